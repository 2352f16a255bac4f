"""Runs that train a part of a model: what is sent, noised, clipped, saved and resumed is this part alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fl_sim
from fl_sim import models
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.models import build
from fl_sim.simulation import rounds
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent

BASE = {
    "data": "digits", "partition": "dirichlet:0.5", "clients": 4, "rounds": 2, "engine": "inprocess",
    "local": {"learning_rate": 0.1, "weight_decay": 0.1, "batch_size": 128},
    "model": {"name": "mlp", "trainable": "head"},
}  # fmt: skip
START = build("mlp", (1, 8, 8), 10, seed=0).state_dict()
HEAD = {"5.weight", "5.bias"}


def changed(*settings: str, **more: Any) -> Any:
    return experiment_from(with_overrides({**BASE, **more}, list(settings)))


def outcome(out: Path, *settings: str, **more: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    result = run(changed(*settings, **more), out)
    return load_file(out / "model.safetensors"), result


def test_the_saved_model_is_whole_and_only_the_part_has_moved_and_was_sent(tmp_path: Path) -> None:
    saved, result = outcome(tmp_path / "run")
    assert saved.keys() == START.keys()
    assert {name for name, value in saved.items() if not torch.equal(value, START[name])} == HEAD
    assert result["num_parameters"] == 1010
    assert result["trained_part"].startswith("model.trainable=head trains 1,010 of 100,110")
    assert 4 * 1010 < result["bytes"]["each_client_in_a_round"]["up"] < 4 * 1010 + 200
    planned = procedure_of(job_of(changed())).traffic()["rounds"]
    assert planned.up == result["bytes"]["rounds"]["up"]
    loaded = fl_sim.load_model(tmp_path / "run")
    assert torch.equal(dict(loaded.named_parameters())["5.weight"], saved["5.weight"])
    assert result["final_accuracy"] > 0.2


class Said(Silent):
    """Remembers what is said at the start of a run."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def started(self, experiment: Any, engine: str, first_round: int) -> None:
        self.lines = engine.splitlines()


def test_the_part_is_said_at_the_start(tmp_path: Path) -> None:
    said = Said()
    run(changed("rounds=1"), tmp_path / "run", observer=said)
    assert [line[:45] for line in said.lines if "model" in line] == ["model.trainable=head trains 1,010 of 100,110 "]


def frozen_by_hand(shape: tuple[int, ...], classes: int) -> nn.Module:
    model = models.mlp(shape, classes)
    model[1].requires_grad_(requires_grad=False)
    model[3].requires_grad_(requires_grad=False)
    return model


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm=scaffold"],
        ["algorithm=fedadam", "aggregator=global-dp", "aggregator.noise=seeded"],
        ["aggregator=median", "attack=sign-flip:1"],
        ["compress=top-k:0.1"],
        ["calibrate=ccvr:20"],
    ],
    ids=str,
)  # fmt: skip
def test_it_is_to_every_part_of_a_run_what_freezing_by_hand_is(settings: list[str], tmp_path: Path) -> None:
    by_setting, said = outcome(tmp_path / "setting", *settings)
    by_hand, also = outcome(tmp_path / "hand", *settings, f"model={__name__}:frozen_by_hand", "model.trainable=all")
    assert {name for name, value in by_setting.items() if not torch.equal(value, by_hand[name])} == set()
    assert {name for name, value in by_setting.items() if not torch.equal(value, START[name])} <= HEAD
    assert said["bytes"] == also["bytes"]
    assert [one["epsilon"] for one in said.get("privacy", [])] == [one["epsilon"] for one in also.get("privacy", [])]


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(
    "protection",
    ["local.privacy=dp-sgd", "local.privacy=local-dp", "aggregator=global-dp", "aggregator=distributed-dp"],
)
def test_noise_is_on_the_trained_numbers_alone_and_has_their_dimension(protection: str, tmp_path: Path) -> None:
    group, what = protection.partition("=")[0], protection.partition("=")[2]
    more = [f"{group}.noise_multiplier=300", f"{group}.noise=seeded", f"{group}.clipping_norm=1"]
    if what == "dp-sgd":
        more += ["local.batch_size=1000", "local.learning_rate=1"]
    settings = [protection, *more, "local.momentum=0", "local.weight_decay=0", "clients=1", "partition=iid", "rounds=1"]
    sampling = ["sampler=full"] if what == "global-dp" else []
    saved, _ = outcome(tmp_path / "run", *settings, *sampling)
    moved = {name: (saved[name] - START[name]).flatten() for name in saved}
    assert {name for name, value in moved.items() if value.any()} == HEAD
    steps = torch.cat([moved[name] for name in HEAD]).numpy()
    assert len(steps) == 1010
    assert np.all(steps != 0)
    expected = 300.0 if what != "dp-sgd" else 300.0 * np.sqrt(2) / 1000  # two batches of 1,000 of 1,438 records
    assert steps.std() == pytest.approx(expected, rel=0.1)


