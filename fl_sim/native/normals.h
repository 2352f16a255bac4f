// Normal random numbers from uniform random bits, in one pass. fl_sim/privacy/mechanisms.py computes the same numbers.
//
// A number N is computed from one or two words. The last bit of ``first`` is its sign. first >> 1, then ``second``, are the first
// binary digits of U = P(|N'| > |N|). The quantile is Wichura's (1988, algorithm AS 241, PPND16), with an error of about 2^-50.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "vectors.h"

namespace {

constexpr long NORMALS_AT_ONCE = 512;
constexpr double SURE = 0.5 - 1.0 / (1 << 17);  // see TOLERANCE in fl_sim/privacy/mechanisms.py
constexpr uint64_t LEAST = uint64_t(1) << 47;   // the least word ``first``: see DECIDED in fl_sim/privacy/mechanisms.py
constexpr double CLOSE = 0x1p-43;               // see CLOSE in fl_sim/privacy/mechanisms.py

template <int DEGREE>
inline double polynomial(const double (&terms)[DEGREE + 1], double x) {
    double sum = terms[DEGREE];
#pragma GCC unroll 8
    for (int i = DEGREE - 1; i >= 0; i--) sum = sum * x + terms[i];
    return sum;
}

// Returns x with P(N > x) = 0.5 - q, for 0 <= q <= 0.425.
inline double middle_quantile(double q) {
    constexpr double ABOVE[8] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                                 1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                                 3.3430575583588128105e4, 2.5090809287301226727e3};
    constexpr double BELOW[8] = {1.0,                     4.2313330701600911252e1, 6.8718700749205790830e2,
                                 5.3941960214247511077e3, 2.1213794301586595867e4, 3.9307895800092710610e4,
                                 2.8729085735721942674e4, 5.2264952788528545610e3};
    const double r = 0.180625 - q * q;
    return q * polynomial<7>(ABOVE, r) / polynomial<7>(BELOW, r);
}

// Returns x in the tail of the distribution, for r = sqrt(-log(P(N > x))) <= 5.
inline double near_tail(double r) {
    constexpr double ABOVE[8] = {1.42343711074968357734e0,  4.63033784615654529590e0,  5.76949722146069140550e0,
                                 3.64784832476320460504e0,  1.27045825245236838258e0,  2.41780725177450611770e-1,
                                 2.27238449892691845833e-2, 7.74545014278341407640e-4};
    constexpr double BELOW[8] = {1.0,                       2.05319162663775882187e0,  1.67638483018380384940e0,
                                 6.89767334985100004550e-1, 1.48103976427480074590e-1, 1.51986665636164571966e-2,
                                 5.47593808499534494600e-4, 1.05075007164441684324e-9};
    return polynomial<7>(ABOVE, r - 1.6) / polynomial<7>(BELOW, r - 1.6);
}

// Returns x as ``near_tail`` does, for r > 5. This happens once in 10^11 numbers.
inline double far_tail(double r) {
    constexpr double ABOVE[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                                 2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                 2.71155556874348757815e-5, 2.01033439929228813265e-7};
    constexpr double BELOW[8] = {1.0,                       5.99832206555887937690e-1, 1.36929880922735805310e-1,
                                 1.48753612908506148525e-2, 7.86869131145613259100e-4, 1.84631831751005468180e-5,
                                 1.42151175831644588870e-7, 2.04426310338993978564e-15};
    return polynomial<7>(ABOVE, r - 5.0) / polynomial<7>(BELOW, r - 5.0);
}

// Returns log(x) as fdlibm does, with an error below one unit in the last place. ``x``: a float64 number that is not subnormal.
inline double log_of(double x) {
    constexpr double LG[7] = {6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                              2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                              1.479819860511658591e-01};
    int64_t bits;
    std::memcpy(&bits, &x, 8);
    bits += 0x3ff0000000000000 - 0x3fe6a09e00000000;  // shifts the exponent so that the mantissa is close to 1
    const double power = double(int32_t((bits >> 52) - 1023));
    bits = (bits & 0x000fffffffffffff) + 0x3fe6a09e00000000;
    double rest;
    std::memcpy(&rest, &bits, 8);
    const double f = rest - 1.0, s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
    return power * 6.93147180369123816490e-01 -
           ((half - (s * (half + z * polynomial<6>(LG, z)) + power * 1.90821492927058770002e-10)) - f);
}

