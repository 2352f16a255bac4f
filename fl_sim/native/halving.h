// Convolutions with 4 x 4 kernels, stride 2 and padding 1, which halve an image, and their transposes, which double one.
//
// Such a convolution is a sum of four convolutions with 2 x 2 kernels and stride 1: one for the even and the odd rows and columns
// of the fine image. Each is computed by Winograd's algorithm F(2x2, 2x2) (Lavin and Gray 2016), with 9 instead of 16 products
// for 2 x 2 outputs. In one dimension: y0 = (d0 - d1) g0 + d1 (g0 + g1), y1 = d1 (g0 + g1) + (d2 - d1) g1. The numbers of the
// transforms are 0, 1 and -1, so that results equal plain sums to a few float32 roundings. At every position the sums are matrix
// products. A result for one row (image) does not depend on the other rows: every number is added in the same order.
#pragma once

#include "products.h"
#include "wide.h"

namespace {

constexpr int CORNERS = 9;  // products for one output tile, in both dimensions
constexpr int PANEL = REGISTERS == 32 ? 4 : 2, STRIP = 6;  // vectors and rows of a block of a product, held in registers

// The numbers of an image: ``row`` lies between two of its rows, ``channels`` between two pixels of a row.
struct View {
    float* at;
    long side, row, channels;

    float* pixel(long y, long x) const { return at + y * row + x * channels; }
};

template <int ROWS, int WIDE>
INLINE void add_products(const float* left, long apart, long along, const float* right, long stride, long count,
                         vec (&sums)[ROWS][WIDE]) {
    UNROLL for (int row = 0; row < ROWS; row++)
        UNROLL for (int part = 0; part < WIDE; part++) sums[row][part] = vec{};
    for (long i = 0; i < count; i++, left += along, right += stride) {
        vec numbers[WIDE];
        UNROLL for (int part = 0; part < WIDE; part++) numbers[part] = load(right + part * LANES);
        UNROLL for (int row = 0; row < ROWS; row++) {
            const vec one = spread(left[row * apart]);
            UNROLL for (int part = 0; part < WIDE; part++) sums[row][part] = fused(one, numbers[part], sums[row][part]);
        }
    }
}

// Calls ``each(rows, first row, vectors, first column)`` for all blocks of a matrix; ``rows`` and ``vectors`` are constants.
template <int ROWS, int WIDE, class Each>
INLINE void each_block(long rows, long first, long column, const Each& each) {
    for (; first + ROWS <= rows; first += ROWS)
        each(std::integral_constant<int, ROWS>(), first, std::integral_constant<int, WIDE>(), column);
    if constexpr (ROWS > 1) each_block<(ROWS > 4 ? 4 : ROWS / 2), WIDE>(rows, first, column, each);
}

template <int WIDE = PANEL, class Each>
INLINE void each_panel(long rows, long columns, long column, const Each& each) {
    for (; column + WIDE * LANES <= columns; column += WIDE * LANES) each_block<STRIP, WIDE>(rows, 0, column, each);
    if constexpr (WIDE > 1) each_panel<WIDE / 2>(rows, columns, column, each);
}

// out = left * right. ``columns``: a multiple of LANES.
NOINLINE void multiply(const float* left, long apart, const float* right, float* out, long rows, long columns, long count) {
    each_panel(rows, columns, 0, [&](auto height, long row, auto width, long column) INLINED {
        vec sums[height()][width()];
        add_products<height(), width()>(left + row * apart, apart, 1, right + column, columns, count, sums);
        UNROLL for (int i = 0; i < height(); i++)
            UNROLL for (int part = 0; part < width(); part++)
                store(out + (row + i) * columns + column + part * LANES, sums[i][part]);
    });
}

// The transforms in one dimension; ``step`` lies between two numbers.
template <class T>
INLINE void to_window(T* d, int step) { d[0] = d[0] - d[step], d[2 * step] = d[2 * step] - d[step]; }
template <class T>
INLINE void from_window(T* v, int step) { v[step] = v[step] - v[0] - v[2 * step]; }
template <class T>
INLINE void to_output(T* m, int step) { m[0] = m[0] + m[step], m[step] = m[step] + m[2 * step]; }
// Of two numbers m[0] and m[step] three, for outputs' errors and for kernels alike.
template <class T>
INLINE void to_three(T* m, int step) { m[2 * step] = m[step], m[step] = m[0] + m[step]; }

INLINE void take(const float* from, float& to) { to = *from; }
INLINE void take(const float* from, vec& to) { to = load(from); }
INLINE void give(float* to, float value) { *to = value; }
INLINE void give(float* to, vec value) { store(to, value); }

// Calls ``each(channel, zero)`` for LANES channels at a time, and for each of the last channels alone.
template <class Each>
INLINE void each_channels(long channels, const Each& each) {
    long channel = 0;
    for (; channel + LANES <= channels; channel += LANES) each(channel, vec{});
    for (; channel < channels; channel++) each(channel, 0.0f);
}

class Halving {
  public:
    // ``fine``, ``coarse``: the channels of the fine image and of the coarse one (a multiple of LANES). ``side``: of the coarse image.
    void allocate(long fine, long coarse, long side, long rows) {
        fine_ = fine, coarse_ = coarse, side_ = side, inputs_ = 4 * fine, stride_ = filled(inputs_, LANES);
        tiles_ = side * side / 4, rows_ = rows;
        windows_.at_least(CORNERS * rows * tiles_ * stride_), outputs_.at_least(CORNERS * rows * tiles_ * coarse);
        made_.at_least(rows * tiles_ * CORNERS * std::max(stride_, coarse));
        down_.at_least(CORNERS * inputs_ * coarse);
        const long size = CORNERS * coarse * stride_;
        std::fill_n(up_.at_least(size), size, 0.0f);
    }

