"""The roofline counts what layers must do, and compares both trainers on large ones."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim.models import MODELS
from fl_sim.native.compiling import compile_plain, lanes_of, processor
from fl_sim.native.kernel import load_kernel
from fl_sim.native.layers import describe


def test_a_row_for_every_layer_with_its_operations_bytes_and_least_time(
    load_benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    load_benchmark("speed_work")
    load_benchmark("contestants")
    roofline = load_benchmark("roofline")
    stack = describe(MODELS["niid-cnn"]((1, 28, 28), 10), (1, 28, 28))
    assert stack is not None
    roof = roofline.Roofs(operations=1e9, half_operations=0.0, amx_operations=0.0, cached_bytes=1e9, memory_bytes=1e8)
    milliseconds = np.ones((roofline.MOST_PLACES, len(roofline.PARTS)))
    rows = roofline.rows_of(stack, milliseconds, 2, roof)
    assert [row.name.split()[1] for row in rows[:5]] == ["conv", "conv", "linear", "linear", "linear"]
    assert rows[0].operations == 2 * 2 * 2 * 25 * 6 * 24 * 24  # two ways, two records, multiplication and addition
    assert rows[4].bytes == 4 * 3 * (2 * (84 + 10) + 84 * 10)
    assert rows[0].least == pytest.approx(1e3 * rows[0].operations / 1e9)
    assert "| **all** |" in roofline.table(rows)
    roofline.plot({"niid-cnn": rows}, roof, tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("compiler")
def test_the_loops_that_measure_the_roofs_can_be_compiled(tmp_path: Path) -> None:
    lanes = lanes_of(processor())
    if lanes < 8:
        pytest.skip("they are for x86-64 with AVX2")
    source = Path(__file__).resolve().parents[1] / "benchmarks" / "roofline.cpp"
    compile_plain(source, tmp_path / "roofs.so", lanes)
    measured = ctypes.CDLL(str(tmp_path / "roofs.so"))
    assert all(hasattr(measured, name) for name in ("operations", "bfloat16_operations", "amx_operations", "bytes"))


@pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")
def test_both_trainers_take_the_same_large_layers(
    load_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    large_layers = load_benchmark("large_layers")
    for factory, shape, _ in large_layers.NETWORKS.values():
        with torch.device("meta"):
            assert isinstance(factory(), nn.Module)
        assert len(shape) in {1, 3}
    monkeypatch.setitem(large_layers.NETWORKS, "tiny", (lambda: large_layers.wide(8, 3), (3, 8, 8), 4))
    theirs, own, ratio, who = large_layers.measure(load_kernel()[0], "tiny", 3)
    assert theirs > 0
    assert own > 0
    assert ratio > 0
    assert who == "compiled"
