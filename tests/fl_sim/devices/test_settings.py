"""Devices from distributions and from a profile; what cannot be used is refused before anything runs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fl_sim.devices.settings import ConstantDevices, Fleet, LogNormal, Profile, Uniform, digest_of
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run


def profile(tmp_path: Path, text: str) -> str:
    (tmp_path / "devices.csv").write_text(text)
    return str(tmp_path / "devices.csv")


def test_constant_devices_have_the_units_that_they_say() -> None:
    fleet = ConstantDevices(seconds_per_step=0.2, download_mbps=8, upload_mbps=4, availability=0.5).fleet(3, seed=0)
    assert fleet.step_seconds.tolist() == [0.2] * 3
    assert fleet.record_seconds.tolist() == [0] * 3
    assert (fleet.download[0], fleet.upload[0], fleet.availability[0]) == (1e6, 5e5, 0.5)
    by_records = ConstantDevices(records_per_second=50).fleet(2, seed=0)
    assert (by_records.step_seconds[0], by_records.record_seconds[0]) == (0, 0.02)


def test_drawn_devices_have_the_median_and_the_spread_that_they_say() -> None:
    typical = LogNormal(sigma=0.5).fleet(4000, seed=0)
    assert np.median(typical.step_seconds) == pytest.approx(0.1, rel=0.05)
    assert np.log(typical.step_seconds).std() == pytest.approx(0.5, rel=0.05)
    assert np.log(typical.upload).std() == pytest.approx(0.5, rel=0.05)
    drawn = np.corrcoef([typical.step_seconds, typical.upload, typical.download])
    assert np.abs(drawn - np.eye(3)).max() < 0.1, "speed and both ways are drawn by themselves"
    assert np.median(typical.upload) == pytest.approx(625_000, rel=0.05)
    assert np.median(typical.download) == pytest.approx(2_500_000, rel=0.05)
    even = Uniform(spread=0.5).fleet(4000, seed=0)
    assert (even.step_seconds.min(), even.step_seconds.max()) == pytest.approx((0.05, 0.15), rel=0.01)
    assert (even.upload.min(), even.upload.max()) == pytest.approx((625_000 / 1.5, 625_000 / 0.5), rel=0.01)
    assert (even.download.min(), even.download.max()) == pytest.approx((2_500_000 / 1.5, 2_500_000 / 0.5), rel=0.01)


def test_devices_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    one, same, other = (LogNormal().fleet(5, seed=seed).step_seconds for seed in (0, 0, 1))
    assert (one == same).all()
    assert (one != other).any()


def test_a_profile_has_a_row_for_each_client_in_order(tmp_path: Path) -> None:
    path = profile(tmp_path, "records_per_second, download_mbps,upload_mbps,availability\n10,8,1,1\n\n20,16,2,0.5\n")
    fleet = Profile(path=path, jitter=0.1).fleet(2, seed=0)
    assert fleet.record_seconds.tolist() == [0.1, 0.05]
    assert fleet.download.tolist() == [1e6, 2e6]
    assert fleet.upload.tolist() == [125_000, 250_000]
    assert fleet.availability.tolist() == [1, 0.5]
    assert fleet.jitter == 0.1


def test_a_profile_of_classes_gives_each_class_its_number_of_clients_at_random(tmp_path: Path) -> None:
    path = profile(tmp_path, "seconds_per_step,clients\n0.1,70\n0.9,30\n")
    slow = Profile(path=path).fleet(100, seed=0).step_seconds == 0.9
    assert slow.sum() == 30
    assert 10 < slow[:50].sum() < 20
    assert np.isinf(Profile(path=path).fleet(100, seed=0).download).all()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no rows below a line of column names"),
        ("seconds_per_step\n", "has no rows below a line of column names"),
        ("speed\n1\n1\n", "has a column 'speed'"),
        ("download_mbps\n1\n1\n", "must have one of the columns seconds_per_step and records_per_second"),
        ("seconds_per_step,records_per_second\n1,1\n1,1\n", "and not both"),
        ("seconds_per_step,seconds_per_step\n1,1\n1,1\n", "has the column 'seconds_per_step' twice"),
        ("seconds_per_step\n1\n0\n", "line 3, seconds_per_step is 0: it must be from 1e-09"),
        ("seconds_per_step\n1\n-2\n", "line 3, seconds_per_step is -2: it must be from 1e-09"),
        ("seconds_per_step\n1\nnan\n", "line 3, seconds_per_step is nan: it must be from 1e-09"),
        ("seconds_per_step\n1\nfast\n", "line 3, seconds_per_step is 'fast'; it must be a number"),
        ("seconds_per_step,upload_mbps\n1,1\n1\n", "line 3 has 1 cells, but there are 2 columns"),
        ("seconds_per_step,availability\n1,1\n1,0\n", "line 3, availability is 0"),
        ("seconds_per_step,clients\n1,1\n1,0.5\n", "line 3, clients is 0.5: it must be a whole number"),
        ("seconds_per_step\n1\n1\n1\n", "is for 3 clients, but this run has 2"),
        ('seconds_per_step\n"1\n1\n', "is no CSV file in UTF-8"),
    ],
)
def test_a_malformed_profile_is_refused_with_its_line_and_column(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"devices\.path: ") as refused:
        Profile(path=profile(tmp_path, text)).fleet(2, seed=0)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@dataclass(frozen=True)
class Shop:
    """Devices of one's own: every other client has a slow one."""

    slow: float = 2.0
    download: float = 1e6

    def fleet(self, num_clients: int, seed: int) -> Fleet:
        steps = np.where(np.arange(num_clients) % 2, self.slow, 0.1)
        ones = np.ones(num_clients)
        return Fleet(steps, 0 * ones, self.download * ones, 1e6 * ones, ones)


