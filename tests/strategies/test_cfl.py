"""CFL: FedAvg until a split, FedAvg within each cluster after it, and splits that separate groups of clients."""

import itertools
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.settings import kinds_of
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.types import Reply
from strategies.aggregators import WeightedMean
from strategies.cfl import CFL
from strategies.fedavg import FedAvg
from strategies.layer import Layer
from strategies.split_clusters import SplitClusters, cosines_of, two_parts

GROUPS = {
    "data": "digits", "partition": "permute-labels:2", "clients": 6, "model": "logistic", "rounds": 8,
    "local": {"learning_rate": 0.1, "batch_size": 32}, "evaluate": {"clients": "class-shares"},
    "algorithm": {"kind": "cfl", "eps_1": 0.8, "eps_2": 0.3, "split_after": 2, "max_clusters": 2},
}  # fmt: skip


def ran(out: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """Return the result of a run, its model, and its table of clients."""
    run(experiment_from({**GROUPS, **settings}), out)
    table = np.genfromtxt(out / "clients.csv", delimiter=",", names=True)
    return json.loads((out / "result.json").read_text()), load_file(out / "model.safetensors"), table


def with_algorithm(**changes: Any) -> dict[str, Any]:
    return {"algorithm": {**GROUPS["algorithm"], **changes}}  # type: ignore[dict-item]


def test_a_run_without_a_split_is_fedavg_to_the_bit(tmp_path: Path) -> None:
    plain = ran(tmp_path / "plain", algorithm="fedavg")
    for name, changes in (("never", {"eps_1": 1e-9}), ("short", {"eps_2": 1e9}), ("one", {"max_clusters": 1})):
        ours = ran(tmp_path / name, **with_algorithm(**changes))
        assert all(torch.equal(value, plain[1][key]) for key, value in ours[1].items())
        assert ours[0]["personal"] == plain[0]["personal"]
        assert ours[0]["bytes"] == plain[0]["bytes"]
        warned = [one for one in ours[0]["warnings"] if "no cluster was split, so that the run was FedAvg" in one]
        assert len(warned) == (name != "one")


def test_clients_of_two_groups_end_in_two_clusters(tmp_path: Path) -> None:
    result, _, table = ran(tmp_path)
    assert table["cluster"].tolist() == [0, 1, 0, 1, 0, 1]
    assert result["clients_of_models"] == [3, 3]
    assert result["splits"] == [{"round": 3, "cluster": 0, "new_cluster": 1}]
    plain = ran(tmp_path / "plain", algorithm="fedavg")[0]
    assert result["personal"]["own_accuracy"] > plain["personal"]["own_accuracy"] + 0.3
    assert result["bytes"] == plain["bytes"]  # each client receives one model
    assert not result["warnings"]
    plan = procedure_of(job_of(experiment_from(GROUPS))).traffic()["rounds"]
    assert {"down": plan.down, "up": plan.up} == result["bytes"]["rounds"]


def test_there_are_at_most_max_clusters(tmp_path: Path) -> None:
    always = {"eps_1": 1e9, "eps_2": 0.0, "min_cluster_size": 2}
    counts = ran(tmp_path, **with_algorithm(**always, max_clusters=3))[0]["clients_of_models"]
    assert len(counts) == 3
    assert sum(counts) == 6


@pytest.mark.parametrize("cut", [2, 3, 5])
def test_a_resumed_run_ends_in_the_same_bits_and_clusters(tmp_path: Path, stop_after: Any, cut: int) -> None:
    settings = with_algorithm(eps_1=1e9, max_clusters=4, split_after=2, min_cluster_size=2)
    whole = ran(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        run(experiment_from({**GROUPS, **settings}), tmp_path / "cut", observer=stop_after(cut))
    resumed = ran(tmp_path / "cut", **settings)
    assert all(torch.equal(value, resumed[1][name]) for name, value in whole[1].items())
    assert len(whole[0]["splits"]) == 3
    assert resumed[0]["splits"] == whole[0]["splits"]
    assert resumed[0]["personal"] == whole[0]["personal"]
    assert np.array_equal(whole[2]["cluster"], resumed[2]["cluster"])
    extended = ran(tmp_path / "cut", **settings, rounds=9)
    assert extended[0]["splits"] == ran(tmp_path / "nine", **settings, rounds=9)[0]["splits"]


@pytest.mark.cluster
def test_ray_ends_in_the_same_bits(tmp_path: Path) -> None:
    one, other = (ran(tmp_path / name, engine=engine) for name, engine in (("here", "inprocess"), ("ray", "ray:2")))
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    assert one[0]["personal"] == other[0]["personal"]


class Clustered:
    """A federation whose rounds go through CFL's round layer. ``Plain`` is its innermost layer."""

    class Plain:
        def __init__(self, weighting: Any) -> None:
            self.weighting = weighting

        def sent_to(self, client: int, server: Any) -> Any:
            return server

        def aggregate(self, cohort: Any, algorithm: Any, server: Any) -> Any:
            return WeightedMean().mean(cohort, self.weighting)

        def merge(self, algorithm: Any, server: Any, aggregate: Any) -> Any:
            return algorithm.merge(server, aggregate)

    def __init__(self, federation: Any, algorithm: CFL, model: Any, shards: Any, settings: Any) -> None:
        self.inside = federation(algorithm, model, shards, settings)
        self.layer = SplitClusters(algorithm, len(shards), {})
        self.layer.inner = self.Plain(algorithm.weighting)  # type: ignore[assignment]
        experiment = type("Settings", (), {"algorithm": algorithm})
        self.server = SplitClusters.begun(experiment, model, self.inside.server)

    def round(self, number: int) -> None:
        replies, cohort = [], fl_sim.types.Cohort
        for client in range(len(self.inside.shards)):
            self.inside.server = self.layer.sent_to(client, self.server)
            update = self.inside.client(client)
            replies.append(Reply(client, update.payloads, update.num_examples, update.loss))
        made = self.layer.aggregate(
            cohort(number, tuple(replies), len(replies), 1.0), self.inside.algorithm, self.server
        )
        assert made is not None
        self.server = self.layer.merge(self.inside.algorithm, self.server, made)

    def w(self, client: int) -> float:
        """Return the weight of the model that a client receives."""
        return float(self.layer.sent_to(client, self.server).params["w"])


def test_clusters_end_at_the_means_of_their_groups_as_a_fedavg_run_of_each_group(
    bowl: Any, federation: Any, records: Any, settings: Any
) -> None:
    """Groups around 0 and 10, with other numbers of records; after the split every round is FedAvg's to the bit."""
    shards = [records((1, 0, 0)), records((1, 10, 0)), records((1, 0.3, 0), (1, 0.3, 0)), records((1, 10.4, 0))]
    algorithm = CFL(eps_1=0.01, eps_2=0.3, split_after=0)
    simulated = Clustered(federation, algorithm, bowl(3.0), shards, settings(0.1))
    plain: dict[tuple[int, int], Any] = {}
    for number in range(1, 301):
        before = simulated.w(0)
        simulated.round(number)
        if simulated.layer.counts == [2, 2] and not plain:
            for group in ((0, 2), (1, 3)):
                plain[group] = federation(FedAvg(), bowl(before), [shards[one] for one in group], settings(0.1))
        for group, alone in plain.items():
            alone.round()
            assert {simulated.w(client) for client in group} == {alone.w}
    assert plain
    assert simulated.w(0) == pytest.approx(0.2, abs=1e-6)
    assert simulated.w(1) == pytest.approx(10.2, abs=1e-6)


def test_a_client_without_records_stays_in_its_cluster(bowl: Any, federation: Any, records: Any, settings: Any) -> None:
    shards = [records(), records((1, 0, 0)), records((1, 10, 0)), records((1, 0, 0)), records((1, 10, 0))]
    algorithm = CFL(eps_1=0.01, eps_2=0.3, split_after=0)
    simulated = Clustered(federation, algorithm, bowl(5.0), shards, settings(0.1))
    simulated.round(1)
    assert simulated.layer.chosen == {0: 0, 1: 0, 2: 1, 3: 0, 4: 1}


def replies_of(*rows: tuple[float, ...]) -> list[Reply]:
    return [Reply(client, {"delta": {"w": torch.tensor(row)}}, 1, None) for client, row in enumerate(rows)]


def test_single_linkage_has_the_smallest_largest_cosine_between_the_parts() -> None:
    """The paper's algorithm 1, compared with a search over all partitions in two."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        cosines = cosines_of(replies_of(*draw.standard_normal((6, 3)).tolist()))
        masks = [np.array((False, *rest)) for rest in itertools.product((False, True), repeat=5) if any(rest)]
        best = min(cosines[mask][:, ~mask].max() for mask in masks)
        apart = two_parts(cosines, "single")
        assert cosines[apart][:, ~apart].max() == pytest.approx(best)


def test_complete_linkage_keeps_a_chain_of_clients_from_one_part() -> None:
    """Directions 0, 10, ..., 70 and 160 degrees: "single" parts the last client alone."""
    angles = np.deg2rad([*range(0, 80, 10), 160])
    cosines = cosines_of(replies_of(*zip(np.cos(angles).tolist(), np.sin(angles).tolist(), strict=True)))
    assert two_parts(cosines, "single").tolist() == [False] * 8 + [True]
    assert two_parts(cosines_of(replies_of((0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (0.0, 0.0))), "complete").sum() > 0
    ties = cosines_of(replies_of((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)))
    assert two_parts(ties, "complete").sum() in {1, 2}


def test_gamma_max_forbids_a_split_of_parts_that_are_too_close(tmp_path: Path) -> None:
    assert "splits" in ran(tmp_path / "far", **with_algorithm(gamma_max=0.3))[0]
    assert len(ran(tmp_path / "far", **with_algorithm(gamma_max=0.3))[0]["splits"]) == 1
    assert ran(tmp_path / "close", **with_algorithm(gamma_max=0.99))[0]["splits"] == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"aggregator": "global-dp"}, "compares the updates of single clients, and the noise covers only their mean"),
        ({"aggregator": "median"}, "clusters may be too small for it"),
        ({"sampler": {"kind": "fixed-size", "cohort_size": 3}}, "with sampler fixed-size: a split compares"),
        ({"compress": "qsgd"}, "cannot run with compress qsgd"),
        ({"local": {"batch_norm": "average"}}, "local.batch_norm=average: clusters have whole models"),
        ({"local": {"personal": "head"}}, "local.personal=head"),
        ({"server": "fedbuff", "devices": "log-normal"}, "has a round layer of its own, and there are no rounds"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Experiment.model_validate({"algorithm": "cfl", **settings})


class Nothing(Layer):
    """A round layer of the user's own."""


class OwnMean(WeightedMean):
    """The mean, with a round layer of the user's own around it."""

    layer: ClassVar[str] = f"{__name__}:Nothing"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"calibrate": "ccvr"}, "Calibration trains one at the server"),
        ({"evaluate": {"clients": "class-shares", "held_out_clients": 0.5}}, "a client that never trains is in no"),
        ({"aggregator": OwnMean()}, "Nothing, a round layer of your own, expects one for all clients"),
    ],
    ids=str,
)
def test_runs_that_would_ignore_clusters_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        ran(tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


def test_remarks_name_settings_without_effect() -> None:
    remarks = [CFL(**one).remarks(Experiment(rounds=20)) for one in ({"max_clusters": 1}, {}, {"split_after": 19})]
    assert [len(one) for one in remarks] == [1, 1, 0]
    assert kinds_of("algorithm")["cfl"] is CFL
