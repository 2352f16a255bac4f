"""What the page's script gets: what the files tell and no more, as JSON that ends no script."""

import base64
import hashlib
import itertools
import json
import math
import re

import pytest

from fl_sim.report import page as pages
from fl_sim.report import page_data as told
from fl_sim.report.groups import group, panels
from fl_sim.report.page import page
from fl_sim.report.page_data import page_data
from fl_sim.report.runs import find


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
    monkeypatch.setattr(told, "_MOST_POINTS", 50)
    data = data_of(lengthened("long", 333))
    [rounds] = [line["round"] for panel in data["panels"] for line in panel["lines"]]
    assert (data["thinned"], len(rounds), rounds[0], rounds[-1]) == (50, 50, 1, 333)
    assert data_of(lengthened("short", 20, seed=1))["thinned"] == 0


def test_matrices_beyond_the_room_are_counted(lengthened, monkeypatch):
    monkeypatch.setattr(told, "_MOST_CELLS", 3)
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
    assert {path.name for path in pages._WEB.iterdir()} == {"page.css", *pages._SCRIPTS}
    style, script = pages._web()
    for word in ("http:", "https:", "@import", "url(", "fetch(", "XMLHttp", "eval(", "</script", "localStorage"):
        assert word not in style + script
