"""The layer of local differential privacy: it checks the payloads, and counts each client's rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from clients.client_layer import ClientLayer
from clients.private_updates import ClientPrivateUpdates
from fl_sim.errors import UserError
from fl_sim.kinds import kind_of
from fl_sim.params import detached, layout_of, trainable
from strategies.algorithm import first_template
from strategies.layer import Beginning
from strategies.private_steps import PrivateTraining, digest_of


class PrivateUpdates(PrivateTraining):
    """Counts the rounds in which each client sent an update, because each update adds to the client's privacy cost."""

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: Any, model: Callable[[], nn.Module]) -> ClientLayer | None:
        """Return the layer's code on clients: it clips updates, adds noise, and charges costs to a client's ledger."""
        params = detached(trainable(model()).items())
        template = first_template(algorithm, params, experiment.local.personal)
        protection = experiment.local.privacy.protection
        return ClientPrivateUpdates(protection, digest_of(experiment), experiment.rounds, template)

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if clients send nothing, or more than changes of the model's parameters."""
        check_changes(
            experiment.algorithm, beginning, f"local.privacy={experiment.local.privacy.kind}", "local.privacy"
        )


def check_changes(algorithm: object, beginning: Beginning, chosen: str, setting: str) -> None:
    """Raise UserError if clients send nothing, or more than changes of the model's parameters.

    ``chosen``: the name of the protection in error messages, such as local DP. ``setting``: the name of its setting.
    """
    what = f"algorithm {kind_of(algorithm)} cannot run with {chosen}"
    if not beginning.server.params:
        raise UserError(f"{what}: clients send no parameters, and epsilon would protect nothing; leave {setting} out")
    wanted = dict(layout_of(beginning.server.params))
    for group, params in beginning.sent.items():
        if dict(layout_of(params)) != wanted:
            raise UserError(
                f"{what}: clients also send {group}, which is not a change of the parameters and becomes "
                "useless if it is clipped and noised with the update; take another algorithm, such as fedavg, "
                "fedprox or scaffold"
            )
