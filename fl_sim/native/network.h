// A network that trains on one minibatch after another.
#pragma once

#include <numeric>

#include "ascent.h"
#ifdef FL_SIM_AMX
#include "amx_linear.h"
#else
#include "linear.h"
#endif
#include "graph.h"
#include "objective.h"
#include "rows.h"
#include "spatial.h"

namespace {

class Network {
  public:
    // ``graph``: its memory must be allocated for minibatches of ``groups`` groups.
    Network(Graph graph, int groups) : graph_(std::move(graph)), spatial_(graph_), dropout_(graph_, groups) {
        long widest = graph_.layers.back().out.channels, widest_output = 0;
        for (const Layer& layer : graph_.layers) {
            if (layer.kind != LINEAR) continue;
            widest = std::max(widest, layer.in.features()), widest_output = std::max<long>(widest_output, layer.out.channels);
        }
        logits_.resize(groups * widest), other_.resize(groups * widest);
        rows_.resize(groups * (widest + LANES));
        record_rows_.resize(graph_.first_linear == 0 ? groups * (graph_.nodes[0].image.features() + LANES) : 0);
        flat_.resize(graph_.nodes[0].image.features() + LANES);
        gradients_.resize(num_spatial() + LANES), by_bias_.resize(widest_output + LANES);
    }

    // Executes one optimizer step on ``batch``; returns the batch's mean loss before the step.
    double step(const float* inputs, const Batch& batch, const Optimizer& optimizer, const Ascent& ascent) {
        const Timed timed(RECORDS, FORWARD);
        if (optimizer.clip_norm == 0) return descend(inputs, batch, optimizer.params, ascent, optimizer);
        whole_.resize(graph_.num_params + LANES);
        std::fill(whole_.end() - LANES, whole_.end(), 0.0f);  // removes a NaN that an earlier client may have left there
        whole_length_.start(whole_.data(), nullptr, graph_.num_params);
        const double loss = descend(inputs, batch, optimizer.params, ascent, Corrected{optimizer, {whole_.data(), whole_length_}});
        move_clipped(optimizer, whole_.data(), graph_.num_params, whole_length_.length());
        return loss;
    }

    // Prepares for a client; must be called before the client's first step. ``masks``: the key of the random dropout masks.
    void begin(uint64_t masks) { dropout_.start(masks); }

    // Rearranges the weights for the passes of a minibatch.
    void start(const float* params) { spatial_.start(params); }

    // Writes a batch's features (the inputs of the last layer), [record][feature], or its logits, [record][class]. ``params``: the
    // same as in the last call of ``start``.
    void infer(const float* inputs, const Batch& batch, const float* params, bool wants_features, float* rows) {
        forward(inputs, batch, params, nullptr, nullptr);
        const long numbers = wants_features ? num_features() : batch.classes;
        const vec* from = wants_features ? features() : logits_.data();
        for (int record = 0; record < batch.count; record++)
            for (long i = 0; i < numbers; i++) *rows++ = from[record / LANES * numbers + i][record % LANES];
    }

    // The backward pass of a batch for ``slopes``, the gradient by its logits, [record][class]; null: that of the sum of the
    // records' cross-entropies. Passes the gradient by the parameters to ``sink``. Writes the gradient by the records,
    // [record][feature], to ``by_records``; null: it is not needed. If it is needed, the graph's first layer must copy the records.
    // ``params``: the same as in the last call of ``start``.
    template <class Sink>
    void backward(const float* inputs, const Batch& batch, const float* params, const float* slopes, const Sink& sink,
                  float* by_records) {
        forward(inputs, batch, params, nullptr, nullptr);
        if (!slopes) turn(batch);
        for (int group = 0; group < groups_; group++) {
            vec* logits = logits_.data() + group * batch.classes;
            if (slopes) lay_out(slopes, batch.chosen + group * LANES, records_in(batch, group), batch.classes, logits);
            else for (int k = 0; k < batch.classes; k++) logits[k] *= float(batch.count);  // from the mean to the sum
        }
        std::fill(gradients_.begin(), gradients_.end(), 0.0f);
        vec* boundary = linear_backward(batch, params, nullptr, sink);
        const long features = graph_.nodes[0].image.features();
        for (int group = 0; group < groups_; group++, boundary += graph_.layers[graph_.first_linear].in.features()) {
            spatial_.backward(group, origins_, records_in(batch, group), boundary, params, dropout_, gradients_.data());
            if (by_records) lay_back(graph_.spare.data(), records_in(batch, group), features, by_records + group * LANES * features);
        }
        spatial_.finish(gradients_.data(), sink);
    }

