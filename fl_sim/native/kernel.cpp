// Local training of clients, one after another in one call, and inference. Training is minibatch SGD or Adam on convolutions,
// pooling, GroupNorm, residual blocks, ReLU, dropout and linear layers.
//
// Layout. A group is LANES records of the minibatch. An activation is [group][channel][row][column][LANES]. The innermost index
// runs over records, so every step of every layer is one instruction on LANES numbers, for any number of channels. Layers that
// work on planes (the images of channels) process one group at a time, because the activations of one group fit in the L2 cache.
// Linear layers process all groups at once, so that their weights are read once per minibatch. Missing records in a smaller
// minibatch are zeros, and the gradient of their loss is set to zero.
//
// Words. A slope is the gradient of the loss by a number that a layer has computed. A tap is a position of a kernel. A place is a
// position in a plane. A sink is an object that receives a gradient part by part, as soon as each part is known (optimizer.h).
//
// Fusion. A convolution with the ReLU and the 2 x 2 pooling that follow is one layer. It writes the pooled output and, as a byte,
// the position of the maximum in each pooling window. A linear layer's weights are updated as soon as their gradient is known.
//
// Second derivatives. FedMix's loss contains the derivative of cross-entropy along a record. If every layer is linear apart from
// ReLU and pooling, this derivative passes forward and backward through the same layers, as additional groups: the derivative
// groups. Each derivative group belongs to an ordinary group, its origin. It uses the origin's ReLUs and maxima (``Flow``).
//
// Order of sums. A client is trained by one thread, and all loops are sequential. So the bits depend on the arguments and the
// compiler only.

#include <algorithm>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>

#include "network.h"
#ifndef FL_SIM_BFLOAT16
#include "private.h"
#endif
#include "subnormals.h"

namespace {

// The arguments for one client. request.py has the same structure, field by field.
struct Request {
    const int32_t* layers;
    int64_t num_layers;
    const int32_t* input_shape;  // channels, height, width
    int64_t num_params;
    float *params, *buffers;               // receive the results; buffers: null without momentum
    const float *anchor, *warm;            // initial values of params and buffers; warm: null: zeros
    const float *offset, *drift;           // offsets of gradients and of steps; null: none
    const float* trained;                  // 0 for frozen parameters, else 1; null: none is frozen
    const float* inputs;
    const int64_t *labels, *order;                 // order: [epoch][record]
    const float *partner_inputs, *partner_labels;  // the mixing pool; null: no mixing
    const int64_t* partners;                       // [step]
    uint64_t masks;                                // the key of the random dropout masks
    int64_t num_partners;                          // the number of records in the mixing pool
    int64_t num_examples, num_steps, batch_size, linearise;
    int64_t adam;  // not 0: the optimiser is Adam or AdamW
    float learning_rate, momentum, weight_decay, proximal_mu, own_weight, partner_weight, gradient_scale, clip_norm;
    float weight_kept;  // AdamW's factor of a weight before its step; 1 for other optimisers
    Terms terms;
    Ascent ascent;
    Moves moves;  // places: [epoch][record in the epoch's order]
};

// Returns the network for a request, or null if its layers do not fit together. A thread reuses its last network if the shape is
// the same, because allocating the memory can take longer than training a client. A client overwrites all numbers of the
// previous client before it reads them.
Network* network_for(const Request& request, int64_t batch_size) {
    thread_local std::vector<int64_t> shape;
    thread_local std::unique_ptr<Network> network;
    std::vector<int64_t> wanted(request.layers, request.layers + request.num_layers * FIELDS);
    wanted.insert(wanted.end(), request.input_shape, request.input_shape + 3);
    wanted.insert(wanted.end(), {(batch_size + LANES - 1) / LANES, request.linearise, request.num_params});
    if (!network || shape != wanted) {
        shape.clear(), network.reset();
        Graph graph(request.layers, int(request.num_layers),
                    {request.input_shape[0], request.input_shape[1], request.input_shape[2]});
        if (graph.num_params != request.num_params) return nullptr;
        const int origins = int((batch_size + LANES - 1) / LANES), groups = request.linearise ? 2 * origins : origins;
        graph.reserve(groups, origins);
        network = std::make_unique<Network>(std::move(graph), groups);
        shape = wanted;
    }
    return network.get();
}

int num_classes(const Request& request) { return request.layers[(request.num_layers - 1) * FIELDS + 1]; }

int64_t num_batches(const Request& request) { return (request.num_examples - 1) / request.batch_size + 1; }

// Returns true if all of the ``count`` numbers are in 0 .. end - 1.
bool are_below(const int64_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [end](int64_t number) { return number >= 0 && number < end; });
}

