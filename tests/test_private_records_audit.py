"""Audits of whole runs of DP-SGD on clients: the real steps stay below their claim, every planted fault is refuted."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fl_sim.seeding import rng

pytestmark = pytest.mark.usefixtures("coarse_losses")

SCALE = 5
REAL = ("all records, one step", "all records, ten steps", "batches of a tenth, 20 rounds")
FAULTS = ("half the noise", "clipped after the mean", "noise once a round", "losses in the clear")
COMPANIONS, SHUFFLED = "batches of a twentieth, companions", "shuffled, billed as Poisson"


@pytest.fixture(scope="module")
def load(load_benchmark: Callable[[str], ModuleType]) -> Iterator[Callable[[str], ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).resolve().parents[1] / "benchmarks/private_records")
        yield lambda name: load_benchmark(f"private_records/{name}")


@pytest.fixture(scope="module")
def audit(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("audit")


@pytest.fixture(scope="module")
def membership(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("membership")


def test_the_tests_know_every_mechanism(audit: ModuleType) -> None:
    faulty = {name: one.is_faulty for name, one in audit.mechanisms().items()}
    assert faulty == dict.fromkeys((*REAL, COMPANIONS), False) | dict.fromkeys((*FAULTS, SHUFFLED), True)
    assert {one.setting.epsilon for one in audit.mechanisms().values()} == {4.0}


@pytest.mark.parametrize("name", REAL)
def test_real_steps_are_not_refuted_and_what_is_proven_is_near_the_claim(audit: ModuleType, name: str) -> None:
    found = audit.audit(name, audit.mechanisms(SCALE)[name])
    assert 3.9 < found.claimed <= 4.0
    assert not found.refuted
    if name != REAL[2]:  # coins of batches hide canaries from an auditor who does not know them
        assert found.proven > 0.5 * found.claimed
        assert found.estimate == pytest.approx(found.claimed, rel=0.1)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_refuted(audit: ModuleType, name: str) -> None:
    found = audit.audit(name, audit.mechanisms(SCALE)[name])
    assert 3.9 < found.claimed <= 4.0  # the bill says nothing of the fault
    assert found.proven > found.claimed


@pytest.mark.long
def test_shuffled_batches_are_refuted_where_poisson_batches_are_not(audit: ModuleType) -> None:
    verdicts = {}
    for name in (COMPANIONS, SHUFFLED):
        mechanism = audit.mechanisms()[name]
        shorter = replace(mechanism.setting, clients=300, companions=9, rounds=10, batches=10, epsilon=8.0)
        fewer = replace(mechanism, setting=shorter)
        verdicts[name] = audit.audit(name, fewer).refuted
    assert verdicts == {COMPANIONS: False, SHUFFLED: True}


def test_a_canary_moves_the_sum_along_itself_alone_and_by_one_clipping_norm(audit: ModuleType) -> None:
    setting = audit.Setting(clients=2, canaries=5, steps=3, epsilon=400.0)
    seen = audit.watched(setting)
    assert seen.noise < 0.1
    assert seen.sums[0] == pytest.approx(3.0 * seen.taking_part, abs=6 * 3**0.5 * seen.noise)
    assert np.isnan(seen.losses).all()


def test_a_record_is_called_trained_on_where_others_scores_say_so(membership: ModuleType) -> None:
    draw, models, records = rng(0, "scores"), 40, 30
    trained_on = draw.permuted(np.arange(models)[:, np.newaxis] % 2 == np.zeros(records), axis=0)
    scores = draw.standard_normal((models, records)) + 3 * trained_on + np.arange(records)
    ratios = membership.likelihood_ratios(scores, trained_on)
    members, others = ratios[trained_on], ratios[~trained_on]
    assert membership.true_positive_rate(members, others, 0.01) == pytest.approx(0.75, abs=0.15)  # P(N > 2.33 - 3)
    assert (others > np.quantile(others, 0.99)).mean() <= 0.01
    moved = scores.copy()
    moved[0, 0] = 1e9  # in the ratios of its own record alone
    assert np.array_equal(membership.likelihood_ratios(moved, trained_on)[:, 1:], ratios[:, 1:])


def test_an_overfit_model_gives_records_away_and_private_steps_do_not(membership: ModuleType) -> None:
    plain, private = (membership.attacked(epsilon, 24) for epsilon in (None, 1.0))
    assert plain.caught[0] > 0.05
    assert private.caught[0] < 0.03
    assert private.limit(0.01) == pytest.approx(0.0272, abs=1e-4)
