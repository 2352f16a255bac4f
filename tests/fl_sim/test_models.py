"""The networks: sizes, shapes, seeds, and what is refused."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim import models
from fl_sim.errors import UserError
from fl_sim.settings import MODEL_NAMES

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
    ours = "niid-cnn, niid-mlp, dafl-cnn, mlp, 2nn, logistic, resnet, random-features, gru, lstm, transformer, decoder"
    choose = f"unknown model 'niid_cnn' {guess}; choose one of {ours}, or your own function"
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


SHAPE, CLASSES = (1, 8, 8), 4

MODULE = """
import functools
import torch
from torch import nn
from fl_sim import models
from fl_sim.errors import UserError

def tiny(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

class Net(nn.Module):
    def __init__(self, shape, classes, change=None):
        super().__init__()
        self.flat, self.head, self.change = nn.Flatten(), nn.Linear(64, classes), change
        self.register_buffer("positions", torch.arange(64.0))
        self.register_buffer("mask", torch.ones(64), persistent=False)
    def forward(self, inputs):
        logits = self.head(self.flat(inputs) + self.positions * self.mask)
        return self.change(logits) if self.change else logits

def with_(change): return functools.partial(Net, change=change)
def in_front(layer): return lambda shape, classes: nn.Sequential(layer(shape), tiny(shape, classes))
def counting(shape, classes):
    net = Net(shape, classes)
    net.change = lambda logits: net.positions.add_(1).sum() + logits
    return net
def random_buffer(shape, classes):
    net = Net(shape, classes)
    net.positions = torch.randn(64)
    return net
def random_frozen(shape, classes):
    net = tiny(shape, classes)
    net.features = nn.Parameter(torch.randn(64), requires_grad=False)
    return net
def composed(shape, classes): return nn.Sequential(models.build("mlp", shape, classes, 0))

def raising(shape, classes): raise KeyError("my\\nconfig")
def leaving(shape, classes): raise SystemExit(3)
def choosy(shape, classes): raise UserError("choosy wants larger images")
def one(shape): return tiny(shape, 10)
def three(shape, classes, depth): return tiny(shape, classes)
def keyword_only(*, input_shape, num_classes): return tiny(input_shape, num_classes)
def lazy(shape, classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
def empty(shape, classes): return nn.Flatten()
def frozen(shape, classes): return tiny(shape, classes).requires_grad_(False)
def half(shape, classes): return tiny(shape, classes).half()
def double(shape, classes): return tiny(shape, classes).double()
def listed(shape, classes): return [1]
def other_classes(shape, classes): return tiny(shape, 1000)
def other_shape(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))
pair, table = with_(lambda logits: (logits, logits)), with_(lambda logits: {"scores": logits[:, :2]})
to_half, cut = with_(torch.Tensor.half), with_(torch.Tensor.detach)
batchnorm = in_front(lambda shape: nn.BatchNorm2d(shape[0]))
def spectral(shape, classes):
    return nn.Sequential(nn.Flatten(), torch.nn.utils.parametrizations.spectral_norm(nn.Linear(64, classes)))
stateless = in_front(lambda shape: nn.InstanceNorm2d(shape[0], affine=True))
untracked = in_front(lambda shape: nn.BatchNorm2d(shape[0], track_running_stats=False))
dropout = in_front(lambda shape: nn.Dropout(0.5))
model = tiny(None, 4)
number = 3
"""


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user's module in the current folder, which nothing but that makes importable."""
    folder = tmp_path_factory.mktemp("users_folder")
    (folder / "users_own_models.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [entry for entry in sys.path if entry])
        yield
        sys.modules.pop("users_own_models", None)


def build(name: str, seed: int = 0) -> torch.nn.Module:
    return models.build(f"users_own_models:{name}", SHAPE, CLASSES, seed)


@pytest.mark.parametrize(
    "name", ["tiny", "Net", "random_frozen", "composed", "stateless", "untracked", "dropout"]
)  # fmt: skip
def test_what_can_be_trained_is_built_and_its_weights_depend_on_the_seed_alone(name: str) -> None:
    first, before = build(name), torch.get_rng_state()
    again = build(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert first(torch.zeros(3, *SHAPE)).shape == (3, CLASSES)
    assert first.training
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), again.parameters(), strict=True))
    other = build(name, seed=1)
    is_drawn = [not torch.equal(*pair) for pair in zip(first.parameters(), other.parameters(), strict=True)]
    assert any(is_drawn) or name == "composed"  # which gives a seed of its own


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no 'missing'"),
        ("number", r"is 3, not a function of \(input_shape, num_classes\) that returns a new torch.nn.Module"),
        ("model", r"is Sequential\(.*, not a function of"),
        ("one", r"takes \(shape\), but must be a function of \(input_shape, num_classes\)"),
        ("three", r"takes \(shape, classes, depth\), but must be"),
        ("keyword_only", r"takes \(\*, input_shape, num_classes\), but must be"),
        ("raising", r"failed when it was called with \(\(1, 8, 8\), 4\): KeyError: "),
        ("leaving", r"failed when it was called with \(\(1, 8, 8\), 4\): SystemExit: 3"),
        ("listed", "returned list, not a torch.nn.Module"),
        ("lazy", r"has parameters without a size before the first batch \(1.weight\): compute the sizes"),
        ("empty", "has no parameters: there is nothing to train"),
        ("frozen", r"has only frozen parameters \(requires_grad=False\): there is nothing to train"),
        ("half", r"has float16 parameters \(1.weight\): they must be float32"),
        ("double", r"has float64 parameters"),
        ("other_shape", r"cannot take records of shape \(1, 8, 8\): RuntimeError: (addmm: )?mat1 and mat2"),
        ("pair", r"returns tuple for a batch \(0: \(2, 4\), 1: \(2, 4\)\), and several of them can be the logits"),
        ("table", r"returns dict for a batch \(scores: \(2, 2\)\), and none of them can be the logits"),
        ("other_classes", r"returns float32 of shape \(2, 1000\) for 2 records, not float32 logits of shape \(2, 4\)"),
        ("to_half", r"returns float16 of shape \(2, 4\)"),
        ("cut", "depend on none of its trained parameters"),
        ("batchnorm", r"keeps running statistics \(0.running_mean\).* local.batch_norm=average or personal, or use"),
        ("spectral", r"keeps running statistics \(.*_u\)"),
        ("counting", r"keeps running statistics \(positions\)"),
        ("random_buffer", r"draws the buffer positions at random, .* nn.Parameter with requires_grad=False"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line_that_says_what_is_wanted(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(name)
    assert str(caught.value).startswith(f"model 'users_own_models:{name}' ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_batch_norm_is_built_where_its_statistics_are_averaged_and_starts_as_it_was_made() -> None:
    model = models.build("users_own_models:batchnorm", SHAPE, CLASSES, 0, batch_norm="average")
    fresh = torch.nn.BatchNorm2d(1)
    assert all(torch.equal(*pair) for pair in zip(model[0].buffers(), fresh.buffers(), strict=True))
    for name in ("spectral", "tiny"):
        with pytest.raises(UserError, match=r"only those of nn\.BatchNorm|has no BatchNorm layers: leave local"):
            models.build(f"users_own_models:{name}", SHAPE, CLASSES, 0, batch_norm="average")


def test_what_a_factory_itself_says_to_the_user_is_said() -> None:
    with pytest.raises(UserError, match=r"^choosy wants larger images$"):
        build("choosy")
