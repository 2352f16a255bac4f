// A generator of records, and the gradient by which it learns to pass with a discriminator.
#pragma once

#include "perceptron.h"

namespace {

// sigmoid(2 (curved(x) + straight(x))): two networks on the same inputs. perceptrons.py fills it in.
struct Generator {
    Perceptron curved, straight;
};

class GeneratorAtWork {
  public:
    void begin(const Generator& net) {
        curved_.begin(net.curved, 1), straight_.begin(net.straight, 1);
    }

    // Writes what each of ``latents`` becomes, [row][output].
    void write(const Shown& latents, float* made) {
        for (long first = 0; first < latents.count; first += ROWS_AT_ONCE) {
            const long here = std::min<long>(ROWS_AT_ONCE, latents.count - first);
            const Rows views = this->views(latents, first, here);
            for (long row = 0; row < here; row++)
                std::copy_n(views.row(row), views.width, made + (first + row) * views.width);
        }
    }

    // Writes the gradient of mean softplus(-D(G(latents))) in the order of curved's parameters, then straight's.
    void write_gradient(const Perceptron& discriminator, const Shown& latents, float* gradient) {
        const long num_rows = latents.count, count = filled(num_rows, TILE);
        const Rows made = views(latents, 0, num_rows);
        discriminator_.begin(discriminator, 0);
        const Rows shown = discriminator_.inputs(count), scores = discriminator_.left(count);
        const Rows scored = discriminator_.last_errors(count);
        for (long row = 0; row < num_rows; row++)
            Shown::put_in(discriminator, made.row(row), latents.place(discriminator, row), shown.row(row));
        std::fill(shown.row(num_rows), shown.row(count), 0.0f);
        discriminator_.forward(count);
        for (long row = 0; row < count; row++)
            *scored.row(row) = row < num_rows ? -sigmoid(-spread(*scores.row(row)))[0] / float(num_rows) : 0.0f;
        scored.fill_up(0.0f);
        discriminator_.back(count);
        const Rows errors = curved_.last_errors(count);
        to_views(discriminator, latents, made, errors);
        curved_.back(count);
        std::copy_n(errors.at, count * errors.stride, straight_.last_errors(count).at);
        for (Passage* part : {&curved_, &straight_}) gradient = write_part(*part, count, gradient);
    }

  private:
    static constexpr long ROWS_AT_ONCE = 96;

    Rows views(const Shown& latents, long first, long num_rows) {
        const long count = filled(num_rows, TILE);
        const Rows in = curved_.inputs(count);
        for (long row = 0; row < num_rows; row++) latents.enter(curved_.net(), first + row, in.row(row));
        std::fill(in.row(num_rows), in.row(count), 0.0f);
        std::copy_n(in.at, count * in.stride, straight_.inputs(count).at);
        curved_.forward(count), straight_.forward(count);
        const Rows bent = curved_.left(count), direct = straight_.left(count);
        for (long row = 0; row < count; row++)
            for (long column = 0; column < bent.width; column += LANES)
                store(bent.row(row) + column,
                      sigmoid(2.0f * (load(bent.row(row) + column) + load(direct.row(row) + column))));
        return bent;
    }

    // The loss's derivative by the numbers whose sigmoid the views are.
    void to_views(const Perceptron& discriminator, const Shown& latents, const Rows& made, const Rows& errors) {
        const long count = errors.count;
        const Rows by_first = discriminator_.errors(0, count);
        const Rows by_shown = shown_.rows(count, discriminator.layers[0].inputs);
        discriminator_.packed(0).back(discriminator.layers[0], by_first, [&](long row, long column, vec value) {
            store(by_shown.row(row) + column, value);
        });
        std::fill(errors.at, errors.row(count), 0.0f);
        for (long row = 0; row < latents.count; row++) {
            const float* const slope = by_shown.row(row) + latents.place(discriminator, row);
            for (long i = 0; i < made.width; i++)
                errors.row(row)[i] = 2.0f * made.row(row)[i] * (1.0f - made.row(row)[i]) * slope[i];
        }
    }

    float* write_part(Passage& part, long count, float* gradient) {
        for (long number = 0; number < part.net().num_layers; number++) {
            const Linear& layer = part.net().layers[number];
            const Rows in = part.entered(number, count), errors = part.errors(number, count);
            const long outputs = filled(layer.outputs, TILE);
            float* const sums = sums_.at_least(outputs * in.stride);
            multiply_rows<float>({errors.at, 1, errors.stride, in.at, in.stride, count, nullptr, 0}, outputs, in.stride,
                                 [&](long output, long column, vec value) {
                                     store(sums + output * in.stride + column, value);
                                 });
            for (long output = 0; output < layer.outputs; output++)
                gradient = std::copy_n(sums + output * in.stride, layer.inputs, gradient);
            for (long output = 0; layer.bias && output < layer.outputs; output++)
                *gradient++ = sums[output * in.stride + layer.inputs];
        }
        return gradient;
    }

    Passage curved_, straight_, discriminator_;
    RowsMemory shown_;
    Numbers<float> sums_;
};

}  // namespace
