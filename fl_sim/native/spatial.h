// The layers before the first linear layer. They work on planes, one group at a time.
#pragma once

#include <stdexcept>

#include "chosen.h"
#include "convolution_back.h"
#include "dropout.h"
#include "graph.h"
#include "norm.h"
#include "planes.h"
#include "routed.h"
#include "optimizer.h"
#include "winograd.h"

namespace {

class Spatial {
  public:
    // ``by_record``: true if the caller uses ``backward_by_record`` in place of ``backward``.
    explicit Spatial(Graph& graph, bool by_record = false)
        : graph_(graph), by_record_(by_record), routes_(graph.first_linear), winograds_(graph.first_linear) {
        for (int index = 0; index < graph_.first_linear; index++) {
            const Layer& layer = graph_.layers[index];
            if (is_routed(layer)) reserve(routes_[index], layer, by_record);
            if (is_winograd(layer)) reserve(winograds_[index], tiles_, layer);
        }
    }

    // Before a minibatch: rearranges the weights for its passes.
    void start(const float* params) {
        for (int index = 0; index < graph_.first_linear; index++) start(index, params);
    }

    // The forward pass of one group. ``origins``: the number of groups of the minibatch that are no derivative groups.
    // ``dropout``: the masks; null: no dropout.
    void forward(int group, int origins, const float* params, const Dropout* dropout) {
        for (int index = 0; index < graph_.first_linear; index++) {
            forward(index, flow_of(index, group, origins), params);
            Node& out = graph_.nodes[index + 1];
            if (dropout) dropout->apply(index, group % origins, out.image, out.at(group));
        }
    }

    // The backward pass of a group of ``count`` records. ``boundary``: the gradient by the input of the first linear layer.
    void backward(int group, int origins, int count, vec* boundary, const float* params, const Dropout& dropout,
                  float* gradients) {
        for (Node& node : graph_.nodes) node.is_known = false;
        for (int index = graph_.first_linear - 1; index >= graph_.first_trained; index--) {
            const bool is_last = index + 1 == graph_.first_linear;
            vec* gradient = is_last ? boundary : graph_.slots[graph_.nodes[index + 1].slot].data();
            dropout.apply(index, group % origins, graph_.layers[index].out.bare(), gradient);
            backward(index, flow_of(index, group, origins), count, gradient, params, gradients);
        }
    }

#ifndef FL_SIM_BFLOAT16
    // The backward pass of a group of ``count`` records, without dropout and normalisation. Writes the gradients of each record,
    // [parameter][lane].
    void backward_by_record(int group, int origins, int count, vec* boundary, vec* gradients) {
        for (Node& node : graph_.nodes) node.is_known = false;
        for (int index = graph_.first_linear - 1; index >= graph_.first_trained; index--) {
            Layer& layer = graph_.layers[index];
            const Flow flow = flow_of(index, group, origins);
            vec* gradient = index + 1 == graph_.first_linear ? boundary : graph_.slots[graph_.nodes[index + 1].slot].data();
            if (layer.kind == CONV)
                pass_back(layer, layer.source, [&](vec* back, bool adds) {
                    vec* asked = index > graph_.first_trained && layer.source ? back : nullptr;
                    conv_backward_by_record(index, flow, count, gradient, asked, adds, gradients);
                });
            else backward(index, flow, count, gradient, nullptr, nullptr);
        }
    }
#endif

    // After a minibatch: passes the gradient of these layers to ``sink``.
    template <class Sink>
    void finish(float* gradients, const Sink& sink) {
        for (int index = 0; index < graph_.first_linear; index++) {
            const Timed timed(FIRST_LAYER + index, LAYOUT);
            Layer& layer = graph_.layers[index];
            if (is_routed(layer)) finish_routes(routes_[index], layer, gradients + layer.weight);
            else if (is_winograd(layer)) finish_winograd(winograds_[index], layer, gradients + layer.weight);
            if (has_own_gradient(layer)) finish_gradient(layer, gradients + layer.weight);
            const Timed stepping(STEP);
            step_range(sink, layer.weight, layer.num_weights() + layer.num_biases(), gradients + layer.weight);
        }
    }

  private:
    static bool has_own_gradient(const Layer& layer) {
        return layer.kind == CONV && !is_first_pooled(layer) && !is_routed(layer) && !is_winograd(layer);
    }

    Flow flow_of(int index, int group, int origins) {
        const Layer& layer = graph_.layers[index];
        Node& out = graph_.nodes[index + 1];
        return {graph_.nodes[layer.source].at(group), layer.kind == ADD ? graph_.nodes[layer.other].at(group) : nullptr,
                out.at(group), out.at(group % origins), group % origins, group >= origins};
    }

