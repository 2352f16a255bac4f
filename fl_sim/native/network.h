// A network on one minibatch after another.
#pragma once

#include <stdexcept>

#include "ascent.h"
#include "convolution.h"
#include "graph.h"
#include "linear.h"
#include "loss.h"
#include "norm.h"
#include "planes.h"
#include "routed.h"
#include "rows.h"
#include "terms.h"
#include "winograd.h"

namespace {

class Network {
  public:
    Network(const Graph& graph, int batch_size, bool takes_derivatives) : graph_(graph) {
        const int origins = (batch_size + LANES - 1) / LANES, groups = takes_derivatives ? 2 * origins : origins;
        graph_.reserve(groups, origins);
        long widest = graph_.layers.back().out.channels;
        for (const Layer& layer : graph_.layers) {
            routes_.emplace_back(), winograds_.emplace_back();
            if (is_routed(layer)) reserve(routes_.back(), layer);
            if (is_winograd(layer)) reserve(winograds_.back(), tiles_, layer);
            if (layer.kind == LINEAR) widest = std::max(widest, layer.in.features());
        }
        logits_.resize(groups * widest), other_.resize(groups * widest);
        rows_.resize(groups * (widest + LANES));
        flat_.resize(graph_.nodes[0].image.features() + LANES);
        gradients_.resize(graph_.num_params + LANES);
    }

    // One step on ``batch``; returns its mean loss before the step.
    double step(const float* inputs, const Batch& batch, const Sgd& sgd, const Ascent& ascent) {
        if (ascent.radius == 0) return descend(inputs, batch, sgd.params, sgd);
        slope_.resize(graph_.num_params + LANES), above_.resize(ascent.share == 1 ? 0 : slope_.size());
        std::fill(slope_.end() - LANES, slope_.end(), 0.0f);  // a client of NaN leaves NaN there
        float* above = ascent.share == 1 ? slope_.data() : above_.data();  // in place where the first gradient has done its part
        const double loss = descend(inputs, batch, sgd.params, Kept{slope_.data()});
        climb(ascent, sgd.params, slope_.data(), graph_.num_params, above);
        descend(inputs, batch, above, Uphill{sgd, slope_.data(), ascent.share});
        return loss;
    }

    // Lays the weights out as minibatches will need them.
    void start(const float* params) {
        for (int index = 0; index < graph_.first_linear; index++) start(index, params);
    }

    // Writes a batch's features (what enters the last layer), [record][feature], or its logits, [record][class]; the weights
    // are those of the last ``start``.
    void infer(const float* inputs, const Batch& batch, const float* params, bool wants_features, float* rows) {
        forward(inputs, batch, params);
        const long numbers = wants_features ? num_features() : batch.classes;
        const vec* from = wants_features ? features() : logits_.data();
        for (int record = 0; record < batch.count; record++)
            for (long i = 0; i < numbers; i++) *rows++ = from[record / LANES * numbers + i][record % LANES];
    }

    long num_features() const { return graph_.layers.back().in.features(); }

  private:
    int num_layers() const { return int(graph_.layers.size()); }
    const vec* features() { return graph_.nodes[num_layers() - 1].at(0); }

    // Hands the gradient of the batch's mean loss at ``params`` to ``sink``; returns the loss.
    template <class Sink>
    double descend(const float* inputs, const Batch& batch, const float* params, const Sink& sink) {
        start(params);
        forward(inputs, batch, params);
        const double loss = turn(batch);
        std::fill(gradients_.begin(), gradients_.end(), 0.0f);
        const vec* boundary = linear_backward(batch, params, sink);
        spatial_backward(batch.count, boundary, params, sink);
        return loss / batch.count;
    }

    void forward(const float* inputs, const Batch& batch, const float* params) {
        origins_ = batch.groups;
        groups_ = batch.mix && batch.mix->linearise ? 2 * origins_ : origins_;
        for (int group = 0; group < groups_; group++) {
            gather(inputs, batch, group);
            for (int index = 0; index < graph_.first_linear; index++) forward(index, group, params);
        }
        for (int index = graph_.first_linear; index < num_layers(); index++) linear_forward(index, params);
    }

