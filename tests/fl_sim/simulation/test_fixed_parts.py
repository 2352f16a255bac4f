"""What of a model nobody trains stays as it is, bit for bit: frozen parameters, and BatchNorm in evaluation mode."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.settings import kinds_of
from fl_sim.simulation.run import run
from strategies.algorithm import Averaging
from strategies.fedproto import FedProto

HERE = __name__
HIDDEN, CLASSES = 24, 10


class Body(nn.Module):
    """A fixed body, as a frozen parameter or as a buffer, and a head; the head is called so, or is a last layer."""

    def __init__(self, classes: int, *, frozen_parameter: bool) -> None:
        super().__init__()
        body = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(0)) / 8
        if frozen_parameter:
            self.body = nn.Parameter(body, requires_grad=False)
        else:
            self.register_buffer("body", body)
        self.head = nn.Linear(HIDDEN, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(inputs.flatten(1) @ self.body))
        return logits


def as_parameter(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Body(classes, frozen_parameter=True)


def as_buffer(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Body(classes, frozen_parameter=False)


def frozen_head(shape: tuple[int, ...], classes: int) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))
    model[3].requires_grad_(requires_grad=False)
    return model


def fresh_each_time(shape: tuple[int, ...], classes: int) -> nn.Module:
    model = Body(classes, frozen_parameter=True)
    nn.init.normal_(model.body, generator=torch.Generator().manual_seed(int(torch.seed() % 2**31)))
    return model


def trained(out: Path, model: str, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    base = {
        "data": "digits", "partition": "dirichlet:0.5", "clients": 4, "rounds": 2, "engine": "inprocess",
        "local": {"learning_rate": 0.1, "weight_decay": 0.1, "batch_size": 128},
    }  # fmt: skip
    result = run(experiment_from({**base, "model": f"{HERE}:{model}", **changes}), out)
    return load_file(out / "model.safetensors"), result


def expect_the_same(tmp_path: Path, **changes: Any) -> None:
    parameter, said = trained(tmp_path / "parameter", "as_parameter", **changes)
    buffer, other = trained(tmp_path / "buffer", "as_buffer", **changes)
    assert torch.equal(parameter["body"], Body(CLASSES, frozen_parameter=True).body)
    assert torch.equal(parameter["head.weight"], buffer["head.weight"])
    assert torch.equal(parameter["head.bias"], buffer["head.bias"])
    assert said["num_parameters"] == other["num_parameters"] == (HIDDEN + 1) * CLASSES
    assert said["bytes"] == other["bytes"]


KINDS = sorted(
    one.model_fields["kind"].default
    for one in kinds_of("algorithm").values()
    if issubclass(one, Averaging)
    and not hasattr(one, "sends")  # the model here is a head alone
    and not hasattr(one, "size_of")  # which refuse frozen parameters
    and not hasattr(one, "further_outputs")  # whose head is wider
    and "model" not in getattr(one, "starts_with", {})  # which train adapters
)


@pytest.mark.parametrize("algorithm", KINDS)
def test_a_frozen_parameter_is_to_every_algorithm_what_a_buffer_is(algorithm: str, tmp_path: Path) -> None:
    expect_the_same(tmp_path, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["fedper", "fedrep", "fedbabu", "lg-fedavg"])
def test_a_model_that_is_a_head_alone_has_no_part_that_could_be_personal(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"head\.bias\) belong to the head: train a part of the body too"):
        trained(tmp_path, "as_parameter", algorithm=algorithm)


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(
    "changes",
    [
        {"aggregator": {"kind": "global-dp", "noise": "seeded", "clipping_norm": 0.1}},
        {"aggregator": {"kind": "global-dp", "noise": "seeded", "adaptive_clipping": {}}, "compress": "rand-k:0.25"},
        {"aggregator": {"kind": "global-dp", "noise": "seeded", "clipping_norm": 0.1}, "algorithm": "scaffold"},
        {"aggregator": "trimmed-mean:0.3"},
        {"aggregator": "krum:0"},
        {"compress": "top-k:0.1"},
        {"compress": "qsgd:3"},
        {"compress": "powersgd:1"},
        {"local": {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1}},
        {"calibrate": "ccvr:20"},
        {"preprocess": {"kind": "da-fl", "generator": "mean-embedding", "noise": "seeded", "server_epochs": 1}},
        {"server": {"kind": "fedbuff", "buffer": 2, "concurrency": 3}, "devices": "constant"},
        {"attack": "sign-flip:1"},
    ],
    ids=str,
)  # fmt: skip
def test_and_to_all_that_changes_what_clients_send(changes: dict[str, Any], tmp_path: Path) -> None:
    expect_the_same(tmp_path, **changes)


@pytest.mark.cluster
def test_and_on_ray(tmp_path: Path) -> None:
    alone, _ = trained(tmp_path / "alone", "as_parameter", algorithm="scaffold")
    spread, _ = trained(tmp_path / "spread", "as_parameter", algorithm="scaffold", engine={"kind": "ray", "actors": 2})
    assert all(torch.equal(alone[name], spread[name]) for name in alone)


def test_a_stack_of_clients_leaves_it_alone(tmp_path: Path) -> None:
    alone, _ = trained(tmp_path / "alone", "frozen_head", engine={"kind": "inprocess", "stack": 1})
    stacked, said = trained(tmp_path / "stacked", "frozen_head", engine={"kind": "inprocess", "stack": 4})
    assert "4 clients" in said["trainer"]
    assert torch.equal(alone["3.weight"], stacked["3.weight"])
    assert torch.allclose(alone["1.weight"], stacked["1.weight"], atol=1e-5)
    assert not torch.equal(stacked["1.weight"], frozen_head((64,), CLASSES)[1].weight)


def test_a_frozen_head_is_refused_where_it_would_have_to_learn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"algorithm fedproto needs a trainable head .* is frozen"):
        trained(tmp_path / "a", "frozen_head", algorithm=FedProto())
    with pytest.raises(UserError, match=r"the method needs a head that .* or is frozen"):
        trained(tmp_path / "b", "frozen_head", calibrate="ccvr")


def test_a_frozen_parameter_that_every_process_would_draw_for_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"differs between two calls of its factory with the same seed \(in body\)"):
        trained(tmp_path / "run", "fresh_each_time")


class Frozen(nn.Module):
    """A pretrained norm that stays in evaluation mode, a norm that is trained if asked for, and a head."""

    def __init__(self, width: int, classes: int, *, written_out: bool, second: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.Identity() if written_out else nn.BatchNorm1d(width, affine=False)
        if isinstance(self.norm, nn.BatchNorm1d):
            self.norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
            self.norm.running_var.fill_(4.0)  # type: ignore[union-attr]
        self.other: nn.Module = nn.BatchNorm1d(width) if second else nn.Identity()
        self.head = nn.Linear(width, classes)

    def train(self, mode: bool = True) -> "Frozen":  # noqa: FBT001, FBT002 (torch's own)
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.flatten(1)
        rows = (rows - 3) / math.sqrt(4 + 1e-5) if isinstance(self.norm, nn.Identity) else self.norm(rows)
        logits: torch.Tensor = self.head(self.other(rows))
        return logits


def kept(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Frozen(math.prod(shape), classes, written_out=False, second=False)


def written_out(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Frozen(math.prod(shape), classes, written_out=True, second=False)


def kept_beside_another(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Frozen(math.prod(shape), classes, written_out=False, second=True)


def another_alone(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Frozen(math.prod(shape), classes, written_out=True, second=True)


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(
    ("norms", "plain", "changes"),
    [
        ("kept", "written_out", {}),
        ("kept", "written_out", {"algorithm": "fedsam"}),
        ("kept", "written_out", {"algorithm": "moon"}),
        ("kept", "written_out", {"aggregator": {"kind": "global-dp", "noise": "seeded"}, "sampler": "full"}),
        ("kept_beside_another", "another_alone", {"local": {"batch_norm": "average", "learning_rate": 0.1}}),
        ("kept_beside_another", "another_alone", {"local": {"batch_norm": "personal", "learning_rate": 0.1}}),
    ],
    ids=str,
)
def test_a_norm_that_a_model_keeps_in_evaluation_mode_is_arithmetic(
    norms: str, plain: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    found, _ = trained(tmp_path / "norm", norms, **changes)
    wanted, _ = trained(tmp_path / "plain", plain, **changes)
    assert set(found["norm.running_mean"].tolist()) == {3.0}
    assert set(found["norm.running_var"].tolist()) == {4.0}
    assert float(found["norm.num_batches_tracked"]) == 0
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-4), name


def test_without_a_norm_that_is_trained_there_are_no_statistics_to_average(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation mode.* leave local\.batch_norm"):
        trained(tmp_path / "run", "kept", local={"batch_norm": "average"})
