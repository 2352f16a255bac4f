"""APFL, pFedMe and Per-FedAvg, which have local steps of their own: fixed points, and identities to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from fl_sim import models
from fl_sim.data import load
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.local_plan import LocalPlan
from fl_sim.native.kernel import load_kernel
from fl_sim.params import detached
from fl_sim.testing import check
from fl_sim.training.courses import follow, gradient_in, gradient_job, steps_of
from fl_sim.training.loop import to_tensors
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params, Trained
from strategies.apfl import APFL
from strategies.ditto import Ditto
from strategies.fedavg import FedAvg
from strategies.per_fedavg import PerFedAvg
from strategies.pfedme import PFedMe

A, B = (1.0, 3.0), (0.0, 1.0)
"""Two clients with the losses a/2 (w - b)^2 and equal weights: the minimum of their mean is at 0.75."""


@pytest.fixture
def shards(records: Any) -> list[Any]:
    return [records((a, b, 0)) for a, b in zip(A, B, strict=True)]


def ended(simulated: Any, rounds: int = 150) -> Any:
    for _ in range(rounds):
        simulated.round()
    return simulated


def own(simulated: Any) -> list[float]:
    """Return the model that each client uses, as it is evaluated."""
    return [float(simulated.algorithm.own_model(simulated.task(client))["w"]) for client in range(len(A))]


@pytest.mark.parametrize("algorithm", [APFL(adaptive=False), APFL(), APFL(alpha=0.75)], ids=str)
def test_mixtures_of_apfl_end_at_the_clients_minima(
    bowl: Any, federation: Any, shards: Any, settings: Any, algorithm: Any
) -> None:
    simulated = ended(federation(algorithm, bowl(0.4), shards, settings(0.4)))
    assert simulated.w == pytest.approx(0.75, abs=1e-6)
    assert own(simulated) == pytest.approx(B, abs=1e-6)


def test_the_first_step_of_apfl_is_that_of_the_paper(bowl: Any, federation: Any, shards: Any, settings: Any) -> None:
    simulated = federation(APFL(alpha=0.25), bowl(0.4), shards, settings(0.1))
    simulated.states[1] = {
        "own-model": {"w": torch.tensor([2.0], dtype=torch.float64)},
        "mixing": {"alpha": torch.tensor([0.25])},
    }
    w, v = 0.4, 2.0
    gradient = 3 * (0.25 * v + 0.75 * w - 1)
    state = simulated.client(1).state
    assert float(state["own-model"]["w"]) == pytest.approx(v - 0.1 * 0.25 * gradient, abs=1e-9)
    assert float(state["mixing"]["alpha"]) == pytest.approx(0.25 - 0.1 * gradient * (v - w), abs=1e-7)


@pytest.mark.parametrize("algorithm", [APFL(alpha=0, adaptive=False), APFL(), APFL(alpha=1, adaptive=False)], ids=str)
def test_apfls_global_model_is_fedavgs_to_the_bit(
    bowl: Any, federation: Any, records: Any, settings: Any, algorithm: Any
) -> None:
    shards = [records((a, b, 0), (b, a, 0.3), (2, a, -1), (1, 1, b), (2, 0, 1)) for a, b in zip(A, B, strict=True)]
    chosen = settings(0.05, batch_size=2, epochs=1.7, weight_decay=0.01, clip_norm=0.5)
    apfl, fedavg = (ended(federation(one, bowl(0.4), shards, chosen), 5) for one in (algorithm, FedAvg()))
    assert apfl.w == fedavg.w
    assert apfl.client(0).loss == pytest.approx(fedavg.client(0).loss, abs=1e-12)


def test_with_alpha_1_apfl_trains_every_client_alone_to_the_bit(
    bowl: Any, federation: Any, shards: Any, settings: Any
) -> None:
    apfl, ditto = (
        ended(federation(one, bowl(0.4), shards, settings(0.05, epochs=2)), 5)
        for one in (APFL(alpha=1, adaptive=False), Ditto(strength=0))
    )
    assert own(apfl) == own(ditto)


@pytest.mark.parametrize(("strength", "beta"), [(0.5, 1.0), (4.0, 1.5)])
def test_pfedme_ends_where_its_strength_says(
    bowl: Any, federation: Any, shards: Any, settings: Any, strength: float, beta: float
) -> None:
    """w = sum a' b / sum a' with a' = a strength / (a + strength), and theta = (a b + strength w) / (a + strength)."""
    algorithm = PFedMe(strength=strength, personal_steps=20, personal_learning_rate=1 / (2 + strength), beta=beta)
    simulated = ended(federation(algorithm, bowl(0.4), shards, settings(0.4)), 90)
    pulls = [a * strength / (a + strength) for a in A]
    w = sum(pull * b for pull, b in zip(pulls, B, strict=True)) / sum(pulls)
    assert simulated.w == pytest.approx(w, abs=1e-6)
    assert own(simulated) == pytest.approx(
        [(a * b + strength * w) / (a + strength) for a, b in zip(A, B, strict=True)], abs=1e-6
    )


