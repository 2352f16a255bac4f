"""TSTR as an experiment's algorithm: what it starts with, and what it has no place for."""

import pytest

from clients.dafl.settings import DaFl
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from strategies.tstr import Tstr


@pytest.mark.parametrize("preprocess", [{}, {"kind": "da-fl"}, {"generator": "mean-embedding"}])
def test_it_takes_the_pool_alone_unless_told_otherwise(preprocess):
    experiment = experiment_from({"algorithm": "tstr", "preprocess": preprocess})
    assert isinstance(experiment.preprocess, DaFl)
    assert experiment.preprocess.train_on == "synthetic"
    assert (experiment.local.optimizer, experiment.local.epochs, experiment.evaluate.test) == ("adam", 20, "last")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"preprocess": "none"}, "tstr trains only on synthetic records"),
        ({"preprocess": {"kind": "da-fl", "train_on": "own-and-synthetic"}}, "preprocess.train_on=synthetic"),
        ({"preprocess": {"kind": "da-fl", "server_epochs": 3}}, "without preprocess.server_epochs"),
        ({"aggregator": "global-dp"}, "has no rounds, so aggregator global-dp would have no effect"),
        ({"sampler": "fixed-size:3"}, "leave sampler out"),
        ({"attack": "label-flip:2"}, "leave attack out"),
        ({"calibrate": "ccvr"}, "leave calibrate out|only synthetic records leave"),
        ({"local": {"batch_norm": "average"}}, "averages no models"),
        (
            {"algorithm": {"kind": "tstr", "classifiers": ["lda"]}},
            "unknown model 'lda'.*or take discriminant, quadratic",
        ),
        ({"algorithm": {"kind": "tstr", "classifiers": []}}, "classifiers"),
        ({"algorithm": {"kind": "tstr", "holdout": 1}}, "holdout"),
        ({"evaluate": {"validation": 0.1}}, "run that promises privacy cannot use it"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_place_is_refused_in_a_line(more, said):
    with pytest.raises(UserError, match=said) as raised:
        experiment_from({"algorithm": "tstr", **more})
    assert "\n" not in str(raised.value)


def test_the_experiments_model_is_tried_once():
    assert Tstr().names("mlp") == ("discriminant", "logistic", "mlp")
    assert Tstr().names("2nn") == ("discriminant", "logistic", "mlp", "2nn")
    assert Tstr(classifiers=("discriminant",)).names("2nn") == ("discriminant",)


@pytest.mark.parametrize("records", [0, 1, 4])
def test_too_few_records_are_refused(records):
    with pytest.raises(UserError, match=f"cannot split {records} synthetic records"):
        Tstr().check_size(records)
    Tstr().check_size(10)
