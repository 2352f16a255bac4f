// Calls functions of a library on memory that lies in files: what emulated.py runs in an emulator.
//
//     call_on_arm LIBRARY
//
// Each line of the standard input, "FUNCTION FILE", is one call; the answer is a line with 0, or with the reason why the
// function could not be called. An emulator that goes on from call to call has translated the library's code already.
//
// The file is a ``Call``, places of pointers and of gaps, and memory. Pointers are held as places in the file; whatever the
// function writes to that memory is in the file afterwards. Gaps must not be touched.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

struct Call {
    int64_t numbers[12];  // arguments that are no floating-point numbers, in order
    double reals[8];      // those that are
    int64_t pointers;     // how many places of pointers follow
    int64_t gaps, gap;    // how many places of gaps follow these, and how long each is
    int64_t returned;
    int64_t returns_text;
    char text[256];
};

// An ARM processor hands over the two kinds of arguments apart, and a function does not mind more than it takes.
typedef int64_t (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, double, double, double, double, double, double, double, double);

static const char* call(void* library, const char* function, const char* path) {
    const int file = open(path, O_RDWR);
    struct stat about;
    if (file < 0 || fstat(file, &about)) return "no such file";
    char* const base = static_cast<char*>(mmap(nullptr, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
    if (base == MAP_FAILED) return "the file cannot be mapped";
    void* const found = dlsym(library, function);
    if (!found) return "no such function";
    Call& call = *reinterpret_cast<Call*>(base);
    const int64_t* const places = reinterpret_cast<const int64_t*>(&call + 1);
    for (int64_t i = 0; i < call.pointers; i++) *reinterpret_cast<int64_t*>(base + places[i]) += int64_t(base);
    for (int64_t i = 0; i < call.gaps; i++)
        if (mprotect(base + places[call.pointers + i], call.gap, PROT_NONE)) return "a gap cannot be protected";
    const auto& n = call.numbers;
    const auto& r = call.reals;
    call.returned = reinterpret_cast<Function>(found)(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10],
                                                      n[11], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]);
    if (call.returns_text) std::strncpy(call.text, reinterpret_cast<const char*>(call.returned), sizeof call.text - 1);
    munmap(base, about.st_size);
    return "0";
}

int main(int count, char** given) {
    if (count != 2) return 2;
    void* const library = dlopen(given[1], RTLD_NOW);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 3;
    char function[256], path[4096];
    while (std::scanf("%255s %4095s", function, path) == 2) {
        std::puts(call(library, function, path));
        std::fflush(stdout);
    }
    return 0;
}
