"""A result is believed where its settings, the content of its records and the user's code are those of now."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fl_sim
from fl_sim.errors import UserError
from fl_sim.experiment import identity
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import job_of
from fl_sim.settings import read_table
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.stages.dafl.pool import pool_key
from fl_sim.store import run_directory

QUICK = {"model": "logistic", "rounds": 2, "engine": "inprocess", "partition": "iid", "clients": 2}

METHOD = """
from typing import ClassVar
from fl_sim.params import add
from fl_sim.types import ServerState
from strategies.algorithm import Averaging
from own_factor import FACTOR

class Mine(Averaging):
    title: ClassVar[str] = "Mine"
    def merge(self, server, aggregate):
        return ServerState(add(server.params, aggregate.payloads["delta"], FACTOR))
"""


def table(path: Path, *, noise: bool = False) -> str:
    """Write a table of 200 rows whose label follows from its first column, or from nothing, and return its name."""
    coins = np.random.default_rng(0)
    first = coins.random(200) if noise else np.arange(200) % 2 * 2 - 1 + coins.random(200) * 0.1
    lines = [f"{value:.6f},{coins.random():.6f},{'xy'[row % 2]}" for row, value in enumerate(first)]
    path.write_text("\n".join(["a,b,label", *lines]) + "\n")
    return f"csv:{path}:test=0.3"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_method(folder, 1.0)
    yield folder
    forget()


def write_method(folder: Path, factor: float) -> None:
    """Write a method whose factor stands in a module that it imports, as another process finds it."""
    (folder / "own_method.py").write_text(METHOD)
    (folder / "own_factor.py").write_text(f"FACTOR = {factor}\n")
    forget()


def forget() -> None:
    for name in ("own_method", "own_factor"):
        sys.modules.pop(name, None)


def made(**changes: Any) -> Any:
    return experiment_from({**QUICK, **changes})


class _Stopping(Silent):
    def finished_round(self, record: run_directory.RoundRecord) -> None:
        if record.round == 1:
            raise KeyboardInterrupt


def _moved(tmp_path: Path, **settings: Any) -> tuple[Path, str]:
    """Interrupt a run after its first round, move it and its records, and return the new directory and data set."""
    old, new = tmp_path / "here", tmp_path / "there"
    old.mkdir()
    name = table(old / "t.csv")
    with pytest.raises(KeyboardInterrupt):
        run(made(data=name, **settings), old / "run", observer=_Stopping())
    run(made(data=name, **settings), tmp_path / "whole")
    old.rename(new)
    return new / "run", name.replace(str(old), str(new))


def test_an_interrupted_run_goes_on_with_its_records_at_another_place(tmp_path: Path) -> None:
    out, name = _moved(tmp_path, algorithm="scaffold")
    assert run(made(data=name, algorithm="scaffold"), out)["rounds"] == 2
    assert (out / run_directory.MODEL).read_bytes() == (tmp_path / "whole" / run_directory.MODEL).read_bytes()
    assert run(made(data=name, algorithm="scaffold"), out)["rounds"] == 2  # and is found finished
    with pytest.raises(UserError, match=r"other settings \(data\)"):
        run(made(data=f"{name}:drop=b", algorithm="scaffold"), out)


def test_records_at_another_place_have_to_be_the_same(tmp_path: Path) -> None:
    out, name = _moved(tmp_path)
    table(out.parent / "t.csv", noise=True)
    with pytest.raises(UserError, match=r"other settings \(data\)"):
        run(made(data=name), out)


def test_a_finished_run_of_other_records_is_not_given_again(tmp_path: Path) -> None:
    name = table(tmp_path / "t.csv")
    assert run(made(data=name), tmp_path / "run")["final_accuracy"] > 0.9
    assert run(made(data=name), tmp_path / "run")["final_accuracy"] > 0.9
    table(tmp_path / "t.csv", noise=True)
    with pytest.raises(UserError, match=r"other records \(the data have changed.*--again .* another"):
        run(made(data=name), tmp_path / "run")
    assert fl_sim.run(made(data=name), out=tmp_path / "run", again=True, progress=False).final_accuracy < 0.8
    assert run(made(data=name), tmp_path / "fresh")["final_accuracy"] < 0.8  # in one process, too


def test_another_test_file_is_other_records_too(tmp_path: Path) -> None:
    table(tmp_path / "t.csv")
    table(tmp_path / "test.csv")
    name = f"csv:{tmp_path / 't.csv'}:test_file={tmp_path / 'test.csv'}"
    run(made(data=name), tmp_path / "run")
    table(tmp_path / "test.csv", noise=True)
    with pytest.raises(UserError, match="a run of other records"):
        run(made(data=name), tmp_path / "run")


def test_a_run_of_other_code_is_neither_given_again_nor_gone_on_with(code: Path, tmp_path: Path) -> None:
    settings = {"algorithm": "own_method:Mine"}
    first = run(made(**settings), tmp_path / "run")
    assert run(made(**settings), tmp_path / "run") == first
    assert set(first["identity"]["code"]) == {"own_method", "own_factor"}
    write_method(code, 0.0)
    for rounds in (2, 4):
        with pytest.raises(UserError, match=r"other code \(own_factor .* restore the old files"):
            run(made(**settings, rounds=rounds), tmp_path / "run")
    write_method(code, 1.0)
    assert run(made(**settings, rounds=4), tmp_path / "run")["rounds"] == 4


def test_a_run_that_goes_on_keeps_its_identity(code: Path, tmp_path: Path) -> None:
    run(made(algorithm="own_method:Mine"), tmp_path / "run")
    before = run_directory.read_identity(tmp_path / "run")
    assert run(made(algorithm="own_method:Mine", rounds=3), tmp_path / "run")["identity"] == before


def test_code_that_changed_after_it_was_imported_is_said(code: Path, tmp_path: Path) -> None:
    run(made(algorithm="own_method:Mine"), tmp_path / "first")
    (code / "own_factor.py").write_text("FACTOR = 0.0\n")
    result = run(made(algorithm="own_method:Mine"), tmp_path / "second")
    assert result["identity"] == run_directory.read_identity(tmp_path / "first")
    assert any("own_factor.py changed after the import" in said for said in result["warnings"])


def test_a_run_of_an_older_version_is_taken_with_a_warning(
    code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = made(algorithm="own_method:Mine", data=table(tmp_path / "t.csv"))
    with monkeypatch.context() as older:
        older.setattr("fl_sim.experiment.identity.Identity.written", lambda self: {})
        run(settings, tmp_path / "run")
    assert b"identity" not in (tmp_path / "run" / "config.toml").read_bytes()
    write_method(code, 0.0)
    fl_sim.run(settings, out=tmp_path / "run")
    assert (
        "has no digest of its records and code that can be compared here (it was written by an older version"
        in capsys.readouterr().err
    )
    longer = run(settings.model_copy(update={"rounds": 3}), tmp_path / "run")
    assert "has no digest of its records and code" in longer["warnings"][0]


def test_runs_of_public_records_and_our_own_code_have_the_files_of_older_versions(tmp_path: Path) -> None:
    result = run(made(data="digits"), tmp_path / "run")
    assert result["identity"] == {}
    assert (tmp_path / "run" / "config.toml").read_text().startswith("data = ")


def test_what_a_private_run_records_of_its_records_says_nothing_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = table(tmp_path / "t.csv")
    private = made(data=name, aggregator="global-dp", sampler="poisson:0.5")
    now = identity_of(private, None)
    first, second = now.written()["records"], now.written()["records"]
    assert first != second  # nobody can tell whether two runs are of the same records
    assert now.records not in first
    assert [now.changed({"records": one}) for one in (first, second)] == ["", ""]
    table(tmp_path / "t.csv", noise=True)
    other = identity_of(private, None)
    assert other.changed({"records": first}).startswith("other records")
    assert other.unverified({"records": first}) == ""
    monkeypatch.setenv("FL_SIM_LEDGERS", str(tmp_path / "of another machine"))
    assert (other.changed({"records": first}), other.unverified({"records": first})) == ("", "records")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "of another machine").iterdir()] == [0o600]


def test_a_cut_log_is_refused_with_its_number_of_rounds(tmp_path: Path) -> None:
    run(made(data="digits", rounds=3), tmp_path / "run")
    log = tmp_path / "run" / "rounds.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match=r"rounds.jsonl holds 2 .*result.json .*3 rounds: restore the"):
        run(made(data="digits", rounds=3), tmp_path / "run")


def test_a_damaged_identity_is_told(tmp_path: Path) -> None:
    run(made(data=table(tmp_path / "t.csv")), tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('"records"', '"recards"'))
    with pytest.raises(UserError, match=r"belong|damaged"):
        run(made(data=table(tmp_path / "t.csv")), tmp_path / "run")


def test_the_result_says_what_the_settings_file_says(tmp_path: Path) -> None:
    run(made(data=table(tmp_path / "t.csv")), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["identity"] == run_directory.read_identity(tmp_path / "run") != {}
    assert experiment_from(read_table(tmp_path / "run" / "config.toml")).data.startswith("csv:")


def test_pools_are_of_the_code_that_made_them(code: Path, tmp_path: Path) -> None:
    (code / "own_split.py").write_text(
        "from fl_sim.settings import Settings\nimport numpy as np\n"
        "class Turns(Settings):\n"
        "    def split(self, labels, num_partitions, rng):\n"
        "        return [np.arange(k, len(labels), num_partitions) for k in range(num_partitions)]\n"
    )
    settings = made(data="digits", partition="own_split:Turns", preprocess="da-fl")
    before = pool_key(job_of(settings))
    (code / "own_split.py").write_text((code / "own_split.py").read_text() + "# another\n")
    sys.modules.pop("own_split")
    assert pool_key(job_of(settings)) != before


def test_a_finished_run_of_public_records_whose_files_were_changed_is_not_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result has their content under this machine's key; under another's nobody can tell."""
    experiment = experiment_from({"model": "logistic", "rounds": 1})
    first = run(experiment, tmp_path / "run")
    key, _, content = str(first["records"]).partition(":")
    assert content
    assert run(experiment, tmp_path / "run") == first
    monkeypatch.setattr(identity, "sealed_content", lambda *_, **__: f"another:{'0' * 32}")
    assert run(experiment, tmp_path / "run") == first
    monkeypatch.setattr(identity, "sealed_content", lambda *_, **__: f"{key}:{'0' * 32}")
    with pytest.raises(UserError, match=r"other records \(the files of digits .*: --again"):
        run(experiment, tmp_path / "run")