    long num_features() const { return graph_.layers.back().in.features(); }

  private:
    int num_layers() const { return int(graph_.layers.size()); }
    long num_spatial() const { return graph_.layers[graph_.first_linear].weight; }  // the number of parameters before the first linear layer
    const vec* features() { return graph_.nodes[num_layers() - 1].at(0); }

    // Passes the gradient of the batch's mean loss, with the ascent step ``ascent``, to ``sink``; returns the loss at ``params``.
    template <class Sink>
    double descend(const float* inputs, const Batch& batch, const float* params, const Ascent& ascent, const Sink& sink) {
        if (ascent.radius == 0) return descend(inputs, batch, params, nullptr, sink);
        slope_.resize(graph_.num_params + LANES), above_.resize(ascent.share == 1 ? 0 : slope_.size());
        std::fill(slope_.end() - LANES, slope_.end(), 0.0f);  // removes a NaN that an earlier client may have left there
        float* above = ascent.share == 1 ? slope_.data() : above_.data();  // in place, if the gradient is not needed later
        slope_length_.start(slope_.data(), ascent.adaptive ? params : nullptr, graph_.num_params);
        const double loss = descend(inputs, batch, params, nullptr, Kept{slope_.data(), slope_length_});
        const Climb climb(ascent, params, slope_.data(), slope_length_.length());
        const long first = graph_.first_linear == 0 ? graph_.layers[0].bias : 0;  // linear_forward computes the weights before it
        climb.write(first, graph_.num_params - first, above + first);
        descend(inputs, batch, above, &climb, Uphill<Sink>{sink, slope_.data(), ascent.share});
        return loss;
    }

    // Passes the gradient of the batch's mean loss at ``params`` to ``sink``; returns the loss. ``climb``: null, or the ascent
    // step from the weights of the previous call to ``params``. With an ascent step, the batch is that of the previous call, and
    // its records are already laid out. ``params`` then lacks the weights of a linear layer that reads these records.
    template <class Sink>
    double descend(const float* inputs, const Batch& batch, const float* params, const Climb* climb, const Sink& sink) {
        start(params);
        dropout_.draw(batch.groups);
        forward(inputs, batch, params, climb, &dropout_);
        const double loss = turn(batch);
        std::fill(gradients_.begin(), gradients_.end(), 0.0f);
        vec* boundary = linear_backward(batch, params, climb, sink);
        for (int group = 0; group < groups_; group++, boundary += graph_.layers[graph_.first_linear].in.features())
            spatial_.backward(group, origins_, records_in(batch, group), boundary, params, dropout_, gradients_.data());
        spatial_.finish(gradients_.data(), sink);
        return loss / batch.count;
    }

    // Replaces the logits by the gradient of the batch's mean loss; returns the sum of the records' losses.
    double turn(const Batch& batch) {
        const Timed timed(LOSS, FORWARD);
        vec* moving = groups_ > origins_ ? logits_.data() + origins_ * batch.classes : nullptr;
        return objective_.turn(batch, logits_.data(), moving, features(), num_features());
    }

