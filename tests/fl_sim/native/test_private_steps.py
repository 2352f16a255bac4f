"""Private steps of the compiled trainer: PyTorch's clipped sums and steps to rounding, and what one record moves."""

import copy
import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from fl_sim.clipping import FLAT, Clipping
from fl_sim.local_plan import LocalPlan, PrivateSteps
from fl_sim.models import MODELS, ResidualBlock
from fl_sim.native.kernel import CompiledNormals, Kernel
from fl_sim.native.layers import describe
from fl_sim.native.private_steps import (
    ClippingBounds,
    PrivateDraws,
    clipped_sum,
    is_supported,
    job_without_order,
    train,
)
from fl_sim.params import detached, num_in, trainable
from fl_sim.privacy.mechanisms import Noise
from fl_sim.training import private_steps
from fl_sim.training.per_record import by_records
from fl_sim.training.private_steps import train_compiled, train_privately
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params

ROUNDING, ONE_BIT = 2e-5, 0.2  # see test_kernel.py
NOISE = Noise(b"k" * 32, simulation_only=True)
LOCAL = LocalSettings(0.1, 0.0, 0.0, batch_size=6, epochs=0, steps=4)

torch.manual_seed(8)
PADDED = nn.Sequential(
    nn.Conv2d(2, 5, 4, 2, 1), nn.MaxPool2d(3, 2, 1), nn.ReLU(), nn.Conv2d(5, 7, (2, 3), padding=(1, 2)), nn.Flatten(),
    nn.ReLU(), nn.Linear(168, 10),
)  # fmt: skip
STRIDED = nn.Sequential(
    nn.ReLU(), nn.Conv2d(2, 7, 3, 2, 1), nn.MaxPool2d(2), nn.Conv2d(7, 3, 1, bias=False), nn.ReLU(), nn.MaxPool2d(2, 1),
    nn.Flatten(), nn.Linear(18, 11), nn.ReLU(), nn.Linear(11, 10, bias=False),
)  # fmt: skip
ROUTED = nn.Sequential(
    nn.Conv2d(2, 20, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(20, 9, 3, padding=2), nn.MaxPool2d(2),
    nn.Conv2d(9, 6, 5, padding=4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 4 * 4, 10),
)  # fmt: skip
RESIDUAL = nn.Sequential(
    nn.Conv2d(2, 8, 3, padding=1), ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(16, 10),
)  # fmt: skip
for _block in RESIDUAL[1:3]:
    _block.body = nn.Sequential(*(layer for layer in _block.body if not isinstance(layer, nn.GroupNorm)))
POOLED = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * 6 * 7, 10))


@pytest.fixture
def here(kernel: Kernel) -> Kernel:
    """The kernel, if this process can be called by it: not the one in an emulator."""
    if not isinstance(kernel.library, ctypes.CDLL):
        pytest.skip("a kernel in an emulator cannot call Python")
    return kernel


def _records(seed: int, count: int, shape: tuple[int, ...], classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=draw), torch.randint(0, classes, (count,), generator=draw)


def _task(model: nn.Module, local: LocalSettings = LOCAL) -> LocalTask:
    return LocalTask(3, 0, 1, 1, local, detached(trainable(model).items()))


def _sum(
    kernel: Kernel, model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], limit: float, clipping: Clipping = FLAT
) -> NDArray[np.float64]:
    stack = describe(model, tuple(data[0].shape[1:]))
    assert stack is not None
    bounds = ClippingBounds.of(clipping, limit, stack.layout)
    return clipped_sum(kernel, stack, job_without_order(_task(model), LocalPlan(), *data), bounds)


RULES = {"flat": FLAT, "per-layer": Clipping(by_layer=True), "automatic": Clipping(stability=0.3)}


@pytest.mark.parametrize("count", [1, 37, 150])
@pytest.mark.parametrize("model", [PADDED, STRIDED, ROUTED, RESIDUAL, POOLED],
                         ids=["padded", "strided", "routed", "residual", "pooled"])  # fmt: skip
def test_the_clipped_sum_is_that_of_gradients_computed_from_one_record_alone(
    here: Kernel, model: nn.Module, count: int
) -> None:
    _agree(here, model, count, (2, 13, 15))


