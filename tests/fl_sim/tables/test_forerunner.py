"""A run that has no directory yet begins with the rounds of a shorter one beside it, and ends in the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fl_sim
from fl_sim.data import load
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import resolved
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.tables.forerunner import begin_with_shorter
from fl_sim.tables.words import run_name
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
    assert f"the rounds of {shorter} are the first of this run" in told
    assert "going on after round 3" in told
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
