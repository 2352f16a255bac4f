// DP-SGD (Abadi et al. 2016, algorithm 1): sums of clipped gradients of records, and steps with noise.
//
// The layers compute as in network.h, and the bits of a record's gradient do not depend on other records. For a linear layer the
// gradient of one record is the product of a slope and an input for each weight. So its squared norm is the product of two sums of
// squares, and the clipped sum is one product of matrices (Goodfellow 2015). The gradients of a convolution are small and are
// stored for each record. Gradients are float32; norms, factors and sums over records are float64, as in
// fl_sim/training/per_record.py.
#pragma once

#include "chacha.h"
#include "network.h"
#include "normals.h"
#include "wide.h"

namespace {

// The bounds on the norm of a record's gradient, see fl_sim/clipping.py. private_steps.py has these structures, field by field.
struct Bounds {
    double limit;             // the largest norm
    double stability;         // the constant of automatic clipping; 0 for other clipping rules
    const double* of_layers;  // the largest norm for each layer with parameters, if each layer is clipped separately; else null
};

// The arguments for one client's private steps, beside its Request.
struct PrivateSteps {
    const uint8_t *batch_keys, *noise_keys;  // 32 bytes for each step; noise_keys: null: no noise
    uint64_t below;           // a record joins a step if its random word is below this number
    int64_t everybody;        // not 0: all records join
    Bounds bounds;
    double ratio, spacing;    // the noise's standard deviation in grid steps; the grid step
    double divisor;           // the number that divides the sum with noise
    double (*exactly)(int64_t step, int64_t place);  // returns an undecided number of the noise, in grid steps; NaN: it failed
};

constexpr long COLUMNS_AT_ONCE = 2 * LANES;  // inputs of a linear layer, four vectors of float64 numbers
constexpr long TILES_AT_ONCE = 4;            // tiles of ROWS_AT_ONCE rows of weights; their sums fit in the L2 cache

class ClippedSums {
  public:
    // ``graph``: a graph without dropout and normalisation, whose memory is allocated for ``groups`` groups.
    ClippedSums(Graph graph, int groups) : graph_(std::move(graph)), spatial_(graph_, true), most_(groups) {
        long widest = graph_.layers.back().out.channels;
        slopes_.resize(graph_.layers.size());
        for (size_t index = graph_.first_linear; index < slopes_.size(); index++) {
            const Layer& layer = graph_.layers[index];
            slopes_[index].resize(groups * layer.out.channels);
            widest = std::max(widest, layer.in.features());
        }
        boundary_.resize(groups * graph_.layers[graph_.first_linear].in.features());
        by_record_.resize(groups * num_spatial());
        rows_.resize(groups * (widest + 2 * LANES));
        wide_slopes_.resize(groups * LANES * widest);
        wide_rows_.resize(groups * LANES * (widest + COLUMNS_AT_ONCE));
        sums_.resize(std::max(num_spatial(), TILES_AT_ONCE * ROWS_AT_ONCE * widest));
        factors_.resize(groups * graph_.layers.size());
        flat_.resize(graph_.nodes[0].image.features());
    }

    // Computes the sum of the clipped gradients of ``count`` chosen records. Calls ``sink(at, count, sums)`` once for each part
    // of the sum, as soon as the part is known. The sink may change the parameters from ``at`` on.
    template <class Sink>
    void pass(const float* inputs, const int64_t* labels, const int64_t* chosen, long count, const float* params,
              const Bounds& bounds, const Sink& sink) {
        spatial_.start(params);
        const long at_once = most_ * LANES;
        totals_.assign(count > 0 && count <= at_once ? 0 : graph_.num_params, 0.0);
        if (count == 0) return sink(0, graph_.num_params, totals_.data());
        for (long first = 0; first < count; first += at_once) {
            records_ = int(std::min(at_once, count - first)), groups_ = (records_ + LANES - 1) / LANES;
            for (int group = 0; group < groups_; group++) gather(inputs, chosen + first + group * LANES, group);
            forward(params);
            for (int group = 0; group < groups_; group++) turn(labels, chosen + first + group * LANES, group);
            backward(params);
            clip(bounds);
            const auto add = [&](long at, long numbers, double* sums) {
                for (long i = 0; !totals_.empty() && i < numbers; i++) sums[i] = totals_[at + i] += sums[i];
                if (first + at_once >= count) sink(at, numbers, sums);
            };
            add_spatial(add);
            for (int index = graph_.first_linear; index < num_layers(); index++) add_linear(index, add);
        }
    }

