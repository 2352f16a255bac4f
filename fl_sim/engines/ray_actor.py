"""The handler of messages in a process of Ray, once that process was found to have the versions of this one."""

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
    from fl_sim.engines.remote import Encryption, importable


class MessageHandler:
    """Answers messages, and keeps the experiment's data for the next ones.

    ``factories``: a reference to the sources of the user's own modules and, pickled, (app_factory, num_clients,
    threads, batching) as ``RayGrid`` has them. ``setup``: a reference to the argument of both factories where this
    process sees no disk of the driver's, or None. Both are encrypted.
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
        """Return one reply per request, and the seconds taken, encrypted.

        A request: (the message's metadata, the number of its content, the records of its client alone). ``contents``:
        encrypted themselves, or references, or None where the call before had the same. ``files``: references to the
        files that they name.
        """
        start = time.perf_counter()
        for name, content in files.items():
            if name not in self._setup.files:
                self._setup.files[name] = self._encryption.decrypt(ray.get(content))
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # holds for the thread that calls it
        had, decrypted = self._contents, self._decrypted
        self._contents = {number: had[number] if content is None else content for number, content in contents.items()}
        self._decrypted = {number: content for number, content in decrypted.items() if number in contents}
        self._replies = []
        messages = [
            # Flower's overloads do not name metadata, by which its own code makes messages.
            Message(self._content(number, own), metadata=about)  # type: ignore[call-overload]
            for about, number, own in self._encryption.decrypt(requests)
        ]
        for batch in self._runner.batches(messages, workers=1):
            self._replies += self._runner.run(batch)
        return self._encryption.encrypt((self._replies, time.perf_counter() - start))

    def replies_so_far(self) -> Any:
        """Return the replies of the running call so far, encrypted."""
        return self._encryption.encrypt(list(self._replies))

    def _content(self, number: int, own: Mapping[str, Any]) -> RecordDict:
        """Return a message's content: the shared one of this ``number``, and its client's ``own`` records."""
        if number not in self._decrypted:
            content = self._contents[number]
            encrypted = ray.get(content) if isinstance(content, ray.ObjectRef) else content
            self._decrypted[number] = self._encryption.decrypt(encrypted)
        shared = self._decrypted[number]
        return RecordDict({**shared, **own}) if own else shared
