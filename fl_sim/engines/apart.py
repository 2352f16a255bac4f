"""What goes beside messages where workers see no disk of the driver's, and what is done for clients at home.

Knows no Ray, and nothing of what clients are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict


@dataclass(frozen=True)
class Parcel:
    """What goes to a worker in place of a message.

    ``content``: what all messages of the exchange share, one object for all of them. ``own``: the records that this
    client's message has beside them. ``files``: where what the content names lies here.
    """

    content: RecordDict
    own: Mapping[str, ArrayRecord | ConfigRecord] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)


class Desk(Protocol):
    """What is done at home for clients that are played elsewhere: their files lie here."""

    def before(self, message: Message) -> Parcel | Message:
        """Return what goes to a worker, or the answer where there is nothing for one to do.

        Asked again where a message is sent again, and then the same.
        """
        ...

    def after(self, message: Message, answer: Message) -> Message:
        """Keep what the client keeps, and return what goes to the server."""
        ...


@dataclass(frozen=True)
class Apart:
    """How clients are played where no disk is shared.

    ``goods``: what every worker is sent once, and gives to the factories of its app and of its player. It has a
    dictionary ``files``, in which a worker puts the content of files by name. ``modules``: the user's own that workers
    need.
    """

    goods: Any
    desk: Desk
    modules: tuple[str, ...] = ()
