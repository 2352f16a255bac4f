"""The layer of CFL: each cluster of clients has a model, and clusters are split by the directions of updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, hides_clients, is_none, is_own, kind_of
from fl_sim.params import flattened, zeros_like
from fl_sim.types import Aggregate, Cohort, Params, Reply, ServerState
from strategies.aggregators import as_rows
from strategies.algorithm import Algorithm
from strategies.layer import Beginning, layer_kinds
from strategies.several_models import SeveralModels, delta_name, model_name, models_of

if TYPE_CHECKING:
    from torch import nn

    from fl_sim.store.run_directory import RoundRecord

DELTA: Final = "delta"
"""Name of the payload with a client's update."""


def check_single_updates(algorithm: object, experiment: Choices) -> None:
    """Raise ValueError if a setting hides single updates from the server, or changes their directions or lengths."""
    what = f"algorithm {kind_of(algorithm)} cannot run"
    local = experiment.local
    if hides_clients(experiment.aggregator):
        raise ValueError(
            f"{what} under aggregator {kind_of(experiment.aggregator)}: the server compares the updates of single "
            "clients, and the noise covers only their mean; take fedavg, fedprox or scaffold"
        )
    if (sampler := kind_of(experiment.sampler)) != "full":
        raise ValueError(
            f"{what} with sampler {sampler}: a split compares the updates of all clients of a cluster in one round; "
            "leave sampler out, so that all clients take part"
        )
    if not is_none(experiment.compress):
        raise ValueError(
            f"{what} with compress {kind_of(experiment.compress)}: it changes lengths and directions of the updates, "
            "by which clusters are split; leave compress out"
        )
    for name, value in (("batch_norm", local.batch_norm), ("personal", local.personal)):
        if value != "none":
            raise ValueError(
                f"{what} with local.{name}={value}: clusters have whole models of their own, and clients send "
                f"the updates of whole models; leave local.{name} out"
            )


