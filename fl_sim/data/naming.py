"""The names of data sets: public sets, such as ``cifar10``, and the user's own data, such as ``csv:patients.csv``.

For each public set, this module holds the published facts: files in torchvision's layout, sizes, mean and standard
deviation. The name of the user's own data contains the settings for reading the files, for example
``csv:patients.csv:label=outcome:client=hospital``. A settings file may write this name as a table, ``{kind = "csv",
place = "patients.csv", label = "outcome", client = "hospital"}``; ``from_table`` converts the table to the name. A
single string, the name, thus defines the data set of a run completely.
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

OwnKind: TypeAlias = Literal["csv", "parquet", "npz", "folder", "leaf", "medmnist", "hf", "domains"]

_TEST: Final = ("test", "test_seed")
_TABLE: Final = (
    "label", "classes", "client", "split", *_TEST, "test_file", "drop", "text", "range", "category", "fill",
    "scale", "missing", "tokenizer", "max_length", "alphabet",
)  # fmt: skip

_HF: Final = ("image", "size", "values", "config", "train_part", "test_part")

OPTIONS: Final[Mapping[OwnKind, tuple[str, ...]]] = {
    "csv": (*_TABLE, "delimiter", "decimal", "thousands"),
    "parquet": _TABLE,
    "npz": ("classes", "values"),
    "folder": ("classes", "domains", "size", "values", *_TEST),
    "leaf": ("classes", "alphabet"),
    "medmnist": ("classes", "val"),
    "hf": (*(key for key in _TABLE if key != "test_file"), *_HF),
    "domains": ("size", "records"),
}
"""{kind of the user's own data, such as csv: the names of its settings, such as label}"""

DOMAINS: Final = "domains"
"""The kind of a data set that joins several data sets (its parts), such as ``domains:mnist+digits``."""

PLACES: Final[Mapping[OwnKind, str]] = {"folder": "folder", "leaf": "folder", "hf": "data set", "domains": "data set"}
"""{kind of data: the word for its location in error messages}; "file" for all other kinds."""

OWN: Final = ", ".join(f"{kind}:{'A+B' if kind == DOMAINS else 'PATH'}" for kind in OPTIONS)
"""The valid forms of names of the user's own data, such as ``csv:PATH``, for error messages."""

_LISTS: Final = frozenset({"classes", "drop", "text"})
_TABLES: Final[Mapping[str, str]] = {"range": "..", "category": "+", "fill": ""}
"""{setting with a value per column: the separator if it has several values per column, else empty}"""

_NEXT: Final = re.compile(r":(?=[A-Za-z_]+(?:\.[^=:]*)?=)")

ABOUT: Final[Mapping[str, str]] = {
    "csv": "A table in a csv file; each row is a record.",
    "parquet": "A table in a parquet file; each row is a record.",
    "npz": "Arrays in an npz file: x_train, y_train, x_test, y_test.",
    "folder": "Images in folders: train/CLASS/*.png and test/CLASS/*.png.",
    "leaf": "LEAF's json files, in the folders train and test.",
    "medmnist": "MedMNIST's npz files.",
    "hf": "Data that Hugging Face's datasets library reads: a local folder, or a name on the Hugging Face hub.",
    "domains": "Several data sets of images, such as mnist+digits, joined as domains of one task.",
}
"""{kind of the user's own data, such as csv: its description in the settings reference}"""

SETTINGS: Final[Mapping[str, tuple[str, str]]] = {
    "label": ("a column", "The column with the class of a record, as text or whole number. Default: column label."),
    "classes": ("names, with + or , between", "The classes in order, or their number. Default: those in the records."),
    "domains": ("true or false", "True for folders PATH/DOMAIN/CLASS: each domain is a source of records."),
    "client": ("a column", "The column that names a record's client, for partition=natural. Default: column client."),
    "split": ("a column", "The column with train or test for each record. Default: column split, if there is one."),
    "test": ("number, above 0, below 1", "The share of records for testing, taken from each client or class if known."),
    "test_seed": ("whole number", "The seed of the random choice of the test records of data.test. Default: 0."),
    "test_file": ("text", "Another file with the same columns; all its records are for testing."),
    "drop": ("columns, with + or , between", "The columns that are not used."),
    "text": ("columns, with + or , between", "Columns whose numbers are only names, or the column of texts."),
    "range": ("LEAST..MOST", "Set as data.range.COLUMN: the bounds of the column's numbers, which become 0 and 1."),
    "category": ("names, with + between", "Set as data.category.COLUMN: the categories; other values become zeros."),
    "scale": ("records", "Numbers without a range are scaled by mean and deviation of the training records."),
    "fill": ("a number, or a category", "Set as data.fill.COLUMN: the value that replaces empty cells of the column."),
    "missing": ("drop or middle", "For empty cells: drop the record, or use the middle of the column's data.range."),
    "delimiter": ("comma, semicolon, tab or bar", "The delimiter of a csv file. Default: from its first line."),
    "decimal": ("point or comma", "The decimal separator of numbers in a csv file. Default: point."),
    "thousands": ("comma, point, space or apostrophe", "The thousands separator in a csv file. Default: none."),
    "tokenizer": ("characters, bytes or a place", "The tokens of texts; a place has tokenizer.json. Default: bytes."),
    "max_length": ("whole number", "Texts are cut after this number of tokens. Default: the longest, at most 256."),
    "alphabet": ("text", "The characters of texts, in order, each once. Default: LEAF's 80 characters."),
    "size": ("WIDTHxHEIGHT", "The size to which images are scaled. Default: none; for domains, the largest."),
    "records": ("whole number", "The number of training records of each domain. Default: as in the smallest."),
    "values": ("LEAST..MOST", "For images of 16-bit numbers or floats: the pixel values that become 0 and 255."),
    "val": ("leave, train or validate", "Validation images are unused, trained on, or for evaluate.validation=given."),
    "image": ("a column", "The column with the images, for data with several image columns."),
    "config": ("text", "The configuration of the data set, if there are several."),
    "train_part": ("text", "The name of the split with the training records. Default: train."),
    "test_part": ("text", "The name of the split with the test records. Default: test, if there is one."),
}  # fmt: skip
"""{setting: (form of its value, its meaning)} for the settings reference; users write a setting as ``data.SETTING``."""


@dataclass(frozen=True)
class KnownSet:
    """The published facts of a public data set.

    ``torchvision_class``: the class for this set in torchvision.datasets; empty if torchvision cannot download the set.
    ``layout``: the file format. ``files``: {path below the data folder: MD5 of the unpacked file, or None if
    torchvision has the MD5}. ``mean`` and ``std``: the published constants of the training images, one float per
    channel; pixel values are between 0 and 1. ``merged``: only for a set that merges classes of another set, as
    cifar100-coarse does with cifar100. Class c of the other set becomes class ``merged[c]`` of this set.
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
        """The name of the set with the same records but finer classes (cifar100 for cifar100-coarse); else ""."""
        return FINER.get(self.name, "")

    @property
    def npz_names(self) -> tuple[str, ...]:
        """The accepted names of an npz file with these images, such as cifar10.npz; empty for tables of numbers."""
        if self.layout == "uci":
            return ()
        name = records_of(self.name)
        return tuple(dict.fromkeys((f"{name}.npz", f"{name.replace('-', '_')}.npz")))

    def in_torchvision(self) -> Any:
        """Return the torchvision class of this data set, for example ``torchvision.datasets.CIFAR10``."""
        from torchvision import datasets  # noqa: PLC0415 (seconds to import)

        return getattr(datasets, self.torchvision_class)


# torchvision publishes the MD5s of the .gz archives; these are the MD5s of the unpacked files.
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
# Krizhevsky 2009, section 3.1: the superclass of each class. Classes and superclasses are in alphabetical order.
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
        "the settings of the benchmarks of Global DP and of DP-SGD on public features, and whether images that DA-FL's "
        "generator mean-embedding draws are warped"
    ),
    "cifar10": (
        "the radius of DA-FL's generator gaussian, the colour resolution of DA-FL's generator mean-embedding, "
        "how features=whitened-scattering whitens, the square roots of features=root-scattering-maps, the ridge and "
        "the intercept of heads in closed form, and the settings of the benchmark of DP-SGD on public features"
    ),
    DIGITS: (
        "the number of synthetic records per client in the preset digits, and the learning rates, momenta and further "
        "settings of its methods"
    ),
}

KNOWN: dict[str, KnownSet] = {known.name: known for known in _ALL}
NAMES: tuple[str, ...] = (DIGITS, *KNOWN)
"""The names of all public data sets. ``load`` also accepts names of the user's own data (``own_name``)."""


OTHER_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("fmnist", "fashion", "fashionmnist"), "fashion-mnist"),
    **dict.fromkeys(("femnist", "emnist", "shakespeare"), "leaf:FOLDER, with LEAF's json files"),
    **dict.fromkeys(("pathmnist", "bloodmnist", "dermamnist", "organamnist"), "medmnist:FILE"),
    **dict.fromkeys(("cifar", "cifar-10-batches-py"), "cifar10"),
}
"""{name of a data set in other projects: its name in fl-sim}, for hints in error messages."""


