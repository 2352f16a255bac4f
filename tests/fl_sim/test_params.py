"""Named tensors: arithmetic, and the guard against writes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fl_sim import params
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.params import WriteGuard, flattened
from fl_sim.simulation.run import run
from fl_sim.testing import BrokenLaw, check
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, Payloads, ServerState, Trained
from strategies.algorithm import Averaging

LEFT = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
RIGHT = {"b": torch.tensor(-1.0), "a": torch.tensor([10.0, 20.0])}


def _lists(values):
    return {name: value.tolist() for name, value in values.items()}


def test_sums_differences_and_multiples_go_by_name():
    assert _lists(params.add(LEFT, RIGHT)) == {"a": [11.0, 22.0], "b": 2.0}
    assert _lists(params.add(LEFT, RIGHT, 0.5)) == {"a": [6.0, 12.0], "b": 2.5}
    assert _lists(params.subtract(LEFT, RIGHT)) == {"a": [-9.0, -18.0], "b": 4.0}
    assert _lists(params.scale(LEFT, -2.0)) == {"a": [-2.0, -4.0], "b": -6.0}
    assert _lists(params.zeros_like(LEFT)) == {"a": [0.0, 0.0], "b": 0.0}
    assert params.num_parameters(LEFT) == 3
    assert _lists(LEFT) == {"a": [1.0, 2.0], "b": 3.0}


def test_the_weights_of_a_copied_recurrent_model_are_joined_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep copy undoes this, and cuDNN would repeat it in every step, with a warning."""
    joined: list[torch.nn.Module] = []

    def join(part: torch.nn.Module) -> None:
        joined.append(part)

    monkeypatch.setattr(torch.nn.LSTM, "flatten_parameters", join)
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.LSTM(2, 4))
    joined.clear()
    made = params.copied(model)
    assert joined == [made[1]]
    assert made[1] is not model[1]


def test_one_bad_number_anywhere_is_not_finite_and_large_ones_are():
    large = torch.full((1000,), 3e38)
    assert params.is_finite({"a": {"w": large, "empty": torch.zeros(0)}, "b": {"v": -large}})
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled = large.clone()
        spoiled[500] = bad
        assert not params.is_finite({"a": {"w": large}, "b": {"v": spoiled}})
    assert not params.is_finite({"a": {"w": torch.tensor([float("inf"), -float("inf")])}})


def test_the_shape_of_the_last_layer_comes_from_its_name_or_its_place():
    named = {"body.weight": torch.zeros(2, 5), "last.weight": torch.zeros(3, 2), "last.bias": torch.zeros(3)}
    assert params.head_shape(named) == (3, 2)
    assert params.head_shape({"head.weight": torch.zeros(7, 4), **named}) == (7, 4)


def test_detached_copies_leave_the_graph_and_the_original():
    weight = torch.ones(2, requires_grad=True)
    copy = params.detached([("w", weight)])["w"]
    copy += 1
    assert not copy.requires_grad
    assert weight.tolist() == [1.0, 1.0]


NAMED = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0), "none": torch.zeros(0, 2)}


def test_a_vector_has_the_names_shapes_and_numbers_of_its_tensors():
    flat = params.flattened(NAMED)
    assert flat.flat.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert list(flat) == list(NAMED) == [name for name, _ in flat.items()]
    assert len(flat) == len(flat.values()) == 3
    assert all(torch.equal(flat[name], value) for name, value in NAMED.items())
    assert flat["a.weight"].data_ptr() == flat.flat.data_ptr()  # a view
    assert params.flattened(flat) is flat
    assert params.layout_of(flat) == params.layout_of(NAMED)
    assert params.num_parameters(flat) == params.num_parameters(NAMED) == 7
    assert len(params.flattened({})) == 0


def test_flattening_leaves_the_graph_and_the_original():
    weight = torch.ones(2, requires_grad=True)
    flat = params.flattened({"w": weight})
    flat.flat.add_(1)
    assert not flat.flat.requires_grad
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("flat", [(True, True), (True, False), (False, True)])
def test_vectors_add_up_to_the_same_bits_as_tensors_do(flat):
    generator = torch.Generator().manual_seed(0)
    plain = [{"w": torch.randn(37, 3, generator=generator), "b": torch.randn(5, generator=generator)} for _ in range(2)]
    left, right = (params.flattened(item) if chosen else item for item, chosen in zip(plain, flat, strict=True))
    for operation in (params.add, params.subtract, lambda x, y: params.add(x, y, 0.3)):
        got, expected = operation(left, right), operation(*plain)
        assert isinstance(got, params.FlatParams)
        assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kept", [dict, params.flattened])
def test_mixtures_and_inner_products_go_by_name(kept):
    left, right = kept(LEFT), kept(RIGHT)
    assert _lists(params.mixture(left, right, 0.5)) == {"a": [5.5, 11.0], "b": 1.0}
    assert _lists(params.mixture(left, right, 1.0)) == _lists(LEFT)
    assert _lists(params.mixture(left, right, 0.0)) == _lists(RIGHT)
    assert params.inner_product(left, right) == 1 * 10 + 2 * 20 - 3


