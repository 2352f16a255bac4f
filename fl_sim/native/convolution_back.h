// The backward pass of convolutions: the gradients by their weights and by their input.
#pragma once

#include "convolution.h"
#ifdef FL_SIM_AMX
#include "amx_gradient.h"
#else
#include "gradient.h"
#endif

namespace {

// Writes the gradient before pooling and ReLU to ``layer.slopes``. Adds the gradient by the biases to ``bias_gradient``, unless
// that is null.
void before_pooling(Layer& layer, const Flow& flow, const vec* gradient, float* bias_gradient) {
    const Image &to = layer.slope, &shape = layer.out;
    const bvec* chosen = layer.chosen.data() + flow.origin * shape.features();
    for (int channel = 0; channel < shape.channels; channel++) {
        vec total{};
        for (int y = 0; y < shape.height; y++) {
            const vec* value = flow.passed + channel * shape.plane() + y * shape.row() + shape.start();
            vec* slope = layer.slopes.data() + to.line(channel, layer.pooled ? 2 * y : y);
            for (int x = 0; x < shape.width; x++, gradient++) {
                const vec incoming = !layer.relu ? *gradient : value[x] > 0.0f ? *gradient : vec{};
                total += incoming;
                if (!layer.pooled) {
                    slope[x] = incoming;
                    continue;
                }
                const ivec which = widened(*chosen++);
                UNROLL for (int place = 0; place < 4; place++)
                    slope[(place / 2) * to.row() + 2 * x + place % 2] = which == place ? incoming : vec{};
            }
        }
        if (bias_gradient) bias_gradient[channel] += sum(total);
    }
}

// Returns the gradient before pooling and ReLU. ``gradient``: the gradient by the output, without border. It is returned
// unchanged if the layer has no pooling, no ReLU and no biases. ``bordered``: true if the result must have a border.
// ``gradients``: receives the gradient by the biases; null: it is not needed.
Slope slope_of(Layer& layer, const Flow& flow, const vec* gradient, bool bordered, float* gradients) {
    if (!bordered && !layer.pooled && !layer.relu && !layer.has_bias) return {gradient, layer.out.bare()};
    before_pooling(layer, flow, gradient, gradients && layer.has_bias && !flow.is_derivative ? gradients + layer.bias : nullptr);
    return {layer.slopes.data(), layer.slope};
}

// The gradient by the input is computed by phases. Input pixels with (pixel + padding) % stride == phase are multiplied by every
// stride-th tap of the kernel only, from ``phase`` on. The next pixel of the same phase reads the slopes one position further. So
// the gradient by the pixels of a phase is a convolution of stride 1 over the slopes, with these taps in reverse order.
struct Phase {
    int taps, first, count, start;  // numbers of taps and pixels; first pixel; first slope of its window
    Phase(int phase, int kernel, int stride, int padding, int size) {
        taps = (kernel - phase + stride - 1) / stride;
        first = ((phase - padding) % stride + stride) % stride;
        count = (size - first + stride - 1) / stride;
        start = (first + padding - phase) / stride - (taps - 1);
    }
};

// Calls ``each(phase_y, phase_x, y, x)`` for all phases with taps.
template <class Each>
INLINE void each_phase(const Layer& layer, const Each& each) {
    for (int phase_y = 0; phase_y < std::min(layer.stride_y, layer.kernel_y); phase_y++)
        for (int phase_x = 0; phase_x < std::min(layer.stride_x, layer.kernel_x); phase_x++)
            each(phase_y, phase_x, Phase(phase_y, layer.kernel_y, layer.stride_y, layer.padding_y, layer.in.height),
                 Phase(phase_x, layer.kernel_x, layer.stride_x, layer.padding_x, layer.in.width));
}

// Rearranges the weights for the backward pass: [phase][in channel][out channel][taps in reverse order].
void flip(Layer& layer, const float* weights) {
    float* to = layer.flipped.data();
    const int inputs = layer.in.channels, outputs = layer.out.channels;
    each_phase(layer, [&](int phase_y, int phase_x, const Phase& y, const Phase& x) {
        for (int channel = 0; channel < inputs; channel++)
            for (int output = 0; output < outputs; output++) {
                const float* kernel = weights + (long(output) * inputs + channel) * layer.taps();
                for (int i = y.taps - 1; i >= 0; i--)
                    for (int j = x.taps - 1; j >= 0; j--)
                        *to++ = kernel[(phase_y + i * layer.stride_y) * layer.kernel_x + phase_x + j * layer.stride_x];
            }
    });
}

#ifdef FL_SIM_AMX
INLINE Runs runs_back(const Layer& layer, const Phase& y, const Phase& x) {
    return Runs(layer.out.channels, layer.in.channels, y.taps, x.taps, 1, false);
}

// Before a minibatch: rearranges the kernels for the backward pass, [phase].
inline void start_backward(Layer& layer, const float* weights) {
    flip(layer, weights);
    const long inputs = layer.in.channels, outputs = layer.out.channels;
    long count = LANES;
    each_phase(layer, [&](int, int, const Phase& y, const Phase& x) { count += runs_back(layer, y, x).num_weights(); });
    layer.amx.back_kernels.resize(count);
    Pairs::Weight* to = layer.amx.back_kernels.data();
    const float* flipped = layer.flipped.data();
    each_phase(layer, [&](int, int, const Phase& y, const Phase& x) {
        const Pairs::Weight* kernels = Pairs::kernels(flipped, inputs, outputs, y.taps, x.taps, layer.flipped_room);
        to = lay_out_kernels(runs_back(layer, y, x), kernels, inputs, outputs, y.taps, x.taps, 1, layer.amx.room, to);
        flipped += inputs * outputs * y.taps * x.taps;
    });
}
#else
inline void start_backward(Layer& layer, const float* weights) { flip(layer, weights); }
#endif

// Computes the gradient by the input from the slopes. ``adds``: true: add it to the numbers in ``back``.
void slopes_to_input(Layer& layer, const Slope& given, vec* back, bool adds) {
    Image bare = layer.in;
    bare.border_y = bare.border_x = 0;
    const Image& slope = given.image;
    const Read* slopes = read_of(given.values, slope, layer);
    if (!adds && (layer.stride_y > layer.kernel_y || layer.stride_x > layer.kernel_x))  // some pixels belong to no window
        std::fill(back, back + bare.features(), vec{});
    const auto convolve_phase = [&](const Phase& y, const Phase& x, const Factors::Weight* kernels) {
        convolve({y.taps, x.taps, 1, 1, slopes, slope.start() + y.start * slope.row() + x.start, slope,
                  back + y.first * bare.row() + x.first, bare, y.count, x.count, layer.stride_y, layer.stride_x, nullptr,
                  kernels, nullptr, false, -y.start, layer.before_height - y.start, nullptr, adds}, layer);
    };
#ifdef FL_SIM_AMX
    const Pairs::Weight* kernels = layer.amx.back_kernels.data();
    each_phase(layer, [&](int, int, const Phase& y, const Phase& x) {
        convolve_phase(y, x, kernels);
        kernels += runs_back(layer, y, x).num_weights();
    });
#else
    const float* weights = layer.flipped.data();
    each_phase(layer, [&](int, int, const Phase& y, const Phase& x) {
        convolve_phase(y, x, Factors::kernels(weights, layer.in.channels, slope.channels, y.taps, x.taps, layer.flipped_room));
        weights += long(layer.in.channels) * layer.out.channels * y.taps * x.taps;
    });
#endif
}

// Computes the backward pass of a convolution. ``gradient``: the gradient by the output, without border. ``back``: receives the
// gradient by the input, without border; null: it is not needed. ``adds``: true: add it to the numbers in ``back``.
void conv_backward(Layer& layer, const Flow& flow, const vec* gradient, vec* back, bool adds, float* gradients) {
    const bool has_border = layer.slope.vectors() > layer.slope.channels * layer.out.area();
    const Slope slope = slope_of(layer, flow, gradient, back && has_border, gradients);
    if (back) slopes_to_input(layer, slope, back, adds);
    const Timed timed(TO_WEIGHTS);
    add_gradient(layer, flow.in, slope, gradients);
}

#ifndef FL_SIM_BFLOAT16
// Computes the same backward pass, but writes the gradients of each record to ``gradients``, [parameter][lane].
void conv_backward_by_record(Layer& layer, const Flow& flow, const vec* gradient, vec* back, bool adds, vec* gradients) {
    const bool has_border = layer.slope.vectors() > layer.slope.channels * layer.out.area();
    const Slope slope = slope_of(layer, flow, gradient, back && has_border, nullptr);
    if (back) slopes_to_input(layer, slope, back, adds);
    write_gradients(layer, flow.in, slope, gradients);
}
#endif

}  // namespace
