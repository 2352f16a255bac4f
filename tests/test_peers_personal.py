"""Own models of clients: fl-sim comes to the numbers of plain loops of the papers, and the page on peers fits them."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fl_sim.settings import kinds_of
from fl_sim.training.loop import to_tensors

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/peers_personal.md").read_text()
COLUMNS = ("pfllib", "fl-bench", "fluke")
METHODS = ("fedper", "lg-fedavg", "fedrep", "fedbabu", "fedrod", "ditto", "pfedme", "apfl", "per-fedavg",
           "per-fedavg exact", "fedala", "fedproto", "knn-per", "cfl")  # fmt: skip


@pytest.fixture
def personal(load_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks/peers")
    return load_benchmark("peers/personal")


@pytest.fixture
def job(personal: ModuleType) -> Any:
    return personal.the_job()


@pytest.fixture
def problem(personal: ModuleType, job: Any) -> Any:
    return personal.the_problem(job)


@pytest.mark.parametrize("name", METHODS)
def test_fl_sim_comes_to_the_numbers_of_the_papers_loop(
    personal: ModuleType, problem: Any, name: str, tmp_path: Path
) -> None:
    found = personal.ours(problem, name, tmp_path / "run")
    loop = personal.DEPARTURES["fl-sim"].get(name, personal.PAPERS[name])
    shared, own = found.distance(loop(problem)[0])
    assert shared < personal.ROUNDING or name == "cfl"
    assert own < personal.ROUNDING or name in {"fedbabu", "per-fedavg", "per-fedavg exact", "knn-per"}


@pytest.mark.parametrize(("name", "column"), [("fedbabu", "fine_tuned_accuracy"), ("knn-per", "own_accuracy")])
def test_predictions_of_clients_without_numbers_of_their_own_are_the_loops(
    personal: ModuleType, job: Any, problem: Any, name: str, column: str, tmp_path: Path
) -> None:
    personal.ours(problem, name, tmp_path / "run")
    table = np.genfromtxt(tmp_path / "run/clients.csv", delimiter=",", names=True)
    accuracies = []
    for client, indices in enumerate(job.own_tests):
        inputs, labels = to_tensors(job.dataset.test.take(indices), job.dataset)
        scores = personal.papers.PAPERS[name](replace(problem, test=(inputs, labels)))[1][client]
        accuracies.append(float((scores.argmax(1) == labels).float().mean()))
    assert table[column] == pytest.approx(accuracies, abs=1e-6)


def test_every_departure_is_seen(personal: ModuleType, problem: Any) -> None:
    """A loop with a departure differs from the paper's by far more than rounding."""
    for peer in COLUMNS:
        for name, loop in personal.DEPARTURES[peer].items():
            if name == "fedmtl":
                continue
            paper = personal.PAPERS[name.removesuffix(" by default").removesuffix(" adaptive")](problem)[0]
            departed = loop(problem)[0]
            if departed.shared.shape == paper.shared.shape:
                assert max(np.nan_to_num(departed.distance(paper))) > 100 * personal.ROUNDING, (peer, name)


def test_the_pages_table_is_what_the_scripts_explain(
    personal: ModuleType, load_benchmark: Callable[[str], ModuleType]
) -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert [name for name, *_ in rows] == [name for name in METHODS if " " not in name]
    notes = set(re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE))
    used = set()
    for name, *cells in rows:
        for peer, cell in zip(COLUMNS, cells, strict=True):
            classes = load_benchmark(f"peers/{personal.PEERS[peer].removesuffix('.py')}").CLASSES
            expected = "differs" if name in personal.DEPARTURES[peer] else "follows"
            word, _, numbers = cell.partition(" ")
            assert word == (expected if name in classes else "-"), (name, peer)
            assert numbers or word != "differs", (name, peer)
            used |= set(re.findall(r"\d+", numbers))
    assert used == notes


def test_the_page_states_the_scripts_bound(personal: ModuleType) -> None:
    [bound] = re.findall(r"no parameter differs from the simple implementation by more than ([0-9.e-]+)\.", PAGE)
    assert float(bound) == personal.ROUNDING


def test_methods_on_the_page_are_ours() -> None:
    known = {*kinds_of("algorithm"), "fedproto"}
    rows = re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE)
    assert {*rows, "mr-mtl", "ifca", "local-only"} <= known


def test_accuracies_on_the_page_are_those_of_the_loops(personal: ModuleType, problem: Any) -> None:
    long = replace(problem, way=replace(problem.way, rounds=personal.LONG))

    def percent(loop: Any) -> float:
        scores = loop(long)[1]
        return 100 * sum(problem.accuracy(client, one) for client, one in enumerate(scores)) / len(scores)

    papers = {name: percent(loop) for name, loop in personal.PAPERS.items()}
    departed = {(peer, name): percent(loop) for peer in COLUMNS for name, loop in personal.DEPARTURES[peer].items()}
    told = {
        ("pfllib", "pfedme"): r"(91\.9) % instead of 96\.2", ("fl-bench", "cfl"): r"(72\.0) % instead of 95\.1",
        ("fl-bench", "pfedme"): r"\): (6\.2) %", ("pfllib", "pfedme by default"): r"accuracy (6\.2) %",
    }  # fmt: skip
    for one, pattern in told.items():
        [said] = re.findall(pattern, PAGE)
        assert departed.pop(one) == pytest.approx(float(said), abs=0.5)
    assert [papers["pfedme"], papers["cfl"]] == pytest.approx([96.2, 95.1], abs=0.5)
    del departed["pfllib", "fedmtl"]
    changes = {one: abs(found - papers[one[1].removesuffix(" by default").removesuffix(" adaptive")])
               for one, found in departed.items()}  # fmt: skip
    [most] = re.findall(r"by at most\s+([0-9.]+)\s+points", PAGE)
    assert max(changes.values()) == pytest.approx(float(most), abs=0.5), changes


def test_problem_and_outcomes_go_through_their_files(personal: ModuleType, problem: Any, tmp_path: Path) -> None:
    files = __import__("personal_problem")
    files.write(tmp_path / "problem.npz", problem)
    read = files.read(tmp_path / "problem.npz")
    assert read.sizes == problem.sizes
    assert all(torch.equal(read.start[name], value) for name, value in problem.start.items())
    assert all(torch.equal(one, other) for one, other in zip(read.test, problem.test, strict=True))
    outcome = personal.papers.fedper(problem)[0]
    files.write_outcomes(tmp_path / "outcomes.npz", {"per-fedavg exact": outcome})
    assert files.read_outcomes(tmp_path / "outcomes.npz")["per-fedavg exact"].distance(outcome) == (0, 0)


def test_an_unexplained_difference_is_told(personal: ModuleType, problem: Any) -> None:
    short = replace(problem, way=replace(problem.way, rounds=1))
    outcome = personal.papers.fedper(short)[0]
    personal.LONG, kept = 1, personal.LONG
    try:
        assert personal.row(short, "fluke", "fedper", outcome)[1]
        assert not personal.row(short, "fluke", "fedper", replace(outcome, own=outcome.own + 1e-4))[1]
        assert not personal.row(short, "fluke", "fedper", replace(outcome, shared=outcome.shared[1:]))[1]
    finally:
        personal.LONG = kept
