"""A round cut into pieces of work, and how one process plays the clients of a piece: the same in both engines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from flwr.app import Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fl_sim.engines import wire
from fl_sim.engines.grid import answer, partition_of

Play: TypeAlias = Callable[[Sequence[Message]], list[Message]]
"""Answers messages as one piece of work: a reply for each, an error reply where a client fails; never raises."""

Release: TypeAlias = Callable[[Sequence[Message], Callable[[], None]], list[Message]]
"""The same for tasks that are answered for several clients in one computation: calls its second argument now
and then, and raises nothing but what that raises."""

STEPS_AT_A_TIME = 16
"""Minibatch steps in a piece of work: far more than handing it over costs, far less than a round."""

_FIRST_STEPS = 4
"""Those in the first piece; the next ones have as many more each, until they are ``STEPS_AT_A_TIME``."""


@dataclass(frozen=True)
class Together:
    """How a round's clients are trained several at a time.

    ``player`` is called once in every process. ``steps``: every partition's minibatch steps in a round. ``stack``: how
    many clients make a piece of work; with 1 it is as many as have ``STEPS_AT_A_TIME`` steps, or ``least_steps`` where
    these are more: what is less work is not worth handing to another thread. ``most_clients``: how many a piece has
    at most, since all of their models are there at once.
    """

    player: Callable[[], Play]
    steps: Sequence[int] | NDArray[np.int64]
    stack: int = 1
    least_steps: int = 1
    most_clients: int = 1_000_000

    def ordered(self, messages: Sequence[Message]) -> list[Message]:
        """Put clients with the most steps first: neighbours are alike, and no worker is left with a long last one."""
        return sorted(messages, key=lambda message: -self.steps_of(message))

    def steps_of(self, message: Message) -> int:
        """Return the minibatch steps that a message asks for."""
        return int(self.steps[partition_of(message)])

    def pieces(self, messages: Sequence[Message], workers: int) -> list[list[Message]]:
        """Cut a round into pieces of work; how depends on the arguments alone.

        Towards the end pieces shrink, so that no worker is left with a long last one. The first ones are small, too: in
        one process a worker gets ready while the others wait to do so.
        """
        ordered = self.ordered(messages)
        if self.stack > 1:
            return [ordered[first : first + self.stack] for first in range(0, len(ordered), self.stack)]
        pieces: list[list[Message]] = []
        left, room = sum(map(self.steps_of, ordered)), 0.0
        for message in ordered:
            steps = self.steps_of(message)
            if steps > room or not pieces or len(pieces[-1]) >= self.most_clients:
                pieces.append([])
                grown = min(STEPS_AT_A_TIME, _FIRST_STEPS * len(pieces))
                share = min(grown, left / (2 * workers)) if workers > 1 else STEPS_AT_A_TIME
                room = max(share, self.least_steps)
            pieces[-1].append(message)
            room, left = room - steps, left - steps
        return pieces


class Clients:
    """Plays the clients of one process: training several at a time where ``together`` is given, else one by one."""

    def __init__(self, app: ClientApp, num_clients: int, together: Together | None) -> None:
        self._app = app
        self._num_clients = num_clients
        self._together = together
        self._play = together.player() if together else None

    def pieces(self, messages: Sequence[Message], workers: int) -> list[list[Message]]:
        """Cut ``messages`` into what ``play`` takes."""
        if self._together is None or not all(map(_trains, messages)):
            return [[message] for message in messages]
        return self._together.pieces(messages, workers)

    def play(self, piece: Sequence[Message]) -> list[Message]:
        """Answer a piece of work, with an error reply for a client that fails."""
        if self._play is not None and all(map(_trains, piece)):
            return self._play(piece)
        return [answer(self._app, message, self._num_clients) for message in piece]


def _trains(message: Message) -> bool:
    return wire.task_of(message) == wire.TRAIN
