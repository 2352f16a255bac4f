"""Compile the kernel for this machine's processor. Needs nothing but Python, so that an installation can use it."""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "libkernel.so"
SOURCE = FOLDER / "kernel.cpp"

SOURCES_DIGEST = "57882d93db8f411fda64384727f4c64c"
"""What ``sources_digest`` says of this version: a copy of the program that has no sources knows its kernel by it."""

COMPILE_SECONDS = 300.0
"""How long a compiler may take (9 s measured)."""

NEEDED = frozenset({"avx2", "fma"})
"""The kernel's vectors are 512 bits wide with AVX-512, else 256: see vectors.h.

Wider ones than the processor has are slow: 512 bits made of twice 256 took 12 times as long, more than PyTorch.
"""


class NoCompiler(Exception):  # noqa: N818 (the reason why there is no kernel, not a fault)
    """There is no compiler, or it failed; the message says which."""


def compile_kernel(library: Path = LIBRARY, options: Sequence[str] = ()) -> None:
    """Compile the kernel into ``library``, at once or not at all. Raises NoCompiler.

    ``$CXX`` names the compiler, with options if need be; else g++, c++ or clang++. ``options``: more of them.
    """
    partial = library.with_name(f".{library.name}.{os.getpid()}.part")
    flags = processor()
    tuned = ["-march=native"] if flags else []
    command = [
        *_compiler(), "-O3", "-fno-math-errno", *tuned, *options, "-std=c++17", "-fPIC", "-shared",
        f'-DFL_SIM_PROCESSOR="{flags}"',
        f'-DFL_SIM_SOURCES="{sources_digest()}"', str(SOURCE), "-o", str(partial),
    ]  # fmt: skip
    try:
        done = subprocess.run(  # noqa: S603 (the user's own compiler)
            command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
        if done.returncode:
            raise NoCompiler(f"{command[0]} failed: {_error_in(done.stderr)}")
        partial.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]} failed: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def find_library() -> Path:
    """Return where the kernel lies: beside this file, or in another copy of fl-sim on the import path.

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


def processor() -> str:
    """Return this machine's architecture and vector features as one line; empty where they cannot be told."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    if found is None:
        return ""
    wanted = re.compile(
        r"avx|sse|ssse|fma|bmi|f16c|abm|adx|aes|gfni|movbe|popcnt|sha|pclmul|vpclmul|vaes|xsave|asimd|sve"
    )
    return " ".join([platform.machine(), *sorted(flag for flag in found[1].split() if wanted.match(flag))])


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        return asked
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise NoCompiler("no C++ compiler (g++, c++ or clang++) was found")


def _error_in(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["it said nothing"]
    return lines[0][:300]


def main() -> int:
    """Compile the kernel where it lies, unless it would not be used."""
    try:
        if missing := NEEDED - set(processor().split()):
            raise NoCompiler(f"this processor has no {', '.join(sorted(missing))}")  # noqa: TRY301 (as a compiler's failure)
        compile_kernel()
    except NoCompiler as reason:
        sys.stderr.write(f"fl-sim: the native trainer was not built: {reason}; PyTorch will train instead\n")
        return 1
    sys.stderr.write(f"fl-sim: the native trainer was built: {LIBRARY}\n")
    if (found := sources_digest()) != SOURCES_DIGEST:
        sys.stderr.write(f"fl-sim: its sources have changed, so nobody takes it: set SOURCES_DIGEST to {found}\n")
    return 0