def test_other_orders_of_names_go_by_name():
    left, right = params.flattened(LEFT), params.flattened(RIGHT)
    assert (
        _lists(params.subtract(left, right)) == _lists(params.subtract(left, RIGHT)) == {"a": [-9.0, -18.0], "b": 4.0}
    )
    assert params.vector_in(right, params.layout_of(LEFT)).tolist() == [10.0, 20.0, -1.0]


def test_multiples_and_zeros_of_vectors_are_vectors():
    flat = params.flattened(LEFT)
    assert _lists(params.scale(flat, -2.0)) == {"a": [-2.0, -4.0], "b": -6.0}
    assert _lists(params.zeros_like(flat)) == {"a": [0.0, 0.0], "b": 0.0}
    assert not params.is_finite({"delta": params.flattened({"w": torch.tensor([1.0, float("nan")])})})
    assert params.is_finite({"delta": flat})


HERE = Path(__file__)


def tensors() -> Params:
    return {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}


WRITES: dict[str, tuple[Callable[[Params], Any], bool]] = {
    "copy_": (lambda params: params["w"].copy_(torch.zeros(2, 3)), True),
    "of the same numbers": (lambda params: params["w"].mul_(1.0), True),
    "a slice": (lambda params: params["w"][1].add_(1), True),
    "an item": (lambda params: params["b"].__setitem__(2, 5.0), True),
    "detached": (lambda params: params["b"].detach().zero_(), True),
    "a view": (lambda params: params["w"].view(-1)[:1].fill_(7), True),
    "by numpy": (lambda params: params["w"].numpy().__setitem__((0, 0), 5.0), False),
    "by data": (lambda params: params["b"].data.mul_(3), False),
}  # fmt: skip
"""How a tensor may be written to, and whether PyTorch counts it."""


@pytest.mark.parametrize("form", [tensors, lambda: flattened(tensors())], ids=["each by itself", "one vector"])
@pytest.mark.parametrize("how", WRITES)
def test_every_way_to_write_is_found(how: str, form: Callable[[], Params]) -> None:
    params = form()
    write, is_counted = WRITES[how]
    write_guard = WriteGuard.of({"the global model": params})
    write_guard.check(write)
    write_guard.check_bits(write)
    write(params)
    if is_counted:
        with pytest.raises(RunError, match=r"wrote into the global model, which must only be read.*clone"):
            write_guard.check(write)
    if how != "of the same numbers":
        with pytest.raises(RunError, match=rf"<lambda> \({HERE}:\d+\) wrote into the global model"):
            write_guard.check_bits(write)


def test_reading_is_no_writing() -> None:
    params = {**flattened(tensors()), "empty": torch.empty_strided((0,), (0,))}
    write_guard = WriteGuard.of({"the global model": params})
    _ = [params["w"] + 1, params["w"].clone().zero_(), params["w"].numpy().sum(), {**params}, params["b"].tolist()]
    write_guard.check(tensors)
    write_guard.check_bits(tensors)


def test_whoever_runs_after_the_one_who_wrote_is_not_to_blame() -> None:
    params = tensors()
    write_guard = WriteGuard.of({"it": params})
    params["w"].add_(1)
    for method in (Leak.plan, Finishing.finish):
        with pytest.raises(RunError, match=r"^Leak\.plan \("):
            write_guard.check(method)
    with pytest.raises(RunError, match=r"^Leak\.plan \("):
        write_guard.check_bits(Finishing.finish)


def test_bits_are_looked_at_to_the_last_byte() -> None:
    for size in range(1, 18):
        for place in range(size):
            params = {"w": torch.zeros(size)}
            write_guard = WriteGuard.of({"it": params})
            params["w"].numpy()[place] = 1e-30
            with pytest.raises(RunError):
                write_guard.check_bits(tensors)


class Quiet(Averaging):
    """FedAvg whose clients keep their last layers."""

    title: ClassVar[str] = "Quiet"

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        head = list(trained.params)[-2:]
        return replace(super().finish(task, trained), state={"head": {name: trained.params[name] for name in head}})


class Leak(Quiet):
    """A careless personal head: ``plan`` writes into the received model."""

    def plan(self, task: LocalTask) -> LocalPlan:
        for name, value in task.state.get("head", {}).items():
            task.params[name].copy_(value)
        return LocalPlan()


class LeakByNumpy(Quiet):
    """The same in a way that PyTorch does not see."""

    def plan(self, task: LocalTask) -> LocalPlan:
        for name, value in task.state.get("head", {}).items():
            task.params[name].numpy()[:] = value.numpy()
        return LocalPlan()


