// A loss term that lowers the logits of classes that a record does not have (FedVLS, Guo et al. 2025, as in its released code).
#pragma once

#include "loss.h"
#include "softmax.h"

namespace {

struct Suppression {
    const float* shares;  // [class]
    float weight;         // 0: no such term
};

// Adds the term's gradient by all logits of the batch, [group][class], to ``slopes``; returns the term times the batch size.
NOINLINE double suppress(const Suppression& term, const Batch& batch, const vec* logits, vec* slopes) {
    double total = 0;
    for (int k = 0; k < batch.classes; k++) {
        const float share = term.shares[k], strength = term.weight * share;
        if (!(share > 0)) continue;
        const float usual = std::log(share * float(batch.classes));
        const auto place = [&](int at) { return at / LANES * batch.classes + k; };
        const auto is_other = [&](int at) { return batch.labels[batch.chosen[at]] != k; };
        const auto exponent = [&](int at) { return is_other(at) ? logits[place(at)][at % LANES] - usual : 0.0f; };
        const Softmax records(batch.count, exponent, [](int) { return true; });
        total += double(strength) * (records.log_sum() - std::log(double(batch.count)));
        for (int at = 0; at < batch.count; at++)
            if (is_other(at)) slopes[place(at)][at % LANES] += strength * std::exp(records.log_of(at));
    }
    return total * batch.count;
}

}  // namespace
