// The way back through a convolution with 2 x 2 pooling behind it, without the zeros.
//
// Pooling lets a gradient through to one of four places, and ReLU stops some of the rest: three quarters and more of the
// slopes are zero, at other places in every record. So the record leaves the innermost index: a record's input is laid
// out as [row][column][channel], where the part of a kernel's window that lies in one row is one run of numbers. Every
// slope that is left adds a multiple of its window to the gradient of its output channel's weights, and a multiple of
// these weights to the window's gradient.
#pragma once

#include "layer.h"

namespace {

constexpr int AT_ONCE = REGISTERS == 32 ? 24 : 14;  // vectors of a kernel's gradient that stay in registers
constexpr int MOST_RUN = REGISTERS == 32 ? 8 : 14;  // vectors in a row of a kernel

INLINE long run_vectors(const Layer& layer) { return (long(layer.kernel_x) * layer.in.channels + LANES - 1) / LANES; }

// Says whether this way is open and cheaper: per slope, the kernel's vectors and some overhead against four times the
// kernel's numbers, a LANES-th each.
inline bool is_routed(const Layer& layer) {
    if (layer.kind != CONV || !layer.pooled || layer.stride_y != 1 || layer.stride_x != 1) return false;
    if (layer.kernel_y != 3 && layer.kernel_y != 5) return false;
    if (layer.corner() != 0) return false;
    const long vectors = run_vectors(layer) * layer.kernel_y;
    if (run_vectors(layer) > MOST_RUN) return false;
    return vectors * 4 / 3 + 7 < 4 * layer.in.channels * layer.taps() / LANES;
}

struct Slope {
    int32_t at;  // where the window starts in the record
    float value;
};

struct Routes {
    Floats in, back;              // of a group: [record][row][column][channel], borders counted
    Floats weights;               // [output][kernel row][run]
    Floats gradient;              // likewise, summed over the minibatch
    Floats values;                // [record][output][place]: slopes
    std::vector<int32_t> places;  // likewise: where their windows start
    std::vector<Slope> slopes;    // of a record: [output][place], those that are not zero
    std::vector<int> counts;      // of a record: [band][output]
};

constexpr int BAND_ROWS = 4;  // of pooled output: what they read fits the L1 cache

struct RouteShape {
    long record, row, run, padded, bands, band_places;
    explicit RouteShape(const Layer& layer) {
        row = layer.in.row() * layer.in.channels;
        record = row * (layer.in.height + 2 * layer.in.border_y) + 2 * LANES;
        record = (record + LANES - 1) / LANES * LANES;
        run = run_vectors(layer) * LANES;
        bands = (layer.out.height + BAND_ROWS - 1) / BAND_ROWS;
        band_places = BAND_ROWS * long(layer.out.width);
        padded = (bands * band_places + LANES - 1) / LANES * LANES;
    }
};

inline void reserve(Routes& routes, const Layer& layer) {
    const RouteShape shape(layer);
    const long outputs = layer.out.channels, kernel = layer.kernel_y * shape.run;
    routes.in.resize(LANES * shape.record), routes.back.resize(LANES * shape.record);
    routes.weights.resize(outputs * kernel), routes.gradient.resize(outputs * kernel);
    routes.values.resize(LANES * outputs * shape.padded), routes.places.resize(LANES * outputs * shape.padded);
    routes.slopes.resize(outputs * shape.padded), routes.counts.resize(shape.bands * outputs);
}

// Before a minibatch: lays the weights out by runs, and clears their gradient.
inline void start_routes(Routes& routes, const Layer& layer, const float* weights) {
    const RouteShape shape(layer);
    routes.gradient.clear_values();
    for (long output = 0; output < layer.out.channels; output++)
        for (long channel = 0; channel < layer.in.channels; channel++)
            for (long y = 0; y < layer.kernel_y; y++)
                for (long x = 0; x < layer.kernel_x; x++)
                    routes.weights.data()[(output * layer.kernel_y + y) * shape.run + x * layer.in.channels + channel] = *weights++;
}

// After a minibatch: hands the weights' gradient over in their own order.
inline void finish_routes(const Routes& routes, const Layer& layer, float* gradient) {
    const RouteShape shape(layer);
    for (long output = 0; output < layer.out.channels; output++)
        for (long channel = 0; channel < layer.in.channels; channel++)
            for (long y = 0; y < layer.kernel_y; y++)
                for (long x = 0; x < layer.kernel_x; x++)
                    *gradient++ = routes.gradient.data()[(output * layer.kernel_y + y) * shape.run + x * layer.in.channels + channel];
}

// Lays a group's planes out record by record. Reads and writes up to LANES numbers too many: what follows is written later.
NOINLINE void to_records(const vec* in, const Image& image, float* records, long record) {
    const long plane = image.plane(), channels = image.channels;
    for (long pixel = 0; pixel < plane; pixel++)
        for (long first = 0; first < channels; first += LANES) {
            vec block[LANES];
            UNROLL for (int i = 0; i < LANES; i++)
                block[i] = first + i < channels ? in[(first + i) * plane + pixel] : vec{};
            transpose(block);
            float* to = records + pixel * channels + first;
            UNROLL for (int lane = 0; lane < LANES; lane++) store(to + lane * record, block[lane]);
        }
}

// The other way round, without the border.
NOINLINE void from_records(const float* records, long record, const Image& image, vec* out) {
    const long channels = image.channels, area = long(image.height) * image.width;
    for (int y = 0; y < image.height; y++)
        for (int x = 0; x < image.width; x++, out++)
            for (long first = 0; first < channels; first += LANES) {
                const float* from = records + (image.start() + y * image.row() + x) * channels + first;
                vec block[LANES];
                UNROLL for (int lane = 0; lane < LANES; lane++) block[lane] = load(from + lane * record);
                transpose(block);
                const long here = std::min<long>(LANES, channels - first);
                for (long i = 0; i < here; i++) out[(first + i) * area] = block[i];
            }
}

// Writes a group's slopes and where they belong, record by record, and adds the bias gradient, where that is asked for.
NOINLINE void route(Routes& routes, const Layer& layer, const Flow& flow, const vec* gradient, float* bias_gradient) {
    const Image& image = layer.out;
    const RouteShape shape(layer);
    const long places = long(image.height) * image.width, outputs = image.channels;
    const bvec* chosen = layer.chosen.data() + flow.origin * image.features();
    const int32_t pixel = layer.in.channels, row = int32_t(shape.row);
    for (long channel = 0; channel < outputs; channel++) {
        vec total{};
        const vec* values = flow.passed + channel * image.plane() + image.start();
        for (long first = 0; first < shape.padded; first += LANES) {
            vec slopes[LANES], starts[LANES];
            for (int i = 0; i < LANES; i++) {
                const long place = first + i;
                slopes[i] = starts[i] = vec{};
                if (place >= places) continue;
                const int y = int(place / image.width), x = int(place % image.width);
                const vec slope = gradient[channel * places + place];
                slopes[i] = !layer.relu ? slope : values[y * image.row() + x] > 0.0f ? slope : vec{};
                total += slopes[i];
                const ivec which = __builtin_convertvector(chosen[channel * places + place], ivec);
                starts[i] = (vec)((which & 1) * pixel + (which >> 1) * row + (2 * y * row + 2 * x * pixel));
            }
            transpose(slopes), transpose(starts);
            for (int lane = 0; lane < LANES; lane++) {
                const long at = (lane * outputs + channel) * shape.padded + first;
                store(routes.values.data() + at, slopes[lane]);
                store(reinterpret_cast<float*>(routes.places.data() + at), starts[lane]);
            }
        }
        if (bias_gradient) bias_gradient[channel] += sum(total);
    }
}

// Lists a record's slopes that are not zero, by output and band.
NOINLINE void list_slopes(Routes& routes, const RouteShape& shape, long outputs, int lane) {
    for (long output = 0; output < outputs; output++)
        for (long band = 0; band < shape.bands; band++) {
            const long at = (lane * outputs + output) * shape.padded + band * shape.band_places;
            Slope* list = routes.slopes.data() + output * shape.padded + band * shape.band_places;
            const float* values = routes.values.data() + at;
            const int32_t* places = routes.places.data() + at;
            int count = 0;
            for (long i = 0; i < shape.band_places; i++) {
                list[count] = {places[i], values[i]};
                count += values[i] != 0.0f;
            }
            routes.counts[band * outputs + output] = count;
        }
}

// gradient += slope * window, for one output channel and ROWS rows of its kernel
template <int ROWS, int VECTORS>
INLINE void add_rows(const Slope* slopes, int count, const float* in, long row, float* gradient) {
    vec sums[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = load(gradient + (r * VECTORS + v) * LANES);
    for (int i = 0; i < count; i++) {
        const vec value = spread(slopes[i].value);
        const float* from = in + slopes[i].at;
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] += value * load(from + r * row + v * LANES);
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(gradient + (r * VECTORS + v) * LANES, sums[r][v]);
}

template <int ROWS, int VECTORS>
INLINE void add_windows(const Slope* slopes, int count, const float* in, long row, float* gradient) {
    constexpr int PART = std::min(ROWS, AT_ONCE / VECTORS), REST = ROWS % PART;
    int r = 0;
    for (; r + PART <= ROWS; r += PART)
        add_rows<PART, VECTORS>(slopes, count, in + r * row, row, gradient + r * VECTORS * LANES);
    if constexpr (REST > 0) add_rows<REST, VECTORS>(slopes, count, in + r * row, row, gradient + r * VECTORS * LANES);
}

// window's gradient += slope * weights, for one output channel
template <int ROWS, int VECTORS>
INLINE void add_weights(const Slope* slopes, int count, float* back, long row, const float* weights) {
    for (int i = 0; i < count; i++) {
        const vec value = spread(slopes[i].value);
        float* to = back + slopes[i].at;
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                float* here = to + r * row + v * LANES;
                store(here, load(here) + value * load(weights + (r * VECTORS + v) * LANES));
            }
    }
}

template <int ROWS, int VECTORS>
NOINLINE void follow(Routes& routes, const RouteShape& shape, long outputs, int lane, bool wants_back) {
    constexpr long KERNEL = ROWS * VECTORS * LANES;
    const float* in = routes.in.data() + lane * shape.record;
    float* back = routes.back.data() + lane * shape.record;
    for (long band = 0; band < shape.bands; band++) {
        const int* counts = routes.counts.data() + band * outputs;
        const Slope* slopes = routes.slopes.data() + band * shape.band_places;
        {
            const Timed timed(TO_WEIGHTS);
            for (long output = 0; output < outputs; output++)
                add_windows<ROWS, VECTORS>(slopes + output * shape.padded, counts[output], in, shape.row,
                                           routes.gradient.data() + output * KERNEL);
        }
        for (long output = 0; output < outputs && wants_back; output++)
            add_weights<ROWS, VECTORS>(slopes + output * shape.padded, counts[output], back, shape.row,
                                       routes.weights.data() + output * KERNEL);
    }
}

template <int ROWS, int VECTORS = 1>
void follow(Routes& routes, const RouteShape& shape, long outputs, int lane, bool wants_back, long vectors) {
    if (vectors == VECTORS) follow<ROWS, VECTORS>(routes, shape, outputs, lane, wants_back);
    else if constexpr (VECTORS < MOST_RUN)
        follow<ROWS, VECTORS + 1>(routes, shape, outputs, lane, wants_back, vectors);
}

// As conv_backward, for ``count`` records; the weights' gradient stays in ``routes`` until the minibatch is through.
void routed_backward(Routes& routes, const Layer& layer, const Flow& flow, int count, const vec* gradient, vec* back,
                     float* gradients) {
    const RouteShape shape(layer);
    {
        const Timed timed(TO_WEIGHTS);
        to_records(flow.in, layer.in, routes.in.data(), shape.record);
    }
    if (back) routes.back.clear_values();
    route(routes, layer, flow, gradient, layer.has_bias && !flow.is_derivative ? gradients + layer.bias : nullptr);
    const long outputs = layer.out.channels;
    for (int lane = 0; lane < count; lane++) {
        list_slopes(routes, shape, outputs, lane);
        if (layer.kernel_y == 3) follow<3>(routes, shape, outputs, lane, back != nullptr, run_vectors(layer));
        else follow<5>(routes, shape, outputs, lane, back != nullptr, run_vectors(layer));
    }
    if (back) from_records(routes.back.data(), shape.record, layer.in, back);
}

}  // namespace
