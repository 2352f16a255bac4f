// Receivers of a convolution's gradient: sums over all records, or the gradient of each record.
#pragma once

#include "layer.h"

namespace {

// Receives sums of products over places. Each sum is a vector with one number per record. Adds the total over all records to
// ``gradient``.
struct OverRecords {
    float* gradient;

    // ``sums``: the sums of OUTPUTS outputs for one weight. ``apart``: the distance between the weights of two outputs.
    template <int OUTPUTS>
    INLINED void take(long at, long apart, const vec (&sums)[OUTPUTS]) const {
        constexpr int LAST = OUTPUTS - 1;
        const four total = ::sums(sums[0], sums[std::min(1, LAST)], sums[std::min(2, LAST)], sums[std::min(3, LAST)]);
        UNROLL for (int o = 0; o < OUTPUTS; o++) gradient[at + o * apart] += total[o];
    }
    void take(long at, vec sums) const { gradient[at] += sum(sums); }
};

// Receives the same sums as ``OverRecords``, and stores them as the gradient of each record, [weight][lane].
struct ByOneRecord {
    vec* gradients;

    template <int OUTPUTS>
    INLINED void take(long at, long apart, const vec (&sums)[OUTPUTS]) const {
        UNROLL for (int o = 0; o < OUTPUTS; o++) gradients[at + o * apart] = sums[o];
    }
    void take(long at, vec sums) const { gradients[at] = sums; }
};

}  // namespace
