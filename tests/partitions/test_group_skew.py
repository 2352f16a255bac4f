"""Groups of clients: the split is the inner one, the changes of records are exact, and group 0 changes nothing."""

from math import factorial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitions import (
    ByGroup,
    Colour,
    Dirichlet,
    Domain,
    FeatureNoise,
    FeatureSkew,
    Iid,
    ImpossibleSplit,
    Invert,
    LabelK,
    Natural,
    PermuteLabels,
    Quantity,
    RecordSkew,
    Rotate,
    Shards,
    WithinSources,
)

KINDS = [Rotate(4), Rotate(2), Invert(2), Invert(3), Colour(4), PermuteLabels(4)]
INNER = [Iid(), Dirichlet(0.3), LabelK(2), Quantity(0.5)]
LABELS = np.random.default_rng(5).integers(0, 4, 400)


def coins(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def images(seed: int, channels: int, size: int = 5, count: int = 7) -> Any:
    return coins(seed).integers(0, 256, (count, channels, size, size), dtype=np.uint8)


@pytest.mark.parametrize("inner", INNER, ids=lambda one: one.kind)
@pytest.mark.parametrize("kind", KINDS, ids=lambda one: one.title)
@settings(max_examples=5, deadline=None)
@given(clients=st.integers(4, 20), seed=st.integers(0, 2**32))
def test_the_split_is_that_of_the_inner_partition_to_the_bit(kind: Any, inner: Any, clients: int, seed: int) -> None:
    found = type(kind)(kind.k, inner).split(LABELS, clients, coins(seed))
    expected = inner.split(LABELS, clients, coins(seed))
    assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS, ids=lambda one: one.title)
def test_sources_are_for_the_inner_partition(kind: Any) -> None:
    sources = np.arange(400) % 8
    over_sources, over_labels = (type(kind)(kind.k, inner) for inner in (Natural(), Dirichlet(0.3)))
    assert isinstance(over_sources, ByGroup)
    found = over_sources.split_groups(LABELS, sources, 8, coins())
    assert all(set(sources[part]) == {client} for client, part in enumerate(found))
    found = over_labels.split_groups(LABELS, sources, 8, coins())
    expected = Dirichlet(0.3).split(LABELS, 8, coins())
    assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))
    with pytest.raises(ImpossibleSplit, match="does not say where its records come from"):
        over_sources.split(LABELS, 8, coins())


@given(clients=st.integers(1, 100), k=st.integers(2, 12))
def test_groups_differ_by_at_most_one_client(clients: int, k: int) -> None:
    sizes = np.bincount([Invert(k).group_of(client) for client in range(clients)], minlength=k)
    assert sizes.sum() == clients
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("kind", KINDS, ids=lambda one: one.title)
@pytest.mark.parametrize("channels", [1, 3])
def test_group_0_sees_its_records_and_clients_of_a_group_see_the_same(kind: Any, channels: int) -> None:
    assert isinstance(kind, RecordSkew)
    assert not isinstance(kind, FeatureSkew)
    inputs, labels = images(1, channels), np.arange(7) % 4
    kept = inputs.copy()
    held = [kind.held_by(client, inputs, labels, 4, coins(3)) for client in range(2 * kind.k)]
    assert np.array_equal(held[0][0], kept)
    assert np.array_equal(held[0][1], labels)
    assert np.array_equal(inputs, kept)  # nothing was written to
    for one, two in zip(held[: kind.k], held[kind.k :], strict=True):
        assert all(np.array_equal(*pair) for pair in zip(one, two, strict=True))
    assert all(seen.shape == inputs.shape and seen.dtype == np.uint8 for seen, _ in held)


@given(seed=st.integers(0, 2**32), channels=st.integers(1, 3))
def test_four_quarter_turns_and_two_half_turns_are_the_identity(seed: int, channels: int) -> None:
    inputs = images(seed, channels)
    turned = inputs
    for _ in range(4):
        turned = Rotate(4).seen_in(1, turned)
    assert np.array_equal(turned, inputs)
    assert np.array_equal(Rotate(2).seen_in(1, inputs), Rotate(4).seen_in(2, inputs))
    assert np.array_equal(Rotate(2).seen_in(1, Rotate(2).seen_in(1, inputs)), inputs)
    assert np.array_equal(Rotate(4).seen_in(3, Rotate(4).seen_in(1, inputs)), inputs)


