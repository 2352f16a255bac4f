"""fl-sim as a library: what a script or a notebook calls, and what it gets back."""

import csv
import io
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save

import fl_sim
from fl_sim import Experiment
from fl_sim.experiment.job import job_of
from strategies.fedprox import FedProx

SMALL = {"model": "logistic", "rounds": 2, "engine": "inprocess"}


def test_a_run_returns_its_rounds_and_where_they_lie_and_finds_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = fl_sim.run(SMALL)
    assert "round 2/2" in capsys.readouterr().err
    assert [record.round for record in result.rounds] == [1, 2]
    assert result.final_accuracy == result.rounds[-1].test_accuracy == result.facts["final_accuracy"]
    assert result.privacy == ()
    assert result.directory.parent == Path("results")
    again = fl_sim.run(Experiment.model_validate(SMALL), progress=False)
    assert again == result
    assert capsys.readouterr().err == ""
    with pytest.raises(FrozenInstanceError):
        result.rounds = ()


def test_what_a_run_warns_of_after_its_start_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = {"devices": "log-normal", "server": {"deadline": 1e-4}}
    fl_sim.run({**SMALL, **late}, out=tmp_path / "late")
    assert capsys.readouterr().err.count("in 2 of 2 rounds no client was available and in time") == 1
    fl_sim.run({**SMALL, "local": {"momentum": 0.5}, "algorithm": "fedmix"}, out=tmp_path / "mixed")
    assert capsys.readouterr().err.count("has no local momentum") == 1, "what was shown at the start is not repeated"


@pytest.mark.usefixtures("quick_accounting")
def test_a_private_run_states_its_epsilon(tmp_path: Path) -> None:
    private = {**SMALL, "aggregator": {"kind": "global-dp", "epsilon": 8}, "sampler": "poisson:0.5", "partition": "iid"}
    (release,) = fl_sim.run(private, out=str(tmp_path / "run"), progress=False).privacy
    assert release.unit == "client"
    assert release.epsilon is not None
    assert 0 < release.epsilon <= 8


@pytest.mark.usefixtures("cells_in_threads")
def test_a_table_takes_objects_and_returns_a_cell_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"base": SMALL, "grid": {"algorithm": ["fedavg", FedProx(mu=0.3)]}, "centralized": False}
    filled = fl_sim.table(plan, out=tmp_path / "table", jobs=1, progress=False)
    assert [(cell.row, cell.status) for cell in filled.cells] == [
        ("FedAvg", "finished"),
        ("FedProx (mu=0.3)", "finished"),
    ]
    assert filled.to_markdown() == (tmp_path / "table" / "table.md").read_text().rstrip("\n")
    run = fl_sim.run(SMALL, out=filled.directory / filled.cells[0].directory, progress=False)
    assert run.final_accuracy == filled.cells[0].last
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    lines = [{name: "" if value is None else str(value) for name, value in line.items()} for line in filled.to_pandas()]
    assert lines == list(csv.DictReader(io.StringIO((tmp_path / "table" / "table.csv").read_text())))


def test_records_go_to_pandas_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fl_sim.run(SMALL, out=tmp_path / "run", progress=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fl_sim.UserError, match="pip install pandas"):
        result.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert [row["test_accuracy"] for row in result.to_pandas()] == [one.test_accuracy for one in result.rounds]


NORMALISED = """
from torch import nn


def network(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
"""


