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

// The inverse of ``lay_out``: writes the first ``count`` lanes of [number][lane] as rows, one after the other.
NOINLINE void lay_back(const vec* from, int count, long numbers, float* rows) {
    for (long first = 0; first < numbers; first += LANES) {
        const long here = std::min<long>(LANES, numbers - first);
        vec block[LANES] = {};
        for (long i = 0; i < here; i++) block[i] = from[first + i];
        transpose(block);
        for (int lane = 0; lane < count; lane++) std::memcpy(rows + lane * numbers + first, &block[lane], here * sizeof(float));
    }
}

}  // namespace
