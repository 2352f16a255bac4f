"""Do fl-sim and its peers train own models of clients as the papers have it? All from one start, on the same batches.

    python benchmarks/peers/personal.py                                            fl-sim alone
    python benchmarks/peers/personal.py --python PYTHON --pfllib DIR --fl-bench DIR --fluke DIR

``DIR``: a checkout of the peer, outside of the project. ``PYTHON``: an interpreter with what the peers import: torch,
torchvision, scikit-learn, h5py, hydra-core, faiss-cpu, ray, rich, pynvml, torchmetrics, seaborn, clearml, diskcache.

A row has the largest differences of the server's numbers and of the clients' own ones, after 3 rounds: from the loop
of the paper (``personal_papers.py``), and from the same loop with the program's departures. If the second is rounding,
the departures are all that there is. Then come the clients' mean accuracies by both loops after 60 rounds. The exit
code is 1 if a difference stays.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402
import personal_papers as papers  # noqa: E402 (it lies beside this file)
import torch  # noqa: E402
from personal_clusters import cfl, with_clusters  # noqa: E402
from personal_problem import BODY, HEAD, METHODS, Outcome, Problem, flat, outcome, read_outcomes, write  # noqa: E402

Loop = Callable[[Problem], papers.Result]

PAPERS: Mapping[str, Loop] = {**papers.PAPERS, "cfl": cfl}

PEERS = {"pfllib": "personal_pfllib.py", "fl-bench": "personal_flbench.py", "fluke": "personal_fluke.py"}

LONG = 60
"""The number of rounds after which accuracies are compared."""

ROUNDING = 5e-6
"""The largest difference of two programs that compute the same in float32."""

SETTINGS: dict[str, Any] = {
    "data": "digits", "partition": "dirichlet:0.3", "clients": 4, "model": "personal_problem:perceptron",
    "evaluate": {"clients": "class-shares", "personal_every": 1, "fine_tune_epochs": 2}, "engine": "inprocess",
}  # fmt: skip
"""The settings of all runs of fl-sim. Records are fine-tuned for as many steps as a round has."""


def set_to(loop: Loop, **settings: Any) -> Loop:
    """Return the loop with other settings of the problem's way."""
    return lambda problem: loop(replace(problem, way=replace(problem.way, **settings)))


DEPARTURES: Mapping[str, Mapping[str, Loop]] = {
    "fl-sim": {
        "fedrod": partial(papers.fedrod, begins="zero"), "apfl": partial(papers.apfl, adaptive=True),
        "fedproto": partial(papers.fedproto, after=True),
    },
    "pfllib": {
        "fedbabu": partial(papers.fedbabu, fine_tuned="own"),
        "ditto by default": set_to(papers.ditto, strength=0.0),
        "pfedme": partial(papers.pfedme, weights="records", decay=1e-3, tests="received"),
        "pfedme by default": set_to(partial(papers.pfedme, decay=1e-3, tests="received"), beta=0.0),
        "apfl": partial(papers.apfl, adaptive=True, at="own", w="first", overwrites=True, decay=0.02),
        "apfl by default": set_to(
            partial(papers.apfl, adaptive=True, at="own", w="first", overwrites=True, decay=0.02), alpha=1.0
        ),
        "per-fedavg": partial(papers.per_fedavg, weights="records", passes=2),
        "fedproto": partial(papers.fedproto, counts=False),
        "fedmtl": papers.alone,
    },
    "fl-bench": {
        "lg-fedavg": partial(papers.lg_fedavg, sent=BODY),
        "fedrod": partial(papers.fedrod, sums=False, cuts=False, relays=True),
        "pfedme": partial(papers.pfedme, weights="records", decay=1e-3, tests="start"),
        "apfl": partial(papers.apfl, at="outputs", w="twice"),
        "apfl adaptive": partial(
            papers.apfl, at="outputs", w="twice", adaptive=True, often=False, decay=0.02
        ),
        "per-fedavg exact": partial(papers.per_fedavg, exact=True, differences=1e-3),
        "fedala": partial(papers.fedala, one_worker=True),
        "fedproto": partial(papers.fedproto, counts=False),
        "knn-per": partial(papers.knn_per, of_logits=True),
        "cfl": partial(cfl, uniform=True, places=True),
    },
    "fluke": {
        "fedbabu": partial(papers.fedbabu, fine_tuned="own"),
        "pfedme": partial(papers.pfedme, decay=1e-3, pulls=False, sends_own=True),
        "apfl": partial(papers.apfl, trains=False, overwrites=True),
        "per-fedavg": partial(papers.per_fedavg, restores=False),
        "per-fedavg exact": partial(papers.per_fedavg, exact=True, restores=False, differences=1e-3, bent="inner"),
        "fedproto": partial(papers.fedproto, counts=False),
    },
}  # fmt: skip
"""The loop with a program's departures from the paper, or with its choice where the paper leaves one: see the page."""


