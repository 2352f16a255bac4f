// A loss term that moves features towards the prototype of their class (FedProto, Tan et al. 2022, eq. 6).
#pragma once

#include "loss.h"
#include "rows.h"

namespace {

struct Pull {
    const float* prototypes;  // [class][feature]
    const bool* present;      // [class]
    float weight;             // 0: no such term
};

// Adds the term's gradient by one group's features to ``slopes``; returns the sum of the term over the group's records.
// ``wanted``: memory for the prototypes of the group's records.
NOINLINE double pull(const Pull& term, const Batch& batch, int group, const vec* features, long numbers, vec* wanted,
                     vec* slopes) {
    const int here = std::min(LANES, batch.count - group * LANES);
    int64_t labels[LANES] = {};
    vec strength{}, square{};
    for (int lane = 0; lane < here; lane++) {
        labels[lane] = batch.labels[batch.chosen[group * LANES + lane]];
        strength[lane] = term.present[labels[lane]] ? term.weight : 0.0f;
    }
    lay_out(term.prototypes, labels, here, numbers, wanted);
    for (long i = 0; i < numbers; i++) {
        const vec way = strength == 0 ? vec{} : features[i] - wanted[i];  // not multiplied by 0, because the prototype of an absent class may be NaN
        square += way * way;
        slopes[i] += strength * (2.0f / float(batch.count)) * way;
    }
    return sum(strength * square);
}

}  // namespace
