"""Data files damaged at random: each is loaded as a data set that can be, or refused in one line; nothing else happens.

    python benchmarks/fuzz_files.py [--cases 1000] [--seed 0]

Damages npz (plain and compressed), idx, folders of images, csv, parquet, LEAF's JSON and UCI's Adult table: bytes
flipped, cut, zeroed, doubled and swapped, headers that claim terabytes, pickled objects, archives that unpack to far
more than they are. Exits with 1 for a traceback, a refusal of several lines, a data set that breaks its own promises,
or one that takes long.
"""

import argparse
import io
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet
from PIL import Image

from fl_sim.data import npz, read
from fl_sim.data.naming import KNOWN, KnownSet
from fl_sim.data.places import look_for
from fl_sim.data.public_sets import read_idx, read_uci
from fl_sim.errors import UserError
from fl_sim.types import Dataset

MOST_SECONDS = 20.0
_CLAIMS = (
    b"(6, 5, 4, 3)",
    b"(9999999999999, 1)",
    b"(-6, -5, 4, 3)",
    b"(6, 5, 4, 3.0)",
    b"(((((((((((6,),)",
    b"(2**70,)",
)


def write_samples(folder: Path) -> dict[Path, Callable[[], Dataset]]:
    """Write one sound example of each format; return {file to damage: how the data set is read}."""
    generator = np.random.default_rng(0)
    images = {name: generator.integers(0, 256, (size, 5, 4, 3), np.uint8) for name, size in (("train", 6), ("test", 3))}
    arrays = {
        "x_train": images["train"], "y_train": np.arange(6) % 3, "x_test": images["test"], "y_test": np.arange(3),
        "mean": np.array([0.5]), "std": np.array([0.5]),
    }  # fmt: skip
    np.savez(folder / "plain.npz", **arrays)
    np.savez_compressed(folder / "packed.npz", **arrays)
    for split, pixels in images.items():
        for number, image in enumerate(pixels):
            path = folder / "images" / split / f"class{number % 3}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    mnist = KNOWN["mnist"]
    for file, shape in zip(mnist.files, ((4, 28, 28), (4,), (2, 28, 28), (2,)), strict=True):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        header = bytes((0, 0, 8, len(shape))) + b"".join(side.to_bytes(4, "big") for side in shape)
        path.write_bytes(header + bytes(generator.integers(0, 10, int(np.prod(shape)), np.uint8)))
    adult = KNOWN["adult"]
    row = (
        "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
        "United-States, "
    )
    for file in adult.files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(row + earned + "\n" for earned in ("<=50K", ">50K", "<=50K")), encoding="utf-8")
    found: dict[Path, Callable[[], Dataset]] = {
        folder / name: lambda name=name: _own(f"npz:{folder / name}") for name in ("plain.npz", "packed.npz")
    }
    for path in sorted((folder / "images").rglob("*.png"))[:3]:
        found[path] = lambda: _own(f"folder:{folder}/images")
    found |= {folder / file: lambda: _mnist(folder, mnist) for file in mnist.files}
    found |= {folder / file: lambda: read_uci(folder, adult) for file in adult.files}
    return found | _tables_and_leaf(folder)


def _tables_and_leaf(folder: Path) -> dict[Path, Callable[[], Dataset]]:
    columns = {"age": [39, 50, 38, 53] * 5, "job": ["clerk", "farmer"] * 10, "label": ["a", "b", "b", "a"] * 5}
    rows = zip(*columns.values(), strict=True)
    (folder / "t.csv").write_text("age,job,label\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet")
    users = {"users": ["a", "b"], "num_samples": [2, 1]}
    data = {"a": {"x": [[39, 1.5], [2, 0]], "y": [0, 1]}, "b": {"x": [[3, 4]], "y": [1]}}
    found: dict[Path, Callable[[], Dataset]] = {
        folder / f"t.{kind}": lambda kind=kind: _own(f"{kind}:{folder}/t.{kind}:test=0.3")
        for kind in ("csv", "parquet")
    }
    for part in ("train", "test"):
        (folder / "leaf" / part).mkdir(parents=True)
        (folder / "leaf" / part / "a.json").write_text(json.dumps({**users, "user_data": data}))
        found[folder / "leaf" / part / "a.json"] = lambda: _own(f"leaf:{folder}/leaf")
    return found


def _own(name: str) -> Dataset:
    source = look_for(name)
    assert source is not None
    return read(name, source)


