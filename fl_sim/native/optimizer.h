// The step of SGD, and those of Adam and AdamW.
#pragma once

#include "vectors.h"

namespace {

// Adam's running means of a gradient and of its squares (Kingma and Ba 2015), LANES longer than they have numbers.
struct Moments {
    static constexpr double FIRST_KEPT = 0.9, SECOND_KEPT = 0.999;
    float *first, *second;
    float first_share, second_share;  // what part of a mean is of gradients: the rest is of the zeros it began with

    // Before the step of number ``step``, from 1.
    void begin(int64_t step) {
        first_share = float(1 - std::pow(FIRST_KEPT, double(step)));
        second_share = float(1 - std::pow(SECOND_KEPT, double(step)));
    }

    // Takes in a gradient; returns what the weights move against. Those that are not ``is_mine`` stay as they were.
    inline __attribute__((always_inline)) vec direction(long at, vec gradient, ivec is_mine) const {
        const vec mean = load(first + at), square = load(second + at);
        const vec new_mean = mean + float(1 - FIRST_KEPT) * (gradient - mean);
        const vec new_square = float(SECOND_KEPT) * square + float(1 - SECOND_KEPT) * gradient * gradient;
        store(first + at, is_mine ? new_mean : mean);
        store(second + at, is_mine ? new_square : square);
        return new_mean / first_share / (root(new_square / second_share) + 1e-8f);
    }
};

// Where the parts of a gradient go as soon as they are known. A sink has the functions
//     step<PLAIN>(at, gradient, count): ``count`` numbers of the gradient, at most LANES, those of the parameters from ``at``
//         on; what lies behind them is written as it was;
//     finish(at, count): ``count`` numbers from ``at`` on, a layer's first, are through;
//     is_plain(): whether ``step<true>`` does the same, without asking for all that there could be.
//
// This one takes torch.optim.SGD's step, or those of Adam and AdamW. All arrays are LANES longer than they have parameters.
struct Optimizer {
    float learning_rate, momentum, weight_decay, proximal_mu, gradient_scale, clip_norm;  // clip_norm 0: not clipped
    float weight_kept;             // what AdamW leaves of a weight before its step; 1: all of it
    float *params, *buffers;       // buffers are not touched without momentum
    const float *anchor, *offset;  // offset: of the gradient; null where there is none
    const float* drift;            // joins what the optimiser makes of the gradient; likewise
    const float* trained;          // 0 for a frozen parameter, which never moves, else 1; null: no parameter is frozen
    Moments moments;               // null but for Adam and AdamW
    bool decays = weight_decay != 0, has_momentum = momentum != 0;

    bool is_plain() const {
        return gradient_scale == 1 && !offset && proximal_mu == 0 && !moments.first && !drift && weight_kept == 1 && !trained;
    }

    template <bool PLAIN = false>
    inline __attribute__((always_inline)) void step(long at, vec gradient, long count) const {
        move<PLAIN>(at, PLAIN ? gradient : corrected(at, gradient), count);
    }

    void finish(long, long) const {}

    // Returns a gradient with all that the plan adds to it.
    inline __attribute__((always_inline)) vec corrected(long at, vec gradient) const {
        if (gradient_scale != 1) gradient *= gradient_scale;
        if (offset) gradient += load(offset + at);
        if (proximal_mu != 0) gradient += proximal_mu * (load(params + at) - load(anchor + at));
        if (trained) gradient = load(trained + at) != 0.0f ? gradient : vec{};
        return gradient;
    }

    // Takes the optimiser's step.
    template <bool PLAIN = false>
    inline __attribute__((always_inline)) void move(long at, vec gradient, long count) const {
        ivec is_mine = LANE < int32_t(std::min<long>(count, LANES));
        if (!PLAIN && trained) is_mine &= load(trained + at) != 0.0f;
        const vec weight = load(params + at);
        if (decays) gradient += weight_decay * weight;
        if (!PLAIN && moments.first) {
            gradient = moments.direction(at, gradient, is_mine);
        } else if (has_momentum) {
            const vec buffer = load(buffers + at);
            gradient += momentum * buffer;
            store(buffers + at, is_mine ? gradient : buffer);
        }
        if (!PLAIN && drift) gradient += load(drift + at);
        const vec kept = !PLAIN && weight_kept != 1 ? weight_kept * weight : weight;
        store(params + at, is_mine ? kept - learning_rate * gradient : weight);
    }
};

// Hands over the gradient of ``count`` parameters from ``at`` on; LANES numbers behind it are read, too.
template <class Sink>
void step_range(const Sink& sink, long at, long count, const float* gradient) {
    for (long done = 0; done < count; done += LANES) sink.step(at + done, load(gradient + done), count - done);
    sink.finish(at, count);
}

}  // namespace
