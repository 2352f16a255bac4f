"""Tests of a user's own layer or stage in whole runs (``check_run``), and an engine for tests (``FakeEngine``).

    from fl_sim.testing_runs import check_run
    check_run(aggregator=MyAggregator(), rounds=3)

The laws of algorithms are in ``fl_sim.testing``. A test takes some seconds on the small data set ``digits``.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from safetensors.torch import load_file

from fl_sim.engines import wire
from fl_sim.engines.batching import TOO_LATE, answer, failure, partition_of, raised
from fl_sim.engines.grid import LocalGrid
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.mistakes import shortened
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.simulation.stage import stages_of
from fl_sim.store import run_directory
from fl_sim.store.run_directory import RoundRecord
from fl_sim.testing import BrokenLaw
from fl_sim.types import Params
from partitions import Iid

_MEASURED = {"test_accuracy", "test_loss", "validation_accuracy", "validation_loss", "epsilon"}
"""The fields of a round in ``rounds.jsonl`` that measure the model or its privacy cost."""


@dataclass(frozen=True)
class Without:
    """The partition ``iid``, except that the client with the ID ``client`` has no records (-1: no exception)."""

    kind: ClassVar[str] = "fl_sim.testing_runs:Without"
    client: int = -1

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        """Return the indices of the records of every client."""
        parts = [*Iid().split(labels, num_partitions, rng)]
        return [part[:0] if client == self.client else part for client, part in enumerate(parts)]


def check_run(*, ray: bool = False, **settings: Any) -> None:
    """Test a run with these ``settings`` against the laws. Raises BrokenLaw for the first broken law.

    1. The settings do not change when they are written to JSON and read back. 2. A second run, and a run with two
    workers, end in the same bits. If ``ray`` is True, a run on Ray also ends in the same bits. 3. A run that is
    interrupted after any round and resumed ends in the same bits: model, log and result. 4. If rounds or stages declare
    privacy costs, a privacy ledger has an entry before the first answer of a client. 5. If a run promises privacy, its
    log and its result do not reveal whether one client has records. The test compares a run with the client's records
    and a run without them. All texts and whole numbers in log and result must be equal, except for measures of the
    model.

    Settings that are not given have small values: three rounds of four clients with a linear model. All noise must come
    from a seed.
    """
    usual = {"model": "logistic", "clients": 4, "rounds": 3, "partition": Without(), "engine": {"kind": "inprocess"}}
    experiment = experiment_from({**usual, **settings})
    if experiment_from(experiment.model_dump(mode="json")) != experiment:
        raise BrokenLaw("written to JSON and read back, the settings differ")
    with tempfile.TemporaryDirectory() as folder:
        try:
            _check(experiment, Path(folder), ray=ray)
        except RunError as error:
            raise BrokenLaw(str(error)) from error


def _check(experiment: Experiment, folder: Path, *, ray: bool) -> None:
    with _charged_first(experiment, folder):
        first = _output_of(experiment, folder / "first")
    engines: dict[str, Mapping[str, Any]] = {
        "a second run": {"kind": "inprocess", "workers": 1},
        "a run with two workers": {"kind": "inprocess", "workers": 2},
        **({"a run on Ray": {"kind": "ray", "actors": 2}} if ray else {}),
    }
    for who, engine in engines.items():
        other = experiment_from({**experiment.model_dump(), "engine": engine})
        _expect_same(who, first, _output_of(other, folder / who))
    for last in range(1, len(first.rounds)):
        out = folder / f"until {last}"
        try:
            run(experiment, out, observer=_Break(last))
        except KeyboardInterrupt:
            _expect_same(f"a run that was interrupted after round {last}", first, _output_of(experiment, out))
    if experiment.is_private and isinstance(experiment.partition, Without):
        lacking = experiment_from({**experiment.model_dump(), "partition": Without(client=1)})
        _expect_as_shown(first, _output_of(lacking, folder / "lacking"))


@dataclass(frozen=True)
class _Output:
    """The output of a run: its model, the lines of its log, and its result."""

    model: Params
    rounds: list[dict[str, Any]]
    result: dict[str, Any]


def _output_of(experiment: Experiment, out: Path) -> _Output:
    result = run(experiment, out)
    lines = [json.loads(line) for line in (out / run_directory.ROUNDS).read_text("utf-8").splitlines()]
    return _Output(load_file(out / run_directory.MODEL), _comparable(lines), _comparable(result))


def _comparable(told: Any) -> Any:
    """Return the JSON value ``told`` without the fields, such as times, that may differ between two equal runs."""
    if isinstance(told, dict):
        passing = {"seconds", "engine", "trainer", "chain", "ledger", "warnings"}
        return {name: _comparable(value) for name, value in told.items() if name not in passing}
    return [_comparable(value) for value in told] if isinstance(told, list) else told


@dataclass
class _Break(Silent):
    """An observer that interrupts a run after the round ``last``."""

    last: int

    def finished_round(self, record: RoundRecord) -> None:
        if record.round == self.last:
            raise KeyboardInterrupt


def _expect_same(who: str, one: _Output, other: _Output) -> None:
    if any(not torch.equal(one.model[name], other.model[name]) for name in one.model):
        raise BrokenLaw(
            f"{who} ends in another model: keep everything for later rounds in the states of server, clients and "
            "layers, and derive all random numbers from the seed, never from a clock"
        )
    for number, (line, again) in enumerate(zip(one.rounds, other.rounds, strict=False), start=1):
        if changed := _changed_fields(line, again):
            raise BrokenLaw(_difference(f"{who} differs in round {number}", changed[0], line, again))
    if len(one.rounds) != len(other.rounds):
        raise BrokenLaw(f"{who} has {len(other.rounds)} rounds, not {len(one.rounds)}")
    if changed := _changed_fields(one.result, other.result):
        raise BrokenLaw(_difference(f"{who} differs in its result", changed[0], one.result, other.result))


def _difference(who: str, name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return f"{who}: {name} is {shortened(repr(other.get(name)))}, not {shortened(repr(one.get(name)))}"


def _changed_fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


@contextmanager
def _charged_first(experiment: Experiment, folder: Path) -> Iterator[None]:
    """Raise BrokenLaw if, in a run with privacy costs, clients answer before any entry is in a privacy ledger."""
    job = job_of(experiment)
    payments = [*(procedure_of(job).payments() or ()), *(one for stage in stages_of(job) for one in stage.payments())]
    send = LocalGrid.send_and_receive

    def watched(grid: LocalGrid, messages: Iterable[Any], **how: Any) -> Iterable[Any]:
        asked = [*messages]
        answers = [*send(grid, asked, **how)]
        if any(one.metadata.message_type == wire.TRAIN for one in asked) and not _num_charges(folder):
            raise BrokenLaw("clients answered before any charge to a ledger, in a run that declares privacy costs")
        return answers

    if not payments:
        yield
        return
    with patch.object(LocalGrid, "send_and_receive", watched):
        yield


def _num_charges(folder: Path) -> int:
    """Return the total number of entries in all privacy ledgers in ``folder``.

    The file of a ledger has one header line, then one line per entry.
    """
    lines = (path.read_bytes().count(b"\n") for path in folder.rglob("*ledger*.jsonl"))
    return sum(max(0, number - 1) for number in lines)


def _expect_as_shown(one: _Output, other: _Output) -> None:
    for number, (line, again) in enumerate(zip(one.rounds, other.rounds, strict=False), start=1):
        if changed := _first_change(line, again, _MEASURED):
            raise BrokenLaw(f"round {number} reveals whether a client has records: {changed}")
    if len(one.rounds) != len(other.rounds):
        raise BrokenLaw("the number of rounds reveals whether a client has records")
    if changed := _first_change(
        one.result, other.result, {"partition", "identity", "best_round", "confusion", "reached"}
    ):
        raise BrokenLaw(f"the result reveals whether a client has records: {changed}")


def _first_change(one: Any, other: Any, apart: Iterable[str]) -> str:
    """Describe the first difference between two JSON values by its path and both values; return "" if there is none.

    Floats are not compared: they are measures of a model that was trained with random noise. ``apart``: names of fields
    that are not compared, at any depth.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:
            if name not in apart and (place := _first_change(one.get(name), other.get(name), apart)):
                return f"{name}.{place}".rstrip(".")
        return ""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next(
            (place for left, right in zip(one, other, strict=True) if (place := _first_change(left, right, apart))),
            "",
        )
    same = (isinstance(one, float) and isinstance(other, float)) or one == other
    return "" if same else f" {one!r} or {other!r}"