def test_pfedme_of_strength_1_ends_where_the_published_law_says(
    bowl: Any, federation: Any, shards: Any, settings: Any
) -> None:
    algorithm = PFedMe(strength=1.0, personal_steps=15, personal_learning_rate=1 / 3)
    simulated = ended(federation(algorithm, bowl(0.4), shards, settings(0.4)), 70)
    assert simulated.w == pytest.approx(0.6, abs=1e-6)
    assert own(simulated) == pytest.approx([0.3, 0.9], abs=1e-6)


def test_the_server_of_pfedme_moves_by_beta(bowl: Any, federation: Any, shards: Any, settings: Any) -> None:
    moved = [
        ended(federation(PFedMe(strength=1.0, beta=beta), bowl(0.4), shards, settings(0.2)), 1).w - 0.4
        for beta in (1.0, 1.5)
    ]
    assert moved[1] == pytest.approx(1.5 * moved[0], abs=1e-12)
    assert moved[0] != 0


def test_the_inner_problem_of_pfedme_continues_at_the_last_batchs_solution(
    bowl: Any, federation: Any, shards: Any, settings: Any
) -> None:
    chosen = PFedMe(strength=2.0, personal_steps=1, personal_learning_rate=0.1)
    simulated = federation(chosen, bowl(0.4), shards, settings(0.25, epochs=2))
    w = theta = 0.4
    for _ in range(2):
        theta -= 0.1 * (3 * (theta - 1) + 2.0 * (theta - w))
        w -= 0.25 * 2.0 * (w - theta)
    update = simulated.client(1)
    assert float(update.state["own-model"]["w"]) == pytest.approx(theta, abs=1e-12)
    assert float(update.payloads["delta"]["w"]) == pytest.approx(w - 0.4, abs=1e-12)


@pytest.mark.parametrize(("variant", "w"), [("exact", 0.4285714), ("first-order", 0.6)])
def test_per_fedavg_ends_where_the_published_law_says(
    bowl: Any, federation: Any, shards: Any, settings: Any, variant: Any, w: float
) -> None:
    """The weights of the clients' minima are a (1 - alpha a)^2 (exact), or a (1 - alpha a) (first order)."""
    algorithm = PerFedAvg(personal_learning_rate=0.2, variant=variant)
    assert ended(federation(algorithm, bowl(0.4), shards, settings(0.5)), 60).w == pytest.approx(w, abs=1e-6)


@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_exact_per_fedavg_minimises_the_loss_after_one_step(
    bowl: Any, federation: Any, shards: Any, settings: Any, alpha: float
) -> None:
    algorithm = PerFedAvg(personal_learning_rate=alpha, variant="exact")
    weights = [a * (1 - alpha * a) ** 2 for a in A]
    expected = sum(weight * b for weight, b in zip(weights, B, strict=True)) / sum(weights)
    assert ended(federation(algorithm, bowl(0.4), shards, settings(0.5)), 110).w == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("variant", ["exact", "first-order"])
