"""DepthFL: clients of different depths train the first blocks of a model with exits (Kim et al. 2023, section 3)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.params import head_shape
from fl_sim.types import LocalTask, Params, ServerState
from strategies.algorithm import Averaging, in_turn, several
from strategies.sizes import check_one_size

if TYPE_CHECKING:
    from torch import nn

    from fl_sim.exits import WithExits
    from fl_sim.narrow_models import Places


class DepthFL(Averaging):
    """A client of depth d has the first d blocks of the model, with a classifier (exit) after each block.

    The loss of a client is the sum of the cross-entropies of its exits, plus a distillation between the exits. The
    distillation is w(t) T^2 / (d - 1) times the sum of KL(softmax(f_j / T) || softmax(f_i / T)) over all pairs of exits
    i and j. No gradient flows through the logits f_j. The update of a parameter is the mean update of the round's
    clients that have this parameter, weighted by their numbers of records. If no client of the round has a parameter,
    this parameter does not change. Clients receive, train and send only their blocks and exits. The evaluated model
    predicts by the mean logits of all exits.

    ``depths``: the possible depths, assigned to clients like the ``rates`` of ``heterofl``; empty means 1, 2, ..., up
    to the number of the model's blocks. The model has as many blocks as the deepest client. ``consistency``: the final
    value of w, the weight of the distillation. ``temperature``: the temperature T of the distillation. ``ramp_up``: in
    round t (from 0), w(t) = ``consistency`` exp(-5 (1 - t / ``ramp_up``)^2), up to round ``ramp_up``; 0 means no ramp.
    The defaults are those of the released code, for 1,000 rounds: in a short run the distillation is almost off, so set
    a smaller ``ramp_up``.

    ``resnet`` has an exit after each residual block, other models have one after each layer. Differences from the
    released code: an exit is one linear layer, after pooling to 4 to 7 pixels per side (there, an exit also has
    convolutions). FedDyn's regularisation is left out, as in the row "FedAvg" of the tables of Kim et al. 2023. Clients
    are weighted by their numbers of records (there, equally).
    """

    kind: Literal["depthfl"] = "depthfl"
    title: ClassVar[str] = "DepthFL"
    layer: ClassVar[str] = "strategies.sizes:MeanOfHolders"
    knobs: ClassVar[str] = "algorithm.consistency is the weight of the distillation between exits: set a smaller value"
    depths: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(several)] = ()
    consistency: float = Field(1.0, ge=0)
    temperature: float = Field(1.0, gt=0)
    ramp_up: int = Field(300, ge=0)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings that do not support updates of different shapes."""
        check_one_size(self, experiment)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return remarks for the user: one sentence for each setting that has no effect."""
        del experiment
        if self.consistency and set(self.depths) == {1}:
            return [off(f"algorithm.consistency={self.consistency:g}", "all models have a single exit")]
        return []

    def mean_only(self) -> str:
        """Return the reason why this method cannot use robust aggregators: updates have different parameters."""
        return "updates of clients of different depths have different parameters"

    def note(self) -> str:
        """Return the note below result tables: the evaluated model, and the size of messages."""
        return f"{self.title}: the mean of all exits is evaluated, and bytes are those of the clients' first blocks."

    def rebuilt(self, model: nn.Module, input_shape: tuple[int, ...]) -> WithExits:
        """Return ``model`` with exits, and with as many blocks as the deepest client has.

        Raises UserError for a model that cannot have exits, or has fewer blocks than a client.
        """
        from fl_sim.exits import with_exits  # noqa: PLC0415 (it loads torch)

        return with_exits(model, input_shape).first(max(self.depths, default=None))

    def check_model(self, model: nn.Module) -> None:
        """Do nothing: ``rebuilt`` has made a model with exits."""

    def size_of(self, client: int, server: ServerState) -> float:
        """Return the share of the model's blocks that a client has: its depth, divided by the number of blocks."""
        blocks = _depth(server.params)
        return in_turn(self.depths or range(1, blocks + 1), client) / blocks

    def sized(self, server: ServerState, size: float) -> ServerState:
        """Return the server state that clients with the share ``size`` of the blocks receive."""
        from fl_sim.exits import first_blocks  # noqa: PLC0415 (as above)

        params = first_blocks(server.params, round(size * _depth(server.params)))
        return ServerState(params, server.broadcast, server.memory)

    def places(self, server: ServerState, size: float) -> Places:
        """Return {name: ()} for each parameter in the share ``size`` of the blocks; () stands for the whole tensor."""
        return dict.fromkeys(self.sized(server, size).params, ())

    def size_in(self, task: LocalTask) -> float:
        """Return the share of the model's blocks that the client receives."""
        return _depth(task.params) / _depth(task.initial)

    def resized(self, model: WithExits, params: Params, size: float) -> WithExits:
        """Return a copy of the first blocks and exits of ``model``: those with parameters in ``params``."""
        del size
        return model.first(_depth(params))

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``): the loss of all exits replaces the loss of the mean logits."""
        data = {
            "smoothing": torch.tensor(task.settings.label_smoothing),
            "weight": torch.tensor(self._weight(task.server_round)),
        }
        # mean logits times 0: the gradient of their cross-entropy is 0
        scale = torch.zeros(head_shape(task.params)[0])
        return LocalPlan(logit_scale=scale, loss_term=LossTerm(self.losses_of_exits, data, features=True))

    def losses_of_exits(self, batch: Batch) -> torch.Tensor:
        """Return the loss of each record, (n,): the cross-entropies of all exits, and the distillation between them.

        ``batch.features``: the logits of all exits, as one vector for each record. The trainer adds the cross-entropy
        of the mean logits times 0, which is the logarithm of the number of classes. This logarithm is subtracted here.
        """
        assert batch.features is not None
        count, classes = batch.logits.shape
        exits, smoothing = batch.features.reshape(count, -1, classes), batch.data["smoothing"]
        logs, depth = exits.log_softmax(2), exits.shape[1]
        is_right = batch.labels[:, None, None] == torch.arange(classes, device=batch.labels.device)
        loss = -(logs * ((1 - smoothing) * is_right + smoothing / classes)).sum((1, 2)) - math.log(classes)
        if depth == 1 or not self.consistency:
            return loss
        own = (exits / self.temperature).log_softmax(2)
        taught = own.detach()
        # for each exit, the sum of the probabilities of all other exits
        others = taught.exp().sum(1, keepdim=True) - taught.exp()
        divergence = (taught.exp() * taught).sum((1, 2)) - (others * own).sum((1, 2)) / (depth - 1)
        return loss + batch.data["weight"] * self.temperature**2 * divergence

    def _weight(self, server_round: int) -> float:
        """Return w, the weight of the distillation in round ``server_round`` (from 1)."""
        left = 1 - min(1, (server_round - 1) / self.ramp_up) if self.ramp_up else 0.0
        return self.consistency * math.exp(-5 * left**2)


def _depth(params: Params) -> int:
    from fl_sim.exits import num_exits  # noqa: PLC0415 (it loads torch)

    return num_exits(params.keys())
