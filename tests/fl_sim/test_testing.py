"""The checks of an algorithm and a compressor see each kind of mistake that they are there for."""

from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fl_sim.local_plan import LocalPlan
from fl_sim.packed import Coins, Compressor, Packed, Size
from fl_sim.params import FlatParams, Layout, add, num_in, scale, zeros_like
from fl_sim.testing import BrokenLaw, check, check_compressor
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Payloads, ServerState, Trained
from strategies.algorithm import Averaging
from strategies.compression.error_feedback import PowerSGD, RandK, SignSGD, TopK
from strategies.compression.quantization import QSGD

_calls = count()


class Silent(Averaging):
    """A client without records sends nothing."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        update = super().finish(task, trained)
        return update if task.num_examples else ClientUpdate({}, 0)


class Everybody(Averaging):
    """A client without records counts, too."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        return ClientUpdate(super().finish(task, trained).payloads, 1, trained.loss)


class PerStep(Averaging):
    """Divides by the number of steps, which is 0 without records."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        update = super().finish(task, trained)
        one = {name: value / torch.tensor(trained.num_steps) for name, value in update.payloads["delta"].items()}
        return ClientUpdate({"delta": one}, task.num_examples, trained.loss)


class Growing(Averaging):
    """Sends more in its second round."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        delta = super().finish(task, trained).payloads["delta"]
        more = {"again": delta} if task.state else {}
        return ClientUpdate({"delta": delta, **more}, task.num_examples, trained.loss, {"kept": delta})


class Forgetting(Averaging):
    """Loses what the server remembers."""

    def init(self, params: Any) -> ServerState:
        return ServerState(params, memory={"momentum": zeros_like(params)})

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        return ServerState(add(server.params, aggregate.payloads["delta"]))


class Exploding(Averaging):
    """Makes infinite numbers."""

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        return ServerState(scale(server.params, float("inf")))


class Elsewhere(Averaging):
    """Keeps what rounds hand on where no checkpoint finds it."""

    rounds: ClassVar[dict[int, int]] = {}

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        self.rounds[0] = self.rounds.get(0, 0) + 1
        return ServerState(add(server.params, aggregate.payloads["delta"], 1 / self.rounds[0]))


class Restless(Averaging):
    """Plans another step every time it is asked, so that no two trainers do the same."""

    def plan(self, task: LocalTask) -> LocalPlan:
        return LocalPlan(proximal_mu=1.0 + next(_calls) % 2)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Silent(), "a client with 1 records sends .*, but a client without records sends {}"),
        (Everybody(), "a client with 0 records sends num_examples=1"),
        (PerStep(), "a client with 0 records sends numbers that are not finite"),
        (Growing(), "in its second round sends"),
        (Forgetting(), "merge changed the names or shapes of the server state"),
        (Exploding(), "merge returned numbers that are not finite"),
        (Elsewhere(), "a run that was interrupted after round 2 ended in other bits|the model of a stack of clients"),
        (Restless(), "at distance .* from that of PyTorch .* disagree about the local plan"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Averaging) else "",
)
def test_a_broken_law_is_named(algorithm: Averaging, message: str) -> None:
    with pytest.raises(BrokenLaw, match=message) as caught:
        check(algorithm)
    assert type(algorithm).__name__ in str(caught.value)


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


class Quiet(SignSGD):
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
        (Careless(), "only from coins"), (Quiet(), "NaN is finite after"), (Moody(), "tensors that a client stores"),
        (Infinite(), "after decompression"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_each_law_can_be_broken(way: Any, law: str) -> None:
    with pytest.raises(BrokenLaw, match=law):
        check_compressor(way)


def test_what_is_counted_is_what_is_packed() -> None:
    assert Longer().size((("w", (10,)),)) == Size(1)
