// The forward and backward pass of multilayer perceptrons, with one row for every record.
#pragma once

#include "sorted.h"

namespace {

// A linear layer, in PyTorch's layout, and the ReLU that follows it. perceptrons.py has the same structure, field by field.
struct Linear {
    const float *weights, *bias;  // [output][input]; bias: null: none
    int64_t inputs, outputs, stride;  // stride: the distance between the weights of two outputs
    double slope;                     // the slope of the LeakyReLU below zero; 0 for a ReLU, 1 for no ReLU
};

// ``num_classes``: the number of blocks in the inputs, one for each class; 0: no blocks. A row's values and a one fill the block of
// the row's class. All other blocks are zero and are not multiplied.
struct Perceptron {
    const Linear* layers;
    int64_t num_layers, num_classes;

    long num_blocks() const { return num_classes ? num_classes : 1; }
    long block() const { return layers[0].inputs / num_blocks(); }  // the number of inputs in one block
    long width() const { return num_classes ? block() - 1 : block(); }

    // Returns the layer for the rows of one class: the first layer has only the weights of its block.
    Linear of_class(long layer, long number) const {
        Linear found = layers[layer];
        if (layer == 0) found.weights += number * block(), found.inputs = block();
        return found;
    }
};

// The input rows of a network. ``classes``: the class of each row; read only if the network has classes.
struct Shown {
    const float* values;
    const int64_t* classes;
    int64_t count;

    bool fits(const Perceptron& net, long row) const {
        return row >= 0 && row < count && (!net.num_classes || (classes[row] >= 0 && classes[row] < net.num_classes));
    }

    bool fits(const Perceptron& net) const {
        for (long row = 0; row < count; row++)
            if (!fits(net, row)) return false;
        return true;
    }

    long class_of(const Perceptron& net, long row) const { return net.num_classes ? classes[row] : 0; }
    const float* row(const Perceptron& net, long number) const { return values + number * net.width(); }
};

// A matrix of consecutive rows, each padded with zeros.
struct Rows {
    float* at = nullptr;
    long count = 0, width = 0, stride = 0;  // count: a multiple of TILE

    float* row(long number) const { return at + number * stride; }
    Rows part(long first, long number) const { return {row(first), number, width, stride}; }

    // Pads all rows with zeros. ``first``: the number directly after a row's own numbers.
    void fill_up(float first) const {
        for (long number = 0; number < count; number++) {
            std::fill(row(number) + width, row(number) + stride, 0.0f);
            row(number)[width] = first;
        }
    }
};

constexpr long stride_of(long width) { return filled(width + 1); }

class RowsMemory {
  public:
    Rows rows(long count, long width) {
        return {numbers_.at_least(count * stride_of(width)), count, width, stride_of(width)};
    }

  private:
    Numbers<float> numbers_;
};

// e^x; NaN where ``x`` is NaN. Cephes' polynomial, with an error of at most 2 units in the last place.
INLINE vec exponential_of(vec x) {
    x = x < -87.0f ? spread(-87.0f) : x;
    x = x > 88.0f ? spread(88.0f) : x;
    const vec shifted = fused(x, spread(1.44269504088896341f), spread(12582912.0f)), whole = shifted - 12582912.0f;
    const vec rest = fused(whole, spread(2.12194440e-4f), fused(whole, spread(-0.693359375f), x));
    vec sum = spread(1.9875691500e-4f);
    for (const float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = fused(sum, rest, spread(term));
    sum = fused(sum * rest, rest, rest) + 1.0f;
    const ivec power = (ivec(shifted) - 0x4b400000 + 127) << 23;
    return sum * vec(power);
}

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exponential_of(-x)); }

// A layer's weights in the layouts for products: [input][output], and [output][input] for the backward pass.
class Packed {
  public:
    void pack(const Linear& layer, bool goes_back) {
        columns_ = filled(layer.outputs), inputs_ = filled(layer.inputs);
        forward_ = forward_memory_.at_least(inputs_ * columns_);
        bias_ = bias_memory_.at_least(columns_);
        for (long first = 0; first < inputs_; first += LANES)
            for (long output = 0; output < columns_; output += LANES) {
                vec block[LANES];
                for (int i = 0; i < LANES; i++)
                    block[i] = output + i < layer.outputs && first < layer.inputs
                                   ? load(layer.weights + (output + i) * layer.stride + first, layer.inputs - first)
                                   : vec{};
                transpose(block);
                for (int i = 0; i < LANES; i++) store(forward_ + (first + i) * columns_ + output, block[i]);
            }
        for (long output = 0; output < columns_; output++)
            bias_[output] = layer.bias && output < layer.outputs ? layer.bias[output] : 0.0f;
        if (!goes_back) return;
        back_ = back_memory_.at_least(layer.outputs * inputs_);
        for (long output = 0; output < layer.outputs; output++) {
            std::copy_n(layer.weights + output * layer.stride, layer.inputs, back_ + output * inputs_);
            std::fill(back_ + output * inputs_ + layer.inputs, back_ + (output + 1) * inputs_, 0.0f);
        }
    }

