"""FD, FedGH and FedTGP: clients keep their models, and the server learns from every client's means by class."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_sim import models
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.params import detached
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.store.tensors import load_state
from fl_sim.training.features import feature_sums
from fl_sim.types import LocalTask, Params, ServerState, Trained
from strategies.algorithm import first_state
from strategies.class_means import RoundPayloads
from strategies.fd import FD
from strategies.fedgh import FedGH
from strategies.fedtgp import LARGEST_MARGIN, FedTGP, contrast, margin_of, prototypes_of
from strategies.other_logits import OtherLogits

SETTINGS: dict[str, Any] = {
    "data": "digits", "partition": "label-3", "clients": 5, "model": "mlp", "rounds": 3, "sampler": "fixed-size:3",
    "local": {"learning_rate": 0.1, "batch_size": 32}, "evaluate": {"clients": "class-shares"},
}  # fmt: skip
DRAW = torch.Generator().manual_seed(0)


def ran(out: Path, **settings: Any) -> tuple[dict[str, Any], list[Params]]:
    """Return the measures of the clients' own models, and these models."""
    experiment = experiment_from({**SETTINGS, **settings})
    run(experiment, out)
    states = [load_state(out / "clients", client, experiment.rounds + 1) for client in range(experiment.num_clients)]
    return json.loads((out / "result.json").read_text())["personal"], [one.get("own", {}) for one in states]


def network() -> tuple[torch.nn.Module, Params]:
    model = models.build("mlp", (1, 8, 8), 10, seed=0).requires_grad_(requires_grad=False)
    return model, detached(model.named_parameters())


def test_without_gamma_fd_is_local_only_to_the_bit_and_only_logits_travel(tmp_path: Path) -> None:
    fd, ours = ran(tmp_path / "fd", algorithm={"kind": "fd", "gamma": 0})
    alone, theirs = ran(tmp_path / "alone", algorithm="local-only")
    _, moved = ran(tmp_path / "moved", algorithm="fd")
    assert fd["by_client"]["own"] == alone["by_client"]["own"]
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert any(
        not torch.equal(value, mine[name]) for mine, new in zip(ours, moved, strict=True) for name, value in new.items()
    )
    numbers = 3 * 4 * (10 * 10 + 10)  # 3 clients, float32, one row of logits and one flag for each class
    for line in (read_rounds(tmp_path / "fd")[-1], read_rounds(tmp_path / "moved")[-1]):
        assert numbers <= (line.bytes_up or 0) < numbers + 3 * 2000
        assert numbers <= (line.bytes_down or 0) < numbers + 3 * 2000


def test_fd_sends_the_means_of_the_logits_of_the_clients_own_model(settings: Any) -> None:
    model, params = network()
    inputs, labels = torch.randn(12, 1, 8, 8, generator=DRAW), torch.tensor([0, 0, 0, 4, 4, 7] * 2)
    server = first_state(FD(), params)
    counts = tuple(torch.bincount(labels, minlength=10).tolist())
    task = LocalTask(1, 0, 1, 12, settings(), server.params, server.broadcast, class_counts=counts)
    trained = Trained({}, {}, 1, 0.0, feature_sums(model, params, inputs, labels), personal=params)
    sent = FD().finish(task, trained).payloads["logits"]
    for one in range(10):
        mine = model(inputs)[labels == one]
        wanted = mine.mean(0) if len(mine) else torch.zeros(10)
        assert torch.allclose(sent["means"][one], wanted, atol=1e-6)
    assert sent["held"].tolist() == [1, 0, 0, 0, 1, 0, 0, 1, 0, 0]


def test_fd_targets_are_those_of_others_and_classes_without_holders_stay() -> None:
    def row(*held: float) -> dict[str, torch.Tensor]:
        flags = torch.tensor(held)
        return {"means": flags[:, None] * torch.randn(3, 3, generator=DRAW), "held": flags}

    def rows(**of: Any) -> RoundPayloads:
        chosen = list(of.values())
        stacked = {name: torch.stack([one[name] for one in chosen]) for name in ("means", "held")}
        return RoundPayloads([int(name[1:]) for name in of], {"logits": stacked})

    algorithm, layer = FD(), OtherLogits(FD())
    layer.inner = SimpleNamespace(sent_to=lambda client, server: server)  # type: ignore[assignment]
    start = algorithm.init({"weight": torch.zeros(3, 4)})
    begun = OtherLogits.begun(SimpleNamespace(num_clients=4), torch.nn.Identity(), start)
    first = {"c0": row(1, 1, 0), "c1": row(1, 0, 0), "c3": row(1, 1, 0)}
    server = algorithm.learned(begun, rows(**first))
    second = {"c0": row(0, 1, 0), "c2": row(0, 1, 0)}
    server = algorithm.learned(server, rows(**second))
    found = {client: layer.sent_to(client, server).broadcast["others"] for client in range(4)}
    for client, others in found.items():
        assert others["known"].tolist() == [1, 1, 0]  # nobody ever had class 2
        for one, last in ((0, first), (1, second)):  # class 0 stays as it was after the first round
            held = [each["means"][one] for name, each in last.items() if name != f"c{client}" and each["held"][one]]
            assert torch.allclose(others["logits"][one], torch.stack(held).mean(0), atol=1e-6)
    alone = algorithm.learned(
        OtherLogits.begun(SimpleNamespace(num_clients=4), torch.nn.Identity(), start), rows(c1=row(1, 0, 0))
    )
    assert layer.sent_to(1, alone).broadcast["others"]["known"].tolist() == [0, 0, 0]
    assert layer.sent_to(0, alone) is layer.sent_to(2, alone)


