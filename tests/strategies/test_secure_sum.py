"""aggregator=secure-sum: masks cancel to the bit for any drop-outs, and runs learn as under the mean."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.privacy.modular_sums import unpacked
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_model, read_rounds
from fl_sim.types import ClientUpdate, LocalSettings, LocalTask, Trained
from strategies import secure_rounds
from strategies.masking import PRIME, exchange_bytes, mask, masked, rebuilt, share_of_secret, unmasked
from strategies.secure_rounds import GROUP, ClientMasks, names_of, quantised, scale_of
from strategies.secure_sum import SecureSum

QUICK: dict[str, Any] = {
    "model": "logistic", "engine": "inprocess", "partition": "dirichlet:0.3", "clients": 6, "rounds": 3,
    "sampler": "fixed-size:5", "local": {"batch_size": 64},
}  # fmt: skip


def experiment(**changes: Any) -> Any:
    aggregator = {"kind": "secure-sum", **changes.pop("aggregator", {})}
    return experiment_from({**QUICK, "aggregator": aggregator, **changes})


def gap(left: Path, right: Path) -> float:
    models = read_model(left), read_model(right)
    return max(float((value - models[1][name]).abs().max()) for name, value in models[0].items())


@pytest.mark.parametrize("bits", [8, 13, 32])
def test_masks_cancel_to_the_bit_for_any_drop_outs_above_the_threshold(bits: int) -> None:
    """The law of Bonawitz et al., theorem 6.1: the result is the plain sum of the remaining clients modulo 2^bits."""
    cohort, threshold, coins = (2, 3, 7, 11), 3, np.random.default_rng(0)
    numbers = {one: coins.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), 50) for one in cohort}
    sent = {one: masked(numbers[one], one, cohort, 5, 1, bits) for one in cohort}
    for count in range(len(cohort) + 1):
        for present in combinations(cohort, count):
            total = sum((sent[one] for one in present), np.zeros(50, np.int64))
            opened = {"threshold": threshold, "seed": 5, "server_round": 1, "bits": bits}
            if count < threshold:
                with pytest.raises(ValueError, match="3 shares are needed"):
                    unmasked(total, cohort, present, **opened)
                continue
            plain = sum((numbers[one] for one in present), np.zeros(50, np.int64)) % 2**bits
            assert np.array_equal(unmasked(total, cohort, present, **opened), plain)
            assert not np.array_equal(total % 2**bits, plain)
    other_round = masked(numbers[2], 2, cohort, 5, 2, bits)
    assert not np.array_equal(sent[2], other_round)


def test_a_masked_number_is_uniform_whatever_the_number_is() -> None:
    """A chi-square test on 2^16 numbers of 4 bits; and the mask is the same for all numbers, so it is a bijection."""
    zeros, ones = (masked(np.full(2**16, value), 1, (0, 1, 2), 0, 1, 4) for value in (0, 1))
    counts = np.bincount(zeros, minlength=16)
    assert ((counts - 2**12) ** 2 / 2**12).sum() < 37.7  # the .999 quantile for 15 degrees of freedom
    assert np.array_equal((zeros + 1) % 16, ones)
    assert mask(3, 10**4, 32).max() > 2**31


def test_shares_give_a_secret_from_the_threshold_on_and_nothing_below() -> None:
    secret = PRIME - 5
    shares = {place: share_of_secret(secret, place, 3) for place in range(1, 6)}
    for chosen in combinations(shares, 3):
        assert rebuilt({place: shares[place] for place in chosen}) == secret
    assert rebuilt(shares) == secret
    few = {place: shares[place] for place in (1, 2)}
    assert rebuilt(few) != secret
    for guess in (0, 1, secret):  # for two shares there is a polynomial of degree 2 through every secret
        third = (guess - sum(few[p] * _basis(p, (1, 2, 3)) for p in few)) * pow(_basis(3, (1, 2, 3)), -1, PRIME)
        assert rebuilt({**few, 3: third % PRIME}) == guess


def _basis(place: int, places: tuple[int, ...]) -> int:
    value = 1
    for other in places:
        if other != place:
            value = value * other * pow(other - place, -1, PRIME) % PRIME
    return value


def test_rounding_is_within_its_bound_unbiased_and_never_overflows() -> None:
    settings, coins = SecureSum(bits=10, clipping_range=1.0), np.random.default_rng(0)
    scale, values = scale_of(settings, 7), coins.uniform(-1, 1, 4000)
    nearest = quantised(values, scale, "nearest", lambda: coins) / scale
    drawn = np.mean([quantised(values, scale, "stochastic", lambda: coins) / scale for _ in range(400)], axis=0)
    assert np.abs(nearest - values).max() <= 0.5 / scale
    assert np.abs(drawn - values).max() < 0.15 / scale
    assert 7 * quantised(np.ones(1), scale, "nearest", lambda: coins)[0] < 2**9


def test_a_client_sends_masked_numbers_alone() -> None:
    """Neither its loss nor its number of records, and the same form without records."""
    template = {"delta": {"w": torch.zeros(3)}}
    half = ClientMasks(SecureSum(), template, 0, is_weighted=False)
    for records in (5, 0):
        task = LocalTask(1, 0, 2, records, LocalSettings(0.1, 0.0, 0.0, 1, 1), {}, broadcast={GROUP: names_of((0, 1))})
        sent = half.sent(task, task, Trained({}, {}, 1, 0.5), ClientUpdate(template, records, 0.5 if records else None))
        assert (sent.num_examples, sent.loss, sent.payloads) == (0, None, {})
        numbers = unpacked(sent.packed["delta"].bits, 5, 32)
        assert np.abs(numbers).min() > 2**16  # a mask lies on each of five small numbers


@pytest.mark.parametrize(
    ("settings", "most_records"),
    [({"algorithm": "fedcm"}, 0), ({}, 900), ({"algorithm": "scaffold", "sampler": "poisson:0.6"}, 0)],
    ids=["every client alike", "by records", "client states and two payloads"],
)
def test_a_run_ends_within_rounding_of_the_mean(tmp_path: Path, settings: dict[str, Any], most_records: int) -> None:
    run(experiment(aggregator={"most_records": most_records}, **settings), tmp_path / "masked")
    run(experiment_from({**QUICK, **settings}), tmp_path / "plain")
    assert 0 < gap(tmp_path / "masked", tmp_path / "plain") < 1e-6
    masked_rounds = read_rounds(tmp_path / "masked")
    assert all(one.train_loss is None for one in masked_rounds)


def test_the_sum_is_that_of_the_unmasked_whole_numbers_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without masks on both sides, with drop-outs and coarse steps, the run ends in the same bits."""
    settings = {"aggregator": {"bits": 12, "dropout": 0.3, "threshold": 0.51, "rounding": "stochastic"}}
    run(experiment(**settings), tmp_path / "masked")
    result = json.loads((tmp_path / "masked" / "result.json").read_text())
    assert result["secure_sum"]["dropped"] > 0
    monkeypatch.setattr(secure_rounds, "masked", lambda numbers, *_: numbers % 2**12)
    monkeypatch.setattr(secure_rounds, "unmasked", lambda total, *_, **__: total % 2**12)
    run(experiment(**settings), tmp_path / "plain")
    assert gap(tmp_path / "masked", tmp_path / "plain") == 0
    kept = read_model(tmp_path / "plain")
    monkeypatch.setattr(secure_rounds, "unmasked", lambda total, *_, **__: (total + 1) % 2**12)
    run(experiment(**settings), tmp_path / "shifted")
    assert not all(torch.equal(value, kept[name]) for name, value in read_model(tmp_path / "shifted").items())


