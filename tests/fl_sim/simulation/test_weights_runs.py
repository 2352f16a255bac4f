"""Runs that start from weights: of another run, with a new head, with every engine, and never from a changed file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fl_sim
from fl_sim import models
from fl_sim.engines.remote import Signer
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.groups import Model
from fl_sim.experiment.job import job_of, resolved
from fl_sim.report.runs import read_run
from fl_sim.settings import read_table
from fl_sim.simulation.remote_workers import WorkerSetup
from fl_sim.simulation.rounds import procedure_of, runtime_of
from fl_sim.simulation.run import run
from fl_sim.store.weights import read_weights

MODEL = """
from torch import nn
def normed(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))
"""


def made(**changes: Any) -> Experiment:
    base = {"model": "mlp", "rounds": 1, "engine": "inprocess", "clients": 3, "partition": "iid", "seed": 1}
    return experiment_from({**base, **changes})


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the model mlp on the digits."""
    out = tmp_path_factory.mktemp("first") / "run"
    run(made(), out)
    return out


def start_of(experiment: Experiment) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in procedure_of(job_of(experiment)).beginning().params.items()}


def test_a_run_starts_from_the_last_model_of_another_and_the_files_say_so(first: Path, tmp_path: Path) -> None:
    experiment = made(model={"name": "mlp", "weights": str(first)})
    saved, begun = load_file(first / "model.safetensors"), start_of(experiment)
    assert saved.keys() == begun.keys()
    assert all(torch.equal(saved[name], begun[name]) for name in saved)
    result = run(experiment, tmp_path / "next")
    assert result["final_accuracy"] > json.loads((first / "result.json").read_text())["final_accuracy"]
    assert result["weights"]["new"] == []
    assert result["weights"]["in_words"] == f"the model started from {first}"
    stored = read_table(tmp_path / "next" / "config.toml")["model"]
    assert stored == {"name": "mlp", "weights": str(first), "digest": result["weights"]["digest"]}
    assert read_run(tmp_path / "next").config.model == f"mlp, weights={first}"
    (first / "model.safetensors").rename(first / "moved")
    try:
        assert isinstance(fl_sim.load_model(tmp_path / "next"), nn.Module)  # a run's own model needs no other file
    finally:
        (first / "moved").rename(first / "model.safetensors")


def test_a_file_that_changes_is_refused_on_resume_and_the_same_file_goes_on(first: Path, tmp_path: Path) -> None:
    weights = load_file(first / "model.safetensors")
    save_file(weights, tmp_path / "start.safetensors")
    experiment = made(model={"name": "mlp", "weights": str(tmp_path / "start.safetensors")})
    run(experiment, tmp_path / "run")
    longer = experiment.model_copy(update={"rounds": 2})
    assert run(longer, tmp_path / "run")["rounds"] == 2
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "start.safetensors")
    with pytest.raises(UserError, match=r"other content in a file of model, which has changed since"):
        run(experiment.model_copy(update={"rounds": 3}), tmp_path / "run")


@pytest.mark.parametrize("written", [{"name": "mlp"}, "mlp"])
def test_a_model_by_name_alone_is_written_as_before(written: Any) -> None:
    experiment = made(model=written)
    assert experiment.as_written()["model"] == "mlp"
    assert json.loads(experiment.model_dump_json())["model"] == "mlp"
    assert experiment.chosen("model") == {"model": "mlp"}
    assert str(experiment.model) == "mlp"
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment


def test_overrides_set_name_and_weights_in_any_order(first: Path) -> None:
    for order in (["model=mlp", f"model.weights={first}"], [f"model.weights={first}", "model=mlp"]):
        assert experiment_from(with_overrides({}, order)).model == Model(name="mlp", weights=str(first))
    assert resolved(experiment_from(with_overrides({}, ["clients=2"])), None).model == Model(name="dafl-cnn")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"digest": "0" * 64}, r"model\.digest is the digest of a file of weights"),
        ({"name": "mlp", "weight": "x"}, r"model\.weight"),
        ({"name": "mpl"}, "mlp"),
    ],
)
def test_wrong_settings_of_a_model_are_refused(table: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        made(model=table)


def test_a_new_head_is_named_in_line_and_result_and_starts_as_without_weights(tmp_path: Path) -> None:
    there = models.mlp((1, 8, 8), 7)
    save_file(there.state_dict(), tmp_path / "seven.safetensors")
    experiment = made(model={"name": "mlp", "weights": str(tmp_path / "seven.safetensors")})
    begun, random = start_of(experiment), start_of(made())
    assert all(torch.equal(begun[name], random[name]) for name in ("5.weight", "5.bias"))
    assert torch.equal(begun["1.weight"], there[1].weight)
    result = run(experiment, tmp_path / "run")
    assert result["weights"]["new"] == ["5.bias", "5.weight"]
    assert "a new head (5.bias, 5.weight), because the file's head is for 7 classes" in result["weights"]["in_words"]


def test_statistics_of_batch_norm_start_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_norms.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    base = {"local": {"batch_norm": "average"}}
    run(made(model="with_norms:normed", **base), tmp_path / "first")
    saved = load_file(tmp_path / "first" / "model.safetensors")
    again = made(model={"name": "with_norms:normed", "weights": str(tmp_path / "first")}, **base)
    layers = procedure_of(job_of(again)).beginning().layers
    assert layers.keys() == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert all(torch.equal(layers[name], saved[name]) for name in layers)
    assert saved["2.running_mean"].abs().sum() > 0


def test_workers_on_other_machines_get_the_weights_with_the_job(first: Path) -> None:
    job = job_of(made(model={"name": "mlp", "weights": str(first)}))
    setup = WorkerSetup.of(job, Signer.fresh())
    sent = WorkerSetup(**{**vars(setup), "experiment": setup.experiment.replace(str(first), "/nowhere")})
    model, expected = sent.runtime.model, job.model()
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in model.state_dict().items())
    changed = {name: value + 1 for name, value in setup.weights.items()}
    with pytest.raises(fl_sim.errors.RunError, match="differ from those that were sent"):
        WorkerSetup(**{**vars(setup), "weights": changed}).runtime  # noqa: B018


