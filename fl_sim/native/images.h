// The paper's networks for images of 32 x 32 pixels (clients/dafl/dpcgan/nets.py): a discriminator of four convolutions and a
// generator of four transposed convolutions, with InstanceNorm. Every row (image) is computed by itself, with the channels of a
// pixel together.
#pragma once

#include <cmath>

#include "halving.h"
#include "perceptron.h"

namespace {

constexpr long SIDE = 32, NARROW = 32, MEDIUM = 64, WIDE_CHANNELS = 128;  // pixels a side; channels of the hidden layers
constexpr long LAST_SIDE = 4, LAST_INPUTS = WIDE_CHANNELS * LAST_SIDE * LAST_SIDE;
constexpr long IMAGES_AT_ONCE = 8;  // rows at a time: few, for the cache; several, because every product loads the weights
constexpr float EPSILON = 1e-5f, LEAK = 0.2f;

// The networks; images.py has the same structure. ``discriminator``, ``generator``: all parameters, in PyTorch's order.
struct Painters {
    const float *discriminator, *generator;
    int64_t channels, num_classes, latent_dim;  // of images; num_classes: 0 for one class only

    long pixels() const { return channels * SIDE * SIDE; }
    bool fits(const Shown& rows, long row) const {
        return row >= 0 && row < rows.count && (!num_classes || (rows.classes[row] >= 0 && rows.classes[row] < num_classes));
    }
    bool fits(const Shown& rows) const {
        for (long row = 0; row < rows.count; row++)
            if (!fits(rows, row)) return false;
        return true;
    }
};

// Images of several rows, each with a border of zeros.
class Framed {
  public:
    void allocate(long side, long channels, long rows) {
        side_ = side, channels_ = channels;
        std::fill_n(numbers_.at_least(rows * size()), rows * size(), 0.0f);
        for (long row = 0; row < rows; row++) views_[row] = {numbers_.at_least(0) + row * size() + (side + 3) * channels, side,
                                                             (side + 2) * channels, channels};
    }
    View* views() { return views_; }
    View& operator[](long row) { return views_[row]; }

  private:
    long size() const { return (side_ + 2) * (side_ + 2) * channels_ + LANES; }

    long side_ = 0, channels_ = 0;
    Numbers<float> numbers_;
    View views_[IMAGES_AT_ONCE];
};

// Calls ``each(y, x)`` for the pixels of an image.
template <class Each>
INLINE void each_pixel(const View& image, const Each& each) {
    for (long y = 0; y < image.side; y++)
        for (long x = 0; x < image.side; x++) each(y, x);
}

INLINE vec leaked(vec value, float slope) { return value > vec{} ? value : value * slope; }

// InstanceNorm (Ulyanov et al. 2016) with the (Leaky)ReLU that follows; ``slope``: of the LeakyReLU below zero.
struct InstanceNorm {
    const float *weights, *biases;
    float slope;
    float scales[IMAGES_AT_ONCE][WIDE_CHANNELS];  // 1 / standard deviation

    // Replaces the numbers of ``in`` by the normalised ones, and writes the activations.
    NOINLINE void forward(const View& in, const View& out, long row) {
        for (long channel = 0; channel < in.channels; channel += LANES) {
            vec mean{}, variance{};
            each_pixel(in, [&](long y, long x) INLINED { mean += load(in.pixel(y, x) + channel); });
            mean /= float(in.side * in.side);
            each_pixel(in, [&](long y, long x) INLINED {
                const vec apart = load(in.pixel(y, x) + channel) - mean;
                variance += apart * apart;
            });
            const vec scale = 1.0f / root(variance / float(in.side * in.side) + EPSILON);
            const vec weight = load(weights + channel), bias = load(biases + channel);
            store(scales[row] + channel, scale);
            each_pixel(in, [&](long y, long x) INLINED {
                const vec normed = (load(in.pixel(y, x) + channel) - mean) * scale;
                store(in.pixel(y, x) + channel, normed);
                store(out.pixel(y, x) + channel, leaked(normed * weight + bias, slope));
            });
        }
    }