// Checks the request for numbers that would cause an invalid memory access. Returns 0, or the error code of the fault (see
// fl_sim_train).
int fault_of(const Request& request) {
    const int64_t count = request.num_examples;
    if (request.num_layers < 1) return 1;
    if (count < 1 || request.num_steps < 1 || request.batch_size < 1) return 4;
    if (std::min(request.batch_size, count) > MOST_NUMBERS) return 2;
    if (!are_below(request.labels, count, num_classes(request))) return 3;
    const int64_t passes = (request.num_steps - 1) / num_batches(request) + 1;
    if (!are_below(request.order, passes * count, count)) return 4;
    return request.partners && !are_below(request.partners, request.num_steps, request.num_partners) ? 4 : 0;
}

// Writes the logits of all records for the weights ``params``, [record][class], or their features, [record][feature].
void write_rows(Network& network, const Request& request, const float* params, bool wants_features, float* rows) {
    const int64_t count = request.num_examples, batch_size = std::min(request.batch_size, count);
    const int classes = num_classes(request);
    const long numbers = wants_features ? network.num_features() : classes;
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    network.start(params);
    for (int64_t first = 0; first < count; first += batch_size) {
        const int here = int(std::min(batch_size, count - first));
        const Batch batch{nullptr, order.data() + first, here, (here + LANES - 1) / LANES, classes, nullptr, 0, nullptr, {}};
        network.infer(request.inputs, batch, params, wants_features, rows + first * numbers);
    }
}

// The outputs of other models that loss terms need. They do not change during training, so they are computed once for all epochs.
class Memory {
  public:
    // Returns the request's loss terms, with pointers to these outputs.
    Terms prepare(Network& network, const Request& request) {
        Terms terms = request.terms;
        if (terms.distillation.weight != 0) {
            logits_.resize(request.num_examples * num_classes(request));
            write_rows(network, request, request.anchor, false, logits_.data());
            terms.distillation.received = logits_.data();
        }
        if (terms.contrast.weight != 0) {
            write_leads(network, request);
            terms.contrast.leads = leads_.data();
        }
        return terms;
    }

  private:
    void write_leads(Network& network, const Request& request) {
        const long numbers = network.num_features();
        std::vector<float> received(request.num_examples * numbers);
        leads_.resize(received.size());
        write_rows(network, request, request.terms.contrast.previous, true, leads_.data());
        write_rows(network, request, request.anchor, true, received.data());
        to_directions(leads_.data(), request.num_examples, numbers);
        to_directions(received.data(), request.num_examples, numbers);
        for (size_t at = 0; at < leads_.size(); at++) leads_[at] -= received[at];
    }

    std::vector<float> logits_, leads_;
};

// Writes the initial values of params and buffers, and returns the optimiser. ``moments``: receives the memory of Adam.
Optimizer begin(const Request& request, std::vector<float>& moments) {
    std::copy(request.anchor, request.anchor + request.num_params + LANES, request.params);
    if (request.warm) std::copy(request.warm, request.warm + request.num_params + LANES, request.buffers);
    else if (request.buffers) std::fill(request.buffers, request.buffers + request.num_params + LANES, 0.0f);
    moments.assign(request.adam ? 2 * (request.num_params + LANES) : 0, 0.0f);
    float* const first = request.adam ? moments.data() : nullptr;
    return {request.learning_rate, request.momentum, request.weight_decay, request.proximal_mu, request.gradient_scale,
            request.clip_norm, request.weight_kept, request.params, request.buffers, request.anchor, request.offset,
            request.drift, request.trained, {first, first + moments.size() / 2, 1, 1}};
}

