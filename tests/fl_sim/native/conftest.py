"""The compiled trainer as these tests' checkout has it."""

import os
import platform
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fl_sim.native.compiling import (
    ARCHITECTURES,
    FOLDER,
    LIBRARY,
    compile_kernel,
    lanes_of,
    missing_in,
    processor,
)
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.store.files import folder_lock

PROCESSORS = ["native", pytest.param("avx2", marks=pytest.mark.slow), pytest.param("neon", marks=pytest.mark.long)]


@pytest.fixture(scope="session", params=PROCESSORS)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The kernel of this checkout's source, compiled unless it lies there already; its half for AVX2; that for ARM."""
    if request.param == "neon":
        base = tmp_path_factory.getbasetemp()
        return on_arm((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "neon")
    lanes = lanes_of(processor())
    if not lanes:
        pytest.skip(f"this processor has no {missing_in(processor())}")
    if request.param == "avx2" and lanes == 8:
        pytest.skip("this processor has no AVX-512: the native kernel is that of AVX2")
    library = LIBRARY
    newest = max(path.stat().st_mtime for path in FOLDER.iterdir() if path.suffix in {".cpp", ".h"})
    if not library.exists() or library.stat().st_mtime < newest:
        request.getfixturevalue("compiler")
        library = tmp_path_factory.mktemp("kernel") / "kernel.so"
        compile_kernel(library)
    loaded, why_not = load_kernel.__wrapped__(library)
    assert loaded is not None, why_not
    assert loaded.lanes == lanes
    # Products of bfloat16 numbers have 16 lanes.
    return replace(loaded, lanes=8, has_bfloat16=False, has_amx=False) if request.param == "avx2" else loaded


@pytest.fixture
def kernels(kernel: Kernel) -> list[Kernel]:
    """The kernel in every width that runs here; of one in an emulator, it and this processor's."""
    if kernel.lanes not in ARCHITECTURES[platform.machine()]:
        here, why_not = load_kernel.__wrapped__()
        assert here is not None, why_not
        return [here, kernel]
    return [replace(kernel, lanes=lanes) for lanes in ARCHITECTURES[platform.machine()] if lanes <= kernel.lanes]


@cache
def on_arm(folder: Path) -> Kernel:
    """The kernel for 64-bit ARM, in an emulator; compiled into ``folder`` once for all workers of a run of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        import emulated  # noqa: PLC0415 (it lies beside this file)
    compiler = emulated.cross_compiler()
    if compiler is None or emulated.emulator() is None:
        pytest.skip("no aarch64-linux-gnu-g++ or no qemu-aarch64: g++-aarch64-linux-gnu and qemu-user have them")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", compiler)
        folder.mkdir(exist_ok=True)
        with folder_lock(folder):
            if not (folder / "kernel.so").exists():
                compile_kernel(folder / "kernel.so", architecture="aarch64")
            library = emulated.EmulatedLibrary(folder / "kernel.so", folder)
    kernel = Kernel(library, 4)
    assert kernel.is_this_versions()
    return kernel
