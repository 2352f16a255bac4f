// A network on one minibatch after another.
#pragma once

#include "convolution.h"
#include "linear.h"
#include "routed.h"

namespace {

class Network {
  public:
    long num_params = -1;  // stays so where the layers do not fit together

    Network(const int32_t* described, int num_layers, Image input, int batch_size) {
        groups_ = (batch_size + LANES - 1) / LANES;
        long at = 0;
        Image shape = input;
        for (int index = 0; index < num_layers; index++) {
            Layer layer = read_layer(described + index * FIELDS, shape);
            if (layer.out.height < 1 || layer.out.width < 1 || layer.out.channels < 1) return;
            layer.weight = at;
            layer.bias = at += layer.num_weights();
            at += layer.has_bias ? layer.out.channels : 0;
            shape = layer.out;
            layers_.push_back(layer);
        }
        if (layers_.empty() || layers_.back().kind != LINEAR) return;
        for (size_t index = 0; index + 1 < layers_.size(); index++) {  // who writes keeps the border of who reads
            layers_[index].out.border_y = layers_[index + 1].in.border_y;
            layers_[index].out.border_x = layers_[index + 1].in.border_x;
        }
        while (layers_[first_linear_].kind != LINEAR) first_linear_++;
        long widest = classes_ = layers_.back().out.channels, largest = 1;
        for (Layer& layer : layers_) {
            reserve(layer, groups_);
            routes_.emplace_back();
            if (is_routed(layer)) reserve(routes_.back(), layer);
            if (layer.kind == LINEAR) widest = std::max(widest, layer.in.features());
            else largest = std::max(largest, layer.in.features());
        }
        logits_.resize(groups_ * widest), other_.resize(groups_ * widest);
        rows_.resize(groups_ * (widest + LANES));
        back_.resize(largest), forth_.resize(largest);
        flat_.resize(input.features() + LANES);
        gradients_.resize(at + LANES);
        num_params = at;
    }

    // One step on the ``count`` records ``chosen``; returns the batch's mean loss.
    double step(const float* inputs, const int64_t* labels, const int64_t* chosen, int count, const Sgd& sgd) {
        const int groups = (count + LANES - 1) / LANES;
        for (int group = 0; group < groups; group++) {
            gather(inputs, chosen + group * LANES, std::min(LANES, count - group * LANES), group);
            for (int index = 0; index < first_linear_; index++) forward(index, group, sgd.params);
        }
        for (size_t index = first_linear_; index < layers_.size(); index++) {
            Layer& layer = layers_[index];
            vec* out = index + 1 < layers_.size() ? layers_[index + 1].activation.data() : logits_.data();
            const long features = layer.in.features();
            multiply({layer.activation.data(), features, out, layer.out.channels, sgd.params + layer.weight, features, 1,
                      layer.has_bias ? sgd.params + layer.bias : nullptr, layer.relu}, groups);
        }
        const double loss = softmax(labels, chosen, count, groups);
        std::fill(gradients_.begin(), gradients_.end(), 0.0f);
        linear_backward(count, groups, sgd);
        spatial_backward(count, groups, sgd);
        return loss;
    }

  private:
    // Lays up to LANES records out with the record innermost; records that are missing are zeros.
    NOINLINE void gather(const float* inputs, const int64_t* chosen, int count, int group) {
        const Image& shape = layers_[0].in;
        const long features = shape.features();
        const bool is_bare = shape.border_y == 0 && shape.border_x == 0;
        vec* to = layers_[0].group_input(group);
        vec* flat = is_bare ? to : flat_.data();
        for (long first = 0; first < features; first += LANES) {
            vec block[LANES];
            for (int lane = 0; lane < LANES; lane++)
                block[lane] = lane < count ? load(inputs + chosen[lane] * features + first, features - first) : vec{};
            transpose(block);
            const long here = std::min<long>(LANES, features - first);
            for (long i = 0; i < here; i++) flat[first + i] = block[i];
        }
        if (is_bare) return;
        for (int channel = 0; channel < shape.channels; channel++)
            for (int y = 0; y < shape.height; y++, flat += shape.width)
                std::copy(flat, flat + shape.width, to + channel * shape.plane() + shape.start() + y * shape.row());
    }

    vec* output_of(int index, int group) { return layers_[index + 1].group_input(group); }

    void forward(int index, int group, const float* params) {
        Layer& layer = layers_[index];
        vec* out = output_of(index, group);
        if (layer.kind == CONV) conv_forward(layer, group, out, params);
        else if (layer.kind == POOL) pool_forward(layer, group, out);
        else relu_alone(layer, group, nullptr, out);
    }