def means(held: list[list[float]], size: int = 4) -> RoundPayloads:
    """Return the mean features of clients, and their sums for two records of each class."""
    flags = torch.tensor(held)
    features = flags[:, :, None] * torch.randn(*flags.shape, size, generator=DRAW)
    payload = {"means": features, "held": flags, "sums": 2 * features, "counts": 2 * flags}
    return RoundPayloads(range(len(held)), {"features": payload})


def test_the_server_of_fedgh_takes_steps_of_sgd_on_all_means() -> None:
    params = {"0.weight": torch.randn(4, 5, generator=DRAW), "1.weight": torch.randn(3, 4, generator=DRAW)}
    params["1.bias"] = torch.randn(3, generator=DRAW)
    algorithm, rows = FedGH(head_steps=7, head_rate=0.3), means([[1, 1, 0], [0, 1, 0]])
    found = algorithm.learned(ServerState({}, algorithm.init(params).broadcast), rows).broadcast["head"]
    head = torch.nn.Linear(4, 3)
    head.load_state_dict({"weight": params["1.weight"], "bias": params["1.bias"]})
    steps = torch.optim.SGD(head.parameters(), lr=0.3)
    features = rows.payloads["features"]["means"]
    inputs, labels = torch.stack([features[0, 0], features[0, 1], features[1, 1]]), torch.tensor([0, 1, 1])
    for _ in range(7):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(head(inputs), labels).backward()
        steps.step()
    assert torch.allclose(found["weight"], head.weight, atol=1e-5)
    assert torch.allclose(found["bias"], head.bias, atol=1e-5)


def test_clients_of_fedgh_begin_with_the_head_of_the_server_and_their_own_body(settings: Any) -> None:
    _, params = network()
    server = first_state(FedGH(), params)
    head = {name: value + 1 for name, value in server.broadcast["head"].items()}
    task = LocalTask(1, 0, 1, 9, settings(), params, {"head": head})
    begun = FedGH().start(task, None).params  # type: ignore[arg-type]
    assert list(begun) == list(params)
    for name, value in begun.items():
        assert torch.equal(value, params[name] + 1 if name.startswith("5.") else params[name])


def test_the_server_of_fedtgp_lowers_the_contrast_and_keeps_classes_without_holders() -> None:
    algorithm, rows = FedTGP(server_steps=50, server_rate=0.1), means([[1, 1, 0], [0, 1, 0], [1, 0, 0]])
    server = first_state(algorithm, {"0.weight": torch.zeros(4, 5), "1.weight": torch.zeros(3, 4)})
    held = rows.payloads["features"]["held"] > 0
    inputs, labels = rows.payloads["features"]["means"][held], held.nonzero()[:, 1]
    learned = algorithm.learned(server, rows)
    margin = margin_of(inputs, labels)
    centres = [inputs[labels == one].mean(0) for one in (0, 1)]
    assert margin == pytest.approx(float((centres[0] - centres[1]).norm()), rel=1e-5)
    assert margin_of(1000 * inputs, labels) == LARGEST_MARGIN
    assert margin_of(inputs[:1], labels[:1]) == 0
    before, after = (contrast(prototypes_of(one.memory["g"]), inputs, labels, margin) for one in (server, learned))
    assert after < 0.7 * before
    old, new = (one.broadcast["prototypes"]["z"] for one in (server, learned))
    assert torch.equal(new[2], old[2])
    assert torch.equal(new[:2], prototypes_of(learned.memory["g"])[:2])
    distance = (inputs[0] - prototypes_of(server.memory["g"])).norm(dim=1)
    logits = -(distance + margin * torch.tensor([1.0, 0, 0]))
    wanted = torch.nn.functional.cross_entropy(logits[None], torch.tensor([0]))
    assert torch.allclose(contrast(prototypes_of(server.memory["g"]), inputs[:1], labels[:1], margin), wanted)


@pytest.mark.parametrize("kind", ["fd", "fedgh", "fedtgp"])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"aggregator": "global-dp", "sampler": "poisson:0.5"}, "aggregator=global-dp: its server reads"),
        (
            {"aggregator": {"kind": "distributed-dp", "noise_multiplier": 1.0}, "sampler": "poisson:0.5"},
            "aggregator=distributed-dp: its server reads",
        ),
        ({"aggregator": "secure-sum"}, "aggregator=secure-sum: its server reads"),
        ({"local": {"privacy": {"kind": "dp-sgd", "noise_multiplier": 1.0}}}, "local.privacy=dp-sgd: .*without noise"),
        ({"server": "fedbuff"}, "server=fedbuff: .*one state"),
    ],
)
def test_what_hides_or_should_protect_single_means_is_refused(kind: str, settings: Any, reason: str) -> None:
    with pytest.raises(UserError, match=f"{reason}.*leave .* out"):
        experiment_from({**SETTINGS, "algorithm": kind, **settings})
