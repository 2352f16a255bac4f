"""What the directory of a trial says that it came to."""

import json
from pathlib import Path

from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import RESULT, ROUNDS, read_rounds
from fl_sim.tables.tuning_runs import outcome_in


def trial(rounds: int) -> Experiment:
    judged = {"validation": 0.2, "test": "never"}
    return experiment_from({"model": "logistic", "clients": 4, "rounds": rounds, "evaluate": judged})


def test_a_run_that_diverged_in_its_third_round_has_the_accuracy_of_its_second_for_a_trial_of_two(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    run(trial(3), out)
    lines = (out / ROUNDS).read_text().splitlines(keepends=True)
    (out / ROUNDS).write_text("".join(lines[:-1]))
    result = json.loads((out / RESULT).read_text())
    (out / RESULT).write_text(json.dumps({**result, "status": "failed", "diverged": True, "error": "the loss is nan"}))
    accuracies = [record.validation_accuracy for record in read_rounds(out)]
    assert len({*accuracies}) == 2
    found = [outcome_in(out, trial(rounds), 0, None) for rounds in (1, 2, 3, 5)]
    assert [one and (one.accuracy, one.trained) for one in found] == [
        (accuracies[0], 1), (accuracies[1], 2), (None, 2), (None, 2),
    ]  # fmt: skip
