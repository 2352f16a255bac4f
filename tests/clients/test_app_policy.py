"""A SuperNode whose owner has a policy: the ClientApp refuses what the policy does not allow, before anything else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from clients.dafl.noisy_moments import MeanEmbedding
from fl_sim.data import load
from fl_sim.engines import wire
from fl_sim.engines.grid import LocalGrid
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.params import detached
from fl_sim.simulation import rounds
from fl_sim.simulation.engine_choice import client_app
from fl_sim.stages.dafl.stage import SYNTHESIZE
from fl_sim.stages.feature_sums import SUMMARISE
from fl_sim.stages.pate.procedure import VOTE
from fl_sim.stages.private_start import MEASURE
from fl_sim.stages.shares import SHARE
from fl_sim.store.tensors import save_by_content

POOLED = (
    "preprocess=da-fl", "preprocess.generator=mean-embedding", "preprocess.generator.frequencies=8",
    "preprocess.epsilon=8",
)  # fmt: skip

Ask = Callable[..., Message]


class Cheap(MeanEmbedding):
    """A generator of somebody else's, of which nobody knows what it costs."""


def _order(folder: Path, *overrides: str) -> tuple[Experiment, wire.TaskConfig]:
    experiment = experiment_from(with_overrides({"model": "logistic"}, overrides))
    return experiment, wire.TaskConfig(experiment.model_dump_json(), 1, 0.1, "", str(folder / "server"), "", "")


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Ask client 3 for a task, whose owner's policy is ``policy`` ("" for none)."""
    app = client_app()
    LocalGrid(10)  # sets the identity that Flower wants before a message can be made

    def send(task: str, policy: str, *overrides: str) -> Message:
        experiment, order = _order(tmp_path, *overrides)
        params = detached(job_of(experiment).model().named_parameters())
        config: dict[str, bool | float | int | str] = {"partition-id": 3, "num-partitions": 10}
        if policy:
            (tmp_path / "policy.toml").write_text(policy)
            config["policy"] = str(tmp_path / "policy.toml")
        message = Message(wire.task_content(replace(order, task=task), params, {}), 1003, wire.TRAIN)
        message.metadata.__dict__["_message_id"] = "one"
        return app(message, Context(1, 1003, config, RecordDict(), {}))

    return send


def test_a_node_without_a_policy_obeys(ask: Ask) -> None:
    assert wire.error_of(ask(wire.TRAIN, "")) is None


@pytest.mark.parametrize(
    ("task", "asked"),
    [
        (wire.TRAIN, ()), (SHARE, ("algorithm=fedmix",)),
        (MEASURE, ("preprocess=private-start", "aggregator=global-dp")),
    ],
)  # fmt: skip
def test_a_node_with_a_policy_sends_nothing_made_from_its_raw_records(
    ask: Ask, task: str, asked: tuple[str, ...]
) -> None:
    with pytest.raises(RunError, match=r"policy allows no updates .*its own records"):
        ask(task, "epsilon = 10.0", *asked)
    assert wire.error_of(ask(wire.TRAIN, "epsilon = 10.0\nallow_raw_updates = true")) is None


class Talkative:
    """A question of somebody else's that says it reads no records."""

    reads_records = reads_state = runs_in_threads = False

    def run(self, client: Any) -> RecordDict:
        return wire.pool_content({"inputs": client.records.tensors()[0]})


def test_a_node_with_a_policy_takes_no_foreign_word_for_what_an_answer_is_made_of(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "tasks_of", lambda job: {"talk": Talkative()})
    assert wire.error_of(ask("talk", "", "seed=11")) is None
    with pytest.raises(RunError, match=r"policy allows no updates .*its own records"):
        ask("talk", "epsilon = 10.0", "seed=11")


def test_a_node_with_a_policy_does_not_vote(ask: Ask) -> None:
    with pytest.raises(RunError, match="policy allows no votes"):
        ask(VOTE, "epsilon = 10.0", "algorithm=pate", "algorithm.public_records=200")


def test_a_node_pays_for_all_pools_together(ask: Ask) -> None:
    assert wire.error_of(ask(SYNTHESIZE, "epsilon = 10.0", *POOLED)) is None
    with pytest.raises(RunError, match=r"epsilon 10 at delta 1e-05 .*exceed"):
        ask(SYNTHESIZE, "epsilon = 10.0", *POOLED, "seed=1")


