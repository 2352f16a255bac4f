"""FedProto as published: clients have their own models, and send only prototypes (Tan et al. 2022, algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.types import LocalTask, Params
from strategies.fedproto import FedProto

if TYPE_CHECKING:
    from clients.client_task import OnClient
    from fl_sim.training.losses import LogitsOf


class FedProtoLocal(FedProto):
    """Uses the loss and prototypes of ``fedproto``, but each client trains its own model, and no parameter is sent.

    Clients train from the run's initial model, in the rounds in which they take part. ``strength``: as in ``fedproto``;
    with 0 the method is ``local-only``. ``predict``: "head" predicts the class with the highest logit. "prototype"
    predicts the class whose prototype is nearest to the features of the record; before the first prototypes are known,
    the head predicts. The released code reports the accuracy of both rules. For "prototype" the released code uses only
    the prototypes of the client's classes. All other deviations from the released code are listed under ``fedproto``.
    """

    kind: Literal["fedproto-local"] = "fedproto-local"  # type: ignore[assignment]  # another kind than its base class
    title: ClassVar[str] = "FedProto with local models"
    sends_nothing: ClassVar[bool] = True
    before: ClassVar[Mapping[str, Any]] = {}
    predict: Literal["head", "prototype"] = "head"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return remarks for the user: one sentence for each setting that has no effect."""
        if not self.strength:
            return [off("algorithm.strength=0", "each client's own model is that of algorithm local-only")]
        return super().remarks(experiment)

    def sends(self, params: Params) -> Collection[str]:
        """Return no names: clients send no parameters."""
        del params
        return ()

    def own_scores(self, task: LocalTask, client: OnClient) -> LogitsOf:
        """Return a function from inputs to class scores: logits, or minus the squared distances to the prototypes."""
        outputs = partial(client.trainer.outputs, {**task.params, **task.statistics})
        z, known = task.broadcast["prototypes"].values()
        if self.predict == "head" or not (known > 0).any():
            return lambda inputs: outputs(inputs)[0]

        def scores(inputs: torch.Tensor) -> torch.Tensor:
            squares = torch.cdist(outputs(inputs)[1], z.to(inputs.device)).square()
            return squares.masked_fill(known.to(inputs.device) == 0, torch.inf).neg()

        return scores
