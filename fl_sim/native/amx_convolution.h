// Convolutions by AMX. The inputs are rearranged into runs. A run is a sequence of consecutive values in memory. It contains a
// whole window, or the part of a window in one row of the kernel. The run of the next output begins one column further.
//
// If a row of the kernel fills AMX's registers, the layout of a plane is [row][column][pair of channels]. A window then has one
// run for each row of the kernel. With few channels, the inputs of every row of outputs are copied to the layout [column][pair of
// channels][row of the kernel]. In this layout, a window is one run. With few outputs, two columns of outputs are computed
// together: both read a window that is wider by the stride, with weights of zero for the columns outside of their own window.
#pragma once

#include "amx.h"
#include "pass.h"

namespace {

struct Runs {
    bool by_row;   // true if a run is one row of the kernel
    long at_once;  // the number of output columns that are computed together
    long width;    // the number of columns that a run reads
    long in_column, count;
    Cut outputs, pairs;

    // ``is_pooled``: if true, no columns are computed together, because pooling reads columns separately.
    Runs(long channels, long num_outputs, long kernel_y, long kernel_x, long stride_x, bool is_pooled)
        : by_row(is_by_row(channels, kernel_y, kernel_x)), at_once(1), width(kernel_x),
          in_column(by_row ? (channels + 1) / 2 : Pairs::num_pairs(channels, kernel_y, 1)), count(by_row ? kernel_y : 1),
          outputs(num_outputs), pairs(kernel_x * in_column) {
        const Cut wider((kernel_x + stride_x) * in_column);  // the pairs for two columns; it is used only if it saves products
        if (is_pooled || 2 * num_outputs > MOST_AMX || wider.parts >= 2 * pairs.parts) return;
        at_once = 2, width += stride_x, outputs = Cut(2 * num_outputs), pairs = wider;
    }

    long in_run() const { return outputs.size * pairs.whole(); }
    long num_weights() const { return outputs.whole() * pairs.whole() * count; }

