"""The check for partitions whose shards depend on the round: it refuses all settings that need fixed shards."""

from typing import Any, Final

from fl_sim.kinds import SettingAside, follows_moves, is_none, kind_of, path_in
from partitions.moving import ByRound
from strategies.algorithm import Dealing, Sharing


def has_moving_shards(experiment: Any) -> bool:
    """Return True if the clients' shards depend on the round: the partition implements the protocol ``ByRound``."""
    return isinstance(experiment.partition, ByRound) and not experiment.is_central


def check_fixed_shards(experiment: Any) -> None:
    """Raise ValueError for a setting that needs the same shards in all rounds, if the shards depend on the round.

    Only four parts of a run use the shards of the current round: local training, the weights of the mean, the number of
    clients with records, and the client accuracies that the server computes. Every other setting that reads shards is
    refused.
    """
    if not has_moving_shards(experiment):
        return
    moves = f"partition={kind_of(experiment.partition)} moves records between clients during the run"
    if experiment.is_private:
        raise ValueError(
            f"{moves}, and this run promises privacy: an epsilon for a client or a record would not cover a record "
            "that two clients hold; use a partition with fixed shards, such as dirichlet:0.3, or leave the privacy out"
        )
    for setting, why in _refused(experiment):
        name = setting.partition("=")[0]
        raise ValueError(
            f"{moves}, and {setting} {why}: leave {name} out, or use a partition with fixed shards, such as "
            "dirichlet:0.3"
        )


def _refused(experiment: Any) -> list[tuple[str, str]]:
    """Return the settings that need fixed shards, each with the reason."""
    evaluate = experiment.evaluate
    chosen = [(f"{name}={kind_of(getattr(experiment, name))}", getattr(experiment, name)) for name in _PARTS]
    once = "runs code outside of the usual rounds, which may need one fixed shard for each client"
    cut = "takes records from one fixed shard for each client"
    found = [(setting, once) for setting, part in chosen if _acts_outside(part) and not follows_moves(part)]
    found += [(setting, once) for setting, part in chosen if isinstance(part, Sharing)]
    found += [(setting, cut) for setting, part in chosen if isinstance(part, SettingAside) and part.num_set_aside]
    found += [(setting, "assigns the records itself, once") for setting, part in chosen if isinstance(part, Dealing)]
    if not is_none(experiment.devices):
        found += [(f"devices={kind_of(experiment.devices)}", "computes times from one fixed number of records")]
    if evaluate.measures_clients:
        found += [(f"evaluate.clients={evaluate.clients}", "measures client models on test records of fixed shards")]
    if evaluate.validation not in {0.0, "given"}:
        found += [(f"evaluate.validation={evaluate.validation}", cut)]
    if experiment.forgotten:
        found += [(f"forgotten={'+'.join(map(str, experiment.forgotten))}", "removes the records of fixed shards")]
    if experiment.keep_every:
        found += [
            (
                f"keep_every={experiment.keep_every}",
                "keeps server states for 'fl-sim unlearn', which needs fixed shards",
            )
        ]
    if experiment.left_out:
        found += [(f"left_out={experiment.left_out:g}", cut)]
    return found


def _acts_outside(part: object) -> bool:
    """Return True if a settings object has a stage or a procedure: code outside of the usual rounds."""
    return bool(path_in(type(part), "stage") or path_in(type(part), "procedure"))


_PARTS: Final = ("preprocess", "algorithm", "aggregator", "sampler", "attack", "calibrate", "server")
