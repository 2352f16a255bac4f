"""Does a way to compress updates keep the laws that each of them must keep? For ours and for your own.

from fl_sim.testing_compressor import check_compressor
check_compressor(HalfPrecision())
"""

from functools import partial

import numpy as np
import torch

from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.kinds import title_of
from fl_sim.packed import Coins, Compressor, Packed, Packing
from fl_sim.params import FlatParams, Layout, layout_of, num_in
from fl_sim.seeding import rng
from fl_sim.testing import BrokenLaw
from fl_sim.types import Payloads

LAYOUTS: tuple[Layout, ...] = (
    (("conv", (4, 3, 3, 3)), ("bias", (4,)), ("head", (10, 40)), ("scale", ())),
    (("only", (1,)),),
)
MANY, OFF = 1000, 0.25
"""So many rounds, after which what arrived in all may lie so far from what was sent, relative to its length."""


def check_compressor(way: Compressor) -> None:
    """Hold ``way``, a settings object, to the laws. Raises BrokenLaw with the first one that it breaks.

    1. It can be written down and read back. 2. All that it packs has its ``size``. 3. What is packed follows from the
    update, what was held back and the coins, and from nothing else. 4. A finite update arrives finite, and one that is
    not does not. 5. What is held back always has the same names and shapes. 6. Over many rounds what arrives adds up
    to what was sent: by error feedback, or on average.
    """
    experiment = Experiment(compress=way)
    if experiment_from(experiment.model_dump(mode="json")) != experiment:
        raise BrokenLaw(f"{title_of(way)} written down and read back is another one: {way!r}")
    for layout in LAYOUTS:
        _packs_to_its_size(way, layout)
        _tells_what_is_not_finite(way, layout)
        _adds_up(way, layout)


def _packs_to_its_size(way: Compressor, layout: Layout) -> None:
    held: Payloads = {}
    for number in range(3):
        update = _update(layout, number)
        packed, kept = way.pack(update, held, _coins(number))
        size = way.size(layout)
        if (len(packed.numbers), len(packed.bits)) != size or packed.numbers.dtype != torch.float32:
            raise BrokenLaw(f"{title_of(way)} packs {len(packed.numbers)} numbers and {len(packed.bits)} bytes: {size}")
        again, _ = way.pack(update, held, _coins(number))
        if not _same(packed, again):
            raise BrokenLaw(f"{title_of(way)} packs the same update in two ways: draw random numbers from coins alone")
        if number and _shapes(kept) != _shapes(held):
            raise BrokenLaw(f"{title_of(way)} holds back {_shapes(kept)} after {_shapes(held)}")
        arrived = way.unpack(packed, layout, _coins(number))
        if layout_of(arrived) != layout or not torch.isfinite(arrived.flat).all():
            raise BrokenLaw(
                f"{title_of(way)}: a finite update of {layout} arrives as {arrived.flat} of {layout_of(arrived)}"
            )
        held = kept


def _tells_what_is_not_finite(way: Compressor, layout: Layout) -> None:
    packing, update = Packing(way, seed=0), _update(layout, 0)
    update.flat[-1] = torch.nan
    packed = packing.pack({"delta": update}, update, {}, 0, 1)[1]["delta"]
    arrived = packing.unpack("delta", packed, layout, 0, 1)
    if torch.isfinite(torch.cat([value.reshape(-1) for value in arrived.values()])).all():
        raise BrokenLaw(f"{title_of(way)}: an update of which numbers are NaN arrives finite, so nobody learns of it")


def _adds_up(way: Compressor, layout: Layout) -> None:
    update, held = _update(layout, 0), Payloads()
    total = torch.zeros(num_in(layout), dtype=torch.float64)
    for number in range(MANY):
        packed, held = way.pack(update, held, _coins(number))
        total += way.unpack(packed, layout, _coins(number)).flat
    off = float(torch.linalg.vector_norm(total / MANY - update.flat) / torch.linalg.vector_norm(update.flat))
    if not off <= OFF:
        raise BrokenLaw(
            f"{title_of(way)}: of an update that is sent {MANY} times what arrives on average lies {off:.2g} of its "
            "length away: hold back what is left out (strategies.compression.error_feedback), or be right on average"
        )


def _update(layout: Layout, seed: int) -> FlatParams:
    generator = torch.Generator().manual_seed(seed)
    return FlatParams(torch.randn(num_in(layout), generator=generator), layout)


def _coins(number: int) -> Coins:
    return partial(rng, 0, "check", number)


def _same(one: Packed, other: Packed) -> bool:
    return torch.equal(one.numbers, other.numbers) and np.array_equal(one.bits, other.bits)


def _shapes(held: Payloads) -> dict[str, Layout]:
    return {name: layout_of(params) for name, params in held.items()}
