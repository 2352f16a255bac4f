// The gradient of a convolution's weights, vector by vector.
#pragma once

#include "layer.h"

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

// Adds a group's gradient to ``gradients``, by the slopes in ``layer.slopes``.
void add_gradient(const Layer& layer, const vec* in, float* gradients) {
    in += layer.corner();
    const bool is_square = layer.kernel_y == layer.kernel_x;
    float* to = gradients + layer.weight;
    constexpr bool HAS_MANY = REGISTERS == 32;
    if (is_square && layer.kernel_y == 3) weight_gradients<HAS_MANY ? 2 : 3, HAS_MANY ? 3 : 1, 3>(layer, in, to);
    else if (is_square && layer.kernel_y == 5) weight_gradients<HAS_MANY ? 4 : 2, 1, 5>(layer, in, to);
    else if (is_square && layer.kernel_y == 7) weight_gradients<HAS_MANY ? 3 : 1, 1, 7>(layer, in, to);
    else if (is_square && layer.kernel_y == 1) pixel_gradients(layer, in, to);
    else weight_gradients<4, 1, 1>(layer, in, to);
}

// Before and after a minibatch there is nothing to do.
inline void start_gradient(const Layer&) {}
inline void finish_gradient(const Layer&, const float*) {}

}  // namespace
