// The description of a layer: its kind, its sizes, the layers that it reads, and its working memory.
#pragma once

#include <cstring>
#include <vector>

#include "clock.h"
#include "factors.h"

namespace {

enum Kind { CONV = 0, POOL = 1, RELU = 2, LINEAR = 3, NORM = 4, ADD = 5, AVERAGE = 6, DROP = 7 };
constexpr int FIELDS = 18;  // the number of fields in a layer's description; layers.py names them
constexpr long MOST_NUMBERS = 1L << 30;  // the largest size of one record's activation in a node, so that 32-bit counters do not overflow
constexpr int MOST_WIDE = 1 << 15;       // the largest side of a kernel, and the largest border, for the same reason

struct Image {  // the sizes of an activation: one plane of vectors for each channel, with a border of zeros
    int channels = 0, height = 0, width = 0, border_y = 0, border_x = 0;
    long row() const { return width + 2 * border_x; }
    long plane() const { return row() * (height + 2 * border_y); }
    long vectors() const { return plane() * channels; }
    long area() const { return long(height) * width; }
    long features() const { return area() * channels; }
    long start() const { return border_y * row() + border_x; }
    long line(int channel, int y) const { return channel * plane() + start() + y * row(); }  // the index of a row's first pixel
    Image bare() const { return {channels, height, width}; }  // the same sizes without the border
    bool same_size(const Image& other) const {
        return channels == other.channels && height == other.height && width == other.width;
    }
};

// Copies planes without a border, [channel][row][column], to planes with a border.
inline void add_border(const vec* bare, const Image& shape, vec* to) {
    for (int channel = 0; channel < shape.channels; channel++)
        for (int y = 0; y < shape.height; y++, bare += shape.width)
            std::copy(bare, bare + shape.width, to + shape.line(channel, y));
}

#ifdef FL_SIM_AMX
// The operands of a convolution in the layout for AMX: see amx_convolution.h and amx_gradient.h.
struct AmxRoom {
    std::vector<Pairs::Weight> kernels, back_kernels;  // the kernels for the forward and the backward pass
    std::vector<Pairs::Weight> room;                   // temporary memory for some kernels in another order
    std::vector<Pairs::Values> columns, slopes;        // the inputs of a row of outputs; the slopes of a group
    Pairs::Room records;                               // the inputs of a group, as pairs of records
    std::vector<vec> gradient;                         // the weights' gradient, summed over the minibatch
};
#endif

struct Layer {
    Kind kind;
    int source, other;  // the nodes that the layer reads; only ADD reads two
    int kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x;
    bool has_bias, relu, pooled;      // pooled: 2 x 2 max pooling of stride 2 follows the convolution
    int parts;                        // NORM: the number of parts into which the channels are divided
    float epsilon;                    // NORM: the number that is added to the variance
    float dropout;                    // the probability that dropout sets an output to zero, see dropout.h
    float factor;                     // the factor of the outputs in training
    Image in, out;                    // the sizes of input and output, with the widest border that a reading layer needs
    int before_height, before_width;  // the height and width of a convolution's output before pooling
    long weight, bias;                // the indices of its first weight and its first bias among all parameters
    std::vector<bvec> chosen;         // the index, 0 to 3, of the maximum in each pooling window of a convolution: [group][out]
    std::vector<int32_t> place;       // the input index of the maximum in each window of a pooling layer: [group][out][lane]
    std::vector<vec> moments;         // NORM: means and reciprocal standard deviations, [group][2 * parts]
    Image slope;                      // the sizes of ``slopes``, with the border that the backward pass needs
    std::vector<vec> slopes;          // the gradient of one group before ReLU and pooling
    std::vector<vec> turned;          // some slopes in a layout with the output innermost, see gradient.h
    std::vector<vec> by_outputs;      // the gradient of a convolution's weights, [some outputs][channel][tap]
    std::vector<float> flipped;       // a convolution's weights, [in channel][out channel], each kernel rotated by 180 degrees
    const Factors::Weight* kernels;   // a convolution's weights in the layout of the forward pass, in ``kernel_room``
    Factors::Room kernel_room, flipped_room, plane_room;
    std::vector<Factors::Values> chosen_slopes;  // the slopes of one output channel of a pooled first convolution, see chosen.h
#ifdef FL_SIM_AMX
    AmxRoom amx;
#endif