@pytest.mark.parametrize("rule", ["per-layer", "automatic"])
@pytest.mark.parametrize("model", [STRIDED, RESIDUAL, nn.Sequential(nn.Flatten(), nn.Linear(390, 10))],
                         ids=["strided", "residual", "linear"])  # fmt: skip
def test_clipping_by_layers_and_automatic_clipping_are_those_of_pytorch(
    here: Kernel, model: nn.Module, rule: str
) -> None:
    _agree(here, model, 37, (2, 13, 15), RULES[rule])
    names = list(trainable(model))
    norms = {layer: 1.0 + place for place, layer in enumerate(Clipping(by_layer=True).parts(names))}
    _agree(here, model, 9, (2, 13, 15), Clipping(by_layer=True, layer_norms=norms))


def test_with_one_layer_clipping_by_layers_has_the_bits_of_flat_clipping(here: Kernel) -> None:
    model, data = nn.Sequential(nn.Flatten(), nn.Linear(390, 10)), _records(3, 70, (2, 13, 15))
    assert np.array_equal(_sum(here, model, data, 0.5, RULES["per-layer"]), _sum(here, model, data, 0.5))
    stack = describe(STRIDED, (2, 13, 15))
    assert stack is not None
    job = job_without_order(_task(STRIDED), LocalPlan(), *data)
    with pytest.raises(ValueError, match="4 layers need one bound each"):
        clipped_sum(here, stack, job, ClippingBounds(1.0, of_layers=np.ones(3)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("niid-cnn", (1, 28, 28)), ("niid-cnn", (3, 32, 32)), ("dafl-cnn", (1, 8, 8)), ("mlp", (1, 8, 8)), ("2nn", (13,)),
     ("logistic", (1, 28, 28))],
)  # fmt: skip
def test_the_clipped_sum_of_our_models_is_that_of_pytorch(here: Kernel, name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    _agree(here, MODELS[name](shape, 10), 40, shape)


def _agree(kernel: Kernel, model: nn.Module, count: int, shape: tuple[int, ...], rule: Clipping = FLAT) -> None:
    errors = []
    for seed in range(3):
        data = _records(seed, count, shape)
        norms = [np.linalg.norm(_sum(kernel, model, (data[0][one : one + 1], data[1][one : one + 1]), math.inf))
                 for one in range(min(count, 9))]  # fmt: skip
        limit = float(np.median(norms))  # some gradients are clipped, others are not
        expected = by_records(model, trainable(model), 0.0, rule)(*data, limit)
        errors.append(np.linalg.norm(_sum(kernel, model, data, limit, rule) - expected) / np.linalg.norm(expected))
        if errors[-1] <= ROUNDING:
            break
    assert max(errors) <= ONE_BIT
    assert errors[-1] <= ROUNDING


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 40), st.lists(st.floats(width=32), min_size=6, max_size=6),
    st.floats(1e-3, 10), st.sampled_from([(6,), (1, 2, 3)]), st.sampled_from(sorted(RULES)),
)  # fmt: skip
def test_one_record_moves_the_sum_by_at_most_the_clipping_norm(
    kernel: Kernel, seed: int, count: int, row: list[float], limit: float, shape: tuple[int, ...], rule: str
) -> None:
    if not isinstance(kernel.library, ctypes.CDLL):
        pytest.skip("a kernel in an emulator cannot call Python")
    torch.manual_seed(seed)
    first = nn.Conv2d(1, 3, 2, padding=1) if len(shape) > 1 else nn.Linear(6, 36)
    model = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    inputs, labels = _records(seed, count, shape, 3)
    place = seed % count
    inputs[place] = torch.tensor(row).view(shape)
    nothing = inputs.clone()
    nothing[place] = math.nan  # its gradient is not finite, and so counts as zeros
    whole, without = (_sum(kernel, model, (some, labels), limit, RULES[rule]) for some in (inputs, nothing))
    assert np.linalg.norm(whole - without) <= limit * (1 + 1e-12)


@pytest.mark.parametrize("model", [PADDED, ROUTED, RESIDUAL, nn.Sequential(nn.Flatten(), nn.Linear(390, 10))])
def test_the_bits_of_a_records_gradient_do_not_depend_on_the_others_and_a_broken_record_counts_as_zeros(
    here: Kernel, model: nn.Module
) -> None:
    inputs, labels = _records(4, 150, (2, 13, 15))
    broken = torch.full_like(inputs, math.nan)
    broken[77] = inputs[77]
    alone = _sum(here, model, (inputs[77:78], labels[77:78]), 0.5)
    assert np.array_equal(_sum(here, model, (broken, labels), 0.5), alone)
    assert np.linalg.norm(alone) == pytest.approx(0.5)
    broken[77, 0, 0, 0] = math.inf
    for rule in RULES.values():
        assert not _sum(here, model, (broken, labels), 0.5, rule).any()


