// Products of pairs of bfloat16 numbers by AMX, Intel's matrix instructions. Only builds with the option FL_SIM_AMX contain this
// code.
//
// A register of AMX holds up to 16 rows of 64 bytes. One instruction multiplies a register of weights by a register of values and
// adds the products to a register of sums. The weights have one row of up to 16 pairs for each output, and up to 16 outputs. The
// values have one vector for each pair, and the sums have one vector for each output. So one instruction replaces 256 vector
// instructions.
#pragma once

#include <cstring>

#include "factors.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int MOST_AMX = 16;                // the most outputs, and the most pairs, in a register
constexpr long PAIRS_IN_GROUP = LANES / 2;  // pairs of records in a group

// The division of ``count`` outputs or pairs into parts that fit in a register. All parts have the same size, so the last part
// may overlap with the part before it.
struct Cut {
    long count, parts, size;
    explicit Cut(long count) : count(count), parts((count + MOST_AMX - 1) / MOST_AMX), size((count + parts - 1) / parts) {}
    long start(long part) const { return std::min(part * size, count - size); }
    long known(long part) const { return part * size - start(part); }  // the number of elements that the previous part also contains
    long whole() const { return parts * size; }
};

#if defined(__AMX_BF16__)

// Requests AMX's registers from the operating system, for all threads of this process. Returns true if they may be used.
inline bool may_use_amx() {
    constexpr int REQUEST_PERMISSION = 0x1023, REGISTERS_OF_AMX = 18;  // constants that old versions of <asm/prctl.h> lack
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, REGISTERS_OF_AMX) == 0;
}

// An object whose destructor releases AMX's registers. The system switches threads faster when no register is in use.
struct AmxInUse {
    ~AmxInUse() { _tile_release(); }
};

// Sets the sizes of the registers. Registers 0 to 4 hold sums, register 5 holds weights, and registers 6 and 7 hold values. If
// ``one_value`` is true, register 5 holds values, and registers 6 and 7 hold weights.
INLINE void shape_amx(long outputs, long pairs, bool one_value = false) {
    struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    for (int at = 0; at < 8; at++) {
        const bool is_sum = at < 5, is_weight = (at == 5) != one_value;
        shapes.bytes[at] = uint16_t(!is_sum && is_weight ? 4 * pairs : 64);
        shapes.rows[at] = uint8_t(is_sum || is_weight ? outputs : pairs);
    }
    asm volatile("" : : "r"(&shapes) : "memory");  // ``shapes`` must be in memory, see written_for_amx
    _tile_loadconfig(&shapes);
}

// Forces the compiler to execute all earlier writes before the next AMX instruction. The compiler does not know that AMX's
// instructions read memory.
INLINE void written_for_amx() { asm volatile("" ::: "memory"); }

#define EACH_SUM(INSTRUCTION)                              \
    if constexpr (SUM == 0) { INSTRUCTION(0, 6); }         \
    else if constexpr (SUM == 1) { INSTRUCTION(1, 7); }    \
    else if constexpr (SUM == 2) { INSTRUCTION(2, 6); }    \
    else if constexpr (SUM == 3) { INSTRUCTION(3, 7); }    \
    else { INSTRUCTION(4, 6); }

template <int SUM>
INLINE void clear_sum() {
#define CLEAR(sum, other) _tile_zero(sum)
    EACH_SUM(CLEAR)
#undef CLEAR
}

template <int SUM>
INLINE void load_sum(const vec* from) {
#define LOAD(sum, other) _tile_loadd(sum, from, 64)
    EACH_SUM(LOAD)
#undef LOAD
}

template <int SUM>
INLINE void store_sum(vec* to) {
#define STORE(sum, other) _tile_stored(sum, to, 64)
    EACH_SUM(STORE)
#undef STORE
}

// Loads weights into register 5. ``apart``: the distance between the weights of two outputs.
INLINE void take_weights(const Pairs::Weight* weights, long apart) { _tile_loadd(5, weights, apart * 4); }
INLINE void take_values(const Pairs::Values* values) { _tile_loadd(5, values, 64); }

// Adds to a sum the products of ``values`` with the weights of the last ``take_weights``.
template <int SUM>
INLINE void add_values(const Pairs::Values* values) {
#define ADD(sum, other)              \
    _tile_loadd(other, values, 64);  \
    _tile_dpbf16ps(sum, 5, other)
    EACH_SUM(ADD)
#undef ADD
}

// Adds to a sum the products of ``weights`` with the values of the last ``take_values``.
template <int SUM>
INLINE void add_weights(const Pairs::Weight* weights, long apart) {
#define ADD(sum, other)                      \
    _tile_loadd(other, weights, apart * 4);  \
    _tile_dpbf16ps(sum, other, 5)
    EACH_SUM(ADD)
#undef ADD
}
#undef EACH_SUM

#else

// The same computations without AMX instructions. Only tests on processors without AMX use this code.
inline bool may_use_amx() { return true; }
struct AmxInUse {
    ~AmxInUse() {}
};

struct Amx {
    vec sums[5][MOST_AMX];
    const Pairs::Weight* weights;
    const Pairs::Values* values;
    long apart, outputs, pairs;

    void add(vec (&sum)[MOST_AMX]) {
        for (long output = 0; output < outputs; output++) {
            vec low{}, high{};
            for (long pair = 0; pair < pairs; pair++) {
                const Pairs::Values weight = Pairs::spread(weights[output * apart + pair]);
                low += Pairs::high_of(weight << 16) * Pairs::high_of(values[pair] << 16);
                high += Pairs::high_of(weight) * Pairs::high_of(values[pair]);
            }
            sum[output] += low + high;
        }
    }
};
thread_local Amx the_amx;

