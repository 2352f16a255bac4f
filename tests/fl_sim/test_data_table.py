"""Tables in csv and parquet files: what becomes of columns, and what is refused, by row and column."""

import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fl_sim.data import load, naming, table
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.simulation.run import run

ROWS = """age,sex,ward,outcome,part
30,f,north,ill,train
40,m,north,well,train
50,f,south,ill,test
60,f,south,well,train
70,m,south,ill,train
80,m,north,well,test
"""
SETTINGS = "label=outcome:client=ward:split=part"


def written(folder: Path, text: str = ROWS, name: str = "a.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def as_parquet(folder: Path, **columns: object) -> str:
    path = folder / "a.parquet"
    pyarrow.parquet.write_table(pa.table(columns), path)
    return f"parquet:{path}"


def test_numbers_categories_label_client_and_test_part(tmp_path):
    found = load(f"csv:{written(tmp_path)}:{SETTINGS}")
    assert found.train.inputs.tolist() == [[30, 1, 0], [40, 0, 1], [60, 1, 0], [70, 0, 1]]
    assert found.train.inputs.dtype == np.float32
    assert found.classes == ("ill", "well")
    assert found.train.labels.tolist() == [0, 1, 1, 0]
    assert found.train.groups.tolist() == [0, 0, 1, 1]
    assert (found.test.inputs[:, 0].tolist(), found.test.labels.tolist(), found.test.groups.tolist()) == (
        [50, 80], [0, 1], [1, 0],
    )  # fmt: skip
    assert dict(found.shown) == {
        "outcome": "label: ill, well", "ward": "client: 2 clients", "part": "split: train or test",
        "age": "number, unchanged", "sex": "category: f, m",
    }  # fmt: skip
    assert found.mean == (0.0,) * 3
    assert "numbers without scaling: age" in found.note
    assert [fact.partition(" (")[0] for fact in found.read_off] == [
        "the list of classes, and so the number of the model's outputs", "the categories of sex",
    ]  # fmt: skip


def test_public_ranges_and_categories_leave_nothing_to_read_off(tmp_path):
    name = f"csv:{written(tmp_path)}:{SETTINGS}:classes=ill+well:range.age=40..80:category.sex=m+x"
    found = load(name)
    assert found.train.inputs.tolist() == [[0, 0, 0], [0, 1, 0], [0.5, 0, 0], [0.75, 1, 0]]
    assert found.read_off == ()
    assert [(column.name, column.width, column.cells) for column in found.columns] == [("age", 1, 20), ("sex", 2, 3)]


def test_parquet_gives_the_records_that_csv_gives(tmp_path):
    lines = [line.split(",") for line in ROWS.split()]
    columns = dict(zip(lines[0], zip(*lines[1:], strict=True), strict=True))
    columns["age"] = [int(age) for age in columns["age"]]
    columns["sex"] = pa.array(columns["sex"]).dictionary_encode()
    found, same = load(f"{as_parquet(tmp_path, **columns)}:{SETTINGS}"), load(f"csv:{written(tmp_path)}:{SETTINGS}")
    for part, other in ((found.train, same.train), (found.test, same.test)):
        np.testing.assert_array_equal(part.inputs, other.inputs)
        np.testing.assert_array_equal(part.labels, other.labels)
        np.testing.assert_array_equal(part.groups, other.groups)
    assert found.shown == same.shown


def test_numbers_that_are_names_are_categories_in_order(tmp_path):
    rows = "".join(f"{(3, 10, 2)[i % 3]},{i % 2},{i}\n" for i in range(30))
    found = load(f"csv:{written(tmp_path, f'zip,label,x{chr(10)}{rows}')}:test=0.2:text=zip")
    assert dict(found.shown)["zip"] == "category: 2, 3, 10"


def test_batches_are_put_together_whatever_their_size(tmp_path, monkeypatch):
    rows = [f"{i},{'abc'[i % 3]},{i % 2}" for i in range(1000)]
    path = tmp_path / "a.parquet"
    columns = list(zip(*(row.split(",") for row in rows), strict=True))
    pyarrow.parquet.write_table(pa.table({"x": list(map(int, columns[0])), "c": columns[1], "label": columns[2]}), path)
    whole = load(f"parquet:{path}:test=0.2")
    monkeypatch.setattr("fl_sim.data.table_file.ROWS", 7)
    parts = load(f"parquet:{path}:test=0.2:test_seed=0")
    np.testing.assert_array_equal(whole.train.inputs, parts.train.inputs)
    np.testing.assert_array_equal(whole.test.labels, parts.test.labels)


def test_a_share_for_testing_is_of_every_client_and_by_a_seed(tmp_path):
    rows = "\n".join(f"{i},{i % 2},{'abcd'[min(i // 10, 3)]}" for i in range(31))
    path = written(tmp_path, f"x,label,client\n{rows}\n")
    found = load(f"csv:{path}:test=0.3")
    assert np.bincount(found.test.groups, minlength=4).tolist() == [3, 3, 3, 0]  # d has one record, and trains on it
    assert np.bincount(found.train.groups).tolist() == [7, 7, 7, 1]
    assert found.sources == ("a", "b", "c", "d")
    again, other = load(f"csv:{path}:test=0.3:test_seed=0"), load(f"csv:{path}:test=0.3:test_seed=1")
    assert again.test.inputs.tolist() == found.test.inputs.tolist() != other.test.inputs.tolist()
    assert "drawn by test_seed 1" in other.note


def test_the_test_part_may_be_a_file(tmp_path):
    head, *rows = ROWS.split()
    train, test = ("\n".join([head, *some]) + "\n" for some in (rows[:4], rows[4:]))
    second = written(tmp_path, test, "b.csv")
    found = load(f"csv:{written(tmp_path, train)}:label=outcome:client=ward:drop=part:test_file={second}")
    assert (len(found.train), found.test.inputs[:, 0].tolist(), found.test.groups.tolist()) == (4, [70, 80], [1, 0])


def test_scaling_by_the_records_is_asked_for_and_said_and_refused_where_privacy_is_promised(tmp_path):
    name = f"csv:{written(tmp_path)}:{SETTINGS}:scale=records"
    found = load(name)
    assert found.mean == (50.0, 0.0, 0.0)
    np.testing.assert_allclose(found.std, (np.std([30, 40, 60, 70]), 1, 1))
    assert "scaled by the training records' mean and deviation: age" in found.note
    settings = {"data": name, "partition": "natural", "clients": 2, "evaluate": {"test_is_public": True}}
    assert job_of(experiment_from(settings)).dataset.mean[0] == 50.0
    with pytest.raises(UserError, match=r"data\.scale=records .* privacy"):
        job_of(experiment_from({**settings, "aggregator": "global-dp", "sampler": "poisson:0.5"}))


def test_records_with_an_empty_cell_are_left_out_when_asked_and_counted(tmp_path):
    text = ROWS.replace("40,m", " NA ,m").replace("30,f", "30,?")
    found = load(f"csv:{written(tmp_path, text)}:{SETTINGS}:missing=drop")
    assert found.train.inputs[:, 0].tolist() == [60, 70]
    assert found.counted == ("2 records with an empty cell are left out",)
    assert "; records with an empty cell are left out" in found.note


def test_other_signs_between_cells_can_be_named(tmp_path):
    name = f"csv:{written(tmp_path, ROWS.replace(',', ';'))}:{SETTINGS}"
    with pytest.raises(UserError, match=r"has only one column.*set data\.delimiter=semicolon"):
        load(f"{name}:delimiter=tab")
    assert len(load(f"{name}:delimiter=semicolon").train) == 4


def test_spaces_around_cells_and_names_do_not_count(tmp_path):
    spaced = load(f"csv:{written(tmp_path, ROWS.replace(',', ' , '))}:{SETTINGS}")
    plain = load(f"csv:{written(tmp_path, name='b.csv')}:{SETTINGS}")
    assert spaced.shown == plain.shown
    np.testing.assert_array_equal(spaced.train.inputs, plain.train.inputs)


def test_what_was_read_off_the_records_is_said_beside_every_epsilon(tmp_path):
    settings = {"data": f"csv:{written(tmp_path)}:{SETTINGS}", "partition": "natural", "clients": 2, "rounds": 1,
                "model": "logistic", "aggregator": "global-dp", "sampler": "poisson:0.5",
                "evaluate": {"test_is_public": True}}  # fmt: skip
    (promise,) = run(experiment_from(settings), tmp_path / "run")["privacy"]
    said = promise["does_not_cover"].partition("Taken from the private records and published without noise: ")[2]
    assert "the list of classes" in said
    assert "the categories of sex" in said


SAME = "label=outcome:client=ward:split=part"


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("", SAME, "a.csv is empty; the first line"),
        ("age,sex,ward,outcome,part\n", SAME, "a.csv has no rows below the names"),
        (ROWS.replace("age,sex", "sex,sex"), SAME, "has 2 columns called 'sex'; rename all but one"),
        (ROWS, "label=outcom:split=part", r"no column 'outcom' \(did you mean 'outcome'\?\); its columns are age, sex"),
        (ROWS, "split=part", "has no column called label: name the label column by data.label=COLUMN; its columns"),
        (ROWS, "label=outcome", r"no setting says which records are for testing; set data\.test=0\.2"),
        (ROWS, f"{SAME}:test=0.2", "2 settings define the test records; set only one of"),
        (ROWS, "label=outcome:test=20", r"data\.test = '20': it must be a share of the records, above 0 and below 1"),
        (ROWS, "label=outcome:test=0.2:test_seed=x", r"data\.test_seed = 'x': it must be a whole number"),
        (ROWS, "label=outcome:split=part:test_seed=1", r"seed of data\.test, which is not set: set data\.test"),
        (ROWS, f"{SAME}:drop=outcome", r"data\.drop names 'outcome', which is also data\.label"),
        (ROWS, f"{SAME}:drop=age+sex", "no feature columns in addition to outcome, ward, part"),
        (ROWS, f"{SAME}:client=outcome", "client is set twice"),
        (ROWS, "label=outcome:client=outcome:split=part", r"data\.label and data\.client are both 'outcome'"),
        (ROWS, f"{SAME}:range.sex=0..1", r"data\.range\.sex is for numbers, but the column 'sex' holds texts"),
        (ROWS, f"{SAME}:range.age=9..1", r"data\.range\.age = '9\.\.1': write LOW\.\.HIGH"),
        (ROWS, f"{SAME}:range.ward=0..1", "the column 'ward' is no feature"),
        (ROWS, f"{SAME}:scale=mean", r"data\.scale = 'mean'; valid: ranges, records"),
        (ROWS.replace("50,", ","), SAME, r"a.csv: row 3, column 'age' is empty: fill it in \(data.fill.age=V"),
        (ROWS.replace("ill,test", ",test"), SAME, "row 3, column 'outcome' is empty"),
        (ROWS.replace("50,f", ","), SAME, r"row 3, column 'age' is empty \(and cells of sex\): fill"),
        (ROWS.replace("50,", "old,"), SAME, "row 3, column 'age': 'old' is no number, but row 1 holds 30: correct"),
        (ROWS.replace("50,", "inf,"), SAME, "row 3, column 'age': the number is not finite"),
        (ROWS.replace("50,", "1e300,"), SAME, r"column 'age' holds numbers beyond 3\.4e38"),
        (ROWS.replace("50,f,", "50,"), SAME, r"cannot be read as a table .*Expected 5 columns, got 4.*; correct or"),
        (ROWS.replace("well", "ill"), SAME, "column 'outcome': all records are of class ill; classification"),
        (ROWS.replace("ill,test", "dead,test"), SAME, "class dead occurs only in the test part"),
        (ROWS.replace("well,test", "well,val"), SAME, r"'part' has the entry val, but only train .*evaluate\.valid"),
        (ROWS.replace(",test", ",train"), SAME, "there are no test records"),
        (ROWS.replace(",ill,", ",0.5,").replace(",well,", ",1.5,"), SAME, r"numbers such as 0\.5: regression is not"),
        (ROWS, "label=outcome+sex:split=part", r"several labels per record \(multi-label\) are not supported"),
        (ROWS.replace("30,", "2020-01-30,").replace("sex", "x"), SAME, "column 'age': '2020-01-30' is no num"),
    ],
)  # fmt: skip
def test_what_is_no_classification_data_is_refused_in_one_line(tmp_path, text, settings, message):
    with pytest.raises(UserError, match=message) as caught:
        load(f"csv:{written(tmp_path, text)}:{settings}")
    assert "\n" not in str(caught.value)


