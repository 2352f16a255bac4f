"""The exchange of tasks and answers with clients over Flower nodes. Every answer is checked before it is used."""

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
    "a client's error message may contain its records, so the reason is in private-errors.log in the run directory, "
    "which only you can read"
)

_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True)
class Population:
    """The Flower node of each client: ``nodes[client]`` is a node id.

    For simulated nodes, ``nodes`` is a ``range``: unlike a list, a range needs no memory for each client.
    """

    nodes: Sequence[int]

    def client_of(self, node: int) -> int | None:
        """Return the ID of the client on Flower node ``node``, or None if the node has no client."""
        if isinstance(self.nodes, range):
            return self.nodes.index(node) if node in self.nodes else None
        return self._clients.get(node)

    @cached_property
    def _clients(self) -> dict[int, int]:
        return {node: client for client, node in enumerate(self.nodes)}


@dataclass(frozen=True)
class Asking:
    """One client task that is sent to every client, or only to the clients in ``contents``.

    ``order``: the kind of task, such as evaluate, and its settings. ``quoted``: True if an error message may quote a
    client's error message; False if the client's message is private. ``timeout``: seconds for the whole exchange.
    ``params``: a model that is sent with the task, or None. ``broadcast``: tensors sent with the model. ``contents``:
    {client: content of its message}; empty if all clients receive the same task and model.
    """

    order: wire.TaskConfig
    timeout: float
    quoted: bool
    params: Params | None = None
    broadcast: Payloads = field(default_factory=dict)
    contents: Mapping[int, RecordDict] = field(default_factory=dict)


def ask_everybody(grid: Grid, population: Population, asking: Asking, read: Callable[[RecordDict], Read]) -> list[Read]:
    """Send a task to clients, and return their answers in ascending order of client IDs. ``read`` decodes an answer.

    Raises RunError, with the name of the first client whose answer is not valid.
    """
    what, made, asked = asking.order.task, [], sorted(asking.contents) or range(len(population.nodes))
    for client, answer in zip(asked, answers_to(grid, population, asking, read), strict=True):
        if isinstance(answer, Malformed):
            raise refusal(f"client {client}, asked to {what},", answer, quoted=asking.quoted)
        made.append(answer)
    return made


def answers_to(
    grid: Grid, population: Population, asking: Asking, read: Callable[[RecordDict], Read]
) -> list[Read | Malformed]:
    """Send a task, and return the clients' answers in ascending order of client IDs.

    In place of an invalid answer, the list contains an error (``Malformed``), which is not raised.
    """
    order, params = asking.order, asking.params
    if not (contents := asking.contents):
        content = wire.config_content(order) if params is None else wire.task_content(order, params, asking.broadcast)
        contents = dict.fromkeys(range(len(population.nodes)), content)
    sent = [Message(content, population.nodes[client], wire.TRAIN) for client, content in contents.items()]
    answers = by_client(grid.send_and_receive(sent, timeout=asking.timeout), population.client_of, strict=asking.quoted)
    return [_read(answers.get(client, []), read) for client in sorted(contents)]


def _read(replies: Sequence[Message], read: Callable[[RecordDict], Read]) -> Read | Malformed:
    try:
        return read(content_of(replies))
    except Malformed as reason:
        return reason


def by_client(
    replies: Iterable[Message], client_of: Callable[[int], int | None], *, strict: bool
) -> dict[int, list[Message]]:
    """Group ``replies`` by client: return {client ID: list of replies}. A correct client sends one reply.

    ``client_of``: a function that returns the client ID for a node id, or None if the node is no client of this run.
    Replies from such nodes are ignored, or raise RunError if ``strict`` is True.
    """
    answers: dict[int, list[Message]] = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if (client := client_of(node)) is not None:
            answers.setdefault(client, []).append(reply)
        elif strict:
            raise RunError(f"node {node} is no client of this run, but answered: stop nodes that are not part of it")
    return answers


def content_of(replies: Sequence[Message]) -> RecordDict:
    """Return the content of the single message in ``replies``, the replies of one client.

    Raises Malformed if there is no reply, if there are several replies, or if the reply reports a failure.
    """
    if not replies:
        raise Malformed("did not answer in time", cure="see whether it still runs, or give a larger round_timeout")
    if len(replies) > 1:
        raise Malformed(
            f"answered {len(replies)} times", cure="its update would have too much weight: start each client only once"
        )
    if said := wire.error_of(replies[0]):
        raise Malformed("failed", cure="", said=said)
    return replies[0].content


def refusal(who: str, error: Malformed, *, quoted: bool) -> RunError:
    """Return the error (a ``RunError``) that ends a run because of one client's invalid answer.

    ``quoted``: True if this error may quote the client's error message. If False, that message goes to a private file.
    """
    if not error.said:
        return RunError(f"{who} {error}")
    if quoted:
        return RunError(f"{who} {error}: {error.said}")
    return RunError(f"{who} {error}; {UNQUOTED}", private=f"{who} {error}: {error.said}")


def in_words(who: str, failed: Mapping[int, Malformed]) -> str:
    """Return a text with one line per failed client, including the client's own error message. The text is private."""
    return "\n".join(
        f"{who} {number} {reason}" + (f": {reason.said}" if reason.said else "")
        for number, reason in sorted(failed.items())
    )


def find_population(grid: Grid, num_clients: int, timeout: float) -> Population:
    """Wait until all Flower nodes are connected, ask each for its client ID, and return the node of each client.

    Flower assigns random node ids. ``timeout``: in seconds. Raises RunError if there are too few or too many nodes, or
    if two nodes have the same client ID.
    """
    if isinstance(grid, LocalGrid):
        return Population(grid.get_node_ids())
    deadline = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < num_clients:
        if time.monotonic() > deadline:
            raise RunError(
                f"only {len(nodes)} of {num_clients} nodes connected in {timeout:.0f} s: start one supernode for "
                "each client"
            )
        time.sleep(_POLL_SECONDS)
    if len(nodes) > num_clients:
        raise RunError(f"{len(nodes)} nodes for {num_clients} clients: start exactly one supernode for each client")
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
                + f": give each supernode a different partition-id, from 0 to {num_clients - 1}"
            )
        node_of[partition] = node
    return Population(tuple(node_of[client] for client in range(num_clients)))