INLINE void shape_amx(long outputs, long pairs, bool = false) { the_amx.outputs = outputs, the_amx.pairs = pairs; }
INLINE void written_for_amx() {}
template <int SUM>
INLINE void clear_sum() {
    std::fill(the_amx.sums[SUM], the_amx.sums[SUM] + MOST_AMX, vec{});
}
template <int SUM>
INLINE void load_sum(const vec* from) {
    std::copy(from, from + the_amx.outputs, the_amx.sums[SUM]);
}
template <int SUM>
INLINE void store_sum(vec* to) {
    std::copy(the_amx.sums[SUM], the_amx.sums[SUM] + the_amx.outputs, to);
}
INLINE void take_weights(const Pairs::Weight* weights, long apart) { the_amx.weights = weights, the_amx.apart = apart; }
INLINE void take_values(const Pairs::Values* values) { the_amx.values = values; }
template <int SUM>
INLINE void add_values(const Pairs::Values* values) {
    take_values(values);
    the_amx.add(the_amx.sums[SUM]);
}
template <int SUM>
INLINE void add_weights(const Pairs::Weight* weights, long apart) {
    take_weights(weights, apart);
    the_amx.add(the_amx.sums[SUM]);
}

#endif

typedef vec Sums[MOST_AMX];  // the sums of up to MOST_AMX outputs

// Rearranges the weights of one part of outputs for products, as [part of pairs][output][pair]. ``rows``: the first row of pairs;
// ``apart``: the distance of rows. Pairs that the previous part also contains become zero. Reads and writes up to LANES numbers
// after the last one.
NOINLINE void lay_out_rows(const Pairs::Weight* rows, long apart, const Cut& outputs, const Cut& pairs, Pairs::Weight* to) {
    for (long part = 0; part < pairs.parts; part++)
        for (long output = 0; output < outputs.size; output++, to += pairs.size) {
            const float* from = reinterpret_cast<const float*>(rows + output * apart + pairs.start(part));
            for (long at = 0; at < pairs.size; at += LANES)
                store(reinterpret_cast<float*>(to + at), LANE + int32_t(at) < int32_t(pairs.known(part)) ? vec{} : load(from + at));
        }
}

// Does the same for a matrix in columns, [pair][output]. ``apart``: the distance of columns.
NOINLINE void lay_out_columns(const Pairs::Weight* columns, long apart, const Cut& outputs, const Cut& pairs, Pairs::Weight* to) {
    for (long part = 0; part < pairs.parts; part++, to += outputs.size * pairs.size)
        for (long output = 0; output < outputs.size; output += LANES)
            for (long at = 0; at < pairs.size; at += LANES) {
                vec block[LANES];
                for (long i = 0; i < LANES; i++) {
                    const long pair = at + i;
                    const bool is_here = pair >= pairs.known(part) && pair < pairs.size;
                    block[i] = is_here ? load(reinterpret_cast<const float*>(columns + (pairs.start(part) + pair) * apart + output))
                                       : vec{};
                }
                transpose(block);
                const long rows = std::min<long>(LANES, outputs.size - output), here = std::min<long>(LANES, pairs.size - at);
                for (long i = 0; i < rows; i++) {
                    float* row = reinterpret_cast<float*>(to + (output + i) * pairs.size + at);
                    if (LANES == MOST_AMX) store(row, block[i]);  // the next row overwrites the surplus numbers
                    else std::memcpy(row, &block[i], here * sizeof(float));
                }
            }
}

// Computes out[i][o] = sum over pairs of weights * in[i], for one part of outputs and COUNT arrays of values. The pairs are
// divided into ``runs`` runs. ``apart``: the distance between the values of two runs. ``weights``: the weights of this part. The
// caller must call shape_amx for these parts first.
template <int COUNT>
INLINE void multiply_amx(const Pairs::Weight* weights, const Cut& outputs, const Cut& pairs, const Pairs::Values* const (&in)[4],
                         long runs, long apart, Sums* out) {
    written_for_amx();
    clear_sum<0>();
    if constexpr (COUNT > 1) clear_sum<1>();
    if constexpr (COUNT > 2) clear_sum<2>();
    if constexpr (COUNT > 3) clear_sum<3>();
    for (long run = 0, at = 0; run < runs; run++, at += apart)
        for (long part = 0; part < pairs.parts; part++, weights += outputs.size * pairs.size) {
            const long start = at + pairs.start(part);
            take_weights(weights, pairs.size);
            add_values<0>(in[0] + start);
            if constexpr (COUNT > 1) add_values<1>(in[1] + start);
            if constexpr (COUNT > 2) add_values<2>(in[2] + start);
            if constexpr (COUNT > 3) add_values<3>(in[3] + start);
        }
    store_sum<0>(out[0]);
    if constexpr (COUNT > 1) store_sum<1>(out[1]);
    if constexpr (COUNT > 2) store_sum<2>(out[2]);
    if constexpr (COUNT > 3) store_sum<3>(out[3]);
}

NOINLINE void multiply_amx(int count, const Pairs::Weight* weights, const Cut& outputs, const Cut& pairs,
                           const Pairs::Values* const (&in)[4], long runs, long apart, Sums* out) {
    switch (count) {
        case 1: return multiply_amx<1>(weights, outputs, pairs, in, runs, apart, out);
        case 2: return multiply_amx<2>(weights, outputs, pairs, in, runs, apart, out);
        case 3: return multiply_amx<3>(weights, outputs, pairs, in, runs, apart, out);
        default: return multiply_amx<4>(weights, outputs, pairs, in, runs, apart, out);
    }
}

}  // namespace
