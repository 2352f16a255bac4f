"""The stage that reports the rounding and the drop-outs of secure aggregation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fl_sim.experiment.job import Job
from fl_sim.params import detached, num_parameters, trainable
from fl_sim.simulation.stage import Run, Stage
from fl_sim.simulation.timing import Work
from strategies.algorithm import first_template
from strategies.layer import found_in
from strategies.masking import mask
from strategies.secure_rounds import EXTRA, SecureRounds, scale_of


class SecureSumFacts(Stage):
    """The stage at the server that reports rounding and drop-outs. It sends no messages to clients."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._layer: SecureRounds | None = None

    def before(self, run: Run) -> None:
        """Store the run's layer of secure aggregation. It counts drop-outs (clients without an answer in a round)."""
        self._layer = found_in(run.strategy.layer, SecureRounds)

    def work(self) -> Sequence[Work]:
        """Return the amount of computation for random masks. Clients add the masks, and the server removes them."""
        experiment = self.job.experiment
        settings: Any = experiment.aggregator
        params = detached(trainable(self.job.model()).items())
        template = first_template(experiment.algorithm, params, experiment.local.personal)
        count = sum(map(num_parameters, template.values())) + EXTRA
        cohort = experiment.sampler.expected_size(experiment.num_members)
        present = cohort * (1 - settings.dropout)
        masks = cohort**2 + present + (cohort - present) * present

        def ready(_: int, pieces: int) -> Callable[[], object]:
            return lambda: [mask(secret, count, settings.bits) for secret in range(pieces)]

        what = f"a mask of {count:,} numbers"
        return (Work(what, f"{what}, {settings.bits} bits", 0.0, experiment.rounds * masks, ready, most=4),)

    def warnings(self) -> list[str]:
        """Return a warning that numbers are rounded, and that the simulated masks protect nothing."""
        settings: Any = self.job.experiment.aggregator
        size = self.job.experiment.sampler.expected_size(self.job.experiment.num_members)
        step = 1 / scale_of(settings, max(1, round(size)))
        said = (
            f"aggregator=secure-sum: numbers are rounded to steps of {step:.3g}; masks come from the run's seed, so "
            "the masking is only simulated and protects nothing"
        )
        return [said]

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``secure_sum`` for ``result.json``: drop-outs, and rounds whose sum stayed masked."""
        layer = self._layer
        return {"secure_sum": {"dropped": layer.dropped, "unopened": layer.unopened} if layer else {}}