    // Lays up to LANES records out with the record innermost; records that are missing are zeros. A derivative is taken
    // along the partner record.
    NOINLINE void gather(const float* inputs, const Batch& batch, int group) {
        const Image& shape = graph_.nodes[0].image;
        const long features = shape.features();
        const int count = std::min(LANES, batch.count - group % origins_ * LANES);
        const int64_t* chosen = batch.chosen + group % origins_ * LANES;
        const float* partner = batch.mix ? batch.mix->inputs + batch.partner * features : nullptr;
        const bool is_bare = shape.border_y == 0 && shape.border_x == 0;
        vec* to = graph_.nodes[0].at(group);
        vec* flat = is_bare ? to : flat_.data();
        lay_out(inputs, chosen, count, features, flat);
        for (long i = 0; partner && i < features; i++) {
            if (!batch.mix->linearise) flat[i] = batch.mix->own * flat[i] + batch.mix->weight * partner[i];
            else flat[i] = group < origins_ ? batch.mix->own * flat[i] : spread(partner[i]);
        }
        if (is_bare) return;
        for (int channel = 0; channel < shape.channels; channel++)
            for (int y = 0; y < shape.height; y++, flat += shape.width)
                std::copy(flat, flat + shape.width, to + shape.line(channel, y));
    }

    Flow flow_of(int index, int group) {
        const Layer& layer = graph_.layers[index];
        Node& out = graph_.nodes[index + 1];
        return {graph_.nodes[layer.source].at(group), layer.kind == ADD ? graph_.nodes[layer.other].at(group) : nullptr,
                out.at(group), out.at(group % origins_), group % origins_, group >= origins_};
    }

    void start(int index, const float* params) {
        Layer& layer = graph_.layers[index];
        const float* weights = params + layer.weight;
        if (is_winograd(layer)) start_winograd(winograds_[index], layer, weights);
        if (is_routed(layer)) start_routes(routes_[index], layer, weights);
        else if (layer.kind == CONV && layer.source && !is_winograd(layer)) flip(layer, weights);
    }

    void forward(int index, int group, const float* params) {
        Layer& layer = graph_.layers[index];
        const Flow flow = flow_of(index, group);
        switch (layer.kind) {
            case CONV:
                if (is_winograd(layer)) winograd_forward(winograds_[index], tiles_, layer, flow, params);
                else convolve(forward_pass(layer, flow, params));
                return;
            case POOL: return pool_forward(layer, flow);
            case NORM: return norm_forward(layer, flow, params);
            case AVERAGE: return average_forward(layer, flow);
            case RELU: case ADD: return add_forward(layer, graph_.nodes[layer.other].image, flow);
            case LINEAR: break;
        }
        throw std::logic_error("no layer of planes");
    }

    void linear_forward(int index, const float* params) {
        const Layer& layer = graph_.layers[index];
        const long inputs = layer.in.features(), outputs = layer.out.channels;
        const vec* in = graph_.nodes[index].at(0);
        vec* out = index + 1 < num_layers() ? graph_.nodes[index + 1].at(0) : logits_.data();
        Product product{in, inputs, out, outputs, params + layer.weight, inputs, 1,
                        layer.has_bias ? params + layer.bias : nullptr, layer.relu};
        multiply(product, origins_);
        if (groups_ == origins_) return;
        product.in += origins_ * inputs, product.out += origins_ * outputs;
        product.bias = nullptr, product.relu = false;
        multiply(product, origins_);
        for (long at = 0; layer.relu && at < origins_ * outputs; at++) product.out[at] = out[at] > 0.0f ? product.out[at] : vec{};
    }

    // Turns the logits into the gradient of the batch's mean loss; returns the sum of its records' losses.
    double turn(const Batch& batch) {
        double loss = 0;
        if (batch.terms) {
            added_.assign(origins_ * batch.classes, vec{});
            loss = add_terms(*batch.terms, batch, logits_.data(), added_.data());
            if (batch.terms->look_at_features()) {
                row_.resize(num_features()), pulled_.assign(origins_ * num_features(), vec{});
                loss += add_feature_terms(*batch.terms, batch, features(), num_features(), row_.data(), pulled_.data());
            }
        }
        for (int group = 0; group < origins_; group++) {
            vec* logits = logits_.data() + group * batch.classes;
            if (batch.terms) adjust(*batch.terms, batch.classes, logits);
            loss += group_loss(batch, group, logits, groups_ > origins_ ? logits + origins_ * batch.classes : nullptr);
            if (batch.terms) adjust_back(*batch.terms, batch.classes, added_.data() + group * batch.classes, logits);
        }
        return loss;
    }

