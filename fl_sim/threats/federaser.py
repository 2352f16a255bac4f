"""FedEraser: approximate unlearning from the stored updates of some rounds (Liu et al. 2021, algorithm 1).

The server stores the updates U_k of all clients k in every few rounds. To unlearn client u, these rounds are repeated
without u. In each of them, every other client k trains again from the new model, for fewer steps, and gets an update
V_k. The server then uses the update |U_k| V_k / |V_k|: it has the length of the stored update and the new direction.
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
    """The settings of FedEraser.

    ``calibration``: in a repeated round, a client takes this fraction of its usual local steps, in (0, 1].

    A run stores server states (the setting ``keep_every``), but no updates. So the updates of the round after a stored
    state are recomputed from this state, with the same result. ``LocalSteps.recomputed`` counts the local steps of this
    recomputation. A server with stored updates would not need them.
    """

    calibration: float = 0.5

    def unlearned(self, replay: Replay, client: int, first: int) -> tuple[ServerState, LocalSteps]:
        """Return the server state after unlearning ``client``, and the amount of work.

        ``first``: the first round in which the client took part.
        """
        states = list(self.states(replay, client, stored_rounds(replay.finished, first)))
        return states[-1][0], sum((work for _, work in states), LocalSteps())

    def states(self, replay: Replay, client: int, kept: list[int]) -> Iterator[tuple[ServerState, LocalSteps]]:
        """Repeat the round after each stored state without ``client``; yield pairs (new server state, amount of work).

        ``kept``: the rounds of the stored states; 0 stands for the initial model.
        """
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
    """Return the rounds of the stored server states that FedEraser uses; 0 stands for the initial model.

    After each of these states, FedEraser repeats one round. The first state is the latest state before round ``first``.
    Raises UserError if no other state follows.
    """
    rounds = int(finished.facts["rounds"])
    kept = [0, *(one for one in run_directory.kept_rounds(finished.out) if one < rounds)]
    begin = max(one for one in kept if one < first)
    if (usable := [one for one in kept if one >= begin]) == [begin]:
        raise UserError(
            f"FedEraser needs the updates of several rounds, and {finished.out} keeps no server state after round "
            f"{begin} to recompute these updates: repeat the run with keep_every=2, or use --method exact"
        )
    return usable


def calibrated(stored: Reply, new: Reply, group: str) -> Reply:
    """Return the update ``new``, scaled to the L2 norm of the update ``stored`` of the same client.

    ``group``: the name of the payload with the change of the model. If ``new`` is zero, it has no direction, and
    ``stored`` is returned.
    """
    lengths = [inner_product(reply.payloads[group], reply.payloads[group]) ** 0.5 for reply in (stored, new)]
    if not lengths[1]:
        return stored
    return replace(new, payloads={**new.payloads, group: scale(new.payloads[group], lengths[0] / lengths[1])})
