"""``fl-sim privacy labels``: one JSON object with the distribution, lines for people, errors that help."""

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from clients.dafl.labels import ExponentialMechanism, Geometric
from fl_sim.cli.privacy import app
from fl_sim.errors import UserError

CLASS = ("labels", "--records", "600", "--gamma", "0.05", "--epsilon", "0.1", "--range", "400")


def call(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    value: dict[str, Any] = json.loads(result.stdout)
    return value


@pytest.mark.parametrize(("mechanism", "kind"), [("exponential", ExponentialMechanism), ("geometric", Geometric)])
def test_the_json_holds_the_distribution_and_every_total(mechanism: str, kind: type) -> None:
    found = call(*CLASS, "--mechanism", mechanism, "--classes", "7")
    assert found["pmf"] == kind(epsilon=0.1).pmf(600, 0.05, 400).tolist()
    assert (found["epsilon"], found["delta"], found["unit"], found["mechanism"]) == (0.1, 0.0, "record", mechanism)
    assert found["epsilon_parallel"] == 0.1
    assert found["epsilon_sequential"] == pytest.approx(0.7)
    assert found["epsilon_replace_one"] == 0.2
    assert found["mean"] == pytest.approx(30, rel=1e-3)
    counts = np.arange(401)
    assert found["standard_deviation"] == pytest.approx(np.sqrt(found["pmf"] @ (counts - found["mean"]) ** 2))
    assert found["threshold"] == kind(epsilon=0.1).threshold(0.05, 400)


def test_the_exponential_mechanism_is_the_default_and_nothing_is_dropped_on_request() -> None:
    found = call(*CLASS)
    assert found["mechanism"] == "exponential"
    assert found["threshold"] == 5
    assert found["mean_of_absent_class"] == pytest.approx(0.582, rel=1e-3)
    everything = call(*CLASS, "--false-positive", "1")
    assert (everything["threshold"], everything["dropped"]) == (0, 0.0)


@pytest.mark.parametrize(("records", "largest", "rows"), [("600", "400", 25), ("0", "5", 6), ("20000", "400", 25)])
def test_people_get_the_middle_of_the_distribution(records: str, largest: str, rows: int) -> None:
    arguments = ["labels", "--records", records, "--gamma", "0.05", "--range", largest]
    text = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    for word in ("standard deviation", "threshold", "all classes together", "sequential", "of another class"):
        assert word in text
    shown = [line for line in text.splitlines() if line[:8].strip().isdigit()]
    assert len(shown) == rows
    assert any(line.endswith("#" * 40) for line in shown)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--records", "-1", "-1 records"),
        ("--gamma", "0", "gamma 0.0"),
        ("--gamma", "nan", "gamma nan"),
        ("--epsilon", "0", "epsilon 0.0"),
        ("--epsilon", "inf", "epsilon inf"),
        ("--range", "-1", "range up to -1"),
        ("--range", "10000000", "too long to print"),
        ("--classes", "0", "0 classes"),
        ("--false-positive", "0", "false-positive probability of 0.0"),
    ],
)
def test_mistakes_are_named_with_their_fix(option: str, value: str, said: str) -> None:
    arguments = [*CLASS, "--classes", "10", "--false-positive", "0.01"]
    arguments[arguments.index(option) + 1] = value
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert said in str(caught.value)
