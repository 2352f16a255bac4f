"""Building the native trainer never fails an installation, and a library for another processor is never called."""

import re
import sys
from pathlib import Path

import pytest

from fl_sim.native import compiling
from fl_sim.native.kernel import _LAYOUT, load_kernel


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


PROCESSOR = 'extern "C" const char* fl_sim_processor() { return FL_SIM_PROCESSOR; }\n'
SOURCES = 'extern "C" const char* fl_sim_sources() { return FL_SIM_SOURCES; }\n'
LAYOUT = f'extern "C" int fl_sim_layout() {{ return {_LAYOUT}; }}\n'
"""What a library says of itself; that of this version says all three."""


def test_without_wide_vectors_nothing_is_compiled_and_nothing_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never() -> None:
        raise AssertionError

    monkeypatch.setattr(compiling, "processor", lambda: "x86_64 avx fma sse4_2")
    monkeypatch.setattr(compiling, "compile_kernel", never)
    assert compiling.main() == 1
    assert "this processor has no avx2; PyTorch will train instead" in capsys.readouterr().err
    source = tmp_path / "narrow.cpp"
    source.write_text(PROCESSOR + SOURCES + LAYOUT)
    monkeypatch.undo()
    monkeypatch.setattr(compiling, "SOURCE", source)
    monkeypatch.setattr(compiling, "processor", lambda: "")
    try:
        compiling.compile_kernel(tmp_path / "narrow.so")
    except compiling.NoCompiler as reason:
        pytest.skip(str(reason))
    kernel, why_not = load_kernel.__wrapped__(tmp_path / "narrow.so")
    assert kernel is None
    assert "slower than PyTorch" in why_not


@pytest.mark.parametrize(
    "version",
    [
        "", LAYOUT, SOURCES, SOURCES + LAYOUT.replace("return", "return 1 +"),
        SOURCES.replace("return FL_SIM_SOURCES", 'return "other"') + LAYOUT,
    ],
    ids=["none", "no sources", "no layout", "other layout", "other sources"],
)  # fmt: skip
def test_a_library_of_another_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    source = tmp_path / "older.cpp"
    source.write_text(PROCESSOR + version)
    monkeypatch.setattr(compiling, "SOURCE", source)
    try:
        compiling.compile_kernel(tmp_path / "older.so")
    except compiling.NoCompiler as reason:
        pytest.skip(str(reason))
    kernel, why_not = load_kernel.__wrapped__(tmp_path / "older.so")
    assert kernel is None
    assert "of another version" in why_not


def test_a_library_for_another_processor_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" const char* fl_sim_processor() { return FL_SIM_PROCESSOR; }\n')
    monkeypatch.setattr(compiling, "SOURCE", source)
    monkeypatch.setattr(compiling, "processor", lambda: "x86_64 avx avx9000")
    try:
        compiling.compile_kernel(tmp_path / "other.so")
    except compiling.NoCompiler as reason:
        pytest.skip(str(reason))
    kernel, why_not = load_kernel.__wrapped__(tmp_path / "other.so")
    assert kernel is None
    assert "avx9000" in why_not


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
        (folder / "libkernel.so").write_text("a kernel")
        return folder / "libkernel.so"

    installed("bare", "", with_sources=False)
    installed("other", "// another step")
    own = tmp_path / "copy" / "libkernel.so"
    monkeypatch.setattr(compiling, "LIBRARY", own)
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("nowhere", "bare", "other", "same")])
    assert compiling.find_library() == own  # none fits
    same = installed("same", "")
    assert compiling.find_library() == same
    own.parent.mkdir()
    own.write_text("its own")
    assert compiling.find_library() == own
