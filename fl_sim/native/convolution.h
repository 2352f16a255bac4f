// The forward pass of convolutions, together with the ReLU and the 2 x 2 pooling that follow.
#pragma once

#ifdef FL_SIM_AMX
#include "amx_convolution.h"
#else
#include "windows.h"
#endif

namespace {

// Returns the arguments of a layer's forward pass over one group. ``in``, ``weights``: the group's planes and the kernels as
// factors of products; null if ``convolve`` is not called.
Pass forward_pass(Layer& layer, const Flow& flow, const float* params, const Read* in, const Factors::Weight* weights) {
    bvec* chosen = layer.pooled ? layer.chosen.data() + flow.origin * layer.out.features() : nullptr;
    const bool is_biased = layer.has_bias && !flow.is_derivative;
    return {layer.kernel_y, layer.kernel_x, layer.stride_y, layer.stride_x, in, layer.corner(), layer.in, flow.out,
            layer.out, layer.out.height, layer.out.width, 1, 1, chosen, weights, is_biased ? params + layer.bias : nullptr, layer.relu,
            layer.padding_y, layer.padding_y + layer.in.height, flow.is_derivative ? flow.passed : nullptr};
}

void conv_forward(Layer& layer, const Flow& flow, const float* params) {
    convolve(forward_pass(layer, flow, params, read_of(flow.in, layer.in, layer), layer.kernels), layer);
}

}  // namespace
