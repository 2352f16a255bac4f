"""FL-bench (Tan 2023) solves the personal problem: ``python personal_flbench.py PROBLEM OUTCOMES CHECKOUT``.

Its own servers, trainer (in one process, its default) and clients play ``train_one_round``. The constructor of its base
server, which reads Hydra's options and files, is replaced; what subclasses add to it runs as it is. Per-FedAvg, which
takes a new batch for each gradient, is given all records as each of the batches of an epoch.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from personal_problem import Outcome, Problem, outcome, read, write_outcomes
from torch import Tensor, nn

CLASSES = {
    "fedper": ("fedper", "FedPerServer"), "lg-fedavg": ("lgfedavg", "LGFedAvgServer"),
    "fedrep": ("fedrep", "FedRepServer"), "fedbabu": ("fedbabu", "FedBabuServer"), "fedrod": ("fedrod", "FedRoDServer"),
    "ditto": ("ditto", "DittoServer"), "pfedme": ("pfedme", "pFedMeServer"), "apfl": ("apfl", "APFLServer"),
    "per-fedavg": ("perfedavg", "PerFedAvgServer"), "per-fedavg exact": ("perfedavg", "PerFedAvgServer"),
    "fedala": ("fedala", "FedALAServer"), "fedproto": ("fedproto", "FedProtoServer"),
    "knn-per": ("knnper", "kNNPerServer"), "cfl": ("cfl", "CFLServer"), "apfl adaptive": ("apfl", "APFLServer"),
}  # fmt: skip
"""The module in ``src.server`` and the class of each method."""

BODY, HEAD = ("base.1.weight", "base.1.bias"), ("classifier.weight", "classifier.bias")


class Records:
    """All clients' records and then the test records, as FL-bench's data set."""

    def __init__(self, problem: Problem) -> None:
        pairs = [*problem.shards, problem.test]
        self.data, self.targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        self.classes = list(range(10))
        self.enable_train_transform = False

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.targets)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        """Return a record and its class."""
        return self.data[place], self.targets[place]

    def train(self) -> None:
        """Switch no augmentation on."""

    def eval(self) -> None:
        """Switch no augmentation off."""


class Batches(list[tuple[Tensor, Tensor]]):
    """A loader that gives the same batch so many times an epoch."""

    def __init__(self, client: Any, repeated: int) -> None:
        super().__init__()
        self._client, self._repeated = client, repeated

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._repeated

    def __iter__(self) -> Any:
        """Yield the client's records so many times."""
        pairs = [self._client.dataset[place] for place in self._client.trainset.indices]
        inputs, labels = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        return iter([(inputs, labels)] * self._repeated)


def options(problem: Problem, name: str) -> Any:
    """Return FL-bench's options for a method."""
    from omegaconf import DictConfig

    way = problem.way
    steps = 2 * way.steps if name == "fedrep" else way.steps
    tests = {"finetune_epoch": way.steps, "train": False, "val": False, "test": name == "knn-per"}
    methods = {
        "fedrep": {"train_body_epoch": way.steps}, "ditto": {"pers_epoch": way.steps, "lamda": way.strength},
        "lgfedavg": {"num_global_layers": 1}, "fedproto": {"lamda": way.strength},
        "fedrod": {"gamma": 1, "hyper": 0, "eval_per": 1},
        "pfedme": {"beta": way.beta, "lamda": way.pull, "pers_lr": way.rate, "mu": 1e-3, "k": way.inner_steps},
        "apfl": {"alpha": way.alpha, "adaptive_alpha": int("adaptive" in name)},
        "perfedavg": {"version": "hf" if "exact" in name else "fo", "beta": way.rate, "delta": 1e-3},
        "fedala": {"layer_idx": 2, "num_pre_loss": 10, "eta": 1.0, "threshold": 0.1, "rand_percent": 1.0},
        "cfl": {"eps_1": 1e6, "eps_2": 0.0, "min_cluster_size": 1, "start_clustering_round": 0},
        "knnper": {"capacity": 500, "weight": 0.5, "scale": 1.0, "k": way.neighbours},
    }  # fmt: skip
    common = {
        "local_epoch": steps, "batch_size": 10**6, "buffers": "global", "reset_optimizer_on_global_epoch": True,
        "client_side_evaluation": False, "use_cuda": False, "test": {"client": tests},
    }  # fmt: skip
    model = {"external_model_weights_path": None}
    optimizer = {"name": "sgd", "lr": way.rate, "momentum": 0.0, "weight_decay": 0.0}
    return DictConfig({
        "mode": "serial", "dataset": {"name": "mnist"}, "model": model, "optimizer": optimizer,
        "lr_scheduler": {"name": None}, "common": common, **methods,
    })  # fmt: skip


