// A gradient that is kept until all of it is known: for what depends on its length.
#pragma once

#include "optimizer.h"

namespace {

// The length of a vector that becomes known part by part. Its squares are summed in runs of numbers, each as soon as it is known
// and still in a near cache, and the runs in their order, whichever was known first.
class Length {
  public:
    // Before the first part of a vector of ``count`` numbers: ``numbers``, those behind the last are zeros; ``factors``: null, or
    // what each of them is multiplied with.
    void start(const float* numbers, const float* factors, long count) {
        numbers_ = numbers, factors_ = factors, count_ = count, at_ = -1;
        squares_.assign((count + RUN - 1) / RUN, UNKNOWN);
    }

    // Takes in that ``count`` numbers from ``at`` on are known: more than the last time from there, or others.
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
    static constexpr long RUN = 256 * LANES;  // sums of float32 numbers stay short
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
    long count_ = 0, at_ = -1, next_ = 0;  // numbers; where the last part began; its next run
    std::vector<double> squares_;          // of each run
};

// A sink that keeps the gradient, LANES longer than it has numbers: what lies behind them stays as it was.
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

// A sink that keeps the gradient with all that the plan adds to it.
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

// Steps ``count`` parameters by a corrected gradient of this length, made no longer than ``clip_norm``.
NOINLINE void move_clipped(const Optimizer& optimizer, const float* gradient, long count, double length) {
    const float factor = float(std::min(optimizer.clip_norm / (length + 1e-6), 1.0));  // NaN where the length is
    for (long at = 0; at < count; at += LANES) optimizer.move(at, factor * load(gradient + at), count - at);
}

}  // namespace
