"""fluke (Polato 2024) solves the personal problem: ``python personal_fluke.py PROBLEM OUTCOMES CHECKOUT``.

Its own algorithms run, as in ``with_fluke.py``; ``finalize``, which trains clients further, is left out. FedBABU's
fine-tuning is called as ``finalize`` calls it.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from personal_problem import Outcome, Problem, outcome, read, write_outcomes
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

CLASSES = {
    "fedper": ("fedper", "FedPer"), "lg-fedavg": ("lg_fedavg", "LGFedAVG"), "fedrep": ("fedrep", "FedRep"),
    "fedbabu": ("fedbabu", "FedBABU"), "fedrod": ("fedrod", "FedROD"), "ditto": ("ditto", "Ditto"),
    "pfedme": ("pfedme", "PFedMe"), "apfl": ("apfl", "APFL"), "per-fedavg": ("per_fedavg", "PerFedAVG"),
    "per-fedavg exact": ("per_fedavg", "PerFedAVG"), "fedala": ("fedala", "FedALA"),
    "fedproto": ("fedproto", "FedProto"),
}  # fmt: skip
"""The module in ``fluke.algorithms`` and the class of each method."""

UNIFORM = {"pfedme", "per-fedavg", "per-fedavg exact"}
"""The methods whose papers weigh all clients the same; fluke has a setting for it."""

BY_NAME = {"fedrep", "fedproto"}
"""The methods whose clients make their models by name. Given a module, all clients would train this one module."""


def network(problem: Problem) -> Any:
    """Return the perceptron in fluke's two parts."""
    from fluke.nets import EncoderHeadNet

    made = EncoderHeadNet(nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU()), nn.Linear(20, 10))
    for parameter, value in zip(made.parameters(), problem.start.values(), strict=True):
        parameter.data = value.clone()
    return made


def settings(problem: Problem, name: str) -> Any:
    """Return fluke's hyperparameters for a method."""
    from fluke import DDict

    way = problem.way
    client = {
        "batch_size": 10**6, "local_epochs": way.steps, "loss": nn.CrossEntropyLoss,
        "optimizer": {"name": "SGD", "lr": way.rate}, "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
    }  # fmt: skip
    extra: dict[str, dict[str, Any]] = {
        "fedrep": {"tau": way.steps}, "fedbabu": {"mode": "full", "fine_tuning_epochs": way.steps},
        "ditto": {"tau": way.steps, "lam": way.strength},
        "pfedme": {"k": way.inner_steps, "optimizer": {"lr": way.rate, "lamda": way.pull, "mu": 1e-3}},
        "apfl": {"lam": way.alpha}, "per-fedavg": {"mode": "FO", "beta": way.rate},
        "per-fedavg exact": {"mode": "HF", "beta": way.rate},
        "fedala": {"ala_sample_size": 1.0, "conergence_threshold": 0.1},
        "fedproto": {"n_protos": 10, "lam": way.strength},
    }  # fmt: skip
    client |= extra.get(name, {})
    if name in {"per-fedavg", "per-fedavg exact"}:
        client["optimizer"] = {"lr": way.rate}
    if name in {"fedper", "lg-fedavg", "fedbabu", "ditto", "apfl"}:
        client["model"] = network(problem)
    if name in BY_NAME:
        client["model"] = "perceptron"
    server: dict[str, Any] = {"weighted": name not in UNIFORM}
    of_server: dict[str, dict[str, Any]] = {
        "pfedme": {"beta": way.beta},
        "apfl": {"tau": 1},
        "fedproto": {"n_protos": 10},
    }
    server |= of_server.get(name, {})
    whole = network(problem)
    sent = {"fedper": whole.encoder, "fedrep": whole.encoder, "fedbabu": whole.encoder, "lg-fedavg": whole.head}
    return DDict(client=DDict(client), server=DDict(server), model=sent.get(name, whole))


def run(problem: Problem, name: str) -> Any:
    """Return fluke's algorithm after the rounds."""
    from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader

    torch.manual_seed(0)
    loaders = [
        FastDataLoader(inputs, labels, num_labels=10, batch_size=10**6, shuffle=False)
        for inputs, labels in problem.shards
    ]
    splitter = DataSplitter(DummyDataContainer(loaders, [None] * len(loaders), None, 10))
    place, cls = CLASSES[name]
    module: Any = importlib.import_module(f"fluke.algorithms.{place}")
    kind = getattr(module, cls)
    if name in BY_NAME:
        module.get_model = lambda _: network(problem)
    algorithm = kind(n_clients=len(loaders), data_splitter=splitter, hyper_params=settings(problem, name))
    algorithm.finalize = lambda: None
    algorithm.run(n_rounds=problem.way.rounds, eligible_perc=1)
    if name == "fedbabu":
        algorithm.server.fine_tune()
    return algorithm


def vector(module: nn.Module) -> Tensor:
    """Return the parameters of a module."""
    return parameters_to_vector(module.parameters()).detach()


def personal(algorithm: Any, problem: Problem, name: str) -> list[Tensor] | None:
    """Return each client's own numbers."""
    alpha = torch.tensor([problem.way.alpha])
    take: dict[str, Callable[[Any], Tensor]] = {
        **dict.fromkeys(("fedper", "fedrep", "lg-fedavg"), lambda client: vector(client.model.get_local())),
        **dict.fromkeys(("fedbabu", "fedproto", "pfedme"), lambda client: vector(client.model)),
        "fedrod": lambda client: vector(client.inner_model), "fedala": lambda client: vector(client.model.head),
        "ditto": lambda client: vector(client.personalized_model),
        "apfl": lambda client: torch.cat([vector(client.personalized_model), alpha]),
    }  # fmt: skip
    return [take[name](client) for client in algorithm.clients] if name in take else None


def solved(problem: Problem, name: str) -> Outcome:
    """Return what fluke comes to."""
    algorithm = run(problem, name)
    shared = torch.cat(algorithm.server.prototypes) if name == "fedproto" else vector(algorithm.server.model)
    return outcome(shared, personal(algorithm, problem, name))


def main() -> None:
    """Solve the problem by each method, and write the outcomes."""
    problem, out, checkout = read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    sys.path.insert(0, str(checkout))
    from fluke import FlukeENV

    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    write_outcomes(out, {name: solved(problem, name) for name in CLASSES})


if __name__ == "__main__":
    main()
