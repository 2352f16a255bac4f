"""The compiled trainer as these tests' checkout has it."""

import pytest

from fl_sim.native.compiling import FOLDER, LIBRARY, NEEDED, NoCompiler, compile_kernel, processor
from fl_sim.native.kernel import Kernel, load_kernel


@pytest.fixture(scope="session", params=["native", pytest.param("avx2", marks=pytest.mark.slow)])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The kernel of this checkout's source, compiled here unless it lies there already; and as AVX2 alone has it."""
    if missing := NEEDED - set(processor().split()):
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    has_wider = "avx512f" in processor().split()
    wants_avx2 = request.param == "avx2"
    if wants_avx2 and not has_wider:
        pytest.skip("this processor has no AVX-512: the native kernel is that of AVX2")
    library = LIBRARY
    newest = max(path.stat().st_mtime for path in FOLDER.iterdir() if path.suffix in {".cpp", ".h"})
    if wants_avx2 or not library.exists() or library.stat().st_mtime < newest:
        library = tmp_path_factory.mktemp("kernel") / "kernel.so"
        try:
            compile_kernel(library, ["-mno-avx512f"] if wants_avx2 else [])
        except NoCompiler as reason:
            pytest.skip(str(reason))
    loaded, why_not = load_kernel.__wrapped__(library)
    assert loaded is not None, why_not
    assert loaded.library.fl_sim_lanes() == (16 if has_wider and not wants_avx2 else 8)
    return loaded