// Writes the magnitudes of ``count`` numbers, at most NORMALS_AT_ONCE. ``second``: null: the middle of its range is used instead.
void magnitudes(const uint64_t* first, const uint64_t* second, long count, double* made) {
    double probabilities[NORMALS_AT_ONCE], tails[NORMALS_AT_ONCE];
    int32_t places[NORMALS_AT_ONCE];
    for (long i = 0; i < count; i++) probabilities[i] = double(int64_t(first[i] >> 1));
    long num_tails = 0;
    for (long i = 0; i < count; i++) {
        places[num_tails] = int32_t(i);
        num_tails += probabilities[i] < 0x1p63 * 0.15;
    }
    // If leading zeros leave fewer than 53 significant digits, the second word adds more digits.
    for (long tail = 0; tail < num_tails; tail++) {
        double& digits = probabilities[places[tail]];
        if (digits < 0x1p53)
            digits += second ? double(int64_t(second[places[tail]] >> 11)) * 0x1p-53 + 0x1p-54 : 0.5;
        tails[tail] = digits * 0x1p-64;
    }
    for (long i = 0; i < count; i++) made[i] = middle_quantile(0.5 - probabilities[i] * 0x1p-64);
    for (long tail = 0; tail < num_tails; tail++) tails[tail] = std::sqrt(-log_of(tails[tail]));
    for (long tail = 0; tail < num_tails; tail++) probabilities[tail] = near_tail(tails[tail]);
    for (long tail = 0; tail < num_tails; tail++)
        made[places[tail]] = tails[tail] > 5.0 ? far_tail(tails[tail]) : probabilities[tail];
}

inline double with_sign(double magnitude, uint64_t word) {
    uint64_t bits;
    std::memcpy(&bits, &magnitude, 8);
    bits |= word << 63;
    std::memcpy(&magnitude, &bits, 8);
    return magnitude;
}

// Writes ``count`` normal numbers.
void write_normals(const uint64_t* first, const uint64_t* second, long count, double* made) {
    for (long start = 0; start < count; start += NORMALS_AT_ONCE) {
        const long here = count - start < NORMALS_AT_ONCE ? count - start : NORMALS_AT_ONCE;
        magnitudes(first + start, second + start, here, made + start);
        for (long i = start; i < start + here; i++) made[i] = with_sign(made[i], first[i]);
    }
}

// Rounds ``scaled`` to an integer. ``scaled`` is the magnitude of a number times ``ratio``, and lies close to the boundary
// between two integers. The function compares the digits of U with the probability of the boundary. It returns a negative number
// if float64 is too coarse to decide.
NOINLINE double rounded_at_boundary(uint64_t word, double scaled, double ratio) {
    const double below = std::floor(scaled), tail = std::erfc((below + 0.5) / ratio * 0.70710678118654752440);
    const double apart = double(int64_t(word >> 1)) * 0x1p-63 - tail;
    return std::fabs(apart) <= CLOSE * tail ? -1.0 : apart > 0 ? below : below + 1;
}

// Writes normal numbers times ``ratio``, rounded to integers, at most NORMALS_AT_ONCE. Returns the number of undecided ones and
// writes their indices to ``undecided``: float64 may round the wrong way, or the first word has too few digits.
long round_some_normals(const uint64_t* words, long count, double ratio, double* made, int64_t* undecided) {
    double scaled[NORMALS_AT_ONCE];
    long num_undecided = 0;
    int64_t is_open = 0;
    magnitudes(words, nullptr, count, scaled);
    for (long i = 0; i < count; i++) {
        scaled[i] *= ratio;
        const double whole = std::rint(scaled[i]);
        is_open |= (std::fabs(scaled[i] - whole) > SURE) | (words[i] < LEAST);
        made[i] = with_sign(whole, words[i]);
    }
    for (long i = 0; is_open && i < count; i++) {
        if (std::fabs(scaled[i] - std::rint(scaled[i])) <= SURE && words[i] >= LEAST) continue;
        const double whole = words[i] < LEAST ? -1.0 : rounded_at_boundary(words[i], scaled[i], ratio);
        if (whole < 0) undecided[num_undecided++] = i;
        else made[i] = with_sign(whole, words[i]);
    }
    return num_undecided;
}

// Does the same as ``round_some_normals`` for any number of normal numbers.
long write_rounded_normals(const uint64_t* words, long count, double ratio, double* made, int64_t* undecided) {
    long num_undecided = 0;
    for (long start = 0; start < count; start += NORMALS_AT_ONCE) {
        const long here = count - start < NORMALS_AT_ONCE ? count - start : NORMALS_AT_ONCE;
        const long found = round_some_normals(words + start, here, ratio, made + start, undecided + num_undecided);
        for (long i = 0; i < found; i++) undecided[num_undecided++] += start;
    }
    return num_undecided;
}

}  // namespace
