"""The same seed ends in the same bits on every engine, with any number of workers, and over a change of engines."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.native.kernel import load_kernel
from fl_sim.params import detached
from fl_sim.simulation.run import Silent, run
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.types import Params

MODEL = """
from torch import nn

def with_dropout(input_shape, num_classes):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, num_classes)
    )

def native(input_shape, num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.GroupNorm(2, 6), nn.Flatten(),
        nn.Linear(54, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, num_classes)
    )
"""
OWN = "users_models:with_dropout"
CALIBRATED = {"kind": "ccvr", "epsilon": 8.0, "noise": "seeded"}
COMPRESS = {"fedavg": "qsgd", "scaffold": "powersgd"}
SAMPLERS = {"fedavg": "poisson:0.6", "scaffold": "fixed-size:5", "fedmix": "fixed-size:4"}
LABEL_SKEW = [
    "balanced-softmax", "fedcm", "feddisco", "feddyn", "fedexp", "fedlc", "fednova", "fedntd", "fedprox",
    "fedproto", "fedrs", "fedsam", "fedspeed", "fedvls", "mofedsam", "moon",
]  # fmt: skip


def settings(algorithm: str, engine: str | dict[str, Any], model: str = OWN) -> Experiment:
    """An unequal split, partial participation, a model with dropout and BatchNorm; some updates are compressed.

    With SCAFFOLD images are moved, too, BatchNorm stays with clients, and records are held out for validation.
    """
    is_scaffold = algorithm == "scaffold"
    own = {"batch_norm": "personal" if is_scaffold else "average"} if model == OWN else {}
    return experiment_from(
        {
            "data": "digits",
            "partition": "dirichlet:0.3",
            "clients": 8,
            "model": model,
            "algorithm": algorithm,
            "sampler": SAMPLERS.get(algorithm, "full"),
            "compress": COMPRESS.get(algorithm, "none"),
            "calibrate": CALIBRATED if algorithm == "fedmix" else "none",
            "rounds": 4,
            "evaluate": {"validation": 0.2 if is_scaffold else 0},
            "local": {"epochs": 2, "batch_size": 16, "augment": "crop-flip" if is_scaffold else "none", **own},
            "seed": 5,
            "engine": engine,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("engines")
    (made / "users_models.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(made)
        yield made


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Path]:
    """Every algorithm's run in one process."""
    for algorithm in SAMPLERS:
        run(settings(algorithm, "inprocess"), folder / algorithm)
    return {algorithm: folder / algorithm for algorithm in SAMPLERS}


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def distance(left: Params, right: Params) -> float:
    return float(sum((left[name].double() - right[name].double()).pow(2).sum() for name in left)) ** 0.5


