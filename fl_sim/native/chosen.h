// The way back through a first convolution with 2 x 2 pooling behind it, to its weights alone.
//
// Pooling took one of four outputs. So a slope meets one of four windows of the input, and as they overlap, all four lie
// in one that is a row and a column larger: of it, every record takes the half that its maximum was in, first of the
// columns, then of the rows. That is a choice of two for every number instead of four products, three of them with zero.
#pragma once

#include "layer.h"

namespace {

// Says whether this way is open, as nobody asks for the gradient of the records. With 16 registers it is the longer one.
inline bool is_first_pooled(const Layer& layer) {
    if (REGISTERS < 32 || layer.kind != CONV || layer.source || !layer.pooled) return false;
    if (layer.stride_y != 1 || layer.stride_x != 1) return false;
    return layer.kernel_y == layer.kernel_x && (layer.kernel_y == 3 || layer.kernel_y == 5);
}

// gradient[y][x] += sum over places and lanes of slope * input, for one output, one channel and ROWS rows of its kernel.
template <int ROWS, int COLUMNS>
INLINE void chosen_rows(const Image& shape, const vec* slopes, const bvec* chosen, const vec* in, long row, float* gradient) {
    vec sums[ROWS][COLUMNS] = {};
    for (int y = 0; y < shape.height; y++)
        for (int x = 0; x < shape.width; x++, slopes++, chosen++) {
            const vec slope = *slopes;
            const ivec way = widened(*chosen), right = (way & 1) != 0, below = (way & 2) != 0;
            const vec* from = in + 2 * (y * row + x);
            vec above[COLUMNS];
            UNROLL for (int c = 0; c < COLUMNS; c++) above[c] = right ? from[c + 1] : from[c];
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int c = 0; c < COLUMNS; c++) {
                    const vec* under = from + (r + 1) * row + c;
                    const vec value = right ? under[1] : under[0];
                    sums[r][c] += slope * (below ? value : above[c]);
                    above[c] = value;
                }
        }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) gradient[r * COLUMNS + c] += sum(sums[r][c]);
}

template <int SIDE>
NOINLINE void chosen_gradient(const Layer& layer, const vec* slopes, const bvec* chosen, const vec* in, float* gradient) {
    constexpr int PART = 3, REST = SIDE % PART;  // rows whose sums stay in registers
    const long row = layer.in.row();
    int y = 0;
    for (; y + PART <= SIDE; y += PART)
        chosen_rows<PART, SIDE>(layer.out, slopes, chosen, in + y * row, row, gradient + y * SIDE);
    if constexpr (REST > 0) chosen_rows<REST, SIDE>(layer.out, slopes, chosen, in + y * row, row, gradient + y * SIDE);
}

// As conv_backward, without the gradient of the input.
void first_backward(Layer& layer, const Flow& flow, const vec* gradient, float* gradients) {
    const Timed timed(TO_WEIGHTS);
    const Image& shape = layer.out;
    const bvec* chosen = layer.chosen.data() + flow.origin * shape.features();
    float* to = gradients + layer.weight;
    for (int output = 0; output < shape.channels; output++, chosen += shape.area()) {
        vec total{};
        vec* slope = layer.slopes.data();
        for (int y = 0; y < shape.height; y++)
            for (int x = 0; x < shape.width; x++)
                total += *slope++ = flow.let_back(layer, shape.line(output, y) + x, *gradient++);
        if (layer.has_bias && !flow.is_derivative) gradients[layer.bias + output] += sum(total);
        for (int channel = 0; channel < layer.in.channels; channel++, to += layer.taps()) {
            const vec* in = flow.in + layer.corner() + channel * layer.in.plane();
            if (layer.kernel_y == 3) chosen_gradient<3>(layer, layer.slopes.data(), chosen, in, to);
            else chosen_gradient<5>(layer, layer.slopes.data(), chosen, in, to);
        }
    }
}

}  // namespace
