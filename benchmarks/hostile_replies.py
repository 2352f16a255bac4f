"""Send broken and hostile replies of every kind and see what becomes of them.

One of four clients answers with a reply that was changed at random: a record missing, foreign or of another type,
another layout, shape, type or byte, a number that cannot be, text that is no JSON, no answer, two answers, an answer
from a node that nobody asked. Each must end in one of four ways: a RunError that names the client; the zero vector
(under Global DP) or an unused vote (where votes are private); the same result as the reply before it was changed; or,
where the change left a reply that an honest client could send, another result. Everything else counts as a fault: a
traceback, a result that is silently wrong, an error that names nobody, a client's words where records are private.

    PYTHONPATH=. python benchmarks/hostile_replies.py [--replies 2000] [--seed 0] [--json]
"""

import argparse
import json
import logging
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fl_sim.engines import wire
from fl_sim.engines.grid import LocalGrid
from fl_sim.errors import RunError
from fl_sim.packed import Packing
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.terms import Adjacency, Terms
from fl_sim.simulation.stage import Run
from fl_sim.stages.dafl import pool as pools
from fl_sim.stages.feature_sums import SUMMARISE
from fl_sim.stages.pate.procedure import ask_teachers
from fl_sim.stages.shares import Shares
from fl_sim.types import ClientUpdate, Examples, Payloads
from strategies.aggregators import WeightedMean
from strategies.algorithm import payload_template, share_template
from strategies.answers import find_population
from strategies.compression.error_feedback import PowerSGD, RandK, SignSGD, TopK
from strategies.compression.layer import ClientCompression
from strategies.compression.quantization import QSGD
from strategies.fedavg import FedAvg
from strategies.fedmix import FedMix, NaiveMix
from strategies.fednova import FedNova
from strategies.fedprox import FedProx
from strategies.flower import FederatedStrategy, run_round
from strategies.global_dp import AdaptiveClipping, GlobalDP
from strategies.private import PrivateRounds
from strategies.samplers import Everyone
from strategies.scaffold import Scaffold
from strategies.server_opt import FedAdagrad, FedAdam, FedAvgM, FedYogi

CLIENTS, VICTIM, CLASSES, RECORDS, SHAPE = 4, 2, 3, 40, (2, 2)
MY_RECORD = "my record is 0.123"
MODEL = {"w": torch.linspace(-1, 1, 6).reshape(2, 3), "b": torch.zeros(2)}
OUTCOMES = ("refused by name", "counted for nothing", "same result", "another honest reply")
FAULTS = ("traceback", "silently wrong", "not named", "quoted")
DP = {"noise_multiplier": 1.0, "noise": "seeded"}
AGGREGATORS = {
    "mean": WeightedMean(),
    "global-dp": GlobalDP(**DP),
    "global-dp, adaptive": GlobalDP(**DP, adaptive_clipping=AdaptiveClipping()),
}
ALGORITHMS = (
    FedAvg(), FedProx(), Scaffold(), FedNova(), FedNova(tau_eff=2.0), FedAvgM(), FedAdam(), FedYogi(), FedAdagrad(),
    FedMix(),
)  # fmt: skip

COMPRESSORS = (TopK(share=0.5), RandK(share=0.5), QSGD(), PowerSGD(rank=1), SignSGD())


@dataclass(frozen=True)
class Answer:
    """What one client answers: a content or an error, how often, and from which node (None: its own)."""

    content: RecordDict | None
    times: int = 1
    node: int | None = None
    honest: bool = False


@dataclass(frozen=True)
class Case:
    """One kind of message. ``good``: what every client answers; ``play(grid)``: what the server makes of answers."""

    title: str
    good: tuple[RecordDict, ...]
    play: Callable[[Any], bytes]
    private: bool
    who: str = f"client {VICTIM}"


