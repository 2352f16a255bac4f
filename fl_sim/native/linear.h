// Linear layers, for all groups of a minibatch at once. Each part of a gradient is passed to its sink as soon as it is computed.
#pragma once

#include "factors.h"
#include "optimizer.h"

namespace {

// The arguments of the product out[group][o] = bias[o] + sum_i weights[o * along + i * across] * in[group][i], for OUTPUTS
// outputs and GROUPS groups.
struct Product {
    const Factors::Values* in;
    long inputs;  // the number of numbers, or of pairs of numbers
    vec* out;
    long outputs;
    const Factors::Weight* weights;
    long along, across;
    const float* bias;  // null: no bias
    bool relu;
};

template <int OUTPUTS, int GROUPS>
NOINLINE void multiply_part(const Product& product, int group, long output, const Factors::Weight* weights) {
    const long inputs = product.inputs, along = product.along;
    const Factors::Values* in = product.in + group * inputs;
    vec* out = product.out + group * product.outputs + output;
    vec sums[OUTPUTS][GROUPS];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int g = 0; g < GROUPS; g++) sums[o][g] = spread(product.bias ? product.bias[output + o] : 0.0f);
    for (long i = 0; i < inputs; i++, weights += product.across) {
        Factors::Values values[GROUPS];
        UNROLL for (int g = 0; g < GROUPS; g++) values[g] = in[g * inputs + i];
        UNROLL for (int o = 0; o < OUTPUTS; o++) {
            const Factors::Values weight = Factors::spread(weights[o * along]);
            UNROLL for (int g = 0; g < GROUPS; g++) Factors::add(sums[o][g], weight, values[g]);
        }
    }
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int g = 0; g < GROUPS; g++) out[g * product.outputs + o] = product.relu ? rectified(sums[o][g]) : sums[o][g];
}

constexpr int ROWS_AT_ONCE = REGISTERS == 32 ? 6 : 3;  // rows of weights; their sums for four groups fit in registers

template <int OUTPUTS>
void multiply_rows(const Product& product, int group, int end, long output, const Factors::Weight* weights) {
    for (; group + 4 <= end; group += 4) multiply_part<OUTPUTS, 4>(product, group, output, weights);
    if (end - group == 3) multiply_part<OUTPUTS, 3>(product, group, output, weights);
    if (end - group == 2) multiply_part<OUTPUTS, 2>(product, group, output, weights);
    if (end - group == 1) multiply_part<OUTPUTS, 1>(product, group, output, weights);
}

// Returns the number of groups that are processed together: their inputs, 1 MB, fit in the L2 cache.
inline int groups_at_once(long inputs) { return int(std::max(4L, (1L << 14) / inputs / 4 * 4)); }

// Returns the number of blocks of four vectors of columns that fit in the L2 cache, for all records.
inline long blocks_at_once(int records) { return std::max(1L, (1L << 12) / records); }

// ``rows(output, count)`` returns a pointer to the weights of ``count`` outputs from ``output`` on.
template <class Rows>
void multiply(const Product& product, int groups, const Rows& rows) {
    const int most = groups_at_once(product.inputs);
    for (int group = 0; group < groups; group += most) {
        const int end = std::min(groups, group + most);
        long output = 0;
        for (; output + ROWS_AT_ONCE <= product.outputs; output += ROWS_AT_ONCE)
            multiply_rows<ROWS_AT_ONCE>(product, group, end, output, rows(output, ROWS_AT_ONCE));
        for (; output + 4 <= product.outputs; output += 4)
            multiply_rows<4>(product, group, end, output, rows(output, 4));
        for (; output < product.outputs; output++) multiply_rows<1>(product, group, end, output, rows(output, 1));
    }
}

// Writes activations [group][feature][lane] as [feature / LANES][record][LANES features]. ``apart``: the distance of groups.
template <class Of>
NOINLINE void to_rows(const vec* in, long features, long apart, int groups, typename Of::Values* rows) {
    for (long first = 0; first < features; first += LANES)
        for (int group = 0; group < groups; group++) {
            vec block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = first + i < features ? in[group * apart + first + i] : vec{};
            transpose(block);
            rows = Of::write_records(block, rows);
        }
}

template <class Of>
struct Slopes {  // the arguments for the gradient of a linear layer's weights
    long at, inputs, outputs;
    const typename Of::Weight* slopes;  // [group][output][lane]
    long apart;                         // the distance between the slopes of two groups, in vectors
    const typename Of::Values* rows;    // the inputs, see to_rows
    long block;                         // the distance between blocks of LANES features
    int records;
};

