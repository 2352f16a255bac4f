// The gradient uphill: sharpness-aware minimisation (Foret et al. 2021), adaptive or not (Kwon et al. 2021).
#pragma once

#include "kept.h"

namespace {

// request.py fills it in, field by field.
struct Ascent {
    float radius, share;  // radius 0: none
    int64_t adaptive;
};

// A sink that takes the gradient uphill, and hands on what is to be taken for that at the foot.
template <class Sink>
struct Uphill {
    const Sink& sink;
    const float* gradient;  // at the foot
    float share;

    inline __attribute__((always_inline)) void step(long at, vec part, long count) const {
        if (share != 1) part = (1 - share) * load(gradient + at) + share * part;
        sink.step(at, part, count);
    }
};

// Writes ``to``: ``params`` after a step uphill. What lies behind the ``count`` numbers of ``gradient`` is zeros.
NOINLINE void climb(const Ascent& ascent, const float* params, const float* gradient, long count, float* to) {
    const double norm = length_of(count, [&](long at) {
        return ascent.adaptive ? load(params + at) * load(gradient + at) : load(gradient + at);
    });
    const float length = float(ascent.radius / (norm + 1e-12));
    for (long at = 0; at < count; at += LANES) {
        const vec weight = load(params + at), part = load(gradient + at);
        store(to + at, weight + length * (ascent.adaptive ? weight * weight * part : part));
    }
}

}  // namespace
