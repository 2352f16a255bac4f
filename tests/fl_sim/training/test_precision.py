"""How exactly products are computed, and that PyTorch's settings are put back whatever happens."""

import pytest
import torch

from fl_sim.training import precision as module
from fl_sim.training.precision import arithmetic
from fl_sim.types import Precision

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
