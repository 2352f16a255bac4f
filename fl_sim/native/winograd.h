// 3 x 3 convolutions of stride 1 by Winograd's F(4 x 4, 3 x 3): 36 multiplications for a tile of 4 x 4 outputs instead of
// 144. See tiles.h.
//
// Forward: V = B' d B for the tile's 6 x 6 window d, U = G g G' for the kernel g. At each of the 36 positions M = sum over
// channels of U * V. The outputs are A' M A. The backward pass is the transpose of these steps: Y = A dy A', dV = sum over
// outputs of U * Y, window += B dV B'; dU = sum over tiles and records of Y * V, dg = G' dU G. At every position the sums are
// matrix products. A tile that extends beyond the plane reads zeros there, and its outputs there are dropped.
#pragma once

#include "convolution_back.h"
#include "linear.h"
#include "tiles.h"

namespace {

struct Winograd {
    Floats weights, gradient;  // transformed, of one layer: [position][output][channel]; gradient: with LANES spare numbers
};

struct Tiles {  // the memory for some tiles of a group, shared by all layers
    std::vector<vec> in, out;  // [tile][position][channel]
    std::vector<vec> rows;     // the inputs at one position, see to_rows
};

// The sizes of the part of a convolution's output that is needed: pooling drops an odd last row or column.
INLINE int rows_asked(const Layer& layer) { return layer.pooled ? 2 * layer.out.height : layer.before_height; }
INLINE int columns_asked(const Layer& layer) { return layer.pooled ? 2 * layer.out.width : layer.before_width; }
INLINE int tiles_down(const Layer& layer) { return (rows_asked(layer) + TILE - 1) / TILE; }
INLINE int tiles_across(const Layer& layer) { return (columns_asked(layer) + TILE - 1) / TILE; }

constexpr long TILE_NUMBERS = 4096;  // numbers at one position of some tiles, inputs and outputs together

// Returns the number of tiles that are processed together; their numbers fit in the L2 cache.
INLINE int tiles_at_once(const Layer& layer) {
    return std::max(4, int(TILE_NUMBERS / LANES / (layer.in.channels + layer.out.channels)));
}

// Returns true if Winograd's algorithm applies and is faster. With few channels the transforms cost more than they save. The
// same holds if large parts of the tiles extend beyond the plane.
inline bool is_winograd(const Layer& layer) {
    if (HAS_AMX) return false;  // with AMX the products do not take most of the time
    if (layer.kind != CONV || layer.kernel_y != 3 || layer.kernel_x != 3) return false;
    if (layer.stride_y != 1 || layer.stride_x != 1 || std::min(layer.in.channels, layer.out.channels) < 8) return false;
    return 6L * tiles_down(layer) * tiles_across(layer) <= long(rows_asked(layer)) * columns_asked(layer);
}

inline void reserve(Winograd& winograd, Tiles& tiles, const Layer& layer) {
    const long inputs = layer.in.channels, outputs = layer.out.channels;
    const int most = std::min(tiles_at_once(layer), tiles_down(layer) * tiles_across(layer));
    winograd.weights.resize(POSITIONS * inputs * outputs), winograd.gradient.resize(POSITIONS * inputs * outputs + LANES);
    tiles.in.resize(std::max<long>(tiles.in.size(), most * tile_apart(inputs)));
    tiles.out.resize(std::max<long>(tiles.out.size(), most * tile_apart(outputs)));
    tiles.rows.resize(std::max<long>(tiles.rows.size(), most * (inputs + LANES)));
}

// Calls ``each(first, zero)`` for LANES kernels, [output][channel], at a time, and separately for each of the last kernels, if
// fewer than LANES remain.
template <class Each>
INLINE void each_kernels(const Layer& layer, const Each& each) {
    const long pairs = long(layer.out.channels) * layer.in.channels;
    long pair = 0;
    for (; pair + LANES <= pairs; pair += LANES) each(pair, vec{});
    for (; pair < pairs; pair++) each(pair, 0.0f);
}

INLINE void take(const float* from, long apart, float& to) { to = *from, void(apart); }
INLINE void take(const float* from, long apart, vec& to) {
    for (int lane = 0; lane < LANES; lane++) to[lane] = from[lane * apart];
}
INLINE void give(float from, float* to, long apart) { *to = from, void(apart); }
INLINE void give(const vec& from, float* to, long apart) {
    for (int lane = 0; lane < LANES; lane++) to[lane * apart] = from[lane];
}

// Before a minibatch: transforms the weights and clears their gradient.
NOINLINE void start_winograd(Winograd& winograd, const Layer& layer, const float* weights) {
    winograd.gradient.clear_values();
    const long pairs = long(layer.out.channels) * layer.in.channels;
    each_kernels(layer, [&](long pair, auto zero) {
        decltype(zero) kernel[3][3], positions[WINDOW][WINDOW];
        for (int tap = 0; tap < 9; tap++) take(weights + pair * 9 + tap, 9, kernel[tap / 3][tap % 3]);
        transform<ToKernel>(kernel, positions);
        for (int at = 0; at < POSITIONS; at++)
            give(positions[at / WINDOW][at % WINDOW], winograd.weights.data() + at * pairs + pair, 1);
    });
}

// After a minibatch: transforms the weights' gradient back.
NOINLINE void finish_winograd(const Winograd& winograd, const Layer& layer, float* gradient) {
    const long pairs = long(layer.out.channels) * layer.in.channels;
    each_kernels(layer, [&](long pair, auto zero) {
        decltype(zero) kernel[3][3], positions[WINDOW][WINDOW];
        for (int at = 0; at < POSITIONS; at++)
            take(winograd.gradient.data() + at * pairs + pair, 1, positions[at / WINDOW][at % WINDOW]);
        transform<FromKernel>(positions, kernel);
        for (int tap = 0; tap < 9; tap++) give(kernel[tap / 3][tap % 3], gradient + pair * 9 + tap, 9);
    });
}

// Calls ``each(first, count)`` for all tiles of a plane, some at a time.
template <class Each>
INLINE void each_tiles(const Layer& layer, const Each& each) {
    const int all = tiles_down(layer) * tiles_across(layer), most = tiles_at_once(layer);
    for (int first = 0; first < all; first += most) each(first, std::min(most, all - first));
}

// Reads SIZE x SIZE numbers. Only ``rows`` x ``columns`` of these numbers exist (none if ``rows`` or ``columns`` is below 1); the
// others are zeros.
template <int SIZE>
INLINE void read_square(const vec* from, long row, int rows, int columns, vec (&to)[SIZE][SIZE]) {
    if (rows >= SIZE && columns >= SIZE) {
        UNROLL for (int y = 0; y < SIZE; y++)
            UNROLL for (int x = 0; x < SIZE; x++) to[y][x] = from[y * row + x];
        return;
    }
    for (int y = 0; y < SIZE; y++)
        for (int x = 0; x < SIZE; x++) to[y][x] = y < rows && x < columns ? from[y * row + x] : vec{};
}

// Prefetches a tile of numbers for a later access. The processor's own prefetching does not help, because the rows are too short.
INLINE void prefetch_square(const vec* from, long row) {
    UNROLL for (int y = 0; y < TILE; y++)
        UNROLL for (int x = 0; x < TILE; x++) __builtin_prefetch(from + y * row + x);
}

template <int SIZE>
INLINE void write_positions(const vec (&from)[SIZE][SIZE], vec* to, long apart) {
    UNROLL for (int at = 0; at < POSITIONS; at++) to[at * apart] = from[at / WINDOW][at % WINDOW];
}

INLINE void read_positions(const vec* from, long apart, vec (&to)[WINDOW][WINDOW]) {
    UNROLL for (int at = 0; at < POSITIONS; at++) to[at / WINDOW][at % WINDOW] = from[at * apart];
}

// Transforms the windows of some tiles. ``in``: the start of the first window.
NOINLINE void transform_windows(const Layer& layer, const vec* in, int first, int count, vec* to) {
    const long channels = layer.in.channels, across = tiles_across(layer);
    for (long channel = 0; channel < channels; channel++, in += layer.in.plane(), to++)
        for (int tile = 0; tile < count; tile++) {
            const int y = TILE * ((first + tile) / across), x = TILE * ((first + tile) % across);
            vec window[WINDOW][WINDOW], positions[WINDOW][WINDOW];
            prefetch_square(in + layer.in.plane() + (y + 2) * layer.in.row() + x + 2, layer.in.row());
            read_square(in + y * layer.in.row() + x, layer.in.row(), layer.before_height + 2 - y, layer.before_width + 2 - x,
                        window);
            transform<ToInput>(window, positions);
            write_positions(positions, to + tile * tile_apart(channels), position_apart(channels));
        }
}

NOINLINE void write_outputs(const Layer& layer, const Pass& pass, int first, int count, const vec* from) {
    const long outputs = layer.out.channels;
    for (int tile = 0; tile < count; tile++, from += tile_apart(outputs)) {
        const int y = TILE * ((first + tile) / tiles_across(layer)), x = TILE * ((first + tile) % tiles_across(layer));
        const int rows = std::min(TILE, rows_asked(layer) - y), columns = std::min(TILE, columns_asked(layer) - x);
        for (long output = 0; output < outputs; output++) {
            vec positions[WINDOW][WINDOW], values[TILE][TILE];
            read_positions(from + output, position_apart(outputs), positions);
            transform<ToOutput>(positions, values);
            const float bias = pass.bias ? pass.bias[output] : 0.0f;
            if (!pass.chosen) prefetch_square(pass.out + pass.out_shape.line(output, y) + x + TILE, pass.out_shape.row());
            UNROLL for (int at = 0; at < TILE * TILE; at++) values[at / TILE][at % TILE] += bias;
            if (pass.chosen) {
                for (int down = 0; down < rows; down += 2)
                    for (int right = 0; right < columns; right += 2) {
                        const vec pooled[2][2] = {{values[down][right], values[down][right + 1]},
                                                  {values[down + 1][right], values[down + 1][right + 1]}};
                        write_pooled(pass, output, (y + down) / 2, (x + right) / 2, pooled);
                    }
                continue;
            }
            for (int down = 0; down < rows; down++)
                for (int right = 0; right < columns; right++) {
                    const long place = pass.out_shape.line(output, y + down) + x + right;
                    pass.out[place] = let_through(pass, place, values[down][right]);
                }
        }
    }
}

// Computes, at every position, to[tile][o] = sum over i of weights * from[tile][i].
INLINE void multiply_positions(const Winograd& winograd, const vec* from, long inputs, vec* to, long outputs, long along,
                               long across, int count) {
    for (long at = 0; at < POSITIONS; at++)
        multiply_tiles({from + at * position_apart(inputs), inputs, tile_apart(inputs), to + at * position_apart(outputs),
                        outputs, tile_apart(outputs), winograd.weights.data() + at * inputs * outputs, along, across}, count);
}

void winograd_forward(const Winograd& winograd, Tiles& tiles, Layer& layer, const Flow& flow, const float* params) {
    const Pass pass = forward_pass(layer, flow, params, nullptr, nullptr);
    const long inputs = layer.in.channels, outputs = layer.out.channels;
    each_tiles(layer, [&](int first, int count) {
        transform_windows(layer, flow.in + layer.corner(), first, count, tiles.in.data());
        multiply_positions(winograd, tiles.in.data(), inputs, tiles.out.data(), outputs, inputs, 1, count);
        write_outputs(layer, pass, first, count, tiles.out.data());
    });
}

NOINLINE void transform_slopes(const Layer& layer, const Slope& slope, int first, int count, vec* to) {
    const long outputs = layer.out.channels;
    for (int tile = 0; tile < count; tile++, to += tile_apart(outputs)) {
        const int y = TILE * ((first + tile) / tiles_across(layer)), x = TILE * ((first + tile) % tiles_across(layer));
        for (long output = 0; output < outputs; output++) {
            vec values[TILE][TILE], positions[WINDOW][WINDOW];
            prefetch_square(slope.line(int(output), y) + x + TILE, slope.image.row());
            read_square(slope.line(int(output), y) + x, slope.image.row(), layer.before_height - y, layer.before_width - x, values);
            transform<FromOutput>(values, positions);
            write_positions(positions, to + output, position_apart(outputs));
        }
    }
}

NOINLINE void add_windows(const Layer& layer, int first, int count, const vec* from, vec* back) {
    const int height = layer.in.height, width = layer.in.width;
    const long channels = layer.in.channels;
    for (int tile = 0; tile < count; tile++, from += tile_apart(channels)) {
        const int y = TILE * ((first + tile) / tiles_across(layer)) - layer.padding_y;
        const int x = TILE * ((first + tile) % tiles_across(layer)) - layer.padding_x;
        const bool is_inside = y >= 0 && x >= 0 && y + WINDOW <= height && x + WINDOW <= width;
        for (long channel = 0; channel < channels; channel++) {
            vec positions[WINDOW][WINDOW], window[WINDOW][WINDOW];
            read_positions(from + channel, position_apart(channels), positions);
            transform<FromInput>(positions, window);
            vec* to = back + (channel * height + y) * width + x;
            prefetch_square(to + 2 * width + TILE + 2, width);
            UNROLL for (int r = 0; r < WINDOW; r++)
                UNROLL for (int c = 0; c < WINDOW; c++)
                    if (is_inside || (y + r >= 0 && y + r < height && x + c >= 0 && x + c < width))
                        to[r * width + c] += window[r][c];
        }
    }
}

// Adds the weights' gradient at every position. The inputs are transposed where that costs less than sums over lanes.
INLINE void add_gradient(Winograd& winograd, Tiles& tiles, long inputs, long outputs, int count) {
    constexpr int ROWS = REGISTERS / 8;
    const bool is_by_lanes = inputs % 4 == 0 && outputs % ROWS == 0 && 2 * count >= outputs;
    for (long at = 0; at < POSITIONS; at++) {
        const vec* in = tiles.in.data() + at * position_apart(inputs);
        const vec* slopes = tiles.out.data() + at * position_apart(outputs);
        float* gradient = winograd.gradient.data() + at * inputs * outputs;
        if (is_by_lanes) {
            add_tile_products<ROWS>(in, inputs, tile_apart(inputs), slopes, outputs, tile_apart(outputs), count, gradient);
            continue;
        }
        to_rows<Singles>(in, inputs, tile_apart(inputs), count, tiles.rows.data());
        linear_steps<Singles>(Added{gradient}, {0, inputs, outputs, reinterpret_cast<const float*>(slopes), tile_apart(outputs),
                                       tiles.rows.data(), long(count) * LANES, count * LANES});
    }
}

// The backward pass as in ``conv_backward`` (convolution_back.h). The weights' gradient stays in ``winograd`` until the end of
// the minibatch.
void winograd_backward(Winograd& winograd, Tiles& tiles, Layer& layer, const Flow& flow, const vec* gradient, vec* back, bool adds,
                       float* gradients) {
    const Slope slope = slope_of(layer, flow, gradient, false, gradients);
    if (back && !adds) std::fill(back, back + layer.in.features(), vec{});
    const long inputs = layer.in.channels, outputs = layer.out.channels;
    each_tiles(layer, [&](int first, int count) {
        transform_slopes(layer, slope, first, count, tiles.out.data());
        {
            const Timed timed(TO_WEIGHTS);
            transform_windows(layer, flow.in + layer.corner(), first, count, tiles.in.data());
            add_gradient(winograd, tiles, inputs, outputs, count);
        }
        if (!back) return;
        multiply_positions(winograd, tiles.out.data(), outputs, tiles.in.data(), inputs, 1, inputs, count);  // overwrites the windows
        add_windows(layer, first, count, tiles.in.data(), back);
    });
}

}  // namespace
