"""The stage of DA-FL. Before the first round, every client publishes synthetic records.

In the rounds, clients train on the pool of all these records, if ``train_on`` allows it. The code that runs on clients
is in ``clients.dafl.share``.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from clients.client_task import Begun, Client
from clients.dafl.settings import DaFl
from fl_sim.data import version_of
from fl_sim.engines import remote, wire
from fl_sim.engines.arrays import float32_bytes
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of
from fl_sim.privacy.terms import Adjacency
from fl_sim.report.figures.samples import write_samples
from fl_sim.seeding import rng
from fl_sim.simulation.client_runtime import answers_at_once, as_kept, to_generator
from fl_sim.simulation.run_log import Pooled, RunLog
from fl_sim.simulation.stage import Run, Stage, start_from
from fl_sim.simulation.timing import Work, public_records
from fl_sim.training.loop import to_tensors
from fl_sim.training.records import Records
from fl_sim.types import Params, Traffic

if TYPE_CHECKING:
    from clients.dafl.generator import PrivateRecords
    from clients.dafl.share import ReleasingClient, SyntheticShare
    from fl_sim.privacy.bill import Payment
    from fl_sim.stages.dafl.pool import Pool

_MOST_STEPS: Final = 400
"""The largest number of generator steps in a timing."""


SYNTHESIZE: Final = "synthesize"
"""The name of the client task that makes synthetic records."""


@dataclass(frozen=True)
class Synthesize:
    """The client task that makes synthetic records once. Their privacy cost is written into the client's ledger."""

    job: Job
    # False, because the answer has noise. The client's policy checks the noise, and limits the privacy cost.
    reads_records: ClassVar[bool] = False
    reads_state: ClassVar[bool] = False
    runs_in_threads: ClassVar[bool] = False

    def run(self, client: Client) -> RecordDict:
        """Return the client's message: its synthetic records, and a JSON text with their counts and privacy costs."""
        if not client.ticket:
            [made] = self.run_together([client])
            if isinstance(made, Exception):
                raise made
            return made
        from clients.dafl.share import generate_elsewhere  # noqa: PLC0415 (the accountants load slowly)
        from fl_sim.privacy.mechanisms import Noise  # noqa: PLC0415

        job, ticket = self.job, client.ticket
        counts, noise = np.array(ticket.counts, dtype=np.int64), Noise(ticket.key, ticket.simulation_only)
        records = _private_records(job, client.runtime.own_records, client.number)
        settings, seed = settings_of(job.experiment), job.experiment.seed
        return wire.made_content(generate_elsewhere(settings, client.number, records, counts, noise, seed=seed))

    def run_together(self, clients: Sequence[Client]) -> list[RecordDict | Exception]:
        """Train the generators of several clients in one call; return the answer or the exception of each client."""
        from clients.dafl.share import make_shares  # noqa: PLC0415 (the accountants load slowly)

        job, experiment = self.job, self.job.experiment
        releasing = [releasing_client(job, client) for client in clients]
        shares = make_shares(
            settings_of(job.experiment), releasing, seed=experiment.seed, public_records=len(job.dataset.train),
            check=clients[0].check,
        )  # fmt: skip
        return [share if isinstance(share, Exception) else content_of(share) for share in shares]

    def begin(self, client: Client) -> Begun | RecordDict | None:
        """Write the privacy cost of a client's synthetic records into its privacy ledger.

        The driver, the process that started the workers, calls this method before a worker makes the records. See
        ``PaidAtHome``.
        """
        from clients.dafl.share import PaidRequest, begin_share  # noqa: PLC0415 (the accountants load slowly)

        job, releasing = self.job, releasing_client(self.job, client)
        begun = begin_share(settings_of(job.experiment), releasing, job.experiment.seed, len(job.dataset.train))
        if not isinstance(begun, PaidRequest):
            return content_of(begun)
        noise, counts = begun.request.noise, begun.request.counts
        return Begun(remote.Ticket(noise.key, noise.simulation_only, tuple(counts.tolist())), (releasing, begun))

    def finish(self, begun: Begun, answer: RecordDict) -> RecordDict:
        """Store the synthetic records that a worker's answer contains, and return the message for the server."""
        from clients.dafl.share import finish_share  # noqa: PLC0415 (the accountants load slowly)

        releasing, paid = begun.paid
        return content_of(finish_share(settings_of(self.job.experiment), releasing, paid, wire.read_made(answer)))


