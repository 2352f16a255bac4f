"""Laws of every way to compress: what travels, what it stands for, and what is left for later."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fl_sim.engines import arrays, wire
from fl_sim.errors import Malformed, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.packed import Coins, Compressor, Packed, Packing, Size
from fl_sim.params import FlatParams, Layout, num_in
from fl_sim.seeding import rng
from fl_sim.settings import kinds_of
from fl_sim.types import ClientUpdate, Payloads
from strategies.compression.error_feedback import PowerSGD, RandK, SignSGD, TopK
from strategies.compression.layer import ClientCompression
from strategies.compression.quantization import QSGD, bits_for, pack, pack_digits, unpack, unpack_digits

LAYOUT: Layout = (("conv", (4, 3, 5, 5)), ("bias", (4,)), ("head", (10, 40)), ("one", ()))
D = num_in(LAYOUT)  # 300 + 4 + 400 + 1 = 705
ALL: dict[str, Compressor] = {
    "top-k": TopK(share=0.1), "rand-k": RandK(share=0.1), "rand-k, error feedback": RandK(correction="error-feedback"),
    "qsgd": QSGD(levels=3, bucket_size=64), "powersgd": PowerSGD(rank=2), "signsgd": SignSGD(),
}  # fmt: skip
WITH_FEEDBACK = [name for name, way in ALL.items() if way.keeps_error]
every = pytest.mark.parametrize("name", ALL)


def coins(*keys: int) -> Coins:
    return partial(rng, 0, "compress", *keys)


def update_of(seed: int = 0, layout: Layout = LAYOUT) -> FlatParams:
    generator = torch.Generator().manual_seed(seed)
    return FlatParams(torch.randn(num_in(layout), generator=generator), layout)


def sent(way: Compressor, update: FlatParams, held: Payloads | None = None, *keys: int) -> tuple[FlatParams, Payloads]:
    """What arrives of an update, and what is held back."""
    packed, kept = way.pack(update, held or {}, coins(*keys))
    return way.unpack(packed, update.layout, coins(*keys)), kept


def test_the_laws_here_are_held_by_every_kind() -> None:
    assert {name.partition(",")[0] for name in ALL} == set(kinds_of("compress")) - {"none"}


def test_what_travels_has_the_bits_of_the_formulas() -> None:
    k = 71  # 0.1 * 705, rounded up
    assert TopK(share=0.1).size(LAYOUT) == Size(k, -(-k * 10 // 8))  # ceil(log2 705) = 10
    assert RandK(share=0.1).size(LAYOUT) == Size(k)
    # 2 s + 1 = 7 values take 3 bits, and 22 of them 64 bits, less than 3 each; a norm for every 64 of 705 numbers.
    assert QSGD(levels=3, bucket_size=64).size(LAYOUT) == Size(12, 8 * -(-D // 22))
    assert QSGD(levels=7, bucket_size=10**9).size(LAYOUT) == Size(1, 8 * -(-D // 16))
    # (4, 75) and (10, 40) have rank 2; a vector of 4 and a number alone travel whole.
    assert PowerSGD(rank=2).size(LAYOUT) == Size(2 * (4 + 75) + 2 * (10 + 40) + 4 + 1)
    assert SignSGD().size(LAYOUT) == Size(4, -(-D // 8))


@every
def test_the_bytes_on_the_wire_are_those_of_the_packed_arrays(name: str) -> None:
    way = ALL[name]
    size, (packed, _) = way.size(LAYOUT), way.pack(update_of(), {}, coins())
    assert (packed.numbers.dtype, tuple(packed.numbers.shape)) == (torch.float32, (size.numbers,))
    assert (packed.bits.dtype, packed.bits.shape) == (np.uint8, (size.bits,))
    content = wire.update_content(ClientUpdate({}, 1, packed={"delta": packed}))
    headers = 128 * (bool(size.numbers) + bool(size.bits))
    assert arrays.num_bytes(content) == headers + 4 * size.numbers + size.bits


@every
def test_an_update_comes_through_the_wire_as_it_was_packed(name: str) -> None:
    packing, update = Packing(ALL[name], seed=3), update_of()
    whole, packed, held = packing.pack({"delta": update, "few": {"a": torch.ones(2)}}, update, {}, 5, 7)
    assert list(whole) == ["few"]  # what has not the model's shapes travels as it is
    assert bool(held["delta"]) is ALL[name].keeps_error
    template = {"delta": update, "few": {"a": torch.zeros(2)}}
    content = wire.update_content(ClientUpdate(whole, 9, 0.5, packed=packed))
    reply = wire.read_update(5, content, template, packed=packing.sizes(template, update))
    reply = ClientCompression(packing).unpacked(reply, template, 7)
    assert list(reply.payloads) == ["delta", "few"]
    got = reply.payloads["delta"]
    assert isinstance(got, FlatParams)
    assert torch.equal(got.flat, packing.unpack("delta", packed["delta"], LAYOUT, 5, 7).flat)  # type: ignore[attr-defined]
    assert reply.payloads["few"]["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("way", "tolerance"),
    [
        (TopK(share=1), 0), (RandK(share=1), 0), (RandK(share=1, correction="error-feedback"), 0),
        (PowerSGD(rank=100), 0), (QSGD(levels=32767, bucket_size=1), 1e-6), (QSGD(levels=32767, bucket_size=D), 1e-3),
    ],
)  # fmt: skip
def test_all_numbers_all_ranks_or_very_many_levels_are_no_compression(way: Compressor, tolerance: float) -> None:
    update = update_of()
    arrived, _ = sent(way, update)
    assert torch.linalg.vector_norm(arrived.flat - update.flat) <= tolerance * torch.linalg.vector_norm(update.flat)


def test_powersgd_is_exact_for_matrices_of_its_rank() -> None:
    left, right = torch.randn(30, 2, generator=torch.Generator().manual_seed(1)), update_of(2, (("", (2, 40)),))[""]
    update = FlatParams((left @ right).reshape(-1), (("w", (30, 40)),))
    for rank in (2, 3):
        arrived, held = sent(PowerSGD(rank=rank), update)
        assert torch.allclose(arrived.flat, update.flat, atol=1e-4)
        assert float(held["error"]["w"].abs().max()) < 1e-4


def test_powersgds_warm_start_finds_the_best_approximation_of_its_rank() -> None:
    layout: Layout = (("w", (20, 30)),)
    update, way = update_of(3, layout), PowerSGD(rank=1)
    _, held = way.pack(update, {}, coins())
    for _ in range(200):  # the same matrix again and again, without its error, is power iteration
        packed, held = way.pack(update, {"start": held["start"]}, coins())
    left, values, right = torch.linalg.svd(update["w"])
    best = values[0] * torch.outer(left[:, 0], right[0])
    assert torch.allclose(way.unpack(packed, layout, coins())["w"], best, atol=1e-3)


@pytest.mark.parametrize(
    ("way", "most"),
    [
        # Alistarh et al., lemma 3.1: min(n / s^2, sqrt(n) / s) of a bucket of n; rand-k: d / k - 1.
        (QSGD(levels=1, bucket_size=D), min(D, D**0.5)),
        (QSGD(levels=7, bucket_size=64), min(64 / 49, 64**0.5 / 7)),
        (RandK(share=0.1), D / 71 - 1),
    ],
)
def test_qsgd_and_scaled_rand_k_are_right_on_average_with_the_variance_of_the_paper(
    way: Compressor, most: float
) -> None:
    update, draws = update_of(), 2000
    arrived = torch.stack([sent(way, update, {}, draw)[0].flat for draw in range(draws)])
    square = float(update.flat.double().pow(2).sum())
    spread = float((arrived.double() - update.flat).pow(2).sum(dim=1).mean()) / square
    assert spread <= most * 1.05
    # The mean of so many draws has that spread over their number; five deviations of a chi-square of 705 numbers.
    off = float((arrived.double().mean(dim=0) - update.flat).pow(2).sum()) / square
    assert 0.5 * spread / draws < off < 1.5 * spread / draws


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_what_was_sent_and_what_is_left_add_up_to_all_updates(name: str) -> None:
    held: Payloads = {}
    total, arrived = torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    for number in range(12):
        update = update_of(number)
        got, held = sent(ALL[name], update, held, number)
        total += update.flat
        arrived += got.flat
    error = held["error"]
    assert isinstance(error, FlatParams)
    assert torch.linalg.vector_norm(error.flat) > 0.1  # something was left, or this would show nothing
    assert torch.allclose(arrived + error.flat, total, atol=2e-5)


@given(hnp.arrays(np.float32, D, elements=st.floats(-1e6, 1e6, width=32)), st.sampled_from(list(ALL)))
def test_any_update_is_packed_and_unpacked_and_its_error_is_what_is_missing(flat: Any, name: str) -> None:
    update = FlatParams(torch.from_numpy(flat), LAYOUT)
    arrived, held = sent(ALL[name], update)
    assert torch.isfinite(arrived.flat).all()
    if held:
        error = held["error"]
        assert isinstance(error, FlatParams)
        assert torch.equal(update.flat - arrived.flat, error.flat)


@every
def test_an_update_of_zeros_arrives_as_zeros_and_the_next_one_is_heard(name: str) -> None:
    zeros = FlatParams(torch.zeros(D), LAYOUT)
    arrived, held = sent(ALL[name], zeros)
    assert not arrived.flat.any()
    for number in range(20):
        arrived, held = sent(ALL[name], update_of(), held, number)
    assert float(arrived.flat @ update_of().flat) > 0


@every
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_that_is_not_finite_is_told_by_any_number_of_it(name: str, bad: float) -> None:
    update = FlatParams(update_of().flat.clone(), LAYOUT)
    update.flat[17] = bad
    packing = Packing(ALL[name], seed=0)
    _, packed, _ = packing.pack({"delta": update}, update, {}, 0, 1)
    arrived = packing.unpack("delta", packed["delta"], LAYOUT, 0, 1)
    assert not torch.isfinite(torch.cat([value.reshape(-1) for value in arrived.values()])).all()


def test_top_k_sends_the_largest_numbers_and_only_these() -> None:
    update = FlatParams(torch.tensor([1.0, -5, 0, 3, -2, 4]), (("w", (6,)),))
    arrived, held = sent(TopK(share=0.5), update)
    assert arrived["w"].tolist() == [0, -5, 0, 3, 0, 4]
    assert held["error"]["w"].tolist() == [1, 0, 0, 0, -2, 0]
    arrived, _ = sent(TopK(share=0.5), FlatParams(torch.tensor([2.0, 0, 0, 0, -1, 0]), update.layout), held)
    assert arrived["w"].tolist() == [3, 0, 0, 0, -3, 0]  # and of equal sizes whichever


def test_rand_ks_places_are_others_in_each_round_and_for_each_client_and_no_part_of_the_message() -> None:
    packing, update = Packing(RandK(share=0.1), seed=0), update_of()

    def places(client: int, server_round: int) -> frozenset[int]:
        _, packed, _ = packing.pack({"delta": update}, update, {}, client, server_round)
        arrived = packing.unpack("delta", packed["delta"], LAYOUT, client, server_round)
        assert isinstance(arrived, FlatParams)
        assert arrived.flat.count_nonzero() == 71
        return frozenset(arrived.flat.nonzero().flatten().tolist())

    drawn = {places(client, server_round) for client in range(3) for server_round in (1, 2)}
    assert len(drawn) == 6
    assert places(1, 2) == places(1, 2)


def test_signsgd_sends_the_mean_size_of_each_tensor() -> None:
    update = FlatParams(torch.tensor([1.0, -3, 10, -20]), (("small", (2,)), ("large", (2,))))
    arrived, held = sent(SignSGD(), update)
    assert arrived.flat.tolist() == [2, -2, 15, -15]
    assert held["error"]["large"].tolist() == [-5, -5]


@pytest.mark.parametrize(
    "setting",
    [
        "top-k:0", "top-k:1.01", "top-k:-0.1", "rand-k:0", "rand-k:2", "rand-k:nan", "qsgd:0", "qsgd:40000",
        "qsgd:1.5", "powersgd:0", "powersgd:-1", "signsgd:1", "top-5", "rand-3", "topk", "none:1",
    ],
)  # fmt: skip
def test_no_numbers_no_levels_and_no_rank_are_refused_before_anything_runs(setting: str) -> None:
    with pytest.raises(UserError, match=f"compress|{setting.partition(':')[0]}") as raised:
        experiment_from({"compress": setting})
    assert "\n" not in str(raised.value)


@given(st.integers(0, 21), st.data())
def test_whole_numbers_survive_their_bits(bits: int, data: st.DataObject) -> None:
    numbers = np.array(data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=50)), np.int64)
    packed = pack(numbers, bits)
    assert len(packed) == -(-len(numbers) * bits // 8)
    assert unpack(packed, len(numbers), bits).tolist() == numbers.tolist()


@given(st.integers(2, 65535), st.data())
def test_digits_survive_their_words_which_are_no_larger_than_their_bits(base: int, data: st.DataObject) -> None:
    digits = np.array(data.draw(st.lists(st.integers(0, base - 1), max_size=100)), np.int64)
    packed = pack_digits(digits, base)
    assert len(packed) <= 8 * -(-len(digits) // (64 // bits_for(base)))
    assert unpack_digits(packed, len(digits), base).tolist() == digits.tolist()


def _numbers_changed(packed: Packed, to: float) -> Packed:
    numbers = packed.numbers.clone()
    numbers[0] = to
    return Packed(numbers, packed.bits)


def _bits_changed(packed: Packed, change: Any) -> Packed:
    bits = packed.bits.copy()
    change(bits)
    return Packed(packed.numbers, bits)


def _fill(value: int, at: slice) -> Any:
    return lambda bits: bits.__setitem__(at, value)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (
            "top-k",
            lambda p: _bits_changed(p, _fill(255, slice(0, 80))),
            "ascend",
        ),  # place 1023 of 705, again and again
        ("top-k", lambda p: _bits_changed(p, _fill(0, slice(None))), "ascend"),  # place 0, 71 times
        ("top-k", lambda p: _bits_changed(p, _fill(255, slice(-1, None))), "unused|ascend"),
        ("qsgd", lambda p: _bits_changed(p, _fill(255, slice(0, 8))), "levels"),
        ("qsgd", lambda p: _bits_changed(p, _fill(255, slice(-8, None))), "levels"),
        ("qsgd", lambda p: _numbers_changed(p, -1.0), "below 0"),
        ("signsgd", lambda p: _numbers_changed(p, -1.0), "below 0"),
        ("signsgd", lambda p: _bits_changed(p, _fill(255, slice(-1, None))), "unused"),
    ],
)
def test_what_no_client_packs_is_malformed(name: str, change: Any, reason: str) -> None:
    packed, _ = ALL[name].pack(update_of(), {}, coins())
    with pytest.raises(Malformed, match=reason):
        ALL[name].unpack(change(packed), LAYOUT, coins())


@every
def test_a_message_of_other_sizes_or_parts_is_malformed(name: str) -> None:
    size, template = ALL[name].size(LAYOUT), {"delta": update_of()}
    reading = {"delta": size}
    for other in (Size(size.numbers + 1, size.bits), Size(size.numbers, size.bits + 1), Size(0, size.bits), Size(0)):
        content = wire.update_content(ClientUpdate({}, 1, packed={"delta": Packed.blank(other)}))
        with pytest.raises(Malformed):
            wire.read_update(0, content, template, packed=reading)
    with pytest.raises(Malformed, match="Flower records with other names"):  # whole, where it was to be packed
        wire.read_update(0, wire.update_content(ClientUpdate(template, 1)), template, packed=reading)
