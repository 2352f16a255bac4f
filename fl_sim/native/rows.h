// Rows of numbers, one a record, laid out with the record innermost.
#pragma once

#include "vectors.h"

namespace {

// Lays ``count`` rows, at most LANES, those at ``chosen``, out as [number][lane]; rows that are missing are zeros.
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
