"""A run directory is resumed, or its run is set aside and repeated."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.identity import Identity
from fl_sim.report.payments import bills_of
from fl_sim.report.runs import read_all
from fl_sim.simulation import resuming
from fl_sim.simulation.resuming import num_bytes_kept, set_aside
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import RunLog
from fl_sim.store import run_directory
from fl_sim.store.run_directory import CHECKPOINT
from fl_sim.types import ServerState
from strategies.private import check_paid

NOBODYS = Identity("", {}, is_private=False)


def made(**changes: Any) -> Experiment:
    settings = {
        "model": "logistic",
        "rounds": 3,
        "engine": "inprocess",
        "algorithm": "scaffold",
        "clients": 3,
        "seed": 1,
    }
    return experiment_from({**settings, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three rounds."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(made(), out)
    return out


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def result_with(out: Path, **changes: Any) -> dict[str, Any]:
    """Change what the result says; None leaves it out."""
    result = {**json.loads((out / run_directory.RESULT).read_text()), **changes}
    result = {key: value for key, value in result.items() if value is not None or key not in changes}
    (out / run_directory.RESULT).write_text(json.dumps(result))
    return result


def test_the_result_of_a_finished_run_is_given_for_its_own_number_of_rounds_with_and_without_checkpoint(
    finished: Path,
) -> None:
    result = result_with(finished)
    assert [resuming.finished_result(made(rounds=rounds), finished, NOBODYS) for rounds in (2, 3, 4)] == [
        None, result, None,
    ]  # fmt: skip
    (finished / CHECKPOINT).unlink()
    assert resuming.finished_result(made(), finished, NOBODYS) == result


@pytest.mark.parametrize("status", ["failed", "stopped", "running"])
def test_a_run_that_ended_otherwise_is_not_finished(finished: Path, status: str) -> None:
    result_with(finished, status=status)
    assert resuming.finished_result(made(), finished, NOBODYS) is None


def test_a_damaged_result_is_made_again_from_a_checkpoint_and_told_where_there_is_none(finished: Path) -> None:
    (finished / run_directory.RESULT).write_text("{")
    assert resuming.finished_result(made(), finished, NOBODYS) is None
    (finished / CHECKPOINT).unlink()
    with pytest.raises(UserError, match=r"result.json is damaged, so it is unknown"):
        resuming.finished_result(made(), finished, NOBODYS)


@pytest.mark.parametrize("told", [0, 2, 4])
def test_a_result_of_fewer_or_more_rounds_than_there_are_is_refused(finished: Path, told: int) -> None:
    result_with(finished, rounds=told)
    with pytest.raises(UserError, match=f"holds 3 rounds, but result.json states {told} rounds:"):
        resuming.finished_result(made(), finished, NOBODYS)


def test_a_result_that_tells_no_number_of_rounds_is_held_against_the_log_alone(finished: Path) -> None:
    result = result_with(finished, rounds=None)
    assert resuming.finished_result(made(), finished, NOBODYS) == result


@pytest.mark.parametrize(
    ("files", "is_refused"),
    [([], False), ([".lock"], False), ([".a.1.2.part"], False), ([".lock", ".a.1.2.part"], False), (["a"], True),
     ([".lock", "a"], True), ([".a.1.2.part", "a"], True)],
)  # fmt: skip
def test_a_lock_and_files_that_are_not_whole_leave_a_directory_empty(
    tmp_path: Path, files: list[str], *, is_refused: bool
) -> None:
    for name in files:
        (tmp_path / name).touch()
    if is_refused:
        with pytest.raises(UserError, match="is not empty and holds no run"):
            resuming.earlier_run(made(), tmp_path)
    else:
        assert resuming.earlier_run(made(), tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"seed": 0}, "seed"), ({"seed": 2}, "seed"), ({"clients": 4, "seed": 0}, "clients, seed")],
)
def test_a_run_of_another_value_is_another_even_where_the_value_is_zero(
    finished: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=rf"holds a run with other settings \({named}\)"):
        resuming.earlier_run(made(**changes), finished)


def test_the_engine_its_patience_and_the_number_of_rounds_make_no_other_run(finished: Path) -> None:
    for changes in ({"engine": {"kind": "inprocess", "workers": 2}}, {"round_timeout": 77}, {"rounds": 9}):
        assert made(**changes) != made()
        assert resuming.earlier_run(made(**changes), finished) == made()


@pytest.mark.parametrize("kept", [run_directory.RESULT, run_directory.ROUNDS, run_directory.START, CHECKPOINT])
def test_any_file_that_a_run_would_take_over_is_enough_for_an_objection(finished: Path, kept: str) -> None:
    for path in finished.iterdir():
        if path.is_file() and path.name != run_directory.CONFIG:
            path.unlink()
    assert resuming.objection(made(seed=2), finished, NOBODYS) == ""
    (finished / kept).touch()
    assert "holds a run with other settings (seed)" in resuming.objection(made(seed=2), finished, NOBODYS)
    assert resuming.objection(made(rounds=5), finished, NOBODYS) == ""


def test_what_a_run_could_go_on_with_is_left_over_above_the_most_that_is_kept(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = num_bytes_kept(finished)
    for most, is_left in ((kept + 1, False), (kept, False), (kept - 1, True)):
        monkeypatch.setattr(resuming, "MOST_KEPT", most)
        assert resuming.has_leftovers(made(), finished) is is_left
        resuming.clean_up(made(), finished)
        assert (finished / CHECKPOINT).exists() is (finished / run_directory.STATE).exists() is not is_left
    assert not resuming.has_leftovers(made(), finished)


@pytest.mark.parametrize("part", [CHECKPOINT, run_directory.STATE, run_directory.STUDENT])
def test_each_part_alone_is_left_over_of_a_run_that_promises_privacy(tmp_path: Path, part: str) -> None:
    private = made(aggregator="global-dp", sampler="poisson:0.5")
    assert not resuming.has_leftovers(private, tmp_path)
    (tmp_path / part).mkdir() if part == run_directory.STATE else (tmp_path / part).touch()
    assert resuming.has_leftovers(private, tmp_path)
    resuming.clean_up(private, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("charges", "rounds_of_a_charge", "beforehand", "is_paid"),
    [(3, 1, 0, True), (2, 1, 0, False), (4, 1, 0, True), (1, 3, 0, True), (1, 2, 0, False), (2, 2, 0, True),
     (7, 1, 4, True), (6, 1, 4, False), (5, 3, 4, True), (4, 3, 4, False), (0, 1, 0, False)],
)  # fmt: skip
def test_every_round_that_was_released_is_in_the_ledger_after_the_charges_beforehand(
    finished: Path, charges: int, rounds_of_a_charge: int, beforehand: int, *, is_paid: bool
) -> None:
    """A ledger has a line more than charges; three rounds were released."""
    (finished / run_directory.LEDGER).write_text("{}\n" * (charges + 1))
    if is_paid:
        check_paid(finished, rounds_of_a_charge, beforehand)
    else:
        with pytest.raises(RunError, match=f"holds {charges} charges, but 3 rounds were released"):
            check_paid(finished, rounds_of_a_charge, beforehand)


def test_where_nothing_was_released_nothing_has_to_be_paid_for(tmp_path: Path) -> None:
    check_paid(tmp_path, 1, 4)


def test_a_ledger_that_is_gone_has_no_charges(finished: Path) -> None:
    with pytest.raises(RunError, match="holds 0 charges, but 3 rounds were released"):
        check_paid(finished, 1, 0)


def test_what_is_recorded_stays_where_it_tells_all_and_nothing_has_changed(finished: Path) -> None:
    config = finished / run_directory.CONFIG
    settings = config.read_bytes()

    def recorded(then: dict[str, Any]) -> dict[str, Any]:
        config.write_bytes(settings)
        run_directory.write_config(finished, made().as_written(), then)
        now = Identity("b" * 64, {"mine": "2"}, is_private=False)
        return dict(resuming._identity(finished, now))

    now = {"records": "b" * 64, "code": {"mine": "2"}}
    assert recorded(now) == now
    assert recorded({"records": "a" * 64, "code": {"mine": "2"}}) == now
    assert recorded({"records": "b" * 64, "code": {"mine": "1"}}) == now
    assert recorded({"records": "b" * 64}) == now
    assert recorded({"code": {"mine": "2"}}) == now


def test_a_run_that_stopped_before_its_first_round_does_not_go_on_with_other_code(finished: Path) -> None:
    run_directory.write_config(finished, made().as_written(), {"code": {"mine": "1"}})
    (finished / CHECKPOINT).unlink()
    log, other = RunLog(ServerState({})), Identity("", {"mine": "2"}, is_private=False)
    resuming._check_records(finished, log, other)
    (finished / run_directory.START).touch()
    resuming._check_records(finished, log, Identity("", {"mine": "1"}, is_private=False))
    with pytest.raises(UserError, match=r"holds a run of other code \(mine changed since\)"):
        resuming._check_records(finished, log, other)


@pytest.mark.parametrize(("then", "is_refused"), [("", False), ("b", False), ("a", True), ("c", True)])
def test_a_checkpoint_that_does_not_tell_its_records_is_taken_on_trust(
    finished: Path, monkeypatch: pytest.MonkeyPatch, then: str, *, is_refused: bool
) -> None:
    monkeypatch.setattr(resuming, "read_checkpoint", lambda out, server: (SimpleNamespace(records=then), server))
    log = RunLog(ServerState({}), records="b")
    if is_refused:
        with pytest.raises(UserError, match="holds a run of other records"):
            resuming._check_records(finished, log, NOBODYS)
    else:
        resuming._check_records(finished, log, NOBODYS)


def test_each_public_fact_of_private_records_tells_them_apart() -> None:
    experiment = made(data="csv:/nowhere/t.csv", aggregator="global-dp", sampler="poisson:0.5")
    facts = {"train": range(70), "test": range(30), "input_shape": (4,), "num_classes": 3, "mean": [0.1], "std": [0.2]}

    def key(**changes: Any) -> str:
        job: Any = SimpleNamespace(experiment=experiment, dataset=SimpleNamespace(**{**facts, **changes}))
        return resuming._records_key(job)

    others = [
        key(train=range(60), test=range(40)), key(train=range(71)), key(test=range(31)), key(input_shape=(5,)),
        key(num_classes=4), key(mean=[0.2]), key(std=[0.1]),
    ]  # fmt: skip
    assert key() == key()
    assert len({key(), *others}) == 1 + len(others)


def quick(**changes: object) -> Experiment:
    return experiment_from({"model": "logistic", "rounds": 2, "engine": "inprocess", **changes})


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(("noise", "charged"), [("secret", 4), ("seeded", 2)])
def test_a_repetition_under_global_dp_is_charged_on_top_unless_it_has_the_same_noise(
    tmp_path: Path, noise: str, charged: int
) -> None:
    out, experiment = tmp_path / "run", quick(aggregator={"kind": "global-dp", "noise": noise})
    [first] = run(experiment, out)["privacy"]
    assert set_aside(experiment, out) == tmp_path / "run-before-1"
    [again] = run(experiment, out)["privacy"]
    assert again["steps"] == charged
    assert (again["epsilon"] > first["epsilon"]) is (charged == 4)
    assert ("paid for again, after an interruption or by --again" in again["guarantee"]) is (charged == 4)
    [bill] = bills_of(read_all([tmp_path]))[0]
    assert bill["epsilon"] == again["epsilon"]  # which counts both


@pytest.mark.usefixtures("quick_accounting")
def test_a_budget_that_is_spent_pays_for_no_repetition(tmp_path: Path) -> None:
    spent = run(quick(aggregator="global-dp"), tmp_path / "measured")["privacy"][0]["epsilon_rdp"]
    experiment = quick(aggregator={"kind": "global-dp", "epsilon": 1.01 * spent})
    assert run(experiment, tmp_path / "run")["rounds"] == 2
    set_aside(experiment, tmp_path / "run")
    with pytest.raises(RunError, match=r"does not afford the first round .* earlier charges of a stopped run"):
        run(experiment, tmp_path / "run")


@pytest.mark.parametrize("moves", [1, 2, 3])
def test_a_move_that_was_cut_short_leaves_no_run_that_would_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    out, move, moved = tmp_path / "run", Path.rename, []
    run(quick(), out)
    model = (out / "model.safetensors").read_bytes()

    def die(path: Path, target: Path) -> Path:
        if len(moved) == moves:
            raise KeyboardInterrupt
        moved.append(path.name)
        return move(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            set_aside(quick(), out)
    if "rounds.jsonl" in moved:
        with pytest.raises(UserError, match="holds no rounds but the checkpoint is of round"):
            run(quick(), out)
        assert (out / "checkpoint.safetensors").exists()
    else:
        run(quick(), out)
        assert (out / "model.safetensors").read_bytes() == model


def test_a_run_is_repeated_with_its_own_number_of_rounds_and_what_is_none_stays(tmp_path: Path) -> None:
    run(quick(), tmp_path / "run")
    with pytest.raises(UserError, match=r"with its rounds=2, not 3: choose another --out"):
        set_aside(quick(rounds=3), tmp_path / "run")
    assert set_aside(quick(), tmp_path / "nothing") is None
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear").touch()
    with pytest.raises(UserError, match="holds no run"):
        set_aside(quick(), tmp_path / "letters")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "finished"
