"""kNN-Per: clients mix predictions of the global model and of nearest neighbours (Marfoq et al. 2022, algorithm 1)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.types import LocalTask
from strategies.algorithm import FEDAVG, Averaging

if TYPE_CHECKING:
    from clients.client_task import OnClient
    from fl_sim.training.losses import LogitsOf

_GRID: Final = tuple(step / 10 for step in range(11))
"""The weights that are compared on a client's validation records, as in the paper."""


class KNNPer(Averaging):
    """FedAvg, but a client predicts by ``weight`` p_kNN + (1 - ``weight``) p, where p is the global model's softmax.

    Let N be the ``neighbours`` training records that are nearest to an input. p_kNN(class c) is the sum of
    exp(-distance / ``scale``) over the records of class c in N, divided by the same sum over all records in N.
    Distances are between features z, the inputs of the last layer. ``distance``: "norm" is ||z - z'||, as in the paper;
    "mean" is ||z - z'||^2 / d for d features, as in the released code. ``neighbours``: 10 in the paper. ``scale``: 1 in
    the released code. ``weight``: a number from 0 to 1; with 0 the method is FedAvg. With "validation" each client
    tries 0, 0.1, ..., 1 and uses the best weight on its own validation records, as in the paper; of equally good
    weights, the smallest. A client without validation records uses 0. The released code reports the accuracy of every
    weight on test records. A client without training records uses only the model's prediction.
    """

    kind: Literal["knn-per"] = "knn-per"
    title: ClassVar[str] = "kNN-Per"
    weight: Annotated[float, Field(ge=0, le=1)] | Literal["validation"] = 0.5
    neighbours: int = Field(10, ge=1)
    scale: float = Field(1.0, gt=0)
    distance: Literal["mean", "norm"] = "mean"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the weight is chosen by validation, and clients have no validation records."""
        if self.weight == "validation" and experiment.evaluate.validation in {0, "given"}:
            raise ValueError(
                "algorithm.weight=validation chooses each client's weight on its own validation records, and clients "
                "have none: set evaluate.validation, for example to 0.2, or give a number as the weight"
            )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return remarks for the user: one sentence for each setting that has no effect."""
        if not self.weight:
            return [off("algorithm.weight=0", FEDAVG)]
        why = f"evaluate.clients=none measures no client's own predictions, and without them {FEDAVG}"
        return [] if experiment.evaluate.measures_clients else [off("algorithm knn-per", why)]

    def own_scores(self, task: LocalTask, client: OnClient) -> LogitsOf:
        """Return a function from inputs to the logarithms of the client's mixed probabilities."""
        outputs = partial(client.trainer.outputs, {**task.params, **task.statistics})
        if not self.weight or not len(client.records):
            return lambda inputs: outputs(inputs)[0]
        inputs, labels = client.records.tensors()
        _, features = outputs(inputs)

        def parts(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits, own = outputs(inputs)
            return logits.softmax(1), self._of_neighbours(own, features, labels, logits.shape[1])

        weight = self.weight if isinstance(self.weight, float) else 0.0
        if self.weight == "validation" and client.validation is not None and len(client.validation):
            inputs, known = client.validation.tensors()
            found = parts(inputs)
            weight = max(
                _GRID, key=lambda one: int((_mixed(*found, one).argmax(1) == known).sum())
            )  # max returns the smallest of equally good weights
        return lambda inputs: _mixed(*parts(inputs), weight).log()

    def _of_neighbours(
        self, own: torch.Tensor, features: torch.Tensor, labels: torch.Tensor, num_classes: int
    ) -> torch.Tensor:
        """Return p_kNN, the class probabilities by nearest neighbours (see ``KNNPer``), for inputs.

        ``own``: the features of these inputs. ``features``, ``labels``: features and labels of the training records.
        """
        distances = torch.cdist(own, features, compute_mode="donot_use_mm_for_euclid_dist")
        if self.distance == "mean":
            distances = distances.square() / features.shape[1]
        nearest, places = distances.topk(min(self.neighbours, len(labels)), largest=False)
        similarities = (nearest / -self.scale).softmax(1)
        of_class = torch.nn.functional.one_hot(labels[places], num_classes).to(similarities.dtype)
        return (similarities.unsqueeze(1) @ of_class).squeeze(1)


def _mixed(softmax: torch.Tensor, of_neighbours: torch.Tensor, weight: float) -> torch.Tensor:
    mixture = weight * of_neighbours + (1 - weight) * softmax
    return mixture.clamp(min=torch.finfo(mixture.dtype).tiny)
