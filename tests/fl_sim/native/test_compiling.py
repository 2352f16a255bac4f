"""Building the native trainer never fails an installation, and a library for another processor is never called."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fl_sim.native import compiling
from fl_sim.native.kernel import _LAYOUT, Kernel, load_kernel


def test_no_compiler_and_a_failing_one_are_reasons_not_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "compile_kernel", compiling.compile_kernel)
    for compiler, said in (("false", "false failed"), (str(tmp_path / "none"), "No such file")):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(compiling.NoCompiler, match=re.escape(said)):
            compiling.compile_kernel(tmp_path / "k.so")
        assert compiling.main() == 1
        assert "PyTorch will train instead" in capsys.readouterr().err
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(compiling.NoCompiler, match="no C\\+\\+ compiler"):
        compiling.compile_kernel(tmp_path / "k.so")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_and_one_that_is_none_give_the_reason(tmp_path: Path) -> None:
    load = load_kernel.__wrapped__
    kernel, why_not = load(tmp_path / "absent.so")
    assert kernel is None
    assert "python -m fl_sim.native" in why_not
    (tmp_path / "text.so").write_text("no library")
    kernel, why_not = load(tmp_path / "text.so")
    assert kernel is None
    assert "cannot be loaded" in why_not


def said_by(width: int, sources: str, layout: int) -> str:
    """Return the source of a library that says these things of itself for one width."""
    return (
        f'extern "C" const char* fl_sim_sources_{width}() {{ return "{sources}"; }}\n'
        f'extern "C" int fl_sim_layout_{width}() {{ return {layout}; }}\n'
    )


LANES = compiling.lanes_of(compiling.processor())
OTHER = {0: 8, 8: 16, 16: 8}[LANES]
needs_vectors = pytest.mark.skipif(not LANES, reason="no native trainer for this processor")


def library_of(source: str, folder: Path) -> Path:
    """Compile ``source`` as it stands."""
    if not (compiler := shutil.which("g++")):
        pytest.skip("no g++")
    (folder / "library.cpp").write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "library.cpp", "-o", "library.so"], cwd=folder, check=True)
    return folder / "library.so"


@needs_vectors
@pytest.mark.parametrize(
    ("version", "is_taken"),
    [
        (said_by(LANES, compiling.SOURCES_DIGEST, _LAYOUT), True),
        ("", False),
        (said_by(OTHER, compiling.SOURCES_DIGEST, _LAYOUT), False),
        (said_by(LANES, compiling.SOURCES_DIGEST, _LAYOUT + 1), False),
        (said_by(LANES, "other", _LAYOUT), False),
    ],
    ids=["this version", "none", "other width", "other layout", "other sources"],
)  # fmt: skip
def test_a_library_of_another_version_is_not_used(tmp_path: Path, version: str, *, is_taken: bool) -> None:
    kernel, why_not = load_kernel.__wrapped__(library_of(version, tmp_path))
    assert (kernel is not None) is is_taken
    assert ("from another version" in why_not) is not is_taken


AVX2, AVX512 = {"x86_64", "avx", "avx2", "fma"}, {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEON = {"aarch64", "fp", "asimd"}


@pytest.mark.parametrize(
    ("features", "lanes"),
    [(AVX2 | AVX512, 16), (AVX2, 8), (AVX2 | AVX512 - {"avx512bw"}, 8), (AVX2 - {"fma"}, 0), (NEON, 4), (set(), 0)],
    ids=["avx-512", "avx2", "half of avx-512", "no fma", "neon", "unknown"],
)
def test_the_widest_vectors_that_a_processor_has_are_chosen_where_it_runs(features: set[str], lanes: int) -> None:
    assert compiling.lanes_of(frozenset(features)) == lanes


def test_without_wide_vectors_nothing_is_used_and_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fl_sim.native.kernel.processor", lambda: frozenset(AVX2 - {"avx2"}))
    assert load_kernel.__wrapped__() == (None, "this processor has no avx2")
    monkeypatch.setattr(compiling, "processor", lambda: frozenset({"x86_64", "avx"}))
    monkeypatch.setattr(compiling, "compile_kernel", lambda: None)  # for the processors of others
    assert compiling.main() == 0
    assert "this processor has no avx2, fma: on it PyTorch will train instead" in capsys.readouterr().err


def test_an_architecture_that_there_is_nothing_for_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.platform, "machine", lambda: "riscv64")
    with pytest.raises(compiling.NoCompiler, match="but this machine's architecture is riscv64"):
        compiling.compile_kernel(tmp_path / "k.so")


@pytest.mark.parametrize(
    ("features", "missing"), [(set(), "avx2, fma"), ({"aarch64"}, "asimd"), ({"x86_64", "fma"}, "avx2")]
)
def test_what_is_missing_is_told_by_the_architecture(features: set[str], missing: str) -> None:
    assert compiling.missing_in(frozenset(features)) == missing


def test_a_processor_is_known_by_what_the_system_says_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "cpuinfo"
    monkeypatch.setattr(compiling, "Path", lambda _: told)
    assert compiling.processor() == frozenset()  # not Linux
    told.write_text("processor : 0\nflags\t\t: fpu avx2 fma\nbugs : none\n")
    assert compiling.processor() == {compiling.platform.machine(), "fpu", "avx2", "fma"}


@needs_vectors
def test_one_library_holds_every_width_and_shares_nothing_with_other_libraries(kernel: Kernel) -> None:
    [widths] = [widths for widths in compiling.ARCHITECTURES.values() if kernel.lanes in widths]
    for lanes in widths:
        assert Kernel(kernel.library, lanes).is_this_versions()
    if not (nm := shutil.which("nm")):
        pytest.skip("no nm")
    listed = subprocess.run(
        [nm, "-D", "--defined-only", kernel.library._name], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    called = ["sources", "layout", "train", "infer", "clipped_sum", "generate", "generator_step", "discriminator_step"]
    called += [f"image_{name}" for name in called[4:]]
    called += ["normals", "rounded_normals", "weighted_sum", "train_privately", "private_sum", "backward"]
    rounded = {f"fl_sim_{name}_16_bfloat16" for name in called[:4]} if 16 in widths else set()
    by_amx = {f"fl_sim_{name}_16_amx" for name in [*called[:4], "may_use"]} if 16 in widths else set()
    by_width = {f"fl_sim_{name}_{lanes}" for name in called for lanes in widths}
    assert names - by_amx == by_width | rounded
    assert names & by_amx in (by_amx, set())  # older compilers do not know it


def test_a_compiler_is_asked_whether_it_knows_amx(compiler: list[str]) -> None:
    assert compiling._knows(compiler, [])
    assert not compiling._knows(compiler, ["-mno-such-instructions"])


def test_a_copy_without_sources_knows_its_kernel_by_their_digest() -> None:
    found = compiling.sources_digest()
    assert found == compiling.SOURCES_DIGEST, f"the sources have changed: set SOURCES_DIGEST in compiling.py to {found}"


def test_a_copy_without_a_kernel_takes_that_of_the_same_sources_on_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str, addition: str, *, with_sources: bool = True) -> Path:
        folder = tmp_path / name / "fl_sim" / "native"
        folder.mkdir(parents=True)
        for path in compiling.FOLDER.iterdir():
            if with_sources and path.suffix in {".cpp", ".h"}:
                (folder / path.name).write_bytes(path.read_bytes())
        if addition:
            (folder / "optimizer.h").write_text(addition)
        (folder / compiling.LIBRARY.name).write_text("a kernel")
        return folder / compiling.LIBRARY.name

    installed("bare", "", with_sources=False)
    installed("other", "// another step")
    own = tmp_path / "copy" / compiling.LIBRARY.name
    monkeypatch.setattr(compiling, "LIBRARY", own)
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("nowhere", "bare", "other", "same")])
    assert compiling.find_library() == own  # none fits
    same = installed("same", "")
    assert compiling.find_library() == same
    own.parent.mkdir()
    own.write_text("its own")
    assert compiling.find_library() == own