    void start(int index, const float* params) {
        const Timed timed(FIRST_LAYER + index, LAYOUT);
        Layer& layer = graph_.layers[index];
        const float* weights = params + layer.weight;
        if (is_winograd(layer)) start_winograd(winograds_[index], layer, weights);
        else if (layer.kind == CONV) start_forward(layer, params);
        if (is_routed(layer)) start_routes(routes_[index], layer, weights);
        else if (layer.kind == CONV && layer.source && (by_record_ || !is_winograd(layer))) start_backward(layer, weights);
        if (has_own_gradient(layer) && !by_record_) start_gradient(layer);
    }

    void forward(int index, const Flow& flow, const float* params) {
        const Timed timed(FIRST_LAYER + index, FORWARD);
        Layer& layer = graph_.layers[index];
        switch (layer.kind) {
            case CONV:
                if (is_winograd(layer)) winograd_forward(winograds_[index], tiles_, layer, flow, params);
                else conv_forward(layer, flow, params);
                return;
            case POOL: return pool_forward(layer, flow);
            case NORM: return norm_forward(layer, flow, params);
            case AVERAGE: return average_forward(layer, flow);
            case RELU: case ADD: case DROP: return add_forward(layer, graph_.nodes[layer.other].image, flow);
            case LINEAR: break;
        }
        throw std::logic_error("no layer of planes");
    }

    void backward(int index, const Flow& flow, int count, vec* gradient, const float* params, float* gradients) {
        const Timed timed(FIRST_LAYER + index, TO_INPUTS);
        Layer& layer = graph_.layers[index];
        if (layer.kind == ADD) return sum_backward(layer, graph_.nodes[index + 1].slot, flow, gradient);
        pass_back(layer, layer.source, [&](vec* back, bool adds) {
            vec* asked = index > graph_.first_trained && layer.source ? back : nullptr;
            switch (layer.kind) {
                case CONV:
                    if (is_routed(layer))
                        routed_backward(routes_[index], layer, flow, count, gradient, asked, OverRecords{gradients});
                    else if (is_winograd(layer))
                        winograd_backward(winograds_[index], tiles_, layer, flow, gradient, asked, adds, gradients);
                    else if (is_first_pooled(layer)) first_backward(layer, flow, gradient, OverRecords{gradients});
                    else conv_backward(layer, flow, gradient, asked, adds, gradients);
                    return;
                case POOL: return pool_backward(layer, flow, gradient, back);
                case NORM: return norm_backward(layer, flow, gradient, back, params, gradients);
                case AVERAGE: return average_backward(layer, gradient, back);
                case RELU: case DROP: return add_backward(layer, flow, gradient, back);
                case ADD: case LINEAR: break;
            }
            throw std::logic_error("no layer of planes");
        });
    }

#ifndef FL_SIM_BFLOAT16
    void conv_backward_by_record(int index, const Flow& flow, int count, const vec* gradient, vec* back, bool adds, vec* gradients) {
        Layer& layer = graph_.layers[index];
        if (is_routed(layer)) {
            Routes& routes = routes_[index];
            routes.gradient.clear_values();
            routed_backward(routes, layer, flow, count, gradient, back, ByOneRecord{gradients});
            finish_routes_by_record(routes, layer, gradients + layer.weight);
        } else if (is_first_pooled(layer)) {
            first_backward(layer, flow, gradient, ByOneRecord{gradients});
        } else {
            ::conv_backward_by_record(layer, flow, gradient, back, adds, gradients);
        }
    }
#endif

    // The backward pass of an ADD layer. ``slot``: the index of the buffer that ``gradient`` points to; -1: none.
    void sum_backward(const Layer& layer, int slot, const Flow& flow, vec* gradient) {
        bool stays = false;  // true if the gradient by an input of the sum uses the same buffer
        for (int part : {layer.other, layer.source}) {
            if (part && graph_.nodes[part].slot == slot) graph_.nodes[part].is_known = stays = true;
            else pass_back(layer, part, [&](vec* back, bool adds) { add_backward(layer, flow, gradient, back, adds); });
        }
        if (stays && layer.relu) add_backward(layer, flow, gradient, gradient);
    }

    // Calls ``write(buffer, adds)`` for the gradient by a node. If another reader of the node has already written a gradient, the
    // two are added: by ``write`` itself if ``adds`` is true, else here.
    template <class Write>
    void pass_back(const Layer& layer, int node_index, const Write& write) {
        Node& node = graph_.nodes[node_index];
        vec* slot = node_index ? graph_.slots[node.slot].data() : nullptr;
        const bool adds = slot && node.is_known, adds_itself = adds && (layer.kind == ADD || (layer.kind == CONV && !is_routed(layer)));
        write(slot && (!adds || adds_itself) ? slot : graph_.spare.data(), adds_itself);
        for (long at = 0; adds && !adds_itself && at < layer.in.features(); at++) slot[at] += graph_.spare[at];
        node.is_known = true;
    }

    Graph& graph_;
    const bool by_record_;
    std::vector<Routes> routes_;       // for every layer; empty for layers that are not routed
    std::vector<Winograd> winograds_;  // for every layer; empty for layers that do not use Winograd's algorithm
    Tiles tiles_;
};

}  // namespace
