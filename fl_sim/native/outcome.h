// What the steps of both kinds of GAN return to Python, and the names of their functions (gan.cpp, image_gan.cpp).
#pragma once

#include <new>
#include <stdexcept>

#include "subnormals.h"

namespace {

enum Outcome { DONE = 0, NO_MEMORY = 2, STRANGE = 3 };  // STRANGE: a row or a class does not exist

// Executes ``work`` and returns the outcome: no exception may reach Python.
template <class Work>
int guarded(const Work& work) try {
    const NoSubnormals none;
    work();
    return DONE;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
} catch (const std::length_error&) {
    return NO_MEMORY;
}

}  // namespace

// The library contains the steps once for every width of vectors, so the names of their functions end with the width.
#define JOINED(name, lanes) name##_##lanes
#define EXPANDED(name, lanes) JOINED(name, lanes)
#define OF_WIDTH(name) EXPANDED(name, FL_SIM_LANES)
