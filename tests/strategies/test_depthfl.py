"""DepthFL: FedAvg as its limit, the loss of all exits, parameters and their holders, bytes and time, refusals."""

import json
import math
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from fl_sim.engines.arrays import float32_bytes
from fl_sim.errors import UserError
from fl_sim.exits import WithExits, first_blocks
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.local_plan import Batch
from fl_sim.models import products
from fl_sim.own_loss import Outcome
from fl_sim.params import detached, num_parameters
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.types import Cohort, LocalSettings, LocalTask, Params, Reply
from strategies.depthfl import DepthFL
from strategies.sizes import MeanOfHolders

SETTINGS: dict[str, Any] = {
    "data": "digits", "partition": "label-3", "clients": 6, "model": "niid-mlp", "rounds": 2, "sampler": "full",
    "algorithm": "depthfl", "local": {"learning_rate": 0.05, "batch_size": 32},
}  # fmt: skip


def ran(out: Path, **settings: Any) -> tuple[dict[str, Any], Params]:
    run(experiment_from({**SETTINGS, **settings}), out)
    return json.loads((out / "result.json").read_text()), load_file(out / "model.safetensors")


def by(depths: Any = (), **more: Any) -> dict[str, Any]:
    return {"algorithm": {"kind": "depthfl", "depths": depths, **more}}


def initial(**settings: Any) -> Params:
    return detached(job_of(experiment_from({**SETTINGS, **settings})).model().named_parameters())


def test_the_blocks_begin_with_the_weights_of_the_model_without_exits() -> None:
    named, plain = initial(), list(initial(algorithm="fedavg").values())
    body = [value for name, value in named.items() if name.startswith(("blocks.", "exits.2."))]
    assert all(torch.equal(one, other) for one, other in zip(body, plain, strict=True))
    assert len(named) == len(plain) + 4
    assert {num_parameters(initial(**by(depth))) for depth in (1, 2)} == {2_080 + 330, 2_080 + 330 + 528 + 170}


class Supervised(WithExits):
    """A model that computes the sum of its exits' cross-entropies itself."""

    def loss_of(self, inputs: torch.Tensor, labels: torch.Tensor) -> Outcome:
        logits = list[torch.Tensor]()
        hook = self.head.register_forward_pre_hook(lambda _, given: logits.append(given[0]))
        mean = self(inputs)
        hook.remove()
        losses = functional.cross_entropy(logits[0].flatten(0, 1), labels.repeat_interleave(3), reduction="none")
        return Outcome(losses.reshape(-1, 3).sum(1), (mean.argmax(1) == labels).long(), torch.ones_like(labels))


def supervised(input_shape: tuple[int, ...], num_classes: int) -> Supervised:
    """Return the model of SETTINGS with its initial weights, as a model that FedAvg can train."""
    del input_shape, num_classes
    model = job_of(experiment_from(SETTINGS)).model()
    assert isinstance(model, WithExits)
    return Supervised([*model.blocks], [*model.exits])


def test_whole_models_without_distillation_are_fedavg_with_deep_supervision_to_the_bit(tmp_path: Path) -> None:
    _, model = ran(tmp_path / "ours", **by(3, consistency=0))
    _, expected = ran(tmp_path / "plain", algorithm="fedavg", model=f"{__name__}:supervised", model_seed=0)
    assert model.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.items())
    assert not any(torch.equal(value, initial()[name]) for name, value in model.items())


@pytest.mark.parametrize("depth", [1, 3])
def test_the_loss_is_that_of_the_paper(depth: int) -> None:
    draw = torch.Generator().manual_seed(0)
    exits, labels = 5 * torch.randn(4, depth, 10, generator=draw), torch.tensor([0, 3, 3, 9])
    exits.requires_grad_()
    algorithm = DepthFL(temperature=3.0, consistency=0.5)
    data = {"smoothing": torch.tensor(0.1), "weight": torch.tensor(0.7)}
    any_params: Any = None
    batch = Batch(labels, labels, labels, exits.mean(1), {}, {}, data, any_params, any_params, exits.flatten(1))
    found, expected = algorithm.losses_of_exits(batch) + math.log(10), torch.zeros(4)
    for each in exits.unbind(1):
        expected = expected + functional.cross_entropy(each, labels, reduction="none", label_smoothing=0.1)
    for own, other in permutations(exits.unbind(1), 2):
        logs, taught = (own / 3).log_softmax(1), (other / 3).softmax(1).detach()
        expected = expected + 0.7 * 9 / (depth - 1) * functional.kl_div(logs, taught, reduction="none").sum(1)
    assert torch.allclose(found, expected, rtol=1e-5)
    slopes = [torch.autograd.grad(loss.sum(), exits, retain_graph=True)[0] for loss in (found, expected)]
    assert torch.allclose(*slopes, atol=1e-5)


