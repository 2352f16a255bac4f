"""One-run privacy audit: guesses about the membership of records prove a lower bound on the epsilon of one run.

The audit needs canaries, each of which takes part in the run with probability 1/2, independently of all others
(Steinke, Nasr, Jagielski 2023, algorithm 1). In a run with the setting ``left_out=0.5``, all training records are
canaries. The auditor guesses "in" for the records with the smallest losses, "out" for the records with the largest
losses, and makes no guess for the rest. If too many guesses are correct, a claimed epsilon is false (theorem 5.2 of the
same paper). Ordinary records are weak canaries: crafted records prove more (``fl_sim.threats.crafted``).
"""

from dataclasses import dataclass

import numpy as np

from fl_sim.errors import UserError
from fl_sim.privacy.audit import guess, power_limit
from fl_sim.threats.finished import FinishedRun
from fl_sim.threats.lira import Audited, judged_by_loss

_DELTA_WITHOUT_CLAIM = 1e-5


@dataclass(frozen=True)
class Proven:
    """The result of a one-run audit: epsilon is at least ``epsilon_lower_bound`` at ``delta``, with 95 % confidence.

    ``claimed``: the epsilon that the run promises for each record at ``delta``; None without such a promise.
    ``canaries``: the number of canaries. ``guesses``: the number of guesses that prove the bound. ``correct``: the
    number of these guesses that are correct. ``limit``: the largest epsilon that this number of canaries can prove.
    """

    claimed: float | None
    delta: float
    canaries: int
    guesses: int
    correct: int
    epsilon_lower_bound: float
    limit: float


def audit(finished: FinishedRun) -> Proven:
    """Audit the final model of ``finished``, and return the lower bound on epsilon that the audit proves.

    Raises UserError as ``Audited.of`` does, and if the run does not leave out each record with probability 1/2.
    """
    if finished.job.experiment.left_out != 0.5:
        raise UserError(
            f"the run in {finished.out} has left_out={finished.job.experiment.left_out:g}, and each canary must take "
            "part with probability 1/2: give a run with left_out=0.5"
        )
    audited = Audited.of(finished)
    # The order of records with equal losses must not depend on membership, so all records are sorted by their indices.
    order = np.argsort(np.concatenate([audited.members, audited.others]))
    taking_part, losses = audited.is_member[order], judged_by_loss(finished, audited).losses[order]
    claimed, delta = max(
        ((one.of_run[0], one.of_run[1]) for one in finished.covering if one.epsilon is not None),
        key=lambda claim: claim[0] or 0.0, default=(None, _DELTA_WITHOUT_CLAIM),
    )  # fmt: skip
    best = max(guess(-losses, taking_part, delta), key=lambda one: one.epsilon_lower_bound)
    return Proven(
        claimed, delta, len(order), best.guesses, best.correct, best.epsilon_lower_bound,
        power_limit(len(order), delta),
    )  # fmt: skip
