// Functions that move numbers between lanes, for vectors of 4: see shuffles16.h.
#pragma once

#include <arm_neon.h>

namespace {

constexpr ivec LANE = {0, 1, 2, 3};

INLINE vec spread(float value) { return vec{value, value, value, value}; }

INLINE ivec widened(bvec value) {
    int32_t lanes;
    __builtin_memcpy(&lanes, &value, sizeof lanes);
    return (ivec)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(lanes)))));
}
INLINE bvec narrowed(ivec value) {
    const int16x4_t halves = vmovn_s32((int32x4_t)value);
    const int32_t lanes = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(halves, halves))), 0);
    bvec bytes;
    __builtin_memcpy(&bytes, &lanes, sizeof lanes);
    return bytes;
}

INLINE uint32_t bits(ivec holds) { return uint32_t(vaddvq_s32((int32x4_t)(holds & ivec{1, 2, 4, 8}))); }

INLINE void store_some(float* to, vec value, uint32_t which) {
    float lanes[LANES];
    store(lanes, value);
    for (int lane = 0; lane < LANES; lane++) {
        *to = lanes[lane];
        to += which >> lane & 1;
    }
}

INLINE float sum(vec value) { return (value[0] + value[2]) + (value[1] + value[3]); }

INLINE four sums(vec a, vec b, vec c, vec d) {
    const auto ab = __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
    const auto cd = __builtin_shufflevector(c, d, 0, 4, 2, 6) + __builtin_shufflevector(c, d, 1, 5, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

INLINE void transpose(vec (&row)[LANES]) {
    UNROLL for (int low = 0; low < 2; low++) {
        const vec a = row[low], b = row[low + 2];
        row[low] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
        row[low + 2] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    }
    UNROLL for (int low = 0; low < 4; low += 2) {
        const vec a = row[low], b = row[low + 1];
        row[low] = __builtin_shufflevector(a, b, 0, 4, 2, 6);
        row[low + 1] = __builtin_shufflevector(a, b, 1, 5, 3, 7);
    }
}

}  // namespace
