// Convolutions, with the ReLU and the 2 x 2 pooling behind them in the same pass.
#pragma once

#include "layer.h"

namespace {

struct Pass {  // a convolution over one group: forward, or back to the input with the flipped weights
    int kernel_y, kernel_x, stride_y, stride_x;
    const vec* in;
    Image in_shape;
    vec* out;
    Image out_shape;
    int rows, columns, step_y, step_x;  // how many places of ``out`` to write, and how far they are from each other
    bvec* chosen;  // null: no pooling
    const float *weights, *bias;  // bias: null where there is none
    bool relu;
    int first_row, end_row;  // rows of ``in`` outside of which all is zero
    const vec* passed;       // null; or a derivative's origin: take what it took (``chosen`` too), let through what it let
    long per_output() const { return long(in_shape.channels) * kernel_y * kernel_x; }
};

// sums[o][y][x] += weights of OUTPUTS channels * the window at ROWS x COLUMNS places. K: a K x K kernel; S: of stride S; 0: any.
template <int OUTPUTS, int ROWS, int COLUMNS, int K, int S>
INLINE void add_window(const Pass& pass, int row_at, int column_at, int output, vec (&sums)[OUTPUTS][ROWS][COLUMNS]) {
    const int kernel_y = K ? K : pass.kernel_y, kernel_x = K ? K : pass.kernel_x;
    const int stride_y = S ? S : pass.stride_y, stride_x = S ? S : pass.stride_x;
    const long row = pass.in_shape.row(), plane = pass.in_shape.plane(), per_output = pass.per_output();
    const int begin = std::max(0, pass.first_row - row_at - (ROWS - 1) * stride_y);
    const int end = std::min(kernel_y, pass.end_row - row_at);
    const vec* in = pass.in + row_at * row + column_at;
    for (int channel = 0; channel < pass.in_shape.channels; channel++, in += plane) {
        const float* weights = pass.weights + output * per_output + (channel * kernel_y + begin) * kernel_x;
        for (int y = begin; y < end; y++) {
            const vec* from = in + y * row;
            _Pragma("GCC unroll 5") for (int x = 0; x < kernel_x; x++, weights++) {
                vec values[ROWS][COLUMNS];
                UNROLL for (int r = 0; r < ROWS; r++)
                    UNROLL for (int c = 0; c < COLUMNS; c++) values[r][c] = from[r * stride_y * row + c * stride_x + x];
                UNROLL for (int o = 0; o < OUTPUTS; o++) {
                    const vec weight = spread(weights[o * per_output]);
                    UNROLL for (int r = 0; r < ROWS; r++)
                        UNROLL for (int c = 0; c < COLUMNS; c++) sums[o][r][c] += weight * values[r][c];
                }
            }
        }
    }
}

INLINE vec let_through(const Pass& pass, long at, vec value) {
    if (!pass.relu) return value;
    return !pass.passed ? rectified(value) : pass.passed[at] > 0.0f ? value : vec{};
}

// Writes the largest of four numbers and which it was; of a derivative, the one that its origin took.
INLINE void write_pooled(const Pass& pass, int output, int y, int x, const vec (&from)[2][2]) {
    const Image& shape = pass.out_shape;
    const long at = shape.line(output, y) + x;
    bvec* chosen = pass.chosen + (long(output) * shape.height + y) * shape.width + x;
    if (pass.passed) {
        const ivec taken = __builtin_convertvector(*chosen, ivec);
        const vec left = taken == 0 ? from[0][0] : from[1][0], right = taken == 1 ? from[0][1] : from[1][1];
        pass.out[at] = let_through(pass, at, (taken & 1) == 0 ? left : right);
        return;
    }
    const vec best = larger(larger(from[0][0], from[0][1]), larger(from[1][0], from[1][1]));
    ivec which = from[1][0] == best ? ivec{} + 2 : ivec{} + 3;
    which = from[0][1] == best ? ivec{} + 1 : which;
    which = from[0][0] == best ? ivec{} : which;
    pass.out[at] = pass.relu ? rectified(best) : best;
    *chosen = __builtin_convertvector(which, bvec);
}

template <int OUTPUTS, int K, int S>
void pooled_row(const Pass& pass, int output, int y) {
    for (int x = 0; x < pass.columns; x++) {
        vec sums[OUTPUTS][2][2];
        UNROLL for (int o = 0; o < OUTPUTS; o++) {
            const vec start = spread(pass.bias ? pass.bias[output + o] : 0.0f);
            sums[o][0][0] = sums[o][0][1] = sums[o][1][0] = sums[o][1][1] = start;
        }
        add_window<OUTPUTS, 2, 2, K, S>(pass, 2 * y * pass.stride_y, 2 * x * pass.stride_x, output, sums);
        UNROLL for (int o = 0; o < OUTPUTS; o++) write_pooled(pass, output + o, y, x, sums[o]);
    }
}

template <int OUTPUTS, int COLUMNS, int K, int S>
INLINE void plain_part(const Pass& pass, int output, int y, int x) {
    const Image& shape = pass.out_shape;
    vec sums[OUTPUTS][1][COLUMNS];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int c = 0; c < COLUMNS; c++) sums[o][0][c] = spread(pass.bias ? pass.bias[output + o] : 0.0f);
    add_window<OUTPUTS, 1, COLUMNS, K, S>(pass, y * pass.stride_y, x * pass.stride_x, output, sums);
    UNROLL for (int o = 0; o < OUTPUTS; o++) {
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            const long at = shape.line(output + o, y * pass.step_y) + (x + c) * pass.step_x;
            pass.out[at] = let_through(pass, at, sums[o][0][c]);
        }
    }
}