    // Replaces the errors of the activations by those of the layer's inputs, and adds the gradients of weights and biases.
    NOINLINE void backward(const View& normed, const View& activated, const View& errors, const View& to, long row, float* gradient) {
        const float count = float(normed.side * normed.side);
        for (long channel = 0; channel < normed.channels; channel += LANES) {
            vec shift{}, tilt{};
            each_pixel(normed, [&](long y, long x) INLINED {
                const vec error = load(errors.pixel(y, x) + channel);
                const vec passed = load(activated.pixel(y, x) + channel) > vec{} ? error : error * slope;
                store(errors.pixel(y, x) + channel, passed);
                shift += passed, tilt += passed * load(normed.pixel(y, x) + channel);
            });
            store(gradient + channel, load(gradient + channel) + tilt);
            float* const biases_gradient = gradient + normed.channels + channel;
            store(biases_gradient, load(biases_gradient) + shift);
            const vec scale = load(scales[row] + channel) * load(weights + channel);
            shift /= count, tilt /= count;
            each_pixel(normed, [&](long y, long x) INLINED {
                const vec error = load(errors.pixel(y, x) + channel), number = load(normed.pixel(y, x) + channel);
                store(to.pixel(y, x) + channel, scale * (error - shift - number * tilt));
            });
        }
    }
};

// [first][image size] -> [image size][first] for the kernels of the layer between an image of 4 x 4 pixels and single numbers.
INLINE void by_pixel(const float* weights, float* to) {
    for (long channel = 0; channel < WIDE_CHANNELS; channel++)
        for (long pixel = 0; pixel < LAST_SIDE * LAST_SIDE; pixel++)
            to[pixel * WIDE_CHANNELS + channel] = weights[channel * LAST_SIDE * LAST_SIDE + pixel];
}

template <class To>
INLINE To* from_by_pixel(const double* from, To* to) {
    for (long channel = 0; channel < WIDE_CHANNELS; channel++)
        for (long pixel = 0; pixel < LAST_SIDE * LAST_SIDE; pixel++) *to++ = To(from[pixel * WIDE_CHANNELS + channel]);
    return to;
}

class Generating {
  public:
    void begin(const Painters& nets) {
        const long inputs = nets.latent_dim + nets.num_classes;
        if (nets.channels != channels_) {
            channels_ = nets.channels;
            quarter_.allocate(MEDIUM, WIDE_CHANNELS, 4, IMAGES_AT_ONCE), half_.allocate(NARROW, MEDIUM, 8, IMAGES_AT_ONCE);
            full_.allocate(channels_, NARROW, 16, IMAGES_AT_ONCE);
            first_.allocate(4, WIDE_CHANNELS, IMAGES_AT_ONCE), first_out_.allocate(4, WIDE_CHANNELS, IMAGES_AT_ONCE);
            second_.allocate(8, MEDIUM, IMAGES_AT_ONCE), second_out_.allocate(8, MEDIUM, IMAGES_AT_ONCE);
            third_.allocate(16, NARROW, IMAGES_AT_ONCE), third_out_.allocate(16, NARROW, IMAGES_AT_ONCE);
            first_errors_.allocate(4, WIDE_CHANNELS, IMAGES_AT_ONCE), second_errors_.allocate(8, MEDIUM, IMAGES_AT_ONCE);
            third_errors_.allocate(16, NARROW, IMAGES_AT_ONCE), image_.allocate(SIDE, channels_, IMAGES_AT_ONCE);
        }
        nets_ = nets;
        const float* at = nets.generator;
        float* latent = latent_.at_least(inputs * LAST_INPUTS);
        for (long input = 0; input < inputs; input++, at += LAST_INPUTS) by_pixel(at, latent + input * LAST_INPUTS);
        at = begin_norm(first_norm_, WIDE_CHANNELS, at);
        quarter_.take_weights(at), at = begin_norm(second_norm_, MEDIUM, at + quarter_.num_weights());
        half_.take_weights(at), at = begin_norm(third_norm_, NARROW, at + half_.num_weights());
        full_.take_weights(at), bias_ = at + full_.num_weights();
    }

