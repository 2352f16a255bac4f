"""A library for another processor, called as if it were this one's: an emulator runs its calls on copies of memory.

What a call may read and write is not known, so what lies behind every pointer is copied, and more of it where a call
goes beyond: until it ends well, nothing is written back.
"""

import atexit
import ctypes
import mmap
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

_REACHES = 1 << 20, 1 << 25, 1 << 25  # bytes behind a pointer; a busy machine ends the emulator now and then
_PAGE = mmap.PAGESIZE
_GAP = 1 << 22  # bytes behind each range of memory that a call must not touch
_NUMBERS, _REALS, _TEXT = 12, 8, 256


class _Call(ctypes.Structure):
    """``Call`` of call_on_arm.cpp."""

    _fields_ = (
        ("numbers", ctypes.c_int64 * _NUMBERS), ("reals", ctypes.c_double * _REALS), ("pointers", ctypes.c_int64),
        ("gaps", ctypes.c_int64), ("gap", ctypes.c_int64),
        ("returned", ctypes.c_int64), ("returns_text", ctypes.c_int64), ("text", ctypes.c_char * _TEXT),
    )  # fmt: skip


def cross_compiler() -> str | None:
    """Return the compiler for 64-bit ARM, where there is one."""
    return shutil.which("aarch64-linux-gnu-g++")


def emulator() -> str | None:
    """Return the emulator of 64-bit ARM, where there is one."""
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


class EmulatedLibrary:
    """In place of ``ctypes.CDLL``."""

    def __init__(self, library: Path, folder: Path) -> None:
        compiler, found = cross_compiler(), emulator()
        assert compiler is not None
        assert found is not None
        self._name, caller = str(library), folder / "call_on_arm"
        source = Path(__file__).with_name("call_on_arm.cpp")
        subprocess.run([compiler, "-O1", "-static-libgcc", str(source), "-o", str(caller), "-ldl"], check=True)
        self._command = [found, "-L", "/usr/aarch64-linux-gnu", str(caller), str(library)]
        self._running: subprocess.Popen[str] | None = None
        self._one_call_at_a_time = threading.Lock()
        atexit.register(self._end)

    def __getattr__(self, name: str) -> "_Function":
        if not name.startswith("fl_sim_"):
            raise AttributeError(name)
        return _Function(self, name)

    def run(self, name: str, file: str) -> str:
        """Call the function ``name`` on the memory in ``file``; return "0", or why there was no call or no end of it.

        The emulator stays for the next call, unless the function ended it.
        """
        with self._one_call_at_a_time:
            if self._running is None:
                self._running = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            assert self._running.stdin is not None
            assert self._running.stdout is not None
            with suppress(BrokenPipeError):  # it has ended since the last call: no answer comes
                self._running.stdin.write(f"{name} {file}\n")
                self._running.stdin.flush()
            answer = self._running.stdout.readline().strip()
            return answer if answer == "0" else f"{answer} {self._end()}"

    def _end(self) -> str:
        """End the emulator, and return what it says then."""
        running, self._running = self._running, None
        if running is None:
            return ""
        said, _ = running.communicate()
        return f"{said} (exit code {running.returncode})"


class _Function:
    restype: Any = ctypes.c_int

    def __init__(self, library: EmulatedLibrary, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *arguments: Any) -> Any:
        for reach in _REACHES:
            failed, found = self._run(arguments, reach)
            if not failed:
                return found
        raise RuntimeError(f"{self._name} in the emulator: {failed}")

    def _run(self, arguments: tuple[Any, ...], reach: int) -> tuple[str, Any]:
        """Return "" and what the function returned, or why it did not, and None."""
        memory, call, numbers, reals = _Memory(reach), _Call(), [], []
        for argument in arguments:
            if isinstance(argument, ctypes.c_double):
                reals.append(argument.value)
            elif isinstance(argument, ctypes.c_int64):
                numbers.append((argument.value, False))
            else:
                address = memory.enter(argument)
                numbers.append((address, address != 0))
        call.reals[: len(reals)] = reals
        call.returns_text = self.restype is ctypes.c_char_p
        with tempfile.NamedTemporaryFile() as file:
            memory.write(file, call, numbers)
            answer = self._library.run(self._name, file.name)
            if answer != "0":
                return answer, None
            after = memory.take_back(file)
        return "", after.text if call.returns_text else ctypes.c_int(after.returned).value