LABELS = ["a", "b"] * 150


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ([f"n{i}" for i in range(300)], "over 200 different texts"),
        ([f"2020-01-{i % 9 + 1:02}" for i in range(300)], "dates"),
        ([f"{i % 28 + 1}.{i % 12 + 1}.{1900 + i % 100}" for i in range(300)], "dates"),
        (["", *["3.4.2020 10:15"] * 299], "dates"),
        (pa.array([0] * 300, pa.date32()), "dates"),
    ],
    ids=["names", "dates", "many dates", "times", "declared"],
)
def test_columns_of_dates_and_ids_are_left_out_and_said(tmp_path, cells, reason):
    found = load(f"{as_parquet(tmp_path, day=cells, x=[1.5] * 300, label=LABELS)}:test=0.1")
    assert found.names == ("x",)
    assert len(found.train) + len(found.test) == 300
    assert f"left out: day ({reason})" in found.note
    assert ("day", f"left out: {reason}") in found.shown
    assert any(f"column 'day' is not used: it holds {reason}; confirm this by" in one for one in found.counted)
    assert "the list of unused columns (set data.drop=day to make it public)" in found.read_off
    told = load(f"{as_parquet(tmp_path, day=cells, x=[1.5] * 300, label=LABELS)}:test=0.1:drop=day")
    assert told.train.inputs.tolist() == found.train.inputs.tolist()
    assert not told.counted
    assert not any("left out" in fact for fact in told.read_off)


