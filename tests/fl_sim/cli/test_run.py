"""``fl-sim run`` as typed: results, messages and exit codes."""

import json
import sys
from pathlib import Path

import pytest

from fl_sim.__main__ import main
from fl_sim.cli.run import parse_experiment
from fl_sim.cli.running_verbs import read_arguments
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.groups import Evaluate, Local
from fl_sim.tables import PRESETS

QUICK = ["model=logistic", "rounds=2", "engine=inprocess"]


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fl-sim", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_json_prints_one_object_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "run", *QUICK, "--out", str(tmp_path / "run"), "--json") == 0
    printed = capsys.readouterr()
    assert (
        json.loads(printed.out)["final_accuracy"]
        == json.loads((tmp_path / "run" / "result.json").read_text())["final_accuracy"]
    )
    assert "round 2/2" in printed.err


def test_people_read_accuracy_engine_and_that_there_is_no_privacy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "run", *QUICK, "--out", str(tmp_path / "run")) == 0
    printed = capsys.readouterr().out
    assert "accuracy" in printed
    assert "engine inprocess" in printed
    assert "privacy: none" in printed


def test_a_finished_run_says_so_and_shows_its_summary_and_again_repeats_it_beside_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def command(*more: str) -> tuple[str, str]:
        assert typed(monkeypatch, "run", *QUICK, "--out", str(out), *more) == 0
        return capsys.readouterr()

    _, told = command()
    assert "nothing was done" not in told
    shown, told = command()
    assert "accuracy" in shown
    assert "this run is already finished, so nothing was done: --again (again=True) repeats it" in told
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    _, told = command("--again")
    assert f"the earlier files of {out} are in {tmp_path / 'run-before-1'} now" in told
    assert "round 2/2" in told
    assert {path.name: path.read_bytes() for path in (tmp_path / "run-before-1").iterdir()} == before
    assert (out / "model.safetensors").read_bytes() == before["model.safetensors"]
    command("--again")
    assert (tmp_path / "run-before-2").is_dir()


def test_settings_come_from_a_file_with_overrides_on_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e.toml").write_text('model = "logistic"\nrounds = 9\nalgorithm = "fedprox"\n')
    arguments = [
        "run",
        str(tmp_path / "e.toml"),
        "algorithm.mu=0.5",
        "rounds=1",
        "engine=inprocess",
        "--out",
        str(tmp_path / "run"),
    ]
    assert typed(monkeypatch, *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["algorithm"], result["rounds"]) == ("fedprox", 1)
    assert "mu = 0.5" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("algorithm=scafold", "did you mean 'scaffold'"),
        ("data=mnits", "did you mean 'mnist'"),
        ("engine=rai", "did you mean 'ray'"),
        ("partition=label-11", "11"),
        ("partition=dirichlet:-1", "-1"),
        ("locale.epochs=2", "did you mean 'local'"),
        ("partition.kk=2", "kk"),
        ("rounds=0", "rounds = '0'"),
        ("local.learning_rate=nan", "local.learning_rate"),
        ("model=niid-cnn", "at least 16x16"),
        ("model=nobody.knows:it", "nobody.knows:it"),
        ("clients=2000", "2000"),
        ("sampler=fixed-size:11", "11"),
        ("rounds", "key=value"),
    ],
)
def test_a_users_mistake_exits_with_2_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str, said: str
) -> None:
    assert typed(monkeypatch, "run", *QUICK, setting, "--out", str(tmp_path / "run")) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_a_failed_run_exits_with_1_and_names_client_and_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", *QUICK, "rounds=9", "local.learning_rate=1e30", "--out", str(tmp_path / "run")]
    assert typed(monkeypatch, *arguments) == 1
    printed = capsys.readouterr().err
    assert "client 0 in round" in printed
    assert "Traceback" not in printed


def test_debug_lets_the_traceback_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fl-sim", "run", "data=nothing", "--debug", "--out", str(tmp_path / "run")])
    with pytest.raises(ValueError, match="nothing"):
        main()


def test_a_preset_is_the_base_of_its_table() -> None:
    experiment = parse_experiment(read_arguments(["mnist", "rounds=3"]))
    assert (experiment.data, experiment.model.name, experiment.rounds) == ("mnist", "niid-cnn", 3)


def test_what_a_run_leaves_out_of_a_tables_file_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    parse_experiment(read_arguments(["digits"]))
    assert "digits defines a table: this run uses only its [base], not [grid]" in capsys.readouterr().err


def test_a_name_means_the_preset_in_every_folder_and_for_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_arguments(["mnist"]).path == PRESETS / "mnist.toml"
    assert capsys.readouterr().err == ""
    (tmp_path / "mnist").write_text("rounds = 7\n")
    assert read_arguments(["mnist"]).path == PRESETS / "mnist.toml"
    assert "mnist means the preset here; for the file mnist in this folder, write ./mnist" in capsys.readouterr().err
    assert parse_experiment(read_arguments(["./mnist"])).rounds == 7


def test_help_teaches_with_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(monkeypatch, "run", "--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "fl-sim run data=mnist" in told
    assert "The name of a preset always means the preset; for a file of the same name, write ./NAME." in told
    named = set(told.partition("Settings: ")[2].partition(". For example")[0].split(", "))
    groups = {"local": Local, "evaluate": Evaluate}
    assert named >= Experiment.model_fields.keys() - groups
    assert named >= {f"{group}.{key}" for group, settings in groups.items() for key in settings.model_fields}
