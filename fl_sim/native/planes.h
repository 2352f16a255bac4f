// Layers without weights: pooling with any window, a separate ReLU, the mean of a plane, the sum in a residual block.
//
// Backward functions compute the gradient by the input from the gradient by the output, both without borders.
#pragma once

#include "layer.h"

namespace {

void pool_forward(Layer& layer, const Flow& flow) {
    const Image &from = layer.in, &to = layer.out;
    int32_t* place = layer.place.data() + flow.origin * to.features() * LANES;
    for (int channel = 0; channel < to.channels; channel++)
        for (int y = 0; y < to.height; y++)
            for (int x = 0; x < to.width; x++, place += LANES) {
                vec best{};
                ivec which = ivec{} - 1;
                if (flow.is_derivative) std::memcpy(&which, place, sizeof which);
                for (int ky = 0; ky < layer.kernel_y; ky++)
                    for (int kx = 0; kx < layer.kernel_x; kx++) {
                        const int row = y * layer.stride_y + ky - layer.padding_y;
                        const int column = x * layer.stride_x + kx - layer.padding_x;
                        if (row < 0 || row >= from.height || column < 0 || column >= from.width) continue;
                        const int at = (channel * from.height + row) * from.width + column;
                        const vec other = flow.in[from.line(channel, row) + column];
                        const ivec is_larger = (other > best) | (other != other) | (which < 0);
                        const ivec takes = flow.is_derivative ? which == at : is_larger;
                        best = takes ? other : best;
                        which = takes ? ivec{} + at : which;
                    }
                const long at = to.line(channel, y) + x;
                flow.out[at] = flow.let_through(layer, at, best);
                std::memcpy(place, &which, sizeof which);
            }
}

void pool_backward(const Layer& layer, const Flow& flow, const vec* gradient, vec* back) {
    const Image& shape = layer.out;
    std::fill(back, back + layer.in.features(), vec{});
    const int32_t* place = layer.place.data() + flow.origin * shape.features() * LANES;
    for (int channel = 0; channel < shape.channels; channel++)
        for (int y = 0; y < shape.height; y++)
            for (int x = 0; x < shape.width; x++, gradient++, place += LANES) {
                const vec incoming = flow.let_back(layer, shape.line(channel, y) + x, *gradient);
                for (int lane = 0; lane < LANES; lane++) back[place[lane]][lane] += incoming[lane];
            }
}

// The sum in a residual block, or (``flow.other`` null) a separate ReLU or dropout. ``other``: the sizes of the second input.
void add_forward(const Layer& layer, const Image& other, const Flow& flow) {
    for (int channel = 0; channel < layer.out.channels; channel++)
        for (int y = 0; y < layer.out.height; y++) {
            const long at = layer.out.line(channel, y);
            const vec* left = flow.in + layer.in.line(channel, y);
            const vec* right = flow.other ? flow.other + other.line(channel, y) : nullptr;
            for (int x = 0; x < layer.out.width; x++)
                flow.out[at + x] = flow.let_through(layer, at + x, right ? left[x] + right[x] : left[x]);
        }
}

// Writes the gradient by one of the two inputs to ``back``, which may be ``gradient`` itself. ``adds``: true: add it to the
// numbers in ``back``.
void add_backward(const Layer& layer, const Flow& flow, const vec* gradient, vec* back, bool adds = false) {
    for (int channel = 0; channel < layer.out.channels; channel++)
        for (int y = 0; y < layer.out.height; y++) {
            const long at = layer.out.line(channel, y);
            for (int x = 0; x < layer.out.width; x++, back++) {
                const vec slope = flow.let_back(layer, at + x, *gradient++);
                *back = adds ? *back + slope : slope;
            }
        }
}

void average_forward(const Layer& layer, const Flow& flow) {
    for (int channel = 0; channel < layer.in.channels; channel++) {
        vec total{};
        for (int y = 0; y < layer.in.height; y++) {
            const vec* in = flow.in + layer.in.line(channel, y);
            for (int x = 0; x < layer.in.width; x++) total += in[x];
        }
        flow.out[layer.out.line(channel, 0)] = total / float(layer.in.area());
    }
}

void average_backward(const Layer& layer, const vec* gradient, vec* back) {
    for (int channel = 0; channel < layer.in.channels; channel++, back += layer.in.area())
        std::fill(back, back + layer.in.area(), gradient[channel] / float(layer.in.area()));
}

}  // namespace
