"""Clipped sums of gradients beside Opacus: its stored gradients of each record, and its ghost clipping."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.layers import DPGRU
from torch import nn

from fl_sim import models
from fl_sim.params import trainable
from fl_sim.token_models import GatedRecurrent
from fl_sim.training.per_record import ClippedSum, by_layers, by_records, clipped_sum_of

IMAGE, TEXT = (1, 28, 28), (12,)
LIMIT, SMOOTHING = 0.7, 0.1
WAYS: dict[str, Callable[..., ClippedSum]] = {"layers": by_layers, "records": by_records, "chosen": clipped_sum_of}

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")


def _images(count: int) -> torch.Tensor:
    return torch.randn(count, *IMAGE, generator=torch.Generator().manual_seed(2))


def _texts(count: int) -> torch.Tensor:
    """Return rows of tokens from 1, and zeros behind the last token of a row."""
    tokens = torch.randint(1, 9, (count, *TEXT), generator=torch.Generator().manual_seed(2))
    return torch.where(torch.arange(12) < 4 + torch.arange(count)[:, None], tokens, 0).float()


class _Words(nn.Module):
    """A bag of words: the mean of embeddings, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(inputs.long()).mean(dim=1))
        return logits


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "embedding":
        return _Words()
    return models.build("gru", TEXT, 10, 0, vocabulary=9) if name == "gru" else models.MODELS[name](IMAGE, 10)


def _for_opacus(model: nn.Module) -> nn.Module:
    """Return a copy of ``model``, in which Opacus' own GRU replaces PyTorch's."""
    twin = copy.deepcopy(model)
    if isinstance(twin, GatedRecurrent):
        own = DPGRU(8, 128, batch_first=True)
        own.load_state_dict(twin.recurrent.state_dict())
        twin.recurrent = own
    return twin


def _by_stored_gradients(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> NDArray[np.float64]:
    theirs = GradSampleModule(model, loss_reduction="sum")
    nn.functional.cross_entropy(theirs(inputs), labels, reduction="sum", label_smoothing=SMOOTHING).backward()
    flat = torch.cat([weight.grad_sample.flatten(1) for weight in theirs.parameters()], dim=1).double()  # type: ignore[union-attr]
    return (flat * (LIMIT / flat.norm(dim=1, keepdim=True)).clamp(max=1.0)).sum(dim=0).numpy()


def _by_ghost_clipping(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> NDArray[np.float64]:
    theirs = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=LIMIT)
    losses = nn.functional.cross_entropy(theirs(inputs), labels, reduction="none", label_smoothing=SMOOTHING)
    losses.sum().backward(retain_graph=True)
    factors = theirs.get_clipping_coef()
    theirs.disable_hooks()
    weights = list(theirs.parameters())
    found = torch.autograd.grad((factors.detach() * losses).sum(), weights)
    return torch.cat([one.flatten() for one in found]).double().numpy()


def _in_order(model: nn.Module, values: NDArray[np.float64], names: list[str]) -> dict[str, NDArray[np.float64]]:
    sizes = [dict(model.named_parameters())[name].numel() for name in names]
    return dict(zip(names, np.split(values, np.cumsum(sizes)[:-1]), strict=True))


@pytest.mark.parametrize("opacus", [_by_stored_gradients, _by_ghost_clipping])
@pytest.mark.parametrize("name", ["logistic", "mlp", "niid-cnn", "resnet", "embedding", "gru"])
def test_the_clipped_sum_is_that_of_opacus(name: str, opacus: Callable[..., NDArray[np.float64]]) -> None:
    model, labels = _model(name), torch.arange(6)
    inputs = (_texts if name in {"embedding", "gru"} else _images)(6)
    twin = _for_opacus(model)
    names = [name.removeprefix("_module.") for name, _ in twin.named_parameters()]
    theirs = _in_order(model, opacus(twin, inputs, labels), names)
    ways = ["chosen", "records"] if name in {"embedding", "gru"} else list(WAYS)
    for way in ways:
        ours = WAYS[way](model, trainable(model), SMOOTHING)(inputs, labels, LIMIT)
        for parameter, found in _in_order(model, ours, list(trainable(model))).items():
            assert np.allclose(found, theirs[parameter], rtol=1e-4, atol=2e-6), (way, parameter)
