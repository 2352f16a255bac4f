// Clients' local training, one after another in one call, or what a model makes of records: minibatch SGD or Adam on
// convolutions, pooling, GroupNorm, residual blocks, ReLU, dropout and linear layers.
//
// Layout. An activation is [group][channel][row][column][LANES]: a group is LANES records of the minibatch, and the
// innermost index runs over records, so every step of every layer is the same instruction on LANES numbers, whatever
// the channel count. Layers of planes go through one group at a time (a group's activations fit the L2 cache), linear
// layers through all groups at once (their weights are read once a minibatch). Records that are missing in a smaller
// minibatch are zeros, and the gradient of their loss is set to zero.
//
// Fusion. A convolution with the ReLU and the 2 x 2 pooling behind it is one layer: what is written is the pooled output
// and, a byte each, which of the four numbers it was. A linear layer's weights are stepped where their gradient is made.
//
// Second derivatives. FedMix's loss holds the derivative of cross-entropy along a record. Where every layer is linear but
// for ReLU and pooling, that derivative goes forward and back through the same layers as further groups, with the ReLUs
// and the maxima of the groups they belong to (``Flow``).
//
// Order of sums. One client is one thread and all loops are sequential: the bits depend on the arguments (and the
// compiler) alone.

#include <algorithm>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>

#include "network.h"
#include "subnormals.h"

namespace {

// kernel.py fills it in, field by field.
struct Request {
    const int32_t* layers;
    int64_t num_layers;
    const int32_t* input_shape;  // channels, height, width
    int64_t num_params;
    float *params, *buffers;               // where the results go; buffers: null without momentum
    const float *anchor, *warm;            // where params and buffers start; warm: null where there is none
    const float *offset, *drift;           // of gradients and of steps; null where there is none
    const float* trained;                  // 0 for frozen parameters, else 1; null: none is frozen
    const float* inputs;
    const int64_t *labels, *order;                 // order: [epoch][record]
    const float *partner_inputs, *partner_labels;  // null: the loss is plain
    const int64_t* partners;                       // [step]
    uint64_t masks;                                // the key of what dropout leaves out
    int64_t num_partners;                          // records of the mixing pool
    int64_t num_examples, num_steps, batch_size, linearise;
    int64_t adam;  // whether the optimiser is Adam or AdamW
    float learning_rate, momentum, weight_decay, proximal_mu, own_weight, partner_weight, gradient_scale, clip_norm;
    float weight_kept;  // 1 but for AdamW
    Terms terms;
    Ascent ascent;
    Moves moves;  // places: [epoch][record in the epoch's order]
};

// A thread's last network again, where it has the same shape: its memory costs more to take than some clients to train.
// Nothing of a client stays but numbers that the next one overwrites before it reads them. Null where layers do not fit.
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

// Says whether all of ``count`` numbers lie in 0 .. end - 1.
bool are_below(const int64_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [end](int64_t number) { return number >= 0 && number < end; });
}

// Returns 0, or which fault of the request's numbers would have memory read that is none of theirs.
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

// Writes the logits of all records under ``params``, [record][class], or their features, [record][feature].
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

