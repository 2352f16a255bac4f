"""The laws of runs: ours keep them, and each broken one is found. The engine for tests answers by a function."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fl_sim.engines.batching import CLIENT_RAISED, TOO_LATE
from fl_sim.params import scale
from fl_sim.settings import Settings
from fl_sim.simulation.stage import Run, Stage
from fl_sim.testing import BrokenLaw
from fl_sim.testing_runs import FakeEngine, check_run
from fl_sim.types import Aggregate, Cohort, ServerState
from strategies import private
from strategies.aggregators import WeightedMean
from strategies.algorithm import Algorithm
from strategies.layer import Layer

PRIVATE = {"kind": "global-dp", "noise": "seeded"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"aggregator": PRIVATE},
        {"aggregator": {**PRIVATE, "adaptive_clipping": {}, "epsilon": 9.0}},
        {"compress": "top-k:0.1"},
        {"attack": "sign-flip"},
        {"devices": "log-normal", "server": {"deadline": 3.0, "late": "partial"}},
        {"evaluate": {"validation": 0.2, "patience": 1}},
        {"algorithm": "fedmix"},
        {"calibrate": "ccvr"},
        {"preprocess": "private-start", "aggregator": PRIVATE, "model": "mlp"},
    ],
    ids=str,
)
def test_our_layers_and_stages_keep_the_laws(settings: dict[str, Any]) -> None:
    check_run(**settings)


class Scaled(Layer):
    """Scales the mean by what ``factor`` says in each round."""

    def __init__(self) -> None:
        self.rounds = 0

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Layer:
        return cls()

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        mean = self.inner.aggregate(cohort, algorithm, server)
        assert mean is not None
        return replace(mean, payloads={name: scale(params, self.factor()) for name, params in mean.payloads.items()})

    def factor(self) -> float:
        self.rounds += 1
        return 1 / self.rounds


class ByTheClock(Scaled):
    """Scales by the time of day."""

    def factor(self) -> float:
        return time.time() % 1


class ByChance(Scaled):
    """Scales by a generator of its own that nobody has seeded."""

    def factor(self) -> float:
        return float(np.random.default_rng().random())


class OwnMean(WeightedMean):
    """The mean, with one of these layers."""


class Forgetful(OwnMean):
    layer: ClassVar[str] = f"{__name__}:Scaled"


class Timed(OwnMean):
    layer: ClassVar[str] = f"{__name__}:ByTheClock"


class Random(OwnMean):
    layer: ClassVar[str] = f"{__name__}:ByChance"


@pytest.mark.parametrize(
    ("aggregator", "told"),
    [
        (Forgetful(), "interrupted after round 1 ends in another model"),
        (Timed(), "a second run ends in another model"),
        (Random(), "a second run ends in another model"),
    ],
)
def test_a_layer_that_forgets_or_goes_by_the_clock_is_found(aggregator: WeightedMean, told: str) -> None:
    with pytest.raises(BrokenLaw, match=told):
        check_run(aggregator=aggregator)


class Noting(Stage):
    """Tells the time in the result."""

    def facts(self) -> Mapping[str, Any]:
        return {"noted": time.time_ns()}


class Notes(Settings):
    """A preprocessing that notes the time."""

    kind: ClassVar[str] = f"{__name__}:Notes"
    stage: ClassVar[str] = f"{__name__}:Noting"


def test_a_stage_whose_facts_go_by_the_clock_is_found() -> None:
    with pytest.raises(BrokenLaw, match="a second run differs in its result: noted is"):
        check_run(preprocess=Notes())


def test_rounds_that_are_not_charged_before_clients_answer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.PrivateRounds, "pay", lambda self, server_round: None)
    with pytest.raises(BrokenLaw, match="answered before any charge"):
        check_run(aggregator=PRIVATE)


def test_a_private_run_that_shows_who_has_records_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def metrics(self: private.PrivateRounds) -> Mapping[str, Any]:
        return {"late": self.inner.counted, "epsilon": self.ledger.epsilon}  # type: ignore[attr-defined]

    def received(self: private.PrivateRounds, replies: tuple[Any, ...]) -> tuple[Any, ...]:
        self.inner.counted = sum(one.num_examples > 0 for one in replies)  # type: ignore[attr-defined]
        return self.inner.received(replies)

    monkeypatch.setattr(private.PrivateRounds, "metrics", metrics)
    monkeypatch.setattr(private.PrivateRounds, "received", received)
    with pytest.raises(BrokenLaw, match="round 1 reveals whether a client has records: late"):
        check_run(aggregator=PRIVATE, sampler="full")


class Broken(Stage):
    """Raises."""

    def before(self, run: Run) -> None:
        raise ZeroDivisionError("no way on")


class Breaks(Settings):
    """A preprocessing that raises."""

    kind: ClassVar[str] = f"{__name__}:Breaks"
    stage: ClassVar[str] = f"{__name__}:Broken"


def test_a_stage_that_raises_is_told_with_its_place() -> None:
    with pytest.raises(BrokenLaw, match=r"before of Broken failed with ZeroDivisionError: no way on"):
        check_run(preprocess=Breaks())


@pytest.mark.cluster
def test_they_keep_them_on_ray_too() -> None:
    check_run(ray=True, aggregator=PRIVATE, compress="rand-k:0.5")


def asked(grid: FakeEngine, timeout: float = 5.0) -> list[Message]:
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    return grid.send_and_receive(messages, timeout=timeout)


def number(client: int, message: Message) -> RecordDict:
    return RecordDict({"number": ConfigRecord({"client": client})})


def test_every_client_answers_as_the_function_says() -> None:
    grid = FakeEngine(3, number)
    replies = asked(grid, timeout=7.0)
    assert [reply.content["number"]["client"] for reply in replies] == [0, 1, 2]
    assert [reply.metadata.src_node_id for reply in replies] == list(grid.get_node_ids())
    assert (len(grid.asked), grid.waits) == (3, [7.0])


def test_what_a_client_raises_is_its_reply_and_none_is_no_reply() -> None:
    def trouble(client: int, message: Message) -> RecordDict | None:
        if client == 0:
            raise ValueError("no records")
        if client == 1:
            raise TimeoutError("too slow")
        return None

    broken, late = asked(FakeEngine(3, trouble))
    assert (broken.error.code, late.error.code) == (CLIENT_RAISED, TOO_LATE)
    assert "ValueError: no records" in broken.error.reason
    assert late.error.reason == "too slow"


def test_ctrl_c_is_no_clients_answer() -> None:
    def interrupted(client: int, message: Message) -> RecordDict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked(FakeEngine(1, interrupted))


def test_replies_come_in_the_order_that_is_asked_for() -> None:
    replies = asked(FakeEngine(3, number, order=lambda replies: replies[::-1]))
    assert [reply.content["number"]["client"] for reply in replies] == [2, 1, 0]
