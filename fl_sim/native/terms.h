// The loss terms of a local plan, apart from mixing, and their gradients.
#pragma once

#include "contrast.h"
#include "distillation.h"
#include "pull.h"
#include "suppression.h"

namespace {

// request.py has the same structure, field by field.
struct Terms {
    const float *scale, *shift;  // [class], or null: only cross-entropy uses scale * logits + shift
    Distillation distillation;
    Suppression suppression;
    Contrast contrast;
    Pull pull;
    bool look_at_features() const { return contrast.weight != 0 || pull.weight != 0; }
    bool any() const {
        return scale || shift || distillation.weight != 0 || suppression.weight != 0 || look_at_features();
    }
};

// Adds the gradient of the terms of the logits to ``slopes``, [group][class]; returns the sum of these terms over the records.
inline double add_terms(const Terms& terms, const Batch& batch, const vec* logits, vec* slopes) {
    double total = terms.suppression.weight != 0 ? suppress(terms.suppression, batch, logits, slopes) : 0;
    for (int group = 0; terms.distillation.weight != 0 && group < batch.groups; group++)
        total += distil(terms.distillation, batch, group, logits + group * batch.classes, slopes + group * batch.classes);
    return total;
}

// Adds the gradient of the terms of the features, [group][feature], to ``slopes``; returns the sum of these terms over the
// records. ``row``: memory for ``numbers`` vectors.
inline double add_feature_terms(const Terms& terms, const Batch& batch, const vec* features, long numbers, vec* row,
                                vec* slopes) {
    double total = 0;
    for (int group = 0; group < batch.groups; group++, features += numbers, slopes += numbers) {
        if (terms.contrast.weight != 0) total += contrast(terms.contrast, batch, group, features, numbers, row, slopes);
        if (terms.pull.weight != 0) total += pull(terms.pull, batch, group, features, numbers, row, slopes);
    }
    return total;
}

// Replaces a group's logits by scale * logits + shift, for cross-entropy.
inline void adjust(const Terms& terms, int classes, vec* logits) {
    for (int k = 0; k < classes; k++) {
        if (terms.scale) logits[k] *= terms.scale[k];
        if (terms.shift) logits[k] += terms.shift[k];
    }
}

// Converts a gradient in place: from the gradient of cross-entropy by the adjusted logits to the gradient of the loss by the
// logits. ``added``: the gradient of the other terms.
inline void adjust_back(const Terms& terms, int classes, const vec* added, vec* slopes) {
    for (int k = 0; k < classes; k++) slopes[k] = (terms.scale ? slopes[k] * terms.scale[k] : slopes[k]) + added[k];
}

}  // namespace
