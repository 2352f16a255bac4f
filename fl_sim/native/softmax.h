// A softmax over some of a few numbers, wherever they lie.
#pragma once

#include "vectors.h"

namespace {

// Of ``value(0)`` .. ``value(count - 1)``, over those for which ``takes_part``.
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
    float log_sum() const { return highest + log_mass; }  // -inf where none takes part
};

}  // namespace
