"""Reads the public data sets: digits, MNIST's idx files, CIFAR, SVHN, and the tables Adult and Diabetes of UCI.

The data set "digits" has 1,797 images of handwritten digits, 8x8 pixels each (UCI, Alpaydin and Kaynak 1998). Its file
is a part of scikit-learn. A test checks that its training and test records equal those of
``sklearn.model_selection.train_test_split`` (stratified, random_state 0). scikit-learn is not imported, because its
import takes longer than a short run. MNIST's idx files (LeCun, Cortes, Burges) are memory-mapped after a check of
header and file size. The files of CIFAR and SVHN are in torchvision's layout.

Models for Adult (Becker and Kohavi 1996) predict whether a person earns over 50,000 dollars. Models for Diabetes 130-US
hospitals (Strack et al. 2014) predict whether a patient returns to hospital within 30 days. Numbers are divided by
published maxima. For Adult these maxima are the top codes of the census form. For Diabetes they are the largest values
in the publication. The categories are published, too. A value that is not a published category ("?") becomes zeros.
``Dataset.columns`` lists round numbers from 0 to the maximum of each column. Generators of synthetic records may round
their numbers to these values. Maxima, categories and round numbers are not computed from the records, so their use has
no privacy cost.
"""

import csv
import gzip
import importlib.util
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.dataset import as_labels
from fl_sim.data.naming import DIGITS, KnownSet
from fl_sim.errors import UserError
from fl_sim.own_code import in_one_line
from fl_sim.types import Column, Dataset, Examples

_NUM_TRAIN, _NUM_TEST = 1437, 360
_MEAN, _STD = (0.3054,), (0.3760,)
"""The mean and standard deviation of the training images of the public set "digits", for pixel values from 0 to 1."""

Row: TypeAlias = Mapping[str, str]

_ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip
_ADULT: dict[str, tuple[str, ...]] = {
    "workclass": ("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
                  "Never-worked"),
    "marital-status": ("Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed",
                       "Married-spouse-absent", "Married-AF-spouse"),
    "occupation": ("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
                   "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving",
                   "Priv-house-serv", "Protective-serv", "Armed-Forces"),
    "relationship": ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    "sex": ("Female", "Male"),
    "native-country": ("United-States", "Mexico", "Philippines", "Germany", "Canada", "Puerto-Rico", "El-Salvador",
                       "India", "Cuba", "England", "Jamaica", "South", "China", "Italy"),
}  # fmt: skip
_ADULT_NUMBERS = {"age": 90, "education-num": 16, "hours-per-week": 99}  # {column of Adult: its published maximum}
_DRUGS = (
    "metformin", "repaglinide", "nateglinide", "chlorpropamide", "glimepiride", "acetohexamide", "glipizide",
    "glyburide", "tolbutamide", "pioglitazone", "rosiglitazone", "acarbose", "miglitol", "troglitazone", "tolazamide",
    "insulin", "glyburide-metformin",
)  # fmt: skip
_DIABETES: dict[str, tuple[str, ...]] = {
    "race": ("Caucasian", "AfricanAmerican", "Hispanic", "Asian", "Other"),
    "gender": ("Female", "Male"),
    "admission_type_id": tuple(map(str, range(1, 9))),
    "discharge_disposition_id": tuple(map(str, range(1, 30))),
    "admission_source_id": tuple(map(str, range(1, 27))),
    "max_glu_serum": ("Norm", ">200", ">300"),
    "A1Cresult": ("Norm", ">7", ">8"),
    "change": ("Ch",),
    "diabetesMed": ("Yes",),
    **dict.fromkeys(_DRUGS, ("Steady", "Up", "Down")),
}
_DIABETES_NUMBERS = {
    "time_in_hospital": 14, "num_lab_procedures": 132, "num_procedures": 6, "num_medications": 81,
    "number_outpatient": 42, "number_emergency": 76, "number_inpatient": 21, "number_diagnoses": 16,
}  # fmt: skip
_FEW: Final = 20  # a column of Diabetes has at most this many rounding steps from 0 to its maximum
_ICD9 = (
    ("circulatory", ((390, 460), (785, 786))), ("respiratory", ((460, 520), (786, 787))),
    ("digestive", ((520, 580), (787, 788))), ("diabetes", ((250, 251),)), ("injury", ((800, 1000),)),
    ("musculoskeletal", ((710, 740),)), ("genitourinary", ((580, 630), (788, 789))), ("neoplasms", ((140, 240),)),
)  # fmt: skip
"""(group of diagnoses, its ranges of ICD-9 codes): Strack et al. 2014, table 2. Other codes form one more group."""


