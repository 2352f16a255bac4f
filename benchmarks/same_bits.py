"""Does another version of the code come to the same results, bit for bit? For a change that should change nothing.

    python benchmarks/same_bits.py OLD_CHECKOUT NEW_CHECKOUT [--only TEXT] [--ray] [--flower]

There is a case for every kind of every open setting (``KINDS``, read from the settings themselves), and each algorithm
runs plain, by Global DP with seeded noise, in stacks, resumed after its second round, extended, and with ``--ray`` on
Ray. Both checkouts work side by side, each in one process, on one core each. Compared are the model, the lines of
``rounds.jsonl`` and ``result.json`` without seconds and versions, the synthetic records, and the events that ledgers
charged. All cases but one, which needs MNIST, run on embedded data. Both checkouts need the compiled trainer
(``python -m fl_sim.native`` in each), or neither. The table names what differs; the exit code is 1 where something
does, or where a run fails in one checkout alone. A case that both refuse in the same words is "refused".
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST_SECONDS = 600.0
"""Timeout of one run in seconds."""

KINDS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("local.privacy", "dp-sgd"): ("local.privacy.noise_multiplier=1", "local.privacy.noise=seeded"),
    ("local.privacy", "local-dp"): ("local.privacy.noise_multiplier=1", "local.privacy.noise=seeded"),
    ("algorithm", "pate"): ("clients=20", "partition=iid", "algorithm.queries=50", "algorithm.labelling.noise=seeded",
                            "algorithm.student=supervised", "algorithm.student.steps=50"),
    ("algorithm", "tstr"): ("preprocess=da-fl", "preprocess.noise=seeded", "preprocess.generator=mean-embedding"),
    ("aggregator", "bulyan"): ("attack=sign-flip", "attack.clients=1", "clients=9"),
    ("aggregator", "distributed-dp"): ("aggregator.noise_multiplier=1", "aggregator.noise=seeded"),
    ("aggregator", "distributed-dp-sgd"): ("aggregator.noise_multiplier=5", "aggregator.noise=seeded"),
    ("aggregator", "global-dp"): ("aggregator.noise_multiplier=1", "aggregator.noise=seeded", "sampler=poisson:0.5"),
    ("aggregator", "krum"): ("attack=sign-flip", "attack.clients=1", "clients=9"),
    ("aggregator", "multi-krum"): ("attack=sign-flip", "attack.clients=1", "clients=9"),
    ("aggregator", "norm-bound"): ("aggregator.norm_bound=0.1",),
    ("sampler", "divfl"): ("sampler.cohort_size=3",),
    ("sampler", "fixed-size"): ("sampler.cohort_size=3",),
    ("sampler", "importance"): ("sampler.cohort_size=3",),
    ("sampler", "oort"): ("sampler.cohort_size=3", "devices=log-normal"),
    ("sampler", "poisson"): ("sampler.sampling_rate=0.5",),
    ("sampler", "power-of-choice"): ("sampler.cohort_size=2", "sampler.candidates_asked=4"),
    ("sampler", "cyclic"): ("sampler.groups=2",),
    ("partition", "natural"): ("data=npz:{inputs}/records.npz",),
    ("preprocess", "da-fl"): ("preprocess.noise=seeded", "preprocess.generator=mean-embedding", "model=dafl-cnn"),
    ("preprocess", "private-start"): (
        "aggregator=global-dp", "aggregator.noise_multiplier=1", "aggregator.noise=seeded", "clients=20",
        "partition=iid",
    ),
    ("calibrate", "ccvr"): ("model=mlp",),
    ("devices", "profile"): ("devices.path={inputs}/devices.csv",),
    ("server", "fedasync"): ("devices=log-normal", "server.concurrency=3"),
    ("server", "fedbuff"): ("devices=log-normal", "server.buffer=2", "server.concurrency=3"),
}  # fmt: skip
"""{(setting, kind): further settings that it needs}; ``{inputs}``: the folder of ``write_inputs``."""

OPEN = ("algorithm", "aggregator", "sampler", "partition", "preprocess", "attack", "calibrate", "compress", "devices",
        "server", "local.privacy")  # fmt: skip
PRIVATE = ("aggregator=global-dp", "aggregator.noise_multiplier=1", "aggregator.noise=seeded", "sampler=poisson:0.5")
POOL = ("preprocess=da-fl", "preprocess.noise=seeded", "preprocess.generator=mean-embedding", "model=dafl-cnn")
TABLE = ("data=csv:{inputs}/table.csv", "data.test=0.3", "data.range.a=0..1", "partition=iid")
GENERATOR = "preprocess.generator"
PATE = ("algorithm=pate", "clients=20", "partition=iid", "algorithm.queries=50", "algorithm.labelling.noise=seeded")
_COMPARED = ("model", "rounds", "result", "pool", "ledger")
_UNCOMPARED = frozenset({"seconds", "versions", "chain", "ledger", "records"})
"""Keys of results that differ from run to run: hashes of lines with seconds, names of ledgers, what a key makes."""


@dataclass(frozen=True)
class Case:
    """One experiment. ``stop_after``: a round that it is ended after; ``first_rounds``: of a run that it extends."""

    name: str
    settings: tuple[str, ...]
    stop_after: int = 0
    first_rounds: int = 0


def quick(name: str, *settings: str, rounds: int = 3, stop_after: int = 0, first_rounds: int = 0) -> Case:
    """Return a case on six clients of the digits; ``settings`` are laid over its own."""
    defaults = ("clients=6", f"rounds={rounds}", "model=logistic", "engine=inprocess", "seed=3")
    given = {setting.partition("=")[0] for setting in settings}
    kept = tuple(one for one in defaults if one.partition("=")[0] not in given)
    return Case(name, (*kept, *settings), stop_after, first_rounds)


def every_kind() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (setting, kind, settings that make an experiment of it) for all kinds of all open settings."""
    from fl_sim.settings import kinds_of

    for setting in OPEN:
        for kind in kinds_of(setting):
            yield setting, kind, (f"{setting}={kind}", *KINDS.get((setting, kind), ()))