    long fine() const { return fine_; }
    long num_weights() const { return inputs_ * 4 * coarse_; }

    // ``weights``: [coarse][fine][4][4].
    void take_weights(const float* weights) {
        float *const down = down_.at_least(0), *const up = up_.at_least(0);
        for (long phase = 0; phase < 4; phase++)
            for (long channel = 0; channel < fine_; channel++)
                for (long output = 0; output < coarse_; output++) {
                    const float* kernel = weights + (output * fine_ + channel) * 16 + (phase / 2) * 4 + phase % 2;
                    float taps[CORNERS] = {kernel[0], kernel[2], 0, kernel[8], kernel[10]};
                    for (int x = 0; x < 2; x++) to_three(taps + x, 3);
                    for (int y = 0; y < 3; y++) to_three(taps + 3 * y, 1);
                    const long input = phase * fine_ + channel;
                    for (int at = 0; at < CORNERS; at++) {
                        down[(at * inputs_ + input) * coarse_ + output] = taps[at];
                        up[(at * coarse_ + output) * stride_ + input] = taps[at];
                    }
                }
    }

    // Transforms a fine image of one row. ``image`` has a border of one pixel, which ``image.at`` does not include.
    NOINLINE void enter_fine(const View& image, long row) {
        each_window(image, row, [&](const float* from, long at, auto zero) INLINED {
            decltype(zero) d[CORNERS];
            UNROLL for (int i = 0; i < CORNERS; i++) take(from + 2 * (i / 3) * image.row + 2 * (i % 3) * fine_, d[i]);
            UNROLL for (int x = 0; x < 3; x++) to_window(d + x, 3);
            UNROLL for (int y = 0; y < 3; y++) to_window(d + 3 * y, 1);
            float* to = windows_.at_least(0) + at;
            UNROLL for (int i = 0; i < CORNERS; i++) give(to + i * rows_ * tiles_ * stride_, d[i]);
        });
    }

    // Transforms a coarse image of one row.
    NOINLINE void enter_coarse(const View& image, long row) {
        for (long tile = 0; tile < tiles_; tile++)
            for (long channel = 0; channel < coarse_; channel += LANES) {
                vec m[CORNERS] = {};
                UNROLL for (int i = 0; i < 4; i++)
                    m[i / 2 * 3 + i % 2] = load(image.pixel(tile_y(tile) + i / 2, tile_x(tile) + i % 2) + channel);
                UNROLL for (int x = 0; x < 2; x++) to_three(m + x, 3);
                UNROLL for (int y = 0; y < 3; y++) to_three(m + 3 * y, 1);
                float* to = outputs_.at_least(0) + (row * tiles_ + tile) * coarse_ + channel;
                UNROLL for (int i = 0; i < CORNERS; i++) store(to + i * rows_ * tiles_ * coarse_, m[i]);
            }
    }

    // Computes the coarse images of the fine ones that entered: the convolution.
    void halve(long rows, View* images) {
        const long count = rows * tiles_;
        const float* const made = products(windows_, stride_, inputs_, down_, coarse_, count);
        for (long row = 0; row < rows; row++) write_coarse(made + row * tiles_ * coarse_, count * coarse_, images[row]);
    }

    // Computes the fine images of the coarse ones that entered: the transposed convolution. The border receives other numbers.
    void redouble(long rows, View* images) {
        const long count = rows * tiles_;
        const float* const made = products(outputs_, coarse_, coarse_, up_, stride_, count);
        for (long row = 0; row < rows; row++) write_fine(made + row * tiles_ * stride_, count * stride_, images[row]);
    }

