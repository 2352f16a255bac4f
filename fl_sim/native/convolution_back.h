// The way back through convolutions: to their weights and to their input.
#pragma once

#include "convolution.h"

namespace {

// gradient[o][channel][y][x] += sum over places and lanes of slope * input, for OUTPUTS channels and a part of the kernel.
template <int OUTPUTS, int ROWS, int COLUMNS>
NOINLINE void weight_gradient(const Layer& layer, const vec* in, int output, int channel, int ky,
                                               int kx, float* gradient) {
    const long in_row = layer.in.row(), plane = layer.slope.plane();
    vec sums[OUTPUTS][ROWS][COLUMNS];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int c = 0; c < COLUMNS; c++) sums[o][r][c] = vec{};
    for (int y = 0; y < layer.before_height; y++) {
        const vec* left = layer.slopes.data() + layer.slope.line(output, y);
        const vec* right = in + channel * layer.in.plane() + (y * layer.stride_y + ky) * in_row + kx;
        for (int x = 0; x < layer.before_width; x++, left++, right += layer.stride_x) {
            vec values[OUTPUTS];
            UNROLL for (int o = 0; o < OUTPUTS; o++) values[o] = left[o * plane];
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int c = 0; c < COLUMNS; c++) {
                    const vec value = right[r * in_row + c];
                    UNROLL for (int o = 0; o < OUTPUTS; o++) sums[o][r][c] += value * values[o];
                }
        }
    }
    constexpr int LAST = OUTPUTS - 1;
    const long per_output = layer.in.channels * layer.taps();
    float* to = gradient + output * per_output + channel * layer.taps() + ky * layer.kernel_x + kx;
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            const four total = ::sums(sums[0][r][c], sums[std::min(1, LAST)][r][c], sums[std::min(2, LAST)][r][c],
                                      sums[std::min(3, LAST)][r][c]);
            UNROLL for (int o = 0; o < OUTPUTS; o++) to[o * per_output + r * layer.kernel_x + c] += total[o];
        }
}

template <int MOST, int ROWS, int COLUMNS>
void weight_gradients(const Layer& layer, const vec* in, float* gradient) {
    const int outputs = layer.out.channels;
    for (int channel = 0; channel < layer.in.channels; channel++)
        for (int y = 0; y < layer.kernel_y; y += ROWS)
            for (int x = 0; x < layer.kernel_x; x += COLUMNS) {
                int output = 0;
                if (MOST > 3 && outputs % MOST && outputs % 3 == 0)
                    for (; output < outputs; output += 3)
                        weight_gradient<3, ROWS, COLUMNS>(layer, in, output, channel, y, x, gradient);
                for (; output + MOST <= outputs; output += MOST)
                    weight_gradient<MOST, ROWS, COLUMNS>(layer, in, output, channel, y, x, gradient);
                for (; output < outputs; output++)
                    weight_gradient<1, ROWS, COLUMNS>(layer, in, output, channel, y, x, gradient);
            }
}

// The same for kernels of one pixel, of OUTPUTS x CHANNELS channels.
template <int OUTPUTS, int CHANNELS>
NOINLINE void pixel_gradient(const Layer& layer, const vec* in, int output, int channel, float* gradient) {
    const long plane = layer.slope.plane(), in_plane = layer.in.plane();
    vec sums[OUTPUTS][CHANNELS];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int c = 0; c < CHANNELS; c++) sums[o][c] = vec{};
    for (int y = 0; y < layer.before_height; y++) {
        const vec* left = layer.slopes.data() + layer.slope.line(output, y);
        const vec* right = in + channel * in_plane + y * layer.stride_y * layer.in.row();
        for (int x = 0; x < layer.before_width; x++, left++, right += layer.stride_x) {
            vec values[CHANNELS];
            UNROLL for (int c = 0; c < CHANNELS; c++) values[c] = right[c * in_plane];
            UNROLL for (int o = 0; o < OUTPUTS; o++) {
                const vec slope = left[o * plane];
                UNROLL for (int c = 0; c < CHANNELS; c++) sums[o][c] += slope * values[c];
            }
        }
    }
    UNROLL for (int o = 0; o < OUTPUTS; o++) {
        float* to = gradient + long(output + o) * layer.in.channels + channel;
        constexpr int LAST = CHANNELS - 1;
        const four total = ::sums(sums[o][0], sums[o][std::min(1, LAST)], sums[o][std::min(2, LAST)], sums[o][LAST]);
        UNROLL for (int c = 0; c < CHANNELS; c++) to[c] += total[c];
    }
}