int train(const Request& request, double* mean_loss) {
    if (const int fault = fault_of(request)) return fault;
    const int64_t count = request.num_examples, batch_size = std::min(request.batch_size, count);
    const int classes = num_classes(request);
    Network* network = network_for(request, batch_size);
    if (!network) return 1;
    std::vector<float> moments;
    Optimizer optimizer = begin(request, moments);
    const Mix mix{request.partner_inputs, request.partner_labels, request.own_weight, request.partner_weight,
                  request.linearise != 0};
    network->begin(request.masks);
    Memory memory;
    const Terms terms = memory.prepare(*network, request);
    double total = 0;
    for (int64_t step = 0; step < request.num_steps; step++) {
        const int64_t epoch = step / num_batches(request), first = step % num_batches(request) * batch_size;
        const int here = int(std::min(batch_size, count - first));
        if (request.adam) optimizer.moments.begin(step + 1);
        Moves moves = request.moves;
        if (moves.places) moves.places += 3 * (epoch * count + first);
        const Batch batch{request.labels, request.order + epoch * count + first, here, (here + LANES - 1) / LANES,
                          classes, request.partners ? &mix : nullptr, request.partners ? request.partners[step] : 0,
                          terms.any() ? &terms : nullptr, moves};
        total += network->step(request.inputs, batch, optimizer, request.ascent);
    }
    *mean_loss = total / double(request.num_steps);
    return 0;
}

#ifndef FL_SIM_BFLOAT16
constexpr int MOST_GROUPS = 8;            // groups of records at a time
constexpr long MOST_BY_RECORD = 1L << 17; // vectors of gradients by record

// Returns the network for the private steps of a request, or null if its layers do not fit together or are not supported.
ClippedSums* clipped_sums_for(const Request& request) {
    thread_local std::vector<int64_t> shape;
    thread_local std::unique_ptr<ClippedSums> network;
    std::vector<int64_t> wanted(request.layers, request.layers + request.num_layers * FIELDS);
    wanted.insert(wanted.end(), request.input_shape, request.input_shape + 3);
    wanted.push_back(request.num_params);
    if (!network || shape != wanted) {
        shape.clear(), network.reset();
        Graph graph(request.layers, int(request.num_layers),
                    {request.input_shape[0], request.input_shape[1], request.input_shape[2]});
        if (graph.num_params != request.num_params) return nullptr;
        for (const Layer& layer : graph.layers)
            if (layer.kind == NORM || layer.kind == DROP || layer.is_changed()) return nullptr;
        const long by_record = std::max(1L, graph.layers[graph.first_linear].weight);
        const int groups = int(std::clamp<long>(MOST_BY_RECORD / by_record, 1, MOST_GROUPS));
        graph.reserve(groups, groups);
        network = std::make_unique<ClippedSums>(std::move(graph), groups);
        shape = wanted;
    }
    return network.get();
}

int train_privately(const Request& request, const PrivateSteps& steps) {
    if (request.num_layers < 1) return 1;
    if (request.num_examples < 1 || request.num_steps < 1) return 4;
    if (!are_below(request.labels, request.num_examples, num_classes(request))) return 3;
    ClippedSums* network = clipped_sums_for(request);
    if (!network || request.trained || request.clip_norm != 0) return 1;
    std::vector<float> moments;
    Optimizer optimizer = begin(request, moments);
    std::vector<int64_t> chosen;
    for (int64_t step = 0; step < request.num_steps; step++) {
        draw_batch(steps, step, request.num_examples, chosen);
        if (request.adam) optimizer.moments.begin(step + 1);
        Release release(steps, step, optimizer);
        network->pass(request.inputs, request.labels, chosen.data(), long(chosen.size()), request.params, steps.bounds,
                      [&](long at, long count, double* sums) { release(at, count, sums); });
        if (release.failed) return 5;
    }
    return 0;
}
#endif

int infer(const Request& request, bool wants_features, float* rows) {
    const int64_t count = request.num_examples, batch_size = std::min(request.batch_size, count);
    if (request.num_layers < 1) return 1;
    if (count < 1 || batch_size < 1) return 4;
    Network* network = network_for(request, batch_size);
    if (!network) return 1;
    write_rows(*network, request, request.params, wants_features, rows);
    return 0;
}

#ifndef FL_SIM_BFLOAT16
// Returns the description of the request's layers after one more layer, which copies the records. Every layer then has an input
// whose gradient the backward pass can compute.
std::vector<int32_t> after_a_copy(const Request& request) {
    std::vector<int32_t> described(FIELDS, 0);
    described[0] = DROP;
    described.insert(described.end(), request.layers, request.layers + request.num_layers * FIELDS);
    for (int64_t layer = 1; layer <= request.num_layers; layer++) described[layer * FIELDS + 11]++, described[layer * FIELDS + 12]++;
    return described;
}

