"""Compilation of the kernel (the compiled trainer) to one shared library.

The library has code for AVX2 and AVX-512 on x86-64, and for NEON on 64-bit ARM. This file imports only the standard
library, so that it also works during the installation of fl-sim.
"""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / f"libkernel-{platform.machine()}.so"
SOURCES = FOLDER / "kernel.cpp", FOLDER / "gan.cpp", FOLDER / "image_gan.cpp"

SOURCES_DIGEST = "f0ab132de293b882f1108b904c381fdd"
"""The result of ``sources_digest`` for the C++ sources of this version.

A copy of fl-sim without C++ sources uses this digest to find a kernel of the same version.
"""

COMPILE_SECONDS = 300.0
"""The time limit of one call of the compiler, in seconds; about 10 s were measured on one core."""

WIDTHS = {4: ("asimd",), 8: ("avx2", "fma"), 16: ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl")}
"""The processor features for each width: {width: features}. A width is the number of float32 numbers in a vector.

The C++ code of the trainer is compiled once for each width, with the features of this width and no others. So every
machine compiles the same library, and ``lanes_of`` chooses the width at run time. Vectors that are wider than the
processor's registers are slow. For example, 512-bit vectors on a 256-bit processor took 12 times as long, longer than
PyTorch. The code for narrow vectors is linked first. The reason: several widths may contain the same template function
of the C++ standard library, and the linker keeps only the first copy. Every processor can run the narrow copy.
"""

ARCHITECTURES = {"x86_64": (8, 16), "aarch64": (4,)}
"""The ``WIDTHS`` that the library contains for each architecture, the narrowest first."""

BFLOAT16, BFLOAT16_OPTIONS = "avx512_bf16", ("-mavx512bf16", "-DFL_SIM_BFLOAT16")
"""The processor feature and compiler options of a second build for width 16, with products of bfloat16 numbers."""

AMX, AMX_OPTIONS = "amx_bf16", ("-mamx-tile", "-mamx-bf16", "-DFL_SIM_AMX")
"""The processor feature and compiler options of a third build for width 16, with bfloat16 products by AMX.

AMX is the name of the matrix instructions of Intel processors. With an older compiler, which does not support the
options, this build is left out.
"""


class NoCompiler(Exception):  # noqa: N818 (the reason why there is no kernel, not a fault)
    """The compiled trainer cannot be compiled. The message gives the reason, such as a missing compiler."""


def compile_kernel(library: Path = LIBRARY, options: Sequence[str] = (), architecture: str | None = None) -> None:
    """Compile the trainer's C++ code for all vector widths of an architecture, and write ``library`` atomically.

    The environment variable ``CXX`` names the compiler, with options if needed; the default is g++, c++ or clang++.
    ``options``: more compiler options. ``architecture``: the target of the compilation, a key of ``ARCHITECTURES``;
    None means this machine's architecture. The same sources and compiler give the same library, byte for byte, in every
    folder. Raises NoCompiler if the compilation fails.
    """
    architecture = architecture or platform.machine()
    if architecture not in ARCHITECTURES:
        raise NoCompiler(
            f"its code is for {' and '.join(ARCHITECTURES)}, but this machine's architecture is "
            f"{architecture or 'unknown'}"
        )
    compiler = [*_compiler(), *options]
    partial = library.with_name(f".{library.name}.{os.getpid()}.part")
    with tempfile.TemporaryDirectory(prefix="fl-sim-kernel-") as folder, ThreadPoolExecutor() as threads:
        objects = [
            (source, _options(lanes), Path(folder) / f"{source.stem}{lanes}.o")
            for lanes in ARCHITECTURES[architecture]
            for source in SOURCES
        ]
        if architecture == "x86_64":
            halves = [*_options(16), *BFLOAT16_OPTIONS]
            objects.append((SOURCES[0], halves, Path(folder) / "bfloat16.o"))
            if _knows(compiler, AMX_OPTIONS):
                objects.append((SOURCES[0], [*halves, *AMX_OPTIONS], Path(folder) / "amx.o"))
        try:
            for made in [threads.submit(_compile, compiler, *one) for one in objects]:
                made.result()
            exported = Path(folder) / "exported"
            exported.write_text("{ global: fl_sim_*; local: *; };")  # exports the names with the prefix fl_sim_
            link = [f"-Wl,--version-script={exported}", "-shared", "-s", *(str(made) for *_, made in objects)]
            _call([*compiler, *link, "-o", str(partial)])
            partial.replace(library)
        except OSError as error:
            raise NoCompiler(f"{library} cannot be written: {error}") from error
        finally:
            partial.unlink(missing_ok=True)


def compile_plain(source: Path, library: Path, lanes: int, options: Sequence[str] = ()) -> None:
    """Compile one source file to ``library``, with SIMD vectors of ``lanes`` numbers. Raises NoCompiler on failure."""
    flags = ["-O3", *_options(lanes), *options, "-std=c++17", "-fPIC", "-shared"]
    _call([*_compiler(), *flags, str(source), "-o", str(library)])


def _compile(compiler: Sequence[str], source: Path, options: Sequence[str], to: Path) -> None:
    _call([
        *compiler, "-O3", "-fno-math-errno", *options, "-std=c++17", "-fPIC",
        f'-DFL_SIM_SOURCES="{sources_digest()}"', "-c", str(source), "-o", str(to),
    ])  # fmt: skip


def _knows(compiler: Sequence[str], options: Sequence[str]) -> bool:
    """Return True if the command ``compiler`` supports the command-line options ``options``.

    Old compilers lack the options for new processors.
    """
    try:
        _call([*compiler, *options, "-fsyntax-only", "-x", "c++", os.devnull])
    except NoCompiler:
        return False
    return True


def _options(lanes: int) -> list[str]:
    # Every 64-bit ARM processor has asimd, so the compiler needs no option for asimd.
    return [f"-m{feature}" for feature in WIDTHS[lanes] if feature != "asimd"]


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603 (the user's own compiler)
            command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]} failed: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        reason = [line for line in lines if "error" in line] or lines or ["it printed no message"]
        raise NoCompiler(f"{command[0]} failed: {reason[0][:300]}")


