"""Narrow models: nested widths, the same numbers as the whole model's part, and layers that cannot be cut."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.local_plan import LocalPlan
from fl_sim.models import MODELS, build, products
from fl_sim.narrow_models import check_narrowable, cut, narrowed, places_of
from fl_sim.native.kernel import load_kernel
from fl_sim.native.layers import describe
from fl_sim.params import detached, layout_of
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params

SHAPE = (1, 16, 16)
CUT = [name for name in MODELS if name not in {"logistic", "random-features"}]


def whole(name: str) -> tuple[nn.Module, Params]:
    model = build(name, SHAPE, 10, 0)
    return model, detached(model.named_parameters())


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("first", [0, 5])
def test_narrower_models_lie_within_wider_ones_and_none_is_empty(name: str, first: int) -> None:
    model, params = whole(name)
    check_narrowable(model)
    before: dict[str, torch.Tensor] = {}
    for width in (1e-6, 1 / 16, 0.3, 0.5, 1.0):
        places, held = places_of(layout_of(params), width, first), {}
        for key, value in params.items():
            mask = torch.zeros_like(value)
            mask[places[key]] = 1
            held[key] = mask > 0
            assert held[key].any()
            assert key not in before or (held[key] | ~before[key]).all()
        before = held
    assert all(mask.all() for mask in before.values())


def test_a_layer_of_k_channels_keeps_the_first_ones_rounded_up() -> None:
    _, params = whole("niid-cnn")
    small = cut(params, places_of(layout_of(params), 0.3))
    widths = [math.ceil(0.3 * count) for count in (6, 16, 120, 84)]
    assert [value.shape[0] for value in small.values() if value.ndim > 1] == [*widths, 10]
    assert torch.equal(small["0.weight"], params["0.weight"][: widths[0]])
    assert torch.equal(small["3.weight"], params["3.weight"][: widths[1], : widths[0]])
    assert torch.equal(small["7.weight"], params["7.weight"][: widths[2], : widths[1]])  # one pixel of each channel
    assert torch.equal(small["11.weight"], params["11.weight"][:, : widths[3]])
    assert torch.equal(small["11.bias"], params["11.bias"])


@pytest.mark.parametrize("name", ["dafl-cnn", "niid-mlp", "resnet"])
def test_a_narrow_model_computes_as_the_whole_one_without_the_other_channels(name: str) -> None:
    """Zeros in all other entries silence the other channels. ResNet's norms have parts of the same channels."""
    model, params = whole(name)
    places, rest = places_of(layout_of(params), 0.5, 0), {key: torch.zeros_like(one) for key, one in params.items()}
    small = cut(params, places)
    for key, value in small.items():
        rest[key][places[key]] = value
    outputs = []
    for network, weights in ((model, rest), (narrowed(model, small, 1.0), small)):
        network.load_state_dict(weights)
        outputs.append(network(torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0))))
    assert torch.allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize("name", CUT)
def test_compiled_training_of_scaled_layers_is_pytorchs(name: str) -> None:
    model, params = whole(name)
    small = cut(params, places_of(layout_of(params), 0.5, 3))
    network, kernel = narrowed(model, small, 2.0), load_kernel()[0]
    assert kernel is not None
    assert describe(network, SHAPE) is not None
    draw = torch.Generator().manual_seed(0)
    records = Records.of(torch.randn(40, *SHAPE, generator=draw), torch.randint(0, 10, (40,), generator=draw))
    task = LocalTask(1, 0, 1, 40, LocalSettings(0.02, 0.9, 1e-3, 16, 2), small)
    ways = [Trainer(network, one) for one in (None, kernel)]
    plain = Trainer(narrowed(model, small, 1.0), kernel)
    ends = [trainer.train(LocalJob(task, LocalPlan(), records, np.random.default_rng(0))) for trainer in (*ways, plain)]
    assert ends[0].loss == pytest.approx(ends[1].loss, abs=1e-5)
    assert ends[0].loss != pytest.approx(ends[2].loss, abs=1e-5)
    for key in small:
        assert torch.allclose(ends[0].params[key], ends[1].params[key], atol=1e-6)
    scores = [trainer.evaluate(small, *records.tensors()).loss for trainer in (*ways, plain)]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)  # no factor in evaluation


def test_products_are_those_of_weights_and_inputs() -> None:
    assert products(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 4, 5)), (1, 4, 4)) == 2 * 4 * 9 + 40


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 2)), r"layer 0 \(Conv2d\)"),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), r"layer 1 \(LayerNorm\)"),
        (nn.Sequential(nn.GRU(4, 4), nn.Linear(4, 2)), r"layer 0 \(GRU\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "one layer has no channels between layers"),
        (nn.Sequential(nn.Linear(4, 4).requires_grad_(requires_grad=False), nn.Linear(4, 2)), "0.weight is frozen"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_the_name_of_the_layer(model: nn.Module, match: str) -> None:
    with pytest.raises(UserError, match=f"{match}.*(use|train)"):
        check_narrowable(model)
