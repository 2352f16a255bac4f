"""Samples by class and epsilon: which run stands for an epsilon, and what is said of privacy and of images found."""

import math

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fl_sim.report.figures import by_epsilon
from fl_sim.report.figures.by_epsilon import PICTURES, draw, sample_pictures, some_vectors, stored_images
from fl_sim.report.figures.samples import read_records, read_samples
from fl_sim.report.groups import group
from fl_sim.report.runs import find


def pictures_of(path, finder=None):
    return sample_pictures(group(find([path]).runs)[0], finder)


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
        "Epsilon: the privacy budget for one record of a client, for all synthetic records of a run: labels and "
        "generator together, at delta 1e-05."
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
        by_epsilon.Row(run, run.preprocess, read_samples(run.path / run.result.preprocess.pool, counts), ())
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
    samples = read_samples(path / find([path]).runs[0].result.preprocess.pool, counts)
    block = by_epsilon._block(samples, 2)
    size = 48 + by_epsilon._WITHIN
    np.testing.assert_array_equal(block[::size, ::size, 0], [[0, 10], [1, 11]])


def test_a_damaged_pool_is_named_and_the_rest_is_shown(write_experiment, tmp_path):
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        write_experiment(name, preprocess={"epsilon": float(seed + 1)}, seed=seed)
    pool = find([tmp_path]).runs[0].result.preprocess.pool
    (tmp_path / "a" / pool).write_bytes(b"xxxxxxxxxxxxxxxxxxxx")
    (tmp_path / "b" / pool).unlink()
    (picture,), problems = pictures_of(tmp_path)
    assert picture.details[0].startswith("epsilon 3")
    assert [problem.path.name for problem in problems] == ["a", "b"]
    assert all("its synthetic records cannot be shown" in problem.error for problem in problems)


GAUSSIAN = {"generator": {"kind": "gaussian"}}
COUNTS = ((2, 0, 1), (0, 0, 9))


@pytest.fixture
def finder():
    """Finds an image of one grey for each vector, that of its first number, and counts how often it was asked."""

    def find_images(run, vectors):
        find_images.asked.append((run.path.name, vectors))
        grey = vectors[:, 0].astype(np.uint8).reshape(-1, 1, 1, 1)
        return grey * np.ones((1, 8, 8), dtype=np.uint8), np.full(len(vectors), 0.25, dtype=np.float32)

    find_images.asked = []
    return find_images


def write(write_experiment, name="a", **changes):
    return write_experiment(
        name, preprocess={**GAUSSIAN, **changes.pop("preprocess", {})}, features="scattering", **changes
    )


def test_without_images_one_line_says_how_they_are_found(write_experiment, tmp_path):
    write(write_experiment)
    pictures, (problem,) = pictures_of(tmp_path)
    assert pictures == []
    command = f"'fl-sim report {tmp_path / 'a'} --pictures'"
    assert problem.error == (
        f"synthetic records are feature vectors, which are not shown: {command} finds images for them"
    )
    write(write_experiment, "b", preprocess={"epsilon": 1.0})
    _, (problem,) = pictures_of(tmp_path)
    assert problem.error.startswith("synthetic records of 2 runs are feature vectors")
    assert f"'fl-sim report {tmp_path} --pictures'" in problem.error


def test_images_are_found_for_the_first_records_of_each_class_and_said_to_be_nobodys(
    write_experiment, finder, tmp_path
):
    write(write_experiment)
    (picture,), problems = pictures_of(tmp_path, finder)
    assert problems == []
    assert picture.name == "samples-digits-label-1-features-scattering-generator-gaussian.png"
    ((_, vectors),) = finder.asked
    assert vectors[:, 0].tolist() == [0, 1, 0, 10, 11, 12]  # of client 1's class 2 the first three, not all nine
    assert "found for synthetic feature vectors" in picture.caption[2]
    assert "(mean distance divided by the vector's length: 0.25)" in picture.caption[2]
    assert "not real records. They have no privacy cost" in picture.caption[3]
    assert "12 records" in picture.details[0]


def test_every_image_stands_at_the_class_of_its_vector(write_experiment, finder, tmp_path):
    path = write(write_experiment)
    pictures_of(tmp_path, finder)
    (run,) = find([tmp_path]).runs
    vectors = some_vectors(read_records(path / run.result.preprocess.pool, COUNTS), 20, 4)
    row = by_epsilon._with(by_epsilon.Row(run, run.preprocess, vectors, ()), stored_images(run, vectors))
    shown = {label: [int(tile[0, 0, 0]) for tile in row.samples.some(label, 4)] for label in range(3)}
    assert shown == {0: [0, 1], 1: [], 2: [0, 10, 11, 12]}


