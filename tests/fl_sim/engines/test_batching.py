"""How an exchange is shared out over workers, and what is made of those that die or hang (no Ray needed)."""

import math
from collections import deque

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.engines.batching import (
    LEAST_SECONDS,
    MAX_DEATHS,
    MOST_SECONDS,
    TOO_LATE,
    WORKER_DIED,
    Exchange,
    node_context,
)
from fl_sim.engines.grid import InProcessGrid


def messages(number: int) -> list[Message]:
    grid = InProcessGrid(ClientApp(), number)
    made = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    for message in made:
        message.metadata.__dict__["_message_id"] = str(message.metadata.dst_node_id)
    return made


def reply(message: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def clients(batch: list[Message]) -> list[object]:
    return [node_context(message.metadata.dst_node_id, 99).node_config["partition-id"] for message in batch]


def reasons(work: Exchange[str], code: int) -> dict[int, str]:
    failed = [made for made in work.replies.values() if made.has_error() and made.error.code == code]
    return {made.metadata.src_node_id - 1000: made.error.reason for made in failed}


@given(st.integers(1, 300), st.integers(1, 9), st.floats(1e-9, 10) | st.just(math.inf))
def test_batches_cover_all_messages_once_and_never_hold_too_much_work(
    number: int, workers: int, seconds: float
) -> None:
    sent = messages(number)
    work: Exchange[str] = Exchange(deque(sent))
    taken = []
    while work.waiting:
        batch = work.take(seconds, [seconds] * (workers - 1))
        assert len(batch) >= 1
        assert len(batch) == 1 or len(batch) * seconds <= MOST_SECONDS
        taken += batch
    assert taken == sent


def test_batches_shrink_towards_the_end_so_that_no_worker_is_left_with_a_long_one() -> None:
    work: Exchange[str] = Exchange(deque(messages(20)))
    sizes = []
    while work.waiting:
        sizes.append(len(work.take(LEAST_SECONDS, [LEAST_SECONDS])))
    assert sizes == [5, 4, 3, 2, 2, 1, 1, 1, 1]


def test_batches_hold_about_the_same_steps_not_the_same_clients() -> None:
    steps = [40, 20, 10, *[1] * 10]
    work: Exchange[str] = Exchange(deque(messages(13)), lambda message: steps[message.metadata.dst_node_id - 1000])
    batches = []
    while work.waiting:
        batches.append([steps[int(str(client))] for client in clients(work.take(0.01, [0.01]))])
    assert batches == [[40], [20], [10], [1, 1, 1], [1, 1, 1], [1, 1], [1], [1]]


def test_stacks_are_the_same_whoever_takes_them_when() -> None:
    for workers, seconds in ((1, math.inf), (5, 1e-9)):
        work: Exchange[str] = Exchange(deque(messages(7)), stack=3)
        assert [clients(work.take(seconds, [seconds] * (workers - 1))) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_the_message_that_kills_its_second_worker_is_named_and_the_others_are_sent_again() -> None:
    sent = messages(4)
    work: Exchange[str] = Exchange(deque(sent))
    work.begin("first", [work.fresh.popleft() for _ in range(3)])
    work.worker_died("first", "the worker died")
    assert work.replies == {}
    for call in ("a", "b", "c"):
        work.begin(call, work.take(0.0))
        assert len(work.running[call]) == 1
    work.worker_died("b", "the worker died")
    work.answered("a", [reply(sent[0])])
    work.answered("c", [reply(sent[2])])
    assert reasons(work, WORKER_DIED) == {1: "the worker died while client 1 trained"}
    assert clients(work.take(0.0)) == [3]
    assert work.waiting == 0


def test_an_exchange_in_which_all_workers_die_is_given_up() -> None:
    work: Exchange[str] = Exchange(deque(messages(100)))
    for death in range(MAX_DEATHS):
        work.begin("call", work.take(math.inf))
        assert work.waiting + len(work.running) + len(work.replies) == 100, death
        work.worker_died("call", "the worker died")
    assert not work.waiting
    assert len(work.replies) == 100
    assert set(reasons(work, WORKER_DIED)) == set(range(100))


def test_a_worker_that_cannot_start_is_no_clients_fault() -> None:
    work: Exchange[str] = Exchange(deque(messages(3)))
    work.give_up("no worker can start: ImportError: no module named torch")
    assert set(reasons(work, WORKER_DIED).values()) == {"no worker can start: ImportError: no module named torch"}
    assert len(work.replies) == 3


def test_what_went_with_a_node_is_sent_again_as_it_was_and_is_no_clients_fault() -> None:
    sent = messages(6)
    work: Exchange[str] = Exchange(deque(sent), stack=2)
    for _ in range(2 * MAX_DEATHS):
        work.begin("call", work.take(math.inf))
        assert work.running["call"] == sent[:2]  # what is trained together decides the last bits
        work.node_lost("call")
        assert work.waiting == 6
    assert work.replies == {}


def test_the_last_batch_is_a_fair_part_of_all_that_is_not_answered_yet() -> None:
    work: Exchange[str] = Exchange(deque(messages(6)))
    seconds = LEAST_SECONDS / 6
    work.begin("first", work.take(seconds, [seconds]))
    assert len(work.running["first"]) == 3
    assert len(work.take(seconds, [seconds])) == 3  # not half of what is left, and half of that


def test_a_worker_has_its_next_batch_waiting_where_clients_take_no_longer_than_a_call() -> None:
    short, long = LEAST_SECONDS / 2, 2 * LEAST_SECONDS
    work: Exchange[str] = Exchange(deque(messages(20)))
    assert work.take_ahead(long, [long]) == []  # whoever is free first is to have it
    assert work.take_ahead(math.inf, []) == []  # nobody knows how long they take
    ahead = work.take_ahead(short, [short])
    assert clients(ahead) == [0, 1, 2, 3, 4]
    work.begin("dies", ahead)
    work.worker_died("dies", "the worker died")
    assert work.take_ahead(short, [short]) == []  # those who may kill their worker are to be alone there
    while work.waiting:
        work.take(short)
    assert work.take_ahead(short, [short]) == []
    stacks: Exchange[str] = Exchange(deque(messages(4)), stack=2)
    assert stacks.take_ahead(0.6 * LEAST_SECONDS, []) == []
    assert clients(stacks.take_ahead(0.5 * LEAST_SECONDS, [])) == [0, 1]


def test_a_worker_that_is_faster_takes_more() -> None:
    work: Exchange[str] = Exchange(deque(messages(96)))
    assert len(work.take(1e-3, [3e-3])) == 36  # half of its part, which is three fourths
    assert len(work.take(3e-3, [1e-3])) == int(LEAST_SECONDS / 3e-3) == 10


def test_a_slow_worker_leaves_the_last_ones_to_those_who_finish_sooner() -> None:
    work: Exchange[str] = Exchange(deque(messages(3)))
    assert work.take(1.0, [0.1, math.inf]) == []
    assert work.take(1.0, [math.inf]) != []  # nobody knows how fast the other is
    work.begin("fast", messages(20))
    assert work.take(1.0, [0.1]) != []  # it has enough to do
    work.answered("fast", [])
    assert work.take(0.1, [1.0, 1.0]) != []


def test_after_the_deadline_the_client_that_hangs_and_those_behind_it_are_told_apart() -> None:
    sent = messages(6)
    work: Exchange[str] = Exchange(deque(sent))
    work.begin("hangs", [work.fresh.popleft() for _ in range(3)])
    work.begin("mute", [work.fresh.popleft()])
    work.begin("just done", [work.fresh.popleft()])
    stale = reply(messages(7)[6])
    work.too_late({"hangs": [reply(sent[0]), stale], "just done": [reply(sent[4])]}, timeout=5)
    assert [work.replies[str(1000 + client)].has_error() for client in range(6)] == [
        False,
        True,
        True,
        True,
        False,
        True,
    ]
    assert reasons(work, TOO_LATE) == {
        1: "no answer within 5 s: it was still training",
        2: "no answer within 5 s: it waited for client 1, which did not finish",
        3: "no answer within 5 s: its worker is stuck, or was still starting",
        5: "no answer within 5 s: it waited for client 1 and client 3, which did not finish",
    }
