// GroupNorm with the ReLU behind it (Wu and He 2018): every record's channels are divided into parts, each of which is
// shifted and scaled to mean 0 and variance 1, and every channel then has a weight and a bias.
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

// Sums go row by row, so that rounding grows with the rows and not with the pixels.
NOINLINE void norm_forward(Layer& layer, const Flow& flow, const float* params) {
    const Image &from = layer.in, &to = layer.out;
    const float count = float(from.features() / layer.parts);
    for (int part = 0; part < layer.parts; part++) {
        vec mean{}, variance{};
        each_row(layer, part, [&](int channel, int y) {
            const vec* in = flow.in + from.line(channel, y);
            vec total{};
            for (int x = 0; x < from.width; x++) total += in[x];
            mean += total;
        });
        mean /= count;
        each_row(layer, part, [&](int channel, int y) {
            const vec* in = flow.in + from.line(channel, y);
            vec total{};
            for (int x = 0; x < from.width; x++) total += (in[x] - mean) * (in[x] - mean);
            variance += total;
        });
        const vec scale = 1.0f / root(variance / count + layer.epsilon);
        vec* moments = layer.moments.data() + 2 * (flow.origin * layer.parts + part);
        moments[0] = mean, moments[1] = scale;
        each_row(layer, part, [&](int channel, int y) {
            const vec* in = flow.in + from.line(channel, y);
            const long at = to.line(channel, y);
            const vec slope = scale * params[layer.weight + channel], bias = spread(params[layer.bias + channel]);
            for (int x = 0; x < from.width; x++)
                flow.out[at + x] = flow.let_through(layer, at + x, (in[x] - mean) * slope + bias);
        });
    }
}

// With n = (x - mean) * scale: dx = scale * (w * dy - mean(w * dy) - n * mean(w * dy * n)), means over the part.
NOINLINE void norm_backward(const Layer& layer, const Flow& flow, const vec* gradient, vec* back, const float* params,
                            float* gradients) {
    const Image &from = layer.in, &to = layer.out;
    const float count = float(from.features() / layer.parts);
    for (int part = 0; part < layer.parts; part++) {
        const vec* moments = layer.moments.data() + 2 * (flow.origin * layer.parts + part);
        const vec mean = moments[0], scale = moments[1];
        vec mean_slope{}, mean_product{};
        each_row(layer, part, [&](int channel, int y) {
            const vec* in = flow.in + from.line(channel, y);
            const long at = to.line(channel, y), bare = (long(channel) * from.height + y) * from.width;
            vec slopes{}, products{};
            for (int x = 0; x < from.width; x++) {
                const vec slope = flow.let_back(layer, at + x, gradient[bare + x]);
                slopes += slope;
                products += slope * (in[x] - mean);
            }
            products *= scale;
            gradients[layer.weight + channel] += sum(products);
            gradients[layer.bias + channel] += sum(slopes);
            mean_slope += slopes * params[layer.weight + channel];
            mean_product += products * params[layer.weight + channel];
        });
        mean_slope /= count, mean_product /= count;
        each_row(layer, part, [&](int channel, int y) {
            const vec* in = flow.in + from.line(channel, y);
            const long at = to.line(channel, y), bare = (long(channel) * from.height + y) * from.width;
            const float weight = params[layer.weight + channel];
            for (int x = 0; x < from.width; x++) {
                const vec slope = flow.let_back(layer, at + x, gradient[bare + x]);
                back[bare + x] = scale * (weight * slope - mean_slope - (in[x] - mean) * scale * mean_product);
            }
        });
    }
}

}  // namespace
