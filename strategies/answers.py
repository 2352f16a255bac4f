"""Answers of clients and the nodes they come from: nothing is used before it is checked."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_sim.engines import wire
from fl_sim.engines.grid import LocalGrid
from fl_sim.errors import Malformed, RunError
from fl_sim.types import Params, Payloads

Read = TypeVar("Read")

UNQUOTED: Final = (
    "what clients say may hold their records, so the reason is in private-errors.log in the run directory, which "
    "nobody but you can read"
)

_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True)
class Population:
    """The Flower node of each client: ``nodes[client]`` is a node id.

    A range where nodes are ours, so that clients who are never asked cost nothing.
    """

    nodes: Sequence[int]

    def client_of(self, node: int) -> int | None:
        """Return the client that ``node`` plays, None for a stranger."""
        if isinstance(self.nodes, range):
            return self.nodes.index(node) if node in self.nodes else None
        return self._clients.get(node)

    @cached_property
    def _clients(self) -> dict[int, int]:
        return {node: client for client, node in enumerate(self.nodes)}


@dataclass(frozen=True)
class Asking:
    """One question to every client: ``order`` names the task.

    ``quoted``: whether an error may say what a client said; not where it is private. ``timeout``: in seconds, for the
    whole exchange. ``params``: the model that the question is about, if any, and the groups of ``broadcast`` with it.
    """

    order: wire.TaskConfig
    timeout: float
    quoted: bool
    params: Params | None = None
    broadcast: Payloads = field(default_factory=dict)


def ask_everybody(grid: Grid, population: Population, asking: Asking, read: Callable[[RecordDict], Read]) -> list[Read]:
    """Return every client's answer, read by ``read``, by client. Raises RunError that names the first bad one."""
    what, made = asking.order.task, []
    for client, answer in enumerate(answers_to(grid, population, asking, read)):
        if isinstance(answer, Malformed):
            raise refusal(f"client {client}, asked to {what},", answer, quoted=asking.quoted)
        made.append(answer)
    return made


def answers_to(
    grid: Grid, population: Population, asking: Asking, read: Callable[[RecordDict], Read]
) -> list[Read | Malformed]:
    """Return every client's answer, read by ``read``, or the error in its place, by client."""
    order, params = asking.order, asking.params
    content = wire.config_content(order) if params is None else wire.task_content(order, params, asking.broadcast)
    sent = [Message(content, node, wire.TRAIN) for node in population.nodes]
    answers = by_client(grid.send_and_receive(sent, timeout=asking.timeout), population.client_of, strict=asking.quoted)
    return [_read(answers.get(client, []), read) for client in range(len(population.nodes))]


def _read(replies: Sequence[Message], read: Callable[[RecordDict], Read]) -> Read | Malformed:
    try:
        return read(content_of(replies))
    except Malformed as reason:
        return reason


def by_client(
    replies: Iterable[Message], client_of: Callable[[int], int | None], *, strict: bool
) -> dict[int, list[Message]]:
    """Return every client's replies, of which there should be one. ``client_of``: which client a node plays, if any.

    A reply of a node that is no client is ignored, or where ``strict`` a RunError.
    """
    answers: dict[int, list[Message]] = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if (client := client_of(node)) is not None:
            answers.setdefault(client, []).append(reply)
        elif strict:
            raise RunError(f"node {node} answered, which plays no client: find out what else is on this federation")
    return answers


def content_of(replies: Sequence[Message]) -> RecordDict:
    """Return the content of a client's one reply. Raises Malformed where it failed, or gave none or several."""
    if not replies:
        raise Malformed("did not answer in time", cure="see whether it still runs, or give a larger round_timeout")
    if len(replies) > 1:
        raise Malformed(
            f"answered {len(replies)} times", cure="it would count more than once, so see that it runs once"
        )
    if said := wire.error_of(replies[0]):
        raise Malformed("failed", cure="", said=said)
    return replies[0].content


def refusal(who: str, error: Malformed, *, quoted: bool) -> RunError:
    """Return the error that stops a run for one client's answer."""
    if not error.said:
        return RunError(f"{who} {error}")
    if quoted:
        return RunError(f"{who} {error}: {error.said}")
    return RunError(f"{who} {error}; {UNQUOTED}", private=f"{who} {error}: {error.said}")


def in_words(who: str, failed: Mapping[int, Malformed]) -> str:
    """Return the failures, a line per client with its own words. PRIVATE."""
    return "\n".join(
        f"{who} {number} {reason}" + (f": {reason.said}" if reason.said else "")
        for number, reason in sorted(failed.items())
    )


def find_population(grid: Grid, num_clients: int, timeout: float) -> Population:
    """Wait for all nodes and learn which client each one is; Flower hands out random node ids in random order."""
    if isinstance(grid, LocalGrid):
        return Population(grid.get_node_ids())
    deadline = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < num_clients:
        if time.monotonic() > deadline:
            raise RunError(
                f"only {len(nodes)} of {num_clients} nodes came in {timeout:.0f} s: start as many supernodes as clients"
            )
        time.sleep(_POLL_SECONDS)
    if len(nodes) > num_clients:
        raise RunError(f"{len(nodes)} nodes for {num_clients} clients: start as many supernodes as clients")
    sent = [Message(wire.who_content(0), node, wire.WHO) for node in nodes]
    themselves = {node: node for node in nodes}
    answers = by_client(grid.send_and_receive(sent, timeout=timeout), themselves.get, strict=True)
    node_of: dict[int, int] = {}
    for node in nodes:
        partition = _read(answers.get(node, []), wire.read_who)
        if isinstance(partition, Malformed):
            raise refusal(f"node {node}, asked for its partition,", partition, quoted=False)
        if partition >= num_clients or partition in node_of:
            raise RunError(
                f"node {node} says that it holds partition {partition}"
                + (f", as node {node_of[partition]} does" if partition in node_of else "")
                + f": give each supernode a partition-id of its own, from 0 to {num_clients - 1}"
            )
        node_of[partition] = node
    return Population(tuple(node_of[client] for client in range(num_clients)))