class Replying(LocalGrid):
    """Answers every exchange with contents that are there beforehand."""

    def __init__(self, good: Sequence[RecordDict], victims: Answer) -> None:
        super().__init__(len(good))
        self._answers = [victims if client == VICTIM else Answer(one) for client, one in enumerate(good)]

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:  # noqa: ARG002
        return [reply for sent in messages for reply in self._replies(sent)]

    def _replies(self, sent: Message) -> Iterator[Message]:
        answer = self._answers[sent.metadata.dst_node_id - 1000]
        for _ in range(answer.times):
            reply = Message(Error(1, MY_RECORD) if answer.content is None else answer.content, reply_to=sent)
            if answer.node is not None:
                reply.metadata.__dict__["_src_node_id"] = answer.node
            yield reply


class Remote:
    """The same as a grid of Flower's own runtime has it: its nodes are to be asked who they are."""

    def __init__(self, grid: Replying) -> None:
        self._grid = grid

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes."""
        return list(self._grid.get_node_ids())

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float) -> list[Message]:
        """Return the answers."""
        return self._grid.send_and_receive(messages, timeout=timeout)


def cases() -> Iterator[Case]:
    """Every kind of message, with every algorithm and aggregator that takes it."""
    for algorithm in ALGORITHMS:
        for name, aggregator in AGGREGATORS.items():
            private = isinstance(aggregator, GlobalDP)
            if not (private and (isinstance(algorithm, FedMix) or algorithm == FedNova())):
                title = f"train, {algorithm.kind}{', public tau' * (algorithm == FedNova(tau_eff=2.0))}, {name}"
                yield Case(title, _updates(algorithm), partial(_train, algorithm, aggregator), private)
    for compress in COMPRESSORS:
        for name in ("mean", "global-dp") if isinstance(compress, RandK) else ("mean",):
            packing = Packing(compress, seed=0)
            play = partial(_train, FedAvg(), AGGREGATORS[name], packing=packing)
            title = f"train, compress {compress.kind}, {name}"
            yield Case(title, _updates(FedAvg(), packing), play, private=name == "global-dp")
    shared = {"inputs": torch.ones(3, *SHAPE), "labels": torch.full((3, CLASSES), 1 / CLASSES)}
    for mixing in (FedMix(), NaiveMix()):
        yield Case(
            f"share, {mixing.kind}", (wire.pool_content(shared),) * CLIENTS, partial(_share, mixing), private=False
        )
    facts = {"labels_epsilon": 1.0}
    said = json.dumps({"counts": [1, 0, 2], "refused": "", "facts": facts, "receipt": None})
    yield Case(
        "synthesize", (wire.synthetic_content(torch.zeros(3, *SHAPE), said),) * CLIENTS, _synthesize, private=True
    )
    votes = (wire.votes_content(np.array([0, 1, 2, 1, 0])),) * CLIENTS
    yield Case("vote", votes, partial(_vote, private=True), private=True)
    yield Case("vote, no privacy", votes, partial(_vote, private=False), private=False, who=f"teacher {VICTIM}")
    moments = (wire.moments_content(np.arange(9.0).reshape(CLASSES, 3)),) * CLIENTS
    yield Case("summarise", moments, partial(_summarise, private=True), private=True)
    yield Case("summarise, no privacy", moments, partial(_summarise, private=False), private=False)
    yield Case("query", tuple(wire.who_content(client) for client in range(CLIENTS)), _who, private=False, who="node ")


def _updates(algorithm: Any, packing: Packing | None = None) -> tuple[RecordDict, ...]:
    def payloads(client: int) -> Payloads:
        sent = payload_template(algorithm, algorithm.init(MODEL))
        return {group: {name: torch.full_like(one, 0.1 * (client + 1)) for name, one in params.items()}
                for group, params in sent.items()}  # fmt: skip

    def content(client: int) -> RecordDict:
        update = ClientUpdate(payloads(client), 5 + client, 0.5)
        if packing:
            whole, packed, _ = packing.pack(update.payloads, MODEL, {}, client, 1)
            update = replace(update, payloads=whole, packed=packed)
        return wire.update_content(update)

    return tuple(content(client) for client in range(CLIENTS))


def _strategy(
    algorithm: Any, aggregator: Any = AGGREGATORS["mean"], packing: Packing | None = None
) -> FederatedStrategy:
    strategy = FederatedStrategy(
        algorithm, aggregator, Everyone(), algorithm.init(MODEL), wire.TaskConfig("", 0, 0.0, "", ""), CLIENTS, 0,
        most_examples=RECORDS, on_clients=(ClientCompression(packing),) if packing else (),
    )  # fmt: skip
    if isinstance(aggregator, GlobalDP):
        ledger = Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, aggregator.delta))
        strategy.wrap(PrivateRounds(aggregator, Everyone(), CLIENTS, ledger, Noise.seeded(0), 1.0))
    return strategy


def _train(algorithm: Any, aggregator: Any, grid: Replying, packing: Packing | None = None) -> bytes:
    strategy = _strategy(algorithm, aggregator, packing)
    done = run_round(strategy, grid, 1, 0.1, timeout=1.0)
    layer = strategy.layer
    assert not isinstance(layer, PrivateRounds) or len(layer.ledger.charges) == 1
    loss = b"" if done.train_loss is None else str(done.train_loss).encode()
    return b"".join(value.numpy().tobytes() for value in strategy.server.params.values()) + loss


def _run(algorithm: Any, grid: Replying) -> Run:
    records = Examples(np.zeros((RECORDS, *SHAPE), np.float32), np.zeros(RECORDS, np.int64))
    dataset = SimpleNamespace(train=records, num_classes=CLASSES)
    job: Any = SimpleNamespace(experiment=SimpleNamespace(round_timeout=1.0, algorithm=algorithm), dataset=dataset)
    log: Any = None
    return Run(job, _strategy(algorithm), grid, Path(), log)


def _share(algorithm: Any, grid: Replying) -> bytes:
    template = share_template(algorithm, SHAPE, CLASSES)
    run = _run(algorithm, grid)
    pool, _ = Shares(run.job).gathered(run, template)
    return b"".join(value.numpy().tobytes() for value in pool.values())


def _synthesize(grid: Replying) -> bytes:
    made = pools.ask_clients(_run(FedAvg(), grid), wire.TaskConfig("", 0, 0.0, "", ""))
    return b"".join(inputs.numpy().tobytes() + str(json.loads(said)["counts"]).encode() for inputs, said in made)


def _vote(grid: Replying, *, private: bool) -> bytes:
    order = wire.TaskConfig("", 0, 0.0, "", "")
    votes, _ = ask_teachers(grid, order, 1.0, teachers=CLIENTS, records=5, classes=CLASSES, private=private)
    return votes.tobytes()


def _summarise(grid: Replying, *, private: bool) -> bytes:
    most = None if private else RECORDS
    run = _run(FedAvg(), grid)
    moments = run.ask(SUMMARISE, lambda one: wire.read_moments(one, (CLASSES, 3), most), quoted=not private)
    return b"".join(one.tobytes() for one in moments)


def _who(grid: Replying) -> bytes:
    return str(find_population(Remote(grid), CLIENTS, 1.0).nodes).encode()  # type: ignore[arg-type]


def mutated(good: RecordDict, chance: random.Random) -> Answer:
    """Return one client's answer, changed in one way that ``chance`` picks."""
    ways = (_no_content, _times, _records, _records, _arrays, _arrays, _arrays, _arrays, _numbers, _numbers, _text)
    while (answer := chance.choice(ways)(pickle.loads(pickle.dumps(good)), chance)) is None:  # noqa: S301 (our own)
        pass
    return answer


