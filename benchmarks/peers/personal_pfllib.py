"""PFLlib (Zhang et al. 2025) solves the personal problem: ``python personal_pfllib.py PROBLEM OUTCOMES CHECKOUT``.

Its own servers and clients run their own ``train``. In their place are: the options of its command line, the reading of
data (a client's batch is all its records; Per-FedAvg, which halves a double batch, gets them twice), and evaluation and
saving, which are left out.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from personal_problem import Outcome, Problem, outcome, read, write_outcomes
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

CLASSES = {
    "fedper": ("serverper", "FedPer"), "lg-fedavg": ("serverlg", "LG_FedAvg"), "fedrep": ("serverrep", "FedRep"),
    "fedbabu": ("serverbabu", "FedBABU"), "fedrod": ("serverrod", "FedROD"), "ditto": ("serverditto", "Ditto"),
    "pfedme": ("serverpFedMe", "pFedMe"), "apfl": ("serverapfl", "APFL"), "per-fedavg": ("serverperavg", "PerAvg"),
    "fedala": ("serverala", "FedALA"), "fedproto": ("serverproto", "FedProto"), "fedmtl": ("servermtl", "FedMTL"),
    "ditto by default": ("serverditto", "Ditto"), "pfedme by default": ("serverpFedMe", "pFedMe"),
    "apfl by default": ("serverapfl", "APFL"),
}  # fmt: skip
"""The module in ``flcore.servers`` and the class of each method."""

DEFAULTS = {"ditto by default": {"mu": 0.0}, "pfedme by default": {"beta": 0.0}, "apfl by default": {"alpha": 1.0}}
"""Defaults of PFLlib's command line that differ from the problem's way."""

ARGUMENTS: dict[str, Any] = {
    "algorithm": "", "dataset": "", "device": "cpu", "save_folder_name": "", "num_classes": 10, "few_shot": 0,
    "learning_rate_decay_gamma": 1.0, "learning_rate_decay": False, "join_ratio": 1.0, "random_join_ratio": False,
    "time_select": False, "goal": "", "time_threthold": 1e9, "top_cnt": 0, "auto_break": False, "eval_gap": 1,
    "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 1,
    "batch_num_per_client": 1, "num_new_clients": 0, "fine_tuning_epoch_new": 0, "eta": 1.0, "rand_percent": 100,
    "layer_idx": 2, "itk": 1,
}  # fmt: skip


class Split(nn.Module):
    """The perceptron, in PFLlib's two parts."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU())
        self.head = nn.Linear(20, 10)
        for parameter, value in zip(self.parameters(), problem.start.values(), strict=True):
            parameter.data = value.clone()

    def forward(self, inputs: Tensor) -> Any:
        """Return the logits."""
        return self.head(self.base(inputs))


def vector(module: nn.Module) -> Tensor:
    """Return the parameters of a module."""
    return parameters_to_vector(module.parameters()).detach()


def arguments(problem: Problem, name: str) -> Namespace:
    """Return PFLlib's options for a method."""
    way = problem.way
    options = Namespace(
        **ARGUMENTS, model=Split(problem), num_clients=len(problem.shards), global_rounds=way.rounds - 1,
        batch_size=1, local_learning_rate=way.rate, local_epochs=way.steps, plocal_epochs=way.steps,
        fine_tuning_epochs=way.steps, mu=way.strength, lamda=way.pull if "pfedme" in name else way.strength,
        beta=way.beta, K=way.inner_steps, p_learning_rate=way.rate, alpha=way.alpha,
    )  # fmt: skip
    vars(options).update(DEFAULTS.get(name, {}))
    return options


def read_instead(problem: Problem) -> None:
    """Put the problem's records in the place of PFLlib's files."""
    from flcore.clients import clientala, clientbase
    from flcore.servers import serverbase

    def records(dataset: str, client: int, **options: object) -> list[Any]:
        del dataset, options
        return list(zip(*problem.shards[client], strict=True))

    def batches(client: Any, batch_size: int | None = None) -> list[tuple[Tensor, Tensor]]:
        inputs, labels = problem.shards[client.id]
        client.batch_size = len(labels)
        if batch_size is None or batch_size == 1:
            return [(inputs, labels)]
        return [(torch.cat([inputs, inputs]), torch.cat([labels, labels]))]

    for module in (clientala, clientbase, serverbase):
        module.read_client_data = records
    clientbase.Client.load_train_data = batches


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def run(problem: Problem, name: str) -> Any:
    """Return PFLlib's server after its ``train``."""
    torch.manual_seed(0)
    module, cls = CLASSES[name]
    server = getattr(importlib.import_module(f"flcore.servers.{module}"), cls)(arguments(problem, name), 0)
    for client in server.clients:  # FedALA's weights train in batches of this size
        client.batch_size = len(problem.shards[client.id][1])
        if name == "fedala":
            client.ALA.batch_size = client.batch_size
    server.rs_test_acc = server.rs_test_acc_per = [0.0]
    for method in ("evaluate", "evaluate_personalized", "evaluate_one_step", "save_results", "save_global_model"):
        setattr(server, method, nothing)
    server.train()
    return server


def tested_by_pfedme(server: Any) -> list[Tensor]:
    """Return the models that pFedMe's server would test as personal ones at the beginning of a further round."""
    server.send_models()
    for client in server.clients:
        client.update_parameters(client.model, client.personalized_params)
    return [vector(client.model) for client in server.clients]


def personal(server: Any, name: str) -> list[Tensor] | None:
    """Return each client's own numbers."""
    clients, name = server.clients, name.removesuffix(" by default")
    take: dict[str, Callable[[Any], Tensor]] = {
        "fedper": lambda client: vector(client.model.head), "lg-fedavg": lambda client: vector(client.model.base),
        "fedrep": lambda client: vector(client.model.head), "fedbabu": lambda client: vector(client.model),
        "fedrod": lambda client: vector(client.head), "ditto": lambda client: vector(client.model_per),
        "apfl": lambda client: torch.cat([vector(client.model_per), torch.tensor([client.alpha]).float()]),
        "fedala": lambda client: vector(client.model.head), "fedproto": lambda client: vector(client.model),
        "fedmtl": lambda client: vector(client.model),
    }  # fmt: skip
    if name == "pfedme":
        return tested_by_pfedme(server)
    return [take[name](client) for client in clients] if name in take else None


def solved(problem: Problem, name: str) -> Outcome:
    """Return what PFLlib comes to."""
    server = run(problem, name)
    if name == "fedproto":
        shared: Tensor | None = torch.cat([server.global_protos[one] for one in range(10)])
    else:
        shared = None if name == "fedmtl" else vector(server.global_model)
    return outcome(shared, personal(server, name))


def main() -> None:
    """Solve the problem by each method, and write the outcomes."""
    problem, out, checkout = read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    sys.path.insert(0, str(checkout / "system"))
    read_instead(problem)
    write_outcomes(out, {name: solved(problem, name) for name in CLASSES})


if __name__ == "__main__":
    main()
