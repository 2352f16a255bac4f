// A loss term that moves features towards those of the received model, away from those of another model (MOON, Li et al. 2021,
// eq. 3).
//
// The loss depends only on the directions of the two models' features. It needs only their difference, which is called the lead.
// With lead = previous / |previous| - received / |received|, the loss of a record with features z is softplus(z . lead / (|z|
// temperature)). A vector of zeros has no direction: its cosines and its gradient are 0.
#pragma once

#include "loss.h"
#include "rows.h"

namespace {

struct Contrast {
    const float* previous;      // the other model's parameters
    const float* leads;         // [record][feature]; kernel.cpp computes them
    float weight, temperature;  // weight 0: no such term
};

// Scales rows of ``numbers`` numbers to length 1; rows of zeros stay unchanged.
inline void to_directions(float* rows, int64_t count, long numbers) {
    for (float* row = rows; row < rows + count * numbers; row += numbers) {
        double square = 0;
        for (long i = 0; i < numbers; i++) square += double(row[i]) * row[i];
        const float scale = square == 0 ? 0.0f : float(1 / std::sqrt(square));
        for (long i = 0; i < numbers; i++) row[i] *= scale;
    }
}

// Adds the term's gradient by one group's features to ``slopes``; returns the sum of the term over the group's records.
// ``leads``: memory for the leads of the group.
NOINLINE double contrast(const Contrast& term, const Batch& batch, int group, const vec* features, long numbers, vec* leads,
                         vec* slopes) {
    const int here = std::min(LANES, batch.count - group * LANES);
    lay_out(term.leads, batch.chosen + group * LANES, here, numbers, leads);
    vec square{}, along{}, inverse{}, strength{};
    for (long i = 0; i < numbers; i++) square += features[i] * features[i], along += features[i] * leads[i];
    double total = 0;
    for (int lane = 0; lane < here; lane++) {
        inverse[lane] = square[lane] == 0 ? 0.0f : 1 / std::sqrt(square[lane]);
        const float gap = along[lane] * inverse[lane] / term.temperature;
        total += std::max(gap, 0.0f) + std::log1p(std::exp(-std::abs(gap)));
        strength[lane] = inverse[lane] * term.weight / (term.temperature * float(batch.count)) / (1 + std::exp(-gap));
    }
    const vec back = along * inverse * inverse;
    for (long i = 0; i < numbers; i++) slopes[i] += strength * (leads[i] - back * features[i]);
    return term.weight * total;
}

}  // namespace
