"""What travels once, before the first round, foretold from how many records clients hold.

Exact where that decides it. About right where noise decides how many records clients release, where a sampler draws who
is asked, and where clients that share something hold unequally many records.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from clients.dafl.settings import DaFl
from clients.frequencies import lowest_frequencies
from clients.frequency_sums import STEPS, Question, black_frame, question_tensors, shapes_of
from fl_sim.engines import releases, tensor_records, wire
from fl_sim.engines.arrays import TensorArray, num_bytes
from fl_sim.experiment.job import Job
from fl_sim.seeding import rng
from fl_sim.simulation.site import as_kept, sizes_trained_on
from fl_sim.training.loop import to_tensors
from fl_sim.types import Traffic
from strategies.algorithm import Algorithm, Sharing
from strategies.private_start import PrivateStart


def travels_beforehand(job: Job, algorithm: Algorithm) -> dict[str, Traffic]:
    """Return the bytes of arrays to and from all clients before the first round, named as in ``result.json``."""
    preprocess, once = job.experiment.preprocess, {}
    if isinstance(preprocess, DaFl):
        once["synthetic_records"] = _of_synthetic_records(job)
    if isinstance(preprocess, PrivateStart):
        once["private_start"] = _of_private_start(job, preprocess)
    if isinstance(algorithm, Sharing):
        once["shared_records"] = _of_shared_records(job, algorithm)
    return once


def traffic_of_votes(num_records: int, num_teachers: int) -> Traffic:
    """Return what it takes that every teacher sends its votes on public records, which all have."""
    sent = releases.votes_content(np.zeros(num_records, dtype=np.int64))
    return Traffic(0, tensor_records.num_bytes(sent)) * num_teachers


def synthetic_by_client(job: Job) -> NDArray[np.int64]:
    """Return about how many synthetic records each client releases: (clients,), all zeros without DA-FL."""
    sizes, settings = job.shards.sizes, job.experiment.preprocess
    if not isinstance(settings, DaFl):
        return np.zeros_like(sizes)
    gammas = np.array(settings.client_gammas or [settings.gamma])
    return np.round(gammas * sizes).astype(np.int64)


def _of_synthetic_records(job: Job) -> Traffic:
    """Clients send their records as float32, and each gets all as they are kept, with a label of 8 bytes a record."""
    numbers, released = math.prod(job.dataset.input_shape), synthetic_by_client(job)
    sizes, how_often = np.unique(released, return_counts=True)
    up = sum(_array_bytes(numbers * int(size)) * int(times) for size, times in zip(sizes, how_often, strict=True))
    kept = as_kept(torch.zeros(1, *job.dataset.input_shape), job)
    return Traffic(int(released.sum()) * (kept.nbytes + 8) * len(released), up)


def _of_private_start(job: Job, settings: PrivateStart) -> Traffic:
    """Three questions go to a cohort, and three answers come back."""
    shape, num_classes = job.dataset.input_shape, job.dataset.num_classes
    number = settings.num_frequencies(shape)
    frame, each = black_frame(shape, lowest_frequencies(shape, number)[0]), Traffic(0, 0)
    for step in STEPS:
        means = np.zeros((num_classes, number)) if step == max(STEPS) else None
        question = wire.task_content(wire.BLANK, question_tensors(Question(step, 1.0, frame, means)), {})
        answer = {name: torch.zeros(like) for name, like in shapes_of(step, num_classes, number).items()}
        sizes = (tensor_records.num_bytes(content) for content in (question, releases.sums_content(answer)))
        each += Traffic(*sizes)
    return each * round(job.experiment.sampler.expected_size(job.experiment.num_clients))


def _of_shared_records(job: Job, algorithm: Sharing) -> Traffic:
    """Clients send what one of their mean size would, made of public test records, and each gets what all have sent."""
    clients, public = job.experiment.num_clients, job.dataset.test
    size = round(float(sizes_trained_on(job, int(synthetic_by_client(job).sum())).mean()))
    records = to_tensors(public.take(np.arange(size) % len(public)), job.dataset)
    shared = algorithm.share(*records, job.dataset.num_classes, rng(job.experiment.seed, "share", 0))
    numbers = sum(one.numel() for one in shared.values())
    return Traffic(_array_bytes(numbers * clients), _array_bytes(numbers)) * clients


def _array_bytes(numbers: int) -> int:
    """Return how many bytes an array of so many float32 numbers has on its way, without making one."""
    return num_bytes(TensorArray(torch.empty(numbers, device="meta")))