def cases(*, with_ray: bool = False) -> list[Case]:
    """Return all cases but the one of Flower's own runtime."""
    from fl_sim.kinds import path_in
    from fl_sim.settings import kinds_of

    found = []
    for setting, kind, settings in every_kind():
        name = f"{setting} {kind}"
        found.append(quick(name, *settings))
        found.append(quick(f"{name}, resumed", *settings, stop_after=2))
        if setting == "algorithm" and not path_in(kinds_of(setting)[kind], "procedure"):  # others have no rounds
            private = (*PRIVATE, "algorithm.tau_eff=8") if kind == "fednova" else PRIVATE
            found.append(quick(f"{name}, global-dp", *settings, *_beside(settings, private)))
            found.append(quick(f"{name}, stacked", *settings, "engine.stack=6"))
            found.append(quick(f"{name}, extended", *settings, first_rounds=2))
        if with_ray:
            found.append(quick(f"{name}, ray", *settings, "engine=ray:2"))
    return [*found, *_further()]


def _further() -> list[Case]:
    """Return cases of settings that have no kinds, and of parts of kinds."""
    conv = "model=dafl-cnn"
    return [
        *(quick(f"model {name}", f"model={name}", "partition=dirichlet:0.3") for name in ("mlp", "dafl-cnn")),
        quick("model niid-cnn, mnist", "model=niid-cnn", "data=mnist", "partition=label-2", rounds=1),
        quick("model resnet", "model=resnet", rounds=1),
        quick("cosine, fixed-size", "local.schedule=cosine", "sampler=fixed-size:3", "local.batch_size=10"),
        *(quick(f"optimizer {name}", f"local.optimizer={name}") for name in ("adam", "adamw")),
        *(quick(f"augment {name}", f"local.augment={name}", conv, rounds=2) for name in ("crop-flip", "reflect-crop")),
        quick("clip norm, label smoothing", "local.clip_norm=0.5", "local.label_smoothing=0.1"),
        quick("steps", "local.steps=5"),
        quick("validation", "evaluate.validation=0.2"),
        quick("scattering", "data=mnist", "features=scattering", rounds=1),
        quick("stack, scaffold, cnn", "engine.stack=6", "algorithm=scaffold", conv, rounds=2),
        quick("dirichlet with empty clients", "partition=dirichlet:0.05", "clients=30"),
        quick("global-dp, adaptive", *PRIVATE, "aggregator.adaptive_clipping.target_quantile=0.5", "clients=20"),
        quick("global-dp, cyclic", *PRIVATE[:3], "sampler=cyclic:2", "clients=20", "partition=iid"),
        quick("da-fl, gaussian", *POOL[:2], f"{GENERATOR}=gaussian", "data=mnist", "features=scattering", rounds=1),
        quick("da-fl, marginals", *POOL[:2], f"{GENERATOR}=marginals", *TABLE),
        quick("da-fl, dp-cgan", *POOL[:2], "preprocess.generator=dp-cgan", f"{GENERATOR}.discriminator_steps=20"),
        quick("da-fl, geometric", *POOL, "preprocess.labels=geometric"),
        quick("da-fl, synthetic only", *POOL, "preprocess.train_on=synthetic"),
        quick("da-fl, global-dp", *POOL[:3], *PRIVATE),
        quick("ccvr, private", "model=mlp", "calibrate=ccvr", "calibrate.epsilon=4", "calibrate.noise=seeded"),
        quick("pate, fixmatch", *PATE, "algorithm.student=fixmatch", "algorithm.student.steps=20"),
        quick("compress, scaffold", "compress=top-k", "algorithm=scaffold"),
        quick("compress, global-dp", "compress=rand-k", *PRIVATE),
    ]  # fmt: skip


