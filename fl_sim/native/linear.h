// Linear layers: over all groups of a minibatch at once; a gradient goes to its sink as soon as it is known.
#pragma once

#include "optimizer.h"

namespace {

// out[group][o] = bias[o] + sum_i weights[o * along + i * across] * in[group][i], for OUTPUTS outputs and GROUPS groups.
struct Product {
    const vec* in;
    long inputs;
    vec* out;
    long outputs;
    const float* weights;
    long along, across;
    const float* bias;  // null: none
    bool relu;
};

template <int OUTPUTS, int GROUPS>
INLINE void multiply_part(const Product& product, long output) {
    const long inputs = product.inputs, along = product.along;
    vec sums[OUTPUTS][GROUPS];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int g = 0; g < GROUPS; g++) sums[o][g] = spread(product.bias ? product.bias[output + o] : 0.0f);
    const float* weights = product.weights + output * along;
    for (long i = 0; i < inputs; i++, weights += product.across) {
        vec values[GROUPS];
        UNROLL for (int g = 0; g < GROUPS; g++) values[g] = product.in[g * inputs + i];
        UNROLL for (int o = 0; o < OUTPUTS; o++) {
            const vec weight = spread(weights[o * along]);
            UNROLL for (int g = 0; g < GROUPS; g++) sums[o][g] += weight * values[g];
        }
    }
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int g = 0; g < GROUPS; g++)
            product.out[g * product.outputs + output + o] = product.relu ? rectified(sums[o][g]) : sums[o][g];
}

constexpr int ROWS_AT_ONCE = REGISTERS == 32 ? 6 : 3;  // of weights: their sums for four groups stay in registers

template <int GROUPS>
void multiply(Product product, int group) {
    product.in += group * product.inputs;
    product.out += group * product.outputs;
    long output = 0;
    for (; output + ROWS_AT_ONCE <= product.outputs; output += ROWS_AT_ONCE)
        multiply_part<ROWS_AT_ONCE, GROUPS>(product, output);
    for (; output + 4 <= product.outputs; output += 4) multiply_part<4, GROUPS>(product, output);
    for (; output < product.outputs; output++) multiply_part<1, GROUPS>(product, output);
}

void multiply(const Product& product, int groups) {
    int group = 0;
    for (; group + 4 <= groups; group += 4) multiply<4>(product, group);
    if (groups - group == 3) multiply<3>(product, group);
    if (groups - group == 2) multiply<2>(product, group);
    if (groups - group == 1) multiply<1>(product, group);
}

// Lays activations [group][feature][lane] out as [feature / LANES][record][LANES features]. ``apart``: of groups.
NOINLINE void to_rows(const vec* in, long features, long apart, int groups, vec* rows) {
    for (long first = 0; first < features; first += LANES)
        for (int group = 0; group < groups; group++, rows += LANES) {
            vec block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = first + i < features ? in[group * apart + first + i] : vec{};
            transpose(block);
            for (int lane = 0; lane < LANES; lane++) rows[lane] = block[lane];
        }
}

struct Slopes {  // what the gradient of a linear layer's weights needs to know
    long at, inputs, outputs;
    const float* slopes;  // [group][output][lane]
    long apart;           // from one group's slopes to the next, in vectors
    const vec* rows;      // see to_rows
    long block;           // from one block of LANES features to the next
    int records;
};

// Sums slope * input over records, for OUTPUTS rows and COLUMNS * LANES columns of the weights; hands them to ``take``:
// where the first of LANES numbers stands, the numbers, and how many of them count.
template <int OUTPUTS, int COLUMNS, class Take>
NOINLINE void product_part(const Slopes& given, long output, long first, const Take& take) {
    vec sums[OUTPUTS][COLUMNS];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int c = 0; c < COLUMNS; c++) sums[o][c] = vec{};
    const vec* row = given.rows + first / LANES * given.block;
    for (int record = 0; record < given.records; record++, row++) {
        const float* slope = given.slopes + (record / LANES * given.apart + output) * LANES + record % LANES;
        vec values[COLUMNS];
        UNROLL for (int c = 0; c < COLUMNS; c++) values[c] = row[c * given.block];
        UNROLL for (int o = 0; o < OUTPUTS; o++) {
            const vec weight = spread(slope[o * LANES]);
            UNROLL for (int c = 0; c < COLUMNS; c++) sums[o][c] += weight * values[c];
        }
    }
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            const long column = first + c * LANES;
            take(given.at + (output + o) * given.inputs + column, sums[o][c], given.inputs - column);
        }
}

template <int COLUMNS, int MOST, class Take>
void product_columns(const Slopes& given, long first, const Take& take) {
    long output = 0;
    for (; output + MOST <= given.outputs; output += MOST) product_part<MOST, COLUMNS>(given, output, first, take);
    for (; output < given.outputs; output++) product_part<1, COLUMNS>(given, output, first, take);
}

template <class Take>
void products(const Slopes& given, const Take& take) {
    long first = 0;
    for (; first + 4 * LANES <= given.inputs; first += 4 * LANES) product_columns<4, REGISTERS / 8>(given, first, take);
    for (; first + 2 * LANES <= given.inputs; first += 2 * LANES) product_columns<2, REGISTERS / 4>(given, first, take);
    for (; first < given.inputs; first += LANES) product_columns<1, 8>(given, first, take);
}

// Hands over the gradient of a linear layer's weights.
template <class Sink>
void linear_steps(const Sink& sink, const Slopes& given) {
    products(given, [&](long at, vec gradient, long count) { sink.step(at, gradient, count); });
}

// Adds to a gradient, which is LANES longer than it has numbers: the later of two rows that overlap there comes last.
void add_products(float* gradient, const Slopes& given) {
    products(given, [&](long at, vec sums, long count) {
        const vec before = load(gradient + at);
        store(gradient + at, LANE < int32_t(std::min<long>(count, LANES)) ? before + sums : before);
    });
}

}  // namespace