def tuned_on(data: str) -> str:
    """Return a sentence about fl-sim's defaults that were chosen with training records of the data set ``data``.

    The sentence begins with a space, and is added to privacy statements. A default that was chosen with records reveals
    information about these records, and no epsilon covers this information. The result is empty if no default was
    chosen on these records. A joined data set has a sentence for each of its parts.
    """
    parts = parts_of(data)
    return "".join(
        f" Choices made beforehand on {'these training records' if len(parts) == 1 else f'training records of {part}'} "
        f"by this project: {_TUNED_ON[records]}."
        for part in parts
        if (records := records_of(part)) in _TUNED_ON
    )


@dataclass(frozen=True)
class OwnName:
    """A parsed name of the user's own data, such as ``csv:patients.csv:label=outcome:range.age=0..100``.

    ``kind``: the format; in this example "csv". ``place``: the path of a file or folder, or a name on Hugging Face's
    hub; in the example "patients.csv". ``options``: {setting: its values}; in the example {"label": ("outcome",)}.
    ``columns``: {setting with values per column: {column: its values}}; in the example {"range": {"age": ("0",
    "100")}}.
    """

    kind: OwnKind
    place: str
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def option(self, key: str) -> str:
        """Return the first value of the setting ``key``; empty if it is not set."""
        return self.options[key][0] if key in self.options else ""

    def of_columns(self, key: str) -> Mapping[str, tuple[str, ...]]:
        """Return {column: values} of the setting ``key``, which has values per column, such as ``range``."""
        return self.columns.get(key, {})


