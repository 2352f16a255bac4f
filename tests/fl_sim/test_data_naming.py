"""The name of the user's own records says all of how they are read, in one line or as a table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.data.naming import OwnName, as_table, from_table, own_name, short_label, without_settings
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from, with_overrides


def test_settings_stand_behind_the_place():
    assert own_name("csv:my/patients.csv:label=outcome:drop=id+name:range.age=0..100:category.sex=f+m") == OwnName(
        "csv",
        "my/patients.csv",
        {"label": ("outcome",), "drop": ("id", "name")},
        {"range": {"age": ("0", "100")}, "category": {"sex": ("f", "m")}},
    )


@pytest.mark.parametrize("name", ["digits", "mnist", "my.sets:hospitals", "csv:", "cvs:a.csv"])
def test_what_names_no_files_of_the_users_own_is_left_to_others(name):
    assert own_name(name) is None


def test_a_place_may_hold_colons():
    assert own_name("npz:/data/12:30/a=b.npz") == OwnName("npz", "/data/12:30/a=b.npz")


WORD = st.text(min_size=1, max_size=8).filter(str.isprintable)


@given(label=WORD, drop=st.lists(WORD, min_size=1, max_size=3), column=WORD, categories=st.lists(WORD, min_size=1))
def test_a_table_and_its_line_say_the_same_whatever_columns_are_called(label, drop, column, categories):
    table = {"kind": "csv", "place": "a.csv", "label": label, "drop": drop, "category": {column: categories}}
    assert as_table(from_table(table)) == table
    assert experiment_from({"data": table}).data == from_table(table)


def test_single_settings_are_laid_over_the_name():
    typed = ["data=csv:a.csv", "data.label=outcome", "data.test=0.2", "data.range.age=0..100", "data.drop=id+name"]
    line = "csv:a.csv:label=outcome:test=0.2:drop=id+name:range.age=0..100"
    found = experiment_from(with_overrides({}, typed)).data
    assert own_name(found) == own_name(line)
    written = experiment_from({"data": {"kind": "csv", "place": "a.csv", "test": 0.2, "range": {"age": [0, 100]}}})
    assert written.data == "csv:a.csv:test=0.2:range.age=0..100"
    assert experiment_from(with_overrides(written.as_written(), ["data.label=x:y"])).data.endswith(":label=x%3Ay")


def test_a_short_name_is_without_settings():
    assert without_settings("csv:a.csv:label=outcome") == "csv:a.csv"
    assert without_settings("digits") == "digits"


def test_labels_in_tables_are_short_and_tell_settings_apart():
    names = [f"csv:a.csv:label=x:test=0.2:test_seed={seed}" for seed in range(50)]
    assert len({short_label(name) for name in names}) == 50
    assert all(len(short_label(name)) == len("csv:a.csv [0000]") for name in names)
    assert (short_label("npz:a.npz"), short_label("mnist")) == ("npz:a.npz", "mnist")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.label=x"], r"kind must be one of csv, .* got None"),
        (["data=csv:a.csv", "data.lable=x"], r"unknown setting data\.lable of csv data \(did you mean 'label'\?\)"),
        (["data=csv:a.csv", "data.range=3"], r"data\.range is set for each column, for example data\.range\.age=0\.\."),
        (["data=csv:a.csv", "data.label.x=3"], r"data\.label is a single value|label is a single value"),
        (["data=npz:a.npz", "data.label=x"], r"unknown setting data\.label of npz data"),
        (["data=digits", "data.label=x"], r"data=digits has no settings inside"),
    ],
)
def test_what_cannot_be_set_is_refused_in_one_line(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        experiment_from(with_overrides({}, overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "cvs", "place": "a"}, r"got 'cvs' \(did you mean 'csv'\?\)"),
        ({"kind": "csv"}, r"needs place, the path of the records"),
        ({"kind": "csv", "place": "a", "label": ["x", "y"]}, r"takes one value \(several labels per record"),
    ],
)
def test_a_table_that_is_no_name_is_refused(table, message):
    with pytest.raises(UserError, match=message):
        experiment_from({"data": table})


def test_a_setting_that_is_given_twice_is_refused():
    with pytest.raises(UserError, match="label is set twice"):
        own_name("csv:a.csv:label=x:label=y")