class SynthesisStage(Stage):
    """The stage at the server: it collects the pool of synthetic records, or finds the pool of an earlier run."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.settings = settings_of(job.experiment)
        self.pool: Pool | None = None

    def tasks(self) -> Mapping[str, Synthesize]:
        """Return the client task ``synthesize``, which makes a client's synthetic records."""
        return {SYNTHESIZE: Synthesize(self.job)}

    def preparing(self, log: RunLog) -> str:
        """Return the line that is shown while clients make synthetic records, before the first round."""
        del log
        made_by = kind_of(self.settings.generator)
        return f"clients make synthetic records, {made_by} (once for all runs with the same pool)"

    def before(self, run: Run) -> None:
        """Make or find the pool for the rounds. If ``server_epochs`` is set, train the first model on the pool."""
        from fl_sim.stages.dafl.pool import prepare_pool, traffic_of, warnings_of  # noqa: PLC0415 (the accountants load slowly)

        job, log = self.job, run.log
        self.pool = pool = prepare_pool(run)
        log.warnings += warnings_of(pool, job)
        traffic = traffic_of(pool, job.dataset.input_shape)
        log.before["synthetic_records"] = traffic if self.settings.supplies_rounds else Traffic(0, traffic.up)
        counts = [part.counts for part in pool.parts]
        if len(job.dataset.input_shape) == 3:
            log.warnings += write_samples(run.out, pool.path, counts, job.experiment.model_dump(), job.dataset.note)
        log.released = Pooled(pool.path, pool.num_synthetic)
        if self.settings.supplies_rounds:
            log.pooled = log.released
            run.strategy.order = replace(run.order, synthetic=str(pool.path))
        if (epochs := self.settings.server_epochs) and not log.rounds:
            start_from(run, pool.path, epochs)

    def num_pooled(self) -> int:
        """Return the approximate number of synthetic records of all clients, if clients train on them; else 0."""
        return int(self._by_client().sum()) if self.settings.supplies_rounds else 0

    def _by_client(self) -> NDArray[np.int64]:
        """Return the approximate number of synthetic records of each client, shape (clients,)."""
        gammas = np.array(self.settings.client_gammas or [self.settings.gamma])
        return np.round(gammas * self.job.shards.sizes).astype(np.int64)

    def trains_model(self) -> bool:
        """Return True if the server trains the first model on the pool."""
        return bool(self.settings.server_epochs)

    def num_server_steps(self) -> int:
        """Return the number of minibatch steps for which the server trains the first model on the pool."""
        released = int(self._by_client().sum())
        return self.settings.server_epochs * math.ceil(released / self.job.experiment.local.batch_size)

    def key(self) -> str:
        """Return the name of the pool, which several runs share."""
        from fl_sim.stages.dafl.pool import pool_key  # noqa: PLC0415 (the accountants load slowly)

        return pool_key(self.job)

    def is_made(self) -> bool:
        """Return True if an earlier run has made the pool on this machine."""
        from fl_sim.stages.dafl.pool import is_made  # noqa: PLC0415 (the accountants load slowly)

        return is_made(self.job)

    def work(self) -> tuple[Work, ...]:
        """Return the amount of computation of the clients' generators, for the time forecast.

        In one turn (see ``Work``), one client makes its synthetic records. The pieces of a turn are the generator's
        training steps. A generator without training steps has one piece per turn. The forecast assumes that each client
        has records of one class. More classes take longer. Partitions, privacy budgets and seeds do not change the
        time.
        """
        from clients.dafl.generator import ShortenedGenerator  # noqa: PLC0415 (the accountants load slowly)

        job, settings, clients = self.job, self.settings, self.job.experiment.num_clients
        records, steps = max(1, len(job.shards.records) // clients), 1.0
        if isinstance(settings.generator, ShortenedGenerator):
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
        """Return a function for timings that makes synthetic records from public test records, without a privacy cost.

        ``size``: the number of records. ``steps``: the number of training steps of the generator.
        """
        from clients.dafl.generator import Generator, PrivateRecords, ShortenedGenerator  # noqa: PLC0415 (as above)
        from fl_sim.privacy.mechanisms import Noise  # noqa: PLC0415 (as above)

        job, settings = self.job, self.settings
        generator: Generator = settings.generator
        if isinstance(generator, ShortenedGenerator):
            generator, _ = generator.shortened(steps)
        inputs, _ = to_tensors(public_records(job, size), job.dataset)
        records = PrivateRecords(to_generator(inputs, job), torch.zeros(size, dtype=torch.int64), 1)
        counts = np.array([max(1, round(settings.gamma * size))])
        # Any noise multiplier gives the same time. So a fixed one is used here, without the search for the right noise
        # multiplier.
        noise = 1.0 if math.isfinite(settings.epsilon) else 0.0
        bill = replace(generator.bill(size, 1, math.inf, settings.delta), noise_multiplier=noise)
        coins = rng(job.experiment.seed, "probe")
        return lambda: generator.generate(records, counts, bill, Noise.seeded(0), coins)

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return a forecast of bytes: clients send float32 records. They receive the pool if they train on it."""
        del params
        numbers, released = math.prod(self.job.dataset.input_shape), self._by_client()
        sizes, how_often = np.unique(released, return_counts=True)
        up = sum(float32_bytes(numbers * int(size)) * int(times) for size, times in zip(sizes, how_often, strict=True))
        kept = as_kept(torch.zeros(1, *self.job.dataset.input_shape), self.job)
        down = int(released.sum()) * (kept.nbytes + 8) * len(released) if self.settings.supplies_rounds else 0
        return {"synthetic_records": Traffic(down, up)}

    def payments(self) -> "Iterator[Payment]":
        """Yield the planned privacy cost of the pool: the whole privacy budget.

        The exact cost may be lower. It depends on the clients' numbers of records, so it is not computed here.
        """
        from fl_sim.privacy.bill import Payment  # noqa: PLC0415

        settings = self.settings
        epsilon = settings.epsilon if math.isfinite(settings.epsilon) else None
        yield Payment(
            "record", self.key(), epsilon, settings.delta, Adjacency.ADD_OR_REMOVE_ONE,
            simulation_only=settings.noise == "seeded",
        )  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return the pool's fields for ``result.json``; empty before the pool exists."""
        if self.pool is None:
            return {}
        from fl_sim.stages.dafl.pool import summary  # noqa: PLC0415 (the accountants load slowly)

        return {"preprocess": summary(self.pool, self.job.experiment)}

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the given privacy statements ``others`` and the privacy statement of the pool.

        Each client-level statement among ``others`` gets a further sentence: the statement does not cover the pool.
        """
        if self.pool is None:
            return list(others)
        from fl_sim.stages.dafl.bill import NOT_PER_CLIENT, statement  # noqa: PLC0415 (the accountants load slowly)

        told = [
            one | {"does_not_cover": f"{one['does_not_cover']}{NOT_PER_CLIENT}"} if one["unit"] == "client" else one
            for one in others
        ]
        return [*told, statement(self.pool, self.job.experiment)]


def settings_of(experiment: Experiment) -> DaFl:
    """Return the DA-FL settings of ``experiment``, which must use DA-FL."""
    assert isinstance(experiment.preprocess, DaFl)
    return experiment.preprocess


def content_of(share: "SyntheticShare") -> RecordDict:
    """Return the client's message: its synthetic records, and a JSON text with their counts and privacy costs."""
    receipt = share.receipt and share.receipt.to_json()
    said = {"counts": share.counts.tolist(), "refused": share.refused, "facts": share.facts, "receipt": receipt}
    return wire.synthetic_content(share.inputs, json.dumps(said))


def releasing_client(job: Job, client: Client) -> "ReleasingClient":
    """Return a client's inputs for making synthetic records.

    The inputs are the client's own records, and the paths of the client's private folder and privacy ledger.
    """
    from clients.dafl.share import ReleasingClient  # noqa: PLC0415 (the accountants load slowly)
    from fl_sim.simulation.client_ledgers import ledger_path, names_of_deal  # noqa: PLC0415

    ledger, folder, policy = ledger_path(job, client.number), client.folder(), client.policy
    if policy:  # private files go to the client's own folder, not to a folder that the server names
        features = version_of(job.experiment.features)
        release = settings_of(job.experiment).release_of(client.number, job.experiment.seed, features)
        now, earlier = (policy.home / f"{name}-{release}" for name in names_of_deal(job))
        folder = earlier if earlier.exists() else now
    records = _private_records(job, client.runtime.own_records, client.number)
    return ReleasingClient(client.number, records, folder, ledger, policy)


def _private_records(job: Job, own: Callable[[int], Records], client: int) -> "PrivateRecords":
    from clients.dafl.generator import PrivateRecords  # noqa: PLC0415 (the accountants load slowly)

    inputs, labels = (tensor.cpu() for tensor in own(client).tensors())
    dataset, features = job.dataset, version_of(job.experiment.features)
    return PrivateRecords(to_generator(inputs, job), labels, dataset.num_classes, dataset.columns, features)
