"""A layer of the user's own: its answers are checked, its errors are told with their place, its state comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from clients.client_layer import ClientLayer, OwnClientLayer
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.types import Aggregate, ClientUpdate, Cohort, LocalTask, Payloads, Reply, ServerState, Traffic, Trained
from strategies.aggregators import WeightedMean
from strategies.algorithm import Algorithm
from strategies.fedavg import FedAvg
from strategies.layer import Ask, Drawn, Layer, layer_kinds
from strategies.own_layer import OwnLayer
from strategies.samplers import Coins

QUICK = {"model": "logistic", "clients": 4, "rounds": 3, "partition": "iid", "engine": "inprocess"}


class Faulty(Layer):
    """Does one thing wrong."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Layer:
        return cls(experiment.aggregator.fault)

    def begin(self, server_round: int) -> None:
        if self._fault == "raises":
            raise ZeroDivisionError("no way on")
        self.inner.begin(server_round)

    def consult(self, server_round: int, ask: Ask) -> Traffic:
        sent: Any = self.inner.consult(server_round, ask)
        return sent.down if self._fault == "bytes" else sent

    def cohort(self, server_round: int, coins: Coins | None = None) -> Drawn:
        drawn = self.inner.cohort(server_round, coins)
        clients: Any = {"a stranger": [0, 4], "one twice": [1, 1], "below": [-1, 0], "backwards": [2, 1],
                        "shares": [0.5, 1.5]}.get(self._fault)  # fmt: skip
        made: Any = clients if self._fault == "a list" else drawn
        return made if clients is None else Drawn(np.array(clients))

    def sent_to(self, client: int, server: ServerState) -> ServerState:
        made: Any = {"nothing": None, "half a model": replace(server, params={})}.get(self._fault, server)
        return made

    def received(self, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        first, *others = self.inner.received(replies)
        if self._fault == "another shape":
            first = replace(first, payloads={"delta": {"w": torch.zeros(2)}})
        if self._fault == "a made-up client":
            first = replace(first, client=9)
        if self._fault == "another order":
            return (*others, first)
        return (first, *others)

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        mean = self.inner.aggregate(cohort, algorithm, server)
        assert mean is not None
        if self._fault == "a smaller mean":
            return replace(mean, payloads={"delta": {}})
        made: Any = 0.5 if self._fault == "a number" else mean
        return made

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        merged = self.inner.merge(algorithm, server, aggregate)
        return replace(merged, params={}) if self._fault == "no model" else merged

    def metrics(self) -> Mapping[str, Any]:
        return {**self.inner.metrics(), **({"seconds": 1.0} if self._fault == "a strange metric" else {})}

    def state(self) -> Mapping[str, Any]:
        made: Any = {"tensor": {"t": torch.zeros(1)}, "nan": {"n": float("nan")}, "keys": {1: 2}}
        return dict(made.get(self._fault, {}))


class FaultyMean(WeightedMean):
    """The mean, with a faulty layer around it."""

    layer: ClassVar[str] = f"{__name__}:Faulty"
    fault: str = "none"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raises", r"begin of Faulty failed with ZeroDivisionError: no way on \(.*test_own_layer.py:\d+, in begin\)"),
        ("bytes", "consult of layer Faulty returned 0: return a Traffic"),
        ("a stranger", "cohort of layer Faulty returned .* numbers from 0 to 3"),
        ("one twice", "cohort of layer Faulty returned"),
        ("below", "cohort of layer Faulty returned"),
        ("backwards", "cohort of layer Faulty returned"),
        ("shares", "cohort of layer Faulty returned"),
        ("nothing", "sent_to of layer Faulty returned None: return a ServerState whose params and broadcast are"),
        ("half a model", "sent_to of layer Faulty returned"),
        ("another shape", "received of layer Faulty returned tensors of"),
        ("a made-up client", r"received of layer Faulty returned updates of \[9, 1, 2, 3\]: return some of \[0, 1"),
        ("another order", "received of layer Faulty returned updates of"),
        ("a smaller mean", "aggregate of layer Faulty returned"),
        ("a number", "aggregate of layer Faulty returned 0.5"),
        ("no model", "merge of layer Faulty returned"),
        ("a strange metric", "metrics of layer Faulty returned 'seconds'"),
        ("tensor", "state of layer .*:Faulty returned"),
        ("nan", "state of layer .*:Faulty returned"),
        ("keys", "state of layer .*:Faulty returned"),
    ],
)  # fmt: skip
def test_what_a_layer_does_wrong_is_told_in_a_line_with_its_name(fault: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=told) as caught:
        run(experiment_from({**QUICK, "aggregator": FaultyMean(fault=fault)}), tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_one_that_does_nothing_wrong_is_let_through(tmp_path: Path) -> None:
    run(experiment_from({**QUICK, "aggregator": FaultyMean()}), tmp_path / "own")
    run(experiment_from(QUICK), tmp_path / "plain")
    own, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "plain"))
    assert all(torch.equal(own[name], plain[name]) for name in plain)