    long taps() const { return long(kernel_y) * kernel_x; }
    // The index, in the input, at which the first window starts.
    long corner() const { return (in.border_y - padding_y) * in.row() + in.border_x - padding_x; }
    long num_weights() const {
        if (kind == CONV) return long(out.channels) * in.channels * taps();
        if (kind == NORM) return out.channels;
        return kind == LINEAR ? long(out.channels) * in.features() : 0;
    }
    bool is_changed() const { return dropout > 0 || factor != 1; }  // true if dropout or a factor changes the layer's outputs
    long num_biases() const { return has_bias ? out.channels : 0; }
};

// Returns true if a layer's window fits into the input with its border.
inline bool has_window(const int32_t* field, const Image& in) {
    for (int axis = 0; axis < 2; axis++) {
        const long kernel = field[2 + axis], stride = field[4 + axis], padding = field[6 + axis];
        if (kernel < 1 || kernel > MOST_WIDE || stride < 1 || padding < 0 || padding >= kernel) return false;
        if ((axis ? in.width : in.height) + 2 * padding < kernel) return false;
        if (field[0] == POOL && 2 * padding > kernel) return false;  // else a window could consist of border pixels only
    }
    return true;
}

inline float number_in(const int32_t* field) {
    float number;
    std::memcpy(&number, field, sizeof number);
    return number;
}

// Returns true if ``field`` describes a supported layer that fits an input of the sizes ``in``.
inline bool is_known(const int32_t* field, const Image& in) {
    if (field[10] && field[0] != CONV) return false;  // only convolutions are fused with pooling
    if (!(number_in(field + 16) >= 0 && number_in(field + 16) < 1 && number_in(field + 17) >= 0)) return false;
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

// Returns the layer for a description that ``is_known`` has accepted. ``in``: the sizes of its input. ``Graph`` sets the borders
// later.
inline Layer read_layer(const int32_t* field, const Image& in) {
    Layer layer{};
    layer.kind = Kind(field[0]);
    layer.kernel_y = field[2], layer.kernel_x = field[3];
    layer.stride_y = field[4], layer.stride_x = field[5];
    layer.padding_y = field[6], layer.padding_x = field[7];
    layer.has_bias = field[8], layer.relu = field[9] || layer.kind == RELU, layer.pooled = field[10];
    layer.source = field[11], layer.other = field[12];
    layer.parts = field[13];
    layer.epsilon = number_in(field + 14), layer.dropout = number_in(field + 16);
    layer.factor = field[17] ? number_in(field + 17) : 1.0f;
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

// Allocates a layer's memory for minibatches of ``groups`` groups.
inline void reserve(Layer& layer, int groups) {
    if (layer.kind == POOL) layer.place.resize(groups * layer.out.features() * LANES);
    if (layer.kind == NORM) layer.moments.resize(groups * 2 * layer.parts);
    if (layer.kind != CONV) return;
    if (layer.pooled) layer.chosen.resize(groups * layer.out.features());
    // The backward pass reads, for every pixel of the input, a window of slopes with every stride-th kernel tap. Near the edges
    // this window includes slopes of zero, which are the border.
    const int border_y = layer.stride_y == 1 ? layer.kernel_y - 1 - layer.padding_y : (layer.kernel_y - 1) / layer.stride_y;
    const int border_x = layer.stride_x == 1 ? layer.kernel_x - 1 - layer.padding_x : (layer.kernel_x - 1) / layer.stride_x;
    const int height = (layer.in.height - 1 + layer.padding_y) / layer.stride_y + 1 - border_y;
    const int width = (layer.in.width - 1 + layer.padding_x) / layer.stride_x + 1 - border_x;
    layer.slope = {layer.out.channels, std::max(layer.before_height, height), std::max(layer.before_width, width), border_y,
                   border_x};
    layer.slopes.resize(layer.slope.vectors());
    layer.flipped.resize(layer.num_weights() + LANES);
}

// The slopes of a group, and their layout. Slopes are the gradient of the loss by a convolution's output before ReLU and pooling.
struct Slope {
    const vec* values;
    Image image;
    const vec* line(int channel, int y) const { return values + image.line(channel, y); }
};

// One group's pass through a layer. A derivative group (see kernel.cpp) uses the maxima and ReLUs of its ``origin``, the group
// that it is the derivative of, and no biases. An ordinary group is its own origin.
struct Flow {
    const vec *in, *other;  // the inputs of the layer; other: null unless the layer is an ADD
    vec* out;
    const vec* passed;      // the origin's output: the ReLU is active where it is positive
    int origin;
    bool is_derivative;

    // Applies the layer's ReLU to ``value``, at the index ``at`` of the output. Returns ``value`` itself if the layer has no
    // ReLU.
    vec let_through(const Layer& layer, long at, vec value) const {
        if (!layer.relu) return value;
        return !is_derivative ? rectified(value) : passed[at] > 0.0f ? value : vec{};
    }
    // Returns the gradient before the ReLU from the ``gradient`` after the ReLU, at the index ``at`` of the output.
    vec let_back(const Layer& layer, long at, vec gradient) const {
        return !layer.relu || passed[at] > 0.0f ? gradient : vec{};
    }
};

}  // namespace
