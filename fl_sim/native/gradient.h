// The gradient of a convolution's weights. If the number of outputs is a multiple of the vector length, a group's slopes are
// rearranged so that the output is the innermost index. The inputs are then read number by number, and no sums over lanes are
// needed.
#pragma once

#include "takers.h"

namespace {

// Computes the sums over places of slope * input, [o][channel][y][x], for OUTPUTS channels and a part of the kernel, and passes
// them to ``taker``.
template <int OUTPUTS, int ROWS, int COLUMNS, class Taker>
NOINLINE void weight_gradient(const Layer& layer, const vec* in, const Slope& slope, int output, int channel, int ky,
                              int kx, const Taker& taker) {
    const long in_row = layer.in.row(), plane = slope.image.plane();
    vec sums[OUTPUTS][ROWS][COLUMNS];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int c = 0; c < COLUMNS; c++) sums[o][r][c] = vec{};
    for (int y = 0; y < layer.before_height; y++) {
        const vec* left = slope.line(output, y);
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
    const long per_output = layer.in.channels * layer.taps();
    const long at = output * per_output + channel * layer.taps() + ky * layer.kernel_x + kx;
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            vec of_weight[OUTPUTS];
            UNROLL for (int o = 0; o < OUTPUTS; o++) of_weight[o] = sums[o][r][c];
            taker.take(at + r * layer.kernel_x + c, per_output, of_weight);
        }
}

template <int MOST, int ROWS, int COLUMNS, class Taker>
void weight_gradients(const Layer& layer, const vec* in, const Slope& slope, const Taker& taker) {
    const int outputs = layer.out.channels;
    for (int channel = 0; channel < layer.in.channels; channel++)
        for (int y = 0; y < layer.kernel_y; y += ROWS)
            for (int x = 0; x < layer.kernel_x; x += COLUMNS) {
                int output = 0;
                if (MOST > 3 && outputs % MOST && outputs % 3 == 0)
                    for (; output < outputs; output += 3)
                        weight_gradient<3, ROWS, COLUMNS>(layer, in, slope, output, channel, y, x, taker);
                for (; output + MOST <= outputs; output += MOST)
                    weight_gradient<MOST, ROWS, COLUMNS>(layer, in, slope, output, channel, y, x, taker);
                for (; output < outputs; output++)
                    weight_gradient<1, ROWS, COLUMNS>(layer, in, slope, output, channel, y, x, taker);
            }
}