    // Hands over the gradient of the linear layers; returns that of what the first of them reads.
    template <class Sink>
    const vec* linear_backward(const Batch& batch, const float* params, const Sink& sink) {
        vec *slopes = logits_.data(), *next = other_.data();
        for (int index = num_layers() - 1; index >= graph_.first_linear; index--) {
            const Layer& layer = graph_.layers[index];
            const long inputs = layer.in.features(), outputs = layer.out.channels, half = origins_ * outputs;
            if (layer.relu) {
                const vec* out = graph_.nodes[index + 1].at(0);
                for (long at = 0; at < groups_ * outputs; at++) slopes[at] = out[at % half] > 0.0f ? slopes[at] : vec{};
            }
            if (index > 0)  // first, as a sink may step: with the weights of the way forward
                multiply({slopes, outputs, next, inputs, params + layer.weight, 1, inputs, nullptr, false}, groups_);
            if (index + 1 == num_layers() && batch.terms && batch.terms->look_at_features())
                for (long at = 0; at < origins_ * inputs; at++) next[at] += pulled_[at];
            to_rows(graph_.nodes[index].at(0), inputs, groups_, rows_.data());
            const int records = groups_ == origins_ ? batch.count : groups_ * LANES;  // those that are missing have slope 0
            linear_steps(sink, {layer.weight, inputs, outputs, reinterpret_cast<const float*>(slopes), rows_.data(),
                               long(groups_) * LANES, records});
            if (layer.has_bias) {
                for (long o = 0; o < outputs; o++) {
                    vec total{};
                    for (int group = 0; group < origins_; group++) total += slopes[group * outputs + o];
                    gradients_[layer.bias + o] = sum(total);
                }
                step_range(sink, gradients_.data(), layer.bias, outputs);
            }
            std::swap(slopes, next);
        }
        return slopes;
    }

    template <class Sink>
    void spatial_backward(int count, const vec* boundary, const float* params, const Sink& sink) {
        for (int group = 0; group < groups_; group++) {
            for (Node& node : graph_.nodes) node.is_known = false;
            const int here = std::min(LANES, count - group % origins_ * LANES);
            for (int index = graph_.first_linear - 1; index >= 0; index--) {
                const int slot = graph_.nodes[index + 1].slot;
                const bool is_last = index + 1 == graph_.first_linear;
                const vec* gradient =
                    is_last ? boundary + group * graph_.layers[index + 1].in.features() : graph_.slots[slot].data();
                backward(index, group, here, gradient, params);
            }
        }
        for (int index = 0; index < graph_.first_linear; index++) {
            Layer& layer = graph_.layers[index];
            if (is_routed(layer)) finish_routes(routes_[index], layer, gradients_.data() + layer.weight);
            else if (is_winograd(layer)) finish_winograd(winograds_[index], layer, gradients_.data() + layer.weight);
            step_range(sink, gradients_.data(), layer.weight, layer.num_weights() + layer.num_biases());
        }
    }

    void backward(int index, int group, int count, const vec* gradient, const float* params) {
        Layer& layer = graph_.layers[index];
        const Flow flow = flow_of(index, group);
        if (layer.kind == ADD)
            pass_back(layer, layer.other, [&](vec* back) { add_backward(layer, flow, gradient, back); });
        pass_back(layer, layer.source, [&](vec* back) {
            vec* asked = layer.source ? back : nullptr;
            switch (layer.kind) {
                case CONV:
                    if (is_routed(layer))
                        routed_backward(routes_[index], layer, flow, count, gradient, asked, gradients_.data());
                    else if (is_winograd(layer))
                        winograd_backward(winograds_[index], tiles_, layer, flow, gradient, asked, gradients_.data());
                    else conv_backward(layer, flow, gradient, asked, gradients_.data());
                    return;
                case POOL: return pool_backward(layer, flow, gradient, back);
                case NORM: return norm_backward(layer, flow, gradient, back, params, gradients_.data());
                case AVERAGE: return average_backward(layer, gradient, back);
                case RELU: case ADD: return add_backward(layer, flow, gradient, back);
                case LINEAR: break;
            }
            throw std::logic_error("no layer of planes");
        });
    }

    // Lets ``write`` write the gradient of ``node``, or adds it to what another reader of the node has written.
    template <class Write>
    void pass_back(const Layer& layer, int node_index, const Write& write) {
        Node& node = graph_.nodes[node_index];
        vec* slot = node_index ? graph_.slots[node.slot].data() : nullptr;
        write(slot && !node.is_known ? slot : graph_.spare.data());
        if (slot && node.is_known)
            for (long at = 0; at < layer.in.features(); at++) slot[at] += graph_.spare[at];
        node.is_known = true;
    }

    Graph graph_;
    std::vector<Routes> routes_;       // of every layer; empty where it is not routed
    std::vector<Winograd> winograds_;  // likewise
    Tiles tiles_;
    std::vector<vec> logits_, other_;  // gradients between linear layers, [group][feature]
    std::vector<vec> added_, pulled_;  // what terms add to the gradient by the logits, and by the features
    std::vector<vec> row_;             // a group's leads or prototypes
    std::vector<vec> flat_;            // a group's inputs before they get a border
    std::vector<vec> rows_;            // a linear layer's inputs with the feature innermost
    std::vector<float> gradients_;
    std::vector<float> slope_, above_; // with an ascent: the gradient at the weights, and the weights uphill
    int groups_ = 0, origins_ = 0;     // of this minibatch: all, and those that are no derivatives
};

}  // namespace
