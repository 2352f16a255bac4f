// The gradient of a convolution's weights by AMX. The operands of AMX are as follows. The values are the slopes of a place: one
// vector for each pair of records, with one lane for each output. The weights are the inputs of the place: one row for each
// channel, with the pairs of records. If the stride is 1, two neighbouring places are processed together, because their inputs
// are consecutive in memory.
#pragma once

#include "amx.h"
#include "layer.h"

namespace {

struct GradientShape {
    long places;           // the number of places that are processed together
    long across, blocks;   // the number of such places in a row; the number of parts of LANES outputs
    Cut channels;
    explicit GradientShape(const Layer& layer)
        : places(layer.stride_x == 1 ? 2 : 1), across((layer.before_width + places - 1) / places),
          blocks((layer.out.channels + LANES - 1) / LANES), channels(layer.in.channels) {}
    long pairs() const { return places * PAIRS_IN_GROUP; }
};

// Before a minibatch: clears the gradient.
inline void start_gradient(Layer& layer) {
    const GradientShape shape(layer);
    layer.amx.gradient.assign(shape.blocks * layer.taps() * shape.channels.whole(), vec{});
}

// Rearranges a group's slopes, [part of outputs][row][column][pair of records]; missing columns are zeros.
NOINLINE void lay_out_slopes(Layer& layer, const GradientShape& shape, const Slope& slope) {
    const long columns = shape.across * shape.places, plane = slope.image.plane();
    layer.amx.slopes.resize(shape.blocks * layer.before_height * columns * PAIRS_IN_GROUP);
    Pairs::Values* to = layer.amx.slopes.data();
    for (long output = 0; output < layer.out.channels; output += LANES) {
        const long here = std::min<long>(LANES, layer.out.channels - output);
        for (int y = 0; y < layer.before_height; y++) {
            const vec* from = slope.line(int(output), y);
            for (long x = 0; x < columns; x++, from++) {
                vec block[LANES];
                for (long i = 0; i < LANES; i++) block[i] = i < here && x < layer.before_width ? from[i * plane] : vec{};
                transpose(block);
                UNROLL for (int record = 0; record < LANES; record += 2) *to++ = Pairs::pair(block[record], block[record + 1]);
            }
        }
    }
}

// Adds a group's gradient for LANES outputs, a part of the channels and COUNT consecutive taps to ``to``. ``apart``: the distance
// between two taps.
template <int COUNT>
void add_taps(const Layer& layer, const GradientShape& shape, const Pairs::Weight* records, const Pairs::Values* slopes, vec* to,
              long apart) {
    const long channel = layer.in.plane() * PAIRS_IN_GROUP, row = layer.in.row() * PAIRS_IN_GROUP;
    const long step = shape.places * layer.stride_x * PAIRS_IN_GROUP;
    written_for_amx();
    load_sum<0>(to);
    if constexpr (COUNT > 1) load_sum<1>(to + apart);
    if constexpr (COUNT > 2) load_sum<2>(to + 2 * apart);
    if constexpr (COUNT > 3) load_sum<3>(to + 3 * apart);
    if constexpr (COUNT > 4) load_sum<4>(to + 4 * apart);
    for (int y = 0; y < layer.before_height; y++) {
        const Pairs::Weight* from = records + y * layer.stride_y * row;
        for (long x = 0; x < shape.across; x++, from += step, slopes += shape.pairs()) {
            take_values(slopes);
            add_weights<0>(from, channel);
            if constexpr (COUNT > 1) add_weights<1>(from + PAIRS_IN_GROUP, channel);
            if constexpr (COUNT > 2) add_weights<2>(from + 2 * PAIRS_IN_GROUP, channel);
            if constexpr (COUNT > 3) add_weights<3>(from + 3 * PAIRS_IN_GROUP, channel);
            if constexpr (COUNT > 4) add_weights<4>(from + 4 * PAIRS_IN_GROUP, channel);
        }
    }
    store_sum<0>(to);
    if constexpr (COUNT > 1) store_sum<1>(to + apart);
    if constexpr (COUNT > 2) store_sum<2>(to + 2 * apart);
    if constexpr (COUNT > 3) store_sum<3>(to + 3 * apart);
    if constexpr (COUNT > 4) store_sum<4>(to + 4 * apart);
}

// Adds a group's gradient to ``layer.amx.gradient``, [part of outputs][tap][channel].
NOINLINE void add_gradient(Layer& layer, const vec* in, const Slope& slope, float*) {
    const GradientShape shape(layer);
    lay_out_slopes(layer, shape, slope);
    const Pairs::Weight* records = Pairs::records(in, layer.in.vectors(), layer.amx.records) + layer.corner() * PAIRS_IN_GROUP;
    std::fill(layer.amx.records.weights.end() - LANES, layer.amx.records.weights.end(), 0);  // these numbers are multiplied by slopes of zero, so they must not be NaN
    const long in_block = layer.before_height * shape.across * shape.pairs(), apart = shape.channels.whole();
    vec* to = layer.amx.gradient.data();
    shape_amx(shape.channels.size, shape.pairs(), true);
    for (long block = 0; block < shape.blocks; block++) {
        const Pairs::Values* slopes = layer.amx.slopes.data() + block * in_block;
        for (int y = 0; y < layer.kernel_y; y++)
            for (int x = 0; x < layer.kernel_x; x += 5, to += std::min(5, layer.kernel_x - x + 5) * apart)
                for (long part = 0; part < shape.channels.parts; part++) {
                    const long channel = shape.channels.start(part);
                    const Pairs::Weight* from =
                        records + (channel * layer.in.plane() + y * layer.in.row() + x) * PAIRS_IN_GROUP;
                    vec* const here = to + part * shape.channels.size;
                    switch (layer.kernel_x - x) {
                        case 1: add_taps<1>(layer, shape, from, slopes, here, apart); break;
                        case 2: add_taps<2>(layer, shape, from, slopes, here, apart); break;
                        case 3: add_taps<3>(layer, shape, from, slopes, here, apart); break;
                        case 4: add_taps<4>(layer, shape, from, slopes, here, apart); break;
                        default: add_taps<5>(layer, shape, from, slopes, here, apart);
                    }
                }
    }
}

// After a minibatch: adds the result to the gradient in the order of the parameters.
inline void finish_gradient(const Layer& layer, float* gradient) {
    const GradientShape shape(layer);
    for (long output = 0; output < layer.out.channels; output++)
        for (long channel = 0; channel < layer.in.channels; channel++) {
            const long part = channel / shape.channels.size;
            const long at = part * shape.channels.size + channel - shape.channels.start(part);
            for (long tap = 0; tap < layer.taps(); tap++)
                *gradient++ += layer.amx.gradient[(output / LANES * layer.taps() + tap) * shape.channels.whole() + at][output % LANES];
        }
}

}  // namespace
