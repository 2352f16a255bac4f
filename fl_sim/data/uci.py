"""Two tables of people's records from the UCI repository, as rows of numbers in about 0 to 1.

Adult (Becker and Kohavi 1996): does a person earn over 50,000 dollars? Diabetes 130-US hospitals (Strack et al. 2014):
is a patient in hospital again within 30 days? Categories and divisors are those of the published descriptions, none is
computed from the records; a category that is not listed ("?") is all zeros. The divisors are the top codes of the
census form in Adult, and the largest values that the publication of Diabetes states; the values that ``columns`` rounds
to are round numbers up to these. That both were published is what makes them free: bounds that a program takes from the
records are a release that nobody pays for.
"""

import csv
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from fl_sim.data.naming import KnownSet
from fl_sim.errors import UserError
from fl_sim.own_code import in_one_line
from fl_sim.types import Column, Dataset, Examples

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
_FEW: Final = 20  # numbers of Diabetes up to which each is a cell by itself
_ICD9 = (
    ("circulatory", ((390, 460), (785, 786))), ("respiratory", ((460, 520), (786, 787))),
    ("digestive", ((520, 580), (787, 788))), ("diabetes", ((250, 251),)), ("injury", ((800, 1000),)),
    ("musculoskeletal", ((710, 740),)), ("genitourinary", ((580, 630), (788, 789))), ("neoplasms", ((140, 240),)),
)  # fmt: skip
"""Groups of diagnoses by ICD-9 code (Strack et al. 2014, table 2); all others are one more."""


def read(root: Path, known: KnownSet) -> Dataset:
    """Return the table. Raises UserError for a file that is not what its description says."""
    readers: dict[str, Callable[[Path, KnownSet], tuple[Examples, Examples]]] = {
        "adult": _adult, "diabetes": _diabetes,
    }  # fmt: skip
    try:
        train, test = readers[known.name](root, known)
    except Exception as error:
        raise UserError(
            f"{root / next(iter(known.files))} is not UCI's table of {known.name} ({type(error).__name__}: "
            f"{in_one_line(error)}); delete it and fetch it again"
        ) from error
    columns = {"adult": _adult_columns, "diabetes": _diabetes_columns}[known.name]()
    return Dataset(known.name, train, test, known.num_classes, known.mean, known.std, columns=columns)


def _adult(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    train, test = (_examples(_adult_rows(root / file), _adult_record, _earns_much) for file in known.files)
    return train, test


def _adult_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        for values in csv.reader(file, skipinitialspace=True):
            if len(values) == len(_ADULT_COLUMNS):  # the test file begins with a remark
                yield dict(zip(_ADULT_COLUMNS, values, strict=True))


def _adult_record(row: Row) -> list[float]:
    money = [math.log1p(float(row[name])) / math.log1p(99_999) for name in ("capital-gain", "capital-loss")]
    numbers = [float(row["age"]) / 90, float(row["education-num"]) / 16, float(row["hours-per-week"]) / 99]
    return [*numbers, *money, *_one_hot(row, _ADULT)]


def _adult_columns() -> tuple[Column, ...]:
    """Return the columns in the order of a record: years and hours by fives, money by steps of about a half."""
    money = (0.0, *(step / 25 for step in range(10, 26)))  # 100 to 100,000 dollars
    return (
        _number("age", range(20, 91, 5), 90),
        _number("education-num", range(1, 17), 16),
        _number("hours-per-week", range(5, 100, 5), 99),
        Column("capital-gain", money),
        Column("capital-loss", money),
        *_categories(_ADULT),
    )


def _earns_much(row: Row) -> int:
    return {"<=50K": 0, ">50K": 1}[row["income"].rstrip(".")]


def _diabetes(root: Path, known: KnownSet) -> tuple[Examples, Examples]:
    """Split by patient, who may have come several times: a fixed fifth of them is for testing."""
    path = root / next(iter(known.files))
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    is_test = [zlib.crc32(row["patient_nbr"].encode()) % 5 == 0 for row in rows]
    parts = ([row for row, test in zip(rows, is_test, strict=True) if test == wanted] for wanted in (False, True))
    train, test = (_examples(part, _diabetes_record, _comes_again) for part in parts)
    return train, test


def _diabetes_record(row: Row) -> list[float]:
    numbers = [float(row[name]) / most for name, most in _DIABETES_NUMBERS.items()]
    age = int(row["age"].strip("[)").partition("-")[0]) / 90
    groups = [share for name in ("diag_1", "diag_2", "diag_3") for share in _diagnosis(row[name])]
    return [age, *numbers, *groups, *_one_hot(row, _DIABETES)]


def _diabetes_columns() -> tuple[Column, ...]:
    """Return the columns in the order of a record: small numbers one by one, large ones by up to 20 steps."""
    numbers = [_number(name, range(0, most + 1, -(-most // _FEW)), most) for name, most in _DIABETES_NUMBERS.items()]
    diagnoses = dict.fromkeys(("diag_1", "diag_2", "diag_3"), (*(name for name, _ in _ICD9), "other"))
    return (_number("age", range(0, 91, 10), 90), *numbers, *_categories(diagnoses), *_categories(_DIABETES))


def _number(name: str, values: Iterable[int], divisor: int) -> Column:
    return Column(name, tuple(value / divisor for value in values))


def _categories(categories: Mapping[str, tuple[str, ...]]) -> tuple[Column, ...]:
    return tuple(Column(name, categories=len(values)) for name, values in categories.items())


def _diagnosis(code: str) -> list[float]:
    number = float(code) if code.replace(".", "").isdigit() else -1.0
    found = [float(any(low <= number < high for low, high in ranges)) for _, ranges in _ICD9]
    return [*found, float(not any(found) and code != "?")]


def _comes_again(row: Row) -> int:
    return {"NO": 0, ">30": 0, "<30": 1}[row["readmitted"]]


def _one_hot(row: Row, categories: Mapping[str, tuple[str, ...]]) -> Iterator[float]:
    for name, values in categories.items():
        given = row[name]
        yield from (float(given == value) for value in values)


def _examples(rows: Iterable[Row], record: Callable[[Row], list[float]], label: Callable[[Row], int]) -> Examples:
    given = list(rows)
    if not given:
        raise ValueError("no record in it")
    inputs = np.array([record(row) for row in given], dtype=np.float32)
    if not np.isfinite(inputs).all():
        raise ValueError(f"record {int(np.isfinite(inputs).all(axis=1).argmin())} holds a number that is not finite")
    return Examples(inputs, np.array([label(row) for row in given], dtype=np.int64))
