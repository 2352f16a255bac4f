"""The observations of an attacker on one client: gradients of local steps, and the update of a round.

The client's own code computes these observations for a finished run, with the run's algorithm and layers. There is one
difference from the run: the noise comes from a seed, and no privacy ledger is charged. So these observations must not
be shown if the run promises to protect the records (``FinishedRun.refuse_private_records``).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clients.client_task import Broadcast, Client
from clients.train import TrainingJob
from fl_sim.engines import wire
from fl_sim.engines.remote import Ticket
from fl_sim.errors import UserError
from fl_sim.kinds import kind_of
from fl_sim.local_plan import PrivateSteps
from fl_sim.params import copied, layout_of, load_statistics
from fl_sim.privacy.mechanisms import Noise, add_noise
from fl_sim.seeding import rng
from fl_sim.store import run_directory
from fl_sim.threats.finished import FinishedRun
from fl_sim.training.features import Network
from fl_sim.training.loop import Objective, trained_weights
from fl_sim.training.per_record import clipped_sum_of
from fl_sim.training.private_steps import StepPlan
from fl_sim.types import Params, ServerState


def server_of(finished: FinishedRun, at: str) -> ServerState:
    """Return the server state before the first round if ``at`` is "initial", else after the last round."""
    server = finished.procedure.beginning()
    if at == "initial":
        return server
    if kept := run_directory.read_checkpoint(finished.out, server):
        return kept[1]
    model = run_directory.read_model(finished.out)
    layers = {name: model[name] for name in server.layers}
    return replace(server, params={name: model[name] for name in server.params}, layers=layers)


@dataclass(frozen=True)
class Observed:
    """One client in an additional round of a run, as an attacker observes it.

    ``model``: the model that the client received, in evaluation mode. ``training``: the client's local training, with
    clipping and noise. ``num_records``: the number of the client's training records. ``sent``: the names of the trained
    parameters that clients send; all others, such as personal layers, stay on the client.
    """

    model: nn.Module
    training: TrainingJob
    num_records: int
    sent: frozenset[str]

    @classmethod
    def of(cls, finished: FinishedRun, client: int, server: ServerState) -> Self:
        """Return the observed ``client`` in an additional round, which starts from the server state ``server``.

        Raises UserError if clients of this run send nothing that an attacker can use.
        """
        experiment, runtime = finished.job.experiment, finished.runtime.of_client(client)
        if any(layer.only_sums for layer in runtime.layers):
            raise UserError(
                f"the run in {finished.out} has aggregator={kind_of(experiment.aggregator)}: its server sees only sums "
                "over clients, and this attack needs a single client's update: give a run without this aggregator"
            )
        if not runtime.trains_on_own("synthetic records"):
            raise UserError(
                f"the clients of {finished.out} train only on synthetic records "
                f"(preprocess={kind_of(experiment.preprocess)}), so no gradient of a training record leaves a client: "
                "give a run whose clients train on their own records"
            )
        key = Noise.seeded(int(rng(experiment.seed, "attack", client).integers(2**63))).key
        rate = experiment.local.rate_in(finished.facts["rounds"], experiment.rounds)
        config = replace(wire.BLANK, server_round=finished.facts["rounds"] + 1, learning_rate=rate)
        received = Broadcast(server.model, server.broadcast)
        sees = Client(
            client, runtime, config, wire.config_content(config), ticket=Ticket(key, simulation_only=True),
            read=lambda _: received,
        )  # fmt: skip
        training = TrainingJob.of(sees)
        model = copied(runtime.model)
        model.load_state_dict({**training.job.task.params}, strict=False)
        load_statistics(model, training.job.task.statistics)
        found = cls(model.eval(), training, len(training.job.records), frozenset(server.params))
        if not found.sent & found.trained.keys():
            raise UserError(
                f"no trained parameter of the model leaves a client of {finished.out} "
                f"(algorithm={kind_of(experiment.algorithm)}): give a run of another algorithm, such as fedavg"
            )
        return found

    def at(self, params: Params) -> "Observed":
        """Return a copy of this observed client, with ``params`` as the received parameters."""
        model = copied(self.model)
        model.load_state_dict({**params}, strict=False)
        return replace(self, model=model.eval())

    @property
    def private(self) -> PrivateSteps | None:
        """The clipping and the noise of the client's local steps; None for steps without noise."""
        return self.training.job.plan.private

    @cached_property
    def trained(self) -> dict[str, torch.Tensor]:
        """The parameters of ``model`` that local training changes, by name."""
        return trained_weights(self.model, self.training.job.plan)

    @cached_property
    def step(self) -> StepPlan | None:
        """The constants of the client's noisy steps, such as the noise's standard deviation; None without noise."""
        if self.private is None:
            return None
        return StepPlan.of(self.private, self.training.job.task.settings, self.num_records, layout_of(self.trained))

    @property
    def shows_gradients(self) -> bool:
        """False if the client adds noise to its whole update instead of the gradients of its steps."""
        return self.private is not None or not self.training.paid

    def refuse_protected_updates(self, finished: FinishedRun) -> None:
        """Raise UserError if the client adds noise to its whole update instead of the gradients of its steps."""
        if not self.shows_gradients:
            raise UserError(
                f"the run in {finished.out} has local.privacy={kind_of(finished.job.experiment.local.privacy)}, which "
                "adds noise to whole updates, so no gradient of a step leaves a client, and this attack needs "
                "gradients: give a run whose steps have noise (local.privacy=dp-sgd), or a run without local.privacy"
            )

    def summed(self, inputs: torch.Tensor, labels: torch.Tensor) -> Params:
        """Return the sum of the gradients of n records, clipped as in a step of the run, without noise.

        ``inputs``: (n, *input shape), normalised. ``labels``: (n,). The result has the names and shapes of ``trained``.
        """
        plan, settings = self.training.job.plan, self.training.job.task.settings
        if self.private is None or self.step is None:
            objective = Objective.of(
                Network(self.model), plan, self.trained, inputs.device, smoothing=settings.label_smoothing
            )
            loss = len(labels) * objective.loss(inputs, labels, objective.partner(rng(0, "attack")))
            found = torch.autograd.grad(loss, list(self.trained.values()), materialize_grads=True)
            return dict(zip(self.trained, found, strict=True))
        clipped_sum = clipped_sum_of(self.model, self.trained, settings.label_smoothing, self.private.clipping)
        return self._shaped(clipped_sum(inputs, labels, self.step.limit))

    def noisy(self, total: Params, draw: int) -> Params:
        """Add the noise of a step to ``total``, if steps have noise. Return only the tensors that the client sends.

        ``total``: a result of ``summed``. ``draw``: the index of the noise; equal indices give equal noise.
        """
        if self.private is None or self.step is None:
            return self._visible(total)
        flat = torch.cat([value.flatten() for value in total.values()]).double().cpu().numpy()
        steps = self.private.noise.gaussian(
            self.step.size, self.step.std, purpose=f"noise {draw} of an attack", server_round=0
        )
        return self._visible(self._shaped(add_noise(flat, self.step.std, steps)))

    def _visible(self, gradient: Params) -> Params:
        return {name: value for name, value in gradient.items() if name in self.sent}

    def _shaped(self, values: NDArray[np.float64]) -> Params:
        """Return the vector ``values`` as float64 tensors with the names and shapes of ``trained``."""
        parts = torch.split(torch.from_numpy(values), [weight.numel() for weight in self.trained.values()])
        pairs = zip(self.trained.items(), parts, strict=True)
        return {name: part.view_as(weight).to(weight.device) for (name, weight), part in pairs}

    def update(self) -> Params | None:
        """Return the change of the model that the client sends in its round.

        The result is None if the client sends something else, such as a compressed update.
        """
        sent = self.training.updated(self.training.client.runtime.prepare(self.training.jobs)())
        delta = sent.payloads.get("delta")
        return delta if delta and delta.keys() <= self.training.job.task.params.keys() else None
