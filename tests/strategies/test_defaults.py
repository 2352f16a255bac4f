"""What every kind does at its defaults, and that a setting which does nothing is said."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fl_sim
from clients.evaluate import OwnModel
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, experiment_of_run
from fl_sim.experiment.groups import Schedule
from fl_sim.kinds import Remarking, kinds
from fl_sim.params import flattened
from fl_sim.seeding import rng, torch_kept
from fl_sim.settings import kinds_of
from fl_sim.types import LocalSettings
from strategies.attacks import ALittleIsEnough, SignFlip, hostile_clients
from strategies.fedavg import FedAvg
from strategies.fedproto import FedProto
from strategies.norm_bound import NormBound
from strategies.samplers import FixedSize

WITHOUT_ROUNDS = {
    "pate": "an answer needs more teachers than digits have records for",
    "tstr": "it needs a pool",
    **dict.fromkeys(
        ("local-only", "fedproto-local", "fd", "fedgh", "fedmd", "fedtgp"), "every client's model stays with it"
    ),
}
"""Kinds that do not train one model on clients' records in rounds."""

SKEWED = {"partition": "dirichlet:0.5", "clients": 5, "rounds": 6, "model": "mlp"}
LOCAL = {"epochs": 2, "learning_rate": 0.05}


def accuracy(tmp_path: Path, algorithm: Any) -> float:
    result = fl_sim.run({**SKEWED, "local": LOCAL, "algorithm": algorithm}, out=tmp_path / "run", progress=False)
    assert result.final_accuracy is not None
    return result.final_accuracy


@pytest.mark.parametrize("kind", [kind for kind in kinds_of("algorithm") if kind not in WITHOUT_ROUNDS])
def test_every_method_learns_at_its_defaults_where_labels_are_skewed(kind: str, tmp_path: Path) -> None:
    """The most frequent class has a tenth of the records."""
    assert accuracy(tmp_path, kind) > 0.3


def test_fedproto_at_its_defaults_stays_near_fedavg(tmp_path: Path) -> None:
    """A sum over features in place of their mean, 32 times as strong, ends at 46 % where FedAvg has 87 %."""
    assert accuracy(tmp_path / "proto", "fedproto") > 0.9 * accuracy(tmp_path / "avg", "fedavg")


def moved(tmp_path: Path, **more: Any) -> torch.Tensor:
    """The model after one round, as one vector, less the one it began with."""
    settings = {"partition": "iid", "rounds": 1, "model": "mlp", **more}
    directory = fl_sim.run(settings, out=tmp_path / str(more["attack"]), progress=False).directory
    start = fl_sim.run(
        {**settings, "attack": "none", "local": {"learning_rate": 1e-30}}, out=tmp_path / "start", progress=False
    ).directory
    after, before = (load_file(folder / "model.safetensors") for folder in (directory, start))
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(after)])


@pytest.mark.parametrize("clients", [10, 11])
@pytest.mark.parametrize("attack", [kind for kind in kinds_of("attack") if kind != "none"])
def test_every_attack_at_its_defaults_moves_the_mean_for_even_and_odd_numbers_of_clients(
    attack: str, clients: int, tmp_path: Path
) -> None:
    honest, attacked = (moved(tmp_path, attack=which, clients=clients) for which in ("none", attack))
    assert float((attacked - honest).norm() / honest.norm()) > 0.05


SETTINGS = LocalSettings(0.1, 0.0, 0.0, batch_size=4, epochs=1)


class Uniform(FedAvg):
    """FedAvg in which all clients count the same."""

    weighting = "uniform"


def after_two_rounds(federation: Any, algorithm: Any) -> torch.Tensor:
    with torch_kept():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    generator = torch.Generator().manual_seed(0)
    labels = ([0, 0, 1, 0], [2, 1, 1, 1, 0, 1], [2, 2, 0])
    shards = [(torch.randn(len(own), 5, generator=generator), torch.tensor(own)) for own in labels]
    made = federation(algorithm, model, shards, SETTINGS)
    made.num_classes = 3
    made.round()
    made.round()
    return flattened(made.server.params).flat.clone()


def extremes(part: str) -> list[Any]:
    """Every kind of ``part`` with each of its numbers at each bound that the number may take."""
    found = []
    for settings in kinds_of(part).values():
        for name, field in settings.model_fields.items():
            bounds = [getattr(rule, end) for rule in field.metadata for end in ("ge", "le") if hasattr(rule, end)]
            found += [settings(**{name: bound}) for bound in bounds if isinstance(field.default, float)]
    return found