    // Makes the images of ``count`` rows from ``first`` on: at most IMAGES_AT_ONCE.
    void forward(const Shown& latents, long first, long count) {
        for (long row = 0; row < count; row++) {
            View& image = first_[row];
            const float* numbers = latents.values + (first + row) * nets_.latent_dim;
            each_pixel(image, [&](long y, long x) {
                const float* weights = latent_.at_least(0) + (y * LAST_SIDE + x) * WIDE_CHANNELS;
                for (long channel = 0; channel < WIDE_CHANNELS; channel += LANES) {
                    vec total{};
                    for (long i = 0; i < nets_.latent_dim; i++)
                        total = fused(spread(numbers[i]), load(weights + i * LAST_INPUTS + channel), total);
                    if (nets_.num_classes)
                        total += load(weights + (nets_.latent_dim + latents.classes[first + row]) * LAST_INPUTS + channel);
                    store(image.pixel(y, x) + channel, total);
                }
            });
            first_norm_.forward(image, first_out_[row], row), quarter_.enter_coarse(first_out_[row], row);
        }
        quarter_.redouble(count, second_.views());
        for (long row = 0; row < count; row++)
            second_norm_.forward(second_[row], second_out_[row], row), half_.enter_coarse(second_out_[row], row);
        half_.redouble(count, third_.views());
        for (long row = 0; row < count; row++)
            third_norm_.forward(third_[row], third_out_[row], row), full_.enter_coarse(third_out_[row], row);
        full_.redouble(count, image_.views());
        for (long row = 0; row < count; row++) {
            View& image = image_[row];
            for (long y = 0; y < SIDE; y++) {
                float* const pixels = image.pixel(y, 0);
                float line[SIDE * MOST_CHANNELS + LANES];
                for (long i = 0; i < SIDE * channels_; i++) line[i] = pixels[i] + bias_[i % channels_];
                for (long i = 0; i < SIDE * channels_; i += LANES) store(line + i, 2.0f * sigmoid(2.0f * load(line + i)) - 1.0f);
                std::copy_n(line, SIDE * channels_, pixels);
            }
        }
    }

    View& image(long row) { return image_[row]; }

    long num_parameters() const {
        return (nets_.latent_dim + nets_.num_classes) * LAST_INPUTS + 2 * (WIDE_CHANNELS + MEDIUM + NARROW) +
               quarter_.num_weights() + half_.num_weights() + full_.num_weights() + channels_;
    }

