"""SemiFL: clients without labels train on pseudo-labels of the received model (Diao et al. 2022, algorithm 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.local_plan import Batch, LossTerm
from fl_sim.types import Trained
from strategies.fixmatch import view
from strategies.partly_labelled import PSEUDO, PartlyLabelled, num_sure, torch_generator

if TYPE_CHECKING:
    from fl_sim.training.courses import Course
    from fl_sim.training.trainer import LocalJob


class SemiFL(PartlyLabelled):
    """FedAvg in which only the server, or only some clients, have labels. All other clients use FixMatch.

    A client without labels predicts the class of each of its records with the received model, on weakly changed views
    of its images. Records with a probability of at least ``threshold`` get the predicted class as pseudo-label for the
    whole round. The client trains on strongly changed views of these records only. Each step also lowers a mixup loss:
    each record is mixed with a random record of the client. The pseudo-label of the random record may be less probable
    than ``threshold``. The step's mixing share is drawn from Beta(``mixing``, ``mixing``). A client without a confident
    record sends no change. Training never reads the true labels of these clients. The partition may read them to divide
    the records.

    Clients with labels train as with FedAvg. A server with labels continues, after each round, with local training on
    its own records, with the local settings of clients. Then the model is evaluated and sent.

    ``server_records``: the number of training records of the server, which no client holds; 0 means that the server has
    no labels. These records are drawn at random, whatever their labels. ``labelled_clients``: the number k of clients
    with labels, which are the clients 0 to k-1. ``threshold``: the smallest probability of a pseudo-label. ``mixing``:
    the parameter of the Beta distribution; 0 leaves the mixup loss out. ``unlabelled``: if false, clients without
    labels do not train; the result is then a lower bound, from labelled records alone. ``augmentation``: the changes of
    views.

    In the paper, only the server has labels, all confident clients have the same weight in the mean, and the local step
    has Nesterov momentum. Here the weight is the number of confident records. The paper's weak views are crops and
    mirror images, its strong views are RandAugment, and its server has equally many records of each class.
    """

    kind: Literal["semifl"] = "semifl"
    title: ClassVar[str] = "SemiFL"
    mixing: float = Field(0.75, ge=0)

    def course(self, job: LocalJob) -> Course:
        """Yield the training jobs of one client: one for a client with labels, else one for each step."""
        from fl_sim.training.courses import at, steps_of, stream  # noqa: PLC0415 (it loads torch)
        from fl_sim.training.records import Records  # noqa: PLC0415 (as above)

        task = job.task
        if self.has_labels(task):
            (trained,) = yield [job]
            return trained
        params, buffers, losses = task.params, job.plan.momentum_buffers, list[float]()
        if num_sure(task):
            inputs, _ = job.records.tensors()
            given, is_sure = task.state[PSEUDO]["labels"], task.state[PSEUDO]["is_sure"]
            draws, shares = torch_generator(stream(job, 1)), stream(job, 2)
            sure = replace(job, records=Records.of(inputs[is_sure], given[is_sure]))
            for step in steps_of(sure):
                records, labels = step.records.tensors()
                plan = replace(step.plan, momentum_buffers=buffers)
                if self.mixing:
                    chosen = torch.from_numpy(shares.integers(len(given), size=len(labels))).to(given.device)
                    share = torch.tensor(shares.beta(self.mixing, self.mixing), dtype=records.dtype)
                    weak = view(self.augmentation.weak, torch.cat([records, inputs[chosen]]), draws)
                    mixed = torch.lerp(weak[len(labels) :], weak[: len(labels)], share.to(weak.device))
                    data = {"mixed": mixed, "second": given[chosen], "share": share}
                    plan = replace(plan, loss_term=LossTerm(_mixup, data))
                strong = replace(step, records=Records.of(view(self.augmentation.strong, records, draws), labels))
                (trained,) = yield [at(strong, params, plan)]
                params, buffers = trained.params, trained.momentum_buffers
                losses.append(trained.loss or 0.0)
        return Trained(params, buffers or {}, len(losses), float(np.mean(losses)) if losses else None)


def _mixup(batch: Batch) -> torch.Tensor:
    """Return the mixup loss of each record, (n,): the cross-entropies with both labels, weighted by their shares."""
    count = len(batch.labels)  # not the batch size: a stacked trainer also calls this for one record
    mixed, second, share = batch.data["mixed"][:count], batch.data["second"][:count], batch.data["share"]
    logits = batch.logits_of(batch.params, mixed)
    losses = [torch.nn.functional.cross_entropy(logits, one, reduction="none") for one in (batch.labels, second)]
    return share * losses[0] + (1 - share) * losses[1]