// Returns the network that computes gradients by records, or null if its layers do not fit together.
Network* network_to_records(const Request& request, int64_t batch_size) {
    thread_local std::vector<int64_t> shape;
    thread_local std::unique_ptr<Network> network;
    const std::vector<int32_t> described = after_a_copy(request);
    std::vector<int64_t> wanted(described.begin(), described.end());
    wanted.insert(wanted.end(), request.input_shape, request.input_shape + 3);
    wanted.insert(wanted.end(), {(batch_size + LANES - 1) / LANES, request.num_params});
    if (!network || shape != wanted) {
        shape.clear(), network.reset();
        Graph graph(described.data(), int(request.num_layers) + 1,
                    {request.input_shape[0], request.input_shape[1], request.input_shape[2]});
        if (graph.num_params != request.num_params) return nullptr;
        const int groups = int((batch_size + LANES - 1) / LANES);
        graph.first_trained = 0;  // the backward pass then reaches the copy, and leaves its gradient in ``spare``
        graph.reserve(groups, groups);
        network = std::make_unique<Network>(std::move(graph), groups);
        shape = wanted;
    }
    return network.get();
}

// Writes the gradients of sum(slopes * logits), or (``slopes`` null) of the sum of the records' cross-entropies: by the parameters,
// and (if ``by_records`` is not null) by the records, [record][feature]. ``slopes``: [record][class].
int backward(const Request& request, const float* slopes, float* by_params, float* by_records) {
    const int64_t count = request.num_examples, batch_size = std::min(request.batch_size, count);
    if (request.num_layers < 1) return 1;
    if (count < 1 || batch_size < 1) return 4;
    if (!slopes && !are_below(request.labels, count, num_classes(request))) return 3;
    for (int64_t layer = 0; layer < request.num_layers; layer++)  // dropout and factors have no meaning here
        if (request.layers[layer * FIELDS + 16] || request.layers[layer * FIELDS + 17]) return 1;
    Network* network = by_records ? network_to_records(request, batch_size) : network_for(request, batch_size);
    if (!network) return 1;
    const int classes = num_classes(request);
    const int64_t features = int64_t(request.input_shape[0]) * request.input_shape[1] * request.input_shape[2];
    std::vector<float> part(request.num_params + LANES);
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    Length length;
    length.start(part.data(), nullptr, request.num_params);
    std::fill(by_params, by_params + request.num_params, 0.0f);
    for (int64_t first = 0; first < count; first += batch_size) {
        network->start(request.params);
        const int here = int(std::min(batch_size, count - first));
        const Batch batch{request.labels, order.data() + first, here, (here + LANES - 1) / LANES, classes, nullptr, 0, nullptr, {}};
        network->backward(request.inputs, batch, request.params, slopes, Kept{part.data(), length},
                          by_records ? by_records + first * features : nullptr);
        for (int64_t at = 0; at < request.num_params; at++) by_params[at] += part[at];
    }
    return 0;
}
#endif

// Returns the result of ``work``, or an error code: no exception may reach Python.
template <class Work>
int guarded(const Work& work) try {
    const NoSubnormals none;
#ifdef FL_SIM_AMX
    const AmxInUse amx;
#endif
    return work();
} catch (const std::bad_alloc&) {
    return 2;
} catch (const std::length_error&) {  // a size beyond the limit of a vector
    return 2;
} catch (const std::logic_error&) {  // a layer of a kind that is not allowed there
    return 1;
}

#ifndef FL_SIM_BFLOAT16  // this part is compiled once for every width, and not again for each kind of products
// Writes sum_i factors[i] * vectors[i], each of ``size`` numbers: in float64, in order, with one fused multiply-add for each
// number, rounded at the end. The sums of a block fit in the L1 cache.
void add_up(const float* const* vectors, const double* factors, int64_t count, int64_t size, float* sums) {
    constexpr int64_t BLOCK = 1024;
    double totals[BLOCK];
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t numbers = std::min(BLOCK, size - first);
        std::fill(totals, totals + numbers, 0.0);
        for (int64_t i = 0; i < count; i++) {
            const float *vector = vectors[i] + first, *next = vectors[std::min(i + 1, count - 1)] + first;
            for (int64_t at = 0; at < numbers; at += 16) __builtin_prefetch(next + at);
            for (int64_t at = 0; at < numbers; at++) totals[at] = __builtin_fma(double(vector[at]), factors[i], totals[at]);
        }
        std::copy(totals, totals + numbers, sums + first);
    }
}
#endif

}  // namespace

