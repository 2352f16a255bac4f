"""``fl-sim data``: what is where, and an exit code a script can trust."""

import json

import numpy as np
import pytest
from PIL import Image
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
    assert str(result.exception) == "damaged or missing: mnist, svhn"
    assert "no readable npz file" in result.stdout
    assert "svhn was not found" in result.stdout


def test_verify_refuses_a_name_it_does_not_know():
    assert isinstance(run("verify", "minst").exception, UserError)


def test_a_card_tells_sizes_classes_clients_and_columns(tmp_path):
    rows = "".join(f"{i},{'abc'[i % 3]},{'xy'[i % 2]},{'nnnnsssse'[i % 9]}\n" for i in range(90))
    (tmp_path / "t.csv").write_text(f"size,kind,label,ward\n{rows}")
    typed = [f"csv:{tmp_path}/t.csv", "data.client=ward", "data.test=0.1"]
    result = run("show", *typed)
    assert result.exit_code == 0
    for line in (
        "records   81 to train, 9 to test",
        "inputs    4 numbers per record (float32)",
        "  kind   category: a, b, c",
        "  ward   client: 3 clients",
    ):
        assert line in result.stdout.splitlines()
    assert "clients   3: 9 to 36 training records each, median 36; 0 with one record, 3 with test" in result.stdout
    assert "they are the clients of a run with partition=natural clients=3\n" in result.stdout
    assert "number, unchanged (here 0.." in result.stdout
    assert "kind=b" in result.stdout
    assert "This description shows records of your data" in result.stderr
    card = json.loads(run("show", *typed, "--json").stdout)
    assert card["clients"]["histogram"] == [{"from": 8, "to": 15, "clients": 1}, {"from": 32, "to": 63, "clients": 2}]
    assert [one["name"] for one in card["classes"]] == ["x", "y"]
    assert len(card["first_records"]) == 5


def test_a_card_without_records_shows_none_and_no_ranges(tmp_path):
    (tmp_path / "t.csv").write_text("size,label\n" + "".join(f"{1000 + i},{i % 2}\n" for i in range(20)))
    typed = ["show", f"csv:{tmp_path}/t.csv:test=0.2", "--no-records"]
    for output in ([], ["--json"]):
        result = run(*typed, *output)
        assert "10" not in result.stdout.replace(str(tmp_path), "")
        assert result.stderr == ""


def test_a_sheet_draws_images_of_every_class(tmp_path):
    assert f"drawn to {tmp_path}/sheet.png" in run("show", "digits", "--sheet", f"{tmp_path}/sheet.png").stdout
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("L"))
    rows = np.flatnonzero((pixels[:, 200:] < 100).any(axis=1))
    assert len(rows) > 300
    wrong = run("show", "digits", "--sheet", f"{tmp_path}/sheet.bmp")
    assert "give a file name that ends in .png" in str(wrong.exception)
    (tmp_path / "t.csv").write_text("size,label\n" + "1,0\n2,1\n" * 5)
    table = run("show", f"csv:{tmp_path}/t.csv:test=0.2", "--sheet", f"{tmp_path}/t.png")
    assert "--sheet draws images" in str(table.exception)


def test_after_the_name_stand_settings_of_the_data_alone():
    assert "only settings of the data" in str(run("show", "digits", "rounds=3").exception)


def test_names_from_files_steer_no_terminal_and_forge_no_line(root):
    head, label = '"a\x1b[2Jb"', "x\x1b]0;owned\x07\nsafe   9,999"
    rows = "".join(f'{row * 1.5},"{label if row % 2 else "y"}"\n' for row in range(20))
    (root / "t.csv").write_text(f"{head},label\n{rows}")
    shown = run("show", f"csv:{root}/t.csv:test=0.3")
    assert shown.exit_code == 0
    assert "\x1b" not in shown.output
    assert "\x07" not in shown.output
    assert r"a\x1b[2Jb" in shown.output
    assert not any(line.startswith("safe") for line in shown.output.splitlines())
    told = json.loads(run("show", f"csv:{root}/t.csv:test=0.3", "--json").stdout)
    assert [one["name"] for one in told["classes"]] == [label, "y"]  # programs get what is there


def test_the_card_lists_what_was_taken_for_granted(root):
    (root / "t.csv").write_text("a;label\n" + "".join(f"{row},5;{row % 2}\n" for row in range(20)))
    shown = run("show", f"csv:{root}/t.csv:test=0.3:delimiter=semicolon:decimal=comma").output
    lines = shown[shown.index("assumed (no setting states it)") :].splitlines()
    assert lines[1:5] == [
        "  the delimiter is semicolon; numbers have a decimal comma and no thousands separator",
        "  1 columns of numbers, 0 of categories",
        "  columns found by their names: label",
        "  2 classes, in the order of their numbers",
    ]