def test_a_text_of_its_own_in_every_row_is_told_to_look_like_an_id(tmp_path):
    text = "who,x,label\n" + "".join(f"p{i},{i % 3},{i % 2}\n" for i in range(12))
    told = load(f"csv:{written(tmp_path, text)}:test=0.3").counted
    assert told == ("column 'who' has a different text in every row, like an ID: leave it out by data.drop=who",)


@pytest.mark.parametrize(("name", "is_id"), [("patient_id", True), ("ID", True), ("patientID", True), ("humid", False)])
def test_a_column_of_numbers_that_is_called_like_an_id_is_told(tmp_path, name, is_id):
    text = f"{name},x,label\n" + "".join(f"{i * 7919 % 997},{i % 3},{i % 2}\n" for i in range(12))
    said = f"column {name!r} is a feature with the name of an ID: leave it out by data.drop={name}"
    assert load(f"csv:{written(tmp_path, text)}:test=0.3").counted == ((said,) if is_id else ())


def test_columns_to_leave_out_may_be_typed_with_commas(tmp_path):
    text = ROWS.replace("sex", '"sex, self-told"')
    for drop, names in (("age,sex", ["ward=north", "ward=south"]), ("age", ["sex=f", "sex=m"])):
        found = load(f"csv:{written(tmp_path)}:label=outcome:split=part:drop={drop}")
        assert list(found.names)[:2] == names
    found = load(f"csv:{written(tmp_path, text)}:{SETTINGS}:drop=sex, self-told")
    assert found.names == ("age",)
    made = experiment_from(with_overrides({}, ["data=csv:a.csv", "data.drop=id,name"]))
    assert made.data == "csv:a.csv:drop=id,name"


