// The factors of the products in convolutions and linear layers. They are float32 numbers (Singles) in the layout of the tensors.
// In builds with the option FL_SIM_BFLOAT16 they are pairs of bfloat16 numbers (Pairs). With pairs, one instruction multiplies
// twice as many numbers.
//
// A pair has 32 bits and contains two numbers, each rounded to 8 significant bits. The product of two pairs is the product of the
// lower halves plus the product of the upper halves. Both products are exact and are added to a float32 sum. So the two numbers
// of a pair always belong to one sum. In a convolution they belong to two channels. In a channel without a partner they belong to
// two rows. For the gradient of the weights of a pooled first convolution they belong to two places. In a linear layer they
// belong to two features, and for the gradient of its weights to two records.
#pragma once

#include <vector>

#include "vectors.h"

namespace {

struct Singles {
    struct Room {};  // memory for factors in another layout: none is needed
    typedef vec Values;
    typedef float Weight;
    static constexpr int EACH = 1;  // numbers in one lane of ``Values``

    INLINE Values spread(Weight weight) { return ::spread(weight); }
    INLINE void add(vec& sum, Values weight, Values value) { sum += weight * value; }

    // The planes of a group, with ``row`` vectors in a row and ``plane`` vectors in a plane.
    static const vec* planes(const vec* in, long, long, long, Room&) { return in; }
    // The kernels of some outputs, or of some inputs, one after another: see ``Pairs::kernels``.
    static const float* kernels(const float* weights, long, long, long, long, Room&) { return weights; }
    // The features of some groups, [group][feature].
    static const vec* features(const vec* in, long, long, Room&) { return in; }
    // Some rows of weights, with ``inputs`` weights each.
    static const float* rows(const float* weights, long, long, Room&) { return weights; }
    // The same weights, for products with one factor for each row.
    static const float* columns(const float* weights, long, long, Room&) { return weights; }
    // Numbers of records, [group][feature][LANES records].
    static const float* records(const vec* in, long, Room&) { return reinterpret_cast<const float*>(in); }
    // Writes a block of LANES records, each a vector of features; returns the end.
    INLINE Values* write_records(const vec (&block)[LANES], Values* to) {
        UNROLL for (int lane = 0; lane < LANES; lane++) to[lane] = block[lane];
        return to + LANES;
    }

    // The planes for chosen.h: see ``Pairs::planes_by_place``.
    static const vec* planes_by_place(const vec* in, long, Room&) { return in; }
    INLINE Values slopes(const vec (&slopes)[1]) { return slopes[0]; }
    // Returns the place that pooling chose, 0 to 3, in each lane. The next function returns the lanes in which a bit of this
    // number is set.
    INLINE ivec ways(const bvec* chosen, bool) { return widened(*chosen); }
    INLINE ivec is_set(ivec ways, int bit) { return (ways & 1 << bit) != 0; }
    INLINE Values choose(ivec which, Values yes, Values no) { return which ? yes : no; }
};

#ifdef FL_SIM_BFLOAT16

struct Pairs {
    struct Room {
        std::vector<ivec> values;
        std::vector<int32_t> weights;
    };
    typedef ivec Values;
    typedef int32_t Weight;
    static constexpr int EACH = 2;

