"""The compiled trainer as these tests' checkout has it."""

from dataclasses import replace

import pytest

from fl_sim.native.compiling import FOLDER, LIBRARY, NoCompiler, compile_kernel, lanes_of, missing_in, processor
from fl_sim.native.kernel import Kernel, load_kernel


@pytest.fixture(scope="session", params=["native", pytest.param("avx2", marks=pytest.mark.slow)])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The kernel of this checkout's source, compiled here unless it lies there already; and its half for AVX2."""
    lanes = lanes_of(processor())
    if not lanes:
        pytest.skip(f"this processor has no {missing_in(processor())}")
    if request.param == "avx2" and lanes == 8:
        pytest.skip("this processor has no AVX-512: the native kernel is that of AVX2")
    library = LIBRARY
    newest = max(path.stat().st_mtime for path in FOLDER.iterdir() if path.suffix in {".cpp", ".h"})
    if not library.exists() or library.stat().st_mtime < newest:
        library = tmp_path_factory.mktemp("kernel") / "kernel.so"
        try:
            compile_kernel(library)
        except NoCompiler as reason:
            pytest.skip(str(reason))
    loaded, why_not = load_kernel.__wrapped__(library)
    assert loaded is not None, why_not
    assert loaded.lanes == lanes
    return replace(loaded, lanes=8) if request.param == "avx2" else loaded
