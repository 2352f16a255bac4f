"""What float32 costs: the compiled trainer's gradients lie as near to float64's as PyTorch's do."""

from collections.abc import Callable
from types import ModuleType

import pytest

from fl_sim.native.kernel import Kernel


@pytest.mark.parametrize("name", ["niid-cnn", "dafl-cnn", "resnet"])
def test_gradients_are_as_exact_as_pytorchs(
    kernel: Kernel, load_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rounding = load_benchmark("rounding")
    monkeypatch.setattr(rounding, "RECORDS", 16)
    found = rounding.measure(kernel, name, 3)
    assert found["compiled, median"] <= 2 * found["PyTorch, median"]
    if kernel.has_bfloat16:
        assert 1e-3 < found["compiled, bfloat16"] <= 2 * found["PyTorch, bfloat16"]