    INLINE Values spread(Weight weight) { return ivec{} + weight; }
    INLINE vec high_of(ivec pairs) { return (vec)(pairs & int32_t(0xffff0000)); }

#if defined(__AVX512BF16__)
    INLINE void add(vec& sum, Values weight, Values value) {
        sum = (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)value);
    }
    // Returns a pair in every lane: a number from ``low`` and a number from ``high``, rounded to nearest, ties to even.
    INLINE Values pair(vec low, vec high) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        return (ivec)_mm512_permutexvar_epi16(
            _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                             18, 2, 17, 1, 16, 0),
            both);
    }
    // Returns LANES pairs of neighbours from 2 * LANES consecutive numbers.
    INLINE Values pair_row(vec first, vec second) {
        return (ivec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
#else
    // The same computations without instructions for bfloat16. Only tests on processors without these instructions use this code.
    INLINE void add(vec& sum, Values weight, Values value) {
        sum += high_of(weight) * high_of(value);
        sum += high_of(weight << 16) * high_of(value << 16);
    }
    INLINE ivec rounded(vec value) {
        const ivec bits = (ivec)value, up = bits + 0x7fff + ((bits >> 16) & 1);
        return value == value ? up & int32_t(0xffff0000) : bits | 0x400000;
    }
    INLINE Values pair(vec low, vec high) {
        return rounded(high) & int32_t(0xffff0000) | ((rounded(low) >> 16) & 0xffff);
    }
    INLINE Values pair_row(vec first, vec second) {
        float numbers[2 * LANES];
        store(numbers, first), store(numbers + LANES, second);
        vec low, high;
        for (int i = 0; i < LANES; i++) low[i] = numbers[2 * i], high[i] = numbers[2 * i + 1];
        return pair(low, high);
    }
#endif

    // Planes of pairs of channels, [channel / 2][row][column]. If the number of channels is odd, the last channel has no partner.
    // Its plane consists of pairs of a row and the next row.
    NOINLINE static const Values* planes(const vec* in, long channels, long plane, long row, Room& room) {
        Values* const all = values_in(room, (channels + 1) / 2 * plane);
        Values* to = all;
        for (long channel = 0; channel + 2 <= channels; channel += 2, in += 2 * plane)
            for (long at = 0; at < plane; at++) *to++ = pair(in[at], in[plane + at]);
        for (long at = 0; channels % 2 && at < plane; at++) *to++ = pair(in[at], at + row < plane ? in[at + row] : vec{});
        return all;
    }

    // Returns the number of pairs in a kernel with this number of channels.
    static long num_pairs(long channels, long kernel_y, long kernel_x) {
        return (channels / 2 * kernel_y + channels % 2 * ((kernel_y + 1) / 2)) * kernel_x;
    }

    // Kernels for such planes, [kernel][channel / 2][row][column]; the layout of a channel without a partner is [row / 2][column].
    // Reads up to LANES numbers after the last one.
    NOINLINE static const Weight* kernels(const float* weights, long count, long channels, long kernel_y, long kernel_x,
                                          Room& room) {
        Weight* const all = weights_in(room, count * num_pairs(channels, kernel_y, kernel_x));
        Weight* to = all;
        const long taps = kernel_y * kernel_x;
        for (long kernel = 0; kernel < count; kernel++, weights += channels * taps) {
            for (long channel = 0; channel + 2 <= channels; channel += 2)
                to = pair_numbers(weights + channel * taps, weights + (channel + 1) * taps, taps, to);
            const float* last = weights + (channels - 1) * taps;
            for (long y = 0; channels % 2 && y < kernel_y; y += 2)
                to = pair_numbers(last + y * kernel_x, y + 1 < kernel_y ? last + (y + 1) * kernel_x : nullptr, kernel_x, to);
        }
        return all;
    }

    // [group][feature / 2]
    NOINLINE static const Values* features(const vec* in, long features, long groups, Room& room) {
        Values* const all = values_in(room, groups * ((features + 1) / 2));
        Values* to = all;
        for (long group = 0; group < groups; group++, in += features)
            for (long at = 0; at < features; at += 2) *to++ = pair(in[at], at + 1 < features ? in[at + 1] : vec{});
        return all;
    }

    // [row][input / 2]
    NOINLINE static const Weight* rows(const float* weights, long count, long inputs, Room& room) {
        const long pairs = (inputs + 1) / 2;
        Weight* const all = weights_in(room, count * pairs);
        for (long row = 0; row < count; row++) {
            const float* from = weights + row * inputs;
            Weight* to = all + row * pairs;
            long at = 0;
            for (; at + 2 * LANES <= inputs; at += 2 * LANES)
                store(reinterpret_cast<float*>(to + at / 2), (vec)pair_row(load(from + at), load(from + at + LANES)));
            for (; at < inputs; at += 2) to[at / 2] = pair(from[at], at + 1 < inputs ? from[at + 1] : 0.0f);
        }
        return all;
    }

    // [row / 2][input]. Reads up to LANES numbers after the last one.
    NOINLINE static const Weight* columns(const float* weights, long count, long inputs, Room& room) {
        Weight* const all = weights_in(room, (count + 1) / 2 * inputs);
        Weight* to = all;
        for (long row = 0; row < count; row += 2, weights += 2 * inputs)
            to = pair_numbers(weights, row + 1 < count ? weights + inputs : nullptr, inputs, to);
        return all;
    }

    // [group][feature][LANES / 2 pairs of records]
    NOINLINE static const Weight* records(const vec* in, long count, Room& room) {
        Weight* const all = weights_in(room, count * (LANES / 2));
        for (long at = 0; at < count; at += 2)
            store(reinterpret_cast<float*>(all + at * (LANES / 2)), (vec)pair_row(in[at], at + 1 < count ? in[at + 1] : vec{}));
        return all;
    }

    INLINE Values* write_records(const vec (&block)[LANES], Values* to) {
        UNROLL for (int lane = 0; lane < LANES; lane += 2) *to++ = pair(block[lane], block[lane + 1]);
        return to;
    }

    // Pairs of every pixel and the pixel two columns further. Both pixels have the same position in neighbouring 2 x 2 pooling
    // windows.
    NOINLINE static const Values* planes_by_place(const vec* in, long count, Room& room) {
        Values* const all = values_in(room, count);
        for (long at = 0; at < count; at++) all[at] = pair(in[at], at + 2 < count ? in[at + 2] : vec{});
        return all;
    }
    INLINE Values slopes(const vec (&slopes)[2]) { return pair(slopes[0], slopes[1]); }
    INLINE ivec ways(const bvec* chosen, bool both) { return widened(chosen[0]) | (both ? widened(chosen[1]) << 16 : ivec{}); }
#if defined(__AVX512BF16__)
    INLINE __mmask32 is_set(ivec ways, int bit) {
        return _mm512_test_epi16_mask((__m512i)ways, _mm512_set1_epi16(short(1 << bit)));
    }
    INLINE Values choose(__mmask32 which, Values yes, Values no) {
        return (ivec)_mm512_mask_blend_epi16(which, (__m512i)no, (__m512i)yes);
    }
#else
    INLINE ivec is_set(ivec ways, int bit) {
        const ivec set = ways >> bit & 0x10001;
        return (set << 16) - set;
    }
    INLINE Values choose(ivec which, Values yes, Values no) { return (which & yes) | (~which & no); }
#endif

  private:
    INLINE Weight pair(float low, float high) { return pair(::spread(low), ::spread(high))[0]; }

    // Writes pairs of two rows of numbers (``high`` null: a row of zeros), and up to LANES pairs more. Returns the end of the pairs.
    INLINE Weight* pair_numbers(const float* low, const float* high, long count, Weight* to) {
        for (long at = 0; at < count; at += LANES) {
            const Values pairs = pair(load(low + at), high ? load(high + at) : vec{});
            store(reinterpret_cast<float*>(to + at), (vec)pairs);
        }
        return to + count;
    }

    static Values* values_in(Room& room, long count) {
        if (long(room.values.size()) < count) room.values.resize(count);
        return room.values.data();
    }
    static Weight* weights_in(Room& room, long count) {
        if (long(room.weights.size()) < count + LANES) room.weights.resize(count + LANES);
        return room.weights.data();
    }
};
typedef Pairs Factors;

#else

typedef Singles Factors;

#endif

#ifdef FL_SIM_AMX
constexpr bool HAS_AMX = true;
#else
constexpr bool HAS_AMX = false;
#endif

// Returns the number of factors (numbers or pairs) that hold this number of numbers.
constexpr long num_factors(long numbers) { return (numbers + Factors::EACH - 1) / Factors::EACH; }

}  // namespace
