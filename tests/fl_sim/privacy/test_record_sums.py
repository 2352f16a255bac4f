"""Noisy sums of per-record gradients: the central Gaussian's cost and error, bounded sensitivity, drop-outs, audits."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_sim.errors import UserError
from fl_sim.privacy import audit, record_sums
from fl_sim.privacy.accounting import delta_profile, epsilon_of_counts, noise_multiplier
from fl_sim.privacy.events import noise_multiplier as noise_multiplier_of
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.modular_sums import noise_for
from fl_sim.privacy.record_sums import BITS, MOST_RECORDS, STEPS_OF_NOISE, RecordGrid, opened, record_share


def noise_of(*numbers: int) -> Noise:
    return Noise.seeded(int("1".join(map(str, numbers))))


def total_of(sums: np.ndarray, grid: RecordGrid, server_round: int = 1) -> np.ndarray:
    shares = [record_share(row, grid, noise_of(client, server_round), server_round) for client, row in enumerate(sums)]
    return np.asarray(np.sum(shares, axis=0) % grid.modulus)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's noise of 256 grid steps, whose table is made at once."""
    monkeypatch.setattr(record_sums, "STEPS_OF_NOISE", 2**8)


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(mechanism: str, variance: float, noise: Noise, count: int, **more: object) -> np.ndarray:
        return np.zeros(count, np.int64)

    monkeypatch.setattr(record_sums, "drawn", none)


@pytest.mark.parametrize("shares", [1, 10, 100])
@pytest.mark.parametrize(("rounds", "epsilon"), [(1, 1.0), (200, 3.0), (200, 10.0)])
def test_the_noise_is_that_of_a_server_with_all_records(shares: int, rounds: int, epsilon: float) -> None:
    """For any number of clients, up to the rounding: sqrt(d) of 2^16 sqrt(m) steps of noise."""
    central = noise_multiplier(lambda event: event, rounds, epsilon, 1e-5)
    grid = RecordGrid(19_450, shares, 4.4, 1.0)
    found = noise_for(grid, rounds, epsilon, 1e-5)
    rounding = math.sqrt(19_450) / (STEPS_OF_NOISE * math.sqrt(shares))
    assert central < found < central * (1.017 + 1.1 * central * rounding)  # 1.017: RDP of whole orders only
    planned = grid.with_noise(found)
    assert 0.999 * epsilon < epsilon_of_counts({planned.event(shares): rounds}, 1e-5) <= epsilon
    assert planned.std_of_mean * shares == pytest.approx(found * 4.4, rel=1e-6)


def test_the_event_is_the_gaussians_of_its_noise_and_sensitivity() -> None:
    grid = RecordGrid(7850, 10, 1.0, 20.0)
    event = grid.event(10)
    assert noise_multiplier_of(event) == pytest.approx(20.0 / (grid.l2 / grid.scale))
    assert 1 < grid.l2 / grid.scale < 1.01
    gaussian = dp_event.GaussianDpEvent(noise_multiplier_of(event))
    ours, theirs = (epsilon_of_counts({one: 100}, 1e-5) for one in (event, gaussian))
    assert theirs <= ours < 1.003 * theirs


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 200), st.integers(1, 60), st.floats(1e-3, 1e3), st.floats(0.05, 100), st.integers(0, 10**6),
    st.sampled_from(["random", "largest", "one number", "zero"]),
)  # fmt: skip
def test_a_record_moves_a_rounded_sum_by_no_more_than_is_charged(
    size: int, records: int, norm: float, noise: float, seed: int, kind: str
) -> None:
    """Two sums that differ by one clipped gradient, rounded with the same coins."""
    generator = np.random.default_rng(seed)
    others = generator.normal(size=(records, size))
    others *= norm / np.linalg.norm(others, axis=1, keepdims=True)
    mine = {"random": generator.normal(size=size), "largest": np.ones(size), "zero": np.zeros(size)}.get(
        kind, np.eye(size)[0]
    )
    mine = mine * (norm / np.linalg.norm(mine)) if mine.any() else mine
    grid = RecordGrid(size, 3, norm, noise)

    def rounded(total: np.ndarray) -> np.ndarray:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(record_sums, "drawn", lambda *_, **__: np.zeros(size, np.int64))
            found = record_share(total, grid, noise_of(seed, 5), 1)
        half = grid.modulus // 2
        return np.asarray((found + half) % grid.modulus - half)

    moved = rounded(others.sum(axis=0) + mine) - rounded(others.sum(axis=0))
    assert np.linalg.norm(moved) <= grid.l2
    assert np.abs(moved).sum() <= grid.l1
    if kind == "one number" and size == 1:
        assert abs(int(moved[0])) >= grid.scale * norm - 1  # the bound is not far from what happens


