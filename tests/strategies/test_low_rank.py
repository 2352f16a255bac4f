"""Methods for adapters: the laws of their means, what they send, and what does not go together."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fl_sim
import fl_sim.simulation.run as running
from fl_sim import models
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.params import detached, trainable
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.types import Aggregate, LocalTask, ServerState, Trained
from strategies.algorithm import ONE_STEP, Averaging
from strategies.fedit import FedIT
from strategies.ffa_lora import FFALoRA
from strategies.flexlora import FlexLoRA
from strategies.flora import FLoRA
from strategies.low_rank import factors_in, is_factor, products
from strategies.rolora import RoLoRA

OUT, IN, RANK, CLIENTS = 9, 13, 4, 6
SHARES = np.array([1, 2, 3, 4, 5, 6]) / 21
A, B, W, SCALE = "1.lora_A", "1.lora_B", "1.weight", "1.lora_scale"


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


START = {A: normal(RANK, IN, seed=1), B: normal(OUT, RANK, seed=2)}


def after(algorithm: Any, server_round: int = 1, *, start: dict[str, torch.Tensor] = START) -> tuple[Any, torch.Tensor]:
    """Let clients move all factors that the algorithm trains at random; return (merged state, mean of the products)."""
    server = ServerState(start)
    payloads, mean = [], torch.zeros(OUT, IN, dtype=torch.float64)
    for client, share in enumerate(SHARES):
        task = LocalTask(server_round, client, CLIENTS, 5, ONE_STEP, start, initial=start)
        moving = algorithm.plan(task).trained
        if moving is None:
            named = algorithm.trains(list(start), []) if isinstance(algorithm, FFALoRA) else list(start)
            moving = frozenset(named)
        moved = {
            name: normal(*value.shape, seed=10 + client + 100 * len(name)) + (0 if "A" in name else 1)
            if name in moving and is_factor(name)
            else value
            for name, value in start.items()
        }
        update = algorithm.finish(task, Trained(moved, {}, 1, 0.5))
        sent = {group: dict(params) for group, params in update.payloads.items()}
        payloads.append(algorithm.unfolded(sent) if hasattr(algorithm, "unfolded") else sent)
        mean += share * (moved[B] @ moved[A])
    weighed = list(zip(SHARES, payloads, strict=True))
    averaged = {
        group: {name: sum(share * one[group][name] for share, one in weighed) for name in own}
        for group, own in payloads[0].items()
    }
    return algorithm.merge(server, Aggregate(averaged, 1.0)).params, mean


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_the_mean_of_factors_is_biased_and_that_of_ffa_lora_and_rolora_is_exact() -> None:
    merged, mean = after(FedIT())
    assert 0.3 < error(merged[B] @ merged[A], mean) < 1.5
    merged, mean = after(FFALoRA())
    assert torch.equal(merged[A], START[A])
    assert error(merged[B] @ merged[A], mean) < 1e-12
    for server_round, still in ((1, A), (2, B)):
        merged, mean = after(RoLoRA(), server_round)
        assert torch.equal(merged[still], START[still])
        assert error(merged[B] @ merged[A], mean) < 1e-12


def test_the_error_of_fedit_on_random_factors_is_the_published_one() -> None:
    """Six clients with standard normal factors of rank 4: product of means against mean of products."""
    errors = []
    for seed in range(20):
        pairs = [(normal(32, 4, seed=100 * seed + i), normal(4, 32, seed=100 * seed + 50 + i)) for i in range(6)]
        mean = sum(b @ a for b, a in pairs) / 6
        errors.append(error(sum(b for b, _ in pairs) @ sum(a for _, a in pairs) / 36, mean))
    assert np.mean(errors) == pytest.approx(0.91, abs=0.04)


def test_flora_adds_the_exact_mean_to_the_weights_and_starts_anew() -> None:
    start = {**START, B: START[B] * 0, W: normal(OUT, IN, seed=3), SCALE: torch.tensor(2.0, dtype=torch.float64)}
    merged, mean = after(FLoRA(), start=start)
    assert error(merged[W], start[W] + 2 * mean) < 1e-12
    assert all(torch.equal(merged[name], start[name]) for name in (A, B, SCALE))


def test_flora_does_not_add_what_its_start_has_already() -> None:
    start = {**START, W: normal(OUT, IN, seed=3), SCALE: torch.tensor(2.0, dtype=torch.float64)}
    merged, mean = after(FLoRA(), start=start)
    assert error(merged[W] + 2 * merged[B] @ merged[A], start[W] + 2 * mean) < 1e-12


def test_flexlora_is_exact_up_to_its_rank_and_the_best_of_that_rank_beyond() -> None:
    merged, mean = after(FlexLoRA())
    left, values, right = torch.linalg.svd(mean)
    best = left[:, :RANK] * values[:RANK] @ right[:RANK]
    assert error(merged[B] @ merged[A], best) < 1e-12
    assert error(merged[B] @ merged[A], mean) > 0.1
    wide = {A: normal(OUT, IN, seed=1), B: normal(OUT, OUT, seed=2)}
    merged, mean = after(FlexLoRA(), start=wide)
    assert error(merged[B] @ merged[A], mean) < 1e-12


def test_flexlora_averages_adapters_of_different_ranks_exactly_and_gives_each_client_the_best_of_its_rank() -> None:
    algorithm = FlexLoRA(ranks=(1, 2, 4))
    server = algorithm.init(START)
    ranks = [round(RANK * algorithm.size_of(client, server)) for client in range(CLIENTS)]
    assert sorted(ranks[:3]) == sorted(ranks[3:]) == [1, 2, 4]
    payloads, stacked_a, stacked_b = [], [], []
    for client, share in enumerate(SHARES):
        sized = algorithm.sized(server, ranks[client] / RANK)
        assert (sized.params[A].shape, sized.params[B].shape) == ((ranks[client], IN), (OUT, ranks[client]))
        task = LocalTask(1, client, CLIENTS, 5, ONE_STEP, sized.params, sized.broadcast, initial=sized.params)
        assert algorithm.size_in(task) == ranks[client] / RANK
        moved = {name: normal(*value.shape, seed=client + len(name)) for name, value in sized.params.items()}
        payloads.append(algorithm.unfolded(algorithm.finish(task, Trained(moved, {}, 1, 0.5)).payloads)["products"][A])
        stacked_a.append(moved[A])
        stacked_b.append(share * moved[B])
    mean = sum(share * one for share, one in zip(SHARES, payloads, strict=True))
    product_of_stacks = torch.cat(stacked_b, 1) @ torch.cat(stacked_a)
    assert error(mean, product_of_stacks) < 1e-12
    merged = algorithm.merge(server, Aggregate({"products": {A: mean}}, 1.0))
    left, values, right = torch.linalg.svd(product_of_stacks)
    for rank in (1, 2, 4):
        of_client = algorithm.sized(merged, rank / RANK).params
        best = left[:, :rank] * values[:rank] @ right[:rank]
        assert error(of_client[B] @ of_client[A], best) < 1e-12


def test_clients_of_smaller_ranks_send_fewer_bytes_and_equal_ranks_change_no_bit(tmp_path: Path) -> None:
    ranks, settings = (1, 2, 4), ("algorithm=flexlora", "model.rank=4", "rounds=2", "sampler=full", "clients=3")
    _, result = outcome(tmp_path / "several", *settings, "algorithm.ranks=1,2,4")
    up = 4 * sum(_sizes(rank, "AB") for rank in ranks)
    assert up <= result["bytes"]["rounds"]["up"] / 2 <= up + 3 * 400
    assert up <= result["bytes"]["rounds"]["down"] / 2 <= up + 3 * 400
    planned = procedure_of(job_of(changed(*settings, "algorithm.ranks=1,2,4"))).traffic()["rounds"]
    assert {"down": planned.down, "up": planned.up} == pytest.approx(result["bytes"]["rounds"], abs=2)  # a rounded mean
    (one, _), (same, _) = (outcome(tmp_path / name, *settings, name) for name in ("algorithm.ranks=4", "seed=0"))
    assert all(torch.equal(one[name], value) for name, value in same.items())


def test_flora_and_flexlora_keep_convolutions_embeddings_and_peft_in_their_shapes() -> None:
    params = {
        "c.weight": normal(6, 2, 3, 3, seed=0), "c.lora_A": normal(2, 18, seed=1), "c.lora_B": normal(6, 2, seed=2),
        "e.weight": normal(7, 5, seed=3), "e.lora_embedding_A": normal(2, 7, seed=4),
        "e.lora_embedding_B": normal(5, 2, seed=5), "c.lora_scale": torch.tensor(1.0),
        "e.lora_scale": torch.tensor(1.0),
    }  # fmt: skip
    found = products(params)
    start = {name: value * 0 if name.endswith("_B") else value for name, value in params.items()}
    merged = FLoRA().merge(ServerState(start), Aggregate({"products": found}, 1.0)).params
    added = {name: merged[f"{name}.weight"] - params[f"{name}.weight"] for name in "ce"}
    assert torch.allclose(added["c"], (params["c.lora_B"] @ params["c.lora_A"]).reshape(6, 2, 3, 3))
    assert torch.allclose(added["e"], (params["e.lora_embedding_B"] @ params["e.lora_embedding_A"]).T)
    peft = {
        "q.lora_A.default.weight": normal(2, 3, 4, 4, seed=6),
        "q.lora_B.default.weight": normal(5, 2, 1, 1, seed=7),
    }
    [pair] = factors_in(peft)
    assert (pair.layer, pair.is_embedding) == ("q.", False)
    after_svd = FlexLoRA().merge(ServerState(peft), Aggregate({"products": products(peft)}, 1.0)).params
    assert {name: value.shape for name, value in after_svd.items()} == {name: one.shape for name, one in peft.items()}
    assert error(products(after_svd)[pair.a], products(peft)[pair.a]) < 1e-12


BASE = {
    "data": "digits", "partition": "dirichlet:0.5", "clients": 4, "rounds": 3, "engine": "inprocess", "model": "mlp",
    "local": {"learning_rate": 0.1, "batch_size": 128},
}  # fmt: skip
METHODS = ("fedit", "ffa-lora", "flora", "flexlora", "rolora")


def changed(*settings: str) -> Any:
    return experiment_from(with_overrides(BASE, list(settings)))


def outcome(out: Path, *settings: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    result = run(changed(*settings), out)
    return load_file(out / "model.safetensors"), result


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns_and_saves_a_plain_model(method: str, tmp_path: Path) -> None:
    saved, result = outcome(tmp_path / "run", f"algorithm={method}", "model.rank=4", "model.alpha=8", "rounds=6",
                            "partition=iid", "local.learning_rate=0.03", "local.batch_size=32")  # fmt: skip
    plain = job_of(changed("algorithm=fedavg")).model()
    assert saved.keys() == plain.state_dict().keys()
    start = plain.state_dict()
    assert all(torch.equal(saved[name], start[name]) for name in saved if name.endswith("bias"))
    rank = np.linalg.matrix_rank(saved["3.weight"] - start["3.weight"], tol=1e-4)
    assert 0 < rank <= (100 if method == "flora" else 4)
    assert result["final_accuracy"] > 0.25
    loaded = fl_sim.load_model(tmp_path / "run")
    assert dict(loaded.named_parameters()).keys() == dict(plain.named_parameters()).keys()


def _sizes(rank: int, sides: str) -> int:
    """Return the numbers in the factors of ``sides`` for a 64-600-100-10 perceptron."""
    pairs = ((64, 600), (600, 100), (100, 10))
    return sum(min(rank, *pair) * (pair[0] * ("A" in sides) + pair[1] * ("B" in sides)) for pair in pairs)


WHOLE = sum(one.numel() for one in models.mlp((1, 8, 8), 10).parameters() if one.ndim > 1)


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        ("fedit", _sizes(4, "AB"), _sizes(4, "AB")),
        ("ffa-lora", _sizes(4, "B"), _sizes(4, "B")),
        ("flora", WHOLE + _sizes(4, "AB") + 3, _sizes(4, "AB")),
        ("flexlora", _sizes(4, "AB"), _sizes(4, "AB")),
        ("rolora", _sizes(4, "AB"), (_sizes(4, "A") + _sizes(4, "B")) / 2),
    ],
)
def test_bytes_are_the_sizes_of_what_travels(method: str, down: int, up: float, tmp_path: Path) -> None:
    settings = (f"algorithm={method}", "model.rank=4", "rounds=2", "sampler=full")
    _, result = outcome(tmp_path / "run", *settings)
    each = result["bytes"]["each_client_in_a_round"]
    assert 4 * down <= each["down"] <= 4 * down + 200
    assert 4 * up <= each["up"] <= 4 * up + 400
    assert result["bytes"]["rounds"]["up"] == 2 * 4 * each["up"]
    planned = procedure_of(job_of(changed(*settings))).traffic()["rounds"]
    assert (planned.down, planned.up) == (result["bytes"]["rounds"]["down"], result["bytes"]["rounds"]["up"])


def test_rolora_alternates(tmp_path: Path) -> None:
    seen: dict[int, list[str]] = {}
    algorithm = RoLoRA()
    params = detached(trainable(job_of(changed("algorithm=rolora")).model()).items())
    for server_round in (1, 2, 3, 4):
        task = LocalTask(server_round, 0, 1, 5, ONE_STEP, params, initial=params)
        moved = {name: value + 1 for name, value in params.items()}
        seen[server_round] = sorted(algorithm.finish(task, Trained(moved, {}, 1, 0.1)).payloads["delta"])
        assert algorithm.plan(task).trained == {*seen[server_round]}
    assert seen[1] == seen[3] == ["1.lora_B", "3.lora_B", "5.lora_B"]
    assert seen[2] == seen[4] == ["1.lora_A", "3.lora_A", "5.lora_A"]
    one, _ = outcome(tmp_path / "whole", "algorithm=rolora", "rounds=4")
    lines = [line for line in (tmp_path / "whole" / "rounds.jsonl").read_text().splitlines() if line]
    ups = [json.loads(line)["bytes_up"] for line in lines]
    assert ups[0] == ups[2] != ups[1] == ups[3]
    assert one


class Identity(nn.Module):
    """One linear layer without bias; its adapter has A = I if it is of full rank (see ``full_rank``)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(inputs.flatten(1))
        return logits


