"""Names of data sets: public sets with their published facts, and the user's own, ``KIND:PLACE`` and settings.

The published facts of a public set are its files in torchvision's layout, its sizes and its constants. The name of the
user's own records contains the settings with which they are read: ``csv:patients.csv:label=outcome:client=hospital`` in
one line. In a file of settings it may be the table ``{kind = "csv", place = "patients.csv", label = "outcome", client =
"hospital"}``, which is stored as that line. Thus the name alone defines a data set.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import unquote

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.types import FINER, records_of

Layout: TypeAlias = Literal["embedded", "idx", "cifar", "mat", "uci", "npz", "own"]

DIGITS = "digits"

OwnKind: TypeAlias = Literal["csv", "parquet", "npz", "folder", "leaf", "medmnist", "hf"]

_TEST: Final = ("test", "test_seed")
_TABLE: Final = (
    "label", "classes", "client", "split", *_TEST, "test_file", "drop", "text", "range", "category", "fill",
    "scale", "missing",
)  # fmt: skip

_HF: Final = ("image", "size", "values", "config", "train_part", "test_part")

OPTIONS: Final[Mapping[OwnKind, tuple[str, ...]]] = {
    "csv": (*_TABLE, "delimiter", "decimal", "thousands"),
    "parquet": _TABLE,
    "npz": ("classes", "values"),
    "folder": ("classes", "size", "values", *_TEST),
    "leaf": ("classes", "alphabet"),
    "medmnist": ("classes", "val"),
    "hf": (*(key for key in _TABLE if key != "test_file"), *_HF),
}
"""{kind of data: the names of its settings}"""

PLACES: Final[Mapping[OwnKind, str]] = {"folder": "folder", "leaf": "folder", "hf": "data set"}
"""{kind of data: the noun for its location in messages}, for kinds whose location is not a file"""

OWN: Final = ", ".join(f"{kind}:PATH" for kind in OPTIONS)
"""The forms of names of the user's own data, for messages."""

_LISTS: Final = frozenset({"classes", "drop", "text"})
_TABLES: Final[Mapping[str, str]] = {"range": "..", "category": "+", "fill": ""}
"""{setting that is given per column: the separator of its values, empty if it has one value}"""

_NEXT: Final = re.compile(r":(?=[A-Za-z_]+(?:\.[^=:]*)?=)")

ABOUT: Final[Mapping[str, str]] = {
    "csv": "A table in a csv file, a row a record.",
    "parquet": "A table in a parquet file, a row a record.",
    "npz": "Arrays in an npz file: x_train, y_train, x_test, y_test.",
    "folder": "Images in folders: train/CLASS/*.png and test/CLASS/*.png.",
    "leaf": "LEAF's json files, in the folders train and test.",
    "medmnist": "MedMNIST's npz files.",
    "hf": "What Hugging Face's datasets reads: a folder, or a name on its hub.",
}
"""{kind of data: its description}"""

SETTINGS: Final[Mapping[str, tuple[str, str]]] = {
    "label": ("a column", "The column with the class, texts or whole numbers; left out: the one called label."),
    "classes": ("names, with + or , between", "The classes in order, or their number; left out: read off the records."),
    "client": ("a column", "The column with the client, for partition=natural; left out: client, if there is one."),
    "split": ("a column", "A column that says train or test; left out: the one called split, if any."),
    "test": ("number, above 0, below 1", "The share of records for testing, of every client's or class's if known."),
    "test_seed": ("whole number", "Which records are for testing; 0 where it is left out."),
    "test_file": ("text", "Another file with the same columns, all of which is for testing."),
    "drop": ("columns, with + or , between", "Columns to leave out."),
    "text": ("columns, with + or , between", "Columns of numbers that are names, such as postal codes."),
    "range": ("LEAST..MOST", "As data.range.COLUMN: the ends of its numbers, which become 0 and 1."),
    "category": ("names, with + between", "As data.category.COLUMN: the categories that count; others become zeros."),
    "scale": ("records", "Numbers without a range are scaled by mean and deviation of the training records."),
    "fill": ("a number, or a category", "As data.fill.COLUMN: the value of its empty cells."),
    "missing": ("drop or middle", "Empty cells: their records are left out, or they become the middle of data.range."),
    "delimiter": ("comma, semicolon, tab or bar", "The sign between cells of a csv file; left out: by its first line."),
    "decimal": ("point or comma", "The decimal sign of a csv file's numbers; point where it is left out."),
    "thousands": ("comma, point, space or apostrophe", "The sign between a csv file's thousands, if any."),
    "alphabet": ("text", "The characters of texts, in order, each once; left out: LEAF's 80."),
    "size": ("WIDTHxHEIGHT", "The size that images are scaled to; without it all must be of one size."),
    "values": ("LEAST..MOST", "Which values of images of 16 bits, or of floats, become 0 and 255."),
    "val": ("train", "The validation images are trained on, too; without this they are left out."),
    "image": ("a column", "The column of images, where there are several."),
    "config": ("text", "Which configuration, where a data set has several."),
    "train_part": ("text", "The part that is trained on; left out: train."),
    "test_part": ("text", "The part that is tested on; left out: test, where there is one."),
}  # fmt: skip
"""{setting: (form of its value, its meaning)}; users write a setting as ``data.SETTING``."""


