"""What a run costs depends on the clients that take part, not on how many there are."""

import gc
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent

RECORDS = 6_000
COHORT = 5
PAGE = 4096


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make up records of four numbers, each of a writer of its own."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("population") / "records.npz"
    labels = np.arange(RECORDS) % 3
    inputs = rng.standard_normal((RECORDS, 4), dtype=np.float32)
    writers = rng.permutation(RECORDS)
    np.savez(path, x_train=inputs, y_train=labels, x_test=inputs[:9], y_test=labels[:9], client_train=writers)
    return f"npz:{path}"


@dataclass
class _Watch(Silent):
    """Counts Python's objects after every round."""

    objects: list[int] = field(default_factory=list)

    def finished_round(self, _: object) -> None:
        gc.collect()
        self.objects.append(sys.getallocatedblocks())


def _run(data: str, out: Path, clients: int, partition: str, rounds: int = 3) -> tuple[int, dict[str, int]]:
    """Return (how many of Python's objects there are after the last round, the bytes on disk of each file)."""
    settings = {
        "data": data, "partition": partition, "clients": clients, "sampler": f"fixed-size:{COHORT}",
        "algorithm": "scaffold", "rounds": rounds, "evaluate_every": rounds, "engine": "inprocess",
        "local": {"steps": 1},
    }  # fmt: skip
    watch = _Watch()
    run(experiment_from(settings), out, None, watch)
    files = (path for path in out.rglob("*") if path.is_file())
    return watch.objects[-1], {str(path.relative_to(out)): path.stat().st_blocks * 512 for path in files}


@pytest.mark.parametrize("partition", ["natural", "dirichlet:0.5", "iid"])
def test_clients_that_are_never_met_cost_no_object_no_file_and_no_space(
    data: str, tmp_path: Path, partition: str
) -> None:
    _run(data, tmp_path / "first", 10, partition)  # what is loaded and kept at first use
    few, files_of_few = _run(data, tmp_path / "few", 10, partition)
    many, files_of_many = _run(data, tmp_path / "many", RECORDS, partition)
    assert many - few < RECORDS / 2
    assert set(files_of_few) - set(files_of_many) == {"clients.csv"}  # a list of all clients, where these are few
    assert set(files_of_many) < set(files_of_few)
    states = files_of_many.pop("clients/states.bin")
    parameters = json.loads((tmp_path / "many" / "result.json").read_text())["num_parameters"]
    assert 0 < states <= 3 * COHORT * (4 * parameters + 2 * PAGE)
    assert all(abs(size - files_of_few[name]) <= PAGE for name, size in files_of_many.items())
