// The arithmetic of Winograd's F(4 x 4, 3 x 3) (Lavin and Gray 2016, section 4): the transforms of tiles, windows and
// kernels, and the products between them.
//
// The interpolation points are 0, 5/8, -5/8, 3/2, -3/2 and infinity. Their rounding errors are half of those with 1 and 2 in
// place of 5/8 and 3/2. All constants for windows and tiles are exact float32 numbers.
#pragma once

#include "vectors.h"

namespace {

constexpr int TILE = 4, WINDOW = 6, POSITIONS = WINDOW * WINDOW;
constexpr float A = 0.625f, A2 = A * A, A3 = A2 * A, B = 1.5f, B2 = B * B, B3 = B2 * B;  // the points and their powers
constexpr float SUM = A2 + B2, PRODUCT = A2 * B2;
constexpr float OVER_A = 1 / (2 * A2 * (A2 - B2)), OVER_B = 1 / (2 * B2 * (B2 - A2)), OVER_0 = 1 / PRODUCT;

struct ToInput {  // B'
    template <class T> static void line(const T (&x)[WINDOW], T (&y)[WINDOW]) {
        const T even_a = x[4] - B2 * x[2], odd_a = x[3] - B2 * x[1], even_b = x[4] - A2 * x[2], odd_b = x[3] - A2 * x[1];
        y[0] = PRODUCT * x[0] + (x[4] - SUM * x[2]), y[5] = PRODUCT * x[1] + (x[5] - SUM * x[3]);
        y[1] = even_a + A * odd_a, y[2] = even_a - A * odd_a, y[3] = even_b + B * odd_b, y[4] = even_b - B * odd_b;
    }
};
struct FromInput {  // B
    template <class T> static void line(const T (&x)[WINDOW], T (&y)[WINDOW]) {
        const T sum_a = x[1] + x[2], difference_a = A * (x[1] - x[2]), sum_b = x[3] + x[4], difference_b = B * (x[3] - x[4]);
        y[0] = PRODUCT * x[0], y[5] = x[5];
        y[1] = PRODUCT * x[5] - B2 * difference_a - A2 * difference_b;
        y[2] = -SUM * x[0] - B2 * sum_a - A2 * sum_b;
        y[3] = difference_a + difference_b - SUM * x[5];
        y[4] = x[0] + sum_a + sum_b;
    }
};
struct ToOutput {  // A'
    template <class T> static void line(const T (&x)[WINDOW], T (&y)[TILE]) {
        const T sum_a = x[1] + x[2], difference_a = x[1] - x[2], sum_b = x[3] + x[4], difference_b = x[3] - x[4];
        y[0] = x[0] + sum_a + sum_b, y[1] = A * difference_a + B * difference_b;
        y[2] = A2 * sum_a + B2 * sum_b, y[3] = A3 * difference_a + (B3 * difference_b + x[5]);
    }
};
struct FromOutput {  // A
    template <class T> static void line(const T (&x)[TILE], T (&y)[WINDOW]) {
        const T even_a = x[0] + A2 * x[2], odd_a = A * x[1] + A3 * x[3], even_b = x[0] + B2 * x[2], odd_b = B * x[1] + B3 * x[3];
        y[0] = x[0], y[1] = even_a + odd_a, y[2] = even_a - odd_a, y[3] = even_b + odd_b, y[4] = even_b - odd_b, y[5] = x[3];
    }
};
struct ToKernel {  // G
    template <class T> static void line(const T (&x)[3], T (&y)[WINDOW]) {
        const T even_a = OVER_A * x[0] + (OVER_A * A2) * x[2], odd_a = (OVER_A * A) * x[1];
        const T even_b = OVER_B * x[0] + (OVER_B * B2) * x[2], odd_b = (OVER_B * B) * x[1];
        y[0] = OVER_0 * x[0], y[1] = even_a + odd_a, y[2] = even_a - odd_a, y[3] = even_b + odd_b, y[4] = even_b - odd_b, y[5] = x[2];
    }
};
struct FromKernel {  // G'
    template <class T> static void line(const T (&x)[WINDOW], T (&y)[3]) {
        const T sum_a = OVER_A * (x[1] + x[2]), sum_b = OVER_B * (x[3] + x[4]);
        y[0] = OVER_0 * x[0] + sum_a + sum_b, y[1] = (OVER_A * A) * (x[1] - x[2]) + (OVER_B * B) * (x[3] - x[4]);
        y[2] = A2 * sum_a + (B2 * sum_b + x[5]);
    }
};

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

// The layout of tiles is [tile][position][channel]. Each position has one spare vector, so that tiles and positions do not
// compete for the same few lines of the L1 cache.
INLINE long position_apart(long channels) { return channels + 1; }
INLINE long tile_apart(long channels) { return POSITIONS * position_apart(channels); }

struct TileProduct {  // the arguments of the product at one position
    const vec* in;
    long inputs, in_apart;
    vec* out;
    long outputs, out_apart;
    const float* weights;  // the weight of output o and input i has the index o * along + i * across
    long along, across;
};

template <int OUTPUTS, int TILES>
INLINE void multiply_tiles(const TileProduct& product, long output, const vec* in, vec* out) {
    vec sums[OUTPUTS][TILES];
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int t = 0; t < TILES; t++) sums[o][t] = vec{};
    const float* weights = product.weights + output * product.along;
    for (long i = 0; i < product.inputs; i++, weights += product.across) {
        vec values[TILES];
        UNROLL for (int t = 0; t < TILES; t++) values[t] = in[t * product.in_apart + i];
        UNROLL for (int o = 0; o < OUTPUTS; o++) {
            const vec weight = spread(weights[o * product.along]);
            UNROLL for (int t = 0; t < TILES; t++) sums[o][t] += weight * values[t];
        }
    }
    UNROLL for (int o = 0; o < OUTPUTS; o++)
        UNROLL for (int t = 0; t < TILES; t++) out[t * product.out_apart + output + o] = sums[o][t];
}