def one_layer(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Identity(math.prod(shape), classes)


class FullRank(nn.Module):
    """The same layer with factors of its own, under PEFT's names: A = I and B = 0 of full rank."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.base_layer = Identity(width, classes).head.requires_grad_(requires_grad=False)
        self.lora_A = nn.Parameter(torch.eye(width))
        self.lora_B = nn.Parameter(torch.zeros(classes, width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.flatten(1)
        logits: torch.Tensor = self.base_layer(rows) + rows @ self.lora_A.T @ self.lora_B.T
        return logits


def full_rank(shape: tuple[int, ...], classes: int) -> nn.Module:
    return FullRank(math.prod(shape), classes)


def test_ffa_lora_of_full_rank_with_the_identity_is_fedavg_on_the_layer(tmp_path: Path) -> None:
    plain, _ = outcome(tmp_path / "plain", f"model={__name__}:one_layer", "local.weight_decay=0")
    found, said = outcome(tmp_path / "ffa", f"model={__name__}:full_rank", "algorithm=ffa-lora", "local.weight_decay=0")
    assert torch.equal(found["lora_A"], torch.eye(64))
    assert torch.allclose(found["base_layer.weight"] + found["lora_B"], plain["head.weight"], atol=1e-5)
    assert said["num_parameters"] == 640


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize("protection", ["aggregator=global-dp", "local.privacy=dp-sgd", "local.privacy=local-dp"])
def test_with_privacy_the_noise_of_ffa_lora_is_on_b_alone(
    protection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = protection.partition("=")[0]
    job = job_of(changed("algorithm=ffa-lora", "model.rank=2"))
    start = job.model()
    states: list[ServerState] = []
    monkeypatch.setattr(running, "_write_outcome", lambda job, log, out: states.append(log.server))
    settings = [
        "algorithm=ffa-lora", "model.rank=2", protection, f"{group}.noise=seeded", f"{group}.noise_multiplier=50",
        "rounds=1", "clients=1", "partition=iid", *(["sampler=full"] if group == "aggregator" else []),
    ]  # fmt: skip
    run(changed(*settings), tmp_path / "run")
    moved = states[0].params
    assert {name.rpartition(".")[2] for name in moved} == {"lora_B"}
    assert all((value != start.get_parameter(name)).all() for name, value in moved.items())


@pytest.mark.parametrize("method", METHODS)
def test_rank_zero_beside_a_trained_head_is_training_the_head(method: str, tmp_path: Path) -> None:
    if method == "flora":
        with pytest.raises(UserError, match=r"flora adds adapters to weights W, and this model has no adapters"):
            outcome(tmp_path / "x", f"algorithm={method}", "model.trainable=lora,head", "model.rank=0")
        return
    if method == "flexlora":
        return  # its update has factors
    plain, _ = outcome(tmp_path / "plain", "model.trainable=head")
    none, _ = outcome(tmp_path / "none", f"algorithm={method}", "model.trainable=lora,head", "model.rank=0")
    assert all(torch.equal(plain[name], none[name]) for name in plain)


def test_parameters_beside_adapters_are_averaged_as_ever(tmp_path: Path) -> None:
    for method in ("flora", "flexlora", "rolora"):
        saved, result = outcome(tmp_path / method, f"algorithm={method}", "model.trainable=lora,head", "rounds=2")
        start = job_of(changed()).model().state_dict()
        assert not torch.equal(saved["5.bias"], start["5.bias"])
        assert torch.equal(saved["3.bias"], start["3.bias"])
        assert result["final_accuracy"] > 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=flora", "model.trainable=head"], r"algorithm flora is for adapters, and model.trainable=head"),
        (["algorithm=flora", "aggregator=global-dp"], r"flora averages products of two factors, .*take ffa-lora"),
        (["algorithm=flexlora", "compress=top-k:0.1"], r"leave compress out"),
        (["algorithm=flexlora", "algorithm.ranks=2,9"], r"ranks has 9, and the server's adapters .*set model.rank=9"),
        (["algorithm=flexlora", "algorithm.ranks=2", "local.personal=head"], r"one size.*leave local.personal out, or"),
        (["algorithm=rolora", "aggregator=global-dp"], r"rolora sends factors B in odd rounds .*aggregator"),
        (["algorithm=rolora", "compress=qsgd:3"], r"rolora sends factors B .*leave compress out"),
        (["algorithm=flora", f"model={__name__}:full_rank"], r"flora adds adapters to weights W, .*has no parameter"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        outcome(tmp_path / "run", *settings)


def test_the_methods_choose_adapters_unless_told_otherwise() -> None:
    assert changed("algorithm=fedit").model.trainable == "lora"
    assert experiment_from({"algorithm": "flora", "model": {"rank": 3}}).model.trainable == "lora"
    assert changed("algorithm=ffa-lora", "model.trainable=lora,head").model.trainable == "lora,head"
    assert isinstance(FedIT(), Averaging)
    assert "biased" in FedIT().note()


@pytest.mark.cluster
def test_ray_gives_the_same_bits(tmp_path: Path) -> None:
    alone, _ = outcome(tmp_path / "alone", "algorithm=flora", "rounds=2")
    spread, _ = outcome(tmp_path / "spread", "algorithm=flora", "rounds=2", "engine=ray", "engine.actors=2")
    assert all(torch.equal(alone[name], value) for name, value in spread.items())
