"""An experiment as a value: from text and back, and how its parts are wired."""

import math
from itertools import permutations
from pathlib import Path

import pytest

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.groups import Cosine, Ray
from fl_sim.experiment.job import resolved
from fl_sim.seeding import rng
from fl_sim.settings import read_table
from fl_sim.store import run_directory
from partitions import Dirichlet, LabelK
from strategies.aggregators import WeightedMean
from strategies.fedavg import Centralized, FedAvg
from strategies.fedprox import FedProx
from strategies.samplers import FixedSize, Poisson
from strategies.scaffold import Scaffold
from strategies.server_opt import FedYogi


def _made(*overrides, table=None):
    return experiment_from(with_overrides(table or {}, list(overrides)))


def test_no_settings_are_fedavg_on_one_label_digits():
    made = _made()
    assert made == Experiment()
    assert (made.data, made.partition, made.algorithm, made.clients) == ("digits", LabelK(k=1), FedAvg(), 10)


@pytest.mark.parametrize("overrides", [*permutations(["algorithm=fedprox", "algorithm.mu=0.1", "local.epochs=5"])])
def test_overrides_mean_the_same_in_any_order(overrides):
    made = _made(*overrides)
    assert made.algorithm == FedProx(mu=0.1)
    assert made.local.epochs == 5


@pytest.mark.parametrize(
    ("overrides", "part", "value"),
    [
        (["partition=label-1"], "partition", LabelK(k=1)),
        (["partition=label-2"], "partition", LabelK(k=2)),
        (["partition=dirichlet:0.05"], "partition", Dirichlet(beta=0.05)),
        (["partition=dirichlet", "partition.balanced=true"], "partition", Dirichlet(balanced=True)),
        (["partition.k=3"], "partition", LabelK(k=3)),
        (["algorithm=scaffold:0.5"], "algorithm", Scaffold(server_learning_rate=0.5)),
        (["algorithm=fedyogi", "algorithm.tau=0.1", "algorithm.beta_2=0.9"], "algorithm", FedYogi(tau=0.1, beta_2=0.9)),
        (["algorithm.kind=centralized"], "algorithm", Centralized()),
        (["sampler=poisson:0.1"], "sampler", Poisson(sampling_rate=0.1)),
        (["sampler.cohort_size=4", "sampler=fixed-size"], "sampler", FixedSize(cohort_size=4)),
        (["engine=ray:4"], "engine", Ray(actors=4)),
        (["engine=ray", "engine.cpus=0.5"], "engine", Ray(cpus=0.5)),
        (["aggregator=mean"], "aggregator", WeightedMean()),
    ],
)  # fmt: skip
def test_short_forms_and_keys_inside_groups(overrides, part, value):
    assert getattr(_made(*overrides), part) == value


def test_overrides_lie_over_a_table_and_leave_it_as_it_was():
    table = {"algorithm": "fedprox:1.0", "local": {"epochs": 10, "momentum": 0.5, "schedule": "cosine"}, "rounds": 7}
    made = _made("local.epochs=2", "algorithm.mu=0.25", "local.schedule.final=0.5", table=table)
    assert made.algorithm == FedProx(mu=0.25)
    assert (made.local.epochs, made.local.momentum, made.rounds) == (2, 0.5, 7)
    assert made.local.schedule == Cosine(final=0.5)
    assert table["local"] == {"epochs": 10, "momentum": 0.5, "schedule": "cosine"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rnds=3"], r"unknown key 'rnds' \(did you mean 'rounds'\?\); valid here: data, partition, clients,"),
        (["local.epoch=3"], r"unknown key 'local.epoch' \(did you mean 'epochs'\?\); valid here: epochs, steps, batch"),
        (["algorithm=fedprx"], r"unknown algorithm 'fedprx' \(did you mean 'fedprox'\?\); valid: afl, agnostic-fl, "),
        (["algorithm=fedprox", "algorithm.muu=1"], r"'algorithm.muu' \(did you mean 'mu'\?\); .*: kind, mu$"),
        (["algorithm.mu=0.1"], r"'algorithm.mu' \(here: algorithm=fedprox algorithm.mu=0.01\); valid here: kind$"),
        (["algorithm.kind=fedprx"], r"algorithm needs a kind, .*; got 'fedprx' \(did you mean 'fedprox'\?\)"),
        (["engine=rya"], r"unknown engine 'rya' \(did you mean 'ray'\?\); valid: auto, inprocess, ray"),
        (["partition=dirichlt:1"], r"unknown partition 'dirichlt:1' \(did you mean 'dirichlet'\?\)"),
        (["partition=dirichlet", "partition.betta=1"], r"'partition.betta' .*here: kind, beta, min_size, balanced$"),
        (["local.schedule=stp"], r"unknown local.schedule 'stp' \(did you mean 'step'\?\)"),
        (["local.schedule.every=3"], "unknown key 'local.schedule.every'; valid here: kind$"),
        (["local.learning_rate=nan"], "local.learning_rate = 'nan': input should be a finite number"),
        (["local.learning_rate=inf"], "local.learning_rate = 'inf': input should be a finite number"),
        (["local.learning_rate=0"], "local.learning_rate = '0': input should be greater than 0"),
        (["local.momentum=1"], "local.momentum = '1': input should be less than 1"),
        (["local.epochs=0"], "local.epochs=0 and local.steps=0: clients train for epochs or steps; set one"),
        (["local.steps=5", "local.epochs=2"], "local.epochs=2 and local.steps=5: clients train for epochs or steps"),
        (["local.optimizer=sdg"], "local.optimizer = 'sdg'"),
        (["local.augment=rotate"], "local.augment = 'rotate': input should be 'none', 'crop', 'flip', 'crop-"),
        (["local.optimizer=adam", "local.momentum=0.9"], "momentum=0.9 does not work with local.optimizer=adam"),
        *[([f"algorithm={kind}", "local.optimizer=adamw"], f"{kind} cannot run with local.optimizer=adamw: its? ")
          for kind in ("scaffold", "fednova", "feddyn", "fedspeed", "fedcm", "mofedsam")],
        (["local.label_smoothing=1"], "local.label_smoothing = '1': input should be less than 1"),
        (["local.label_smoothing=0.1", "algorithm=fedlc"], "fedlc cannot run with local.label_smoothing=0.1: its"),
        (["local.clip_norm=-1"], "local.clip_norm = '-1': input should be greater than or equal to 0"),
        (["algorithm=fedprox:nan"], "algorithm.mu = 'nan': input should be a finite number"),
        (["partition=dirichlet:nan"], "beta=nan is outside"),
        (["partition=dirichlet:inf"], "beta=inf is outside"),
        (["round_timeout=inf"], "round_timeout = 'inf': input should be a finite number"),
        (["rounds=0"], "rounds = '0': input should be greater than or equal to 1"),
        (["rounds=ten"], "rounds = 'ten': input should be a valid integer"),
        (["rounds.x=1"], "rounds = {'x': '1'}: input should be a valid integer"),
        (["seed=-1"], "seed = '-1': input should be greater than or equal to 0"),
        (["local=5", "local.epochs=3"], "local is a single value: it has no further settings"),
        (["rounds"], "settings are given as key=value, got 'rounds'; for example rounds=50"),
        (["=3"], "settings are given as key=value, got '=3'"),
        (["sampler=fixed-size:20"], "^sampler fixed-size:20 needs more than the run's 10 clients: set a smaller"),
        (["algorithm=centralized", "sampler=poisson:0.5"], "^algorithm centralized has a single client"),
    ],
)  # fmt: skip
def test_mistakes_name_the_value_and_what_is_valid(overrides, message):
    with pytest.raises(UserError, match=message):
        _made(*overrides)


