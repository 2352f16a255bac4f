"""A budget that affords nothing ends in an error before anything is trained, in one line that names the cure."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.events import amplify_poisson
from fl_sim.simulation import run as running
from fl_sim.simulation.run import run
from strategies.global_dp import GlobalDP
from strategies.layer import Stop
from strategies.private import open_private_rounds
from strategies.private_start import PrivateStart
from strategies.samplers import Everyone

QUICK = ("data=digits", "model=logistic", "clients=5", "rounds=2", "engine=inprocess")
GLOBAL_DP = ("aggregator=global-dp", "sampler=poisson:0.5")
ONE_ROUND = epsilon_of_counts({amplify_poisson(GlobalDP().event(), 0.5): 1}, 1e-5)

TOO_SMALL = {
    "global-dp": ((*GLOBAL_DP, "aggregator.epsilon=0.1"), "aggregator.epsilon=0.1 does not afford one round"),
    "no noise": (
        (*GLOBAL_DP, "aggregator.epsilon=8", "aggregator.noise_multiplier=0"),
        "aggregator.epsilon=8 does not afford one round, which costs inf",
    ),
    "private start": (
        (*GLOBAL_DP, "preprocess=private-start", f"aggregator.epsilon={ONE_ROUND * 1.05}"),
        "does not afford the private start and one round",
    ),
    "da-fl": (("preprocess=da-fl", "preprocess.epsilon=0.11"), "lets no client release a synthetic record"),
    "da-fl's labels": (("preprocess=da-fl", "preprocess.epsilon=0.05"), "is used up by the labels"),
    "mean embedding": (
        ("preprocess=da-fl", "preprocess.generator=mean-embedding", "preprocess.epsilon=0.2"),
        "lets no client release a synthetic record",
    ),
    "pate": (
        ("algorithm=pate", "algorithm.labelling.epsilon=0.01"), "labelling.epsilon=0.01 does not afford one query",
    ),
    "pate, confident": (
        ("algorithm=pate", "algorithm.labelling.mechanism=confident", "algorithm.labelling.epsilon=0.01"),
        "labelling.epsilon=0.01 does not afford one query",
    ),
    "pate, by the votes": (
        ("algorithm=pate", "algorithm.labelling.epsilon=0.01", "algorithm.labelling.budget=data-dependent",
         "algorithm.keep_private=true"),
        "labelling.epsilon=0.01 does not afford one query, which costs .* at delta 1e-05, a lower bound for all votes",
    ),
    "ccvr": (("calibrate=ccvr", "calibrate.epsilon=1e-9"), "calibrate.epsilon=1e-09 is too small to send moments"),
    "ccvr, too coarse": (("calibrate=ccvr", "calibrate.epsilon=1e-5"), "is too small to send moments: noise of"),
}  # fmt: skip


def experiment(*overrides: str) -> Experiment:
    return experiment_from(with_overrides({}, [*QUICK, *overrides]))


@pytest.mark.parametrize(("overrides", "message"), TOO_SMALL.values(), ids=TOO_SMALL)
@pytest.mark.usefixtures("quick_accounting")
def test_a_budget_that_affords_nothing_ends_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(running, "_run", lambda *_: pytest.fail("it was run"))
    with pytest.raises(UserError, match=message) as caught:
        run(experiment(*overrides), tmp_path / "run")
    assert "\n" not in str(caught.value)
    cures = ("take", "set a larger epsilon", "use a", "out of reach")
    assert any(cure in str(caught.value) for cure in cures)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preprocess", ["none", "private-start"])
def test_a_budget_that_affords_one_round_and_what_comes_before_it_is_taken(preprocess: str) -> None:
    chosen = experiment(*GLOBAL_DP, f"preprocess={preprocess}")
    mechanisms = [chosen.aggregator]
    if isinstance(chosen.preprocess, PrivateStart):
        mechanisms += [chosen.preprocess.release(step, chosen.aggregator) for step in (1, 2, 3)]
    counts: dict[object, int] = {}
    for one in mechanisms:
        event = amplify_poisson(one.event(), 0.5)
        counts[event] = counts.get(event, 0) + 1
    exact = epsilon_of_counts(counts, 1e-5)
    for budget, affords in ((exact, True), (exact * (1 - 1e-9), False)):
        given = experiment(*GLOBAL_DP, f"preprocess={preprocess}", f"aggregator.epsilon={budget!r}")
        asked = given.aggregator if preprocess == "none" else given.preprocess
        if affords:
            asked.check_budget(given, [100] * 5, 10)
        else:
            with pytest.raises(UserError, match="does not afford"):
                asked.check_budget(given, [100] * 5, 10)


def test_one_client_that_can_release_is_enough() -> None:
    given = experiment("preprocess=da-fl", "preprocess.generator=mean-embedding", "preprocess.epsilon=2")
    for records in ([30, 100_000, 20], [100_000]):
        given.preprocess.check_budget(given, records, 10)
    with pytest.raises(UserError, match="for the largest client, 30 records are too few"):
        given.preprocess.check_budget(given, [30, 20], 10)


def test_a_budget_spent_by_an_attempt_that_was_stopped_is_an_error_too(tmp_path: Path) -> None:
    one_round = epsilon_of_counts({GlobalDP().event(): 1}, 1e-5)
    for budget, name in ((one_round / 2, "none"), (one_round * 1.01, "one")):
        (tmp_path / name).mkdir()
        rounds = open_private_rounds(GlobalDP(epsilon=budget), Everyone(), 4, 0, tmp_path / name, None)
        rounds.inner = Mock()
        if name == "none":
            with pytest.raises(RunError, match="does not afford the first round"):
                rounds.begin(1)
            continue
        rounds.begin(1)
        with pytest.raises(Stop, match="spent after 1 rounds"):
            rounds.begin(2)