@pytest.mark.usefixtures("quick_accounting")
def test_the_clipping_norm_is_over_the_trained_numbers_alone(tmp_path: Path) -> None:
    """Without noise, one client's update has exactly the norm to which it is clipped."""
    settings = ["aggregator=global-dp", "aggregator.noise_multiplier=0.0001", "aggregator.noise=seeded",
                "aggregator.clipping_norm=0.01", "clients=1", "partition=iid", "sampler=full", "rounds=1"]  # fmt: skip
    saved, _ = outcome(tmp_path / "run", *settings)
    norm = torch.cat([(saved[name] - START[name]).flatten() for name in HEAD]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-2)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted_and_stores_the_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("rounds=4", "algorithm=fedadam", "evaluate.patience=0")
    whole, _ = outcome(tmp_path / "whole", *settings)
    out = tmp_path / "twice"
    written = rounds._write_round

    def stop(*given: Any) -> None:
        written(*given)
        if given[3].round == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rounds, "_write_round", stop)
        with pytest.raises(KeyboardInterrupt):
            run(changed(*settings), out)
    assert (out / "checkpoint.safetensors").stat().st_size < 20 * 1010 * 4
    assert load_file(out / "model.safetensors").keys() == START.keys()
    run(changed(*settings), out)
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    with pytest.raises(UserError):  # another part is another run
        run(changed(*settings, "model.trainable=bias"), out)


def test_compiled_and_pytorch_agree_and_the_compiled_trainer_trains(tmp_path: Path) -> None:
    compiled, said = outcome(tmp_path / "compiled", "model.trainable=last:2")
    assert said["trainer"].startswith("native trainer")
    stacked, also = outcome(tmp_path / "stacked", "model.trainable=last:2", "engine.stack=4")
    assert "4 clients" in also["trainer"]
    assert all(torch.allclose(stacked[name], value, atol=1e-4) for name, value in compiled.items())


@pytest.mark.cluster
def test_ray_trains_the_same_part(tmp_path: Path) -> None:
    alone, _ = outcome(tmp_path / "alone")
    spread, _ = outcome(tmp_path / "spread", "engine=ray", "engine.actors=2")
    assert all(torch.equal(alone[name], value) for name, value in spread.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.trainable=1", "algorithm=fedper"], r"algorithm fedper needs a trainable head .* is frozen"),
        (["model.trainable=bias", "algorithm=fedproto"], r"algorithm fedproto needs a trainable head"),
        (["model.trainable=1", "local.personal=head"], r"local.personal=head needs a trainable head"),
        (["local.personal=1.weight"], r"local.personal names 1\.weight, and the model trains 5\.weight, 5\.bias"),
        (["algorithm=fedrep"], r"all trained parameters \(5\.weight, 5\.bias\) belong to the head: train a part of"),
        (["algorithm=fedper"], r"model\.trainable=last:2 .* algorithm=local-only, where each client trains its own"),
        (["algorithm=pate"], r"model.trainable=head cannot run with algorithm pate"),
        (["algorithm=fedrod", "model.trainable=lora"], r"fedrod adds the outputs of two heads, .*adapters"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        outcome(tmp_path / "run", *settings)


def test_plan_says_what_is_frozen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner  # noqa: PLC0415

    from fl_sim.cli.verbs import app  # noqa: PLC0415

    asked = ["plan", "data=digits", "model=mlp", "model.trainable=head", "rounds=2", "clients=2", "--json"]
    said = json.loads(CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "x")]).stdout)
    assert said["runs"][0]["told"][0].startswith("model.trainable=head trains 1,010 of")
    assert said["runs"][0]["bytes"]["up"] < 2 * 2 * 4 * 1010 + 1000