    // Computes the layer's outputs for ``in``, before the ReLU.
    template <class Take>
    void forward(const Linear& layer, const Rows& in, const Take& take) const {
        multiply_rows<float>({in.at, in.stride, 1, forward_, columns_, layer.inputs, bias_, 0}, in.count, columns_, take);
    }

    // Computes the derivative of the loss by the layer's inputs, from the derivative by its outputs.
    template <class Take>
    void back(const Linear& layer, const Rows& errors, const Take& take) const {
        multiply_rows<float>({errors.at, errors.stride, 1, back_, inputs_, layer.outputs, nullptr, 0}, errors.count,
                             inputs_, take);
    }

  private:
    Numbers<float> forward_memory_, back_memory_, bias_memory_;
    float *forward_ = nullptr, *back_ = nullptr, *bias_ = nullptr;
    long columns_ = 0, inputs_ = 0;
};

// The memory and the functions for the passes of a perceptron. It holds each layer's inputs and errors. An error is the
// derivative of the loss by an output. Rows are sorted by class.
class Passage {
  public:
    // Prepares the passes of ``net``. ``goes_back_to``: the index of the first layer for which the derivative by its inputs is
    // needed.
    void begin(const Perceptron& net, long goes_back_to) {
        net_ = net;
        packed_.resize(net.num_layers), first_.resize(net.num_blocks());
        entered_.resize(net.num_layers + 1), errors_.resize(net.num_layers);
        for (long number = 0; number < net.num_blocks(); number++)
            first_[number].pack(net.of_class(0, number), goes_back_to == 0);
        for (long layer = 1; layer < net.num_layers; layer++) packed_[layer].pack(net.layers[layer], layer >= goes_back_to);
    }

    // Memory for the inputs of the first layer, of all layers, and for errors.
    Rows inputs(long count) { return entered(0, count); }
    Rows entered(long layer, long count) {
        const long width = layer == 0                ? net_.block()
                           : layer < net_.num_layers ? net_.layers[layer].inputs
                                                     : net_.layers[layer - 1].outputs;
        return entered_[layer].rows(count, width);
    }
    Rows errors(long layer, long count) { return errors_[layer].rows(count, net_.layers[layer].outputs); }
    Rows left(long count) { return entered(net_.num_layers, count); }
    Rows last_errors(long count) { return errors(net_.num_layers - 1, count); }

    // Writes an input row of the first layer.
    void enter(const float* values, float* row) const {
        std::copy_n(values, net_.width(), row);
        if (net_.num_classes) row[net_.width()] = 1.0f;
    }

    // The forward pass. The inputs of the first layer must have been written.
    void forward(const Sorted& rows) {
        const long count = rows.count();
        rows.for_fillers([&](long row) { std::fill_n(inputs(count).row(row), inputs(count).stride, 0.0f); });
        fill_up(0, count);
        for (long number = 0; number < net_.num_layers; number++) {
            const Rows in = entered(number, count), out = entered(number + 1, count);
            if (number > 0) pass(packed_[number], net_.layers[number], in, out);
            for (const Sorted::Group& group : rows.groups())
                if (number == 0)
                    pass(first_[group.number], net_.of_class(0, group.number), in.part(group.first, group.filled_up()),
                         out.part(group.first, group.filled_up()));
            fill_up(number + 1, count);
        }
    }

    // The backward pass, from the errors of the last layer to those of the first layer.
    void back(long count) {
        for (long number = net_.num_layers - 1; number > 0; number--) {
            const Rows in = errors(number, count), out = errors(number - 1, count), after = entered(number, count);
            const float slope = float(net_.layers[number - 1].slope);
            packed_[number].back(net_.layers[number], in, [&](long row, long column, vec value) {
                const vec passed = load(after.row(row) + column);
                store(out.row(row) + column, passed > 0.0f ? value : slope * value);
            });
            out.fill_up(0.0f);
        }
    }

    // Calls ``take(row, column, vector)`` with the derivative by the inputs of the first layer, from that layer's errors.
    template <class Take>
    void back_to_inputs(const Sorted& rows, const Take& take) {
        for (const Sorted::Group& group : rows.groups())
            first_[group.number].back(net_.of_class(0, group.number),
                                      errors(0, rows.count()).part(group.first, group.filled_up()),
                                      [&](long row, long column, vec value) { take(group.first + row, column, value); });
    }

    const Perceptron& net() const { return net_; }

  private:
    static void pass(const Packed& packed, const Linear& layer, const Rows& in, const Rows& out) {
        const float slope = float(layer.slope);
        packed.forward(layer, in, [&](long row, long column, vec value) {
            store(out.row(row) + column, value > 0.0f ? value : slope * value);
        });
    }

    // Pads the inputs of a layer. If the layer has biases, one more input of 1 follows a row's inputs; the biases are the weights
    // of this input.
    void fill_up(long layer, long count) {
        entered(layer, count).fill_up(layer < net_.num_layers && net_.layers[layer].bias ? 1.0f : 0.0f);
    }

    Perceptron net_{};
    std::vector<Packed> first_, packed_;  // first_: the first layer, by class
    std::vector<RowsMemory> entered_, errors_;
};

}  // namespace
