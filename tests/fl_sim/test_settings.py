"""Settings from files, short forms and objects."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.kinds import field_defaults, kinds
from fl_sim.mistakes import explain, guess
from fl_sim.settings import MOST_BYTES, OneOf, Settings, parse_table, read_table
from partitions import Dirichlet, Iid, LabelK, Shards


class Plain(Settings):
    kind: Literal["plain"] = "plain"


class Tuned(Settings):
    kind: Literal["tuned"] = "tuned"
    rate: float = Field(0.1, gt=0)
    steps: int = 3


@dataclass(frozen=True)
class Counted:
    kind: Literal["count-k"] = "count-k"
    k: int = 1


Choice = Plain | Tuned | Counted


class Chosen(Settings):
    choice: Annotated[Choice, OneOf("choice")] = Plain()


def chosen(value):
    """Return the choice that a short form or a table stands for. Raises UserError as an experiment does."""
    try:
        return Chosen.model_validate({"choice": value}).choice
    except ValidationError as error:
        raise UserError(explain(error, Chosen, "")) from error


class Inner(Settings):
    choice: Annotated[Choice, Field(discriminator="kind")] = Plain()
    width: int = 4


class Outer(Settings):
    inner: Inner = Inner()
    single: Tuned = Tuned()


def _message(table):
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(table)
    return explain(caught.value, Outer, "")


def test_kinds_and_defaults_are_read_off_the_classes():
    assert kinds(Choice) == {"plain": Plain, "tuned": Tuned, "count-k": Counted}
    assert kinds(Tuned) == {"tuned": Tuned}
    assert field_defaults(Tuned) == {"kind": "tuned", "rate": 0.1, "steps": 3}
    assert field_defaults(Counted) == {"kind": "count-k", "k": 1}


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("plain", {"kind": "plain"}),
        ("tuned", {"kind": "tuned"}),
        ("tuned:0.05", {"kind": "tuned", "rate": "0.05"}),
        ("count-7", {"kind": "count-k", "k": "7"}),
        ("count-k", {"kind": "count-k"}),
        ("count-k:7", {"kind": "count-k", "k": "7"}),
    ],
)
def test_short_forms_grow_into_tables(text, table):
    assert OneOf("choice").expand(text, Choice) == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tunde", r"unknown choice 'tunde' \(did you mean 'tuned'\?\); valid: plain, tuned, count-k"),
        ("xyzzy", "unknown choice 'xyzzy'; valid: plain, tuned, count-k"),
        ("tuned-3", "unknown choice 'tuned-3'"),
        ("count-", "unknown choice 'count-'"),
        ("", "unknown choice ''; valid"),
        ("plain:3", "choice 'plain' takes no parameter, got 'plain:3'"),
    ],
)
def test_unknown_short_forms_list_what_is_valid_and_guess(text, message):
    with pytest.raises(UserError, match=message):
        OneOf("choice").expand(text, Choice)


def test_a_choice_takes_short_forms_and_tables():
    assert chosen("tuned:0.5") == Tuned(rate=0.5)
    assert chosen({"kind": "count-k", "k": 2}) == Counted(k=2)
    assert chosen({"kind": "tuned", "steps": "4"}) == Tuned(steps=4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"rate": 1.0}, r"unknown key .choice\.rate.; valid here: kind"),
        ({"kind": "tunde"}, "choice needs a kind, one of plain, tuned, count-k; got 'tunde'"),
        (
            {"kind": "tuned", "rat": 1.0},
            r"unknown key 'choice.rat' \(did you mean 'rate'\?\); valid here: kind, rate, steps",
        ),
        ("tuned:-1", "choice.rate = '-1': input should be greater than 0"),
        ("tuned:nan", "choice.rate = 'nan': input should be a finite number"),
        ("tuned:x", "choice.rate = 'x': input should be a valid number"),
    ],
)
def test_a_choice_says_what_is_wrong(value, message):
    with pytest.raises(UserError, match=message):
        chosen(value)


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("label-1", LabelK(k=1)),
        ("label-12", LabelK(k=12)),
        ("dirichlet:0.05", Dirichlet(beta=0.05)),
        ("shards:2", Shards(shards_per_client=2)),
        ("iid", Iid()),
    ],
)
def test_schemes_have_the_papers_short_forms(text, scheme):
    assert experiment_from({"partition": text}).partition == scheme


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("dirichlt:0.05", r"unknown partition 'dirichlt:0.05' \(did you mean 'dirichlet'\?\)"),
        ("dirichlet:nan", r"partition\.beta = 'nan'|beta=nan"),
        ({"kind": "dirichlet", "betta": 1}, r"unknown key 'partition.betta' \(did you mean 'beta'\?\)"),
    ],
)
def test_schemes_say_what_is_wrong(value, message):
    with pytest.raises(UserError, match=message):
        experiment_from({"partition": value})


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Tuned().rate = 3.0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"iner": {}}, "unknown key 'iner' (did you mean 'inner'?); valid here: inner, single"),
        ({"inner": {"widht": 1}}, "unknown key 'inner.widht' (did you mean 'width'?); valid here: choice, width"),
        ({"inner": {"zzz": 1}}, "unknown key 'inner.zzz'; valid here: choice, width"),
        ({"single": {"rat": 1}}, "unknown key 'single.rat' (did you mean 'rate'?); valid here: kind, rate, steps"),
        (
            {"inner": {"choice": {"kind": "tuned", "stepz": 1}}},
            "unknown key 'inner.choice.stepz' (did you mean 'steps'?); valid here: kind, rate, steps",
        ),
        # a key of another kind is not offered for this one
        ({"inner": {"choice": {"kind": "plain", "rate": 1}}}, "unknown key 'inner.choice.rate'; valid here: kind"),
        (
            {"inner": {"choice": {"kind": "tunde"}}},
            "inner.choice needs a kind, one of plain, tuned, count-k; got 'tunde' (did you mean 'tuned'?)",
        ),
        ({"inner": {"choice": {"rate": 1}}}, "inner.choice needs a kind, one of plain, tuned, count-k; got None"),
        (
            {"inner": {"choice": {"kind": "tuned", "rate": float("nan")}}},
            "inner.choice.rate = nan: input should be a finite number",
        ),
        (
            {"inner": {"choice": {"kind": "count-k", "k": "x"}}},
            "inner.choice.k = 'x': input should be a valid integer, unable to parse string as an integer",
        ),
        ({"inner": 3}, "inner = 3: input should be a valid dictionary or instance of Inner"),
        (
            {"inner": {"width": []}, "single": {"rate": 0}},
            "inner.width = []: input should be a valid integer; single.rate = 0: input should be greater than 0",
        ),
    ],
)  # fmt: skip
def test_every_mistake_is_named_with_its_place_its_value_and_what_is_valid(table, message):
    assert _message(table) == message


def test_guesses_are_close_or_none():
    assert guess("fedvag", ["fedavg", "scaffold"]) == " (did you mean 'fedavg'?)"
    assert guess("xyz", ["fedavg", "scaffold"]) == ""


def test_messages_stay_short_whatever_was_given():
    table = {f"key{number}": "x" * 10_000 for number in range(1000)} | {"rounds": "y" * 10_000}
    with pytest.raises(UserError, match=r"and 999 more mistakes$") as refusal:
        experiment_from(table)
    assert len(str(refusal.value)) < 5 * 700
    with pytest.raises(UserError, match="valid: colour, dirichlet, domain, drift, feature-noise, iid") as refusal:
        experiment_from({"partition": "z" * 100_000})
    assert len(str(refusal.value)) < 3000


def test_whole_numbers_beyond_64_bits_are_refused():
    with pytest.raises(UserError, match="seed is a whole number of 19 digits: it must fit into 64 bits"):
        experiment_from({"seed": 2**63})
    assert experiment_from({"seed": 2**63 - 1}).seed == 2**63 - 1


def test_a_setting_deeper_than_any_is_refused_at_once():
    with pytest.raises(UserError, match="has 20000 dots"):
        with_overrides({}, ["a" + ".b" * 20_000 + "=1"])


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("algorithm.classifiers=discriminant,mlp", lambda one: one.algorithm.classifiers == ("discriminant", "mlp")),
        ("algorithm.classifiers=quadratic-discriminant", lambda one: len(one.algorithm.classifiers) == 1),
        ("preprocess.client_gammas=0.1,0.2", lambda one: one.preprocess.client_gammas == (0.1, 0.2)),
    ],
)
def test_a_list_may_be_typed_with_commas(override, found):
    assert found(experiment_from(with_overrides({"algorithm": "tstr", "clients": 2}, [override])))


def test_what_is_wrong_in_a_list_that_was_typed_is_named():
    with pytest.raises(UserError, match=r"algorithm.classifiers.1 = 'nonsense': unknown model"):
        experiment_from(with_overrides({"algorithm": "tstr"}, ["algorithm.classifiers=mlp,nonsense"]))


ANY_TEXT = st.text() | st.text(alphabet="[]{}=.,\"'#\n ae1-+_", max_size=200)


def test_a_good_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path):
    path = tmp_path / "good.toml"
    path.write_text(tomli_w.dumps({"rounds": 3, "local": {"epochs": 2}}))
    assert read_table(path) == {"rounds": 3, "local": {"epochs": 2}}
    path.write_bytes(b"\xef\xbb\xbfrounds = 3")
    assert read_table(path) == {"rounds": 3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = = 3", "is not a TOML file"),
        (b"rounds = 1\nrounds = 2", "is not a TOML file"),
        (b"\xff\xfe", "is not a TOML file"),
        (bytes(1000), "is not a TOML file"),
        (b"x = " + b"[" * 100_000 + b"]" * 100_000, "nested more than"),
        (b"x = " + b"[" * 18 + b"]" * 18, "nested more than"),
        (b"x = " + b"{a = " * 50_000 + b"1" + b"}" * 50_000, "nested more than"),
        (b"x" + b".a" * 50_000 + b" = 1", "nested more than"),
        (b"[x" + b' . "a b"' * 50_000 + b"]", "nested more than"),
        (b"rounds = " + b"9" * 100_000, "is not a TOML file: Exceeds the limit"),
        (b"rounds = 1" + b"0" * 400, "a whole number of 401 digits"),
        (b"rounds = [-9223372036854775809]", "a whole number of 19 digits"),
        (b"".join(b"k%d = 1\n" % number for number in range(200_000)), "more than 1,048,576 bytes"),
    ],
    ids=lambda value: value[:12].decode("latin-1") if isinstance(value, bytes) else "",
)  # fmt: skip
def test_what_is_no_table_of_settings_is_refused_in_one_short_line_and_at_once(content, message, tmp_path: Path):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(UserError, match=message) as refusal:
        read_table(path)
    assert time.process_time() - start < 5
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_what_is_no_file_is_refused_without_being_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="is no regular file: give the path of a TOML file"):
            read_table(path)
    with pytest.raises(UserError, match=r"no such file: .*missing.toml"):
        read_table(tmp_path / "missing.toml")
    for path in (tmp_path / "loop", tmp_path / "file" / "below", tmp_path / ("x" * 300), Path("a\0b")):
        with pytest.raises(UserError, match="cannot be read") as refusal:
            read_table(path)
        assert "\0" not in str(refusal.value)


def test_a_file_of_the_largest_size_is_read(tmp_path: Path):
    path = tmp_path / "large.toml"
    path.write_text("a = 1 #".ljust(MOST_BYTES, "x"))
    assert read_table(path) == {"a": 1}
    path.write_text("a = 1 #".ljust(MOST_BYTES + 1, "x"))
    with pytest.raises(UserError, match="more than"):
        read_table(path)


@given(ANY_TEXT)
def test_any_text_is_a_table_or_a_refusal(text: str):
    try:
        table = parse_table(text, "it")
    except UserError as error:
        assert str(error).startswith("it ")  # noqa: PT017 (a refusal is one of two right answers)
    else:
        assert isinstance(table, dict)
