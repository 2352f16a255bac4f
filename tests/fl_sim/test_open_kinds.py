"""Kinds of the user's own: by import path, from a table, by a package's short name, and as objects from Python."""

import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import tomli_w
from numpy.typing import NDArray
from pydantic import ConfigDict
from torch import nn

from clients.dafl.noisy_moments import MeanEmbedding
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.kinds import kind_of, short_form, title_of
from fl_sim.params import scale
from fl_sim.settings import Settings
from fl_sim.simulation.engine_choice import choose
from fl_sim.simulation.rounds import Rounds
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import RunLog
from fl_sim.store.run_directory import read_rounds
from fl_sim.types import Aggregate, ClientUpdate, Cohort, LocalTask, Trained
from partitions import LabelK, Scheme
from strategies.aggregators import WeightedMean
from strategies.algorithm import Averaging, Weighting
from strategies.fedavg import FedAvg
from strategies.global_dp import GlobalDP
from strategies.samplers import Coins, Poisson


class Doubled(Averaging):
    """FedAvg that sends ``factor`` times its update."""

    title: ClassVar[str] = "FedDouble"
    factor: float = 2.0

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        update = super().finish(task, trained)
        return ClientUpdate({"delta": scale(update.payloads["delta"], self.factor)}, update.num_examples, update.loss)


