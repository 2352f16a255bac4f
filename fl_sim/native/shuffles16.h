// Functions that move numbers between lanes, for vectors of 16.
#pragma once

#include <immintrin.h>

namespace {

constexpr ivec LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Returns a vector with the same value in all lanes. ``vec{} + value`` would be slower: the compiler may not remove this
// addition, because 0 + -0 is 0.
INLINE vec spread(float value) {
    return vec{value, value, value, value, value, value, value, value,
               value, value, value, value, value, value, value, value};
}

// Conversions between bytes and int32. __builtin_convertvector would be slow: some compilers convert lane by lane.
INLINE ivec widened(bvec value) { return (ivec)_mm512_cvtepi8_epi32((__m128i)value); }
INLINE bvec narrowed(ivec value) { return (bvec)_mm512_cvtepi32_epi8((__m512i)value); }

// Returns a mask with one bit for each lane. The bit is set if the comparison is true in the lane.
INLINE uint32_t bits(ivec holds) { return _mm512_movepi32_mask((__m512i)holds); }

// Stores the lanes with a bit in ``which`` one after the other. Writes LANES numbers in total; the last ones have arbitrary
// values.
INLINE void store_some(float* to, vec value, uint32_t which) {
    store(to, (vec)_mm512_maskz_compress_ps(__mmask16(which), (__m512)value));
}

INLINE float sum(vec value) {
    const auto eight = __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7) +
                       __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto last =
        __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (last[0] + last[2]) + (last[1] + last[3]);
}

// Returns the sums of four vectors. One call costs a third of four separate sums.
INLINE four sums(vec a, vec b, vec c, vec d) {
    const auto ab = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                    __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    const auto cd = __builtin_shufflevector(c, d, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                    __builtin_shufflevector(c, d, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    const auto abcd = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                      __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    const auto eight = __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3, 4, 5, 6, 7) +
                       __builtin_shufflevector(abcd, abcd, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
}

// Transposes a 16 x 16 block in four rounds. They exchange numbers between rows that are 8, 4, 2 and 1 apart.
INLINE void transpose(vec (&row)[LANES]) {
#define EXCHANGE(distance, LOW, HIGH)                    \
    UNROLL for (int low = 0; low < LANES; low++) {       \
        if (low & distance) continue;                    \
        const vec a = row[low], b = row[low + distance]; \
        row[low] = LOW(a, b);                            \
        row[low + distance] = HIGH(a, b);                \
    }
#define LOW8(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH8(a, b) __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define LOW4(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH4(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW2(a, b) __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW1(a, b) __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH1(a, b) __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
    EXCHANGE(8, LOW8, HIGH8)
    EXCHANGE(4, LOW4, HIGH4)
    EXCHANGE(2, LOW2, HIGH2)
    EXCHANGE(1, LOW1, HIGH1)
#undef EXCHANGE
#undef LOW8
#undef HIGH8
#undef LOW4
#undef HIGH4
#undef LOW2
#undef HIGH2
#undef LOW1
#undef HIGH1
}

}  // namespace