@pytest.mark.parametrize("algorithm", extremes("algorithm"), ids=repr)
def test_a_strength_that_makes_a_method_fedavg_is_said(algorithm: Any, federation: Any) -> None:
    result = after_two_rounds(federation, algorithm)
    plain = [after_two_rounds(federation, one) for one in (FedAvg(), Uniform())]
    is_meant = isinstance(algorithm, OwnModel)  # the server's model is FedAvg's, and the clients' own ones are not
    is_fedavg = any(result.shape == one.shape and torch.allclose(result, one, rtol=0, atol=1e-7) for one in plain)
    if not is_meant and is_fedavg:
        assert any("has no effect" in said for said in Experiment(algorithm=algorithm, rounds=2).remarks)


SAID: dict[str, tuple[dict[str, Any], str]] = {
    "nothing proximal": ({"algorithm": "fedprox:0"}, "algorithm.mu=0 has no effect: this is fedavg"),
    "nothing distilled": ({"algorithm": "fedntd:0"}, "algorithm.beta=0 has no effect"),
    "absent classes as others": ({"algorithm": "fedrs:1"}, "algorithm.alpha=1 has no effect"),
    "no calibration": ({"algorithm": "fedlc:0"}, "algorithm.tau=0 has no effect: no logit is shifted"),
    "vacant classes": ({"algorithm": "fedvls:0"}, "algorithm.distillation_weight=0 has no effect"),
    "no suppression": ({"algorithm": {"kind": "fedvls", "logit_weight": 0}}, "algorithm.logit_weight=0 has no effect"),
    "not uphill": ({"algorithm": "fedsam:0"}, "algorithm.rho=0 has no effect: this is fedavg"),
    "nothing carried": ({"algorithm": "fedcm:1"}, "algorithm.alpha=1 has no effect"),
    "FedCM of one round": ({"algorithm": "fedcm", "rounds": 1}, "rounds=1, and the first round has no earlier update"),
    "MoFedSAM not uphill": ({"algorithm": {"kind": "mofedsam", "rho": 0}}, "algorithm.rho=0 .* this is fedcm"),
    "FedSpeed not uphill": ({"algorithm": {"kind": "fedspeed", "rho": 0}}, "algorithm.rho=0 .* this is feddyn"),
    "no share uphill": ({"algorithm": {"kind": "fedspeed", "uphill_share": 0}}, "algorithm.uphill_share=0 has no"),
    "no contrast": ({"algorithm": "moon:0"}, "algorithm.mu=0 has no effect: this is fedavg"),
    "MOON of one round": ({"algorithm": "moon", "rounds": 1}, "a client's first round has no earlier model"),
    "no pull": ({"algorithm": "fedproto:0"}, "algorithm.strength=0 has no effect: this is fedavg"),
    "FedProto of one round": ({"algorithm": "fedproto", "rounds": 1}, "no prototypes in the first round"),
    "no tilt": ({"algorithm": "term:0"}, "algorithm.t=0 has no effect: this is fedavg"),
    "no fairness": ({"algorithm": "q-ffl:0"}, "algorithm.q=0 has no effect: this is fedavg with equal weights"),
    "no ascent": ({"algorithm": "agnostic-fl:0"}, "algorithm.mixture_learning_rate=0 has no effect"),
    "no labels": ({"algorithm": "feddisco:0"}, "algorithm.a=0 has no effect: labels have no effect on the weights"),
    "no labels, no constant": ({"algorithm": {"kind": "feddisco", "a": 0, "b": 0}}, "this is fedavg"),
    "corrections of one round": ({"algorithm": "scaffold", "rounds": 1}, "corrections have no effect: rounds=1"),
    "another program": (
        {"algorithm": {"kind": "scaffold", "variant": "niid-bench"}, "sampler": "fixed-size:5"},
        "control variates start at random weights, and here they start at 0",
    ),
    "no server momentum": (
        {"algorithm": {"kind": "fedavgm", "server_momentum": 0}}, "algorithm.server_momentum=0 .* this is fedavg",
    ),
    "FedAvgM of one round": ({"algorithm": "fedavgm", "rounds": 1}, "rounds=1, and this is fedavg"),
    "nothing trimmed": ({"aggregator": "trimmed-mean:0"}, "aggregator.trim=0 has no effect: nothing is cut off"),
    "too few to trim": ({"aggregator": "trimmed-mean", "clients": 2}, "aggregator.trim=0.2 has no effect"),
    "no middle": ({"aggregator": "median", "sampler": "fixed-size:2"}, "aggregator median has no effect"),
    "all selected": ({"aggregator": "multi-krum:0"}, "aggregator.hostile=0 has no effect: all 10 clients"),
    "as many selected as there are": (
        {"aggregator": {"kind": "multi-krum", "selected": 10}}, "aggregator.selected=10 has no effect",
    ),
    "no noise": ({"aggregator": {"kind": "global-dp", "noise_multiplier": 0}}, "aggregator.noise_multiplier=0 has no"),
    "everybody drawn": ({"sampler": "fixed-size"}, "sampler.cohort_size=10 has no effect: all 10 clients"),
    "everybody chosen": ({"sampler": "oort"}, "sampler.cohort_size=10 has no effect: all 10 clients"),
    "everybody's coin": ({"sampler": "poisson:1"}, "sampler.sampling_rate=1 has no effect"),
    "one group": ({"sampler": {"kind": "cyclic", "groups": 1, "sampling_rate": 1}}, "sampler.groups=1 has no effect"),
    "all of the largest": ({"compress": "top-k:1"}, "compress.share=1 has no effect: all numbers"),
    "all of some": ({"compress": "rand-k:1"}, "compress.share=1 has no effect: all numbers"),
    "devices alike": ({"devices": {"kind": "uniform", "spread": 0}}, "all devices are equal"),
    "devices all alike": ({"devices": {"kind": "log-normal", "sigma": 0}}, "devices.sigma=0 has no effect"),
    "age does not count": (
        {"devices": "constant", "server": {"kind": "fedasync", "staleness_exponent": 0}},
        "server.staleness_exponent=0 has no effect",
    ),
    "nobody is late": (
        {"devices": "constant", "server": {"kind": "fedbuff", "concurrency": 1}}, "no update is older than the model",
    ),
    "no noise on inputs": ({"partition": "feature-noise:0"}, "partition.sigma=0 has no effect"),
    "no decay": ({"local": {"schedule": "exponential:1"}}, "local.schedule.decay=1 has no effect"),
    "no step": ({"local": {"schedule": {"kind": "step", "decay": 1}}}, "local.schedule.decay=1 has no effect"),
    "a step after the end": ({"local": {"schedule": "step:20"}}, "local.schedule.every=20 has no effect: rounds=20"),
    "no cosine": ({"local": {"schedule": "cosine:1"}}, "local.schedule.final=1 has no effect"),
    "z of 0": ({"attack": {"kind": "alie", "deviations": 0}}, "attack.deviations=0.0 has no effect: z is 0 for 2"),
    "the paper's z of two": ({"attack": {"kind": "alie", "deviations": "formula"}}, "attack.deviations=formula has no"),
    "alone": ({"attack": "alie:1"}, "a deviation needs two hostile clients in a round, and rounds have 1 of them"),
    "alone on average": ({"attack": "alie:2", "sampler": "fixed-size:4"}, "rounds have 0.8 of them on average"),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_a_setting_without_effect_is_said(case: str) -> None:
    settings, words = SAID[case]
    said = experiment_from({"partition": "iid", **settings}).remarks
    assert any(re.search(words, one) for one in said), said


def test_what_has_no_effect_is_on_the_screen_and_in_the_result(tmp_path: Path, capsys: Any) -> None:
    settings = {"algorithm": "fedprox:0", "model": "logistic", "rounds": 1, "clients": 2, "partition": "iid"}
    result = fl_sim.run(settings, out=tmp_path / "run")
    assert "algorithm.mu=0 has no effect: this is fedavg" in result.facts["warnings"]
    assert "algorithm.mu=0 has no effect" in capsys.readouterr().err


IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "a bound above all": ({"aggregator": "norm-bound:1000"}, "aggregator.norm_bound=1000 has no effect: no update had"),
    "a bound below all": ({"aggregator": "norm-bound:1e-6"}, ""),
    "smoothed away": (
        {"aggregator": {"kind": "geometric-median", "smoothing": 1e6}},
        "geometric-median has no effect: the distances of updates are below aggregator.smoothing=1e.06, so",
    ),
    "hardly smoothed": ({"aggregator": "geometric-median"}, ""),
    "hostile and empty": (
        {"attack": "sign-flip:1", "partition": "dirichlet:0.02", "clients": 60, "seed": 4},
        "attack sign-flip has no effect: no hostile client with records took part",
    ),
    "hostile": ({"attack": "sign-flip:1"}, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", IDLE)
def test_what_turned_out_to_have_no_effect_is_said_after_the_last_round(case: str, tmp_path: Path) -> None:
    settings, words = IDLE[case]
    few = {"partition": "iid", "clients": 4, "rounds": 2, "model": "logistic"}
    said = fl_sim.run({**few, **settings}, out=tmp_path / "run", progress=False).facts["warnings"]
    found = [one for one in said if "has no effect" in one]
    assert len(found) == bool(words)
    assert all(re.search(words, one) and one.endswith("(in each of the last 2 rounds)") for one in found)


def test_what_had_an_effect_in_some_rounds_is_not_said(tmp_path: Path) -> None:
    """Of six seeds some draw the hostile client for one round of two, and some for neither."""
    few = {"partition": "iid", "clients": 4, "rounds": 2, "model": "logistic", "attack": "sign-flip:1"}
    said = {
        seed: fl_sim.run(
            {**few, "sampler": "fixed-size:1", "seed": seed}, out=tmp_path / str(seed), progress=False
        ).facts["warnings"]
        for seed in range(6)
    }
    drawn = {seed: _rounds_with_a_hostile_client(seed) for seed in said}
    assert {0, 1} <= {*drawn.values()}
    for seed, rounds in drawn.items():
        assert any("has no effect" in one for one in said[seed]) == (rounds == 0)


def _rounds_with_a_hostile_client(seed: int) -> int:
    [hostile] = hostile_clients(SignFlip(clients=1), 4, seed)
    coins = (rng(seed, "sampler", number).random for number in (1, 2))
    return sum(hostile in FixedSize(cohort_size=1).sample(4, one, 1) for one in coins)


@pytest.mark.parametrize(
    "part", ["algorithm", "aggregator", "attack", "partition", "compress", "devices", "server", "sampler"]
)
def test_defaults_have_an_effect(part: str) -> None:
    """But for a cohort as large as the federation, which clients=10 and cohort_size=10 are."""
    for kind in kinds_of(part):
        more: dict[str, Any] = {"devices": "constant"} if part == "server" else {}
        if kind in {"fedbabu", "knn-per"}:  # their effect is on clients' own models
            more = {"evaluate": {"clients": "class-shares", "fine_tune_epochs": 1}}
        if kind == "cfl":  # whose clusters are split after 20 rounds at the earliest
            more = {"rounds": 30}
        # these need a file, a pool, an epsilon, a proxy, or a number of epochs
        if kind in {
            "profile",
            "tstr",
            "distributed-dp",
            "distributed-dp-sgd",
            "feddf",
            "fedmd",
            "dense",
            "co-boosting",
        }:
            continue
        assert experiment_from({"clients": 12, **more, part: kind}).remarks == [], kind


def test_schedules_have_an_effect_at_their_defaults() -> None:
    for kind in kinds(Schedule):
        assert experiment_from({"local": {"schedule": kind}}).remarks == []


def test_the_papers_bound_on_deviations_moves_little_for_few_hostile_clients() -> None:
    attack = ALittleIsEnough(deviations="formula")
    assert [attack._z(count, 2) for count in (4, 10, 12, 100)] == [0, 0, 0, 0]
    assert attack._z(11, 2) == pytest.approx(0.1397, abs=1e-4)
    assert attack._z(100, 24) == pytest.approx(0.3711, abs=1e-4)
    assert attack._z(100, 47) < 1.5 < attack._z(100, 48)


LATER: list[tuple[str, str, dict[str, Any], Callable[[Experiment], Any], Any]] = [
    ("algorithm", "fedproto", {"distance": "sum"}, lambda one: one.algorithm, FedProto(distance="sum")),
    ("attack", "alie", {"deviations": "formula"}, lambda one: one.attack, ALittleIsEnough(deviations="formula")),
    ("aggregator", "norm-bound", {"weights": "examples"}, lambda one: one.aggregator, NormBound(weights="examples")),
]


@pytest.mark.parametrize(("part", "kind", "before", "found", "expected"), LATER, ids=lambda one: str(one)[:12])
def test_a_run_from_before_a_setting_is_what_it_was_and_no_run_of_today(
    part: str, kind: str, before: dict[str, Any], found: Any, expected: Any, tmp_path: Path
) -> None:
    old = {part: {"kind": kind}, "partition": {"kind": "iid"}, "rounds": 1, "clients": 4, "model": "mlp"}
    assert found(experiment_of_run(old)) == expected
    assert experiment_of_run({**old, part: {"kind": kind, **before}}) == experiment_of_run(old)
    result = fl_sim.run(old, out=tmp_path / "run", progress=False)
    config = result.directory / "config.toml"
    [name] = before
    lines = [line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith(f"{name} =")]
    assert len(lines) == len(config.read_text(encoding="utf-8").splitlines()) - 1
    config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"holds a run with other settings \({part}\)"):
        fl_sim.run(old, out=tmp_path / "run", progress=False)


def test_remarks_are_a_part_of_what_a_kind_may_say() -> None:
    assert isinstance(FedProto(), Remarking)
    assert not isinstance(FedAvg(), Remarking)