    // Adds the gradient of the last images that were made. ``slopes``: the derivatives of the loss by their pixels, each an image
    // with ``channels`` or more channels; they are replaced.
    void backward(const Shown& latents, long first, long count, View* slopes, double* sums) {
        const long inputs = nets_.latent_dim + nets_.num_classes, size = num_parameters();
        float* const gradient = gradient_.at_least(size);
        std::fill_n(gradient, inputs * LAST_INPUTS + 2 * (WIDE_CHANNELS + MEDIUM + NARROW) + channels_, 0.0f);
        float* const norms = gradient + inputs * LAST_INPUTS;
        float* const bias = norms + 2 * (WIDE_CHANNELS + MEDIUM + NARROW);
        float* const weights = bias + channels_;
        for (long row = 0; row < count; row++) {
            View& image = image_[row];
            for (long y = 0; y < SIDE; y++)
                for (long x = 0; x < SIDE; x++)
                    for (long channel = 0; channel < channels_; channel++) {
                        float& made = image.pixel(y, x)[channel];
                        made = slopes[row].pixel(y, x)[channel] * (1.0f - made * made);
                        bias[channel] += made;
                    }
            clear_border(image), full_.enter_fine(image, row);
        }
        full_.halve(count, third_errors_.views());
        for (long row = 0; row < count; row++) {
            third_norm_.backward(third_[row], third_out_[row], third_errors_[row], third_errors_[row], row, norms + 2 * (WIDE_CHANNELS + MEDIUM));
            half_.enter_fine(third_errors_[row], row);
        }
        half_.halve(count, second_errors_.views());
        for (long row = 0; row < count; row++) {
            second_norm_.backward(second_[row], second_out_[row], second_errors_[row], second_errors_[row], row, norms + 2 * WIDE_CHANNELS);
            quarter_.enter_fine(second_errors_[row], row);
        }
        quarter_.halve(count, first_errors_.views());
        for (long row = 0; row < count; row++) {
            first_norm_.backward(first_[row], first_out_[row], first_errors_[row], first_errors_[row], row, norms);
            const float* numbers = latents.values + (first + row) * nets_.latent_dim;
            for (long i = 0; i < nets_.latent_dim; i++) add_latent(first_errors_[row], numbers[i], gradient + i * LAST_INPUTS);
            if (nets_.num_classes)
                add_latent(first_errors_[row], 1.0f, gradient + (nets_.latent_dim + latents.classes[first + row]) * LAST_INPUTS);
        }
        ByRecord unused[4];
        quarter_.write_gradient(0, count, weights, unused);
        half_.write_gradient(0, count, weights + quarter_.num_weights(), unused);
        full_.write_gradient(0, count, weights + quarter_.num_weights() + half_.num_weights(), unused);
        for (long i = 0; i < size; i++) sums[i] += double(gradient[i]);
    }

    // Writes sums of ``backward`` in the order of the parameters.
    void hand_over(const double* sums, float* to) const {
        const double* norms = sums + (nets_.latent_dim + nets_.num_classes) * LAST_INPUTS;
        const double* weights = norms + 2 * (WIDE_CHANNELS + MEDIUM + NARROW) + channels_;
        for (; sums != norms; sums += LAST_INPUTS) to = from_by_pixel(sums, to);
        to = std::copy_n(norms, 2 * WIDE_CHANNELS, to);
        quarter_.write_weights(weights, to), to += quarter_.num_weights(), weights += quarter_.num_weights();
        to = std::copy_n(norms + 2 * WIDE_CHANNELS, 2 * MEDIUM, to);
        half_.write_weights(weights, to), to += half_.num_weights(), weights += half_.num_weights();
        to = std::copy_n(norms + 2 * (WIDE_CHANNELS + MEDIUM), 2 * NARROW, to);
        full_.write_weights(weights, to), to += full_.num_weights();
        std::copy_n(norms + 2 * (WIDE_CHANNELS + MEDIUM + NARROW), channels_, to);
    }

    static constexpr long MOST_CHANNELS = 4;

  private:
    static const float* begin_norm(InstanceNorm& norm, long channels, const float* at) {
        norm.weights = at, norm.biases = at + channels, norm.slope = 0.0f;
        return at + 2 * channels;
    }

    static void clear_border(View& image) {  // which ``redouble`` has used
        const long width = image.channels;
        std::fill_n(image.pixel(-1, -1), image.row, 0.0f), std::fill_n(image.pixel(image.side, -1), image.row, 0.0f);
        for (long y = 0; y < image.side; y++)
            std::fill_n(image.pixel(y, -1), width, 0.0f), std::fill_n(image.pixel(y, image.side), width, 0.0f);
    }

    static void add_latent(const View& errors, float number, float* to) {
        each_pixel(errors, [&](long y, long x) {
            const float* from = errors.pixel(y, x);
            for (long channel = 0; channel < WIDE_CHANNELS; channel += LANES, from += LANES, to += LANES)
                store(to, fused(spread(number), load(from), load(to)));
        });
    }

