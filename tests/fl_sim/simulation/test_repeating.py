"""A run that is repeated: nothing is lost on the way, and what it paid stays paid."""

import json
from pathlib import Path

import pytest

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.report.bills import bills_of
from fl_sim.report.runs import read_all
from fl_sim.simulation.repeating import set_aside
from fl_sim.simulation.run import run


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
    [bill] = bills_of(read_all([tmp_path])).bills
    assert bill["epsilon"] == again["epsilon"]  # which counts both


@pytest.mark.usefixtures("quick_accounting")
def test_a_budget_that_is_spent_pays_for_no_repetition(tmp_path: Path) -> None:
    spent = run(quick(aggregator="global-dp"), tmp_path / "measured")["privacy"][0]["epsilon_rdp"]
    experiment = quick(aggregator={"kind": "global-dp", "epsilon": 1.01 * spent})
    assert run(experiment, tmp_path / "run")["rounds"] == 2
    set_aside(experiment, tmp_path / "run")
    with pytest.raises(RunError, match=r"does not afford the first round .* has paid here before counts"):
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
        with pytest.raises(UserError, match="holds no rounds, after which the checkpoint was written"):
            run(quick(), out)
        assert (out / "checkpoint.safetensors").exists()
    else:
        run(quick(), out)
        assert (out / "model.safetensors").read_bytes() == model


def test_a_run_is_repeated_with_its_own_number_of_rounds_and_what_is_none_stays(tmp_path: Path) -> None:
    run(quick(), tmp_path / "run")
    with pytest.raises(UserError, match=r"with rounds=2, not 3: choose another --out"):
        set_aside(quick(rounds=3), tmp_path / "run")
    assert set_aside(quick(), tmp_path / "nothing") is None
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear").touch()
    with pytest.raises(UserError, match="holds no run"):
        set_aside(quick(), tmp_path / "letters")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "finished"
