// Rearranges rows of numbers, one row per record, to a layout in which the record is the innermost index.
#pragma once

#include "vectors.h"

namespace {

// Writes the ``count`` rows with the indices ``chosen``, at most LANES, as [number][lane]; the missing lanes are zeros.
NOINLINE void lay_out(const float* rows, const int64_t* chosen, int count, long numbers, vec* to) {
    for (long first = 0; first < numbers; first += LANES) {
        const long here = std::min<long>(LANES, numbers - first);
        vec block[LANES];
        for (int lane = 0; lane < LANES; lane++)
            block[lane] = lane < count ? load(rows + chosen[lane] * numbers + first, numbers - first) : vec{};
        transpose(block);
        for (long i = 0; i < here; i++) to[first + i] = block[i];
    }
}

}  // namespace