class Finishing(Quiet):
    """``finish`` scales the received model."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        update = super().finish(task, trained)
        for value in task.params.values():
            value.mul_(0.5)
        return update


class Keeping(Quiet):
    """``plan`` writes into what the client keeps."""

    def plan(self, task: LocalTask) -> LocalPlan:
        for value in task.state.get("head", {}).values():
            value.zero_()
        return LocalPlan()


class KeepingByNumpy(Quiet):
    """The same in a way that PyTorch does not see."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        for value in task.state.get("head", {}).values():
            value.numpy()[:] = 0
        return super().finish(task, trained)


class Pooling(Quiet):
    """``plan`` writes into what all clients shared, in a way that PyTorch does not see."""

    def share(self, inputs: torch.Tensor, labels: torch.Tensor, num_classes: int, generator: Any) -> dict[str, Any]:
        return {"means": inputs.flatten(1)[:3]}

    def plan(self, task: LocalTask) -> LocalPlan:
        if task.pool:
            task.pool["means"].numpy()[:] += 1
        return LocalPlan()


class Broadcasting(Quiet):
    """``plan`` writes into what the server sends beside the model."""

    def init(self, params: Params) -> ServerState:
        return ServerState(params, {"momentum": {name: torch.zeros_like(value) for name, value in params.items()}})

    def plan(self, task: LocalTask) -> LocalPlan:
        for value in task.broadcast["momentum"].values():
            value.add_(1.0)
        return LocalPlan()

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        return replace(super().merge(server, aggregate), broadcast=server.broadcast)


def _shrinking(batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        for value in batch.anchor.values():
            value.mul_(0.9)
    return torch.zeros(())


class Losing(Quiet):
    """A loss term writes into the received model."""

    def plan(self, task: LocalTask) -> LocalPlan:
        return LocalPlan(loss_term=LossTerm(_shrinking))


class Merging(Quiet):
    """``merge`` writes into the state that it was given."""

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        for name, value in aggregate.payloads["delta"].items():
            server.params[name].add_(value)
        return ServerState(server.params)


LEAKS = {
    Leak: "Leak.plan", LeakByNumpy: "LeakByNumpy.plan", Finishing: "Finishing.finish", Keeping: "Keeping.plan",
    KeepingByNumpy: "KeepingByNumpy.finish", Pooling: "Pooling.plan",
    Broadcasting: "Broadcasting.plan", Losing: "_shrinking", Merging: "Merging.merge",
}  # fmt: skip


@pytest.mark.parametrize("algorithm", LEAKS, ids=lambda algorithm: algorithm.__name__)
def test_a_run_ends_where_an_algorithm_writes_to_what_it_was_handed(algorithm: type[Averaging], tmp_path: Path) -> None:
    """With the method, its file and its line; at 04f3935 the server's model was another's for the rest of the round."""
    settings: Payloads | dict[str, Any] = {
        "algorithm": algorithm(), "model": "logistic", "partition": "label-2", "clients": 4, "rounds": 3,
        "engine": {"kind": "inprocess", "workers": 1},
    }  # fmt: skip
    with pytest.raises(RunError, match=rf"{LEAKS[algorithm]} \({HERE}:\d+\).* wrote into ") as caught:
        run(experiment_from(settings), tmp_path / "run")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("aggregator", [{"kind": "global-dp", "noise_multiplier": 1.0, "noise": "seeded"}])
@pytest.mark.parametrize("algorithm", [Leak, LeakByNumpy])
def test_under_privacy_the_run_ends_too_and_no_client_counts_as_zeros(
    algorithm: type[Averaging], aggregator: dict[str, Any], tmp_path: Path
) -> None:
    experiment = experiment_from(
        {"algorithm": algorithm(), "model": "logistic", "clients": 4, "rounds": 3, "aggregator": aggregator,
         "sampler": "full", "engine": "inprocess"}
    )  # fmt: skip
    with pytest.raises(RunError, match=rf"{algorithm.__name__}.plan .*wrote into the global model"):
        run(experiment, tmp_path / "run")


@pytest.mark.cluster
def test_a_run_on_ray_ends_too(tmp_path: Path) -> None:
    """There the model is a worker's own copy, and the next client on it would have started from another's."""
    experiment = experiment_from(
        {"algorithm": Leak(), "model": "logistic", "partition": "label-2", "clients": 4, "rounds": 3, "engine": "ray:1"}
    )
    with pytest.raises(RunError, match=rf"client \d in round 2 failed.*Leak.plan \({HERE}:\d+\) wrote into the global"):
        run(experiment, tmp_path / "run")


@pytest.mark.parametrize("algorithm", LEAKS, ids=lambda algorithm: algorithm.__name__)
def test_the_check_of_algorithms_finds_it(algorithm: type[Averaging]) -> None:
    with pytest.raises(BrokenLaw, match=rf"{LEAKS[algorithm]} \({HERE}:\d+\).* wrote into "):
        check(algorithm())


def test_an_algorithm_that_makes_new_tensors_passes() -> None:
    check(Quiet())
