// The clipped sum of the gradients of (real, fake) pairs: what clients/dafl/dpcgan/clipping.py defines, in one pass.
//
// Real and fake of a pair are rows 2i and 2i + 1. What enters and what leaves the layers is float32, and a row's bits do
// not depend on the other rows. Norms and sums are float64, and the bias is the weight of one more input, which is 1.
#pragma once

#include "perceptron.h"

namespace {

constexpr double SLACK = 1.0 / (1L << 32);  // see _SLACK in clipping.py
constexpr long PAIRS_AT_ONCE = 48;          // their rows stay in the second cache

// Eight numbers are eight lanes on any processor, so that their sum is rounded in one way.
typedef double eight __attribute__((vector_size(64)));
typedef double loose_eight __attribute__((vector_size(64), aligned(8), may_alias));

INLINE double sum(const eight& value) {
    return ((value[0] + value[4]) + (value[2] + value[6])) + ((value[1] + value[5]) + (value[3] + value[7]));
}

// A matrix like Rows, of whose numbers only those are kept up to the next eight.
struct Wide {
    double* at = nullptr;
    long stride = 0;
    double* row(long number) const { return at + number * stride; }
};

constexpr long wide_stride(long width) { return filled(width + 1, 8); }

#ifdef __AVX512F__
INLINE void widen(const float* from, eight& to) { to = eight(_mm512_cvtps_pd(_mm256_loadu_ps(from))); }
#else
INLINE void widen(const float* from, eight& to) {
    to = __builtin_shufflevector(dvec(_mm256_cvtps_pd(_mm_loadu_ps(from))), dvec(_mm256_cvtps_pd(_mm_loadu_ps(from + 4))),
                                 0, 1, 2, 3, 4, 5, 6, 7);
}
#endif

// Two rows' squares, and their product, of ``count`` numbers: products of float32 are exact in float64.
struct Products {
    double real, fake, across;

    Products(const float* one, const float* other, long count) {
        eight squares{}, others{}, both{};
        for (long i = 0; i < count; i += 8) {
            eight a, b;
            widen(one + i, a), widen(other + i, b);
            squares += a * a, others += b * b, both += a * b;
        }
        real = sum(squares), fake = sum(others), across = sum(both);
    }

};

class ClippedSum {
  public:
    // Writes the sum, in the order of D's parameters. A pair's record is the row of ``real`` in the place that is chosen.
    void write(const Perceptron& net, const Shown& real, const int64_t* chosen, const Shown& fake, double bound,
               double* sum) {
        passage_.begin(net, 1);
        wide_.resize(net.num_layers), wide_errors_.resize(net.num_layers), totals_.resize(net.num_layers);
        for (long number = 0; number < net.num_layers; number++) {
            const Linear& layer = net.layers[number];
            const long size = filled(layer.outputs, TILE) * wide_stride(layer.inputs);
            std::fill_n(totals_[number].at_least(size), size, 0.0);
        }
        for (long first = 0; first < fake.count; first += PAIRS_AT_ONCE) {
            const long here = std::min<long>(PAIRS_AT_ONCE, fake.count - first), count = rows_of(here);
            const Rows in = passage_.inputs(count);
            for (long pair = 0; pair < here; pair++) {
                real.enter(net, chosen[first + pair], in.row(2 * pair));
                fake.enter(net, first + pair, in.row(2 * pair + 1));
            }
            std::fill(in.row(2 * here), in.row(count), 0.0f);
            score(count);
            clip(here, bound);
            add(here);
        }
        hand_over(sum);
    }

  private:
    static long rows_of(long pairs) { return filled(2 * pairs, TILE); }

