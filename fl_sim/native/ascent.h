// The gradient uphill: sharpness-aware minimisation (Foret et al. 2021), adaptive or not (Kwon et al. 2021).
#pragma once

#include "sgd.h"

namespace {

// request.py fills it in, field by field.
struct Ascent {
    float radius, share;  // radius 0: none
    int64_t adaptive;
};

// A sink that keeps the gradient, LANES longer than it has numbers.
struct Kept {
    float* gradient;

    inline __attribute__((always_inline)) void step(long at, vec part, long count) const {
        const ivec is_mine = LANE < int32_t(std::min<long>(count, LANES));
        store(gradient + at, is_mine ? part : load(gradient + at));
    }
};

// A sink that takes the gradient uphill and steps the weights that lie at the foot.
struct Uphill {
    const Sgd& sgd;
    const float* gradient;  // at the foot
    float share;

    inline __attribute__((always_inline)) void step(long at, vec part, long count) const {
        if (share != 1) part = (1 - share) * load(gradient + at) + share * part;
        sgd.step(at, part, count);
    }
};

// Writes ``to``: ``params`` after a step uphill. What lies behind the ``count`` numbers of ``gradient`` is zeros.
NOINLINE void climb(const Ascent& ascent, const float* params, const float* gradient, long count, float* to) {
    constexpr long RUN = 256 * LANES;  // sums of float32 numbers stay short
    double square = 0;
    for (long first = 0; first < count; first += RUN) {
        vec squares{};
        for (long at = first; at < std::min(count, first + RUN); at += LANES) {
            const vec part = ascent.adaptive ? load(params + at) * load(gradient + at) : load(gradient + at);
            squares += part * part;
        }
        square += sum(squares);
    }
    const float length = float(ascent.radius / (std::sqrt(square) + 1e-12));
    for (long at = 0; at < count; at += LANES) {
        const vec weight = load(params + at), part = load(gradient + at);
        store(to + at, weight + length * (ascent.adaptive ? weight * weight * part : part));
    }
}

}  // namespace