class _Memory:
    """What one call sees: ranges of this process's memory, and where pointers lie in them."""

    def __init__(self, reach: int) -> None:
        self._reach = reach
        self._wanted: list[tuple[int, int]] = []  # from one address to another
        self._pointers: list[int] = []  # addresses of pointers

    def enter(self, argument: Any) -> int:
        """Take what an argument points to, and all that this points to; return the address, 0 for none."""
        if isinstance(argument, ctypes.c_void_p):
            return self._enter_address(argument.value)
        target = getattr(argument, "_obj", argument)  # of byref, or an array
        for one in target if isinstance(target, ctypes.Array) else [target]:
            if isinstance(one, ctypes.Structure):
                self._enter_structure(one)
        address = ctypes.addressof(target)
        self._wanted.append((address, address + ctypes.sizeof(target)))
        if isinstance(target, ctypes.Array) and target._type_ is ctypes.c_void_p:
            for index, pointer in enumerate(target):
                self._enter_address(pointer)
                self._pointers.append(address + index * ctypes.sizeof(ctypes.c_void_p))
        return address

    def _enter_structure(self, structure: ctypes.Structure) -> None:
        for name, kind, *_ in structure._fields_:
            value, place = getattr(structure, name), ctypes.addressof(structure) + getattr(type(structure), name).offset
            if kind is ctypes.c_void_p and value:
                self._enter_address(value)
                self._pointers.append(place)
            elif isinstance(value, ctypes._Pointer):
                self.enter((value._type_ * getattr(structure, f"num_{name}")).from_address(_address(value)))
                self._pointers.append(place)
            elif isinstance(value, ctypes.Structure):
                self._enter_structure(value)

    def _enter_address(self, address: int | None) -> int:
        if address:
            self._wanted.append((address, address + self._reach))
        return address or 0

    def write(self, file: Any, call: _Call, numbers: list[tuple[int, bool]]) -> None:
        """Write the call and a copy of the memory."""
        self._ranges = list(_readable(self._wanted))
        place = -(-(ctypes.sizeof(call) + 8 * (len(self._pointers) + _NUMBERS + len(self._ranges))) // _PAGE) * _PAGE
        self._places, gaps = [], []
        for start, end in self._ranges:
            self._places.append(place + start % _PAGE)  # numbers keep the alignment that they have
            gaps.append(-(-(place + start % _PAGE + end - start) // _PAGE) * _PAGE)
            place = gaps[-1] + _GAP
        moved = [self._place(address) for address in self._pointers]
        self._before = [bytearray(ctypes.string_at(start, end - start)) for start, end in self._ranges]
        file.truncate(place)
        with mmap.mmap(file.fileno(), place) as content:
            for at, before in zip(self._places, self._before, strict=True):
                content[at : at + len(before)] = bytes(before)
            for address, at in zip(self._pointers, moved, strict=True):
                target = ctypes.c_int64.from_address(address).value
                content[at : at + 8] = self._place(target).to_bytes(8, "little")
            first = ctypes.sizeof(call)
            arguments = [  # pointers among the arguments are pointers in the file, too
                (number, _Call.numbers.offset + 8 * index) for index, (number, points) in enumerate(numbers) if points
            ]
            places = [*moved, *(at for _, at in arguments)]
            call.pointers, call.gaps, call.gap = len(places), len(gaps), _GAP
            call.numbers[: len(numbers)] = [self._place(number) if points else number for number, points in numbers]
            content[:first] = bytes(call)
            content[first : first + 8 * (len(places) + len(gaps))] = np.array([*places, *gaps], np.int64).tobytes()
        self._moved = moved

    def take_back(self, file: Any) -> _Call:
        """Write to this process's memory what the call has changed."""
        with mmap.mmap(file.fileno(), 0) as content:
            call = _Call.from_buffer_copy(content)
            for address, at in zip(self._pointers, self._moved, strict=True):
                content[at : at + 8] = ctypes.string_at(address, 8)
            for (start, _), at, before in zip(self._ranges, self._places, self._before, strict=True):
                after = np.frombuffer(content[at : at + len(before)], np.uint8)
                changed = np.flatnonzero(after != np.frombuffer(before, np.uint8))
                for run in np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1):
                    if len(run):
                        part = after[run[0] : run[-1] + 1].tobytes()
                        ctypes.memmove(start + int(run[0]), part, len(part))
        return call

    def _place(self, address: int) -> int:
        for (start, end), place in zip(self._ranges, self._places, strict=True):
            if start <= address < end:
                return place + address - start
        raise AssertionError(f"{address:#x} is not among what was taken")


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _readable(wanted: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what is wanted, ranges that touch as one, without what is no memory of this process's."""
    mapped: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        addresses, modes, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if modes.startswith("r"):
            mapped = (
                [*mapped[:-1], (mapped[-1][0], end)] if mapped and mapped[-1][1] == start else [*mapped, (start, end)]
            )
    merged: list[tuple[int, int]] = []
    for start, wished in sorted(wanted):
        end = min(wished, next(last for first, last in mapped if first <= start < last))
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    yield from merged