  private:
    int num_layers() const { return int(graph_.layers.size()); }
    long num_spatial() const { return graph_.layers[graph_.first_linear].weight; }
    int records_in(int group) const { return std::min(LANES, records_ - group * LANES); }

    void gather(const float* inputs, const int64_t* chosen, int group) {
        const Image& shape = graph_.nodes[0].image;
        const bool is_bare = shape.border_y == 0 && shape.border_x == 0;
        vec* const to = graph_.nodes[0].at(group);
        lay_out(inputs, chosen, records_in(group), shape.features(), is_bare ? to : flat_.data());
        if (!is_bare) add_border(flat_.data(), shape, to);
    }

    void forward(const float* params) {
        for (int group = 0; group < groups_; group++) spatial_.forward(group, groups_, params, nullptr);
        for (int index = graph_.first_linear; index < num_layers(); index++) {
            const Layer& layer = graph_.layers[index];
            const long inputs = layer.in.features();
            vec* out = index + 1 < num_layers() ? graph_.nodes[index + 1].at(0) : slopes_[index].data();
            const float* weights = params + layer.weight;
            multiply({graph_.nodes[index].at(0), inputs, out, layer.out.channels, nullptr, inputs, 1,
                      layer.has_bias ? params + layer.bias : nullptr, layer.relu},
                     groups_, [&](long output, long) { return weights + output * inputs; });
        }
    }

    // Replaces a group's logits by the derivatives of each record's cross-entropy.
    void turn(const int64_t* labels, const int64_t* chosen, int group) {
        const int classes = graph_.layers.back().out.channels;
        vec* const logits = slopes_.back().data() + group * classes;
        vec highest = logits[0], mass{};
        for (int k = 1; k < classes; k++) highest = logits[k] > highest ? logits[k] : highest;
        for (int k = 0; k < classes; k++) mass += logits[k] = exponential(logits[k] - highest);
        for (int k = 0; k < classes; k++) logits[k] = LANE < records_in(group) ? logits[k] / mass : vec{};
        for (int lane = 0; lane < records_in(group); lane++) logits[labels[chosen[lane]]][lane] -= 1.0f;
    }

    void backward(const float* params) {
        for (int index = num_layers() - 1; index >= graph_.first_linear; index--) {
            const Layer& layer = graph_.layers[index];
            const long inputs = layer.in.features(), outputs = layer.out.channels;
            vec* const slopes = slopes_[index].data();
            const vec* out = layer.relu ? graph_.nodes[index + 1].at(0) : nullptr;
            for (long at = 0; out && at < groups_ * outputs; at++) slopes[at] = out[at] > 0.0f ? slopes[at] : vec{};
            if (index <= graph_.first_trained) continue;
            vec* next = index > graph_.first_linear ? slopes_[index - 1].data() : boundary_.data();
            const float* columns = params + layer.weight;
            multiply({slopes, outputs, next, inputs, nullptr, 1, inputs, nullptr, false}, groups_,
                     [&](long input, long) { return columns + input; });
        }
        const long features = graph_.layers[graph_.first_linear].in.features();
        for (int group = 0; group < groups_; group++)
            spatial_.backward_by_record(group, groups_, records_in(group), boundary_.data() + group * features,
                                        by_record_.data() + group * num_spatial());
    }

    ByRecord& factor(int index, int group) { return factors_[index * most_ + group]; }

