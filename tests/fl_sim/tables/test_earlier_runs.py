"""A new run begins with a shorter one's rounds, and runs that are strangers to a table are told or set aside."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fl_sim
from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import resolved
from fl_sim.report.table_files import markdown
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_identity, read_rounds
from fl_sim.tables.earlier_runs import begin_with_shorter, trial_outcome
from fl_sim.tables.filling import TableState, conclude, fill
from fl_sim.tables.labels import run_name
from fl_sim.tables.plan import TableSettings, plan_table, table_settings
from fl_sim.tables.tuning import TRIALS
from fl_sim.tables.workers import Started, run_all

QUICK = {"model": "logistic", "rounds": 2, "engine": "inprocess", "algorithm": "scaffold"}


def quick(**changes: object) -> Experiment:
    return resolved(experiment_from({**QUICK, **changes}), None)


def place(folder: Path, experiment: Experiment) -> Path:
    return folder / run_name(experiment, load(experiment.data, None))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_without_out_goes_on_from_the_longest_shorter_one_which_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for rounds in (2, 3):
        fl_sim.run({**QUICK, "rounds": rounds}, progress=False)
    shorter = place(Path("results"), quick(rounds=3))
    before = files(shorter)
    longer = fl_sim.run({**QUICK, "rounds": 4})
    told = capsys.readouterr().err
    assert f"the first rounds of this run are those of {shorter}" in told
    assert "resuming this run after round 3" in told
    assert files(shorter) == before
    whole = fl_sim.run({**QUICK, "rounds": 4}, out="whole", progress=False)
    models = [(one.directory / "model.safetensors").read_bytes() for one in (longer, whole)]
    assert models[0] == models[1]
    assert not list(Path("results").glob(".*"))


@pytest.mark.usefixtures("cells_in_threads")
def test_a_cell_of_a_table_does_so_too(tmp_path: Path) -> None:
    run(quick(), place(tmp_path, quick()))
    name = place(tmp_path, quick(rounds=4)).name
    events = list(run_all({name: quick(rounds=4)}, tmp_path, 1, None))
    assert [event.first_round for event in events if isinstance(event, Started)] == [3]


def _leave(out: Path) -> None:
    del out


def _change(out: Path) -> None:
    (out / "rounds.jsonl").write_text((out / "rounds.jsonl").read_text().replace('"round": 2', '"round": x'))


@pytest.mark.parametrize(
    ("settings", "before"),
    [
        ({"seed": 1}, _leave), ({"rounds": 1}, _leave), ({"local": {"schedule": "cosine"}}, _leave),
        ({}, lambda out: (out / "checkpoint.safetensors").unlink()), ({}, _change),
        ({}, lambda out: (out / "result.json").unlink()), ({}, lambda out: out.rename(out.with_name(f"{out.name}0"))),
    ],
    ids=["another seed", "more rounds", "cosine", "nothing kept", "damaged", "unfinished", "other records"],
)  # fmt: skip
def test_what_is_no_beginning_of_a_run_is_left_alone(
    tmp_path: Path, settings: dict[str, Any], before: Callable[[Path], object]
) -> None:
    own = {key: value for key, value in settings.items() if key == "local"}
    shorter = place(tmp_path, quick(**own))
    run(quick(**own), shorter)
    before(shorter)
    wanted = quick(**{"rounds": 4, **settings})
    assert begin_with_shorter(wanted, place(tmp_path, wanted), None) is None
    assert not place(tmp_path, wanted).exists()


def test_a_directory_that_is_there_is_never_touched(tmp_path: Path) -> None:
    run(quick(), place(tmp_path, quick()))
    there = place(tmp_path, quick(rounds=4))
    run(quick(rounds=4), there)
    before = files(there)
    assert begin_with_shorter(quick(rounds=4), there, None) is None
    assert files(there) == before
    assert len(read_rounds(there)) == 4


pytestmark = pytest.mark.usefixtures("cells_in_threads")

METHOD = """
from typing import ClassVar
from fl_sim.params import add
from fl_sim.types import ServerState
from strategies.algorithm import Averaging

class Mine(Averaging):
    title: ClassVar[str] = "Mine"
    def merge(self, server, aggregate):
        return ServerState(add(server.params, aggregate.payloads["delta"], {factor}))
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write(folder, 1.0)
    yield folder
    sys.modules.pop("own_cell", None)


def write(folder: Path, factor: float) -> None:
    (folder / "own_cell.py").write_text(METHOD.format(factor=factor))
    sys.modules.pop("own_cell", None)


