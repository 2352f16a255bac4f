"""The stage of a private start: the server trains the first model on synthetic images, before the first round.

The server draws the images from noisy sums over the clients' records. It asks for sums in three steps, and adds noise
in each step. The privacy cost of a step is written into the privacy ledger before clients are asked. The images are
stored, so that a resumed run has no further privacy cost. The settings, and the code that draws the images, are in
``strategies.private_start``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch
from flwr.app import Message, RecordDict
from safetensors import SafetensorError

from clients.client_task import Client
from clients.frequency_sums import (
    STEPS,
    FrequencyQuestion,
    answer,
    black_frame,
    question_tensors,
    read_question,
    shapes_of,
)
from clients.images import lowest_frequencies
from fl_sim.engines import arrays, wire
from fl_sim.errors import BudgetExhausted, Malformed, RunError, UserError
from fl_sim.experiment.job import Job
from fl_sim.seeding import rng
from fl_sim.simulation.client_runtime import as_kept, read_pool, to_generator
from fl_sim.simulation.run_log import RunLog
from fl_sim.simulation.stage import Run, Stage, start_from
from fl_sim.simulation.timing import Work
from fl_sim.store import run_directory
from fl_sim.store.files import read_whole
from fl_sim.store.tensors import save_by_content
from fl_sim.types import Cohort, Params, Reply, Traffic
from strategies.answers import by_client, content_of, find_population
from strategies.layer import found_in
from strategies.private_start import PrivateStart, classes_of, covariances_of, drawn_images, frame_of

if TYPE_CHECKING:
    from strategies.private import PrivateRounds

MEASURE: Final = "measure"
"""The name of the client task that returns sums over the client's records. The message says which sums."""

_MOST_BYTES: Final = 64 * 1024  # maximum size of start.json in bytes


def settings_of(job: Job) -> PrivateStart:
    """Return the settings of the private start. The experiment of ``job`` must have one."""
    assert isinstance(job.experiment.preprocess, PrivateStart)
    return job.experiment.preprocess


@dataclass(frozen=True)
class Measure:
    """The client task that returns sums over the client's records. The server clips the sums and adds noise."""

    job: Job
    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = False
    runs_in_threads: ClassVar[bool] = False

    def run(self, client: Client) -> RecordDict:
        """Return the message with the sums over the client's records that the server's question asks for."""
        inputs, labels = (tensor.cpu() for tensor in client.records.tensors())
        question, num_classes = read_question(client.params), self.job.dataset.num_classes
        return wire.sums_content(answer(question, to_generator(inputs, self.job), labels.numpy(), num_classes))


class Start(Stage):
    """The stage of a private start at the server.

    It asks clients for sums, draws synthetic images, and trains a model on the images.
    """

    def tasks(self) -> Mapping[str, Measure]:
        """Return the client task ``measure``, which the server sends three times, with different questions."""
        return {MEASURE: Measure(self.job)}

    def preparing(self, log: RunLog) -> str:
        """Return the line that is shown while clients compute sums before the first round; empty for a resumed run."""
        said = "clients send sums over their images, and the server trains on images that it draws from these sums"
        return "" if log.rounds else said

    def before(self, run: Run) -> None:
        """Train the first model on synthetic images. The server draws these images from the clients' noisy answers."""
        run.log.before["private_start"] = None  # None, because the bytes would reveal the secret cohort sizes
        if not run.log.rounds:
            start_from(run, prepare_start(run), settings_of(self.job).server_epochs)

    def trains_model(self) -> bool:
        """Return True, because this stage trains the first model."""
        return True

    def num_server_steps(self) -> int:
        """Return the number of minibatch steps for which the server trains the first model on the synthetic images."""
        settings = settings_of(self.job)
        return settings.server_epochs * math.ceil(settings.images / self.job.experiment.local.batch_size)

    def work(self) -> tuple[Work, ...]:
        """Return the computation of sums and synthetic images. The forecast lists it without its time."""
        return (Work("the sums and the drawing of a private start's images", pieces=1.0),)

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return a forecast of bytes: the three questions to a cohort of expected size, and the clients' answers."""
        del params
        settings, experiment = settings_of(self.job), self.job.experiment
        shape, num_classes = self.job.dataset.input_shape, self.job.dataset.num_classes
        number = settings.num_frequencies(shape)
        frame, each = black_frame(shape, lowest_frequencies(shape, number)[0]), Traffic(0, 0)
        for step in STEPS:
            means = np.zeros((num_classes, number)) if step == max(STEPS) else None
            question = wire.task_content(wire.BLANK, question_tensors(FrequencyQuestion(step, 1.0, frame, means)), {})
            sums = {name: torch.zeros(like) for name, like in shapes_of(step, num_classes, number).items()}
            sizes = (arrays.num_bytes(content) for content in (question, wire.sums_content(sums)))
            each += Traffic(*sizes)
        return {"private_start": each * round(experiment.sampler.expected_size(experiment.num_members))}

    def facts(self) -> Mapping[str, Any]:
        """Return fields for ``result.json``: the numbers of synthetic images, and of questions with a privacy cost."""
        settings = settings_of(self.job)
        return {"preprocess": {"kind": settings.kind, "num_images": settings.images, "releases": len(STEPS)}}


