// The gradient by the weights of a convolution, if it is the first layer and 2 x 2 pooling follows.
//
// Pooling chose one of four outputs. So a slope is multiplied by one of four overlapping windows of the input. All four windows
// lie in one window that is larger by one row and one column. The code selects each record's window from the larger window: first
// the left or the right columns, then the upper or the lower rows. These selections cost less than four products, of which three
// would be zero.
#pragma once

#include "routes.h"
#include "takers.h"

namespace {

// Computes the sums over places of slope * input, [y][x], for one output, one channel and ROWS rows of its kernel, and passes
// them to ``taker``. ``at``: the index of the first of these weights.
template <int ROWS, int COLUMNS, class Taker>
INLINE void chosen_rows(const Image& shape, const Factors::Values* slopes, const bvec* chosen, const Factors::Values* in, long row,
                        long at, const Taker& taker) {
    vec sums[ROWS][COLUMNS] = {};
    for (int y = 0; y < shape.height; y++, chosen += shape.width)
        for (int x = 0; x < shape.width; x += Factors::EACH, slopes++) {
            const Factors::Values slope = *slopes;
            const ivec ways = Factors::ways(chosen + x, x + 1 < shape.width);
            const auto right = Factors::is_set(ways, 0), below = Factors::is_set(ways, 1);
            const Factors::Values* from = in + 2 * (y * row + x);
            Factors::Values above[COLUMNS];
            UNROLL for (int c = 0; c < COLUMNS; c++) above[c] = Factors::choose(right, from[c + 1], from[c]);
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int c = 0; c < COLUMNS; c++) {
                    const Factors::Values* under = from + (r + 1) * row + c;
                    const Factors::Values value = Factors::choose(right, under[1], under[0]);
                    Factors::add(sums[r][c], slope, Factors::choose(below, value, above[c]));
                    above[c] = value;
                }
        }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) taker.take(at + r * COLUMNS + c, sums[r][c]);
}

template <int SIDE, class Taker>
NOINLINE void chosen_gradient(const Layer& layer, const bvec* chosen, const Factors::Values* in, long at, const Taker& taker) {
    constexpr int PART = 3, REST = SIDE % PART;  // rows whose sums fit in registers
    const Factors::Values* slopes = layer.chosen_slopes.data();
    const long row = layer.in.row();
    int y = 0;
    for (; y + PART <= SIDE; y += PART)
        chosen_rows<PART, SIDE>(layer.out, slopes, chosen, in + y * row, row, at + y * SIDE, taker);
    if constexpr (REST > 0) chosen_rows<REST, SIDE>(layer.out, slopes, chosen, in + y * row, row, at + y * SIDE, taker);
}

// The backward pass as in ``conv_backward`` (convolution_back.h), without the gradient by the input. ``taker``: receives the
// gradient by the layer's parameters.
template <class Taker>
void first_backward(Layer& layer, const Flow& flow, const vec* gradient, const Taker& taker) {
    const Timed timed(TO_WEIGHTS);
    const Image& shape = layer.out;
    const bvec* chosen = layer.chosen.data() + flow.origin * shape.features();
    const Factors::Values* in = Factors::planes_by_place(flow.in, layer.in.vectors(), layer.plane_room) + layer.corner();
    long to = layer.weight;
    layer.chosen_slopes.resize(shape.height * num_factors(shape.width));
    for (int output = 0; output < shape.channels; output++, chosen += shape.area()) {
        vec total{};
        Factors::Values* slope = layer.chosen_slopes.data();
        for (int y = 0; y < shape.height; y++)
            for (int x = 0; x < shape.width; x += Factors::EACH) {
                vec here[Factors::EACH] = {};
                UNROLL for (int i = 0; i < Factors::EACH; i++)
                    if (x + i < shape.width) total += here[i] = flow.let_back(layer, shape.line(output, y) + x + i, *gradient++);
                *slope++ = Factors::slopes(here);
            }
        if (layer.has_bias && !flow.is_derivative) taker.take(layer.bias + output, total);
        for (int channel = 0; channel < layer.in.channels; channel++, to += layer.taps()) {
            if (layer.kernel_y == 3) chosen_gradient<3>(layer, chosen, in + channel * layer.in.plane(), to, taker);
            else chosen_gradient<5>(layer, chosen, in + channel * layer.in.plane(), to, taker);
        }
    }
}

}  // namespace
