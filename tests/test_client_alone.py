"""Under Global DP a client's update is the client's alone: who else takes part in the round moves no bit of it.

The bound on what one client moves is the clipping norm of its own update. If the others' updates moved too, be it by
the last bit, the epsilon that is printed would be another mechanism's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from fl_sim.engines import wire
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.groups import InProcess, Ray
from fl_sim.experiment.job import Job, job_of
from fl_sim.params import detached, flattened
from fl_sim.simulation.client_runtime import stack_of
from fl_sim.simulation.engine_choice import batching_of, open_engine
from fl_sim.simulation.rounds import runtime_of
from fl_sim.types import Params

MODELS = """
from torch import nn

def smooth(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, num_classes))

def with_dropout(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, num_classes))
"""
EVERYBODY = tuple(range(8))


@pytest.fixture(autouse=True)
def _own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_the_lonely.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)


def experiment(engine: dict[str, Any], model: str = "mlp", aggregator: str = "global-dp") -> Experiment:
    """Clients of very different sizes: some end up in one piece of work, some in pieces of their own."""
    return experiment_from(
        {
            "data": "digits", "partition": "dirichlet:0.3", "clients": len(EVERYBODY), "model": model,
            "aggregator": aggregator, "algorithm": "fedprox:0.1", "local": {"epochs": 2, "batch_size": 16}, "seed": 3,
            "engine": engine, "device": "cpu",
        }
    )  # fmt: skip


def updates(asked: Experiment, cohort: tuple[int, ...], folder: Path) -> dict[int, Params]:
    """Return what each client of ``cohort`` sends in a round in which they alone take part."""
    job = job_of(asked)
    params = detached(job.model().named_parameters())
    order = wire.TaskConfig(asked.model_dump_json(), 1, 0.05, "", str(folder), "")
    with open_engine(job, lambda _: None) as (grid, _):
        nodes = list(grid.get_node_ids())
        content = wire.task_content(order, params, {})
        replies = grid.send_and_receive(Message(content, nodes[client], wire.TRAIN) for client in cohort)
        template = {"delta": flattened(params)}
        read = [
            wire.read_update(client, reply.content, template) for client, reply in zip(cohort, replies, strict=True)
        ]
    return {reply.client: reply.payloads["delta"] for reply in read}


def same_bits(left: Params, right: Params) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("model", ["dafl-cnn", "models_of_the_lonely:smooth", "models_of_the_lonely:with_dropout"])
def test_leaving_a_client_out_moves_no_bit_of_the_others(model: str, tmp_path: Path) -> None:
    """By the compiled trainer, whose calls train several clients; by PyTorch side by side; and one after another."""
    everybody = updates(experiment({"kind": "inprocess", "workers": 2}, model), EVERYBODY, tmp_path)
    for left_out, workers in ((0, 2), (5, 1), (7, 3)):
        fewer = tuple(client for client in EVERYBODY if client != left_out)
        found = updates(experiment({"kind": "inprocess", "workers": workers}, model), fewer[::-1], tmp_path)
        assert found.keys() == set(fewer)
        assert all(same_bits(found[client], everybody[client]) for client in fewer)
    [one] = updates(experiment({"kind": "inprocess"}, model), (3,), tmp_path).values()
    assert same_bits(one, everybody[3])
    assert not same_bits(one, everybody[4])  # so that equal bits mean something


@pytest.mark.parametrize("engine", [InProcess(), Ray(actors=2, gpus=0.5)], ids=lambda engine: engine.kind)
def test_on_a_gpu_too_private_clients_train_one_by_one(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, private = (
        replace(job_of(experiment(engine.model_dump(), aggregator=kind)), device=torch.device("cuda"))
        for kind in ("mean", "global-dp")
    )
    monkeypatch.setattr(Job, "trainer", job_of(experiment(engine.model_dump())).trainer)  # there may be no GPU
    assert stack_of(engine, plain) > 1
    assert stack_of(engine, private) == 1
    assert batching_of(private, runtime_of, 1) is None


@pytest.mark.parametrize("kind", ["inprocess", "ray"])
def test_a_stack_asked_for_under_global_dp_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(UserError, match=r"engine\.stack=4 .* leave engine\.stack out"):
        experiment({"kind": kind, "stack": 4})
    assert experiment({"kind": kind, "stack": 1}).engine.stack == 1  # type: ignore[union-attr]
