"""The engine for tests answers by a function; failures, lost replies and their order are those of an engine."""

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fl_sim.engines.grid import CLIENT_RAISED, TOO_LATE
from fl_sim.testing_engine import FakeEngine


def asked(grid: FakeEngine, timeout: float = 5.0) -> list[Message]:
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    return grid.send_and_receive(messages, timeout=timeout)


def number(client: int, message: Message) -> RecordDict:
    return RecordDict({"number": ConfigRecord({"client": client})})


def test_every_client_answers_as_the_function_says() -> None:
    grid = FakeEngine(3, number)
    replies = asked(grid, timeout=7.0)
    assert [reply.content["number"]["client"] for reply in replies] == [0, 1, 2]
    assert [reply.metadata.src_node_id for reply in replies] == list(grid.get_node_ids())
    assert (len(grid.asked), grid.waits) == (3, [7.0])


def test_what_a_client_raises_is_its_reply_and_none_is_no_reply() -> None:
    def trouble(client: int, message: Message) -> RecordDict | None:
        if client == 0:
            raise ValueError("no records")
        if client == 1:
            raise TimeoutError("too slow")
        return None

    broken, late = asked(FakeEngine(3, trouble))
    assert (broken.error.code, late.error.code) == (CLIENT_RAISED, TOO_LATE)
    assert "ValueError: no records" in broken.error.reason
    assert late.error.reason == "too slow"


def test_ctrl_c_is_no_clients_answer() -> None:
    def interrupted(client: int, message: Message) -> RecordDict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked(FakeEngine(1, interrupted))


def test_replies_come_in_the_order_that_is_asked_for() -> None:
    replies = asked(FakeEngine(3, number, order=lambda replies: replies[::-1]))
    assert [reply.content["number"]["client"] for reply in replies] == [2, 1, 0]
