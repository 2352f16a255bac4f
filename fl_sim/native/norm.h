// GroupNorm (Wu and He 2018) with the ReLU that follows. The channels of every record are divided into parts. Each part is shifted
// and scaled to mean 0 and variance 1. Then every channel is multiplied by a weight, and a bias is added.
#pragma once

#include "layer.h"

namespace {

// Calls ``each(channel, y)`` for every row of a part.
template <class Each>
INLINE void each_row(const Layer& layer, int part, const Each& each) {
    const int channels = layer.in.channels / layer.parts;
    for (int channel = part * channels; channel < (part + 1) * channels; channel++)
        for (int y = 0; y < layer.in.height; y++) each(channel, y);
}

// Writes the mean of a part and 1 / sqrt(variance + epsilon). Each row has its own sum, so that rounding errors grow with the
// number of rows instead of the number of pixels.
INLINE void measure(const Layer& layer, const vec* in, int part, vec* moments) {
    const Image& from = layer.in;
    const float count = float(from.features() / layer.parts);
    vec mean{}, variance{};
    each_row(layer, part, [&](int channel, int y) {
        const vec* row = in + from.line(channel, y);
        vec total{};
        for (int x = 0; x < from.width; x++) total += row[x];
        mean += total;
    });
    mean /= count;
    each_row(layer, part, [&](int channel, int y) {
        const vec* row = in + from.line(channel, y);
        vec total{};
        for (int x = 0; x < from.width; x++) total += (row[x] - mean) * (row[x] - mean);
        variance += total;
    });
    moments[0] = mean, moments[1] = 1.0f / root(variance / count + layer.epsilon);
}

// The normalisation of the numbers of one channel, before the ReLU.
struct Normed {
    vec mean, slope, bias;
    Normed(const Layer& layer, const vec* moments, int channel, const float* params)
        : mean(moments[0]), slope(moments[1] * params[layer.weight + channel]), bias(spread(params[layer.bias + channel])) {}
    INLINED vec of(vec value) const { return (value - mean) * slope + bias; }
};

NOINLINE void norm_forward(Layer& layer, const Flow& flow, const float* params) {
    const Image &from = layer.in, &to = layer.out;
    for (int part = 0; part < layer.parts; part++) {
        vec* moments = layer.moments.data() + 2 * (flow.origin * layer.parts + part);
        measure(layer, flow.in, part, moments);
        each_row(layer, part, [&](int channel, int y) {
            const Normed normed(layer, moments, channel, params);
            const vec* in = flow.in + from.line(channel, y);
            const long at = to.line(channel, y);
            for (int x = 0; x < from.width; x++) flow.out[at + x] = flow.let_through(layer, at + x, normed.of(in[x]));
        });
    }
}

// With n = (x - mean) * scale: dx = scale * (w * dy - mean(w * dy) - n * mean(w * dy * n)), with means over the part. The ReLU's
// mask is computed again from the input, because the output is not stored.
NOINLINE void norm_backward(const Layer& layer, const Flow& flow, const vec* gradient, vec* back, const float* params,
                            float* gradients) {
    const Image& from = layer.in;
    const float count = float(from.features() / layer.parts);
    const auto slope_of = [&](const Normed& normed, vec value, vec incoming) INLINED {
        return !layer.relu || normed.of(value) > 0.0f ? incoming : vec{};
    };
    for (int part = 0; part < layer.parts; part++) {
        const vec* moments = layer.moments.data() + 2 * (flow.origin * layer.parts + part);
        const vec mean = moments[0], scale = moments[1];
        vec mean_slope{}, mean_product{};
        each_row(layer, part, [&](int channel, int y) {
            const Normed normed(layer, moments, channel, params);
            const vec* in = flow.in + from.line(channel, y);
            const long bare = (long(channel) * from.height + y) * from.width;
            vec slopes{}, products{};
            for (int x = 0; x < from.width; x++) {
                const vec slope = slope_of(normed, in[x], gradient[bare + x]);
                slopes += slope;
                products += slope * (in[x] - mean);
            }
            products *= scale;
            gradients[layer.weight + channel] += sum(products);
            gradients[layer.bias + channel] += sum(slopes);
            mean_slope += slopes * params[layer.weight + channel];
            mean_product += products * params[layer.weight + channel];
        });
        mean_slope /= count, mean_product *= scale / count;
        each_row(layer, part, [&](int channel, int y) {
            const Normed normed(layer, moments, channel, params);
            const vec* in = flow.in + from.line(channel, y);
            const long bare = (long(channel) * from.height + y) * from.width;
            const float weight = params[layer.weight + channel];
            for (int x = 0; x < from.width; x++) {
                const vec slope = slope_of(normed, in[x], gradient[bare + x]);
                back[bare + x] = scale * (weight * slope - mean_slope - (in[x] - mean) * mean_product);
            }
        });
    }
}

}  // namespace