def find_library() -> Path:
    """Return the path of the library with the compiled trainer.

    The library is next to this file, or in another copy of fl-sim on the import path. The second case is for Flower's
    engine: it executes clients from a copy of fl-sim that has no library. The library of the installed fl-sim is then
    used, if it was compiled from the sources of this version. If no library exists, the result is the path next to this
    file.
    """
    if LIBRARY.exists():
        return LIBRARY
    for entry in sys.path:
        folder = Path(entry or ".").absolute() / "fl_sim" / "native"
        if (folder / LIBRARY.name).is_file() and sources_digest(folder) == SOURCES_DIGEST:
            return folder / LIBRARY.name
    return LIBRARY


def sources_digest(folder: Path = FOLDER) -> str:
    """Return a digest of the trainer's C++ sources in ``folder``: of their names and contents.

    By this digest fl-sim recognises a library that was compiled from other sources.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def processor() -> frozenset[str]:
    """Return this machine's architecture and its processor's features; an empty set if they are unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset() if found is None else frozenset({platform.machine(), *found[1].split()})


def lanes_of(features: frozenset[str]) -> int:
    """Return the largest vector width in ``WIDTHS`` that a processor with ``features`` supports; 0 if there is none.

    The unit is float32 numbers per vector.
    """
    return max((lanes for lanes, needed in WIDTHS.items() if features.issuperset(needed)), default=0)


def missing_in(features: frozenset[str]) -> str:
    """Return the processor features that the compiled trainer needs at least, but that this processor lacks.

    The result is a text with commas, empty if no feature is missing. ``features``: the result of ``processor``.
    """
    narrowest = min((ARCHITECTURES[name][0] for name in features.intersection(ARCHITECTURES)), default=8)
    return ", ".join(sorted(set(WIDTHS[narrowest]) - features))


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        return asked
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise NoCompiler("no C++ compiler (g++, c++ or clang++) was found")


def main() -> int:
    """Compile the C++ code of the trainer in this folder and print the result.

    Return the exit code: 0 for success, else 1.
    """
    try:
        compile_kernel()
    except NoCompiler as reason:
        sys.stderr.write(f"fl-sim: the native trainer was not built: {reason}; PyTorch will train instead\n")
        return 1
    sys.stderr.write(f"fl-sim: the native trainer was built: {LIBRARY}\n")
    if missing := missing_in(processor()):
        sys.stderr.write(f"fl-sim: this processor has no {missing}: on it PyTorch will train instead\n")
    if (found := sources_digest()) != SOURCES_DIGEST:
        sys.stderr.write(
            f"fl-sim: the sources have changed, so this trainer will not be used: set SOURCES_DIGEST to {found}\n"
        )
    return 0
