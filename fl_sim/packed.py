"""Compression of updates: a client packs the payload of its algorithm, and the server unpacks it first.

So algorithms and aggregators never see a packed update.
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
"""Returns, on each call, a fresh generator that client and server share for one packed group."""

Held: TypeAlias = Mapping[str, Payloads]
"""Tensors that a client holds back for its next round, by group of its update: {"delta": {"error": ...}}."""


class Compressor(Protocol):
    """A compressor of updates, defined by its settings: client and server each have a copy."""

    @property
    def keeps_error(self) -> bool:
        """True if the rest of an update is sent in later rounds, so that sums over rounds stay right."""

    def size(self, layout: Layout) -> Size:
        """Return the size of every packed update of this layout, whatever its numbers are."""

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Return the packed update of a client, and the tensors that it holds back for its next round.

        ``held``: the tensors from its previous round; none in its first one. Names and shapes of held tensors never
        change. Numbers that are not finite must be among those sent.
        """

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return the update of ``packed``, whose ``size`` was checked. Raises Malformed where it is none."""


@dataclass(frozen=True)
class Packing:
    """The compression of one run. ``seed``: the seed of the random numbers that both sides share.

    Groups of an update that have the model's own names and shapes are packed, each by itself: the model's change, and
    SCAFFOLD's change of a control variate. All others travel whole.
    """

    compressor: Compressor
    seed: int

    def sizes(self, template: Payloads, model: Params) -> dict[str, Size]:
        """Return the sizes of the packed groups. ``template``: all groups; ``model``: its parameters."""
        like = dict(layout_of(model))
        layouts = {name: layout_of(params) for name, params in template.items()}
        return {name: self.compressor.size(layout) for name, layout in layouts.items() if dict(layout) == like}

    def pack(
        self, payloads: Payloads, model: Params, held: Held, client: int, server_round: int
    ) -> tuple[Payloads, dict[str, Packed], dict[str, Payloads]]:
        """Return (whole groups, packed groups, tensors that the client holds back of each)."""
        packed, kept = {}, {}
        for name in self.sizes(payloads, model):
            update, coins = flattened(payloads[name]), self._coins(name, client, server_round)
            if not is_finite({name: update}):  # so that divergence is reported as for whole updates
                update = FlatParams(torch.full_like(update.flat, torch.nan), update.layout)
            on_cpu = FlatParams(update.flat.detach().to("cpu"), update.layout)
            packed[name], kept[name] = self.compressor.pack(on_cpu, held.get(name, {}), coins)
        return {name: params for name, params in payloads.items() if name not in packed}, packed, kept

    def unpack(self, name: str, packed: Packed, layout: Layout, client: int, server_round: int) -> Params:
        """Return the unpacked group ``name`` of a client's update. Raises Malformed for an impossible one."""
        return self.compressor.unpack(packed, layout, self._coins(name, client, server_round))

    def held_back(self, template: Payloads, model: Params) -> dict[str, Payloads]:
        """Return a template of the tensors that a client holds back between rounds."""
        blank = {name: zeros_like(flattened(params)) for name, params in template.items()}
        return self.pack(blank, model, {}, 0, 1)[2]

    def _coins(self, name: str, client: int, server_round: int) -> Coins:
        return partial(rng, self.seed, f"compress {name}", client, server_round)