    Painters nets_{};
    long channels_ = 0;
    Halving quarter_, half_, full_;
    InstanceNorm first_norm_, second_norm_, third_norm_;
    Framed first_, first_out_, second_, second_out_, third_, third_out_, first_errors_, second_errors_, third_errors_, image_;
    Numbers<float> latent_, gradient_;
    const float* bias_ = nullptr;
};

class Discriminating {
  public:
    void begin(const Painters& nets) {
        const long inputs = nets.channels + nets.num_classes;
        if (inputs != inputs_) {
            inputs_ = inputs;
            full_.allocate(inputs, NARROW, 16, IMAGES_AT_ONCE), half_.allocate(NARROW, MEDIUM, 8, IMAGES_AT_ONCE);
            quarter_.allocate(MEDIUM, WIDE_CHANNELS, 4, IMAGES_AT_ONCE);
            image_.allocate(SIDE, inputs, IMAGES_AT_ONCE), image_errors_.allocate(SIDE, inputs, IMAGES_AT_ONCE);
            first_.allocate(16, NARROW, IMAGES_AT_ONCE), first_errors_.allocate(16, NARROW, IMAGES_AT_ONCE);
            second_.allocate(8, MEDIUM, IMAGES_AT_ONCE), second_out_.allocate(8, MEDIUM, IMAGES_AT_ONCE);
            second_errors_.allocate(8, MEDIUM, IMAGES_AT_ONCE), third_.allocate(4, WIDE_CHANNELS, IMAGES_AT_ONCE);
            third_out_.allocate(4, WIDE_CHANNELS, IMAGES_AT_ONCE), third_errors_.allocate(4, WIDE_CHANNELS, IMAGES_AT_ONCE);
        }
        nets_ = nets;
        const float* at = nets.discriminator;
        full_.take_weights(at), first_bias_ = at + full_.num_weights();
        at = first_bias_ + NARROW, half_.take_weights(at), at = begin_norm(second_norm_, MEDIUM, at + half_.num_weights());
        quarter_.take_weights(at), at = begin_norm(third_norm_, WIDE_CHANNELS, at + quarter_.num_weights());
        by_pixel(at, last_.at_least(LAST_INPUTS)), last_bias_ = at[LAST_INPUTS];
    }

    // Takes a record, [channel][y][x], as a row.
    void enter(const Shown& records, long record, long row) {
        const float* from = records.values + record * nets_.pixels();
        View& image = image_[row];
        for (long channel = 0; channel < nets_.channels; channel++)
            each_pixel(image, [&](long y, long x) { image.pixel(y, x)[channel] = *from++; });
        enter_class(records, record, row);
    }

    // Takes an image of the generator as a row; its class is that of its latent vector.
    void enter(const View& made, const Shown& latents, long latent, long row) {
        View& image = image_[row];
        each_pixel(image, [&](long y, long x) { std::copy_n(made.pixel(y, x), nets_.channels, image.pixel(y, x)); });
        enter_class(latents, latent, row);
    }

    void forward(long count, float* scores) {
        for (long row = 0; row < count; row++) full_.enter_fine(image_[row], row);
        full_.halve(count, first_.views());
        for (long row = 0; row < count; row++) {
            View& image = first_[row];
            each_pixel(image, [&](long y, long x) {
                for (long channel = 0; channel < NARROW; channel += LANES) {
                    float* at = image.pixel(y, x) + channel;
                    store(at, leaked(load(at) + load(first_bias_ + channel), LEAK));
                }
            });
            half_.enter_fine(image, row);
        }
        half_.halve(count, second_.views());
        for (long row = 0; row < count; row++)
            second_norm_.forward(second_[row], second_out_[row], row), quarter_.enter_fine(second_out_[row], row);
        quarter_.halve(count, third_.views());
        for (long row = 0; row < count; row++) {
            third_norm_.forward(third_[row], third_out_[row], row);
            vec total{};
            each_last(row, [&](float* activated, float*, long at) { total = fused(load(activated), load(last_.at_least(0) + at), total); });
            scores[row] = sum(total) + last_bias_;
        }
    }