template <int TILES>
void multiply_tiles(const TileProduct& product, const vec* in, vec* out) {
    constexpr int MOST = REGISTERS / 4;  // outputs whose sums for three tiles fit in registers
    long output = 0;
    for (; output + MOST <= product.outputs; output += MOST) multiply_tiles<MOST, TILES>(product, output, in, out);
    for (; output + 2 <= product.outputs; output += 2) multiply_tiles<2, TILES>(product, output, in, out);
    for (; output < product.outputs; output++) multiply_tiles<1, TILES>(product, output, in, out);
}

// Computes out = weights * in, for ``tiles`` tiles.
NOINLINE void multiply_tiles(const TileProduct& product, int tiles) {
    int tile = 0;
    const auto in = [&] { return product.in + tile * product.in_apart; };
    const auto out = [&] { return product.out + tile * product.out_apart; };
    for (; tile + 3 <= tiles && tiles - tile != 4; tile += 3) multiply_tiles<3>(product, in(), out());
    for (; tile + 2 <= tiles; tile += 2) multiply_tiles<2>(product, in(), out());
    for (; tile < tiles; tile++) multiply_tiles<1>(product, in(), out());
}

// Computes gradient[output][input] += sum over tiles and lanes of slopes * in. ``inputs``: a multiple of 4; ``outputs``: of ROWS.
template <int ROWS>
NOINLINE void add_tile_products(const vec* in, long inputs, long in_apart, const vec* slopes, long outputs,
                                long slopes_apart, int tiles, float* gradient) {
    for (long output = 0; output < outputs; output += ROWS)
        for (long input = 0; input < inputs; input += 4) {
            vec sums[ROWS][4];
            UNROLL for (int o = 0; o < ROWS; o++)
                UNROLL for (int i = 0; i < 4; i++) sums[o][i] = vec{};
            const vec *left = slopes + output, *right = in + input;
            for (int tile = 0; tile < tiles; tile++, left += slopes_apart, right += in_apart) {
                vec values[4];
                UNROLL for (int i = 0; i < 4; i++) values[i] = right[i];
                UNROLL for (int o = 0; o < ROWS; o++) {
                    const vec slope = left[o];
                    UNROLL for (int i = 0; i < 4; i++) sums[o][i] += slope * values[i];
                }
            }
            UNROLL for (int o = 0; o < ROWS; o++) {
                float* to = gradient + (output + o) * inputs + input;
                const four total = ::sums(sums[o][0], sums[o][1], sums[o][2], sums[o][3]);
                UNROLL for (int i = 0; i < 4; i++) to[i] += total[i];
            }
        }
}

}  // namespace
