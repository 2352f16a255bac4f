"""What plays clients in a process of Ray, once that process was found to have the same version of all of this."""

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

    from fl_sim.engines.batching import BatchRunner, ClientBatching
    from fl_sim.engines.remote import Envelopes, importable


class Player:
    """Answers messages, and keeps the experiment's data for the next ones.

    ``crew``: a reference to the sources of the user's own modules and, pickled, (app_factory, num_clients, threads,
    together) as ``RayGrid`` has them. ``goods``: a reference to what both factories are given where this process sees
    no disk of the driver's, or None. Both are closed.
    """

    def __init__(self, envelopes: Envelopes, crew: Any, goods: Any) -> None:
        self._envelopes = envelopes
        app_factory: Callable[..., ClientApp]
        together: ClientBatching | None
        sources, pickled = envelopes.open(ray.get(crew))
        importable(sources)
        app_factory, num_clients, self._threads, together = ray.cloudpickle.loads(pickled)
        self._goods: Any = None if goods is None else envelopes.open(ray.get(goods))
        sent = () if self._goods is None else (self._goods,)
        if together is not None:
            together = replace(together, handler=partial(together.handler, *sent))
        self._clients = BatchRunner(app_factory(*sent), num_clients, together)
        self._replies: list[Message] = []
        self._contents: dict[int, Any] = {}
        self._opened: dict[int, RecordDict] = {}

    def answer(self, letters: Any, contents: Mapping[int, Any], files: Mapping[str, Any]) -> Any:
        """Return one reply per letter, and the seconds taken, closed.

        A letter: (the message's metadata, which of the ``contents`` it has, what is its client's own). Contents: closed
        themselves, or references, or None where the call before had the same. ``files``, which they name: references.
        """
        start = time.perf_counter()
        for name, content in files.items():
            if name not in self._goods.files:
                self._goods.files[name] = self._envelopes.open(ray.get(content))
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # holds for the thread that calls it
        had, opened = self._contents, self._opened
        self._contents = {number: had[number] if content is None else content for number, content in contents.items()}
        self._opened = {number: content for number, content in opened.items() if number in contents}
        self._replies = []
        messages = [
            # Flower's overloads do not name metadata, by which its own code makes messages.
            Message(self._content(number, own), metadata=about)  # type: ignore[call-overload]
            for about, number, own in self._envelopes.open(letters)
        ]
        for piece in self._clients.batches(messages, workers=1):
            self._replies += self._clients.run(piece)
        return self._envelopes.close((self._replies, time.perf_counter() - start))

    def replies_so_far(self) -> Any:
        """Return the replies of the running call that are there, closed."""
        return self._envelopes.close(list(self._replies))

    def _content(self, number: int, own: Mapping[str, Any]) -> RecordDict:
        """Return a message's content: the one of this ``number``, and what is its client's ``own``."""
        if number not in self._opened:
            content = self._contents[number]
            closed = ray.get(content) if isinstance(content, ray.ObjectRef) else content
            self._opened[number] = self._envelopes.open(closed)
        shared = self._opened[number]
        return RecordDict({**shared, **own}) if own else shared