    // Computes the clipping factor of each record for each layer. It is 1 for a norm up to the largest norm, and less for a
    // larger norm; with automatic clipping it depends on ``stability``. All factors of a record are 0 if its gradient is not
    // finite.
    void clip(const Bounds& bounds) {
        const double* limit = bounds.of_layers ? bounds.of_layers : &bounds.limit;
        for (int group = 0; group < groups_; group++) {
            ByRecord squares, total;
            for (int first = 0, index = 0, parts = 0; index < num_layers(); index++) {
                add_squares(index, group, squares);
                const bool is_last = bounds.of_layers ? graph_.layers[index].num_weights() > 0 : index + 1 == num_layers();
                if (!is_last) continue;
                for (int lane = 0; lane < LANES; lane++) {
                    const double norm = std::sqrt(squares.at(lane)), most = limit[parts];
                    factor(index, group).set(lane, bounds.stability > 0 ? most / (norm + bounds.stability) : norm <= most ? 1.0 : most / norm);
                }
                for (; first < index; first++) factor(first, group) = factor(index, group);
                first = index + 1, parts++, total.add(squares), squares = {};
            }
            for (int lane = 0; lane < LANES; lane++)
                for (int index = 0; !std::isfinite(total.at(lane)) && index < num_layers(); index++) factor(index, group).set(lane, 0.0);
        }
    }

    // Adds, for each record, the squared norm of the gradient by a layer's parameters to ``squares``.
    void add_squares(int index, int group, ByRecord& squares) {
        const Layer& layer = graph_.layers[index];
        if (index < graph_.first_linear) {
            const long first = group * num_spatial() + layer.weight;
            for (long at = 0; at < layer.num_weights() + layer.num_biases(); at++) squares.add_square(by_record_[first + at]);
            return;
        }
        const ByRecord of_slopes = sum_of_squares(slopes_[index].data(), layer.out.channels, group);
        squares.add_product(of_slopes, sum_of_squares(graph_.nodes[index].at(0), layer.in.features(), group));
        if (layer.has_bias) squares.add(of_slopes);
    }

    // Returns for each record of a group the sum of squares over its features. ``values``: [group][feature].
    static ByRecord sum_of_squares(const vec* values, long features, int group) {
        ByRecord found, other;  // two sums are faster than one, because each addition to a sum must wait for the previous addition
        values += group * features;
        for (long at = 0; at + 1 < features; at += 2) found.add_square(values[at]), other.add_square(values[at + 1]);
        if (features % 2) found.add_square(values[features - 1]);
        found.add(other);
        return found;
    }

    template <class Add>
    void add_spatial(const Add& add) {
        for (int index = 0; index < graph_.first_linear; index++) {
            const Layer& layer = graph_.layers[index];
            for (long at = layer.weight; at < layer.bias + layer.num_biases(); at++) {
                ByRecord total;
                for (int group = 0; group < groups_; group++)
                    total.add(ByRecord::of(by_record_[group * num_spatial() + at]).times(factor(index, group)));
                sums_.data()[at] = total.total();
            }
        }
        add(0, num_spatial(), sums_.data());
    }

    template <class Add>
    void add_linear(int index, const Add& add) {
        const Layer& layer = graph_.layers[index];
        const long inputs = layer.in.features(), outputs = layer.out.channels, apart = groups_ * LANES;
        widen_slopes(index, outputs);
        widen_rows(index, inputs);
        const long most = TILES_AT_ONCE * ROWS_AT_ONCE;
        for (long top = 0; top < outputs; top += most) {
            const long end = std::min(outputs, top + most);
            for (long first = 0; first < inputs; first += COLUMNS_AT_ONCE) {
                const double* rows = wide_rows_.data() + first * records_;
                const long here = std::min(COLUMNS_AT_ONCE, inputs - first);
                for (long output = top; output < end;) {
                    const double* slopes = wide_slopes_.data() + output * apart;
                    double* to = sums_.data() + (output - top) * inputs + first;
                    if (output + ROWS_AT_ONCE <= end) sum_tile<ROWS_AT_ONCE>(slopes, apart, rows, to, inputs, here), output += ROWS_AT_ONCE;
                    else if (output + 2 <= end) sum_tile<2>(slopes, apart, rows, to, inputs, here), output += 2;
                    else sum_tile<1>(slopes, apart, rows, to, inputs, here), output++;
                }
            }
            add(layer.weight + top * inputs, (end - top) * inputs, sums_.data());
        }
        for (long output = 0; layer.has_bias && output < outputs; output++) {
            dvec total{};
            for (long at = 0; at < apart; at += WIDE_LANES) total += load_wide(wide_slopes_.data() + output * apart + at);
            sums_.data()[output] = sum_wide(total);
        }
        if (layer.has_bias) add(layer.bias, outputs, sums_.data());
    }

