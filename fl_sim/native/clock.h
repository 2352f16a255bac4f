// Measures the time of a minibatch, by layer and part. benchmarks/roofline.py compiles a library with -DFL_SIM_CLOCK, which
// contains the measurement. In all other libraries these functions are empty.
#pragma once

#include "vectors.h"

namespace {

enum Part { FORWARD, TO_INPUTS, TO_WEIGHTS, LAYOUT, STEP, NUM_PARTS };  // LAYOUT: rearranging weights before and after a minibatch
enum Place { OUTSIDE = 0, RECORDS = 1, LOSS = 2, FIRST_LAYER = 3, MOST_PLACES = 64 };  // OUTSIDE: outside of optimizer steps

#ifdef FL_SIM_CLOCK
unsigned long long ticks_now() {
#ifdef __aarch64__
    unsigned long long now;
    asm volatile("mrs %0, cntvct_el0" : "=r"(now));
    return now;
#else
    return __builtin_ia32_rdtsc();
#endif
}

struct Clock {
    double ticks[MOST_PLACES][NUM_PARTS] = {};
    int place = 0, part = 0;
    unsigned long long since = 0;

    void enter(int new_place, int new_part) {
        const unsigned long long now = ticks_now();
        ticks[place][part] += double(now - since);
        since = now, place = new_place, part = new_part;
    }
};

Clock the_clock;  // for one thread only: measurements use a single thread

// An object that measures the time from its construction to its destruction, for one part of a place. The time of other such
// objects in between is not counted.
class Timed {
  public:
    Timed(int place, Part part) : place_(the_clock.place), part_(the_clock.part) {
        the_clock.enter(std::min<int>(place, MOST_PLACES - 1), part);
    }
    explicit Timed(Part part) : Timed(the_clock.place, part) {}
    ~Timed() { the_clock.enter(place_, part_); }
    Timed(const Timed&) = delete;

  private:
    const int place_, part_;
};
#else
struct Timed {
    Timed(int, Part) {}
    explicit Timed(Part) {}
    ~Timed() {}  // avoids the compiler's warning about an unused variable
};
#endif

}  // namespace