def test_the_distillation_grows_over_the_rounds() -> None:
    def weight(server_round: int, ramp_up: int) -> float:
        settings = LocalSettings(0.1, momentum=0.0, weight_decay=0.0, batch_size=1, epochs=1)
        task = LocalTask(server_round, 0, 1, 1, settings, {"exits.0.0.weight": torch.zeros(2, 3)}, {})
        term = DepthFL(consistency=2.0, ramp_up=ramp_up).plan(task).loss_term
        assert term is not None
        return float(term.data["weight"])

    weights = [weight(number, 300) for number in (1, 151, 301, 900)]
    assert weights == pytest.approx([2 * math.exp(-5), 2 * math.exp(-1.25), 2, 2])
    assert weight(1, 0) == 2


def test_a_parameter_is_the_mean_over_its_holders_and_stays_without_any() -> None:
    before, algorithm = initial(), DepthFL()
    server = algorithm.init(before)
    depths = [round(3 * algorithm.size_of(client, server)) for client in range(6)]
    assert sorted(depths) == [1, 1, 2, 2, 3, 3]

    def mean(clients: list[int]) -> Params:
        replies = []
        for client in clients:
            held = algorithm.sized(server, algorithm.size_of(client, server)).params
            delta = {name: torch.full_like(value, float(client)) for name, value in held.items()}
            replies.append(Reply(client, {"delta": delta}, client + 1, 0.0))
        aggregate = MeanOfHolders().aggregate(Cohort(1, tuple(replies), 6, 3.0), algorithm, server)
        assert aggregate is not None
        return aggregate.payloads["delta"]

    for clients in ([*range(6)], [client for client in range(6) if depths[client] < 3]):
        for name, value in mean(clients).items():
            holders = [client for client in clients if depths[client] > int(name.split(".")[1])]
            weights = sum(client + 1 for client in holders)
            wanted = sum((client + 1) * client for client in holders) / max(1, weights)
            assert torch.allclose(value, torch.tensor(wanted))


def test_clients_receive_and_send_only_their_blocks_and_take_their_time(tmp_path: Path) -> None:
    device = {"kind": "constant", "records_per_second": 1.0}
    result, _ = ran(tmp_path, **by(), rounds=1, devices=device, evaluate={"clients": "class-shares"})
    named, (record,) = initial(), read_rounds(tmp_path)
    sizes = [2 * float32_bytes(num_parameters(first_blocks(named, depth))) for depth in (1, 2, 3)]
    assert record.bytes_down == record.bytes_up == sum(sizes)
    planned = procedure_of(job_of(experiment_from({**SETTINGS, **by(), "rounds": 1}))).traffic()["rounds"]
    assert planned.down == planned.up == pytest.approx(result["bytes"]["rounds"]["up"], abs=3)  # a rounded mean
    assert len(result["personal"]["by_client"]["own"]) == 6

    ran(tmp_path / "one", **by((1, 2)), clients=1, partition="iid", rounds=1, devices=device)
    ran(tmp_path / "two", **by((2, 1)), clients=1, partition="iid", rounds=1, devices=device)
    seconds = sorted(read_rounds(tmp_path / name)[0].virtual_seconds or 0.0 for name in ("one", "two"))
    whole = job_of(experiment_from({**SETTINGS, **by((1, 2))})).model()
    assert isinstance(whole, WithExits)
    share = products(whole.first(1), (1, 8, 8)) / products(whole, (1, 8, 8))
    assert seconds[0] == pytest.approx(share * seconds[1], rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (by(4), "a client of depth 4 needs 4 blocks, and this model has 3: give depths of at most 3"),
        ({"model": "logistic"}, "exits need a model of two blocks or more"),
        ({"aggregator": "median"}, "aggregator median"),
        ({"local": {"personal": "head"}}, "local.personal=head"),
        (by(0), "depths.*greater than or equal to 1"),
        ({"calibrate": "ccvr"}, "algorithm depthfl made this model, so leave calibrate and preprocess out"),
        ({"preprocess": "ridge-start"}, "algorithm depthfl made this model, so leave calibrate and preprocess out"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match):
        ran(tmp_path, **changes)
