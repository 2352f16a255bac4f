"""What a run of PATE promises about a record: fixed before a vote is looked at, under neighbours it is true for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.privacy.accounting import compose, epsilon_of_counts, epsilon_of_curve
from fl_sim.privacy.pate import smooth_sensitivity
from fl_sim.privacy.renyi import ORDERS
from fl_sim.privacy.terms import Adjacency
from fl_sim.seeding import rng
from fl_sim.settings import kinds_of
from fl_sim.stages.pate.noisy_labels import Released, Votes, release_labels
from fl_sim.stages.pate.statements import neighbours, statements_of
from partitions import ByRound, Dirichlet, Domain, FeatureNoise, Iid, LabelK, Natural, Quantity, Rotate, Scheme, Shards
from strategies.pate.labelling import UNANSWERED, LNMax

CONFIDENT = (
    "algorithm.labelling.mechanism=confident", "algorithm.labelling.mechanism.threshold=35",
    "algorithm.labelling.mechanism.sigma_threshold=20", "algorithm.labelling.mechanism.sigma=10",
)  # fmt: skip


def pate(*overrides: str) -> Experiment:
    return experiment_from(with_overrides({"algorithm": "pate"}, ["algorithm.queries=40", *overrides]))


def votes_of(agreement: float) -> np.ndarray:
    """Return the votes of 50 teachers on 40 queries, where that share of them agrees."""
    shares = [agreement, *[(1 - agreement) / 9] * 9]
    return np.random.default_rng(0).choice(10, size=(50, 40), p=shares)


def all_said(folder: Path, experiment: Experiment, predictions: np.ndarray) -> tuple[list[dict[str, Any]], Released]:
    """Return all statements about these votes, and what was released."""
    counts = np.stack([(predictions == label).sum(axis=0) for label in range(10)], axis=1)
    votes = Votes(predictions, counts, np.arange(len(counts)), folder / "cache", 1.0, reused=False)
    folder.mkdir(exist_ok=True)
    released = release_labels(experiment.algorithm, votes, 0, folder)
    return statements_of(experiment, experiment.algorithm, votes, released), released


def said(folder: Path, experiment: Experiment, agreement: float = 0.7) -> tuple[dict[str, Any], int]:
    """Return the labels' statement and how many of 40 queries were answered, where that share of 50 teachers agrees."""
    statements, released = all_said(folder, experiment, votes_of(agreement))
    return statements[0], int((released.labelled.labels != UNANSWERED).sum())


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


PUBLISHED = ("algorithm.publish_cost=true",)
ALIKE = (  # a test costs what an answer costs
    "algorithm.labelling.mechanism=confident", "algorithm.labelling.mechanism.threshold=30",
    f"algorithm.labelling.mechanism.sigma_threshold={10 / 2**0.5!r}", "algorithm.labelling.mechanism.sigma=10",
)  # fmt: skip


@pytest.mark.parametrize(
    "mechanism",
    [
        CONFIDENT, (*CONFIDENT, "algorithm.labelling.epsilon=2"),
        (*CONFIDENT, "algorithm.labelling.epsilon=1.2", "algorithm.labelling.accountant=pld"),
        (*ALIKE, "algorithm.labelling.epsilon=3"),
        ("algorithm.labelling.mechanism=gnmax:10", "algorithm.labelling.epsilon=3"),
        ("algorithm.labelling.mechanism=lnmax:0.2", "algorithm.labelling.epsilon=3"),
    ],
    ids=["confident", "confident, budget", "confident, pld", "alike, budget", "gnmax, budget", "lnmax, budget"],
)  # fmt: skip
def test_what_is_promised_is_the_same_number_whatever_the_votes(tmp_path: Path, mechanism: tuple[str, ...]) -> None:
    experiment = pate(*mechanism, *PUBLISHED, "algorithm.labelling.noise=seeded")
    clear, split = votes_of(0.9), votes_of(0.2)
    moved = clear.copy()
    moved[0] = (clear[0] + 1) % 10  # one teacher votes otherwise on every query: a neighbour
    told, asked, released = [], set(), set()
    for number, predictions in enumerate((clear, moved, split)):
        statements, made = all_said(tmp_path / str(number), experiment, predictions)
        told.append([one["epsilon"] for one in statements])
        asked.add(made.labelled.num_asked)
        released.add(len(made.ledger.charges))
    assert told[0] == told[1] == told[2]
    labels, both = told[0]
    assert both > labels > 0
    if mechanism[0] == CONFIDENT[0]:
        assert len(asked | released) > 2  # how far the budget went, or how many were answered, is not the same number


