"""Code of the user's own: what an import path takes, where an error came from, and what a digest covers."""

import hashlib
import importlib
import sys
from collections.abc import Iterator
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
from fl_sim.own_code import digests, edited, error_context, load_object, place_of, with_place
from fl_sim.simulation.run import run
from fl_sim.types import Aggregate, ClientUpdate, Cohort, LocalTask, Params, ServerState, Trained
from strategies.aggregators import WeightedMean
from strategies.algorithm import Averaging
from strategies.samplers import Everyone


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a user's modules in it; what a test imports is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name, text in {
        "users_fine.py": "def build(): return 7\nnumber = 3\n",
        "users_empty.py": "",
        "users_needy.py": "import users_absent\n",
        "users_raising.py": "raise ValueError('first line\\nsecond line ' + 1000 * 'x')\n",
        "users_leaving.py": "import sys; sys.exit(3)\n",
        "users_broken.py": "def build(:\n",
    }.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("users_")]:
        del sys.modules[name]


def test_a_module_in_the_current_folder_serves_and_hides_nothing_that_is_installed(here: Path) -> None:
    assert load_object("users_fine:build", "model")() == 7
    assert load_object("users_fine:number", "model") == 3
    assert sys.path.count(str(here)) == 1
    assert sys.path[-1] == str(here)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("users_fine", "is not an import path: write package.module:name, for example mine:model"),
        (":build", "is not an import path"),
        ("users_fine:", "is not an import path"),
        ("..up:build", "is not an import path"),
        ("users_fine.py:build", "there is no module 'users_fine.py', neither in the current folder"),
        ("users_nowhere:build", "there is no module 'users_nowhere', neither in the current folder"),
        ("users_fine:bild", r"module 'users_fine' \(.*users_fine.py\) has no 'bild'; did you mean 'build'\?"),
        ("users_fine:zzz", "has no 'zzz'; its names are build, number"),
        ("users_empty:build", "has no 'build'; its names are none"),
        ("users_needy:build", "ModuleNotFoundError: No module named 'users_absent'; correct the module"),
        ("users_raising:build", "ValueError: first line second line xxx"),
        ("users_leaving:build", "SystemExit: 3"),
        ("users_broken:build", "SyntaxError: "),
    ],
)
def test_what_cannot_be_imported_is_said_in_one_line(here: Path, path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_object(path, "model")
    assert str(caught.value).startswith(f"model {path!r} ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


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


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path; what a test imports from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("own_")]:
        del sys.modules[name]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "line",
    [
        "import own_helper",
        "from own_helper import factor",
        "def later():\n    import own_helper",
        "import importlib\ndef later():\n    return importlib.import_module('own_helper')",
        "from own_middle import *",
        "from own_package import part",
        "import own_package.part",
    ],
)
def test_what_a_module_imports_of_the_users_own_counts_wherever_it_does_so(code: Path, line: str) -> None:
    write(code, own_mine=line, own_helper="factor = 1", own_middle="from own_helper import factor")
    (code / "own_package").mkdir()
    (code / "own_package" / "__init__.py").write_text("")
    (code / "own_package" / "part.py").write_text("from ..own_none import x\nfrom . import deeper\nimport own_helper")
    (code / "own_package" / "deeper.py").write_text("")
    before = digests(["own_mine"])
    assert before["own_mine"] == sha(code / "own_mine.py")
    assert before["own_helper"] == sha(code / "own_helper.py")
    assert ("own_package.deeper" in before) == ("own_package" in line)
    write(code, own_helper="factor = 2")
    assert {name for name in before if digests(["own_mine"])[name] != before[name]} == {"own_helper"}


def test_installed_packages_and_fl_sim_are_nobodys_own(code: Path) -> None:
    write(
        code, own_mine="import json, numpy, torch\nfrom fl_sim.params import add\nfrom strategies.fedavg import FedAvg"
    )
    assert set(digests(["own_mine", "torch", "fl_sim.params", "no_such_module"])) == {"own_mine"}


def test_code_counts_as_it_was_imported_and_an_edit_since_is_known(code: Path) -> None:
    write(code, own_mine="import own_helper", own_helper="factor = 1")
    importlib.import_module("own_mine")
    before = digests(["own_mine"])
    assert edited(["own_mine"]) == []
    write(code, own_helper="factor = 2")
    assert digests(["own_mine"]) == before
    assert edited(["own_mine"]) == [str(code / "own_helper.py")]
    importlib.invalidate_caches()
    importlib.reload(sys.modules["own_helper"])
    assert digests(["own_mine"])["own_helper"] == sha(code / "own_helper.py")
    assert edited(["own_mine"]) == []


def test_a_script_has_no_digest(code: Path) -> None:
    assert digests(["__main__"]) == {"__main__": ""}
