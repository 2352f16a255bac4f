"""Words of other frameworks: what they are answered with can be typed here."""

import re

import pytest

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.local import Local
from fl_sim.other_words import OTHER_WORDS

SETTING = re.compile(r"[a-z_.]+=[^ ,]+")


@pytest.mark.parametrize("meant", sorted(set(OTHER_WORDS.values())))
def test_what_a_word_is_answered_with_are_settings_of_ours(meant: str) -> None:
    for together in meant.split(", "):
        settings = SETTING.findall(together)
        assert settings
        experiment_from(with_overrides({"clients": 10}, settings))


def test_no_word_is_a_setting_of_ours_at_the_top() -> None:
    assert not set(OTHER_WORDS) & set(Experiment.model_fields)


@pytest.mark.parametrize("word", ["lr", "epochs", "batch_size", "fraction_fit", "num_clients", "epsilon"])
def test_the_word_is_answered_wherever_it_is_typed(word: str) -> None:
    places = [word] if word in Local.model_fields else [word, f"local.{word}"]
    for place in places:
        with pytest.raises(UserError) as caught:
            experiment_from(with_overrides({}, [f"{place}=1"]))
        assert f"unknown key {place!r} (here: {OTHER_WORDS[word]}); valid here: " in str(caught.value)


def test_several_values_in_the_place_of_one_are_answered_with_how_they_are_tried() -> None:
    for given in ("local.learning_rate=0.01,0.1", "algorithm=fedavg,fedprox", "seed=0,1"):
        with pytest.raises(UserError, match=f"'fl-sim sweep {given}'"):
            experiment_from(with_overrides({}, [given]))
    with pytest.raises(UserError) as caught:
        experiment_from({"rounds": "many"})
    assert "sweep" not in str(caught.value)