def test_a_node_sends_moments_of_its_features_only_as_its_policy_allows(ask: Ask) -> None:
    assert wire.error_of(ask(SUMMARISE, "", "calibrate=ccvr")) is None
    with pytest.raises(RunError, match=r"policy allows no updates .*its own records"):
        ask(SUMMARISE, "epsilon = 10.0", "calibrate=ccvr")
    private = ("calibrate=ccvr", "calibrate.epsilon=8")
    first = ask(SUMMARISE, "epsilon = 10.0", *private)
    again = ask(SUMMARISE, "epsilon = 10.0", *private, "calibrate.epochs=5")  # the server's affair alone
    assert wire.error_of(first) is None
    read = [wire.read_moments(message.content, (10, 1 + 64 + 64 * 65 // 2)) for message in (first, again)]
    assert (read[0] == read[1]).all()
    with pytest.raises(RunError, match=r"epsilon 10 at delta 1e-05 .*exceed"):
        ask(SUMMARISE, "epsilon = 10.0", *private, "calibrate.clipping_norm=3")
    with pytest.raises(RunError, match="policy allows secret noise only"):
        ask(SUMMARISE, "epsilon = 10.0", *private, "calibrate.noise=seeded")


@pytest.mark.parametrize(("kind", "noise_multiplier"), [("dp-sgd", 2), ("local-dp", 9)])
def test_a_node_trains_on_its_raw_records_if_it_makes_every_round_private(
    kind: str, noise_multiplier: int, ask: Ask
) -> None:
    private = (
        f"local.privacy={kind}", f"local.privacy.noise_multiplier={noise_multiplier}", "local.privacy.epsilon=8",
    )  # fmt: skip
    assert wire.error_of(ask(wire.TRAIN, "epsilon = 10.0", *private)) is None
    with pytest.raises(RunError, match="policy allows secret noise only"):
        ask(wire.TRAIN, "epsilon = 10.0", *private, "local.privacy.noise=seeded")
    with pytest.raises(RunError, match=r"epsilon 0.1 at delta 1e-05 .*exceed"):
        ask(wire.TRAIN, "epsilon = 0.1", *private)


def test_a_node_makes_secret_noise_only(ask: Ask) -> None:
    with pytest.raises(RunError, match="policy allows secret noise only"):
        ask(SYNTHESIZE, "epsilon = 10.0", *POOLED, "preprocess.noise=seeded")


def test_a_node_takes_no_foreign_codes_word_for_what_a_release_costs(ask: Ask, tmp_path: Path) -> None:
    foreign = ("preprocess=da-fl", "preprocess.epsilon=8", f"preprocess.generator={__name__}:Cheap")
    with pytest.raises(RunError, match=r"cannot verify the privacy cost of code from outside.*test_app_policy:Cheap"):
        ask(SYNTHESIZE, "epsilon = 10.0", *foreign)
    assert not (tmp_path / "policy.toml.private").exists()
    assert wire.error_of(ask(SYNTHESIZE, "", *foreign)) is None


@pytest.mark.parametrize("name", ["private.safetensors", "synthetic-0123456789abcdef.safetensors", "by content", ""])
def test_a_node_with_a_policy_trains_on_no_other_file_than_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever the server names: raw records in a file on the node's disk would leave it as an update."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.toml").write_text("epsilon = 10.0")
    train = load("digits", None).train
    tensors = {"inputs": torch.from_numpy(train.inputs[:90]), "labels": torch.from_numpy(train.labels[:90])}
    path = save_by_content(tmp_path, "averages" if name == "by content" else "synthetic", tensors)
    if name not in {"", "by content"}:
        path = path.rename(tmp_path / name)
    experiment, order = _order(tmp_path, *POOLED, "preprocess.train_on=synthetic")
    LocalGrid(10)
    params = detached(job_of(experiment).model().named_parameters())
    message = Message(wire.task_content(replace(order, synthetic=str(path)), params, {}), 1003, wire.TRAIN)
    message.metadata.__dict__["_message_id"] = "one"
    node = Context(1, 1003, {"partition-id": 3, "num-partitions": 10, "policy": "policy.toml"}, RecordDict(), {})
    if not name:
        assert wire.error_of(client_app()(message, node)) is None
        return
    with pytest.raises(RunError, match=r"without the name of such a pool|does not fit the hash in its name"):
        client_app()(message, node)
