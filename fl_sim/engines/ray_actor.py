"""What lives in a process of Ray and plays clients there."""

import time
from collections.abc import Callable
from typing import Any

import ray

from fl_sim.importing import importing

with importing():  # Ray imports this file first, in a process that has nothing yet
    import torch
    from flwr.app import Message, RecordDict
    from flwr.clientapp import ClientApp

    from fl_sim.engines.pieces import Clients, Together


class Actor:
    """Lives in a process of its own: answers messages, and keeps the experiment's data for the next ones."""

    def __init__(
        self, app_factory: Callable[[], ClientApp], num_clients: int, threads: int, together: Together | None
    ) -> None:
        self._clients = Clients(app_factory(), num_clients, together)
        self._threads = threads
        self._replies: list[Message] = []
        self._content: tuple[Any, RecordDict] | None = None

    def answer(self, letters: list[tuple[Any, Any]]) -> tuple[list[Message], float]:
        """Return one reply per letter, (the message's metadata, a reference to its content), and the seconds taken."""
        start = time.perf_counter()
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # holds for the thread that calls it
        self._replies = []
        messages = [Message(self._fetched(content), metadata=about) for about, content in letters]  # type: ignore[call-overload]
        for piece in self._clients.pieces(messages, workers=1):
            self._replies += self._clients.play(piece)
        return self._replies, time.perf_counter() - start

    @ray.method(concurrency_group="progress")
    def replies_so_far(self) -> list[Message]:
        """Return the replies of the running call that are there; answered while it runs."""
        return list(self._replies)

    def _fetched(self, content: Any) -> RecordDict:
        if self._content is None or self._content[0] != content:
            self._content = (content, ray.get(content))
        return self._content[1]