template <int OUTPUTS, int K, int S>
void plain_row(const Pass& pass, int output, int y) {
    int x = 0;
    for (; x + 4 <= pass.columns; x += 4) plain_part<OUTPUTS, 4, K, S>(pass, output, y, x);
    for (; x < pass.columns; x++) plain_part<OUTPUTS, 1, K, S>(pass, output, y, x);
}

template <int OUTPUTS, int K, int S>
INLINE void row(const Pass& pass, int output, int y) {
    if (pass.chosen) pooled_row<OUTPUTS, K, S>(pass, output, y);
    else plain_row<OUTPUTS, K, S>(pass, output, y);
}

constexpr int OUTPUTS_AT_ONCE = REGISTERS == 32 ? 6 : 3;  // their sums of four places each stay in registers

template <int K, int S>
void convolve(const Pass& pass) {
    for (int y = 0; y < pass.rows; y++) {
        int output = 0;
        const int outputs = pass.out_shape.channels;
        for (; output + OUTPUTS_AT_ONCE <= outputs; output += OUTPUTS_AT_ONCE)
            row<OUTPUTS_AT_ONCE, K, S>(pass, output, y);
        if (output + 4 <= outputs) row<4, K, S>(pass, output, y), output += 4;
        if (output + 2 <= outputs) row<2, K, S>(pass, output, y), output += 2;
        if (output < outputs) row<1, K, S>(pass, output, y);
    }
}

void convolve(const Pass& pass) {
    const int kernel = pass.kernel_y == pass.kernel_x ? pass.kernel_y : 0;
    const int stride = pass.stride_y == pass.stride_x ? pass.stride_y : 0;
    if (kernel == 3 && stride == 1) return convolve<3, 1>(pass);
    if (kernel == 5 && stride == 1) return convolve<5, 1>(pass);
    if (kernel == 3 && stride == 2) return convolve<3, 2>(pass);
    if (kernel == 1) return convolve<1, 0>(pass);
    convolve<0, 0>(pass);
}

Pass forward_pass(Layer& layer, const Flow& flow, const float* params) {
    bvec* chosen = layer.pooled ? layer.chosen.data() + flow.origin * layer.out.features() : nullptr;
    const bool is_biased = layer.has_bias && !flow.is_derivative;
    return {layer.kernel_y, layer.kernel_x, layer.stride_y, layer.stride_x, flow.in + layer.corner(), layer.in, flow.out,
            layer.out, layer.out.height, layer.out.width, 1, 1, chosen, params + layer.weight, is_biased ? params + layer.bias : nullptr, layer.relu,
            layer.padding_y, layer.padding_y + layer.in.height, flow.is_derivative ? flow.passed : nullptr};
}

// The way back ---------------------------------------------------------------------------------------------------------

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
                const ivec which = __builtin_convertvector(*chosen++, ivec);
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

void slopes_to_input(const Layer& layer, vec* back) {
    Image bare = layer.in;
    bare.border_y = bare.border_x = 0;
    const Image& slope = layer.slope;
    const float* weights = layer.flipped.data();
    if (layer.stride_y > layer.kernel_y || layer.stride_x > layer.kernel_x)  // some pixels are not met at all
        std::fill(back, back + bare.features(), vec{});
    each_phase(layer, [&](int, int, const Phase& y, const Phase& x) {
        const vec* in = layer.slopes.data() + slope.start() + y.start * slope.row() + x.start;
        convolve({y.taps, x.taps, 1, 1, in, slope, back + y.first * bare.row() + x.first, bare, y.count, x.count,
                  layer.stride_y, layer.stride_x, nullptr, weights, nullptr, false, -y.start,
                  layer.before_height - y.start, nullptr});
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
    else weight_gradients<4, 1, 1>(layer, in, to);
}

}  // namespace
