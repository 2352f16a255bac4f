"""The peer frameworks as contestants of ``benchmarks/speed.py``: which are installed, and how each is started."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from peers.install import HERE, PEERS, installed, python_of
from speed_work import Work


@dataclass(frozen=True)
class Entrant:
    """A peer in its own environment."""

    label: str
    python: Path
    script: Path

    def command(self, work: Work) -> list[str]:
        """Return the command that does ``work``, whose shards are written to a file for it."""
        return [str(self.python), str(self.script), str(job_file(work))]

    @staticmethod
    def environment() -> dict[str, str]:
        """Return its variables: one thread, no GPU, and nothing of ours to import."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def fits(work: Work) -> bool:
    """Tell whether ``work`` is the peers' job: equal shards of MNIST-shaped records for the NIID-Bench CNN."""
    return (work.model, work.data, work.partition) == ("niid-cnn", "mnist", "iid")


def entrants(environments: Path | None, wanted: Sequence[str] = ()) -> dict[str, Entrant]:
    """Return the peers that have an environment under ``environments``, by name.

    SystemExit, saying what to run, where there is none at all or one that is ``wanted`` by name is not there.
    """
    if environments is None:
        if wanted:
            raise SystemExit(f"{', '.join(wanted)}: say with --peers DIR where benchmarks/peers/install.py put them")
        return {}
    versions = installed(environments)
    missing = [name for name in wanted or (() if versions else PEERS) if name not in versions]
    if missing:
        raise SystemExit(
            f"--peers {environments}: no environment there for {', '.join(missing)}; "
            f"make it with: python benchmarks/peers/install.py {environments} {' '.join(wanted)}".rstrip()
        )
    return {
        name: Entrant(f"{name} {version}, {PEERS[name].mode}", python_of(environments, name), HERE / PEERS[name].script)
        for name, version in versions.items()
    }


@lru_cache
def job_file(work: Work) -> Path:
    """Write the shards and the first weights of a work on the NIID-Bench CNN, and return where."""
    from contestants import experiment_of
    from peers import job

    from fl_sim.experiment.job import job_of
    from fl_sim.training.loop import to_tensors

    experiment = experiment_of(work, "auto")
    ours = job_of(experiment)
    inputs, labels = to_tensors(ours.dataset.train, ours.dataset)
    path = Path(tempfile.gettempdir()) / f"fl-sim-peers-{work.clients}x{work.records}.npz"
    shards = [(inputs[shard], labels[shard]) for shard in ours.shards]
    job.write(path, shards, ours.model().state_dict())
    return path
