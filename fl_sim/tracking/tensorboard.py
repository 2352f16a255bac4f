"""TensorBoard: one file of events in the run's directory, for ``tensorboard --logdir``."""

import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fl_sim.report.measures import of_round
from fl_sim.store.run_directory import RoundRecord
from fl_sim.tracking.subject import Subject

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

FOLDER: Final = "tensorboard"
_HEAD: Final = struct.Struct("<QI")  # a record's length, and a checksum of that
_CHECKSUM_BYTES: Final = 4


class Events:
    """The file of a run's events, which is gone on with after its last whole one."""

    def __init__(self, subject: Subject) -> None:
        self._path = subject.directory / FOLDER / f"events.out.tfevents.{subject.mark.identity}"
        self._path.parent.mkdir(exist_ok=True)
        for other in self._path.parent.glob("events.out.tfevents.*"):
            if other != self._path:
                other.unlink()  # an earlier run's, which this directory holds no more
        events = _keep_whole(self._path) if self._path.exists() else []
        scalars = [event for event in events if event.summary.value and event.step]
        self.last_round = max((event.step for event in scalars), default=0)
        self.place = f"tensorboard --logdir {subject.directory}"
        if not events:
            self._write([_version(), _text("settings", subject.settings)])

    def send(self, records: Sequence[RoundRecord]) -> None:
        """Write the rounds' numbers."""
        self._write([_scalars(of_round(record), record.round) for record in records])

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Write the results."""
        self._write([_scalars(results, last_round), _text("status", {"status": status})])

    def _write(self, events: "Sequence[Event]") -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415 (an extra)

        now = time.time()
        with self._path.open("ab") as file:
            writer = RecordWriter(file)
            for event in events:
                event.wall_time = now
                writer.write(event.SerializeToString())


open_session = Events


def _keep_whole(path: Path) -> "list[Event]":
    """Return the events in a file, and cut off it what a crash has left behind the last whole one."""
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 (an extra)

    content, events, at = path.read_bytes(), [], 0
    while at + _HEAD.size <= len(content):
        start = at + _HEAD.size
        end = start + _HEAD.unpack_from(content, at)[0]
        if end + _CHECKSUM_BYTES > len(content):
            break
        events.append(Event.FromString(content[start:end]))
        at = end + _CHECKSUM_BYTES
    if at < len(content):
        with path.open("r+b") as file:
            file.truncate(at)
    return events


def _version() -> "Event":
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 (an extra)

    return Event(file_version="brain.Event:2")


def _scalars(numbers: Mapping[str, float], step: int) -> "Event":
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 (an extra)
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415

    values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
    return Event(step=step, summary=Summary(value=values))


def _text(tag: str, table: Mapping[str, Any]) -> "Event":
    """Return a table of names and values, which TensorBoard shows as Markdown."""
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 (an extra)
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # noqa: PLC0415
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # noqa: PLC0415
    from tensorboard.compat.proto.types_pb2 import DT_STRING  # noqa: PLC0415

    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in table.items())]
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=["\n".join(lines).encode()])
    return Event(summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]))