def _no_content(content: RecordDict, chance: random.Random) -> Answer:
    del content
    return Answer(None, times=chance.choice([0, 1]))


def _times(content: RecordDict, chance: random.Random) -> Answer:
    return chance.choice([Answer(content, times=2), Answer(content, node=chance.choice([7, 2**62]))])


def _records(content: RecordDict, chance: random.Random) -> Answer:
    name = chance.choice(list(content))
    odd = [MetricRecord({"a": 1}), ConfigRecord({"a": MY_RECORD}), ArrayRecord({MY_RECORD: Array(np.zeros(2))}),
           ArrayRecord(), MetricRecord(), ConfigRecord()]  # fmt: skip
    match chance.randrange(4):
        case 0:
            del content[name]
        case 1:
            content[chance.choice([MY_RECORD, "", "payload/", "payload/more", name + "x"])] = content[name]
        case 2:
            content[name + "x"] = content.pop(name)
        case _:
            del content[name]
            content[name] = chance.choice(odd)
    return Answer(content)


def _arrays(content: RecordDict, chance: random.Random) -> Answer | None:
    records = [record for record in content.values() if isinstance(record, ArrayRecord) and record]
    if not records:
        return None
    record = chance.choice(records)
    name = chance.choice(list(record))
    array, change = record[name], chance.randrange(6)
    if change == 0:
        del record[name]
    elif change == 1:
        record[MY_RECORD] = array
    elif change == 2:
        record[chance.choice(["", "{", "[" * 50_000, name[:-1], name.replace("2", "3"), name + " "])] = record.pop(name)
    elif change == 3:
        record[name] = Array(_other_numbers(np.array(array.numpy()), chance))
    elif change == 4:
        record[name] = Array(array.dtype, array.shape, array.stype, _other_bytes(array.data, chance))
    else:
        lies = ("object", chance.choice([(), (10**15,), (-1,), (0, 0)]), chance.choice(["pickle", ""]))
        record[name] = Array(*lies, array.data)
    return Answer(content)


