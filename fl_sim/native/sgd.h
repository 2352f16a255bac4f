// The step of SGD.
#pragma once

#include "vectors.h"

namespace {

// Where the parts of a gradient go as soon as they are known. A sink has a function
//     step(at, gradient, count): ``count`` numbers of the gradient, at most LANES, those of the parameters from ``at`` on;
// what lies behind them is written as it was.
//
// This one takes torch.optim.SGD's step. All arrays are LANES longer than they have parameters.
struct Sgd {
    float learning_rate, momentum, weight_decay, proximal_mu, gradient_scale, clip_norm;  // clip_norm 0: not clipped
    float *params, *buffers;       // buffers are not touched without momentum
    const float *anchor, *offset;  // offset: of the gradient; null where there is none
    const float* drift;            // joins what momentum makes of the gradient; likewise

    inline __attribute__((always_inline)) void step(long at, vec gradient, long count) const {
        move(at, corrected(at, gradient), count);
    }

    // Returns a gradient with all that the plan adds to it.
    inline __attribute__((always_inline)) vec corrected(long at, vec gradient) const {
        if (gradient_scale != 1) gradient *= gradient_scale;
        if (offset) gradient += load(offset + at);
        if (proximal_mu != 0) gradient += proximal_mu * (load(params + at) - load(anchor + at));
        return gradient;
    }

    // Takes the optimiser's step.
    inline __attribute__((always_inline)) void move(long at, vec gradient, long count) const {
        const ivec is_mine = LANE < int32_t(std::min<long>(count, LANES));
        const vec weight = load(params + at);
        if (weight_decay != 0) gradient += weight_decay * weight;
        if (momentum != 0) {
            const vec buffer = load(buffers + at);
            gradient += momentum * buffer;
            store(buffers + at, is_mine ? gradient : buffer);
        }
        if (drift) gradient += load(drift + at);
        store(params + at, is_mine ? weight - learning_rate * gradient : weight);
    }
};

// Hands over the gradient of ``count`` parameters from ``at`` on; ``gradients``: of all parameters.
template <class Sink>
void step_range(const Sink& sink, const float* gradients, long at, long count) {
    for (long done = 0; done < count; done += LANES) sink.step(at + done, load(gradients + at + done), count - done);
}

}  // namespace