def test_per_fedavg_without_a_personal_step_is_fedavg_to_the_bit(
    bowl: Any, federation: Any, records: Any, settings: Any, variant: Any
) -> None:
    shards = [records((a, b, 0), (b, a, 0.3), (2, a, -1), (1, 1, b), (2, 0, 1)) for a, b in zip(A, B, strict=True)]
    chosen = settings(0.05, batch_size=2, epochs=2, weight_decay=0.01)
    algorithms = (PerFedAvg(personal_learning_rate=0.0, variant=variant), FedAvg())
    per_fedavg, fedavg = (ended(federation(one, bowl(0.4), shards, chosen), 5) for one in algorithms)
    assert per_fedavg.w == fedavg.w


@pytest.mark.parametrize("variant", ["exact", "first-order"])
def test_gradients_of_per_fedavg_are_those_of_autograd(variant: Any) -> None:
    """On a network: the gradient of F(w - alpha grad F(w)), with or without its second derivatives."""
    digits = load("digits")
    inputs, labels = to_tensors(digits.train.take(np.arange(20)), digits)
    network = models.build("mlp", digits.input_shape, digits.num_classes, seed=0)
    start = detached(network.named_parameters())
    once = LocalSettings(1.0, momentum=0.0, weight_decay=0.0, batch_size=20, epochs=1)
    task = LocalTask(1, 0, 1, 20, once, start, class_counts=(2,) * digits.num_classes, initial=start)
    job = LocalJob(task, LocalPlan(), Records.of(inputs, labels), np.random.default_rng(0))
    algorithm = PerFedAvg(personal_learning_rate=0.1, variant=variant)
    [trained] = follow(algorithm, [job], Trainer(network, load_kernel()[0]).train_all)

    def loss(params: Params) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(torch.func.functional_call(network, dict(params), (inputs,)), labels)

    def after_a_step(params: Params) -> torch.Tensor:
        slopes = torch.func.grad(loss)(params)
        if variant == "first-order":
            slopes = {name: value.detach() for name, value in slopes.items()}
        return loss({name: params[name] - 0.1 * value for name, value in slopes.items()})

    for name, value in torch.func.grad(after_a_step)(dict(start)).items():
        assert torch.allclose(start[name] - trained.params[name], value.detach(), atol=2e-6), name


def test_the_adapted_model_is_one_step_of_alpha(bowl: Any, federation: Any, shards: Any, settings: Any) -> None:
    simulated = federation(PerFedAvg(personal_learning_rate=0.1), bowl(0.4), shards, settings(0.05, epochs=7))
    adapting = simulated.algorithm.adapted(simulated.task(1))
    assert (adapting.settings.learning_rate, adapting.settings.num_steps(1)) == (0.1, 1)
    assert not hasattr(simulated.algorithm, "own_model")


EVERY = [APFL(), PFedMe(), PerFedAvg(), PerFedAvg(variant="exact")]


@pytest.mark.parametrize("algorithm", EVERY, ids=str)
def test_a_client_without_records_changes_nothing(
    bowl: Any, federation: Any, records: Any, settings: Any, algorithm: Any
) -> None:
    [update] = federation(algorithm, bowl(0.4), [records()], settings(0.2)).round()
    assert (update.num_examples, update.loss) == (0, None)
    assert float(update.payloads["delta"]["w"]) == 0.0


@pytest.mark.parametrize("algorithm", EVERY[:3], ids=str)
@pytest.mark.parametrize("local", [{"momentum": 0.9}, {"optimizer": "adam"}], ids=str)
def test_momentum_and_other_optimizers_are_refused(algorithm: Any, local: Any) -> None:
    with pytest.raises((ValueError, UserError), match="cannot run with local"):
        Experiment(algorithm=algorithm, local={"momentum": 0.0, **local})


