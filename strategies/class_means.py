"""Shared code of methods whose clients keep their models and send class means: a round's payloads, and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl_sim.kinds import Choices, is_none, kind_of
from fl_sim.types import Payloads


@dataclass(frozen=True)
class RoundPayloads:
    """The payloads of a round's clients with records.

    ``clients``: the IDs of these m clients, ascending. ``payloads``: the tensors of all m clients, stacked along the
    first dimension.
    """

    clients: Sequence[int]
    payloads: Payloads


def check_in_the_clear(algorithm: object, experiment: Choices, what: str) -> None:
    """Raise ValueError for settings that hide single payloads, and for local privacy, which does not cover ``what``.

    ``what``: the payload in words, such as "mean logits".
    """
    local, reads = experiment.local, f"its server reads the {what} of every client"
    refused = {
        "aggregator": (kind_of(experiment.aggregator), kind_of(experiment.aggregator) != "mean"),
        "local.privacy": (kind_of(local.privacy), not is_none(local.privacy)),
        "server": (kind_of(experiment.server), kind_of(experiment.server) != "synchronous"),
    }
    reasons = {
        "aggregator": f"{reads}, and this aggregator hides or leaves out some of them",
        "local.privacy": f"clients send {what}, which are computed from records without noise",
        "server": f"{reads} after a round in which all of them began from one state",
    }
    for name, (value, is_refused) in refused.items():
        if is_refused:
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with {name}={value}: {reasons[name]}; leave {name} out, or "
                "take fedavg"
            )
