"""IFCA: group means on quadratic losses, two groups of clients that are told apart, and FedAvg as its limit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from fl_sim import models
from fl_sim.data import load
from fl_sim.errors import Malformed, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.params import flattened
from fl_sim.training.loop import to_tensors
from fl_sim.types import ClientUpdate, LocalTask, Params, Reply, Trained
from strategies.algorithm import payload_template
from strategies.fedavg import FedAvg
from strategies.ifca import IFCA
from strategies.several_models import ClientOneUpdate, models_of


def one(value: float) -> Params:
    return {"w": torch.tensor([value], dtype=torch.float64)}


def federation_at(federation: Any, bowl: Any, shards: Any, settings: Any, first: float, other: float) -> Any:
    """Return a federation whose two models begin at ``first`` and ``other``."""
    simulated = federation(IFCA(spread=1.0), bowl(first), shards, settings(0.1))
    simulated.server = type(simulated.server)(one(first), {"model-1": one(other)})
    return simulated


def test_models_end_at_the_means_of_their_groups(bowl: Any, federation: Any, records: Any, settings: Any) -> None:
    """Groups around 0 and 10 and starts at 3 and 6 end at the means of the groups, weighted by records."""
    shards = [records((1, 0, 0)), records((1, 10, 0)), records((1, 0.3, 0), (1, 0.3, 0)), records((1, 10.4, 0))]
    simulated = federation_at(federation, bowl, shards, settings, 3.0, 6.0)
    for _ in range(300):
        simulated.round()
    assert simulated.w == pytest.approx(0.2, abs=1e-6)
    assert float(simulated.server.broadcast["model-1"]["w"]) == pytest.approx(10.2, abs=1e-6)


def test_a_model_that_nobody_chooses_keeps_its_bits(bowl: Any, federation: Any, records: Any, settings: Any) -> None:
    """The others' model is FedAvg's to the bit."""
    shards = [records((1, 0.1, 0)), records((3, 0.7, 0), (3, 0.7, 0))]
    simulated = federation_at(federation, bowl, shards, settings, 0.4, 1000.0)
    plain = federation(FedAvg(), bowl(0.4), shards, settings(0.1))
    for _ in range(20):
        simulated.round()
        plain.round()
    assert float(simulated.server.broadcast["model-1"]["w"]) == 1000.0
    assert simulated.w == plain.w


def test_one_model_is_fedavg_to_the_bit(bowl: Any, federation: Any, records: Any, settings: Any) -> None:
    shards = [records((1, 0, 0)), records((3, 1, 0), (3, 1, 0))]
    ends = []
    for algorithm in (IFCA(num_models=1), FedAvg()):
        simulated = federation(algorithm, bowl(0.4), shards, settings(0.05, 0.9))
        for _ in range(20):
            simulated.round()
        ends.append(simulated.w)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("model_seed", [0, 1])
@pytest.mark.parametrize("group", ["inverted images", "other labels"])
def test_clients_of_two_groups_choose_two_models(federation: Any, settings: Any, group: str, model_seed: int) -> None:
    data = load("digits")
    inputs, labels = to_tensors(data.train, data)
    shards = []
    for client, part in enumerate(torch.arange(len(labels)).chunk(10)):
        images, classes = inputs[part], labels[part]
        if client % 2 and group == "inverted images":
            images = inputs.max() + inputs.min() - images
        elif client % 2:
            classes = (classes + 3) % 10
        shards.append((images, classes))
    network = models.build("mlp", data.input_shape, 10, seed=model_seed)
    simulated = federation(IFCA(), network, shards, settings(0.1, batch_size=20), num_classes=10)
    for _ in range(8):
        updates = simulated.round()
    chosen = [int(update.payloads["chosen"]["share"].argmax()) for update in updates]
    assert set(chosen[::2]) | set(chosen[1::2]) == {0, 1}
    assert len(set(chosen[::2])) == len(set(chosen[1::2])) == 1


def initial() -> Params:
    return dict(models.build("mlp", (1, 8, 8), 10, seed=0).named_parameters())


def test_initial_models_are_distinct_and_come_from_the_seed() -> None:
    params = {name: value.detach() for name, value in initial().items()}
    first, again = (IFCA(num_models=4).init(params) for _ in range(2))
    found = models_of(first.params, first.broadcast)
    for name, value in params.items():
        assert len({tuple(model[name].flatten().tolist()) for model in found}) == 4
        assert all(torch.equal(model[name].flatten().sort()[0], value.flatten().sort()[0]) for model in found)
        assert torch.equal(first.broadcast["model-3"][name], again.broadcast["model-3"][name])
    noisy = IFCA(spread=0.1).init(params).broadcast["model-1"]
    moved = torch.cat([(noisy[name] - value).flatten() for name, value in params.items()])
    assert float(moved.std()) == pytest.approx(0.1, rel=0.05)
    moved_seed = {name: value + 1 for name, value in params.items()}
    other = IFCA(num_models=2).init(moved_seed).broadcast["model-1"]
    assert not any(torch.equal(other[name] - 1, first.broadcast["model-1"][name]) for name in ("1.weight", "3.weight"))
    with pytest.raises(UserError, match=r"shuffled makes no second model.* set algorithm\.spread to a number"):
        IFCA().init({name: torch.zeros_like(value) for name, value in params.items()})


def test_an_update_travels_once_and_arrives_at_its_model() -> None:
    algorithm, half = IFCA(num_models=3), ClientOneUpdate(3)
    params = {name: value.detach() for name, value in initial().items()}
    server = algorithm.init(params)
    template = {name: flattened(group) for name, group in payload_template(algorithm, server).items()}
    task = LocalTask(1, 0, 1, 5, fl_sim.types.LocalSettings(0.1, 0.0, 0.0, 5, 1), params)
    task = type(task)(**{**vars(task), "state": {"chosen": {"model": torch.tensor([2])}}})
    trained = Trained({name: value + 1 for name, value in params.items()}, {}, 1, 0.5)
    update = algorithm.finish(task, trained)
    sent = half.sent(task, task, trained, update)
    sizes = half.packs(template, params)
    assert {name: len(part.numbers) for name, part in sent.packed.items()} == {n: s.numbers for n, s in sizes.items()}
    assert sum(size.numbers for size in sizes.values()) == sum(value.numel() for value in params.values())
    reply = half.unpacked(_reply(sent), template, 1)
    assert not reply.packed
    for name, group in update.payloads.items():
        assert all(torch.equal(reply.payloads[name][key], value) for key, value in group.items())
    sent.payloads["chosen"]["share"][0] = 1  # type: ignore[index]
    with pytest.raises(Malformed, match="more than one"):
        half.unpacked(_reply(sent), template, 1)


def _reply(sent: ClientUpdate) -> Reply:
    return Reply(0, sent.payloads, sent.num_examples, sent.loss, sent.packed)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clients": 3, "algorithm": {"kind": "ifca", "num_models": 4}}, "num_models=4 is more than clients=3"),
        ({"aggregator": "global-dp"}, "choice of a model depends on its records"),
        ({"aggregator": "median"}, "only a mean leaves such zeros"),
        ({"compress": "qsgd"}, "cannot run with compress qsgd"),
        ({"local": {"batch_norm": "average"}}, "running statistics"),
        ({"local": {"personal": "head"}}, "local.personal=head"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Experiment.model_validate({"algorithm": "ifca", **settings})


SMALL = {
    "data": "digits", "partition": "label-2", "clients": 6, "model": "logistic", "rounds": 3,
    "local": {"learning_rate": 0.1, "batch_size": 32}, "evaluate": {"clients": "class-shares"},
}  # fmt: skip


def ran(out: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """Return the result of a run, its model, and its table of clients."""
    fl_sim.run({**SMALL, **settings}, out=out, progress=False)
    table = np.genfromtxt(out / "clients.csv", delimiter=",", names=True)
    return json.loads((out / "result.json").read_text()), load_file(out / "model.safetensors"), table


def test_a_run_with_one_model_is_fedavg_to_the_bit(tmp_path: Path) -> None:
    ours, plain = (
        ran(tmp_path / str(number), algorithm=algorithm)
        for number, algorithm in enumerate(({"kind": "ifca", "num_models": 1}, "fedavg"))
    )
    assert all(torch.equal(value, plain[1][name]) for name, value in ours[1].items())
    assert ours[0]["personal"] == plain[0]["personal"]
    assert ours[0]["bytes"] == plain[0]["bytes"]


def test_a_resumed_run_ends_in_the_same_bits_and_choices(tmp_path: Path) -> None:
    """Three of six clients take part in a round, so some choices are known from before the resume alone."""
    some = {"algorithm": {"kind": "ifca", "num_models": 5}, "sampler": {"kind": "fixed-size", "cohort_size": 3}}
    whole = ran(tmp_path / "whole", **some)
    fl_sim.run({**SMALL, **some, "rounds": 2}, out=tmp_path / "run", progress=False)
    resumed = ran(tmp_path / "run", **some)
    assert all(torch.equal(value, resumed[1][name]) for name, value in whole[1].items())
    assert whole[0]["personal"] == resumed[0]["personal"]
    assert whole[0]["clients_of_models"] == resumed[0]["clients_of_models"]
    assert np.array_equal(whole[2]["chosen_model"], resumed[2]["chosen_model"], equal_nan=True)
    said = " ".join(resumed[0]["warnings"])
    assert "num_models=5 is more than the 3 clients of a round" in said
    assert "in the last round no client chose models" in said
    counted, numbers = whole[0]["bytes"]["each_client_in_a_round"], 650
    assert 5 * 4 * numbers < counted["down"] < 5 * 4 * numbers + 1000
    assert 4 * numbers < counted["up"] < 4 * numbers + 500
    assert whole[0]["bytes"]["after"]["own models"]["down"] == counted["down"] * 6
