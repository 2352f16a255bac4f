// A generator of records, and the gradient of its loss under a discriminator.
#pragma once

#include "perceptron.h"

namespace {

// The generator sigmoid(2 (curved(x) + straight(x))). perceptrons.py has the same structure.
struct Generator {
    Perceptron curved, straight;
};

class GeneratorAtWork {
  public:
    void begin(const Generator& net) {
        curved_.begin(net.curved, 1), straight_.begin(net.straight, 1);
    }

    // Writes the generator's outputs for ``latents``, [row][output].
    void write(const Shown& latents, float* made) {
        const long at_once = curved_.net().num_classes ? SORTED_AT_ONCE : ROWS_AT_ONCE;
        for (long first = 0; first < latents.count; first += at_once) {
            const long here = std::min<long>(at_once, latents.count - first);
            const Rows views = this->views(latents, first, here);
            for (long row = 0; row < here; row++)
                std::copy_n(views.row(sorted_.place(row)), views.width, made + (first + row) * views.width);
        }
    }

    // Writes the gradient of mean softplus(-D(G(latents))), with G the generator and D the discriminator, in the order of curved's
    // parameters, then straight's. D has as many classes as G.
    void write_gradient(const Perceptron& discriminator, const Shown& latents, float* gradient) {
        const Rows made = views(latents, 0, latents.count);
        const long count = made.count;
        discriminator_.begin(discriminator, 0);
        for (long row = 0; row < count; row++) discriminator_.enter(made.row(row), discriminator_.inputs(count).row(row));
        discriminator_.forward(sorted_);
        const Rows scores = discriminator_.left(count), scored = discriminator_.last_errors(count);
        for (long row = 0; row < count; row++)
            *scored.row(row) = -sigmoid(-spread(*scores.row(row)))[0] / float(latents.count);
        sorted_.for_fillers([&](long row) { *scored.row(row) = 0.0f; });
        scored.fill_up(0.0f);
        discriminator_.back(count);
        const Rows errors = curved_.last_errors(count);
        to_views(made, errors);
        curved_.back(count);
        std::copy_n(errors.at, count * errors.stride, straight_.last_errors(count).at);
        for (Passage* part : {&curved_, &straight_}) gradient = write_part(*part, gradient);
    }

  private:
    static constexpr long ROWS_AT_ONCE = 96, SORTED_AT_ONCE = 512;  // rows at a time; more if rows have classes, so that each class has enough rows

    // Returns the generator's outputs for some rows, sorted by class.
    Rows views(const Shown& latents, long first, long num_rows) {
        const Perceptron& net = curved_.net();
        sorted_.sort(num_rows, net.num_blocks(), [&](long row) { return latents.class_of(net, first + row); });
        const long count = sorted_.count();
        const Rows in = curved_.inputs(count);
        for (long row = 0; row < num_rows; row++) curved_.enter(latents.row(net, first + row), in.row(sorted_.place(row)));
        std::copy_n(in.at, count * in.stride, straight_.inputs(count).at);
        for (Passage* part : {&curved_, &straight_}) part->forward(sorted_);
        const Rows bent = curved_.left(count), direct = straight_.left(count);
        for (long row = 0; row < count; row++)
            for (long column = 0; column < bent.width; column += LANES)
                store(bent.row(row) + column,
                      sigmoid(2.0f * (load(bent.row(row) + column) + load(direct.row(row) + column))));
        return bent;
    }

    // Computes the derivative of the loss by the inputs of the generator's sigmoid.
    void to_views(const Rows& made, const Rows& errors) {
        const Rows slopes = shown_.rows(made.count, discriminator_.net().block());
        discriminator_.back_to_inputs(
            sorted_, [&](long row, long column, vec value) { store(slopes.row(row) + column, value); });
        std::fill(errors.at, errors.row(made.count), 0.0f);
        for (const Sorted::Group& group : sorted_.groups())
            for (long row = group.first; row < group.first + group.count; row++)
                for (long i = 0; i < made.width; i++)
                    errors.row(row)[i] = 2.0f * made.row(row)[i] * (1.0f - made.row(row)[i]) * slopes.row(row)[i];
    }

    float* write_part(Passage& part, float* gradient) {
        const long count = sorted_.count();
        for (long number = 0; number < part.net().num_layers; number++) {
            const Linear& layer = part.net().layers[number];
            const Rows in = part.entered(number, count), errors = part.errors(number, count);
            float* const biases = std::fill_n(gradient, layer.outputs * layer.inputs, 0.0f);
            if (layer.bias) std::fill_n(biases, layer.outputs, 0.0f);
            if (number > 0) add_sums(in, errors, layer, gradient, biases);
            for (const Sorted::Group& group : sorted_.groups())
                if (number == 0)
                    add_sums(in.part(group.first, group.filled_up()), errors.part(group.first, group.filled_up()), layer,
                             gradient + group.number * in.width, biases);
            gradient = biases + (layer.bias ? layer.outputs : 0);
        }
        return gradient;
    }

    // Writes the gradient of a layer's weights, the sums of errors times inputs, and adds the sums of the errors to ``biases``.
    void add_sums(const Rows& in, const Rows& errors, const Linear& layer, float* weights, float* biases) {
        const long outputs = filled(layer.outputs, TILE);
        float* const sums = sums_.at_least(outputs * in.stride);
        multiply_rows<float>({errors.at, 1, errors.stride, in.at, in.stride, in.count, nullptr, 0}, outputs, in.stride,
                             [&](long output, long column, vec value) { store(sums + output * in.stride + column, value); });
        for (long output = 0; output < layer.outputs; output++) {
            std::copy_n(sums + output * in.stride, in.width, weights + output * layer.inputs);
            if (layer.bias) biases[output] += sums[output * in.stride + in.width];
        }
    }

    Passage curved_, straight_, discriminator_;
    Sorted sorted_;
    RowsMemory shown_;
    Numbers<float> sums_;
};

}  // namespace