def constructor(problem: Problem) -> Any:
    """Return what replaces the constructor of FL-bench's base server."""
    from src.utils.models import DecoupledModel

    class Perceptron(DecoupledModel):  # type: ignore[misc]  # its base is FL-bench's
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU())
            self.classifier = nn.Linear(20, 10)
            for parameter, value in zip(self.parameters(), problem.start.values(), strict=True):
                parameter.data = value.clone()

    def made(server: Any, args: Any, init_trainer: Any = True) -> None:  # noqa: FBT002 (as FL-bench has it)
        clients = list(range(len(problem.shards)))
        server.args, server.device, server.client_num = args, torch.device("cpu"), len(clients)
        server.train_clients = server.test_clients = server.val_clients = server.selected_clients = clients
        server.init_model(Perceptron())
        server.client_optimizer_states = {client: {} for client in clients}
        server.client_lr_scheduler_states = {client: {} for client in clients}
        server.client_local_epoches = [args.common.local_epoch] * len(clients)
        server.current_epoch, server.testing, server.verbose = 0, False, False
        server.client_metrics = {client: {} for client in clients}
        server.dataset, ends, begins = Records(problem), 0, 0
        server.client_data_indices = []
        tests = list(range(sum(problem.sizes), len(server.dataset)))
        for size in problem.sizes:
            begins, ends = ends, ends + size
            server.client_data_indices.append({"train": list(range(begins, ends)), "val": [], "test": tests})
        server.trainer = None
        if init_trainer:
            server.init_trainer()

    return made


def run(problem: Problem, name: str) -> Any:
    """Return FL-bench's server after the rounds."""
    torch.manual_seed(0)
    module, cls = CLASSES[name]
    server = getattr(importlib.import_module(f"src.server.{module}"), cls)(options(problem, name))
    worker = server.trainer.worker
    if module == "perfedavg":
        worker.trainloader = Batches(worker, 3 if "exact" in name else 2)
    for server.current_epoch in range(problem.way.rounds):
        server.train_one_round()
    return server


def joined(params: Any, names: tuple[str, ...]) -> Tensor:
    """Return the parameters called ``names`` as a vector."""
    return torch.cat([params[name].detach().flatten() for name in names])


def fine_tuned(server: Any, client: int) -> Tensor:
    """Return the model that FedBABU's ``test`` makes by ``finetune``."""
    worker = server.trainer.worker
    worker.set_parameters(server.package(client))
    worker.finetune()
    return joined(worker.model.state_dict(), (*BODY, *HEAD))


def scores(server: Any, problem: Problem, client: int) -> Tensor:
    """Return kNN-Per's scores of the test records, from its own votes and its sum."""
    worker, seen, inputs = server.trainer.worker, list[Tensor](), problem.test[0]
    worker.set_parameters(server.package(client))
    worker.model.eval()
    worker.testing = True
    measured = worker.get_knn_logits

    def spied(features: Tensor) -> Any:
        votes = measured(features)
        seen.append(votes)
        return votes

    worker.get_knn_logits = spied
    argmax = torch.argmax

    def spied_argmax(values: Tensor, **options: Any) -> Tensor:
        seen.append(values)
        return argmax(values, **options)

    try:
        torch.argmax = spied_argmax  # type: ignore[assignment]
        worker.evaluate()
    finally:
        torch.argmax, worker.get_knn_logits, worker.testing = argmax, measured, False
    assert seen[-1].shape == (len(inputs), 10), "the last argmax is that of the mixture"
    return seen[-1].detach().float().flatten()


def personal(server: Any, problem: Problem, name: str) -> list[Tensor] | None:
    """Return each client's own numbers."""
    kind, whole = name.partition(" ")[0], (*BODY, *HEAD)
    groups = {
        "fedper": HEAD, "fedrep": HEAD, "lg-fedavg": HEAD, "fedrod": tuple(f"personalized_{one}" for one in HEAD),
        "fedproto": whole, "cfl": whole, "ditto": whole, "pfedme": whole, "apfl": whole,
    }  # fmt: skip
    held = {"ditto": "clients_personalized_model_params", "pfedme": "clients_personalized_model_params",
            "apfl": "client_local_model_params"}  # fmt: skip
    numbers = list[Tensor]()
    for client in range(len(problem.shards)):
        if kind == "fedbabu":
            numbers.append(fine_tuned(server, client))
        elif kind == "knn-per":
            numbers.append(scores(server, problem, client))
        elif kind in groups:
            kept = getattr(server, held.get(kind, "clients_personal_model_params"))[client]
            alpha = server.client_alphas[client].reshape(1) if kind == "apfl" else torch.zeros(0)
            numbers.append(torch.cat([joined(kept, groups[kind]), alpha]))
    return numbers or None


def solved(problem: Problem, name: str) -> Outcome:
    """Return what FL-bench comes to."""
    server = run(problem, name)
    params = {one.removeprefix("generic_model."): value for one, value in server.public_model_params.items()}
    if name == "fedproto":
        return outcome(torch.cat([server.global_prototypes[one] for one in range(10)]), personal(server, problem, name))
    if name == "cfl":
        return outcome(None, personal(server, problem, name))
    sent = {"fedper": BODY, "lg-fedavg": BODY, "fedrep": BODY, "fedbabu": BODY}.get(name, (*BODY, *HEAD))
    return outcome(joined(params, sent), personal(server, problem, name))


def main() -> None:
    """Solve the problem by each method, and write the outcomes."""
    problem, out, checkout = read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    sys.path.insert(0, str(checkout))
    base = importlib.import_module("src.server.fedavg").FedAvgServer
    base.__init__ = constructor(problem)
    write_outcomes(out, {name: solved(problem, name) for name in CLASSES})


if __name__ == "__main__":
    main()