def test_empty_cells_become_the_value_that_is_set_or_the_middle_of_a_range(tmp_path):
    text = ROWS.replace("40,m", ",m").replace("60,f", "60,")
    place = f"csv:{written(tmp_path, text)}:{SETTINGS}"
    found = load(f"{place}:range.age=0..100:missing=middle")
    assert (found.train.inputs * 10).round().tolist() == [[3, 10, 0], [5, 0, 10], [6, 0, 0], [7, 0, 10]]
    assert "empty cells become: the middle of a number's range, zeros for a category" in found.note
    found = load(f"{place}:fill.age=33:fill.sex=unknown")
    assert found.names == ("age", "sex=f", "sex=m", "sex=unknown")
    assert found.train.inputs.tolist() == [[30, 1, 0, 0], [33, 0, 1, 0], [60, 0, 0, 1], [70, 0, 1, 0]]
    assert "empty cells become: age 33, sex unknown" in found.note
    assert len(load(f"{place}:fill.age=33:missing=drop").train) == 3
    table = {"kind": "csv", "place": "a", "fill": {"age": 33, "sex": "unknown"}}
    assert naming.as_table(naming.from_table(table)) == {**table, "fill": {"age": "33", "sex": "unknown"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("missing=middle", r"column 'age' has empty cells, .*: set data\.range\.age=LOW\.\.HIGH"),
        ("fill.age=33", r"row 4, column 'sex' is empty: fill it in \(data\.fill\.sex=VALUE"),
        ("fill.age=old:fill.sex=f", r"data\.fill\.age = 'old': the column 'age' holds numbers"),
        ("fill.age=1:category.sex=f+m:fill.sex=x", r"data\.fill\.sex = 'x' is none of data\.category\.sex; use one"),
        ("fill.ag=1", "has no column 'ag'"),
        ("fill=1", r"data\.fill is set for each column, for example data\.fill\.age=40"),
    ],
)
def test_values_for_empty_cells_that_do_not_fit_are_refused(tmp_path, settings, message):
    text = ROWS.replace("40,m", ",m").replace("60,f", "60,")
    with pytest.raises(UserError, match=message):
        load(f"csv:{written(tmp_path, text)}:{SETTINGS}:{settings}")


