"""A student's training goes on where it was stopped, and ends in the bits of one that was not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.simulation.run import Silent, run
from fl_sim.stages.pate.run import StudentCheckpoint, read_student, restore, write_student
from fl_sim.store.run_directory import LEDGER, MODEL, ROUNDS, STUDENT, RoundRecord
from strategies.pate.student import Batches, Coins

pytestmark = pytest.mark.usefixtures("coarse_losses")

QUICK = (
    "clients=3", "model=logistic", "local.epochs=1", "engine=inprocess", "rounds=4", "algorithm.public_records=100",
    "algorithm.queries=30", "algorithm.labelling.noise=seeded", "algorithm.student.steps=8",
    "algorithm.student.batch_size=8",
)  # fmt: skip

STUDENTS = {
    "supervised": (),
    "fixmatch": ("algorithm.student.unlabelled_ratio=2", "algorithm.student.doubt_after=0.25"),
    "pate-g": (),
    "resnet": ("algorithm.student.blocks=1", "algorithm.student.width=8"),
}


def pate(kind: str, *overrides: str) -> Experiment:
    student = f"algorithm.student={kind}"
    return experiment_from(with_overrides({"algorithm": "pate"}, [student, *QUICK, *STUDENTS[kind], *overrides]))


class Stop(Silent):
    """Ends the process, as far as the run can tell, after an epoch; and hears what is said."""

    def __init__(self, after: int = 0) -> None:
        self.after, self.said, self.epochs = after, "", list[int]()

    def preparing(self, what: str) -> None:
        self.said += f"{what}\n"

    def finished_round(self, record: RoundRecord) -> None:
        self.epochs.append(record.round)
        if record.round == self.after:
            raise MemoryError


def stopped(experiment: Experiment, out: Path, after: int) -> None:
    with pytest.raises(MemoryError):
        run(experiment, out, None, Stop(after))


@pytest.mark.parametrize("kind", STUDENTS)
def test_a_student_that_was_stopped_ends_in_the_same_bits(tmp_path: Path, kind: str) -> None:
    experiment = pate(kind)
    whole = run(experiment, tmp_path / "whole")
    stopped(experiment, tmp_path / "stopped", 1)
    stopped(experiment, tmp_path / "stopped", 3)
    assert (tmp_path / "stopped" / STUDENT).exists()
    torch.rand(3)  # whatever chance did meanwhile
    watch = Stop()
    result = run(experiment, tmp_path / "stopped", None, watch)
    assert "the student's training resumes after epoch 3 of 4" in watch.said
    assert watch.epochs == [1, 2, 3, 4]
    for name in (MODEL, ROUNDS, LEDGER):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert result["measures"] == whole["measures"]
    assert result["chain"] == whole["chain"]
    assert not (tmp_path / "stopped" / STUDENT).exists()


def test_a_student_that_had_taken_all_steps_is_measured(tmp_path: Path) -> None:
    experiment = pate("supervised", "evaluate_every=4")
    whole = run(experiment, tmp_path / "whole")
    stopped(experiment, tmp_path / "stopped", 4)
    assert run(experiment, tmp_path / "stopped")["measures"] == whole["measures"]


def test_other_labels_begin_a_student_anew_and_say_so(tmp_path: Path) -> None:
    experiment = pate("supervised")
    stopped(experiment, tmp_path / "run", 2)
    path = tmp_path / "run" / STUDENT
    standing, tensors = read_student(path)
    write_student(path, StudentCheckpoint("of other labels", standing.steps, standing.rounds), {"all": _Given(tensors)})
    watch = Stop()
    run(experiment, tmp_path / "run", None, watch)
    assert "training restarts: labels or settings differ from those" in watch.said
    assert watch.epochs == [1, 2, 3, 4]
    run(experiment, tmp_path / "fresh")
    assert _same(load_file(tmp_path / "run" / MODEL), load_file(tmp_path / "fresh" / MODEL))


def test_a_damaged_file_is_refused_with_the_way_on(tmp_path: Path) -> None:
    experiment = pate("supervised")
    stopped(experiment, tmp_path / "run", 2)
    path = tmp_path / "run" / STUDENT
    content = path.read_bytes()
    for damaged in (
        content[:100],
        content[:-1] + bytes([content[-1] ^ 1]),
        b"",
        content.replace(b'"steps\\":4', b'"steps\\":5'),
    ):
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"student.safetensors .*: delete it"):
            run(experiment, tmp_path / "run")
    path.unlink()
    run(experiment, tmp_path / "run")


def test_parts_of_another_student_are_refused(tmp_path: Path) -> None:
    path, net = tmp_path / STUDENT, torch.nn.Linear(2, 3)
    generator = torch.Generator().manual_seed(0)
    parts: dict[str, Any] = {"model": net, "optimizer": torch.optim.AdamW(net.parameters()), "coins": Coins(generator)}
    net(torch.ones(1, 2)).sum().backward()
    parts["optimizer"].step()
    write_student(path, StudentCheckpoint("", 1, ()), parts)
    tensors = read_student(path)[1]
    restore(path, tensors, parts)
    for others in (
        {**parts, "model": torch.nn.Linear(2, 4)}, {**parts, "model": torch.nn.Linear(2, 3, bias=False)},
        {**parts, "batches": Batches(3, 2, generator)}, {key: parts[key] for key in ("model", "coins")},
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"student\.safetensors does not fit"):
            restore(path, tensors, others)


class _Given:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return self._tensors

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        raise AssertionError


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
