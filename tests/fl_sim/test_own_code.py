"""An error in code of the user's is told in one line, with the file and the line that it came from."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.own_code import error_context, place_of, with_place
from fl_sim.simulation.run import run
from fl_sim.types import Aggregate, ClientUpdate, Cohort, LocalTask, Params, ServerState, Trained
from strategies.aggregators import WeightedMean
from strategies.algorithm import Averaging
from strategies.samplers import Everyone

HERE = Path(__file__)


def line_of(words: str) -> int:
    """Return the line of this file that holds ``words`` first."""
    return next(number for number, line in enumerate(HERE.read_text().splitlines(), 1) if words in line)


class Planning(Averaging):
    """Fails in plan."""

    title: ClassVar[str] = "Planning"

    def plan(self, task: LocalTask) -> LocalPlan:
        raise KeyError("in plan")


class Ending(Averaging):
    """Fails in finish, in a library."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        moved = torch.zeros(2, 3) @ torch.zeros(2, 3)
        return replace(super().finish(task, trained), loss=float(moved.sum()))


class Merging(Averaging):
    """Fails in merge."""

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        raise ZeroDivisionError("in merge")


def _term(batch: Batch) -> torch.Tensor:
    return batch.logits.reshape(3, -1, 7).mean()


class Losing(Averaging):
    """Fails in a loss term."""

    def plan(self, task: LocalTask) -> LocalPlan:
        return LocalPlan(loss_term=LossTerm(_term))


class Meaning(WeightedMean):
    """An aggregator that fails."""

    def mean(self, cohort: Cohort, weighting: Any = "examples") -> Aggregate | None:
        raise LookupError("in mean")


class Sometimes(nn.Module):
    """A model that fails in training alone, on a batch of its third step."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes)

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        if len(records) != 2:
            records = records.reshape(1, 5)
        logits: torch.Tensor = self.head(self.body(records))
        return logits


class Starting(Averaging):
    """Fails in init."""

    def init(self, params: Params) -> ServerState:
        raise OverflowError("in init")


class Reported(Averaging):
    """Fails in what is evaluated."""

    def reported(self, server: ServerState) -> Params:
        raise BufferError("in reported")

    def reports(self) -> str:
        return "nothing"


class Sampling(Everyone):
    """A sampler that fails."""

    def sample(self, num_clients: int, coins: Any, server_round: int) -> Any:
        raise ConnectionAbortedError("in sample") if server_round > 5 else AttributeError("in sample")


class Untrained(Sometimes):
    """A model that fails when it is measured."""

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        if not self.training:
            records = records.reshape(11, -1, 13)
        logits: torch.Tensor = self.head(self.body(records))
        return logits


FAULTS = {
    "reported": ({"algorithm": Reported()}, "BufferError: in reported", 'BufferError("in reported")', "in reported"),
    "sample": ({"sampler": Sampling()}, "AttributeError: in sample", 'AttributeError("in sample")', "in sample"),
    "measure": ({"model": f"{__name__}:Untrained"}, "RuntimeError: shape", "reshape(11, -1, 13)", "in forward"),
    "plan": ({"algorithm": Planning()}, "KeyError: 'in plan'", 'KeyError("in plan")', "in plan"),
    "finish": ({"algorithm": Ending()}, "RuntimeError: mat1 and mat2", "moved = torch", "in finish"),
    "merge": ({"algorithm": Merging()}, "ZeroDivisionError: in merge", 'ZeroDivisionError("in merge")', "in merge"),
    "loss": ({"algorithm": Losing()}, "RuntimeError: shape", "reshape(3, -1, 7)", "in _term"),
    "mean": ({"aggregator": Meaning()}, "LookupError: in mean", 'LookupError("in mean")', "in mean"),
    "init": ({"algorithm": Starting()}, "OverflowError: in init", 'OverflowError("in init")', "in init"),
    "forward": ({"model": f"{__name__}:Sometimes"}, "RuntimeError: shape", "records.reshape(1, 5)", "in forward"),
}  # fmt: skip


@pytest.mark.parametrize("where", FAULTS)
def test_an_error_in_a_method_of_the_users_names_file_and_line(where: str, tmp_path: Path) -> None:
    settings, said, at, function = FAULTS[where]
    table = {"model": "logistic", "clients": 2, "rounds": 1, "partition": "iid", "engine": "inprocess", **settings}
    with pytest.raises(RunError) as caught:
        run(experiment_from(table), tmp_path / "run")
    text = str(caught.value)
    assert said in text
    assert f"({HERE}:{line_of(at)}, {function})" in text
    assert "\n" not in text


def test_a_place_is_the_users_own_and_never_a_librarys() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)
    assert place_of(caught.value) == f"{HERE}:{line_of('torch.zeros(2) @ torch.zeros(3)')}, in {_name()}"
    assert place_of(ValueError("never raised")) == ""
    assert with_place(ValueError("never raised")) == "ValueError: never raised"


def _name() -> str:
    return "test_a_place_is_the_users_own_and_never_a_librarys"


@pytest.mark.parametrize("error", [RunError("in words"), UserError("in words"), FileNotFoundError("a file")])
def test_what_is_in_words_already_stays_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error), match=r"^(in words|a file)$"), error_context("merge of Own"):
        raise error


def broken_set(root: Path | None) -> None:
    """A data set of the user's that fails."""
    raise EOFError("in the data set")


def broken_factory(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A model of the user's that cannot be built."""
    raise EOFError("in the factory")


class Narrow(nn.Module):
    """A model of the user's that takes other records."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(records.reshape(5, 5, 5))
        return logits


@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({"data": f"{__name__}:broken_set"}, 'EOFError("in the data set")'),
        ({"model": f"{__name__}:broken_factory"}, 'EOFError("in the factory")'),
        ({"model": f"{__name__}:Narrow"}, "records.reshape(5, 5, 5)"),
    ],
)
def test_an_error_before_the_run_names_file_and_line(settings: dict[str, Any], at: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(experiment_from({"clients": 2, "rounds": 1, **settings}), tmp_path / "run")
    assert f"({HERE}:{line_of(at)}, in " in str(caught.value)