    // The forward pass of a batch. ``climb``: see ``descend``. ``dropout``: the masks; null: no dropout.
    void forward(const float* inputs, const Batch& batch, const float* params, const Climb* climb, const Dropout* dropout) {
        origins_ = batch.groups;
        groups_ = batch.mix && batch.mix->linearise ? 2 * origins_ : origins_;
        for (int group = 0; group < groups_; group++) {
            if (!climb) gather(inputs, batch, group);
            spatial_.forward(group, origins_, params, dropout);
        }
        for (int index = graph_.first_linear; index < num_layers(); index++) {
            linear_forward(index, params, climb);
            for (int group = 0; dropout && group < groups_; group++) leave_out(index, group);
        }
    }

    int records_in(const Batch& batch, int group) const {
        return std::min(LANES, batch.count - group % origins_ * LANES);
    }

    // Writes up to LANES records in the layout with the record as the innermost index; missing records are zeros. The values of a
    // derivative group are those of the partner record.
    NOINLINE void gather(const float* inputs, const Batch& batch, int group) {
        const Timed timed(RECORDS, FORWARD);
        const Image& shape = graph_.nodes[0].image;
        const long features = shape.features();
        const int64_t* chosen = batch.chosen + group % origins_ * LANES;
        const float* partner = batch.mix ? batch.mix->inputs + batch.partner * features : nullptr;
        const bool is_bare = shape.border_y == 0 && shape.border_x == 0;
        vec* to = graph_.nodes[0].at(group);
        vec* flat = is_bare ? to : flat_.data();
        int64_t in_order[LANES];
        if (batch.moves.places) {
            inputs = moved(inputs, batch, group), chosen = in_order;
            std::iota(in_order, in_order + LANES, 0);
        }
        lay_out(inputs, chosen, records_in(batch, group), features, flat);
        for (long i = 0; partner && i < features; i++) {
            if (!batch.mix->linearise) flat[i] = batch.mix->own * flat[i] + batch.mix->weight * partner[i];
            else flat[i] = group < origins_ ? batch.mix->own * flat[i] : spread(partner[i]);
        }
        if (!is_bare) add_border(flat, shape, to);
    }

    // Returns a group's records, one after the other, after image augmentation.
    const float* moved(const float* inputs, const Batch& batch, int group) {
        const Image& shape = graph_.nodes[0].image;
        const int first = group % origins_ * LANES;
        moved_.resize(LANES * shape.features());
        for (int record = first; record < first + records_in(batch, group); record++)
            write_moved(inputs + batch.chosen[record] * shape.features(), shape, batch.moves.places + 3 * record,
                        batch.moves, moved_.data() + (record - first) * shape.features());
        return moved_.data();
    }

    // Applies the dropout mask to the output of a linear layer.
    void leave_out(int index, int group) {
        Node& out = graph_.nodes[index + 1];
        dropout_.apply(index, group % origins_, out.image, out.at(group));
    }

    void linear_forward(int index, const float* params, const Climb* climb) {
        const Timed timed(FIRST_LAYER + index, FORWARD);
        const Layer& layer = graph_.layers[index];
        const long inputs = layer.in.features(), outputs = layer.out.channels;
        const vec* in = graph_.nodes[index].at(0);
        vec* out = index + 1 < num_layers() ? graph_.nodes[index + 1].at(0) : logits_.data();
        const long factors = num_factors(inputs);
        Product product{Factors::features(in, inputs, groups_, feature_room_), factors, out, outputs, nullptr, factors, 1,
                        layer.has_bias ? params + layer.bias : nullptr, layer.relu};
        const auto rows = [&](long output, long count) -> const Factors::Weight* {
            if (!climb || index > 0)
                return Factors::rows(params + layer.weight + output * inputs, count, inputs, weight_room_);
            climbed_.resize(count * inputs + LANES);
            climb->write(output * inputs, count * inputs, climbed_.data());
            return Factors::rows(climbed_.data(), count, inputs, weight_room_);
        };
        multiply(product, origins_, rows, linear_room_);
        if (groups_ == origins_) return;
        product.in += origins_ * factors, product.out += origins_ * outputs;
        product.bias = nullptr, product.relu = false;
        multiply(product, origins_, rows, linear_room_);
        for (long at = 0; layer.relu && at < origins_ * outputs; at++) product.out[at] = out[at] > 0.0f ? product.out[at] : vec{};
    }

