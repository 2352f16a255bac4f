// What a plan does to the loss beside mixing: from raw logits to their gradient.
#pragma once

#include "loss.h"

namespace {

// Turns a group's raw logits into those that cross-entropy is taken of.
inline void adjust(const Terms& terms, int classes, vec* logits) {
    for (int k = 0; k < classes; k++) {
        if (terms.scale) logits[k] *= terms.scale[k];
        if (terms.shift) logits[k] += terms.shift[k];
    }
}

// Turns the gradient by those into that by the raw logits.
inline void adjust_back(const Terms& terms, int classes, vec* slopes) {
    for (int k = 0; terms.scale && k < classes; k++) slopes[k] *= terms.scale[k];
}

}  // namespace
