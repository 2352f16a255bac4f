// The graph of layers: which layer reads which output, and which buffer holds which gradient in the backward pass.
#pragma once

#include <new>

#include "layer.h"

namespace {

// The output of a layer, or (the first node) the input of the network.
struct Node {
    Image image;
    std::vector<vec> values;  // [group][image]
    int slot = -1;            // the index in ``slots`` of the buffer for a group's gradient by this node; -1: none
    bool is_known = false;    // true if a layer that reads this node has already written the gradient
    bool is_kept = true;      // true if the backward pass reads the values; if not, all groups share one memory
    vec* at(int group) { return values.data() + is_kept * group * image.vectors(); }
};

struct Graph {
    std::vector<Layer> layers;
    std::vector<Node> nodes;              // layer i writes nodes[i + 1]; nodes[0] is the input
    int first_linear = 0;                 // the index of the first linear layer: earlier layers work on planes, later ones are linear
    int first_trained = 0;                // the index of the first layer with parameters; the gradient by its input is not needed
    long num_params = -1;                 // stays -1 if the layers do not fit together
    std::vector<std::vector<vec>> slots;  // the buffers for a group's gradients; they have no borders
    std::vector<vec> spare;               // one more buffer, for a gradient that is later added to a slot, or that nobody reads

    Graph(const int32_t* described, int num_layers, const Image& input) {
        nodes.push_back({input, {}});
        long at = 0;
        if (input.channels < 1 || input.height < 1 || input.width < 1) return;
        if (double(input.area()) * input.channels > double(MOST_NUMBERS)) return;
        for (int index = 0; index < num_layers; index++) {
            const int32_t* field = described + index * FIELDS;
            const int source = field[11], other = field[12];
            if (source < 0 || source > index || other < 0 || other > index) return;
            const Image& in = nodes[source].image;
            if (!is_known(field, in) || (field[0] == ADD && !in.same_size(nodes[other].image))) return;
            Layer layer = read_layer(field, in);
            if (!is_countable(layer)) return;
            layer.weight = at;
            layer.bias = at += layer.num_weights();
            at += layer.num_biases();
            nodes.push_back({layer.out, {}});
            layers.push_back(layer);
        }
        while (first_linear < num_layers && layers[first_linear].kind != LINEAR) first_linear++;
        for (int index = first_linear; index < num_layers; index++)
            if (layers[index].kind != LINEAR || layers[index].source != index) return;
        while (first_trained < first_linear && layers[first_trained].num_weights() == 0) first_trained++;
        if (first_linear < num_layers && !layers.back().is_changed()) num_params = at;
    }

    // Allocates the memory for minibatches of ``groups`` groups. ``origins``: the number of groups that are no derivative groups.
    void reserve(int groups, int origins) {
        for (const Layer& layer : layers) {  // a node gets the widest border that a reading layer needs
            Image& read = nodes[layer.source].image;
            read.border_y = std::max(read.border_y, layer.kind == CONV ? layer.padding_y : 0);
            read.border_x = std::max(read.border_x, layer.kind == CONV ? layer.padding_x : 0);
        }
        for (const Node& node : nodes)
            if (node.image.vectors() > MOST_NUMBERS) throw std::bad_alloc();
        for (size_t index = 0; index < layers.size(); index++) {
            layers[index].in = nodes[layers[index].source].image, layers[index].out = nodes[index + 1].image;
            ::reserve(layers[index], origins);
        }
        if (groups == origins) drop_unread();  // derivative groups need the outputs of all layers of their origins
        for (Node& node : nodes) node.values.resize((node.is_kept ? groups : 1) * node.image.vectors());
        long largest = 0;
        for (int index = 0; index < first_linear; index++) largest = std::max(largest, layers[index].in.features());
        share_slots();
        for (auto& slot : slots) slot.resize(largest);
        spare.resize(largest);
    }

  private:
    // Returns true if the layer has an output, and if its sizes do not overflow the counters.
    static bool is_countable(const Layer& layer) {
        const Image& out = layer.out;
        const double weights = double(out.channels) * double(layer.in.features()) * double(std::max(1L, layer.taps()));
        return out.height > 0 && out.width > 0 && double(out.area()) * out.channels <= double(MOST_NUMBERS) && weights < 1e15;
    }

    // The backward pass reads a layer's input if the layer has weights, and its output if it has a ReLU and is no NORM.
    void drop_unread() {
        for (size_t index = 0; index < layers.size(); index++) nodes[index + 1].is_kept = layers[index].relu && layers[index].kind != NORM;
        for (const Layer& layer : layers)
            if (layer.num_weights() > 0) nodes[layer.source].is_kept = true;
    }

    // Assigns buffers to gradients. A node's gradient is needed from the backward pass of its last reader to that of its writer;
    // then another node reuses the buffer.
    void share_slots() {
        std::vector<int> unused, holders;  // holders: the number of nodes that use each slot
        for (int index = first_linear - 1; index >= 0; index--) {
            const Layer& layer = layers[index];
            const int own = nodes[index + 1].slot;
            const bool is_free = own >= 0 && holders[own] == 1;
            for (int node : {layer.source, layer.kind == ADD ? layer.other : 0}) {
                int& slot = nodes[node].slot;
                if (node == 0 || slot >= 0) continue;
                if (is_free && may_share(index, node)) slot = own;
                else if (!unused.empty()) slot = unused.back(), unused.pop_back();
                else slot = int(slots.size()), slots.emplace_back(), holders.push_back(0);
                holders[slot]++;
            }
            if (own >= 0 && --holders[own] == 0) unused.push_back(own);
        }
    }

    // An ADD layer adds two inputs, so the gradient by each input equals the gradient by the sum. Returns true if the gradient by
    // the input ``part`` may use the buffer of the sum's gradient. The other input may use the same buffer. So no layer may add
    // to the buffer before the later input is done.
    bool may_share(int sum, int part) const {
        if (layers[sum].kind != ADD || layers[sum].source == layers[sum].other) return false;
        const int later = std::max(layers[sum].source, layers[sum].other);
        if (layers[later - 1].is_changed()) return false;  // the layer's mask or factor is applied to the gradient in place
        for (int index = part; index < sum; index++) {
            const bool reads = layers[index].source == part || (layers[index].kind == ADD && layers[index].other == part);
            if (reads && index >= later - 1) return false;
        }
        return true;
    }
};

}  // namespace
