"""Numbers and names in other spellings: read by a setting, refused with the cure, or told; never taken for others."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fl_sim.data import load
from fl_sim.data.table_file import Spelling, cure_of, similar_spellings
from fl_sim.errors import UserError

ROWS = 60


def table(folder: Path, cells, *, sign=",", head="a", labels=("no", "yes"), more="", name="t.csv") -> str:
    """Write one column of ``cells``, drawn in turn, beside labels; return the name of the data set."""
    rows = [f"{cells[i % len(cells)]}{sign}{labels[i % len(labels)]}" for i in range(ROWS)]
    (folder / name).write_text(f"{head}{sign}label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return f"csv:{folder}/{name}:test=0.3{more}"


def numbers(found) -> list[float]:
    return sorted({round(float(value), 4) for part in (found.train, found.test) for value in part.inputs[:, 0]})


def test_decimal_commas_are_refused_with_the_setting_that_reads_them(tmp_path):
    cells = ("0,126", "-0,436", "2,868", "12,5")
    name = table(tmp_path, cells, sign=";", more=":delimiter=semicolon")
    with pytest.raises(UserError, match=r"row 1, column 'a': '0,126' looks like .* set data.decimal=comma, leave"):
        load(name)
    found = load(f"{name}:decimal=comma")
    plain = load(table(tmp_path, ("0.126", "-0.436", "2.868", "12.5"), name="p.csv"))
    np.testing.assert_array_equal(found.train.inputs, plain.train.inputs)
    np.testing.assert_array_equal(found.test.inputs, plain.test.inputs)
    assert found.names == ("a",)
    assert "numbers have a decimal comma" in found.inferred[0]


@pytest.mark.parametrize(
    ("cells", "settings", "read"),
    [
        (('"1,234.5"', '"12,000"', "7"), "thousands=comma", [7, 1234.5, 12000]),
        (("1.234,5", "12.000", "7"), "decimal=comma:thousands=point", [7, 1234.5, 12000]),
        (("1 234,5", "12\u00a0000", "7"), "decimal=comma:thousands=space", [7, 1234.5, 12000]),
        (("1'234.5", "12'000", "+7"), "thousands=apostrophe", [7, 1234.5, 12000]),
        (("1,5e3", "-,5", "3,"), "decimal=comma", [-0.5, 3, 1500]),
    ],
)
def test_settings_read_other_signs(tmp_path, cells, settings, read):
    name = table(tmp_path, cells, sign=";", more=":delimiter=semicolon")
    bare = tuple(cell.strip('"') for cell in cells)
    assert numbers(load(f"{name}:{settings}")) == read
    with pytest.raises(UserError, match=r"set .*data\."):
        load(name)
    assert not all(re.match(Spelling().pattern, text) for text in bare)


def test_a_comma_that_may_be_either_sign_is_told_with_both_readings():
    assert cure_of(["45,000", "1,250"]) == (
        "set data.thousands=comma if 45,000 means 45000 or data.decimal=comma if 45,000 means 45"
    )
    assert cure_of(["0,250", "1,250"]) == "set data.decimal=comma"  # no group of thousands begins with 0
    assert cure_of(["1,5", "0.5"]) == "write the cells as plain numbers, without units and other signs"


@pytest.mark.parametrize(
    "cells",
    [
        ("45%", "7%"), ("45 kg", "7.5 kg"), ("45kg", "7kg"), ("$45", "-$7"), ("45 €", "7 €"), ("EUR 45", "EUR 7"),
        ("<45", "7"), ("(45)", "(7)"), ("45-", "7-"), ("\u22125", "\u22127"), ("5 mg/dl", "7 mg/dl"), ("45 %", "7"),
    ],
)  # fmt: skip
def test_numbers_with_units_and_signs_are_refused_with_the_cure(tmp_path, cells):
    with pytest.raises(UserError, match=r"another notation.* write the cells as plain numbers"):
        load(table(tmp_path, cells))
    assert load(table(tmp_path, cells, more=":text=a")).names == tuple(
        f"a={cell}" for cell in sorted(cells, key=lambda text: (not text.isdigit(), text))
    )


def test_words_that_hold_digits_stay_categories(tmp_path):
    cells = ("10-20", "5th", "A7", "ward 3", "20+ years old")
    assert load(table(tmp_path, cells)).names == tuple(f"a={cell}" for cell in sorted(cells))


def test_more_spelled_numbers_than_categories_are_told_as_such(tmp_path):
    text = "a,label\n" + "".join(f"{i}.5%,{i % 2}\n" for i in range(500))
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(UserError, match=r"'0.5%' looks like a number"):
        load(f"csv:{tmp_path}/m.csv:test=0.3")


def test_one_word_among_spelled_numbers_is_a_category_as_before(tmp_path):
    assert load(table(tmp_path, ("45%", "none", "7%"))).names == ("a=45%", "a=7%", "a=none")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("decimal=,", r"data.decimal = ',' \(did you mean 'comma'\?\); valid: point, comma"),
        ("thousands=dot", "data.thousands = 'dot'.*valid: comma, point, space, apostrophe"),
        ("thousands=point", "data.thousands=point is also the decimal .* set data.decimal=comma, too"),
        ("decimal=comma:thousands=comma", "is also the decimal separator; set data.decimal=point"),
    ],
)
def test_signs_that_are_none_or_mean_two_things_are_refused(tmp_path, setting, message):
    with pytest.raises(UserError, match=message):
        load(table(tmp_path, ("1", "2"), more=f":{setting}"))


def test_labels_with_decimal_commas_are_regression(tmp_path):
    with pytest.raises(UserError, match=r"holds numbers such as 0,5: regression"):
        load(table(tmp_path, ("1", "2"), sign=";", labels=("0,5", "1,75", "3"), more=":delimiter=semicolon"))


@pytest.mark.parametrize(
    "word", ["NAN", "-nan", "Nan", "+NaN", "nan(0x8)", "-1.#IND", "1.#QNAN", "#N/A", "<NA>", "n/a"]
)
def test_what_is_no_number_is_a_missing_value_with_its_row(tmp_path, word):
    cells = ["1.5", "-2", "4", word, *["3"] * (ROWS - 4)]
    for more in ("", ":range.a=-10..10"):
        with pytest.raises(UserError, match=r"row 4, column 'a' is empty: .*data.missing=drop"):
            load(table(tmp_path, cells, more=more))
    found = load(table(tmp_path, cells, more=":missing=drop"))
    assert (len(found.train) + len(found.test), numbers(found)) == (ROWS - 1, [-2, 1.5, 3, 4])


def test_what_is_no_number_is_missing_in_parquet_texts_and_halves_too(tmp_path):
    half = np.array([1, 2, np.nan, 4] * 5, np.float16)
    columns = {"a": pa.array(half), "label": ["x", "y"] * 10}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "h.parquet")
    with pytest.raises(UserError, match="row 3, column 'a' is empty"):
        load(f"parquet:{tmp_path}/h.parquet:test=0.3")
    columns = {"a": ["1", "NAN", "x", "y"] * 5, "label": ["x", "y"] * 10}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="row 2, column 'a' is empty"):
        load(f"parquet:{tmp_path}/t.parquet:test=0.3")


def test_an_unnamed_column_is_a_number_and_told_with_its_cure(tmp_path):
    cells = [str(row) for row in range(ROWS)]
    name = table(tmp_path, cells, head="")
    found = load(name)
    assert numbers(found) == list(range(ROWS))
    assert "a column has no name and contains row numbers" in "; ".join(found.counted)
    assert "leave it out by data.drop= with nothing after" in "; ".join(found.counted)
    few = load(table(tmp_path, ["0", "1", "2", "3", "4"], head="", name="few.csv"))
    assert few.input_shape == (1,)  # a number, not five categories
    assert "a column has no name, like the index" in "; ".join(few.counted)
    (tmp_path / "two.csv").write_text(",a,label\n" + "".join(f"{i},{i % 7},{i % 2}\n" for i in range(ROWS)))
    assert load(f"csv:{tmp_path}/two.csv:test=0.3:drop=").names == ("a",)


def test_a_named_column_that_numbers_the_rows_is_told_in_every_file(tmp_path):
    columns = {"Unnamed: 0": range(20), "year": range(2000, 2020), "label": ["x", "y"] * 10}
    for name in ("a", "b"):
        pyarrow.parquet.write_table(
            pa.table({key: list(of) for key, of in columns.items()}), tmp_path / f"{name}.parquet"
        )
    found = load(f"parquet:{tmp_path}/a.parquet:test_file={tmp_path}/b.parquet")
    assert "column 'Unnamed: 0' contains row numbers: leave it out by data.drop=Unnamed: 0" in "; ".join(found.counted)
    assert "year" not in "; ".join(found.counted).split("contains row numbers")[0].rpartition(";")[2]
    columns["Unnamed: 0"] = [*range(19), 25]
    pyarrow.parquet.write_table(pa.table({key: list(of) for key, of in columns.items()}), tmp_path / "c.parquet")
    assert load(f"parquet:{tmp_path}/c.parquet:test=0.3").counted == ()


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([2**53 + 1 + 3 * i for i in range(20)], pa.int64()),
        pa.array([2**63 + 5 * i for i in range(20)], pa.uint64()),
        pa.array([-(2**60) + i for i in range(20)], pa.int64()),
    ],
)
def test_whole_numbers_beyond_2_to_the_53_are_read_as_a_csv_file_is(tmp_path, ids):
    labels = ["x", "y"] * 10
    pyarrow.parquet.write_table(pa.table({"id": ids, "label": labels}), tmp_path / "b.parquet")
    rows = "".join(f"{i},{label}\n" for i, label in zip(ids.to_pylist(), labels, strict=True))
    (tmp_path / "b.csv").write_text("id,label\n" + rows)
    found, same = load(f"parquet:{tmp_path}/b.parquet:test=0.3"), load(f"csv:{tmp_path}/b.csv:test=0.3")
    np.testing.assert_array_equal(found.train.inputs, same.train.inputs)
    by_id = load(f"parquet:{tmp_path}/b.parquet:test=0.3:text=id")
    assert by_id.names == tuple(
        f"id={i}" for i in sorted(ids.to_pylist(), key=lambda i: (float(i) if i > 0 else 1e99, str(i)))
    )


def test_one_and_one_point_zero_are_one_label_client_and_category(tmp_path):
    rows = [("1", "3", "7"), ("2.0", "4.0", "8"), ("1.0", "3.0", "7.0"), ("2", "4", "8.0")] * 5
    (tmp_path / "o.csv").write_text(
        "label,client,code,x\n" + "".join(f"{','.join(row)},{i % 3}\n" for i, row in enumerate(rows))
    )
    found = load(f"csv:{tmp_path}/o.csv:test=0.3:text=code:category.code=7.0+8")
    assert found.classes == ("1", "2")
    assert sorted({*found.train.groups.tolist()}) == [0, 1]
    assert found.names == ("code=7", "code=8", "x")
    assert found.train.inputs[:, :2].sum() == len(found.train)


def test_composed_and_decomposed_letters_are_one_name(tmp_path):
    names = ("Zu\u0308rich", "Z\u00fcrich", "Bern")
    name = table(tmp_path, ("1", "2"), labels=names, head="Gro\u0308sse", more=":range.Gr\u00f6sse=0..2")
    found = load(name)
    assert found.classes == ("Bern", "Z\u00fcrich")
    assert numbers(found) == [0.5, 1]


def test_names_in_two_cases_stay_two_and_are_told(tmp_path):
    rows = [("Yes", "North", "Red"), ("yes", "north", "red"), ("no", "N orth", "blue")] * 10
    (tmp_path / "d.csv").write_text("label,client,colour\n" + "".join(f"{','.join(row)}\n" for row in rows))
    found = load(f"csv:{tmp_path}/d.csv:test=0.3")
    assert found.classes == ("Yes", "no", "yes")
    assert "classes that differ only in case or spaces count as different: 'Yes' and 'yes'" in "; ".join(found.counted)
    assert "1 clients have several spellings" in "; ".join(found.counted)
    assert "orth" not in "; ".join(found.counted)  # clients' names are no matter of results
    assert "categories of colour that differ only in case or spaces count as different: 'Red' and 'red'" in "; ".join(
        found.counted
    )
    told = similar_spellings("codes", ["07", "7", "70", "0", "00"])
    assert told.endswith(": '07' and '7', '0' and '00'")


def test_texts_in_parquet_that_are_all_numbers_are_refused_or_kept_as_codes(tmp_path):
    def named(**columns):
        pyarrow.parquet.write_table(pa.table({**columns, "label": ["x", "y"] * 10}), tmp_path / "n.parquet")
        return f"parquet:{tmp_path}/n.parquet:test=0.3"

    with pytest.raises(UserError, match=r"row 2, column 'a'.*'0.5'"):
        load(named(a=["1", "0.5"] * 10))
    with pytest.raises(UserError, match=r"'0,5' .*write the column as numbers"):
        load(named(a=["1", "0,5"] * 10))
    assert load(named(a=["10", "2"] * 10, b=range(20))).names == ("a=2", "a=10", "b")


def test_declared_texts_keep_categories_of_batches_before_the_first_word(tmp_path):
    count = 2**16
    columns = {"a": [*["7", "8"] * (count // 2), "x", "x"], "label": ["u", "v"] * (count // 2 + 1)}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "l.parquet")
    assert load(f"parquet:{tmp_path}/l.parquet:test=0.3").names == ("a=7", "a=8", "a=x")


def test_test_files_whose_codes_or_types_mean_another_thing_are_refused(tmp_path):
    datasets = pytest.importorskip("datasets")

    def part(name, names):
        kinds = {"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=names)}
        made = {"a": [float(i) for i in range(8)], "label": [i % 2 for i in range(8)]}
        datasets.Dataset.from_dict(made, features=datasets.Features(kinds)).to_parquet(str(tmp_path / name))
        return tmp_path / name

    train, other, same = (
        part("1.parquet", ["ant", "bee"]),
        part("2.parquet", ["bee", "ant"]),
        part("3.parquet", ["ant", "bee"]),
    )
    with pytest.raises(UserError, match=r"'label' .*bee, ant.*1.parquet .*ant, bee"):
        load(f"parquet:{train}:test_file={other}")
    assert len(load(f"parquet:{train}:test_file={same}").test) == 8
    times = pa.table({"a": pa.array([0] * 8, pa.timestamp("s")), "label": [0, 1] * 4})
    pyarrow.parquet.write_table(times, tmp_path / "4.parquet")
    with pytest.raises(UserError, match=r"column 'a' .*dates or times"):
        load(f"parquet:{train}:test_file={tmp_path}/4.parquet")
