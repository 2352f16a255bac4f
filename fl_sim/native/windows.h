// Convolutions vector by vector: the sums of some channels at some places stay in registers.
#pragma once

#include "pass.h"

namespace {

// Computes sums[o][y][x] += weights * window, for OUTPUTS channels at ROWS x COLUMNS places. K, S: side and stride of the kernel;
// 0: any.
template <int OUTPUTS, int ROWS, int COLUMNS, int K, int S>
INLINE void add_window(const Pass& pass, int row_at, int column_at, int output, vec (&sums)[OUTPUTS][ROWS][COLUMNS]) {
    const int kernel_y = K ? K : pass.kernel_y, kernel_x = K ? K : pass.kernel_x;
    const int stride_y = S ? S : pass.stride_y, stride_x = S ? S : pass.stride_x;
    const long row = pass.in_shape.row(), plane = pass.in_shape.plane(), per_output = pass.per_output();
    const int begin = std::max(0, pass.first_row - row_at - (ROWS - 1) * stride_y);
    const int end = std::min(kernel_y, pass.end_row - row_at);
    const Factors::Values* in = pass.in + pass.corner + row_at * row + column_at;
    const auto add_row = [&](const Factors::Values* from, const Factors::Weight* weights) INLINED {
        _Pragma("GCC unroll 7") for (int x = 0; x < kernel_x; x++, weights++) {
            Factors::Values values[ROWS][COLUMNS];
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int c = 0; c < COLUMNS; c++) values[r][c] = from[r * stride_y * row + c * stride_x + x];
            UNROLL for (int o = 0; o < OUTPUTS; o++) {
                const Factors::Values weight = Factors::spread(weights[o * per_output]);
                UNROLL for (int r = 0; r < ROWS; r++)
                    UNROLL for (int c = 0; c < COLUMNS; c++) Factors::add(sums[o][r][c], weight, values[r][c]);
            }
        }
    };
    for (int channel = 0; channel < pass.planes(); channel++, in += plane) {
        const Factors::Weight* weights = pass.weights + output * per_output + (channel * kernel_y + begin) * kernel_x;
        for (int y = begin; y < end; y++, weights += kernel_x) add_row(in + y * row, weights);
    }
    if (!pass.is_odd()) return;
    const Factors::Weight* weights = pass.weights + output * per_output + (pass.planes() * kernel_y + begin / 2) * kernel_x;
    for (int y = begin / 2 * 2; y < end; y += 2, weights += kernel_x) add_row(in + y * row, weights);
}

// Computes one pooled output of OUTPUTS channels.
template <int OUTPUTS, int K, int S>
INLINE void pooled_part(const Pass& pass, int output, int y, int x) {
    vec sums[OUTPUTS][2][2];
    UNROLL for (int o = 0; o < OUTPUTS; o++) {
        const vec start = spread(pass.bias ? pass.bias[output + o] : 0.0f);
        sums[o][0][0] = sums[o][0][1] = sums[o][1][0] = sums[o][1][1] = start;
    }
    add_window<OUTPUTS, 2, 2, K, S>(pass, 2 * y * pass.stride_y, 2 * x * pass.stride_x, output, sums);
    UNROLL for (int o = 0; o < OUTPUTS; o++) write_pooled(pass, output + o, y, x, sums[o]);
}

// Computes COLUMNS outputs in a row of OUTPUTS channels.
template <int OUTPUTS, int COLUMNS, int K, int S>
INLINE void plain_part(const Pass& shared, int output, int y, int x) {
    const Pass pass = shared;  // a local copy, so that the compiler knows that no store changes it
    const Image& shape = pass.out_shape;
    vec sums[OUTPUTS][1][COLUMNS];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int c = 0; c < COLUMNS; c++) sums[o][0][c] = spread(pass.bias ? pass.bias[output + o] : 0.0f);
    add_window<OUTPUTS, 1, COLUMNS, K, S>(pass, y * pass.stride_y, x * pass.stride_x, output, sums);
    UNROLL for (int o = 0; o < OUTPUTS; o++) {
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            const long at = shape.line(output + o, y * pass.step_y) + (x + c) * pass.step_x;
            write_plain(pass, at, sums[o][0][c]);
        }
    }
}

template <int OUTPUTS, int COLUMNS, int K, int S>
NOINLINE void part(const Pass& pass, int output, int y, int x) {
    if constexpr (COLUMNS == 0) pooled_part<OUTPUTS, K, S>(pass, output, y, x);
    else plain_part<OUTPUTS, COLUMNS, K, S>(pass, output, y, x);
}

constexpr int OUTPUTS_AT_ONCE = REGISTERS == 32 ? 6 : 3;  // channels whose sums for four places fit in registers

// Computes all channels at some places (COLUMNS; 0: one pooled place), a few channels at a time. Their common inputs stay in a
// fast cache.
template <int COLUMNS, int K, int S>
INLINE void place(const Pass& pass, int y, int x) {
    int output = 0;
    const int outputs = pass.out_shape.channels;
    for (; output + OUTPUTS_AT_ONCE <= outputs; output += OUTPUTS_AT_ONCE)
        part<OUTPUTS_AT_ONCE, COLUMNS, K, S>(pass, output, y, x);
    if (output + 4 <= outputs) part<4, COLUMNS, K, S>(pass, output, y, x), output += 4;
    if (output + 2 <= outputs) part<2, COLUMNS, K, S>(pass, output, y, x), output += 2;
    if (output < outputs) part<1, COLUMNS, K, S>(pass, output, y, x);
}

template <int K, int S>
void convolve(const Pass& pass) {
    for (int y = 0; y < pass.rows; y++) {
        int x = 0;
        for (; pass.chosen && x < pass.columns; x++) place<0, K, S>(pass, y, x);
        for (; x + 4 <= pass.columns; x += 4) place<4, K, S>(pass, y, x);
        for (; x < pass.columns; x++) place<1, K, S>(pass, y, x);
    }
}

void convolve(const Pass& pass) {
    const int kernel = pass.kernel_y == pass.kernel_x ? pass.kernel_y : 0;
    const int stride = pass.stride_y == pass.stride_x ? pass.stride_y : 0;
    if (kernel == 3 && stride == 1) return convolve<3, 1>(pass);
    if (kernel == 5 && stride == 1) return convolve<5, 1>(pass);
    if (kernel == 3 && stride == 2) return convolve<3, 2>(pass);
    if (kernel == 1) return convolve<1, 0>(pass);
    if (kernel == 7) return convolve<7, 0>(pass);
    convolve<0, 0>(pass);
}

// Before a minibatch: rearranges the kernels for the forward pass.
inline void start_forward(Layer& layer, const float* params) {
    layer.kernels = Factors::kernels(params + layer.weight, layer.out.channels, layer.in.channels, layer.kernel_y,
                                     layer.kernel_x, layer.kernel_room);
}

// Returns the planes as the factors that a pass reads, in the memory of ``layer``.
inline const Read* read_of(const vec* planes, const Image& image, Layer& layer) {
    return Factors::planes(planes, image.channels, image.plane(), image.row(), layer.plane_room);
}

inline void convolve(const Pass& pass, const Layer&) { convolve(pass); }

}  // namespace
