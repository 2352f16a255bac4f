"""Before the first round of a private start: ask, pay, draw, and keep what was drawn, so that it is paid for once."""

import json
from pathlib import Path
from typing import Final

import numpy as np
import torch
from flwr.serverapp import Grid
from safetensors import SafetensorError

from clients.frequencies import lowest_frequencies
from clients.frequency_sums import Question, black_frame, question_tensors, shapes_of
from fl_sim.errors import BudgetExhausted, RunError, UserError
from fl_sim.experiment.job import Job
from fl_sim.privacy.charge_log import Receipt
from fl_sim.privacy.ledger import Ledger
from fl_sim.seeding import rng
from fl_sim.simulation.site import as_kept, read_pool
from fl_sim.store import run_directory
from fl_sim.store.files import read_whole
from fl_sim.store.tensors import save_by_content
from fl_sim.types import Params
from strategies.flower import FederatedStrategy, release_before_training
from strategies.private_start import PrivateStart, classes_of, covariances_of, drawn_images, frame_of

_MOST_SAID: Final = 64 * 1024  # bytes of start.json


def prepare_start(job: Job, strategy: FederatedStrategy, grid: Grid, out: Path) -> Path:
    """Return the file of the images that the first model learns from, made now or by this run before it stopped.

    Raises UserError where the budget does not afford them, RunError where clients fail or what was kept is damaged, or
    is not in the ledger of the run.
    """
    kept = out.absolute() / run_directory.START
    if not kept.exists():
        try:
            images, labels = _made(job, strategy, grid)
        except BudgetExhausted as spent:
            raise UserError(
                f"aggregator.epsilon={strategy.privacy and strategy.privacy.aggregator.epsilon:g} does not afford the "
                f"private start ({spent}): take a larger preprocess.noise_multiplier, or a larger epsilon"
            ) from spent
        tensors = {"inputs": as_kept(images, job).contiguous(), "labels": labels}
        path = save_by_content(kept.parent, "start", tensors)
        assert strategy.privacy is not None
        said = {"images": path.name, "receipt": strategy.privacy.ledger.receipt.to_json()}
        run_directory.write_text(kept, json.dumps(said))
    return _checked(kept, job, strategy)


def _made(job: Job, strategy: FederatedStrategy, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Have clients answer three questions; return images (n, *shape) in [-1, 1] and labels (n,)."""
    settings, shape, num_classes = job.experiment.preprocess, job.dataset.input_shape, job.dataset.num_classes
    assert isinstance(settings, PrivateStart)
    number, records = settings.num_frequencies(shape), len(job.dataset.train) / job.experiment.num_clients

    def answered(question: Question) -> tuple[Params, float]:
        """Return the mean answer of clients, and the standard deviation of the noise on each of its numbers."""
        assert strategy.privacy is not None
        template = {name: torch.zeros(like) for name, like in shapes_of(question.step, num_classes, number).items()}
        sums = release_before_training(
            strategy, grid, question.step, question_tensors(question), template, job.experiment.round_timeout
        )
        release = strategy.privacy.beforehand[question.step - 1]
        expected = strategy.sampler.expected_size(strategy.num_clients)
        return sums, release.noise_multiplier * release.clipping_norm / expected

    order, _ = lowest_frequencies(shape, number)
    frame = frame_of(*answered(Question(1, records, black_frame(shape, order))), shape, number)
    classes = classes_of(*answered(Question(2, records, frame)))
    covariances = covariances_of(*answered(Question(3, records, frame, classes.means)), classes)
    generator = rng(job.experiment.seed, "private start")
    images, labels = drawn_images(settings, shape, frame, classes, covariances, generator)
    return torch.from_numpy(images), torch.from_numpy(labels)


def _checked(kept: Path, job: Job, strategy: FederatedStrategy) -> Path:
    """Return the file that ``kept`` names. Raises RunError where that is damaged, or not paid for."""
    assert strategy.privacy is not None
    try:
        said = json.loads(read_whole(kept, _MOST_SAID))
        receipt, path = Receipt.from_json(said["receipt"]), kept.with_name(said["images"])
        found = read_pool(path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, RecursionError, RunError) as error:
        raise RunError(
            f"{kept} or the images beside it are damaged: delete it, and they are released again, which pays again"
        ) from error
    classes = np.arange(job.dataset.num_classes)
    if found.inputs.shape[1:] != job.dataset.input_shape or not np.isin(found.labels, classes).all():
        raise RunError(f"{path} holds no images of {job.experiment.data}: delete {kept}, which pays again")
    Ledger(strategy.privacy.ledger.terms, kept.with_name(run_directory.LEDGER), receipt=receipt, holder=str(kept))
    return path
