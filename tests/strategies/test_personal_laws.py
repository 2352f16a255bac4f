"""Methods with a model of the client's own: fixed points on quadratic losses, and identities to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import fl_sim
from strategies.ditto import Ditto
from strategies.fedavg import FedAvg
from strategies.mr_mtl import MRMTL

A, B = (1.0, 3.0), (0.0, 1.0)
"""Two clients with the losses a/2 (w - b)^2 and equal weights: the minimum of their mean is at 0.75."""


@pytest.fixture
def shards(records: Any) -> list[Any]:
    return [records((a, b, 0)) for a, b in zip(A, B, strict=True)]


def ended(simulated: Any, rounds: int = 300) -> Any:
    for _ in range(rounds):
        simulated.round()
    return simulated


def own(simulated: Any) -> list[float]:
    return [float(state["own-model"]["w"]) for state in simulated.states]


@pytest.mark.parametrize("strength", [0.1, 1.0, 2.0])
def test_ditto_ends_between_the_clients_minimum_and_the_global_one(
    bowl: Any, federation: Any, shards: Any, settings: Any, strength: float
) -> None:
    """v = (a b + strength w) / (a + strength), and w is FedAvg's."""
    simulated = ended(federation(Ditto(strength=strength), bowl(0.4), shards, settings(0.2)))
    assert simulated.w == pytest.approx(0.75, abs=1e-6)
    expected = [(a * b + strength * 0.75) / (a + strength) for a, b in zip(A, B, strict=True)]
    assert own(simulated) == pytest.approx(expected, abs=1e-6)


def test_ditto_of_strength_1_ends_where_the_published_law_says(
    bowl: Any, federation: Any, shards: Any, settings: Any
) -> None:
    simulated = ended(federation(Ditto(strength=1.0), bowl(0.4), shards, settings(0.2)))
    assert own(simulated) == pytest.approx([0.375, 0.9375], abs=1e-6)


def test_mr_mtl_of_strength_1_ends_at_3_and_9_tenths(bowl: Any, federation: Any, shards: Any, settings: Any) -> None:
    simulated = ended(federation(MRMTL(strength=1.0), bowl(0.4), shards, settings(0.2)))
    assert own(simulated) == pytest.approx([0.3, 0.9], abs=1e-6)
    assert simulated.w == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize("algorithm", [Ditto(strength=0.0), MRMTL(strength=0.0)], ids=["ditto", "mr-mtl"])
def test_without_strength_everybody_ends_at_its_own_minimum(
    bowl: Any, federation: Any, shards: Any, settings: Any, algorithm: Any
) -> None:
    assert own(ended(federation(algorithm, bowl(0.4), shards, settings(0.05)))) == pytest.approx(B, abs=1e-6)


@pytest.mark.parametrize("strength", [0.0, 0.5, 3.0])
def test_dittos_global_model_is_fedavgs_to_the_bit(
    bowl: Any, federation: Any, shards: Any, settings: Any, strength: float
) -> None:
    ditto, fedavg = (
        ended(federation(one, bowl(0.4), shards, settings(0.05, 0.9)), 20)
        for one in (Ditto(strength=strength), FedAvg())
    )
    assert ditto.w == fedavg.w


SMALL = {
    "data": "digits", "partition": "label-2", "clients": 5, "model": "mlp", "rounds": 4,
    "local": {"learning_rate": 0.1, "batch_size": 32}, "evaluate": {"clients": "class-shares", "personal_every": 2},
}  # fmt: skip


def ran(out: Path, **settings: Any) -> tuple[dict[str, Any], Any]:
    """Return the final tensors of a run, and the table of its clients."""
    local = {**SMALL["local"], **settings.pop("local", {})}  # type: ignore[dict-item]  # it is a table
    fl_sim.run({**SMALL, **settings, "local": local}, out=out, progress=False)
    table = np.genfromtxt(out / "clients.csv", delimiter=",", names=True)
    return load_file(out / "model.safetensors"), table


def names_of_all() -> str:
    return ",".join(f"{layer}.{part}" for layer in (1, 3, 5) for part in ("weight", "bias"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"algorithm": "fedper"}, {"local": {"personal": "head"}}),
        ({"algorithm": "lg-fedavg"}, {"local": {"personal": "body"}}),
        ({"algorithm": "local-only"}, {"algorithm": {"kind": "ditto", "strength": 0}}),
        ({"algorithm": "local-only"}, {"algorithm": {"kind": "mr-mtl", "strength": 0}}),
        ({"algorithm": "local-only"}, {"local": {"personal": names_of_all()}}),
    ],
    ids=["fedper", "lg-fedavg", "ditto", "mr-mtl", "all names"],
)
def test_clients_own_models_are_the_same(one: dict[str, Any], other: dict[str, Any], tmp_path: Path) -> None:
    (_, left), (_, right) = ran(tmp_path / "one", **one), ran(tmp_path / "other", **other)
    for name in ("test_records", "own_accuracy"):
        assert np.array_equal(left[name], right[name]), name
    assert left["own_accuracy"].mean() > 0.8
