"""The laws for ways to compress: ours keep them, and each law is broken by something."""

from typing import Any

import numpy as np
import pytest
import torch

from fl_sim.packed import Coins, Compressor, Packed, Size
from fl_sim.params import FlatParams, Layout, num_in
from fl_sim.testing import BrokenLaw
from fl_sim.testing_compressor import check_compressor
from fl_sim.types import Payloads
from strategies.compression.power_sgd import PowerSGD
from strategies.compression.qsgd import QSGD
from strategies.compression.rand_k import RandK
from strategies.compression.sign_sgd import SignSGD
from strategies.compression.top_k import TopK


@pytest.mark.parametrize(
    "way",
    [
        TopK(share=0.05), RandK(share=0.3), RandK(share=0.05, correction="error-feedback"), QSGD(levels=2),
        PowerSGD(rank=1), SignSGD(),
    ],
    ids=str,
)  # fmt: skip
def test_ours_keep_the_laws(way: Compressor) -> None:
    check_compressor(way)


class Forgetful(TopK):
    """Top-k that loses what it leaves out."""

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        return self.encode(update, coins), {}


class Longer(RandK):
    """Sends more than it says."""

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        return Packed.of(update.flat)


class Careless(QSGD):
    """Draws random numbers that nobody can draw again."""

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        return super().pack(update, held, np.random.default_rng)


class Silent(SignSGD):
    """Turns what is not finite into numbers."""

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        return FlatParams(torch.nan_to_num(super().unpack(packed, layout, coins).flat), layout)


class Moody(TopK):
    """Holds back this and that."""

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        packed, kept = super().pack(update, held, coins)
        return packed, {**kept, f"part {len(held)}": update}


class Infinite(RandK):
    """Divides by nothing."""

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        return FlatParams(torch.full((num_in(layout),), torch.inf), layout)


@pytest.mark.parametrize(
    ("way", "law"),
    [
        (Forgetful(share=0.05), "sent 1000 times"), (Longer(share=0.5), "packs 513 numbers"),
        (Careless(), "coins alone"), (Silent(), "NaN arrives finite"), (Moody(), "holds back"),
        (Infinite(), "arrives as"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_each_law_can_be_broken(way: Any, law: str) -> None:
    with pytest.raises(BrokenLaw, match=law):
        check_compressor(way)


def test_what_is_counted_is_what_is_packed() -> None:
    assert Longer().size((("w", (10,)),)) == Size(1)