    // Writes the slopes of a layer, multiplied by the records' factors, in float64, [output][record].
    void widen_slopes(int index, long outputs) {
        const vec* slopes = slopes_[index].data();
        for (int group = 0; group < groups_; group++)
            for (long output = 0; output < outputs; output++) {
                const ByRecord scaled = ByRecord::of(slopes[group * outputs + output]).times(factor(index, group));
                double* to = wide_slopes_.data() + (output * groups_ + group) * LANES;
                UNROLL for (int part = 0; part < 2; part++) store_wide(to + part * WIDE_LANES, scaled.parts[part]);
            }
    }

    // Writes the inputs of a layer in float64, [input / COLUMNS_AT_ONCE][record][COLUMNS_AT_ONCE]. The numbers of a record whose
    // factor is 0 are zeros, and so are those after the last input.
    void widen_rows(int index, long inputs) {
        to_rows<Factors>(graph_.nodes[index].at(0), inputs, inputs, groups_, rows_.data());
        double* to = wide_rows_.data();
        for (long first = 0; first < inputs; first += COLUMNS_AT_ONCE)
            for (int record = 0; record < records_; record++)
                for (long half = first; half < first + COLUMNS_AT_ONCE; half += LANES, to += LANES) {
                    const bool is_kept = half < inputs && factor(index, record / LANES).at(record % LANES) > 0.0;
                    const float* from = reinterpret_cast<const float*>(rows_.data() + half / LANES * groups_ * LANES + record);
                    UNROLL for (int part = 0; part < 2; part++)
                        store_wide(to + part * WIDE_LANES, is_kept ? widened_at(from + part * WIDE_LANES) : dvec{});
                }
    }

    // Writes the sums over records of slope * input, ``here`` columns of OUTPUTS rows. ``apart``: the distance between two outputs'
    // slopes; ``row``: between two rows of ``to``.
    template <int OUTPUTS>
    NOINLINE void sum_tile(const double* slopes, long apart, const double* rows, double* to, long row, long here) const {
        dvec sums[OUTPUTS][4];
        UNROLL for (int o = 0; o < OUTPUTS; o++)
            UNROLL for (int part = 0; part < 4; part++) sums[o][part] = dvec{};
        for (int record = 0; record < records_; record++, rows += COLUMNS_AT_ONCE) {
            dvec values[4];
            UNROLL for (int part = 0; part < 4; part++) values[part] = load_wide(rows + part * WIDE_LANES);
            UNROLL for (int o = 0; o < OUTPUTS; o++) {
                const dvec slope = spread_wide(slopes[o * apart + record]);
                UNROLL for (int part = 0; part < 4; part++) sums[o][part] = fused(slope, values[part], sums[o][part]);
            }
        }
        UNROLL for (int o = 0; o < OUTPUTS; o++, to += row) {
            if (here == COLUMNS_AT_ONCE) {
                UNROLL for (int part = 0; part < 4; part++) store_wide(to + part * WIDE_LANES, sums[o][part]);
                continue;
            }
            double row_of_sums[COLUMNS_AT_ONCE];
            UNROLL for (int part = 0; part < 4; part++) store_wide(row_of_sums + part * WIDE_LANES, sums[o][part]);
            std::copy(row_of_sums, row_of_sums + here, to);
        }
    }

