// A softmax over a subset of the numbers that a function returns.
#pragma once

#include "vectors.h"

namespace {

// The softmax of those numbers ``value(i)``, i from 0 to ``count`` - 1, for which ``takes_part(i)`` is true.
template <class Value, class TakesPart>
struct Softmax {
    Value value;
    float highest = -INFINITY, log_mass = -INFINITY;

    Softmax(int count, const Value& value, const TakesPart& takes_part) : value(value) {
        for (int i = 0; i < count; i++)
            if (takes_part(i) && value(i) > highest) highest = value(i);
        double mass = 0;
        for (int i = 0; i < count; i++)
            if (takes_part(i)) mass += std::exp(value(i) - highest);
        log_mass = float(std::log(mass));
    }
    float log_of(int i) const { return value(i) - highest - log_mass; }
    float log_sum() const { return highest + log_mass; }  // -inf if no number takes part
};

}  // namespace
