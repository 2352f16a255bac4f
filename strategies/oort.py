"""Oort: clients with high losses and fast devices train more often (Lai et al. 2021, algorithm 1)."""

from __future__ import annotations

import math
from typing import ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.kinds import Choices, off
from strategies.guided_sampler import Feedback, GuidedSampler, smallest
from strategies.samplers import Coins, distinct

_DECAY: Final = 0.98
_CUT_OFF: Final = 0.95
_PERCENTILE: Final = 95.0


class Oort(GuidedSampler):
    """A share of the cohort is new clients; the rest is drawn from the known clients with the highest utilities.

    Known clients have sent an update before; new clients have not. The utility of client i is (U_i + sqrt(0.1 log t /
    t_i)) (T / s_i)^alpha. The last factor is used only if s_i > T. t is the round, t_i the last round with an update of
    the client, and s_i the virtual duration of its work in that round (``devices``). U_i is its number of records times
    its mean loss in that round, at most the 95th percentile of these products. T is a percentile of all known
    durations. If the cohort has k known clients, they are drawn in proportion to utility, from all clients with at
    least 95 % of the k-th largest utility.

    In round t the share of new clients is max(``least_exploration``, ``exploration`` 0.98^(t-1)). They are drawn
    uniformly. If there are too few new clients, known clients are drawn uniformly instead. If both settings are 1,
    cohorts are drawn as by ``fixed-size``, except that new clients come first.

    In the paper U_i contains the root mean square of the records' losses; here clients send the mean loss. The square
    root in the utility has t_i as in the released code; the paper has the number of rounds since t_i.

    The pacer (Lai et al. 2021, section 4.3) raises T. After every W rounds it compares two sums of U_i (without the
    limit): over the clients of the last W rounds, and over the clients of the W rounds before. If the sum fell, the
    percentile that defines T grows by ``pacer_step``, to 100 at most. In the paper T itself grows, by a step in
    seconds. The released code also raises the percentile, but only if the sum changes by less than a tenth. Its sums
    leave out U_i of new clients.

    ``cohort_size``: the number of clients in a round. ``alpha``: the exponent of T / s_i in the utility; with 0,
    durations have no effect. ``exploration``: the share of new clients in the first round. ``least_exploration``: the
    least share of new clients. ``preferred_percentile``: the initial percentile; T is this percentile of all known
    durations. ``pacer_window``: W; 0 for no pacer. The released code has W = 20 and steps of 5.
    """

    kind: Literal["oort"] = "oort"
    title: ClassVar[str] = "Oort"
    cohort_size: int = Field(10, ge=1)
    alpha: float = Field(2.0, ge=0)
    exploration: float = Field(0.9, ge=0, le=1)
    least_exploration: float = Field(0.2, ge=0, le=1)
    preferred_percentile: float = Field(30.0, ge=0, le=100)
    pacer_window: int = Field(0, ge=0)
    pacer_step: float = Field(5.0, gt=0, le=100)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        said, window = super().remarks(experiment), self.pacer_window
        if not window and self.pacer_step != type(self).model_fields["pacer_step"].default:
            said.append(off(f"sampler.pacer_step={self.pacer_step:g}", "sampler.pacer_window=0 turns the pacer off"))
        elif window and not self.alpha:
            said.append(off(f"sampler.pacer_window={window}", "sampler.alpha=0, and durations do not count"))
        elif window and experiment.rounds <= 2 * window:
            said.append(off(f"sampler.pacer_window={window}", f"it first acts after {2 * window} rounds"))
        return said

    def select(self, coins: Coins, server_round: int, feedback: Feedback) -> NDArray[np.int64]:
        """Return the cohort, ascending: known clients with high utilities, and new clients."""
        num_clients = len(feedback.sizes)
        drawn, holds = distinct(num_clients, coins), feedback.sizes > 0
        known = np.array([client in feedback.met for client in range(num_clients)])
        share = max(self.least_exploration, self.exploration * _DECAY ** (server_round - 1))
        explored = round(share * self.cohort_size)
        wanted = min(max(self.cohort_size - explored, 0), int((known & holds).sum()))
        best = np.arange(0)
        if wanted:
            utility = np.where(holds, self.utilities(server_round, feedback), 0.0)
            least = _CUT_OFF * np.sort(utility)[-wanted]
            best = smallest(distinct(num_clients, coins), np.where(utility >= least, utility, 0.0), wanted)
        others = holds.copy()
        others[best] = False
        new = smallest(drawn, others & ~known, self.cohort_size - len(best))
        others[new] = False
        rest = smallest(drawn, others, self.cohort_size - len(best) - len(new))
        return np.sort(np.concatenate([best, new, rest]))

    def utilities(self, server_round: int, feedback: Feedback) -> NDArray[np.float64]:
        """Return the utility of each client, shape (clients,); 0 for a client without an update so far."""
        utility, met = np.zeros(len(feedback.sizes)), feedback.met
        if not met:
            return utility
        clients = np.array(list(met))
        gains = feedback.sizes[clients] * np.array([max(0.0, one.loss) for one in met.values()])
        gains = np.minimum(gains, np.percentile(gains, _PERCENTILE))
        seconds = np.array([one.seconds for one in met.values()])
        preferred = np.percentile(seconds, self.percentile(server_round, feedback))
        since = [math.sqrt(0.1 * math.log(server_round) / one.server_round) for one in met.values()]
        slowness = np.divide(preferred, seconds, out=np.ones(len(seconds)), where=seconds > preferred)
        utility[clients] = (gains + since) * slowness**self.alpha
        return utility

    def percentile(self, server_round: int, feedback: Feedback) -> float:
        """Return the percentile of durations that defines T in this round.

        The percentile grows by ``pacer_step`` whenever the pacer finds that the sum of U_i fell.
        """
        window, found = self.pacer_window, self.preferred_percentile
        for end in range(2 * window, server_round, window) if window else ():
            before, last = (
                sum(feedback.gains.get(number, 0.0) for number in range(stop - window + 1, stop + 1))
                for stop in (end - window, end)
            )
            found += self.pacer_step if last < before else 0.0
        return min(found, 100.0)