class Engines(Silent):
    """Hears which engines are taken."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        self.said.append(engine)


def assert_same_bits(left: Path, right: Path) -> None:
    first, second = weights(left), weights(right)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    rounds = [[vars(record) | {"seconds": 0.0} for record in read_rounds(out)] for out in (left, right)]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) == 4


@pytest.mark.cluster
@pytest.mark.parametrize(("algorithm", "actors"), [("fedavg", 1), ("fedmix", 2)])  # scaffold: below
def test_ray_with_any_number_of_actors_ends_in_the_bits_of_one_process(
    alone: dict[str, Path], one_ray: None, tmp_path: Path, algorithm: str, actors: int
) -> None:
    result = run(settings(algorithm, {"kind": "ray", "actors": actors}), tmp_path / "run")
    assert result["engine"] == "ray"
    assert_same_bits(alone[algorithm], tmp_path / "run")


@pytest.mark.cluster
def test_a_run_that_breaks_off_in_one_engine_and_goes_on_in_another_ends_in_the_same_bits(
    alone: dict[str, Path], one_ray: None, tmp_path: Path
) -> None:
    class Break(Silent):
        def finished_round(self, record: RoundRecord) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings("scaffold", "inprocess"), tmp_path / "run", observer=Break())
    run(settings("scaffold", {"kind": "ray", "actors": 1}), tmp_path / "run")
    assert_same_bits(alone["scaffold"], tmp_path / "run")


@pytest.mark.cluster
@pytest.mark.parametrize(
    "server", [{"kind": "fedbuff", "buffer": 2, "concurrency": 5}, {"deadline": 1.0, "late": "partial"}]
)
def test_the_engines_agree_on_clients_that_start_from_different_models_or_stop_early(
    server: dict[str, Any], one_ray: None, tmp_path: Path
) -> None:
    base = settings("fednova" if "late" in server else "fedavg", "inprocess", "mlp").model_dump()
    base |= {"sampler": "full", "compress": "none", "devices": {"kind": "log-normal", "sigma": 1.0}, "server": server}
    for engine in ("inprocess", "ray:2"):
        run(experiment_from({**base, "engine": engine}), tmp_path / engine)
    assert_same_bits(tmp_path / "inprocess", tmp_path / "ray:2")


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["rotate", "permute-labels"])
def test_the_engines_agree_on_groups_of_clients(kind: str, one_ray: None, tmp_path: Path) -> None:
    base = settings("fedavg", "inprocess", "mlp").model_dump()
    base |= {"partition": {"kind": kind, "k": 4, "over": "dirichlet:0.3"}, "evaluate": {"clients": "class-shares"}}
    for engine in ("inprocess", "ray:2"):
        run(experiment_from({**base, "engine": engine}), tmp_path / engine)
    assert_same_bits(tmp_path / "inprocess", tmp_path / "ray:2")


@pytest.mark.cluster
def test_the_engines_agree_on_shards_that_move(one_ray: None, tmp_path: Path) -> None:
    base = settings("fedavg", "inprocess", "mlp").model_dump()
    base |= {
        "partition": {"kind": "drift", "over": "dirichlet:0.3", "to": "label-2", "first_round": 1, "last_round": 4}
    }
    for engine in ("inprocess", "ray:2"):
        run(experiment_from({**base, "engine": engine}), tmp_path / engine)
    assert_same_bits(tmp_path / "inprocess", tmp_path / "ray:2")


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["dp-sgd", "local-dp"])
def test_the_engines_agree_on_what_clients_make_private(kind: str, one_ray: None, tmp_path: Path) -> None:
    base = settings("fedavg", "inprocess", "mlp").model_dump()
    base["local"] |= {"privacy": {"kind": kind, "noise_multiplier": 1.0, "noise": "seeded"}}
    results = [run(experiment_from({**base, "engine": engine}), tmp_path / engine) for engine in ("inprocess", "ray:2")]
    assert_same_bits(tmp_path / "inprocess", tmp_path / "ray:2")
    assert results[0]["privacy"][0]["epsilon"] == results[1]["privacy"][0]["epsilon"]


@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "algorithm"), [("distributed-dp", "scaffold"), ("distributed-dp-sgd", "fedavgm")])
def test_the_engines_agree_on_sums_of_whole_numbers(kind: str, algorithm: str, one_ray: None, tmp_path: Path) -> None:
    base = settings(algorithm, "inprocess", "mlp").model_dump()
    base |= {"aggregator": {"kind": kind, "noise_multiplier": 1.0, "noise": "seeded"}}
    if kind == "distributed-dp-sgd":
        base["local"] = {"learning_rate": 0.1}
    base |= {"sampler": "full", "compress": "none", "evaluate": {}}
    results = [run(experiment_from({**base, "engine": engine}), tmp_path / engine) for engine in ("inprocess", "ray:2")]
    assert_same_bits(tmp_path / "inprocess", tmp_path / "ray:2")
    assert results[0]["privacy"][0]["epsilon"] == results[1]["privacy"][0]["epsilon"]


@pytest.mark.cluster
def test_the_engines_agree_on_the_votes_of_teachers(
    one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = []
    for engine in ("inprocess", "ray:1"):
        monkeypatch.setenv("FL_SIM_POOLS", str(tmp_path / engine[:3]))
        labelling = {"kind": "pate", "public_records": 200, "queries": 60, "keep_private": True}
        student = {"kind": "supervised", "steps": 9}
        settings = {"clients": 6, "model": "logistic", "rounds": 1, "local": {"epochs": 5}, "engine": engine}
        run(experiment_from({**settings, "algorithm": {**labelling, "student": student}}), tmp_path / f"run-{engine}")
        votes.append(np.load(tmp_path / f"run-{engine}" / "votes.npy"))
    assert np.array_equal(*votes)


@pytest.mark.cluster
def test_a_private_start_is_the_same_on_every_engine(one_ray: None, tmp_path: Path) -> None:
    base = settings("scaffold", "inprocess", "mlp").model_dump()
    base |= {"aggregator": {"kind": "global-dp", "noise": "seeded", "delta": 1e-3}, "sampler": "poisson:0.6"}
    base |= {"preprocess": {"kind": "private-start", "images": 200}, "compress": "none", "evaluate": {}}
    for engine in ("inprocess", "ray:2"):
        run(experiment_from({**base, "engine": engine}), tmp_path / engine)
    assert_same_bits(tmp_path / "inprocess", tmp_path / "ray:2")
    drawn = [{path.name for path in (tmp_path / engine).glob("start-*")} for engine in ("inprocess", "ray:2")]
    assert drawn[0] == drawn[1]  # named by content


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("engine", "generator"),
    [
        ("ray:2", {"kind": "mean-embedding"}),
        ("ray:1", {"kind": "dp-cgan", "discriminator_steps": 4, "batch_size": 400}),  # less than one client has
    ],
)
def test_synthetic_records_with_seeded_noise_are_the_same_on_every_engine(
    folder: Path, one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, generator: dict[str, Any]
) -> None:
    preprocess = {"kind": "da-fl", "generator": generator, "noise": "seeded", "gamma": 0.2}
    made = {}
    for name in ("inprocess", engine):
        monkeypatch.setenv("FL_SIM_POOLS", str(tmp_path / f"pools of {name}"))
        plain = settings("fedavg", "inprocess").model_dump()
        experiment = experiment_from({**plain, "engine": name, "preprocess": preprocess})
        made[name] = run(experiment, tmp_path / name)["preprocess"]
    assert not any(pool["reused"] for pool in made.values())
    assert made["inprocess"]["num_synthetic"] > 20
    assert made["inprocess"]["pool"] == made[engine]["pool"]  # named by content
    assert_same_bits(tmp_path / "inprocess", tmp_path / engine)


@pytest.fixture(scope="module")
def two_workers(folder: Path) -> Path:
    """A run with two workers, of a model with dropout that the native trainer takes, where it is there."""
    natively({"kind": "inprocess", "workers": 2}, folder / "two workers")
    return folder / "two workers"


def natively(engine: dict[str, Any], out: Path) -> None:
    base = settings("scaffold", "inprocess", "users_models:native").model_dump()
    run(experiment_from({**base, "engine": engine}), out)


@pytest.mark.parametrize("workers", [1, 5])
def test_any_number_of_workers_ends_in_the_same_bits(two_workers: Path, tmp_path: Path, workers: int) -> None:
    natively({"kind": "inprocess", "workers": workers}, tmp_path / "other")
    assert_same_bits(two_workers, tmp_path / "other")


@pytest.mark.cluster
def test_ray_and_one_process_train_with_the_same_trainer(two_workers: Path, one_ray: None, tmp_path: Path) -> None:
    natively({"kind": "ray", "actors": 1}, tmp_path / "ray")
    assert_same_bits(two_workers, tmp_path / "ray")


@pytest.mark.parametrize("algorithm", SAMPLERS)
def test_clients_trained_as_one_stack_end_within_rounding(algorithm: str, folder: Path, tmp_path: Path) -> None:
    # Two rounds: the second begins with what the first left with clients and server.
    # Not calibrated: the noise on moments is another one wherever the model they are asked under differs by a rounding.
    base = settings(algorithm, "inprocess", "mlp").model_dump() | {"calibrate": "none", "rounds": 2}
    alone = run(experiment_from(base), tmp_path / "alone")
    initial = detached(job_of(experiment_from(base)).model().named_parameters())
    moved = distance(weights(tmp_path / "alone"), initial)
    for stack in (2, 8):
        out = tmp_path / f"stacks of {stack}"
        stacked = run(experiment_from({**base, "engine": {"kind": "inprocess", "stack": stack}}), out)
        assert distance(weights(out), weights(tmp_path / "alone")) <= 1e-3 * moved
        assert stacked["final_accuracy"] == pytest.approx(alone["final_accuracy"], abs=0.02)


def test_precision_is_said_and_changes_the_numbers_a_little(tmp_path: Path) -> None:
    results, engines = {}, Engines()
    for precision in ("float32", "bfloat16"):
        base = settings("fedavg", "inprocess", "mlp").model_dump() | {"device": "cpu", "rounds": 2}
        base |= {"engine": {"kind": "inprocess", "stack": 8}, "local": base["local"] | {"precision": precision}}
        results[precision] = run(experiment_from(base), tmp_path / precision, None, engines)
        assert results[precision]["precision"] == precision
    first, second = engines.said
    assert "as one computation" in first
    assert second.endswith("as one computation, bfloat16")
    assert distance(weights(tmp_path / "float32"), weights(tmp_path / "bfloat16")) > 0
    assert results["bfloat16"]["final_accuracy"] == pytest.approx(results["float32"]["final_accuracy"], abs=0.1)
    alone = experiment_from(base | {"engine": "inprocess", "local": base["local"] | {"precision": "tf32"}})
    with pytest.raises(UserError, match="precision=tf32 has no effect on a CPU"):
        run(alone, tmp_path / "alone")


def test_the_native_trainer_takes_bfloat16_where_the_processor_does(tmp_path: Path) -> None:
    engines = Engines()
    base = settings("scaffold", "inprocess", "dafl-cnn").model_dump() | {"device": "cpu", "rounds": 2}
    exact = run(experiment_from(base), tmp_path / "exact")
    asked = experiment_from(base | {"local": base["local"] | {"precision": "bfloat16"}})
    kernel, _ = load_kernel()
    if kernel is None or not kernel.has_bfloat16:
        with pytest.raises(UserError, match=r"local\.precision=bfloat16 needs the native trainer"):
            run(asked, tmp_path / "refused")
        return
    result = run(asked, tmp_path / "rounded", None, engines)
    by_amx = " by AMX" if kernel.has_amx else ""
    assert re.search(rf"native trainer, \d threads?, bfloat16{by_amx}$", engines.said[0], re.MULTILINE)
    assert weights(tmp_path / "rounded").keys() == weights(tmp_path / "exact").keys()
    moved = distance(weights(tmp_path / "exact"), detached(job_of(asked).model().named_parameters()))
    assert 1e-4 * moved < distance(weights(tmp_path / "rounded"), weights(tmp_path / "exact")) < 0.2 * moved
    assert result["final_accuracy"] == pytest.approx(exact["final_accuracy"], abs=0.1)
    # More threads, or a run that goes on, end in the same bits.
    threads = base["engine"] | {"workers": 1}
    run(experiment_from(asked.model_dump() | {"engine": threads, "rounds": 1}), tmp_path / "extended")
    run(experiment_from(asked.model_dump() | {"engine": threads}), tmp_path / "extended")
    assert distance(weights(tmp_path / "extended"), weights(tmp_path / "rounded")) == 0
    by_pytorch = experiment_from(asked.model_dump() | {"algorithm": "fedmix", "model": "resnet"})
    with pytest.raises(UserError, match=r"local\.precision=bfloat16 is for the native trainer.*PyTorch trains"):
        run(by_pytorch, tmp_path / "pytorch")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("algorithm", [*SAMPLERS, *LABEL_SKEW])
def test_a_gpu_ends_where_a_cpu_does_stacked_and_one_by_one(algorithm: str, tmp_path: Path) -> None:
    # Uncalibrated: a private calibration's noise is another one for a model of other bits.
    base = {**settings(algorithm, "inprocess", "mlp").model_dump(), "calibrate": "none"}
    ends = {}
    for out, device, stack in (("cpu", "cpu", 1), ("alone", "cuda", 1), ("stacked", "cuda", 8)):
        engine = {"kind": "inprocess", "stack": stack}
        ends[out] = run(experiment_from({**base, "device": device, "engine": engine}), tmp_path / out)
    initial = detached(job_of(experiment_from(base)).model().named_parameters())
    moved = distance(weights(tmp_path / "cpu"), initial)
    for out in ("alone", "stacked"):
        assert distance(weights(tmp_path / out), weights(tmp_path / "cpu")) <= 1e-3 * moved
        assert ends[out]["final_accuracy"] == pytest.approx(ends["cpu"]["final_accuracy"], abs=0.02)


@pytest.mark.cluster
def test_stacks_are_the_same_in_ray_actors_and_in_one_process(one_ray: None, tmp_path: Path) -> None:
    base = settings("scaffold", "inprocess", "mlp").model_dump()
    for out, chosen in (("alone", {"kind": "inprocess"}), ("ray", {"kind": "ray", "actors": 2})):
        run(experiment_from({**base, "engine": {**chosen, "stack": 2}}), tmp_path / out)
    assert_same_bits(tmp_path / "alone", tmp_path / "ray")


def test_a_model_with_dropout_is_not_stacked(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.stack=4: this model .* draws random numbers"):
        run(settings("fedavg", {"kind": "inprocess", "stack": 4}), tmp_path / "run")


def test_the_experiments_differ_so_that_equal_bits_mean_something(alone: dict[str, Path]) -> None:
    for left, right in itertools.combinations(alone.values(), 2):
        assert any(not torch.equal(first, weights(right)[name]) for name, first in weights(left).items())
    cohorts = {algorithm: [record.cohort for record in read_rounds(out)] for algorithm, out in alone.items()}
    assert len(set(cohorts["fedavg"])) > 1  # Poisson sampling: the number of clients varies
    assert set(cohorts["scaffold"]) == {5}
    found = weights(alone["fedavg"])
    assert found.keys() == job_of(settings("fedavg", "inprocess")).model().state_dict().keys()
    assert float(found["2.num_batches_tracked"]) > 0
