"""Updates that travel packed: what a way to compress them is, and what it does between an algorithm and the wire.

A client packs what its algorithm sends, the server unpacks it before anything else looks at it. So algorithms and
aggregators know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from fl_sim.importing import torch
from fl_sim.params import FlatParams, Layout, flattened, is_finite, layout_of, zeros_like
from fl_sim.seeding import rng
from fl_sim.types import Packed, Params, Payloads, Size

__all__ = ["Coins", "Compressor", "Held", "Packed", "Packing", "Size"]

Coins: TypeAlias = Callable[[], np.random.Generator]
"""Starts anew, on each call, the random numbers that a client and the server have in common for one packed group."""

Held: TypeAlias = Mapping[str, Payloads]
"""What a client holds back for its next round, by the group of its update: {"delta": {"error": ...}}."""


class Compressor(Protocol):
    """A way to compress updates, told by settings alone: client and server each have their own copy of it."""

    @property
    def keeps_error(self) -> bool:
        """Say whether what is left out of an update is sent later, so that sums over rounds stay right."""
        ...

    def size(self, layout: Layout) -> Size:
        """Return how much every packed update of this layout takes, whatever its numbers are."""
        ...

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Return what is sent of a client's update, and what the client holds back for its next round.

        ``held``: what it held back in the last round in which it took part; nothing in its first one. The names and
        shapes of what is held back are always the same. Numbers that are not finite must be among those sent.
        """
        ...

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return the update that ``packed``, which has its ``size``, stands for. Raises Malformed where it has none."""
        ...


@dataclass(frozen=True)
class Packing:
    """The compression of one run. ``seed``: what the random numbers that both sides share are derived from.

    Groups of an update that have the model's own names and shapes are packed, each by itself: the model's change, and
    SCAFFOLD's change of a control variate. All others travel whole.
    """

    compressor: Compressor
    seed: int

    def sizes(self, template: Payloads, model: Params) -> dict[str, Size]:
        """Return the sizes of the groups that travel packed. ``template``: all groups; ``model``: its parameters."""
        like = dict(layout_of(model))
        layouts = {name: layout_of(params) for name, params in template.items()}
        return {name: self.compressor.size(layout) for name, layout in layouts.items() if dict(layout) == like}

    def pack(
        self, payloads: Payloads, model: Params, held: Held, client: int, server_round: int
    ) -> tuple[Payloads, dict[str, Packed], dict[str, Payloads]]:
        """Return (groups that travel whole, packed groups, what the client holds back of each)."""
        packed, kept = {}, {}
        for name in self.sizes(payloads, model):
            update, coins = flattened(payloads[name]), self._coins(name, client, server_round)
            if not is_finite({name: update}):  # so that training that diverges is told as it is of whole updates
                update = FlatParams(torch.full_like(update.flat, torch.nan), update.layout)
            packed[name], kept[name] = self.compressor.pack(_on_cpu(update), held.get(name, {}), coins)
        return {name: params for name, params in payloads.items() if name not in packed}, packed, kept

    def unpack(self, name: str, packed: Packed, layout: Layout, client: int, server_round: int) -> Params:
        """Return the group ``name`` of a client's update. Raises Malformed where no client could have sent it."""
        return self.compressor.unpack(packed, layout, self._coins(name, client, server_round))

    def held_back(self, template: Payloads, model: Params) -> dict[str, Payloads]:
        """Return the names and shapes of what a client holds back between rounds."""
        blank = {name: zeros_like(flattened(params)) for name, params in template.items()}
        return self.pack(blank, model, {}, 0, 1)[2]

    def _coins(self, name: str, client: int, server_round: int) -> Coins:
        return partial(rng, self.seed, f"compress {name}", client, server_round)


def _on_cpu(update: FlatParams) -> FlatParams:
    return FlatParams(update.flat.detach().to("cpu"), update.layout)
