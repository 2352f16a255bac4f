"""Asking teachers for their votes: what is no ballot is refused and named, or is a vote for class 0 and nobody's."""

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fl_sim.engines import wire
from fl_sim.engines.grid import InProcessGrid
from fl_sim.errors import Malformed, RunError
from fl_sim.stages.pate.procedure import ask_teachers

RECORDS, CLASSES = 4, 3
VOTES = np.array([2, 0, 1, 1])


def raw(votes: np.ndarray) -> RecordDict:
    return RecordDict({"votes": ArrayRecord({"votes": Array(votes)})})


def forged(shape: tuple[int, ...]) -> RecordDict:
    array = Array(VOTES)
    return RecordDict({"votes": ArrayRecord({"votes": Array(array.dtype, shape, array.stype, array.data[:-8])})})


MALFORMED = {
    "missing": RecordDict(),
    "a foreign record": RecordDict({"votes": ArrayRecord({"votes": Array(VOTES)}), "more": ConfigRecord({"a": 1})}),
    "a foreign array": RecordDict({"votes": ArrayRecord({"votes": Array(VOTES), "more": Array(VOTES)})}),
    "another record": RecordDict({"votes": ConfigRecord({"votes": 1})}),
    "too few": raw(VOTES[:3]),
    "too many": raw(np.append(VOTES, 0)),
    "two rows": raw(VOTES.reshape(2, 2)),
    "halves": raw(VOTES / 2),
    "short numbers": raw(VOTES.astype(np.int32)),
    "a class too many": raw(VOTES + 1),
    "a negative class": raw(VOTES - 1),
    "cut off": forged((4,)),
    "terabytes": forged((10**12,)),
}


def app_of(answer_of: Callable[[int], RecordDict]) -> ClientApp:
    app = ClientApp()

    @app.train()
    def vote(message: Message, context: Context) -> Message:
        return Message(answer_of(int(context.node_config["partition-id"])), reply_to=message)

    return app


def asked(answer_of: Callable[[int], RecordDict], *, private: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    order = wire.TaskConfig("", 0, 0.0, "", "")
    grid = InProcessGrid(app_of(answer_of), 3)
    return ask_teachers(grid, order, 10.0, teachers=3, records=RECORDS, classes=CLASSES, private=private)


def test_votes_come_back_by_teacher() -> None:
    votes, silent = asked(lambda client: wire.votes_content((VOTES + client) % CLASSES), private=True)
    assert votes.tolist() == [((VOTES + client) % CLASSES).tolist() for client in range(3)]
    assert silent == ()


@pytest.mark.parametrize("reply", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_ballot_is_named_or_votes_for_class_0(reply: RecordDict) -> None:
    def answer_of(client: int) -> RecordDict:
        return reply if client == 1 else wire.votes_content(VOTES)

    with pytest.raises(RunError, match="teacher 1 "):
        asked(answer_of, private=False)
    votes, silent = asked(answer_of, private=True)
    assert votes.tolist() == [VOTES.tolist(), [0] * RECORDS, VOTES.tolist()]
    assert silent == (1,)


def test_a_teacher_that_fails_stops_no_private_run_and_its_words_go_nowhere() -> None:
    def answer_of(client: int) -> RecordDict:
        if client != 0:
            raise ValueError("my record is [0.25, 0.5]")
        return wire.votes_content(VOTES)

    with pytest.raises(RunError, match="teacher 1 failed: ValueError: my record"):
        asked(answer_of, private=False)
    assert asked(answer_of, private=True)[1] == (1, 2)

    def nobody(client: int) -> RecordDict:
        raise ValueError("my record is [0.25, 0.5]")

    with pytest.raises(RunError, match="none of 3 teachers voted") as caught:
        asked(nobody, private=True)
    assert "0.25" not in str(caught.value)
    assert "0.25" in caught.value.private


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(st.sampled_from([np.int64, np.uint8, np.float32, np.bool_]), arrays.array_shapes(max_dims=2)))
def test_whatever_array_is_sent_one_class_a_record_comes_out_or_a_refusal(sent: np.ndarray) -> None:
    try:
        votes = wire.read_votes(raw(sent), RECORDS, CLASSES)
    except Malformed:
        return
    assert votes.shape == (RECORDS,)
    assert ((votes >= 0) & (votes < CLASSES)).all()
    assert votes.tolist() == sent.tolist()
