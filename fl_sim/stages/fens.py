"""The stage of FENS: after the last round, clients train a small network on the logits of all client models.

This network is called the combiner. The network and the settings are in ``strategies.fens``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import torch
from flwr.app import RecordDict
from safetensors.torch import load_file, save

from clients.client_task import Client
from fl_sim.engines import arrays, wire
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.job import Job
from fl_sim.seeding import rng
from fl_sim.simulation.client_runtime import records_as_seen
from fl_sim.simulation.measuring import Measured
from fl_sim.simulation.stage import Run
from fl_sim.simulation.timing import Work
from fl_sim.stages.ensemble import MeasuresEnsemble, on_device
from fl_sim.store.tensors import save_by_content, write_private
from fl_sim.training.evaluation import score
from fl_sim.training.features import Network
from fl_sim.types import Params, Traffic
from strategies.fens import Fens, combined

COMBINE: Final = "combine"
"""The name of the client task that trains the combiner."""

_COUNT: Final = "count"


def settings_of(job: Job) -> Fens:
    """Return the settings of FENS. The experiment of ``job`` must use FENS."""
    assert isinstance(job.experiment.algorithm, Fens)
    return job.experiment.algorithm


@dataclass(frozen=True)
class Combine:
    """The client task that trains the combiner on the client's held-out records.

    The first message contains the models. The client stores the models' logits in its own folder until training ends.
    """

    job: Job
    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = False
    runs_in_threads: ClassVar[bool] = False

    def run(self, client: Client) -> RecordDict:
        """Return the message with the client's combiner (a small network), and its number of held-out records."""
        settings, number = settings_of(self.job), client.config.server_round
        if not client.has_disk:
            raise UserError(
                "algorithm fens stores logits in each client's folder, and this client has no folder: set "
                "engine=inprocess, or engine=ray on one machine"
            )
        place = client.folder(settings.kind) / "logits.safetensors"
        if models := [client.broadcast.groups[name] for name in sorted(client.broadcast.groups)]:
            logits, labels = self._logits(client, models)
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(place, save({"logits": logits, "labels": labels}))
        held = load_file(place)
        generator = rng(self.job.experiment.seed, "combiner", client.number, number)
        made = settings.trained(client.params, held["logits"], held["labels"], generator)
        if number >= settings.combiner_rounds:
            place.unlink()
        return wire.sums_content({**made, _COUNT: torch.tensor([float(len(held["labels"]))])})

    def _logits(self, client: Client, models: list[Params]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of all models, (n, models, classes), and labels, (n,), on the CPU."""
        job, number = self.job, client.number
        parts = job.validation[number] if len(job.validation) else np.zeros(0, dtype=np.int64)
        examples = job.records.train.take(parts)
        inputs, labels = records_as_seen(job, examples, number, "own validation feature-noise").tensors()
        network = Network(client.runtime.model.eval())
        with torch.no_grad():
            found = [network.logits_of(on_device(inputs.device, model), inputs) for model in models]
        return torch.stack(found, 1).cpu().contiguous(), labels.cpu()


class TrainedCombiner(MeasuresEnsemble):
    """The stage at the server: it averages the clients' combiners, and tests the combination of all models."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._found: dict[str, Any] = {}

    def tasks(self) -> Mapping[str, Combine]:
        """Return the client task ``combine``, which trains the combiner."""
        return {COMBINE: Combine(self.job)}

    def after(self, run: Run) -> None:
        """Train the combiner, save it with the models, and test the combination of all models.

        Raises RunError if no client has held-out records. Also raises RunError if the run was interrupted after its
        last round, because the client models were only in memory.
        """
        job, log, settings = self.job, run.log, settings_of(self.job)
        if not (models := self.models()):
            raise RunError(
                "fens keeps the models of the last round only in memory, and this run was interrupted after it: start "
                "the run again with --again"
            )
        combiner = settings.first(len(models), job.dataset.num_classes, rng(job.experiment.seed, "first combiner"))
        log.after["combiner"] = self._traffic(self.kept.models, combiner)
        for number in range(1, settings.combiner_rounds + 1):
            combiner = self._averaged(run, combiner, number)
        tensors = {f"combiner.{name}": value for name, value in combiner.items()}
        for place, one in enumerate(self.kept.models):
            tensors |= {f"{place}.{name}": value for name, value in one.items()}
        saved = save_by_content(run.out.absolute(), "ensemble", tensors)
        self._found = {"accuracy_of_mean": log.rounds[-1].test_accuracy, "accuracy": None, "file": saved.name}
        if not job.experiment.evaluate.tests(is_last=True):
            return
        placed, network, test = on_device(job.device, combiner), self.network, run.measuring.test

        def logits_of(records: torch.Tensor) -> torch.Tensor:
            shown = test.normalised(records)
            return combined(placed, torch.stack([network.logits_of(one, shown) for one in models], 1))

        scores = score(logits_of, test.inputs, test.labels)
        found = Measured.of(scores, job.dataset.num_classes, clients_by=run.measuring.clients_by)
        log.measured = log.measured_again = found
        self._found["accuracy"] = scores.accuracy

    def _averaged(self, run: Run, combiner: Params, number: int) -> Params:
        """Let clients train ``combiner``, and return the mean of the results, weighted by numbers of held-out records.

        ``number``: the number of this round of the combiner's training, from 1. In round 1, clients also receive all
        models.
        """
        models = {f"model-{place:05}": one for place, one in enumerate(self.kept.models)} if number == 1 else {}
        template = {**combiner, _COUNT: torch.zeros(1)}
        order = replace(run.order, server_round=number)
        read = partial(wire.read_sums, template=template)
        answers = run.ask(COMBINE, read, quoted=True, params=combiner, broadcast=models, order=order)
        counts = [float(one[_COUNT]) for one in answers]
        if not sum(counts) > 0:
            raise RunError("no client holds out a record for the combiner of fens: set a larger evaluate.validation")
        shares = torch.tensor(counts) / sum(counts)
        return {name: torch.tensordot(shares, torch.stack([one[name] for one in answers]), 1) for name in combiner}

    def work(self) -> tuple[Work, ...]:
        """Return the computation of the combiner. The forecast lists it, but does not estimate its time."""
        return (Work("the training of the combiner", pieces=1.0),)

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return a forecast of bytes: each client receives all models of a round, then receives and sends combiners."""
        cohort = round(self.job.experiment.sampler.expected_size(self.job.experiment.num_members))
        first = settings_of(self.job).first(cohort, self.job.dataset.num_classes, rng(0, "first combiner"))
        return {"combiner": self._traffic([params] * cohort, first)}

    def _traffic(self, models: list[Params], combiner: Params) -> Traffic:
        rounds = settings_of(self.job).combiner_rounds
        groups = {f"model-{place:05}": one for place, one in enumerate(models)}
        first, later = (arrays.num_bytes(wire.task_content(wire.BLANK, combiner, one)) for one in (groups, {}))
        up = arrays.num_bytes(wire.sums_content({**combiner, _COUNT: torch.zeros(1)}))
        each = Traffic(first + (rounds - 1) * later, rounds * up) if rounds else Traffic(0, 0)
        return each * self.job.experiment.num_clients

    def facts(self) -> Mapping[str, Any]:
        """Return the fields ``ensemble`` and ``fens`` for ``result.json``: results of the combined models."""
        found = dict(self._found)
        if found.get("accuracy") is not None:
            found["in_words"] = f"accuracy of {len(self.kept.models)} models, combined by the trained combiner"
        return {**super().facts(), "fens": found}
