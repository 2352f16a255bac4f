// Which layer reads what another wrote, and where gradients lie on the way back.
#pragma once

#include <new>

#include "layer.h"

namespace {

// What a layer wrote, or (the first) the network's input.
struct Node {
    Image image;
    std::vector<vec> values;  // [group][image]
    int slot = -1;            // which buffer holds a group's gradient of it, while that is needed
    bool is_known = false;    // whether one of its readers has written that gradient
    bool is_kept = true;      // for the way back; if not, all groups have the same place
    vec* at(int group) { return values.data() + is_kept * group * image.vectors(); }
};

struct Graph {
    std::vector<Layer> layers;
    std::vector<Node> nodes;              // layer i writes nodes[i + 1]
    int first_linear = 0;                 // layers before it work on planes, those from it on are linear
    int first_trained = 0;                // layers before it have no parameters: nobody asks for the gradient of what it reads
    long num_params = -1;                 // stays so where the layers do not fit together
    std::vector<std::vector<vec>> slots;  // a group's gradients, without borders
    std::vector<vec> spare;               // another, for a layer whose result is added to a slot or not asked for

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
        if (first_linear < num_layers && layers.back().dropout == 0) num_params = at;
    }

    // Takes the memory for minibatches of ``groups`` groups, ``origins`` of which are no derivatives.
    void reserve(int groups, int origins) {
        for (const Layer& layer : layers) {  // who writes keeps the border of who reads
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
        if (groups == origins) drop_unread();  // a derivative goes the way that its origin went
        for (Node& node : nodes) node.values.resize((node.is_kept ? groups : 1) * node.image.vectors());
        long largest = 0;
        for (int index = 0; index < first_linear; index++) largest = std::max(largest, layers[index].in.features());
        share_slots();
        for (auto& slot : slots) slot.resize(largest);
        spare.resize(largest);
    }

  private:
    // Whether it writes something, and no more numbers than can be counted.
    static bool is_countable(const Layer& layer) {
        const Image& out = layer.out;
        const double weights = double(out.channels) * double(layer.in.features()) * double(std::max(1L, layer.taps()));
        return out.height > 0 && out.width > 0 && double(out.area()) * out.channels <= double(MOST_NUMBERS) && weights < 1e15;
    }

    // On the way back a layer reads what came in if it has weights, and what went out if it has a ReLU, a norm excepted.
    void drop_unread() {
        for (size_t index = 0; index < layers.size(); index++) nodes[index + 1].is_kept = layers[index].relu && layers[index].kind != NORM;
        for (const Layer& layer : layers)
            if (layer.num_weights() > 0) nodes[layer.source].is_kept = true;
    }

    // A node's gradient is needed from its last reader back to its writer; then another takes its buffer.
    void share_slots() {
        std::vector<int> unused, holders;  // holders: how many nodes have a slot
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

    // Whether the gradient of a part of a sum may be where the sum's own is, and the other part's, which has the same: until
    // the later part is through, nobody may add to it.
    bool may_share(int sum, int part) const {
        if (layers[sum].kind != ADD || layers[sum].source == layers[sum].other) return false;
        const int later = std::max(layers[sum].source, layers[sum].other);
        if (layers[later - 1].dropout > 0) return false;  // its mask is taken to the gradient in place
        for (int index = part; index < sum; index++) {
            const bool reads = layers[index].source == part || (layers[index].kind == ADD && layers[index].other == part);
            if (reads && index >= later - 1) return false;
        }
        return true;
    }
};

}  // namespace
