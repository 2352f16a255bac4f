"""Does another version of the code train the same models to the last bit? For a change that should change nothing.

    python benchmarks/same_bits.py OLD_CHECKOUT NEW_CHECKOUT [--only TEXT]

Every case is run with both checkouts by the same interpreter, and the SHA-256 of what it trained is compared:
``model.safetensors``, and for DA-FL the digest of its synthetic records as well. All cases but one, which needs MNIST,
run on embedded data. Both checkouts need the compiled trainer (``python -m fl_sim.native`` in each), or neither. The
exit code is 1 where a digest differs or a run fails.
"""

import argparse
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LONGEST_SECONDS = 600.0
"""How long one run may take."""


@dataclass(frozen=True)
class Case:
    """One experiment; ``resumed``: killed after its second round and started again; ``by_flower``: by ``flwr run``."""

    name: str
    settings: tuple[str, ...]
    resumed: bool = False
    by_flower: bool = False


def _quick(name: str, *settings: str, rounds: int = 3, resumed: bool = False) -> Case:
    defaults = ("clients=6", f"rounds={rounds}", "model=logistic", "engine=inprocess", "seed=3")
    given = {setting.partition("=")[0] for setting in settings}
    return Case(name, tuple(one for one in defaults if one.partition("=")[0] not in given) + settings, resumed)


PRIVATE = ("aggregator=global-dp", "aggregator.noise_multiplier=1", "aggregator.noise=seeded", "sampler=poisson:0.5")
POOL = ("preprocess=da-fl", "preprocess.noise=seeded", "preprocess.generator=mean-embedding", "model=dafl-cnn")
PATE = ("algorithm=pate", "clients=20", "partition=iid", "algorithm.queries=50", "algorithm.labelling.noise=seeded")
ALGORITHMS = (
    "fedavg", "fedprox", "scaffold", "fednova", "fedmix", "naivemix", "fedavgm", "fedadagrad", "fedadam", "fedyogi",
    "centralized",
)  # fmt: skip
CASES = (
    *(_quick(name, f"algorithm={name}") for name in ALGORITHMS),
    *(_quick(f"model {name}", f"model={name}", "partition=dirichlet:0.3") for name in ("mlp", "dafl-cnn")),
    _quick("model niid-cnn, mnist", "model=niid-cnn", "data=mnist", "partition=label-2", rounds=1),
    _quick("model resnet", "model=resnet", rounds=1),
    *(_quick(f"split {name}", f"partition={name}") for name in ("iid", "shards:2", "quantity:0.5", "feature-noise:.1")),
    _quick("cosine, fixed-size", "local.schedule=cosine", "sampler=fixed-size:3", "local.batch_size=10"),
    _quick("stack", "engine.stack=6", "partition=dirichlet:0.3"),
    _quick("stack, scaffold, cnn", "engine.stack=6", "algorithm=scaffold", "model=dafl-cnn", rounds=2),
    _quick("ray, fedavg", "engine=ray:2"),
    _quick("ray, scaffold, cnn", "engine=ray:2", "algorithm=scaffold", "model=dafl-cnn"),
    _quick("global-dp", *PRIVATE, "clients=20", "partition=iid"),
    _quick("global-dp, scaffold", *PRIVATE, "algorithm=scaffold"),
    _quick("da-fl, mean embedding", *POOL),
    _quick("da-fl, dp-cgan", *POOL[:2], "preprocess.generator=dp-cgan", "preprocess.generator.discriminator_steps=20"),
    _quick("pate, supervised", *PATE, "algorithm.student=supervised"),
    _quick("pate, fixmatch", *PATE, "algorithm.student=fixmatch", "algorithm.student.steps=20"),
    _quick("resumed, scaffold", "algorithm=scaffold", rounds=400, resumed=True),
    _quick("resumed, fedadam", "algorithm=fedadam", rounds=400, resumed=True),
    Case("flwr run", ('model = "logistic"', "rounds = 2", "clients = 4", 'algorithm = "scaffold"'), by_flower=True),
)


def digest(case: Case, checkout: Path, folder: Path) -> str:
    """Run ``case`` with ``checkout``; return a digest of what it trained, or in words why there is none."""
    folder.mkdir(parents=True)
    environment = os.environ | {
        "PYTHONPATH": str(checkout), "FL_SIM_POOLS": str(folder / "pools"), "FL_SIM_LEDGERS": str(folder / "ledgers"),
        "FLWR_HOME": str(folder / "flwr"),
    }  # fmt: skip
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    out = folder / "out"
    if case.by_flower:
        done = _flwr_run(case, checkout, folder, environment)
    else:
        command = [sys.executable, "-m", "fl_sim", "run", *case.settings, "--out", str(out)]
        if case.resumed and (mistake := _killed(command, environment, folder)):
            return mistake
        done = _finished(command, folder, environment)
    model = out / "model.safetensors"
    if done.returncode or not model.exists():
        lines = (done.stderr or done.stdout).strip().splitlines() or [""]
        return f"failed ({done.returncode}): {lines[-1][:200]}"
    digests = [hashlib.sha256(model.read_bytes()).hexdigest()[:16]]
    digests += [_digest_of(pool) for pool in sorted((folder / "pools").rglob("synthetic-*.safetensors"))]
    return " ".join(digests)


def _finished(command: Sequence[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )


def _flwr_run(
    case: Case, checkout: Path, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a case by Flower, with a SuperLink of its own, which is ended with the run."""
    ports = [str(port) for port in _free_ports()]
    environment = environment | {
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0], "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    (folder / "experiment.toml").write_text("\n".join(case.settings))
    command = [
        "flwr", "run", str(checkout), "--stream",
        "--federation-config", "num-supernodes=4 client-resources-num-cpus=1",
        "-c", f'experiment="{folder / "experiment.toml"}" out="{folder / "out"}"',
    ]  # fmt: skip
    try:
        return _finished(command, folder, environment)
    finally:
        subprocess.run(["pkill", "-f", f"flower-superlink.*{ports[0]}"], check=False)  # noqa: S607


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return [int(first.getsockname()[1]), int(second.getsockname()[1])]


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _killed(command: Sequence[str], environment: dict[str, str], folder: Path) -> str:
    """Start ``command`` and kill it after its second round; return what went wrong, or nothing."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    records, deadline = folder / "out/rounds.jsonl", time.monotonic() + LONGEST_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if records.exists() and records.read_text().count("\n") >= 2:
            break
        time.sleep(0.005)
    if process.poll() is not None:
        return f"ended before it could be killed ({process.returncode})"
    process.send_signal(signal.SIGKILL)
    process.wait()
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both digests of every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("new", type=Path, metavar="NEW_CHECKOUT")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose name holds TEXT")
    chosen = parser.parse_args(arguments)
    cases = [case for case in CASES if chosen.only in case.name]
    if not cases:
        parser.error(f"no case is named like {chosen.only!r}; there are {', '.join(case.name for case in CASES)}")
    different = 0
    print("| case | old | new | same |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            old, new = (
                digest(case, checkout.resolve(), Path(folder) / f"{number}-{side}")
                for side, checkout in (("old", chosen.old), ("new", chosen.new))
            )
            is_same = old == new and not old.startswith(("failed", "ended"))
            different += not is_same
            print(f"| {case.name} | {old} | {new} | {'yes' if is_same else 'NO'} |", flush=True)
    print(f"{len(cases)} cases, {different} different")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