def test_the_hessian_of_smoothed_labels_is_refused() -> None:
    with pytest.raises((ValueError, UserError), match=r"algorithm\.variant=exact"):
        Experiment(algorithm=PerFedAvg(variant="exact"), local={"momentum": 0.0, "label_smoothing": 0.1})


@pytest.mark.parametrize("algorithm", [PerFedAvg(variant="exact")], ids=str)
def test_the_laws_of_every_algorithm_hold(algorithm: Any) -> None:
    """Those of the defaults are tested with all other algorithms."""
    check(algorithm)


def test_a_course_ends_with_a_result() -> None:
    class Nothing:
        def course(self, job: Any) -> Any:
            yield []

    with pytest.raises(RunError, match="not a Trained"):
        follow(Nothing(), [None], lambda jobs: [])  # type: ignore[list-item]


def test_steps_have_the_batches_of_the_trainer_and_gradients_come_out(
    bowl: Any, federation: Any, records: Any, settings: Any
) -> None:
    shard = records(*((1.0, float(number), 0) for number in range(5)))
    simulated = federation(FedAvg(), bowl(0.4), [shard], settings(0.05, batch_size=2, epochs=2))

    def job() -> Any:
        return simulated.job(simulated.task(0), simulated.algorithm.plan(simulated.task(0)), simulated.own(0))

    steps = list(steps_of(job()))
    assert [len(step.records) for step in steps] == [2, 2, 1] * 2
    seen = torch.cat([step.records.tensors()[0][:, 1] for step in steps[:3]])
    assert sorted(seen.tolist()) == list(range(5))
    others = torch.cat([step.records.tensors()[0][:, 1] for step in list(steps_of(job(), 1))[:3]])
    assert sorted(others.tolist()) == list(range(5))
    assert not torch.equal(seen, others)
    params = simulated.server.params
    found: Trained = simulated.trained(gradient_job(steps[0], params))
    expected = float((0.4 - steps[0].records.tensors()[0][:, 1]).mean())
    assert float(gradient_in(found)["w"]) == pytest.approx(expected, abs=1e-12)


SMALL = {
    "data": "digits", "partition": "label-2", "clients": 5, "model": "mlp", "rounds": 3,
    "local": {"learning_rate": 0.1, "batch_size": 32, "momentum": 0.0}, "evaluate": {"clients": "class-shares"},
}  # fmt: skip


def test_the_compiled_trainer_gives_fedavgs_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With alpha 0, the global model of APFL; without a personal step, the model of Per-FedAvg up to rounding."""
    monkeypatch.setattr(PerFedAvg, "weighting", "examples")
    kinds = {
        "fedavg": "fedavg", "apfl": {"kind": "apfl", "alpha": 0, "adaptive": False},
        "per-fedavg": {"kind": "per-fedavg", "personal_learning_rate": 0},
    }  # fmt: skip
    models = {}
    for name, algorithm in kinds.items():
        fl_sim.run({**SMALL, "algorithm": algorithm}, out=tmp_path / name, progress=False)
        models[name] = load_file(tmp_path / name / "model.safetensors")
    for name, value in models["fedavg"].items():
        assert torch.equal(value, models["apfl"][name]), name
        assert torch.allclose(value, models["per-fedavg"][name], atol=1e-6), name


def test_the_adapted_model_is_measured(tmp_path: Path) -> None:
    """A step of size 0 changes no prediction; the published step changes some."""
    for rate in (0.0, 0.03):
        algorithm = {"kind": "per-fedavg", "personal_learning_rate": rate}
        fl_sim.run({**SMALL, "algorithm": algorithm}, out=tmp_path / f"{rate}", progress=False)
        table = np.genfromtxt(tmp_path / f"{rate}" / "clients.csv", delimiter=",", names=True)
        assert np.array_equal(table["received_accuracy"], table["own_accuracy"])
        assert np.array_equal(table["received_accuracy"], table["trained_accuracy"]) == (rate == 0)
        assert table["trained_accuracy"].mean() >= table["received_accuracy"].mean()
