"""Clients without records change nothing: K, of |S|/K, are the clients that can ever take part."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.settings import kinds_of
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import RunLog
from strategies.algorithm import Averaging
from strategies.attacks import hostile_clients

HOLDERS = 3
KINDS = sorted(one.model_fields["kind"].default for one in kinds_of("algorithm").values() if issubclass(one, Averaging))
QUICK: dict[str, Any] = {
    "model": "logistic", "rounds": 3, "engine": "inprocess", "data": "digits",
    "local": {"momentum": 0.0, "learning_rate": 0.05, "batch_size": 64},
}  # fmt: skip


@dataclass(frozen=True)
class FirstHold:
    """The first ``real`` clients hold all records, in parts of very different sizes, and the others none."""

    real: int = HOLDERS

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        order = np.random.Generator(np.random.Philox(1)).permutation(len(labels))[:600]
        parts = np.split(order, [60, 200])
        return [*map(np.sort, parts), *[np.array([], dtype=np.int64)] * (num_partitions - self.real)]


def experiment(clients: int, **changes: Any) -> Experiment:
    return experiment_from({**QUICK, "partition": f"{__name__}:FirstHold", "clients": clients, **changes})


def model(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(out / "model.safetensors")
    return found


def same(left: Path, right: Path) -> bool:
    first, second = model(left), model(right)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("algorithm", KINDS)
def test_clients_without_records_change_no_bit_of_any_algorithm(algorithm: str, tmp_path: Path) -> None:
    needs_body = any(hasattr(kinds_of("algorithm")[algorithm], name) for name in ("sends", "size_of"))
    model = "mlp" if needs_body else "logistic"
    run(experiment(HOLDERS, algorithm=algorithm, model=model), tmp_path / "few")
    run(experiment(HOLDERS + 5, algorithm=algorithm, model=model), tmp_path / "many")
    assert same(tmp_path / "few", tmp_path / "many")


@pytest.mark.parametrize("aggregator", ["norm-bound", "geometric-median"])
def test_nor_under_an_aggregator_that_looks_at_single_updates(aggregator: str, tmp_path: Path) -> None:
    own = f"{__name__}:Counting"
    run(experiment(HOLDERS, algorithm=own, aggregator=aggregator), tmp_path / "few")
    run(experiment(HOLDERS + 5, algorithm=own, aggregator=aggregator), tmp_path / "many")
    assert same(tmp_path / "few", tmp_path / "many")


class Counting(Averaging):
    """An algorithm that takes a step as long as the share of clients that took part."""

    def merge(self, server: Any, aggregate: Any) -> Any:
        scaled = {name: value * aggregate.participation for name, value in aggregate.payloads["delta"].items()}
        return super().merge(server, type(aggregate)({"delta": scaled}, aggregate.participation))


def test_nor_where_updates_are_merged_as_they_come(tmp_path: Path) -> None:
    """All at one pace, so that a buffer of everybody is a round."""
    for clients in (HOLDERS, HOLDERS + 5):
        server = {"kind": "fedbuff", "buffer": clients, "concurrency": clients}
        run(
            experiment(clients, algorithm=f"{__name__}:Counting", server=server, devices="constant",
                       local={"steps": 2, "batch_size": 16}),
            tmp_path / str(clients),
        )  # fmt: skip
    assert same(tmp_path / str(HOLDERS), tmp_path / str(HOLDERS + 5))


@pytest.mark.usefixtures("quick_accounting")
def test_synthetic_records_make_a_client_count(tmp_path: Path) -> None:
    """Clients that train on the pool take part, and count before they were asked: two of eight are a quarter."""
    heard: list[int] = []
    labels = {"kind": "exponential", "epsilon": 1.0}
    pool = {"kind": "da-fl", "generator": "mean-embedding", "noise": "seeded", "gamma": 1.0, "labels": labels}
    for train_on in ("own-and-synthetic", "synthetic"):
        Watching.participations.clear()
        settings = experiment(
            HOLDERS + 5, algorithm=f"{__name__}:Watching", rounds=1, sampler="fixed-size:2",
            preprocess={**pool, "train_on": train_on},
        )  # fmt: skip
        run(settings, tmp_path / train_on)
        heard += Watching.participations
    assert heard == [0.25, 0.25]


class Watching(Averaging):
    """FedAvg, which notes the share of clients that took part."""

    participations: ClassVar[list[float]] = []

    def merge(self, server: Any, aggregate: Any) -> Any:
        Watching.participations.append(aggregate.participation)
        return super().merge(server, aggregate)


def test_a_run_that_goes_on_counts_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: Callable[[int], Any]
) -> None:
    many = experiment(HOLDERS + 5, algorithm="scaffold")
    run(many, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(many, tmp_path / "stopped", observer=stop_after(2))
    assert not any("without records" in one for one in run(many, tmp_path / "stopped")["warnings"])
    assert same(tmp_path / "whole", tmp_path / "stopped")

    with monkeypatch.context() as earlier:  # a version whose checkpoints do not say, as it counted all clients
        earlier.setattr("fl_sim.simulation.stage.holders_in", lambda *_: None)
        run(many, tmp_path / "all counted")
        with pytest.raises(KeyboardInterrupt):
            run(many, tmp_path / "old", observer=stop_after(2))
    [warning] = [one for one in run(many, tmp_path / "old")["warnings"] if "without records" in one]
    assert "counts the 5 clients without records" in warning
    assert "--again" in warning
    assert same(tmp_path / "all counted", tmp_path / "old")
    assert not same(tmp_path / "whole", tmp_path / "old")


def told(**changes: Any) -> list[str]:
    procedure = procedure_of(job_of(experiment(HOLDERS + 5, rounds=1, **changes)))
    return [one for one in procedure.warnings(RunLog(procedure.beginning())) if "hold no records" in one]


def test_cohorts_and_hostile_clients_without_records_are_told() -> None:
    [drawn] = told(sampler="fixed-size:4")
    assert drawn.startswith("5 of 8 clients hold no records and are sampled like the others: of 4 clients in a round")
    assert "about 1.5 train" in drawn
    [hostile] = told(attack={"kind": "sign-flip", "clients": 7}, aggregator="trimmed-mean:0.4")
    who = hostile_clients(experiment_from({"attack": {"kind": "sign-flip", "clients": 7}}).attack, HOLDERS + 5, 0)
    harmless = sum(client >= HOLDERS for client in who)
    assert hostile.startswith(f"{harmless} of the 7 hostile clients hold no records, so they have no effect")
    assert told() == told(aggregator="global-dp", sampler="full") == told(aggregator="global-dp") == []
    assert told(sampler="fixed-size:8") == []