def test_a_quarter_turn_is_counter_clockwise() -> None:
    image = np.array([[[[1, 2], [3, 4]]]], dtype=np.uint8)
    assert Rotate(4).seen_in(1, image).tolist() == [[[[2, 4], [1, 3]]]]


@given(seed=st.integers(0, 2**32), k=st.integers(2, 5))
def test_an_inversion_is_its_own_inverse_and_belongs_to_the_last_group(seed: int, k: int) -> None:
    inputs, scheme = images(seed, 1), Invert(k)
    assert np.array_equal(scheme.seen_in(k - 1, inputs), 255 - inputs)
    assert np.array_equal(scheme.seen_in(k - 1, scheme.seen_in(k - 1, inputs)), inputs)
    assert all(np.array_equal(scheme.seen_in(group, inputs), inputs) for group in range(k - 1))


@given(num_classes=st.integers(2, 12), k=st.integers(2, 6), seed=st.integers(0, 2**32))
def test_permutations_are_permutations_and_all_differ(num_classes: int, k: int, seed: int) -> None:
    if k > factorial(num_classes):
        with pytest.raises(ImpossibleSplit, match=r"2 classes have only 2: use a smaller k"):
            PermuteLabels(k).check_records((1, 8, 8), num_classes)
        return
    PermuteLabels(k).check_records((64,), num_classes)  # vectors, too
    rows = PermuteLabels(k).permutations(num_classes, coins(seed))
    assert rows[0].tolist() == list(range(num_classes))
    assert all(sorted(row) == list(range(num_classes)) for row in rows.tolist())
    assert len({tuple(row) for row in rows.tolist()}) == k
    labels = np.arange(num_classes)
    assert np.array_equal(PermuteLabels(k).held_by(k + 1, labels, labels, num_classes, coins(seed))[1], rows[1])


def test_light_darkens_channels_down_to_half() -> None:
    factors = np.array([Colour(4).light(group, 3) for group in range(4)])
    assert factors.tolist() == [[1, 1, 1], [1, 0.5, 0.5], [0.5, 1, 0.5], [0.5, 0.5, 1]]  # white, red, green, blue
    assert [Colour(3).light(group, 1).tolist() for group in range(3)] == [[1], [0.75], [0.5]]
    white = np.full((1, 3, 2, 2), 255, dtype=np.uint8)
    assert Colour(4).seen_in(1, white)[0, :, 0, 0].tolist() == [255, 128, 128]
    assert Colour(2).seen_in(1, white[:, :1])[0, :, 0, 0].tolist() == [128]


@given(k=st.integers(2, 9), channels=st.sampled_from([1, 3]))
def test_each_group_has_light_of_its_own(k: int, channels: int) -> None:
    assert len({tuple(Colour(k).light(group, channels)) for group in range(k)}) == k


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotate(3), r"rotate: k=3 groups: take 4 \(quarter turns\) or 2"),
        (lambda: Rotate(1), "rotate: k=1 groups: take at least 2"),
        (lambda: Invert(2, FeatureNoise()), "invert: over=feature-noise changes the records of clients by itself"),
        (lambda: Invert(2, Rotate()), "invert: over=rotate changes the records"),
        (lambda: Colour(2, "dirichlet"), "over='dirichlet' is no partition: give an object"),  # type: ignore[arg-type]
        (lambda: Invert(5).split(LABELS, 4, coins()), "invert:5 has 5 groups for 4 clients; use at least 5 clients"),
        (lambda: Rotate(4).check_records((1, 8, 6), 10), "these have 8 x 6 pixels: take rotate:2"),
        (lambda: Rotate(2).check_records((64,), 10), r"rotate changes images, and the records have shape \(64,\)"),
        (lambda: Colour(2).check_records((4, 8, 8), 10), "these have 4: take rotate or invert"),
        (lambda: Invert(2).check_records((30,), 2), "take images"),
    ],
)
def test_what_cannot_be_is_refused_with_a_cure(make: Any, message: str) -> None:
    with pytest.raises(ImpossibleSplit, match=message):
        make()


