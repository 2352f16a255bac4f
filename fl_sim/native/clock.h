// Where a minibatch's time goes, by layer and part: known to a library that is compiled with -DFL_SIM_CLOCK, which
// benchmarks/roofline.py does. In any other the lines that take the time are empty.
#pragma once

#include "vectors.h"

namespace {

enum Part { FORWARD, TO_INPUTS, TO_WEIGHTS, LAYOUT, STEP, NUM_PARTS };  // LAYOUT: of weights, before and after a minibatch
enum Place { OUTSIDE = 0, RECORDS = 1, LOSS = 2, FIRST_LAYER = 3, MOST_PLACES = 64 };  // OUTSIDE: of steps

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

Clock the_clock;  // of one thread: whoever asks for times trains in one

// Counts the time of its life for a part of a place, less that of others that live meanwhile.
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
    ~Timed() {}  // so that no compiler takes it for a variable without use
};
#endif

}  // namespace
