// Vectors of LANES numbers, one for each record of a group. LANES and REGISTERS are the processor's register width and count.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#define INLINE static inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // for lambdas
#define NOINLINE __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 32")

namespace {

#if defined(__AVX512F__)
#define FL_SIM_LANES 16
constexpr int REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__)
#define FL_SIM_LANES 8
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
#define FL_SIM_LANES 4
constexpr int REGISTERS = 32;
#else
#error "fl-sim's native trainer needs AVX-512, AVX2 with FMA, or NEON"
#endif
constexpr int LANES = FL_SIM_LANES;

typedef float vec __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t ivec __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef int8_t bvec __attribute__((vector_size(LANES)));
typedef float loose __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

INLINE vec load(const float* from) { return *reinterpret_cast<const loose*>(from); }
INLINE void store(float* to, vec value) { *reinterpret_cast<loose*>(to) = value; }

// An array of numbers with the alignment of vectors. Without alignment, a load could cross two cache lines, which costs twice as
// much.
class Floats {
  public:
    void resize(long count) { vectors_.resize((count + LANES - 1) / LANES); }
    void clear_values() { std::fill(vectors_.begin(), vectors_.end(), vec{}); }
    float* data() { return reinterpret_cast<float*>(vectors_.data()); }
    const float* data() const { return reinterpret_cast<const float*>(vectors_.data()); }

  private:
    std::vector<vec> vectors_;
};

// Loads at most ``count`` numbers, followed by zeros.
INLINE vec load(const float* from, long count) {
    if (count >= LANES) return load(from);
    float values[LANES] = {};
    for (long i = 0; i < count; i++) values[i] = from[i];
    return load(values);
}

// The larger number in each lane; NaN where ``right`` is NaN.
INLINE vec larger(vec left, vec right) { return left > right ? left : right; }

INLINE vec rectified(vec value) { return larger(vec{}, value); }

INLINE vec root(vec value) {
    for (int lane = 0; lane < LANES; lane++) value[lane] = std::sqrt(value[lane]);
    return value;
}

typedef float four __attribute__((vector_size(16)));

}  // namespace

#if FL_SIM_LANES == 16
#include "shuffles16.h"
#elif FL_SIM_LANES == 8
#include "shuffles8.h"
#else
#include "shuffles4.h"
#endif
