// Cross-entropy, plain or mixed with an averaged record (Yoon et al. 2021), and its gradient by the logits.
#pragma once

#include "moves.h"
#include "vectors.h"

namespace {

// Mixing with one partner record per minibatch. The loss is own * l(f(x'), y) + weight * l(f(x'), labels of the partner) with
// x' = own * x + weight * partner (NaiveMix). If ``linearise`` is true (FedMix), x' = own * x, and the loss has one more term:
// weight * <dl(f(x'), y) / dx', partner>.
struct Mix {
    const float *inputs, *labels;  // the mixing pool: [record][feature], [record][class]
    float own, weight;
    bool linearise;
};

struct Terms;

struct Batch {
    const int64_t *labels, *chosen;  // labels: of all records of the client; chosen: the indices of the batch's records
    int count, groups, classes;
    const Mix* mix;                  // null: no mixing
    int64_t partner;
    const Terms* terms;              // the loss terms, see terms.h; null: none
    Moves moves;                     // the image augmentation of the records
};

INLINE vec exponential(vec value) {
    for (int lane = 0; lane < LANES; lane++) value[lane] = std::exp(value[lane]);
    return value;
}

// Replaces one group's logits by the gradient of the batch's mean loss; returns the sum of the group's losses. ``moving``: the
// derivative of the logits along the partner record, which is replaced by the loss's gradient, too; null if not needed.
NOINLINE double group_loss(const Batch& batch, int group, vec* logits, vec* moving) {
    const int classes = batch.classes, here = std::min(LANES, batch.count - group * LANES);
    const int64_t* chosen = batch.chosen + group * LANES;
    const float own = batch.mix ? batch.mix->own : 1.0f, weight = batch.mix ? batch.mix->weight : 0.0f;
    const float* soft = batch.mix ? batch.mix->labels + batch.partner * classes : nullptr;
    double total = 0;
    vec highest = logits[0], mass{}, expected{}, along{};
    for (int k = 1; k < classes; k++) highest = logits[k] > highest ? logits[k] : highest;
    for (int lane = 0; lane < here; lane++) {
        const int64_t label = batch.labels[chosen[lane]];
        total += double(own) * (highest[lane] - logits[label][lane]);
        if (moving) total -= double(weight) * moving[label][lane];
    }
    float soft_total = 0;  // the sum of the class proportions: 1, apart from rounding
    for (int k = 0; k < classes; k++) {
        if (soft) expected += soft[k] * (highest - logits[k]), soft_total += soft[k];
        mass += logits[k] = exponential(logits[k] - highest);
    }
    const vec share = LANE < here ? spread(1.0f / float(batch.count)) : vec{};
    for (int k = 0; k < classes; k++) {
        logits[k] /= mass;
        if (moving) along += logits[k] * moving[k];
    }
    for (int lane = 0; lane < here; lane++)
        total += double(own + weight * soft_total) * std::log(mass[lane]) + double(weight) * (expected[lane] + along[lane]);
    for (int k = 0; k < classes; k++) {
        vec slope = logits[k] * (own + weight * soft_total);
        if (soft) slope -= spread(weight * soft[k]);
        if (moving) slope += weight * logits[k] * (moving[k] - along), moving[k] = weight * logits[k] * share;
        logits[k] = slope * share;
    }
    for (int lane = 0; lane < here; lane++) {
        const int64_t label = batch.labels[chosen[lane]];
        logits[label][lane] -= own * share[lane];
        if (moving) moving[label][lane] -= weight * share[lane];
    }
    return total;
}

}  // namespace
