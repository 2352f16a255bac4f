// The arguments of a convolution over one group, and the functions that write its outputs.
#pragma once

#include "layer.h"

namespace {

#ifdef FL_SIM_AMX
typedef vec Read;
#else
typedef Factors::Values Read;
#endif

struct Pass {  // forward pass, or backward pass to the input with the flipped weights
    int kernel_y, kernel_x, stride_y, stride_x;
    const Read* in;
    long corner;  // the index in ``in`` at which the first window starts
    Image in_shape;
    vec* out;
    Image out_shape;
    int rows, columns, step_y, step_x;  // the number of outputs to write, and the distances between them in ``out``
    bvec* chosen;  // null: no pooling
    bvec* chosen_at(int output, int y, int x) const { return chosen + (long(output) * out_shape.height + y) * out_shape.width + x; }
    const Factors::Weight* weights;
    const float* bias;  // null: no bias
    bool relu;
    int first_row, end_row;  // the rows of ``in`` outside of this range are zero
    const vec* passed;       // for a derivative group the output of its origin, whose ReLUs and maxima (``chosen``) the group uses; else null
    bool adds = false;       // true: add to the numbers in ``out``; only without pooling and ReLU
    int planes() const { return in_shape.channels / Factors::EACH; }            // the number of planes: of channels, or of whole pairs of channels
    bool is_odd() const { return in_shape.channels % Factors::EACH != 0; }      // true if one channel is left without a partner; its pairs are pairs of rows
    long per_output() const { return long(planes() * kernel_y + is_odd() * ((kernel_y + 1) / 2)) * kernel_x; }
};

INLINE vec let_through(const Pass& pass, long at, vec value) {
    if (!pass.relu) return value;
    return !pass.passed ? rectified(value) : pass.passed[at] > 0.0f ? value : vec{};
}

// Writes an output that is not pooled.
INLINE void write_plain(const Pass& pass, long at, vec value) {
    pass.out[at] = pass.adds ? pass.out[at] + value : let_through(pass, at, value);
}

// Writes the largest of four numbers to the index ``at``, and its number, 0 to 3, to ``chosen``. For a derivative group it
// writes the number that its origin chose. BIASED: adds ``bias``.
template <bool BIASED = false>
INLINE void write_largest(const Pass& pass, long at, bvec* chosen, const vec (&from)[2][2], vec bias = vec{}) {
    if (pass.passed) {
        const ivec taken = widened(*chosen);
        const vec left = taken == 0 ? from[0][0] : from[1][0], right = taken == 1 ? from[0][1] : from[1][1];
        const vec value = (taken & 1) == 0 ? left : right;
        pass.out[at] = let_through(pass, at, BIASED ? value + bias : value);
        return;
    }
    vec best = larger(larger(from[0][0], from[0][1]), larger(from[1][0], from[1][1]));
    ivec which = from[1][0] == best ? ivec{} + 2 : ivec{} + 3;
    which = from[0][1] == best ? ivec{} + 1 : which;
    which = from[0][0] == best ? ivec{} : which;
    if (BIASED) best += bias;
    pass.out[at] = pass.relu ? rectified(best) : best;
    *chosen = narrowed(which);
}

INLINE void write_pooled(const Pass& pass, int output, int y, int x, const vec (&from)[2][2]) {
    write_largest(pass, pass.out_shape.line(output, y) + x, pass.chosen_at(output, y, x), from);
}

}  // namespace
