"""FedMD: clients keep their models, and learn from the mean of all logits on public records (Li and Wang 2019)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.params import head_shape
from fl_sim.types import LocalTask, Params, ServerState
from strategies.class_means import KeepsModels

if TYPE_CHECKING:
    from fl_sim.training.courses import Course
    from fl_sim.training.trainer import LocalJob


class FedMD(KeepsModels):
    """Each client trains its own model: first towards the mean logits of all clients, then on its own records.

    Before each round except the first, every client i sends its logits f_i(u) on the public records u. The cohort
    receives their mean fbar(u). A client of the cohort first lowers |f_i(u) - fbar(u)|, averaged over public records
    and classes, by plain SGD; the paper calls this step the digest. Then the client trains on its own records, as with
    the algorithm ``local-only``. No parameter is sent. Clients without records skip the digest.

    ``proxy``: the name of the data set with the public records. Its labels are not used, and its inputs must have the
    shape of the clients' inputs. With "none" the run is bit-identical to ``local-only``. ``public_records``: the number
    of public records, drawn once for all rounds from the training records of ``proxy``. ``digest_epochs``,
    ``digest_rate`` and ``digest_batch``: the epochs, learning rate and batch size of the digest. In the paper, clients
    first train on labelled public records, and new public records are drawn for each round.
    """

    kind: Literal["fedmd"] = "fedmd"
    title: ClassVar[str] = "FedMD"
    layer: ClassVar[str] = "strategies.public_logits:PublicLogits"
    stage: ClassVar[str] = "fl_sim.stages.public_logits:PublicRecords"
    payload: ClassVar[str] = "logits on public records"
    proxy: str = Field("none", min_length=1)
    public_records: int = Field(500, ge=1, le=10**5)
    digest_epochs: int = Field(1, ge=1)
    digest_rate: float = Field(0.1, gt=0)
    digest_batch: int = Field(32, ge=1)

    def mean_only(self) -> str:
        """Return the reason why this method cannot use robust aggregators, for error messages."""
        return "clients receive the mean logits of all clients, also of those that a robust aggregator leaves out"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return remarks for the user: one sentence for each setting that has no effect."""
        if self.proxy == "none":
            return [off("algorithm.proxy=none", "each client's own model is that of algorithm local-only")]
        first = "rounds=1, and there are no logits of trained models in the first round"
        return [off("algorithm fedmd", first)] if experiment.rounds == 1 else []

    def further_data(self) -> str:
        """Return the name of the data set with the public records."""
        return "" if self.proxy == "none" else self.proxy

    def note(self) -> str:
        """Return the note below result tables. It names the tensors that clients send."""
        return f"FedMD: clients send only their logits on {self.public_records:,} public records of {self.proxy}."

    def init_for(self, params: Params, model: Params) -> ServerState:
        """Return the server state before round 1, when no mean logits are known.

        ``params``: the parameters of ``model`` that clients send.
        """
        return ServerState(params, {"consensus": {"logits": torch.zeros(0, head_shape(model)[0])}})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the client's local objective on its own records (``LocalPlan``): plain local steps."""
        del task
        return LocalPlan()

    def course(self, job: LocalJob) -> Course:
        """Return a generator of a client's training jobs: the digest if there are mean logits, then local training."""
        from fl_sim.training.courses import at, steps_of, stream  # noqa: PLC0415 (it loads torch)
        from fl_sim.training.records import Records  # noqa: PLC0415 (as above)
        from fl_sim.types import Augment  # noqa: PLC0415 (only for a digest)

        consensus, task, own = job.task.broadcast.get("consensus", {}).get("logits", ()), job.task, job
        if len(consensus) and len(job.records):
            device = job.records.tensors()[0].device
            inputs, targets = task.pool["inputs"].to(device), torch.as_tensor(consensus).to(device)
            rows, scale = torch.arange(len(targets), device=device), torch.zeros(targets.shape[1], device=device)
            settings = replace(
                task.settings, learning_rate=self.digest_rate, momentum=0.0, weight_decay=0.0, optimizer="sgd",
                batch_size=self.digest_batch, epochs=self.digest_epochs, steps=0, label_smoothing=0.0,
                augment=Augment(),
            )  # fmt: skip
            public = replace(
                job, task=replace(task, settings=settings), records=Records.of(inputs, rows), generator=stream(job, 1)
            )
            params, statistics = task.params, task.statistics
            for step in steps_of(public):
                batch, chosen = step.records.tensors()
                # public records have no labels, so a factor 0 on the logits makes the cross-entropy's gradient 0
                plan = LocalPlan(logit_scale=scale, loss_term=LossTerm(self.digest, {"targets": targets[chosen]}))
                unlabelled = replace(step, records=Records.of(batch, torch.zeros_like(chosen)))
                (made,) = yield [at(unlabelled, params, plan, statistics=statistics)]
                params, statistics = made.params, made.statistics
            own = replace(job, task=replace(task, params=params, statistics=statistics))
        (trained,) = yield [own]
        return trained

    def digest(self, batch: Batch) -> torch.Tensor:
        """Return the digest's loss of each public record, (n,): mean absolute difference from the mean logits."""
        return (batch.logits - batch.data["targets"]).abs().mean(-1)
