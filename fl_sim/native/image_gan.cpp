// The steps of a DP conditional GAN of convolutions (clients/dafl/dpcgan), for one client per call; gan.cpp has those of perceptrons.

#include "adam.h"
#include "images.h"
#include "outcome.h"

namespace {

bool all_fit(const Painters& nets, const Shown& real, const int64_t* chosen, const Shown& others) {
    if (!nets.fits(others)) return false;
    for (long pair = 0; pair < others.count; pair++)
        if (!nets.fits(real, chosen[pair])) return false;
    return true;
}

}  // namespace

extern "C" {

// Writes the sum of the clipped gradients of the pairs of chosen records and fakes: see images.h.
int OF_WIDTH(fl_sim_image_clipped_sum)(const Painters* nets, const Shown* real, const int64_t* chosen, const Shown* fake,
                                       double bound, double* sum) {
    thread_local ClippedPairs pairs;
    if (!all_fit(*nets, *real, chosen, *fake)) return STRANGE;
    return guarded([&] {
        pairs.write(*nets, fake->count, bound, [](long, long) {}, [&](long pair, Discriminating& net, long row) {
            net.enter(*real, chosen[pair], row), net.enter(*fake, pair, row + 1);
        }, sum);
    });
}

// Executes Adam's step on the discriminator, as fl_sim_discriminator_step of gan.cpp does.
int OF_WIDTH(fl_sim_image_discriminator_step)(const Painters* nets, const Shown* real, const int64_t* chosen, const Shown* latents,
                                              double bound, const double* noise, double spacing, double divisor,
                                              const Adam* adam, int64_t step, double* sum) {
    thread_local ClippedPairs pairs;
    thread_local Generating generating;
    if (!all_fit(*nets, *real, chosen, *latents)) return STRANGE;
    const int outcome = guarded([&] {
        long begun = 0;
        generating.begin(*nets);
        const auto prepare = [&](long first, long count) { generating.forward(*latents, begun = first, count); };
        pairs.write(*nets, latents->count, bound, prepare, [&](long pair, Discriminating& net, long row) {
            net.enter(*real, chosen[pair], row), net.enter(generating.image(pair - begun), *latents, pair, row + 1);
        }, sum);
    });
    if (outcome != DONE) return outcome;
    release(sum, noise, spacing, divisor, adam->count, adam->gradient);
    return guarded([&] { take_step(*adam, step); });
}

// Writes the generator's images, [row][channel][y][x].
int OF_WIDTH(fl_sim_image_generate)(const Painters* nets, const Shown* latents, float* made) {
    thread_local Generating generating;
    if (!nets->fits(*latents)) return STRANGE;
    return guarded([&] {
        generating.begin(*nets);
        for (long first = 0; first < latents->count; first += IMAGES_AT_ONCE) {
            const long here = std::min<long>(IMAGES_AT_ONCE, latents->count - first);
            generating.forward(*latents, first, here);
            for (long row = 0; row < here; row++)
                for (long channel = 0; channel < nets->channels; channel++)
                    each_pixel(generating.image(row), [&](long y, long x) { *made++ = generating.image(row).pixel(y, x)[channel]; });
        }
    });
}

// Executes Adam's step on the generator, as fl_sim_generator_step of gan.cpp does.
int OF_WIDTH(fl_sim_image_generator_step)(const Painters* nets, const Shown* latents, const Adam* adam, int64_t step, double kept,
                                          float* mean) {
    thread_local Generating generating;
    thread_local Discriminating net;
    thread_local Numbers<double> sums;
    thread_local Numbers<float> small;
    if (!nets->fits(*latents)) return STRANGE;
    return guarded([&] {
        generating.begin(*nets), net.begin(*nets);
        std::fill_n(sums.at_least(generating.num_parameters()), generating.num_parameters(), 0.0);
        for (long first = 0; first < latents->count; first += IMAGES_AT_ONCE) {
            const long here = std::min<long>(IMAGES_AT_ONCE, latents->count - first);
            generating.forward(*latents, first, here);
            for (long row = 0; row < here; row++) net.enter(generating.image(row), *latents, first + row, row);
            float scores[IMAGES_AT_ONCE], errors[IMAGES_AT_ONCE];
            net.forward(here, scores);
            for (long row = 0; row < here; row++) errors[row] = -sigmoid(spread(-scores[row]))[0] / float(latents->count);
            net.backward(here, errors, true, small.at_least(Discriminating::SMALL), here);
            generating.backward(*latents, first, here, net.image_errors(), sums.at_least(0));
        }
        generating.hand_over(sums.at_least(0), adam->gradient);
        take_step(*adam, step), take_mean(*adam, kept, mean);
    });
}

}  // extern "C"
