"""TensorBoard: one file of events in the run's directory, for ``tensorboard --logdir``."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fl_sim.tracking.subject import Subject

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

FOLDER: Final = "tensorboard"
_AROUND: Final = 16  # bytes around an event in its file: its length, and two checksums


class Tracker:
    """The file of a run's events, which is gone on with after its last whole one."""

    def __init__(self, subject: Subject) -> None:
        self._path = subject.directory / FOLDER / f"events.out.tfevents.{subject.mark.identity}"
        self._path.parent.mkdir(exist_ok=True)
        for other in self._path.parent.glob("events.out.tfevents.*"):
            if other != self._path:
                other.unlink()  # an earlier run's, which this directory holds no more
        steps = [event.step for event in _kept(self._path)] if self._path.exists() else []
        self.last_round = max(steps, default=0)
        self.place = f"tensorboard --logdir {subject.directory}"
        if not steps:
            self._write({"file_version": "brain.Event:2"}, {"summary": _text("settings", subject.settings)})

    def send(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Write the rounds' numbers."""
        self._write(*({"step": step, "summary": _scalars(numbers)} for step, numbers in rounds.items()))

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Write the results."""
        said = {"summary": _text("status", {"status": status})}
        self._write({"step": last_round, "summary": _scalars(results)}, said)

    def _write(self, *events: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 (an extra)
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

        now = time.time()
        with self._path.open("ab") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(Event(wall_time=now, **event).SerializeToString())


def _kept(path: Path) -> "Iterator[Event]":
    """Return the events in a file, and cut off it what a crash has left behind the last whole one."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader  # noqa: PLC0415 (an extra)
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415

    records = list(RawEventFileLoader(str(path)).Load())
    os.truncate(path, sum(_AROUND + len(record) for record in records))
    return map(Event.FromString, records)


def _scalars(numbers: Mapping[str, float]) -> object:
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 (an extra)

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()])


def _text(tag: str, table: Mapping[str, Any]) -> object:
    """Return a table of names and values, which TensorBoard shows as Markdown."""
    from tensorboard.plugins.text.summary_v2 import text_pb  # noqa: PLC0415 (an extra)

    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in table.items())]
    return text_pb(tag, "\n".join(lines))