def test_half_turns_take_images_that_are_not_square() -> None:
    Rotate(2).check_records((1, 8, 6), 10)
    inputs = coins().integers(0, 256, (3, 1, 8, 6), dtype=np.uint8)
    assert Rotate(2).seen_in(1, inputs).shape == inputs.shape


def test_one_client_holds_everything() -> None:
    (part,) = Rotate(4).split(LABELS, 1, coins())
    assert np.array_equal(part, np.arange(400))


@pytest.mark.parametrize("inner", [Iid(), Dirichlet(0.3), Dirichlet(0.3, balanced=True), Quantity(0.5), Shards(2)])
@settings(max_examples=10, deadline=None)
@given(
    domains=st.lists(st.integers(0, 6), min_size=300, max_size=300).filter(
        lambda one: min(np.unique(one, return_counts=True)[1]) > 10 and len(set(one)) > 1
    ),
    clients=st.integers(7, 25),
    seed=st.integers(0, 2**32),
)
def test_every_record_belongs_to_one_client_and_no_client_mixes_domains(
    inner: Any, domains: list[int], clients: int, seed: int
) -> None:
    labels, groups = coins(seed).integers(0, 4, 300), 5 * np.array(domains) - 7  # any numbers
    parts = Domain(inner).split_groups(labels, groups, clients, coins(seed))
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(list(parts))), np.arange(300))
    numbers = np.unique(groups)
    for client, part in enumerate(parts):
        assert set(groups[part]) <= {numbers[client % len(numbers)]}
        assert np.array_equal(part, np.sort(part))
    again = Domain(inner).split_groups(labels, groups, clients, coins(seed))
    assert all(np.array_equal(*pair) for pair in zip(parts, again, strict=True))


def test_one_client_for_each_domain_is_the_natural_split() -> None:
    domains = np.arange(400) % 5
    parts = Domain(Dirichlet(0.3)).split_groups(LABELS, domains, 5, coins())
    natural = Natural().split_groups(LABELS, domains, 5, coins())
    assert all(np.array_equal(*pair) for pair in zip(parts, natural, strict=True))


def test_the_inner_split_divides_each_domain() -> None:
    domains = np.repeat([3, 8], 200)
    parts = Domain(LabelK(1)).split_groups(LABELS, domains, 8, coins())
    for client, part in enumerate(parts):  # client 2 j + d has class j of domain d
        assert set(LABELS[part]) == {client // 2}
        assert set(domains[part]) == {(3, 8)[client % 2]}


def test_groups_over_domains_keep_to_domains() -> None:
    domains = np.arange(400) % 3
    over: Any = Rotate(4, Domain(Iid()))
    parts = over.split_groups(LABELS, domains, 12, coins())
    assert all(set(domains[part]) == {client % 3} for client, part in enumerate(parts))
    assert isinstance(over, WithinSources)
    assert (over.keeps_sources, Rotate(4).keeps_sources, Domain().keeps_sources) == (True, False, True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Domain(Natural()), "domain: over=natural also follows the sources of the records: take it by itself"),
        (lambda: Domain(Rotate()), "domain: over=rotate changes the records of clients by itself"),
        (lambda: Domain("iid"), "over='iid' is no partition"),  # type: ignore[arg-type]
        (lambda: Domain().split(LABELS, 4, coins()), r"set data\.client=COLUMN for a table or data\.domains=true"),
        (lambda: Domain().split_groups(LABELS, 0 * LABELS, 4, coins()), "all records have the same source: take the"),
        (
            lambda: Domain().split_groups(LABELS, LABELS, 3, coins()),
            r"4 domains; use at least 4 clients, or partition=n",
        ),
        (
            lambda: Domain(LabelK(5)).split_groups(LABELS, np.arange(400) % 2, 8, coins()),
            "domain 0, with 200 records: k=5 classes a client, but the data have only 4",
        ),
    ],
)
def test_domains_that_cannot_be_divided_are_refused_with_a_cure(make: Any, message: str) -> None:
    with pytest.raises(ImpossibleSplit, match=message):
        make()
