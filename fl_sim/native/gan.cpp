// What a DP conditional GAN of perceptrons computes in a step (clients/dafl/dpcgan), one client a call.

#include <cmath>
#include <new>
#include <stdexcept>

#include "generator.h"
#include "normals.h"
#include "pairs.h"
#include "subnormals.h"

namespace {

// Returns 0, or 2 where memory ran out; no exception may reach Python.
template <class Work>
int guarded(const Work& work) try {
    const NoSubnormals none;
    work();
    return 0;
} catch (const std::bad_alloc&) {
    return 2;
} catch (const std::length_error&) {
    return 2;
}

}  // namespace

#define JOINED(name, lanes) name##_##lanes
#define EXPANDED(name, lanes) JOINED(name, lanes)
#define OF_WIDTH(name) EXPANDED(name, FL_SIM_LANES)

extern "C" {

int OF_WIDTH(fl_sim_clipped_sum)(const Perceptron* discriminator, const float* real, const float* fake, int64_t pairs,
                                 double bound, double* sum) {
    thread_local ClippedSum at_work;
    return guarded([&] { at_work.write(*discriminator, real, fake, pairs, bound, sum); });
}

int OF_WIDTH(fl_sim_generate)(const Generator* generator, const float* latents, int64_t rows, float* made) {
    thread_local GeneratorAtWork at_work;
    return guarded([&] { at_work.begin(*generator), at_work.write(latents, rows, made); });
}

int OF_WIDTH(fl_sim_generator_gradient)(const Generator* generator, const Perceptron* discriminator,
                                        const float* latents, const int64_t* places, int64_t rows, float* gradient) {
    thread_local GeneratorAtWork at_work;
    return guarded([&] {
        at_work.begin(*generator), at_work.write_gradient(*discriminator, latents, places, rows, gradient);
    });
}

// Adam's step number ``step``, from 1 (Kingma and Ba 2015).
int OF_WIDTH(fl_sim_adam)(float* weights, float* means, float* squares, const float* gradient, int64_t count,
                          int64_t step, double mean_kept, double square_kept, double least, double learning_rate) {
    const double mean_share = 1 - std::pow(mean_kept, double(step)), square_share = 1 - std::pow(square_kept, double(step));
    const float first = float(1 - mean_kept), kept = float(square_kept), second = float(1 - square_kept);
    const float scale = float(1 / square_share), rate = float(learning_rate / mean_share), epsilon = float(least);
    return guarded([&] {
        for (int64_t i = 0; i < count; i++) {
            const float slope = gradient[i];
            means[i] += first * (slope - means[i]);
            squares[i] = kept * squares[i] + second * slope * slope;
            weights[i] -= rate * means[i] / (std::sqrt(squares[i] * scale) + epsilon);
        }
    });
}

// See normals.h.
int OF_WIDTH(fl_sim_normals)(const uint64_t* first, const uint64_t* second, int64_t count, double* made) {
    write_normals(first, second, count, made);
    return 0;
}

int OF_WIDTH(fl_sim_rounded_normals)(const uint64_t* first, const uint64_t* second, int64_t count, double ratio,
                                     double* made, int64_t* undecided, int64_t* num_undecided) {
    *num_undecided = write_rounded_normals(first, second, count, ratio, made, undecided);
    return 0;
}

}  // extern "C"
