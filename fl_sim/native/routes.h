// The layouts for routed.h: lists of a pooled convolution's slopes that are not zero, and inputs laid out by record.
#pragma once

#include "layer.h"

namespace {

constexpr int AT_ONCE = REGISTERS == 32 ? 24 : 14;  // the most vectors of sums that fit in registers
constexpr int MOST_RUN = REGISTERS == 32 ? 8 : 14;  // the most vectors in a row of a kernel

INLINE long run_vectors(const Layer& layer) { return (long(layer.kernel_x) * layer.in.channels + LANES - 1) / LANES; }

// Returns true if the method of chosen.h applies. It applies to a convolution that is the first layer, because nobody needs the
// gradient by the records. It would be slower with 16 registers.
inline bool is_first_pooled(const Layer& layer) {
    if (REGISTERS < 32 || layer.kind != CONV || layer.source || !layer.pooled) return false;
    if (layer.stride_y != 1 || layer.stride_x != 1) return false;
    return layer.kernel_y == layer.kernel_x && (layer.kernel_y == 3 || layer.kernel_y == 5);
}

// Returns true if the method of routed.h applies and is cheaper. Its cost for each slope is the number of vectors in the kernel
// plus an overhead. The cost of the other code is four times the number of weights in the kernel, divided by LANES.
inline bool is_routed(const Layer& layer) {
    if (HAS_AMX) return false;  // with AMX, products with zeros are cheaper than finding the zeros
    if (layer.kind != CONV || !layer.pooled || layer.stride_y != 1 || layer.stride_x != 1) return false;
    if (layer.kernel_y != 3 && layer.kernel_y != 5) return false;
    if (layer.corner() != 0) return false;
    if (Factors::EACH == 2 && is_first_pooled(layer)) return false;  // chosen.h supports pairs
    const long vectors = run_vectors(layer) * layer.kernel_y;
    if (run_vectors(layer) > MOST_RUN) return false;
    return vectors * 4 / 3 + 7 < 4 * layer.in.channels * layer.taps() / LANES;
}

constexpr bool BY_PLACE = REGISTERS == 32;  // the order for the gradient by the input; 16 registers are too few for it
constexpr int HELD = 28;                    // the most vectors of sums and of a window together that fit in registers
constexpr int BAND_ROWS = 4;                // rows of pooled output in a band, whose inputs fit in the L1 cache
constexpr int WAYS = 4;                     // the places from which pooling chooses: left above, right above, left below, right below

struct Routes {
    Floats in, back;               // a group's input and its gradient: [record][row][column][channel], with borders
    Floats weights;                // [output][kernel row][run]
    Floats gradient;               // the weights' gradient in the same layout, summed over the minibatch or [record of a group]
    long apart = 0;                // the distance between the gradients of two records; 0: they are summed
    Floats values;                 // the slopes: [record][output][place]
    std::vector<int32_t> starts;   // the start of each slope's window in the record, in the same layout
    Floats met;                    // the slopes of one record that are not zero: [output][place]
    std::vector<int32_t> windows;  // the starts of their windows, in the same layout
    std::vector<int> counts;       // the numbers of these slopes: [band][output]
    Floats crossing;               // the slopes again: [record][place][output]
    std::vector<int32_t> ways;     // the place that pooling chose for each slope, 0 to 3, in the same layout
    std::vector<uint32_t> going;   // of one record: [place][way][LANES outputs], one bit for each slope whose way this is
    std::vector<int32_t> written;  // [place]: its index in a plane of the output
    std::vector<int32_t> corners;  // [place]: the start, in a record, of the window of way 0
};

struct RouteShape {
    long outputs, record, row, run, places, padded, bands, band_places, blocks;
    explicit RouteShape(const Layer& layer) {
        outputs = layer.out.channels;
        row = layer.in.row() * layer.in.channels;
        record = row * (layer.in.height + 2 * layer.in.border_y) + 2 * LANES;
        record = (record + LANES - 1) / LANES * LANES;
        run = run_vectors(layer) * LANES;
        places = layer.out.area();
        bands = (layer.out.height + BAND_ROWS - 1) / BAND_ROWS;
        band_places = BAND_ROWS * long(layer.out.width);
        padded = (bands * band_places + LANES - 1) / LANES * LANES;
        blocks = (layer.out.channels + LANES - 1) / LANES;
    }
};

inline void reserve(Routes& routes, const Layer& layer, bool by_record) {
    const RouteShape shape(layer);
    const long outputs = shape.outputs, kernel = layer.kernel_y * shape.run, slack = LANES;
    routes.in.resize(LANES * shape.record), routes.back.resize(LANES * shape.record);
    routes.apart = by_record ? outputs * kernel : 0;
    routes.weights.resize(outputs * kernel), routes.gradient.resize((by_record ? LANES : 1) * outputs * kernel);
    routes.values.resize(LANES * outputs * shape.padded + slack), routes.starts.resize(LANES * outputs * shape.padded + slack);
    routes.met.resize(outputs * shape.padded + slack), routes.windows.resize(outputs * shape.padded + slack);
    routes.counts.resize(shape.bands * outputs);
    const long crossing = BY_PLACE ? shape.places * shape.blocks * LANES : 0;
    routes.crossing.resize(LANES * crossing), routes.ways.resize(LANES * crossing);
    routes.going.resize(BY_PLACE ? shape.places * WAYS * shape.blocks : 0);
    for (int y = 0; y < layer.out.height; y++)
        for (int x = 0; x < layer.out.width; x++) {
            routes.written.push_back(int32_t(layer.out.line(0, y) + x));
            routes.corners.push_back(int32_t(2 * y * shape.row + 2 * x * layer.in.channels));
        }
}

// Before a minibatch: rearranges the weights by rows of kernels (runs), and clears their gradient.
inline void start_routes(Routes& routes, const Layer& layer, const float* weights) {
    const RouteShape shape(layer);
    routes.gradient.clear_values();
    for (long output = 0; output < layer.out.channels; output++)
        for (long channel = 0; channel < layer.in.channels; channel++)
            for (long y = 0; y < layer.kernel_y; y++)
                for (long x = 0; x < layer.kernel_x; x++)
                    routes.weights.data()[(output * layer.kernel_y + y) * shape.run + x * layer.in.channels + channel] = *weights++;
}

// After a minibatch: writes the weights' gradient in the order of the parameters.
inline void finish_routes(const Routes& routes, const Layer& layer, float* gradient) {
    const RouteShape shape(layer);
    for (long output = 0; output < layer.out.channels; output++)
        for (long channel = 0; channel < layer.in.channels; channel++)
            for (long y = 0; y < layer.kernel_y; y++)
                for (long x = 0; x < layer.kernel_x; x++)
                    *gradient++ = routes.gradient.data()[(output * layer.kernel_y + y) * shape.run + x * layer.in.channels + channel];
}

// After a group: writes the gradients of each record, [parameter][lane].
inline void finish_routes_by_record(const Routes& routes, const Layer& layer, vec* gradients) {
    const RouteShape shape(layer);
    const long channels = layer.in.channels, used = layer.kernel_x * channels;
    for (long line = 0; line < layer.out.channels * layer.kernel_y; line++)
        for (long first = 0; first < used; first += LANES) {
            vec block[LANES];
            UNROLL for (int lane = 0; lane < LANES; lane++)
                block[lane] = load(routes.gradient.data() + lane * routes.apart + line * shape.run + first);
            transpose(block);
            for (long at = first; at < std::min(used, first + LANES); at++) {
                const long kernel = line / layer.kernel_y * channels + at % channels;
                gradients[kernel * layer.taps() + line % layer.kernel_y * layer.kernel_x + at / channels] = block[at - first];
            }
        }
}

// Rearranges a group's planes record by record. Writes up to LANES surplus numbers, which the next record overwrites.
NOINLINE void to_records(const vec* in, const Image& image, float* records, long record) {
    const long plane = image.plane(), channels = image.channels, numbers = plane * channels;
    long pixel = 0, channel = 0;
    for (long first = 0; first < numbers; first += LANES) {
        vec block[LANES];
        for (int i = 0; i < LANES; i++) {
            block[i] = pixel < plane ? in[channel * plane + pixel] : vec{};
            if (++channel == channels) channel = 0, pixel++;
        }
        transpose(block);
        UNROLL for (int lane = 0; lane < LANES; lane++) store(records + lane * record + first, block[lane]);
    }
}

// The inverse of ``to_records``, without the border.
NOINLINE void from_records(const float* records, long record, const Image& image, vec* out) {
    const long channels = image.channels, area = image.area(), numbers = image.width * channels;
    for (long y = 0; y < image.height; y++) {
        const float* from = records + (image.start() + y * image.row()) * channels;
        long pixel = y * image.width, channel = 0;
        for (long first = 0; first < numbers; first += LANES) {
            vec block[LANES];
            UNROLL for (int lane = 0; lane < LANES; lane++) block[lane] = load(from + lane * record + first);
            transpose(block);
            const long here = std::min<long>(LANES, numbers - first);
            for (long i = 0; i < here; i++) {
                out[channel * area + pixel] = block[i];
                if (++channel == channels) channel = 0, pixel++;
            }
        }
    }
}

// A group's slopes after ReLU's backward pass, and the place that pooling chose for each of them.
class PooledSlopes {
  public:
    PooledSlopes(const Layer& layer, const Flow& flow, const vec* gradient, const int32_t* written)
        : layer_(layer), flow_(flow), gradient_(gradient),
          chosen_(layer.chosen.data() + flow.origin * layer.out.features()), written_(written), area_(layer.out.area()),
          plane_(layer.out.plane()) {}

