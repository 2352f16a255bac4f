"""HeteroFL: clients of different widths train the first channels of every layer (Diao et al. 2021, section 3)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import LocalPlan
from fl_sim.params import head_shape, layout_of
from fl_sim.seeding import rng
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.algorithm import FEDAVG, Averaging, in_turn, several
from strategies.sizes import CLASSES, check_one_size

if TYPE_CHECKING:
    from torch import nn

    from fl_sim.narrow_models import Places

_WIDTH: Final = "width"
"""Name of the broadcast tensors with the width of the client's model."""

_ROUND: Final = "round"
"""Name of the tensors in the server's memory with the number of rounds so far."""


class HeteroFL(Averaging):
    """A client of width s has the first ceil(s K) of the K channels of every layer, and trains this small model.

    A small model has all inputs and all logits. The update of a parameter entry is the mean update of this round's
    clients that have this entry, weighted by their numbers of records. An entry that no client of the round has stays
    unchanged. Clients receive, train and send only small models, so bytes, memory and time are those of small models.
    The whole model is evaluated.

    ``rates``: the widths. With n rates, each block of n consecutive client IDs gets every rate once, in random order.
    The order is random because some partitions assign classes by client ID, and widths must not depend on classes. List
    a rate several times to give it to more clients. ``mode``: with "fix" a client's width never changes. With "dynamic"
    each client has a random one of ``rates`` in every round. These random choices depend only on client ID and round
    number, so they are the same in every run. Widths are public.

    ``scaler``: if true, the outputs of all layers except the last are divided by s in training, as in the paper. In the
    paper's models a norm layer follows each layer and removes this factor. In models without norm layers, small widths
    then diverge easily, so ``scaler`` is false by default. ``masked``: if true, the softmax leaves out the classes that
    a client lacks, and the mean of these classes' rows in the last layer is computed without this client. For this
    mean, clients send a mask of their classes. In the released code the logits of absent classes are 0 and stay in the
    softmax, and all clients have the same weight. nn.GroupNorm keeps its number of channels per group, if the small
    model's number of channels is a multiple of this number. The paper's BatchNorm, whose statistics come from a final
    pass over all clients, is not implemented.
    """

    kind: Literal["heterofl"] = "heterofl"
    title: ClassVar[str] = "HeteroFL"
    layer: ClassVar[str] = "strategies.sizes:MeanOfHolders"
    needs_head: ClassVar[bool] = True
    knobs: ClassVar[str] = (
        "algorithm.scaler divides the outputs of each layer by the width, and only norm layers remove this factor: "
        "leave algorithm.scaler out"
    )
    rates: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], BeforeValidator(several)] = Field(
        (1.0, 0.5, 0.25, 0.125, 0.0625), min_length=1
    )
    mode: Literal["fix", "dynamic"] = "fix"
    scaler: bool = False
    masked: bool = True

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings that do not fit updates of different shapes."""
        check_one_size(self, experiment)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return remarks for the user: one sentence for each setting that has no effect."""
        del experiment
        said = list[str]()
        if self.mode == "dynamic" and len(set(self.rates)) == 1:
            said.append(off("algorithm.mode=dynamic", "all rates are the same"))
        if set(self.rates) == {1.0}:
            said.append(off("algorithm.rates=1", "models are whole" if self.masked else FEDAVG))
        return said

    def mean_only(self) -> str:
        """Return the reason why this method cannot use robust aggregators: updates have different shapes."""
        return "updates of clients of different widths have different shapes"

    def note(self) -> str:
        """Return the note below result tables: the evaluated model, and the tensors that clients send."""
        told = "; clients tell which classes they hold" if self.masked else ""
        return f"{self.title}: the whole model is evaluated, and bytes are those of the clients' small models{told}."

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the model, the width 1, and the round count 0."""
        return ServerState(params, {_WIDTH: {"rate": torch.ones(1)}}, {_ROUND: {"number": torch.zeros(1)}})

    def check_model(self, model: nn.Module) -> None:
        """Raise UserError if the model has layers that cannot be made narrower."""
        from fl_sim.narrow_models import check_narrowable  # noqa: PLC0415 (it loads torch)

        check_narrowable(model)

    def size_of(self, client: int, server: ServerState) -> float:
        """Return the width of a client's model in the coming round, as a share of all channels."""
        if self.mode == "fix":
            return in_turn(self.rates, client)
        return self.rates[int(rng(0, "widths", client, _round(server)).integers(len(self.rates)))]

    def sized(self, server: ServerState, size: float) -> ServerState:
        """Return the server state that clients of width ``size`` receive."""
        from fl_sim.narrow_models import cut  # noqa: PLC0415 (it loads torch)

        params = cut(server.params, self.places(server, size))
        return ServerState(params, {**server.broadcast, _WIDTH: {"rate": torch.tensor([size])}}, server.memory)

    def places(self, server: ServerState, size: float) -> Places:
        """Return the positions in the whole model of all entries that a small model of width ``size`` has."""
        from fl_sim.narrow_models import places_of  # noqa: PLC0415 (as above)

        return places_of(layout_of(server.params), size, self.first_channel(_round(server)))

    def first_channel(self, rounds: int) -> int:
        """Return the index of the first channel of small models: 0 in every round."""
        del rounds
        return 0

    def size_in(self, task: LocalTask) -> float:
        """Return the width of the model that the client receives."""
        return float(task.broadcast[_WIDTH]["rate"]) if _WIDTH in task.broadcast else 1.0

    def resized(self, model: nn.Module, params: Params, size: float) -> nn.Module:
        """Return a copy of ``model`` with the smaller shapes of ``params``, for clients of width ``size``."""
        from fl_sim.narrow_models import narrowed  # noqa: PLC0415 (as above)

        return narrowed(model, params, 1 / size if self.scaler else 1.0)

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): FedAvg's; with ``masked``, the softmax omits absent classes."""
        if not self.masked:
            return LocalPlan()
        return LocalPlan(logit_shift=torch.where(torch.tensor(task.class_counts) > 0, 0.0, -math.inf))

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update of the small model and, with ``masked``, a 0/1 mask of the client's classes."""
        update = super().finish(task, trained)
        if self.masked:
            counts = task.class_counts or (0,) * head_shape(task.params)[0]
            update.payloads[CLASSES] = {"held": (torch.tensor(counts) > 0).float()}
        return update

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: the model plus each entry's mean update, and the number of rounds plus 1."""
        merged = super().merge(server, aggregate)
        return ServerState(merged.params, merged.broadcast, {_ROUND: {"number": torch.tensor([_round(server) + 1.0])}})


def _round(server: ServerState) -> int:
    return int(server.memory[_ROUND]["number"])
