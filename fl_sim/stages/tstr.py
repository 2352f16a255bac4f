"""The procedure of TSTR, "train on synthetic, test on real". It has no federated rounds.

Clients publish synthetic records. The server trains classifiers on the pool of all synthetic records. It chooses the
classifier with the best accuracy on held-out synthetic records. It tests this classifier on real records.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import nn

from clients.client_task import ClientRuntime
from fl_sim import models
from fl_sim.data import Features, version_of
from fl_sim.errors import Diverged, UserError
from fl_sim.local_plan import LocalPlan
from fl_sim.native.kernel import load_kernel
from fl_sim.params import detached, is_finite
from fl_sim.seeding import process_kept, rng, seed_process
from fl_sim.simulation.client_runtime import evaluation_records, local_settings, read_pool, runtime_for
from fl_sim.simulation.forecast import evaluation_work
from fl_sim.simulation.measuring import Measured
from fl_sim.simulation.run_log import Observer, RunLog
from fl_sim.simulation.stage import Procedure, prepared_strategy, stages_of, tasks_of
from fl_sim.simulation.timing import Work
from fl_sim.store import run_directory
from fl_sim.store.run_directory import RoundRecord
from fl_sim.training.discriminant import QuadraticDiscriminant, linear_discriminant, quadratic_discriminant
from fl_sim.training.evaluation import Scores
from fl_sim.training.features import frechet_distance
from fl_sim.training.loop import resident, to_tensors
from fl_sim.training.records import Source
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import Examples, LocalTask, Params, ServerState, Traffic
from strategies.fedavg import FedAvg
from strategies.tstr import DISCRIMINANT, QUADRATIC, Tstr

MOST_COMPARED = 10_000
"""The largest number of synthetic records, and of test records, for the Frechet distance between the two sets."""


@dataclass(frozen=True)
class Classifier:
    """A classifier that is trained on synthetic records.

    ``held_out``: the classifier's scores on synthetic records that were not used for training. ``tested``: its scores
    on real test records. ``tested`` is None if the experiment makes no test.
    """

    name: str
    params: Params
    held_out: Scores
    tested: Scores | None

    def facts(self) -> dict[str, Any]:
        """Return the classifier's fields for ``result.json``, which lists all classifiers, not only the chosen one."""
        accuracy = self.tested.accuracy if self.tested else None
        return {"name": self.name, "held_out_accuracy": self.held_out.accuracy, "test_accuracy": accuracy}


