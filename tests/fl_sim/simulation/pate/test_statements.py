"""What a run of PATE promises about a record: fixed before a vote is looked at, under neighbours it is true for."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.privacy.accounting import Adjacency, epsilon_of_counts
from fl_sim.seeding import rng
from fl_sim.simulation.pate.ensemble import Votes
from fl_sim.simulation.pate.noisy_labels import release_labels
from fl_sim.simulation.pate.statements import neighbours, statements_of
from partitions import AnyScheme, Dirichlet, FeatureNoise, Iid, LabelK, Natural, Quantity, Scheme, Shards
from strategies.pate.labelling import UNANSWERED

CONFIDENT = (
    "algorithm.labelling.mechanism=confident", "algorithm.labelling.mechanism.threshold=35",
    "algorithm.labelling.mechanism.sigma_threshold=20", "algorithm.labelling.mechanism.sigma=10",
)  # fmt: skip


def pate(*overrides: str) -> Experiment:
    return experiment_from(with_overrides({"algorithm": "pate"}, ["algorithm.queries=40", *overrides]))


def said(folder: Path, experiment: Experiment, agreement: float = 0.7) -> tuple[dict[str, Any], int]:
    """Return the labels' statement and how many of 40 queries were answered, where that share of 50 teachers agrees."""
    shares = [agreement, *[(1 - agreement) / 9] * 9]
    predictions = np.random.default_rng(0).choice(10, size=(50, 40), p=shares)
    counts = np.stack([(predictions == label).sum(axis=0) for label in range(10)], axis=1)
    votes = Votes(predictions, counts, np.arange(40), folder / "cache", 1.0, reused=False)
    folder.mkdir(exist_ok=True)
    released = release_labels(experiment.algorithm, votes, 0, folder)
    return statements_of(experiment, experiment.algorithm, votes, released)[0], int(
        (released.labelled.labels != UNANSWERED).sum()
    )


def test_confident_without_a_budget_promises_what_all_queries_could_cost_and_not_what_these_did(tmp_path: Path) -> None:
    experiment = pate(*CONFIDENT)
    test, answer = experiment.algorithm.labelling.mechanism.charges()
    agreed, many = said(tmp_path / "agreed", experiment, 0.9)
    split, few = said(tmp_path / "split", experiment, 0.2)
    assert few < many
    whole = epsilon_of_counts({test: 40, answer: 40}, 1e-5, accountant="pld")
    for statement, answered in ((agreed, many), (split, few)):
        assert statement["epsilon"] == pytest.approx(whole, rel=1e-6)
        spent = epsilon_of_counts({test: 40, answer: answered}, 1e-5, accountant="pld")
        assert statement["epsilon_realised"] == pytest.approx(spent, rel=1e-6)
        assert "no guarantee" in statement["guarantee"]
        assert "budget" not in statement["guarantee"]


def test_a_budget_that_is_not_used_up_is_no_larger_than_the_plan(tmp_path: Path) -> None:
    tight, _ = said(tmp_path / "tight", pate(*CONFIDENT, "algorithm.labelling.epsilon=2"), 0.2)
    assert tight["epsilon"] == 2 > tight["epsilon_realised"]
    sure = "algorithm.labelling.mechanism.threshold=0", "algorithm.labelling.noise=seeded"
    clear, answered = said(tmp_path / "clear", pate(*CONFIDENT, *sure, "algorithm.labelling.epsilon=2"), 1.0)
    assert 0 < answered < 40
    assert clear["epsilon"] == 2 > clear["epsilon_realised"]  # where it stopped depended on the votes
    wide, _ = said(tmp_path / "wide", pate(*CONFIDENT, "algorithm.labelling.epsilon=1000"), 0.2)
    assert wide["epsilon_realised"] < wide["epsilon"] < 1000


def test_where_every_query_is_answered_what_is_spent_was_certain_beforehand(tmp_path: Path) -> None:
    for name, change in (("gnmax", ()), ("budget", ("algorithm.labelling.epsilon=3",))):
        statement, answered = said(tmp_path / name, pate("algorithm.labelling.mechanism=gnmax:10", *change))
        assert answered == (40 if name == "gnmax" else statement["steps"])
        assert statement["epsilon"] == statement["epsilon_realised"]
    assert statement["epsilon"] <= 3


def test_a_budget_that_looks_at_the_votes_promises_nothing(tmp_path: Path) -> None:
    looks = "algorithm.labelling.budget=data-dependent", "algorithm.labelling.epsilon=3", "algorithm.keep_private=true"
    statement, _ = said(tmp_path / "run", pate("algorithm.labelling.mechanism=gnmax:10", *looks))
    assert statement["epsilon"] is None
    assert statement["guarantee"].startswith("none")


def test_a_labelling_that_was_paid_for_twice_is_promised_at_twice_the_price(tmp_path: Path) -> None:
    experiment = pate("algorithm.labelling.mechanism=gnmax:10")
    once, _ = said(tmp_path / "run", experiment)
    (labels,) = (tmp_path / "run" / "cache").glob("labels-*/labels.json")
    labels.unlink()
    twice, _ = said(tmp_path / "run", experiment)
    assert twice["epsilon"] > 1.3 * once["epsilon"]


SCHEMES = [Iid(), Quantity(beta=1.0), FeatureNoise(), Dirichlet(beta=0.5), LabelK(k=3), Shards(shards_per_client=2)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.kind)
def test_one_record_in_the_place_of_another_stays_with_its_teacher_wherever_that_is_promised(
    tmp_path: Path, scheme: Scheme
) -> None:
    statement, _ = said(tmp_path / "run", pate().model_copy(update={"partition": scheme}))
    labels = np.random.default_rng(0).integers(10, size=2000)
    other = labels.copy()
    other[0] = (labels[0] + 1) % 10
    before, after, same = (
        [part.tolist() for part in scheme.split(given, 20, rng(3, "partition"))] for given in (labels, other, labels)
    )
    assert before == same
    if scheme.kind in {"iid", "quantity", "feature-noise"}:
        assert statement["adjacency"] == Adjacency.REPLACE_ONE
        assert after == before  # whatever the record's class
        assert "replacing one record by any other" in statement["guarantee"]
    else:
        assert after != before
        assert statement["adjacency"] == Adjacency.ADD_OR_REMOVE_ONE
        assert "How many records of each class there are" in statement["does_not_cover"]


def test_of_every_split_it_is_said_whichneighbours_it_keeps_apart():
    assert {type(scheme()).__name__: neighbours(scheme())[0].value for scheme in get_args(AnyScheme)} == {
        "Iid": "replace-one", "Quantity": "replace-one", "FeatureNoise": "replace-one",
        "Natural": "add-or-remove-one",
        "LabelK": "add-or-remove-one", "Dirichlet": "add-or-remove-one", "Shards": "add-or-remove-one",
    }  # fmt: skip
    assert "Which groups of records there are" in neighbours(Natural())[1]
    with pytest.raises(AssertionError, match="nobody has said"):
        neighbours(object())
