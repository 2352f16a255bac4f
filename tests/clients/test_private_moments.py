"""Private moments of features: what one record moves, how large the noise is, what is charged, and made only once."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2

from clients import private_moments
from clients.moments import moments_of, num_moments
from clients.policy import read_policy
from clients.private_moments import LONGEST, MomentsRelease, Protection, released_moments
from clients.private_moments import private_moments as noisy_moments
from fl_sim.errors import RunError
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.mechanisms import Noise, grid_spacing
from fl_sim.store.tensors import write_private

PROTECTION = Protection(2.0, 1e-5, 3.0, "secret")


class _Silent(Noise):
    """Noise of nothing but zeros: what is left is the sum, rounded to the grid."""

    def gaussian(self, count: int, std: float, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        return np.zeros(count)


def _sum(features: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    return noisy_moments(features, labels, 3, PROTECTION, _Silent(bytes(32), simulation_only=True))


_NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.lists(_NUMBERS, min_size=4, max_size=4), st.integers(0, 2))
def test_one_record_moves_all_moments_together_by_no_more_than_the_sensitivity(
    seed: int, size: int, row: list[float], label: int
) -> None:
    draw = np.random.default_rng(seed)
    features, labels = draw.normal(scale=3, size=(size, 4)), draw.integers(0, 3, size)
    place = draw.integers(0, size)
    features[place], labels[place] = row, label
    nothing = features.copy()
    nothing[place] = np.nan  # as a record that is not there
    assert np.linalg.norm(_sum(features, labels) - _sum(nothing, labels)) <= LONGEST
    assert np.array_equal(_sum(nothing, labels), _sum(np.delete(features, place, 0), np.delete(labels, place)))


def test_a_record_as_long_as_the_clipping_norm_or_longer_moves_them_by_the_whole_sensitivity() -> None:
    label = np.array([1])
    for length in (3.0, 1e6):
        moments = _sum(np.array([[length, 0.0]]), label)
        assert np.linalg.norm(moments) == pytest.approx(math.sqrt(3), rel=1e-4)
        assert moments[1, :2] == pytest.approx(1, rel=1e-4)  # one record, as long as the clipping norm
    assert np.linalg.norm(_sum(np.array([[0.3, 0.4]]), label)) == pytest.approx(math.sqrt(1 + 1 / 36 + 1 / 36**2))


def test_where_nothing_is_clipped_the_sums_are_the_moments_in_units_of_the_clipping_norm() -> None:
    draw = np.random.default_rng(0)
    features, labels = draw.uniform(-1, 1, size=(20, 4)), draw.integers(0, 3, 20)
    np.testing.assert_allclose(
        _sum(features, labels), moments_of(features / 3.0, labels, 3), atol=grid_spacing(PROTECTION.std)
    )


def test_the_noise_is_what_the_accountant_was_told_on_every_number() -> None:
    z = PROTECTION.noise_multiplier
    assert PROTECTION.std == z * LONGEST
    # The exact delta of the Gaussian mechanism (Balle and Wang 2018, theorem 8), which the multiplier must not exceed.
    phi, epsilon = NormalDist().cdf, PROTECTION.epsilon
    delta = phi(0.5 / z - epsilon * z) - math.exp(epsilon) * phi(-0.5 / z - epsilon * z)
    assert 0.1 * PROTECTION.delta < delta <= PROTECTION.delta
    assert epsilon_of_counts({PROTECTION.event: 1}, PROTECTION.delta) == pytest.approx(epsilon, rel=1e-3)
    none = np.zeros((0, 40)), np.zeros(0, np.int64)
    residuals = np.stack([noisy_moments(*none, 2, PROTECTION, Noise.secret()) for _ in range(20)]) / PROTECTION.std
    low, high = chi2.ppf([1e-9, 1 - 1e-9], residuals.size)
    assert low < (residuals**2).sum() < high
    for part in (residuals[:, :, 0], residuals[:, :, 1:41], residuals[:, :, 41:]):  # counts, sums, products
        assert (part**2).mean() == pytest.approx(1, abs=7 * math.sqrt(2 / part.size))
    assert len({residual.tobytes() for residual in residuals}) == len(residuals)


def _release(folder: Path, name: str = "a") -> MomentsRelease:
    return MomentsRelease(name, folder / f"moments-{name}", folder / "ledgers" / "0.jsonl", None, 0)


def _charges(folder: Path) -> list[str]:
    lines = (folder / "ledgers" / "0.jsonl").read_text().splitlines()[1:]
    return [json.loads(line)["release"] for line in lines]


def _made(folder: Path, name: str = "a") -> NDArray[np.float64]:
    return _released(5, PROTECTION, _release(folder, name))


def _released(count: int, protection: Protection, release: MomentsRelease) -> NDArray[np.float64]:
    records = np.ones((count, 2)), np.zeros(count, np.int64)

    def make(noise: Noise) -> NDArray[np.float64]:
        return private_moments.private_moments(*records, 3, protection, noise)

    return released_moments(make, count, (3, num_moments(2)), protection, release)


def test_a_release_is_charged_before_it_is_made_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    make = noisy_moments
    monkeypatch.setattr(
        private_moments, "private_moments", lambda *given: (seen.append(_charges(tmp_path)), make(*given))[1]
    )
    first = _made(tmp_path)
    assert np.array_equal(_made(tmp_path), first)
    assert seen == [_charges(tmp_path)] == [["class moments a"]]
    assert not (tmp_path / "moments-a" / "key").exists()
    assert not np.array_equal(_made(tmp_path, "b"), first)
    assert _charges(tmp_path) == ["class moments a", "class moments b"]


def test_a_client_killed_before_its_release_is_out_makes_the_same_with_the_key_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def killed(path: Path, content: bytes) -> None:
        if path.name == "key":
            return write_private(path, content)
        made.append(content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(private_moments, "write_private", killed)
        with pytest.raises(KeyboardInterrupt):
            _made(tmp_path)
    _made(tmp_path)
    assert _charges(tmp_path) == ["class moments a"]
    assert len(made) == 1
    assert made[0] == (tmp_path / "moments-a" / "moments.safetensors").read_bytes()


def test_a_kept_release_is_handed_out_only_if_it_is_whole_and_the_ledger_honours_it(tmp_path: Path) -> None:
    _made(tmp_path)
    kept = tmp_path / "moments-a" / "moments.safetensors"
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1])
    with pytest.raises(RunError, match="is damaged: delete it"):
        _made(tmp_path)
    kept.write_bytes(whole)
    (tmp_path / "ledgers" / "0.jsonl").unlink()
    with pytest.raises(RunError, match="is missing"):
        _made(tmp_path)


def test_a_client_without_records_sends_zeros_and_pays_nothing(tmp_path: Path) -> None:
    sent = _released(0, PROTECTION, _release(tmp_path))
    assert sent.tolist() == np.zeros((3, num_moments(2))).tolist()
    assert list(tmp_path.iterdir()) == []


def test_a_policy_pays_from_its_own_ledger_and_takes_no_seeded_noise(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("epsilon = 2.5")
    release = replace(_release(tmp_path), policy=read_policy(tmp_path / "policy.toml"))
    with pytest.raises(RunError, match=r"secret noise only.*leave calibrate\.noise at its default"):
        _released(5, replace(PROTECTION, noise="seeded"), release)
    _released(5, PROTECTION, release)
    assert not (tmp_path / "ledgers").exists()
    with pytest.raises(RunError, match="the request would exceed it"):
        _released(5, PROTECTION, replace(release, name="b", folder=tmp_path / "moments-b"))
