"""Sums modulo 2^bits: exact without noise, the central Gaussian on a fine grid, bounded rounding, drop-outs, audits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg

from fl_sim.errors import Malformed, UserError
from fl_sim.privacy import audit, modular_sums
from fl_sim.privacy.accounting import delta_profile, epsilon_of_counts, noise_multiplier
from fl_sim.privacy.events import noise_multiplier as noise_multiplier_of
from fl_sim.privacy.integer_noise import Mechanism
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.modular_sums import (
    SumGrid,
    centred,
    hadamard,
    mean_of_sum,
    noise_for,
    packed,
    rotated,
    rounded_to_grid,
    share_of,
    signs,
    unpacked,
    wraps_around,
)

MECHANISMS: tuple[Mechanism, ...] = ("skellam", "discrete-gaussian")
SEED = 3


def _vectors(count: int, size: int, norm: float = 1.0) -> np.ndarray:
    found = np.random.default_rng(0).normal(size=(count, size))
    return np.asarray(norm * found / np.linalg.norm(found, axis=1, keepdims=True))


def _noise(*numbers: int) -> Noise:
    return Noise.seeded(int("1".join(map(str, numbers))))


def _total(vectors: np.ndarray, grid: SumGrid, server_round: int = 1) -> np.ndarray:
    shares = [
        share_of(row, grid, _noise(client, server_round), seed=SEED, server_round=server_round)
        for client, row in enumerate(vectors)
    ]
    return np.asarray(np.sum(shares, axis=0) % grid.modulus)


def _mean(vectors: np.ndarray, grid: SumGrid, server_round: int = 1) -> np.ndarray:
    return mean_of_sum(_total(vectors, grid, server_round), len(vectors), grid, seed=SEED, server_round=server_round)


def test_the_rotation_keeps_norms_and_spreads_them_and_undoes_itself() -> None:
    vector = np.zeros(1024)
    vector[17] = 3.0
    spread = hadamard(vector * signs(SEED, 1, 1024))
    assert np.abs(spread) == pytest.approx(3.0 / 32)
    assert hadamard(spread) * signs(SEED, 1, 1024) == pytest.approx(vector, abs=1e-12)
    matrix = np.stack([hadamard(row) for row in np.eye(8)])
    assert matrix == pytest.approx(linalg.hadamard(8) / 8**0.5)
    assert abs(signs(SEED, 1, 1024).mean()) < 0.1
    assert (signs(SEED, 1, 1024) != signs(SEED, 2, 1024)).any()


@given(st.integers(8, 20) | st.just(40), st.integers(0, 40), st.integers(0, 2**32))
def test_packed_numbers_are_unpacked_and_take_their_bits(bits: int, count: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 2**bits, count)
    content = packed(numbers, bits)
    assert len(content) == -(-count * bits // 8)
    assert (unpacked(content, count, bits) == numbers).all()
    if count * bits % 8:
        content[-1] |= 128
        with pytest.raises(Malformed, match="unused bits"):
            unpacked(content, count, bits)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("clients", "size"), [(1, 1), (3, 5), (20, 100)])
def test_without_noise_the_sum_is_that_of_the_rounded_vectors_exactly(
    mechanism: Mechanism, clients: int, size: int
) -> None:
    grid, vectors = SumGrid(size, clients, 2.0, 0.0, mechanism), _vectors(clients, size, 1.9)
    rows = [rotated(row, grid, seed=SEED, server_round=1) for row in vectors]
    rounded = [rounded_to_grid(row, grid, _noise(client, 1), 1) for client, row in enumerate(rows)]
    assert (centred(_total(vectors, grid), grid) == np.sum(rounded, axis=0)).all()
    assert _mean(vectors, grid) == pytest.approx(vectors.mean(axis=0), abs=3 * size**0.5 / grid.scale)
    assert grid.event(clients) == dp_event.NonPrivateDpEvent()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_with_many_bits_cost_and_error_are_those_of_the_central_gaussian(mechanism: Mechanism) -> None:
    central = noise_multiplier(lambda event: event, 10, 8.0, 1e-5)
    for bits, tolerance in ((16, 0.01), (20, 0.002), (40, 0.001)):
        grid = SumGrid(7850, 100, 1.0, 1.0, mechanism, bits)
        grid = replace(grid, noise_multiplier=noise_for(grid, 10, 8.0, 1e-5))
        assert central <= grid.noise_multiplier <= (1 + tolerance) * central
        at_z = {replace(grid, noise_multiplier=central).event(100): 10}
        assert 8.0 * (1 - 1e-4) <= epsilon_of_counts(at_z, 1e-5) <= 8.0 * (1 + 2 * tolerance)
        assert grid.std_of_mean == pytest.approx(central / 100, rel=tolerance)
    grid, vectors = SumGrid(250, 10, 2.0, 1.5, mechanism, 16), _vectors(10, 250, 2.0)
    errors = [_mean(vectors, grid, number) - vectors.mean(axis=0) for number in range(1, 21)]
    assert np.mean(np.square(errors)) == pytest.approx((1.5 * 2.0 / 10) ** 2, rel=0.07)
    assert np.mean(errors) == pytest.approx(0, abs=0.02)


def test_fewer_bits_mean_more_error() -> None:
    """As for the means of Kairouz, Liu and Steinke 2021, with d = 250 and n = 100: from 12 bits on it is flat."""
    errors = []
    for bits in (8, 10, 12, 16):
        grid = SumGrid(250, 100, 1.0, 1.0, "discrete-gaussian", bits)
        errors.append(replace(grid, noise_multiplier=noise_for(grid, 1, 5.0, 1e-5)).std_of_mean)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 2 * errors[3]
    assert errors[2] < 1.05 * errors[3]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 500), st.integers(8, 20), st.floats(1e-3, 1e3), st.integers(0, 10**6),
    st.sampled_from(["dense", "sparse", "huge", "tiny"]),
)  # fmt: skip
def test_rounding_never_exceeds_the_norm_that_is_charged(
    size: int, clients: int, bits: int, norm: float, seed: int, kind: str
) -> None:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=size) * {"huge": 1e6, "tiny": 1e-9}.get(kind, norm)
    if kind == "sparse":
        values *= generator.random(size) < 0.02
    grid = SumGrid(size, clients, norm, 1.0, bits=bits)
    try:
        scaled = rotated(values, grid, seed=seed, server_round=1)
    except UserError:
        return  # too few bits for so many clients
    assert np.linalg.norm(scaled) <= grid.scale * norm * (1 + 1e-9)
    rounded = rounded_to_grid(scaled, grid, _noise(seed, 5), 1)
    event = replace(grid, noise_multiplier=5.0).event(1)
    assert int(rounded @ rounded) <= grid.most_squared
    assert np.linalg.norm(rounded) <= grid.l2
    assert np.abs(rounded).sum() <= grid.l1
    assert event.l2 >= math.sqrt(replace(grid, noise_multiplier=5.0).most_squared) * (1 - 1e-12)
    # Conditional rounding gave up for nobody: every number is one of the two whole numbers around it.
    assert np.abs(rounded - scaled).max() < 1


def test_rounding_is_repeated_and_zeros_are_sent_where_it_never_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = SumGrid(64, 1, 1.0, 1.0, bits=12)
    scaled = rotated(_vectors(1, 64)[0], grid, seed=SEED, server_round=1)
    once = [
        (np.floor(scaled) + (_noise(number).uniform(64, purpose="x", server_round=1) < scaled % 1)).astype(np.int64)
        for number in range(300)
    ]
    squares = [int(one @ one) for one in once]
    assert np.mean(np.array(squares) <= grid.most_squared) >= 0.39  # 1 - e^(-1/2)
    usual, most = int(np.median(squares)), grid.most_squared
    monkeypatch.setattr(SumGrid, "most_squared", usual)
    grid = replace(grid)
    found = [rounded_to_grid(scaled, grid, _noise(number), 1) for number in range(50)]
    assert max(int(one @ one) for one in found) <= usual < most
    assert min(int(one @ one) for one in found) > 0.9 * usual
    monkeypatch.setattr(SumGrid, "most_squared", 0)
    assert not rounded_to_grid(scaled, replace(grid), _noise(1), 1).any()


def test_rounding_has_no_bias_and_a_client_without_data_is_the_noise_alone() -> None:
    grid = SumGrid(16, 4, 1.0, 1.0, bits=12)
    scaled = rotated(0.5 * _vectors(1, 16)[0], grid, seed=SEED, server_round=1)  # short enough for every rounding
    rounded = np.mean([rounded_to_grid(scaled, grid, _noise(number), 1) for number in range(4000)], axis=0)
    assert rounded == pytest.approx(scaled, abs=0.04)
    zeros = rotated(np.zeros(16), grid, seed=SEED, server_round=1)
    assert not rounded_to_grid(zeros, grid, _noise(1), 1).any()
    for bad in (math.nan, math.inf):
        values = np.ones(16)
        values[3] = bad
        assert not rotated(values, grid, seed=SEED, server_round=1).any()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_noises_of_the_clients_add_up_to_the_planned_noise(mechanism: Mechanism) -> None:
    grid = SumGrid(2048, 8, 1.0, 2.0, mechanism)
    for present in (8, 5):
        total = centred(_total(np.zeros((present, 2048)), grid), grid)
        assert total.var() == pytest.approx(present * grid.share_variance, rel=0.1)
        assert grid.event(present).variance == present * grid.share_variance
    assert grid.share_variance * 8 == pytest.approx((2.0 * grid.scale) ** 2, rel=1e-4)
    assert grid.share_variance * 8 >= (2.0 * grid.scale) ** 2
    noises = {client: _total(np.zeros((client, 2048)), grid) for client in (1, 2)}
    assert abs(np.corrcoef(noises[1], (noises[2] - noises[1]) % grid.modulus)[0, 1]) < 0.1


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("dropped", [1, 30, 60, 99])
def test_with_drop_outs_the_cost_is_that_of_the_noise_that_was_added(mechanism: Mechanism, dropped: int) -> None:
    grid = SumGrid(7850, 100, 1.0, 4.0, mechanism, 20)
    found = epsilon_of_counts({grid.event(100 - dropped): 3}, 1e-5)
    less = 4.0 * math.sqrt(1 - dropped / 100)
    assert found == pytest.approx(epsilon_of_counts({dp_event.GaussianDpEvent(less): 3}, 1e-5), rel=0.02)
    assert found > epsilon_of_counts({grid.event(100): 3}, 1e-5)
    assert grid.event(101) == grid.event(100)  # more noise than planned is not counted


def test_more_clients_than_planned_are_no_reason_to_charge_less() -> None:
    grid = SumGrid(100, 10, 1.0, 1.0)
    assert grid.event(14) == grid.event(10)


def test_what_no_noise_reaches_is_refused_with_its_cure() -> None:
    with pytest.raises(UserError, match=r"out of reach with 8 bits for 7,850 numbers of 100 clients.*more bits"):
        noise_for(SumGrid(7850, 100, 1.0, 1.0, bits=8), 10, 1.0, 1e-5)
    with pytest.raises(UserError, match=r"8 bits are too few for sums of 5,000 clients"):
        noise_for(SumGrid(7850, 5000, 1.0, 1.0, bits=8), 1, 8.0, 1e-5)


def test_a_sum_that_leaves_the_range_is_noticed_and_an_honest_one_is_not() -> None:
    grid, aligned = SumGrid(1000, 20, 1.0, 1.0), np.repeat(_vectors(1, 1000), 20, axis=0)
    for number in range(1, 9):
        assert not wraps_around(_total(aligned, grid, number), grid)
    assert not wraps_around(_total(_vectors(20, 1000), grid), grid)
    wide = replace(grid, noise_multiplier=0.1)
    narrow = replace(wide, headroom=1.0)
    assert wraps_around(_total(aligned, narrow), narrow)
    errors = [np.linalg.norm(_mean(aligned, one) - aligned[0]) for one in (wide, narrow)]
    assert errors[1] > 4 * errors[0]
    exact = np.full(grid.padded, grid.modulus // 2 + 3)  # beyond 2^(bits-1), so it appears on the other side
    assert (centred(exact, grid) == 3 - grid.modulus // 2).all()
    assert wraps_around(exact, grid)


def _audited(grid: SumGrid, present: int, claimed_for: int) -> audit.ProfileAudit:
    """Compare the sums of ``present`` clients with the claim for ``claimed_for``, for one client or its zeros."""
    rows = np.zeros((present, grid.dimension))

    def run(world: int, number: int) -> np.ndarray:
        values = rows.copy()
        values[0, 0] = world
        shares = [
            share_of(one, grid, _noise(number, client), seed=SEED, server_round=1) for client, one in enumerate(values)
        ]
        return mean_of_sum(np.sum(shares, axis=0) % grid.modulus, 1, grid, seed=SEED, server_round=1)

    outputs = audit.run_mechanism(run, 900)
    claim = dp_event.GaussianDpEvent(noise_multiplier_of(grid.event(claimed_for)))
    return audit.audit_profile(*outputs, delta_profile([claim], audit.EPSILONS))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_an_audit_does_not_refute_the_claim_and_sees_most_of_it(mechanism: Mechanism) -> None:
    found = _audited(SumGrid(4, 3, 1.0, 1.0, mechanism, 14), 3, 3)
    assert not found.refuted
    assert found.power == pytest.approx(1, abs=0.15)


def test_an_audit_refutes_planted_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = SumGrid(4, 3, 1.0, 1.0, bits=14)
    assert _audited(grid, 1, 3).refuted  # clients that dropped out are charged as present
    with monkeypatch.context() as patch:
        patch.setattr(modular_sums, "drawn", lambda *given, **more: np.zeros(4, np.int64))
        assert _audited(grid, 3, 3).refuted
    with monkeypatch.context() as patch:
        patch.setattr(modular_sums, "clip_factor", lambda norm, clipping_norm: 3.0)
        patch.setattr(modular_sums, "rounded_to_grid", lambda scaled, *given: np.rint(scaled).astype(np.int64))
        assert _audited(grid, 3, 3).refuted


def test_an_update_that_is_not_clipped_is_stopped_by_the_bound_on_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = SumGrid(4, 3, 1.0, 1.0, bits=14)
    monkeypatch.setattr(modular_sums, "clip_factor", lambda norm, clipping_norm: 3.0)
    assert not rounded_to_grid(rotated(np.ones(4), grid, seed=SEED, server_round=1), grid, _noise(1), 1).any()
