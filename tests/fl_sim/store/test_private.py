"""What code that sees records says is not on the screen of a private run, whichever way it is said."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim.experiment.experiment import experiment_from
from fl_sim.local_plan import LocalPlan
from fl_sim.simulation.run import run
from fl_sim.store.private import MOST_CHARACTERS, PrivateLog, prints_to, warnings_to
from fl_sim.types import ClientUpdate, LocalTask, Trained
from strategies.algorithm import Averaging

SAYINGS = ("printed", "to stderr", "warned", "numpy's", "logged", "by a handler")


class Talking(Averaging):
    """An algorithm that says, in every way there is, something of the records it sees."""

    title: ClassVar[str] = "Talking"

    def plan(self, task: LocalTask) -> LocalPlan:
        if task.num_examples < 2:  # no client's, but what the server plans with
            return LocalPlan()
        said = f"{task.num_examples} records"
        print(f"printed: {said}")
        sys.stderr.write(f"to stderr: {said}\n")
        warnings.warn(f"warned: {said}", RuntimeWarning, stacklevel=1)
        logging.getLogger("of.theirs").warning("logged: %s", said)
        logging.getLogger("with.a.handler").error("by a handler: %s", said)
        return LocalPlan()

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        np.float32(3e38) * np.float32(task.num_examples)  # "numpy's": overflow encountered
        return super().finish(task, trained)


class Muttering(nn.Module):
    """A model that says how its records look."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes)

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        if len(records) == 32 and self.training:
            print("printed: by the model")
        logits: torch.Tensor = self.head(self.body(records))
        return logits


def _ran(tmp_path: Path, **settings: Any) -> None:
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("with.a.handler")
    logger.addHandler(handler)
    logger.propagate = logging.getLogger("of.theirs").propagate = False  # as where nobody has set up any logging
    table = {"model": "logistic", "clients": 4, "rounds": 2, "engine": "inprocess", "algorithm": Talking(), **settings}
    last = logging.lastResort
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            run(experiment_from(table), tmp_path / "run")
            assert (logging.lastResort, handler.filters) == (last, [])
    finally:
        logger.removeHandler(handler)
        logger.propagate = logging.getLogger("of.theirs").propagate = True


PRIVATE = {"aggregator": {"kind": "global-dp", "noise_multiplier": 1.0, "noise": "seeded"}, "sampler": "full"}


@pytest.mark.parametrize(
    "more",
    [{}, {"engine": {"kind": "inprocess", "workers": 2}}, {"model": f"{__name__}:Muttering"}],
    ids=["", "threads", "own model"],
)
def test_a_private_run_keeps_from_the_screen_what_clients_say(
    more: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[str]()
    monkeypatch.setattr("fl_sim.simulation.run.clean_up", lambda _, out: kept.append(log_of(out).read_text()))
    _ran(tmp_path, **PRIVATE, **more)
    shown = "".join(capfd.readouterr())
    assert not any(f"{word}: " in shown for word in SAYINGS)
    assert "records" not in shown
    assert "overflow" not in shown
    [text] = kept
    for word in ("printed", "to stderr", "warned", "logged", "by a handler"):
        assert f"{word}: 14" in text
    assert "overflow encountered" in text
    assert log_of(tmp_path / "run").stat().st_mode & 0o777 == 0o600


def test_it_is_gone_when_the_run_has_finished(tmp_path: Path) -> None:
    _ran(tmp_path, **PRIVATE)
    assert not log_of(tmp_path / "run").exists()


def test_a_run_without_a_promise_says_it_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _ran(tmp_path)
    shown = "".join(capfd.readouterr())
    assert all(f"{word}: " in shown for word in ("printed", "to stderr", "by a handler"))
    assert not log_of(tmp_path / "run").exists()


def log_of(out: Path) -> Path:
    return out / "private-warnings.log"


def test_no_more_is_kept_than_there_is_room_for_and_nothing_where_nothing_is_said(tmp_path: Path) -> None:
    stream = PrivateLog(tmp_path / "log")
    with warnings_to(stream), prints_to(stream):
        pass
    assert not (tmp_path / "log").exists()
    for _ in range(3):
        assert stream.write("x" * (MOST_CHARACTERS // 2 + 1)) == MOST_CHARACTERS // 2 + 1
    assert (tmp_path / "log").stat().st_size == MOST_CHARACTERS


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    assert PrivateLog(tmp_path / "missing" / "log").write("lost") == 4
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert PrivateLog(tmp_path / "link").write("lost") == 4
    assert not (tmp_path / "elsewhere").exists()
