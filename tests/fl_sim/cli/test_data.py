"""``fl-sim data``: what is where, and an exit code a script can trust."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fl_sim.cli.verbs import data_app as app
from fl_sim.data import NAMES
from fl_sim.errors import RunError, UserError


@pytest.fixture(autouse=True)
def root(monkeypatch, tmp_path):
    monkeypatch.setenv("FL_SIM_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FL_SIM_DATA", str(tmp_path))
    images, labels = np.zeros((3, 28, 28), dtype=np.uint8), np.array([0, 1, 2])
    np.savez(tmp_path / "mnist.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_list_has_one_row_a_data_set_and_names_what_is_missing(root):
    lines = run("list").stdout.splitlines()
    assert [line.split()[0] for line in lines[: len(NAMES)]] == list(NAMES)
    assert "embedded" in lines[0]
    assert f"npz      {root}/mnist.npz" in lines[1]
    assert "missing; wanted: train_32x32.mat, test_32x32.mat, or svhn.npz" in run("list").stdout


def test_list_as_json(root):
    told = json.loads(run("list", "--json", "--data-root", str(root / "nowhere")).stdout)
    rows = {row["name"]: row for row in told["data"]}
    assert list(rows) == list(NAMES)
    assert rows["digits"] == {"name": "digits", "found": True, "layout": "embedded", "path": None}
    assert rows["mnist"]["path"] == f"{root}/mnist.npz"
    assert rows["svhn"] == {"name": "svhn", "found": False, "layout": None, "path": None}
    assert [entry["exists"] for entry in told["roots"]] == [False, True, False]


def test_verify_without_names_checks_all_that_is_found():
    result = run("verify", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert [row["name"] for row in told["data"]] == ["digits", "mnist"]
    assert told["ok"] is True
    assert told["data"][1]["note"] == "3 of 60,000 training images; 3 of 10,000 test images"


@pytest.mark.parametrize("output", [[], ["--json"]])
def test_verify_fails_for_a_damaged_or_a_missing_set(root, output):
    (root / "mnist.npz").write_bytes(b"not a zip")
    result = run("verify", "digits", "mnist", "svhn", *output)
    assert isinstance(result.exception, RunError)
    assert str(result.exception) == "not in order: mnist, svhn"
    assert "no readable npz file" in result.stdout
    assert "svhn was not found" in result.stdout


def test_verify_refuses_a_name_it_does_not_know():
    assert isinstance(run("verify", "minst").exception, UserError)