@dataclass(frozen=True)
class KnownSet:
    """The public facts of a data set.

    ``files``: {path below the root: MD5 of the unpacked file, or None if torchvision has the MD5}. ``mean`` and
    ``std``: the published constants of the training images, one float per channel in units of 1. ``torchvision_class``:
    empty if torchvision cannot download the set. ``merged``: for a set with the records of a finer set, the class in
    this set of each class of the finer set.
    """

    name: str
    torchvision_class: str
    layout: Layout
    files: dict[str, str | None]
    num_classes: int
    shape: tuple[int, ...]
    num_train: int
    num_test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    merged: tuple[int, ...] = ()

    @property
    def finer(self) -> str:
        """The name of the data set with the same records and files, but more classes; empty for most data sets."""
        return FINER.get(self.name, "")

    @property
    def npz_names(self) -> tuple[str, ...]:
        """The accepted file names of an npz file with this data set; empty for tables of numbers."""
        if self.layout == "uci":
            return ()
        name = records_of(self.name)
        return tuple(dict.fromkeys((f"{name}.npz", f"{name.replace('-', '_')}.npz")))

    def in_torchvision(self) -> Any:
        """Return the class of this data set in torchvision."""
        from torchvision import datasets  # noqa: PLC0415 (seconds to import)

        return getattr(datasets, self.torchvision_class)


# torchvision publishes the MD5s of the idx files' .gz archives; these are those of what comes out of them.
_MNIST_FILES: dict[str, str | None] = {
    "MNIST/raw/train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "MNIST/raw/train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "MNIST/raw/t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "MNIST/raw/t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
_FASHION_MNIST_FILES: dict[str, str | None] = {
    "FashionMNIST/raw/train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "FashionMNIST/raw/train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "FashionMNIST/raw/t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "FashionMNIST/raw/t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
_CIFAR10_FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")

_CIFAR100 = KnownSet(
    "cifar100", "CIFAR100", "cifar", {f"cifar-100-python/{file}": None for file in ("train", "test", "meta")},
    num_classes=100, shape=(3, 32, 32), num_train=50_000, num_test=10_000,
    mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762),
)  # fmt: skip
# Krizhevsky 2009, section 3.1: five classes are a superclass, both in alphabetical order.
_SUPERCLASSES = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
    6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
    16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
    12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip

_ALL = (
    KnownSet(
        "mnist", "MNIST", "idx", _MNIST_FILES,
        num_classes=10, shape=(1, 28, 28), num_train=60_000, num_test=10_000, mean=(0.1307,), std=(0.3081,),
    ),
    KnownSet(
        "fashion-mnist", "FashionMNIST", "idx", _FASHION_MNIST_FILES,
        num_classes=10, shape=(1, 28, 28), num_train=60_000, num_test=10_000, mean=(0.2860,), std=(0.3530,),
    ),
    KnownSet(
        "cifar10", "CIFAR10", "cifar",
        {f"cifar-10-batches-py/{file}": None for file in (*_CIFAR10_FILES, "batches.meta")},
        num_classes=10, shape=(3, 32, 32), num_train=50_000, num_test=10_000,
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),
    ),
    _CIFAR100,
    replace(_CIFAR100, name="cifar100-coarse", num_classes=20, merged=_SUPERCLASSES),
    KnownSet(
        "svhn", "SVHN", "mat", {"train_32x32.mat": None, "test_32x32.mat": None},
        num_classes=10, shape=(3, 32, 32), num_train=73_257, num_test=26_032,
        mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970),
    ),
    KnownSet(
        "adult", "", "uci",
        {"uci/adult.data": "5d7c39d7b8804f071cdd1f2a7c460872", "uci/adult.test": "35238206dfdf7f1fe215bbb874adecdc"},
        num_classes=2, shape=(61,), num_train=32_561, num_test=16_281, mean=(0.0,), std=(1.0,),
    ),
    KnownSet(
        "diabetes", "", "uci", {"uci/diabetic_data.csv": "502f0cc004e4cf71536ec2e61596e42f"},
        num_classes=2, shape=(165,), num_train=81_275, num_test=20_491, mean=(0.0,), std=(1.0,),
    ),
)  # fmt: skip

