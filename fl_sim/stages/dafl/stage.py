"""DA-FL as a stage: before the first round clients release synthetic records, on which all of them train."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.engines.arrays import float32_bytes
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of
from fl_sim.privacy.terms import Adjacency
from fl_sim.report.figures.samples import write_samples
from fl_sim.seeding import rng
from fl_sim.simulation.client_runtime import as_kept, to_generator
from fl_sim.simulation.preparation import start_from
from fl_sim.simulation.run_log import Pooled, RunLog
from fl_sim.simulation.stage import Run, Stage
from fl_sim.simulation.work import Work, answers_at_once, public
from fl_sim.stages.dafl.client import SYNTHESIZE, Synthesize, settings_of
from fl_sim.training.loop import to_tensors
from fl_sim.types import Params, Traffic

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment
    from fl_sim.stages.dafl.pool import Pool

_MOST_STEPS: Final = 400
"""Steps of a generator that are timed at most."""


class Synthesis(Stage):
    """The server half."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.settings = settings_of(job)
        self.pool: Pool | None = None

    def tasks(self) -> Mapping[str, Synthesize]:
        """Return the one question."""
        return {SYNTHESIZE: Synthesize(self.job)}

    def preparing(self, log: RunLog) -> str:
        """Say what happens before the first round."""
        del log
        made_by = kind_of(self.settings.generator)
        return f"clients make synthetic records, {made_by} (once for all runs that need the same)"

    def before(self, run: Run) -> None:
        """Make the pool, or find it; let rounds train on it, and the server first where it is to."""
        from fl_sim.stages.dafl.synthesis import prepare_pool, traffic_of, warnings_of  # noqa: PLC0415 (the accountants load slowly)

        job, log = self.job, run.log
        self.pool = pool = prepare_pool(run)
        log.pooled = Pooled(pool.path, pool.num_synthetic)
        log.warnings += warnings_of(pool, job)
        log.before["synthetic_records"] = traffic_of(pool, job.dataset.input_shape)
        counts = [part.counts for part in pool.parts]
        if len(job.dataset.input_shape) == 3:
            log.warnings += write_samples(run.out, pool.path, counts, job.experiment.model_dump(), job.dataset.note)
        run.strategy.order = replace(run.order, synthetic=str(pool.path))
        if (epochs := self.settings.server_epochs) and not log.rounds:
            start_from(pool.path, epochs, job, run.strategy, log)

    def num_pooled(self) -> int:
        """Return about how many synthetic records all clients release."""
        return int(self._by_client().sum())

    def _by_client(self) -> NDArray[np.int64]:
        """Return about how many synthetic records each client releases, (clients,)."""
        gammas = np.array(self.settings.client_gammas or [self.settings.gamma])
        return np.round(gammas * self.job.shards.sizes).astype(np.int64)

    def trains_model(self) -> bool:
        """Say whether the server is to take steps on the pool."""
        return bool(self.settings.server_epochs)

    def num_server_steps(self) -> int:
        """Return the server's steps on the pool."""
        return self.settings.server_epochs * math.ceil(self.num_pooled() / self.job.experiment.local.batch_size)

    def key(self) -> str:
        """Return the name of the pool."""
        from fl_sim.stages.dafl.synthesis import pool_key  # noqa: PLC0415 (the accountants load slowly)

        return pool_key(self.job)

    def is_made(self) -> bool:
        """Say whether the pool is there."""
        from fl_sim.stages.dafl.synthesis import is_made  # noqa: PLC0415 (the accountants load slowly)

        return is_made(self.job)

    def work(self) -> tuple[Work, ...]:
        """Return the clients' generators: a turn is one client's, and its pieces are steps, where there are any.

        As if all clients held records of one class: of more they take longer. Those of other splits, budgets and seeds
        take as long.
        """
        from clients.dafl.generator import Shortening  # noqa: PLC0415 (the accountants load slowly)

        job, settings, clients = self.job, self.settings, self.job.experiment.num_clients
        records, steps = max(1, len(job.shards.records) // clients), 1.0
        if isinstance(settings.generator, Shortening):
            steps = 1 / settings.generator.shortened(1)[1]
        alike = job.experiment.chosen("data", "features", "normalise", "clients")
        generator = settings.model_dump(mode="json", include={"generator", "gamma"})
        piece = f"{'a step' if steps > 1 else 'a release'} of {kind_of(settings.generator)}"
        kind = json.dumps([alike, generator, math.isfinite(settings.epsilon)], sort_keys=True)
        made = Work(
            f"{piece} on {job.experiment.data} ({records} records)", kind, clients, clients * steps,
            self._release, records, min(_MOST_STEPS, round(steps)), answers_at_once(job), self.key(),
            job.experiment.engine.threads,
        )  # fmt: skip
        return (made,)

    def _release(self, size: int, steps: int) -> Callable[[], object]:
        """Make ready the release of a client that holds ``size`` records, by a generator that takes ``steps`` steps."""
        from clients.dafl.generator import Generator, PrivateRecords, Shortening  # noqa: PLC0415 (as above)
        from fl_sim.privacy.mechanisms import Noise  # noqa: PLC0415 (as above)

        job, settings = self.job, self.settings
        generator: Generator = settings.generator
        if isinstance(generator, Shortening):
            generator, _ = generator.shortened(steps)
        inputs, _ = to_tensors(public(job, size), job.dataset)
        records = PrivateRecords(to_generator(inputs, job), torch.zeros(size, dtype=torch.int64), 1)
        counts = np.array([max(1, round(settings.gamma * size))])
        # What is clipped and noised takes longer, however large the noise is, and the least takes a search to find.
        noise = 1.0 if math.isfinite(settings.epsilon) else 0.0
        bill = replace(generator.bill(size, 1, math.inf, settings.delta), noise_multiplier=noise)
        coins = rng(job.experiment.seed, "probe")
        return lambda: generator.generate(records, counts, bill, Noise.seeded(0), coins)

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Clients send their records as float32, and each gets all as they are kept, with a label of 8 bytes each."""
        del params
        numbers, released = math.prod(self.job.dataset.input_shape), self._by_client()
        sizes, how_often = np.unique(released, return_counts=True)
        up = sum(float32_bytes(numbers * int(size)) * int(times) for size, times in zip(sizes, how_often, strict=True))
        kept = as_kept(torch.zeros(1, *self.job.dataset.input_shape), self.job)
        return {"synthetic_records": Traffic(int(released.sum()) * (kept.nbytes + 8) * len(released), up)}

    def payments(self) -> "Iterator[Payment]":
        """Yield the budget: the events depend on clients' numbers of records, and the budget does not."""
        from fl_sim.privacy.bill import Payment  # noqa: PLC0415

        settings = self.settings
        epsilon = settings.epsilon if math.isfinite(settings.epsilon) else None
        yield Payment(
            "record", self.key(), epsilon, settings.delta, Adjacency.ADD_OR_REMOVE_ONE,
            simulation_only=settings.noise == "seeded",
        )  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return how the pool came about."""
        if self.pool is None:
            return {}
        from fl_sim.stages.dafl.synthesis import summary  # noqa: PLC0415 (the accountants load slowly)

        return {"preprocess": summary(self.pool, self.job.experiment)}

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Add what the pool costs a record, and to what protects clients that it does not cover the pool."""
        if self.pool is None:
            return list(others)
        from fl_sim.stages.dafl.bill import NOT_PER_CLIENT, statement  # noqa: PLC0415 (the accountants load slowly)

        told = [
            one | {"does_not_cover": f"{one['does_not_cover']}{NOT_PER_CLIENT}"} if one["unit"] == "client" else one
            for one in others
        ]
        return [*told, statement(self.pool, self.job.experiment)]