Answer: TypeAlias = Callable[[int, Message], RecordDict | Message | None]
"""A function (client ID, message) -> the client's reply, as a message or its content; None for a lost reply.

If the function raises an exception, the reply is that of a failed client; ``TimeoutError`` means a late client.
"""


class FakeEngine(LocalGrid):
    """A Flower Grid (message transport) for tests. It has no clients: ``answering`` computes the reply to each message.

    An exchange is a call that sends messages and returns their replies. ``order``: a function that reorders or drops
    the replies of an exchange. ``asked``: all messages sent so far. ``waits``: the timeouts of all exchanges so far.
    """

    def __init__(
        self, num_clients: int, answering: Answer, *, order: Callable[[list[Message]], list[Message]] = list
    ) -> None:
        super().__init__(num_clients)
        self.asked: list[Message] = []
        self.waits: list[float | None] = []
        self._answering, self._order = answering, order

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        self.asked += messages
        self.waits.append(timeout)
        replies = map(self._reply, messages)
        return self._order([reply for reply in replies if reply is not None])

    def _reply(self, message: Message) -> Message | None:
        try:
            content = self._answering(partition_of(message), message)
        except TimeoutError as error:
            return failure(message, TOO_LATE, str(error))
        except Exception as error:  # noqa: BLE001 (a client may raise anything)
            return raised(message, error)
        return Message(content, reply_to=message) if isinstance(content, RecordDict) else content


def played_by(app: ClientApp, num_clients: int) -> Answer:
    """Return a function for ``FakeEngine`` that computes the clients' replies with the Flower ClientApp ``app``."""
    return lambda _, message: answer(app, message, num_clients)