_TUNED_ON = {
    "mnist": (
        "the defaults of PATE's teachers and students, those of DA-FL's generators, calibrate.clipping_norm, how "
        "features=whitened-scattering whitens, and the settings of the benchmarks"
    ),
    "fashion-mnist": (
        "the settings of the benchmark of Global DP on public features, and whether images that DA-FL's generator "
        "mean-embedding draws are warped"
    ),
    "cifar10": (
        "the radius of DA-FL's generator gaussian, how coarse DA-FL's generator mean-embedding takes colours to be, "
        "and how features=whitened-scattering whitens"
    ),
    DIGITS: (
        "how many synthetic records the preset digits asks clients for, and the learning rates, momenta and further "
        "settings of its methods"
    ),
}

KNOWN: dict[str, KnownSet] = {known.name: known for known in _ALL}
NAMES: tuple[str, ...] = (DIGITS, *KNOWN)
"""The names of public data sets that ``load`` accepts, besides names of the user's own files (``own_name``)."""


OTHER_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("fmnist", "fashion", "fashionmnist"), "fashion-mnist"),
    **dict.fromkeys(("femnist", "emnist", "shakespeare"), "leaf:FOLDER, with LEAF's json files"),
    **dict.fromkeys(("pathmnist", "bloodmnist", "dermamnist", "organamnist"), "medmnist:FILE"),
    **dict.fromkeys(("cifar", "cifar-10-batches-py"), "cifar10"),
}
"""{other name of a data set: its name in fl-sim}"""


def tuned_on(data: str) -> str:
    """Return a sentence on the settings that this project chose on the training records of ``data``; empty if none.

    An epsilon does not cover these choices: a choice is a release without a charge. The sentence begins with a space.
    """
    if (records := records_of(data)) not in _TUNED_ON:
        return ""
    return f" Choices made beforehand on these training records by this project: {_TUNED_ON[records]}."


@dataclass(frozen=True)
class OwnName:
    """A parsed name of the user's own data.

    ``options``: {setting: its values}. ``columns``: {setting that is given per column: {column: its values}}.
    """

    kind: OwnKind
    place: str
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def option(self, key: str) -> str:
        """Return the value of the setting ``key``; empty if it is not set."""
        return self.options[key][0] if key in self.options else ""

    def of_columns(self, key: str) -> Mapping[str, tuple[str, ...]]:
        """Return {column: values} of the per-column setting ``key``."""
        return self.columns.get(key, {})


def own_name(name: str) -> OwnName | None:
    """Return the parsed ``name``; None if it is not a name of the user's own files.

    Raises UserError for a setting that its kind of data does not have, or that is given twice.
    """
    head, _, rest = name.partition(":")
    kind = _kind(head)
    if not rest or kind is None:
        return None
    place, *settings = _NEXT.split(rest)
    options: dict[str, tuple[str, ...]] = {}
    columns: dict[str, dict[str, tuple[str, ...]]] = {}
    for setting in settings:
        written, _, value = setting.partition("=")
        key, dot, column = written.partition(".")
        _check_key(kind, key, is_of_column=bool(dot))
        group = columns.setdefault(key, {}) if dot else options
        if (where := unquote(column) if dot else key) in group:
            raise UserError(f"data {shortened(name)}: {written} is set twice; leave one of them out")
        between = _separator(key)
        group[where] = tuple(map(unquote, value.split(between))) if between else (unquote(value),)
    return OwnName(kind, place, options, columns)


