// What a layer is: its sizes, what it reads, and the memory it works in.
#pragma once

#include <cstring>
#include <vector>

#include "clock.h"
#include "factors.h"

namespace {

enum Kind { CONV = 0, POOL = 1, RELU = 2, LINEAR = 3, NORM = 4, ADD = 5, AVERAGE = 6, DROP = 7 };
constexpr int FIELDS = 17;  // of a layer's description, named in layers.py
constexpr long MOST_NUMBERS = 1L << 30;  // of a record in one place: what counts them in 32 bits does not overflow
constexpr int MOST_WIDE = 1 << 15;       // of a kernel or its border: likewise

struct Image {  // planes of vectors, each with a border of zeros
    int channels = 0, height = 0, width = 0, border_y = 0, border_x = 0;
    long row() const { return width + 2 * border_x; }
    long plane() const { return row() * (height + 2 * border_y); }
    long vectors() const { return plane() * channels; }
    long area() const { return long(height) * width; }
    long features() const { return area() * channels; }
    long start() const { return border_y * row() + border_x; }
    long line(int channel, int y) const { return channel * plane() + start() + y * row(); }  // where a row's pixels start
    Image bare() const { return {channels, height, width}; }  // without its border
    bool same_size(const Image& other) const {
        return channels == other.channels && height == other.height && width == other.width;
    }
};

#ifdef FL_SIM_AMX
// What a convolution multiplies by AMX, as it lies for that: see amx_convolution.h and amx_gradient.h.
struct AmxRoom {
    std::vector<Pairs::Weight> kernels, back_kernels;  // of the way forward, and back
    std::vector<Pairs::Weight> room;                   // of some kernels in another order
    std::vector<Pairs::Values> columns, slopes;        // what a row of outputs reads; a group's slopes
    Pairs::Room records;                               // a group's records
    std::vector<vec> gradient;                         // of the weights, summed over the minibatch
};
#endif

struct Layer {
    Kind kind;
    int source, other;  // nodes that it reads; only ADD reads two
    int kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x;
    bool has_bias, relu, pooled;      // pooled: a 2 x 2 window of stride 2 stands behind the convolution
    int parts;                        // NORM: how many groups the channels are divided into
    float epsilon;                    // NORM: added to the variance
    float dropout;                    // with what probability a number that it writes is left out, see dropout.h
    Image in, out;                    // what comes in, what goes out: with the widest border that a reader wants
    int before_height, before_width;  // of a convolution's output before its pooling
    long weight, bias;                // where its parameters start
    std::vector<bvec> chosen;         // which number of its window a pooled convolution took: [group][out]
    std::vector<int32_t> place;       // where a pooling layer found its maximum: [group][out][lane]
    std::vector<vec> moments;         // NORM: means and reciprocal deviations, [group][2 * parts]
    Image slope;                      // gradient before pooling, bordered for the way back
    std::vector<vec> slopes;          // one group's
    std::vector<vec> turned;          // some of them with the output innermost, see gradient.h
    std::vector<vec> by_outputs;      // the gradient of a convolution's weights, [some outputs][channel][tap]
    std::vector<float> flipped;       // a convolution's weights, [in channel][out channel] and each kernel turned round
    const Factors::Weight* kernels;   // a convolution's weights as the way forward takes them, in ``kernel_room``
    Factors::Room kernel_room, flipped_room, plane_room;
    std::vector<Factors::Values> chosen_slopes;  // of one output of a pooled first convolution, see chosen.h
#ifdef FL_SIM_AMX
    AmxRoom amx;
#endif

