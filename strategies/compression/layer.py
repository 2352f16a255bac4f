"""The layer for compression: clients compress the payloads of their updates, and the server decompresses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from torch import nn

from clients.client_layer import ClientLayer
from fl_sim.errors import UserError
from fl_sim.kinds import Choices, hides_clients, is_none, kind_of, path_in
from fl_sim.packed import Held, Packing
from fl_sim.params import layout_of
from fl_sim.types import ClientUpdate, LocalTask, Params, Payloads, Reply, ServerState, Size, Trained
from strategies.algorithm import Central, Dealing
from strategies.bulyan import Bulyan
from strategies.compression.error_feedback import RandK, TopK
from strategies.coordinate_median import CoordinateMedian
from strategies.feddyn import Dynamic
from strategies.layer import Beginning, Layer
from strategies.mixing import Bucketing
from strategies.scaffold import Scaffold
from strategies.trimmed_mean import TrimmedMean

HELD: Final = "held-back/"
"""Prefix of the names of compression's tensors in client state, such as the error of error feedback."""


class Compression(Layer):
    """The layer (code around the rounds) for compression. ``ClientCompression``, its code on clients, compresses."""

    reserved: ClassVar[str] = HELD

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if updates are compressed."""
        return not is_none(experiment.compress)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> None:
        """Return None: compression needs no layer at the server."""
        del experiment, out, progress

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if clients send no parameters, because only parameters can be compressed."""
        if not beginning.server.params:
            raise UserError(
                f"compress {kind_of(experiment.compress)} cannot run with algorithm {kind_of(experiment.algorithm)}, "
                "whose clients send no parameters: leave compress out"
            )

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> ClientLayer:
        """Return a ``ClientCompression``, which compresses updates on clients, and decompresses them on the server."""
        del algorithm, model
        return ClientCompression(Packing(experiment.compress, experiment.seed))


@dataclass(frozen=True)
class ClientCompression(ClientLayer):
    """Compresses payloads whose tensors have the names and shapes of the model's parameters, and decompresses them."""

    packing: Packing

    def received(self, task: LocalTask) -> LocalTask:
        """Return ``task`` without the compressor's tensors, such as the error, in its client state.

        The algorithm does not need these tensors.
        """
        return replace(task, state={name: group for name, group in task.state.items() if not name.startswith(HELD)})

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the compressed update. The client state also stores the compressor's tensors, such as the error."""
        payloads, packed, held = self.packing.pack(
            update.payloads, task.params, held_in(came.state), task.client, task.server_round
        )
        state = with_held(update.state, held) if update.state or trained.num_steps else update.state
        return replace(update, payloads=payloads, packed=packed, state=state)

    def packs(self, template: Payloads, model: Params) -> Mapping[str, Size]:
        """Return {payload name: compressed size} for all payloads that are compressed."""
        return self.packing.sizes(template, model)

    def unpacked(self, reply: Reply, template: Payloads, server_round: int) -> Reply:
        """Return the reply with all payloads of its update decompressed, in the order of ``template``."""
        opened = {
            name: self.packing.unpack(name, packed, layout_of(template[name]), reply.client, server_round)
            for name, packed in reply.packed.items()
        }
        payloads = {name: opened[name] if name in opened else reply.payloads[name] for name in template}
        return replace(reply, payloads=payloads, packed={})

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Return a template (names and shapes) of client state, with the compressor's tensors added."""
        return with_held(state, self.packing.held_back(template, server.params))


def check_compression(experiment: Choices) -> None:
    """Raise ValueError if the experiment's algorithm or aggregator does not support its compression."""
    compress, algorithm = experiment.compress, experiment.algorithm
    kind, has_rounds = kind_of(compress), not path_in(type(algorithm), "procedure")
    if not has_rounds or isinstance(algorithm, Dealing) or (isinstance(algorithm, Central) and algorithm.is_central):
        raise ValueError(
            f"compress {kind} cannot run with algorithm {kind_of(algorithm)}, whose clients send no updates: leave "
            "compress out, or take another algorithm, such as fedavg"
        )
    if isinstance(algorithm, Scaffold | Dynamic) and not compress.keeps_error:
        raise ValueError(
            f"algorithm {kind_of(algorithm)} cannot run with compress {kind}, which is exact only on average: client "
            "states and server state would drift apart, round by round; take a compressor with error feedback, such as "
            "compress=top-k, or leave compress out"
        )
    if hides_clients(experiment.aggregator) and not (type(compress) is RandK and not compress.keeps_error):
        raise ValueError(
            f"compress {kind} cannot run under aggregator global-dp: the guarantee covers neither a choice of "
            "coordinates by value nor error feedback across rounds; take compress=rand-k, which draws coordinates at "
            "random, or leave compress out"
        )
    rule = experiment.aggregator
    while isinstance(rule, Bucketing):
        rule = rule.over  # the mean of a few sparse updates is sparse, too
    if isinstance(compress, TopK | RandK) and isinstance(rule, CoordinateMedian | TrimmedMean | Bulyan):
        raise ValueError(
            f"aggregator {kind_of(rule)} cannot run with compress {kind}: most clients leave out each "
            "number, which then counts as 0, so the middle value is 0 and nothing would be learnt; take aggregator "
            "krum, multi-krum, geometric-median or norm-bound, or compress=qsgd"
        )


def with_held(state: Payloads, held: Held) -> Payloads:
    """Return the client state ``state`` with the compressor's own tensors added.

    ``held``: the compressor's own tensors, such as the compression error, as {payload name: tensors}.
    """
    return {**state, **{f"{HELD}{group}/{part}": value for group, of in held.items() for part, value in of.items()}}


def held_in(state: Payloads) -> dict[str, Payloads]:
    """Return the compressor's own tensors in the client state ``state``, as {payload name: tensors}."""
    held = dict[str, Payloads]()
    for name, value in state.items():
        if name.startswith(HELD):
            group, _, part = name.removeprefix(HELD).rpartition("/")
            held.setdefault(group, {})[part] = value
    return held
