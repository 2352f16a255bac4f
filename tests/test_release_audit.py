"""Single releases of the private generators: the real ones pass with power to spare, planted faults are refuted."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

STEP, COINS, FAKES, EMBEDDING, MOMENTS = (
    "D step, all records",
    "D step, records by coins of 1/2",
    "D step, where the classes of fakes matter",
    "mean embedding",
    "moments of features",
)


@pytest.fixture(scope="module")
def release_audit(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("release_audit")


def found(script: ModuleType, family: str, name: str, num_runs: int, seed: int = 0) -> Any:
    amplify, mechanisms = script.families(1.0)[family]
    number = next(number for number, one in enumerate(mechanisms) if one.name == name)
    return script.audit(amplify, 1.0, mechanisms[number], num_runs=num_runs, seed=seed, faulty=number > 0).profile


def test_the_sums_of_the_mean_embedding_are_not_refuted(release_audit: ModuleType) -> None:
    assert not found(release_audit, EMBEDDING, "as it is", 300).refuted


def test_the_refuted_epsilon_comes_near_the_claim_along_the_direction_of_the_record(release_audit: ModuleType) -> None:
    amplify, mechanisms = release_audit.families(1.0)[MOMENTS]
    found = release_audit.audit(amplify, 1.0, mechanisms[0], num_runs=1000, seed=0, faulty=False)
    claimed = release_audit.epsilon_at(amplify, 1.0)
    assert 0.4 * claimed < found.proven < claimed


@pytest.mark.usefixtures("coarse_losses")  # the larger claim is the harder one to refute
@pytest.mark.parametrize(
    ("fault", "num_runs"),
    [("half the noise", 300), ("no noise", 100), ("no clipping", 100), ("count without noise", 100)],
)
def test_faults_of_the_mean_embedding_are_refuted(release_audit: ModuleType, fault: str, num_runs: int) -> None:
    assert found(release_audit, EMBEDDING, fault, num_runs).refuted


def test_the_moments_of_features_are_not_refuted(release_audit: ModuleType) -> None:
    assert not found(release_audit, MOMENTS, "as it is", 300).refuted


@pytest.mark.usefixtures("coarse_losses")
def test_half_the_noise_on_moments_is_refuted(release_audit: ModuleType) -> None:
    assert found(release_audit, MOMENTS, "half the noise", 300).refuted


@pytest.mark.parametrize("family", [STEP, FAKES])
def test_a_step_of_the_discriminator_is_not_refuted(release_audit: ModuleType, family: str) -> None:
    assert not found(release_audit, family, "as it is", 200).refuted


@pytest.mark.usefixtures("coarse_losses")
@pytest.mark.parametrize(
    ("fault", "num_runs"), [("no noise", 100), ("no clipping", 100), ("divided by the realised batch", 150)]
)
def test_loud_faults_of_the_step_are_refuted_at_once(release_audit: ModuleType, fault: str, num_runs: int) -> None:
    assert found(release_audit, STEP, fault, num_runs).refuted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fault"),
    [
        (STEP, "half the noise"),
        (STEP, "real and fake clipped apart"),
        (FAKES, "fake labels from the private histogram"),
        (MOMENTS, "products forgotten in the sensitivity"),
        (MOMENTS, "count without noise"),
        (COINS, "all records taken"),
        (EMBEDDING, "two releases for the price of one"),
    ],
)
def test_quiet_faults_are_refuted_in_more_runs(release_audit: ModuleType, family: str, fault: str) -> None:
    assert found(release_audit, family, fault, 4000).refuted


@pytest.mark.slow
@pytest.mark.parametrize("family", [STEP, COINS, FAKES, EMBEDDING])
def test_the_true_mechanisms_pass_more_runs_and_the_audit_is_not_vacuous(
    release_audit: ModuleType, family: str
) -> None:
    profile = found(release_audit, family, "as it is", 4000)
    assert not profile.refuted
    assert profile.power > 0.75
