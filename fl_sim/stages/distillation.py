"""The stage of methods such as FedDF, in which the server distils the client models of each round.

The stage loads the server's training records. After each round, the stage trains the global model at the server, as the
method defines. The methods are in ``strategies``, as subclasses of ``OnEnsemble``.
"""

from functools import partial

from fl_sim.errors import Diverged, UserError
from fl_sim.experiment.job import Job
from fl_sim.experiment.proxy import proxy_records
from fl_sim.kinds import kind_of
from fl_sim.params import is_finite
from fl_sim.seeding import rng
from fl_sim.simulation.client_runtime import read_pool
from fl_sim.simulation.stage import Run
from fl_sim.simulation.timing import Work
from fl_sim.stages.ensemble import MeasuresEnsemble, on_device
from fl_sim.training.loop import resident
from fl_sim.training.records import Source
from fl_sim.types import Params
from strategies.ensemble import POOL, Lesson, OnEnsemble


class EnsembleDistillation(MeasuresEnsemble):
    """The stage that trains the global model at the server after each round, with the client models as teachers."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert isinstance(job.experiment.algorithm, OnEnsemble)
        self.settings: OnEnsemble = job.experiment.algorithm

    def before(self, run: Run) -> None:
        """Tell the layer ``StepOnModels`` which training, if any, the server does after each round."""
        super().before(run)
        if self.settings.learns:
            self.kept.step = partial(self._learn, self._public(run))

    def _public(self, run: Run) -> Source | None:
        if (name := self.settings.public_records) == "none":
            return None
        if name != POOL:
            return proxy_records(self.job, name)
        if (pool := run.log.released) is None or not pool.count:
            raise UserError(
                f"algorithm {kind_of(self.settings)} needs the run's synthetic records, but there are none: set a "
                "larger preprocess.gamma, or use a data set as proxy"
            )
        return resident(read_pool(pool.path), self.job.dataset, self.job.device)

    def _learn(self, public: Source | None, mean: Params, models: list[Params], server_round: int) -> Params:
        student, *teachers = (on_device(self.job.device, one) for one in (mean, *models))
        generator = rng(self.job.experiment.seed, "distillation", server_round)
        network = self.network
        norms = network if network.statistics else None
        lesson = Lesson(network.logits_of, self.job.dataset, public, self.job.device, generator, norms)
        found = self.settings.taught(student, teachers, lesson)
        self.weights = found.weights
        if not is_finite({"params": found.params}):
            raise Diverged(
                f"algorithm {kind_of(self.settings)}: the server's training diverged in round {server_round}: set a "
                "smaller algorithm.distillation_rate"
            )
        return {name: value.to(mean[name].device) for name, value in found.params.items()}

    def work(self) -> tuple[Work, ...]:
        """Return the computation of the distillation. The forecast lists it, but does not estimate its time."""
        return (Work("the distillation at the server", pieces=1.0),) if self.settings.learns else ()
