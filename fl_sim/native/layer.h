// What a layer is, and the step of SGD.
#pragma once

#include <vector>

#include "vectors.h"

namespace {

enum Kind { CONV = 0, POOL = 1, RELU = 2, LINEAR = 3 };
constexpr int FIELDS = 12;  // of a layer's description, named in layers.py

struct Image {  // planes of vectors, each with a border of zeros
    int channels = 0, height = 0, width = 0, border_y = 0, border_x = 0;
    long row() const { return width + 2 * border_x; }
    long plane() const { return row() * (height + 2 * border_y); }
    long vectors() const { return plane() * channels; }
    long features() const { return long(channels) * height * width; }
    long start() const { return border_y * row() + border_x; }
};

struct Layer {
    Kind kind;
    int kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x;
    bool has_bias, relu, pooled;      // pooled: a 2 x 2 window of stride 2 stands behind the convolution
    Image in, out;                    // what comes in (with the border this layer wants), what goes out (the next one's)
    int before_height, before_width;  // of a convolution's output before its pooling
    long weight, bias;                // where its parameters start
    std::vector<vec> activation;      // what comes in: [group][in]
    std::vector<bvec> chosen;         // which number of its window a pooled convolution took: [group][out]
    std::vector<int32_t> place;       // where a pooling layer found its maximum: [group][out][lane]
    Image slope;                      // gradient before pooling: spread by the stride, bordered for the way back
    std::vector<vec> slopes;          // one group's
    std::vector<float> flipped;       // a convolution's weights, [in channel][out channel] and each kernel turned round

    long taps() const { return long(kernel_y) * kernel_x; }
    long num_weights() const {
        if (kind == CONV) return long(out.channels) * in.channels * taps();
        return kind == LINEAR ? long(out.channels) * in.features() : 0;
    }
    vec* group_input(int group) { return activation.data() + group * in.vectors(); }
};

inline Layer read_layer(const int32_t* field, Image in) {
    Layer layer{};
    layer.kind = Kind(field[0]);
    layer.kernel_y = field[2], layer.kernel_x = field[3];
    layer.stride_y = field[4], layer.stride_x = field[5];
    layer.padding_y = field[6], layer.padding_x = field[7];
    layer.has_bias = field[8], layer.relu = field[9], layer.pooled = field[10];
    layer.in = in;
    layer.in.border_y = layer.kind == CONV ? layer.padding_y : 0;
    layer.in.border_x = layer.kind == CONV ? layer.padding_x : 0;
    layer.out = in;
    if (layer.kind == LINEAR) layer.out = {field[1], 1, 1};
    if (layer.kind == CONV || layer.kind == POOL) {
        layer.before_height = (in.height + 2 * layer.padding_y - layer.kernel_y) / layer.stride_y + 1;
        layer.before_width = (in.width + 2 * layer.padding_x - layer.kernel_x) / layer.stride_x + 1;
        layer.out.channels = layer.kind == CONV ? field[1] : in.channels;
        layer.out.height = layer.pooled ? layer.before_height / 2 : layer.before_height;
        layer.out.width = layer.pooled ? layer.before_width / 2 : layer.before_width;
    }
    layer.out.border_y = layer.out.border_x = 0;
    return layer;
}

// Takes the memory a layer needs for minibatches of ``groups`` groups.
inline void reserve(Layer& layer, int groups) {
    layer.activation.resize(groups * layer.in.vectors());
    if (layer.kind == POOL) layer.place.resize(groups * layer.out.features() * LANES);
    if (layer.kind != CONV) return;
    if (layer.pooled) layer.chosen.resize(groups * layer.out.features());
    // With its border as tall as the input and a kernel less one: the way back reads a whole kernel around every pixel.
    const int border_y = layer.kernel_y - 1 - layer.padding_y, border_x = layer.kernel_x - 1 - layer.padding_x;
    layer.slope = {layer.out.channels, layer.in.height + layer.kernel_y - 1 - 2 * border_y,
                   layer.in.width + layer.kernel_x - 1 - 2 * border_x, border_y, border_x};
    layer.slopes.resize(layer.slope.vectors());
    layer.flipped.resize(layer.num_weights());
}

// torch.optim.SGD's step. All arrays are LANES longer than they have parameters.
struct Sgd {
    float learning_rate, momentum, weight_decay, proximal_mu;
    float *params, *buffers;       // buffers are not touched without momentum
    const float *anchor, *offset;  // offset: null where there is none

    // Steps ``count`` parameters, at most LANES; those behind them are written as they were.
    inline __attribute__((always_inline)) void step(long at, vec gradient, long count) const {
        const ivec is_mine = LANE < int32_t(std::min<long>(count, LANES));
        const vec weight = load(params + at);
        if (offset) gradient += load(offset + at);
        if (proximal_mu != 0) gradient += proximal_mu * (weight - load(anchor + at));
        if (weight_decay != 0) gradient += weight_decay * weight;
        if (momentum != 0) {
            const vec buffer = load(buffers + at);
            gradient += momentum * buffer;
            store(buffers + at, is_mine ? gradient : buffer);
        }
        store(params + at, is_mine ? weight - learning_rate * gradient : weight);
    }
};

}  // namespace
