"""CFL: clusters of clients are split by the directions of updates (Sattler, Mueller, Samek 2021, algorithms 1 to 3)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from strategies.algorithm import FEDAVG, Averaging
from strategies.split_clusters import check_single_updates


class CFL(Averaging):
    """FedAvg in clusters of clients, each with its own model. The run begins with one cluster, and clusters are split.

    D_i = y_i - x is the update of client i: its trained model minus the model of its cluster. D is the mean update of
    the cluster. A cluster is split in two if the mean update is small although single updates are large. The split
    groups the cluster's clients by the cosines of their updates. Both new clusters continue from the model of the old
    cluster, each with its own mean update. ``linkage``: "complete" joins groups of clients by the smallest cosine
    between their clients, as in the released code. "single" joins groups by the largest cosine, as in algorithm 1 of
    Sattler et al. With "single", the largest cosine between clients of different clusters is as small as possible, but
    a single client with noisy updates often becomes a cluster.

    ``eps_1``: a split needs a norm ‖D‖ of the mean update below this value. ``eps_2``: a split needs a client's update
    with a norm ‖D_i‖ above this value. The default values are those of the released code for its network. Suitable
    values depend on the model, the learning rate and the number of local steps. ``gamma_max``: a split needs sqrt((1 -
    c) / 2) above this value, where c is the largest cosine between clients of the two new clusters, as in the paper;
    with 0 every split is allowed, as in the released code. ``split_after``: the number of rounds before the first
    split, 20 in the released code. ``min_cluster_size``: a cluster with fewer clients is not split. ``max_clusters``:
    the largest number of clusters; 1 is FedAvg.

    A client receives only the model of its cluster. The server compares the updates of single clients, so secure
    aggregation and noise on the mean are not possible. Clients are weighted by their numbers of records, as in
    FedAvg; the released code uses equal weights. In the released code and in FL-bench, a second split assigns clients
    wrongly, because these codes use positions in the cluster as client IDs.
    """

    kind: Literal["cfl"] = "cfl"
    title: ClassVar[str] = "CFL"
    layer: ClassVar[str] = "strategies.split_clusters:SplitClusters"
    stage: ClassVar[str] = "fl_sim.stages.chosen_models:ChosenModels"
    follows_moves: ClassVar[bool] = True
    eps_1: float = Field(0.4, gt=0)
    eps_2: float = Field(1.6, ge=0)
    gamma_max: float = Field(0.0, ge=0, lt=1)
    split_after: int = Field(20, ge=0)
    min_cluster_size: int = Field(3, ge=2)
    max_clusters: int = Field(8, ge=1, le=100)
    linkage: Literal["complete", "single"] = "complete"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the server does not see every single update in every round."""
        if self.num_models > 1:
            check_single_updates(self, experiment)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if self.max_clusters == 1:
            return [off("algorithm.max_clusters=1", FEDAVG)]
        if self.split_after >= experiment.rounds:
            return [off(f"algorithm.split_after={self.split_after} with rounds={experiment.rounds}", FEDAVG)]
        return []

    def mean_only(self) -> str:
        """Return the reason why robust aggregators are refused, for messages; "" if there is only one cluster."""
        return "clusters may be too small for it, and their updates must differ" if self.num_models > 1 else ""

    def note(self) -> str:
        """Return the note below tables: one sentence that says which model is evaluated."""
        return "CFL: the first cluster's model is evaluated, and evaluate.clients measures each client's cluster model."

    @property
    def num_models(self) -> int:
        """Return the largest number of models at the server."""
        return self.max_clusters