@dataclass(frozen=True)
class TstrProcedure(Procedure):
    """The procedure of TSTR: the server trains classifiers only on the clients' synthetic records."""

    settings: Tstr

    def run(self, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
        """Ask clients for synthetic records, train all classifiers, and log the scores of the best classifier."""
        observer.preparing("clients make synthetic records (once for all runs with the same pool)")
        prepared_strategy(self.job, FedAvg(), (), grid, out, log, observer)
        assert log.pooled is not None
        # The server sends nothing to clients: clients do not train, so they do not receive the pool.
        log.before = {what: traffic and Traffic(0, traffic.up) for what, traffic in log.before.items()}
        self.settings.check_size(log.pooled.count)
        found = []
        for classifier in self._trained(read_pool(log.pooled.path)):
            accuracy = classifier.held_out.accuracy
            observer.preparing(f"classifier {classifier.name}: {100 * accuracy:.2f} % on held-out synthetic records")
            found.append(classifier)
        observer.preparing("synthetic records are compared with real test records")
        # If several classifiers have the best accuracy, ``max`` chooses the first of them.
        chosen = max(found, key=lambda one: one.held_out.accuracy)
        log.facts["tstr"] = {
            "chosen": chosen.name,
            "classifiers": [one.facts() for one in found],
            "frechet": self._frechet(log.pooled.path),
        }
        log.server = ServerState(chosen.params)
        record = RoundRecord(1, None, None, None, None, None, 0.0, None)
        if chosen.tested is not None:
            log.measured = Measured.of(chosen.tested, self.job.dataset.num_classes)
            record = log.measured.noted_in(record)
        log.rounds.append(record)
        log.chain = run_directory.append_round(out, record, log.chain)
        observer.finished_round(record)

    def _trained(self, pool: Examples) -> Iterator[Classifier]:
        """Train all chosen classifiers on the records in ``pool``, one after another; yield each trained classifier."""
        order = rng(self.job.experiment.seed, "holdout").permutation(len(pool))
        held_out, kept = np.split(order, [round(self.settings.holdout * len(pool))])
        own, rest = pool.take(kept), pool.take(held_out)
        judged_on = resident(rest, self.job.dataset, self.job.device)
        tested_on = evaluation_records(self.job) if self.job.experiment.evaluate.tests(is_last=True) else None
        for name in self.settings.names(self.job.experiment.model.name):
            params, trainer = self._learned(name, own)
            tested = _scored(trainer, params, tested_on) if tested_on else None
            yield Classifier(name, params, _scored(trainer, params, judged_on), tested)

    def _learned(self, name: str, own: Examples) -> tuple[Params, Trainer]:
        """Train the classifier ``name`` on the synthetic records ``own``.

        Return the classifier's parameters and its trainer (the code that trains and evaluates a model).
        """
        experiment, dataset = self.job.experiment, self.job.dataset
        found = None
        # The discriminant is computed in closed form before the model is built. It raises an error if the model would
        # be too large.
        if name in {DISCRIMINANT, QUADRATIC}:
            analyse = linear_discriminant if name == DISCRIMINANT else quadratic_discriminant
            found = analyse(*to_tensors(own, dataset), dataset.num_classes)
        model = self._model(name).to(self.job.device)
        trainer = Trainer(model, load_kernel()[0], self.job.precision)
        if found is not None:
            return {key: value.to(self.job.device) for key, value in found.items()}, trainer
        settings = local_settings(self.job, experiment.local.learning_rate)
        task = LocalTask(1, 0, 1, len(own), settings, detached(model.named_parameters()))
        seeded = partial(seed_process, experiment.seed, f"classifier {name}")
        records = resident(own, dataset, self.job.device).whole()
        with process_kept():
            coins = rng(experiment.seed, f"classifier {name}")
            trained = trainer.train(LocalJob(task, LocalPlan(), records, coins, seeded))
        if not is_finite({"params": trained.params}):
            raise Diverged(f"classifier {name} diverged on the synthetic records; try a smaller local.learning_rate")
        return trained.params, trainer

    def _model(self, name: str) -> nn.Module:
        dataset, seed = self.job.dataset, self.job.experiment.seed_of_model
        if name == QUADRATIC:
            return QuadraticDiscriminant(math.prod(dataset.input_shape), dataset.num_classes)
        if name == self.job.experiment.model.name:
            return self.job.model()
        architecture = "logistic" if name == DISCRIMINANT else name
        return models.build(architecture, dataset.input_shape, dataset.num_classes, seed, trial=self.job.two_records)

    def _frechet(self, pool: Path) -> dict[str, Any] | None:
        """Return the Frechet distance between synthetic records and real test records.

        The result also names the features and the numbers of records. The features are scattering coefficients, or the
        features of the experiment. The result is None in three cases: the experiment makes no test, there are fewer
        than two records, or the records have no scattering features.
        """
        from fl_sim.data.scattering import features_of  # noqa: PLC0415 (scipy takes a second)

        experiment, dataset = self.job.experiment, self.job.dataset
        made, real = (_sampled_inputs(part, experiment.seed) for part in (read_pool(pool), dataset.test))
        if not experiment.evaluate.tests(is_last=True) or min(len(made), len(real)) < 2:
            return None
        kept: Features = experiment.features
        if kept == "none":
            kept = "scattering"
            try:
                made, real = features_of(made), features_of(real)
            # Tables, and images that are too small or too large, have no scattering features.
            except UserError:
                return None
        scale = math.sqrt(made.shape[1])  # scales features to a standard deviation of about 1
        distance = frechet_distance(scale * torch.from_numpy(made), scale * torch.from_numpy(real))
        return {"distance": distance, "features": version_of(kept), "synthetic": len(made), "real": len(real)}

    def work(self) -> tuple[Work, ...]:
        """Return the amounts of computation for the time forecast.

        The computation consists of the generation of synthetic records at clients, and the training and evaluation of
        the classifiers. The forecast lists the training without an estimate of its time.
        """
        measured = len(self.settings.names(self.job.experiment.model.name)) * len(self.job.dataset.test)
        made = (work for stage in stages_of(self.job) for work in stage.work())
        return (*made, evaluation_work(self, measured), Work("the classifiers' training", pieces=1.0))

    def traffic(self) -> dict[str, Traffic]:
        """Return a forecast of the bytes of the synthetic records that clients send to the server."""
        foretold = (stage.traffic({}) for stage in stages_of(self.job))
        return {what: Traffic(0, traffic.up) for once in foretold for what, traffic in once.items()}

    def runtime(self) -> ClientRuntime:
        """Return the client runtime for workers. In this procedure clients make synthetic records and do not train."""
        return runtime_for(self.job, FedAvg(), tasks_of(self.job))


def _sampled_inputs(examples: Examples, seed: int) -> NDArray[Any]:
    rows = rng(seed, "frechet").permutation(len(examples))[:MOST_COMPARED]
    return examples.inputs[np.sort(rows)]


def _scored(trainer: Trainer, params: Params, records: Source) -> Scores:
    return trainer.evaluate(params, records.inputs, records.labels, scale=records.scale)
