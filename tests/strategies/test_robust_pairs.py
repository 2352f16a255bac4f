"""Every algorithm beside every aggregator that looks at single updates: refused with the reason, or sound."""

import math
from typing import Any

import pytest
import torch

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.params import num_parameters, scale
from fl_sim.settings import kinds_of
from fl_sim.types import Cohort, Params, Reply, ServerState
from strategies.aggregators import Robust, WeightedMean
from strategies.algorithm import MeanOnly, PartialTraining, Unfolding, payload_template

ALGORITHMS = kinds_of("algorithm")
ROBUST = [kind for kind, made in kinds_of("aggregator").items() if issubclass(made, Robust)]
WITHSTANDING = [kind for kind in ROBUST if kind not in {"foolsgold", "dnc"}]
"""Rules with which no two clients of nine move the result far. FoolsGold bounds no single update, and DnC looks along
one direction, so that a large update hides another."""
WITHOUT_NOISE = {"flame": "flame:0"}
REFUSED = {
    "scaffold": "mean of all c_i",
    "feddyn": "h is the mean",
    "fedspeed": "h is the mean",
    "fedexp": "squared norms",
    "ifca": "only a mean leaves such zeros",
    "cfl": "clusters may be too small",
    **dict.fromkeys(("depthfl", "heterofl", "fedrolex"), "compares or bounds updates of one shape"),
    "fedproto": "divided by counts",
    "fedproto-local": "divided by counts",
    "fd": "reads the mean logits of every client",
    "fedmd": "reads the logits on public records of every client",
    **dict.fromkeys(("fedgh", "fedtgp"), "reads the mean features of every client"),
    "fednova": "set a public algorithm.tau_eff",
    **dict.fromkeys(("feddisco", "q-ffl", "term", "agnostic-fl", "fedmgda"), "only aggregator mean uses such weights"),
    "fedmix": "averages that others share",
    "naivemix": "averages that others share",
    "centralized": "single client",
    "pate": "teachers vote once",
    "tstr": "has no rounds",
    **dict.fromkeys(("afl", "fedpft"), "has no rounds"),
    **dict.fromkeys(("feddf", "dense", "co-boosting", "fedov", "fens"), "keeps all models"),
}
START: Params = {"body": torch.zeros(4, 5), "head.weight": torch.zeros(3, 4), "head.bias": torch.zeros(3)}
ADAPTER: Params = {"1.lora_A": torch.zeros(2, 5), "1.lora_B": torch.zeros(4, 2)}
BESIDE: Params = {"1.weight": torch.zeros(4, 5), "1.lora_scale": torch.tensor(1.0)}
HOSTILE = 2


def test_the_robust_aggregators_are_known_as_such() -> None:
    sums = {"global-dp", "distributed-dp", "distributed-dp-sgd", "secure-sum"}
    assert set(kinds_of("aggregator")) == {"mean", *sums, *ROBUST}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_pair_is_refused_with_the_reason_or_its_server_withstands(algorithm: str) -> None:
    for aggregator in ROBUST:
        settings = {"algorithm": algorithm, "aggregator": WITHOUT_NOISE.get(aggregator, aggregator)}
        if algorithm not in REFUSED and aggregator in WITHSTANDING:
            _expect_soundness(experiment_from(settings))
        if algorithm not in REFUSED:
            continue
        with pytest.raises(UserError, match=f"algorithm {algorithm} .*{REFUSED[algorithm]}.*(leave|take)") as raised:
            experiment_from(settings)
        assert "\n" not in str(raised.value)


def test_fednova_with_a_public_number_of_steps_withstands() -> None:
    for aggregator in WITHSTANDING:
        rule = WITHOUT_NOISE.get(aggregator, aggregator)
        _expect_soundness(experiment_from({"algorithm": {"kind": "fednova", "tau_eff": 2}, "aggregator": rule}))


def test_what_needs_the_mean_still_has_it() -> None:
    for kind, made in ALGORITHMS.items():
        if issubclass(made, MeanOnly):
            assert kind in REFUSED
            experiment_from({"algorithm": kind, "aggregator": "mean"})


def _expect_soundness(experiment: Any) -> None:
    """Clients that agree make what their mean makes; two of nine that send anything move the server's state little."""
    algorithm, aggregator = experiment.algorithm, experiment.aggregator
    groups = [["factors", "delta"]] if isinstance(algorithm, Unfolding) else [["delta"], ["direction"]]
    assert list(payload_template(algorithm, algorithm.init(_start(algorithm)))) in groups
    agreeing = _after(algorithm, aggregator, spread=0.0, harm=None)
    _expect_close(agreeing, _after(algorithm, WeightedMean(), spread=0.0, harm=None), 1e-5)
    honest = _after(algorithm, aggregator, spread=0.01, harm=None)
    for harm in (-1e6, 1e6):
        _expect_close(honest, _after(algorithm, aggregator, spread=0.01, harm=harm), 2.0)
    spoilt = _after(algorithm, WeightedMean(), spread=0.01, harm=1e6)
    assert float(max(value.abs().max() for value in spoilt.memory.get("second_moment", spoilt.params).values())) > 1e2


def _start(algorithm: Any) -> Params:
    """Return START; with an adapter for algorithms of adapters, and with its layer's weights if they need them."""
    if not isinstance(algorithm, Unfolding):
        return START
    return {**ADAPTER, **START, **(BESIDE if isinstance(algorithm, PartialTraining) else {})}


def _after(algorithm: Any, aggregator: Any, *, spread: float, harm: float | None) -> ServerState:
    """Return the server's state after three rounds of nine clients, the first of which may be hostile."""
    start = _start(algorithm)
    server: ServerState = algorithm.init(start)
    generator = torch.Generator().manual_seed(0)
    size = num_parameters(start)
    common = {name: torch.randn(value.shape, generator=generator) / size for name, value in start.items()}
    for server_round in (1, 2, 3):
        replies = []
        for client in range(9):
            own = {
                name: value + spread * torch.randn(value.shape, generator=generator) for name, value in common.items()
            }
            if harm and client < HOSTILE:
                by = math.copysign(math.sqrt(abs(harm)), harm) if isinstance(algorithm, Unfolding) else harm
                own = scale(own, by)  # products of two factors then have the harm of an update
            template = payload_template(algorithm, server)
            payloads = {group: {name: own[name] for name in params} for group, params in template.items()}
            sent = algorithm.unfolded(payloads) if isinstance(algorithm, Unfolding) else payloads
            replies.append(Reply(client, sent, 10, 1.0))
        cohort = Cohort(server_round, tuple(replies), 9, 9.0, own=replies[-1].payloads)
        aggregate = aggregator.mean(cohort, algorithm.weighting)
        assert aggregate is not None
        server = algorithm.merge(server, aggregate)
    return server


def _expect_close(one: ServerState, other: ServerState, limit: float) -> None:
    pairs = zip(_all(one), _all(other), strict=True)
    assert max(float((first - second).abs().max()) for first, second in pairs) <= limit


def _all(server: ServerState) -> list[torch.Tensor]:
    groups = [server.params, *server.broadcast.values(), *server.memory.values()]
    return [value for group in groups for value in group.values()]