def read_digits() -> Dataset:
    """Read the digits. Grey values 0..16 become 0..255.

    A fixed stratified split has 1,437 training and 360 test records. Raises UserError if scikit-learn's file is
    missing.
    """
    found = importlib.util.find_spec("sklearn")
    folders = (found.submodule_search_locations or []) if found else []
    path = next((path for one in folders if (path := Path(one) / "datasets/data/digits.csv.gz").is_file()), None)
    if path is None:
        raise UserError(
            "data=digits is a file of scikit-learn, which is not installed or incomplete: pip install scikit-learn"
        )
    with gzip.open(path) as file:
        table = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    values, labels = table[:, :-1], table[:, -1].astype(np.int64)
    images = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    train, test = _split(labels)
    everything = Examples(images, labels)
    return Dataset(DIGITS, everything.take(train), everything.take(test), 10, _MEAN, _STD)


def read_idx(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    """Read MNIST or Fashion-MNIST from idx files; return (training, test) records. Images are memory-mapped."""
    paths = [root / file for file in known.files]
    train, test = (
        Examples(_idx_mapped(images, 3)[:, np.newaxis], _idx_mapped(labels, 1).astype(np.int64))
        for images, labels in (paths[:2], paths[2:])
    )
    return train, test


def read_cifar(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    """Read CIFAR's pickled batches in the folder ``root``; return (training, test) records.

    Reading a pickle can run code. Therefore torchvision checks the published MD5 of each file before it opens any file.
    Raises UserError if an MD5 differs.
    """
    cifar = known.in_torchvision()
    try:
        parts = [cifar(root, train=train) for train in (True, False)]
    except RuntimeError as error:
        folder = root / next(iter(known.files)).partition("/")[0]
        raise UserError(
            f"{folder}: a file differs from the published file ({error}); delete the folder and fetch it again"
        ) from error
    train, test = (Examples(part.data.transpose(0, 3, 1, 2), np.array(part.targets, dtype=np.int64)) for part in parts)
    return train, test


def read_svhn(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    """Read SVHN's two .mat files (Netzer et al. 2011); return (training, test) records. Label 10 becomes class 0."""
    train, test = (_read_mat(root / file) for file in known.files)
    return train, test


def read_uci(root: Path, known: KnownSet) -> Dataset:
    """Read Adult or Diabetes from UCI's files. Raises UserError for a file that differs from UCI's description."""
    is_adult = known.name == "adult"
    try:
        train, test = (_adult if is_adult else _diabetes)(root, known)
    except Exception as error:
        raise UserError(
            f"{root / next(iter(known.files))} is not UCI's table of {known.name} ({type(error).__name__}: "
            f"{in_one_line(error)}); delete it and fetch it again"
        ) from error
    columns = _adult_columns() if is_adult else _diabetes_columns()
    return Dataset(known.name, train, test, known.num_classes, known.mean, known.std, columns=columns)


def _split(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split the digits exactly as scikit-learn does; return (training, test) indices, shuffled and stratified."""
    coins = np.random.RandomState(0)
    held = np.bincount(labels)
    for_training = _shares(held, _NUM_TRAIN, coins)
    for_testing = _shares(held - for_training, _NUM_TEST, coins)
    shuffled = [np.flatnonzero(labels == label)[coins.permutation(count)] for label, count in enumerate(held)]
    bounds = list(zip(shuffled, for_training, for_training + for_testing, strict=True))
    train, test = [own[:middle] for own, middle, _ in bounds], [own[middle:end] for own, middle, end in bounds]
    return coins.permutation(np.concatenate(train)), coins.permutation(np.concatenate(test))


def _shares(held: NDArray[np.int64], total: int, coins: np.random.RandomState) -> NDArray[np.int64]:
    """Divide ``total`` among the classes in proportion to their counts ``held``; return whole numbers, (classes,).

    The exact numbers are rounded down. The classes with the largest remainders then get one more record. Among equal
    remainders the choice is random, as in scikit-learn's stratified split.
    """
    exact = held / held.sum() * total
    whole = np.floor(exact)
    remainder, left = exact - whole, int(total - whole.sum())
    while left > 0:
        largest = np.flatnonzero(remainder == remainder.max())
        chosen = coins.choice(largest, size=min(len(largest), left), replace=False)
        whole[chosen] += 1
        remainder[largest] = -1.0
        left -= len(chosen)
    dealt: NDArray[np.int64] = whole.astype(np.int64)
    return dealt


def _idx_mapped(path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """Return a memory map of an idx file of bytes.

    The file starts with the bytes 0, 0, 8 and the number of dimensions; then each dimension as a big-endian uint32;
    then the data.
    """
    header_size = 4 + 4 * num_dimensions
    with path.open("rb") as file:
        header = file.read(header_size)
    if header[:4] != bytes((0, 0, 8, num_dimensions)):
        raise UserError(
            f"{path} is no idx file of bytes with {num_dimensions} dimensions (it starts with 0x{header[:4].hex()}, "
            f"not 0x000008{num_dimensions:02x}); delete it and fetch it again"
        )
    if len(header) < header_size:
        raise _wrong_size(path, header_size)
    shape = struct.unpack(f">{num_dimensions}I", header[4:])
    expected = header_size + math.prod(shape)
    if path.stat().st_size != expected:
        raise _wrong_size(path, expected)
    if 0 in shape:
        raise UserError(f"{path} holds no records (shape {shape}); delete it and fetch it again")
    return np.memmap(path, np.uint8, "r", header_size, shape).view(np.ndarray)


def _wrong_size(path: Path, expected: int) -> UserError:
    actual = path.stat().st_size
    state = "truncated" if actual < expected else "too long"
    return UserError(f"{path} is {state}: {actual} bytes, expected {expected}; delete it and fetch it again")


def _read_mat(path: Path) -> Examples:
    from scipy.io import loadmat  # noqa: PLC0415 (only SVHN needs it)

    try:
        content = loadmat(path, variable_names=("X", "y"))
        images, labels = content["X"], content["y"]
    except KeyError as error:
        raise UserError(
            f"{path} has no array {error}, but SVHN's files hold X (32, 32, 3, records) and y; delete it and fetch it "
            "again"
        ) from error
    except Exception as error:
        raise UserError(
            f"{path} is no readable .mat file ({in_one_line(error)}); delete it and fetch it again"
        ) from error
    if images.ndim != 4 or images.dtype != np.uint8:
        raise UserError(
            f"{path}: X is {images.dtype} {images.shape}, but in SVHN it is uint8 (32, 32, 3, records); delete the "
            "file and fetch it again"
        )
    digits = as_labels(labels, f"{path}: y")
    return Examples(images.transpose(3, 2, 0, 1), np.where(digits == 10, 0, digits))


def _adult(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    label = {"<=50K": 0, ">50K": 1, "<=50K.": 0, ">50K.": 1}
    train, test = (
        _examples(_adult_rows(root / file), _adult_record, lambda row: label[row["income"]]) for file in known.files
    )
    return train, test


def _adult_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        for values in csv.reader(file, skipinitialspace=True):
            if len(values) == len(_ADULT_COLUMNS):  # the first line of the test file is a comment, which is skipped
                yield dict(zip(_ADULT_COLUMNS, values, strict=True))


def _adult_record(row: Row) -> list[float]:
    money = [math.log1p(float(row[name])) / math.log1p(99_999) for name in ("capital-gain", "capital-loss")]
    numbers = [float(row[name]) / most for name, most in _ADULT_NUMBERS.items()]
    return [*numbers, *money, *_one_hot(row, _ADULT)]


def _adult_columns() -> tuple[Column, ...]:
    """Return the public facts of Adult's columns (names, categories, rounding steps), in the order of the input vector.

    Generators of synthetic records may round numbers to the values that a column lists: years and hours in steps of 5,
    and amounts of money in steps that grow by a factor of about 1.6.
    """
    # 0, and 16 amounts from 100 to 100,000 dollars, on the logarithmic scale of the model's inputs
    money = (0.0, *(step / 25 for step in range(10, 26)))
    values = {"age": range(20, 91, 5), "education-num": range(1, 17), "hours-per-week": range(5, 100, 5)}
    amounts = Column("capital-gain", money), Column("capital-loss", money)
    return (*_numbers(values, _ADULT_NUMBERS), *amounts, *_categories(_ADULT))


def _diabetes(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    """Read Diabetes; return (training, test) records.

    A hash of the patient's number selects a fixed fifth of the patients for testing. The split is by patient, because a
    patient may have several records.
    """
    path = root / next(iter(known.files))
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    is_test = [zlib.crc32(row["patient_nbr"].encode()) % 5 == 0 for row in rows]
    parts = ([row for row, test in zip(rows, is_test, strict=True) if test == wanted] for wanted in (False, True))
    label = {"NO": 0, ">30": 0, "<30": 1}
    train, test = (_examples(part, _diabetes_record, lambda row: label[row["readmitted"]]) for part in parts)
    return train, test


def _diabetes_record(row: Row) -> list[float]:
    numbers = [float(row[name]) / most for name, most in _DIABETES_NUMBERS.items()]
    age = int(row["age"].strip("[)").partition("-")[0]) / 90
    groups = [share for name in ("diag_1", "diag_2", "diag_3") for share in _diagnosis(row[name])]
    return [age, *numbers, *groups, *_one_hot(row, _DIABETES)]


def _diabetes_columns() -> tuple[Column, ...]:
    """Return the public facts of Diabetes' columns (names, categories, steps), in the order of the input vector.

    Generators of synthetic records may round the numbers of a column to multiples of its step. The step is 1 if the
    maximum of the column is at most 20. Otherwise the step is larger, so that a column has at most 20 steps.
    """
    values = {name: range(0, most + 1, -(-most // _FEW)) for name, most in _DIABETES_NUMBERS.items()}
    numbers = _numbers({"age": range(0, 91, 10), **values}, {"age": 90, **_DIABETES_NUMBERS})
    diagnoses = dict.fromkeys(("diag_1", "diag_2", "diag_3"), (*(name for name, _ in _ICD9), "other"))
    return (*numbers, *_categories(diagnoses), *_categories(_DIABETES))


def _numbers(values: Mapping[str, Iterable[int]], divisors: Mapping[str, int]) -> list[Column]:
    return [Column(name, tuple(value / divisors[name] for value in of)) for name, of in values.items()]


def _categories(categories: Mapping[str, tuple[str, ...]]) -> list[Column]:
    return [Column(name, categories=len(values)) for name, values in categories.items()]


def _diagnosis(code: str) -> list[float]:
    number = float(code) if code.replace(".", "").isdigit() else -1.0
    found = [float(any(low <= number < high for low, high in ranges)) for _, ranges in _ICD9]
    return [*found, float(not any(found) and code != "?")]


def _one_hot(row: Row, categories: Mapping[str, tuple[str, ...]]) -> Iterator[float]:
    for name, values in categories.items():
        given = row[name]
        yield from (float(given == value) for value in values)


def _examples(rows: Iterable[Row], record: Callable[[Row], list[float]], label: Callable[[Row], int]) -> Examples:
    given = list(rows)
    if not given:
        raise ValueError("it has no record")
    inputs = np.array([record(row) for row in given], dtype=np.float32)
    if not np.isfinite(inputs).all():
        raise ValueError(f"record {int(np.isfinite(inputs).all(axis=1).argmin())} contains a number that is not finite")
    return Examples(inputs, np.array([label(row) for row in given], dtype=np.int64))