def settings(*seeds: int, **base: Any) -> TableSettings:
    quick = {"model": "logistic", "rounds": 2, "clients": 2, "partition": "iid", "algorithm": "own_cell:Mine", **base}
    return table_settings({"base": quick, "grid": {"seed": [*seeds]}, "centralized": False}, [], "the test")


def filled(made: TableSettings, out: Path, *, again: bool = False) -> str:
    board = TableState(made, plan_table(made))
    fill(board, out, 1, None, progress=False, again=again)
    return markdown(conclude(board, out)[0])


def test_seeds_of_old_code_are_not_averaged_with_those_of_new(code: Path, tmp_path: Path) -> None:
    old = filled(settings(0, 1), tmp_path / "t")
    write(code, 0.0)
    with pytest.raises(UserError, match=r"other code \(own_cell .* 1 more of 2"):
        filled(settings(0, 1, 2), tmp_path / "t")
    now = filled(settings(0, 1, 2), tmp_path / "t", again=True)
    assert now == filled(settings(0, 1, 2), tmp_path / "fresh")
    assert old.partition("±")[0] != now.partition("±")[0]
    assert len(list((tmp_path / "t" / "cells").glob("*-before-1"))) == 2  # moved aside, not deleted


def rows(path: Path, *, noise: bool) -> str:
    """Write 80 records of two classes, which one column tells apart unless it is noise; return the data's name."""
    drawn = np.random.default_rng(0).random((80, 2))
    lines = [f"{b if noise else 2 * (i % 2) - 1 + a / 10},{b},{'xy'[i % 2]}" for i, (a, b) in enumerate(drawn)]
    path.write_text("\n".join(["a,b,label", *lines]) + "\n", encoding="utf-8")
    return f"csv:{path}:test=0.3"


def test_a_cell_of_records_that_were_rewritten_is_not_taken_for_one_of_those_that_are_there(tmp_path: Path) -> None:
    def made(*seeds: int) -> TableSettings:
        return settings(*seeds, algorithm="fedavg", data=rows(tmp_path / "t.csv", noise=bool(seeds[1:])))

    filled(made(0), tmp_path / "t")
    with pytest.raises(UserError, match="a run of other records"):
        filled(made(0, 1), tmp_path / "t")
    assert filled(made(0, 1), tmp_path / "t", again=True) == filled(made(0, 1), tmp_path / "fresh")


def test_a_cell_of_old_code_that_had_not_finished_is_told_too(code: Path, tmp_path: Path) -> None:
    filled(settings(0, rounds=4), tmp_path / "t")
    [cell] = (tmp_path / "t" / "cells").iterdir()
    (cell / "result.json").unlink()
    write(code, 0.0)
    with pytest.raises(UserError, match="a run of other code"):
        filled(settings(0, rounds=4), tmp_path / "t")


def test_a_run_of_another_method_in_a_cells_folder_is_not_taken_for_the_cell(tmp_path: Path) -> None:
    made = settings(0, algorithm="fedavg")
    filled(made, tmp_path / "t")
    [cell] = (tmp_path / "t" / "cells").iterdir()
    other = settings(0, algorithm="centralized", clients=1)
    filled(other, tmp_path / "other")
    shutil.rmtree(cell)
    shutil.copytree(next((tmp_path / "other" / "cells").iterdir()), cell)
    with pytest.raises(UserError, match=r"other settings \(clients, algorithm\).* another"):
        filled(made, tmp_path / "t")


def test_a_finished_cell_whose_log_was_cut_is_no_result(tmp_path: Path) -> None:
    made = settings(0, algorithm="fedavg", rounds=3)
    filled(made, tmp_path / "t")
    [log] = (tmp_path / "t" / "cells").glob("*/rounds.jsonl")
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    board = TableState(made, plan_table(made))
    fill(board, tmp_path / "t", 1, None, progress=False)
    assert "holds 2 rounds, but result.json states 3 rounds" in board.failures()[0]


def test_a_trial_of_old_code_has_no_outcome(code: Path, tmp_path: Path) -> None:
    [cell] = plan_table(settings(0)).cells
    folder = tmp_path / TRIALS / "one"
    run(cell.experiment, folder)
    assert trial_outcome(folder, cell.experiment, 0, None) is not None
    write(code, 0.0)
    assert identity_of(cell.experiment, None).changed(read_identity(folder))
    assert trial_outcome(folder, cell.experiment, 0, None) is None