    vec value(long channel, long place) const {
        return flow_.let_back(layer_, channel * plane_ + written_[place], gradient_[channel * area_ + place]);
    }

    ivec way(long channel, long place) const { return widened(chosen_[channel * area_ + place]); }

  private:
    const Layer& layer_;
    const Flow& flow_;
    const vec* gradient_;
    const bvec* chosen_;
    const int32_t* written_;
    const long area_, plane_;
};

// Adds the gradient of a group by the biases.
template <class Taker>
inline void add_biases(const Layer& layer, const PooledSlopes& slopes, const Taker& taker) {
    for (long output = 0; output < layer.out.channels; output++) {
        vec total{};
        for (long place = 0; place < layer.out.area(); place++) total += slopes.value(output, place);
        taker.take(layer.bias + output, total);
    }
}

// Writes a group's slopes and the starts of their windows, record by record and output by output.
NOINLINE void route(Routes& routes, const Layer& layer, const PooledSlopes& slopes) {
    const RouteShape shape(layer);
    const long outputs = layer.out.channels;
    const int32_t pixel = layer.in.channels, row = int32_t(shape.row);
    for (long output = 0; output < outputs; output++)
        for (long first = 0; first < shape.padded; first += LANES) {
            vec values[LANES] = {}, starts[LANES] = {};
            const int here = int(std::clamp<long>(shape.places - first, 0, LANES));
            for (int i = 0; i < here; i++) {
                values[i] = slopes.value(output, first + i);
                const ivec way = slopes.way(output, first + i);
                starts[i] = (vec)((way & 1) * pixel + (way >> 1) * row + routes.corners[first + i]);
            }
            transpose(values), transpose(starts);
            for (int lane = 0; lane < LANES; lane++) {
                const long at = (lane * outputs + output) * shape.padded + first;
                store(routes.values.data() + at, values[lane]);
                store(reinterpret_cast<float*>(routes.starts.data() + at), starts[lane]);
            }
        }
}

// Writes a group's slopes and their ways, record by record and place by place.
NOINLINE void cross(Routes& routes, const Layer& layer, const PooledSlopes& slopes) {
    const RouteShape shape(layer);
    for (long place = 0; place < shape.places; place++)
        for (long block = 0; block < shape.blocks; block++) {
            vec values[LANES] = {}, ways[LANES] = {};
            const int here = int(std::min<long>(layer.out.channels - block * LANES, LANES));
            for (int i = 0; i < here; i++) {
                values[i] = slopes.value(block * LANES + i, place);
                ways[i] = (vec)slopes.way(block * LANES + i, place);
            }
            transpose(values), transpose(ways);
            for (int lane = 0; lane < LANES; lane++) {
                const long at = ((lane * shape.places + place) * shape.blocks + block) * LANES;
                store(routes.crossing.data() + at, values[lane]);
                store(reinterpret_cast<float*>(routes.ways.data() + at), ways[lane]);
            }
        }
}

// Returns true if one pass computes the gradients by input and by weights. A window is then loaded only once for all outputs.
constexpr bool holds_window(long rows, long vectors) { return BY_PLACE && vectors * (2 * rows + 1) <= HELD; }

// Lists the slopes of a record that are not zero, by output and band.
NOINLINE void list_slopes(Routes& routes, const RouteShape& shape, int lane) {
    for (long output = 0; output < shape.outputs; output++)
        for (long band = 0; band < shape.bands; band++) {
            const long to = output * shape.padded + band * shape.band_places;
            const long from = lane * shape.outputs * shape.padded + to;
            int count = 0;
            for (long i = 0; i < shape.band_places; i += LANES) {
                const vec values = load(routes.values.data() + from + i);
                const ivec meets = (values != 0.0f) & (LANE < int32_t(shape.band_places - i));
                const vec starts = load(reinterpret_cast<const float*>(routes.starts.data() + from + i));
                const uint32_t which = bits(meets);
                store_some(routes.met.data() + to + count, values, which);
                store_some(reinterpret_cast<float*>(routes.windows.data() + to + count), starts, which);
                count += __builtin_popcount(which);
            }
            routes.counts[band * shape.outputs + output] = count;
        }
}

// Lists, for one record and every place, the outputs whose slopes are not zero, by way.
NOINLINE void list_ways(Routes& routes, const RouteShape& shape, int lane) {
    const long from = lane * shape.places * shape.blocks * LANES;
    uint32_t* going = routes.going.data();
    for (long place = 0; place < shape.places; place++, going += WAYS * shape.blocks)
        for (long block = 0; block < shape.blocks; block++) {
            const long at = from + (place * shape.blocks + block) * LANES;
            const vec values = load(routes.crossing.data() + at);
            const ivec ways = (ivec)load(reinterpret_cast<const float*>(routes.ways.data() + at));
            UNROLL for (int way = 0; way < WAYS; way++)
                going[way * shape.blocks + block] = bits((values != 0.0f) & (ways == way));
        }
}

}  // namespace