def _beside(settings: Sequence[str], others: Sequence[str]) -> list[str]:
    given = {setting.partition("=")[0] for setting in settings}
    return [one for one in others if one.partition("=")[0] not in given]


def write_inputs(folder: Path) -> None:
    """Write the files that cases read: digits with six natural clients, a table, and devices of two classes."""
    import numpy as np
    from sklearn.datasets import load_digits

    inputs, labels = load_digits(return_X_y=True)
    images = (inputs * 15).astype(np.uint8).reshape(-1, 8, 8)
    owners = np.arange(1400) % 6
    np.savez(
        folder / "records.npz",
        x_train=images[:1400], y_train=labels[:1400], client_train=owners, x_test=images[1400:], y_test=labels[1400:],
    )  # fmt: skip
    rows = [f"{number % 89 / 89:.3f},{'xyz'[number % 3]},{'no' if number % 7 < 3 else 'yes'}" for number in range(600)]
    (folder / "table.csv").write_text("\n".join(["a,b,label", *rows, ""]))
    (folder / "devices.csv").write_text("seconds_per_step,upload_mbps,clients\n0.1,10,4\n0.5,2,2\n")


def work(order: Mapping[str, Any]) -> None:
    """Run cases one after another and print a line of JSON for each. Runs in a checkout's own process."""
    import torch

    torch.set_num_threads(1)
    for number, case in enumerate(order["cases"]):
        case["settings"] = [setting.format(inputs=order["inputs"]) for setting in case["settings"]]
        folder = Path(order["folder"]) / str(number)
        os.environ |= {"FL_SIM_POOLS": str(folder / "pools"), "FL_SIM_LEDGERS": str(folder / "ledgers")}
        began = time.monotonic()
        try:
            _run(Case(**case), folder / "out")
            found = digests(folder)
        except Exception as error:  # noqa: BLE001 (whatever it is, the other checkout's is compared with it)
            found = {"error": f"{type(error).__name__}: {error}"[:300].replace(str(folder), "")}
        print(json.dumps({**found, "took": round(time.monotonic() - began, 1)}), flush=True)


def _run(case: Case, out: Path) -> None:
    from fl_sim.experiment.experiment import experiment_from, with_overrides
    from fl_sim.simulation.run import run
    from fl_sim.simulation.run_log import Silent

    class StopAfter(Silent):
        def finished_round(self, record: Any) -> None:
            if record.round == case.stop_after:
                raise KeyboardInterrupt

    if case.first_rounds:
        run(experiment_from(with_overrides({}, [*case.settings, f"rounds={case.first_rounds}"])), out)
    experiment = experiment_from(with_overrides({}, list(case.settings)))
    if case.stop_after:
        try:
            run(experiment, out, observer=StopAfter())
        except KeyboardInterrupt:
            run(experiment, out)
    else:
        run(experiment, out)


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of each of ``_COMPARED`` that a run left behind in ``folder``."""
    out = folder / "out"
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    events = [
        (json.loads(line).get("event"), json.loads(line).get("release"))
        for path in sorted((folder / "ledgers").rglob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    pools = sorted((folder / "pools").rglob("synthetic-*.safetensors"))
    return {
        "model": _digest((out / "model.safetensors").read_bytes()),
        "rounds": _digest(_json([_lasting(line) for line in rounds])),
        "result": _digest(_json(_lasting(json.loads((out / "result.json").read_text())))),
        "pool": _digest(b"".join(pool.read_bytes() for pool in pools)) if pools else "",
        "ledger": _digest(_json(sorted(map(str, events)))) if events else "",
    }


def _lasting(value: Any) -> Any:
    """Return ``value`` without the entries that differ from run to run."""
    if isinstance(value, dict):
        return {name: _lasting(one) for name, one in value.items() if name not in _UNCOMPARED}
    return [_lasting(one) for one in value] if isinstance(value, list) else value


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


class Worker:
    """A process that runs all cases with one checkout."""

    def __init__(self, checkout: Path, chosen: Sequence[Case], inputs: Path, folder: Path) -> None:
        folder.mkdir()
        order = json.dumps({"folder": str(folder), "inputs": str(inputs), "cases": [vars(case) for case in chosen]})
        environment = os.environ | {"PYTHONPATH": str(checkout), "FL_SIM_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", order]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def next(self) -> dict[str, Any]:
        """Return what the next case left behind: {part: digest}, or {"error": words}."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {"error": f"the process ended ({self._process.wait()})"}


