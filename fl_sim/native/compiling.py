"""Compile the kernel: for x86-64 as one library for AVX2 and AVX-512, for 64-bit ARM as one for NEON.

Needs nothing but Python, so that an installation can use it.
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
SOURCES = FOLDER / "kernel.cpp", FOLDER / "gan.cpp"

SOURCES_DIGEST = "8580eb8535df686e508ba1534af4f9e6"
"""The ``sources_digest`` of this version: a copy of the program without sources knows its kernel by it."""

COMPILE_SECONDS = 300.0
"""How long a compiler may take (10 s measured, with a core for each of the two widths)."""

WIDTHS = {4: ("asimd",), 8: ("avx2", "fma"), 16: ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl")}
"""The kernel is compiled once for each width, in numbers a vector: with these features of the processor and no others.

A library so compiled is the same whichever machine compiles it, and ``lanes_of`` chooses the width where it runs. Wider
vectors than the processor has are slow: 512 bits made of twice 256 took 12 times as long, more than PyTorch. The
narrow one is linked first: of the standard library's templates that both hold, the linker keeps the first, which
every processor that is fit for either can run.
"""

ARCHITECTURES = {"x86_64": (8, 16), "aarch64": (4,)}
"""The ``WIDTHS`` in the library for an architecture, the narrowest first."""

BFLOAT16, BFLOAT16_OPTIONS = "avx512_bf16", ("-mavx512bf16", "-DFL_SIM_BFLOAT16")
"""The trainer is compiled once more, for vectors of 16 on processors with this feature: with products of bfloat16."""

AMX, AMX_OPTIONS = "amx_bf16", ("-mamx-tile", "-mamx-bf16", "-DFL_SIM_AMX")
"""And once more for processors with this one too, by compilers that know it: with such products by AMX."""


class NoCompiler(Exception):  # noqa: N818 (the reason why there is no kernel, not a fault)
    """There is no compiler, or it failed; the message says which."""


def compile_kernel(library: Path = LIBRARY, options: Sequence[str] = (), architecture: str | None = None) -> None:
    """Compile the kernel for all widths of an architecture into ``library``, at once or not at all. Raises NoCompiler.

    ``$CXX`` names the compiler, with options if need be; else g++, c++ or clang++. ``options``: more of them.
    ``architecture``: of ``ARCHITECTURES``, what the compiler makes code for; None: this machine's. The same compiler
    makes the same bytes of the same sources, wherever they lie.
    """
    architecture = architecture or platform.machine()
    if architecture not in ARCHITECTURES:
        raise NoCompiler(f"it is for {' and '.join(ARCHITECTURES)}, and this machine is {architecture or 'unknown'}")
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
            exported.write_text("{ global: fl_sim_*; local: *; };")  # all else is between this library and itself
            link = [f"-Wl,--version-script={exported}", "-shared", "-s", *(str(made) for *_, made in objects)]
            _call([*compiler, *link, "-o", str(partial)])
            partial.replace(library)
        except OSError as error:
            raise NoCompiler(f"{library} cannot be written: {error}") from error
        finally:
            partial.unlink(missing_ok=True)


def compile_plain(source: Path, library: Path, lanes: int, options: Sequence[str] = ()) -> None:
    """Compile one file by itself into ``library``, for vectors of ``lanes`` numbers. Raises NoCompiler."""
    flags = ["-O3", *_options(lanes), *options, "-std=c++17", "-fPIC", "-shared"]
    _call([*_compiler(), *flags, str(source), "-o", str(library)])


def _compile(compiler: Sequence[str], source: Path, options: Sequence[str], to: Path) -> None:
    _call([
        *compiler, "-O3", "-fno-math-errno", *options, "-std=c++17", "-fPIC",
        f'-DFL_SIM_SOURCES="{sources_digest()}"', "-c", str(source), "-o", str(to),
    ])  # fmt: skip


def _knows(compiler: Sequence[str], options: Sequence[str]) -> bool:
    """Return True if a compiler takes these options, as older ones do not."""
    try:
        _call([*compiler, *options, "-fsyntax-only", "-x", "c++", os.devnull])
    except NoCompiler:
        return False
    return True


def _options(lanes: int) -> list[str]:
    return [f"-m{feature}" for feature in WIDTHS[lanes] if feature != "asimd"]  # which every 64-bit ARM has


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603 (the user's own compiler)
            command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]} failed: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        reason = [line for line in lines if "error" in line] or lines or ["it said nothing"]
        raise NoCompiler(f"{command[0]} failed: {reason[0][:300]}")


def find_library() -> Path:
    """Return the path of the kernel: beside this file, or in another copy of fl-sim on the import path.

    Flower runs the app from a copy that holds neither the kernel nor its sources; there, that of the fl-sim that is
    installed serves, if it is made of the very same sources. Where there is none, returns where it would lie.
    """
    if LIBRARY.exists():
        return LIBRARY
    for entry in sys.path:
        folder = Path(entry or ".").absolute() / "fl_sim" / "native"
        if (folder / LIBRARY.name).is_file() and sources_digest(folder) == SOURCES_DIGEST:
            return folder / LIBRARY.name
    return LIBRARY


def sources_digest(folder: Path = FOLDER) -> str:
    """Return a digest of the kernel's C++ sources in ``folder``, by their names and contents."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def processor() -> frozenset[str]:
    """Return this machine's architecture and its processor's features; none where they cannot be told."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset() if found is None else frozenset({platform.machine(), *found[1].split()})


def lanes_of(features: frozenset[str]) -> int:
    """Return the widest of ``WIDTHS`` for which a processor has all the features; 0 where it has none."""
    return max((lanes for lanes, needed in WIDTHS.items() if features.issuperset(needed)), default=0)


def missing_in(features: frozenset[str]) -> str:
    """Return the features that even the narrowest vectors of its architecture miss, in words."""
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
    """Compile the kernel where it lies."""
    try:
        compile_kernel()
    except NoCompiler as reason:
        sys.stderr.write(f"fl-sim: the native trainer was not built: {reason}; PyTorch will train instead\n")
        return 1
    sys.stderr.write(f"fl-sim: the native trainer was built: {LIBRARY}\n")
    if missing := missing_in(processor()):
        sys.stderr.write(f"fl-sim: this processor has no {missing}: on it PyTorch will train instead\n")
    if (found := sources_digest()) != SOURCES_DIGEST:
        sys.stderr.write(f"fl-sim: its sources have changed, so nobody takes it: set SOURCES_DIGEST to {found}\n")
    return 0