def the_job() -> Any:
    """Return fl-sim's job with the data of ``SETTINGS``."""
    from fl_sim.experiment.experiment import experiment_from
    from fl_sim.experiment.job import job_of

    return job_of(experiment_from({**SETTINGS, "algorithm": "fedavg"}))


def the_problem(job: Any) -> Problem:
    """Return the problem that a job of fl-sim poses: its clients' records and its first parameters."""
    from fl_sim.params import detached
    from fl_sim.training.loop import to_tensors

    shards = [to_tensors(job.dataset.train.take(indices), job.dataset) for indices in job.shards]
    return Problem(shards, to_tensors(job.dataset.test, job.dataset), dict(detached(job.model().named_parameters())))


def algorithm(problem: Problem, name: str) -> dict[str, Any]:
    """Return fl-sim's settings of a method."""
    way = problem.way
    pfedme = {
        "strength": way.pull, "personal_steps": way.inner_steps, "personal_learning_rate": way.rate, "beta": way.beta
    }  # fmt: skip
    settings: dict[str, dict[str, Any]] = {
        "fedrep": {"head_epochs": way.steps}, "ditto": {"strength": way.strength}, "pfedme": pfedme,
        "apfl": {"alpha": way.alpha}, "per-fedavg": {"personal_learning_rate": way.rate},
        "per-fedavg exact": {"personal_learning_rate": way.rate, "variant": "exact"}, "fedala": {"record_share": 1.0},
        "fedproto": {"kind": "fedproto-local", "strength": way.strength}, "knn-per": {"neighbours": way.neighbours},
        "cfl": {"eps_1": 1e6, "eps_2": 0, "split_after": 0, "min_cluster_size": 2},
    }  # fmt: skip
    return {"kind": name.partition(" ")[0], **settings.get(name, {})}


def ours(problem: Problem, name: str, out: Path) -> Outcome:
    """Run a method by fl-sim in ``out``, and return the server's numbers with those of the clients' states.

    Two methods keep nothing in a client: FedBABU's fine-tuned models and kNN-Per's votes are compared by their
    accuracies, in the tests.
    """
    from safetensors.torch import load_file

    import fl_sim
    from fl_sim.store.tensors import load_state

    way = problem.way
    local = {"learning_rate": way.rate, "momentum": 0.0, "weight_decay": 0.0, "batch_size": 10**6, "epochs": way.steps}
    settings = {**SETTINGS, "rounds": way.rounds, "local": local, "algorithm": algorithm(problem, name)}
    fl_sim.run(settings, out=out, progress=False)
    if name == "cfl":
        clusters = np.genfromtxt(out / "clients.csv", delimiter=",", names=True)["cluster"].astype(int).tolist()
        return outcome(None, with_clusters(load_file(out / "checkpoint.safetensors"), clusters))
    states = [load_state(out / "clients", client, way.rounds + 1) for client in range(len(problem.shards))]
    if name == "fedproto":
        checkpoint = load_file(out / "checkpoint.safetensors")
        [shared] = [value.flatten() for key, value in checkpoint.items() if key.endswith("prototypes/z")]
    else:
        sent = {"fedper": BODY, "fedrep": BODY, "fedbabu": BODY, "lg-fedavg": HEAD}.get(name, (*BODY, *HEAD))
        shared = flat(load_file(out / "model.safetensors"), sent)
    return outcome(shared, own_numbers(name, states))


