// The clipped sum of the gradients of (real, fake) pairs, in one pass; clients/dafl/dpcgan/clipping.py defines it.
//
// The real and the fake record of pair i are rows 2i and 2i + 1; rows are then sorted by class. The inputs and outputs of layers
// are float32, and the bits of a row do not depend on the other rows. Norms and sums are float64. A bias is treated as the
// weight of one more input, which is 1.
#pragma once

#include "perceptron.h"

namespace {

constexpr double SLACK = 1.0 / (1L << 32);  // see _SLACK in clipping.py
constexpr long PAIRS_AT_ONCE = 48;          // pairs at a time, so that their rows fit in the L2 cache
constexpr long SORTED_PAIRS_AT_ONCE = 256;  // pairs at a time if rows have classes: more, so that each class has enough rows
constexpr long ROWS_AT_ONCE = 96;           // float64 rows at a time, which fit in the L2 cache, too

// A vector of eight lanes on every processor. So sums are rounded in the same way everywhere.
typedef double eight __attribute__((vector_size(64)));
typedef double loose_eight __attribute__((vector_size(64), aligned(8), may_alias));

INLINE double sum(const eight& value) {
    return ((value[0] + value[4]) + (value[2] + value[6])) + ((value[1] + value[5]) + (value[3] + value[7]));
}

constexpr long wide_stride(long width) { return filled(width + 1, 8); }

#if FL_SIM_LANES == 16
INLINE void widen(const float* from, eight& to) { to = eight(_mm512_cvtps_pd(_mm256_loadu_ps(from))); }
#elif FL_SIM_LANES == 8
INLINE void widen(const float* from, eight& to) {
    to = __builtin_shufflevector(dvec(_mm256_cvtps_pd(_mm_loadu_ps(from))), dvec(_mm256_cvtps_pd(_mm_loadu_ps(from + 4))),
                                 0, 1, 2, 3, 4, 5, 6, 7);
}
#else
INLINE void widen(const float* from, eight& to) {
    UNROLL for (int i = 0; i < 8; i++) to[i] = from[i];
}
#endif

// The scalar products of two rows of ``count`` numbers with themselves and each other; products of float32 are exact in float64.
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
    // Writes the clipped sum over pairs, in the order of the discriminator's parameters. The real record of pair i is row
    // chosen[i] of ``real``.
    void write(const Perceptron& net, const Shown& real, const int64_t* chosen, const Shown& fake, double bound,
               double* sum) {
        passage_.begin(net, 1);
        begin_totals(net);
        const long at_once = net.num_classes ? SORTED_PAIRS_AT_ONCE : PAIRS_AT_ONCE;
        for (long first = 0; first < fake.count; first += at_once) {
            const long here = std::min<long>(at_once, fake.count - first);
            const auto shown = [&](long row) -> const Shown& { return row % 2 ? fake : real; };
            const auto place = [&](long row) { return row % 2 ? first + row / 2 : chosen[first + row / 2]; };
            rows_.sort(2 * here, net.num_blocks(), [&](long row) { return shown(row).class_of(net, place(row)); });
            const Rows in = passage_.inputs(rows_.count());
            for (long row = 0; row < 2 * here; row++)
                passage_.enter(shown(row).row(net, place(row)), in.row(rows_.place(row)));
            score(here);
            clip(here, bound);
            add();
        }
        hand_over(net, sum);
    }

  private:
    void begin_totals(const Perceptron& net) {
        totals_.resize(net.num_blocks() + net.num_layers - 1);
        for (long number = 0; number < long(totals_.size()); number++) {
            const Linear layer = layer_of(net, number);
            const long size = filled(layer.outputs, TILE) * wide_stride(layer.inputs);
            std::fill_n(totals_[number].at_least(size), size, 0.0);
        }
    }

    // Returns the layer to which the totals with the index ``number`` belong. The first totals are those of the first layer, one
    // for each class; then follow those of the other layers.
    static Linear layer_of(const Perceptron& net, long number) {
        return number < net.num_blocks() ? net.of_class(0, number) : net.layers[number - net.num_blocks() + 1];
    }

    // Computes the scores from the inputs of the first layer, and propagates the losses' derivatives back.
    void score(long pairs) {
        passage_.forward(rows_);
        const long count = rows_.count();
        const Rows scores = passage_.left(count), errors = passage_.last_errors(count);
        for (long first = 0; first < 2 * pairs; first += LANES) {  // the derivatives of softplus(-score) and softplus(score)
            vec score{}, sign{};
            const int here = int(std::min<long>(LANES, 2 * pairs - first));
            for (int i = 0; i < here; i++)
                score[i] = *scores.row(rows_.place(first + i)), sign[i] = i % 2 ? 1.0f : -1.0f;
            const vec error = sign * sigmoid(sign * score);
            for (int i = 0; i < here; i++) *errors.row(rows_.place(first + i)) = error[i];
        }
        rows_.for_fillers([&](long row) { *errors.row(row) = 0.0f; });
        errors.fill_up(0.0f);
        passage_.back(count);
    }

