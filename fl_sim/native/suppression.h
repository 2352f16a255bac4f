// The logits of classes that records are not of, pushed down (FedVLS, eq. 5).
#pragma once

#include "loss.h"
#include "softmax.h"

namespace {

struct Suppression {
    const float* shares;  // [class]
    float weight;         // 0: no such term
};

// Adds the term's gradient by all logits of the batch, [group][class], to ``slopes``; returns the term times their number.
NOINLINE double suppress(const Suppression& term, const Batch& batch, const vec* logits, vec* slopes) {
    double total = 0;
    for (int k = 0; k < batch.classes; k++) {
        const float strength = term.weight * term.shares[k];
        const auto place = [&](int at) { return at / LANES * batch.classes + k; };
        const auto is_other = [&](int at) { return batch.labels[batch.chosen[at]] != k; };
        const Softmax others(batch.count, [&](int at) { return logits[place(at)][at % LANES]; }, is_other);
        if (strength == 0 || others.highest == -INFINITY) continue;
        total += double(strength) * (others.log_sum() - std::log(double(batch.count)));
        for (int at = 0; at < batch.count; at++)
            if (is_other(at)) slopes[place(at)][at % LANES] += strength * std::exp(others.log_of(at));
    }
    return total * batch.count;
}

}  // namespace
