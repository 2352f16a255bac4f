// 3 x 3 convolutions of stride 1 by Winograd's F(2 x 2, 3 x 3) (Lavin and Gray 2016, section 4.1): 16 multiplications for a
// tile of 2 x 2 outputs instead of 36.
//
// With V = B' d B of the tile's 4 x 4 window, U = G g G' of the kernel, and at each of the 16 positions M = sum over
// channels of U * V: outputs = A' M A. The way back is the transpose of these steps: Y = A dy A', dV = sum over outputs of
// U * Y, window += B dV B'; dU = sum over tiles and records of Y * V, dg = G' dU G. At every position the sums are matrix
// products, and linear layers' loops do them, with tiles in place of groups.
#pragma once

#include "convolution.h"
#include "linear.h"

namespace {

constexpr int POSITIONS = 16;

struct Winograd {
    Floats weights, gradient;  // of a layer: [position][output][channel]; LANES longer
};

struct Tiles {  // some tiles of a group, the same memory for all layers
    std::vector<vec> in, out;  // [position][tile][channel]
    std::vector<vec> rows;     // of one position, see to_rows
};

// How many tiles go together: their numbers fit the L2 cache.
INLINE int tiles_at_once(const Layer& layer) { return std::max(4, 4096 / LANES / std::max(layer.in.channels, layer.out.channels)); }

// From one position to the next: no power of two, or all positions would meet in a few lines of the L1 cache.
INLINE long apart(int count, int channels) { return long(count) * channels + 1; }

// With few channels the transforms cost more than they save.
inline bool is_winograd(const Layer& layer) {
    if (layer.kind != CONV || layer.kernel_y != 3 || layer.kernel_x != 3) return false;
    if (layer.stride_y != 1 || layer.stride_x != 1 || std::min(layer.in.channels, layer.out.channels) < 8) return false;
    return layer.pooled || (layer.before_height % 2 == 0 && layer.before_width % 2 == 0);
}

inline void reserve(Winograd& winograd, Tiles& tiles, const Layer& layer) {
    const long inputs = layer.in.channels, outputs = layer.out.channels;
    const int most = tiles_at_once(layer);
    winograd.weights.resize(POSITIONS * inputs * outputs), winograd.gradient.resize(POSITIONS * inputs * outputs + LANES);
    tiles.in.resize(std::max<long>(tiles.in.size(), POSITIONS * apart(most, inputs)));
    tiles.out.resize(std::max<long>(tiles.out.size(), POSITIONS * apart(most, outputs)));
    tiles.rows.resize(std::max<long>(tiles.rows.size(), most * (inputs + LANES)));
}

struct ToInput {  // B'
    template <class T> static void line(const T (&x)[4], T (&y)[4]) {
        y[0] = x[0] - x[2], y[1] = x[1] + x[2], y[2] = x[2] - x[1], y[3] = x[1] - x[3];
    }
};
struct FromInput {  // B
    template <class T> static void line(const T (&x)[4], T (&y)[4]) {
        y[0] = x[0], y[1] = x[1] - x[2] + x[3], y[2] = x[1] + x[2] - x[0], y[3] = -x[3];
    }
};
struct ToOutput {  // A'
    template <class T> static void line(const T (&x)[4], T (&y)[2]) {
        y[0] = x[0] + x[1] + x[2], y[1] = x[1] - x[2] - x[3];
    }
};
struct FromOutput {  // A
    template <class T> static void line(const T (&x)[2], T (&y)[4]) {
        y[0] = x[0], y[1] = x[0] + x[1], y[2] = x[0] - x[1], y[3] = -x[1];
    }
};
struct ToKernel {  // G
    template <class T> static void line(const T (&x)[3], T (&y)[4]) {
        y[0] = x[0], y[1] = (x[0] + x[2] + x[1]) * 0.5f, y[2] = (x[0] + x[2] - x[1]) * 0.5f, y[3] = x[2];
    }
};
struct FromKernel {  // G'
    template <class T> static void line(const T (&x)[4], T (&y)[3]) {
        y[0] = x[0] + (x[1] + x[2]) * 0.5f, y[1] = (x[1] - x[2]) * 0.5f, y[2] = (x[1] + x[2]) * 0.5f + x[3];
    }
};

// Applies a transform to the columns and then to the rows of a square.
template <class Transform, class T, int FROM, int TO>
INLINE void transform(const T (&in)[FROM][FROM], T (&out)[TO][TO]) {
    T middle[FROM][TO];
    UNROLL for (int x = 0; x < FROM; x++) {
        T column[FROM];
        UNROLL for (int y = 0; y < FROM; y++) column[y] = in[y][x];
        Transform::line(column, middle[x]);
    }
    UNROLL for (int y = 0; y < TO; y++) {
        T row[FROM];
        UNROLL for (int x = 0; x < FROM; x++) row[x] = middle[x][y];
        Transform::line(row, out[y]);
    }
}

// Before a minibatch: transforms the weights, and clears their gradient.
NOINLINE void start_winograd(Winograd& winograd, const Layer& layer, const float* weights) {
    winograd.gradient.clear_values();
    const long pairs = long(layer.out.channels) * layer.in.channels;
    for (long pair = 0; pair < pairs; pair++, weights += 9) {
        float kernel[3][3], positions[4][4];
        for (int tap = 0; tap < 9; tap++) kernel[tap / 3][tap % 3] = weights[tap];
        transform<ToKernel>(kernel, positions);
        for (int at = 0; at < POSITIONS; at++) winograd.weights.data()[at * pairs + pair] = positions[at / 4][at % 4];
    }
}

// After a minibatch: transforms the weights' gradient back.
NOINLINE void finish_winograd(const Winograd& winograd, const Layer& layer, float* gradient) {
    const long pairs = long(layer.out.channels) * layer.in.channels;
    for (long pair = 0; pair < pairs; pair++, gradient += 9) {
        float kernel[3][3], positions[4][4];
        for (int at = 0; at < POSITIONS; at++) positions[at / 4][at % 4] = winograd.gradient.data()[at * pairs + pair];
        transform<FromKernel>(positions, kernel);
        for (int tap = 0; tap < 9; tap++) gradient[tap] = kernel[tap / 3][tap % 3];
    }
}

INLINE int tiles_across(const Layer& layer) { return layer.pooled ? layer.out.width : layer.before_width / 2; }

// Calls ``each(first, count)`` for all the tiles of a plane, some at a time.
template <class Each>
INLINE void each_tiles(const Layer& layer, const Each& each) {
    const int all = tiles_across(layer) * (layer.pooled ? layer.out.height : layer.before_height / 2), most = tiles_at_once(layer);
    for (int first = 0; first < all; first += most) each(first, std::min(most, all - first));
}

// ``in``: where the first window starts.
NOINLINE void transform_windows(const Layer& layer, const vec* in, int first, int count, vec* to) {
    const int across = tiles_across(layer), channels = layer.in.channels;
    for (int tile = 0; tile < count; tile++) {
        const vec* corner = in + 2 * ((first + tile) / across) * layer.in.row() + 2 * ((first + tile) % across);
        for (int channel = 0; channel < channels; channel++) {
            vec window[4][4], positions[4][4];
            UNROLL for (int at = 0; at < POSITIONS; at++)
                window[at / 4][at % 4] = corner[channel * layer.in.plane() + at / 4 * layer.in.row() + at % 4];
            transform<ToInput>(window, positions);
            UNROLL for (int at = 0; at < POSITIONS; at++)
                to[at * apart(count, channels) + long(tile) * channels + channel] = positions[at / 4][at % 4];
        }
    }
}

NOINLINE void write_outputs(const Layer& layer, const Pass& pass, int first, int count, const vec* from) {
    const int across = tiles_across(layer), outputs = layer.out.channels;
    for (int tile = 0; tile < count; tile++) {
        const int y = (first + tile) / across, x = (first + tile) % across;
        for (int output = 0; output < outputs; output++) {
            vec positions[4][4], values[2][2];
            UNROLL for (int at = 0; at < POSITIONS; at++)
                positions[at / 4][at % 4] = from[at * apart(count, outputs) + long(tile) * outputs + output];
            transform<ToOutput>(positions, values);
            const float bias = pass.bias ? pass.bias[output] : 0.0f;
            UNROLL for (int at = 0; at < 4; at++) values[at / 2][at % 2] += bias;
            if (pass.chosen) {
                write_pooled(pass, output, y, x, values);
                continue;
            }
            UNROLL for (int at = 0; at < 4; at++) {
                const long place = pass.out_shape.line(output, 2 * y + at / 2) + 2 * x + at % 2;
                pass.out[place] = let_through(pass, place, values[at / 2][at % 2]);
            }
        }
    }
}

void winograd_forward(const Winograd& winograd, Tiles& tiles, Layer& layer, const Flow& flow, const float* params) {
    const Pass pass = forward_pass(layer, flow, params);
    const long inputs = layer.in.channels, outputs = layer.out.channels;
    each_tiles(layer, [&](int first, int count) {
        transform_windows(layer, pass.in, first, count, tiles.in.data());
        for (long at = 0; at < POSITIONS; at++)
            multiply({tiles.in.data() + at * apart(count, inputs), inputs, tiles.out.data() + at * apart(count, outputs),
                      outputs, winograd.weights.data() + at * inputs * outputs, inputs, 1, nullptr, false}, count);
        write_outputs(layer, pass, first, count, tiles.out.data());
    });
}

NOINLINE void transform_slopes(const Layer& layer, int first, int count, vec* to) {
    const int across = tiles_across(layer), outputs = layer.out.channels;
    for (int tile = 0; tile < count; tile++) {
        const int y = 2 * ((first + tile) / across), x = 2 * ((first + tile) % across);
        for (int output = 0; output < outputs; output++) {
            vec values[2][2], positions[4][4];
            UNROLL for (int at = 0; at < 4; at++)
                values[at / 2][at % 2] = layer.slopes[layer.slope.line(output, y + at / 2) + x + at % 2];
            transform<FromOutput>(values, positions);
            UNROLL for (int at = 0; at < POSITIONS; at++)
                to[at * apart(count, outputs) + long(tile) * outputs + output] = positions[at / 4][at % 4];
        }
    }
}

NOINLINE void add_windows(const Layer& layer, int first, int count, const vec* from, vec* back) {
    const int across = tiles_across(layer), channels = layer.in.channels, height = layer.in.height, width = layer.in.width;
    for (int tile = 0; tile < count; tile++) {
        const int y = 2 * ((first + tile) / across) - layer.padding_y, x = 2 * ((first + tile) % across) - layer.padding_x;
        const bool is_inside = y >= 0 && x >= 0 && y + 4 <= height && x + 4 <= width;
        for (int channel = 0; channel < channels; channel++) {
            vec positions[4][4], window[4][4];
            UNROLL for (int at = 0; at < POSITIONS; at++)
                positions[at / 4][at % 4] = from[at * apart(count, channels) + long(tile) * channels + channel];
            transform<FromInput>(positions, window);
            vec* to = back + (long(channel) * height + y) * width + x;
            UNROLL for (int r = 0; r < 4; r++)
                UNROLL for (int c = 0; c < 4; c++)
                    if (is_inside || (y + r >= 0 && y + r < height && x + c >= 0 && x + c < width))
                        to[r * width + c] += window[r][c];
        }
    }
}

// As conv_backward; the weights' gradient stays in ``winograd`` until the minibatch is through.
void winograd_backward(Winograd& winograd, Tiles& tiles, Layer& layer, const Flow& flow, const vec* gradient, vec* back,
                       float* gradients) {
    before_pooling(layer, flow, gradient, layer.has_bias && !flow.is_derivative ? gradients + layer.bias : nullptr);
    if (back) std::fill(back, back + layer.in.features(), vec{});
    const long inputs = layer.in.channels, outputs = layer.out.channels;
    each_tiles(layer, [&](int first, int count) {
        {
            const Timed timed(TO_WEIGHTS);
            transform_windows(layer, flow.in + layer.corner(), first, count, tiles.in.data());
        }
        transform_slopes(layer, first, count, tiles.out.data());
        for (long at = 0; at < POSITIONS; at++) {
            vec* in = tiles.in.data() + at * apart(count, inputs);
            const vec* slopes = tiles.out.data() + at * apart(count, outputs);
            {
                const Timed timed(TO_WEIGHTS);
                to_rows(in, inputs, count, tiles.rows.data());
                add_products(winograd.gradient.data() + at * inputs * outputs,
                             {0, inputs, outputs, reinterpret_cast<const float*>(slopes), tiles.rows.data(),
                              long(count) * LANES, count * LANES});
            }
            if (back)  // in place of the windows
                multiply({slopes, outputs, in, inputs, winograd.weights.data() + at * inputs * outputs, 1, inputs, nullptr,
                          false}, count);
        }
        if (back) add_windows(layer, first, count, tiles.in.data(), back);
    });
}

}  // namespace
