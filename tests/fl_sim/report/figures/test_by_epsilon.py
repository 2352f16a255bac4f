"""Samples by class and epsilon: which run stands for an epsilon, in which order, and what is said of its privacy."""

import math

import numpy as np

from fl_sim.report.figures import by_epsilon as module
from fl_sim.report.figures.by_epsilon import draw, sample_pictures
from fl_sim.report.figures.samples import read_samples
from fl_sim.report.groups import group
from fl_sim.report.runs import find


def pictures_of(path):
    return sample_pictures(group(find([path]).runs)[0])


def texts_of(picture_rows):
    (axes,) = draw(picture_rows, ["a title"]).axes
    return [text.get_text() for text in axes.texts]


def test_rows_ascend_to_infinity_and_their_statements_stand_below(write_experiment, tmp_path):
    for name, epsilon in (("a", math.inf), ("b", 10.0), ("c", 1.0)):
        write_experiment(name, preprocess={"epsilon": epsilon})
    (picture,), problems = pictures_of(tmp_path)
    assert problems == []
    assert picture.name == "samples-digits-label-1-generator-dp-cgan.png"
    assert "SYNTHETIC" in picture.caption[0]
    assert picture.caption[1] == (
        "Epsilon: the most that the whole pool of a run may cost a record of a client, labels and generator together, "
        "at delta 1e-05."
    )
    assert [line.split(" (")[0] for line in picture.details] == [
        "epsilon 1", "epsilon 10", "epsilon inf",
        "It covers: the pool. It does not cover: The main task is NOT private.",
    ]  # fmt: skip
    assert picture.details[1].endswith("Per record: spent 9.75.")
    assert "No privacy guarantee for a record" in picture.details[2]


def test_an_epsilon_is_shown_by_the_run_with_the_most_samples_then_the_lowest_seed(write_experiment, tmp_path):
    few, many = ((2, 0, 1), (0, 0, 9)), ((2, 4, 1), (0, 0, 9))
    write_experiment("a", preprocess={"gamma": 0.01}, counts=few)
    write_experiment("b", preprocess={}, counts=many, seed=1)
    write_experiment("c", preprocess={}, counts=many, seed=0)
    write_experiment("d", preprocess={}, counts=many, seed=0, algorithm={"kind": "fedprox", "mu": 0.1})
    (picture,), _ = pictures_of(tmp_path)
    assert picture.details[0].startswith(f"epsilon 10 (gamma 0.05, seed 0, 16 records, {tmp_path / 'c'})")


def test_data_splits_generators_and_deltas_have_figures_of_their_own(write_experiment, tmp_path):
    write_experiment("a", preprocess={})
    write_experiment("b", preprocess={"generator": {"kind": "mean-embedding"}})
    write_experiment("c", preprocess={}, data="mnist", note="a subset")
    write_experiment("d", preprocess={}, partition={"kind": "label-k", "k": 2})
    write_experiment("e", preprocess={"delta": 1e-6})
    write_experiment("f")
    pictures, _ = pictures_of(tmp_path)
    assert len({picture.name for picture in pictures}) == len(pictures) == 5
    assert "Data: a subset" in next(picture for picture in pictures if "mnist" in picture.name).caption


def test_classes_and_epsilons_without_samples_say_none_and_nothing_released(write_experiment, tmp_path):
    write_experiment("a", preprocess={"epsilon": 1.0}, counts=((0, 0, 0), (0, 0, 0)), spent=0.0)
    write_experiment("b", preprocess={"epsilon": 10.0})
    (picture,), _ = pictures_of(tmp_path)
    assert "Per record: spent 0.0." in picture.details[0]
    rows = [
        module.Row(run, run.preprocess, read_samples(run.path / run.outcome.preprocess.pool, counts), ())
        for run, counts in zip(
            find([tmp_path]).runs, ([[0, 0, 0], [0, 0, 0]], [[2, 0, 1], [0, 0, 9]]), strict=True
        )
    ]  # fmt: skip
    told = texts_of(rows)
    assert told[:3] == ["class 0", "class 1", "class 2"]
    assert told.count("none") == 4
    assert "nothing released" in told


def test_every_place_holds_the_first_samples_of_all_clients(write_experiment, tmp_path):
    counts = ((1, 0, 3), (1, 0, 3))
    path = write_experiment("a", preprocess={}, counts=counts)
    samples = read_samples(path / find([path]).runs[0].outcome.preprocess.pool, counts)
    block = module._block(samples, 2)
    size = 48 + module._WITHIN
    np.testing.assert_array_equal(block[::size, ::size, 0], [[0, 10], [1, 11]])


def test_a_damaged_pool_is_named_and_the_rest_is_shown(write_experiment, tmp_path):
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        write_experiment(name, preprocess={"epsilon": float(seed + 1)}, seed=seed)
    pool = find([tmp_path]).runs[0].outcome.preprocess.pool
    (tmp_path / "a" / pool).write_bytes(b"xxxxxxxxxxxxxxxxxxxx")
    (tmp_path / "b" / pool).unlink()
    (picture,), problems = pictures_of(tmp_path)
    assert picture.details[0].startswith("epsilon 3")
    assert [problem.path.name for problem in problems] == ["a", "b"]
    assert all("its synthetic records cannot be shown" in problem.error for problem in problems)