def damaged(content: bytes, generator: random.Random) -> bytes:
    """Return ``content`` with one random damage."""
    at, length = generator.randrange(len(content)), generator.randint(1, 64)
    choices: tuple[Callable[[], bytes], ...] = (
        lambda: content[:at],
        lambda: content[:at] + bytes(generator.randrange(256) for _ in range(length)) + content[at + length :],
        lambda: content[:at] + bytes(length) + content[at + length :],
        lambda: content[:at] + content[at : at + length] * 2 + content[at + length :],
        lambda: content[:at] + content[at + length :],
        lambda: content + content[:at],
        lambda: content.replace(b"(6, 5, 4, 3)", generator.choice(_CLAIMS).ljust(12), 1),
        lambda: content.replace(b"|u1", generator.choice((b"|O ", b"<f8", b"|V9", b"<U9", b"<M8")), 1),
        lambda: content.replace(b"39,", generator.choice((b"nan,", b"1e400,", b"\0,", b"-5,", b"," * 50, b"'\n',")), 1),
        lambda: content.replace(b"39,", generator.choice((b"-NAN,", b'"3,9",', b"39%,", b"2**53,", b"=39,")), 2),
        lambda: content.replace(b'"b": {', b'"a": {', 1),  # a key that occurs twice
        lambda: b"",
        generator.choice((_bomb, _objects, _lie)),
    )
    return generator.choice(choices)()


def try_out(read: Callable[[], Dataset], outcomes: Counter[str]) -> str:
    """Read a damaged data set. Return the fault of the outcome in words, empty if there is none."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trouble = _broken_promise(read())
        outcomes["loaded"] += 1
    except UserError as refusal:
        outcomes["refused"] += 1
        trouble = f"a refusal of several lines: {str(refusal)!r}" if "\n" in str(refusal) else ""
    except Exception:  # noqa: BLE001 (that there is none is what is asked)
        outcomes["traceback"] += 1
        trouble = traceback.format_exc(limit=-2)
    seconds = time.perf_counter() - start
    return trouble or (f"it took {seconds:.0f} s" if seconds > MOST_SECONDS else "")


def fuzz(cases: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Damage files below ``folder`` ``cases`` times, one at a time; return the outcomes and what was wrong."""
    generator = random.Random(seed)  # noqa: S311 (nothing is secret here)
    samples, outcomes, trouble = write_samples(folder), Counter[str](), []
    for case in range(cases):
        path = generator.choice(list(samples))
        sound = path.read_bytes()
        path.write_bytes(damaged(sound, generator))
        if wrong := try_out(samples[path], outcomes):
            trouble.append(f"case {case}, {path.name}: {wrong}")
        path.write_bytes(sound)
    return outcomes, trouble


def main() -> None:
    """Fuzz, and print the counts."""
    parser = argparse.ArgumentParser(description="Fuzz the readers of data files.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, trouble = fuzz(arguments.cases, arguments.seed, Path(folder))
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    print("\n".join(trouble) or "no trouble")
    sys.exit(bool(trouble))


def _mnist(root: Path, known: KnownSet) -> Dataset:
    from fl_sim.data.dataset import known_dataset

    return known_dataset(known, *read_idx(root, known), str(root))


def _broken_promise(dataset: Dataset) -> str:
    for part in (dataset.train, dataset.test):
        if len(part) == 0 or len(part.inputs) != len(part.labels):
            return "records and labels do not match"
        if not 0 <= int(part.labels.min()) <= int(part.labels.max()) < dataset.num_classes:
            return "a label is outside of the classes"
        if part.inputs.dtype == np.float32 and not np.isfinite(part.inputs).all():
            return "a feature is not finite"
    return ""


def _archive(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in npz.REQUIRED:
            archive.writestr(f"{name}.npy", members.get(name, _npy(np.zeros((2, 3), np.float32))))
    return buffer.getvalue()


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


def _bomb() -> bytes:
    return _archive(x_train=_npy(np.zeros((2, 3), np.float32)) + bytes(50_000_000))


def _objects() -> bytes:
    return _archive(x_train=_npy(np.array([{"a": 1}, None], dtype=object)))


def _lie() -> bytes:
    return _archive(x_train=_npy(np.zeros((2, 3), np.float32)).replace(b"(2, 3), }        ", b"(2, 3000000000), }"))


if __name__ == "__main__":
    main()
