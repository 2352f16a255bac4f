// The optimizer steps of SGD, Adam and AdamW, and the interface of sinks for gradients.
#pragma once

#include "vectors.h"

namespace {

// Adam's running means of gradients and of squared gradients (Kingma and Ba 2015), with LANES spare numbers.
struct Moments {
    static constexpr double FIRST_KEPT = 0.9, SECOND_KEPT = 0.999;
    float *first, *second;
    float first_share, second_share;  // the total weight of all gradients in a running mean; the rest of the weight is on its initial zeros

    // Prepares for step number ``step``, counted from 1; must be called before the step.
    void begin(int64_t step) {
        first_share = float(1 - std::pow(FIRST_KEPT, double(step)));
        second_share = float(1 - std::pow(SECOND_KEPT, double(step)));
    }

    // Updates the means by a gradient; returns Adam's step before multiplication by the learning rate. Lanes in which ``is_mine`` is
    // false stay unchanged.
    inline __attribute__((always_inline)) vec direction(long at, vec gradient, ivec is_mine) const {
        const vec mean = load(first + at), square = load(second + at);
        const vec new_mean = mean + float(1 - FIRST_KEPT) * (gradient - mean);
        const vec new_square = float(SECOND_KEPT) * square + float(1 - SECOND_KEPT) * gradient * gradient;
        store(first + at, is_mine ? new_mean : mean);
        store(second + at, is_mine ? new_square : square);
        return new_mean / first_share / (root(new_square / second_share) + 1e-8f);
    }
};

// A sink receives the parts of a gradient as soon as they are known. It has the functions
//     step<PLAIN>(at, gradient, count): receives ``count`` numbers of the gradient, at most LANES, for the parameters from index
//         ``at`` on; numbers after these stay unchanged;
//     finish(at, count): tells the sink that the first ``count`` numbers of a layer, from index ``at`` on, are complete;
//     is_plain(): returns true if ``step<true>``, a faster version for plain SGD, gives the same result.
//
// This sink executes the step of torch.optim.SGD, Adam or AdamW. All arrays have LANES spare numbers.
struct Optimizer {
    float learning_rate, momentum, weight_decay, proximal_mu, gradient_scale, clip_norm;  // clip_norm 0: no clipping
    float weight_kept;             // AdamW's factor of a weight before its step; 1: none
    float *params, *buffers;       // buffers: not used without momentum
    const float *anchor, *offset;  // offset: added to the gradient; null: none
    const float* drift;            // added to the direction of the optimiser's step; null: none
    const float* trained;          // 0 for a frozen parameter, which never moves, else 1; null: no parameter is frozen
    Moments moments;               // null pointers for SGD
    bool decays = weight_decay != 0, has_momentum = momentum != 0;

    bool is_plain() const {
        return gradient_scale == 1 && !offset && proximal_mu == 0 && !moments.first && !drift && weight_kept == 1 && !trained;
    }

    template <bool PLAIN = false>
    inline __attribute__((always_inline)) void step(long at, vec gradient, long count) const {
        move<PLAIN>(at, PLAIN ? gradient : corrected(at, gradient), count);
    }

    void finish(long, long) const {}

    // Returns the gradient with the scale, the offset and the proximal term of the plan.
    inline __attribute__((always_inline)) vec corrected(long at, vec gradient) const {
        if (gradient_scale != 1) gradient *= gradient_scale;
        if (offset) gradient += load(offset + at);
        if (proximal_mu != 0) gradient += proximal_mu * (load(params + at) - load(anchor + at));
        if (trained) gradient = load(trained + at) != 0.0f ? gradient : vec{};
        return gradient;
    }

    // Executes the optimiser's step.
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

// Passes the gradient of ``count`` parameters, from index ``at`` on, to ``sink``; reads up to LANES numbers after the gradient.
template <class Sink>
void step_range(const Sink& sink, long at, long count, const float* gradient) {
    for (long done = 0; done < count; done += LANES) sink.step(at + done, load(gradient + done), count - done);
    sink.finish(at, count);
}

}  // namespace