def test_a_second_report_shows_the_kept_images_and_asks_nobody(write_experiment, finder, tmp_path):
    path = write(write_experiment)
    (first,), _ = pictures_of(tmp_path, finder)
    assert (path / PICTURES).exists()
    for again in (finder, None):
        (picture,), problems = pictures_of(tmp_path, again)
        assert (picture.png, problems) == (first.png, [])
    assert len(finder.asked) == 1


def changed_pool(path):
    (pool,) = path.glob("synthetic-0*.safetensors")
    tensors = load_file(pool)
    save_file({**tensors, "inputs": tensors["inputs"] + np.float32(1)}, pool)


def foreign_images(path):
    kept = load_file(path / PICTURES)
    save_file({**kept, "images": kept["images"] + np.uint8(1)}, path / PICTURES)


def cut(path):
    (path / PICTURES).write_bytes((path / PICTURES).read_bytes()[:-5])


@pytest.mark.parametrize("change", [changed_pool, foreign_images, cut])
def test_images_are_found_again_where_the_pool_or_their_file_has_changed(write_experiment, finder, tmp_path, change):
    path = write(write_experiment)
    pictures_of(tmp_path, finder)
    change(path)
    pictures, (problem,) = pictures_of(tmp_path)
    assert pictures == []
    assert "--pictures' finds images" in problem.error
    (_,), problems = pictures_of(tmp_path, finder)
    assert problems == []
    assert len(finder.asked) == 2
    assert pictures_of(tmp_path)[1] == []


def test_images_that_cannot_be_kept_are_shown_and_told(write_experiment, finder, tmp_path):
    path = write(write_experiment)
    (path / PICTURES).mkdir()
    (_,), (problem,) = pictures_of(tmp_path, finder)
    assert problem.error.startswith("the images that were found could not be stored: ")
    assert PICTURES in problem.error


def test_images_are_searched_for_runs_that_are_shown_alone(write_experiment, finder, tmp_path):
    for name, seed in (("a", 1), ("b", 0)):
        write(write_experiment, name, seed=seed)
    pictures_of(tmp_path, finder)
    assert [name for name, _ in finder.asked] == ["b"]


def test_what_cannot_be_searched_is_named_and_the_rest_is_shown(write_experiment, finder, tmp_path):
    write(write_experiment)
    write(write_experiment, "b", preprocess={"epsilon": 1.0})
    broken = write(write_experiment, "c", preprocess={"epsilon": 2.0})
    gone = write(write_experiment, "d", preprocess={"epsilon": 3.0})
    next(broken.glob("synthetic-0*")).write_bytes(b"x" * 20)
    next(gone.glob("synthetic-0*")).unlink()

    def picky(run, vectors):
        if run.path.name == "b":
            raise ValueError("no shape")
        return finder(run, vectors)

    (picture,), problems = pictures_of(tmp_path, picky)
    assert [line.split(" (")[0] for line in picture.details][:1] == ["epsilon 10"]
    assert {problem.path.name: problem.error.partition(": ")[2][:8] for problem in problems} == {
        "b": "no shape", "c": "Error wh", "d": "No such ",
    }  # fmt: skip
    assert all(problem.error.startswith("its synthetic records cannot be shown: ") for problem in problems)


def test_records_of_tables_and_images_are_never_searched(write_experiment, finder, tmp_path):
    write_experiment("a", preprocess={})
    path = write_experiment("b", preprocess={"epsilon": 1.0})
    pool = next(path.glob("synthetic-0*"))
    tensors = load_file(pool)
    save_file({**tensors, "inputs": tensors["inputs"].reshape(12, 64)}, pool)
    (_,), (problem,) = pictures_of(tmp_path, finder)
    assert problem.error == "its synthetic records cannot be shown: records of shape (64,) are not images"
    assert finder.asked == []


def test_a_pool_that_is_said_to_be_features_and_holds_images_is_named(write_experiment, finder, tmp_path):
    path = write(write_experiment)
    pool = next(path.glob("synthetic-0*"))
    tensors = load_file(pool)
    save_file({**tensors, "inputs": np.zeros((12, 1, 8, 8), dtype=np.uint8)}, pool)
    pictures, (problem,) = pictures_of(tmp_path, finder)
    assert pictures == []
    assert problem.error.endswith("records of shape (1, 8, 8) are not feature vectors")