def test_steps_take_the_place_of_epochs_those_of_the_kind_too():
    for overrides in ([], ["algorithm=pate"]):  # which starts with 50 epochs
        local = _made("local.steps=7", *overrides).local
        assert (local.epochs, local.steps) == (0, 7)
    assert (_made("algorithm=pate").local.epochs, _made("local.epochs=2.0").local.epochs) == (50, 2)
    assert _made("local.epochs=0.5").model_dump(mode="json")["local"]["epochs"] == 0.5


def test_dates_in_a_file_are_a_mistake_like_any_other(tmp_path: Path):
    (tmp_path / "dated.toml").write_text("rounds = 2026-01-01\n")
    with pytest.raises(UserError, match=r"rounds = .*2026.*input should be a valid integer"):
        _made("seed=1", table=read_table(tmp_path / "dated.toml"))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["partition=dirichlet:0.05", "algorithm=fedprox:0.1"],
        ["partition=dirichlet", "partition.min_size=3", "local.schedule=exponential:0.9", "sampler=poisson:0.3"],
        ["partition=feature-noise:0.1", "algorithm=fedmix", "algorithm.records_per_average=7", "engine=ray:2"],
        ["partition=quantity:0.5", "algorithm=fedadam", "local.learning_rate=0.30000000000000004"],
        ["partition=shards:2", "algorithm=centralized", "local.weight_decay=1e-5", "model=mlp"],
        ["local.steps=30", "local.clip_norm=10", "local.label_smoothing=0.1", "local.optimizer=adam"],
        ["local.epochs=0.5", "local.augment=crop-flip"],
    ],
)  # fmt: skip
def test_an_experiment_written_as_toml_or_json_is_read_back_equal(overrides, tmp_path: Path):
    made = resolved(_made(*overrides), None)
    run_directory.write_config(tmp_path, made.model_dump(exclude_none=True))
    assert experiment_from(read_table(tmp_path / "config.toml")) == made
    assert Experiment.model_validate_json(made.model_dump_json()) == made


def test_schedules_match_numbers_by_hand():
    def factors(text, rounds, *inside):
        schedule = _made(f"local.schedule={text}", *inside).local.schedule
        return [schedule.factor(server_round, rounds) for server_round in range(1, rounds + 1)]

    assert factors("constant", 3) == [1.0, 1.0, 1.0]
    assert factors("exponential:0.5", 4) == [1.0, 0.5, 0.25, 0.125]
    assert factors("step:2", 5, "local.schedule.decay=0.1") == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01])
    assert factors("cosine", 4) == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert factors("cosine:0.2", 2) == pytest.approx([1.0, 0.6])


def test_a_cohort_is_drawn_from_the_population_of_the_experiment():
    made = _made("sampler=fixed-size:3", "clients=5")
    assert len(made.sampler.sample(made.num_clients, rng(0, "sampler", 1).random, 1)) == 3