@pytest.mark.usefixtures("without_noise")
def test_without_noise_the_sum_is_that_of_all_records_for_every_split() -> None:
    gradients = np.random.default_rng(0).normal(size=(60, 17))
    grids = {clients: RecordGrid(17, clients, 3.0, 1.0) for clients in (1, 3, 10)}
    for clients, grid in grids.items():
        sums = np.stack([part.sum(axis=0) for part in np.array_split(gradients, clients)])
        assert opened(total_of(sums, grid), grid) == pytest.approx(gradients.sum(axis=0), abs=clients / grid.scale)


@pytest.mark.usefixtures("without_noise")
def test_rounding_has_no_bias() -> None:
    grid = RecordGrid(9, 1, 1.0, 2.0**14)
    value = np.linspace(-0.7, 0.9, 9) / grid.scale
    found = np.mean([
        opened(record_share(value, grid, noise_of(number), 1), grid) for number in range(4000)
    ], axis=0)  # fmt: skip
    assert found * grid.scale == pytest.approx(value * grid.scale, abs=0.04)


@pytest.mark.usefixtures("coarse")
def test_the_noises_of_the_clients_add_up_to_the_planned_noise() -> None:
    grid = RecordGrid(4096, 8, 2.0, 5.0)
    for present in (8, 5):
        found = opened(total_of(np.zeros((present, 4096)), grid), grid)
        assert found.var() == pytest.approx(present / 8 * (5.0 * 2.0) ** 2, rel=0.1)
        assert abs(found.mean()) < 1
    noises = [opened(total_of(np.zeros((1, 4096)), grid, turn), grid) for turn in (1, 2)]
    assert abs(np.corrcoef(*noises)[0, 1]) < 0.1


@pytest.mark.parametrize("dropped", [1, 5, 9])
def test_with_drop_outs_the_cost_is_that_of_the_noise_that_was_added(dropped: int) -> None:
    grid = RecordGrid(7850, 10, 1.0, 20.0)
    found = epsilon_of_counts({grid.event(10 - dropped): 50}, 1e-5)
    less = 20.0 * math.sqrt(1 - dropped / 10)
    assert found == pytest.approx(epsilon_of_counts({dp_event.GaussianDpEvent(less): 50}, 1e-5), rel=0.02)
    assert found > epsilon_of_counts({grid.event(10): 50}, 1e-5)
    assert grid.event(11) == grid.event(10)  # more noise than planned is not counted


def test_sums_that_could_leave_the_range_are_refused() -> None:
    grid = RecordGrid(100, 10, 1.0, 20.0)
    grid.check_records(MOST_RECORDS)
    with pytest.raises(UserError, match=r"5,000,000 records' gradients may exceed the range of 40 bits.*1,048,576"):
        grid.check_records(5_000_000)
    narrow = RecordGrid(100, 10, 1.0, 0.01)
    with pytest.raises(UserError, match=r"noise of 0\.01 clipping norms and 10 clients.*a larger") as refused:
        narrow.check_records(50_000)
    fits = int(str(refused.value).split("clients, ")[1].split(" ")[0].replace(",", ""))
    narrow.check_records(fits)
    # The largest sum and the largest noise of all clients are within the range.
    most = fits * narrow.scale + 10 * (14.2 * STEPS_OF_NOISE + 40)
    assert most < 2 ** (BITS - 1)


def test_what_no_noise_reaches_is_refused_with_its_cure() -> None:
    with pytest.raises(UserError, match=r"out of reach with 40 bits for 100,000,000 numbers.*Set a smaller model"):
        noise_for(RecordGrid(10**8, 2, 1.0, 1.0), 1000, 0.5, 1e-5)


def audited(grid: RecordGrid, present: int, claimed_for: int) -> audit.ProfileAudit:
    """Compare the sums of ``present`` clients with the claim for ``claimed_for``, with one record and without it."""
    rows = np.zeros((present, grid.dimension))

    def run(world: int, number: int) -> np.ndarray:
        sums = rows.copy()
        sums[0, 0] = world * grid.clipping_norm
        shares = [record_share(one, grid, noise_of(number, client), 1) for client, one in enumerate(sums)]
        return opened(np.sum(shares, axis=0) % grid.modulus, grid)

    outputs = audit.run_mechanism(run, 900)
    claim = dp_event.GaussianDpEvent(math.sqrt(claimed_for / grid.shares) * grid.noise_multiplier)
    return audit.audit_profile(*outputs, delta_profile([claim], audit.EPSILONS))


@pytest.mark.usefixtures("coarse")
def test_an_audit_does_not_refute_the_claim_and_sees_most_of_it() -> None:
    found = audited(RecordGrid(4, 3, 2.0, 1.0), 3, 3)
    assert not found.refuted
    assert found.power == pytest.approx(1, abs=0.15)


@pytest.mark.usefixtures("coarse")
def test_an_audit_refutes_planted_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = RecordGrid(4, 3, 2.0, 1.0)
    assert audited(grid, 1, 3).refuted  # clients that dropped out are charged as present
    quarter = grid.share_variance / 4  # half of the planned noise
    monkeypatch.setattr(RecordGrid, "share_variance", quarter)
    assert audited(RecordGrid(4, 3, 2.0, 1.0), 3, 3).refuted
