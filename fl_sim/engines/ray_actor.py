"""The message handler of a Ray actor. Each actor is a separate process."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from fl_sim.importing import importing

with importing():  # in a new process, Ray imports this file before all other files of fl-sim
    import torch
    from flwr.app import Message, RecordDict
    from flwr.clientapp import ClientApp

    from fl_sim.engines.batching import BatchRunner, ClientBatching
    from fl_sim.engines.remote import Encryption, importable


class MessageHandler:
    """An object that answers messages in an actor, and keeps the experiment's data for later messages.

    ``factories``: a Ray reference to two encrypted values: the source files of the user's own modules, and the pickled
    arguments (app_factory, num_clients, threads, batching) of ``RayGrid``. ``setup``: None if this process shares a
    disk with the driver (the process that runs the server). Otherwise ``setup`` is a Ray reference to an encrypted
    value, and ``app_factory`` and ``batching.handler`` are called with this value.
    """

    def __init__(self, encryption: Encryption, factories: Any, setup: Any) -> None:
        self._encryption = encryption
        app_factory: Callable[..., ClientApp]
        batching: ClientBatching | None
        sources, pickled = encryption.decrypt(ray.get(factories))
        importable(sources)
        app_factory, num_clients, self._threads, batching = ray.cloudpickle.loads(pickled)
        self._setup: Any = None if setup is None else encryption.decrypt(ray.get(setup))
        arguments = () if self._setup is None else (self._setup,)
        if batching is not None:
            batching = replace(batching, handler=partial(batching.handler, *arguments))
        self._runner = BatchRunner(app_factory(*arguments), num_clients, batching)
        self._replies: list[Message] = []
        self._contents: dict[int, Any] = {}
        self._decrypted: dict[int, RecordDict] = {}

    def answer(self, requests: Any, contents: Mapping[int, Any], files: Mapping[str, Any]) -> Any:
        """Answer messages, and return the encrypted pair (one reply per request, duration in seconds).

        ``requests``: encrypted tuples (metadata of a message, ID of its content, Flower records for its client only).
        ``contents``: {ID: message content}. A content is encrypted, or a Ray reference to an encrypted content, or None
        if the previous call contained the same content. ``files``: {name: Ray reference to a file that the contents
        name}.
        """
        start = time.perf_counter()
        for name, content in files.items():
            if name not in self._setup.files:
                self._setup.files[name] = self._encryption.decrypt(ray.get(content))
        if torch.get_num_threads() != self._threads:
            # torch's number of threads is checked in each call, because it is set for the calling thread only
            torch.set_num_threads(self._threads)
        had, decrypted = self._contents, self._decrypted
        self._contents = {number: had[number] if content is None else content for number, content in contents.items()}
        self._decrypted = {number: content for number, content in decrypted.items() if number in contents}
        self._replies = []
        messages = [
            # Flower's own code passes metadata, too, but the type overloads of Message lack this argument.
            Message(self._content(number, own), metadata=about)  # type: ignore[call-overload]
            for about, number, own in self._encryption.decrypt(requests)
        ]
        for batch in self._runner.batches(messages, workers=1):
            self._replies += self._runner.run(batch)
        return self._encryption.encrypt((self._replies, time.perf_counter() - start))

    def replies_so_far(self) -> Any:
        """Return the encrypted list of the replies that the running call has made so far."""
        return self._encryption.encrypt(list(self._replies))

    def _content(self, number: int, own: Mapping[str, Any]) -> RecordDict:
        """Return a message's content: the shared content with the ID ``number``, plus one client's records ``own``."""
        if number not in self._decrypted:
            content = self._contents[number]
            encrypted = ray.get(content) if isinstance(content, ray.ObjectRef) else content
            self._decrypted[number] = self._encryption.decrypt(encrypted)
        shared = self._decrypted[number]
        return RecordDict({**shared, **own}) if own else shared