def own_numbers(name: str, states: list[Any]) -> list[torch.Tensor] | None:
    """Return each client's own numbers from its state."""
    whole = (*BODY, *HEAD)
    kept = {
        "fedper": ("own", HEAD), "fedrep": ("own", HEAD), "lg-fedavg": ("own", BODY), "fedrod": ("personal-head", HEAD),
        "ditto": ("own-model", whole), "pfedme": ("own-model", whole), "apfl": ("own-model", whole),
        "fedala": ("own-model", HEAD), "fedproto": ("own", whole),
    }  # fmt: skip
    if name not in kept:
        return None
    group, names = kept[name]
    alphas = [state["mixing"]["alpha"] if name == "apfl" else torch.zeros(0) for state in states]
    return [torch.cat([flat(state[group], names), alpha]) for state, alpha in zip(states, alphas, strict=True)]


def solved_by_peer(problem: Problem, peer: str, python: Path, checkout: Path) -> dict[str, Outcome]:
    """Return what a peer comes to, by method. Raises CalledProcessError if it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "problem.npz", Path(folder) / "outcomes.npz"
        write(given, problem)
        command = [python, HERE / PEERS[peer], given, out, checkout]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        return read_outcomes(out)


def row(problem: Problem, program: str, name: str, found: Outcome) -> tuple[str, bool]:
    """Return a line of the table, and True if the program's departures explain all differences."""
    known = PAPERS.get(name.removesuffix(" by default").removesuffix(" adaptive"), papers.alone)
    departed = DEPARTURES[program].get(name, known)
    long = replace(problem, way=replace(problem.way, rounds=LONG))
    by_paper, by_program = (_distances(found, loop(problem)[0]) for loop in (known, departed))
    accuracies = []
    for loop in (known, departed):
        scores = loop(long)[1]
        accuracies.append(sum(problem.accuracy(client, one) for client, one in enumerate(scores)) / len(scores))
    cells = [program, name, *by_paper, *by_program]
    told = " | ".join(f"{cell:.1e}" if isinstance(cell, float) else cell for cell in cells)
    explained = all(one == "-" or (isinstance(one, float) and one < ROUNDING) for one in by_program)
    return f"| {told} | {100 * accuracies[0]:.1f} | {100 * accuracies[1]:.1f} |", explained


def _distances(found: Outcome, expected: Outcome) -> tuple[float | str, float | str]:
    try:
        shared, own = found.distance(expected)
    except ValueError:
        return "other", "other"
    return "-" if math.isnan(shared) else shared, "-" if math.isnan(own) else own


def main() -> None:
    """Print the table; exit with 1 if a difference has no explanation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the peers' interpreter")
    for peer in PEERS:
        parser.add_argument(f"--{peer}", type=Path, metavar="DIR", help=f"a checkout of {peer}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    problem = the_problem(the_job())
    print("| program | method | server | clients | server, explained | clients, explained | paper % | program % |")
    print("|---|---|---|---|---|---|---|---|")
    unexplained = []
    for program in DEPARTURES:
        checkout = getattr(options, program.replace("-", "_"), None)
        if program == "fl-sim":
            with tempfile.TemporaryDirectory() as folder:
                found = {name: ours(problem, name, Path(folder) / name) for name in METHODS}
        elif checkout is None:
            continue
        else:
            found = solved_by_peer(problem, program, options.python, checkout.resolve())
        for name, one in found.items():
            line, explained = row(problem, program, name, one)
            print(line, flush=True)
            unexplained += [] if explained else [f"{program} {name}"]
    if unexplained:
        sys.exit(f"not explained: {', '.join(unexplained)}")


if __name__ == "__main__":
    main()