    // Writes the sum of the weights' gradients of ``count`` rows whose images entered on both sides, [input][tap][coarse], and adds
    // its squared norm.
    NOINLINE void write_gradient(long first, long count, float* to, ByRecord (&squares)[4]) {
        const float* windows = windows_.at_least(0) + first * tiles_ * stride_;
        const float* outputs = outputs_.at_least(0) + first * tiles_ * coarse_;
        each_panel(inputs_, coarse_, 0, [&](auto height, long input, auto width, long column) INLINED {
            vec corners[CORNERS][height()][width()];
            for (long at = 0; at < CORNERS; at++) {
                vec sums[height()][width()];
                add_products<height(), width()>(windows + at * rows_ * tiles_ * stride_ + input, 1, stride_,
                                                outputs + at * rows_ * tiles_ * coarse_ + column, coarse_, count * tiles_, sums);
                UNROLL for (int i = 0; i < height(); i++)
                    UNROLL for (int part = 0; part < width(); part++) corners[at][i][part] = sums[i][part];
            }
            for (long i = 0; i < height(); i++)
                UNROLL for (int part = 0; part < width(); part++) {
                    vec u[CORNERS];
                    UNROLL for (int at = 0; at < CORNERS; at++) u[at] = corners[at][i][part];
                    UNROLL for (int x = 0; x < 3; x++) to_output(u + x, 3);
                    UNROLL for (int y = 0; y < 2; y++) to_output(u + 3 * y, 1);
                    UNROLL for (int tap = 0; tap < 4; tap++) {
                        const vec value = u[tap / 2 * 3 + tap % 2];
                        squares[tap].add_square(value);
                        store(to + ((input + i) * 4 + tap) * coarse_ + column + part * LANES, value);
                    }
                }
        });
    }

    // Writes a sum of gradients in the order of the weights, [coarse][fine][4][4].
    template <class To>
    void write_weights(const double* from, To* to) const {
        for (long input = 0; input < inputs_; input++)
            for (long tap = 0; tap < 4; tap++)
                for (long output = 0; output < coarse_; output++) {
                    const long phase = input / fine_, y = tap / 2 * 2 + phase / 2, x = tap % 2 * 2 + phase % 2;
                    to[(output * fine_ + input % fine_) * 16 + 4 * y + x] = To(from[(input * 4 + tap) * coarse_ + output]);
                }
    }

  private:
    // Returns the products of transformed images and weights at every corner, [corner][tile][columns]. ``apart``: the numbers of a
    // tile in memory, of which the first ``inner`` are multiplied.
    const float* products(Numbers<float>& images, long apart, long inner, Numbers<float>& weights, long columns, long count) {
        float* const made = made_.at_least(0);
        for (long at = 0; at < CORNERS; at++)
            multiply(images.at_least(0) + at * rows_ * tiles_ * apart, apart, weights.at_least(0) + at * inner * columns,
                     made + at * count * columns, count, columns, inner);
        return made;
    }

    long tile_y(long tile) const { return tile / (side_ / 2) * 2; }
    long tile_x(long tile) const { return tile % (side_ / 2) * 2; }

    // Calls ``each(pixels, place of the window, zero)`` for all windows of a row's fine image.
    template <class Each>
    INLINED void each_window(const View& image, long row, const Each& each) const {
        for (long tile = 0; tile < tiles_; tile++)
            for (long phase = 0; phase < 4; phase++) {
                float* const from = image.pixel(2 * tile_y(tile) + phase / 2 - 1, 2 * tile_x(tile) + phase % 2 - 1);
                const long at = (row * tiles_ + tile) * stride_ + phase * fine_;
                each_channels(fine_, [&](long channel, auto zero) INLINED { each(from + channel, at + channel, zero); });
            }
    }

    NOINLINE void write_coarse(const float* made, long apart, const View& image) const {
        for (long tile = 0; tile < tiles_; tile++)
            for (long channel = 0; channel < coarse_; channel += LANES) {
                vec m[CORNERS];
                UNROLL for (int at = 0; at < CORNERS; at++) m[at] = load(made + at * apart + tile * coarse_ + channel);
                UNROLL for (int x = 0; x < 3; x++) to_output(m + x, 3);
                UNROLL for (int y = 0; y < 2; y++) to_output(m + 3 * y, 1);
                UNROLL for (int i = 0; i < 4; i++)
                    store(image.pixel(tile_y(tile) + i / 2, tile_x(tile) + i % 2) + channel, m[i / 2 * 3 + i % 2]);
            }
    }

    NOINLINE void write_fine(const float* made, long apart, const View& image) const {
        const long width = (2 * side_ + 2) * fine_;
        for (long y = -1; y <= 2 * side_; y++) std::fill_n(image.pixel(y, -1), width, 0.0f);  // with its border
        each_window(image, 0, [&](float* to, long from, auto zero) INLINED {
            decltype(zero) v[CORNERS];
            UNROLL for (int at = 0; at < CORNERS; at++) take(made + at * apart + from, v[at]);
            UNROLL for (int x = 0; x < 3; x++) from_window(v + x, 3);
            UNROLL for (int y = 0; y < 3; y++) from_window(v + 3 * y, 1);
            UNROLL for (int at = 0; at < CORNERS; at++) {
                float* const pixel = to + 2 * (at / 3) * image.row + 2 * (at % 3) * fine_;
                decltype(zero) before;
                take(pixel, before), give(pixel, before + v[at]);
            }
        });
    }

    long fine_ = 0, coarse_ = 0, side_ = 0, inputs_ = 0, stride_ = 0, tiles_ = 0, rows_ = 0;
    Numbers<float> windows_, outputs_;  // transformed images, [corner][row][tile][numbers]
    Numbers<float> down_, up_;          // transformed weights, [corner][input][coarse] and [corner][coarse][input]
    Numbers<float> made_;
};

}  // namespace