@pytest.mark.parametrize(("sign", "word"), [(";", "semicolon"), ("\t", "tab"), ("|", "bar")])
def test_the_sign_between_cells_is_found_in_the_first_line(tmp_path, sign, word):
    text = ROWS.replace(",", sign).replace("30", "30.5").replace("sex", '"sex, told"')
    found = load(f"csv:{written(tmp_path, text)}:{SETTINGS}")
    assert found.train.inputs.tolist() == [[30.5, 1, 0], [40, 0, 1], [60, 1, 0], [70, 0, 1]]
    assert f"the delimiter is {word}" in found.inferred[0]


def test_lists_and_numbers_are_refused_with_the_way_out(tmp_path):
    labels = LABELS
    with pytest.raises(UserError, match="'x' holds lists or other cells"):
        load(f"{as_parquet(tmp_path, x=[[1]] * 300, label=labels)}:test=0.1")
    with pytest.raises(UserError, match=r"'label' holds lists.*multi-label"):
        load(f"{as_parquet(tmp_path, x=[1] * 300, label=[['a']] * 300)}:test=0.1")
    with pytest.raises(UserError, match=r"more than 1,000 different entries, .*regression"):
        load(f"{as_parquet(tmp_path, x=[1] * 1500, label=list(range(1500)))}:test=0.1")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all" * 9])
def test_a_damaged_parquet_file_is_refused(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet cannot be read as a table"):
        load(f"parquet:{tmp_path}/a.parquet:test=0.1")


def test_texts_that_are_no_utf8_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(ROWS.replace("north", "n\u00f6rd").encode("latin-1"))
    with pytest.raises(UserError, match="invalid UTF8"):
        load(f"csv:{tmp_path}/a.csv:{SAME}")


def test_a_table_that_would_fill_the_memory_is_refused_before(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "most_bytes", lambda: 100)
    with pytest.raises(UserError, match=r"6 records of 3 numbers take 2 x 72 bytes"):
        load(f"csv:{written(tmp_path)}:{SAME}")


def test_a_missing_file_and_a_missing_pyarrow_are_told(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"there is no file .*nowhere\.csv"):
        load(f"csv:{tmp_path}/nowhere.csv")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pyarrow, which is not installed .*: pip install 'fl-sim\[data\]'"):
        load(f"csv:{written(tmp_path)}:{SAME}")


def steps_of_reading(folder: Path, columns: int) -> int:
    """Count the lines of the program that are run while a table of so many columns is read."""
    head = ",".join(f"c{place}" for place in range(columns))
    row = ",".join(str(place % 7) for place in range(columns))
    (folder / f"{columns}.csv").write_text(f"{head},label\n" + f"{row},0\n{row},1\n" * 10)
    count, source = 0, str(Path(table.__file__).parent)

    def line(*_: object) -> object:
        nonlocal count
        count += 1
        return line

    def call(frame: FrameType, *_: object) -> object:
        return line if frame.f_code.co_filename.startswith(source) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        load(f"csv:{folder}/{columns}.csv:test=0.3")
    finally:
        sys.settrace(before)
    return count


def test_the_work_of_reading_grows_as_the_number_of_columns_does(tmp_path):
    steps_of_reading(tmp_path, 2)
    few, many = (steps_of_reading(tmp_path, columns) for columns in (150, 600))
    assert many < 4.5 * few
