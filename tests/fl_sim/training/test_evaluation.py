"""Measures of a classifier: scikit-learn's numbers, and what clients of given shares of the classes would see."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from fl_sim.training.evaluation import Confusion, Holdings, OverClients, OwnTests, Scores, area_under_roc
from partitions import Parts


def _scores(num_classes: int, count: int, seed: int, *, tied: bool = False) -> Scores:
    """Return what a poor classifier makes of ``count`` records, of which the last class has none if there is room."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, max(2, num_classes - 1), count)
    labels[:2] = 0, 1
    predicted = np.where(rng.random(count) < 0.5, labels, rng.integers(0, num_classes, count))
    margins = rng.normal(size=count).astype(np.float32) + labels
    return Scores(0.0, labels, predicted, np.round(margins) if tied else margins)


@settings(max_examples=30)
@given(st.integers(2, 12), st.integers(2, 60), st.integers(0, 99))
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_the_measures_of_a_confusion_matrix_are_those_of_scikit_learn(num_classes, count, seed):
    scores = _scores(num_classes, count, seed)
    confusion = Confusion.of(scores, num_classes)
    truth, predicted = scores.labels, scores.predicted
    classes = np.arange(num_classes)
    assert np.array_equal(confusion.counts, metrics.confusion_matrix(truth, predicted, labels=classes))
    assert scores.accuracy == metrics.accuracy_score(truth, predicted)
    assert confusion.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(truth, predicted))
    assert confusion.macro_f1 == pytest.approx(metrics.f1_score(truth, predicted, average="macro", zero_division=0))
    held = np.isin(classes, truth)
    recalls = metrics.recall_score(truth, predicted, labels=classes, average=None, zero_division=0)
    assert confusion.recalls[held] == pytest.approx(recalls[held])
    assert np.isnan(confusion.recalls[~held]).all()
    assert confusion.majority_share == np.bincount(truth).max() / count


@settings(max_examples=30)
@given(st.integers(2, 60), st.integers(0, 99), st.booleans())
def test_the_area_under_the_roc_curve_is_that_of_scikit_learn(count, seed, tied):
    scores = _scores(2, count, seed, tied=tied)
    assert area_under_roc(scores) == pytest.approx(metrics.roc_auc_score(scores.labels, scores.margins))


def test_there_is_no_area_under_the_roc_curve_of_one_class_or_of_three():
    labels = np.zeros(3, dtype=np.int64)
    assert area_under_roc(Scores(0.0, labels, labels, np.zeros(3, dtype=np.float32))) is None
    assert area_under_roc(Scores(0.0, labels, labels)) is None


def test_a_clients_accuracy_counts_each_test_record_as_often_as_its_class_occurs_with_the_client():
    scores = _scores(5, 300, 1)
    confusion = Confusion.of(scores, 5)
    labels = np.random.default_rng(2).integers(0, 4, 40)
    kept, held_out = (np.arange(0, 20), np.arange(20, 30)), (np.arange(30, 35), np.arange(35, 40))
    found = Holdings.of((Parts.of(kept), Parts.of(held_out)), labels).accuracies(confusion.recalls)
    for client, accuracy in enumerate(found):
        own = labels[np.concatenate([kept[client], held_out[client]])]
        weights = np.bincount(own, minlength=5)[scores.labels] / np.bincount(scores.labels, minlength=5)[scores.labels]
        assert accuracy == pytest.approx(np.average(scores.labels == scores.predicted, weights=weights))


def test_classes_without_test_records_count_nowhere_and_clients_without_others_are_left_out():
    holdings = Holdings.of(
        [Parts.of([np.array([0, 1, 2]), np.array([3]), np.array([], dtype=np.int64)])], np.array([0, 0, 1, 2])
    )
    assert holdings.accuracies(np.array([0.5, 1.0, np.nan])).tolist() == [pytest.approx(2 / 3)]


def test_a_client_with_test_records_of_its_own_is_measured_on_these_alone():
    shards, groups = [np.array([0, 3]), np.array([1]), np.array([2, 4])], np.array([5, 9, 7, 6, 7])
    own = OwnTests.of(Parts.of(shards), groups, np.array([7, 5, 6, 8, 7, 6]), np.zeros(6, dtype=np.int64))
    assert own.owners.tolist() == [2, 0, 0, -1, 2, 0]
    assert own.counts.tolist() == [3, 0, 2]
    truth, guessed = np.array([0, 1, 1, 0, 1, 0]), np.array([0, 1, 0, 1, 1, 1])
    assert own.accuracies(Scores(0.0, truth, guessed)).tolist() == [pytest.approx(1 / 3), 1.0]


def test_test_records_are_nobodys_where_a_group_is_spread_over_clients_with_other_groups():
    shards, nothing = Parts.of([np.array([0, 2]), np.array([1])]), np.zeros(1, dtype=np.int64)
    assert OwnTests.of(shards, np.array([5, 5, 6]), np.array([5]), nothing) is None


def test_clients_with_one_group_divide_its_test_records_class_by_class():
    shards, groups = Parts.of([np.array([0]), np.array([1]), np.array([2]), np.array([3])]), np.array([5, 9, 5, 5])
    tested, labels = np.array([5] * 9 + [9, 4]), np.array([1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0])
    own = OwnTests.of(shards, groups, tested, labels)
    assert own.owners[-2:].tolist() == [1, -1]
    assert sorted(own.counts.tolist()) == [1, 3, 3, 3]
    for client in (0, 2, 3):
        assert sorted(labels[own.owners == client].tolist()) in ([0, 0, 1], [0, 1, 1])


@pytest.mark.parametrize(("count", "worst"), [(1, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (21, 1.0)])
def test_the_worst_tenth_is_rounded_up_to_whole_clients(count, worst):
    accuracies = np.arange(count, dtype=np.float64)[::-1]
    found = OverClients.of(accuracies)
    assert (found.mean, found.deviation, found.worst_tenth) == (accuracies.mean(), accuracies.std(), worst)
    assert found.quantiles == pytest.approx(np.arange(11) / 10 * (count - 1))


@pytest.mark.parametrize(
    ("accuracies", "entropy"),
    [
        ([0.5] * 4, np.log(4)),
        ([0.0] * 4, np.log(4)),
        ([1, 0, 0], 0),
        ([0.2, 0.6], 0.25 * np.log(4) + 0.75 * np.log(4 / 3)),
    ],
)
def test_the_entropy_is_largest_for_equal_accuracies(accuracies, entropy):
    assert OverClients.of(np.array(accuracies, dtype=np.float64)).entropy == pytest.approx(entropy)