def test_a_short_gradient_is_kept(here: Kernel) -> None:
    data = _records(5, 1, (2, 13, 15))
    true = _sum(here, PADDED, data, math.inf)
    length = float(np.linalg.norm(true))
    assert np.array_equal(_sum(here, PADDED, data, 2 * length), true)
    assert np.linalg.norm(_sum(here, PADDED, data, length / 2)) == pytest.approx(length / 2)


def _both(
    kernel: Kernel, model: nn.Module, local: LocalSettings, plan: LocalPlan, data: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Params, Params]:
    """Return what PyTorch and the kernel made: parameters and momentum buffers."""
    stack, task = describe(model, tuple(data[0].shape[1:])), _task(model, local)
    assert stack is not None
    assert private_steps.is_compiled(stack, plan, local)
    expected, found = (
        train_privately(copy.deepcopy(model), task, plan, *data),
        train_compiled(kernel, stack, task, plan, data),
    )
    assert (found.num_steps, found.loss) == (expected.num_steps, None)
    assert found.momentum_buffers.keys() == expected.momentum_buffers.keys()
    return tuple({**one.params, **{f"buffer {name}": value for name, value in one.momentum_buffers.items()}}
                 for one in (expected, found))  # type: ignore[return-value] # fmt: skip


def _assert_close(found: Params, expected: Params, tolerance: float = 2e-5) -> None:
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=tolerance), name


@pytest.mark.parametrize(
    "local",
    [LOCAL, replace(LOCAL, batch_size=1, steps=40), replace(LOCAL, batch_size=200, steps=2),
     replace(LOCAL, momentum=0.9, weight_decay=0.01), replace(LOCAL, optimizer="adam", learning_rate=0.01),
     replace(LOCAL, optimizer="adamw", learning_rate=0.01, weight_decay=0.1)],
    ids=["plain", "batches without records", "everybody", "momentum", "adam", "adamw"],
)  # fmt: skip
def test_batches_noise_and_steps_are_those_of_pytorch(here: Kernel, local: LocalSettings) -> None:
    torch.manual_seed(2)
    model = MODELS["2nn"]((13,), 10)
    plan = LocalPlan(private=PrivateSteps(0.7, 1.3, NOISE, "model"))
    expected, found = _both(here, model, local, plan, _records(6, 140, (13,)))
    _assert_close(found, expected, 2e-3 if local.optimizer != "sgd" else 2e-5)  # Adam divides by numbers near zero


@pytest.mark.parametrize("rule", ["per-layer", "automatic"])
def test_steps_with_other_clipping_are_those_of_pytorch(here: Kernel, rule: str) -> None:
    torch.manual_seed(2)
    model = MODELS["2nn"]((13,), 10)
    plan = LocalPlan(private=PrivateSteps(0.7, 1.3, NOISE, "model", RULES[rule]))
    expected, found = _both(here, model, LOCAL, plan, _records(6, 140, (13,)))
    _assert_close(found, expected)


def test_what_a_plan_adds_acts_on_the_noisy_gradient_as_in_pytorch(here: Kernel) -> None:
    torch.manual_seed(2)
    like = {name: 0.1 * torch.randn_like(value) for name, value in trainable(PADDED).items()}
    plan = LocalPlan(
        private=PrivateSteps(0.7, 0.3, replace(NOISE, normals=CompiledNormals(here)), "own"), proximal_mu=0.3,
        gradient_offset=like, step_offset=like, gradient_scale=0.5, momentum_buffers=like,
    )  # fmt: skip
    _assert_close(*_both(here, PADDED, replace(LOCAL, momentum=0.5), plan, _records(7, 30, (2, 13, 15)))[::-1])


def test_without_noise_the_steps_are_those_of_pytorch(here: Kernel) -> None:
    plan = LocalPlan(private=PrivateSteps(0.7, 0.0, NOISE, "model"))
    _assert_close(*_both(here, STRIDED, LOCAL, plan, _records(8, 30, (2, 13, 15)))[::-1])


