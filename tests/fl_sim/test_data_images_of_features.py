"""Images for feature vectors: a real image comes back from its own features, near and always the same."""

import numpy as np
import pytest
import torch

from fl_sim.data import load, scattering
from fl_sim.data.features import vectors_of
from fl_sim.data.images_of_features import images_of
from fl_sim.errors import UserError

SHAPE = (1, 12, 12)
SIZE = 729  # features of such images


@pytest.fixture
def few(fewer_images):
    fewer_images(steps=60, made=150, whitened=200)
    return fewer_images


def enlarged(side):
    """Digits of more than 8x8 pixels, which have too few positions to be found again."""
    small = torch.from_numpy(np.asarray(load("digits", None).test.inputs[:12])).float()
    return torch.nn.functional.interpolate(small, size=(side, side), mode="bilinear").round().to(torch.uint8).numpy()


@pytest.fixture
def digits():
    return enlarged(12)


def likeness(some, others):
    """The correlation of images with images, pixel by pixel: features hardly tell brightness and contrast."""
    pairs = zip(some.reshape(len(some), -1), others.reshape(len(others), -1), strict=True)
    return np.array([np.corrcoef(one, other)[0, 1] for one, other in pairs])


@pytest.mark.parametrize(("features", "alike", "far"), [("scattering", 0.9, 0.35), ("whitened-scattering", 0.8, 0.6)])
def test_a_real_image_comes_back_from_its_own_features(few, digits, features, alike, far):
    vectors = vectors_of(digits, features)
    images, distances = images_of(vectors, SHAPE, features)
    assert (images.shape, images.dtype, distances.dtype) == (digits.shape, np.uint8, np.float32)
    assert likeness(images, digits).mean() > alike
    assert likeness(images, np.roll(digits, 1, axis=0)).mean() < 0.7
    assert distances.mean() < far


def test_an_image_comes_back_from_features_that_are_projected(few):
    digits = enlarged(16)[:4]
    assert scattering.dimension_of((1, 16, 16)) == 1000 < 81 * 16
    images, _ = images_of(vectors_of(digits, "scattering"), (1, 16, 16), "scattering")
    assert likeness(images, digits).mean() > 0.9


def test_an_image_in_colour_comes_back(few):
    rows, columns = np.mgrid[:12, :12]
    disc, bar = (rows - 5) ** 2 + (columns - 6) ** 2 < 12, (columns > 6) & (columns < 10)
    image = np.stack([255 * disc, 200 * disc, 30 + 150 * bar]).astype(np.uint8)[None]
    images, distances = images_of(vectors_of(image, "scattering"), (3, 12, 12), "scattering")
    assert likeness(images[0], image[0]).min() > 0.7
    assert distances[0] < 0.4


def test_the_distance_is_that_of_the_images_that_are_returned(few, digits):
    vectors = vectors_of(digits, "scattering")
    images, distances = images_of(vectors, SHAPE, "scattering")
    expected = np.linalg.norm(vectors_of(images, "scattering") - vectors, axis=1) / np.linalg.norm(vectors, axis=1)
    np.testing.assert_allclose(distances, expected, rtol=1e-6)


def test_the_search_comes_nearer_than_its_start(few, digits):
    vectors = vectors_of(digits, "scattering")
    _, near = images_of(vectors, SHAPE, "scattering")
    few(steps=1)
    _, start = images_of(vectors, SHAPE, "scattering")
    assert near.mean() < start.mean() / 2


def test_the_same_vectors_have_the_same_images_by_any_number_of_threads(few, digits):
    vectors = vectors_of(digits, "scattering")
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        few()  # forgets what was made with another number of threads
        found.append(images_of(vectors, SHAPE, "scattering"))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


def test_the_part_that_is_done_is_told_up_to_the_whole(few, digits):
    few(steps=4, at_a_time=5)
    told = []
    images, _ = images_of(vectors_of(digits, "scattering"), SHAPE, "scattering", told.append)
    assert len(images) == 12
    assert told == sorted(told)
    assert (len(told), told[-1]) == (12, 1.0)


def test_a_vector_that_no_image_has_gets_one_all_the_same(few):
    """Zeros, and noise of length 1: the gradient stays finite."""
    noise = np.random.default_rng(0).standard_normal(SIZE)
    vectors = np.stack([np.zeros(SIZE), noise / np.linalg.norm(noise)]).astype(np.float32)
    images, distances = images_of(vectors, SHAPE, "scattering")
    assert images[1].std() > 0
    assert np.isfinite(distances[1])


def test_no_vectors_have_no_images():
    images, distances = images_of(np.empty((0, SIZE), dtype=np.float32), SHAPE, "scattering")
    assert (images.shape, distances.shape) == ((0, *SHAPE), (0,))


def test_what_can_be_no_features_of_such_images_is_refused():
    with pytest.raises(ValueError, match=r"vectors of shape \(7,\) .* 729"):
        images_of(np.zeros((2, 7), dtype=np.float32), SHAPE, "scattering")
    with pytest.raises(ValueError, match="not finite"):
        images_of(np.full((2, SIZE), np.nan, dtype=np.float32), SHAPE, "scattering")
    with pytest.raises(UserError, match="images from 8x8 to 128x128"):
        images_of(np.zeros((2, SIZE), dtype=np.float32), (1, 4, 12), "scattering")


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 16, 16), (3, 12, 12)])
def test_the_gradient_of_features_is_their_slope_and_finite_for_images_without_contrast(shape):
    coins = torch.Generator().manual_seed(0)
    images = torch.rand((2, *shape), generator=coins)
    images[1] = 0
    weights = torch.randn(scattering.dimension_of(shape), generator=coins)
    direction = torch.randn(shape, generator=coins)
    images.requires_grad_()
    (gradient,) = torch.autograd.grad((scattering.described(images) @ weights).sum(), images)
    step = 1e-3
    with torch.no_grad():
        ahead, behind = (scattering.described(images[:1] + sign * step * direction) @ weights for sign in (1, -1))
    slope = ((ahead - behind) / (2 * step)).item()
    assert (gradient[0] * direction).sum().item() == pytest.approx(slope, rel=0.03)
    assert torch.isfinite(gradient).all()


def test_the_projection_back_is_the_transpose_of_the_projection():
    coins = np.random.default_rng(0)
    there, back = coins.standard_normal((60, 60)), coins.standard_normal((20, 20))
    there, back = there.astype(np.float32), back.astype(np.float32)
    first = scattering._projected(there.copy(), 20) @ back.T
    second = there @ scattering._projected_back(back, 60).T
    np.testing.assert_allclose(first, second, atol=1e-4)
