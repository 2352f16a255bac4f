"""What wraps every round: the order of layers, one that does nothing, and one of somebody else's."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.params import scale
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.types import Aggregate, Cohort, ServerState
from strategies.aggregators import WeightedMean
from strategies.algorithm import Algorithm
from strategies.attacks import HostileUpdates
from strategies.layer import Layer, found_in, layer_kinds
from strategies.private import PrivateRounds


class Nothing(Layer):
    """Hands all on."""

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Layer:
        return cls()


class Halving(Nothing):
    """Halves what the inner layers make of a round, and numbers its rounds in the log as if they had a clock."""

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        mean = self.inner.aggregate(cohort, algorithm, server)
        assert mean is not None
        return replace(mean, payloads={name: scale(params, 0.5) for name, params in mean.payloads.items()})

    def metrics(self) -> Mapping[str, Any]:
        return {**self.inner.metrics(), "virtual_seconds": 7.0}


class PlainMean(WeightedMean):
    """The mean, with a layer around it that does nothing."""

    layer: ClassVar[str] = f"{__name__}:Nothing"


class HalfMean(WeightedMean):
    """The mean, with a layer around it that halves it."""

    layer: ClassVar[str] = f"{__name__}:Halving"


QUICK = {"model": "logistic", "clients": 4, "rounds": 1, "partition": "iid", "engine": "inprocess"}


def _moved(out: Path, **settings: Any) -> torch.Tensor:
    """Return where a run ends, as a vector."""
    run(experiment_from({**QUICK, **settings}), out)
    return _vector(load_file(out / "model.safetensors"))


def _vector(params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([params[name].detach().flatten() for name in sorted(params)]).double()


def test_layers_are_put_around_the_rounds_in_the_stated_order() -> None:
    private = {"aggregator": "global-dp"}
    assert layer_kinds(experiment_from({})) == []
    assert layer_kinds(experiment_from(private)) == [PrivateRounds]
    assert layer_kinds(experiment_from({"attack": "sign-flip"})) == [HostileUpdates]
    both = experiment_from({"attack": "sign-flip", "aggregator": PlainMean()})
    assert [kind.__name__ for kind in layer_kinds(both)] == ["Nothing", "HostileUpdates"]


def test_a_layer_that_changes_nothing_changes_no_bit(tmp_path: Path) -> None:
    plain, wrapped = _moved(tmp_path / "plain"), _moved(tmp_path / "wrapped", aggregator=PlainMean())
    assert torch.equal(plain, wrapped)
    lines = [read_rounds(tmp_path / name) for name in ("plain", "wrapped")]
    assert [replace(one, seconds=None) for one in lines[0]] == [replace(one, seconds=None) for one in lines[1]]


@pytest.mark.parametrize("attack", ["none", "sign-flip:1"])
def test_a_layer_of_ones_own_takes_part_in_every_round(tmp_path: Path, attack: str) -> None:
    """It halves the step of the whole cohort, hostile clients among it, and has its say in the log."""
    start = experiment_from(QUICK)
    first = _vector(dict(job_of(start).model().named_parameters()))
    whole = _moved(tmp_path / "whole", attack=attack) - first
    half = _moved(tmp_path / "half", attack=attack, aggregator=HalfMean()) - first
    torch.testing.assert_close(half, whole / 2, rtol=1e-4, atol=1e-7)
    assert [record.virtual_seconds for record in read_rounds(tmp_path / "half")] == [7.0]


def test_a_layer_that_no_run_can_make_is_told_what_it_lacks(tmp_path: Path) -> None:
    class Unmade(Layer):
        """Lacks `of`."""

        def __init__(self, needs: int) -> None:
            self.needs = needs

    with pytest.raises(NotImplementedError, match="layer Unmade has an __init__: define the classmethod `of`"):
        Unmade.of(None, tmp_path, {})


def test_a_layer_is_found_among_those_within_it() -> None:
    inner, outer = Nothing(), Halving()
    outer.inner = inner
    assert found_in(outer, Halving) is outer
    assert found_in(inner, Nothing) is inner
