"""The log of rounds: what is not exactly what was written is refused, but for what a crash leaves."""

from dataclasses import fields
from pathlib import Path

import pytest

from fl_sim.errors import UserError
from fl_sim.store.run_directory import (
    MEASURED,
    RoundRecord,
    append_round,
    chain_start,
    chained,
    coarse,
    keep_rounds,
    read_result,
    read_rounds,
    write_config,
    write_text,
)


def _record(number: int, accuracy: float = 0.5) -> RoundRecord:
    return RoundRecord(number, accuracy, 1.0, None, None, 10, 0.01, 0.1)


def _written(out: Path, rounds: int, accuracy: float = 0.5) -> list[str]:
    """Return the chain after each round, the first before any."""
    out.mkdir()
    write_config(out, {"seed": 3})
    chain = [chain_start(out)]
    for number in range(1, rounds + 1):
        chain.append(append_round(out, _record(number, accuracy), chain[-1]))
    return chain


def _lines(out: Path) -> list[bytes]:
    return (out / "rounds.jsonl").read_bytes().splitlines(keepends=True)


def test_the_log_comes_back(tmp_path: Path) -> None:
    chain = _written(tmp_path / "run", 3)
    assert read_rounds(tmp_path / "run") == [_record(1), _record(2), _record(3)]
    assert chained(tmp_path / "run") == chain[3]
    assert keep_rounds(tmp_path / "run", 3, chain[3]) == [_record(1), _record(2), _record(3)]


@pytest.mark.parametrize("more", [b"", b'{"round": 4, "test_', b"{", bytes(50)])
def test_what_a_crash_leaves_behind_the_last_round_is_taken_off(tmp_path: Path, more: bytes) -> None:
    chain = _written(tmp_path / "run", 4)
    whole = _lines(tmp_path / "run")
    (tmp_path / "run" / "rounds.jsonl").write_bytes(b"".join(whole[:3]) + (more or whole[3]))
    assert [record.round for record in keep_rounds(tmp_path / "run", 3, chain[3])] == [1, 2, 3]
    assert _lines(tmp_path / "run") == whole[:3]


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines, other: [*lines[:1], *lines[2:]],
        lambda lines, other: [lines[0], lines[0], *lines[1:]],
        lambda lines, other: [lines[1], lines[0], lines[2]],
        lambda lines, other: [*lines[:2], other[2]],
        lambda lines, other: [*lines[:2], bytes(len(lines[2]) - 1) + b"\n"],
        lambda lines, other: [*lines[:2], lines[2][:-2]],
        lambda lines, other: [*lines, *other],
        lambda lines, other: [*lines, other[2], other[2]],
        lambda lines, other: [*lines[:2], lines[2].replace(b"0.5", b"0.6")],
        lambda lines, other: [*lines[:2], b'{"round": 3}\n'],
        lambda lines, other: [*lines[:2], b"[" * 100_000 + b"\n"],
        lambda lines, other: [*lines[:2], lines[2].replace(b"0.5", b"NaN")],
        lambda lines, other: [],
    ],
    ids=["lost", "doubled", "reordered", "foreign", "zeros", "cut", "another log", "tail", "edited", "half", "deep",
         "nan", "empty"],
)  # fmt: skip
def test_any_other_log_is_refused(tmp_path: Path, damage) -> None:
    chain = _written(tmp_path / "run", 3)
    _written(tmp_path / "other", 3, accuracy=0.7)
    (tmp_path / "run" / "rounds.jsonl").write_bytes(
        b"".join(damage(_lines(tmp_path / "run"), _lines(tmp_path / "other")))
    )
    with pytest.raises(UserError, match=r"rounds\.jsonl"):
        keep_rounds(tmp_path / "run", 3, chain[3])


def test_the_chain_begins_with_the_settings(tmp_path: Path) -> None:
    chain = _written(tmp_path / "run", 2)
    write_config(tmp_path / "run", {"seed": 4})
    with pytest.raises(UserError, match=r"config\.toml was changed"):
        keep_rounds(tmp_path / "run", 2, chain[2])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b"1" * 5000])
def test_a_result_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "result.json").write_bytes(content)
    assert read_result(tmp_path) is None


def test_what_a_round_measures_is_known_by_its_name() -> None:
    # A longer run takes what the last round alone had off it by these names: a new field has to be put on one side.
    others = {part.name for part in fields(RoundRecord) if not part.name.startswith(MEASURED)}
    assert others == {
        "round", "train_loss", "epsilon", "cohort", "learning_rate", "seconds", "bytes_down", "bytes_up",
        "virtual_seconds", "late", "staleness",
    }  # fmt: skip


def test_private_times_fall_on_a_coarse_grid() -> None:
    assert {coarse(seconds) for seconds in (0.0, 3.7, 9.99, 10.0)} == {10.0}
    assert [coarse(seconds) for seconds in (10.01, 599.0, 601.0, 36_001.0)] == [60.0, 600.0, 3600.0, 360_000.0]
    assert all(coarse(seconds) >= seconds for seconds in (0.1, 15.0, 3_000.0, 50_000.0, 3_000_000.0))


def test_half_a_character_is_written_as_its_number(tmp_path: Path) -> None:
    write_text(tmp_path / "page.html", "a\ud800b")
    assert (tmp_path / "page.html").read_text() == "a\\ud800b"
