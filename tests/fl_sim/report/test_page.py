"""The page escapes all texts, says what each run promises, and holds in its JSON what the runs may tell."""

import base64
import hashlib
import itertools
import json
import math
import re
from html.parser import HTMLParser

import pytest

from fl_sim.report import page as page_module
from fl_sim.report.groups import group, panels
from fl_sim.report.page import page, page_data
from fl_sim.report.page_sections import NO_GUARANTEE, privacy_in_words
from fl_sim.report.payments import bills_of
from fl_sim.report.runs import find, read_json_table
from fl_sim.report.table import SeedResult, Table
from fl_sim.report.table_files import write_table

CONFIG = """data = "mnist"
clients = 10
model = "mlp"
rounds = 2
seed = {seed}
[algorithm]
kind = "fedprox"
mu = 0.5
[partition]
kind = "label-k"
k = 1
"""
RELEASE = {"unit": "client", "epsilon": 3.21, "delta": 1e-5, "covers": "the <i>models</i>"}


@pytest.fixture
def write_run(tmp_path):
    def write(name, seed=0, **changes):
        path = tmp_path / name
        path.mkdir(parents=True)
        (path / "config.toml").write_text(CONFIG.format(seed=seed))
        line = {"round": 1, "test_accuracy": 0.5, "test_loss": 1.0, "train_loss": None, "epsilon": None, "cohort": 10,
                "learning_rate": 0.1, "seconds": 1.0}  # fmt: skip
        (path / "rounds.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({**line, "round": 2}) + "\n")
        result = {"status": "finished", "data_note": "", "partition": "label-1", "engine": "inprocess", "rounds": 2,
                  "titles": {"algorithm": "FedProx"},
                  "final_accuracy": 0.5, "best_accuracy": 0.5, "privacy": [],
                  "seconds": {"preprocess": 0, "train": 2, "total": 3}, "versions": {"torch": "9.9"}}  # fmt: skip
        (path / "result.json").write_text(json.dumps(result | changes))
        return path

    return write


def shown(*directories):
    found = find(directories)
    groups, _ = group(found.runs)
    return page(found, panels(groups), [], [bill["in_words"] for bill in bills_of(found)[0]])


def text_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.split("</style>")[1]))


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in {"meta", "br", "img"}:
            self.open.append(tag)
        for name, value in attrs:
            assert name not in {"src", "href"} or value.startswith(("data:", "#"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_every_text_is_escaped_and_the_tags_are_balanced(write_run, tmp_path):
    write_run("a", data_note="<script>alert(1)</script>", privacy=[RELEASE], versions={"<b>": '"&'})
    write_run("<u>b", seed=1, status="failed", error="<img src=x>")
    html = shown(tmp_path)
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    for raw in ("<script>alert", "<img", "<u>", "<i>"):
        assert raw not in html
    assert html.count("<script") == 2
    assert "&lt;script&gt;alert(1)" in html
    assert "&lt;img src=x&gt; (after 2 of 2 rounds)" in html


def test_without_a_release_there_is_no_guarantee_and_an_epsilon_of_zero_is_said(write_run, tmp_path):
    write_run("none")
    assert f"{NO_GUARANTEE} The run" in text_of(shown(tmp_path / "none"))
    told = text_of(shown(write_run("infinite", privacy=[RELEASE | {"epsilon": None}])))
    assert "epsilon 0" not in told
    assert "No privacy guarantee for a client" in told
    told = text_of(shown(write_run("zero", privacy=[RELEASE | {"epsilon": 0.0}])))
    assert "epsilon 0 per client" in told
    assert "Per client: (0, 1e-05)-differential privacy" in told


def test_what_all_runs_cost_together_has_a_section_of_its_own(write_run, tmp_path):
    assert "together" not in text_of(shown(write_run("without", seed=2)))
    for seed, epsilon in ((0, 3.21), (1, 1.5)):
        write_run(f"run-{seed}", seed=seed, privacy=[RELEASE | {"epsilon": epsilon}])
    told = text_of(shown(tmp_path / "run-0", tmp_path / "run-1"))
    assert "Privacy cost of all runs together Privacy of all 2 runs together, of one client of mnist (label-1, " in told
    assert "10 clients): epsilon 4.71 at delta 2e-05 (2 private releases under adding or removing one)." in told
    told = text_of(shown(tmp_path))
    assert "none, since 1 of the 3 runs released something about the same records without a guarantee" in told
    (tmp_path / "run-1" / "result.json").write_text("{")
    told = text_of(shown(tmp_path / "run-0", tmp_path / "run-1"))
    assert "none, since the releases of 1 of the 2 runs are not known" in told


def test_a_release_says_its_epsilon_delta_unit_and_what_it_covers(write_run):
    (run,) = find([write_run("a", privacy=[RELEASE, RELEASE | {"unit": "record", "epsilon": 0.0004}])]).runs
    assert privacy_in_words(run) == (
        "Per client: (3.21, 1e-05)-differential privacy. It covers: the <i>models</i>. "
        "Per record: (0.0004, 1e-05)-differential privacy. It covers: the <i>models</i>."
    )


def test_the_table_averages_finished_seeds_and_tells_of_the_others(write_run, tmp_path):
    write_run("a", final_accuracy=0.2, best_accuracy=0.3)
    write_run("b", seed=1, final_accuracy=0.4, best_accuracy=0.5)
    write_run("c", seed=2, final_accuracy=0.9, best_accuracy=0.9, status="interrupted")
    told = text_of(shown(tmp_path))
    assert "FedProx mu=0.5 mnist label-1 10 mlp 0, 1, 2 30.0 ± 14.1 40.0 ± 14.1 3.0 ± 0.0 none 2 finished" in told
    assert "interrupted: FedProx, mnist, label-1, seed 2" in told
    assert "3 runs, 2 finished; clients 10; rounds 2; model mlp; seeds 0, 1, 2." in told
    assert "torch 9.9" in told


def test_the_page_says_by_which_records_best_rounds_were_picked(write_run, tmp_path):
    write_run("old")
    assert "the best evaluated round (picked on the test set and therefore optimistic); " in text_of(shown(tmp_path))
    write_run("new", seed=1, best_chosen_on="validation")
    picked = "picked on the test set and therefore optimistic or picked on records held out for validation"
    assert f"the best evaluated round ({picked}); " in text_of(shown(tmp_path))


def test_a_table_directory_shows_its_table_orders_its_runs_and_leaves_out_strangers(write_run, tmp_path):
    for name, seed in (("t/cells/a", 1), ("t/cells/b", 0), ("t/cells/old", 7)):
        write_run(name, seed=seed)
    cell = {"row": "Method & Co", "column": "MNIST 1-Label", "seeds": [0, 1, 2], "values": [81.25, 83.25, None],
            "best_values": [90.0, 90.0, None], "status": "failed", "errors": ["worker died"],
            "dir": ["cells/b", "cells/a", "cells/gone"]}  # fmt: skip
    bound = cell | {"row": "Centralized", "values": [99.0] * 3, "best_values": [99.0] * 3, "status": "finished"}
    table = {"rows": ["Method & Co", "Centralized"], "columns": ["MNIST 1-Label"], "upper_bounds": ["Centralized"],
             "cells": [cell, bound], "caption": ["a subset of MNIST"]}  # fmt: skip
    (tmp_path / "t" / "table.json").write_text(json.dumps(table))
    found = find([tmp_path])
    assert [run.path.name for run in found.runs] == ["b", "a"]
    told = text_of(shown(tmp_path))
    assert "Method &amp; Co failed failed Centralized 99.0 ± 0.0 99.0 ± 0.0 a subset of MNIST" in told
    assert "failed: Method &amp; Co, MNIST 1-Label, seed 2: worker died" in told
    assert "left out: table.json of the table in this folder does not list the run" in told


def test_a_seed_that_is_missing_beside_failed_ones_is_read_back_as_missing_and_each_error_as_its_own(tmp_path):
    states = ("failed", "finished", "missing", "failed")
    errors = ("it diverged", "", "", "out of memory")
    results = tuple(
        SeedResult("A", "x", seed, state, f"cells/{seed}", *((0.5, 0.5) if state == "finished" else ()), error=error)
        for seed, (state, error) in enumerate(zip(states, errors, strict=True))
    )
    write_table(tmp_path, Table(("A",), ("x",), frozenset(), results))
    read = read_json_table(tmp_path).results
    assert [(one.status, one.error) for one in read] == list(zip(states, errors, strict=True))
    assert [one.last for one in read] == [None, 0.5, None, None]

    older = json.loads((tmp_path / "table.json").read_text())
    del older["cells"][0]["statuses"]
    (tmp_path / "table.json").write_text(json.dumps(older))
    together = ("failed", "it diverged; out of memory")
    assert [(one.status, one.error) for one in read_json_table(tmp_path).results] == [
        together, ("finished", ""), together, together,
    ]  # fmt: skip
    older["cells"][0]["errors"] = []
    (tmp_path / "table.json").write_text(json.dumps(older))
    assert [one.error for one in read_json_table(tmp_path).results] == [""] * 4


def test_a_table_read_back_is_the_one_that_was_written_and_the_page_shows_how_far_rows_are_behind(write_run, tmp_path):
    results = tuple(
        SeedResult(
            row, "x", seed, "finished", f"cells/{row}{seed}", last + seed / 100, last, measures={"macro_f1": 0.5}
        )
        for row, last in (("A", 0.5), ("B", 0.25))
        for seed in range(3)
    )
    table = Table(("A", "B"), ("x",), frozenset(), results, ("What it is.",))
    for one in results:
        write_run(f"t/{one.directory}", seed=one.seed, clients=10 + 10 * (one.row == "B"))
    write_table(tmp_path / "t", table)
    (found,) = find([tmp_path]).tables.values()
    assert [(one.row, one.seed, one.status, one.measures) for one in found.results] == [
        (one.row, one.seed, "finished", {"macro_f1": 0.5}) for one in results
    ]
    told = text_of(shown(tmp_path))
    assert "Method x A highest mean B -25.0 [-25.0, -25.0] What it is." in told


@pytest.fixture
def lengthened(write_experiment):
    """Write a run with this many rounds, and changes in the lines of its log and in its result."""

    def write(name, count, *, line=None, result=None, **changes):
        path = write_experiment(name, rounds=count, **changes)
        first = json.loads((path / "rounds.jsonl").read_text())
        lines = [
            first | {"round": number, "test_accuracy": number / count} | (line or {}) for number in range(1, count + 1)
        ]
        (path / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        content = json.loads((path / "result.json").read_text()) | {"rounds": count} | (result or {})
        (path / "result.json").write_text(json.dumps(content))
        return path

    return write


def data_of(*directories, target=None):
    return json.loads(page_data(panels(group(find(directories).runs)[0]), target))


def only_line(*directories):
    [panel] = data_of(*directories)["panels"]
    [line] = panel["lines"]
    return line


def test_what_a_private_run_does_not_tell_is_not_on_the_page(lengthened):
    hidden = {"seconds": None, "cohort": None, "epsilon": 1.23456}
    line = only_line(lengthened("private", 3, line=hidden))
    assert line["seconds"] == line["mb"] == [None] * 3
    assert line["epsilon"] == [1.235] * 3  # rounded up
    assert line["clients"] is None
    assert {unit: line["reached"][0][unit] for unit in ("mb", "seconds")} == {
        "mb": [None, None],
        "seconds": [None, None],
    }


def test_bytes_and_seconds_are_those_spent_by_the_end_of_each_round(lengthened):
    sent = {"bytes_down": 2_000_000, "bytes_up": 500_000, "seconds": 2.0}
    before = {"bytes": {"before": {"pool": {"down": 1_000_000, "up": 0}}}}
    seconds = {"seconds": {"preprocess": 3, "train": 1, "total": 9}}
    line = only_line(lengthened("a", 3, line=sent, result=before | seconds))
    assert line["mb"] == [3.5, 6.0, 8.5]
    assert line["seconds"] == [5.0, 7.0, 9.0]
    assert line["reached"][0] == {"there": 1, "of": 1, "round": [2.0, None], "mb": [6.0, None], "seconds": [7.0, None]}


@pytest.mark.parametrize("order", list(itertools.permutations([1.0, 3.0, 2.0])))
def test_the_epsilon_of_a_curve_is_the_largest_of_its_seeds(lengthened, order):
    places = [lengthened(f"s{seed}", 2, seed=seed, line={"epsilon": one}) for seed, one in enumerate(order)]
    assert only_line(*places)["epsilon"] == [3.0, 3.0]


def test_an_epsilon_that_one_seed_does_not_tell_is_not_told(lengthened):
    places = [lengthened(f"s{seed}", 2, seed=seed, line={"epsilon": one}) for seed, one in enumerate([1.0, None])]
    assert only_line(*places)["epsilon"] == [None, None]


def test_virtual_seconds_add_up_where_there_is_a_clock_and_are_left_out_where_there_is_none(lengthened):
    line = only_line(lengthened("timed", 3, line={"virtual_seconds": 2.5, "late": 1}))
    assert line["virtual_seconds"] == [2.5, 5.0, 7.5]
    assert line["reached"][0]["virtual_seconds"] == [5.0, None]
    plain = only_line(lengthened("plain", 3))
    assert "virtual_seconds" not in plain.keys() | plain["reached"][0].keys()


def test_seeds_are_averaged_and_their_confusion_matrices_are_added(lengthened):
    measures = {"confusion": [[3, 1], [0, 4]], "client_accuracy": 0.5, "client_worst_tenth": 0.25}
    places = [lengthened(f"s{seed}", 2, seed=seed, result={"measures": measures}) for seed in (0, 1)]
    line = only_line(*places)
    assert line["confusion"] == [[6, 2], [0, 8]]
    assert line["clients"] == {"mean": 50.0, "worst": 25.0, "quantiles": []}
    assert line["seeds"] == 2
    assert line["accuracy"]["mean"] == [50.0, 100.0]


def test_measures_of_seeds_that_differ_are_averaged_and_their_matrices_added(lengthened):
    told_of = [
        {"confusion": [[3, 1], [0, 4]], "client_accuracy": 0.5, "client_worst_tenth": 0.25, "client_quantiles": [0, 1]},
        {"confusion": [[2, 2], [5, 0]], "client_accuracy": 0.7, "client_worst_tenth": 0.1,
         "client_quantiles": [0.5, 1]},
    ]  # fmt: skip
    places = [
        lengthened(f"s{seed}", 2, seed=seed, result={"measures": measures, "best_accuracy": best})
        for seed, (measures, best) in enumerate(zip(told_of, (0.6, 0.9), strict=True))
    ]  # fmt: skip
    line = only_line(*places)
    assert line["confusion"] == [[5, 3], [5, 4]]
    assert line["clients"] == {"mean": 60.0, "worst": 17.5, "quantiles": [25.0, 100.0]}
    assert line["final"][:2] == [50.0, 0.0]
    assert line["best"][0] == 75.0


def test_long_runs_are_thinned_to_what_a_page_has_room_for(lengthened, monkeypatch):
    monkeypatch.setattr(page_module, "_MOST_POINTS", 50)
    data = data_of(lengthened("long", 333))
    [rounds] = [line["round"] for panel in data["panels"] for line in panel["lines"]]
    assert (data["thinned"], len(rounds), rounds[0], rounds[-1]) == (50, 50, 1, 333)
    assert data_of(lengthened("short", 20, seed=1))["thinned"] == 0


def test_matrices_beyond_the_room_are_counted(lengthened, monkeypatch):
    monkeypatch.setattr(page_module, "_MOST_CELLS", 3)
    data = data_of(lengthened("a", 2, result={"measures": {"confusion": [[3, 1], [0, 4]]}}))
    assert data["untold"] == 1
    assert data["panels"][0]["lines"][0]["confusion"] == []


def test_a_target_of_one_s_own_is_among_the_targets(lengthened):
    data = data_of(lengthened("a", 2), target=0.55)
    assert (data["targets"][:3], data["aim"]) == ([50.0, 55.0, 60.0], 1)


def test_a_method_has_one_number_in_all_panels_and_a_private_one_is_told_apart(lengthened):
    aggregators = {"plain": "mean", "private": "global-dp"}
    places = [lengthened(name, 2, aggregator={"kind": kind}) for name, kind in aggregators.items()]
    places.append(lengthened("other", 2, partition={"kind": "label-k", "k": 2}, aggregator={"kind": "mean"}))
    data = data_of(*places)
    assert [one["name"] for one in data["methods"]] == ["FedAvg", "FedAvg, aggregator=global-dp"]
    assert [[line["method"] for line in panel["lines"]] for panel in data["panels"]] == [[0, 1], [0]]


@pytest.mark.parametrize("value", ["</script><script>alert(1)</script>", "<!--<script>", "\u2028&lt;"])
def test_no_text_ends_the_script_that_it_stands_in(lengthened, value):
    place = lengthened("a", 2, note=value)
    text = page_data(panels(group(find([place]).runs)[0]), None)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text)["panels"][0]["note"] == value


def test_what_is_no_number_is_left_out(lengthened):
    line = only_line(
        lengthened("a", 2, line={"test_loss": 1e308, "bytes_down": 10**300, "bytes_up": 0, "epsilon": 1.79e308})
    )
    assert line["mb"] == [None, None]
    assert all(value is None or math.isfinite(value) for value in (*line["epsilon"], *line["loss"]["mean"]))


def test_the_page_allows_its_own_style_and_script_alone(lengthened):
    found = find([lengthened("a", 2)])
    html = page(found, panels(group(found.runs)[0]), [], [])
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in html
    assert "default-src 'none'" in html
    assert " style=" not in re.sub(r"<script>.*", "", html, flags=re.DOTALL)


def test_no_file_of_the_page_is_forgotten_and_nothing_in_them_reaches_out():
    assert {path.name for path in page_module._WEB.iterdir()} == {"page.css", *page_module._SCRIPTS}
    style, script = page_module._web()
    for word in ("http:", "https:", "@import", "url(", "fetch(", "XMLHttp", "eval(", "</script", "localStorage"):
        assert word not in style + script