class Ending(Layer):
    """Ends the run when it has seen as many updates as are allowed, which it counts over processes."""

    def __init__(self, most: int, seen: Sequence[int]) -> None:
        self.most, self.seen = most, list(seen)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Layer:
        return cls(experiment.aggregator.most, progress.get("seen", []))

    def received(self, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        self.seen.append(len(replies))
        return self.inner.received(replies)

    def ended(self, rounds: Sequence[RoundRecord]) -> str:
        return "enough" if sum(self.seen) >= self.most else ""

    def conclusions(self, rounds: Sequence[RoundRecord]) -> list[str]:
        return [f"seen: {self.seen} in {len(rounds)} rounds"]

    def state(self) -> Mapping[str, Any]:
        return {"seen": self.seen}


class EndingMean(WeightedMean):
    """The mean, for so many updates."""

    layer: ClassVar[str] = f"{__name__}:Ending"
    most: int = 8


class Break(Silent):
    """Breaks off after a round."""

    def finished_round(self, record: RoundRecord) -> None:
        raise KeyboardInterrupt


def test_a_layers_state_comes_back_in_the_process_that_goes_on(tmp_path: Path) -> None:
    experiment = experiment_from({**QUICK, "aggregator": EndingMean(most=8)})
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", observer=Break())
    result = run(experiment, tmp_path / "run")
    assert result["rounds"] == 2
    assert result["stopped"] == "enough"
    assert "seen: [4, 4] in 2 rounds" in result["warnings"]


class Marking(ClientLayer):
    """Adds a group to every update, and does one thing wrong."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def received(self, task: LocalTask) -> LocalTask:
        if self.fault == "raises":
            raise ZeroDivisionError("no way on")
        made: Any = None if self.fault == "nothing" else task
        return made

    def broadcast(self, server: ServerState) -> Payloads:
        return {"control": {}} if self.fault == "a group of the algorithm's goes" else {}

    def adds(self, server: ServerState) -> Payloads:
        if self.fault == "a group of the algorithm's comes back":
            return {"delta": {"one": torch.zeros(1)}}
        return {"mark": {"one": torch.zeros(1)}}

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        if self.fault == "forgets":
            return update
        return replace(update, payloads={**update.payloads, "mark": {"one": torch.full((1,), 7.0)}})


class Marks(Layer):
    """Takes the marks out again."""

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Layer:
        return cls()

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Any) -> ClientLayer:
        return Marking(experiment.aggregator.fault)

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        payloads = dict(aggregate.payloads)
        assert payloads.pop("mark")["one"].tolist() == [7.0]
        return self.inner.merge(algorithm, server, replace(aggregate, payloads=payloads))


class MarkingMean(WeightedMean):
    """The mean of updates that are marked."""

    layer: ClassVar[str] = f"{__name__}:Marks"
    fault: str = "none"


def test_a_client_half_adds_to_updates_what_its_layer_takes_out_again(tmp_path: Path) -> None:
    run(experiment_from({**QUICK, "aggregator": MarkingMean()}), tmp_path / "own")
    run(experiment_from(QUICK), tmp_path / "plain")
    own, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "plain"))
    assert all(torch.equal(own[name], plain[name]) for name in plain)
    marked, whole = (read_rounds(tmp_path / name)[0].bytes_up for name in ("own", "plain"))
    assert marked is not None
    assert whole is not None
    assert marked - whole == 4 * (128 + 4)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raises", r"received of Marking failed with ZeroDivisionError: no way on \(.*test_own_layer.py:\d+"),
        ("nothing", "received of Marking returned NoneType: return LocalTask"),
        ("forgets", "client 0 .* sent Flower records with other names than .*payload/mark"),
    ],
)
def test_what_a_client_half_does_wrong_is_told_with_its_name(fault: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=told):
        run(experiment_from({**QUICK, "aggregator": MarkingMean(fault=fault)}), tmp_path / "run")


@pytest.mark.parametrize(("way", "name"), [("goes", "control"), ("comes back", "delta")])
def test_a_client_half_takes_the_place_of_no_group_of_the_algorithm(way: str, name: str, tmp_path: Path) -> None:
    marking = MarkingMean(fault=f"a group of the algorithm's {way}")
    with pytest.raises(RunError, match=f"a layer adds a payload '{name}'.* give it another name"):
        run(experiment_from({**QUICK, "algorithm": "scaffold", "aggregator": marking}), tmp_path / "run")


class Watched(FedAvg):
    """An algorithm with a layer of the user's own."""

    layer: ClassVar[str] = f"{__name__}:Marks"


def test_a_layer_of_ones_own_has_no_place_in_a_run_that_hides_its_clients(tmp_path: Path) -> None:
    for name, private, seen in (
        ("client", {"aggregator": {"kind": "global-dp", "noise": "seeded"}}, "clients' updates without noise"),
        ("record", {"local": {"privacy": {"kind": "dp-sgd", "noise_multiplier": 1.0}}}, "clients' records"),
    ):
        with pytest.raises(UserError, match=f"Marks, a layer of your own, sees {seen}"):
            run(experiment_from({**QUICK, **private, "algorithm": Watched()}), tmp_path / name)
        assert not [*(tmp_path / name).iterdir()]


def test_whatever_a_layer_or_its_client_half_may_say_goes_through_the_checks() -> None:
    for kind, checked, apart in ((Layer, OwnLayer, {"state"}), (ClientLayer, OwnClientLayer, set[str]())):
        said = {name for name, member in vars(kind).items() if isinstance(member, FunctionType | property)}
        public = {
            name for name in said if not name.startswith("_")
        } - apart  # states are checked where they are written
        assert public
        assert public <= vars(checked).keys()


class TwiceMean(WeightedMean):
    """The mean, with a layer that the algorithm has, too."""

    layer: ClassVar[str] = f"{__name__}:Marks"


def test_one_class_is_the_layer_of_one_setting_alone() -> None:
    both = experiment_from({**QUICK, "aggregator": TwiceMean(), "algorithm": Watched()})
    with pytest.raises(UserError, match="Marks is the layer of two settings"):
        layer_kinds(both)


def test_a_method_of_an_earlier_version_is_refused_with_its_new_name() -> None:
    with pytest.raises(TypeError, match=r"layer Old defines relabels, which is now called tampers"):
        type("Old", (Layer,), {"relabels": classmethod(lambda cls, experiment, num_classes: {})})
