"""What is answered before anything is done: help, the version and typos, without a word from torch."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import typer

import fl_sim
from fl_sim.cli.verbs import app
from fl_sim.experiment.reference import groups

HEAVY = ("torch", "flwr", "ray", "sklearn", "scipy", "matplotlib", "dp_accounting")

ASK = """
import json, sys
from fl_sim.__main__ import main
answers = {}
for typed in json.loads(sys.argv[1]):
    sys.argv[1:] = typed.split()
    try:
        main()
    except SystemExit as left:
        answers[typed] = left.code
print(json.dumps({"answers": answers, "imported": sorted(sys.modules)}))
"""


def asked_of_a_fresh_python(typed: list[str]) -> tuple[dict[str, int], set[str], str, str]:
    """Return the exit codes, all that was imported, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(typed)], capture_output=True, text=True, timeout=60, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    return told["answers"], set(told["imported"]), done.stdout, done.stderr


def test_help_the_version_and_typos_are_answered_without_a_slow_import() -> None:
    asked = {"--help": 0,
             "--version": 0, "run --help": 0, "table --help": 0, "privacy --help": 0, "data list --help": 0,
             "rnu": 2, "run --ouut x": 2, "table --jobs few": 2}  # fmt: skip
    answers, imported, said, told = asked_of_a_fresh_python(list(asked))
    assert answers == asked
    assert not {*HEAVY, "numpy", "pydantic"} & imported
    assert f"fl-sim {fl_sim.__version__}\n" in said
    assert "Did you mean 'run'?" in told
    assert "Did you mean '--out'?" in told


def test_mistakes_in_settings_are_told_without_torch() -> None:
    asked = {"run dataset=digits": "did you mean 'data'?", "run algorithm=fedavgg": "fedavg",
             "run local.epochs=0": "local.epochs", "run model=mpl": "did you mean 'mlp'?",
             "run data=digts": "did you mean 'digits'?",
             "run data=npz:nowhere.npz": "nowhere.npz", "table digits data=minst": "did you mean 'mnist'?",
             "run clients=ten": "clients", "run algorithm=pate algorithm.student=fixmatchh": "fixmatch",
             "run preprocess=da-fl preprocess.generator=gan": "dp-cgan",
             "settings fedpro": "did you mean 'fedprox'?", "settings algorithm=pat": "did you mean 'pate'?",
             "table digits local.epoch=2": "did you mean 'epochs'?"}  # fmt: skip
    answers, imported, _, told = asked_of_a_fresh_python(list(asked))
    assert answers == dict.fromkeys(asked, 2)
    assert not {*HEAVY, "ssl", "cryptography"} & imported
    for line, hint in zip(told.splitlines(), asked.values(), strict=True):
        assert hint in line


def test_a_file_that_is_not_there_is_told_without_the_settings_of_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("rounds = ")
    asked = {"run nowhere.toml": "nowhere.toml", "table nowhere.toml rounds=3": "nowhere.toml",
             "plan nowhere.toml": "nowhere.toml", "table digts": "did you mean 'digits'?",
             f"run {tmp_path}/broken.toml": "is not a TOML file", "run a.toml b.toml": "at most"}  # fmt: skip
    answers, imported, _, told = asked_of_a_fresh_python(list(asked))
    assert answers == dict.fromkeys(asked, 2)
    assert not {*HEAVY, "numpy", "strategies", "clients", "partitions", "fl_sim.experiment"} & imported
    for line, hint in zip(told.splitlines(), asked.values(), strict=True):
        assert hint in line


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert fl_sim.__version__ == project["version"]


def test_settings_are_explained_without_torch() -> None:
    asked = ["settings", "settings local.schedule", "settings fedprox", "settings partition=label-2",
             "settings local.epochs", "settings sampler --json"]  # fmt: skip
    answers, imported, said, _ = asked_of_a_fresh_python(asked)
    assert answers == dict.fromkeys(asked)
    assert not {*HEAVY, "ssl", "cryptography"} & imported
    for text in ("local.precision: float32, tf32 or bfloat16 (default: float32)", "device: auto, cpu or cuda",
                 "local.schedule=cosine", "algorithm.mu: number, at least 0 (default: 0.01)", "partition.k: whole",
                 '"name": "sampler.sampling_rate"'):  # fmt: skip
        assert text in said


def test_help_of_run_names_every_setting_of_every_experiment() -> None:
    told = " ".join(typer.main.get_command(app).commands["run"].help.split())
    listed = set(told.partition("Settings: ")[2].partition(". 'fl-sim settings'")[0].split(", "))
    here = {setting.name for group in groups() if not group.kind for setting in group.settings}
    tables = {group.name for group in groups() if not group.kind}
    wanted = {name for name in here - tables if name.partition(".")[0] not in {"algorithm", "aggregator"}}
    assert sorted(wanted - listed) == []
    assert sorted(listed - {setting.name for group in groups() for setting in group.settings}) == []
