// The steps of a DP conditional GAN of perceptrons (clients/dafl/dpcgan), for one client per call.

#include <cmath>

#include "adam.h"
#include "generator.h"
#include "normals.h"
#include "outcome.h"
#include "pairs.h"

extern "C" {

// Writes the sum of the clipped gradients of (real, fake) pairs: see pairs.h.
int OF_WIDTH(fl_sim_clipped_sum)(const Perceptron* discriminator, const Shown* real, const int64_t* chosen,
                                 const Shown* fake, double bound, double* sum) {
    thread_local ClippedSum at_work;
    if (!fake->fits(*discriminator)) return STRANGE;
    for (long pair = 0; pair < fake->count; pair++)
        if (!real->fits(*discriminator, chosen[pair])) return STRANGE;
    return guarded([&] { at_work.write(*discriminator, *real, chosen, *fake, bound, sum); });
}

// Executes Adam's step on the discriminator. Its gradient is the clipped sum over pairs plus noise, divided by ``divisor``. The
// pairs are the chosen records and the generator's outputs for ``latents``.
int OF_WIDTH(fl_sim_discriminator_step)(const Generator* generator, const Perceptron* discriminator, const Shown* real,
                                        const int64_t* chosen, const Shown* latents, double bound, const double* noise,
                                        double spacing, double divisor, const Adam* adam, int64_t step, double* sum) {
    thread_local GeneratorAtWork maker;
    thread_local ClippedSum at_work;
    thread_local Numbers<float> made;
    if (!latents->fits(generator->curved)) return STRANGE;
    for (long pair = 0; pair < latents->count; pair++)
        if (!real->fits(*discriminator, chosen[pair])) return STRANGE;
    const int outcome = guarded([&] {
        const Shown fake{made.at_least(latents->count * discriminator->width()), latents->classes, latents->count};
        maker.begin(*generator), maker.write(*latents, made.at_least(0));
        at_work.write(*discriminator, *real, chosen, fake, bound, sum);
    });
    if (outcome != DONE) return outcome;
    release(sum, noise, spacing, divisor, adam->count, adam->gradient);
    return guarded([&] { take_step(*adam, step); });
}

int OF_WIDTH(fl_sim_generate)(const Generator* generator, const Shown* latents, float* made) {
    thread_local GeneratorAtWork at_work;
    if (!latents->fits(generator->curved)) return STRANGE;
    return guarded([&] { at_work.begin(*generator), at_work.write(*latents, made); });
}

// Executes Adam's step on the generator, and updates the moving average of its weights. The loss is that of the generator's fakes
// under the discriminator.
int OF_WIDTH(fl_sim_generator_step)(const Generator* generator, const Perceptron* discriminator, const Shown* latents,
                                    const Adam* adam, int64_t step, double kept, float* mean) {
    thread_local GeneratorAtWork at_work;
    if (!latents->fits(generator->curved)) return STRANGE;
    return guarded([&] {
        at_work.begin(*generator), at_work.write_gradient(*discriminator, *latents, adam->gradient);
        take_step(*adam, step), take_mean(*adam, kept, mean);
    });
}

// Writes ``count`` normal random numbers from pairs of random words: see normals.h.
int OF_WIDTH(fl_sim_normals)(const uint64_t* first, const uint64_t* second, int64_t count, double* made) {
    write_normals(first, second, count, made);
    return 0;
}

int OF_WIDTH(fl_sim_rounded_normals)(const uint64_t* words, int64_t count, double ratio, double* made,
                                     int64_t* undecided, int64_t* num_undecided) {
    *num_undecided = write_rounded_normals(words, count, ratio, made, undecided);
    return 0;
}

}  // extern "C"
