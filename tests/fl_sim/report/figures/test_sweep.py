"""Sweeps: which runs make a line, what they are compared with, and that an epsilon is never left unexplained."""

import math
from dataclasses import replace

import pytest

from fl_sim.report.figures.sweep import draw, draw_sweeps, sweeps
from fl_sim.report.groups import group
from fl_sim.report.runs import find

PROX = {"kind": "fedprox", "mu": 0.1}


@pytest.fixture
def found(tmp_path):
    def read():
        return sweeps(group(find([tmp_path]).runs)[0])

    return read


def points(line):
    return [(point.value, dict(point.by_seed)) for point in line.points]


def test_runs_that_differ_in_epsilon_alone_are_a_line_ascending_to_infinity(write_experiment, found):
    for name, epsilon, seed, accuracy in (
        ("a", math.inf, 0, 0.9), ("b", 10.0, 0, 0.5), ("c", 10.0, 1, 0.75), ("d", 1.0, 0, 0.25),
    ):  # fmt: skip
        write_experiment(name, accuracy, preprocess={"epsilon": epsilon}, seed=seed)
    (sweep,) = found()
    (line,) = sweep.lines
    assert (sweep.setting, sweep.partition, line.label) == ("epsilon", "label-1", "DA-FL + FedAvg")
    assert points(line) == [(1.0, {0: 25.0}), (10.0, {0: 50.0, 1: 75.0}), (math.inf, {0: 90.0})]
    assert line.points[1].mean == 62.5


def test_a_figure_has_the_name_of_the_tables_column_that_all_its_runs_come_from(write_experiment, tmp_path):
    for name, epsilon in (("a", 1.0), ("b", 10.0)):
        write_experiment(name, preprocess={"epsilon": epsilon})
    runs = find([tmp_path]).runs
    titles = []
    for columns in (("", ""), ("digits 1-Label", "digits 1-Label"), ("digits 1-Label", "")):
        (sweep,) = sweeps(group([replace(run, column=name) for run, name in zip(runs, columns, strict=True)])[0])
        titles.append(draw(sweep).axes[0].get_title(loc="left"))
    assert titles == ["digits, label-1", "digits 1-Label", "digits, label-1"]


def test_a_second_difference_makes_a_second_line_and_one_value_is_no_line(write_experiment, found):
    for number, (epsilon, gamma) in enumerate([(1.0, 0.05), (10.0, 0.05), (1.0, 0.1), (10.0, 0.1), (5.0, 0.5)]):
        write_experiment(str(number), preprocess={"epsilon": epsilon, "gamma": gamma})
    write_experiment("prox", preprocess={"epsilon": 1.0}, algorithm=PROX)
    by_epsilon, by_gamma = found()
    assert [line.label for line in by_epsilon.lines] == ["DA-FL + FedAvg, gamma=0.05", "DA-FL + FedAvg, gamma=0.1"]
    assert [line.label for line in by_gamma.lines] == ["DA-FL + FedAvg, epsilon=1", "DA-FL + FedAvg, epsilon=10"]
    assert by_gamma.epsilons == (1.0, 10.0)


def test_other_protocols_have_axes_of_their_own(write_experiment, found):
    for number, (epsilon, rounds, labels) in enumerate(
        [(1.0, 1, 1), (2.0, 1, 1), (1.0, 2, 1), (2.0, 2, 1), (1.0, 1, 2), (2.0, 1, 2)]
    ):
        write_experiment(
            str(number), preprocess={"epsilon": epsilon}, rounds=rounds, partition={"kind": "label-k", "k": labels}
        )
    assert len(found()) == 3
    assert len({picture.name for picture in draw_sweeps(found())}) == 3


def test_the_best_method_without_preprocessing_is_that_of_the_same_protocol(write_experiment, found):
    for name, epsilon in (("a", 1.0), ("b", 10.0)):
        write_experiment(name, preprocess={"epsilon": epsilon})
    write_experiment("plain", 0.3)
    write_experiment("prox-0", 0.4, algorithm=PROX)
    write_experiment("prox-1", 0.5, algorithm=PROX, seed=1)
    write_experiment("longer", 0.9, rounds=100)
    write_experiment("bound", 0.99, algorithm={"kind": "centralized"})
    write_experiment("other", 0.9, preprocess={"epsilon": 10.0, "gamma": 0.5})
    by_epsilon, _ = found()
    label, point = by_epsilon.baseline
    assert (label, dict(point.by_seed), by_epsilon.others) == ("FedProx", {0: 40.0, 1: 50.0}, 2)
    told = [text.get_text() for text in draw(by_epsilon).legends[0].get_texts()]
    assert told == ["DA-FL + FedAvg", "best without preprocessing: FedProx, 45.0 % (seeds 0, 1)"]


