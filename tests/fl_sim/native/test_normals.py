"""Compiled normal numbers: on the grid the very numbers of the definition, elsewhere the same to rounding."""

from dataclasses import replace

import numpy as np
import pytest

from fl_sim.native.kernel import CompiledNormals, Kernel
from fl_sim.privacy.mechanisms import CLOSE, GAUSSIAN, Noise, exact_step

DEFINITION = Noise.seeded(5)


@pytest.fixture
def compiled(kernel: Kernel) -> Noise:
    return replace(DEFINITION, normals=CompiledNormals(kernel))


@pytest.mark.parametrize("count", [0, 1, 7, 511, 513, 300_000])
@pytest.mark.parametrize("std", [0.65, 1.0, 1.999, 3e-7])
def test_noise_on_the_grid_is_the_same_number_for_number(compiled: Noise, count: int, std: float) -> None:
    for server_round in range(1 if count > 1000 else 20):
        found = compiled.gaussian(count, std, purpose="noise", server_round=server_round)
        expected = DEFINITION.gaussian(count, std, purpose="noise", server_round=server_round)
        assert np.array_equal(found, expected)
        assert np.array_equal(np.signbit(found), np.signbit(expected))


def test_numbers_off_the_grid_are_the_same_to_rounding(compiled: Noise) -> None:
    found = compiled.standard_normal(300_000, purpose="latent vectors", server_round=0)
    expected = DEFINITION.standard_normal(300_000, purpose="latent vectors", server_round=0)
    np.testing.assert_allclose(found, expected, rtol=4e-15, atol=1e-15)


class Planted(Noise):
    """Noise from given words instead of a stream."""

    def __init__(self, words: list[int], normals: CompiledNormals | None) -> None:
        super().__init__(bytes(32), simulation_only=True, normals=normals)
        object.__setattr__(self, "words", np.array(words, dtype=np.uint64))

    def _words(self, count: int, purpose: str, server_round: int, *, behind: int = 0) -> np.ndarray:
        return self.words  # type: ignore[attr-defined]


def test_words_from_the_ends_of_their_range_make_the_numbers_of_the_definition(kernel: Kernel) -> None:
    most = 2**64 - 1
    firsts = [0, 1, 2, 3, most, most - 1, 2**63, 2**54, 2**54 - 1, 2**54 + 2, 77 << 40]
    for second in (0, 5, 1 << 40, most):
        found, expected = (
            Planted([*firsts, *[second] * len(firsts)], normals).standard_normal(
                len(firsts), purpose="", server_round=0
            )
            for normals in (CompiledNormals(kernel), None)
        )
        np.testing.assert_allclose(found, expected, rtol=4e-15, atol=1e-15)


def test_every_width_of_vectors_makes_the_same_bits(kernels: list[Kernel]) -> None:
    words = np.random.default_rng(0).integers(0, 2**64, (2, 5000), dtype=np.uint64)
    words[0, ::7] >>= np.uint64(12)
    first, *others = [CompiledNormals(kernel).draw(*words) for kernel in kernels]
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("ratio", [2.0**20, 1.999 * 2.0**20])
def test_numbers_next_to_a_boundary_of_the_grid_are_rounded_as_defined_or_left_to_the_caller(
    kernel: Kernel, ratio: float
) -> None:
    draw = np.random.default_rng(1)
    below = [0, 1, *draw.integers(2, int(4.2 * ratio), 60).tolist()]  # |N| in grid steps; U is above 2^-17
    words, apart = [], []
    for step in below:
        boundary = GAUSSIAN.beyond(step + 0.5, ratio, 63)
        for off in (0, 1, 2**12, 2**17, 2**21, 2**24, 2**30):
            for digits in {boundary - off, boundary + off}:
                words.append((digits << 1 | int(draw.integers(2))) % 2**64)
                apart.append(off / boundary)
    first, out = np.array(words, np.uint64), np.empty(len(words))
    undecided = {*CompiledNormals(kernel).rounded(first, ratio, out).tolist()}
    for place, word in enumerate(words):
        if place in undecided:
            assert apart[place] <= 2 * CLOSE
            continue
        assert apart[place] > CLOSE / 2
        magnitude = exact_step(GAUSSIAN, ratio, word >> 1 << 64 | 1 << 63, 127, lambda: 1 << 63)
        assert out[place] == (-magnitude if word & 1 else magnitude)
    assert undecided
    assert len(undecided) < len(words)


def test_what_are_no_pairs_of_words_is_refused(kernel: Kernel) -> None:
    normals, words = CompiledNormals(kernel), np.zeros(8, np.uint64)
    for first, second in ((words, words[:7]), (words[::2], words[::2]), (words, words.astype(np.int64))):
        with pytest.raises(ValueError, match="pairs of 64-bit words"):
            normals.draw(first, second)
    for out in (np.zeros(7), np.zeros(8, np.float32), np.zeros(16)[::2]):
        with pytest.raises(ValueError, match="pairs of 64-bit words"):
            normals.rounded(words, 1.0, out)