    // From the losses' derivatives by the scores. The errors of all layers' outputs enter; the sums of the other parameters'
    // gradients of two rows each, or of all rows, are written by ``write_small``.
    void backward(long count, const float* errors, bool to_images, float* small, long rows_a_sum) {
        std::fill_n(small, SMALL * ((count + rows_a_sum - 1) / rows_a_sum), 0.0f);
        for (long row = 0; row < count; row++) {
            float* const sums = small + row / rows_a_sum * SMALL;
            const vec error = spread(errors[row]);
            each_last(row, [&](float* activated, float* slopes, long at) {
                store(slopes, error * load(last_.at_least(0) + at));
                store(sums + LAST + at, fused(error, load(activated), load(sums + LAST + at)));
            });
            sums[LAST + LAST_INPUTS] += errors[row];
            third_norm_.backward(third_[row], third_out_[row], third_errors_[row], third_errors_[row], row, sums + THIRD);
            quarter_.enter_coarse(third_errors_[row], row);
        }
        quarter_.redouble(count, second_errors_.views());
        for (long row = 0; row < count; row++) {
            float* const sums = small + row / rows_a_sum * SMALL;
            second_norm_.backward(second_[row], second_out_[row], second_errors_[row], second_errors_[row], row, sums + SECOND);
            half_.enter_coarse(second_errors_[row], row);
        }
        half_.redouble(count, first_errors_.views());
        for (long row = 0; row < count; row++) {
            float* const sums = small + row / rows_a_sum * SMALL;
            View &activated = first_[row], &slopes = first_errors_[row];
            each_pixel(slopes, [&](long y, long x) {
                for (long channel = 0; channel < NARROW; channel += LANES) {
                    float* at = slopes.pixel(y, x) + channel;
                    const vec passed = load(activated.pixel(y, x) + channel) > vec{} ? load(at) : load(at) * LEAK;
                    store(at, passed), store(sums + channel, load(sums + channel) + passed);
                }
            });
            full_.enter_coarse(slopes, row);
        }
        if (to_images) full_.redouble(count, image_errors_.views());
    }

    View* image_errors() { return image_errors_.views(); }

    long num_parameters() const { return SMALL_USED + full_.num_weights() + half_.num_weights() + quarter_.num_weights(); }

    // Writes the gradient of the pair in rows 2 i and 2 i + 1, and returns its squared norm.
    double write_gradient(long pair, const float* small, float* to) {
        ByRecord squares[4];
        small += pair * SMALL;
        double total = 0;
        for (long i = 0; i < SMALL_USED; i++) total += double(small[i]) * small[i];
        to = std::copy_n(small, SMALL_USED, to);
        for (Halving* part : {&full_, &half_, &quarter_}) part->write_gradient(2 * pair, 2, to, squares), to += part->num_weights();
        for (const ByRecord& part : squares) total += part.total();
        return total;
    }

    // Writes sums of ``write_gradient`` in the order of the parameters.
    void hand_over(const double* sums, double* to) const {
        const double* weights = sums + SMALL_USED;
        full_.write_weights(weights, to), to += full_.num_weights(), weights += full_.num_weights();
        to = std::copy_n(sums, NARROW, to);
        half_.write_weights(weights, to), to += half_.num_weights(), weights += half_.num_weights();
        to = std::copy_n(sums + SECOND, 2 * MEDIUM, to);
        quarter_.write_weights(weights, to), to += quarter_.num_weights();
        to = std::copy_n(sums + THIRD, 2 * WIDE_CHANNELS, to);
        to = from_by_pixel(sums + LAST, to);
        *to = sums[LAST + LAST_INPUTS];
    }

