"""An engine for tests: clients that answer by a function, without models, records or processes."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fl_sim.engines.grid import TOO_LATE, LocalGrid, answer, failure, partition_of, raised

Answer: TypeAlias = Callable[[int, Message], RecordDict | Message | None]
"""How a client, told by its number, answers a message: a reply or its content, or ``None`` where none arrives.

What it raises becomes the reply of a failed client; ``TimeoutError`` that of one that was too late.
"""


class FakeEngine(LocalGrid):
    """A Grid whose clients answer by ``answering``; ``order`` puts the replies of an exchange in another order.

    ``asked`` holds all messages so far, ``waits`` the seconds that each exchange was given.
    """

    def __init__(
        self,
        num_clients: int,
        answering: Answer,
        *,
        order: Callable[[list[Message]], list[Message]] = list,
    ) -> None:
        super().__init__(num_clients)
        self.asked: list[Message] = []
        self.waits: list[float | None] = []
        self._answering, self._order = answering, order

    def _exchange(self, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        self.asked += messages
        self.waits.append(timeout)
        replies = map(self._reply, messages)
        return self._order([reply for reply in replies if reply is not None])

    def _reply(self, message: Message) -> Message | None:
        try:
            content = self._answering(partition_of(message), message)
        except TimeoutError as error:
            return failure(message, TOO_LATE, str(error))
        except Exception as error:  # noqa: BLE001 (a client may raise anything)
            return raised(message, error)
        return Message(content, reply_to=message) if isinstance(content, RecordDict) else content


def played_by(app: ClientApp, num_clients: int) -> Answer:
    """Return the answers of ``app``."""
    return lambda _, message: answer(app, message, num_clients)