// Computes the same sums for kernels of one pixel, for OUTPUTS x CHANNELS channels.
template <int OUTPUTS, int CHANNELS>
NOINLINE void pixel_gradient(const Layer& layer, const vec* in, const Slope& given, int output, int channel, float* gradient) {
    const long plane = given.image.plane(), in_plane = layer.in.plane();
    vec sums[OUTPUTS][CHANNELS];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int c = 0; c < CHANNELS; c++) sums[o][c] = vec{};
    for (int y = 0; y < layer.before_height; y++) {
        const vec* left = given.line(output, y);
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
void pixel_gradients(const Layer& layer, const vec* in, const Slope& slope, int channel, float* gradient) {
    constexpr int MOST = REGISTERS / 8;
    int output = 0;
    for (; output + MOST <= layer.out.channels; output += MOST)
        pixel_gradient<MOST, CHANNELS>(layer, in, slope, output, channel, gradient);
    for (; output < layer.out.channels; output++) pixel_gradient<1, CHANNELS>(layer, in, slope, output, channel, gradient);
}

void pixel_gradients(const Layer& layer, const vec* in, const Slope& slope, float* gradient) {
    int channel = 0;
    for (; channel + 4 <= layer.in.channels; channel += 4) pixel_gradients<4>(layer, in, slope, channel, gradient);
    for (; channel < layer.in.channels; channel++) pixel_gradients<1>(layer, in, slope, channel, gradient);
}

constexpr int BLOCKS = REGISTERS / 16;  // the number of vectors of outputs whose sums fit in registers, for a 3 x 3 kernel

inline bool is_by_outputs(const Layer& layer) {
    return layer.kernel_y == 3 && layer.kernel_x == 3 && layer.out.channels % (BLOCKS * LANES) == 0;
}

// Writes the slopes of one row and some outputs as [place][record][output].
NOINLINE void turn_slopes(const Layer& layer, const Slope& slope, int output, int y, vec* to) {
    const long plane = slope.image.plane();
    const vec* from = slope.line(output, y);
    for (int x = 0; x < layer.before_width; x++, from++, to += LANES * BLOCKS)
        for (int b = 0; b < BLOCKS; b++) {
            vec block[LANES];
            UNROLL for (int i = 0; i < LANES; i++) block[i] = from[(b * LANES + i) * plane];
            transpose(block);
            UNROLL for (int i = 0; i < LANES; i++) to[i * BLOCKS + b] = block[i];
        }
}

// Adds the gradient from one row of one channel to ``to``, [tap][output].
NOINLINE void row_gradient(const Layer& layer, const vec* in, const vec* slopes, vec* to) {
    const long row = layer.in.row() * LANES;
    const float *from = reinterpret_cast<const float*>(in), *next = from + layer.in.plane() * LANES;  // next: the next channel, which is prefetched
    vec sums[9][BLOCKS];
    UNROLL for (int i = 0; i < 9 * BLOCKS; i++) sums[i / BLOCKS][i % BLOCKS] = vec{};
    for (int x = 0; x < layer.before_width; x++, from += (layer.stride_x - 1) * LANES) {
        UNROLL for (int r = 0; r < 3; r++) __builtin_prefetch(next + r * row), __builtin_prefetch(next + r * row + LANES);
        next += layer.stride_x * LANES;
        for (int record = 0; record < LANES; record++, from++, slopes += BLOCKS)
            UNROLL for (int tap = 0; tap < 9; tap++) {
                const vec value = spread(from[tap / 3 * row + tap % 3 * LANES]);
                UNROLL for (int b = 0; b < BLOCKS; b++) sums[tap][b] += value * slopes[b];
            }
    }
    UNROLL for (int i = 0; i < 9 * BLOCKS; i++) to[i] += sums[i / BLOCKS][i % BLOCKS];
}

// Adds a group's gradient to ``layer.by_outputs``.
void gradient_by_outputs(Layer& layer, const vec* in, const Slope& slope) {
    layer.turned.resize(layer.before_width * LANES * BLOCKS);
    vec* to = layer.by_outputs.data();
    for (int output = 0; output < layer.out.channels; output += BLOCKS * LANES, to += layer.in.channels * 9 * BLOCKS)
        for (int y = 0; y < layer.before_height; y++) {
            turn_slopes(layer, slope, output, y, layer.turned.data());
            for (int channel = 0; channel < layer.in.channels; channel++)
                row_gradient(layer, in + channel * layer.in.plane() + y * layer.stride_y * layer.in.row(), layer.turned.data(),
                             to + channel * 9 * BLOCKS);
        }
}

template <class Taker>
void weight_gradients(const Layer& layer, const vec* in, const Slope& slope, const Taker& taker) {
    constexpr bool HAS_MANY = REGISTERS == 32;
    const int side = layer.kernel_y == layer.kernel_x ? layer.kernel_y : 0;
    if (side == 3) weight_gradients<HAS_MANY ? 2 : 3, HAS_MANY ? 3 : 1, 3>(layer, in, slope, taker);
    else if (side == 5) weight_gradients<HAS_MANY ? 4 : 2, 1, 5>(layer, in, slope, taker);
    else if (side == 7) weight_gradients<HAS_MANY ? 3 : 1, 1, 7>(layer, in, slope, taker);
    else weight_gradients<4, 1, 1>(layer, in, slope, taker);
}

// Adds a group's gradient to ``gradients``, or keeps it in ``layer.by_outputs`` until ``finish_gradient``.
void add_gradient(Layer& layer, const vec* in, const Slope& slope, float* gradients) {
    in += layer.corner();
    if (is_by_outputs(layer)) return gradient_by_outputs(layer, in, slope);
    float* to = gradients + layer.weight;
    if (layer.taps() == 1) pixel_gradients(layer, in, slope, to);
    else weight_gradients(layer, in, slope, OverRecords{to});
}

// Writes the gradients of each record of a group by the layer's weights and biases to ``gradients``, [parameter][lane].
inline void write_gradients(const Layer& layer, const vec* in, const Slope& slope, vec* gradients) {
    weight_gradients(layer, in + layer.corner(), slope, ByOneRecord{gradients + layer.weight});
    for (long channel = 0; channel < layer.num_biases(); channel++) {
        vec total{};
        for (int y = 0; y < layer.before_height; y++) {
            const vec* slopes = slope.line(int(channel), y);
            for (int x = 0; x < layer.before_width; x++) total += slopes[x];
        }
        gradients[layer.bias + channel] = total;
    }
}

// Before a minibatch: clears ``layer.by_outputs``.
inline void start_gradient(Layer& layer) {
    if (is_by_outputs(layer)) layer.by_outputs.assign(layer.num_weights() / LANES, vec{});
}

// After a minibatch: adds ``layer.by_outputs`` to the gradient in the order of the parameters.
inline void finish_gradient(const Layer& layer, float* gradient) {
    if (!is_by_outputs(layer)) return;
    constexpr int OUTPUTS = BLOCKS * LANES;
    const vec* from = layer.by_outputs.data();
    const long in_kernel = layer.in.channels * layer.taps();
    for (int output = 0; output < layer.out.channels; output += OUTPUTS, gradient += OUTPUTS * in_kernel)
        for (long at = 0; at < in_kernel; at++, from += BLOCKS)
            for (int i = 0; i < OUTPUTS; i++) gradient[i * in_kernel + at] += from[i / LANES][i % LANES];
}

}  // namespace