    // The places of the gradients of all parameters but the three large kernels, and their number.
    static constexpr long SECOND = NARROW, THIRD = SECOND + 2 * MEDIUM, LAST = THIRD + 2 * WIDE_CHANNELS;
    static constexpr long SMALL_USED = LAST + LAST_INPUTS + 1, SMALL = filled(SMALL_USED, LANES);

  private:
    static const float* begin_norm(InstanceNorm& norm, long channels, const float* at) {
        norm.weights = at, norm.biases = at + channels, norm.slope = LEAK;
        return at + 2 * channels;
    }

    void enter_class(const Shown& rows, long from, long row) {
        View& image = image_[row];
        for (long number = 0; number < nets_.num_classes; number++) {
            const float value = rows.classes[from] == number ? 1.0f : 0.0f;
            each_pixel(image, [&](long y, long x) { image.pixel(y, x)[nets_.channels + number] = value; });
        }
    }

    // Calls ``each(activations, errors, place)`` for all vectors of a row's last image.
    template <class Each>
    void each_last(long row, const Each& each) {
        each_pixel(third_out_[row], [&](long y, long x) {
            for (long channel = 0; channel < WIDE_CHANNELS; channel += LANES)
                each(third_out_[row].pixel(y, x) + channel, third_errors_[row].pixel(y, x) + channel,
                     (y * LAST_SIDE + x) * WIDE_CHANNELS + channel);
        });
    }

    Painters nets_{};
    long inputs_ = 0;
    Halving full_, half_, quarter_;
    InstanceNorm second_norm_, third_norm_;
    Framed image_, image_errors_, first_, first_errors_, second_, second_out_, second_errors_, third_, third_out_, third_errors_;
    Numbers<float> last_;
    const float* first_bias_ = nullptr;
    float last_bias_ = 0;
};

// The sum of the clipped gradients of (real, fake) pairs; clients/dafl/dpcgan/clipping.py defines it. The gradient of every pair is
// computed in float32. Its norm, and the sum, are float64.
class ClippedPairs {
  public:
    // ``enter(pair, discriminating, row)`` takes the pair's two images as rows ``row`` and ``row`` + 1; ``prepare(first, count)`` is
    // called before, for some pairs.
    template <class Prepare, class Enter>
    void write(const Painters& nets, long count, double bound, const Prepare& prepare, const Enter& enter, double* sum) {
        net_.begin(nets);
        const long size = net_.num_parameters();
        double* const totals = totals_.at_least(size);
        float* const gradient = gradient_.at_least(size + LANES);
        float* const small = small_.at_least(IMAGES_AT_ONCE / 2 * Discriminating::SMALL);
        std::fill_n(totals, size, 0.0);
        for (long first = 0; first < count; first += IMAGES_AT_ONCE / 2) {
            const long here = std::min(IMAGES_AT_ONCE / 2, count - first);
            prepare(first, here);
            for (long pair = 0; pair < here; pair++) enter(first + pair, net_, 2 * pair);
            float scores[IMAGES_AT_ONCE], errors[IMAGES_AT_ONCE];
            net_.forward(2 * here, scores);
            for (long row = 0; row < 2 * here; row++) {
                const float sign = row % 2 ? 1.0f : -1.0f;  // the derivatives of softplus(-score) and softplus(score)
                errors[row] = sign * sigmoid(spread(sign * scores[row]))[0];
            }
            net_.backward(2 * here, errors, false, small, 2);
            for (long pair = 0; pair < here; pair++) {
                const double norm = std::sqrt(net_.write_gradient(pair, small, gradient));
                if (!std::isfinite(norm) || !(bound > 0)) continue;
                const double factor = std::min(1.0, bound / norm);
                for (long i = 0; i < size; i++) totals[i] += factor * double(gradient[i]);
            }
        }
        net_.hand_over(totals, sum);
    }

  private:
    Discriminating net_;
    Numbers<double> totals_;
    Numbers<float> gradient_, small_;
};

}  // namespace
