"""FedDF: without a proxy it is FedAvg; equal models stay; a student learns its teacher; what is unsound is refused."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.simulation.stage import titles_of
from fl_sim.store.run_directory import read_rounds
from fl_sim.types import Params
from strategies.ensemble import ensemble_logits
from strategies.feddf import FedDF, distilled

QUICK = {
    "model": "logistic", "engine": "inprocess", "clients": 3, "partition": "dirichlet:0.1", "rounds": 2,
    "local": {"learning_rate": 0.1},
}  # fmt: skip
SIZE, CLASSES = 6, 4


def _logits(params: Params, records: torch.Tensor) -> torch.Tensor:
    return records @ params["weight"].T + params["bias"]


def _model(seed: int) -> Params:
    draw = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(CLASSES, SIZE, generator=draw), "bias": torch.randn(CLASSES, generator=draw)}


def _teacher(settings: FedDF, models: list[Params]) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(settings.teacher, models, logits_of=_logits)


def _batches(settings: FedDF) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(9)
    for _ in range(settings.steps):
        yield torch.randn(32, SIZE, generator=draw)


@pytest.fixture
def digits_proxy(tmp_path: Path) -> Callable[..., str]:
    """Return what writes a data set of public records, and returns its name."""

    def write(shape: tuple[int, ...] = (8, 8), kind: type = np.uint8) -> str:
        draw = np.random.default_rng(0)
        images = draw.integers(0, 255, (300, *shape)).astype(kind)
        labels = np.arange(300) % 10
        path = tmp_path / "proxy.npz"
        np.savez(path, x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
        return f"npz:{path}"

    return write


def test_equal_models_stay_as_they_are_bit_for_bit() -> None:
    settings, model = FedDF(proxy="x", steps=20), _model(0)
    records = next(_batches(settings))
    for count in (1, 3, 7):
        assert torch.equal(ensemble_logits([model] * count, records, _logits), _logits(model, records))
        made = distilled(settings, model, _teacher(settings, [model] * count), _batches(settings), _logits)
        assert all(torch.equal(made[name], model[name]) for name in model)


def test_a_step_is_adams_on_the_divergence() -> None:
    settings, student, models = FedDF(proxy="x", steps=5, distillation_rate=0.01), _model(0), [_model(1), _model(2)]
    weights = {name: value.clone().requires_grad_() for name, value in student.items()}
    adam = torch.optim.Adam(weights.values(), lr=0.01)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, settings.steps)
    for records in _batches(settings):
        teacher = torch.stack([_logits(one, records) for one in models]).mean(0).softmax(1)
        adam.zero_grad()
        loss = torch.nn.functional.kl_div(
            _logits(weights, records).log_softmax(1), teacher.detach(), reduction="batchmean"
        )
        loss.backward()
        adam.step()
        cosine.step()
    made = distilled(settings, student, _teacher(settings, models), _batches(settings), _logits)
    for name, value in weights.items():
        assert torch.allclose(made[name], value.detach(), atol=1e-5)


def test_the_student_of_one_teacher_ends_in_agreement() -> None:
    settings = FedDF(proxy="x", steps=600, distillation_rate=0.05)
    teacher = _model(1)
    made = distilled(settings, _model(0), _teacher(settings, [teacher]), _batches(settings), _logits)
    records = torch.randn(2000, SIZE, generator=torch.Generator().manual_seed(4))
    agreed = _logits(made, records).argmax(1) == _logits(teacher, records).argmax(1)
    assert float(agreed.float().mean()) > 0.99


def test_without_a_proxy_it_is_fedavg_bit_for_bit_and_measures_the_ensemble(tmp_path: Path) -> None:
    run(experiment_from(QUICK | {"algorithm": "fedavg"}), tmp_path / "a")
    result = run(experiment_from(QUICK | {"algorithm": "feddf"}), tmp_path / "b")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)
    rounds = read_rounds(tmp_path / "b")
    assert [one.test_accuracy for one in rounds] == [one.test_accuracy for one in read_rounds(tmp_path / "a")]
    assert result["ensemble"]["accuracy"] == rounds[-1].metrics["ensemble_accuracy"]
    assert "upper bound" in result["ensemble"]["in_words"]
    assert any("this is fedavg" in one for one in result["warnings"])


def test_the_ensemble_of_one_client_is_its_model(tmp_path: Path) -> None:
    result = run(experiment_from(QUICK | {"algorithm": "feddf", "clients": 1, "partition": "iid"}), tmp_path / "run")
    assert result["ensemble"]["accuracy"] == result["final_accuracy"]


def test_a_proxy_changes_the_model_the_same_way_each_time(tmp_path: Path, digits_proxy: Callable[..., str]) -> None:
    settings = QUICK | {"algorithm": {"kind": "feddf", "proxy": digits_proxy(), "steps": 10}}
    whole = run(experiment_from(settings), tmp_path / "whole")
    run(experiment_from(settings | {"rounds": 1}), tmp_path / "parts")
    parts = run(experiment_from(settings), tmp_path / "parts")
    run(experiment_from(QUICK | {"algorithm": "fedavg"}), tmp_path / "plain")
    first, second, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts", "plain"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["1.weight"], plain["1.weight"])
    assert whole["final_accuracy"] == parts["final_accuracy"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"aggregator": {"kind": "global-dp", "noise_multiplier": 1}}, "hides these models"),
        ({"aggregator": {"kind": "distributed-dp", "noise_multiplier": 1}}, "hides these models"),
        ({"aggregator": "median"}, "keeps all models of the round"),
        ({"local": {"batch_norm": "average"}}, "no running statistics"),
        ({"local": {"privacy": {"kind": "dp-sgd", "epsilon": 8}}}, "no privacy statement covers both"),
        ({"server": "fedbuff", "devices": "log-normal"}, "begin from different models"),
        (
            {"algorithm": {"kind": "feddf", "proxy": "digits"}},
            "clients hold the records of digits: .* another data set",
        ),
        (
            {"algorithm": {"kind": "feddf", "proxy": "digits"}, "data": "domains:mnist+digits"},
            "must be another data set",
        ),
        ({"algorithm": {"kind": "feddf", "steps": 0}}, "steps"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        experiment_from({"algorithm": "feddf", **settings})


def test_a_proxy_that_is_missing_or_of_another_shape_or_kind_is_refused(
    tmp_path: Path, digits_proxy: Callable[..., str]
) -> None:
    for number, (name, why) in enumerate(
        [
            (str(tmp_path / "nothing.npz"), "nothing"),
            (digits_proxy((9, 9)), r"shape \(1, 9, 9\), and digits has records of shape \(1, 8, 8\)"),
        ]
    ):
        proxy = name if name.startswith("npz:") else f"npz:{name}"
        with pytest.raises(UserError, match=why):
            run(experiment_from(QUICK | {"algorithm": {"kind": "feddf", "proxy": proxy}}), tmp_path / str(number))
    assert load("digits").input_shape == (1, 8, 8)


def test_the_runs_synthetic_records_are_a_proxy_even_if_clients_do_not_train_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FL_SIM_POOLS", str(tmp_path / "pools"))
    monkeypatch.setenv("FL_SIM_LEDGERS", str(tmp_path / "ledgers"))
    made = {"kind": "da-fl", "generator": "mean-embedding", "noise": "seeded", "gamma": 0.1}
    algorithm = {"kind": "feddf", "proxy": "pool", "steps": 10}
    for train_on in ("own", "synthetic"):
        preprocess = made | {"train_on": train_on}
        result = run(
            experiment_from(QUICK | {"rounds": 1, "algorithm": algorithm, "preprocess": preprocess}),
            tmp_path / train_on,
        )
        assert [one["unit"] for one in result["privacy"]] == ["record"]
        assert result["ensemble"]["accuracy"] > 0.2
    run(experiment_from(QUICK | {"rounds": 1, "algorithm": "fedavg"}), tmp_path / "plain")
    distilled_one, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "plain"))
    assert not torch.equal(distilled_one["1.weight"], plain["1.weight"])
    with pytest.raises(UserError, match="this run makes none"):
        experiment_from(QUICK | {"algorithm": algorithm})
    with pytest.raises(UserError, match="without a use"):
        experiment_from(QUICK | {"algorithm": "feddf", "preprocess": made | {"train_on": "own"}})


def test_tables_have_the_ensemble_as_a_table_of_its_own() -> None:
    titles = titles_of([experiment_from({"algorithm": "feddf"})])
    assert "upper bound" in titles["ensemble.accuracy_percent"]


def test_a_run_whose_public_records_have_changed_does_not_resume(
    digits_proxy: Callable[..., str], tmp_path: Path
) -> None:
    proxy = digits_proxy()
    settings = {**QUICK, "algorithm": {"kind": "feddf", "proxy": proxy, "steps": 2}}
    run(experiment_from(settings), tmp_path / "run")
    with np.load(tmp_path / "proxy.npz") as held:
        others = {name: held[name] // 2 if name == "x_train" else held[name] for name in held}
    np.savez(tmp_path / "proxy.npz", **others)
    with pytest.raises(UserError, match="other records"):
        run(experiment_from({**settings, "rounds": 3}), tmp_path / "run")
