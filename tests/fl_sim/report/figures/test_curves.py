"""Curves: what is averaged, what is told apart, and that the drawn figures can be read."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.ticker import StrMethodFormatter
from PIL import Image

from fl_sim.report import picture as report_picture
from fl_sim.report.figures import curves
from fl_sim.report.figures.curves import curve, draw, draw_all, styles_of
from fl_sim.report.files import ResultFile, RunConfig, Seconds
from fl_sim.report.groups import group, labels, panels
from fl_sim.report.picture import for_papers
from fl_sim.report.runs import SavedRun
from fl_sim.store.run_directory import RoundRecord

TITLES = {"fedavg": "FedAvg", "fedprox": "FedProx", "centralized": "Centralized", "mine:Bound": "My bound"}


@pytest.fixture
def run_of(tmp_path):
    """A run in memory: ``accuracies`` and ``losses`` by round."""

    def make(name, accuracies=(0.1, 0.2), *, losses=None, status="finished", note="", labels_each=1, pate=None,
             **changes):  # fmt: skip
        algorithm = changes.pop("algorithm", {"kind": "fedavg"})
        settings = {
            "data": "digits", "seed": 0, "clients": 10, "rounds": len(accuracies), "model": "mlp",
            "algorithm": algorithm, "partition": {"kind": "label-k", "k": labels_each},
            "aggregator": {"kind": "mean"}, "local": {"epochs": 1}, "engine": {"kind": "inprocess"}, **changes,
        }  # fmt: skip
        losses = losses or [2.0] * len(accuracies)
        records = tuple(
            RoundRecord(number, accuracy, loss, None, None, 10, 0.1, 1.0)
            for number, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True), start=1)
        )
        split = "centralized" if algorithm["kind"] in {"centralized", "mine:Bound"} else f"label-{labels_each}"
        result = None if status == "unfinished" else ResultFile(
            status=status, data_note=note, partition=split, engine="inprocess", rounds=len(records),
            final_accuracy=accuracies[-1], best_accuracy=max(a or 0 for a in accuracies), privacy=[],
            seconds=Seconds(preprocess=0, train=1, total=2), versions={}, pate=pate,
            titles={"algorithm": TITLES[algorithm["kind"]]} if algorithm["kind"] in TITLES else {},
        )  # fmt: skip
        return SavedRun(tmp_path / name, RunConfig.model_validate(settings), settings, records, result)

    return make


def test_a_curve_is_the_tables_mean_and_deviation_over_the_seeds_in_rounds_that_all_evaluated(run_of):
    (one,), _ = group([
        run_of("a", (0.1, None, 0.3), seed=0), run_of("b", (0.2, 0.9, 0.6), seed=1),
        run_of("c", (0.6, 0.9, 0.6), seed=2)
    ])  # fmt: skip
    drawn = curve(one, "accuracy")
    assert drawn.rounds == [1, 3]
    np.testing.assert_allclose([drawn.mean, drawn.deviation], [[30, 50], [700**0.5, 300**0.5]])
    np.testing.assert_allclose(
        [drawn.low, drawn.high], [[30 - 700**0.5, 50 - 300**0.5], [30 + 700**0.5, 50 + 300**0.5]]
    )


def test_losses_that_are_not_finite_are_no_points(run_of):
    (one,), _ = group([run_of("a", (0.1, 0.1, 0.1), losses=(2.0, math.nan, math.inf))])
    assert curve(one, "loss").rounds == [1]


def test_only_the_seed_and_the_engine_may_differ_within_a_line(run_of):
    runs = [
        run_of("a", seed=0), run_of("b", seed=1, engine={"kind": "ray"}), run_of("c", seed=0, clients=20),
        run_of("d", seed=0, note="1,000 of 60,000 training images"),
    ]  # fmt: skip
    groups, _ = group(runs)
    assert [[run.path.name for run in one.runs] for one in groups] == [["a", "b"], ["c"], ["d"]]
    assert [(panel.note, len(panel.lines)) for panel in panels(groups)] == [("", 2), (runs[3].result.data_note, 1)]


def test_a_second_run_of_the_same_experiment_and_seed_is_left_out_and_the_finished_one_stays(run_of):
    (one,), doubles = group([run_of("first", status="failed"), run_of("second")])
    assert [run.path.name for run in one.runs] == ["second"]
    assert [problem.path.name for problem in doubles] == ["first"]
    assert "same experiment and seed" in doubles[0].error


def test_unfinished_seeds_do_not_enter_the_mean_unless_there_is_nothing_else(run_of):
    (one,), _ = group([run_of("a", (0.1, 0.2)), run_of("b", (0.9, 0.9), seed=1, status="failed")])
    assert curve(one, "accuracy").mean == [10, 20]
    (one,), _ = group([run_of("b", (0.9, 0.9), seed=1, status="unfinished")])
    assert curve(one, "accuracy").mean == [90, 90]


def test_labels_name_the_settings_that_differ_and_no_others(run_of):
    prox = {"kind": "fedprox", "mu": 0.1}
    runs = [
        run_of("a"), run_of("b", algorithm=prox), run_of("c", algorithm={**prox, "mu": 1.0}),
        run_of("d", algorithm={"kind": "centralized"}, clients=1),
    ]  # fmt: skip
    groups, _ = group(runs)
    assert labels(groups) == ["FedAvg", "FedProx, mu=0.1", "FedProx, mu=1", "Centralized"]
    noisy = run_of("e", aggregator={"kind": "global-dp", "noise_multiplier": 1.0}, local={"epochs": 5})
    groups, _ = group([runs[0], noisy])
    assert labels(groups) == [
        "FedAvg, aggregator=mean, local.epochs=1", "FedAvg, aggregator=global-dp, local.epochs=5"
    ]  # fmt: skip


def test_the_upper_bound_stands_in_every_split_of_its_data_and_of_no_other(run_of):
    groups, _ = group([
        run_of("bound", algorithm={"kind": "centralized"}), run_of("a"), run_of("b", labels_each=2),
        run_of("c", data="mnist"),
    ])  # fmt: skip
    shown = {panel.title: [label for label, _ in panel.lines] for panel in panels(groups)}
    assert shown == {
        "digits, label-1": ["FedAvg", "Centralized"],
        "digits, label-2": ["FedAvg", "Centralized"],
        "mnist, label-1": ["FedAvg"],
    }


def test_an_upper_bound_of_the_users_own_is_told_by_its_split_and_stands_last(run_of):
    runs = [run_of("bound", algorithm={"kind": "mine:Bound"}, clients=1), run_of("a"), run_of("b", clients=20)]
    shown = panels(group(runs)[0])
    assert [label for label, _ in shown[0].lines] == ["FedAvg, clients=10", "FedAvg, clients=20", "My bound"]
    (legend,) = draw(shown, "accuracy", styles_of(shown)).legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "My bound"


def test_an_unfinished_run_is_called_as_finished_ones_of_its_kind_are_else_by_its_kind(run_of):
    unfinished = run_of("a", status="unfinished", algorithm={"kind": "fedprox", "mu": 0.1})
    finished = run_of("b", algorithm={"kind": "fedprox", "mu": 0.2})
    assert [one.method for one in group([unfinished])[0]] == ["fedprox"]
    assert [one.method for one in group([unfinished, finished])[0]] == ["FedProx", "FedProx"]


def test_rounds_of_a_run_that_voted_are_epochs_of_a_student_whatever_its_kind(run_of):
    facts = {
        "teachers": 10, "mechanism": {"kind": "none"}, "evaluation_records": 1, "queries_asked": 1,
        "queries_answered": 1, "label_accuracy": 1.0, "student": "fixmatch", "private_kept": False,
    }  # fmt: skip
    voted, rounds = run_of("a", algorithm={"kind": "mine:Vote"}, pate=facts), run_of("b")
    for runs, label in (
        ([rounds], "communication round"),
        ([voted], "epoch of the student"),
        ([voted, rounds], "communication round (PATE: epoch of the student)"),
        (
            [voted, replace(voted, config=voted.config.model_copy(update={"seed": 1}), result=None)],
            "epoch of the student",
        ),
    ):
        shown = panels(group(runs)[0])
        assert draw(shown, "loss", styles_of(shown)).axes[0].get_xlabel() == label


def test_sixty_lines_have_sixty_styles_and_eleven_differ_without_colour(run_of):
    groups, _ = group([run_of(str(n), clients=n) for n in range(1, 61)])
    styles = list(styles_of(panels(groups)).values())
    assert len(set(styles)) == 60
    assert len({style[1:] for style in styles[:11]}) == 11
    assert len({style[0] for style in styles[:11]}) == 11


def test_figures_have_units_a_full_accuracy_range_on_request_bands_and_the_data_note(run_of):
    runs = [run_of("a", note="1,000 of 60,000"), run_of("b", (0.3, 0.4), seed=1, note="1,000 of 60,000")]
    shown = panels(group(runs)[0])
    figure = draw(shown, "accuracy", styles_of(shown), full_axis=True)
    (axes,) = figure.axes
    assert axes.get_ylim() == (0, 100)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("communication round", "test accuracy (%)")
    assert len(axes.collections) == 1
    assert [text.get_text() for text in axes.texts] == ["data: 1,000 of 60,000"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedAvg"]


def test_a_loss_that_explodes_puts_the_axis_on_a_log_scale_and_nan_is_told(run_of):
    runs = [run_of("a", losses=(2.0, 2.0)), run_of("b", losses=(2.0, 2e6), clients=20)]
    runs.append(run_of("c", losses=(math.nan, math.nan), clients=30))
    shown = panels(group(runs)[0])
    (axes,) = draw(shown, "loss", styles_of(shown)).axes
    assert axes.get_yscale() == "log"
    assert "FedAvg, clients=30" in axes.texts[0].get_text()
    shown = panels(group(runs[:1])[0])
    (axes,) = draw(shown, "loss", styles_of(shown)).axes
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 2


def test_runs_of_a_table_have_its_names(run_of):
    runs = [
        replace(run_of("a"), row="FedAvg, mine", column="Digits 1-Label"),
        replace(run_of("b", clients=20), row="Another", column="Digits 1-Label"),
    ]
    (panel,) = panels(group(runs)[0])
    assert (panel.title, [label for label, _ in panel.lines]) == ("Digits 1-Label", ["FedAvg, mine", "Another"])
    (panel,) = panels(group([runs[0], run_of("c", clients=20)])[0])
    assert (panel.title, [label for label, _ in panel.lines]) == (
        "digits, label-1", ["FedAvg, clients=10", "FedAvg, clients=20"]
    )  # fmt: skip


def test_a_figure_for_a_paper_can_be_read(run_of, readable):
    long = {"kind": "fedprox", "mu": 0.1}
    runs = [
        run_of(f"{algorithm['kind']}{each}{seed}", (0.2, 0.3 + seed / 10), labels_each=each, seed=seed,
               algorithm=algorithm, note="1,000 of 60,000 training images, taken evenly from all classes")
        for each in (1, 2) for seed in (0, 1) for algorithm in ({"kind": "fedavg"}, long)
    ]  # fmt: skip
    for picture in draw_all(panels(group(runs)[0])):
        readable(picture)


def test_files_for_papers_are_pdf_and_svg_at_two_widths_with_the_same_bytes_each_time(run_of, monkeypatch):
    picture, _ = draw_all(panels(group([run_of("a")])[0]))
    files = for_papers(picture)
    assert sorted(files) == ["accuracy-column.pdf", "accuracy-column.svg", "accuracy-wide.pdf", "accuracy-wide.svg"]
    monkeypatch.setattr(report_picture, "PAPER", (report_picture.COLUMN,))
    again = for_papers(picture)
    assert len(again) == 2
    assert again == {name: files[name] for name in again}
    assert files["accuracy-column.pdf"].startswith(b"%PDF")
    assert b"CreationDate" not in files["accuracy-column.pdf"]
    assert b"<dc:date>" not in files["accuracy-wide.svg"]
    assert f'width="{6.9 * 72:g}pt"'.encode() in files["accuracy-wide.svg"]


def test_accuracy_is_drawn_over_the_mean_virtual_time_of_those_that_have_a_clock(run_of, readable):
    def on_devices(name, seconds, **changes):
        one = run_of(name, (0.2, 0.5, 0.6), **changes)
        return replace(one, rounds=tuple(replace(record, virtual_seconds=seconds) for record in one.rounds))

    runs = [on_devices("a", 2.0, seed=0), on_devices("b", 4.0, seed=1), run_of("c", algorithm={"kind": "fedprox"})]
    bound = on_devices("d", 100.0, algorithm={"kind": "centralized"})
    shown = panels(group([*runs, bound])[0])
    assert [curve(one, "accuracy").times for _, one in shown[0].lines] == [[3.0, 6.0, 9.0], [], [100.0, 200.0, 300.0]]
    pictures = draw_all(shown)
    assert [picture.name for picture in pictures] == ["accuracy.png", "loss.png", "virtual-time.png"]
    axes = pictures[2].draw(report_picture.PAGE).axes[0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[3.0, 6.0, 9.0]], "no bound, and no run without a clock"
    assert axes.get_xlabel() == "virtual seconds (simulated devices)"
    readable(pictures[2])


@pytest.mark.parametrize("splits", [1, 4, 5])
def test_up_to_four_panels_share_a_figure_and_more_get_their_own(run_of, splits):
    shown = panels(group([run_of(str(k), labels_each=k, data="npz:/a/$x_{$.npz") for k in range(splits)])[0])
    pictures = draw_all(shown)
    names = [picture.name for picture in pictures]
    assert len(set(names)) == len(names) == (2 if splits <= 4 else 10)
    assert ("accuracy.png" in names) == (splits <= 4)
    with Image.open(io.BytesIO(pictures[0].png)) as image:
        assert np.asarray(image.convert("L")).min() < 120  # something dark was drawn


def test_a_curve_has_the_rounds_that_every_seed_evaluated_in_order(run_of):
    seeds = [
        run_of(str(seed), [None if number in missing else (number + seed) / 100 for number in range(1, 10)], seed=seed)
        for seed, missing in enumerate([(2, 3, 4, 7), (2, 3, 5, 6, 7), (2, 4, 9)])
    ]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        (one,), _ = group([seeds[number] for number in order])
        drawn = curve(one, "accuracy")
        assert drawn.rounds == [1, 8]
        np.testing.assert_allclose(drawn.mean, [2, 9])
    assert curve(replace(one, runs=tuple(seeds[:2])), "accuracy").rounds == [1, 8, 9]


def test_a_loss_is_the_mean_test_loss_and_its_band_reaches_a_deviation_up_and_down(run_of):
    runs = [
        run_of(str(seed), losses=losses, seed=seed) for seed, losses in enumerate([(1.0, 4.0), (2.0, 8.0), (6.0, 6.0)])
    ]
    runs = [replace(one, rounds=tuple(replace(record, train_loss=9.0) for record in one.rounds)) for one in runs]
    shown = panels(group(runs)[0])
    (axes,) = draw(shown, "loss", styles_of(shown)).axes
    (line,) = axes.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2], [3.0, 6.0])
    corners = axes.collections[0].get_paths()[0].vertices
    for number, low, high in ((1, 3 - 7**0.5, 3 + 7**0.5), (2, 4.0, 8.0)):
        heights = corners[corners[:, 0] == number, 1]
        np.testing.assert_allclose([heights.min(), heights.max()], [low, high])


def test_one_seed_has_no_band_nor_has_one_that_finished_beside_others_and_two_have_one(run_of):
    def bands(*runs):
        shown = panels(group(runs)[0])
        return len(draw(shown, "accuracy", styles_of(shown)).axes[0].collections)

    failed = [run_of(f"failed {seed}", seed=seed, status="failed") for seed in (5, 6)]
    assert bands(run_of("a")) == bands(run_of("a"), *failed) == 0
    assert bands(run_of("a"), run_of("b", seed=1)) == bands(*failed) == 1


def test_no_time_is_known_where_a_seed_that_is_drawn_has_no_clock(run_of):
    def on_devices(name, seconds, **changes):
        one = run_of(name, (0.2, 0.5), **changes)
        return replace(one, rounds=tuple(replace(record, virtual_seconds=seconds) for record in one.rounds))

    def times(*runs):
        (one,), _ = group(runs)
        return curve(one, "accuracy").times

    clocked, other = on_devices("a", 2.0, seed=0), on_devices("b", 7.0, seed=1)
    for order in ([0, 1, 2], [2, 0, 1], [0, 2, 1]):
        three = clocked, other, run_of("c", (0.2, 0.5), seed=2)
        assert times(*(three[number] for number in order)) == []
    assert times(clocked, other, run_of("d", (0.2, 0.5), seed=2, status="failed")) == [4.5, 9.0]
    late = on_devices("e", 3.0, seed=2)
    assert times(clocked, other, late) == [4.0, 8.0]
    rounds = late.rounds[0], replace(late.rounds[1], virtual_seconds=None)
    assert times(clocked, other, replace(late, rounds=rounds)) == []


@pytest.mark.parametrize(
    ("losses", "limits"),
    [
        ([(2.0, 1.0), (3.0, 0.5)], (0, 3.24)),
        ([(3.0, 1.0), (0.5, 2.0)], (0, 3.24)),
        ([(0.03, 0.02)], (0, 0.1)),
        ([(1.0, 20.0)], (0, 21.6)),
        ([(0.0, 50.0)], (0, 54.0)),
        ([(3.0, 30.0, 1.5), (6.0, 3.0, 3.0)], (0, 32.4)),
        ([(3.0, 33.0, 1.5, 3.0), (6.0, 3.0, 3.0, 3.0)], (1.0, 49.5)),
        ([(6.0, 3.0, 3.0, 3.0), (3.0, 1.5, 33.0, 3.0)], (1.0, 49.5)),
        ([(30.0, 3.0), (900.0, 30.0)], (2.0, 1350.0)),
        ([(3.0, 3.0), (3000.0, 30.0)], (2.0, 4500.0)),
    ],
)  # fmt: skip
def test_losses_begin_at_zero_up_to_a_ratio_of_twenty_and_span_all_lines(run_of, losses, limits):
    runs = [run_of(f"{clients}", losses=each, accuracies=[0.5] * len(each), clients=clients)
            for clients, each in enumerate(losses, start=2)]  # fmt: skip
    shown = panels(group(runs)[0])
    (axes,) = draw(shown, "loss", styles_of(shown)).axes
    np.testing.assert_allclose(axes.get_ylim(), limits)
    assert axes.get_yscale() == ("log" if limits[0] else "linear")
    has_halves = isinstance(axes.yaxis.get_minor_formatter(), StrMethodFormatter)
    assert has_halves == (0 < 1000 * limits[0] > limits[1] / 2.25)


def test_panels_stand_side_by_side_as_far_as_they_fit_and_places_without_one_are_empty(run_of):
    shown = panels(group([run_of(str(each), labels_each=each) for each in range(1, 6)])[0])
    for layout, across in ((report_picture.PAGE, 1), (report_picture.WIDE_PAGE, 2)):
        for number in range(1, 6):
            figure = draw(shown[:number], "accuracy", styles_of(shown), layout)
            down = math.ceil(number / across)
            assert [axes.axison for axes in figure.axes] == [True] * number + [False] * (
                down * min(across, number) - number
            )
            np.testing.assert_allclose(figure.get_size_inches(), [layout.width, 4.2 * down + 0.027 * 9])
    figure = draw(shown[:4], "accuracy", styles_of(shown), report_picture.COLUMN)
    np.testing.assert_allclose(figure.get_size_inches(), [3.3, 7.0 + 0.027 * 7])


def test_a_legend_has_as_many_columns_as_its_longest_label_leaves_room_for(run_of):
    def rows(labels, layout=report_picture.PAGE, splits=1, **changes):
        runs = [replace(run_of(label, clients=number, labels_each=1 + number % splits, **changes), row=label, column="")
                for number, label in enumerate(labels)]  # fmt: skip
        shown = panels(group(runs)[0])
        height = draw(shown, "accuracy", styles_of(shown), layout).get_size_inches()[1]
        return round((height - layout.height * len(shown)) / (0.027 * layout.text))

    room = report_picture.PAGE.characters(9, 1.0)
    assert rows(["a"]) == 1
    assert rows(["a", "b", "c"]) == 1
    half, third = room // 2 - 12, room // 3 - 12
    assert rows(["a", "b" * half, "c"]) == rows(["b" * half, "a", "c", "d"]) == 2
    assert rows(["a", "b", "c", "d" * third]) == 2
    assert rows(["a", "b" * (half + 1), "c"]) == 3
    assert rows(["a", "b" * half, "c"], status="failed") == 3
    assert rows(["a" * room, "b", "c"]) == 3
    assert rows(["a", "c" * third, "b", "d" * third, "e" * third], splits=2) == 2


def test_unfinished_lines_are_told_and_the_bound_is_last_even_so(run_of):
    bound, prox = {"kind": "centralized"}, {"kind": "fedprox"}
    for status in ("finished", "failed"):
        runs = [run_of("bound", algorithm=bound, status=status), run_of("a"),
                run_of("b", algorithm=prox), run_of("c", algorithm=prox, labels_each=2)]  # fmt: skip
        shown = panels(group(runs)[0])
        texts = [text.get_text() for text in draw(shown[::-1], "accuracy", styles_of(shown)).legends[0].get_texts()]
        last = "Centralized" if status == "finished" else "Centralized (unfinished)"
        assert (texts[-1], set(texts[:-1])) == (last, {"FedAvg", "FedProx"})
        assert set(styles_of(shown)) == {"FedAvg", "FedProx"}
    runs = [run_of("d", data="mnist"), run_of("e"), run_of("bound", algorithm=bound),
            run_of("f", data="emnist", algorithm=prox)]  # fmt: skip
    shown = {panel.data: panel for panel in panels(group(runs)[0])}
    order = [shown[data] for data in ("mnist", "digits", "emnist")]
    texts = [text.get_text() for text in draw(order, "accuracy", styles_of(order)).legends[0].get_texts()]
    assert texts == ["FedAvg", "FedProx", "Centralized"]


def test_a_caption_tells_what_the_data_of_every_panel_stand_in_for_once(run_of, monkeypatch):
    pages = []
    monkeypatch.setattr(curves, "drawn", lambda drawing, layout: pages.append(layout) or b"")
    runs = [run_of("a"), run_of("b", labels_each=2, data="mnist", note="1,000 of 60,000"),
            run_of("c", labels_each=3, data="mnist", note="1,000 of 60,000"),
            run_of("d", data="emnist", note="2,000 of 100,000")]  # fmt: skip
    for picture in draw_all(panels(group(runs)[0])):
        (told,) = picture.caption[1:]
        assert sorted(told.removeprefix("Data ").split("; ")) == ["emnist: 2,000 of 100,000", "mnist: 1,000 of 60,000"]
    for picture in draw_all(panels(group(runs[:1])[0])):
        assert picture.caption[1:] == ()
    assert pages == [report_picture.WIDE_PAGE] * 2 + [report_picture.PAGE] * 2


@pytest.mark.parametrize(("rounds", "every"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_a_line_has_at_most_eight_marks_that_begin_one_after_the_other(run_of, rounds, every):
    runs = [run_of(str(clients), [0.1 * clients] * rounds, clients=clients) for clients in (2, 3, 4)]
    runs.append(run_of("bound", [0.9] * rounds, algorithm={"kind": "centralized"}))
    shown = panels(group(runs)[0])
    lines = draw(shown, "accuracy", styles_of(shown)).axes[0].lines
    assert [line.get_markevery() for line in lines] == [(number % every, every) for number in range(4)]
    assert lines[3].get_marker() == ("o" if rounds == 1 else "")
    assert [line.get_markerfacecolor() == "white" for line in lines] == [False, True, False, True]


def test_an_accuracy_axis_spans_the_values_with_their_deviations_and_all_panels_of_the_data(run_of):
    runs = [
        run_of(f"{each}{seed}", (0.9, mean + sign), labels_each=each, seed=seed)
        for each, mean in ((1, 0.92), (2, 0.95)) for seed, sign in ((0, -0.01), (1, 0.01))
    ]  # fmt: skip
    shown = panels(group(runs)[0])
    for axes in draw(shown, "accuracy", styles_of(shown)).axes:
        assert axes.get_ylim() == (89, 97)
        assert [tick for tick in axes.get_yticks() if not 89 <= tick <= 97] == []
    one = panels(group([run_of("one", (0.5, 0.5))])[0])
    low, high = draw(one, "accuracy", styles_of(one)).axes[0].get_ylim()
    assert high - low >= 5, "nothing is magnified beyond five points"
    edge = panels(group([run_of("c", (0.99, 1.0)), run_of("d", (0.9, 0.9), seed=1)])[0])
    assert draw(edge, "accuracy", styles_of(edge)).axes[0].get_ylim()[1] == 100


def test_loss_panels_of_the_same_data_have_one_scale_even_in_figures_of_their_own(run_of):
    runs = [run_of(str(each), losses=(2.0, 1.0 * each), labels_each=each) for each in (1, 2, 3)]
    shown = panels(group(runs)[0])
    assert {axes.get_ylim() for axes in draw(shown, "loss", styles_of(shown)).axes[:3]} == {(0, 1.08 * 3)}
    runs += [run_of(str(each), losses=(2.0, 0.5), labels_each=each) for each in (4, 5)]
    runs.append(run_of("other", losses=(9.0, 9.0), data="mnist"))
    shown = panels(group(runs)[0])
    for picture in draw_all(shown)[len(shown) :]:
        (axes,) = picture.draw(report_picture.PAGE).axes
        assert axes.get_ylim() == pytest.approx((0, 1.08 * (9 if "mnist" in picture.name else 3)))


def test_no_band_is_cut_by_the_edge_of_its_panel(run_of):
    for losses in ((2.0, 1.0), (50.0, 1.0)):
        runs = [run_of("a", losses=losses), run_of("b", losses=[3 * loss for loss in losses], seed=1)]
        shown = panels(group(runs)[0])
        (axes,) = draw(shown, "loss", styles_of(shown)).axes
        corners = axes.collections[0].get_paths()[0].vertices
        low, high = axes.get_ylim()
        assert low < corners[:, 1].min()
        assert corners[:, 1].max() < high


def test_with_more_than_four_lines_bars_beside_the_last_round_replace_bands(run_of):
    def drawn_with(number):
        runs = [run_of(f"{clients}{seed}", (0.1, 0.1 * clients + seed / 10), clients=clients, seed=seed)
                for clients in range(2, 2 + number) for seed in (0, 1)]  # fmt: skip
        shown = panels(group(runs)[0])
        accuracy, _ = draw_all(shown)
        return draw(shown, "accuracy", styles_of(shown)).axes[0], accuracy.caption[0]

    axes, caption = drawn_with(4)
    assert (len(axes.collections), len(axes.containers)) == (4, 0)
    assert "bands: ±" in caption
    axes, caption = drawn_with(8)
    assert "bars beside the last round: ±" in caption
    assert len(axes.containers) == 8
    places = []
    for number, (point, _, (bar,)) in enumerate(axes.containers):
        places.append(float(point.get_xdata()[0]))
        heights = bar.get_segments()[0][:, 1]
        np.testing.assert_allclose(heights.mean(), 10 * (number + 2) + 5)
        np.testing.assert_allclose(np.ptp(heights), 2 * 50**0.5)
    assert min(places) > 2
    assert len(set(places)) == 8
    assert max(axes.get_xticks()) <= 2, "no tick where no round is"


def test_the_legend_has_short_names_and_the_caption_their_settings(run_of):
    rows = (
        "DA-FL (gamma=0.5, generator=mean-embedding) + FedAvg", "FedAvg", "FedProx (mu=0.01)", "FedProx (mu=0.1)",
        "DA-FL (gamma=0.5, generator=mean-embedding) + SCAFFOLD",
    )  # fmt: skip
    runs = [replace(run_of(str(number), clients=number), row=row, column="") for number, row in enumerate(rows, 2)]
    runs[0] = replace(runs[0], label="DA-FL + FedAvg")  # its table's short name; its settings are told all the same
    shown = panels(group(runs)[0])
    accuracy, _ = draw_all(shown)
    texts = [text.get_text() for text in accuracy.draw(report_picture.PAGE).legends[0].get_texts()]
    assert texts == ["DA-FL + FedAvg", "FedAvg", "FedProx (mu=0.01)", "FedProx (mu=0.1)", "DA-FL + SCAFFOLD"]
    assert accuracy.details == ("DA-FL + FedAvg; DA-FL + SCAFFOLD: gamma=0.5, generator=mean-embedding",)


def test_labels_and_legends_of_eight_methods_lie_inside_the_figure_and_beside_each_other(run_of):
    methods = [f"Method {'x' * (3 * number)}" for number in range(8)]
    runs = [
        replace(run_of(f"{each}{name}{seed}", losses=(2.0, 0.01 * (seed + 1)), labels_each=each, clients=number,
                       seed=seed), row=name, column=f"split {each}")
        for each in (1, 2, 3) for number, name in enumerate(methods, 2) for seed in (0, 1)
    ]  # fmt: skip
    for picture in draw_all(panels(group(runs)[0])):
        for layout in (report_picture.WIDE_PAGE, *report_picture.PAPER):
            with rc_context(layout.style()):
                figure = picture.draw(layout)
                figure.draw_without_rendering()
            legend = figure.legends[0].get_window_extent()
            assert 0 <= legend.x0 <= legend.x1 <= figure.bbox.x1
            labels = [axes.yaxis.label.get_window_extent() for axes in figure.axes if axes.axison]
            assert all(figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1 for box in labels)
            assert not [1 for at, box in enumerate(labels) for other in labels[:at] if box.overlaps(other)]