def own_name(name: str) -> OwnName | None:
    """Parse the name of a data set; return None for a public data set such as ``cifar10``.

    Raises UserError for a setting that this kind of data does not have, or that is set twice.
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
    """Return True if two names of the user's own data are equal, except perhaps for the locations of files."""
    names = [own_name(first), own_name(second)]
    return None not in names and len({_without_places(name) for name in names if name}) == 1


def _without_places(own: OwnName) -> str:
    options = {key: value for key, value in own.options.items() if key != "test_file"}
    columns = {key: sorted(of.items()) for key, of in sorted(own.columns.items())}
    return repr((own.kind, sorted(options.items()), "test_file" in own.options, columns))


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of the data sets that ``name`` joins as domains; for any other data set, only ``name``.

    >>> parts_of("domains:mnist+npz%3Ausps.npz:records=500"), parts_of("mnist")
    (('mnist', 'npz:usps.npz'), ('mnist',))
    """
    own = own_name(name)
    return (name,) if own is None or own.kind != DOMAINS else tuple(map(unquote, own.place.split("+")))


def is_own(name: str) -> bool:
    """Return True if the data set ``name`` contains the user's own records, not only records of public data sets."""
    return any(part not in NAMES for part in parts_of(name))


def refused_if_private(name: str) -> str:
    """Return the reason why a run that promises privacy refuses the data set ``name``; empty if there is none."""
    own = own_name(name)
    if own is not None and own.option("scale") == "records":
        return (
            "data.scale=records uses the mean and deviation of the clients' records, which no epsilon would cover, and "
            "this run promises privacy: leave it out, and give public bounds by data.range.COLUMN=LOW..HIGH"
        )
    if own is not None and own.kind == DOMAINS and is_own(name):
        part = next(part for part in parts_of(name) if part not in NAMES)
        return (
            f"data={shortened(name)} uses a part of the records of {shortened(part)}. This run's ledger would not "
            "include the costs of other runs on these records, and the run promises privacy: join public data sets only"
        )
    return ""


def as_table(name: str) -> dict[str, Any]:
    """Convert the data set's ``name`` to a dict with kind, place and settings, as in a settings file (TOML).

    For example ``csv:a.csv:label=ill`` becomes {"kind": "csv", "place": "a.csv", "label": "ill"}. Raises UserError
    for a public data set, which has no settings.
    """
    own = own_name(name)
    if own is None or not OPTIONS[own.kind]:
        having = ", ".join(f"{kind}:" for kind, options in OPTIONS.items() if options)
        raise UserError(f"data={shortened(name)} has no settings inside; only your own data have settings: {having}")
    options = {key: list(values) if key in _LISTS else values[0] for key, values in own.options.items()}
    columns = {
        key: {column: list(values) if _TABLES[key] else values[0] for column, values in of.items()}
        for key, of in own.columns.items()
    }
    return {"kind": own.kind, "place": own.place, **options, **columns}


def from_table(table: Mapping[str, Any]) -> str:
    """Convert a ``table`` with kind, place and settings to the name of the user's own data (inverse of ``as_table``).

    Raises UserError for an unknown kind, a missing place or an invalid setting.
    """
    given, place = table.get("kind"), table.get("place")
    kind = _kind(given)
    if kind is None:
        raise UserError(
            f"data is a table, so its kind must be one of {', '.join(OPTIONS)}; got {given!r}"
            f"{guess(str(given), OPTIONS)}. To use a public data set, write its name: data=digits"
        )
    if not isinstance(place, str) or not place:
        raise UserError(f'data of kind {kind} needs place, the path of the records, for example place = "my.{kind}"')
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
    """Return the kind and place in ``name``, such as ``csv:patients.csv``, without the settings."""
    own = own_name(name)
    return name if own is None else f"{own.kind}:{own.place}"


def short_label(name: str) -> str:
    """Return a short form of ``name`` for the heading of a table of results.

    A hash of four characters replaces the settings in the name: ``csv:patients.csv [1f3a]``.
    """
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
            raise UserError(f"data.{key} is {value!r}: it takes one value (several labels per record are unsupported)")
        return between.join(_quoted(str(part), between) for part in value)
    written = str(value).lower() if isinstance(value, bool) else str(value)
    return written.replace(":", "%3A") if between else _quoted(written)


def _quoted(text: str, between: str = "") -> str:
    """Percent-encode the characters of ``text``, such as ":", that separate the parts of a data set's name."""
    special = "%:=" + between.strip(".")
    return "".join(f"%{ord(letter):02X}" if letter in special or letter < " " else letter for letter in text)
