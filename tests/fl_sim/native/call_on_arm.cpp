// Calls one function of a library on memory that lies in a file: what emulated.py runs in an emulator.
//
//     call_on_arm LIBRARY FUNCTION FILE
//
// The file is a ``Call``, places of pointers and of gaps, and memory. Pointers are held as places in the file; whatever the
// function writes to that memory is in the file afterwards. Gaps must not be touched.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

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

int main(int count, char** given) {
    if (count != 4) return 2;
    const int file = open(given[3], O_RDWR);
    struct stat about;
    if (file < 0 || fstat(file, &about)) return 3;
    char* const base = static_cast<char*>(mmap(nullptr, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    if (base == MAP_FAILED) return 4;
    void* const library = dlopen(given[1], RTLD_NOW);
    void* const found = library ? dlsym(library, given[2]) : nullptr;
    if (!found) return std::fprintf(stderr, "%s\n", dlerror()), 5;
    Call& call = *reinterpret_cast<Call*>(base);
    const int64_t* const places = reinterpret_cast<const int64_t*>(&call + 1);
    for (int64_t i = 0; i < call.pointers; i++) *reinterpret_cast<int64_t*>(base + places[i]) += int64_t(base);
    for (int64_t i = 0; i < call.gaps; i++)
        if (mprotect(base + places[call.pointers + i], call.gap, PROT_NONE)) return 6;
    const auto& n = call.numbers;
    const auto& r = call.reals;
    call.returned = reinterpret_cast<Function>(found)(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10],
                                                      n[11], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]);
    if (call.returns_text) std::strncpy(call.text, reinterpret_cast<const char*>(call.returned), sizeof call.text - 1);
    return 0;
}
