"""The settings of local differential privacy: each client clips its own update and adds noise before sending.

The mechanism is in ``clients.private_updates``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fl_sim.kinds import Choices, kind_of
from strategies.dp_sgd import ANOTHER, ClientPrivacy


class LocalDP(ClientPrivacy):
    """Each client clips its update and adds noise before sending, so the update protects all of the client's data.

    All tensors that a client sends in a round are one vector: the update, and other payloads of the algorithm, such as
    SCAFFOLD's control variates. The vector is clipped, and Gaussian noise is added to each number. Two clipped vectors
    differ by up to two clipping norms. The privacy cost is computed with this sensitivity. Loss and number of records
    are not sent: all clients have the same weight.

    Privacy unit: one client. Adjacency: all data of one client are replaced by any other data. It is public which
    clients hold records, and which clients take part in a round. A client's cost is the cost of all rounds in which it
    takes part. The sampling of clients does not reduce it.

    ``clipping_norm``: the largest L2 norm of a client's vector. ``epsilon``: the largest epsilon for each client, over
    the whole run. ``delta``: the delta at which the given epsilon holds. ``noise_multiplier``: the standard deviation
    of the noise, in clipping norms. If it is left out, the least noise is used with which all rounds cost at most the
    given epsilon. If both are set, a client takes part until its next round would exceed the epsilon. From then on the
    client is treated as a client without records. ``noise``: with "secret" the protection is real, and the noise
    differs from run to run. With "seeded" the noise is repeatable, and protects in simulation only. ``accountant``: the
    accountant that finds the noise, and compares costs with ``epsilon``. "pld" allows less noise than "rdp".
    """

    kind: Literal["local-dp"] = "local-dp"
    title: ClassVar[str] = "local DP"
    layer: ClassVar[str] = "strategies.private_updates:PrivateUpdates"
    stage: ClassVar[str] = "fl_sim.stages.private_updates:PrivateUpdatesBill"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if clients would send something without noise, or numbers that noise makes useless."""
        self.check_alone(experiment)
        algorithm, batch_norm = experiment.algorithm, experiment.local.batch_norm
        if batch_norm != "none":
            raise ValueError(
                f"local.batch_norm={batch_norm} cannot run with local.privacy=local-dp: running statistics are sent "
                "with the update, without noise; leave local.batch_norm out, or take a model with nn.GroupNorm"
            )
        if hasattr(algorithm, "weigh"):
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with local.privacy=local-dp: it weighs clients by numbers "
                f"that they send, and noise makes these useless; {ANOTHER}"
            )
