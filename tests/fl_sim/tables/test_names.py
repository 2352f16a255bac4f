"""The names of run directories: the same for as long as the settings say the same."""

from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.tables.names import run_name


def test_settings_that_came_later_leave_the_names_of_runs_without_them_as_they_were() -> None:
    plain, held = (job_of(experiment_from(table)) for table in ({}, {"evaluate": {"validation": 0.1}}))
    assert run_name(plain.experiment, plain.dataset) == "fedavg-digits-label-1-seed-0-fd89a2b7"
    assert run_name(held.experiment, held.dataset) != run_name(plain.experiment, plain.dataset)
