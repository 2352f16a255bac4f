"""TOML from outside: every file ends in a table or in one line, in bounded time and memory."""

import os
import time
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.errors import UserError
from fl_sim.settings_file import MOST_BYTES, parse_table, read_table

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
        with pytest.raises(UserError, match="is no file: settings are read from a TOML file"):
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
