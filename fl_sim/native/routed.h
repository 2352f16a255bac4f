// The backward pass of a convolution that is followed by 2 x 2 pooling, without multiplying zeros.
//
// Pooling passes a gradient to one of four places, and ReLU sets some gradients to zero. So at least three quarters of the slopes
// are zero, at different places in every record. Therefore the record is not the innermost index here. The layout of a record's
// input is [row][column][channel]. So the part of a window in one row is one run of consecutive numbers. Every slope that is not
// zero adds a multiple of its window to the gradient of the weights of its output channel. It also adds a multiple of these
// weights to the gradient by the window.
#pragma once

#include "routes.h"
#include "takers.h"

namespace {

// A record's slopes of one output in a band of places: their values, and the starts of their windows in the record.
struct Listed {
    const float* values;
    const int32_t* windows;
    int count;
};

// Calls ``each(output, listed)`` for all slopes of a record, band after band.
template <class Each>
INLINE void each_listed(const Routes& routes, const RouteShape& shape, const Each& each) {
    for (long band = 0; band < shape.bands; band++)
        for (long output = 0; output < shape.outputs; output++) {
            const long at = output * shape.padded + band * shape.band_places;
            const int count = routes.counts[band * shape.outputs + output];
            each(output, Listed{routes.met.data() + at, routes.windows.data() + at, count});
        }
}

// Computes gradient += slope * window, for one output and ROWS rows of its kernel.
template <int ROWS, int VECTORS>
INLINE void add_rows(const Listed& slopes, const float* in, long row, float* gradient) {
    vec sums[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = load(gradient + (r * VECTORS + v) * LANES);
    for (int i = 0; i < slopes.count; i++) {
        const vec value = spread(slopes.values[i]);
        const float* from = in + slopes.windows[i];
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] += value * load(from + r * row + v * LANES);
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(gradient + (r * VECTORS + v) * LANES, sums[r][v]);
}

template <int ROWS, int VECTORS>
INLINE void add_windows(const Listed& slopes, const float* in, long row, float* gradient) {
    constexpr int PART = std::min(ROWS, AT_ONCE / VECTORS), REST = ROWS % PART;
    int r = 0;
    for (; r + PART <= ROWS; r += PART)
        add_rows<PART, VECTORS>(slopes, in + r * row, row, gradient + r * VECTORS * LANES);
    if constexpr (REST > 0) add_rows<REST, VECTORS>(slopes, in + r * row, row, gradient + r * VECTORS * LANES);
}

// Adds the gradient of one record by the weights.
template <int ROWS, int VECTORS>
NOINLINE void to_weights(Routes& routes, const RouteShape& shape, int lane) {
    const Timed timed(TO_WEIGHTS);
    list_slopes(routes, shape, lane);
    const float* in = routes.in.data() + lane * shape.record;
    each_listed(routes, shape, [&](long output, const Listed& slopes) {
        add_windows<ROWS, VECTORS>(slopes, in, shape.row, routes.gradient.data() + lane * routes.apart + output * ROWS * VECTORS * LANES);
    });
}

// Adds the sum over outputs of slope * weights to the window's gradient, for one place and PART vectors of every row of the
// kernel. The slopes of the left and of the right pooling column have separate sums in registers. A slope of the lower pooling
// row is added one row further down in these sums. If the window also fits in the registers, its multiples are added to the
// weights' gradient in the same pass.
template <int ROWS, int VECTORS, int PART>
INLINE void add_place(const float* values, const uint32_t* going, const RouteShape& shape, const float* weights, float* back,
                      const float* in, float* gradient, long pixel) {
    constexpr bool HOLDS = holds_window(ROWS, VECTORS);
    for (int right = 0; right < 2; right++) {
        vec sums[ROWS + 1][PART] = {};
        UNROLL for (int below = 0; below < 2; below++) {
            vec window[ROWS][PART];
            if constexpr (HOLDS)
                UNROLL for (int r = 0; r < ROWS; r++)
                    UNROLL for (int v = 0; v < PART; v++)
                        window[r][v] = load(in + right * pixel + (below + r) * shape.row + v * LANES);
            for (long block = 0; block < shape.blocks; block++)
                for (uint32_t left = going[(2 * below + right) * shape.blocks + block]; left; left &= left - 1) {
                    const long output = block * LANES + __builtin_ctz(left), kernel = output * ROWS * VECTORS * LANES;
                    const vec value = spread(values[output]);
                    UNROLL for (int r = 0; r < ROWS; r++)
                        UNROLL for (int v = 0; v < PART; v++) {
                            const long at = kernel + (r * VECTORS + v) * LANES;
                            sums[below + r][v] += value * load(weights + at);
                            if constexpr (HOLDS) store(gradient + at, load(gradient + at) + value * window[r][v]);
                        }
                }
        }
        UNROLL for (int r = 0; r <= ROWS; r++)
            UNROLL for (int v = 0; v < PART; v++) {
                float* to = back + right * pixel + r * shape.row + v * LANES;
                store(to, load(to) + sums[r][v]);
            }
    }
}

template <int ROWS, int VECTORS, int PART>
INLINE void add_places(Routes& routes, const Layer& layer, const RouteShape& shape, int lane, int first) {
    const long pixel = layer.in.channels;
    const float* values = routes.crossing.data() + lane * shape.places * shape.blocks * LANES;
    const float* in = routes.in.data() + lane * shape.record + first * LANES;
    float* back = routes.back.data() + lane * shape.record + first * LANES;
    for (long place = 0; place < shape.places; place++)
        add_place<ROWS, VECTORS, PART>(
            values + place * shape.blocks * LANES, routes.going.data() + place * WAYS * shape.blocks, shape,
            routes.weights.data() + first * LANES, back + routes.corners[place], in + routes.corners[place],
            routes.gradient.data() + lane * routes.apart + first * LANES, pixel);
}

// Adds the gradient of one record by its input, place by place.
template <int ROWS, int VECTORS>
NOINLINE void to_input_by_place(Routes& routes, const Layer& layer, const RouteShape& shape, int lane) {
    constexpr int PART = std::min(VECTORS, AT_ONCE / (ROWS + 1)), REST = VECTORS % PART;
    list_ways(routes, shape, lane);
    int first = 0;
    for (; first + PART <= VECTORS; first += PART) add_places<ROWS, VECTORS, PART>(routes, layer, shape, lane, first);
    if constexpr (REST > 0) add_places<ROWS, VECTORS, REST>(routes, layer, shape, lane, first);
}

// Adds the gradient of one record by its input, output by output, without sums in registers.
template <int ROWS, int VECTORS>
NOINLINE void to_input_by_output(Routes& routes, const RouteShape& shape, int lane) {
    each_listed(routes, shape, [&](long output, const Listed& slopes) {
        const float* weights = routes.weights.data() + output * ROWS * VECTORS * LANES;
        for (int i = 0; i < slopes.count; i++) {
            const vec value = spread(slopes.values[i]);
            float* to = routes.back.data() + lane * shape.record + slopes.windows[i];
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    float* here = to + r * shape.row + v * LANES;
                    store(here, load(here) + value * load(weights + (r * VECTORS + v) * LANES));
                }
        }
    });
}

template <int ROWS, int VECTORS = 1>
void follow(Routes& routes, const Layer& layer, const RouteShape& shape, int lane, bool wants_back) {
    if (shape.run == VECTORS * LANES) {
        if (!wants_back || !holds_window(ROWS, VECTORS)) to_weights<ROWS, VECTORS>(routes, shape, lane);
        if (!wants_back) return;
        if constexpr (BY_PLACE) to_input_by_place<ROWS, VECTORS>(routes, layer, shape, lane);
        else to_input_by_output<ROWS, VECTORS>(routes, shape, lane);
    } else if constexpr (VECTORS < MOST_RUN) {
        follow<ROWS, VECTORS + 1>(routes, layer, shape, lane, wants_back);
    }
}

// The backward pass as in ``conv_backward`` (convolution_back.h), for ``count`` records. The weights' gradient stays in
// ``routes`` until the end of the minibatch or, by record, of the group. ``taker``: receives the gradient by the biases.
template <class Taker>
void routed_backward(Routes& routes, const Layer& layer, const Flow& flow, int count, const vec* gradient, vec* back,
                     const Taker& taker) {
    const RouteShape shape(layer);
    const PooledSlopes slopes(layer, flow, gradient, routes.written.data());
    {
        const Timed timed(TO_WEIGHTS);
        to_records(flow.in, layer.in, routes.in.data(), shape.record);
        if (!back || !holds_window(layer.kernel_y, run_vectors(layer))) route(routes, layer, slopes);
        if (layer.has_bias && !flow.is_derivative) add_biases(layer, slopes, taker);
    }
    if (back) routes.back.clear_values();
    if (back && BY_PLACE) cross(routes, layer, slopes);
    for (int lane = 0; lane < count; lane++) {
        if (layer.kernel_y == 3) follow<3>(routes, layer, shape, lane, back != nullptr);
        else follow<5>(routes, layer, shape, lane, back != nullptr);
    }
    if (back) from_records(routes.back.data(), shape.record, layer.in, back);
}

}  // namespace
