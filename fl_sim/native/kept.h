// A gradient that is stored until it is complete, for steps that depend on its length.
#pragma once

#include "optimizer.h"

namespace {

// The length (L2 norm) of a vector that is computed part by part. As soon as a run of numbers is complete, its squares are added,
// while the numbers are still in a fast cache. At the end the sums of all runs are added in the order of the runs, so the result
// does not depend on the order of the parts.
class Length {
  public:
    // Prepares for a new vector; must be called before its first part. ``numbers``: the vector, ``count`` numbers followed by
    // zeros. ``factors``: a factor for each number; null: none.
    void start(const float* numbers, const float* factors, long count) {
        numbers_ = numbers, factors_ = factors, count_ = count, at_ = -1;
        squares_.assign((count + RUN - 1) / RUN, UNKNOWN);
    }

    // Reports that ``count`` numbers from index ``at`` on are known. A later call with the same ``at`` has a larger ``count``.
    void add(long at, long count) {
        if (at != at_) at_ = at, next_ = (at + RUN - 1) / RUN;
        for (; (next_ + 1) * RUN <= at + count; next_++) squares_[next_] = square(next_);
    }

    double length() {
        double total = 0;
        for (size_t run = 0; run < squares_.size(); run++)
            total += squares_[run] == UNKNOWN ? square(long(run)) : squares_[run];
        return std::sqrt(total);
    }

  private:
    static constexpr long RUN = 256 * LANES;  // numbers per run, few enough for a float32 sum
    static constexpr double UNKNOWN = -1;

    NOINLINE double square(long run) const {
        vec squares{};
        for (long at = run * RUN; at < std::min(count_, (run + 1) * RUN); at += LANES) {
            const vec part = load(numbers_ + at), number = factors_ ? load(factors_ + at) * part : part;
            squares += number * number;
        }
        return sum(squares);
    }

    const float *numbers_ = nullptr, *factors_ = nullptr;
    long count_ = 0, at_ = -1, next_ = 0;  // the number of numbers; the start of the last part; its next run
    std::vector<double> squares_;          // the sum of squares of each run
};

// A sink that stores the gradient in an array with LANES spare numbers, which stay unchanged.
struct Kept {
    float* gradient;
    Length& length;

    void finish(long at, long count) const { length.add(at, count); }
    static constexpr bool is_plain() { return true; }

    template <bool PLAIN = true>
    inline __attribute__((always_inline)) void step(long at, vec part, long count) const {
        const ivec is_mine = LANE < int32_t(std::min<long>(count, LANES));
        store(gradient + at, is_mine ? part : load(gradient + at));
    }
};

// A sink that stores the gradient with the scale, the offset and the proximal term of the plan.
struct Corrected {
    const Optimizer& optimizer;
    Kept kept;

    template <bool PLAIN = false>
    inline __attribute__((always_inline)) void step(long at, vec part, long count) const {
        kept.step(at, optimizer.corrected(at, part), count);
    }

    void finish(long at, long count) const { kept.finish(at, count); }
    static constexpr bool is_plain() { return false; }
};

// Executes the optimiser's step with a corrected gradient of this length, clipped to the length ``clip_norm``.
NOINLINE void move_clipped(const Optimizer& optimizer, const float* gradient, long count, double length) {
    const float factor = float(std::min(optimizer.clip_norm / (length + 1e-6), 1.0));  // NaN if the length is NaN
    for (long at = 0; at < count; at += LANES) optimizer.move(at, factor * load(gradient + at), count - at);
}

}  // namespace
