"""Writes the cost of a client's private round into its privacy ledger, before the client sends the round's results.

``clients.private_steps`` and ``clients.private_updates`` use this module. The privacy unit of the ledger is a record.
If a release protects a whole client, it protects each record of the client at the same cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, Literal

from dp_accounting import dp_event

from clients.client_layer import PaidRound, Payer
from clients.policy import open_ledger
from fl_sim.engines.remote import Ticket
from fl_sim.errors import RunError
from fl_sim.native.kernel import CompiledNormals, load_kernel
from fl_sim.params import zeros_like
from fl_sim.privacy.accounting import epsilon_of_counts, noise_multiplier, steps_that_fit
from fl_sim.privacy.events import amplify_poisson
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.terms import Accountant
from fl_sim.types import ClientUpdate

if TYPE_CHECKING:
    from pathlib import Path

    from fl_sim.privacy.ledger import Ledger
    from fl_sim.training.trainer import LocalJob

_SPENT: Final = (0,)
"""The value of ``counts`` in the ticket of a client that must not train in the round."""


@dataclass(frozen=True)
class ClientProtection:
    """The privacy parameters of the rounds of a client.

    ``epsilon``, ``delta``: the largest privacy cost of all rounds together; an epsilon of None means no limit.
    ``clipping_norm``: the largest L2 norm of a gradient or an update after clipping. ``noise_multiplier``: the standard
    deviation of the noise, divided by ``clipping_norm``; None means the least noise that epsilon allows. ``noise``:
    "secret", or "seeded" for simulations only. ``accountant``: the accountant that finds the noise, and compares costs
    with epsilon.
    """

    epsilon: float | None
    delta: float
    clipping_norm: float
    noise_multiplier: float | None
    noise: Literal["secret", "seeded"]
    accountant: Accountant = "rdp"


@dataclass(frozen=True)
class RoundCost:
    """The noisy steps of one client in one round, and their privacy cost for each record of the client.

    ``noise_multiplier``: the standard deviation of the noise on a sum, divided by the sum's sensitivity. ``rate``: the
    probability with which a record joins a step. ``num_steps``: the number of steps in the round. ``most_rounds``: the
    number of rounds that the client's epsilon allows; None means no limit.
    """

    noise_multiplier: float
    rate: float
    num_steps: int
    most_rounds: int | None

    @property
    def event(self) -> dp_event.DpEvent:
        """Return the privacy event of one noisy step: a Gaussian mechanism with Poisson sampling."""
        return amplify_poisson(dp_event.GaussianDpEvent(self.noise_multiplier), self.rate)

    @property
    def charge(self) -> dp_event.DpEvent:
        """Return the privacy event of all steps of the round."""
        return self.event if self.num_steps == 1 else dp_event.SelfComposedDpEvent(self.event, self.num_steps)


def cost_of_round(protection: ClientProtection, sensitivity: float, rate: float, rounds: int, steps: int) -> RoundCost:
    """Return the privacy cost of one round of ``steps`` noisy steps, in a run of ``rounds`` rounds.

    ``sensitivity``: the sensitivity of a step's sum, in units of the clipping norm. ``rate``: the probability with
    which a record joins a step. If ``protection`` has no noise multiplier, the round has the least noise with which all
    rounds cost at most epsilon. Raises UserError if no noise is enough for epsilon.
    """
    noise = protection.noise_multiplier
    relative = replace(protection, clipping_norm=1.0, noise="secret", noise_multiplier=noise and noise / sensitivity)
    return _cost_of_round(relative, rate, rounds, steps)


@lru_cache(maxsize=2**16)
def _cost_of_round(protection: ClientProtection, rate: float, rounds: int, steps: int) -> RoundCost:
    epsilon, delta, accountant = protection.epsilon, protection.delta, protection.accountant
    if protection.noise_multiplier is None:
        assert epsilon is not None
        sampled = partial(amplify_poisson, sampling_rate=rate)
        found = noise_multiplier(sampled, max(1, steps * rounds), epsilon, delta, accountant=accountant)
        return RoundCost(found, rate, steps, rounds)
    cost = RoundCost(protection.noise_multiplier, rate, steps, None)
    if epsilon is None:
        return cost
    if not steps or epsilon_of_counts({cost.charge: rounds}, delta, accountant=accountant) <= epsilon:
        return replace(cost, most_rounds=rounds)
    return replace(cost, most_rounds=steps_that_fit(cost.event, epsilon, delta, accountant=accountant) // steps)


@dataclass(frozen=True)
class Releases:
    """The names under which a privacy ledger lists a run's releases (outputs with a privacy cost).

    A ledger charges a name only once for each noise key (the secret seed of the noise).

    ``what``: the released numbers, such as "update". ``noise``: "secret" or "seeded". ``run_digest``: a digest of the
    experiment. In the ledger, it identifies a run with seeded noise, because every repetition of this run releases the
    same numbers.
    """

    what: str
    noise: Literal["secret", "seeded"]
    run_digest: str

    def num_charged(self, ledger: Ledger, run: str, client: int) -> int:
        """Return the number of rounds of a run that are charged in the ledger of ``client``.

        A round that was repeated and charged again is counted twice. ``run``: the random name of the run.
        """
        return sum(one.release.startswith(self._rounds(run, client)) for one in ledger.charges)

    def paid(self, client: Payer, server_round: int, cost: RoundCost) -> Noise | None:
        """Write the cost of a client's round into its privacy ledger, and return the source of the round's noise.

        Return None if the budget is spent. Raises RunError if a policy forbids the release. A worker without access to
        the ledger needs a ticket (the driver's proof that the cost is charged). Without a ticket, it raises RunError.
        """
        policy = client.policy
        if ticket := client.ticket:
            return None if ticket.counts == _SPENT else _fast(Noise(ticket.key, ticket.simulation_only))
        if not client.has_disk:
            raise RunError(
                "this worker has no access to the client's privacy ledger, and nothing is released without a charge: "
                "start the same version of fl-sim on all machines"
            )
        if policy:
            policy.check_noise(self.noise, "local.privacy.noise")
        if self.noise == "seeded":
            text = f"{self.run_digest} {client.number} {server_round}"
            noise = Noise.seeded(int.from_bytes(hashlib.sha256(text.encode()).digest()))
        else:
            noise = Noise.secret()
        release = f"{self._rounds(client.run, client.number)}{server_round}"
        if cost.most_rounds is not None:
            ledger = policy.open_ledger() if policy else _open(client.ledger)
            ledger.catch_up()
            is_new = not ledger.has_charged(release, noise.identity)
            if is_new and self.num_charged(ledger, client.run, client.number) >= cost.most_rounds:
                return None
        if policy:
            policy.pay({release: cost.charge}, noise.identity)
        else:
            _open(client.ledger).charge(cost.charge, release=release, noise=noise.identity)
        return _fast(noise)

    def _rounds(self, run: str, client: int) -> str:
        name = self.run_digest if self.noise == "seeded" else run
        return f"{self.what} of run {name}, client {client}, round "


def ticket_of(noise: Noise) -> Ticket:
    """Return a round's ticket: the proof that its privacy cost is charged. ``noise``: the source of its noise."""
    return Ticket(noise.key, noise.simulation_only)


def round_without_records(jobs: Mapping[str, LocalJob]) -> PaidRound:
    """Return the private round of a client that has no records, or must not use them.

    The client does not train, and sends zeros.
    """
    idle = {
        name: replace(job, records=job.records.none(), task=replace(job.task, num_examples=0))
        for name, job in jobs.items()
    }
    return PaidRound(idle, Ticket(bytes(32), simulation_only=True, counts=_SPENT), silent)


def silent(update: ClientUpdate) -> ClientUpdate:
    """Return ``update`` with zeros, weight 0 and no loss, for a client that must not send a private update."""
    payloads = {group: zeros_like(params) for group, params in update.payloads.items()}
    return ClientUpdate(payloads, 0, None, update.state)


def _fast(noise: Noise) -> Noise:
    kernel = load_kernel()[0]
    return replace(noise, normals=CompiledNormals(kernel)) if kernel else noise


@lru_cache(maxsize=2**14)
def _open(path: Path) -> Ledger:
    return open_ledger(path)
