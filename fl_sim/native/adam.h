// Adam (Kingma and Ba 2015) on a network's weights, and the gradient that a noised sum stands for.
#pragma once

#include <cmath>
#include <cstdint>

namespace {

// adversaries.py fills it in. Every vector has ``count`` numbers.
struct Adam {
    float *weights, *means, *squares;
    float* gradient;  // of this step
    int64_t count;
    double mean_kept, square_kept, least, learning_rate;
};

// Takes step number ``step``, from 1.
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

// Writes what ``add_noise`` of fl_sim/privacy/mechanisms.py makes of a sum, divided: the same operations on float64.
// ``noise``: in steps of the grid, which are ``spacing``; null: none, and the sum as it is.
void release(const double* sum, const double* noise, double spacing, double divisor, long count, float* gradient) {
    const double finer = 1 / spacing;  // of a power of two, so that times it is over the other
    if (noise)
        for (long i = 0; i < count; i++) gradient[i] = float((std::rint(sum[i] * finer) + noise[i]) * spacing / divisor);
    else
        for (long i = 0; i < count; i++) gradient[i] = float(sum[i] / divisor);
}

// Moves the mean of weights: ``kept`` of it stays.
void take_mean(const Adam& of, double kept, float* mean) {
    const float share = float(1 - kept);
    for (long i = 0; i < of.count; i++) mean[i] += share * (of.weights[i] - mean[i]);
}

}  // namespace
