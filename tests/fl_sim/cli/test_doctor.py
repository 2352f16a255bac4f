"""``fl-sim doctor``: what a bug report needs, and an exit code that a script can trust."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fl_sim
from fl_sim.cli import doctor
from fl_sim.cli.verbs import app
from fl_sim.errors import RunError


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for variable in ("FL_SIM_POOLS", "FL_SIM_FEATURES", "FL_SIM_LEDGERS", "FL_SIM_DATA"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    (tmp_path / "FL_SIM_LEDGERS").mkdir()
    (tmp_path / "FL_SIM_LEDGERS" / "one.jsonl").write_bytes(b"x" * 200_000)
    return tmp_path


def test_it_tells_versions_trainer_data_and_folders_and_tests_itself(folders: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["ok"]
    assert told["fl_sim"]["version"] == fl_sim.__version__
    assert told["packages"]["torch"]
    assert told["compiled_trainer"]["available"] == (told["compiled_trainer"]["reason"] == "")
    assert told["data"]["digits"] == "embedded"
    assert told["data"]["svhn"] is None
    assert told["folders"]["ledgers"] == {"path": str(folders / "FL_SIM_LEDGERS"), "files": 1, "megabytes": 0.2}
    assert told["self_test"]["bit_identical"]
    assert told["self_test"]["accuracy"] > 0.5
    assert told["data_roots"][0] == {
        "path": str(folders / "FL_SIM_DATA"), "origin": "$FL_SIM_DATA", "exists": False,
    }  # fmt: skip


def test_it_prints_the_same_in_lines() -> None:
    lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    assert [line[:17].strip() for line in lines] == [
        "fl-sim", "Python", "system", "packages", "extras", "processor", "compiled trainer", "GPU", "data roots",
        "data sets", "pools", "features", "ledgers", "self-test",
    ]  # fmt: skip
    assert "bit-identical twice" in lines[-1]


def test_another_projects_fl_sim_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "packages_distributions", lambda: {"fl_sim": ["fl-sim", "fedopt-leaf"]})
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert isinstance(done.exception, RunError)
    assert "belongs to fedopt-leaf, too" in str(done.exception)
    assert not json.loads(done.stdout)["ok"]


def test_a_copy_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.fl_sim, "__version__", "9.9")
    with pytest.raises(RunError, match=r"is version 9\.9, and the installed version is .*: install"):
        CliRunner().invoke(app, ["doctor"], catch_exceptions=False)


def test_a_run_that_does_not_learn_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LEAST_ACCURACY", 1.01)
    with pytest.raises(RunError, match=r"accuracy of the self-test is 0\.\d+, which is less than 1\.01"):
        CliRunner().invoke(app, ["doctor"], catch_exceptions=False)


def test_runs_that_differ_in_a_bit_fail_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(range(2))
    real = doctor.run
    monkeypatch.setattr(doctor, "run", lambda settings, **more: real({**settings, "seed": next(seeds)}, **more))
    with pytest.raises(RunError, match="two runs with the same seed ended in different models"):
        CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
