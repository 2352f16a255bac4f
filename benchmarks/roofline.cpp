// The two roofs of this machine, for one core: multiplications with additions, and bytes read and written.
// benchmarks/roofline.py compiles it.
#include <immintrin.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__AVX512F__)
constexpr int LANES = 16, SUMS = 24;
#else
constexpr int LANES = 8, SUMS = 12;
#endif
typedef float vec __attribute__((vector_size(LANES * sizeof(float))));

static double seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Returns operations a second of fused multiplications and additions on registers alone, two for each.
extern "C" double operations(long turns, float factor, float* out) {
    vec sums[SUMS], value = vec{} + factor;
    for (int i = 0; i < SUMS; i++) sums[i] = vec{} + float(i);
    const double start = seconds();
    for (long turn = 0; turn < turns; turn++) {
        _Pragma("GCC unroll 32") for (int i = 0; i < SUMS; i++) sums[i] = sums[i] * value + value;
        asm volatile("" : "+v"(value));
    }
    const double taken = seconds() - start;
    for (int i = 0; i < SUMS; i++) *out += sums[i][0];
    return 2.0 * LANES * SUMS * double(turns) / taken;
}

// The same of AVX512-BF16's products of pairs, summed in float32: four operations a lane.
extern "C" __attribute__((target("avx512bf16"))) double bfloat16_operations(long turns, float* out) {
    __m512 sums[24];
    __m512bh value = (__m512bh)_mm512_set1_epi32(0x3f003f00);
    for (int i = 0; i < 24; i++) sums[i] = _mm512_set1_ps(float(i));
    const double start = seconds();
    for (long turn = 0; turn < turns; turn++) {
        _Pragma("GCC unroll 32") for (int i = 0; i < 24; i++) sums[i] = _mm512_dpbf16_ps(sums[i], value, value);
        asm volatile("" : "+v"(value));
    }
    const double taken = seconds() - start;
    for (int i = 0; i < 24; i++) *out += _mm512_cvtss_f32(sums[i]);
    return 4.0 * 16 * 24 * double(turns) / taken;
}

// The same by AMX; 0 where the compiler does not know it, or the system does not let this process use it.
#if __has_include(<amxbf16intrin.h>)
extern "C" __attribute__((target("amx-tile,amx-bf16"))) double amx_operations(long turns) {
    constexpr int REQUEST_PERMISSION = 0x1023, REGISTERS_OF_AMX = 18;
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, REGISTERS_OF_AMX) != 0) return 0;
    struct {
        unsigned char palette = 1, start = 0, reserved[14] = {};
        unsigned short bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    const double start = seconds();
    for (long turn = 0; turn < turns; turn++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    const double taken = seconds() - start;
    _tile_release();
    return 4.0 * 16 * 16 * 16 * 4 * double(turns) / taken;
}
#else
extern "C" double amx_operations(long) { return 0; }
#endif

// Returns bytes a second that go from one half of ``numbers`` floats to the other, counted on both ways.
extern "C" double bytes(long turns, long numbers, float* from) {
    const vec* in = reinterpret_cast<const vec*>(from);
    vec* out = reinterpret_cast<vec*>(from + numbers / 2);
    const long count = numbers / 2 / LANES;
    const double start = seconds();
    for (long turn = 0; turn < turns; turn++) {
        for (long i = 0; i < count; i++) out[i] = in[i] + 1.0f;
        asm volatile("" ::: "memory");
    }
    return 4.0 * double(numbers) * double(turns) / (seconds() - start);
}
