"""A client runtime: what a worker needs to play any client, with and without a pool of synthetic records."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from clients.client_task import Client
from clients.dafl import noisy_moments
from fl_sim.data import load
from fl_sim.engines import wire
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.simulation import client_runtime as wiring
from fl_sim.simulation.client_runtime import as_kept, evaluation_records, fixed_threads, to_generator
from fl_sim.simulation.engine_choice import seconds_of_stages
from fl_sim.simulation.rounds import procedure_of, runtime_of
from fl_sim.simulation.run import run
from fl_sim.store.tensors import save_by_content
from fl_sim.training import loop
from fl_sim.training.loop import to_tensors
from fl_sim.types import Examples, LocalSettings
from partitions import Iid
from strategies.attacks import LabelFlip, hostile_clients


def _made(*overrides):
    return experiment_from(with_overrides({}, list(overrides)))


def test_a_site_holds_each_clients_own_records():
    made = _made("partition=label-1", "local.batch_size=7", "local.epochs=3", "engine.threads=1")
    runtime = runtime_of(made.model_dump_json(), "")
    assert runtime is runtime_of(made.model_dump_json(), "")
    dataset, shards = load("digits", None), job_of(made).shards
    for client in (0, 9):
        inputs, labels = runtime.records(client, "").tensors()
        expected, _ = to_tensors(dataset.train.take(shards[client]), dataset)
        assert torch.equal(inputs.cpu(), expected)
        assert set(labels.tolist()) == {client}
    assert (runtime.num_clients, runtime.seed, runtime.threads) == (10, 0, 1)
    assert runtime.local_settings(0.03) == LocalSettings(0.03, 0.9, 1e-5, 7, 3)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("crop", (4, False, False)), ("flip", (0, True, False)), ("crop-flip", (4, True, False)),
        ("none", (0, False, False)), ("reflect-crop", (4, False, True)), ("reflect-crop-flip", (4, True, True)),
    ],
)  # fmt: skip
def test_images_are_moved_as_asked_for_over_black_that_is_a_byte_of_0(chosen, expected):
    job = job_of(_made(f"local.augment={chosen}"))
    augment, dataset = (
        runtime_of(job.experiment.model_dump_json(), "").local_settings(0.1).augment,
        load("digits", None),
    )
    assert (augment.crop, augment.flip, augment.reflect) == expected
    darkest, _ = to_tensors(Examples(np.zeros((1, 1, 8, 8), np.uint8), np.zeros(1, np.int64)), dataset)
    assert set(augment.black) == (set(darkest.flatten().tolist()) if augment.moves else set())


def test_images_too_small_to_be_padded_by_their_own_pixels_are_refused(monkeypatch):
    monkeypatch.setattr(wiring, "PADDING", 8)
    with pytest.raises(UserError, match=r"by 8 of their own pixels, .*local.augment=crop-flip"):
        wiring.local_settings(job_of(_made("local.augment=reflect-crop-flip")), 0.1)


def test_what_a_site_shares_is_seeded_by_client():
    made = _made("algorithm=fedmix", "partition=iid")
    runtime = runtime_of(made.model_dump_json(), "")
    runtime = replace(runtime, records=lambda client, *_: runtime.own_records(0))  # the same for both
    order = wire.TaskConfig(made.model_dump_json(), 0, 0.0, "", "", task="share")
    clients = [Client(number, runtime, order, wire.config_content(order)) for number in (0, 0, 1)]
    one, again, other = (wire.read_made(runtime.tasks["share"].run(client)) for client in clients)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert len(one) == len(runtime.own_records(0)) // 5


def test_feature_noise_has_the_variance_of_the_client_in_units_of_raw_inputs():
    noisy = runtime_of(_made("partition=feature-noise:0.1").model_dump_json(), "")
    dataset, shards = load("digits", None), job_of(_made("partition=feature-noise:0.1")).shards
    for client in range(10):
        clean, _ = to_tensors(dataset.train.take(shards[client]), dataset)
        inputs, _ = noisy.records(client, "").tensors()
        noise = ((inputs.cpu() - clean) * torch.tensor(dataset.std).reshape(1, -1, 1, 1)).double().flatten()
        variance = 0.1 * (client + 1) / 10  # sigma i / K, i = 1..K
        assert float(noise.var()) == pytest.approx(variance, rel=4.5 * math.sqrt(2 / len(noise)))
        assert abs(float(noise.mean())) < 4.5 * math.sqrt(variance / len(noise))


def test_the_model_is_tested_on_noisy_records_only_where_the_published_program_does_so():
    for variant, noisy in [("paper", False), ("niid-bench", True)]:
        job = job_of(_made("partition=feature-noise:0.3", f"partition.variant={variant}"))
        clean, labels = to_tensors(job.dataset.test, job.dataset)
        tested = evaluation_records(job)
        assert torch.equal(tested.labels.cpu(), labels)
        assert torch.equal(tested.inputs.cpu()[::10], clean[::10])  # client 0 has no noise in that program
        assert torch.equal(tested.inputs.cpu(), clean) is not noisy


def test_feature_noise_of_two_clients_is_independent_and_differs_from_seed_to_seed():
    noises = {}
    for seed in (0, 1):
        made = _made("partition=feature-noise:0.1", f"seed={seed}")
        runtime, dataset, shards = runtime_of(made.model_dump_json(), ""), load("digits", None), job_of(made).shards
        for client in (0, 1):
            clean, _ = to_tensors(dataset.train.take(shards[client]), dataset)
            noise = runtime.records(client, "").tensors()[0].cpu() - clean
            noises[seed, client] = noise[:100].flatten()
    (first, *others), size = noises.values(), 100 * 64
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 4.5 / math.sqrt(size)


@pytest.mark.parametrize("partition", ["label-1", "feature-noise:0.1"])
def test_records_are_the_same_whether_they_stay_in_memory_or_not(partition, monkeypatch):
    settings = _made(f"partition={partition}").model_dump_json()
    kept = runtime_of.__wrapped__(settings, "")
    monkeypatch.setattr(wiring, "_room", lambda device: 0)
    made_anew = runtime_of.__wrapped__(settings, "")
    for client in (0, 3):
        assert all(
            torch.equal(*pair)
            for pair in zip(kept.records(client, "").tensors(), made_anew.records(client, "").tensors(), strict=True)
        )
    once, again = (kept.records(3, "").tensors()[0].data_ptr() for _ in range(2))
    assert once == again
    everybody = {kept.records(client, "").tensors()[0].untyped_storage().data_ptr() for client in range(10)}
    assert len(everybody) == 1  # one array, whatever the number of clients
    first, second = (made_anew.records(3, "").tensors()[0] for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def _pool(folder: Path) -> str:
    images = (torch.arange(3 * 64) % 256).to(torch.uint8).reshape(3, 1, 8, 8)
    return str(save_by_content(folder, "synthetic", {"inputs": images, "labels": torch.tensor([1, 1, 4])}))


def test_bytes_that_stay_on_a_device_are_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _made("partition=label-1", "preprocess=da-fl").model_dump_json()
    floats, which = runtime_of.__wrapped__(settings, ""), [(2, ""), (7, ""), (2, _pool(tmp_path)), (7, _pool(tmp_path))]
    as_floats = [floats.records(client, pool) for client, pool in which]
    monkeypatch.setattr(loop, "stays_bytes", lambda *_: True)  # as on a GPU
    in_bytes = runtime_of.__wrapped__(settings, "")
    for (client, pool), expected in zip(which, as_floats, strict=True):
        found = in_bytes.records(client, pool)
        assert all(torch.equal(*pair) for pair in zip(found.tensors(), expected.tensors(), strict=True))
        assert {source.inputs.dtype for source, _ in found.parts} == {torch.uint8}
        assert {source.inputs.dtype for source, _ in expected.parts} == {torch.float32}
    assert in_bytes.records(2, "").parts[0][0] is in_bytes.records(7, "").parts[0][0]  # one source for everybody
    noisy = _made("partition=feature-noise:0.1", "preprocess=da-fl").model_dump_json()
    found = runtime_of.__wrapped__(noisy, "").records(3, _pool(tmp_path))
    assert {source.inputs.dtype for source, _ in found.parts} == {torch.float32}  # noise is no byte


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_everybodys_records_are_one_source_of_bytes() -> None:
    on_gpu, on_cpu = (
        runtime_of(_made("partition=iid", f"device={device}").model_dump_json(), "") for device in ("cuda", "cpu")
    )
    found, expected = on_gpu.records(4, ""), on_cpu.records(4, "")
    assert all(torch.equal(one.cpu(), two) for one, two in zip(found.tensors(), expected.tensors(), strict=True))
    assert found.parts[0][0] is on_gpu.records(5, "").parts[0][0]
    assert (found.parts[0][0].inputs.dtype, found.device.type) == (torch.uint8, "cuda")


def test_clients_train_on_their_own_records_and_the_pool(tmp_path: Path) -> None:
    made = _made("partition=label-1", "preprocess=da-fl")
    runtime = runtime_of(made.model_dump_json(), "")
    own, own_labels = runtime.records(2, "").tensors()
    inputs, labels = runtime.records(2, _pool(tmp_path)).tensors()
    assert torch.equal(inputs[: len(own)], own)
    assert labels.tolist() == [*own_labels.tolist(), 1, 1, 4]
    assert inputs.shape == (len(own) + 3, 1, 8, 8)
    counts = {2: len(own)}
    assert runtime.class_counts(2, "") == tuple(counts.get(label, 0) for label in range(10))
    counts |= {1: 2, 4: 1}
    assert runtime.class_counts(2, _pool(tmp_path)) == tuple(counts.get(label, 0) for label in range(10))


def test_training_on_the_pool_alone_touches_no_record_of_the_client(tmp_path: Path) -> None:
    made = _made("partition=label-1", "preprocess=da-fl", "preprocess.train_on=synthetic")
    runtime = runtime_of(made.model_dump_json(), "")
    first, second = (runtime.records(client, _pool(tmp_path)).tensors() for client in (0, 7))
    assert first[1].tolist() == second[1].tolist() == [1, 1, 4]
    assert torch.equal(first[0], second[0])


def test_generators_see_images_between_minus_one_and_one_and_bytes_come_back() -> None:
    job = job_of(Experiment())
    inputs, _ = to_tensors(job.dataset.train, job.dataset)
    images = to_generator(inputs, job)
    assert -1 <= float(images.min()) < float(images.max()) <= 1
    assert torch.equal(as_kept(images, job), torch.from_numpy(job.dataset.train.inputs.copy()))


@given(st.floats(-1, 1))
def test_a_byte_is_the_nearest_to_what_a_generator_made(value: float) -> None:
    byte = int(as_kept(torch.tensor([value]), job_of(Experiment())))
    assert abs((byte / 127.5 - 1) - value) <= 1 / 255 + 1e-6


@dataclass(frozen=True)
class Dimmed(Iid):
    """Client i sees its records i times as bright; with ``wrong`` it sees fewer of them."""

    wrong: bool = False

    def seen_by(self, client: int, num_partitions: int, inputs: Any, std: Any, rng: np.random.Generator) -> Any:
        return inputs[1:] if self.wrong else inputs * np.float32(client)


def test_a_large_training_set_stays_in_memory_if_copies_for_all_processors_take_a_third(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wiring.os, "cpu_count", lambda: 4)
    for memory, room in ((12 * 2**30, 2**30), (2**30, wiring.KEEP_BYTES)):
        monkeypatch.setattr(wiring, "machine_bytes", lambda memory=memory: memory)
        assert wiring._room(torch.device("cpu")) == pytest.approx(room)


def test_an_own_scheme_changes_what_clients_see_in_memory_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    job, plain = (job_of(Experiment(partition=scheme, clients=4)) for scheme in (Dimmed(), Iid()))
    assert np.array_equal(np.concatenate(job.shards), np.concatenate(plain.shards))
    expected = procedure_of(plain).runtime().records(3, "").tensors()[0]
    for room in (wiring.KEEP_BYTES, 0):
        monkeypatch.setattr(wiring, "_room", lambda device, room=room: room)
        assert torch.equal(procedure_of(job).runtime().records(3, "").tensors()[0], 3 * expected)


def test_a_scheme_must_not_change_the_shape_of_what_clients_see() -> None:
    with pytest.raises(UserError, match=r"Dimmed: seen_by gave float32 of shape .* it must keep the type"):
        procedure_of(job_of(Experiment(partition=Dimmed(wrong=True), clients=4))).runtime()


@dataclass(frozen=True)
class Forgetful(Iid):
    """Returns nothing of what clients see."""

    def seen_by(self, client: int, num_partitions: int, inputs: Any, std: Any, rng: np.random.Generator) -> Any:
        return None


def test_a_scheme_that_returns_nothing_of_what_clients_see_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"Forgetful: seen_by gave object of shape \(\) .* it must keep the type"):
        procedure_of(job_of(Experiment(partition=Forgetful(), clients=4))).runtime()


class Poison(LabelFlip):
    """Trains on labels that are none, or moves them by one."""

    how: str = "next"

    def poisoned(self, labels: Any, num_classes: int) -> Any:
        made: dict[str, Any] = {"next": (labels + 1) % num_classes, "beyond": labels + 1, "fewer": labels[1:],
                                "shares": labels / 2, "nothing": None}  # fmt: skip
        return made[self.how]


def test_an_own_attack_changes_the_labels_of_hostile_clients() -> None:
    job = job_of(Experiment(attack=Poison(clients=1), clients=4, partition=Iid()))
    [hostile] = hostile_clients(job.experiment.attack, 4, job.experiment.seed)
    for client in range(4):
        labels = procedure_of(job).runtime().records(client, "").tensors()[1].numpy()
        moved = (labels - job.dataset.train.labels[job.shards[client]]) % 10
        assert set(moved.tolist()) == {int(client == hostile)}


@pytest.mark.parametrize(
    ("how", "gave"), [("beyond", "int64"), ("fewer", "int64"), ("shares", "float64"), ("nothing", "object")]
)
def test_labels_of_an_own_attack_that_are_none_are_refused_in_one_line(how: str, gave: str) -> None:
    job = job_of(Experiment(attack=Poison(clients=1, how=how), clients=4, partition=Iid()))
    with pytest.raises(
        UserError, match=rf"Poison: method poisoned returned {gave} of shape .*: return a label from 0 to 9"
    ):
        procedure_of(job).runtime()


DA_FL = {
    "model": "logistic", "rounds": 1, "clients": 2, "partition": "iid", "engine": {"kind": "inprocess", "workers": 1},
    "preprocess": {"kind": "da-fl", "epsilon": "inf", "noise": "seeded",
                   "generator": {"kind": "mean-embedding", "frequencies": 5}},
}  # fmt: skip


def blas_threads() -> set[int]:
    """Return the threads of every library of numpy's linear algebra."""
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}


def test_threads_of_torch_and_of_linear_algebra_are_fixed_and_put_back() -> None:
    before = torch.get_num_threads()
    with threadpool_limits(2, user_api="blas"):
        with fixed_threads(1):
            assert torch.get_num_threads() == 1
            assert blas_threads() == {1}
        assert blas_threads() == {2}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("at_work", [run, lambda experiment, _: seconds_of_stages(job_of(experiment))])
def test_generators_compute_in_one_thread_each_in_a_run_and_where_they_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_work: Callable[..., Any]
) -> None:
    seen = []

    def noted(mean: Any, root: Any, clamp: Any) -> tuple[Any, Any]:
        del clamp
        seen.append(blas_threads())
        return mean, root

    monkeypatch.setattr(noisy_moments, "before_clamping", noted)
    with threadpool_limits(2, user_api="blas"):
        at_work(experiment_from(DA_FL), tmp_path / "run")
    assert seen
    assert all(one == {1} for one in seen)
