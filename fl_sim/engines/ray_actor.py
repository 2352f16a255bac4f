"""What lives in a process of Ray and plays clients there."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from fl_sim.importing import importing

with importing():  # Ray imports this file first, in a process that has nothing yet
    import torch
    from flwr.app import Message, RecordDict
    from flwr.clientapp import ClientApp

    from fl_sim.engines.pieces import Clients, Together


class Actor:
    """Lives in a process of its own: answers messages, and keeps the experiment's data for the next ones.

    ``goods``: what it was sent once where it sees no disk of the driver's; both factories are given it.
    """

    def __init__(
        self,
        app_factory: Callable[..., ClientApp],
        num_clients: int,
        threads: int,
        together: Together | None,
        goods: Any = None,
    ) -> None:
        sent = () if goods is None else (goods,)
        if together is not None:
            together = replace(together, player=partial(together.player, *sent))
        self._clients = Clients(app_factory(*sent), num_clients, together)
        self._goods = goods
        self._threads = threads
        self._replies: list[Message] = []
        self._content: tuple[Any, RecordDict] | None = None

    def answer(self, letters: list[tuple[Any, Any, Any]], files: Mapping[str, Any]) -> tuple[list[Message], float]:
        """Return one reply per letter, and the seconds taken.

        A letter: (the message's metadata, a reference to its content, what is its client's own). ``files``: references
        to those that the contents name.
        """
        start = time.perf_counter()
        for name, content in files.items():
            if name not in self._goods.files:
                self._goods.files[name] = ray.get(content)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # holds for the thread that calls it
        self._replies = []
        messages = [
            Message(RecordDict({**self._fetched(content), **own}), metadata=about)  # type: ignore[call-overload]
            for about, content, own in letters
        ]
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
