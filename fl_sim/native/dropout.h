// Dropout (Srivastava et al. 2014): random masks for the forward and the backward pass of a minibatch, and factors of outputs.
#pragma once

#include "graph.h"

namespace {

constexpr int DRAWS = 8;  // numbers of 32 bits in a block of the random generator

// Philox4x64-10 (Salmon et al. 2011), as in NumPy: 256 random bits that depend on ``counter`` and ``key`` only.
INLINE void philox(const uint64_t counter[4], uint64_t key, uint32_t draws[DRAWS]) {
    uint64_t a = counter[0], b = counter[1], c = counter[2], d = counter[3], other = 0;
    UNROLL for (int round = 0; round < 10; round++) {
        const auto left = (unsigned __int128)a * 0xD2E7470EE14C6C93u, right = (unsigned __int128)c * 0xCA5A826395121157u;
        a = uint64_t(right >> 64) ^ b ^ key, b = uint64_t(right);
        c = uint64_t(left >> 64) ^ d ^ other, d = uint64_t(left);
        key += 0x9E3779B97F4A7C15u, other += 0xBB67AE8584CAA73Bu;
    }
    const uint64_t words[] = {a, b, c, d};
    for (int i = 0; i < DRAWS; i++) draws[i] = uint32_t(words[i / 2] >> (i % 2 * 32));
}

// The masks of all layers. All numbers count from 0. In the n-th dropout layer of the model and the p-th forward pass of a client,
// feature f of record r of the batch is kept if draw r % 8 of the block (f + 1, r / 8, n, p) is at least the probability.
class Dropout {
  public:
    Dropout(const Graph& graph, int groups) {
        for (size_t index = 0; index < graph.layers.size(); index++) {
            const double probability = graph.layers[index].dropout;
            masks_.push_back({});
            if (!graph.layers[index].is_changed()) continue;
            Mask& mask = masks_.back();
            mask.least = uint32_t(probability * 4294967296.0);
            mask.scale = float(graph.layers[index].factor / (1 - probability));
            if (probability == 0) continue;
            mask.features = graph.nodes[index + 1].image.features();
            mask.kept.resize(groups * mask.features * BYTES);
        }
    }

    // Prepares for a client; must be called before the client's first step. ``key``: the key of the random generator.
    void start(uint64_t key) { key_ = key, passes_ = 0; }

    // Draws the masks for one forward pass of ``groups`` groups.
    void draw(int groups) {
        uint64_t number = 0;
        for (Mask& mask : masks_)
            if (mask.features != 0) draw(mask, number++, groups);
        passes_++;
    }

    // Applies a layer's mask to one group of the layer's output, or of the gradient by the output. ``image``: the layout of
    // ``values``.
    void apply(int index, int group, const Image& image, vec* values) const {
        const Mask& mask = masks_[index];
        if (mask.scale == 0) return;
        const uint8_t* kept = mask.kept.data() + group * mask.features * BYTES;
        for (int channel = 0; channel < image.channels; channel++)
            for (int y = 0; y < image.height; y++) {
                vec* line = values + image.line(channel, y);
                if (mask.features == 0) {
                    for (int x = 0; x < image.width; x++) line[x] *= mask.scale;
                    continue;
                }
                for (int x = 0; x < image.width; x++, kept += BYTES) {
                    int32_t bits = 0;
                    std::memcpy(&bits, kept, BYTES);
                    line[x] = ((ivec{} + bits) >> LANE & 1) != 0 ? line[x] * mask.scale : vec{};
                }
            }
    }

  private:
    static constexpr int BYTES = std::max(1, LANES / DRAWS);  // bytes with one bit for each lane

    struct Mask {
        uint32_t least = 0;         // the least draw for which a number is kept
        float scale = 0;            // the factor of numbers that are kept; 0: the layer has neither dropout nor a factor
        long features = 0;          // the number of the layer's outputs; 0: the layer has no dropout, and all are kept
        std::vector<uint8_t> kept;  // [group][feature][byte]
    };

    NOINLINE void draw(Mask& mask, uint64_t number, int groups) const {
        uint8_t* to = mask.kept.data();
        for (int group = 0; group < groups; group++)
            for (long feature = 0; feature < mask.features; feature++)
                for (int byte = 0; byte < BYTES; byte++) {
                    const int record = group * LANES + byte * DRAWS;  // the first record of this byte
                    const uint64_t counter[] = {uint64_t(feature + 1), uint64_t(record / DRAWS), number, passes_};
                    uint32_t draws[DRAWS];
                    philox(counter, key_, draws);
                    int bits = 0;
                    for (int i = 0; i < DRAWS; i++) bits |= int(draws[i] >= mask.least) << i;
                    *to++ = uint8_t(bits >> record % DRAWS);
                }
    }

    std::vector<Mask> masks_;  // one for every layer
    uint64_t key_ = 0, passes_ = 0;
};

}  // namespace