def verdict(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return "same", "refused" (by both, in the same words), or a list of all parts that differ."""
    if "error" in old or "error" in new:
        if old.get("error") == new.get("error"):
            return "refused"
        return f"old: {old.get('error', 'ran')} | new: {new.get('error', 'ran')}"
    return ", ".join(part for part in _COMPARED if old[part] != new[part]) or "same"


def flower_digest(checkout: Path, folder: Path) -> dict[str, Any]:
    """Run an experiment by ``flwr run``, with a SuperLink of its own, which is ended with the run."""
    folder.mkdir(parents=True)
    ports = [str(port) for port in _free_ports()]
    environment = os.environ | {
        "PYTHONPATH": str(checkout), "FLWR_HOME": str(folder / "flwr"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0], "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    (folder / "experiment.toml").write_text('model = "logistic"\nrounds = 2\nclients = 4\nalgorithm = "scaffold"\n')
    command = [
        "flwr", "run", str(checkout), "--stream",
        "--federation-config", "num-supernodes=4 client-resources-num-cpus=1",
        "-c", f'experiment="{folder / "experiment.toml"}" out="{folder / "out"}"',
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
        )
    finally:
        subprocess.run(["pkill", "-f", f"flower-superlink.*{ports[0]}"], check=False)  # noqa: S607
    if not (folder / "out/result.json").exists():
        return {"error": (done.stderr or done.stdout)[-200:]}
    return dict(digests(folder))


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return [int(first.getsockname()[1]), int(second.getsockname()[1])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for every case, and how many are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("new", type=Path, metavar="NEW_CHECKOUT")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose name holds TEXT")
    parser.add_argument("--ray", action="store_true", help="every kind on Ray as well: some ten seconds each")
    parser.add_argument("--flower", action="store_true", help="one experiment by flwr run as well")
    given = parser.parse_args(arguments)
    everything = cases(with_ray=given.ray)
    chosen = [case for case in everything if given.only in case.name]
    if not chosen:
        parser.error(f"no case is named like {given.only!r}; there are {', '.join(case.name for case in everything)}")
    verdicts = []
    print("| case | seconds | verdict |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        sides = {"old": given.old.resolve(), "new": given.new.resolve()}
        inputs = Path(folder) / "inputs"
        inputs.mkdir()
        write_inputs(inputs)
        workers = {side: Worker(checkout, chosen, inputs, Path(folder) / side) for side, checkout in sides.items()}
        for case in chosen:
            old, new = workers["old"].next(), workers["new"].next()
            verdicts.append(verdict(old, new))
            print(f"| {case.name} | {old.get('took', '')}, {new.get('took', '')} | {verdicts[-1]} |", flush=True)
        if given.flower:
            old, new = (flower_digest(checkout, Path(folder) / f"flower-{side}") for side, checkout in sides.items())
            verdicts.append(verdict(old, new))
            print(f"| flwr run | | {verdicts[-1]} |", flush=True)
    different = len(verdicts) - verdicts.count("same") - verdicts.count("refused")
    print(f"{len(verdicts)} cases: {verdicts.count('same')} same, {verdicts.count('refused')} refused by both, "
          f"{different} different")  # fmt: skip
    return int(different > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
