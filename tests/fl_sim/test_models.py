"""The networks: sizes, shapes, seeds, and what is refused."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim import models
from fl_sim.errors import UserError
from fl_sim.model_names import MODEL_NAMES

MNIST, DIGITS, CIFAR = (1, 28, 28), (1, 8, 8), (3, 32, 32)


def _count(model):
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("niid-cnn", MNIST, 10, 44_426),
        # 6 * 3 * 25 + 6, 16 * 6 * 25 + 16, 400 * 120 + 120, 120 * 84 + 84, 84 * 10 + 10
        ("niid-cnn", CIFAR, 10, 456 + 2416 + 48_120 + 10_164 + 850),
        ("mlp", MNIST, 10, 784 * 600 + 600 + 600 * 100 + 100 + 100 * 10 + 10),
        ("niid-mlp", (123,), 2, 124 * 32 + 33 * 16 + 17 * 8 + 9 * 2),
        ("2nn", MNIST, 10, 199_210),  # the number in McMahan et al. 2017
        ("logistic", MNIST, 10, 7850),
        ("logistic", (13,), 2, 28),
        ("dafl-cnn", DIGITS, 10, 320 + 18_496 + 64 * 4 * 128 + 128 + 1290),
        # stem 432 + 32; blocks 2 * 2304 + 64, 4608 + 9216 + 128 + 512, 18432 + 36864 + 256 + 2048; 650
        ("resnet", CIFAR, 10, 464 + 4672 + 14_464 + 57_600 + 650),
    ],
)
def test_parameter_counts(name, shape, classes, parameters):
    assert _count(models.build(name, shape, classes, seed=0)) == parameters


@pytest.mark.parametrize("shape", [DIGITS, MNIST, CIFAR, (1, 16, 20), (2, 5, 9)])
@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_maps_records_to_logits_or_refuses_small_images_by_name(name, shape):
    if name == "niid-cnn" and min(shape[1:]) < 16:
        with pytest.raises(UserError, match=r"'niid-cnn' needs images of at least 16x16.*dafl-cnn"):
            models.build(name, shape, 7, seed=0)
    else:
        assert models.build(name, shape, 7, seed=0)(torch.zeros(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize("name", ["niid-cnn", "dafl-cnn", "resnet"])
def test_image_models_refuse_features(name):
    with pytest.raises(UserError, match=rf"{name}.*these records have shape \(14,\)"):
        models.build(name, (14,), 2, seed=0)


def test_the_default_model_fits_the_records():
    assert [models.default_model(shape) for shape in (MNIST, CIFAR, DIGITS, (14,))] == [
        "niid-cnn", "niid-cnn", "dafl-cnn", "mlp",
    ]  # fmt: skip


@pytest.mark.parametrize("name", models.MODELS)
def test_weights_depend_on_the_seed_alone_and_global_generators_stay(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = models.build(name, MNIST, 10, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = models.build(name, MNIST, 10, seed=0), models.build(name, MNIST, 10, seed=1)
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_threads_that_build_at_once_get_the_weights_of_their_own_seeds(monkeypatch):
    def slow(input_shape, num_classes):
        first = nn.Linear(input_shape[0], 5)
        time.sleep(0.01)  # another thread has time to draw
        return nn.Sequential(first, nn.Linear(5, num_classes))

    monkeypatch.setitem(models.MODELS, "mlp", slow)

    def weights(seed):
        return [weight.tolist() for weight in models.build("mlp", (4,), 3, seed).parameters()]

    alone = [weights(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(weights, range(8))) == alone


def test_images_are_scored_one_by_one():
    """No model mixes the records of a batch: FedMix's and DP-SGD's gradients per record rest on it."""
    batch = torch.randn(5, *CIFAR, generator=torch.Generator().manual_seed(0))
    for name in models.MODELS:
        model = models.build(name, CIFAR, 10, seed=0)
        torch.testing.assert_close(model(batch), torch.cat([model(record[None]) for record in batch]))


def test_an_unknown_name_is_refused_with_the_names_there_are():
    guess = r"\(did you mean 'niid-cnn'\?\)"
    ours = "niid-cnn, niid-mlp, dafl-cnn, mlp, 2nn, logistic, resnet, gru"
    choose = f"unknown model 'niid_cnn' {guess}; choose one of {ours}, or give"
    with pytest.raises(UserError, match=choose):
        models.build("niid_cnn", DIGITS, 4, seed=0)


def test_a_resnet_block_adds_its_shortcut():
    block = models.ResidualBlock(8, 8, 1)
    with torch.no_grad():
        for weight in block.body.parameters():
            weight.zero_()
    inputs = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(block(inputs).detach().numpy(), inputs.clamp(min=0).numpy())
    assert models.ResidualBlock(8, 16, 2)(inputs).shape == (2, 16, 2, 2)


def test_the_names_that_are_known_without_torch_are_those_of_the_models():
    assert tuple(models.MODELS) == MODEL_NAMES