    // Passes the gradient of the linear layers to ``sink``; returns the gradient by the input of the first linear layer.
    template <class Sink>
    vec* linear_backward(const Batch& batch, const float* params, const Climb* climb, const Sink& sink) {
        vec *slopes = logits_.data(), *next = other_.data();
        const vec* added = objective_.by_features(batch);  // what loss terms add to the gradient by the features
        for (int index = num_layers() - 1; index >= graph_.first_linear; index--) {
            const Timed timed(FIRST_LAYER + index, TO_INPUTS);
            const Layer& layer = graph_.layers[index];
            const long inputs = layer.in.features(), outputs = layer.out.channels, half = origins_ * outputs;
            if (layer.relu) {
                const vec* out = graph_.nodes[index + 1].at(0);
                for (long at = 0; at < groups_ * outputs; at++) slopes[at] = out[at % half] > 0.0f ? slopes[at] : vec{};
            }
            if (index > graph_.first_trained) {  // must come before the weights' gradient, because the sink may change the weights
                const Factors::Weight* columns = Factors::columns(params + layer.weight, outputs, inputs, weight_room_);
                multiply({Factors::features(slopes, outputs, groups_, feature_room_), num_factors(outputs), next, inputs, columns,
                          1, inputs, nullptr, false}, groups_, [&](long input, long) { return columns + input; }, linear_room_);
                for (long at = 0; added && at < origins_ * inputs; at++) next[at] += added[at];
                added = nullptr;
            }
            for (int group = 0; index > graph_.first_linear && group < groups_; group++)
                dropout_.apply(index - 1, group % origins_, layer.in, next + group * inputs);
            const Timed weighing(TO_WEIGHTS);
            Factors::Values* rows = index ? rows_.data() : record_rows_.data();
            if (index || !climb) to_rows<Factors>(graph_.nodes[index].at(0), inputs, inputs, groups_, rows);
            const int records = groups_ == origins_ ? batch.count : groups_ * LANES;  // missing records have slope 0
            const Slopes<Factors> given{layer.weight, inputs, outputs, Factors::records(slopes, groups_ * outputs, weight_room_),
                                        outputs, rows, long(groups_) * LANES / Factors::EACH, records};
            linear_steps(sink, given, linear_room_);
            if (layer.has_bias) {
                for (long o = 0; o < outputs; o++) {
                    vec total{};
                    for (int group = 0; group < origins_; group++) total += slopes[group * outputs + o];
                    by_bias_[o] = sum(total);
                }
                step_range(sink, layer.bias, outputs, by_bias_.data());
            }
            std::swap(slopes, next);
        }
        return slopes;
    }

    Graph graph_;
    Spatial spatial_;
    Dropout dropout_;
    Objective objective_;
    std::vector<vec> logits_, other_;  // the logits, and the gradients between linear layers, [group][feature]
    std::vector<vec> flat_;            // a group's inputs without a border
    std::vector<Factors::Values> rows_;         // a linear layer's inputs; the feature is the innermost index
    std::vector<Factors::Values> record_rows_;  // the same for the first layer, if it is linear
    Factors::Room feature_room_, weight_room_;  // memory for the operands of a linear layer
    LinearRoom linear_room_;
    std::vector<float> moved_;         // a group's records after image augmentation
    std::vector<float> gradients_;     // the gradient of the layers before the first linear layer
    std::vector<float> by_bias_;       // the gradient by the biases of a linear layer
    std::vector<float> whole_;         // for clipping: the whole gradient, with all that the plan adds to it
    std::vector<float> slope_, above_; // for an ascent step: the gradient, and the weights after the step
    Length whole_length_, slope_length_;
    std::vector<float> climbed_;       // some rows of the first layer's weights after an ascent step, if it is linear
    int groups_ = 0, origins_ = 0;     // the number of groups of this minibatch; the number of those that are no derivative groups
};

}  // namespace
