// What a convolution's pass over a group needs to know, and how what it sums up leaves it.
#pragma once

#include "layer.h"

namespace {

#ifdef FL_SIM_AMX
typedef vec Read;
#else
typedef Factors::Values Read;
#endif

struct Pass {  // a convolution over one group: forward, or back to the input with the flipped weights
    int kernel_y, kernel_x, stride_y, stride_x;
    const Read* in;
    long corner;  // where the first window starts in it
    Image in_shape;
    vec* out;
    Image out_shape;
    int rows, columns, step_y, step_x;  // how many places of ``out`` to write, and how far they are from each other
    bvec* chosen;  // null: no pooling
    bvec* chosen_at(int output, int y, int x) const { return chosen + (long(output) * out_shape.height + y) * out_shape.width + x; }
    const Factors::Weight* weights;
    const float* bias;  // null where there is none
    bool relu;
    int first_row, end_row;  // rows of ``in`` outside of which all is zero
    const vec* passed;       // null; or a derivative's origin: take what it took (``chosen`` too), let through what it let
    bool adds = false;       // to what is in ``out``; without pooling and ReLU
    int planes() const { return in_shape.channels / Factors::EACH; }            // of as many channels as a value has numbers
    bool is_odd() const { return in_shape.channels % Factors::EACH != 0; }      // a channel of pairs of rows is left
    long per_output() const { return long(planes() * kernel_y + is_odd() * ((kernel_y + 1) / 2)) * kernel_x; }
};

INLINE vec let_through(const Pass& pass, long at, vec value) {
    if (!pass.relu) return value;
    return !pass.passed ? rectified(value) : pass.passed[at] > 0.0f ? value : vec{};
}

// Writes a number that no pooling is behind.
INLINE void write_plain(const Pass& pass, long at, vec value) {
    pass.out[at] = pass.adds ? pass.out[at] + value : let_through(pass, at, value);
}

// Writes the largest of four numbers at ``at`` and which it was; of a derivative, the one that its origin took. BIASED: plus
// ``bias``.
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