// Sums slope * input over records, for OUTPUTS rows and COLUMNS * LANES columns of the weights, and passes the sums to
// ``sink``. WHOLE: true if the weights have all of these columns.
template <int OUTPUTS, int COLUMNS, bool WHOLE, class Of, class Sink>
NOINLINE void product_part(const Slopes<Of>& given, long output, long first, const Sink& shared) {
    const Sink sink = shared;  // a local copy, so that the compiler knows that no store changes it
    const long inputs = given.inputs, at = given.at + output * inputs + first;
    vec sums[OUTPUTS][COLUMNS];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int c = 0; c < COLUMNS; c++) sums[o][c] = vec{};
    constexpr int IN_GROUP = LANES / Of::EACH;  // slopes of one output in a group
    const typename Of::Values* row = given.rows + first / LANES * given.block;
    const typename Of::Weight* slopes = given.slopes + output * IN_GROUP;
    for (int record = 0; record < given.records; record += LANES, slopes += given.apart * IN_GROUP) {
        const int here = (std::min(LANES, given.records - record) + Of::EACH - 1) / Of::EACH;
        _Pragma("GCC unroll 2") for (int lane = 0; lane < here; lane++, row++) {
            typename Of::Values values[COLUMNS];
            UNROLL for (int c = 0; c < COLUMNS; c++) values[c] = row[c * given.block];
            UNROLL for (int o = 0; o < OUTPUTS; o++) {
                const typename Of::Values weight = Of::spread(slopes[o * IN_GROUP + lane]);
                UNROLL for (int c = 0; c < COLUMNS; c++) Of::add(sums[o][c], weight, values[c]);
            }
        }
    }
    if (sink.is_plain()) {
        UNROLL for (int o = 0; o < OUTPUTS; o++)
            UNROLL for (int c = 0; c < COLUMNS; c++)
                sink.template step<true>(at + o * inputs + c * LANES, sums[o][c], WHOLE ? LANES : inputs - first - c * LANES);
        return;
    }
    _Pragma("GCC unroll 1") for (int o = 0; o < OUTPUTS; o++)
        _Pragma("GCC unroll 1") for (int c = 0; c < COLUMNS; c++)
            sink.template step<false>(at + o * inputs + c * LANES, sums[o][c], WHOLE ? LANES : inputs - first - c * LANES);
}

// Computes the gradient of COLUMNS * LANES columns of the weights, MOST rows at a time.
template <int COLUMNS, int MOST, class Of, class Sink>
void product_columns(const Slopes<Of>& given, long first, const Sink& sink) {
    long output = 0;
    for (; output + MOST <= given.outputs; output += MOST) product_part<MOST, COLUMNS, false>(given, output, first, sink);
    for (; output < given.outputs; output++) product_part<1, COLUMNS, false>(given, output, first, sink);
}

// Passes the gradient of a linear layer's weights to ``sink``.
template <class Of, class Sink>
void linear_steps(const Sink& sink, const Slopes<Of>& given) {
    constexpr int MOST = ROWS_AT_ONCE, STEP = 4 * LANES;
    const long whole = given.inputs / STEP * STEP;
    long first = whole;
    for (; first + 2 * LANES <= given.inputs; first += 2 * LANES) product_columns<2, REGISTERS / 4>(given, first, sink);
    for (; first < given.inputs; first += LANES) product_columns<1, 8>(given, first, sink);
    // As many columns as fit in the L2 cache are processed together, so that the weights are visited in memory order. If the
    // weights themselves fit in the cache, the smallest number of columns is processed together.
    const bool is_small = given.inputs * given.outputs <= 1L << 16;
    const long panel = is_small ? STEP : blocks_at_once(given.records) * STEP;
    for (first = 0; first < whole; first += panel) {
        const long end = std::min(whole, first + panel);
        for (long output = 0; output < given.outputs;) {
            const bool is_one = output + MOST > given.outputs;
            for (long at = first; at < end; at += STEP)
                if (is_one) product_part<1, 4, true>(given, output, at, sink);
                else product_part<MOST, 4, true>(given, output, at, sink);
            output += is_one ? 1 : MOST;
            if (end == whole) sink.finish(given.at, output * given.inputs);
        }
    }
}

// A sink that adds to ``gradient``, an array with LANES spare numbers. A vector at the end of a row may overwrite the start of
// the next row, because the next row is written later.
struct Added {
    float* gradient;

    static constexpr bool is_plain() { return true; }
    void finish(long, long) const {}

    template <bool PLAIN = true>
    inline __attribute__((always_inline)) void step(long at, vec part, long count) const {
        const vec before = load(gradient + at);
        store(gradient + at, LANE < int32_t(std::min<long>(count, LANES)) ? before + part : before);
    }
};

#ifndef FL_SIM_AMX
struct LinearRoom {};  // memory that all layers share: here none is needed

template <class Rows>
void multiply(const Product& product, int groups, const Rows& rows, LinearRoom&) {
    multiply(product, groups, rows);
}

template <class Sink>
void linear_steps(const Sink& sink, const Slopes<Factors>& given, LinearRoom&) {
    linear_steps<Factors>(sink, given);
}
#endif

}  // namespace
