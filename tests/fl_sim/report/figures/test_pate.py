"""PATE's figures: what can be compared is drawn, every epsilon axis says whose it is, votes are drawn where kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from fl_sim.report.figures import pate
from fl_sim.report.figures.pate import VOTES, pate_pictures
from fl_sim.report.groups import group
from fl_sim.report.picture import Picture, for_papers
from fl_sim.report.runs import find

CONFIG = """
data = "digits"
seed = {seed}
clients = 10
rounds = 1
model = "mlp"
partition = {{ kind = "iid" }}
algorithm = {{ kind = "pate", queries = {queries}, student = {{ kind = "{student}" }}, gamma = {gamma}{asked} }}
"""

Readable: TypeAlias = Callable[[Picture], None]


def write_run(path: Path, *, student: str = "fixmatch", queries: int = 100, gamma: float = 0.1, seed: int = 0,
              kept: bool = False, accuracy: float = 0.9, asking: str | None = None) -> None:  # fmt: skip
    path.mkdir()
    settings = {"student": student, "queries": queries, "gamma": gamma, "seed": seed}
    settings["asked"] = f', asking = "{asking}"' if asking else ""
    (path / "config.toml").write_text(CONFIG.format(**settings))
    line = {"round": 1, "test_accuracy": accuracy, "test_loss": 0.3, "train_loss": None, "epsilon": 2.0,
            "cohort": None, "learning_rate": 0.1, "seconds": 1.0}  # fmt: skip
    (path / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    facts = {
        "teachers": 10, "mechanism": {"kind": "lnmax", "gamma": gamma}, "evaluation_records": 60,
        "queries_asked": queries, "queries_answered": queries, "label_accuracy": 0.8, "student": student,
        "private_kept": kept, **({"asking": asking} if asking else {}),
    }  # fmt: skip
    result: dict[str, Any] = {
        "status": "finished", "data_note": "", "partition": "iid", "engine": "inprocess", "rounds": 1,
        "final_accuracy": accuracy, "best_accuracy": accuracy, "versions": {}, "pate": facts,
        "privacy": [{"unit": "record", "epsilon": gamma * queries, "delta": 1e-5}],
        "seconds": {"preprocess": 1.0, "train": 1.0, "total": 2.0},
    }  # fmt: skip
    (path / "result.json").write_text(json.dumps(result))
    if kept:
        np.save(path / VOTES, np.tile([9, 1, 0], (queries, 1)))


def pictures(top: Path) -> dict[str, Picture]:
    found, problems = pate_pictures(group(find([top]).runs)[0])
    assert not problems
    return {one.name: one for one in found}


def npy(header: str) -> bytes:
    """Return a .npy file of version 1 with a header of one's own."""
    content = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content


def test_each_figure_says_which_epsilon_it_shows(tmp_path: Path) -> None:
    for number, gamma in enumerate((0.05, 0.1, 0.2)):
        write_run(tmp_path / f"run{number}", gamma=gamma)
    write_run(tmp_path / "other", student="pate-g", queries=300)
    drawn = pictures(tmp_path)
    assert set(drawn) == {
        f"pate-{stem}-digits-iid.png"
        for stem in ("labels-by-noise", "student-by-queries", "student-by-total-epsilon", "student-by-query-epsilon")
    }
    headings = {one.heading for one in drawn.values()}
    assert {"Student accuracy over epsilon of all queries", "Student accuracy over epsilon of one query"} < headings
    assert all("sees several points, their epsilons add up" in one.caption[1] for one in drawn.values())
    assert all(one.png.startswith(b"\x89PNG") for one in drawn.values())


def test_one_point_is_no_figure(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"run{seed}", seed=seed)
    assert pictures(tmp_path) == {}


def test_the_agreement_is_drawn_where_votes_were_kept_and_says_that_it_is_private(tmp_path: Path) -> None:
    write_run(tmp_path / "run", kept=True)
    (drawn,) = pictures(tmp_path).values()
    assert drawn.name == "pate-agreement-digits-iid.png"
    assert for_papers(drawn) == {}
    assert "PRIVATE" in drawn.heading
    assert "do not publish" in drawn.caption[1]


@pytest.mark.parametrize("header", ["", "{'descr': (}", "{'descr': '<i8', \x8b", "{'descr': \0}", '"""'])
def test_votes_that_cannot_be_read_are_named(tmp_path: Path, header: str) -> None:
    write_run(tmp_path / "run", kept=True)
    (tmp_path / "run" / VOTES).write_bytes(npy(header) if header else b"nothing")
    drawn, problems = pate_pictures(group(find([tmp_path]).runs)[0])
    assert not drawn
    assert "its votes cannot be shown" in problems[0].error


@pytest.mark.parametrize("axis", ["epsilon of ALL queries together", "epsilon of ONE query = 2 gamma"])
def test_axes_name_the_epsilon(axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(pate, "drawn", lambda draw, layout: seen.append(draw(layout).axes[0].get_xlabel()) or b"")
    for number, gamma in enumerate((0.05, 0.1)):
        write_run(tmp_path / f"run{number}", gamma=gamma)
    pictures(tmp_path)
    assert any(axis in " ".join(label.split()) for label in seen)


def test_runs_that_asked_about_other_records_are_other_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(pate, "draw", lambda plot, title, lines, layout: seen.update({plot.stem: set(lines)}))
    monkeypatch.setattr(pate, "drawn", lambda draw, layout: draw(layout) or b"")
    for number, asking in enumerate((None, "in-order", "representative")):
        for queries in (100, 2000):
            write_run(tmp_path / f"run{number}-{queries}", queries=queries, asking=asking)
    pictures(tmp_path)
    named = "fixmatch, 10 teachers, lnmax 1/gamma 10"
    other = named.replace("teachers", "teachers, asked about representatives")
    assert seen["student-by-queries"] == {named, other}


def test_ticks_are_numbers_as_people_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        pate, "drawn",
        lambda draw, layout: seen.append([one.get_text() for one in draw(layout).axes[0].get_xticklabels()]),
    )  # fmt: skip
    for queries in (100, 2000):
        write_run(tmp_path / f"run{queries}", queries=queries)
    pictures(tmp_path)
    assert ["100", "2,000"] in seen


def test_a_figure_for_a_paper_can_be_read(tmp_path: Path, readable: Readable) -> None:
    for queries in (100, 2000):
        for seed in (0, 1):
            write_run(tmp_path / f"run{queries}-{seed}", queries=queries, seed=seed)
    readable(pictures(tmp_path)["pate-student-by-queries-digits-iid.png"])
