"""Compression of updates: the client compresses its payload before it is sent, and the server decompresses it.

Algorithms and aggregators never see a compressed update.
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
"""A function that returns a new random generator at each call. Client and server get the same random stream.

Each compressed group of tensors of an update has its own random stream.
"""

Held: TypeAlias = Mapping[str, Payloads]
"""The tensors that a compressor stores on a client until its next round: {group of the update: {name: tensor}}.

With error feedback, the stored tensors are the part of the update that was not sent: {"delta": {"error": ...}}.
"""


class Compressor(Protocol):
    """A compressor of updates: a settings object without other state. Client and server each have a copy."""

    @property
    def keeps_error(self) -> bool:
        """True for error feedback: a client adds the compression error of an update to its next update."""

    def size(self, layout: Layout) -> Size:
        """Return the size of a compressed update. The size may depend only on ``layout``, the names and shapes."""

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Return the compressed ``update`` of a client, and the tensors that the client stores for its next round.

        ``held``: the stored tensors of the client's previous round; empty in its first round. Names and shapes of
        stored tensors must never change. If the update contains NaN or infinity, the compressed update must contain NaN
        or infinity, too.
        """

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return the decompressed update. Raises Malformed if ``packed``, the compressed update, is invalid.

        The caller has checked the size of ``packed``.
        """


@dataclass(frozen=True)
class Packing:
    """The compression of all updates of a run. ``seed``: the seed of the random numbers that client and server share.

    An update consists of named groups of tensors. A group is compressed if its tensors have the names and shapes of the
    model's parameters. Examples are the change of the model, and SCAFFOLD's change of a control variate. Each such
    group is compressed separately. All other groups are sent uncompressed.
    """

    compressor: Compressor
    seed: int

    def sizes(self, template: Payloads, model: Params) -> dict[str, Size]:
        """Return {group: compressed size} of the groups that are compressed.

        ``template``: all groups of tensors of an update. ``model``: the model's parameters.
        """
        like = dict(layout_of(model))
        layouts = {name: layout_of(params) for name, params in template.items()}
        return {name: self.compressor.size(layout) for name, layout in layouts.items() if dict(layout) == like}

    def pack(
        self, payloads: Payloads, model: Params, held: Held, client: int, server_round: int
    ) -> tuple[Payloads, dict[str, Packed], dict[str, Payloads]]:
        """Return (groups to send uncompressed, compressed groups, {group: tensors to store on the client}).

        ``payloads``: the client's update. ``held``: the tensors that the client stored in its previous round.
        """
        packed, kept = {}, {}
        for name in self.sizes(payloads, model):
            update, coins = flattened(payloads[name]), self._coins(name, client, server_round)
            # if one number of a group is not finite, all numbers of the group become NaN, so that the server detects
            # the divergence
            if not is_finite({name: update}):
                update = FlatParams(torch.full_like(update.flat, torch.nan), update.layout)
            on_cpu = FlatParams(update.flat.detach().to("cpu"), update.layout)
            packed[name], kept[name] = self.compressor.pack(on_cpu, held.get(name, {}), coins)
        return {name: params for name, params in payloads.items() if name not in packed}, packed, kept

    def unpack(self, name: str, packed: Packed, layout: Layout, client: int, server_round: int) -> Params:
        """Return the decompressed group ``name`` of a client's update. Raises Malformed if ``packed`` is invalid."""
        return self.compressor.unpack(packed, layout, self._coins(name, client, server_round))

    def held_back(self, template: Payloads, model: Params) -> dict[str, Payloads]:
        """Return zeros with the names and shapes of the tensors that a client stores for the compressor."""
        blank = {name: zeros_like(flattened(params)) for name, params in template.items()}
        return self.pack(blank, model, {}, 0, 1)[2]

    def _coins(self, name: str, client: int, server_round: int) -> Coins:
        return partial(rng, self.seed, f"compress {name}", client, server_round)
