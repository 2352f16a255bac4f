// Linear layers by AMX. The functions have the results of those in linear.h, which compute vector by vector.
#pragma once

#include "amx.h"
#include "linear.h"

namespace {

struct LinearRoom {  // memory that all layers share
    std::vector<Pairs::Weight> weights, slopes;
};

// Computes the result of ``multiply`` in linear.h. Weights are in rows of pairs; if ``product.along`` is 1, they are in columns.
template <class Rows>
void multiply(const Product& product, int groups, const Rows& rows, LinearRoom& room) {
    const Cut outputs(product.outputs), pairs(product.inputs);
    const int most = groups_at_once(product.inputs);
    if (long(room.weights.size()) < outputs.size * pairs.whole() + LANES) room.weights.resize(outputs.size * pairs.whole() + LANES);
    Pairs::Weight* const weights = room.weights.data();
    Sums sums[4];
    shape_amx(outputs.size, pairs.size);
    for (int first = 0; first < groups; first += most)
        for (long part = 0; part < outputs.parts; part++) {
            const long output = outputs.start(part);
            const Pairs::Weight* from = rows(output, outputs.size);
            if (product.across == 1) lay_out_rows(from, product.along, outputs, pairs, weights);
            else lay_out_columns(from, product.across, outputs, pairs, weights);
            for (int group = first; group < std::min(groups, first + most); group += 4) {
                const int count = std::min(4, std::min(groups, first + most) - group);
                const Pairs::Values* in[4];
                for (int i = 0; i < count; i++) in[i] = product.in + (group + i) * product.inputs;
                multiply_amx(count, weights, outputs, pairs, in, 1, 0, sums);
                for (int i = 0; i < count; i++) {
                    vec* const out = product.out + (group + i) * product.outputs + output;
                    for (long at = outputs.known(part); at < outputs.size; at++) {
                        const vec sum = sums[i][at] + spread(product.bias ? product.bias[output + at] : 0.0f);
                        out[at] = product.relu ? rectified(sum) : sum;
                    }
                }
            }
        }
}

// Computes the result of ``linear_steps`` in linear.h.
template <class Sink>
void linear_steps(const Sink& sink, const Slopes<Pairs>& given, LinearRoom& room) {
    constexpr long STEP = 4 * LANES;
    const long groups = (given.records + LANES - 1) / LANES, inputs = given.inputs;
    const Cut outputs(given.outputs), pairs(groups * PAIRS_IN_GROUP);
    const long in_part = outputs.size * pairs.whole();
    room.slopes.resize(outputs.size * pairs.count + LANES), room.weights.resize(outputs.parts * in_part + LANES);
    for (long part = 0; part < outputs.parts; part++) {
        const Pairs::Weight* from = given.slopes + outputs.start(part) * PAIRS_IN_GROUP;
        for (long output = 0; output < outputs.size; output++, from += PAIRS_IN_GROUP)
            for (long group = 0; group < groups; group++)
                std::memcpy(&room.slopes[output * pairs.count + group * PAIRS_IN_GROUP],
                            from + group * given.apart * PAIRS_IN_GROUP, PAIRS_IN_GROUP * sizeof(Pairs::Weight));
        lay_out_rows(room.slopes.data(), pairs.count, outputs, pairs, room.weights.data() + part * in_part);
    }
    Sums sums[4];
    shape_amx(outputs.size, pairs.size);
    const long panel = blocks_at_once(given.records) * STEP;
    for (long first = 0; first < inputs; first += panel) {
        const long end = std::min(inputs, first + panel);
        for (long part = 0; part < outputs.parts; part++) {
            const long output = outputs.start(part);
            for (long at = first; at < end; at += STEP) {
                const int count = int(std::min(4L, (end - at + LANES - 1) / LANES));
                const Pairs::Values* in[4];
                for (int i = 0; i < count; i++) in[i] = given.rows + (at / LANES + i) * given.block;
                multiply_amx(count, room.weights.data() + part * in_part, outputs, pairs, in, 1, 0, sums);
                for (long o = outputs.known(part); o < outputs.size; o++)
                    for (int i = 0; i < count; i++) {
                        const long input = at + i * LANES;
                        if (sink.is_plain()) sink.template step<true>(given.at + (output + o) * inputs + input, sums[i][o], inputs - input);
                        else sink.template step<false>(given.at + (output + o) * inputs + input, sums[i][o], inputs - input);
                    }
            }
            if (end == inputs) sink.finish(given.at, (output + outputs.size) * inputs);
        }
    }
}

}  // namespace
