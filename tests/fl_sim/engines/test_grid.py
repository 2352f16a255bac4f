"""The Grid that runs every client in this process."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Lock

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.run import Run
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.engines import wire
from fl_sim.engines.batching import CLIENT_RAISED, STEPS_AT_A_TIME, TOO_LATE, BatchHandler, ClientBatching, partition_of
from fl_sim.engines.grid import Groups, InProcessGrid

TASKS = frozenset({"release"})


def app() -> ClientApp:
    """A client that replies with its number; client 1 does what it is told."""
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        action = message.content.config_records["order"]["action"]
        client = int(str(context.node_config["partition-id"]))
        if client == 1 and action == "raise":
            raise ValueError("bad record")
        if client == 1 and action == "exit":
            raise SystemExit(3)
        if client == 1 and action == "sleep":
            time.sleep(0.7)
        return Message(RecordDict({"report": MetricRecord({"client": client})}), reply_to=message)

    return made


def messages(grid: InProcessGrid, action: str = "") -> list[Message]:
    content = RecordDict({"order": ConfigRecord({"action": action})})
    return [Message(content, node, "train") for node in grid.get_node_ids()]


def clients_of(replies: list[Message]) -> list[object]:
    return [reply.content.metric_records["report"]["client"] for reply in replies]


def test_node_i_plays_client_i_and_replies_come_in_the_order_of_messages() -> None:
    grid = InProcessGrid(app(), 4)
    sent = messages(grid)[::-1]
    assert [partition_of(message) for message in sent] == [3, 2, 1, 0]
    replies = grid.send_and_receive(sent)
    assert clients_of(replies) == [3, 2, 1, 0]
    assert [reply.metadata.reply_to_message_id for reply in replies] == [m.metadata.message_id for m in sent]


def test_pushed_messages_can_be_pulled_once() -> None:
    grid = InProcessGrid(app(), 3)
    ids = list(grid.push_messages(messages(grid)))
    assert clients_of(list(grid.pull_messages(ids))) == [0, 1, 2]
    assert list(grid.pull_messages(ids)) == []


@pytest.mark.parametrize(("action", "reason"), [("raise", "ValueError: bad record"), ("exit", "SystemExit: 3")])
def test_a_client_that_raises_is_one_error_reply_and_no_more(action: str, reason: str) -> None:
    grid = InProcessGrid(app(), 3)
    replies = grid.send_and_receive(messages(grid, action))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    wanted = f'action == "{action}":'
    line = 2 + next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines()) if text.strip().endswith(wanted)
    )
    place = f"{__file__}:{line}, in train"
    assert (replies[1].error.code, replies[1].error.reason) == (CLIENT_RAISED, f"{reason} ({place})")


def test_clients_whose_turn_does_not_come_before_the_deadline_are_error_replies() -> None:
    grid = InProcessGrid(app(), 3)
    replies = grid.send_and_receive(messages(grid, "sleep"), timeout=0.5)
    assert [reply.has_error() for reply in replies] == [False, False, True]
    assert replies[2].error.code == TOO_LATE
    assert "was not started in that time" in replies[2].error.reason


def test_workers_answer_side_by_side_and_in_the_order_of_messages() -> None:
    meeting = Barrier(2)  # passed only if two clients train at the same time

    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        meeting.wait(20)
        client = int(str(context.node_config["partition-id"]))
        if client == 3:
            raise ValueError("bad record")
        return Message(RecordDict({"report": MetricRecord({"client": client})}), reply_to=message)

    heard: list[int] = []
    grid = InProcessGrid(made, 4, heard.append, workers=2)
    replies = grid.send_and_receive(messages(grid))
    grid.close()
    assert clients_of(replies[:3]) == [0, 1, 2]
    assert re.fullmatch(r"ValueError: bad record \(.*/test_grid\.py:\d+, in train\)", replies[3].error.reason)
    assert heard == [1, 2, 3, 4]


def test_workers_keep_the_deadline() -> None:
    grid = InProcessGrid(app(), 8, workers=2)
    replies = grid.send_and_receive([messages(grid, "sleep")[1] for _ in range(6)], timeout=0.5)
    grid.close()
    assert [reply.has_error() for reply in replies] == [False, False, True, True, True, True]
    assert {reply.error.code for reply in replies[2:]} == {TOO_LATE}


def together(play: BatchHandler, steps: list[int], stack: int = 1) -> ClientBatching:
    return ClientBatching(lambda: play, steps, stack)


def unanswered(pieces: list[Message]) -> list[Message]:
    raise AssertionError(pieces)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 9))
def test_pieces_of_work_hold_every_client_once_and_the_longest_come_first(
    steps: list[int], workers: int, stack: int
) -> None:
    sent = messages(InProcessGrid(app(), len(steps)))
    pieces = together(unanswered, steps, stack).batches(sent, workers)
    order = [partition_of(message) for piece in pieces for message in piece]
    assert sorted(order) == list(range(len(steps)))
    assert [steps[client] for client in order] == sorted(steps, reverse=True)
    for piece in pieces:
        assert 1 <= len(piece) <= stack or stack == 1
        most = STEPS_AT_A_TIME if workers == 1 else min(STEPS_AT_A_TIME, sum(steps) / (2 * workers))
        assert stack > 1 or len(piece) == 1 or sum(steps[partition_of(message)] for message in piece) <= most
    assert stack == 1 or {len(piece) for piece in pieces[:-1]} <= {stack}


def test_what_is_little_work_altogether_is_one_piece_and_larger_work_is_cut_into_no_smaller_ones() -> None:
    sent = messages(InProcessGrid(app(), 40))
    sizes = {
        least: [len(piece) for piece in replace(together(unanswered, [2] * 40), least_steps=least).batches(sent, 2)]
        for least in (100, 30, 6)
    }
    assert sizes == {100: [40], 30: [15, 15, 10], 6: [3, 4, 6, 6, 5, 4, 3, 3, 3, 3]}


def test_a_piece_has_no_more_clients_than_memory_is_for() -> None:
    sent = messages(InProcessGrid(app(), 5))
    kept = replace(together(unanswered, [1] * 5), least_steps=100, most_clients=2)
    assert [len(piece) for piece in kept.batches(sent, 1)] == [2, 2, 1]


def test_pieces_grow_so_that_nobody_waits_long_for_the_first_one_and_shrink_towards_the_last_one() -> None:
    sent = messages(InProcessGrid(app(), 40))
    sizes = [[len(piece) for piece in together(unanswered, [2] * 40).batches(sent, workers)] for workers in (1, 2)]
    assert sizes == [[8] * 5, [2, 4, 6, 7, 5, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(("workers", "stack"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_clients_trained_together_are_answered_in_the_order_of_messages(workers: int, stack: int) -> None:
    heard: list[int] = []

    def play(piece: list[Message]) -> list[Message]:
        reports = [MetricRecord({"client": partition_of(message), "of": len(piece)}) for message in piece]
        return [Message(RecordDict({"report": made}), reply_to=to) for made, to in zip(reports, piece, strict=True)]

    grid = InProcessGrid(app(), 5, heard.append, workers=workers, batching=together(play, [3, 9, 9, 1, 1], stack))
    replies = grid.send_and_receive(messages(grid))
    grid.close()
    assert clients_of(replies) == [0, 1, 2, 3, 4]
    sizes = {(1, 1): [4, 1, 4, 4, 4], (2, 1): [1] * 5, (1, 2): [2, 2, 2, 2, 1], (2, 2): [2, 2, 2, 2, 1]}
    assert [reply.content.metric_records["report"]["of"] for reply in replies] == sizes[workers, stack]
    assert heard == [1, 2, 3, 4, 5]


def test_stacks_are_trained_one_after_another() -> None:
    busy = Lock()

    def play(piece: list[Message]) -> list[Message]:
        assert busy.acquire(blocking=False)
        time.sleep(0.01)
        busy.release()
        return [Message(RecordDict(), reply_to=message) for message in piece]

    grid = InProcessGrid(app(), 8, workers=4, batching=together(play, [1] * 8, stack=2))
    assert len(grid.send_and_receive(messages(grid))) == 8
    grid.close()


def test_a_thread_that_fails_is_heard_of() -> None:
    grid = InProcessGrid(app(), 4, workers=2, batching=together(unanswered, [1] * 4))
    with pytest.raises(AssertionError):
        grid.send_and_receive(messages(grid))
    grid.close()


def test_after_ctrl_c_threads_finish_what_they_have_begun_and_begin_no_more() -> None:
    begun: list[int] = []

    def play(piece: list[Message]) -> list[Message]:
        begun.append(len(piece))
        time.sleep(0.05)
        return [Message(RecordDict(), reply_to=message) for message in piece]

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    grid = InProcessGrid(app(), 40, interrupt, workers=2, batching=together(play, [STEPS_AT_A_TIME] * 40))
    with pytest.raises(KeyboardInterrupt):
        grid.send_and_receive(messages(grid))
    grid.close()
    assert 1 <= len(begun) <= 4


def asked(grid: InProcessGrid) -> list[Message]:
    content = RecordDict({"order": ConfigRecord({"task": "release"})})
    return [Message(content, node, wire.TRAIN) for node in grid.get_node_ids()]


def reports(piece: Sequence[Message]) -> list[Message]:
    made = [MetricRecord({"client": partition_of(message), "of": len(piece)}) for message in piece]
    return [Message(RecordDict({"report": one}), reply_to=to) for one, to in zip(made, piece, strict=True)]


@pytest.mark.parametrize(("clients", "threads", "sizes"), [(10, 2, [5] * 10), (10, 8, [3] * 9 + [1]), (2, 1, [2] * 2)])
def test_clients_that_release_records_are_played_several_at_a_time(
    clients: int, threads: int, sizes: list[int]
) -> None:
    heard: list[int] = []
    groups = Groups(TASKS, lambda piece, _: reports(piece), threads)
    grid = InProcessGrid(app(), clients, heard.append, groups=groups)
    replies = grid.send_and_receive(asked(grid))
    grid.close()
    assert clients_of(replies) == list(range(clients))
    assert [reply.content.metric_records["report"]["of"] for reply in replies] == sizes
    assert heard == list(range(1, clients + 1))


def test_generators_train_side_by_side() -> None:
    meeting = Barrier(2)  # passed only if two threads play at the same time

    def release(piece: Sequence[Message], check: Callable[[], None]) -> list[Message]:
        meeting.wait(20)
        return reports(piece)

    grid = InProcessGrid(app(), 6, groups=Groups(TASKS, release, 2))
    assert clients_of(grid.send_and_receive(asked(grid))) == list(range(6))
    grid.close()


def test_generators_stop_at_their_next_step_after_ctrl_c() -> None:
    ended: list[int] = []

    def release(piece: Sequence[Message], check: Callable[[], None]) -> list[Message]:
        if partition_of(piece[0]):
            try:
                while True:
                    time.sleep(0.01)
                    check()
            finally:
                ended.append(partition_of(piece[0]))
        return reports(piece)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    grid = InProcessGrid(app(), 30, interrupt, groups=Groups(TASKS, release, 2))
    with pytest.raises(KeyboardInterrupt):
        grid.send_and_receive(asked(grid))
    grid.close()
    assert len(ended) <= 2


def test_generators_keep_the_deadline() -> None:
    def release(piece: Sequence[Message], check: Callable[[], None]) -> list[Message]:
        time.sleep(0.7)
        return reports(piece)

    grid = InProcessGrid(app(), 20, groups=Groups(TASKS, release, 1))
    replies = grid.send_and_receive(asked(grid), timeout=0.5)
    grid.close()
    assert [reply.has_error() for reply in replies] == [False] * 10 + [True] * 10


def test_what_is_not_training_is_asked_one_client_after_another() -> None:
    made, busy = ClientApp(), Lock()

    @made.query()
    def who(message: Message, context: Context) -> Message:
        assert busy.acquire(blocking=False)
        time.sleep(0.01)
        busy.release()
        return Message(RecordDict({"report": MetricRecord({"client": 0})}), reply_to=message)

    grid = InProcessGrid(made, 4, workers=4)
    replies = grid.send_and_receive([Message(RecordDict(), node, "query") for node in grid.get_node_ids()])
    grid.close()
    assert not any(reply.has_error() for reply in replies)


def test_progress_hears_of_every_reply() -> None:
    heard: list[int] = []
    grid = InProcessGrid(app(), 3, heard.append)
    grid.send_and_receive(messages(grid))
    assert heard == [1, 2, 3]


def test_the_private_parts_of_flower_that_a_grid_needs_are_where_they_were() -> None:
    grid = InProcessGrid(app(), 1)
    grid.set_run(Run.create_empty(7))
    assert grid.run.run_id == 7
    message = grid.create_message(RecordDict(), "train", 1000, "group")
    assert (message.metadata.dst_node_id, message.metadata.group_id) == (1000, "group")
    [message_id] = grid.push_messages(messages(grid))
    assert len(message_id) == 32
