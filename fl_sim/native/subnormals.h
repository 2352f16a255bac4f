// While an object of this class lives, numbers below 1.2e-38 (subnormal numbers) count as zero in its thread.
//
// Two kinds of values decay to such numbers: a momentum without new gradients, and the probability of a class that a client does
// not have. A processor takes a hundred times as long to compute with subnormal numbers. So a client with a single class trained
// three times slower.
#pragma once

#include <cstdint>

namespace {

#ifdef __aarch64__
inline uint64_t float_modes() {
    uint64_t modes;
    asm volatile("mrs %0, fpcr" : "=r"(modes));
    return modes;
}
inline void set_float_modes(uint64_t modes) { asm volatile("msr fpcr, %0" : : "r"(modes) : "memory"); }
constexpr uint64_t NO_SUBNORMALS = 1 << 24;  // FPCR's bit FZ
#else
inline uint64_t float_modes() { return __builtin_ia32_stmxcsr(); }
inline void set_float_modes(uint64_t modes) { __builtin_ia32_ldmxcsr(unsigned(modes)); }
constexpr uint64_t NO_SUBNORMALS = 0x8040;  // MXCSR's bits FTZ, of results, and DAZ, of operands
#endif

class NoSubnormals {
  public:
    NoSubnormals() : before_(float_modes()) { set_float_modes(before_ | NO_SUBNORMALS); }
    ~NoSubnormals() { set_float_modes(before_); }
    NoSubnormals(const NoSubnormals&) = delete;
    NoSubnormals& operator=(const NoSubnormals&) = delete;

  private:
    const uint64_t before_;
};

}  // namespace
