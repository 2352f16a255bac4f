"""Published class counts give away a client's classes, as far as their noise allows, and by chance without a trace."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.threats.property import infer

HELD = np.array([[90, 10, 0], [0, 0, 40], [0, 0, 0], [20, 30, 0]])


def test_exact_counts_give_everything_away_and_equal_counts_nothing() -> None:
    exact = infer(HELD, HELD)
    assert (exact.clients, exact.silent, exact.held, exact.largest) == (3, 0, 1.0, 1.0)
    assert exact.distance == pytest.approx(0)
    assert (exact.held_by_chance, exact.largest_by_chance) == (5 / 9, 1 / 3)
    alike = infer(np.tile(HELD.sum(0), (4, 1)), HELD)
    assert alike.distance == pytest.approx(alike.distance_by_chance)
    assert (alike.held, alike.largest) == (exact.held_by_chance, exact.largest_by_chance)


def test_a_client_without_synthetic_records_is_guessed_by_the_whole_pool() -> None:
    published = HELD * np.array([[1], [1], [1], [0]])
    guessed = infer(published, HELD)
    assert (guessed.clients, guessed.silent) == (3, 1)
    whole, truth = np.array([90, 10, 40]) / 140, np.array([0.4, 0.6, 0.0])
    assert guessed.distance == pytest.approx(np.abs(whole - truth).sum() / 2 / 3)


@pytest.mark.usefixtures("quick_accounting")
def test_the_command_finds_label_skew_in_the_pool_and_prints_its_epsilon(tmp_path: Path) -> None:
    pool = {"kind": "da-fl", "epsilon": 5, "generator": "mean-embedding", "labels": {"epsilon": 1}, "gamma": 0.5}
    settings: dict[str, Any] = {"model": "logistic", "engine": "inprocess", "partition": "label-2", "clients": 5,
                                "rounds": 1, "preprocess": {**pool, "noise": "seeded"}}  # fmt: skip
    run(experiment_from(settings), tmp_path / "run")
    said = CliRunner().invoke(app, ["attack", "property", str(tmp_path / "run"), "--json"])
    found = json.loads(said.stdout)
    assert found["held"] > 0.9 > found["held_by_chance"]
    assert found["distance"] < 0.2 < found["distance_by_chance"]
    assert (found["labels_epsilon"], found["privacy"][0]["unit"]) == (1, "record")
    words = CliRunner().invoke(app, ["attack", "property", str(tmp_path / "run")]).stdout
    assert "does not cover a property of the whole client" in " ".join(words.split())
    run(experiment_from({**settings, "preprocess": "none"}), tmp_path / "open")
    with pytest.raises(UserError, match=r"has preprocess=none, .*: give a run with preprocess=da-fl"):
        CliRunner().invoke(app, ["attack", "property", str(tmp_path / "open")], catch_exceptions=False)
