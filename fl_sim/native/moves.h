// Images moved before they are trained on: a window cut out of the padded image, mirrored or not.
#pragma once

#include <algorithm>

#include "layer.h"

namespace {

// How a client's images are moved. ``places``: where the windows of the batch's images begin in the padded images, and
// whether they are mirrored, [record][down, right, mirrored]; null: images stay as they are. ``black``: what lies beyond
// an image's edge, [channel].
struct Moves {
    const int64_t* places;
    const float* black;
    int64_t crop;
};

// Writes the window of ``image`` that begins at ``place``.
NOINLINE void write_moved(const float* image, const Image& shape, const int64_t* place, const Moves& moves, float* to) {
    const int64_t crop = moves.crop, width = shape.width;
    const int64_t down = std::clamp<int64_t>(place[0], 0, 2 * crop) - crop;
    const int64_t right = std::clamp<int64_t>(place[1], 0, 2 * crop) - crop;
    const bool is_mirrored = place[2] != 0;
    const int64_t first = std::clamp<int64_t>(is_mirrored ? right : -right, 0, width);  // of the columns inside
    const int64_t end = std::clamp<int64_t>(is_mirrored ? width + right : width - right, first, width);
    for (int channel = 0; channel < shape.channels; channel++, image += shape.area())
        for (int64_t y = down; y < down + shape.height; y++, to += width) {
            std::fill(to, to + width, moves.black[channel]);
            if (y < 0 || y >= shape.height) continue;
            const float* row = image + y * width;
            if (is_mirrored) std::reverse_copy(row + width - end + right, row + width - first + right, to + first);
            else std::copy(row + first + right, row + end + right, to + first);
        }
}

}  // namespace
