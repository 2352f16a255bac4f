"""Curves: what is averaged, what is told apart, and that the drawn figures can be read."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fl_sim.report import picture as report_picture
from fl_sim.report.figures.curves import curve, draw, draw_all, styles_of
from fl_sim.report.files import Outcome, RunConfig, Seconds
from fl_sim.report.groups import group, labels, panels
from fl_sim.report.picture import for_papers
from fl_sim.report.runs import Run
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
        outcome = None if status == "unfinished" else Outcome(
            status=status, data_note=note, partition=split, engine="inprocess", rounds=len(records),
            final_accuracy=accuracies[-1], best_accuracy=max(a or 0 for a in accuracies), privacy=[],
            seconds=Seconds(preprocess=0, train=1, total=2), versions={}, pate=pate,
            titles={"algorithm": TITLES[algorithm["kind"]]} if algorithm["kind"] in TITLES else {},
        )  # fmt: skip
        return Run(tmp_path / name, RunConfig.model_validate(settings), settings, records, outcome)

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
    assert [(panel.note, len(panel.lines)) for panel in panels(groups)] == [("", 2), (runs[3].outcome.data_note, 1)]


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
    ):
        shown = panels(group(runs)[0])
        assert draw(shown, "loss", styles_of(shown)).axes[0].get_xlabel() == label


def test_sixty_lines_have_sixty_styles_and_eleven_differ_without_colour(run_of):
    groups, _ = group([run_of(str(n), clients=n) for n in range(1, 61)])
    styles = list(styles_of(panels(groups)).values())
    assert len(set(styles)) == 60
    assert len({style[1:] for style in styles[:11]}) == 11
    assert len({style[0] for style in styles[:11]}) == 11


def test_figures_have_units_a_fixed_accuracy_range_bands_and_the_data_note(run_of):
    runs = [run_of("a", note="1,000 of 60,000"), run_of("b", (0.3, 0.4), seed=1, note="1,000 of 60,000")]
    shown = panels(group(runs)[0])
    figure = draw(shown, "accuracy", styles_of(shown))
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