    // Computes the clipping factor of every row. The factor is NaN for rows that count as zero.
    void clip(long pairs, double bound) {
        const Perceptron& net = passage_.net();
        const long count = rows_.count();
        squares_.assign(pairs, 0.0), factors_.assign(count, NAN);
        for (long number = 0; number < net.num_layers; number++) {
            const Rows in = passage_.entered(number, count), errors = passage_.errors(number, count);
            for (long pair = 0; pair < pairs; pair++) {
                const long real = rows_.place(2 * pair), fake = rows_.place(2 * pair + 1);
                const Products inputs(in.row(real), in.row(fake), wide_stride(in.width));
                const Products slopes(errors.row(real), errors.row(fake), wide_stride(errors.width));
                const double own = inputs.real * slopes.real + inputs.fake * slopes.fake;
                const double across = number > 0 || rows_.are_alike(2 * pair, 2 * pair + 1) ? inputs.across : in.row(real)[in.width];
                squares_[pair] += own + 2 * across * slopes.across + SLACK * own;
            }
        }
        for (long pair = 0; pair < pairs; pair++) {
            const double norm = std::sqrt(squares_[pair]);
            const double factor = !std::isfinite(norm) ? NAN : bound > 0 ? std::min(1.0, bound / norm) : 0.0;
            for (const long row : {2 * pair, 2 * pair + 1}) factors_[rows_.place(row)] = factor;
        }
    }
    // Adds the gradient of every row, times its factor, to the totals.
    void add() {
        const Perceptron& net = passage_.net();
        const long count = rows_.count(), num_blocks = net.num_blocks();
        for (const Sorted::Group& group : rows_.groups()) add_rows(0, group.first, group.filled_up(), totals_[group.number]);
        for (long number = 1; number < net.num_layers; number++)
            add_rows(number, 0, count, totals_[num_blocks + number - 1]);
    }

    void add_rows(long layer, long first, long num_rows, Numbers<double>& to) {
        const Rows in = passage_.entered(layer, rows_.count()), errors = passage_.errors(layer, rows_.count());
        const long stride = wide_stride(in.width), error_stride = wide_stride(errors.width);
        double* const total = to.at_least(0);
        double* const wide = wide_.at_least(ROWS_AT_ONCE * stride);
        double* const wide_errors = wide_errors_.at_least(ROWS_AT_ONCE * error_stride);
        for (long done = 0; done < num_rows; done += ROWS_AT_ONCE) {
            const long here = std::min(ROWS_AT_ONCE, num_rows - done);
            for (long row = 0; row < here; row++) {
                const double factor = factors_[first + done + row];
                scale(in.row(first + done + row), std::isnan(factor) ? NAN : 1.0, stride, wide + row * stride);
                scale(errors.row(first + done + row), factor, error_stride, wide_errors + row * error_stride);
            }
            multiply_rows<double>({wide_errors, 1, error_stride, wide, stride, here, total, stride},
                                  filled(errors.width, TILE), stride, [&](long output, long column, dvec value) {
                                      store_some(total + output * stride + column, value);
                                  });
        }
    }

    // Multiplies a row by ``factor``. If the factor is NaN, the result is zeros. A factor of 0 could not do this, because 0 * nan
    // is nan.
    static void scale(const float* from, double factor, long count, double* to) {
        if (std::isnan(factor))
            std::fill_n(to, count, 0.0);
        else
            for (long i = 0; i < count; i += 8) {
                eight numbers;
                widen(from + i, numbers);
                *reinterpret_cast<loose_eight*>(to + i) = factor * numbers;
            }
    }

    void hand_over(const Perceptron& net, double* sum) {
        for (long number = 0; number < net.num_layers; number++) {
            const Linear& layer = net.layers[number];
            const long first = number ? net.num_blocks() + number - 1 : 0, blocks = number ? 1 : net.num_blocks();
            const long width = layer.inputs / blocks, stride = wide_stride(width);
            for (long output = 0; output < layer.outputs; output++)
                for (long block = 0; block < blocks; block++)
                    sum = std::copy_n(totals_[first + block].at_least(0) + output * stride, width, sum);
            for (long output = 0; layer.bias && output < layer.outputs; output++) {
                *sum = 0.0;
                for (long block = 0; block < blocks; block++)
                    *sum += totals_[first + block].at_least(0)[output * stride + width];
                sum++;
            }
        }
    }

    Passage passage_;
    Sorted rows_;
    std::vector<double> squares_, factors_;  // squared norms of the pairs' gradients; clipping factors of rows
    std::vector<Numbers<double>> totals_;
    Numbers<double> wide_, wide_errors_;
};

}  // namespace
