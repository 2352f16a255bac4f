"""What is answered before anything is done: help, the version and typos, without a word from torch."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import fl_sim

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
print(json.dumps({"answers": answers, "imported": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


def test_help_the_version_and_typos_are_answered_without_a_slow_import() -> None:
    asked = {"--help": 0,
             "--version": 0, "run --help": 0, "table --help": 0, "privacy --help": 0, "data list --help": 0,
             "rnu": 2, "run --ouut x": 2, "table --jobs few": 2}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(list(asked))], capture_output=True, text=True, timeout=60, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["answers"] == asked
    assert not {*HEAVY, "numpy", "pydantic"} & set(told["imported"])
    assert f"fl-sim {fl_sim.__version__}\n" in done.stdout
    assert "Did you mean 'run'?" in done.stderr
    assert "Did you mean '--out'?" in done.stderr


def test_mistakes_in_settings_are_told_without_torch() -> None:
    asked = {"run dataset=digits": "did you mean 'data'?", "run algorithm=fedavgg": "fedavg",
             "run local.epochs=0": "local.epochs", "run model=mpl": "did you mean 'mlp'?",
             "run data=digts": "did you mean 'digits'?",
             "run data=npz:nowhere.npz": "nowhere.npz", "table digits data=minst": "did you mean 'mnist'?",
             "run clients=ten": "clients", "run algorithm=pate algorithm.student=fixmatchh": "fixmatch",
             "run preprocess=da-fl preprocess.generator=gan": "dp-cgan", "run nowhere.toml": "nowhere.toml",
             "table digts": "digits", "table digits local.epoch=2": "did you mean 'epochs'?"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(list(asked))], capture_output=True, text=True, timeout=60, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["answers"] == dict.fromkeys(asked, 2)
    assert not set(HEAVY) & set(told["imported"])
    for line, hint in zip(done.stderr.splitlines(), asked.values(), strict=True):
        assert hint in line


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert fl_sim.__version__ == project["version"]