def test_private_runs_say_what_epsilon_assumes_and_refuse_weights_of_the_same_records(
    first: Path, tmp_path: Path
) -> None:
    private = {"aggregator": {"kind": "global-dp", "noise_multiplier": 2.0, "clipping_norm": 1.0}, "clients": 20}
    with pytest.raises(UserError, match=r"was trained on digits, and this run promises privacy for the same data"):
        job_of(made(model={"name": "mlp", "weights": str(first)}, **private))
    save_file(load_file(first / "model.safetensors"), tmp_path / "start.safetensors")
    file = str(tmp_path / "start.safetensors")
    result = run(made(model={"name": "mlp", "weights": file}, **private), tmp_path / "run")
    for statement in result["privacy"]:
        assert (
            f"started from {file}: the epsilon holds only if these weights were made without"
            in (statement["does_not_cover"])
        )


def test_a_node_that_reads_the_file_itself_refuses_another_content(first: Path, tmp_path: Path) -> None:
    weights, file = load_file(first / "model.safetensors"), tmp_path / "start.safetensors"
    save_file(weights, file)
    told = job_of(made(model={"name": "mlp", "weights": str(file)})).experiment.model_dump_json()
    assert runtime_of(told, "").model is not None
    runtime_of.cache_clear()
    read_weights.cache_clear()  # a node is another process
    save_file({name: value + 1 for name, value in weights.items()}, file)
    with pytest.raises(UserError, match="has changed since the run began"):
        runtime_of(told, "")


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small encoder of transformers, and a data set of tokens."""
    transformers = pytest.importorskip("transformers")
    out, coins = tmp_path_factory.mktemp("bert"), np.random.default_rng(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(2)
    transformers.BertModel(transformers.BertConfig(vocab_size=30, **sizes)).save_pretrained(out / "encoder")
    texts = coins.integers(1, 30, (80, 6))
    labels = np.arange(80) % 2
    texts[:, 0], texts[::3, 4:] = 1 + labels, 0
    np.savez(out / "texts.npz", x_train=texts, y_train=labels, x_test=texts, y_test=labels, vocabulary=30)
    return out


LEARNS = {"optimizer": "adamw", "learning_rate": 0.02, "epochs": 3}
PRIVATELY = {"learning_rate": 0.1, "privacy": {"kind": "dp-sgd", "noise_multiplier": 1.0}}


@pytest.mark.parametrize("local", [LEARNS, PRIVATELY], ids=["plain", "DP-SGD"])
def test_an_encoder_of_transformers_learns_from_tokens(small_bert: Path, tmp_path: Path, local: Any) -> None:
    name = f"hf:{small_bert / 'encoder'}"
    data = {"data": f"npz:{small_bert / 'texts.npz'}", "evaluate": {"test_is_public": True}}
    result = run(made(model=name, rounds=4, clients=2, local=local, **data), tmp_path / "run")
    assert result["weights"]["in_words"] == (
        f"the model started from {name}, with a new head (head.bias, head.weight), because the file has no head"
    )
    if local is LEARNS:
        assert result["final_accuracy"] > 0.9
        texts = np.load(small_bert / "texts.npz")
        chosen = fl_sim.load_model(tmp_path / "run")(torch.from_numpy(texts["x_test"]).float()).argmax(1)
        assert (chosen.numpy() == texts["y_test"]).mean() == result["final_accuracy"]
    else:
        assert f"started from {name}: the epsilon holds only if" in result["privacy"][0]["does_not_cover"]


@pytest.mark.cluster
def test_ray_starts_from_the_same_weights(first: Path, tmp_path: Path) -> None:
    models = []
    for engine in ("inprocess", "ray:2"):
        run(made(model={"name": "mlp", "weights": str(first)}, engine=engine), tmp_path / engine)
        models.append(load_file(tmp_path / engine / "model.safetensors"))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_the_help_imports_no_torch() -> None:
    code = "import sys, fl_sim.experiment.experiment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
