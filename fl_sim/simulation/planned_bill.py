"""What a run will release about its records and what that costs, as far as it is fixed before the run begins."""

from dataclasses import replace

from fl_sim.data import sealed_content
from fl_sim.experiment.job import Job
from fl_sim.kinds import replaces_records, short_form
from fl_sim.names import called
from fl_sim.privacy.bill import Paid
from fl_sim.simulation.procedure import procedure_of
from fl_sim.simulation.stage import stages_of


def planned(job: Job) -> Paid:
    """Return what a run of ``job`` will have paid. Takes seconds where it is private: the PLD is computed here."""
    experiment, of_training = job.experiment, procedure_of(job).payments()
    split = "centralized" if experiment.is_central else short_form(experiment.partition)
    on_synthetic = replaces_records(experiment.preprocess)
    rounds = [replace(one, on_records=not on_synthetic) for one in of_training or ()]
    beside = [payment for stage in stages_of(job) for payment in stage.payments()]
    payments = None if of_training is None else (*rounds, *beside)
    is_bare = of_training == () and not on_synthetic
    name, content = called(experiment.data), sealed_content(experiment.data, job.root, make_key=False)
    return Paid(name, f"{split}, {experiment.clients} clients", payments, is_bare, content)