class SplitClusters(SeveralModels):
    """Averages updates within clusters, splits clusters, and sends each client the model of its cluster.

    ``server.params`` is the model of cluster 0, and ``server.memory`` has all other models. ``settings``: the settings
    of CFL. ``progress``: the state in the checkpoint; it is empty in a new run.
    """

    column: ClassVar[str] = "cluster"

    def __init__(self, settings: Any, num_clients: int, progress: Mapping[str, Any]) -> None:
        self._settings, self._parents = settings, dict[int, int]()
        self._next = np.array(progress.get("clusters", [0] * num_clients), dtype=np.int64)
        super().__init__(dict(enumerate(self._next.tolist())), np.bincount(self._next).tolist())
        self._norms: list[list[float]] = progress.get("norms", [])
        self._missing: int = progress.get("missing", 0)
        self._splits: list[dict[str, int]] = progress.get("splits", [])
        self._seen: tuple[ServerState | None, dict[int, ServerState]] = (None, {})

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> SplitClusters:
        """Return the layer for a run. In a resumed run it contains the clusters of earlier rounds."""
        del out
        return cls(experiment.algorithm, experiment.num_clients, progress)

    @classmethod
    def begun(cls, experiment: Any, model: nn.Module, server: ServerState) -> ServerState:
        """Return ``server`` with tensors of zeros in ``memory``, as placeholders for the models of later clusters."""
        del model
        later = range(1, experiment.algorithm.max_clusters)
        return replace(server, memory={**server.memory, **{model_name(j): zeros_like(server.params) for j in later}})

    @classmethod
    def warnings(cls, experiment: Any, rounds_done: int, idle: Sequence[int]) -> Sequence[str]:
        """Return a warning if only the model of the first cluster is measured."""
        del rounds_done, idle
        said = (
            f"the test accuracy is that of the first of up to {experiment.algorithm.max_clusters} models: set "
            "evaluate.clients to measure the model of each client's cluster"
        )
        return [] if experiment.evaluate.measures_clients else [said]

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError for a stage that trains one model, for held-out clients, and for user-defined layers."""
        what = f"algorithm {kind_of(experiment.algorithm)}"
        if beginning.whole:
            raise UserError(
                f"{what} has several models, and {beginning.whole[0]} trains one at the server: leave out one of the "
                "two"
            )
        if experiment.num_members < experiment.num_clients:
            raise UserError(
                f"{what} cannot run with evaluate.held_out_clients={experiment.evaluate.held_out_clients:g}: a client "
                "that never trains is in no cluster; leave evaluate.held_out_clients out"
            )
        if own := [kind for kind in layer_kinds(experiment) if is_own(kind)]:
            raise UserError(
                f"{what} makes one mean update for each cluster, and {own[0].__name__}, a round layer of your own, "
                "expects one for all clients: leave out one of the two"
            )

    def facts(self) -> Mapping[str, Any]:
        """Return the fields for ``result.json``: the number of clients in each cluster, and all splits.

        For each split: the round, the index of the cluster, and the index of the new cluster that was split off.
        """
        return {**super().facts(), "splits": self._splits}

    def sent_to(self, client: int, server: ServerState) -> ServerState:
        """Return the server state with the model of the client's cluster as the global model."""
        if not (cluster := self.chosen[client]):
            return self.inner.sent_to(client, server)
        if self._seen[0] is not server:
            self._seen = (server, {})
        if cluster not in self._seen[1]:
            first = replace(server, params=models_of(server.params, server.memory)[cluster])
            self._seen[1][cluster] = self.inner.sent_to(client, first)
        return self._seen[1][cluster]

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Split clusters, and return the mean update of each cluster, under the payload names of ``_delta``."""
        means, norms, self._parents = dict[int, Aggregate](), list[list[float]](), {}
        self._next = np.array(list(self.chosen.values()))
        self._missing = cohort.num_clients - len(cohort.replies)

        def mean_of(cluster: int) -> Aggregate | None:
            inside = tuple(one for one in cohort.replies if self._next[one.client] == cluster)
            return self.inner.aggregate(replace(cohort, replies=inside), algorithm, server)

        for cluster in range(len(self.counts)):
            mean = mean_of(cluster)
            trained = [one for one in cohort.replies if one.num_examples and self._next[one.client] == cluster]
            lengths = [_norm(one.payloads[DELTA]) for one in trained]
            norms.append([_norm(mean.payloads[DELTA]) if mean else 0.0, max(lengths, default=0.0)])
            if leaving := self._leaving(trained, norms[-1], cohort.server_round):
                new = int(self._next.max()) + 1
                self._next[leaving], self._parents[new] = new, cluster
                self._splits.append({"round": cohort.server_round, "cluster": cluster, "new_cluster": new})
                mean, means[new] = mean_of(cluster), _known(mean_of(new))
            if mean is not None:
                means[cluster] = mean
        self._norms = norms
        trained_on = sum(one.num_examples > 0 for one in cohort.replies)
        payloads = {_delta(cluster): means[cluster].payloads[DELTA] for cluster in sorted(means)}
        return Aggregate(payloads, cohort.participation(trained_on)) if means else None

    def _leaving(self, trained: Sequence[Reply], norms: Sequence[float], server_round: int) -> list[int]:
        """Return the clients that leave their cluster for a new cluster. Empty if the cluster is not split.

        ``trained``: the updates of the cluster's clients with records. ``norms``: the norm of the mean update, and the
        largest norm of an update.
        """
        chosen = self._settings
        if (
            self._missing
            or server_round <= chosen.split_after
            or self._next.max() + 1 >= chosen.max_clusters
            or len(trained) < chosen.min_cluster_size
            or not (norms[0] < chosen.eps_1 and norms[1] > chosen.eps_2)
        ):
            return []
        cosines = cosines_of(trained)
        apart = two_parts(cosines, chosen.linkage)
        across = float(cosines[apart][:, ~apart].max())
        if chosen.gamma_max and chosen.gamma_max >= math.sqrt((1 - across) / 2):
            return []
        return [one.client for one, leaves in zip(trained, apart.tolist(), strict=True) if leaves]

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state in which each cluster's mean update is added to the cluster's model.

        A new cluster begins with the model of the cluster from which it was split off.
        """
        before = models_of(server.params, server.memory)
        after = list(before)
        for cluster in range(int(self._next.max()) + 1):
            if (delta := aggregate.payloads.get(_delta(cluster))) is not None:
                start = replace(server, params=before[self._parents.get(cluster, cluster)], memory={})
                after[cluster] = self.inner.merge(algorithm, start, replace(aggregate, payloads={DELTA: delta})).params
        self.chosen, self.counts = dict(enumerate(self._next.tolist())), np.bincount(self._next).tolist()
        first, *others = after
        return replace(server, params=first, memory={model_name(j): one for j, one in enumerate(others, 1)})

    def state(self) -> Mapping[str, Any]:
        """Return clusters, splits, and the norms of the last round, for the checkpoint."""
        return {"clusters": list(self.chosen.values()), "splits": self._splits, "norms": self._norms,
                "missing": self._missing}  # fmt: skip

    def conclusions(self, rounds: Sequence[RoundRecord]) -> list[str]:
        """Return a warning if no cluster was split. It states the norms that decide about a split."""
        said = self.inner.conclusions(rounds)
        if self._splits or not self._norms:
            return said
        [[mean, largest]], chosen = self._norms, self._settings
        missing = f" {self._missing} clients sent no update, and a split needs all." if self._missing else ""
        said.append(
            f"no cluster was split, so that the run was FedAvg. In the last round the mean update had norm {mean:.3g}: "
            f"a split needs less than algorithm.eps_1={chosen.eps_1:g}. The longest update had norm {largest:.3g}: a "
            f"split needs more than algorithm.eps_2={chosen.eps_2:g}.{missing}"
        )
        return said


def cosines_of(replies: Sequence[Reply]) -> NDArray[np.float64]:
    """Return the cosine of each pair of updates, shape (replies, replies); 0 for an update of zeros."""
    rows = as_rows(replies).double()
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    unit = rows / torch.where(lengths > 0, lengths, 1.0)
    cosines: NDArray[np.float64] = (unit @ unit.T).clamp(-1, 1).numpy()
    return cosines


def two_parts(cosines: NDArray[np.float64], linkage: Literal["complete", "single"]) -> NDArray[np.bool_]:
    """Split clients into two groups, and return a mask of the group without the first client, shape (clients,).

    Groups of clients are joined until two are left. Each time, the two most similar groups are joined. The similarity
    of two groups is the smallest cosine between their clients for "complete", or the largest cosine for "single".
    """
    from scipy.cluster import hierarchy  # noqa: PLC0415 (scipy loads slowly)

    distances = 1 - cosines[np.triu_indices(len(cosines), 1)]
    labels = hierarchy.cut_tree(hierarchy.linkage(distances, linkage), n_clusters=2)[:, 0]
    apart: NDArray[np.bool_] = labels != labels[0]
    return apart


def _delta(cluster: int) -> str:
    """Return the payload name of a cluster's mean update. For cluster 0 it is "delta", as in FedAvg."""
    return delta_name(cluster) if cluster else DELTA


def _norm(params: Params) -> float:
    return float(torch.linalg.vector_norm(flattened(params).flat, dtype=torch.float64))


def _known(mean: Aggregate | None) -> Aggregate:
    assert mean is not None, "a new cluster has clients with records"
    return mean
