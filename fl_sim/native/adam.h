// Adam (Kingma and Ba 2015) on a network's weights, and the gradient from a sum with noise.
#pragma once

#include <cmath>
#include <cstdint>

namespace {

// The state of Adam. perceptrons.py has the same structure. Every vector has ``count`` numbers.
struct Adam {
    float *weights, *means, *squares;
    float* gradient;  // the gradient of this step
    int64_t count;
    double mean_kept, square_kept, least, learning_rate;
};

// Executes step number ``step``, counted from 1.
void take_step(const Adam& of, long step) {
    const double mean_share = 1 - std::pow(of.mean_kept, double(step));
    const double square_share = 1 - std::pow(of.square_kept, double(step));
    const float first = float(1 - of.mean_kept), kept = float(of.square_kept), second = float(1 - of.square_kept);
    const float scale = float(1 / square_share), rate = float(of.learning_rate / mean_share), epsilon = float(of.least);
    for (long i = 0; i < of.count; i++) {
        const float slope = of.gradient[i];
        of.means[i] += first * (slope - of.means[i]);
        of.squares[i] = kept * of.squares[i] + second * slope * slope;
        of.weights[i] -= rate * of.means[i] / (std::sqrt(of.squares[i] * scale) + epsilon);
    }
}

// Adds noise to a sum, and divides by ``divisor``. The float64 operations are those of ``add_noise`` in
// fl_sim/privacy/mechanisms.py. ``noise``: one number for each coordinate, in grid steps of size ``spacing``; null: no noise and
// no rounding.
void release(const double* sum, const double* noise, double spacing, double divisor, long count, float* gradient) {
    const double finer = 1 / spacing;  // exact, because ``spacing`` is a power of two
    if (noise)
        for (long i = 0; i < count; i++) gradient[i] = float((std::rint(sum[i] * finer) + noise[i]) * spacing / divisor);
    else
        for (long i = 0; i < count; i++) gradient[i] = float(sum[i] / divisor);
}

// Updates ``mean``, the moving average of the weights, with the decay rate ``kept``.
void take_mean(const Adam& of, double kept, float* mean) {
    const float share = float(1 - kept);
    for (long i = 0; i < of.count; i++) mean[i] += share * (of.weights[i] - mean[i]);
}

}  // namespace
