// What the products of convolutions and linear layers take: float32 numbers as they lie (Singles), or, compiled with
// FL_SIM_BFLOAT16, pairs of bfloat16 numbers (Pairs), of which one instruction takes twice as many.
//
// A pair is two numbers rounded to 8 bits, in 32; a product of pairs is that of the lower halves and that of the upper
// halves, both exact, added to a float32 sum. What makes a pair is always two numbers that belong to one sum: two
// channels of a convolution, and of a channel without a partner two rows; for the gradient of a first one's weights two
// places; two features of a linear layer, and for its weights' gradient two records.
#pragma once

#include <vector>

#include "vectors.h"

namespace {

struct Singles {
    struct Room {};  // where what is laid out for products lies: nothing is
    typedef vec Values;
    typedef float Weight;
    static constexpr int EACH = 1;  // numbers in one of ``Values``' lanes

    INLINE Values spread(Weight weight) { return ::spread(weight); }
    INLINE void add(vec& sum, Values weight, Values value) { sum += weight * value; }

    // A group's planes, ``row`` vectors in a row and ``plane`` in a plane.
    static const vec* planes(const vec* in, long, long, long, Room&) { return in; }
    // The kernels of some outputs, or of some inputs, one after another: see Pairs.
    static const float* kernels(const float* weights, long, long, long, long, Room&) { return weights; }
    // Groups of features, [group][feature].
    static const vec* features(const vec* in, long, long, Room&) { return in; }
    // Rows of ``inputs`` weights.
    static const float* rows(const float* weights, long, long, Room&) { return weights; }
    // The same weights, to be multiplied by what belongs to their rows.
    static const float* columns(const float* weights, long, long, Room&) { return weights; }
    // What belongs to records, [group][feature][LANES records].
    static const float* records(const vec* in, long, Room&) { return reinterpret_cast<const float*>(in); }
    // Writes a block of LANES records, each a vector of features.
    INLINE Values* write_records(const vec (&block)[LANES], Values* to) {
        UNROLL for (int lane = 0; lane < LANES; lane++) to[lane] = block[lane];
        return to + LANES;
    }

    // Planes to choose from: see Pairs.
    static const vec* planes_by_place(const vec* in, long, Room&) { return in; }
    INLINE Values slopes(const vec (&slopes)[1]) { return slopes[0]; }
    // What pooling took at a place, 2 bits, and where a bit of it is set.
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
    // In every lane a pair of one number of ``low`` and one of ``high``, rounded to the nearest, to even.
    INLINE Values pair(vec low, vec high) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        return (ivec)_mm512_permutexvar_epi16(
            _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                             18, 2, 17, 1, 16, 0),
            both);
    }
    // The same of neighbours: LANES pairs of 2 * LANES numbers in a row.
    INLINE Values pair_row(vec first, vec second) {
        return (ivec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
#else
    // What the instructions do, for processors without them: tests alone take this.
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

    // Planes of two channels, [channel / 2][row][column], of which the last, if it has no partner, is of its rows and the
    // next ones.
    NOINLINE static const Values* planes(const vec* in, long channels, long plane, long row, Room& room) {
        Values* const all = values_in(room, (channels + 1) / 2 * plane);
        Values* to = all;
        for (long channel = 0; channel + 2 <= channels; channel += 2, in += 2 * plane)
            for (long at = 0; at < plane; at++) *to++ = pair(in[at], in[plane + at]);
        for (long at = 0; channels % 2 && at < plane; at++) *to++ = pair(in[at], at + row < plane ? in[at + row] : vec{});
        return all;
    }

    // How many pairs make a kernel of so many channels.
    static long num_pairs(long channels, long kernel_y, long kernel_x) {
        return (channels / 2 * kernel_y + channels % 2 * ((kernel_y + 1) / 2)) * kernel_x;
    }

    // Kernels for such planes, [kernel][channel / 2][row][column], and of the channel without a partner [row / 2][column].
    // Reads up to LANES numbers behind the last.
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

    // [row / 2][input]. Reads up to LANES numbers behind the last.
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

    // Of every pixel and the one that the next place of a 2 x 2 pooling has there.
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

    // Writes pairs of two rows of numbers, ``high`` null: zeros, and up to LANES too many; returns where they end.
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

// How many factors so many numbers make.
constexpr long num_factors(long numbers) { return (numbers + Factors::EACH - 1) / Factors::EACH; }

}  // namespace
