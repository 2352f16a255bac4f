// One client's local training in one call: minibatch SGD on a stack of Conv2d, MaxPool2d, ReLU and Linear layers.
//
// Layout. An activation is [group][channel][row][column][LANES]: a group is LANES records of the minibatch, and the
// innermost index runs over records, so every step of every layer is the same instruction on LANES numbers, whatever
// the channel count. Convolutions go through one group at a time (a group's activations fit the L2 cache), linear layers
// through all groups at once (their weights are read once a minibatch). Records that are missing in a smaller minibatch
// are zeros, and the gradient of their loss is set to zero.
//
// Fusion. A convolution with the ReLU and the 2 x 2 pooling behind it is one layer: what is written is the pooled output
// and, a byte each, which of the four numbers it was. A linear layer's weights are stepped where their gradient is made.
//
// Order of sums. One client is one thread and all loops are sequential: the bits depend on the arguments (and the
// compiler) alone.

#include <memory>
#include <new>

#include "network.h"

namespace {

// A thread's last network again, where it has the same shape: its memory costs more to take than some clients to train.
// Nothing of a client stays but numbers that the next one overwrites before it reads them.
Network& network_for(const int32_t* layers, int num_layers, const int32_t* input_shape, int batch_size) {
    thread_local std::vector<int32_t> shape;
    thread_local std::unique_ptr<Network> network;
    std::vector<int32_t> wanted(layers, layers + num_layers * FIELDS);
    wanted.insert(wanted.end(), input_shape, input_shape + 3);
    wanted.push_back((batch_size + LANES - 1) / LANES);
    if (!network || shape != wanted) {
        shape.clear(), network.reset();
        const Image input{input_shape[0], input_shape[1], input_shape[2]};
        network = std::make_unique<Network>(layers, num_layers, input, batch_size);
        shape = wanted;
    }
    return *network;
}

}  // namespace

extern "C" {

// Which processor features this file was compiled for; nothing else may be called where one is missing.
const char* fl_sim_processor() { return FL_SIM_PROCESSOR; }

// Trains one client; the arguments are explained in kernel.py. Returns 0; 1 where the description does not fit
// ``num_params``; 2 where memory ran out; 3 where a label is no class.
int fl_sim_train(const int32_t* layers, int num_layers, const int32_t* input_shape, int64_t num_params, float* params,
                 float* buffers, const float* anchor, const float* offset, float learning_rate, float momentum,
                 float weight_decay, float proximal_mu, const float* inputs, const int64_t* labels, const int64_t* order,
                 int64_t num_examples, int64_t epochs, int64_t batch_size, double* mean_loss) try {
    const int64_t classes = layers[(num_layers - 1) * FIELDS + 1];
    for (int64_t i = 0; i < num_examples; i++)
        if (labels[i] < 0 || labels[i] >= classes) return 3;
    batch_size = std::min(batch_size, num_examples);
    Network& network = network_for(layers, num_layers, input_shape, int(batch_size));
    if (network.num_params != num_params) return 1;
    const Sgd sgd{learning_rate, momentum, weight_decay, proximal_mu, params, buffers, anchor, offset};
    double total = 0;
    int64_t steps = 0;
    for (int64_t epoch = 0; epoch < epochs; epoch++, order += num_examples)
        for (int64_t first = 0; first < num_examples; first += batch_size, steps++) {
            const int count = int(std::min(batch_size, num_examples - first));
            total += network.step(inputs, labels, order + first, count, sgd);
        }
    *mean_loss = total / double(steps);
    return 0;
} catch (const std::bad_alloc&) {
    return 2;
}

}  // extern "C"