def _other_numbers(numbers: Any, chance: random.Random) -> Any:
    ways = [
        lambda: numbers[:-1], lambda: np.append(numbers, numbers[:1]), lambda: numbers.reshape(-1, 1),
        lambda: numbers.astype(np.float64 if numbers.dtype == np.float32 else np.float32),
        lambda: numbers.astype(np.int16), lambda: numbers.astype(">f4"), lambda: numbers.astype(bool),
        lambda: numbers[:0], lambda: np.full_like(numbers, 99) if numbers.dtype == np.int64 else numbers * np.nan,
        lambda: -1 - numbers if numbers.dtype == np.int64 else numbers + np.inf,
    ]  # fmt: skip
    with np.errstate(invalid="ignore"):
        return chance.choice(ways)()


def _other_bytes(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(128)  # the header: other bytes behind it are other numbers, which a client may send
    ways = [
        lambda: data[: chance.randrange(len(data))], lambda: data + b"\0" * chance.choice([1, 4, 8]), lambda: b"",
        lambda: data[:place] + bytes([data[place] ^ (1 + chance.randrange(255))]) + data[place + 1 :],
        lambda: data.replace(b"), }", b"000000000), }")[: len(data)], lambda: data.replace(b"<", b"|O<", 1),
        lambda: chance.randbytes(len(data)),
    ]  # fmt: skip
    return chance.choice(ways)()


def _numbers(content: RecordDict, chance: random.Random) -> Answer | None:
    records = [record for record in content.values() if isinstance(record, MetricRecord) and record]
    if not records:
        return None
    record = chance.choice(records)
    name = chance.choice(list(record))
    if chance.random() < 0.2:
        record[chance.choice([MY_RECORD, "num-example", ""])] = 1
        return Answer(content)
    if chance.random() < 0.2:
        del record[name]
        return Answer(content, honest=name == "loss")
    value = chance.choice(
        [-1, 0, 1, RECORDS, RECORDS + 1, 2**63, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf, [1, 2], []]
    )
    record[name] = value
    whole = isinstance(value, int) and 0 <= value <= RECORDS
    loss = name == "loss" and not isinstance(value, list) and not 3.5e38 < abs(value) < math.inf
    return Answer(
        content, honest=loss or (name == "num-examples" and whole) or (name == "partition-id" and value == VICTIM)
    )


def _text(content: RecordDict, chance: random.Random) -> Answer | None:
    records = [record for record in content.values() if isinstance(record, ConfigRecord)]
    if not records:
        return None
    text = str(records[0]["json"])
    place = chance.randrange(len(text))
    said = {"counts": [1, 0, 2], "refused": "", "facts": {}, "receipt": None}
    odd = [
        {**said, "counts": counts}
        for counts in ([3], [1, 2], [-1, 2, 2], [1.0, 0, 2], [10**30, 0, 0], [[1], 0, 2], None)
    ]
    ways: list[Callable[[], Any]] = [
        lambda: text[:place], lambda: text[:place] + chance.choice('{}[]",:0e\\\0') + text[place + 1 :],
        lambda: json.dumps(chance.choice([*odd, {**said, MY_RECORD: 1}, {**said, "facts": 3}, [], None])),
        lambda: "[" * 100_000, lambda: "9" * 10_000, lambda: " " * 2_000_000, lambda: 5, lambda: b"{}", lambda: [text],
    ]  # fmt: skip
    records[0]["json"] = chance.choice(ways)()
    return Answer(content)


def outcome(case: Case, answer: Answer, good: bytes, missing: bytes | None) -> str:
    """Say what became of an answer: one of OUTCOMES or FAULTS."""
    try:
        made = case.play(Replying(case.good, answer))
    except RunError as error:
        if case.private and MY_RECORD in str(error):
            return "quoted"
        named = case.who in str(error) or (answer.node is not None and f"node {answer.node}" in str(error))
        return "refused by name" if named else "not named"
    except Exception:
        logging.getLogger(__name__).exception(case.title)
        return "traceback"
    if made == good:
        return "same result"
    if missing is not None and made == missing:
        return "counted for nothing"
    return "another honest reply" if answer.honest else "silently wrong"


def attack(num_replies: int, seed: int) -> dict[str, Counter[str]]:
    """Return {case: {outcome: how many}} of ``num_replies`` changed replies, dealt to the cases in turn."""
    chance, known = random.Random(seed), list(cases())  # noqa: S311 (no secret)
    nothing = Answer(RecordDict(), times=0)
    results = {case.title: Counter[str]() for case in known}
    baselines = {}
    for case in known:
        silent = case.private and case.title not in {"synthesize", "summarise"}
        missing = case.play(Replying(case.good, nothing)) if silent else None
        baselines[case.title] = (case.play(Replying(case.good, Answer(case.good[VICTIM]))), missing)
    for number in range(num_replies):
        case = known[number % len(known)]
        answer = mutated(case.good[VICTIM], chance)
        results[case.title][outcome(case, answer, *baselines[case.title])] += 1
    return results


def table(results: dict[str, Counter[str]]) -> str:
    """Return the outcomes for people."""
    total = total_of(results)
    columns = ("message", "replies", *OUTCOMES, *FAULTS)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for title, counts in [*results.items(), ("all", total)]:
        shown = [str(counts[name]) for name in (*OUTCOMES, *FAULTS)]
        lines.append(f"| {title} | {counts.total()} | {' | '.join(shown)} |")
    return "\n".join(lines)


def total_of(results: dict[str, Counter[str]]) -> Counter[str]:
    """Return the sum over all cases."""
    return sum(results.values(), Counter[str]())


def main() -> None:
    """Attack and print; exit with 1 where there was a fault."""
    parser = argparse.ArgumentParser(description="Send hostile replies of every kind and count what becomes of them.")
    parser.add_argument("--replies", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = attack(arguments.replies, arguments.seed)
    print(json.dumps(results) if arguments.json else table(results))
    if any(total_of(results)[fault] for fault in FAULTS):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