// The library contains this file once for every width of vectors. So the names of the functions that Python calls end with the
// width: fl_sim_train_16. Only functions of a width that the processor supports may be called. For products of bfloat16
// numbers a suffix follows: _bfloat16, or _amx if they use AMX.
#if defined(FL_SIM_AMX)
#define JOINED(name, lanes) name##_##lanes##_amx
#elif defined(FL_SIM_BFLOAT16)
#define JOINED(name, lanes) name##_##lanes##_bfloat16
#else
#define JOINED(name, lanes) name##_##lanes
#endif
#define EXPANDED(name, lanes) JOINED(name, lanes)
#define OF_WIDTH(name) EXPANDED(name, FL_SIM_LANES)

extern "C" {

// Returns the digest of the sources that this library was compiled from.
const char* OF_WIDTH(fl_sim_sources)() { return FL_SIM_SOURCES; }

// Returns a number that depends on the structure Request; kernel.py compares it with the number for its own structure.
int OF_WIDTH(fl_sim_layout)() { return int(1000 * sizeof(Request) + FIELDS); }

#ifdef FL_SIM_AMX
// Requests AMX's registers from the operating system; returns 1 if this process may use them.
int OF_WIDTH(fl_sim_may_use)() { return may_use_amx(); }
#endif

#ifdef FL_SIM_CLOCK
// Writes the ticks of all places, [place][part], and resets the clock.
void OF_WIDTH(fl_sim_clock)(double* ticks) {
    the_clock.enter(OUTSIDE, FORWARD);
    std::copy(&the_clock.ticks[0][0], &the_clock.ticks[0][0] + MOST_PLACES * NUM_PARTS, ticks);
    the_clock = Clock();
    the_clock.since = ticks_now();
}
#endif

// Trains ``count`` clients, one after another, up to the first one that fails. Returns an error code, 0 for success. 1: the
// layers do not fit each other, the input or ``num_params``. 2: not enough memory. 3: a label is no class. 4: an index in
// ``order`` or ``partners`` is no record, or there is nothing to do.
int OF_WIDTH(fl_sim_train)(const Request* requests, int64_t count, double* mean_losses) {
    return guarded([&] {
        for (int64_t client = 0; client < count; client++)
            if (const int failed = train(requests[client], mean_losses + client)) return failed;
        return 0;
    });
}

#ifndef FL_SIM_BFLOAT16
// Trains one client by private steps, see private.h. Returns an error code as fl_sim_train does; 5: a number of the noise failed.
int OF_WIDTH(fl_sim_train_privately)(const Request* request, const PrivateSteps* steps) {
    return guarded([&] { return train_privately(*request, *steps); });
}

// Writes the sum of all records' clipped gradients at the weights ``anchor``, [parameter].
int OF_WIDTH(fl_sim_private_sum)(const Request* request, const Bounds* bounds, double* totals) {
    return guarded([&] {
        if (request->num_layers < 1) return 1;
        if (!are_below(request->labels, request->num_examples, num_classes(*request))) return 3;
        ClippedSums* network = clipped_sums_for(*request);
        if (!network) return 1;
        std::vector<int64_t> chosen(request->num_examples);
        std::iota(chosen.begin(), chosen.end(), 0);
        network->pass(request->inputs, request->labels, chosen.data(), request->num_examples, request->anchor, *bounds,
                      [&](long at, long count, const double* sums) { std::copy(sums, sums + count, totals + at); });
        return 0;
    });
}
#endif

// Writes the logits of every record, [record][class], or (``wants_features``) the inputs of the last layer, [record][feature].
// Reads the fields that describe the network, ``params``, ``inputs``, ``num_examples`` and ``batch_size`` (records per forward
// pass; the last bits depend on it). Returns an error code as fl_sim_train does.
int OF_WIDTH(fl_sim_infer)(const Request* request, int64_t wants_features, float* rows) {
    return guarded([&] { return infer(*request, wants_features, rows); });
}

#ifndef FL_SIM_BFLOAT16
// Writes gradients, see ``backward``. Reads the same fields as fl_sim_infer, and without slopes the labels. Returns an error code
// as fl_sim_train does.
int OF_WIDTH(fl_sim_backward)(const Request* request, const float* slopes, float* by_params, float* by_records) {
    return guarded([&] { return backward(*request, slopes, by_params, by_records); });
}

void OF_WIDTH(fl_sim_weighted_sum)(const float* const* vectors, const double* factors, int64_t count, int64_t size, float* sums) {
    add_up(vectors, factors, count, size, sums);
}
#endif

}  // extern "C"