template <int CHANNELS>
void pixel_gradients(const Layer& layer, const vec* in, int channel, float* gradient) {
    constexpr int MOST = REGISTERS / 8;
    int output = 0;
    for (; output + MOST <= layer.out.channels; output += MOST)
        pixel_gradient<MOST, CHANNELS>(layer, in, output, channel, gradient);
    for (; output < layer.out.channels; output++) pixel_gradient<1, CHANNELS>(layer, in, output, channel, gradient);
}

void pixel_gradients(const Layer& layer, const vec* in, float* gradient) {
    int channel = 0;
    for (; channel + 4 <= layer.in.channels; channel += 4) pixel_gradients<4>(layer, in, channel, gradient);
    for (; channel < layer.in.channels; channel++) pixel_gradients<1>(layer, in, channel, gradient);
}

// Writes the gradient before pooling and ReLU into ``layer.slopes`` and adds the bias gradient, where that is asked for.
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

// The way back to the input goes by phases. An input pixel at (pixel + padding) % stride == phase meets every stride-th tap
// of the kernel alone, from ``phase`` on, and for each next such pixel the slopes it meets are the next ones: a phase is a
// convolution of stride 1 over the slopes with these taps turned round.
struct Phase {
    int taps, first, count, start;  // taps; the first pixel and how many; which slope the first pixel's window starts at
    Phase(int phase, int kernel, int stride, int padding, int size) {
        taps = (kernel - phase + stride - 1) / stride;
        first = ((phase - padding) % stride + stride) % stride;
        count = (size - first + stride - 1) / stride;
        start = (first + padding - phase) / stride - (taps - 1);
    }
};

// Calls ``each(phase_y, phase_x, y, x)`` for all that have taps.
template <class Each>
INLINE void each_phase(const Layer& layer, const Each& each) {
    for (int phase_y = 0; phase_y < std::min(layer.stride_y, layer.kernel_y); phase_y++)
        for (int phase_x = 0; phase_x < std::min(layer.stride_x, layer.kernel_x); phase_x++)
            each(phase_y, phase_x, Phase(phase_y, layer.kernel_y, layer.stride_y, layer.padding_y, layer.in.height),
                 Phase(phase_x, layer.kernel_x, layer.stride_x, layer.padding_x, layer.in.width));
}

// Lays the weights out for the way back: [phase][in channel][out channel][taps turned round].
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

void slopes_to_input(Layer& layer, vec* back) {
    Image bare = layer.in;
    bare.border_y = bare.border_x = 0;
    const Image& slope = layer.slope;
    const Factors::Values* slopes =
        Factors::planes(layer.slopes.data(), slope.channels, slope.plane(), slope.row(), layer.plane_room) + slope.start();
    const float* weights = layer.flipped.data();
    if (layer.stride_y > layer.kernel_y || layer.stride_x > layer.kernel_x)  // some pixels are not met at all
        std::fill(back, back + bare.features(), vec{});
    each_phase(layer, [&](int, int, const Phase& y, const Phase& x) {
        const Factors::Weight* kernels =
            Factors::kernels(weights, layer.in.channels, slope.channels, y.taps, x.taps, layer.flipped_room);
        convolve({y.taps, x.taps, 1, 1, slopes + y.start * slope.row() + x.start, slope,
                  back + y.first * bare.row() + x.first, bare, y.count, x.count, layer.stride_y, layer.stride_x, nullptr,
                  kernels, nullptr, false, -y.start, layer.before_height - y.start, nullptr});
        weights += long(layer.in.channels) * layer.out.channels * y.taps * x.taps;
    });
}

// ``gradient``: of the output, without border; ``back``: of the input, likewise, or null where nobody asks.
void conv_backward(Layer& layer, const Flow& flow, const vec* gradient, vec* back, float* gradients) {
    before_pooling(layer, flow, gradient, layer.has_bias && !flow.is_derivative ? gradients + layer.bias : nullptr);
    if (back) slopes_to_input(layer, back);
    const Timed timed(TO_WEIGHTS);
    const vec* in = flow.in + layer.corner();
    const bool is_square = layer.kernel_y == layer.kernel_x;
    float* to = gradients + layer.weight;
    constexpr bool HAS_MANY = REGISTERS == 32;
    if (is_square && layer.kernel_y == 3) weight_gradients<HAS_MANY ? 2 : 3, HAS_MANY ? 3 : 1, 3>(layer, in, to);
    else if (is_square && layer.kernel_y == 5) weight_gradients<HAS_MANY ? 4 : 2, 1, 5>(layer, in, to);
    else if (is_square && layer.kernel_y == 7) weight_gradients<HAS_MANY ? 3 : 1, 1, 7>(layer, in, to);
    else if (is_square && layer.kernel_y == 1) pixel_gradients(layer, in, to);
    else weight_gradients<4, 1, 1>(layer, in, to);
}

}  // namespace
