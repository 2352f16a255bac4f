"""FedOV: outliers, the loss of unknown inputs, the vote, runs against the ensemble without it, and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.local_plan import Batch
from fl_sim.simulation.run import run
from fl_sim.types import Params, ServerState
from strategies.fedov import FedOV
from strategies.outliers import blurred, enlarged, erased, outliers_of, pasted, turned

RUN = {
    "model": "logistic", "engine": "inprocess", "clients": 4, "partition": "label-3", "rounds": 1,
    "local": {"learning_rate": 0.1, "epochs": 3, "batch_size": 64},
}  # fmt: skip


def _logits(params: Params, images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1) @ params["weight"].T + params["bias"]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 30), (1, 1, 2)])
@pytest.mark.parametrize("make", [enlarged, blurred, erased, pasted, turned])
def test_outliers_are_made_of_the_image_alone(make: Any, shape: tuple[int, ...]) -> None:
    image = torch.rand(shape) + 1
    made = [make(image, np.random.default_rng(seed)) for seed in (0, 0, 1, 2)]
    assert all(one.shape == image.shape for one in made)
    assert torch.equal(made[0], made[1])
    if shape != (1, 1, 2):
        assert not any(torch.equal(one, image) for one in made)
    if make is erased:
        assert 0.2 < float((made[0] == 0).float().mean()) < 0.6
    else:
        assert image.min() - 1e-5 <= torch.stack(made).min() <= torch.stack(made).max() <= image.max() + 1e-5
    if make is turned and shape[1] > 1:
        assert torch.allclose(made[0].sum(), image.sum(), rtol=1e-4) or shape[2] % 2


def test_operations_are_drawn_for_each_image() -> None:
    images = torch.rand(40, 1, 8, 8)
    made = outliers_of(images, np.random.default_rng(0))
    assert made.shape == images.shape
    assert 0 < int((made == 0).flatten(1).any(1).sum()) < 20


def test_the_loss_is_that_of_the_paper_and_pushing_makes_outliers_harder() -> None:
    draw = torch.Generator().manual_seed(0)
    params = {"weight": torch.randn(4, 9, generator=draw), "bias": torch.randn(4, generator=draw)}
    images, outliers = (torch.randn(5, 1, 3, 3, generator=draw) for _ in range(2))
    labels, logits = torch.tensor([0, 1, 2, 1, 0]), _logits(params, images)
    batch = Batch(
        images, labels, torch.full((5,), 0.2), logits, params, params, {"outliers": outliers}, _logits, _logits
    )
    unknown = torch.full((5,), 3)
    entropy = torch.nn.functional.cross_entropy
    masked = logits.clone()
    masked[torch.arange(5), labels] = -torch.inf
    for steps in (0, 2):
        moved = outliers.clone()
        for _ in range(steps):
            moved.requires_grad_()
            (slope,) = torch.autograd.grad(entropy(_logits(params, moved), unknown), moved)
            moved = (moved + 0.1 * slope.sign()).detach()
        parts = [entropy(_logits(params, one), unknown) for one in (outliers, moved)]
        wanted = parts[0] + parts[1] + entropy(masked, unknown)
        found = FedOV(adversarial_steps=steps, adversarial_rate=0.1).unknown(batch)
        assert torch.allclose(found, wanted, atol=1e-5)
        assert steps == 0 or parts[1] > parts[0]


def test_votes_of_models_that_know_nothing_do_not_count() -> None:
    sure = {"bias": torch.tensor([0.0, 2.0, 0.0, -9.0])}
    blind = {"bias": torch.tensor([9.0, 0.0, 0.0, 20.0])}
    found = FedOV().joint([sure, blind, blind], torch.zeros(2, 1), lambda one, records: one["bias"].expand(2, 4))
    assert found.shape == (2, 3)
    assert found.argmax(1).tolist() == [1, 1]
    alone = FedOV().joint([sure], torch.zeros(2, 1), lambda one, records: one["bias"].expand(2, 4)).softmax(1)
    assert torch.allclose(alone[0], torch.tensor([0.0, 2.0, 0.0]).softmax(0), atol=1e-4)
    same = FedOV().joint([sure] * 3, torch.zeros(2, 1), lambda one, records: one["bias"].expand(2, 4)).softmax(1)
    assert torch.allclose(alone, same, atol=1e-6)
    taught = FedOV().teacher([sure], torch.zeros(2, 1), lambda one, records: one["bias"].expand(2, 4))
    assert taught[:, 3].tolist() == [0, 0]


def test_the_reported_model_never_predicts_unknown() -> None:
    params = {"0.weight": torch.zeros(4, 2), "0.bias": torch.tensor([0.0, 1.0, 2.0, 50.0])}
    found = FedOV().reported(ServerState(params))
    assert found["0.bias"].argmax() == 2
    assert params["0.bias"][3] == 50
    with pytest.raises(UserError, match="intercepts"):
        FedOV().reported(ServerState({"0.weight": torch.zeros(4, 2)}))


def test_the_vote_beats_the_ensemble_in_stacks_too(tmp_path: Path) -> None:
    settings = RUN | {"algorithm": {"kind": "fedov", "adversarial_steps": 1}}
    first = run(experiment_from(settings), tmp_path / "fedov")
    plain = run(experiment_from(RUN | {"algorithm": "feddf"}), tmp_path / "plain")
    assert first["ensemble"]["accuracy"] > plain["ensemble"]["accuracy"] + 0.1
    stacked = run(experiment_from(settings | {"engine": {"kind": "inprocess", "stack": 4}}), tmp_path / "stack")
    assert abs(stacked["ensemble"]["accuracy"] - first["ensemble"]["accuracy"]) < 0.03
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("fedov", "stack"))
    assert len(one["1.bias"]) == 11
    assert all(torch.allclose(one[name], other[name], atol=1e-3) for name in one)


def test_a_student_learns_the_vote(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (300, 8, 8)).astype(np.uint8)
    np.savez(
        tmp_path / "proxy.npz", x_train=images, y_train=np.arange(300) % 10, x_test=images, y_test=np.arange(300) % 10
    )
    proxy = {"kind": "fedov", "proxy": f"npz:{tmp_path / 'proxy.npz'}", "steps": 5, "adversarial_steps": 1}
    local = {"learning_rate": 0.05, "steps": 2}
    run(experiment_from(RUN | {"algorithm": proxy, "local": local}), tmp_path / "student")
    run(experiment_from(RUN | {"algorithm": proxy | {"proxy": "none"}, "local": local}), tmp_path / "mean")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("student", "mean"))
    assert not torch.equal(one["1.weight"], other["1.weight"])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"aggregator": {"kind": "global-dp", "noise_multiplier": 1}}, "hides these models|promises privacy"),
        ({"local": {"privacy": {"kind": "dp-sgd", "epsilon": 8}}}, "no privacy statement covers both"),
        ({"aggregator": "median"}, "keeps all models"),
        ({"local": {"optimizer": "adam"}}, "steps of SGD"),
        ({"evaluate": {"clients": "class-shares"}}, "leave evaluate.clients out"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        experiment_from({"algorithm": "fedov", **settings})


def test_records_that_are_no_images_are_refused(tmp_path: Path) -> None:
    inputs, labels = np.random.default_rng(0).random((60, 12)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "x.npz", x_train=inputs, y_train=labels, x_test=inputs, y_test=labels)
    with pytest.raises(UserError, match=r"makes outliers of images, and records of .* have shape"):
        job_of(experiment_from({"data": f"npz:{tmp_path / 'x.npz'}", "algorithm": "fedov"}), None)
