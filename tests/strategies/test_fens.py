"""FENS: an untrained sum is the ensemble; clients train the combiner; what hides models is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.client_runtime import validation_records
from fl_sim.simulation.run import run
from fl_sim.training.features import Network
from strategies.fens import Fens, combined

RUN = {
    "model": "logistic", "engine": "inprocess", "clients": 4, "partition": "dirichlet:0.1", "rounds": 1,
    "local": {"learning_rate": 0.1, "epochs": 3},
}  # fmt: skip


def test_an_untrained_sum_is_the_mean_of_the_logits() -> None:
    logits = torch.randn(7, 5, 3)
    first = Fens(combiner="weights").first(5, 3, np.random.default_rng(0))
    assert torch.allclose(combined(first, logits), logits.mean(1), atol=1e-6)


def test_a_round_of_one_client_is_sgd() -> None:
    settings = Fens(combiner="network", combiner_epochs=2, combiner_batch=4, combiner_rate=0.3)
    logits, labels = torch.randn(4, 2, 3), torch.tensor([0, 1, 2, 0])
    first = settings.first(2, 3, np.random.default_rng(0))
    assert {name: tuple(value.shape) for name, value in first.items()} == {
        "hidden": (4, 6), "hidden bias": (4,), "output": (3, 4), "output bias": (3,)
    }  # fmt: skip
    made = settings.trained(first, logits, labels, np.random.default_rng(0))
    network = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    network.load_state_dict(dict(zip(network.state_dict(), first.values(), strict=True)))
    sgd = torch.optim.SGD(network.parameters(), lr=0.3)
    for _ in range(2):
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(network(logits.flatten(1)), labels).backward()
        sgd.step()
    for one, other in zip(made.values(), network.state_dict().values(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    nothing = settings.trained(first, logits[:0], labels[:0], np.random.default_rng(0))
    assert all(torch.equal(nothing[name], first[name]) for name in first)


def test_without_rounds_the_accuracy_is_the_ensembles_and_the_model_is_fedavgs(tmp_path: Path) -> None:
    algorithm = {"kind": "fens", "combiner": "weights", "combiner_rounds": 0}
    result = run(experiment_from(RUN | {"algorithm": algorithm}), tmp_path / "fens")
    plain = run(experiment_from(RUN | {"algorithm": "fedavg", "evaluate": {"validation": 0.1}}), tmp_path / "plain")
    assert result["final_accuracy"] == result["ensemble"]["accuracy"] == result["fens"]["accuracy"]
    assert result["fens"]["accuracy_of_mean"] == plain["final_accuracy"]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("fens", "plain"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_trained_sum_beats_the_ensemble_the_same_way_each_time_and_leaves_no_logits(tmp_path: Path) -> None:
    algorithm = {"kind": "fens", "combiner_rounds": 40}
    settings = experiment_from(RUN | {"algorithm": algorithm})
    first, second = run(settings, tmp_path / "a"), run(settings, tmp_path / "b")
    assert first["fens"] == second["fens"]
    assert first["final_accuracy"] == first["fens"]["accuracy"] > first["ensemble"]["accuracy"] + 0.1
    held = load_file(tmp_path / "a" / first["fens"]["file"])
    assert {name.split(".")[0] for name in held} == {"0", "1", "2", "3", "combiner"}
    assert not list((tmp_path / "a").rglob("logits*"))
    assert 0 < first["bytes"]["after"]["combiner"]["up"] < first["bytes"]["after"]["combiner"]["down"]


def test_a_round_of_whole_batches_is_a_step_on_all_held_out_records(tmp_path: Path) -> None:
    algorithm = {"kind": "fens", "combiner_rounds": 1, "combiner_rate": 0.5, "combiner_batch": 10**4}
    settings = experiment_from(RUN | {"algorithm": algorithm})
    result, job = run(settings, tmp_path / "run"), job_of(settings, None)
    held = load_file(tmp_path / "run" / result["fens"]["file"])
    assert len(set(job.validation.sizes.tolist())) > 1
    inputs, labels = validation_records(job).whole().tensors()
    models = [{name[2:]: value for name, value in held.items() if name.startswith(f"{place}.")} for place in range(4)]
    logits = torch.stack([Network(job.model().eval()).logits_of(one, inputs) for one in models], 1).detach()
    weights = torch.full((4, 10), 0.25, requires_grad=True)
    torch.nn.functional.cross_entropy((logits * weights).sum(1), labels).backward()
    assert weights.grad is not None
    assert torch.allclose(held["combiner.weights"], weights.detach() - 0.5 * weights.grad, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"aggregator": {"kind": "global-dp", "noise_multiplier": 1}}, "hides these models|promises privacy"),
        ({"aggregator": "median"}, "keeps all models"),
        ({"local": {"privacy": {"kind": "dp-sgd", "epsilon": 8}}}, "no privacy statement covers both|promises privacy"),
        ({"evaluate": {"validation": 0}}, "holds out none"),
        ({"attack": "sign-flip:1"}, "hostile clients would send an honest combiner"),
        ({"preprocess": "da-fl"}, "promises? privacy"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        experiment_from({"algorithm": "fens", **settings})
