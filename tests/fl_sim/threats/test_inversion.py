"""Gradients give records and labels away, exactly or as resembling images, and DP-SGD's noise bounds the attacks."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.threats import gradient_matching
from fl_sim.threats.candidates import most_found, recognised
from fl_sim.threats.finished import FinishedRun
from fl_sim.threats.first_layer import RowMeans, imprinted, label_of, linear_first, quotient
from fl_sim.threats.labels import bias_gradients, estimated_counts, exact_counts, whole
from fl_sim.threats.observed import Observed, server_of
from fl_sim.types import Params

pytestmark = pytest.mark.usefixtures("quick_accounting")

QUICK: dict[str, Any] = {
    "model": "logistic", "engine": "inprocess", "partition": "dirichlet:0.3", "clients": 5, "rounds": 1,
    "local": {"batch_size": 32},
}  # fmt: skip


def private(**changes: Any) -> dict[str, Any]:
    settings = {"kind": "dp-sgd", "noise_multiplier": 1.0, "noise": "seeded", **changes}
    return {"local": {"batch_size": 32, "privacy": settings}}


def finished(out: Path, **changes: Any) -> FinishedRun:
    run(experiment_from({**QUICK, **changes}), out)
    return FinishedRun.of(out)


def told(verb: str, out: Path, *options: str) -> dict[str, Any]:
    typed = ["attack", verb, str(out), "--json", *options]
    found: dict[str, Any] = json.loads(CliRunner().invoke(app, typed, catch_exceptions=False).stdout)
    return found


def refused(verb: str, out: Path, *options: str) -> str:
    with pytest.raises(UserError) as error:
        CliRunner().invoke(app, ["attack", verb, str(out), *options], catch_exceptions=False)
    return str(error.value)


def test_records_are_read_off_their_gradients_and_under_dp_sgd_no_more_often_than_its_noise_allows(
    tmp_path: Path,
) -> None:
    finished(tmp_path / "open", model="mlp")
    found = told("inversion", tmp_path / "open")
    assert found["method"] == "analytic"
    assert found["exact"] == found["records"] == found["labels_found"] == 5
    assert found["median_error"] < 1e-6
    assert (tmp_path / "open" / "inversion.png").read_bytes().startswith(b"\x89PNG")
    finished(tmp_path / "private", **private(noise_multiplier=4.0))
    found = told("inversion", tmp_path / "private", "--out", str(tmp_path / "seen.png"))
    assert (tmp_path / "seen.png").exists()
    assert found["exact"] == 0
    assert found["median_error"] > 0.1
    assert found["privacy"][0]["unit"] == "record"
    traced = found["recognised"]
    assert traced["draws"] == 500
    assert traced["most_by_one_step"] == pytest.approx(most_found(4.0, 10))
    assert traced["interval"][0] < traced["most_by_one_step"]
    assert 0.1 < traced["most_by_epsilon"] < 0.2
    printed = CliRunner().invoke(app, ["attack", "inversion", str(tmp_path / "private")]).stdout
    assert "the noise of one step allows at most 15.1 %" in printed


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 2.0])
def test_the_bound_on_recognition_is_reached_by_opposite_gradients_and_broken_by_half_the_noise(
    noise_multiplier: float,
) -> None:
    """Two gradients of the clipping norm, opposite to each other: the best guess is right with probability Phi(1/z)."""
    coins = np.random.Generator(np.random.Philox(7))

    class Opposite:
        def __init__(self, spread: float) -> None:
            self.spread = spread

        def summed(self, inputs: torch.Tensor, labels: torch.Tensor) -> Params:
            return {"weight": (1.0 - 2.0 * labels.double()) * torch.tensor([0.6, 0.8]).double()}

        def noisy(self, total: Params, draw: int) -> Params:
            return {"weight": total["weight"] + torch.from_numpy(coins.normal(0, self.spread, 2))}

    inputs, labels = torch.zeros(2, 1), torch.tensor([0, 1])
    found = recognised(Opposite(noise_multiplier), inputs, labels, noise_multiplier=noise_multiplier, draws=4_000)
    low, high = found.interval
    assert low < most_found(noise_multiplier, 2) < high
    broken = recognised(Opposite(noise_multiplier / 2), inputs, labels, noise_multiplier=noise_multiplier, draws=4_000)
    assert broken.interval[0] > most_found(noise_multiplier, 2)
    assert recognised(Opposite(1e-9), inputs, labels, noise_multiplier=0.0, draws=20).right == 20
    assert most_found(1e9, 10) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "clipping", [{}, {"clipping": "per-layer"}, {"clipping": "automatic", "clipping_norm": 2.0}], ids=str
)
def test_the_attacked_gradient_is_the_one_by_which_the_client_moves_its_model(
    tmp_path: Path, clipping: dict[str, Any]
) -> None:
    """A step on all records with next to no noise: the update is minus the learning rate times the clipped mean."""
    local = private(noise_multiplier=1e-5, **clipping)["local"]
    made = finished(
        tmp_path, model="mlp", local={**local, "batch_size": 2000, "steps": 1, "learning_rate": 0.5, "momentum": 0}
    )
    observed = Observed.of(made, 0, server_of(made, "final"))
    update, summed = observed.update(), observed.summed(*made.held_by(0))
    assert update is not None
    for name, value in summed.items():
        wanted = -0.5 * value / observed.num_records
        assert torch.allclose(update[name].double(), wanted, atol=1e-6, rtol=1e-3)
    moved = observed.noisy(summed, 3)["0.weight" if "0.weight" in summed else next(iter(summed))]
    assert not torch.equal(moved, next(iter(summed.values())))


def test_the_gradient_of_one_record_gives_it_away_whatever_the_weights() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, record = nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(1, 3, 3)
    loss = nn.functional.cross_entropy(model(record), torch.tensor([2]))
    names, weights = zip(*model.named_parameters(), strict=True)
    gradient = dict(zip(names, torch.autograd.grad(loss, weights), strict=True))
    layer = linear_first(model)
    assert torch.allclose(quotient(gradient, layer), record.flatten().double(), atol=1e-6)
    assert int(gradient["3.bias"].argmin()) == 2
    with pytest.raises(UserError, match=r"first layer with parameters .* is Conv2d"):
        linear_first(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 3)))


def test_of_a_batch_exactly_the_records_with_a_neuron_of_their_own_are_read_off_and_none_under_dp_sgd(
    tmp_path: Path,
) -> None:
    made = finished(tmp_path / "open", model="2nn")
    options = ["--method", "analytic", "--batch", "12", "--records", "24"]
    found = told("inversion", tmp_path / "open", *options)
    assert found["method"] == "analytic"
    assert found["records"] == 24
    alone, server = list[list[int]](), server_of(made, "final")
    for client in (0, 1):
        inputs, labels = (part[:12] for part in made.held_by(client))
        observed = Observed.of(made, client, server)
        layer = linear_first(observed.model)
        first = dict(observed.model.named_modules())[layer]
        active = (first(inputs.flatten(1)) > 0).numpy()
        alone += [[client, one] for one in range(12) if (active[one] & (active.sum(0) == 1)).any()]
        rows = RowMeans.of(observed.summed(inputs, labels), layer)
        neuron = int(np.flatnonzero(active.sum(0) == 1)[0])
        record = int(active[:, neuron].argmax())
        right = label_of(observed, layer, neuron, inputs[record], float(rows.entries[neuron]), 10)
        assert right == int(labels[record])
    assert found["exact_records"] == alone
    assert 4 < len(alone) < 22
    assert found["exact"] == len(alone) <= found["labels_found"]
    sent = told("inversion", tmp_path / "open", *options, "--imprint", "--model", "initial")
    assert sent["exact"] > len(alone)
    printed = CliRunner().invoke(app, ["attack", "inversion", str(tmp_path / "open"), *options]).stdout
    head = "indices (from 0, among the client's own records) of the exactly reconstructed records"
    assert f"{head}: client 0: " in printed
    finished(tmp_path / "private", model="2nn", **private())
    for more in ([], ["--imprint"]):
        found = told("inversion", tmp_path / "private", *options, "--records", "12", *more)
        assert found["exact"] == 0
        assert found["exact_records"] == []
        assert found["median_error"] > 0.1


def test_an_imprint_layer_gives_every_record_that_is_alone_between_two_thresholds() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 3)).double()
        known, records, labels = torch.randn(500, 9).double(), torch.randn(12, 9).double(), torch.arange(12) % 3
    layer = linear_first(model)
    model.load_state_dict(imprinted(model, layer, known), strict=False)
    loss = nn.functional.cross_entropy(model(records), labels)
    names, weights = zip(*model.named_parameters(), strict=True)
    rows = RowMeans.between(dict(zip(names, torch.autograd.grad(loss, weights), strict=True)), layer)
    bins = (model[1](records) > 0).sum(1)  # the number of thresholds below a record
    found = rows.inputs[rows.nearest(records)]
    is_exact = (found - records).abs().amax(1) < 1e-9
    is_alone = torch.tensor([int((bins == one).sum()) == 1 and int(one) > 0 for one in bins])
    assert torch.equal(is_exact, is_alone)
    assert 3 < int(is_alone.sum()) < 12
    with pytest.raises(UserError, match="has Conv2d there"):
        imprinted(nn.Sequential(nn.Linear(3, 3), nn.Conv2d(1, 1, 1)), "0", known)


def test_optimised_images_resemble_the_records_of_a_convolutional_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path, model="dafl-cnn", local={"batch_size": 32, "steps": 1})
    options = ["--model", "initial", "--records", "2", "--steps", "150"]
    found = told("inversion", tmp_path, *options, "--variation", "0.01")
    assert found["method"] == "optimise"
    assert found["labels_found"] == 2
    assert min(found["psnr"]) > max(15, found["median_psnr_of_mean_record"] + 1)
    (tmp_path / "inversion.png").unlink()
    before = Counter(path.name for path in tmp_path.iterdir())

    def interrupt(images: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(gradient_matching, "total_variation", interrupt)
    stopped = CliRunner().invoke(app, ["attack", "inversion", str(tmp_path), *options])
    assert stopped.exit_code == 130
    assert Counter(path.name for path in tmp_path.iterdir()) == before


def test_counts_of_labels_are_exact_with_the_softmax_and_as_wrong_as_the_noise_under_dp_sgd(tmp_path: Path) -> None:
    noise = 2.0
    made = finished(tmp_path, **private(noise_multiplier=noise, clipping_norm=50.0))
    observed = Observed.of(made, 0, server_of(made, "initial"))
    inputs, labels = (part[:40] for part in made.held_by(0))
    true = np.bincount(labels.numpy(), minlength=10)
    softmax = observed.model(inputs).softmax(1).sum(0).detach().double().numpy()
    total = observed.summed(inputs, labels)
    bias = next(name for name in total if name.endswith("bias"))
    assert exact_counts(total[bias].numpy(), softmax) == pytest.approx(true, abs=1e-4)
    errors = np.array([exact_counts(observed.noisy(total, draw)[bias].numpy(), softmax) - true for draw in range(300)])
    assert errors.std() == pytest.approx(noise * 50.0, rel=0.05)
    assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(errors.size)
    by_class = bias_gradients(observed, made.held_by(0))
    clean = np.abs(estimated_counts(total[bias].numpy(), by_class, 40) - true).mean()
    noisy = np.abs(estimated_counts(observed.noisy(total, 0)[bias].numpy(), by_class, 40) - true).mean()
    assert clean < 1 < noisy
    assert whole(np.zeros(3), 4).tolist() == [2, 1, 1]


def test_labels_are_estimated_better_than_by_class_shares(tmp_path: Path) -> None:
    finished(tmp_path / "open", local={"batch_size": 32, "epochs": 2})
    found = told("labels", tmp_path / "open", "--model", "initial")
    for part in ("batch", "update"):
        assert found[part]["clients"] == 5
        assert found[part]["error"] < found[part]["error_of_guess"] / 2
        for one in found[part]["counts"]:
            assert sum(one["true"]) == sum(one["estimated"])
    printed = CliRunner().invoke(app, ["attack", "labels", str(tmp_path / "open")]).stdout
    assert "privacy of the run: none (epsilon is not defined)" in printed
    finished(tmp_path / "other", **private(kind="local-dp"))
    found = told("labels", tmp_path / "other")
    assert found["batch"] is None
    assert found["update"]["clients"] == 5


def test_what_leaves_no_client_is_not_attacked(tmp_path: Path) -> None:
    finished(tmp_path / "local", **private(kind="local-dp"))
    assert "has local.privacy=local-dp, which adds noise to whole updates" in refused("inversion", tmp_path / "local")
    finished(tmp_path / "sums", aggregator={"kind": "distributed-dp", "noise_multiplier": 1.0, "noise": "seeded"})
    for verb in ("inversion", "labels"):
        assert "sees only sums over clients" in refused(verb, tmp_path / "sums")
    finished(tmp_path / "masks", aggregator="secure-sum")
    assert "sees only sums over clients" in refused("inversion", tmp_path / "masks")
    made = {
        "kind": "da-fl", "epsilon": 10, "generator": "mean-embedding", "train_on": "synthetic", "noise": "seeded",
    }  # fmt: skip
    finished(tmp_path / "synthetic", preprocess=made)
    assert "train only on synthetic records" in refused("inversion", tmp_path / "synthetic")
    finished(tmp_path / "open")
    assert "no client of" in refused("inversion", tmp_path / "open", "--batch", "5000")
    assert "--imprint is for the analytic method only" in refused(
        "inversion", tmp_path / "open", "--method", "optimise", "--imprint"
    )
    assert "the model has none there" in refused("inversion", tmp_path / "open", "--imprint")
    assert "are for the optimiser" in refused("inversion", tmp_path / "open", "--steps", "9")
    finished(tmp_path / "head", model="mlp", local={"batch_size": 32, "personal": "head"})
    for verb in ("inversion", "labels"):
        assert "which no client of this run sends" in refused(verb, tmp_path / "head")
    finished(tmp_path / "body", model="mlp", local={"batch_size": 32, "personal": "body"})
    assert "stays on the clients of this run" in refused("inversion", tmp_path / "body")
    assert told("labels", tmp_path / "body", "--model", "initial")["batch"]["right"] > 0.9
