"""FLoRA: the server adds the product of all clients' stacked adapters to the weights W (Wang et al. 2024)."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from fl_sim.kinds import Choices, hides_clients, is_none, kind_of
from fl_sim.local_plan import LocalPlan
from fl_sim.params import subtract
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, Payloads, ServerState, Trained
from strategies.algorithm import Averaging
from strategies.low_rank import STARTS_WITH, check_adapters, factors_in, is_factor, products


class FLoRA(Averaging):
    """W <- W + (alpha / r) sum of p_i B_i A_i; each round, clients train new adapters of the new W.

    B_i and A_i are the factors of client i, p_i is its weight, r the rank, and m the number of clients in the round.
    The product of the stacked factors [p_1 B_1 ... p_m B_m] [A_1; ...; A_m] equals the sum of p_i B_i A_i, so the mean
    is exact. A and B begin each round at their initial values. Clients send their factors. The paper's server sends the
    stacked factors of the round, and clients add their product to their own W. Here the server sends W, because clients
    may miss rounds. In the released code, FedIT also begins each round with initial factors; here ``fedit`` keeps the
    averaged factors.
    """

    kind: Literal["flora"] = "flora"
    title: ClassVar[str] = "FLoRA"
    starts_with: ClassVar[Mapping[str, Any]] = STARTS_WITH

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings with which the server cannot add products of factors to W."""
        check_products(self, experiment)

    def trains(self, trained: Collection[str], frozen: Collection[str]) -> Collection[str]:
        """Return the names in ``trained``, and each adapter's names of W and of the scale: the server needs these, too.

        Raises ValueError if the model has no adapters, or an adapter without W or scale.
        """
        pairs = factors_in(trained)
        wanted = [f"{one.layer}{name}" for one in pairs for name in ("weight", "lora_scale")]
        if not pairs or (missing := [name for name in wanted if name not in frozen]):
            lacks = f"has no parameter {missing[0]}" if pairs else "has no adapters"
            raise ValueError(
                f"algorithm flora adds adapters to weights W, and this model {lacks}: let fl-sim add the adapters "
                "(model.trainable=lora), or take flexlora"
            )
        return [*trained, *wanted]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return FedAvg's local objective (``LocalPlan``) for trained parameters; W and scales do not change."""
        still = {f"{one.layer}{name}" for one in factors_in(task.params) for name in ("weight", "lora_scale")}
        return LocalPlan(trained=frozenset(task.params.keys() - still))

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the client's update: the factors after training, and the changes of all other trained parameters."""
        moved = self.plan(task).trained or frozenset()
        return factored(task, trained, [name for name in task.params if name in moved])

    def unfolded(self, payloads: Payloads) -> Payloads:
        """Return a client's payloads with the product B_i A_i in place of the factors, so that the mean is exact."""
        return unfolded(payloads)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: W plus the mean product, and other parameters plus their mean update.

        The product of the initial factors, usually 0, is subtracted, because the model already contains it.
        """
        found, start, params = aggregate.payloads["products"], products(server.params), dict(server.params)
        for one in factors_in(params):
            weight, added = params[f"{one.layer}weight"], found[one.a] - start[one.a]
            shaped = (added.T if one.is_embedding else added).reshape(weight.shape)
            params[f"{one.layer}weight"] = weight + params[f"{one.layer}lora_scale"] * shaped
        return ServerState(with_delta(params, aggregate.payloads), server.broadcast, server.memory)


def check_products(algorithm: object, experiment: Choices) -> None:
    """Raise ValueError if no adapters are trained, or if noise or compression would change the factors A and B."""
    check_adapters(algorithm, experiment)
    kind = kind_of(algorithm)
    if hides_clients(experiment.aggregator):
        raise ValueError(
            f"algorithm {kind} averages products of two factors, each as large as W, so noise would be added to as "
            "many numbers as W has: take ffa-lora with aggregator global-dp"
        )
    if not is_none(experiment.compress):
        raise ValueError(f"algorithm {kind} multiplies the factors that clients send: leave compress out")


def factored(task: LocalTask, trained: Trained, names: Collection[str]) -> ClientUpdate:
    """Return the update of a client: its factors, and the changes of all other parameters in ``names``."""
    factors = {name: trained.params[name] for name in names if is_factor(name)}
    rest = [name for name in names if name not in factors]
    before, after = ({name: params[name] for name in rest} for params in (task.params, trained.params))
    beside: Payloads = {"delta": subtract(after, before)} if rest else {}
    return ClientUpdate({"factors": factors, **beside}, task.num_examples, trained.loss)


def unfolded(payloads: Payloads) -> Payloads:
    """Return ``payloads`` with products B_i A_i in place of the factors. Each product has the name of its factor A."""
    return {**{name: group for name, group in payloads.items() if name != "factors"},
            "products": products(payloads["factors"])}  # fmt: skip


def with_delta(params: Params, payloads: Payloads) -> Params:
    """Return ``params`` with the mean update of the non-adapter parameters added, if there is one."""
    delta = payloads.get("delta", {})
    return {name: value + delta[name] if name in delta else value for name, value in params.items()}