def test_gammas_by_client_are_no_gamma_sweep(write_experiment, found):
    for name, gamma in (("a", 0.1), ("b", 0.2)):
        write_experiment(name, preprocess={"gamma": gamma, "client_gammas": [0.5, 0.5]})
    assert found() == []


def test_the_axis_says_what_epsilon_it_is_and_infinity_is_the_last_tick(write_experiment, found):
    for name, epsilon in (("a", 1.0), ("b", 10.0), ("c", math.inf)):
        write_experiment(name, preprocess={"epsilon": epsilon})
    (sweep,) = found()
    (axes,) = draw(sweep).axes
    words = " ".join(axes.get_xlabel().split())
    assert words == (
        "epsilon (log scale) epsilon: the privacy budget for one record of a client, for all synthetic records of a "
        "run: labels and generator together, at delta 1e-05"
    )
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "10", "inf\n(no noise,\nno guarantee)"]
    assert axes.get_xticks()[-1] > 15
    assert axes.get_ylim() == (47.5, 52.5)
    assert draw(sweep, full_axis=True).axes[0].get_ylim() == (0, 100)


def test_a_sweep_of_gamma_says_at_which_epsilon(write_experiment, found):
    for name, gamma in (("a", 0.1), ("b", 0.2)):
        write_experiment(
            name, preprocess={"gamma": gamma}, counts=((0, 0, 0), (0, 0, 0)) if name == "a" else ((1,), (2,))
        )
    (picture,) = draw_sweeps(found())
    assert picture.name == "sweep-gamma-digits-label-1.png"
    assert "at epsilon 10: the privacy budget for one record of a client" in picture.caption[1]
    assert "With gamma 0.1, no client released a synthetic record." in picture.caption
    assert picture.details == (
        "Epsilon per record. It covers: the pool. It does not cover: The main task is NOT private.",
    )


def test_a_point_of_which_one_client_released_something_is_no_empty_one(write_experiment, found):
    for name, gamma in (("a", 0.1), ("b", 0.2)):
        write_experiment(
            name, preprocess={"gamma": gamma}, counts=((0, 0, 0), (0, 3, 0)) if name == "a" else ((1,), (2,))
        )
    (sweep,) = found()
    assert [point.released for line in sweep.lines for point in line.points] == [True, True]
    assert "no client released" not in " ".join(draw_sweeps([sweep])[0].caption)


def test_points_with_different_seeds_are_told(write_experiment, found):
    write_experiment("a", preprocess={"epsilon": 1.0})
    write_experiment("b", preprocess={"epsilon": 2.0}, seed=3)
    (picture,) = draw_sweeps(found())
    assert (
        "The points do not have the same seeds: DA-FL + FedAvg, epsilon 1: seed 0; DA-FL + FedAvg, epsilon 2: seed 3."
        in picture.caption
    )


@pytest.mark.parametrize("epsilons", [(1.0, math.inf), (0.5, 1.0, 2.0)])
def test_every_mixture_of_numbers_and_infinity_is_drawn(write_experiment, found, epsilons):
    for epsilon in epsilons:
        for seed in (0, 1):
            write_experiment(f"{epsilon}-{seed}", 0.5 + seed / 10, preprocess={"epsilon": epsilon}, seed=seed)
    (picture,) = draw_sweeps(found())
    assert len(picture.png) > 5000


def test_values_that_no_axis_holds_are_drawn_at_its_end(write_experiment, found):
    for name, epsilon in (("b", 1.0), ("c", 1e308), ("d", math.inf)):
        write_experiment(name, 0.5, preprocess={"epsilon": epsilon})
    (axes,) = draw(found()[0]).axes
    assert [text.get_text() for text in axes.get_xticklabels()][:2] == ["1", "1e+308"]
    axes.figure.canvas.draw()


def test_a_figure_for_a_paper_can_be_read(write_experiment, found, readable):
    for epsilon in (1.0, 10.0, math.inf):
        write_experiment(str(epsilon), preprocess={"epsilon": epsilon})
    write_experiment("plain")
    (picture,) = draw_sweeps(found())
    readable(picture)
