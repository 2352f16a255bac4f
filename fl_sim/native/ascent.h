// The ascent step of sharpness-aware minimisation (Foret et al. 2021), adaptive or not (Kwon et al. 2021).
#pragma once

#include "kept.h"

namespace {

// request.py has the same structure, field by field.
struct Ascent {
    float radius, share;  // radius 0: no ascent step
    int64_t adaptive;
};

// A sink that receives the gradient after the ascent step. It passes the weighted mean of two gradients to ``sink``: the one
// before the step with the weight 1 - share, and the one after the step with the weight share.
template <class Sink>
struct Uphill {
    const Sink sink;
    const float* gradient;  // the gradient before the ascent step
    float share;

    template <bool PLAIN = false>
    inline __attribute__((always_inline)) void step(long at, vec part, long count) const {
        if (share != 1) part = (1 - share) * load(gradient + at) + share * part;
        sink.template step<PLAIN>(at, part, count);
    }

    void finish(long at, long count) const { sink.finish(at, count); }
    bool is_plain() const { return sink.is_plain(); }
};

// The weights after the ascent step. ``params`` and ``gradient`` have LANES spare numbers.
struct Climb {
    const Ascent& ascent;
    const float *params, *gradient;
    float length;

    Climb(const Ascent& ascent, const float* params, const float* gradient, double norm)
        : ascent(ascent), params(params), gradient(gradient), length(float(ascent.radius / (norm + 1e-12))) {}

    // Writes ``count`` of these weights to ``to``, from the index ``at`` on, and up to LANES further numbers. ``to`` may be the
    // memory of the gradient itself.
    NOINLINE void write(long at, long count, float* to) const {
        for (long end = at + count; at < end; at += LANES, to += LANES) {
            const vec weight = load(params + at), part = load(gradient + at);
            store(to, weight + length * (ascent.adaptive ? weight * weight * part : part));
        }
    }
};

}  // namespace
