"""UCI's tables, on made-up rows of the same layout: what is read, what is refused."""

from pathlib import Path

import numpy as np
import pytest

from clients.dafl.marginals import cells_of, records_of
from fl_sim.data import load, verify
from fl_sim.data.naming import KNOWN
from fl_sim.data.public_sets import _DIABETES, _DIABETES_NUMBERS, _ICD9, _diagnosis
from fl_sim.errors import UserError

ADULT = (
    "45, Private, 1, Bachelors, 8, Divorced, Sales, Unmarried, White, Female, 0, 0, 99, United-States, <=50K{dot}\n"
    "90, ?, 1, Bachelors, 16, Widowed, Sales, Husband, Black, Male, 99999, 0, 0, Mexico, >50K{dot}\n"
)


@pytest.fixture(autouse=True)
def _no_other_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FL_SIM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "uci").mkdir()


def _diabetes(path: Path, **changes: str) -> None:
    names = ["patient_nbr", "age", "diag_1", "diag_2", "diag_3", "readmitted", *_DIABETES_NUMBERS, *_DIABETES]
    row = dict.fromkeys(names, "0") | {"age": "[90-100)", "diag_1": "250.83", "diag_2": "?", "diag_3": "V27"}
    lines = [",".join(names)]
    for patient in range(40):
        again = "<30" if patient % 4 == 0 else ">30"
        lines += [",".join((row | {"patient_nbr": str(patient), "readmitted": again} | changes).values())] * 2
    path.write_text("\n".join(lines) + "\n")


def test_adult_is_read_with_published_categories_and_divisors(tmp_path: Path) -> None:
    (tmp_path / "uci" / "adult.data").write_text(ADULT.format(dot="") + "\n")
    (tmp_path / "uci" / "adult.test").write_text("|1x3 Cross validator\n" + ADULT.format(dot=".") + "\n")
    dataset = load("adult", tmp_path)
    assert dataset.train.inputs.shape == (2, *KNOWN["adult"].shape)
    assert dataset.train.labels.tolist() == dataset.test.labels.tolist() == [0, 1]
    assert dataset.train.inputs[0, :5].tolist() == [0.5, 0.5, 1.0, 0.0, 0.0]
    assert dataset.train.inputs[1, :5].tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert dataset.train.inputs[:, 5:].sum(axis=1).tolist() == [7.0, 6.0]  # one a category, none for "?"
    assert np.array_equal(dataset.train.inputs, dataset.test.inputs)


def test_columns_describe_the_features_in_order(tmp_path: Path) -> None:
    (tmp_path / "uci" / "adult.data").write_text(ADULT.format(dot="") + "\n")
    (tmp_path / "uci" / "adult.test").write_text(ADULT.format(dot=".") + "\n")
    _diabetes(tmp_path / "uci" / "diabetic_data.csv")
    for name in ("adult", "diabetes"):
        dataset = load(name, tmp_path)
        assert sum(column.width for column in dataset.columns) == dataset.input_shape[0]
        for column in dataset.columns:
            assert bool(column.values) != bool(column.categories)
            assert list(column.values) == sorted(set(column.values))
            assert all(0 <= value <= 1 for value in column.values)
        cells = cells_of(dataset.train.inputs, dataset.columns)
        back = records_of(cells, dataset.columns)
        places = np.cumsum([0] + [column.width for column in dataset.columns])[:-1]
        is_category = np.repeat([not column.values for column in dataset.columns], [c.width for c in dataset.columns])
        assert np.array_equal(back[:, is_category], dataset.train.inputs[:, is_category])
        for column, place in zip(dataset.columns, places, strict=True):
            if column.values:  # no record is further from a value than half the widest step
                widest = np.diff(column.values).max() / 2
                inside = (dataset.train.inputs[:, place] >= column.values[0]) & (dataset.train.inputs[:, place] <= 1)
                gaps = np.abs(back[:, place] - dataset.train.inputs[:, place])[inside]
                assert (gaps <= max(widest, 1 - column.values[-1]) + 1e-6).all(), column.name


def test_diabetes_is_split_by_patient_and_diagnoses_are_grouped(tmp_path: Path) -> None:
    _diabetes(tmp_path / "uci" / "diabetic_data.csv")
    dataset = load("diabetes", tmp_path)
    assert dataset.train.inputs.shape[1:] == KNOWN["diabetes"].shape
    assert len(dataset.train) + len(dataset.test) == 80
    assert len(dataset.train) % 2 == 0  # both stays of a patient on one side
    assert 0 < len(dataset.test) < len(dataset.train)
    assert dataset.train.labels.sum() + dataset.test.labels.sum() == 20
    diagnoses = dataset.train.inputs[0, 9:36].reshape(3, 9)
    assert diagnoses.sum(axis=1).tolist() == [1.0, 0.0, 1.0]
    assert diagnoses[0, 3] == diagnoses[2, 8] == 1.0  # diabetes, other


@pytest.mark.parametrize("changes", [{"readmitted": "perhaps"}, {"age": "old"}, {"num_procedures": "many"}])
def test_a_table_that_is_not_as_described_is_refused(tmp_path: Path, changes: dict[str, str]) -> None:
    _diabetes(tmp_path / "uci" / "diabetic_data.csv", **changes)
    with pytest.raises(UserError, match=r"diabetic_data.csv .* fetch it again"):
        load("diabetes", tmp_path)


def test_a_table_that_is_missing_is_not_downloaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"put uci/\{adult.data, adult.test\}.*archive.ics.uci.edu"):
        load("adult", tmp_path)


def test_verify_compares_checksums(tmp_path: Path) -> None:
    _diabetes(tmp_path / "uci" / "diabetic_data.csv")
    assert "the official file has" in verify("diabetes", tmp_path).problems[0]


def test_a_range_of_diagnoses_ends_below_its_upper_code():
    """Strack et al. 2014, table 2: 460 to 519 are respiratory, 250.xx is diabetes, and 785 to 788 go apart."""
    names = [*(name for name, _ in _ICD9), "other"]

    def group(code):
        return [name for name, share in zip(names, _diagnosis(code), strict=True) if share]

    assert [group(code) for code in ("459", "460", "519.9", "520", "579", "580", "629", "630")] == [
        ["circulatory"], ["respiratory"], ["respiratory"], ["digestive"], ["digestive"], ["genitourinary"],
        ["genitourinary"], ["other"],
    ]  # fmt: skip
    assert [group(code) for code in ("250", "250.99", "251", "239", "240")] == [
        ["diabetes"], ["diabetes"], ["other"], ["neoplasms"], ["other"],
    ]  # fmt: skip
    assert [group(code) for code in ("785", "786", "787", "788", "789", "1000", "V45", "?")] == [
        ["circulatory"], ["respiratory"], ["digestive"], ["genitourinary"], ["other"], ["other"], ["other"], [],
    ]  # fmt: skip