def test_labels_and_the_published_figure_cost_what_all_queries_cost_and_the_figure(tmp_path: Path) -> None:
    experiment = pate(*CONFIDENT, *PUBLISHED)
    test, answer = experiment.algorithm.labelling.mechanism.charges()
    (labels, both), _ = all_said(tmp_path / "run", experiment, votes_of(0.2))
    terms = smooth_sensitivity.PublicationTerms(**both["published"]["terms"])
    curve = compose({test: 40, answer: 40}) + terms.curve(np.array(ORDERS))
    assert both["epsilon"] == epsilon_of_curve(curve, 1e-5) > labels["epsilon"]


def test_a_budget_covers_the_published_figure_too_and_no_more_than_it_affords(tmp_path: Path) -> None:
    plan, _ = all_said(tmp_path / "plan", pate(*CONFIDENT, *PUBLISHED), votes_of(0.2))
    previous = 2.0
    for budget in (2.0, 4.0, 1000.0):
        statements, _ = all_said(
            tmp_path / str(budget), pate(*CONFIDENT, *PUBLISHED, f"algorithm.labelling.epsilon={budget}"), votes_of(0.2)
        )
        assert previous < statements[1]["epsilon"] <= plan[1]["epsilon"]
        previous = statements[1]["epsilon"]
    assert previous == plan[1]["epsilon"]


def test_a_figure_published_beside_a_budget_that_looks_at_the_votes_promises_nothing(tmp_path: Path) -> None:
    looks = "algorithm.labelling.budget=data-dependent", "algorithm.labelling.epsilon=3", "algorithm.keep_private=true"
    statements, _ = all_said(
        tmp_path / "run", pate("algorithm.labelling.mechanism=gnmax:10", *looks, *PUBLISHED), votes_of(0.7)
    )
    assert [one["epsilon"] for one in statements] == [None, None]
    assert statements[1]["guarantee"].startswith("none")


def test_a_figure_on_terms_that_the_votes_chose_is_refused(tmp_path: Path) -> None:
    experiment = pate(*CONFIDENT, *PUBLISHED)
    all_said(tmp_path / "run", experiment, votes_of(0.2))
    (kept,) = (tmp_path / "run" / "cache").glob("labels-*/published.json")
    content = json.loads(kept.read_text())
    content["terms"]["noise"] += 1
    kept.write_text(json.dumps(content))
    with pytest.raises(RunError, match="depends on the votes and is unknown"):
        all_said(tmp_path / "run", experiment, votes_of(0.2))


def test_lnmax_within_a_budget_is_told_at_what_its_queries_cost_whatever_is_asked_next(tmp_path: Path) -> None:
    experiment = pate("algorithm.labelling.mechanism=lnmax:0.2", "algorithm.labelling.epsilon=3")
    statement, answered = said(tmp_path / "run", experiment)
    _, each = LNMax(gamma=0.2).charges()
    assert 0 < answered < 40
    assert epsilon_of_counts({each: answered + 1}, 1e-5) > 3
    assert statement["epsilon"] == pytest.approx(epsilon_of_counts({each: answered}, 1e-5, accountant="pld"), rel=1e-6)


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
        assert "The number of records of each class is treated as public" in statement["does_not_cover"]


def test_of_every_split_it_is_said_whichneighbours_it_keeps_apart():
    fixed = [
        scheme() for scheme in kinds_of("partition").values() if not issubclass(scheme, ByRound)
    ]  # others: refused
    assert {type(scheme).__name__: neighbours(scheme)[0].value for scheme in fixed} == {
        "Iid": "replace-one", "Quantity": "replace-one", "FeatureNoise": "replace-one",
        "Rotate": "replace-one", "Invert": "replace-one", "Colour": "replace-one", "PermuteLabels": "replace-one",
        "Natural": "add-or-remove-one", "Domain": "add-or-remove-one",
        "LabelK": "add-or-remove-one", "Dirichlet": "add-or-remove-one", "Shards": "add-or-remove-one",
    }  # fmt: skip
    assert neighbours(Rotate(4, Dirichlet())) == neighbours(Dirichlet())  # the inner split decides
    assert "The groups of records are treated as public" in neighbours(Natural())[1]
    assert "in each domain" in neighbours(Domain(Dirichlet()))[1]
    with pytest.raises(AssertionError, match="no adjacency is known"):
        neighbours(object())
