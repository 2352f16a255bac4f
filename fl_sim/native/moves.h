// Image augmentation: a window is cut out of the padded image, and may be mirrored.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "layer.h"

namespace {

// The augmentation of a client's images. ``places``: for each image of the batch the start of its window in the padded image, and 1
// for mirroring, [record][down, right, mirrored]; null: no augmentation. ``black``: the value of the padding, [channel]; null: the
// image is padded by reflection.
struct Moves {
    const int64_t* places;
    const float* black;
    int64_t crop;
};

// Returns the row (or column) of an image whose content padding by reflection puts at ``place``. ``size``: the number of rows (or
// columns).
int64_t reflected(int64_t place, int64_t size) {
    return std::max<int64_t>(0, size - 1 - std::abs(size - 1 - std::abs(place)));
}

// Writes the window of ``image`` that begins ``down`` rows below and ``right`` columns to the right of its first pixel, padded by
// reflection.
NOINLINE void write_reflected(
    const float* image, const Image& shape, int64_t down, int64_t right, bool is_mirrored, float* to) {
    const int64_t width = shape.width;
    for (int channel = 0; channel < shape.channels; channel++, image += shape.area())
        for (int64_t y = down; y < down + shape.height; y++, to += width) {
            const float* row = image + reflected(y, shape.height) * width;
            for (int64_t x = 0; x < width; x++)
                to[x] = row[reflected((is_mirrored ? width - 1 - x : x) + right, width)];
        }
}

// Writes the window of ``image`` that begins at ``place``.
NOINLINE void write_moved(const float* image, const Image& shape, const int64_t* place, const Moves& moves, float* to) {
    const int64_t crop = moves.crop, width = shape.width;
    const int64_t down = std::clamp<int64_t>(place[0], 0, 2 * crop) - crop;
    const int64_t right = std::clamp<int64_t>(place[1], 0, 2 * crop) - crop;
    const bool is_mirrored = place[2] != 0;
    if (!moves.black) return write_reflected(image, shape, down, right, is_mirrored, to);
    const int64_t first = std::clamp<int64_t>(is_mirrored ? right : -right, 0, width);  // the first column of the window that is inside the image
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