def same_but_place(first: str, second: str) -> bool:
    """Return True if two names of the user's own files differ at most in the locations of the files."""
    names = [own_name(first), own_name(second)]
    return None not in names and len({_without_places(name) for name in names if name}) == 1


def _without_places(own: OwnName) -> str:
    options = {key: value for key, value in own.options.items() if key != "test_file"}
    columns = {key: sorted(of.items()) for key, of in sorted(own.columns.items())}
    return repr((own.kind, sorted(options.items()), "test_file" in own.options, columns))


def is_own(name: str) -> bool:
    """Return True if a data set is the user's own, not a public one."""
    return name not in NAMES


def as_table(name: str) -> dict[str, Any]:
    """Return ``name`` as a table of settings. Raises UserError for a data set without settings."""
    own = own_name(name)
    if own is None or not OPTIONS[own.kind]:
        having = ", ".join(f"{kind}:" for kind, options in OPTIONS.items() if options)
        raise UserError(f"data={shortened(name)} has no settings inside; the user's own data have some: {having}")
    options = {key: list(values) if key in _LISTS else values[0] for key, values in own.options.items()}
    columns = {
        key: {column: list(values) if _TABLES[key] else values[0] for column, values in of.items()}
        for key, of in own.columns.items()
    }
    return {"kind": own.kind, "place": own.place, **options, **columns}


def from_table(table: Mapping[str, Any]) -> str:
    """Return the name that a table of settings stands for. Raises UserError unless it is about the user's own files."""
    given, place = table.get("kind"), table.get("place")
    kind = _kind(given)
    if kind is None:
        raise UserError(
            f"data as a table is for the user's own files: kind is one of {', '.join(OPTIONS)}, got {given!r}"
            f"{guess(str(given), OPTIONS)}; or name a data set, for example data=digits"
        )
    if not isinstance(place, str) or not place:
        raise UserError(f'data of kind {kind} needs place, where its records lie, for example place = "my.{kind}"')
    parts = [f"{kind}:{place}"]
    for key, value in table.items():
        if key in {"kind", "place"}:
            continue
        _check_key(kind, key, is_of_column=isinstance(value, Mapping))
        if isinstance(value, Mapping):
            parts += [f"{key}.{_quoted(str(column))}={_text(key, values)}" for column, values in value.items()]
        else:
            parts.append(f"{key}={_text(key, value)}")
    return ":".join(parts)


def without_settings(name: str) -> str:
    """Return ``name`` without its settings: only kind and location."""
    own = own_name(name)
    return name if own is None else f"{own.kind}:{own.place}"


def short_label(name: str) -> str:
    """Return ``name`` for the heading of a table, with four characters of a hash in place of its settings."""
    place = without_settings(name)
    return name if place == name else f"{place} [{hashlib.sha256(name.encode()).hexdigest()[:4]}]"


def _kind(text: object) -> OwnKind | None:
    return next((kind for kind in OPTIONS if kind == text), None)


def _check_key(kind: OwnKind, key: str, *, is_of_column: bool) -> None:
    known = OPTIONS[kind]
    if key not in known:
        valid = f"valid: {', '.join(known)}" if known else f"{kind} data have none"
        raise UserError(f"unknown setting data.{shortened(key)} of {kind} data{guess(key, known)}; {valid}")
    if is_of_column != (key in _TABLES):
        example = {"range": "age=0..100", "category": "sex=female+male", "fill": "age=40"}.get(key, "")
        raise UserError(
            f"data.{key} is set for each column, for example data.{key}.{example}"
            if example
            else f"data.{key} is a single value, it has no settings inside"
        )


def _separator(key: str) -> str:
    return _TABLES.get(key, "+" if key in _LISTS else "")


def _text(key: str, value: Any) -> str:
    between = _separator(key)
    if isinstance(value, list | tuple):
        if not between:
            raise UserError(f"data.{key} is {value!r}: it takes one value (several labels a record are not supported)")
        return between.join(_quoted(str(part), between) for part in value)
    return str(value).replace(":", "%3A") if between else _quoted(str(value))


def _quoted(text: str, between: str = "") -> str:
    """Return ``text`` with each character that has a meaning in names replaced by %XX."""
    special = "%:=" + between.strip(".")
    return "".join(f"%{ord(letter):02X}" if letter in special or letter < " " else letter for letter in text)
