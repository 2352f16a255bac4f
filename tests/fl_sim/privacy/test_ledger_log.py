"""The charge log: whole or refused, forced to disk before a release, one budget for all processes that use it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dp_accounting import dp_event
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_sim.errors import BudgetExhausted, RunError, UserError
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.events import amplify_fixed_size, amplify_poisson
from fl_sim.privacy.ledger import Charge, Ledger, Receipt, _digest
from fl_sim.privacy.terms import Adjacency, Terms

POISSON = amplify_poisson(dp_event.GaussianDpEvent(1.0), 0.1)
TERMS = Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def charged(path: Path, rounds: int = 3, first: int = 1) -> Ledger:
    book = Ledger(TERMS, path)
    for number in range(first, first + rounds):
        book.charge(POISSON, release=f"round {number}", noise="key")
    return book


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def edited(line: bytes, **changes: object) -> bytes:
    return json.dumps(json.loads(line) | changes).encode() + b"\n"


def test_a_charge_is_on_the_disk_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced.append((os.fstat(descriptor).st_ino, path.read_bytes().count(b"\n")))

    monkeypatch.setattr(os, "fsync", fsync)
    book = Ledger(TERMS, path)
    log, folder = path.stat().st_ino, path.parent.stat().st_ino
    assert {(log, 1), (folder, 1)} <= set(synced)
    book.charge(POISSON, release="round 1", noise="key")
    assert synced[-1] == (log, 2)
    book.charge(POISSON, release="round 2", noise="key")
    assert synced[-1] == (log, 3)


def test_a_charge_that_cannot_be_written_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = charged(path, 2)
    before, spent = path.read_bytes(), book.epsilon

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(RunError, match=r"cannot be written \(disk full\).*make room"):
            book.charge(POISSON, release="round 3", noise="key")
    assert path.read_bytes() == before
    assert book.epsilon == spent
    assert book.charge(POISSON, release="round 3", noise="key") == epsilon([POISSON] * 3, 1e-5)


def test_every_crash_point_keeps_all_charges_that_returned(path: Path) -> None:
    charged(path)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        book = Ledger(TERMS, path)
        assert len(book.charges) == (3 if cut == len(whole) - 1 else 2)
        book.charge(POISSON, release="round 3", noise="key")
        assert path.read_bytes() == whole
    path.write_bytes(whole[:last] + bytes(len(whole) - last))  # the file grew, its content never reached the disk
    charged(path)
    assert path.read_bytes() == whole


def test_a_crash_while_the_log_is_made_leaves_a_new_one(path: Path) -> None:
    Ledger(TERMS, path)
    head = path.read_bytes()
    for cut in range(len(head)):
        path.write_bytes(head[:cut])
        assert Ledger(TERMS, path).epsilon == 0.0
        assert len(lines_of(path)) == 1


def test_every_edited_line_is_refused_and_named(path: Path) -> None:
    charged(path)
    head, *lines = lines_of(path)
    event = {"kind": "poisson", "sampling_rate": 0.01, "event": {"kind": "gaussian", "noise_multiplier": 1.0}}
    wrong: list[tuple[int, list[bytes]]] = [
        (2, [head, *lines[1:]]),
        (2, [head, lines[1], lines[0], lines[2]]),
        (2, [edited(head, id="0" * 16), *lines]),
        (2, [head, edited(lines[0], epsilon=0.0), *lines[1:]]),
        (2, [head, lines[0].replace(b'"epsilon": ', b'"epsilon": 1e999, "more": '), *lines[1:]]),
        (2, [head, b"[" * 60_000 + b"\n"]),
        (2, [head, b" " * 200_000 + b"\n"]),
        (3, [head, lines[0], b"garbage\n", *lines[1:]]),
        (3, [head, lines[0], b'{"release": "' + b"a" * 70_000 + b'"}\n', *lines[1:]]),
        (3, [head, lines[0], edited(lines[1], event=event), lines[2]]),
        (4, [head, *lines[:2], edited(lines[2], noise="other")]),
        (4, [head, *lines[:2], edited(lines[2], chain="0" * 64)]),
        (5, [head, *lines, lines[2]]),
    ]
    for number, content in wrong:
        path.write_bytes(b"".join(content))
        with pytest.raises(RunError, match=f"ledger.jsonl is damaged, line {number}: .*charged again"):
            Ledger(TERMS, path)
        assert path.read_bytes() == b"".join(content)


def append(path: Path, charge: Charge) -> None:
    """Append a line that follows in the chain, whatever it says."""
    log = Ledger(TERMS, path)._log
    assert log is not None
    with path.open("ab") as file:
        file.write(log._line_of(charge))


@pytest.mark.parametrize("value", [-1.0, True, "1", [], 10**400])
def test_a_well_chained_line_with_senseless_values_is_refused(path: Path, value: object) -> None:
    charged(path, 1)
    append(path, Charge("round 2", "key", POISSON, value))  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"line 3: epsilon .* is not a number"):
        Ledger(TERMS, path)


def test_a_well_chained_line_with_a_further_value_is_refused(path: Path) -> None:
    log = charged(path, 1)._log
    assert log is not None
    value = json.loads(lines_of(path)[1]) | {"release": "round 2", "more": 1}
    with path.open("ab") as file:
        file.write(edited(json.dumps(value).encode(), chain=_digest(log._digests, value)))
    with pytest.raises(RunError, match="line 3: its digest does not match"):
        Ledger(TERMS, path)


def test_a_line_that_the_disk_takes_byte_by_byte_is_written_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, place: write(descriptor, data[:1], place))
    book = charged(path)
    assert Ledger(TERMS, path).charges == book.charges
    assert path.read_bytes().endswith(b"}\n")


def test_epsilon_in_the_log_is_not_believed(path: Path) -> None:
    book = charged(path, 1)
    append(path, Charge("round 2", "key", POISSON, 0.0))
    for reader in (book, Ledger(TERMS, path)):
        assert reader.affords(POISSON)
        assert reader.epsilon == epsilon([POISSON] * 2, 1e-5)
        assert reader.charge(POISSON, release="round 2", noise="key") == reader.epsilon


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"ledger": 1, "unit": "client"}\n', "older version.*fresh directory"),
        (b'{"ledger": 3, "id": "0123456789abcdef", "terms": {}}\n', "line 1: it is not the first line"),
        (b'{"ledger": 2, "id": "", "terms": {}}\n', "line 1: it is not the first line"),
        (b'{"ledger": 2, "id": "0123456789abcdef", "terms": {}, "more": 1}\n', "line 1: it is not the first line"),
        (b"[]\n", "line 1: it does not have the format of a charge log"),
        (b"not a ledger, and without an end", "line 1: it does not have the format of a charge log"),
        (b"\xff\xfe\n", "line 1: it is not JSON"),
        (b'{"ledger": 2, "id": "0123456789abcdef", "terms": {}}\n', "opened under"),
    ],
)
def test_a_foreign_file_is_refused_and_left_as_it_is(path: Path, content: bytes, match: str) -> None:
    path.write_bytes(content)
    with pytest.raises((RunError, UserError), match=match):
        Ledger(TERMS, path)
    assert path.read_bytes() == content


def test_what_is_no_file_is_refused_at_once(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    path.symlink_to(target)
    with pytest.raises(RunError, match="not a link"):
        Ledger(TERMS, path)
    assert not target.exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match="is no plain file, or too large for a privacy ledger"):
        Ledger(TERMS, path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(RunError, match="too large for a privacy ledger"):
        Ledger(TERMS, path)


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_log_with_changed_bytes_never_claims_less(path: Path, data: st.DataObject) -> None:
    path.unlink(missing_ok=True)
    receipt = charged(path).receipt
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    cut = data.draw(st.integers(0, 40))
    content[at : at + cut] = data.draw(st.binary(max_size=40))
    path.write_bytes(content)
    try:
        book = Ledger(TERMS, path, receipt=receipt)
    except (RunError, UserError):
        return
    assert book.epsilon == epsilon([POISSON] * 3, 1e-5)


def missing(path: Path, receipt: Receipt) -> None:
    path.unlink()


def cut(path: Path, receipt: Receipt) -> None:
    path.write_bytes(b"".join(lines_of(path)[: receipt.charges]))


def emptied(path: Path, receipt: Receipt) -> None:
    path.write_bytes(b"")


def exchanged(path: Path, receipt: Receipt) -> None:
    path.unlink()
    charged(path, receipt.charges + 1)


def rewritten(path: Path, receipt: Receipt) -> None:
    """Take out a line and compute the chain of the others again, which keeps the id."""
    head, *lines = lines_of(path)
    path.write_bytes(head)
    for line in lines[1:]:
        book = Ledger(TERMS, path)
        book.charge(POISSON, release=json.loads(line)["release"], noise="key")
    charged(path, 2, first=10)


@pytest.mark.parametrize("wrong", [missing, cut, emptied, exchanged, rewritten])
def test_a_log_without_what_was_paid_is_refused(path: Path, wrong: Callable[[Path, Receipt], None]) -> None:
    receipt = charged(path).receipt
    charged(path, 2, first=4)
    again = Receipt.from_json(json.loads(json.dumps(receipt.to_json())))
    assert len(Ledger(TERMS, path, receipt=again).charges) == 5
    wrong(path, receipt)
    match = "ledger.jsonl.*the checkpoint of round 3 was paid for with .*3 charges.*copy of it back, or start a new run"
    with pytest.raises(RunError, match=match):
        Ledger(TERMS, path, receipt=again, holder="the checkpoint of round 3")
    assert wrong is not missing or not path.exists()


def test_a_receipt_is_held_against_its_own_ledger_and_its_own_number_of_charges(path: Path, tmp_path: Path) -> None:
    first = charged(path, 1).receipt
    third = charged(path, 2, first=2).receipt
    other = charged(tmp_path / "other.jsonl", 3).receipt
    for receipt, wrong in (
        (replace(third, charges=2), "holds other charges"), (replace(first, charges=3), "holds other charges"),
        (replace(third, charges=4), "holds 3 charges"), (other, "is another ledger"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=f"ledger.jsonl {wrong}, but this run was paid for"):
            Ledger(TERMS, path, receipt=receipt)


def test_a_log_with_just_what_was_paid_is_enough(path: Path) -> None:
    for rounds in (0, 3):
        receipt = charged(path, rounds).receipt
        assert receipt.charges == rounds
        assert Receipt.from_json(receipt.to_json()) == receipt
        assert len(Ledger(TERMS, path, receipt=receipt).charges) == rounds


@pytest.mark.parametrize("wrong", [missing, cut, emptied, exchanged])
def test_a_log_that_changes_while_it_is_used_is_refused(path: Path, wrong: Callable[[Path, Receipt], None]) -> None:
    book = charged(path)
    wrong(path, book.receipt)
    with pytest.raises(RunError, match=r"ledger.jsonl(, which had 3 charges, no longer exists| was cut or edited)"):
        book.charge(POISSON, release="round 4", noise="key")


@pytest.mark.parametrize(
    "value", [None, [], {}, {"ledger": "a", "charges": 1}, {"ledger": "a", "charges": -1, "digest": ""}]
)
def test_a_receipt_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(RunError, match="not the receipt"):
        Receipt.from_json(value)


def test_a_charge_in_the_log_is_of_the_ledgers_adjacency(path: Path) -> None:
    Ledger(TERMS, path)
    append(path, Charge("round 1", "key", amplify_fixed_size(dp_event.GaussianDpEvent(4.0), 30, 1000), 0.1))
    with pytest.raises(UserError, match=r"replace-one .*ledger under add-or-remove-one"):
        Ledger(TERMS, path)


def test_a_log_that_is_far_too_large_is_refused_unread(path: Path) -> None:
    charged(path)
    os.truncate(path, 256 * 1024**2 + 1)
    with pytest.raises(RunError, match="too large for a privacy ledger"):
        Ledger(TERMS, path)


def test_two_ledgers_of_one_log_share_its_budget(path: Path) -> None:
    terms = Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, budget=epsilon([POISSON] * 3, 1e-5))
    one, other = Ledger(terms, path), Ledger(terms, path)
    one.charge(POISSON, release="round 1", noise="one")
    other.charge(POISSON, release="round 1", noise="other")
    assert one.identity == other.identity
    assert one.affords(POISSON)
    one.charge(POISSON, release="round 2", noise="one")
    assert not other.affords(POISSON)
    with pytest.raises(BudgetExhausted, match="after 3 releases"):
        other.charge(POISSON, release="round 2", noise="other")
    assert other.epsilon == one.epsilon == terms.budget


_HAMMER = """
import os, sys
from pathlib import Path
from dp_accounting import dp_event
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.events import amplify_fixed_size, amplify_poisson
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.terms import Adjacency, Terms
from fl_sim.errors import BudgetExhausted

event = amplify_poisson(dp_event.GaussianDpEvent(1.0), 0.1)
budget = epsilon([event] * 16, 1e-5)

def hammer(key):
    book = Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, budget=budget), Path(sys.argv[1]))
    for number in range(40):
        try:
            book.charge(event, release=f"round {number}", noise=key)
        except BudgetExhausted:
            os._exit(number)

children = []
for key in "abcd":
    if not (child := os.fork()):
        hammer(key)
    children.append(child)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_processes_that_hammer_one_budget_never_exceed_it(path: Path) -> None:
    hammering = [sys.executable, "-W", "ignore", "-c", _HAMMER, str(path)]
    said = subprocess.run(hammering, capture_output=True, text=True, timeout=300, check=True)
    assert sum(map(int, said.stdout.split())) == 16
    terms = Terms(TERMS.unit, TERMS.adjacency, 1e-5, budget=epsilon([POISSON] * 16, 1e-5))
    assert len(Ledger(terms, path).charges) == 16
