// A gradient that is kept until all of it is known: for what depends on its length.
#pragma once

#include "optimizer.h"

namespace {

// A sink that keeps the gradient, LANES longer than it has numbers: what lies behind them stays as it was.
struct Kept {
    float* gradient;

    inline __attribute__((always_inline)) void step(long at, vec part, long count) const {
        const ivec is_mine = LANE < int32_t(std::min<long>(count, LANES));
        store(gradient + at, is_mine ? part : load(gradient + at));
    }
};

// A sink that keeps the gradient with all that the plan adds to it.
struct Corrected {
    const Optimizer& optimizer;
    Kept kept;

    inline __attribute__((always_inline)) void step(long at, vec part, long count) const {
        kept.step(at, optimizer.corrected(at, part), count);
    }
};

// Returns the length of a vector of ``count`` numbers, LANES from each ``at`` on; those behind the last are zeros.
template <class Part>
double length_of(long count, const Part& part) {
    constexpr long RUN = 256 * LANES;  // sums of float32 numbers stay short
    double square = 0;
    for (long first = 0; first < count; first += RUN) {
        vec squares{};
        for (long at = first; at < std::min(count, first + RUN); at += LANES) {
            const vec numbers = part(at);
            squares += numbers * numbers;
        }
        square += sum(squares);
    }
    return std::sqrt(square);
}

// Steps ``count`` parameters by a corrected gradient that is no longer than ``clip_norm``, if need be made shorter.
NOINLINE void move_clipped(const Optimizer& optimizer, const float* gradient, long count) {
    const double length = length_of(count, [&](long at) { return load(gradient + at); });
    const float factor = float(std::min(optimizer.clip_norm / (length + 1e-6), 1.0));  // NaN where the length is
    for (long at = 0; at < count; at += LANES) optimizer.move(at, factor * load(gradient + at), count - at);
}

}  // namespace