def prepare_start(run: Run) -> Path:
    """Return the file with the synthetic images for the first model. A resumed run finds this file; a new run makes it.

    The server draws the images from three noisy sums over the clients' records. Raises UserError if the privacy budget
    is too small for these sums. Raises RunError if clients fail, or if the stored images are damaged, or if the run's
    privacy ledger lacks the cost of the images.
    """
    kept, privacy = run.out.absolute() / run_directory.START, privacy_of(run)
    if not kept.exists():
        try:
            images, labels = _released_images(run)
        except BudgetExhausted as spent:
            raise UserError(
                f"aggregator.epsilon={privacy.aggregator.epsilon:g} is too small for the private start ({spent}): take "
                "a larger preprocess.noise_multiplier, or a larger epsilon"
            ) from spent
        tensors = {"inputs": as_kept(images, run.job).contiguous(), "labels": labels}
        path = save_by_content(kept.parent, "start", tensors)
        said = {"images": path.name, "receipt": privacy.ledger.receipt.to_json()}
        run_directory.write_text(kept, json.dumps(said))
    return _checked(kept, run)


def privacy_of(run: Run) -> "PrivateRounds":
    """Return the run's layer of Global DP, whose privacy ledger also contains the costs of this stage's noisy sums."""
    from strategies.private import PrivateRounds  # noqa: PLC0415 (the accountants load slowly)

    return found_in(run.strategy.layer, PrivateRounds)


def released(run: Run, number: int, question: Params, template: Params) -> Params:
    """Ask a cohort of clients one question before round 1, and return the noisy mean of their answers.

    The privacy cost is first written into the privacy ledger. ``number``: the index of the question, from 1.
    ``question``: the tensors of the message to each client. ``template``: names and shapes of an answer's tensors. A
    client that fails, or whose answer does not fit the template, counts as an answer of zeros, as in a round.
    Raises BudgetExhausted, before any client is asked, if the cost would exceed the privacy budget.
    """
    strategy, privacy, timeout = run.strategy, privacy_of(run), run.job.experiment.round_timeout
    # The server's three questions to clients before round 1 have the round numbers -2, -1 and 0, so that their random
    # numbers differ from those of the rounds.
    server_round = number - len(privacy.beforehand)
    if not strategy.population.nodes:
        strategy.population = find_population(run.grid, strategy.num_clients, timeout)
    privacy.pay_beforehand(number)
    cohort = strategy.sampler.sample(strategy.num_clients, privacy.coins(server_round), server_round)
    content = wire.task_content(replace(strategy.order, server_round=server_round, task=MEASURE), question, {})
    messages = [Message(content, strategy.population.nodes[client], wire.TRAIN) for client in cohort]
    sent = run.grid.send_and_receive(messages, timeout=timeout) if messages else []
    answers = by_client(sent, strategy.population.client_of, strict=False)
    replies: list[Reply] = []
    failed: dict[int, Malformed] = {}
    for client in map(int, cohort):
        try:
            sums = wire.read_sums(content_of(answers.get(client, [])), template)
            replies.append(Reply(client, {"sums": sums}, 0, None))
        except Malformed as reason:
            failed[client] = reason
    privacy.note(failed, answered=bool(replies))
    expected = strategy.sampler.expected_size(strategy.num_clients)
    answered = Cohort(server_round, tuple(replies), strategy.num_clients, expected)
    release = privacy.beforehand[number - 1]
    return release.mean(answered, noise=privacy.noise, template={"sums": template}).payloads["sums"]


def _released_images(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Ask clients three questions, and draw synthetic images from the noisy answers.

    Return the images (n, *shape), with values in [-1, 1], and their labels (n,).
    """
    job, strategy, settings = run.job, run.strategy, settings_of(run.job)
    shape, num_classes = job.dataset.input_shape, job.dataset.num_classes
    number, records = settings.num_frequencies(shape), len(job.dataset.train) / job.experiment.num_clients

    def answered(question: FrequencyQuestion) -> tuple[Params, float]:
        """Ask clients ``question``. Return (their noisy mean answer, the noise's standard deviation per number)."""
        template = {name: torch.zeros(like) for name, like in shapes_of(question.step, num_classes, number).items()}
        sums = released(run, question.step, question_tensors(question), template)
        release = privacy_of(run).beforehand[question.step - 1]
        expected = strategy.sampler.expected_size(strategy.num_clients)
        return sums, release.noise_multiplier * release.clipping_norm / expected

    order, _ = lowest_frequencies(shape, number)
    frame = frame_of(*answered(FrequencyQuestion(1, records, black_frame(shape, order))), shape, number)
    classes = classes_of(*answered(FrequencyQuestion(2, records, frame)))
    covariances = covariances_of(*answered(FrequencyQuestion(3, records, frame, classes.means)), classes)
    generator = rng(job.experiment.seed, "private start")
    images, labels = drawn_images(settings, shape, frame, classes, covariances, generator)
    return torch.from_numpy(images), torch.from_numpy(labels)


def _checked(kept: Path, run: Run) -> Path:
    """Check the JSON file ``kept``, and the file of synthetic images that it names. Return the path of the images.

    Raises RunError if one of these files is damaged, or if the privacy ledger lacks the privacy cost of the images.
    """
    from fl_sim.privacy.ledger import Ledger, Receipt  # noqa: PLC0415 (the accountants load slowly)

    job, privacy = run.job, privacy_of(run)
    try:
        said = json.loads(read_whole(kept, _MOST_BYTES))
        receipt, path = Receipt.from_json(said["receipt"]), kept.with_name(said["images"])
        found = read_pool(path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, RecursionError, RunError) as error:
        raise RunError(
            f"{kept} or its file of images is damaged: delete {kept.name}; the images are then released and charged "
            "again"
        ) from error
    classes = np.arange(job.dataset.num_classes)
    if found.inputs.shape[1:] != job.dataset.input_shape or not np.isin(found.labels, classes).all():
        raise RunError(
            f"{path} contains no images of {job.experiment.data}: delete {kept}; images are then released and charged "
            "again"
        )
    Ledger(privacy.ledger.terms, kept.with_name(run_directory.LEDGER), receipt=receipt, holder=str(kept))
    return path