    Graph graph_;
    Spatial spatial_;
    const int most_;                         // the largest number of groups at a time
    std::vector<std::vector<vec>> slopes_;   // for each linear layer, [group][output]; those of the last layer begin as logits
    std::vector<vec> boundary_;              // the gradient by the input of the first linear layer, [group][feature]
    std::vector<vec> by_record_;             // the gradients by the parameters before the first linear layer, [group][parameter]
    std::vector<vec> rows_, flat_;
    Doubles wide_slopes_, wide_rows_;          // the operands of a layer's product, see widen_slopes and widen_rows
    Doubles sums_;                             // a part of the sum
    std::vector<double> totals_;               // the sum over records so far, unless all fit in one pass
    std::vector<ByRecord> factors_;            // [layer][group]
    int records_ = 0, groups_ = 0;
};

// Draws a batch, the indices of the records that join it.
void draw_batch(const PrivateSteps& steps, int64_t step, int64_t count, std::vector<int64_t>& chosen) {
    chosen.clear();
    const ChaCha stream(steps.batch_keys + 32 * step);
    uint64_t words[ChaCha::WORDS];
    for (int64_t record = 0; record < count; record++) {
        if (!steps.everybody && record % ChaCha::WORDS == 0) stream.write(record, words);
        if (steps.everybody || words[record % ChaCha::WORDS] < steps.below) chosen.push_back(record);
    }
}

// Adds the noise of one step to parts of a sum, and executes the step of ``optimizer`` with them.
class Release {
  public:
    Release(const PrivateSteps& steps, int64_t step, const Optimizer& optimizer)
        : steps_(steps), step_(step), optimizer_(optimizer),
          stream_(steps.noise_keys ? steps.noise_keys + 32 * step : steps.batch_keys) {}

    // Replaces ``sums`` by the released numbers with noise. ``sums`` has ``count`` numbers, for the parameters from index
    // ``first`` on.
    void operator()(long first, long count, double* sums) {
        const double finer = 1 / steps_.spacing, scale = steps_.spacing / steps_.divisor;
        for (long done = 0; done < count && !failed;) {
            const long at = first + done, skipped = at % 8, here = std::min(count - done, NORMALS_AT_ONCE - skipped);
            if (steps_.noise_keys) {
                draw(at, skipped, here);
                for (long i = 0; i < here; i++) gradient_[i] = float((std::rint(sums[done + i] * finer) + noise_[i]) * scale);
            } else {
                for (long i = 0; i < here; i++) gradient_[i] = float(sums[done + i] / steps_.divisor);
            }
            step_range(optimizer_, at, here, gradient_);
            done += here;
        }
    }

    bool failed = false;  // true if an undecided number of the noise is missing

  private:
    // Draws ``count`` numbers of the noise, from index ``at`` on. ``skipped``: the number of words before the first one in its
    // block of the key stream.
    void draw(long at, long skipped, long count) {
        for (long word = 0; word < skipped + count; word += ChaCha::WORDS) stream_.write(at - skipped + word, words_ + word);
        const long num_undecided = round_some_normals(words_ + skipped, count, steps_.ratio, noise_, undecided_);
        for (long i = 0; i < num_undecided; i++) {
            double& number = noise_[undecided_[i]];
            number = steps_.exactly(step_, at + undecided_[i]);
            failed |= std::isnan(number);
        }
    }

    static_assert(NORMALS_AT_ONCE % ChaCha::WORDS == 0);
    const PrivateSteps& steps_;
    const int64_t step_;
    const Optimizer& optimizer_;
    const ChaCha stream_;
    uint64_t words_[NORMALS_AT_ONCE];
    double noise_[NORMALS_AT_ONCE];
    int64_t undecided_[NORMALS_AT_ONCE];
    float gradient_[NORMALS_AT_ONCE + LANES] = {};
};

}  // namespace