// What terms compare every step with does not change while a client trains: one pass serves all epochs.
class Memory {
  public:
    // Returns the request's terms, with what they compare with.
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

int train(const Request& request, double* mean_loss) {
    if (const int fault = fault_of(request)) return fault;
    const int64_t count = request.num_examples, batch_size = std::min(request.batch_size, count);
    const int classes = num_classes(request);
    Network* network = network_for(request, batch_size);
    if (!network) return 1;
    std::copy(request.anchor, request.anchor + request.num_params + LANES, request.params);
    if (request.warm) std::copy(request.warm, request.warm + request.num_params + LANES, request.buffers);
    else if (request.buffers) std::fill(request.buffers, request.buffers + request.num_params + LANES, 0.0f);
    std::vector<float> moments(request.adam ? 2 * (request.num_params + LANES) : 0);
    float* const first_moments = request.adam ? moments.data() : nullptr;
    Optimizer optimizer{request.learning_rate, request.momentum, request.weight_decay, request.proximal_mu,
                        request.gradient_scale, request.clip_norm, request.weight_kept, request.params, request.buffers,
                        request.anchor, request.offset, request.drift, request.trained,
                        {first_moments, first_moments + moments.size() / 2, 1, 1}};
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

int infer(const Request& request, bool wants_features, float* rows) {
    const int64_t count = request.num_examples, batch_size = std::min(request.batch_size, count);
    if (request.num_layers < 1) return 1;
    if (count < 1 || batch_size < 1) return 4;
    Network* network = network_for(request, batch_size);
    if (!network) return 1;
    write_rows(*network, request, request.params, wants_features, rows);
    return 0;
}

// Returns what ``work`` returns; no exception may reach Python.
template <class Work>
int guarded(const Work& work) try {
    const NoSubnormals none;
#ifdef FL_SIM_AMX
    const AmxInUse amx;
#endif
    return work();
} catch (const std::bad_alloc&) {
    return 2;
} catch (const std::length_error&) {  // more than there could ever be
    return 2;
} catch (const std::logic_error&) {  // a layer where none such belongs
    return 1;
}

#ifndef FL_SIM_BFLOAT16  // once for every width, whatever products are made of
// Writes sum_i factors[i] * vectors[i], each of ``size`` numbers: in float64, in order, one fused multiplication and addition
// for each number, rounded at the end. In blocks, whose sums stay in the first cache.
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

// A library holds this file once for every width of vectors, so what Python calls has the width in its name:
// fl_sim_train_16. None but those of a width that the processor has may be called.
// What is compiled for products of bfloat16 says so behind it, and what takes AMX for them.
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

// A digest of the sources that this was compiled from.
const char* OF_WIDTH(fl_sim_sources)() { return FL_SIM_SOURCES; }

// What a request looks like here: kernel.py works out the same of its own.
int OF_WIDTH(fl_sim_layout)() { return int(1000 * sizeof(Request) + FIELDS); }

#ifdef FL_SIM_AMX
// Asks the system for AMX's registers; returns whether this process may use them.
int OF_WIDTH(fl_sim_may_use)() { return may_use_amx(); }
#endif

#ifdef FL_SIM_CLOCK
// Hands over the ticks of all places, [place][part], and begins anew.
void OF_WIDTH(fl_sim_clock)(double* ticks) {
    the_clock.enter(OUTSIDE, FORWARD);
    std::copy(&the_clock.ticks[0][0], &the_clock.ticks[0][0] + MOST_PLACES * NUM_PARTS, ticks);
    the_clock = Clock();
    the_clock.since = ticks_now();
}
#endif

// Trains ``count`` clients, one after another, up to the first that fails. Returns 0; 1 where the layers do not fit each
// other, the input or ``num_params``; 2 where memory ran out; 3 where a label is no class; 4 where a place in ``order`` or
// ``partners`` is no record, or where there is nothing to do.
int OF_WIDTH(fl_sim_train)(const Request* requests, int64_t count, double* mean_losses) {
    return guarded([&] {
        for (int64_t client = 0; client < count; client++)
            if (const int failed = train(requests[client], mean_losses + client)) return failed;
        return 0;
    });
}

// Writes the logits of every record, [record][class], or (``wants_features``) what enters the last layer,
// [record][feature]. Reads what describes the network, ``params``, ``inputs``,
// ``num_examples`` and ``batch_size`` (how many go through together: last bits depend on it). Returns as above.
int OF_WIDTH(fl_sim_infer)(const Request* request, int64_t wants_features, float* rows) {
    return guarded([&] { return infer(*request, wants_features, rows); });
}

#ifndef FL_SIM_BFLOAT16
void OF_WIDTH(fl_sim_weighted_sum)(const float* const* vectors, const double* factors, int64_t count, int64_t size, float* sums) {
    add_up(vectors, factors, count, size, sums);
}
#endif

}  // extern "C"
