"""DP-SGD in PyTorch: what one record moves, the noise, the steps without noise, layers without a per-record rule."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2
from torch import nn

from fl_sim import models
from fl_sim.clipping import FLAT, Clipping
from fl_sim.errors import UserError
from fl_sim.local_plan import LocalPlan, PrivateSteps
from fl_sim.params import detached, trainable
from fl_sim.privacy.mechanisms import Noise
from fl_sim.training.per_record import ClippedSum, by_layers, by_records, clipped_sum_of
from fl_sim.training.private_steps import sampling_rate, train_privately
from fl_sim.types import LocalSettings, LocalTask, Params

WAYS: dict[str, Callable[..., ClippedSum]] = {"layers": by_layers, "records": by_records}
RULES = {
    "flat": FLAT, "per-layer": Clipping(by_layer=True), "automatic": Clipping(stability=0.01),
    "layer norms": Clipping(by_layer=True, layer_norms={"0": 3.0, "2": 4.0}),
}  # fmt: skip
ONE_STEP = LocalSettings(learning_rate=0.1, momentum=0.0, weight_decay=0.0, batch_size=8, epochs=0, steps=1)


def _records(
    seed: int, count: int, shape: tuple[int, ...] = (6,), classes: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=draw), torch.randint(0, classes, (count,), generator=draw)


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@dataclass(frozen=True)
class _Silent(Noise):
    """Noise of zeros: what is left is the sum, rounded to the grid. ``everybody``: all records join each batch."""

    everybody: bool = True

    def gaussian(self, count: int, std: float, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        return np.zeros(count)

    def taking_part(self, count: int, sampling_rate: float, *, purpose: str, server_round: int) -> NDArray[np.bool_]:
        if self.everybody:
            return np.ones(count, np.bool_)
        return super().taking_part(count, sampling_rate, purpose=purpose, server_round=server_round)


def _task(model: nn.Module, local: LocalSettings = ONE_STEP) -> LocalTask:
    return LocalTask(1, 0, 1, 1, local, detached(trainable(model).items()))


def _trained(
    model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], steps: PrivateSteps, local: LocalSettings = ONE_STEP
) -> Params:
    return train_privately(copy.deepcopy(model), _task(model, local), LocalPlan(private=steps), *data).params


def _moved(before: Params, after: Params, scale: float) -> NDArray[np.float64]:
    """Return the change of all parameters, divided by ``scale``, as a vector."""
    return np.concatenate([((after[name] - before[name]).double() / scale).flatten().numpy() for name in before])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.lists(st.floats(width=32), min_size=6, max_size=6),
    st.floats(1e-3, 10),
    st.sampled_from(sorted(WAYS)),
    st.sampled_from(sorted(RULES)),
)
def test_one_record_moves_the_sum_by_at_most_the_clipping_norm(
    seed: int, count: int, row: list[float], limit: float, way: str, rule: str
) -> None:
    model = _net(seed)
    inputs, labels = _records(seed, count)
    place = seed % count
    inputs[place] = torch.tensor(row)
    clipped_sum = WAYS[way](model, trainable(model), 0.0, RULES[rule])
    whole = clipped_sum(inputs, labels, limit)
    nothing = inputs.clone()
    nothing[place] = math.nan  # its gradient is not finite, and so counts as zeros: a record that is not there
    without = clipped_sum(nothing, labels, limit)
    assert np.linalg.norm(whole - without) <= limit * (1 + 1e-12)
    others = torch.arange(count) != place
    again = clipped_sum(inputs[others], labels[others], limit)
    assert np.allclose(without, again, rtol=1e-5, atol=1e-6 * limit)


def _true_sum(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, clip: Callable[[list[torch.Tensor]], float]
) -> NDArray[np.float64]:
    """Return the sum of gradients that are computed record by record; ``clip``: {gradients of a part} -> its factor."""
    total = dict[str, torch.Tensor]()
    for record, label in zip(inputs, labels, strict=True):
        loss = nn.functional.cross_entropy(model(record[None]), label[None])
        names = dict(model.named_parameters())
        each = dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))
        for name in names:
            layer = [value.double() for other, value in each.items() if other[0] == name[0]]
            total[name] = total.get(name, 0) + each[name].double() * clip(layer)
    return torch.cat([value.flatten() for value in total.values()]).numpy()


def _norm(parts: list[torch.Tensor]) -> float:
    return math.hypot(*(float(part.norm()) for part in parts))


@pytest.mark.parametrize("way", WAYS)
def test_each_layer_is_clipped_to_its_own_norm(way: str) -> None:
    model, data = _net(), _records(2, 7)
    found = WAYS[way](model, trainable(model), 0.0, Clipping(by_layer=True))(*data, 0.6)
    true = _true_sum(model, *data, lambda layer: min(1.0, 0.6 / math.sqrt(2) / _norm(layer)))
    assert np.allclose(found, true, rtol=1e-4, atol=1e-6)
    whole = WAYS[way](model, trainable(model), 0.0, Clipping(by_layer=True))(*data, math.inf)
    assert np.allclose(whole, _true_sum(model, *data, lambda layer: 1.0), rtol=1e-4, atol=1e-6)
    [first, second] = [
        WAYS[way](model, trainable(model), 0.0, RULES["layer norms"])(data[0][:1], data[1][:1], 1e-3)[part]
        for part in (slice(35), slice(35, None))
    ]
    assert np.linalg.norm(first) == pytest.approx(1e-3 * 3 / 5)
    assert np.linalg.norm(second) == pytest.approx(1e-3 * 4 / 5)


@pytest.mark.parametrize("way", WAYS)
def test_with_one_layer_clipping_by_layers_has_the_bits_of_flat_clipping(way: str) -> None:
    torch.manual_seed(3)
    model, data = nn.Sequential(nn.Linear(6, 3)), _records(3, 9)
    flat = WAYS[way](model, trainable(model), 0.0)(*data, 0.5)
    for rule in (Clipping(by_layer=True), Clipping(by_layer=True, layer_norms={"0": 0.3})):
        assert np.array_equal(WAYS[way](model, trainable(model), 0.0, rule)(*data, 0.5), flat)
    steps = PrivateSteps(0.3, 1.1, Noise(bytes(32), simulation_only=True), "model")
    by_layer = replace(steps, clipping_norm=9.0, clipping=Clipping(by_layer=True, layer_norms={"0": 0.3}))
    one, other = _trained(model, data, steps), _trained(model, data, by_layer)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", WAYS)
def test_automatic_clipping_normalises_gradients_as_the_stability_falls(way: str) -> None:
    model, (inputs, labels) = _net(), _records(4, 1)
    true = WAYS[way](model, trainable(model), 0.0)(inputs, labels, math.inf)
    length = float(np.linalg.norm(true))
    for stability in (1e-12, 0.01, 10.0):
        found = WAYS[way](model, trainable(model), 0.0, Clipping(stability=stability))(inputs, labels, 2.0)
        assert np.allclose(found, 2 * true / (length + stability), rtol=1e-9)
        assert np.linalg.norm(found) < 2.0
    assert np.linalg.norm(WAYS[way](model, trainable(model), 0.0, Clipping(stability=1e-12))(inputs, labels, 2.0)) == (
        pytest.approx(2.0)
    )
    nothing = torch.full_like(inputs, math.nan)
    assert not WAYS[way](model, trainable(model), 0.0, Clipping(stability=0.01))(nothing, labels, 2.0).any()


def test_a_record_with_one_broken_layer_counts_as_zeros_in_all_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3))
    inputs, labels = torch.full((1, 6), math.inf), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        trainable(model)["0.weight"].fill_(1.0)  # sigmoid(infinity) is 1: the second layer has a finite gradient
    for way in WAYS.values():
        for rule in RULES.values():
            assert np.array_equal(way(model, trainable(model), 0.0, rule)(inputs, labels, 1.0), np.zeros(53))


@pytest.mark.parametrize("way", WAYS)
def test_a_long_gradient_is_cut_to_the_clipping_norm_and_a_short_one_is_kept(way: str) -> None:
    model = _net()
    inputs, labels = _records(1, 1)
    clipped_sum = WAYS[way](model, trainable(model), 0.0)
    true = clipped_sum(inputs, labels, math.inf)
    length = float(np.linalg.norm(true))
    assert np.linalg.norm(clipped_sum(inputs, labels, length / 2)) == pytest.approx(length / 2)
    assert np.array_equal(clipped_sum(inputs, labels, length * 2), true)


def _tied() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Linear(6, 3))


def _frozen_body() -> nn.Module:
    body = nn.Linear(6, 5).requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Flatten(), body, nn.ReLU(), nn.Linear(5, 3))


def _called_twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Linear(6, 3))


@pytest.mark.parametrize(
    "made",
    [
        _tied, _frozen_body, _called_twice,
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.Linear(8, 3)),  # a linear layer on rows of images
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten(), nn.Linear(12, 3)),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, 2, 2, 2, bias=False), nn.GroupNorm(1, 2, affine=False), nn.Flatten(),
                              nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1, groups=2), nn.Flatten(), nn.Linear(12, 3)),
    ],
)  # fmt: skip
def test_models_of_ones_own_have_the_sum_of_gradients_that_are_computed_record_by_record(
    made: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(1)
    model = made()
    inputs, labels = _records(8, 5, (1, 2, 3))
    trained = trainable(model)
    clipped_sum = clipped_sum_of(model, trained, 0.0)
    found = [clipped_sum(inputs, labels, 0.4) for _ in range(2)]
    each = []
    for record, label in zip(inputs, labels, strict=True):
        loss = nn.functional.cross_entropy(model(record[None]), label[None])
        flat = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(trained.values()))]).double()
        each.append(flat * min(1.0, 0.4 / float(flat.norm())))
    for sums in found:
        assert np.allclose(sums, torch.stack(each).sum(dim=0).numpy(), rtol=1e-4, atol=1e-6)


def test_without_noise_and_clipping_a_step_is_that_of_sgd_on_the_drawn_records() -> None:
    model, (inputs, labels) = _net(), _records(3, 40)
    noise = _Silent(bytes(32), simulation_only=True, everybody=False)
    local = replace(ONE_STEP, momentum=0.9, weight_decay=0.01, steps=3)
    task = _task(model, local)
    offset = {name: torch.full_like(value, 0.1) for name, value in task.params.items()}
    plan = LocalPlan(private=PrivateSteps(1e6, 1e-3, noise, "model"), proximal_mu=0.3, gradient_offset=offset)
    ours = train_privately(model, task, plan, inputs, labels)
    rate = sampling_rate(local, len(labels))
    assert rate == 8 / 40
    weights = {name: value.clone().requires_grad_() for name, value in task.params.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(3):
        joins = noise.taking_part(40, rate, purpose=f"batch {step} of model", server_round=1)
        logits = torch.func.functional_call(model, weights, (inputs[joins],))
        loss = nn.functional.cross_entropy(logits, labels[joins], reduction="sum") / (rate * 40)
        optimizer.zero_grad()
        loss.backward()
        for name, weight in weights.items():
            assert weight.grad is not None
            weight.grad += offset[name] + 0.3 * (weight.detach() - task.params[name])
        optimizer.step()
    for name, weight in weights.items():
        assert torch.allclose(
            ours.params[name], weight, rtol=1e-3, atol=2e-4
        )  # the grid of the noise is 1e-3 * 1e6 wide
    assert (ours.num_steps, ours.loss) == (3, None)


@pytest.mark.parametrize("rule", RULES)
def test_the_noise_of_a_step_has_the_stated_deviation_and_differs_between_steps_streams_and_keys(rule: str) -> None:
    model = _net()
    data = _records(4, 16)
    full, noises = replace(ONE_STEP, batch_size=16), []
    clipping = Clipping(by_layer=True, layer_norms={"0": 1.2, "2": 1.6}) if rule == "layer norms" else RULES[rule]
    for key, stream in ((b"a", "model"), (b"b", "model"), (b"a", "own")):
        steps = PrivateSteps(2.0, 1.5, Noise(key * 32, simulation_only=True), stream, clipping)
        silent = replace(steps, noise=_Silent(key * 32, simulation_only=True))
        without, with_noise = _trained(model, data, silent, full), _trained(model, data, steps, full)
        noises.append(_moved(without, with_noise, 0.1 / 16))  # the learning rate over the size of the batch
    for one in noises:  # the deviation is noise_multiplier times clipping_norm
        low, high = chi2.ppf([1e-4, 1 - 1e-4], len(one))
        assert low < (one**2).sum() / 3.0**2 < high
    for first in range(3):
        for second in range(first):
            assert abs(np.corrcoef(noises[first], noises[second])[0, 1]) < 0.6


def test_each_step_has_noise_of_its_own() -> None:
    model, data = _net(), _records(4, 16)
    task = _task(model)
    noise = Noise(bytes(32), simulation_only=True)
    after = [
        _trained(model, data, PrivateSteps(1e-3, 1e3, noise, "model"), replace(ONE_STEP, batch_size=16, steps=steps))
        for steps in (1, 2)
    ]
    first = _moved(task.params, after[0], 0.1 / 16)
    second = _moved(after[0], after[1], 0.1 / 16)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.6


def test_a_batch_without_records_takes_a_step_of_noise_alone() -> None:
    model = _net()
    nobody = (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    for way in WAYS.values():
        assert np.array_equal(way(model, trainable(model), 0.0)(*nobody, 1.0), np.zeros(53))
    data = _records(5, 1000)
    local = replace(ONE_STEP, batch_size=1, steps=20)  # about a third of these batches is empty
    steps = PrivateSteps(1.0, 1.0, Noise(bytes(32), simulation_only=True), "model")
    assert train_privately(model, _task(model, local), LocalPlan(private=steps), *data).num_steps == 20


def test_a_layer_without_a_rule_for_many_records_is_computed_record_by_record() -> None:
    torch.manual_seed(0)
    model = models.build("gru", (12,), 5, 0, vocabulary=9)
    inputs = torch.randint(1, 9, (4, 12), generator=torch.Generator().manual_seed(1)).float()
    labels = torch.tensor([0, 1, 2, 3])
    found = clipped_sum_of(model, trainable(model), 0.0)(inputs, labels, math.inf)
    loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
    true = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])
    assert np.allclose(found, true.double().numpy(), rtol=1e-3, atol=1e-5)


def test_the_noise_is_that_of_the_layers_that_a_phase_trains() -> None:
    rule = RULES["layer norms"]
    assert rule.norm(7.0, ["0.weight", "0.bias", "2.weight"]) == 5.0
    assert rule.norm(7.0, ["2.weight"]) == 4.0
    assert [rule.shares(["2.weight"]), FLAT.shares(["a", "b"])] == [[1.0], [1.0]]
    assert Clipping(by_layer=True).shares(["0.weight", "0.bias", "2.weight", "4.bias"]) == [1 / math.sqrt(3)] * 3
    with pytest.raises(ValueError, match="do not follow each other"):
        Clipping(by_layer=True).parts(["0.weight", "2.weight", "0.bias"])
    for clipping in RULES.values():
        assert math.hypot(*clipping.shares(["0.weight", "0.bias", "2.weight"])) == pytest.approx(1.0)


def test_frozen_parameters_are_neither_moved_nor_counted() -> None:
    model = _net()
    steps = PrivateSteps(1.0, 1.0, Noise(bytes(32), simulation_only=True), "model")
    plan = LocalPlan(private=steps, trained=frozenset({"2.weight", "2.bias"}))
    task = _task(model)
    after = train_privately(model, task, plan, *_records(6, 20)).params
    assert torch.equal(after["0.weight"], task.params["0.weight"])
    assert not torch.equal(after["2.weight"], task.params["2.weight"])


def test_terms_that_join_records_and_noise_that_hides_nothing_are_refused() -> None:
    model = _net()
    steps = PrivateSteps(1.0, 1.0, Noise(bytes(32), simulation_only=True), "model")
    with pytest.raises(UserError, match=r"do not support logit_shift"):
        train_privately(model, _task(model), LocalPlan(private=steps, logit_shift=torch.zeros(3)), *_records(7, 4))
    with pytest.raises(UserError, match=r"hides nothing"):
        _trained(model, _records(7, 4), replace(steps, noise_multiplier=1e-9))