class Renamed(FedAvg):
    """A subclass of one of ours, which inherits its kind."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        return Doubled().finish(task, trained)


def test_a_file_may_be_called_like_a_kind_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "feddisco.py").write_text(
        "from strategies.algorithm import Averaging\nclass Mine(Averaging):\n    a: float = 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for text in ("feddisco:Mine:0.25", "feddisco:Mine"):
        assert kind_of(experiment_from({"algorithm": text}).algorithm) == "feddisco:Mine"
    assert kind_of(experiment_from({"algorithm": "feddisco:0.25"}).algorithm) == "feddisco"


@dataclass(frozen=True)
class InOrder(Scheme):
    """Client i holds the i-th part of the records; the first ``skipped`` records belong to nobody."""

    skipped: int = 0

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        return np.array_split(np.arange(self.skipped, len(labels)), num_partitions)


class FirstOnes(Settings):
    """The first ``count`` clients."""

    count: int = 2

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        return np.arange(min(self.count, num_clients))

    def expected_size(self, num_clients: int) -> float:
        return float(min(self.count, num_clients))


class Uniform(Settings):
    """A mean in which every client counts the same."""

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        return WeightedMean().mean(cohort, "uniform")


class Warmup(Settings):
    """The learning rate grows linearly to its full value in ``length`` rounds."""

    length: int = 4

    def factor(self, server_round: int, rounds: int) -> float:
        return min(1.0, server_round / self.length) if self.length else float("nan")


@dataclass(frozen=True)
class Brief(Rounds):
    """Rounds with another warning."""

    def warnings(self, log: RunLog) -> list[str]:
        return [*super().warnings(log), "by a procedure of my own"]


class Mine(Settings):
    """A server with a procedure."""

    procedure: ClassVar[str] = f"{__name__}:Brief"
    patience: int = 1


class Idle(Settings):
    """A server that names no procedure."""

    procedure: ClassVar[str] = ""


class Unfinished(Settings):
    """Lacks all that an algorithm has."""


class Endless(Settings):
    """A student that does not say how many steps it takes."""

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Linear(1, num_classes)

    def train(self, data: Any, model: nn.Module, seed: int, watch: Any = None) -> nn.Module:
        return model


class Loose:
    """No settings at all."""


HERE = __name__
QUICK: dict[str, Any] = {"model": "logistic", "clients": 3, "rounds": 2, "engine": {"kind": "inprocess"}}
FORMS = [
    ("algorithm", Doubled(factor=3.0), {"factor": 3.0}),
    ("partition", InOrder(5), {"skipped": 5}),
    ("sampler", FirstOnes(count=3), {"count": 3}),
    ("aggregator", Uniform(), {}),
    ("server", Mine(patience=2), {"patience": 2}),
]


@pytest.mark.parametrize(("field", "value", "parameters"), FORMS, ids=lambda one: str(one)[:12])
def test_every_form_of_an_own_kind_gives_the_same_experiment(
    field: str, value: Any, parameters: dict[str, Any]
) -> None:
    path = f"{HERE}:{type(value).__name__}"
    taken = Experiment(**{field: value})
    assert getattr(taken, field) is value
    assert kind_of(value) == path
    assert experiment_from({field: {"kind": path, **parameters}}) == taken
    assert experiment_from({field: short_form(value)}) == taken
    overrides = [f"{field}={path}", *(f"{field}.{name}={given}" for name, given in parameters.items())]
    assert experiment_from(with_overrides({}, overrides)) == taken
    assert experiment_from(with_overrides({}, overrides[::-1])) == taken


@pytest.mark.parametrize(("field", "value", "parameters"), FORMS, ids=lambda one: str(one)[:12])
def test_what_is_written_down_is_read_back_equal(field: str, value: Any, parameters: dict[str, Any]) -> None:
    experiment = Experiment(**{field: value})
    content = experiment.model_dump(mode="json")
    assert content[field] == {"kind": f"{HERE}:{type(value).__name__}", **parameters}
    assert experiment_from(tomllib.loads(tomli_w.dumps(experiment.as_written()))) == experiment
    assert experiment_from(json.loads(experiment.model_dump_json())) == experiment


def test_a_schedule_of_ones_own_sets_the_learning_rates(tmp_path: Path) -> None:
    experiment = experiment_from({**QUICK, "local": {"schedule": f"{HERE}:Warmup:2", "learning_rate": 0.1}})
    assert experiment.local.schedule == Warmup(length=2)
    assert experiment_from(json.loads(experiment.model_dump_json())) == experiment
    run(experiment, tmp_path)
    assert [record.learning_rate for record in read_rounds(tmp_path)] == [0.05, 0.1]
    with pytest.raises(
        RunError, match=r"factor of Warmup failed with ValueError: returned nan in round 1, not a finite"
    ):
        run(experiment_from({**QUICK, "local": {"schedule": {"kind": f"{HERE}:Warmup", "length": 0}}}), tmp_path / "2")


def test_a_package_gives_a_schedule_a_short_name(install_package: Any) -> None:
    install_package("fed-warmup", {"fl_sim.kinds": {"warmup": f"{HERE}:Warmup"}})
    assert experiment_from(with_overrides({}, ["local.schedule=warmup:3"])).local.schedule == Warmup(length=3)


def test_a_server_of_ones_own_proceeds_by_its_procedure(tmp_path: Path, install_package: Any) -> None:
    install_package("fed-server", {"fl_sim.server": {"mine": f"{HERE}:Mine"}})
    result = run(experiment_from({**QUICK, "server": "mine"}), tmp_path / "mine")
    usual = run(experiment_from(QUICK), tmp_path / "usual")
    assert "by a procedure of my own" in result["warnings"]
    assert result["final_accuracy"] == usual["final_accuracy"]
    with pytest.raises(UserError, match=r"server .*:Mine is your own code, and this run promises privacy"):
        experiment_from({**QUICK, "server": "mine", "aggregator": "global-dp"})
    with pytest.raises(UserError, match=r"server .*:Idle has no procedure.*set procedure"):
        experiment_from({**QUICK, "server": f"{HERE}:Idle"})


class Maybe(Averaging):
    """Has a parameter that may be left out."""

    limit: float | None = None


def test_a_parameter_that_is_left_out_is_written_as_that() -> None:
    experiment = Experiment(algorithm=Maybe())
    assert experiment.as_written()["algorithm"] == {"kind": f"{HERE}:Maybe"}
    assert experiment_from(tomllib.loads(tomli_w.dumps(experiment.as_written()))) == experiment
    assert experiment.model_dump()["algorithm"] == {"kind": f"{HERE}:Maybe", "limit": None}


def test_a_subclass_of_one_of_ours_is_its_own_kind() -> None:
    experiment = Experiment(algorithm=Renamed())
    assert type(experiment.algorithm) is Renamed
    assert experiment.model_dump()["algorithm"] == {"kind": f"{HERE}:Renamed"}
    assert type(experiment_from(experiment.model_dump()).algorithm) is Renamed
    assert title_of(Renamed()) == "Renamed"


def test_one_of_ours_by_its_path_is_one_of_ours() -> None:
    assert experiment_from({"partition": "partitions:LabelK:2"}).partition == LabelK(2)
    assert Experiment(partition=LabelK(2)).model_dump()["partition"] == {"kind": "label-k", "k": 2}


@pytest.mark.parametrize("group", ["fl_sim.kinds", "fl_sim.algorithm"])
def test_a_package_gives_its_kinds_short_names(install_package: Any, group: str) -> None:
    install_package("fed-double", {group: {"feddouble": f"{HERE}:Doubled"}})
    assert experiment_from({"algorithm": {"kind": "feddouble", "factor": 3}}).algorithm == Doubled(factor=3.0)
    assert experiment_from(with_overrides({}, ["algorithm=feddouble", "algorithm.factor=3"])).algorithm == Doubled(
        factor=3.0
    )
    assert experiment_from({"algorithm": "feddouble:3"}) == Experiment(algorithm=Doubled(factor=3.0))
    assert experiment_from({"algorithm": "feddouble"}).model_dump()["algorithm"]["kind"] == f"{HERE}:Doubled"


def test_a_file_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_kinds.py").write_text(
        "from strategies.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    rate: float = 0.5\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_own_kinds", raising=False)
    experiment = experiment_from({"algorithm": "my_own_kinds:Mine:0.25"})
    assert experiment.model_dump()["algorithm"] == {"kind": "my_own_kinds:Mine", "rate": 0.25}


def _local() -> FedAvg:
    class Inside(FedAvg):
        pass

    return Inside()


class Melting(Averaging):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=False)


class Pairing(Averaging):
    partner: "Nobody" = None  # type: ignore[name-defined]  # noqa: F821 (a mistake of the user's)


class Thing:
    pass


class Holding(Averaging):
    thing: Thing | None = None


class Halving(Averaging):
    share: float = 0.5  # strategies.algorithm.Sharing asks for a method of this name


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("algorithm", f"{HERE}:Pairing", "is not supported in settings: name 'Nobody' is not defined$"),
        ("algorithm", f"{HERE}:Holding", "is not supported in settings: Unable to generate .* for <class '.*Thing'>$"),
        (
            "algorithm",
            f"{HERE}:Halving",
            "Halving' has a field 'share', which is the name of an optional method: rename the field$",
        ),
        ("algorithm", "nowhere.fed:FedDyn", "cannot be imported: there is no module 'nowhere'"),
        ("algorithm", "fedprx:Mine", r"did you mean 'fedprox'\?"),
        ("algorithm", f"{HERE}:Nothing", "Nothing"),
        ("algorithm", f"{HERE}:Unfinished", "Unfinished' lacks plan, finish, weighting, init, merge; an algorithm of"),
        (
            "algorithm",
            f"{HERE}:Loose",
            "Loose' is no frozen settings class; an algorithm of your own",
        ),
        ("algorithm", f"{HERE}:Melting", "Melting' is no frozen settings class"),
        ("algorithm", f"{HERE}:HERE", "not a class"),
        ("algorithm", {"kind": f"{HERE}:Doubled", "factr": 1}, r"unknown key 'factr' \(did you mean 'factor'\?\)"),
        ("algorithm", {"kind": f"{HERE}:Doubled", "factor": "x"}, "factor = 'x': input should be a valid number"),
        ("algorithm", f"{HERE}:Unfinished:1", "lacks"),
        ("aggregator", f"{HERE}:Uniform:1", "takes no parameter"),
        ("algorithm", Doubled, r"give an object, Doubled\(\)"),
        ("algorithm", Loose(), "of type Loose; an algorithm of your own is a frozen class of settings"),
        ("algorithm", FirstOnes(), "FirstOnes' lacks plan, finish"),
        ("algorithm", _local(), "Inside is defined inside a function"),
        ("engine", f"{HERE}:FirstOnes", "unknown engine .*valid: auto, inprocess, ray$"),
        ("engine", FirstOnes(), "of type FirstOnes$"),
    ],
)
def test_what_is_no_such_kind_is_refused_in_one_line(field: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        experiment_from({field: value})
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(field)


class OftenButNotSaid(Poisson):
    """Takes part twice as often as it says."""

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        return np.union1d(
            super().sample(num_clients, coins, server_round), super().sample(num_clients, coins, server_round)
        )


class Quiet(GlobalDP):
    """Global DP without its noise."""

    def event(self) -> Any:
        return GlobalDP(noise_multiplier=10.0).event()


class Unasked(Quiet):
    """Global DP without its noise, and without its refusals."""

    def check(self, experiment: Any) -> None:
        return


class EveryClass(LabelK):
    """One of ours, dealt otherwise."""


class OwnEmbedding(MeanEmbedding):
    """One of ours under another name."""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": FirstOnes(), "aggregator": "global-dp"}, "FirstOnes cannot run .* not known"),
        ({"sampler": OftenButNotSaid(), "aggregator": "global-dp"}, "OftenButNotSaid cannot run under"),
        ({"aggregator": Quiet(), "clients": 20}, "Quiet changes global-dp, so its privacy guarantee is not known"),
        ({"algorithm": "pate", "partition": EveryClass()}, "EveryClass: .* may change the shards of several teachers"),
        ({"algorithm": "pate", "partition": InOrder()}, "InOrder: .* may change the shards of several teachers"),
    ],
)  # fmt: skip
def test_where_an_epsilon_would_rest_on_code_that_nobody_here_has_proven_it_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        experiment_from(settings)


def test_of_an_aggregator_that_refuses_nothing_any_more_no_epsilon_is_stated(tmp_path: Path) -> None:
    settings = {"aggregator": Unasked(noise="seeded"), "clients": 20, "rounds": 1, "engine": "inprocess"}
    with pytest.raises(UserError, match="Unasked changes global-dp, so its privacy guarantee is not known"):
        run(experiment_from(settings), tmp_path / "run")
    assert not list(tmp_path.rglob("result.json"))


def test_a_student_says_how_many_steps_it_takes() -> None:
    with pytest.raises(UserError, match="Endless' lacks steps"):
        experiment_from({"algorithm": {"kind": "pate", "student": Endless()}})


def test_without_noise_teachers_may_be_split_in_any_way() -> None:
    plain = {"kind": "pate", "labelling": {"mechanism": "none"}}
    assert experiment_from({"algorithm": plain, "partition": InOrder()}).partition == InOrder()


def test_of_an_own_generator_the_statement_says_whose_word_its_cost_is(tmp_path: Path) -> None:
    preprocess = {"kind": "da-fl", "generator": OwnEmbedding(frequencies=10), "gamma": 0.2}
    settings = {"preprocess": preprocess, "clients": 2, "partition": "iid", "rounds": 1, "engine": "inprocess",
                "model": "logistic"}  # fmt: skip
    result = run(experiment_from(settings), tmp_path)
    [statement] = result["privacy"]
    assert f"The generator {HERE}:OwnEmbedding is not part of fl-sim" in (statement["does_not_cover"])
    assert result["preprocess"]["generator"] == f"{HERE}:OwnEmbedding"


class Kinded(Averaging):
    """An own kind that gives itself a name is known by its import path all the same."""

    kind: Literal["kinded"] = "kinded"


def test_a_name_that_a_class_gives_itself_is_not_its_kind() -> None:
    experiment = Experiment(algorithm=Kinded())
    assert experiment.model_dump()["algorithm"] == {"kind": f"{HERE}:Kinded"}
    assert experiment_from(experiment.model_dump()) == experiment


def test_what_a_script_defines_stays_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kinded, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Kinded", Kinded, raising=False)
    settings = {"algorithm": Kinded(), "model": "dafl-cnn"}
    with pytest.raises(UserError, match="engine=ray: Kinded is defined in the running script"):
        choose(job_of(experiment_from({**settings, "engine": "ray"})))
    engine, why = choose(job_of(experiment_from({**settings, "engine": "auto"})))
    assert (engine.kind, "other processes cannot import Kinded" in why) == ("inprocess", True)
