// Distillation from the received model (Hinton et al. 2015). FedNTD (Lee et al. 2022) leaves out the record's own class.
#pragma once

#include "loss.h"
#include "softmax.h"

namespace {

struct Distillation {
    const bool* classes;          // [class]: true for the classes in the softmax; null: all classes
    const float* received;        // the received model's logits, [record][class]; kernel.cpp computes them
    float weight, temperature;    // weight 0: no such term
    int64_t exclude_true;         // not 0: a record's own class is not in the softmax
};

// Adds the term's gradient by one group's logits to ``slopes``; returns the sum of the term over the group's records.
NOINLINE double distil(const Distillation& term, const Batch& batch, int group, const vec* logits, vec* slopes) {
    const int classes = batch.classes, here = std::min(LANES, batch.count - group * LANES);
    const float temperature = term.temperature;
    double total = 0;
    for (int lane = 0; lane < here; lane++) {
        const int64_t record = batch.chosen[group * LANES + lane], label = batch.labels[record];
        const float* from = term.received + record * classes;
        const auto takes_part = [&](int k) { return (!term.classes || term.classes[k]) && (k != label || !term.exclude_true); };
        const Softmax received(classes, [&](int k) { return from[k] / temperature; }, takes_part);
        const Softmax own(classes, [&](int k) { return logits[k][lane] / temperature; }, takes_part);
        for (int k = 0; k < classes; k++) {
            if (!takes_part(k)) continue;
            const float wanted = std::exp(received.log_of(k)), found = std::exp(own.log_of(k));
            total += double(wanted) * (received.log_of(k) - own.log_of(k));
            slopes[k][lane] += term.weight * temperature / float(batch.count) * (found - wanted);
        }
    }
    return double(term.weight) * temperature * temperature * total;
}

}  // namespace
