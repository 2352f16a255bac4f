"""What is decided for a GPU, told without one: who is stacked, what stays there, how exactly, and who trains."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_sim.errors import UserError
from fl_sim.experiment.device import precision_of
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.groups import InProcess, Ray
from fl_sim.experiment.job import Job, job_of
from fl_sim.simulation import client_runtime
from fl_sim.simulation.client_runtime import stack_of, threads_of, workers_of
from fl_sim.simulation.engine_choice import choose, trainer_line, trains_natively
from fl_sim.training.loop import stays_bytes

GPU = torch.device("cuda")


def on_gpu(**settings: Any) -> Job:
    """Return a job as a process with a GPU would have it; nothing of it is computed here."""
    here = job_of(experiment_from({"clients": 150, **settings}))
    there = replace(here, device=GPU)
    there.__dict__["trainer"] = here.trainer  # which would put the model on the GPU
    return there


@pytest.mark.parametrize(
    ("engine", "settings", "stack"),
    [
        (InProcess(), {}, 100),
        (InProcess(), {"clients": 30}, 30),
        (InProcess(stack=7), {}, 7),
        (InProcess(stack=1), {}, 1),
        (InProcess(), {"aggregator": "global-dp"}, 1),
        (Ray(gpus=1, actors=2), {}, 75),
        (Ray(gpus=0.5, actors=3, stack=20), {}, 20),
        (Ray(gpus=0, actors=2), {}, 1),
    ],
)
def test_clients_are_stacked_on_a_gpu_a_hundred_at_a_time_or_a_share_for_each_actor(
    engine: InProcess | Ray, settings: dict[str, Any], stack: int
) -> None:
    assert stack_of(engine, on_gpu(**settings)) == stack


def test_one_thread_feeds_a_gpu() -> None:
    job = on_gpu()
    assert threads_of(InProcess(), job) == workers_of(InProcess(workers=4), job) == 1


def test_images_stay_on_a_gpu_as_bytes_and_in_main_memory_as_numbers() -> None:
    job = on_gpu()
    images = job.dataset.train
    assert stays_bytes(images, GPU)
    assert not stays_bytes(images, torch.device("cpu"))
    features = replace(images, inputs=images.inputs.reshape(len(images), -1).astype("float32"))
    assert not stays_bytes(features, GPU)
    assert 4 * client_runtime._num_bytes(job) == client_runtime._num_bytes(replace(job, device=torch.device("cpu")))
    noisy = on_gpu(partition="feature-noise:0.1")
    assert client_runtime._num_bytes(noisy) == 4 * client_runtime._num_bytes(job)


def test_records_that_are_more_than_a_quarter_of_a_gpu_are_sent_client_by_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Properties:
        total_memory = 8_000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert client_runtime._room(GPU) == 2_000


@pytest.mark.parametrize(("capability", "refused"), [((7, 5), ("tf32", "bfloat16")), ((8, 0), ()), ((9, 0), ())])
def test_a_gpu_before_ampere_trains_in_float32_alone(
    capability: tuple[int, int], refused: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for precision in ("float32", "tf32", "bfloat16"):
        experiment = experiment_from({"local": {"precision": precision}})
        if precision not in refused:
            assert precision_of(experiment, GPU) == precision
            continue
        with pytest.raises(UserError, match="has no effect on a GPU older than NVIDIA's Ampere"):
            precision_of(experiment, GPU)


def test_a_gpu_is_kept_busy_by_one_process_whose_stack_pytorch_trains() -> None:
    job = on_gpu()
    assert not trains_natively(job)
    engine, why = choose(job)
    assert isinstance(engine, InProcess)
    assert "GPU, which one process keeps busy" in why
    assert trainer_line(job, 1, 100) == "stacked trainer on cuda, 100 clients as one computation"