    // Turns logits into the gradient of the batch's mean cross-entropy, and returns that mean.
    NOINLINE double softmax(const int64_t* labels, const int64_t* chosen, int count, int groups) {
        double total = 0;
        for (int group = 0; group < groups; group++, chosen += LANES) {
            vec* logits = logits_.data() + group * classes_;
            const int here = std::min(LANES, count - group * LANES);
            vec highest = logits[0], mass{};
            for (int k = 1; k < classes_; k++) highest = logits[k] > highest ? logits[k] : highest;
            for (int lane = 0; lane < here; lane++) total += highest[lane] - logits[labels[chosen[lane]]][lane];
            for (int k = 0; k < classes_; k++) {
                vec value = logits[k] - highest;
                for (int lane = 0; lane < LANES; lane++) value[lane] = std::exp(value[lane]);
                mass += logits[k] = value;
            }
            for (int lane = 0; lane < here; lane++) total += std::log(mass[lane]);
            const vec share = LANE < here ? spread(1.0f / float(count)) : vec{};
            for (int k = 0; k < classes_; k++) logits[k] = logits[k] / mass * share;
            for (int lane = 0; lane < here; lane++) logits[labels[chosen[lane]]][lane] -= share[lane];
        }
        return total / count;
    }

    void linear_backward(int count, int groups, const Sgd& sgd) {
        vec *slopes = logits_.data(), *next = other_.data();
        for (int index = int(layers_.size()) - 1; index >= first_linear_; index--) {
            Layer& layer = layers_[index];
            const long inputs = layer.in.features(), outputs = layer.out.channels;
            if (layer.relu) {
                const vec* out = layers_[index + 1].activation.data();
                for (long at = 0; at < groups * outputs; at++) slopes[at] = out[at] > 0.0f ? slopes[at] : vec{};
            }
            if (index > 0)  // before the step: with the weights of the way forward
                multiply({slopes, outputs, next, inputs, sgd.params + layer.weight, 1, inputs, nullptr, false}, groups);
            to_rows(layer.activation.data(), inputs, groups, rows_.data());
            const float* scalars = reinterpret_cast<const float*>(slopes);
            linear_steps(sgd, {layer.weight, inputs, outputs, scalars, rows_.data(), long(groups) * LANES, count});
            if (layer.has_bias) {
                for (long o = 0; o < outputs; o++) {
                    vec total{};
                    for (int group = 0; group < groups; group++) total += slopes[group * outputs + o];
                    gradients_[layer.bias + o] = sum(total);
                }
                step_range(sgd, layer.bias, outputs);
            }
            std::swap(slopes, next);
        }
        boundary_ = slopes;
    }

    void spatial_backward(int count, int groups, const Sgd& sgd) {
        for (int index = 0; index < first_linear_; index++) {
            Layer& layer = layers_[index];
            if (is_routed(layer)) start_routes(routes_[index], layer, sgd.params + layer.weight);
            else if (layer.kind == CONV && index) flip(layer, sgd.params + layer.weight);
        }
        for (int group = 0; group < groups; group++) {
            const int here = std::min(LANES, count - group * LANES);
            const vec* gradient = boundary_ + group * layers_[first_linear_].in.features();
            vec *to = back_.data(), *spare = forth_.data();
            for (int index = first_linear_ - 1; index >= 0; index--) {
                backward(index, group, here, gradient, to);
                gradient = to;
                std::swap(to, spare);
            }
        }
        for (int index = 0; index < first_linear_; index++) {
            Layer& layer = layers_[index];
            if (layer.kind != CONV) continue;
            if (is_routed(layer)) finish_routes(routes_[index], layer, gradients_.data() + layer.weight);
            step_range(sgd, layer.weight, layer.num_weights() + (layer.has_bias ? layer.out.channels : 0));
        }
    }

    void backward(int index, int group, int count, const vec* gradient, vec* to) {
        Layer& layer = layers_[index];
        const vec* out = output_of(index, group);
        vec* back = index ? to : nullptr;
        if (is_routed(layer))
            routed_backward(routes_[index], layer, group, count, gradient, out, back, gradients_.data());
        else if (layer.kind == CONV) conv_backward(layer, group, gradient, out, back, gradients_.data());
        else if (layer.kind == POOL) pool_backward(layer, group, gradient, out, to);
        else relu_alone(layer, group, gradient, to);
    }

    void step_range(const Sgd& sgd, long at, long count) const {
        for (long done = 0; done < count; done += LANES)
            sgd.step(at + done, load(gradients_.data() + at + done), count - done);
    }

    std::vector<Layer> layers_;
    std::vector<Routes> routes_;        // of every layer; empty where it is not routed
    std::vector<vec> logits_, other_;   // gradients between linear layers, [group][feature]
    std::vector<vec> back_, forth_;     // gradients between the layers before them, of one group
    std::vector<vec> flat_;             // a group's inputs before they get a border
    std::vector<vec> rows_;             // a linear layer's inputs with the feature innermost
    std::vector<float> gradients_;
    const vec* boundary_ = nullptr;     // the gradient of what the first linear layer reads
    int groups_ = 0, first_linear_ = 0, classes_ = 0;
};

}  // namespace
