"""FedEraser: approximate unlearning from the stored updates of some rounds (Liu et al. 2021, algorithm 1).

The server stores the clients' updates U_k of every few rounds. To unlearn client u, these rounds are repeated without
u, from a calibrated model. In each of them, every other client k trains for fewer steps, which gives a calibration
update V_k. The server then uses the update |U_k| V_k / |V_k|: the length of the stored update with the new direction.
In the first of these rounds, the model does not depend on u yet, so the stored updates are used unchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from fl_sim.errors import UserError
from fl_sim.params import inner_product, scale
from fl_sim.store import run_directory
from fl_sim.threats.finished import FinishedRun
from fl_sim.threats.replay import LocalSteps, Replay
from fl_sim.types import Reply, ServerState
from strategies.algorithm import payload_template


@dataclass(frozen=True)
class FedEraser:
    """The settings of FedEraser. ``calibration``: the fraction of a round's local steps in a calibration, in (0, 1].

    A run stores server states (the setting ``keep_every``), but no updates. The updates of the round after a stored
    state are computed again from this state, with the same result. ``LocalSteps.recomputed`` counts these steps, which
    a server with stored updates would not need.
    """

    calibration: float = 0.5

    def unlearned(self, replay: Replay, client: int, first: int) -> tuple[ServerState, LocalSteps]:
        """Return the server state without ``client``, and the work. ``first``: the client's first round in the run."""
        states = list(self.states(replay, client, stored_rounds(replay.finished, first)))
        return states[-1][0], sum((work for _, work in states), LocalSteps())

    def states(self, replay: Replay, client: int, kept: list[int]) -> Iterator[tuple[ServerState, LocalSteps]]:
        """Yield (calibrated server state, work) for the round after each stored state in ``kept``."""
        like, found = replay.finished.procedure.beginning(), replay.finished.out
        [group] = payload_template(replay.strategy.algorithm, like)
        server: ServerState | None = None
        for after in kept:
            known = run_directory.read_kept(found, after, like)[1] if after else like
            clients = replay.cohort(after + 1, client)
            steps = {one: replay.num_steps(one) for one in clients}
            stored = replay.updates(known, clients, after + 1) if clients else ()
            work = LocalSteps(rounds=1, recomputed=sum(steps.values()))
            if server is None:
                server, replies = known, stored
            else:
                fewer = {one: ceil(self.calibration * count) for one, count in steps.items() if count}
                new = replay.updates(server, clients, after + 1, fewer) if clients else ()
                replies = tuple(calibrated(one, other, group) for one, other in zip(stored, new, strict=True))
                work += LocalSteps(steps=sum(fewer.values()))
            server = replay.merged(server, replies, after + 1)
            yield server, work


def stored_rounds(finished: FinishedRun, first: int) -> list[int]:
    """Return the rounds of the stored server states from which FedEraser repeats the next round; 0: initial model.

    The first one is the latest state before round ``first``. Raises UserError if there is no later stored state.
    """
    rounds = int(finished.facts["rounds"])
    kept = [0, *(one for one in run_directory.kept_rounds(finished.out) if one < rounds)]
    begin = max(one for one in kept if one < first)
    if (usable := [one for one in kept if one >= begin]) == [begin]:
        raise UserError(
            f"FedEraser needs the updates of several rounds, and {finished.out} keeps no server state after round "
            f"{begin} from which they could be computed again: repeat the run with keep_every=2, or take --method exact"
        )
    return usable


def calibrated(stored: Reply, new: Reply, group: str) -> Reply:
    """Return the update ``new`` with the length of the update ``stored`` of the same client.

    ``group``: the name of the payload with the change of the model. If ``new`` has length 0, it has no direction, and
    ``stored`` is returned.
    """
    lengths = [inner_product(reply.payloads[group], reply.payloads[group]) ** 0.5 for reply in (stored, new)]
    if not lengths[1]:
        return stored
    return replace(new, payloads={**new.payloads, group: scale(new.payloads[group], lengths[0] / lengths[1])})
