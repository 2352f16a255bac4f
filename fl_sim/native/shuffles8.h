// Functions that move numbers between lanes, for vectors of 8: see shuffles16.h.
#pragma once

#include <immintrin.h>

namespace {

constexpr ivec LANE = {0, 1, 2, 3, 4, 5, 6, 7};

INLINE vec spread(float value) {
    return vec{value, value, value, value, value, value, value, value};
}

INLINE ivec widened(bvec value) {
    int64_t lanes;
    __builtin_memcpy(&lanes, &value, sizeof lanes);
    return (ivec)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(lanes));
}
INLINE bvec narrowed(ivec value) { return __builtin_convertvector(value, bvec); }

INLINE uint32_t bits(ivec holds) { return uint32_t(_mm256_movemask_ps((__m256)holds)); }

INLINE void store_some(float* to, vec value, uint32_t which) {
    float lanes[LANES];
    store(lanes, value);
    for (int lane = 0; lane < LANES; lane++) {
        *to = lanes[lane];
        to += which >> lane & 1;
    }
}

INLINE float sum(vec value) {
    const auto last =
        __builtin_shufflevector(value, value, 0, 1, 2, 3) + __builtin_shufflevector(value, value, 4, 5, 6, 7);
    return (last[0] + last[2]) + (last[1] + last[3]);
}

INLINE four sums(vec a, vec b, vec c, vec d) {
    const auto ab = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
                    __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    const auto cd = __builtin_shufflevector(c, d, 0, 8, 2, 10, 4, 12, 6, 14) +
                    __builtin_shufflevector(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
    const auto abcd = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                      __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3) + __builtin_shufflevector(abcd, abcd, 4, 5, 6, 7);
}

INLINE void transpose(vec (&row)[LANES]) {
    UNROLL for (int low = 0; low < 4; low++) {
        const vec a = row[low], b = row[low + 4];
        row[low] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
        row[low + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    UNROLL for (int low = 0; low < 8; low += low % 4 == 1 ? 3 : 1) {
        const vec a = row[low], b = row[low + 2];
        row[low] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
        row[low + 2] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL for (int low = 0; low < 8; low += 2) {
        const vec a = row[low], b = row[low + 1];
        row[low] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
        row[low + 1] = __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
}

}  // namespace