class Short(Shop):
    def fleet(self, num_clients: int, seed: int) -> Fleet:
        return super().fleet(num_clients - 1, seed)


def test_devices_of_ones_own_are_taken_and_held_to_what_a_device_can_be(tmp_path: Path) -> None:
    base = {"model": "logistic", "rounds": 1, "clients": 4, "engine": "inprocess", "local": {"steps": 3}}
    result = run(experiment_from({**base, "devices": Shop()}), tmp_path / "run")
    assert result["virtual_seconds"] == pytest.approx(6.0, abs=0.1)
    for wrong, told in (
        (Shop(slow=0), "returned wrong devices: step_seconds and record_seconds of client 1 is 0"),
        (Shop(slow=float("nan")), "returned wrong devices: step_seconds and record_seconds of client 1 is nan"),
        (Shop(download=0), "returned wrong devices: download of client 0 is 0"),
        (Short(), r"have the shape \(3,\), but there are 4 clients"),
    ):
        with pytest.raises(UserError, match=told):
            run(experiment_from({**base, "devices": wrong}), tmp_path / "other")
    assert not (tmp_path / "other" / "config.toml").exists()
    with pytest.raises(UserError, match="No epsilon here covers this"):
        experiment_from({**base, "devices": Shop(), "aggregator": "global-dp"})
    with pytest.raises(UserError, match="lacks fleet"):
        experiment_from({**base, "devices": "fl_sim.types:Traffic"})


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("availability", 0.0, "availability of client 1 is 0"), ("availability", 1.01, "availability of client 1 is 1"),
        ("upload", 0.0, "upload of client 1 is 0"), ("record_seconds", -0.5, "record_seconds of client 1 is -0.5"),
        ("jitter", 3.1, "jitter is 3.1: it must be from 0 to 3"), ("jitter", -0.1, "jitter is -0.1"),
        ("jitter", 3.0, ""), ("availability", 0.001, ""), ("availability", 1.0, ""),
    ],
)  # fmt: skip
def test_every_number_of_a_fleet_has_both_its_ends(part: str, value: float, told: str) -> None:
    numbers = {name: np.array([1.0, 1.0]) for name in ("step_seconds", "record_seconds", "download", "upload")}
    numbers["availability"] = np.array([0.5, 0.5])
    given = value if part == "jitter" else np.array([numbers[part][0], value])
    found = Fleet(**{**numbers, part: given}).wrong(2)
    assert found.startswith(told)
    assert bool(found) == bool(told)


def test_a_profile_that_is_not_there_or_has_changed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"devices\.path: no such file: .*heterogeneity.md"):
        Profile(path=str(tmp_path / "none.csv")).fleet(2, seed=0)
    path = profile(tmp_path, "seconds_per_step\n1\n2\n")
    known = Profile(path=path, digest=digest_of(path))
    known.fleet(2, seed=0)
    profile(tmp_path, "seconds_per_step\n1\n3\n")
    with pytest.raises(UserError, match="has changed since the run began"):
        known.fleet(2, seed=0)
