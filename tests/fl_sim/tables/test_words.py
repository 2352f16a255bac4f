"""How settings are written in a table's rows."""

import inspect

import pytest

from clients.dafl.settings import DaFl
from fl_sim.experiment.experiment import AnyAlgorithm, experiment_from
from fl_sim.kinds import kinds
from fl_sim.tables.words import caption, label
from strategies.global_dp import AdaptiveClipping, GlobalDP
from strategies.pate.labelling import Labelling
from strategies.pate.mechanisms import ConfidentGNMax, GNMax
from strategies.pate.settings import Pate
from strategies.pate.student import Supervised


def test_what_a_group_of_settings_holds_is_named_as_it_is_set() -> None:
    labelling = Labelling(mechanism=GNMax(sigma=6.0), epsilon=2.0)
    assert label(Pate(labelling=labelling)) == "PATE (labelling.mechanism=gnmax:6, labelling.epsilon=2)"
    assert label(Pate(labelling=Labelling())) == "PATE"


def test_what_stands_in_place_of_a_default_is_named_by_its_class_even_where_nothing_in_it_is_changed() -> None:
    assert label(GlobalDP(adaptive_clipping=AdaptiveClipping())).endswith("(adaptive_clipping=AdaptiveClipping)")
    assert label(GlobalDP(adaptive_clipping=AdaptiveClipping(learning_rate=0.5))).endswith(
        "(adaptive_clipping=AdaptiveClipping (learning_rate=0.5))"
    )


def test_kinds_within_settings_are_named_with_what_is_not_their_default() -> None:
    written = label(Pate(student=Supervised(steps=7), labelling=Labelling(mechanism=ConfidentGNMax(sigma=3.0))))
    assert written == "PATE (labelling.mechanism=confident (sigma=3), student=supervised:7)"
    assert label(DaFl(gamma=0.5)).startswith("DA-FL")


def test_an_algorithm_that_has_nothing_to_say_of_momentum_leaves_no_line_behind() -> None:
    kinds = ("scaffold", "fedmix", "fedavg")
    experiments = [experiment_from({"algorithm": kind, "local": {"momentum": 0.0}}) for kind in kinds]
    lines = caption(experiments, {}, {}, has_bound=False)
    assert "SCAFFOLD trains without local momentum, as in its paper." in lines
    assert not [line for line in lines if len(line) < 10]


@pytest.mark.parametrize("kind", kinds(AnyAlgorithm))
def test_who_advises_on_momentum_is_asked_for_nothing_else(kind: str) -> None:
    advice = getattr(kinds(AnyAlgorithm)[kind], "advice", None)
    assert advice is None or list(inspect.signature(advice).parameters) == ["self", "momentum"]


def test_a_table_of_pate_takes_no_momentum_for_a_number_of_teachers() -> None:
    lines = caption([experiment_from({"algorithm": "pate", "clients": 250})], {}, {}, has_bound=False)
    assert not [line for line in lines if "votes of" in line]