    // Takes what enters the first layer to the scores, and the losses' derivatives back.
    void score(long count) {
        const Rows scores = passage_.left(count), errors = passage_.last_errors(count);
        passage_.forward(count);
        for (long first = 0; first < count; first += LANES) {  // of softplus(-score) and softplus(score)
            vec score{}, sign{};
            for (int i = 0; i < LANES && first + i < count; i++)
                score[i] = *scores.row(first + i), sign[i] = i % 2 ? 1.0f : -1.0f;
            const vec error = sign * sigmoid(sign * score);
            for (int i = 0; i < LANES && first + i < count; i++) *errors.row(first + i) = error[i];
        }
        errors.fill_up(0.0f);
        passage_.back(count);
    }

    // Makes float64 of all rows, and clips.
    void clip(long pairs, double bound) {
        const long count = rows_of(pairs), num_layers = passage_.net().num_layers;
        double squares[PAIRS_AT_ONCE] = {};
        for (long number = 0; number < num_layers; number++) {
            const Rows in = passage_.entered(number, count), errors = passage_.errors(number, count);
            for (long pair = 0; pair < pairs; pair++) {
                const Products inputs(in.row(2 * pair), in.row(2 * pair + 1), wide_stride(in.width));
                const Products slopes(errors.row(2 * pair), errors.row(2 * pair + 1), wide_stride(errors.width));
                const double own = inputs.real * slopes.real + inputs.fake * slopes.fake;
                squares[pair] += own + 2 * inputs.across * slopes.across + SLACK * own;
            }
        }
        double factors[PAIRS_AT_ONCE];
        for (long pair = 0; pair < pairs; pair++) {
            const double norm = std::sqrt(squares[pair]);
            factors[pair] = !std::isfinite(norm) ? NAN : bound > 0 ? std::min(1.0, bound / norm) : 0.0;
        }
        for (long number = 0; number < num_layers; number++) {
            const Rows in = passage_.entered(number, count), errors = passage_.errors(number, count);
            for (long row = 0; row < 2 * pairs; row++) {
                const double factor = factors[row / 2];
                scale(in, row, std::isnan(factor) ? NAN : 1.0, wide(wide_[number], in));
                scale(errors, row, factor, wide(wide_errors_[number], errors));
            }
        }
    }

    // NaN for a factor: zeros. 0 * nan is nan, so what is not finite must go, not be multiplied by 0.
    static void scale(const Rows& from, long row, double factor, const Wide& to) {
        if (std::isnan(factor)) std::fill_n(to.row(row), to.stride, 0.0);
        else
            for (long i = 0; i < to.stride; i += 8) {
                eight numbers;
                widen(from.row(row) + i, numbers);
                *reinterpret_cast<loose_eight*>(to.row(row) + i) = factor * numbers;
            }
    }

    void add(long pairs) {
        for (long number = 0; number < passage_.net().num_layers; number++) {
            const long count = rows_of(pairs), outputs = filled(passage_.net().layers[number].outputs, TILE);
            const Wide in = wide(wide_[number], passage_.entered(number, count));
            const Wide errors = wide(wide_errors_[number], passage_.errors(number, count));
            double* const total = totals_[number].at_least(0);
            multiply_rows<double>({errors.at, 1, errors.stride, in.at, in.stride, 2 * pairs, total, in.stride}, outputs,
                                  in.stride, [&](long output, long column, dvec value) {
                                      store_some(total + output * in.stride + column, value);
                                  });
        }
    }

    void hand_over(double* sum) {
        for (long number = 0; number < passage_.net().num_layers; number++) {
            const Linear& layer = passage_.net().layers[number];
            const double* const total = totals_[number].at_least(0);
            const long stride = wide_stride(layer.inputs);
            for (long output = 0; output < layer.outputs; output++)
                sum = std::copy_n(total + output * stride, layer.inputs, sum);
            for (long output = 0; layer.bias && output < layer.outputs; output++)
                *sum++ = total[output * stride + layer.inputs];
        }
    }

    static Wide wide(Numbers<double>& memory, const Rows& rows) {
        return {memory.at_least(rows.count * wide_stride(rows.width)), wide_stride(rows.width)};
    }

    Passage passage_;
    std::vector<Numbers<double>> wide_, wide_errors_, totals_;
};

}  // namespace
