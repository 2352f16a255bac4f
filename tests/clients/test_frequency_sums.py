"""What a client sends for a private start: sums over its records, which add up, and bounded for each."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clients.frequency_sums import (
    COMMON,
    COUNT,
    LONGEST,
    SQUARES,
    STEPS,
    Frame,
    FrequencyQuestion,
    Step,
    answer,
    black_frame,
    question_tensors,
    read_question,
    shapes_of,
)
from clients.images import frequencies_of, lowest_frequencies
from clients.moments import symmetric
from fl_sim.types import Params

SHAPE, CLASSES, SIZE = (1, 6, 6), 3, 7
ORDER, _ = lowest_frequencies(SHAPE, SIZE)


def _records(seed: int, number: int) -> tuple[torch.Tensor, np.ndarray]:
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.uniform(-1, 1, (number, *SHAPE))).float(), draw.integers(0, CLASSES, number)


def _question(step: Step, records: float = 1.0) -> FrequencyQuestion:
    frame = black_frame(SHAPE, ORDER)
    means = np.random.default_rng(0).normal(size=(CLASSES, SIZE)) if step == 3 else None
    return FrequencyQuestion(step, records, frame, means)


def _vector(sums: Params) -> torch.Tensor:
    return torch.cat([value.flatten() for value in sums.values()]).double()


@pytest.mark.parametrize("step", STEPS)
@given(seed=st.integers(0, 2**32 - 1), number=st.integers(0, 9))
def test_answers_of_parts_add_up_and_are_shaped_as_said(step: Step, seed: int, number: int) -> None:
    inputs, labels = _records(seed, number)
    cut = number // 2
    whole, *parts = (
        answer(_question(step), inputs[rows], labels[rows], CLASSES)
        for rows in (slice(None), slice(cut), slice(cut, None))
    )
    assert {name: tuple(value.shape) for name, value in whole.items()} == shapes_of(step, CLASSES, SIZE)
    assert all(value.dtype == torch.float32 for value in whole.values())
    torch.testing.assert_close(_vector(parts[0]) + _vector(parts[1]), _vector(whole), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("step", STEPS)
def test_without_records_and_with_records_that_are_not_finite_everything_is_zero(step: Step) -> None:
    inputs, labels = _records(0, 2)
    inputs[:, 0, 0, 0] = torch.tensor([math.nan, math.inf])
    for some in (slice(0), slice(None)):
        assert not _vector(answer(_question(step), inputs[some], labels[some], CLASSES)).any()


@pytest.mark.parametrize(("step", "most"), [(2, math.hypot(COUNT, LONGEST)), (3, math.hypot(1, COMMON) * LONGEST**2)])
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([0.1, 1.0, 1e3]))
def test_no_record_counts_for_more_than_it_may(step: Step, most: float, seed: int, size: float) -> None:
    inputs, labels = _records(seed, 1)
    frame = Frame(np.zeros(SIZE), np.full(SIZE, 1 / size))
    sums = answer(FrequencyQuestion(step, 1.0, frame, _question(step).means), inputs, labels, CLASSES)
    assert float(_vector(sums).norm()) <= most * (1 + 1e-6)


def test_sums_by_hand() -> None:
    inputs, labels = _records(1, 5)
    black, points = black_frame(SHAPE, ORDER), frequencies_of(inputs, ORDER)
    assert black.rows(points * 0 + black.centre).any() == np.False_  # black is where it measures from
    rows = black.rows(points)
    first = answer(_question(1, records=2.5), inputs, labels, CLASSES)
    np.testing.assert_allclose(first["means"], rows.sum(axis=0) / 2.5, rtol=1e-5)
    np.testing.assert_allclose(first["squares"], [SQUARES * (rows**2).sum() / 2.5], rtol=1e-5)
    wide = Frame(np.zeros(SIZE), np.full(SIZE, 100.0))  # so that nothing is shortened
    second = answer(FrequencyQuestion(2, 1.0, wide), inputs, labels, CLASSES)
    third = answer(FrequencyQuestion(3, 1.0, wide, np.zeros((CLASSES, SIZE))), inputs, labels, CLASSES)
    for label in range(CLASSES):
        own = points[labels == label] / 100
        assert float(second["counts"][label]) == COUNT * len(own)
        np.testing.assert_allclose(second["means"][label], own.sum(axis=0), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(symmetric(third["own"][label].double().numpy(), SIZE), own.T @ own, atol=1e-6)
    torch.testing.assert_close(third["common"], COMMON * third["own"].sum(dim=0))


@pytest.mark.parametrize("step", STEPS)
def test_a_question_travels_as_float32(step: Step) -> None:
    asked = _question(step, records=60.0)
    heard = read_question(question_tensors(asked))
    assert (heard.step, heard.records) == (step, 60.0)
    np.testing.assert_allclose(heard.frame.centre, asked.frame.centre, rtol=1e-6)
    np.testing.assert_allclose(heard.frame.width, asked.frame.width, rtol=1e-6)
    if asked.means is None:
        assert heard.means is None
    else:
        np.testing.assert_allclose(heard.means, asked.means, rtol=1e-6)


@pytest.mark.parametrize("length", [0.5, 1.4, 1.49, 2.0, 50.0])
def test_products_are_as_long_as_their_record_squared_and_no_longer_than_the_longest_may_be(length: float) -> None:
    inputs, labels = _records(4, 1)
    points = frequencies_of(inputs, ORDER)
    frame = Frame(np.zeros(SIZE), np.full(SIZE, np.linalg.norm(points) / length))
    sums = answer(FrequencyQuestion(3, 1.0, frame, np.zeros((CLASSES, SIZE))), inputs, labels, CLASSES)
    assert float(sums["own"].norm()) == pytest.approx(min(length, LONGEST) ** 2, rel=1e-5)
    # Measured from its class's mean, on the other side, a record is longer than LONGEST: its products are cut.
    far = np.tile(-2 * points / np.linalg.norm(points), (CLASSES, 1))
    moved = answer(FrequencyQuestion(3, 1.0, frame, far), inputs, labels, CLASSES)
    assert float(moved["own"].norm()) == pytest.approx(LONGEST**2, rel=1e-5)