@pytest.mark.parametrize("more", [{}, {"model": "normalised:network", "local": {"batch_norm": "average"}}])
def test_a_finished_runs_model_is_loaded_with_its_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    (tmp_path / "normalised.py").write_text(NORMALISED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    seen = {}

    class Remembered:
        def metrics(self, _round, model, test):
            seen.update(inputs=test.tensors[0], logits=model(test.tensors[0]))
            return {}

    fl_sim.run({**SMALL, **more}, out=tmp_path / "run", progress=False, observer=Remembered())
    loaded = fl_sim.load_model(tmp_path / "run")
    assert not loaded.training
    assert torch.equal(loaded(seen["inputs"]), seen["logits"])


def test_a_run_without_a_whole_model_is_named(tmp_path: Path) -> None:
    class Stops:
        def finished_round(self, record):
            raise KeyboardInterrupt

    with pytest.raises(fl_sim.UserError, match=r"nothing holds no run \(config.toml is missing\)"):
        fl_sim.load_model(tmp_path / "nothing")
    with pytest.raises(KeyboardInterrupt):
        fl_sim.run(SMALL, out=tmp_path / "run", progress=False, observer=Stops())
    with pytest.raises(fl_sim.UserError, match=r"holds an unfinished run \(1 of 2 rounds\)"):
        fl_sim.load_model(tmp_path / "run")
    fl_sim.run(SMALL, out=tmp_path / "run", progress=False)
    (tmp_path / "run" / "model.safetensors").write_bytes(save({"1.weight": torch.zeros(2, 2)}))
    with pytest.raises(fl_sim.UserError, match=r"does not fit model logistic: tensor 1.weight is \(2, 2\) in the file"):
        fl_sim.load_model(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(fl_sim.UserError, match=r"model.safetensors is damaged"):
        fl_sim.load_model(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(fl_sim.UserError, match=r"model.safetensors is missing"):
        fl_sim.load_model(tmp_path / "run")


@pytest.mark.usefixtures("quick_accounting")
def test_clients_accuracies_have_their_numbers_but_in_private_runs(tmp_path: Path) -> None:
    result = fl_sim.run({**SMALL, "partition": "label-2", "clients": 7}, out=tmp_path / "run", progress=False)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "run" / "clients.csv").read_text())))
    assert [line["client"] for line in lines] == [str(client) for client in range(7)]
    accuracies = [float(line["client_accuracy"]) for line in lines]
    assert sum(accuracies) / 7 == pytest.approx(result.facts["measures"]["client_accuracy"])
    job = job_of(result.experiment)
    assert [int(line["records"]) for line in lines] == job.shards.sizes.tolist()
    own = np.bincount(job.dataset.train.labels[job.shards[3]], minlength=10)
    recalls = np.array(result.facts["measures"]["recalls"])
    assert accuracies[3] == pytest.approx(own @ recalls / own.sum())
    private = {**SMALL, "aggregator": {"kind": "global-dp", "epsilon": 8}, "sampler": "poisson:0.5", "partition": "iid"}
    fl_sim.run(private, out=tmp_path / "private", progress=False)
    assert not (tmp_path / "private" / "clients.csv").exists()


def test_bad_input_is_the_users_error() -> None:
    with pytest.raises(fl_sim.UserError, match="did you mean 'algorithm'"):
        fl_sim.run({"algoritm": "fedavg"})
    with pytest.raises(fl_sim.UserError, match=r"no file or preset 'digit'.*did you mean 'digits'"):
        fl_sim.table("digit")
    with pytest.raises(fl_sim.UserError, match="the table: unknown key 'grit'"):
        fl_sim.table({"grit": {}})


SCRIPT = """
import sys
import fl_sim
from mine import Mine
print("once")
small = {"model": "logistic", "rounds": 1, "engine": "inprocess"}
print(fl_sim.run(small, progress=False).facts["status"])
print({"torchvision", "sklearn", "scipy", "PIL", "matplotlib", "dp_accounting", "opacus", "ray"} & set(sys.modules))
plan = {"base": small, "grid": {"algorithm": [Mine()]}, "centralized": False}
print(*[(cell.row, cell.status) for cell in fl_sim.table(plan, jobs=1, progress=False).cells])
"""


def test_a_script_needs_no_main_guard_and_a_plain_run_no_library_that_takes_seconds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from strategies.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["once", "finished", "set()", "('Mine', 'finished')"], done.stderr


@pytest.mark.parametrize("shadow", ["clients.py", "strategies/__init__.py", "partitions/__init__.py"])
def test_a_file_of_the_users_that_hides_a_package_of_ours_is_named(tmp_path: Path, shadow: str) -> None:
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).write_text("mine = 1\n")
    done = subprocess.run(
        [sys.executable, "-c", "import fl_sim"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    name = shadow.removesuffix("__init__.py")
    hidden = name.strip("/").removesuffix(".py")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {name} in {tmp_path} hides fl-sim's package {hidden}: "
        "rename it, or start Python in another folder"
    )


def test_a_folder_that_hides_nothing_is_let_be(tmp_path: Path) -> None:
    (tmp_path / "strategies").mkdir()
    subprocess.run([sys.executable, "-c", "import fl_sim"], cwd=tmp_path, timeout=60, check=True)


def test_the_package_names_what_is_public_and_nothing_else() -> None:
    assert all(getattr(fl_sim, name) is not None for name in dir(fl_sim))
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        _ = fl_sim.runs
