// Vectors of float64 numbers. They have half as many numbers as a float32 vector of the same size.
#pragma once

#include "vectors.h"

namespace {

typedef double dvec __attribute__((vector_size(LANES * sizeof(float))));
typedef double loose_double __attribute__((vector_size(LANES * sizeof(float)), aligned(8), may_alias));
constexpr int WIDE_LANES = LANES / 2;

INLINE dvec load_wide(const double* from) { return *reinterpret_cast<const loose_double*>(from); }
INLINE void store_wide(double* to, dvec value) { *reinterpret_cast<loose_double*>(to) = value; }

// Returns a * b + c, rounded once, independently of the compiler's options for sums and products.
#if FL_SIM_LANES == 16
INLINE vec fused(vec a, vec b, vec c) { return vec(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c))); }
INLINE dvec fused(dvec a, dvec b, dvec c) { return dvec(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c))); }
#elif FL_SIM_LANES == 8
INLINE vec fused(vec a, vec b, vec c) { return vec(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c))); }
INLINE dvec fused(dvec a, dvec b, dvec c) { return dvec(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c))); }
#else
INLINE vec fused(vec a, vec b, vec c) { return vec(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b))); }
INLINE dvec fused(dvec a, dvec b, dvec c) { return dvec(vfmaq_f64(float64x2_t(c), float64x2_t(a), float64x2_t(b))); }
#endif

// Returns the WIDE_LANES numbers at ``from`` in float64.
#if FL_SIM_LANES == 16
INLINE dvec widened_at(const float* from) { return dvec(_mm512_cvtps_pd(_mm256_loadu_ps(from))); }
#elif FL_SIM_LANES == 8
INLINE dvec widened_at(const float* from) { return dvec(_mm256_cvtps_pd(_mm_loadu_ps(from))); }
#else
INLINE dvec widened_at(const float* from) { return dvec(vcvt_f64_f32(vld1_f32(from))); }
#endif

INLINE dvec spread_wide(double value) { return value - dvec{}; }  // a difference, because the compiler removes x - 0, but not x + 0

INLINE double sum_wide(dvec value) {
    double total = 0;
    for (int lane = 0; lane < WIDE_LANES; lane++) total += value[lane];
    return total;
}

// An array of numbers with the alignment of vectors.
class Doubles {
  public:
    void resize(long count) { vectors_.resize((count + WIDE_LANES - 1) / WIDE_LANES); }
    double* data() { return reinterpret_cast<double*>(vectors_.data()); }

  private:
    std::vector<dvec> vectors_;
};

// A float64 number for each of LANES records.
struct ByRecord {
    dvec parts[2] = {};

    static ByRecord of(const vec& values) {
        const float* from = reinterpret_cast<const float*>(&values);
        return {{widened_at(from), widened_at(from + WIDE_LANES)}};
    }
    void add_square(const vec& values) {
        const ByRecord wide = of(values);
        UNROLL for (int part = 0; part < 2; part++) parts[part] = fused(wide.parts[part], wide.parts[part], parts[part]);
    }
    void add(const ByRecord& other) {
        UNROLL for (int part = 0; part < 2; part++) parts[part] += other.parts[part];
    }
    void add_product(const ByRecord& left, const ByRecord& right) {
        UNROLL for (int part = 0; part < 2; part++) parts[part] = fused(left.parts[part], right.parts[part], parts[part]);
    }
    double at(int lane) const { return parts[lane / WIDE_LANES][lane % WIDE_LANES]; }
    void set(int lane, double value) { parts[lane / WIDE_LANES][lane % WIDE_LANES] = value; }
    double total() const { return sum_wide(parts[0] + parts[1]); }

    // Returns the numbers times ``factors``. The result is 0 where the factor is 0, also for numbers that are not finite.
    ByRecord times(const ByRecord& factors) const {
        ByRecord found;
        UNROLL for (int part = 0; part < 2; part++)
            found.parts[part] = factors.parts[part] > 0.0 ? factors.parts[part] * parts[part] : dvec{};
        return found;
    }
};

}  // namespace
