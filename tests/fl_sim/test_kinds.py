"""What a kind says of itself counts for one of the user's own as for ours: where it fits, what it starts with."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.kinds import Choices
from fl_sim.report.runs import read_run
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.types import Aggregate, Cohort
from partitions import Iid, LabelK
from strategies.aggregators import WeightedMean
from strategies.algorithm import Averaging, Weighting
from strategies.samplers import Everyone, Poisson


class Gathered(Averaging):
    """Plain SGD by one holder of everything: an upper bound of the user's own."""

    is_central: ClassVar[bool] = True
    starts_with: ClassVar[Mapping[str, Any]] = {"partition": "iid", "local": {"momentum": 0.5, "epochs": 2}}

    def check(self, experiment: Choices) -> None:
        if not isinstance(experiment.sampler, Everyone):
            raise ValueError("Gathered has one holder, who is always there: leave sampler out")


@dataclass(frozen=True)
class Guarded:
    """A mean of which the user says that it protects somebody."""

    is_private: ClassVar[bool] = True

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        return WeightedMean().mean(cohort, weighting)


GATHERED = f"{__name__}:Gathered"


@pytest.mark.parametrize("form", [GATHERED, {"kind": GATHERED}, Gathered()], ids=["path", "table", "object"])
def test_other_settings_start_from_what_suits_the_kind_and_the_users_own_values_stay(form: Any) -> None:
    chosen = experiment_from({"algorithm": form, "local": {"epochs": 3}})
    assert (chosen.partition, chosen.local.momentum, chosen.local.epochs) == (Iid(), 0.5, 3)
    assert experiment_from({"algorithm": form, "partition": "label-2"}).partition == LabelK(2)


@pytest.mark.parametrize("form", ["global-dp", "global-dp:0.5", {"kind": "global-dp"}], ids=str)
def test_global_dp_starts_with_poisson_in_every_form(form: Any) -> None:
    assert experiment_from({"aggregator": form}).sampler == Poisson()
    assert experiment_from({"aggregator": form, "sampler": {"sampling_rate": 0.5}}).sampler == Poisson(
        sampling_rate=0.5
    )
    assert experiment_from({"aggregator": form, "sampler": "full"}).sampler == Everyone()


def test_a_kind_refuses_what_it_has_no_place_in() -> None:
    with pytest.raises(UserError, match=r"Gathered .* leave sampler out"):
        experiment_from({"algorithm": GATHERED, "sampler": "poisson:0.5"})


def test_an_algorithm_of_ones_own_may_have_a_single_holder(tmp_path: Path) -> None:
    chosen = experiment_from({"algorithm": GATHERED, "model": "logistic", "rounds": 1, "engine": "inprocess"})
    assert (chosen.clients, chosen.num_clients) == (10, 1)
    result = run(chosen, tmp_path)
    assert (result["partition"], result["clients"], result["is_private"]) == ("centralized", 1, False)


def test_a_run_that_promises_privacy_tells_no_times_and_says_so(tmp_path: Path) -> None:
    chosen = Experiment(aggregator=Guarded(), clients=2, partition=Iid(), model="logistic", rounds=1)
    assert run(chosen, tmp_path)["is_private"] is True
    assert [record.seconds for record in read_rounds(tmp_path)] == [None]
    outcome = read_run(tmp_path).result
    assert outcome is not None
    assert outcome.is_private
