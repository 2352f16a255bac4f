"""Forward and backward passes of the compiled trainer, for loss terms that are written in PyTorch.

PyTorch can differentiate these passes once.
"""

from dataclasses import dataclass
from typing import Any

import torch

from fl_sim.errors import UserError
from fl_sim.native.kernel import Kernel
from fl_sim.native.layers import Stack
from fl_sim.types import Params


@dataclass(frozen=True)
class CompiledPasses:
    """The forward and the backward pass of a model, by the compiled trainer, in float32 on the CPU.

    The class implements ``fl_sim.training.features.Passes``. ``frozen``: the values of all parameters that callers do
    not pass.
    """

    kernel: Kernel
    stack: Stack
    frozen: Params

    def logits(self, params: Params, records: torch.Tensor) -> torch.Tensor:
        """Return the logits, (n, classes), of ``records``, (n, *input shape), for the weights ``params``.

        PyTorch can compute first derivatives of the logits with respect to ``params`` and ``records``. A second
        derivative raises UserError.
        """
        logits: torch.Tensor = _Logits.apply(self.kernel, self.stack, self._vector(params), records)
        return logits

    def input_slopes(self, params: Params, records: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each record's cross-entropy with respect to the record, without derivatives."""
        return self.kernel.input_slopes(self.stack, self._vector(params), records, labels)

    def _vector(self, params: Params) -> torch.Tensor:
        weights = {**self.frozen, **params}
        # the function vector_in cannot be used here, because PyTorch cannot differentiate its result
        return torch.cat([weights[name].reshape(-1) for name, _ in self.stack.layout])


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(kernel: Kernel, stack: Stack, weights: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        return kernel.infer(stack, weights, records)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del output
        ctx.kernel, ctx.stack, weights, records = inputs
        ctx.save_for_backward(weights, records)

    @staticmethod
    def backward(ctx: Any, slopes: torch.Tensor) -> tuple[None, None, torch.Tensor | None, torch.Tensor | None]:
        weights, records = ctx.saved_tensors
        by_weights, by_records = _Gradients.apply(
            ctx.kernel, ctx.stack, weights, records, slopes, ctx.needs_input_grad[3]
        )
        return None, None, by_weights if ctx.needs_input_grad[2] else None, by_records


class _Gradients(torch.autograd.Function):
    """The backward pass of ``_Logits``, as a separate function: ``torch.func.grad`` passes plain tensors to it."""

    @staticmethod
    def forward(
        kernel: Kernel,
        stack: Stack,
        weights: torch.Tensor,
        records: torch.Tensor,
        slopes: torch.Tensor,
        to_records: bool,  # noqa: FBT001 (autograd passes arguments by position)
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return kernel.backward(stack, weights, records, slopes, to_inputs=to_records)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Store nothing: this function has no derivatives."""

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        del ctx, slopes
        raise UserError(
            "a loss term needs a second derivative of the model, which its first_order=True excludes: remove "
            "first_order=True"
        )