def test_every_number_of_the_noise_is_the_very_number_of_the_definition(here: Kernel) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4001, 150), nn.ReLU(), nn.Linear(150, 3))
    for weight in model.parameters():
        nn.init.zeros_(weight)
    data = torch.full((5, 4001), math.nan), torch.zeros(5, dtype=torch.int64)
    steps = PrivateSteps(2.0, 1.5, NOISE, "model")  # a learning rate and a divisor of powers of two round nothing
    local = LocalSettings(0.5, 0.0, 0.0, batch_size=4, epochs=0, steps=1)
    stack = describe(model, (4001,))
    assert stack is not None
    data = data[0][:4], data[1][:4]
    found = train_compiled(here, stack, _task(model, local), LocalPlan(private=steps), data)
    size = num_in(stack.layout)
    noise = NOISE.gaussian(size, 3.0, purpose="noise 0 of model", server_round=3) * 2.0**-19
    flat = torch.cat([value.flatten() for value in found.params.values()])
    assert np.array_equal(flat.numpy(), -0.5 * (noise / 4).astype(np.float32))


def _draws(**changes: object) -> PrivateDraws:
    keys = np.zeros((1, 32), np.uint8)
    draws = PrivateDraws(keys, keys, 0, ClippingBounds(1.0), 2.0**20, 2.0**-20, 1.0, lambda step, place: 1 / 0)
    return replace(draws, **changes)  # type: ignore[arg-type]


def test_an_error_in_an_undecided_number_of_the_noise_is_raised_and_wrong_keys_and_labels_are_refused(
    here: Kernel,
) -> None:
    model = nn.Sequential(nn.Linear(3000, 300))
    stack, task = describe(model, (3000,)), _task(model, replace(LOCAL, steps=1))
    assert stack is not None
    job = job_without_order(task, LocalPlan(), torch.zeros(2, 3000), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ZeroDivisionError):  # about seven of 900,000 numbers are undecided
        train(here, stack, job, _draws())
    for keys in (np.zeros((2, 32), np.uint8), np.zeros((1, 32), np.int8), np.zeros((1, 64), np.uint8)[:, ::2]):
        with pytest.raises(ValueError, match="one key of 32 bytes"):
            train(here, stack, job, _draws(noise_keys=keys))
    with pytest.raises(IndexError, match="a label is outside"):
        train(here, stack, job._replace(labels=torch.full((2,), 300)), _draws())
    with pytest.raises(IndexError, match="a label is outside"):
        clipped_sum(here, stack, job._replace(labels=torch.full((2,), -1)), ClippingBounds(1.0))


class _Other(Noise):
    """Noise of another class, whose numbers the compiled trainer does not know."""


@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_compiled_trainer_takes_the_steps_that_it_supports_and_pytorch_all_others(
    here: Kernel, *, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(private_steps, "train_compiled", lambda *given: taken.append("kernel") or "trained")
    monkeypatch.setattr(private_steps, "train_privately", lambda *given: taken.append("pytorch"))
    steps, names = PrivateSteps(1.0, 1.0, NOISE, "model"), frozenset({"1.weight"})
    plain, count = nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), 8
    normed = nn.Sequential(nn.Conv2d(1, 2, 1), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(12, 3))
    left_out = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    plan = LocalPlan(private=steps)
    cases = [(plain, LOCAL, plan, count)] if by_kernel else [
        (normed, LOCAL, plan, count), (left_out, LOCAL, plan, count), (plain, LOCAL, plan, 0),
        (plain, replace(LOCAL, clip_norm=1.0), plan, count), (plain, replace(LOCAL, label_smoothing=0.1), plan, count),
        (plain, LOCAL, replace(plan, trained=names), count),
        (plain, LOCAL, LocalPlan(private=replace(steps, noise=_Other(bytes(32), simulation_only=True))), count),
    ]  # fmt: skip
    for model, local, asked, number in cases:
        records = Records.of(*_records(9, number, (1, 2, 3), 3))
        job = LocalJob(_task(model, local), asked, records, np.random.default_rng(0))
        Trainer(model, here).train(job)
        Trainer(model, None).train(job)
        assert taken[-2:] == ["kernel" if by_kernel else "pytorch", "pytorch"]
    stack = describe(normed, (1, 2, 3))
    assert stack is not None
    assert not is_supported(stack)