  private:
    // A quarter more products still costs less than a separate layout for every row of outputs.
    static bool is_by_row(long channels, long kernel_y, long kernel_x) {
        const long by_row = kernel_y * Cut(kernel_x * ((channels + 1) / 2)).parts;
        return 4 * by_row <= 5 * Cut(Pairs::num_pairs(channels, kernel_y, kernel_x)).parts;
    }
};

// Rearranges kernels, in the layout of Pairs::kernels, for ``convolve``: [part of outputs][run][...]. Returns the end of the
// result; writes up to LANES numbers after the end.
NOINLINE Pairs::Weight* lay_out_kernels(const Runs& runs, const Pairs::Weight* kernels, long num_outputs, long channels,
                                        long kernel_y, long kernel_x, long stride_x, std::vector<Pairs::Weight>& room,
                                        Pairs::Weight* to) {
    const long in_kernel = Pairs::num_pairs(channels, kernel_y, kernel_x), paired = channels / 2, window = runs.width * runs.in_column;
    for (long part = 0; part < runs.outputs.parts; part++)
        for (long run = 0; run < runs.count; run++, to += runs.in_run()) {
            room.assign(runs.outputs.size * window + LANES, 0);
            for (long row = 0; row < runs.outputs.size; row++) {
                const long output = (runs.outputs.start(part) + row) % num_outputs;
                const long column = (runs.outputs.start(part) + row) / num_outputs * stride_x;
                const Pairs::Weight* from = kernels + output * in_kernel;
                for (long x = 0; x < kernel_x; x++) {
                    Pairs::Weight* at = &room[row * window + (column + x) * runs.in_column];
                    if (!runs.by_row)
                        for (long pair = 0; pair < runs.in_column; pair++) *at++ = from[pair * kernel_x + x];
                    for (long pair = 0; runs.by_row && pair < paired; pair++) *at++ = from[(pair * kernel_y + run) * kernel_x + x];
                    if (runs.by_row && channels % 2 && run % 2 == 0) *at = from[(paired * kernel_y + run / 2) * kernel_x + x];
                }
            }
            lay_out_rows(room.data(), window, runs.outputs, runs.pairs, to);
        }
    return to;
}

// Rearranges the columns that a row of outputs reads. The windows begin in row ``top``; columns outside of the plane are zeros.
NOINLINE void lay_out_columns(const Pass& pass, const Pairs::Values* planes, const Runs& runs, int top, long columns,
                              Pairs::Values* to) {
    const long row = pass.in_shape.row(), plane = pass.in_shape.plane(), here = std::min(columns, row - pass.corner % row);
    const Pairs::Values* from = planes + pass.corner + top * row;
    std::fill(to + here * runs.in_column, to + columns * runs.in_column, Pairs::Values{});
    for (long x = 0; x < here; x++, from++) {
        const Pairs::Values* channel = from;
        for (int pair = 0; pair < pass.planes(); pair++, channel += plane)
            for (int y = 0; y < pass.kernel_y; y++) *to++ = channel[y * row];
        for (int y = 0; pass.is_odd() && y < pass.kernel_y; y += 2) *to++ = channel[y * row];
    }
}

// Rearranges rows of planes, [row][column][pair of channels]; columns outside of the plane are zeros.
NOINLINE void lay_out_rows(const Pass& pass, const Runs& runs, int first, int end, long columns, Pairs::Values* to) {
    const long row = pass.in_shape.row(), plane = pass.in_shape.plane(), here = std::min(columns, row - pass.corner % row);
    to += first * columns * runs.in_column;
    for (int y = first; y < end; y++) {
        const vec* from = pass.in + pass.corner + y * row;
        const long next = pass.corner + (y + 1) * row;  // the next row: in a channel without a partner, a row and the next row form pairs
        for (long x = 0; x < here; x++, from++) {
            const vec* channel = from;
            for (int pair = 0; pair < pass.planes(); pair++, channel += 2 * plane) *to++ = Pairs::pair(channel[0], channel[plane]);
            if (pass.is_odd()) *to++ = Pairs::pair(channel[0], next + x < plane ? channel[row] : vec{});
        }
        std::fill(to, to + (columns - here) * runs.in_column, Pairs::Values{});
        to += (columns - here) * runs.in_column;
    }
}

// Writes one part of the outputs at one pooled place.
NOINLINE void write_pooled(const Pass& shared, const Runs& runs, long part, int y, int x, const Sums* sums) {
    const Pass pass = shared;  // a local copy, so that the compiler knows that no store changes it
    const int start = int(runs.outputs.start(part)), known = int(runs.outputs.known(part)), end = int(runs.outputs.size);
    const long plane = pass.out_shape.plane(), area = pass.out_shape.area();
    long to = pass.out_shape.line(start + known, y) + x;
    bvec* chosen = pass.chosen_at(start + known, y, x);
    const float* bias = pass.bias ? pass.bias + start : nullptr;
    for (int at = known; at < end; at++, to += plane, chosen += area)
        write_largest<true>(pass, to, chosen, {{sums[0][at], sums[1][at]}, {sums[2][at], sums[3][at]}}, spread(bias ? bias[at] : 0.0f));
}

// Writes one part of the outputs for some columns, from column ``x`` on. ``count``: the number of columns, divided by the number
// that is computed together.
NOINLINE void write_columns(const Pass& shared, const Runs& runs, long part, int y, int x, int count, const Sums* sums) {
    const Pass pass = shared;
    const int num_outputs = pass.out_shape.channels, start = int(runs.outputs.start(part)), end = int(runs.outputs.size);
    for (int at = int(runs.outputs.known(part)); at < end; at++) {
        const int together = start + at >= num_outputs, output = start + at - together * num_outputs;
        const vec bias = spread(pass.bias ? pass.bias[output] : 0.0f);
        const long first = pass.out_shape.line(output, y * pass.step_y);
        int column = x + together;
        for (int i = 0; i < count && column < pass.columns; i++, column += int(runs.at_once)) {
            const long to = first + long(column) * pass.step_x;
            write_plain(pass, to, sums[i][at] + bias);
        }
    }
}

// ``pass.weights``: the result of lay_out_kernels. ``layer``: provides the memory.
void convolve(const Pass& pass, Layer& layer) {
    std::vector<Pairs::Values>& room = layer.amx.columns;
    const int pooled = pass.chosen ? 2 : 1;  // rows and columns in a pooling window
    const Runs runs(pass.in_shape.channels, pass.out_shape.channels, pass.kernel_y, pass.kernel_x, pass.stride_x, pass.chosen);
    const int at_once = pass.chosen ? 1 : int(4 * runs.at_once);
    const long columns = long((pass.columns + at_once - 1) / at_once * at_once * pooled - 1) * pass.stride_x + pass.kernel_x;
    const long step = pass.stride_x * runs.in_column, row = columns * runs.in_column;
    const int height = (pass.rows * pooled - 1) * pass.stride_y + pass.kernel_y;
    if (long(room.size()) < (runs.by_row ? height : pooled) * row) room.resize((runs.by_row ? height : pooled) * row);
    if (runs.by_row) {  // the rows that are not all zero, and the neighbouring rows that a row of pairs or a pooling window also reads
        const int beside = (pooled - 1) * pass.stride_y;
        const int first = std::max(0, pass.first_row - 1 - beside), end = std::min(height, pass.end_row + beside);
        lay_out_rows(pass, runs, first, end, columns, room.data());
    }
    const Image& shape = pass.in_shape;
    const Pairs::Values* planes =
        runs.by_row ? nullptr : Pairs::planes(pass.in, shape.channels, shape.plane(), shape.row(), layer.plane_room);
    Sums sums[2][4];
    int turn = 0, waiting_y = 0, waiting_x = 0, waiting = 0;  // the sums that are written while the next ones are computed
    long waiting_part = 0;
    const auto write = [&] {
        if (waiting && pass.chosen) write_pooled(pass, runs, waiting_part, waiting_y, waiting_x, sums[turn]);
        else if (waiting) write_columns(pass, runs, waiting_part, waiting_y, waiting_x, waiting, sums[turn]);
    };
    shape_amx(runs.outputs.size, runs.pairs.size);
    for (int y = 0; y < pass.rows; y++) {
        const Pairs::Values* in_row[2];
        const int first_top = y * pooled * pass.stride_y, last_top = first_top + (pooled - 1) * pass.stride_y;
        for (int i = 0; i < pooled; i++) {
            const int top = first_top + i * pass.stride_y;
            in_row[i] = room.data() + (runs.by_row ? top : i) * row;
            if (!runs.by_row) lay_out_columns(pass, planes, runs, top, columns, room.data() + i * row);
        }
        // The rows of the kernel whose inputs are not all zero, beginning with the first row of a pair.
        const int from = runs.by_row ? std::max(0, pass.first_row - last_top) / 2 * 2 : 0;
        const int to = runs.by_row ? std::min(pass.kernel_y, pass.end_row - first_top) : 1;
        for (int x = 0; x < pass.columns; x += at_once) {
            const int count = pass.chosen ? 4 : int(std::min(4L, (pass.columns - x + runs.at_once - 1) / runs.at_once));
            const Pairs::Values* in[4];
            for (int i = 0; i < count; i++)
                in[i] = (pass.chosen ? in_row[i / 2] + (2 * x + i % 2) * step : in_row[0] + (x + i * runs.at_once) * step) + from * row;
            const Pairs::Weight* weights = pass.weights + from * runs.in_run();
            for (long part = 0; part < runs.outputs.parts; part++, weights += runs.count * runs.in_run()) {
                multiply_amx(count, weights, runs.outputs, runs.pairs, in, to - from, row, sums[1 - turn]);
                write();
                turn = 1 - turn, waiting = count, waiting_part = part, waiting_y = y, waiting_x = x;
            }
        }
    }
    write();
}

// Before a minibatch: rearranges the kernels for the forward pass.
inline void start_forward(Layer& layer, const float* params) {
    const long inputs = layer.in.channels, outputs = layer.out.channels;
    const Runs runs(inputs, outputs, layer.kernel_y, layer.kernel_x, layer.stride_x, layer.pooled);
    const Pairs::Weight* kernels =
        Pairs::kernels(params + layer.weight, outputs, inputs, layer.kernel_y, layer.kernel_x, layer.kernel_room);
    layer.amx.kernels.resize(runs.num_weights() + LANES);
    lay_out_kernels(runs, kernels, outputs, inputs, layer.kernel_y, layer.kernel_x, layer.stride_x, layer.amx.room,
                    layer.amx.kernels.data());
    layer.kernels = layer.amx.kernels.data();
}

// Returns the planes unchanged: ``convolve`` makes the pairs when it rearranges the inputs.
inline const Read* read_of(const vec* planes, const Image&, const Layer&) { return planes; }

}  // namespace
