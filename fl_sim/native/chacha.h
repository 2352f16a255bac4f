// The key stream of ChaCha20 (RFC 8439) with a nonce of zeros. fl_sim/privacy/mechanisms.py uses the same random words.
#pragma once

#include <cstring>

#include "vectors.h"

namespace {

class ChaCha {
  public:
    static constexpr long WORDS = 8L * LANES;  // the 64-bit words of LANES blocks, which are computed at once

    // ``key``: 32 bytes.
    explicit ChaCha(const uint8_t* key) { std::memcpy(key_, key, sizeof key_); }

    // Writes WORDS words of the key stream, from number ``first`` on. ``first`` must be a multiple of 8. Block i has the words 8
    // i to 8 i + 7.
    NOINLINE void write(long first, uint64_t* words) const {
        constexpr uint32_t NAMES[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};  // "expand 32-byte k"
        uvec start[16];
        UNROLL for (int i = 0; i < 4; i++) start[i] = uvec{} + NAMES[i], start[12 + i] = uvec{};
        UNROLL for (int i = 0; i < 8; i++) start[4 + i] = uvec{} + key_[i];
        start[12] = uvec(LANE) + uint32_t(first / 8);
        uvec x[16];
        UNROLL for (int i = 0; i < 16; i++) x[i] = start[i];
        for (int round = 0; round < 10; round++) {
            UNROLL for (int i = 0; i < 4; i++) quarter(x[i], x[4 + i], x[8 + i], x[12 + i]);
            UNROLL for (int i = 0; i < 4; i++) quarter(x[i], x[4 + (i + 1) % 4], x[8 + (i + 2) % 4], x[12 + (i + 3) % 4]);
        }
        UNROLL for (int part = 0; part < 16; part += LANES) {
            vec block[LANES];
            UNROLL for (int i = 0; i < LANES; i++) block[i] = vec(x[part + i] + start[part + i]);
            transpose(block);
            for (int lane = 0; lane < LANES; lane++) store(reinterpret_cast<float*>(words + 8 * lane) + part, block[lane]);
        }
    }

  private:
    typedef uint32_t uvec __attribute__((vector_size(LANES * sizeof(uint32_t))));

    INLINED static void turn(uvec& value, int bits) { value = value << bits | value >> (32 - bits); }
    INLINED static void quarter(uvec& a, uvec& b, uvec& c, uvec& d) {
        a += b, d ^= a, turn(d, 16);
        c += d, b ^= c, turn(b, 12);
        a += b, d ^= a, turn(d, 8);
        c += d, b ^= c, turn(b, 7);
    }

    uint32_t key_[8];
};

}  // namespace