def test_too_many_drop_outs_leave_the_model_as_it_is(tmp_path: Path) -> None:
    result = run(experiment(rounds=2, aggregator={"dropout": 0.999}), tmp_path / "none")
    assert result["secure_sum"] == {"dropped": 10, "unopened": [1, 2]}
    assert any("these sums were not opened" in one for one in result["warnings"])
    longer = run(experiment(rounds=3, aggregator={"dropout": 0.999}), tmp_path / "none")
    assert longer["secure_sum"] == {"dropped": 15, "unopened": [1, 2, 3]}


def test_the_bytes_are_those_of_the_forecast(tmp_path: Path) -> None:
    run(experiment(), tmp_path / "run")
    typed = ["plan", str(tmp_path / "run" / "config.toml"), "--json"]
    found = json.loads(CliRunner().invoke(app, typed).stdout)
    assert any("a mask of 652 numbers" in one["what"] for one in found["timed"])
    forecast = found["runs"][0]["bytes"]
    rounds = read_rounds(tmp_path / "run")
    assert sum(one.bytes_up or 0 for one in rounds) == forecast["up"]
    assert sum(one.bytes_down or 0 for one in rounds) == forecast["down"]
    assert exchange_bytes(3, 2) == (3 * 2 * (64 + 4 + 92) + 2 * 2 * 4, 3 * (64 + 2 * 92) + 2 * 3 * 32)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attack": "sign-flip"}, "attack sign-flip cannot run with aggregator secure-sum: .*masked numbers"),
        ({"compress": "qsgd"}, "compress qsgd cannot run with aggregator secure-sum: .*cannot be added"),
        ({"algorithm": "q-ffl"}, "only aggregator mean uses such weights"),
        ({"algorithm": "fedmix"}, "without masks before the first round"),
        ({"algorithm": "afl", "sampler": "full"}, "has no rounds"),
        ({"server": "fedbuff:2", "devices": "log-normal"}, "secure-sum"),
        ({"local": {"batch_norm": "average"}}, "secure-sum"),
    ],
)
def test_settings_that_need_single_updates_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        experiment(**changes)


@pytest.mark.parametrize(
    ("changes", "kind", "why"),
    [
        ({"algorithm": "ifca"}, UserError, "reads single updates or losses"),
        ({"algorithm": "flexlora", "model": "mlp"}, UserError, "clients send different tensors"),
        ({"sampler": "oort:3"}, UserError, "reads single updates or losses"),
        ({"aggregator": {"bits": 8, "most_records": 100}}, UserError, "bits=8 are too few for sums of 6 clients"),
        ({"aggregator": {"clipping_range": 1e-3}}, RunError, "clipping_range=0.001: training diverged, or a larger"),
        ({"aggregator": {"most_records": 10}}, RunError, "more records than aggregator.most_records=10"),
    ],
)
def test_what_does_not_fit_ends_in_words(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], why: str
) -> None:
    with pytest.raises(kind, match=why):
        run(experiment(**changes), tmp_path / "run")


def test_late_clients_are_drop_outs_whose_masks_are_removed(tmp_path: Path) -> None:
    settings = {"devices": "log-normal", "server": {"deadline": 1.0}, "sampler": "full", "rounds": 2}
    result = run(experiment(aggregator={"most_records": 900, "threshold": 0.51}, **settings), tmp_path / "masked")
    run(experiment_from({**QUICK, **settings}), tmp_path / "plain")
    assert 0 < result["secure_sum"]["dropped"] == sum(one.late or 0 for one in read_rounds(tmp_path / "masked"))
    assert gap(tmp_path / "masked", tmp_path / "plain") < 1e-6
