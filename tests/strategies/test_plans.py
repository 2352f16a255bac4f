"""Algorithms that change the local loss alone: what they plan, by hand; without strength they are FedAvg."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.local_plan import fields_in_use
from fl_sim.seeding import torch_kept
from fl_sim.settings import kinds_of
from fl_sim.types import LocalSettings, LocalTask
from strategies.balanced_softmax import BalancedSoftmax
from strategies.fedavg import FedAvg
from strategies.fedcm import FedCM
from strategies.feddisco import FedDisco
from strategies.feddyn import FedDyn
from strategies.fedlc import FedLC
from strategies.fedntd import FedNTD
from strategies.fedproto import FedProto
from strategies.fedrs import FedRS
from strategies.fedsam import FedSAM
from strategies.fedspeed import FedSpeed
from strategies.fedvls import FedVLS
from strategies.mofedsam import MoFedSAM
from strategies.moon import MOON

COUNTS = (16, 0, 1, 3)
SETTINGS = LocalSettings(0.1, 0.9, 1e-3, batch_size=4, epochs=2)


def plan(algorithm: Any, counts: tuple[int, ...] = COUNTS) -> Any:
    return algorithm.plan(LocalTask(1, 0, 4, sum(counts), SETTINGS, {}, class_counts=counts))


def classifier() -> nn.Module:
    with torch_kept():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def trained(federation: Any, algorithm: Any, rounds: int = 3) -> torch.Tensor:
    """Play rounds with three clients of nine records each, one of which lacks a class, and one of two classes."""
    generator = torch.Generator().manual_seed(0)
    labels = [torch.arange(9) % 3, torch.arange(9) % 2, torch.arange(9) % 3]
    shards = [(torch.randn(9, 5, generator=generator), own) for own in labels]
    simulated = federation(algorithm, classifier(), shards, SETTINGS)
    simulated.num_classes = 3
    for _ in range(rounds):
        simulated.round()
    return torch.cat([value.flatten() for value in simulated.server.params.values()])


@pytest.mark.parametrize(
    ("without", "plain"),
    [
        (FedNTD(beta=0), FedAvg()), (FedSAM(rho=0), FedAvg()), (FedSAM(rho=0, adaptive=True), FedAvg()),
        (MOON(mu=0), FedAvg()), (FedRS(alpha=1), FedAvg()), (FedCM(alpha=1), FedAvg()),
        (FedProto(strength=0), FedAvg()),
        (MoFedSAM(rho=0, alpha=0.3), FedCM(alpha=0.3)), (FedSpeed(rho=0, alpha=0.3), FedDyn(alpha=0.3)),
        (FedSpeed(uphill_share=0, alpha=0.3), FedDyn(alpha=0.3)), (FedDisco(a=0, b=0), FedAvg()),
    ],
    ids=repr,
)  # fmt: skip
def test_without_strength_it_is_the_plain_algorithm_bit_for_bit(federation: Any, without: Any, plain: Any) -> None:
    assert torch.equal(trained(federation, without), trained(federation, plain))


@pytest.mark.parametrize(
    "algorithm", [FedNTD(), FedSAM(), FedSAM(adaptive=True), MOON(), FedRS(), FedCM(), MoFedSAM(), FedLC(), FedVLS(),
                  BalancedSoftmax(), FedSpeed(), FedProto(), FedDisco()], ids=repr,
)  # fmt: skip
def test_with_its_defaults_it_is_not_fedavg(federation: Any, algorithm: Any) -> None:
    found, plain = trained(federation, algorithm), trained(federation, FedAvg())
    assert torch.isfinite(found).all()
    assert float((found - plain).norm()) > 1e-4


def test_fedlc_lowers_logits_by_the_fourth_root_and_drops_absent_classes() -> None:
    shift = plan(FedLC(tau=0.5)).logit_shift.tolist()
    assert shift == pytest.approx([-0.25, -math.inf, -0.5, -0.5 * 3**-0.25])


def test_fedlc_as_its_paper_writes_it_has_no_own_class_below_the_fraction() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([0, 2, 3, 3, 2, 0])
    found = plan(FedLC(tau=0.5, exclude_true=True))
    shifted = logits + found.logit_shift
    batch: Any = SimpleNamespace(logits=logits, labels=labels, data=found.loss_term.data)
    ours = torch.nn.functional.cross_entropy(shifted, labels, reduction="none") + found.loss_term.function(batch)
    paper = torch.stack([
        -(row[own].exp() / sum(row[c].exp() for c in range(4) if c != own)).log()
        for row, own in zip(shifted, labels.tolist(), strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(ours, paper)
    for one, other in zip(*(torch.autograd.grad(loss.sum(), logits) for loss in (ours, paper)), strict=True):
        torch.testing.assert_close(one, other)
    assert float(paper.detach().min()) < 0  # it has no lower bound


def test_fedlc_without_own_classes_leaves_a_client_of_one_class_alone() -> None:
    found = plan(FedLC(exclude_true=True), (0, 5, 0, 0))
    logits = torch.randn(5, 4).requires_grad_()
    batch: Any = SimpleNamespace(logits=logits, labels=torch.ones(5, dtype=torch.int64), data=found.loss_term.data)
    added = found.loss_term.function(batch)
    assert added.tolist() == [0.0] * 5
    assert torch.equal(torch.autograd.grad(added.sum(), logits)[0], torch.zeros(5, 4))


def test_fedrs_scales_the_logits_of_absent_classes_alone() -> None:
    assert plan(FedRS(alpha=0.25)).logit_scale.tolist() == [1.0, 0.25, 1.0, 1.0]


def test_balanced_softmax_adds_the_logarithm_of_the_counts() -> None:
    shift = plan(BalancedSoftmax()).logit_shift.tolist()
    assert shift == pytest.approx([math.log(16), math.log(1e-9), 0.0, math.log(3)], abs=1e-6)


def test_fedntd_distils_without_the_true_class() -> None:
    found = plan(FedNTD(beta=0.3, temperature=2.0)).distillation
    assert (found.weight, found.temperature, found.exclude_true, found.classes) == (0.3, 2.0, True, None)


def test_fedvls_distils_absent_classes_and_suppresses_by_shares() -> None:
    found = plan(FedVLS(distillation_weight=0.5, logit_weight=0.2))
    assert found.logit_shift.tolist() == pytest.approx([math.log(0.8), -math.inf, math.log(0.05), math.log(0.15)])
    assert found.distillation.classes.tolist() == [False, True, False, False]
    assert (found.distillation.weight, found.distillation.exclude_true) == (0.5, False)
    assert found.suppression.shares.tolist() == pytest.approx([0.8, 0.0, 0.05, 0.15])
    assert found.suppression.weight == 0.2
    assert "loss_term" not in fields_in_use(found)  # which the compiled trainer would hand on


@pytest.mark.parametrize("algorithm", [FedLC(), FedRS(), BalancedSoftmax(), FedVLS()], ids=lambda one: one.kind)
def test_a_client_without_records_has_a_plan(algorithm: Any) -> None:
    found = plan(algorithm, (0, 0, 0, 0))
    assert not any(torch.isnan(part).any() for part in vars(found).values() if isinstance(part, torch.Tensor))


def test_fedsam_plans_what_it_is_told() -> None:
    found = plan(FedSAM(rho=0.7, adaptive=True)).ascent
    assert (found.radius, found.adaptive, found.share) == (0.7, True, 1.0)


def test_moons_first_round_is_fedavg_and_later_ones_are_not(federation: Any) -> None:
    assert torch.equal(trained(federation, MOON(), rounds=1), trained(federation, FedAvg(), rounds=1))
    assert not torch.equal(trained(federation, MOON(), rounds=2), trained(federation, FedAvg(), rounds=2))


def test_moon_contrasts_with_the_clients_own_last_model(federation: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    shards = [(torch.randn(4, 5, generator=generator), torch.arange(4) % 3) for _ in range(2)]
    simulated = federation(MOON(), classifier(), shards, SETTINGS)
    simulated.num_classes = 3
    before = simulated.server.params
    first, _ = simulated.round()
    simulated.round(1)  # client 0 sits this one out
    kept = simulated.states[0]["model"]
    assert all(torch.equal(kept[name] - before[name], first.payloads["delta"][name]) for name in before)
    task = LocalTask(3, 0, 2, 4, SETTINGS, simulated.server.params, state=simulated.states[0])
    assert MOON().plan(task).contrast.previous is kept  # type: ignore[union-attr]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("algorithm", [FedCM(alpha=0.25), MoFedSAM(alpha=0.25)], ids=["fedcm", "mofedsam"])
def test_fedcm_carries_on_the_rest_of_the_last_update(
    bowl: Any, federation: Any, records: Any, settings: Any, algorithm: Any, momentum: float
) -> None:
    """Along a constant gradient of 1, uphill or not, K steps reach far: D = alpha * far + (1 - alpha) * the last."""
    shards = [records((0, 0, 1)), records((0, 0, 1), (0, 0, 1))]  # two steps and four, a record each
    simulated = federation(algorithm, bowl(0.0), shards, settings(0.1, momentum, epochs=2, batch_size=1))
    reach = [0.1 * sum((1 - momentum**step) / (1 - momentum) for step in range(1, steps + 1)) for steps in (2, 4)]
    first = simulated.round()
    assert [float(one.payloads["delta"]["w"]) for one in first] == pytest.approx([-0.25 * far for far in reach])
    last = simulated.w
    assert last == pytest.approx(-0.25 * sum(reach) / 2)
    second = simulated.round()
    expected = [-0.25 * far + 0.75 * last for far in reach]
    assert [float(one.payloads["delta"]["w"]) for one in second] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("fedexp", "squared norm"),
        ("fedproto", "sums of features"),
        ("feddisco", "only aggregator mean uses such weights"),
    ],
)
def test_what_global_dp_cannot_clip_with_the_update_is_refused(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"algorithm {kind} .*{message}"):
        experiment_from({"algorithm": kind, "aggregator": "global-dp"})


def test_what_to_turn_where_training_diverges_is_there() -> None:
    steered = [made for made in kinds_of("algorithm").values() if hasattr(made, "knobs")]
    assert len(steered) >= 10
    for made in steered:
        names = re.findall(r"\balgorithm\.(\w+)", made.knobs)
        assert names, made
        assert set(names) <= set(made.model_fields), made


@pytest.mark.parametrize(
    "settings",
    [{"kind": "feddyn", "alpha": 0}, {"kind": "fedlc", "tau": -1}, {"kind": "fedrs", "alpha": 1.5},
     {"kind": "fedntd", "temperature": 0}, {"kind": "fedcm", "alpha": 0}, {"kind": "moon", "tau": 0},
     {"kind": "fedspeed", "uphill_share": 1.1}],
    ids=lambda one: one["kind"],
)  # fmt: skip
def test_a_strength_out_of_range_is_refused_by_name(settings: dict[str, Any]) -> None:
    name, value = list(settings.items())[1]
    with pytest.raises(UserError, match=rf"algorithm\.{name} = {value}"):
        experiment_from({"algorithm": settings})


@pytest.mark.parametrize(
    "settings",
    [{"kind": "feddyn", "alpha": 1e-300}, {"kind": "scaffold", "server_learning_rate": 1e300},
     {"kind": "fednova", "tau_eff": 1e300}, {"kind": "fedprox", "mu": 1e-50}],
    ids=lambda one: one["kind"],
)  # fmt: skip
def test_a_strength_that_no_float32_holds_is_refused_before_it_breaks_a_round(settings: dict[str, Any]) -> None:
    name, value = list(settings.items())[1]
    with pytest.raises(UserError, match=rf"{name}={re.escape(f'{value:g}')} is out of range: models are float32"):
        experiment_from({"algorithm": settings})
