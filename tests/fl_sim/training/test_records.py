"""Records as ranges of shared sources, and the precision of products on a device."""

import numpy as np
import pytest
import torch

from fl_sim.training import records as module
from fl_sim.training.loop import resident, to_tensors
from fl_sim.training.records import Records, Scale, Source, arithmetic, merged
from fl_sim.types import Dataset, Examples, Precision

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def dataset() -> Dataset:
    """Return records of two channels that have all bytes in them."""
    inputs = np.arange(2 * 2 * 256, dtype=np.int64).reshape(4, 2, 8, 16).astype(np.uint8)
    examples = Examples(inputs, np.arange(4))
    return Dataset("d", examples, examples, 4, (0.1307, 0.2860), (0.3081, 0.3530))


def source_of_bytes(device: str) -> Source:
    data = dataset()
    scale = Scale.of(data, data.train.inputs.dtype, 4).to(torch.device(device))
    inputs, labels = torch.from_numpy(data.train.inputs).to(device), torch.from_numpy(data.train.labels).to(device)
    return Source(inputs, labels, scale)


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_normalise_to_the_bits_of_float_records(device: str) -> None:
    expected, labels = to_tensors(dataset().train, dataset())
    source = source_of_bytes(device)
    inputs, found = source.whole().tensors()
    assert torch.equal(inputs.cpu(), expected)
    assert torch.equal(found.cpu(), labels)
    rows = torch.tensor([[3, 1], [0, 0], [2, 3]], device=device)  # clients x batch, as a stacked step gathers them
    assert torch.equal(source.normalised(source.inputs[rows]).cpu(), expected[rows.cpu()])
    assert source.inputs.dtype == torch.uint8  # as they were


@pytest.mark.parametrize("device", DEVICES)
def test_what_stays_on_a_gpu_is_bytes_and_on_a_cpu_floats(device: str) -> None:
    source = resident(dataset().train, dataset(), torch.device(device))
    assert source.inputs.device.type == source.labels.device.type == device
    assert source.inputs.dtype == (torch.uint8 if device == "cuda" else torch.float32)
    assert torch.equal(source.whole().tensors()[0].cpu(), to_tensors(dataset().train, dataset())[0])
    features = Examples(np.ones((3, 2), dtype=np.float32), np.arange(3))
    numbers = resident(features, Dataset("d", features, features, 3, (0.0, 1.0), (1.0, 2.0)), torch.device(device))
    assert numbers.scale is None
    assert numbers.inputs.cpu().tolist() == [[1.0, 0.0]] * 3


def test_a_range_of_floats_is_a_view_and_ranges_add_up() -> None:
    one, two = (Source(torch.arange(n * 3.0).reshape(n, 3) + n, torch.arange(n) + 10 * n) for n in (4, 2))
    middle = Records(((one, range(1, 3)),))
    assert middle.tensors()[0].data_ptr() == one.inputs[1:].data_ptr()
    both = middle + two.whole()
    inputs, labels = both.tensors()
    assert (len(both), both.input_shape, both.device) == (4, (3,), torch.device("cpu"))
    assert labels.tolist() == [41, 42, 20, 21]
    together = merged([two, one])
    rows = torch.from_numpy(both.rows({two: 0, one: 2}))
    assert torch.equal(together.inputs[rows], inputs)
    assert torch.equal(together.labels[rows], labels)
    assert merged([one]) is one
    assert len(Records(((one, range(2, 2)),)).tensors()[0]) == 0


def test_bytes_and_floats_do_not_lie_end_to_end() -> None:
    with pytest.raises(AssertionError):
        merged([source_of_bytes("cpu"), Source(*to_tensors(dataset().train, dataset()))])


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def settings() -> list[object]:
    return [getattr(place, module._NAME) for place in module._PLACES]


@pytest.mark.parametrize(
    ("precision", "inside"),
    [
        ("float32", module._IEEE),
        ("tf32", module._TF32),
        pytest.param("bfloat16", module._IEEE, marks=[pytest.mark.gpu, NO_GPU]),
    ],
)
def test_on_a_gpu_products_are_as_asked_for_and_the_settings_come_back(precision: Precision, inside: object) -> None:
    before = settings()

    def fail() -> None:
        with arithmetic(GPU, precision):
            assert settings() == [inside, inside]
            assert torch.is_autocast_enabled("cuda") == (precision == "bfloat16")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert settings() == before
    assert not torch.is_autocast_enabled("cuda")


def test_convolutions_are_tf32_on_a_gpu_unless_somebody_says_otherwise() -> None:
    # The reason why "float32" has to be said: if a PyTorch comes that does not, this may go.
    assert settings()[1] in ("tf32", True)


def test_a_cpu_knows_bfloat16_alone() -> None:
    before, left = settings(), torch.ones(2, 2)
    for precision in ("float32", "tf32"):
        with arithmetic(CPU, precision):
            assert settings() == before
            assert (left @ left).dtype == torch.float32
    with arithmetic(CPU, "bfloat16"):
        assert (left @ left).dtype == torch.bfloat16
        assert (left + left).dtype == torch.float32
    assert settings() == before


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize(("precision", "within"), [("float32", 1e-6), ("tf32", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("kind", ["matrices", "images"])
def test_products_on_a_gpu_err_as_their_precision_says(kind: str, precision: Precision, within: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((512, 512), (512, 512)) if kind == "matrices" else ((32, 64, 16, 16), (64, 64, 3, 3))
    left, right = (torch.randn(shape, generator=generator) for shape in shapes)
    product = torch.matmul if kind == "matrices" else torch.nn.functional.conv2d
    with arithmetic(GPU, precision):
        found = product(left.to(GPU), right.to(GPU))
    exact = product(left.double(), right.double())
    error = float((found.double().cpu() - exact).norm() / exact.norm())
    assert within / 100 < error < within
