"""HeteroFL and FedRolex: FedAvg as their limit, entries and their holders, bytes and time of small models, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_sim.engines.arrays import float32_bytes
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.models import products
from fl_sim.narrow_models import cut, places_of
from fl_sim.params import detached, layout_of, num_parameters
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.types import Cohort, Params, Reply
from strategies.fedrolex import FedRolex
from strategies.heterofl import HeteroFL
from strategies.sizes import CLASSES, MeanOfHolders

SETTINGS: dict[str, Any] = {
    "data": "digits", "partition": "label-3", "clients": 6, "model": "niid-mlp", "rounds": 3,
    "local": {"learning_rate": 0.05, "batch_size": 32}, "sampler": "fixed-size:4",
}  # fmt: skip
WIDTHS = (1.0, 0.5, 0.25)
BOTH = pytest.mark.parametrize("kind", ["heterofl", "fedrolex"])


def ran(out: Path, **settings: Any) -> tuple[dict[str, Any], Params]:
    run(experiment_from({**SETTINGS, **settings}), out)
    return json.loads((out / "result.json").read_text()), load_file(out / "model.safetensors")


def by(kind: str, rates: Any = WIDTHS, **more: Any) -> dict[str, Any]:
    return {"algorithm": {"kind": kind, "rates": rates, **more}}


def test_each_block_of_clients_has_each_rate_once_and_widths_do_not_follow_client_numbers() -> None:
    algorithm = HeteroFL(rates=(1.0, 0.5, 0.25, 0.125, 0.0625))
    server = algorithm.init({})
    widths = [algorithm.size_of(client, server) for client in range(100)]
    blocks = [widths[start : start + 5] for start in range(0, 100, 5)]
    assert all(sorted(block) == sorted(algorithm.rates) for block in blocks)
    assert all(len({block[place] for block in blocks}) > 3 for place in range(5))  # class i mod 10 meets all widths
    assert widths == [algorithm.size_of(client, server) for client in range(100)]


def initial(**settings: Any) -> Params:
    return detached(job_of(experiment_from({**SETTINGS, **settings})).model().named_parameters())


@BOTH
def test_whole_models_without_scaler_and_mask_are_fedavg_to_the_bit(kind: str, tmp_path: Path) -> None:
    result, model = ran(tmp_path / "ours", **by(kind, 1.0, masked=False))
    plain, expected = ran(tmp_path / "plain", algorithm="fedavg")
    assert all(torch.equal(value, expected[name]) for name, value in model.items())
    assert result["final_accuracy"] == plain["final_accuracy"]
    assert any("this is fedavg" in said for said in result["warnings"])


def test_an_entry_that_no_client_has_does_not_move(tmp_path: Path) -> None:
    before, (_, after) = initial(), ran(tmp_path, **by("heterofl", 0.5))
    places = places_of(layout_of(before), 0.5)
    for name, value in before.items():
        held = torch.zeros_like(value, dtype=torch.bool)
        held[places[name]] = True
        assert torch.equal(value[~held], after[name][~held])
        assert not torch.equal(value[held], after[name][held])


def test_the_window_of_fedrolex_rolls_over_all_entries(tmp_path: Path) -> None:
    before, (_, after) = initial(), ran(tmp_path, **by("fedrolex", 0.5), rounds=17)
    still = [float((value == after[name]).double().mean()) for name, value in before.items() if value.ndim > 1]
    assert max(still[1:]) < 0.2  # entries of channels that are never active beside each other, and dead units
    first = FedRolex(rates=(0.5,))
    server = first.init(before)
    kept = [first.places(server, 0.5)["1.bias"][0].tolist()]
    for number in (1, 20):
        server.memory["round"] = {"number": torch.tensor([float(number)])}
        kept.append(first.places(server, 0.5)["1.bias"][0].tolist())
    assert kept == [[*range(16)], [*range(1, 17)], [*range(4), *range(20, 32)]]


def cohort_of(before: Params, algorithm: HeteroFL, classes: dict[int, list[float]], value: Any) -> Cohort:
    """Return the replies of clients with 1, 2, ... records, each an update whose entries are ``value(client)``."""
    server, replies = algorithm.init(before), []
    for client, held in classes.items():
        small = cut(before, algorithm.places(server, algorithm.size_of(client, server)))
        payloads: Any = {"delta": {name: torch.full_like(one, value(client)) for name, one in small.items()}}
        if algorithm.masked:
            payloads[CLASSES] = {"held": torch.tensor(held)}
        replies.append(Reply(client, payloads, client + 1, 0.0))
    return Cohort(1, tuple(replies), 6, 3.0)


@pytest.mark.parametrize("masked", [False, True])
def test_an_entry_is_the_mean_over_its_holders_and_their_weights_add_up_to_1(masked: bool) -> None:  # noqa: FBT001
    before = initial()
    algorithm = HeteroFL(rates=(0.25, 0.5), masked=masked)
    classes = {client: [float(row % 3 == client or row < 2) for row in range(10)] for client in range(3)}
    server = algorithm.init(before)
    ones = MeanOfHolders().aggregate(cohort_of(before, algorithm, classes, lambda _: 1.0), algorithm, server)
    means = MeanOfHolders().aggregate(cohort_of(before, algorithm, classes, float), algorithm, server)
    assert ones is not None
    assert means is not None
    for name, value in before.items():
        total, weights = torch.zeros_like(value), torch.zeros_like(value)
        for client, width in enumerate(algorithm.size_of(client, server) for client in range(3)):
            mask = torch.zeros_like(value)
            mask[places_of(layout_of(before), width)[name]] = 1
            if masked and name.startswith("7."):
                mask *= torch.tensor(classes[client]).reshape(-1, *[1] * (value.ndim - 1))
            total, weights = total + (client + 1) * client * mask, weights + (client + 1) * mask
        assert torch.equal(ones.payloads["delta"][name], (weights > 0).float())
        assert torch.allclose(means.payloads["delta"][name], total / weights.clamp(min=1))
    assert ones.participation == 3 / 6


def test_a_client_trains_its_small_model_alone(tmp_path: Path) -> None:
    """One client of half width ends at the model that the trainer makes of the cut model."""
    alone = {"clients": 1, "partition": "iid", "sampler": "full", "rounds": 1}
    before, (_, after) = initial(**alone), ran(tmp_path, **alone, **by("heterofl", 0.5))
    cut_model = cut(before, places_of(layout_of(before), 0.5))
    widths = [value.shape[0] for value in cut_model.values() if value.ndim > 1]
    _, trained = ran(tmp_path / "small", **alone, algorithm="fedavg", model=f"{__name__}:half_model", model_seed=0)
    assert widths == [16, 8, 4, 10]
    for name, value in cut(after, places_of(layout_of(before), 0.5)).items():
        assert torch.allclose(value, trained[name], atol=1e-6)


def half_model(input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
    """The model that a client of half width gets, as a model of its own."""
    del input_shape, num_classes
    before = initial(clients=1, partition="iid", sampler="full")
    small = cut(before, places_of(layout_of(before), 0.5))
    layers = [torch.nn.Linear(*value.shape[::-1]) for value in small.values() if value.ndim > 1]
    model = torch.nn.Sequential(torch.nn.Flatten(), *[one for layer in layers for one in (layer, torch.nn.ReLU())][:-1])
    model.load_state_dict(small)
    return model


def test_bytes_are_those_of_the_small_models_and_the_forecast_is_their_mean(tmp_path: Path) -> None:
    settings = {**by("heterofl"), "sampler": "full", "evaluate": {"clients": "class-shares"}}
    result, before = ran(tmp_path, **settings)[0], initial()
    sizes = [num_parameters(cut(before, places_of(layout_of(before), width))) for width in WIDTHS]
    down, up = (2 * sum(float32_bytes(size) + float32_bytes(more) for size in sizes) for more in (1, 10))
    records = read_rounds(tmp_path)
    assert [(one.bytes_down, one.bytes_up) for one in records] == [(down, up)] * 3
    planned = procedure_of(job_of(experiment_from({**SETTINGS, **settings}))).traffic()
    assert {"down": planned["rounds"].down, "up": planned["rounds"].up} == result["bytes"]["rounds"]
    assert result["bytes"]["after"]["own models"]["down"] == down
    assert len(result["personal"]["by_client"]["own"]) == 6


def test_rounds_take_the_time_of_the_slowest_small_model(tmp_path: Path) -> None:
    device = {"kind": "constant", "records_per_second": 1.0}
    seconds = {}
    for width in (1.0, 0.5):
        ran(tmp_path / str(width), **by("heterofl", width), devices=device, sampler="full")
        seconds[width] = read_rounds(tmp_path / str(width))[0].virtual_seconds
    model = job_of(experiment_from(SETTINGS)).model()
    small = HeteroFL().resized(model, cut(initial(), places_of(layout_of(initial()), 0.5)), 0.5)
    share = products(small, (1, 8, 8)) / products(model, (1, 8, 8))
    assert seconds[0.5] == pytest.approx(share * seconds[1.0], rel=1e-3)


@BOTH
def test_a_resumed_run_with_changing_widths_ends_in_the_same_bits(kind: str, tmp_path: Path, stop_after: Any) -> None:
    settings = {**by(kind, mode="dynamic", scaler=True), "evaluate": {"clients": "class-shares", "personal_every": 1}}
    whole = ran(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        run(experiment_from({**SETTINGS, **settings}), tmp_path / "cut", observer=stop_after(1))
    resumed = ran(tmp_path / "cut", **settings)
    assert all(torch.equal(value, resumed[1][name]) for name, value in whole[1].items())
    assert whole[0]["personal"] == resumed[0]["personal"]
    assert len({one.bytes_up for one in read_rounds(tmp_path / "whole")}) > 1
    stacked = ran(tmp_path / "stacked", **settings, engine={"kind": "inprocess", "stack": 3})
    assert all(torch.allclose(value, stacked[1][name], atol=1e-4) for name, value in whole[1].items())


def test_a_client_does_not_count_for_the_rows_of_classes_that_it_lacks(tmp_path: Path) -> None:
    """Weight decay moves all rows at a client. The server takes those of the client's classes alone."""
    alone = {"clients": 2, "partition": "label-1", "sampler": "full", "rounds": 1}
    before, job = initial(**alone), job_of(experiment_from({**SETTINGS, **alone}))
    held = np.unique(job.dataset.train.labels[job.shards.records])
    _, after = ran(tmp_path, **alone, **by("heterofl"), local={"weight_decay": 0.1})
    moved = [not torch.equal(one, other) for one, other in zip(before["7.bias"], after["7.bias"], strict=True)]
    assert np.flatnonzero(moved).tolist() == held.tolist()
    assert len(held) == 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"aggregator": "median"}, "aggregator median: .*compares or bounds"),
        ({"aggregator": "norm-bound"}, "aggregator norm-bound: .*compares or bounds"),
        ({"aggregator": "global-dp", "sampler": "poisson:0.5"}, "aggregator global-dp: .*secret"),
        (
            {"aggregator": {"kind": "distributed-dp", "noise_multiplier": 1.0}, "sampler": "poisson:0.5"},
            "aggregator distributed-dp: .*secret",
        ),
        ({"compress": "top-k"}, "compress=top-k"),
        ({"attack": "sign-flip"}, "attack=sign-flip"),
        ({"server": "fedbuff", "devices": "uniform"}, "server=fedbuff"),
        ({"local": {"privacy": "dp-sgd"}}, "local.privacy=dp-sgd"),
        ({"local": {"privacy": "local-dp"}}, "local.privacy=local-dp"),
        ({"local": {"batch_norm": "average"}}, "local.batch_norm=average"),
        ({"local": {"personal": "head"}}, "local.personal=head"),
        ({"model": {"name": "mlp", "trainable": "head"}}, "model.trainable=head"),
        (by("heterofl", 0.0), "rates.*greater than 0"),
        (by("heterofl", 2.0), "rates.*less than or equal to 1"),
        (by("heterofl", []), "rates.*at least 1"),
    ],
)
def test_what_needs_models_of_one_size_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match) as raised:
        experiment_from({**SETTINGS, "algorithm": "heterofl", **changes})
    assert "\n" not in str(raised.value)


def test_a_model_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one layer has no channels between layers"):
        ran(tmp_path, algorithm="heterofl", model="logistic")