    long taps() const { return long(kernel_y) * kernel_x; }
    // Of what comes in: where the first window starts.
    long corner() const { return (in.border_y - padding_y) * in.row() + in.border_x - padding_x; }
    long num_weights() const {
        if (kind == CONV) return long(out.channels) * in.channels * taps();
        if (kind == NORM) return out.channels;
        return kind == LINEAR ? long(out.channels) * in.features() : 0;
    }
    long num_biases() const { return has_bias ? out.channels : 0; }
};

// Says whether a layer's window lies within what comes in, with its border.
inline bool has_window(const int32_t* field, const Image& in) {
    for (int axis = 0; axis < 2; axis++) {
        const long kernel = field[2 + axis], stride = field[4 + axis], padding = field[6 + axis];
        if (kernel < 1 || kernel > MOST_WIDE || stride < 1 || padding < 0 || padding >= kernel) return false;
        if ((axis ? in.width : in.height) + 2 * padding < kernel) return false;
        if (field[0] == POOL && 2 * padding > kernel) return false;  // a window could lie in the border alone
    }
    return true;
}

inline float dropout_of(const int32_t* field) {
    float probability;
    std::memcpy(&probability, field + 16, sizeof probability);
    return probability;
}

// Says whether a description can be read as one of the layers there are, on ``in``. A kind that is not named here is none.
inline bool is_known(const int32_t* field, const Image& in) {
    if (field[10] && field[0] != CONV) return false;  // pooling is fused with a convolution alone
    if (!(dropout_of(field) >= 0 && dropout_of(field) < 1)) return false;
    switch (field[0]) {
        case CONV: return field[1] > 0 && field[15] == in.channels && has_window(field, in);
        case POOL: return has_window(field, in);
        case LINEAR: return field[1] > 0 && field[15] == in.features();
        case NORM: return field[8] && field[13] > 0 && field[15] == in.channels && in.channels % field[13] == 0;
        case AVERAGE: return !field[9];
        case RELU: case ADD: case DROP: return true;
    }
    return false;
}

// Reads a description that ``is_known``; ``in``: the size of what comes in. Borders are for the network to set.
inline Layer read_layer(const int32_t* field, const Image& in) {
    Layer layer{};
    layer.kind = Kind(field[0]);
    layer.kernel_y = field[2], layer.kernel_x = field[3];
    layer.stride_y = field[4], layer.stride_x = field[5];
    layer.padding_y = field[6], layer.padding_x = field[7];
    layer.has_bias = field[8], layer.relu = field[9] || layer.kind == RELU, layer.pooled = field[10];
    layer.source = field[11], layer.other = field[12];
    layer.parts = field[13];
    std::memcpy(&layer.epsilon, field + 14, sizeof layer.epsilon);
    layer.dropout = dropout_of(field);
    layer.in = layer.out = in;
    if (layer.kind == LINEAR) layer.out = {field[1], 1, 1};
    if (layer.kind == AVERAGE) layer.out.height = layer.out.width = 1;
    if (layer.kind == CONV || layer.kind == POOL) {
        layer.before_height = (in.height + 2 * layer.padding_y - layer.kernel_y) / layer.stride_y + 1;
        layer.before_width = (in.width + 2 * layer.padding_x - layer.kernel_x) / layer.stride_x + 1;
        layer.out.channels = layer.kind == CONV ? field[1] : in.channels;
        layer.out.height = layer.pooled ? layer.before_height / 2 : layer.before_height;
        layer.out.width = layer.pooled ? layer.before_width / 2 : layer.before_width;
    }
    return layer;
}

// Takes the memory a layer needs for minibatches of ``groups`` groups.
inline void reserve(Layer& layer, int groups) {
    if (layer.kind == POOL) layer.place.resize(groups * layer.out.features() * LANES);
    if (layer.kind == NORM) layer.moments.resize(groups * 2 * layer.parts);
    if (layer.kind != CONV) return;
    if (layer.pooled) layer.chosen.resize(groups * layer.out.features());
    // The way back reads a window around every pixel of the input: of every stride-th tap, and of slopes that are zero.
    const int border_y = layer.stride_y == 1 ? layer.kernel_y - 1 - layer.padding_y : (layer.kernel_y - 1) / layer.stride_y;
    const int border_x = layer.stride_x == 1 ? layer.kernel_x - 1 - layer.padding_x : (layer.kernel_x - 1) / layer.stride_x;
    const int height = (layer.in.height - 1 + layer.padding_y) / layer.stride_y + 1 - border_y;
    const int width = (layer.in.width - 1 + layer.padding_x) / layer.stride_x + 1 - border_x;
    layer.slope = {layer.out.channels, std::max(layer.before_height, height), std::max(layer.before_width, width), border_y,
                   border_x};
    layer.slopes.resize(layer.slope.vectors());
    layer.flipped.resize(layer.num_weights() + LANES);
}

// A group's gradient of what a convolution wrote, before its ReLU and pooling, and how it lies.
struct Slope {
    const vec* values;
    Image image;
    const vec* line(int channel, int y) const { return values + image.line(channel, y); }
};

// One group on its way through a layer. A derivative is carried along the way its ``origin`` went: the same maxima, the
// same ReLUs, no biases. An ordinary group is its own origin.
struct Flow {
    const vec *in, *other;  // what the layer reads; other: null unless it is an ADD
    vec* out;
    const vec* passed;      // the origin's output: ReLU lets through where it is positive
    int origin;
    bool is_derivative;

    // What a layer's ReLU, if it has one, makes of ``value`` at ``at`` in the output.
    vec let_through(const Layer& layer, long at, vec value) const {
        if (!layer.relu) return value;
        return !is_derivative ? rectified(value) : passed[at] > 0.0f ? value : vec{};
    }
    // The same on the way back.
    vec let_back(const Layer& layer, long at, vec gradient) const {
        return !layer.relu || passed[at] > 0.0f ? gradient : vec{};
    }
};

}  // namespace
