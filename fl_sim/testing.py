"""Tests of an algorithm (``check``) or a compressor (``check_compressor``) against laws that each of them must obey.

    from fl_sim.testing import check
    check(FedDyn(alpha=0.1))

A test takes a few seconds on the small data set ``digits``. No test checks the algorithm's formulas: compare them with
the paper.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from clients.client_task import ClientRuntime, CustomStart, OnClient
from clients.train import further_job
from fl_sim import models
from fl_sim.data import load
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.groups import InProcess, Local
from fl_sim.kinds import title_of
from fl_sim.local_plan import FurtherModel, FurtherModels, Sending
from fl_sim.native.kernel import load_kernel
from fl_sim.packed import Coins, Compressor, Packing
from fl_sim.params import FlatParams, Layout, WriteGuard, detached, is_finite, layout_of, num_in, scale, trainable
from fl_sim.privacy.mechanisms import Noise
from fl_sim.seeding import rng, seed_torch, torch_alone
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.store.run_directory import RoundRecord
from fl_sim.trained_part import TrainedPart, as_made, train_alone
from fl_sim.training.loop import to_tensors
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import Aggregate, Cohort, LocalSettings, LocalTask, Params, Payloads, Reply, ServerState, Trained
from partitions import Iid
from strategies.aggregators import WeightedMean
from strategies.algorithm import (
    Algorithm,
    PartialTraining,
    Rebuilding,
    Sharing,
    Sizing,
    Unfolding,
    first_state,
    groups_of,
    num_further_outputs,
    payload_template,
    weighting_of,
)
from strategies.global_dp import GlobalDP

ROUNDING = 1e-4
"""The largest relative distance between the models of two trainers, which sum float32 numbers in different orders."""


class BrokenLaw(AssertionError):  # noqa: N818 (named after the finding)
    """Raised if an algorithm, compressor or run breaks a law of ``check``, ``check_compressor`` or ``check_run``.

    The message names the law.
    """


def check(algorithm: Algorithm) -> None:
    """Test ``algorithm``, a settings object, against eight laws. Raises BrokenLaw for the first broken law.

    1. The algorithm does not change when it is written to JSON and read back. 2. Every client, even without records,
    sends tensors of the same names and shapes, with finite numbers. 3. A client without records has weight 0 in the
    mean. 4. The server state keeps its names and shapes. 5. The compiled C++ trainer, PyTorch, and PyTorch on stacked
    clients train equal models, except for float32 rounding. 6. A run that is interrupted and resumed ends in the same
    bits. 7. Under Global DP no client changes the mean by more than the clipping norm allows. An algorithm that cannot
    be combined with Global DP passes this test. 8. The algorithm does not write to its inputs: the server state, the
    client states and the pool of records that clients share.
    """
    laws = (_is_written_down, _sends_the_same_shapes, _engines_agree, _resumes_to_the_same_bits, _is_clipped_whole)
    for law in laws:
        try:
            law(algorithm)
        except RunError as error:
            raise BrokenLaw(f"{title_of(algorithm)}: {error}") from error


def _is_written_down(algorithm: Algorithm) -> None:
    experiment = Experiment(algorithm=algorithm)
    if experiment_from(experiment.model_dump(mode="json")) != experiment:
        raise BrokenLaw(f"{title_of(algorithm)}: written to JSON and read back, it differs from {algorithm!r}")


def _sends_the_same_shapes(algorithm: Algorithm) -> None:
    server, wanted = _started(algorithm)
    for records in (0, 1, 7):
        update = _update(algorithm, server, records)
        _expect_payloads(algorithm, update.payloads, wanted, f"a client with {records} records")
        if update.num_examples != records:
            raise BrokenLaw(
                f"{title_of(algorithm)}: a client with {records} records sends num_examples={update.num_examples}: "
                "return the task's num_examples, so that a client without records has no weight in the mean"
            )
        again = _update(algorithm, server, records, update.state)
        _expect_payloads(algorithm, again.payloads, wanted, f"a client with {records} records in its second round")
    updates = [_update(algorithm, server, records) for records in (3, 5)]
    unfolded = algorithm.unfolded if isinstance(algorithm, Unfolding) else lambda payloads: payloads
    replies = tuple(Reply(client, unfolded(one.payloads), one.num_examples, None) for client, one in enumerate(updates))
    aggregate = WeightedMean().mean(Cohort(1, replies, 2, 2.0), weighting_of(algorithm))
    assert aggregate is not None
    write_guard = WriteGuard.of(groups_of(server))
    merged = algorithm.merge(server, aggregate)
    write_guard.check(algorithm.merge)
    write_guard.check_bits(algorithm.merge)
    states = [{"params": one.params, **one.broadcast, **one.memory} for one in (server, merged)]
    before, after = ({name: dict(layout_of(params)) for name, params in state.items()} for state in states)
    if before != after:
        raise BrokenLaw(
            f"{title_of(algorithm)}: merge changed the names or shapes of the server state from {before} to {after}"
        )
    if not is_finite({"params": merged.params}):
        raise BrokenLaw(f"{title_of(algorithm)}: merge returned numbers that are not finite")


def _engines_agree(algorithm: Algorithm) -> None:
    with tempfile.TemporaryDirectory() as folder:
        alone = _trained(algorithm, Path(folder) / "alone", InProcess(stack=1))
        stacked = _trained(algorithm, Path(folder) / "stacked", InProcess(stack=4))
    start = detached(as_made(_model(algorithm)).named_parameters())
    _expect_close(algorithm, "a stack of clients", stacked, alone, start)
    kernel, _ = load_kernel()
    if kernel is None:
        return
    server, _ = _started(algorithm)
    compiled, by_pytorch = (
        _local(algorithm, server, 40, trainer=Trainer(_model(algorithm), own)) for own in (kernel, None)
    )
    _expect_close(algorithm, "the compiled trainer", compiled.params, by_pytorch.params, _initial(algorithm))


def _resumes_to_the_same_bits(algorithm: Algorithm) -> None:
    class Break(Silent):
        def finished_round(self, record: RoundRecord) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder:
        whole = _trained(algorithm, Path(folder) / "whole", InProcess(stack=1))
        try:
            _trained(algorithm, Path(folder) / "broken off", InProcess(stack=1), Break())
        except KeyboardInterrupt:
            resumed = _trained(algorithm, Path(folder) / "broken off", InProcess(stack=1))
    if any(not torch.equal(whole[name], resumed[name]) for name in whole):
        raise BrokenLaw(
            f"{title_of(algorithm)}: a run that was interrupted after round 2 ended in other bits than an "
            "uninterrupted run: keep everything for later rounds in ServerState (server) and ClientUpdate.state "
            "(clients)"
        )


def _is_clipped_whole(algorithm: Algorithm) -> None:
    aggregator = GlobalDP(noise_multiplier=0.0)
    try:
        Experiment(algorithm=algorithm, aggregator=aggregator, clients=4)
    except ValueError:
        return  # this algorithm cannot be combined with Global DP, so there is nothing to test
    server, wanted = _started(algorithm)
    honest = [_update(algorithm, server, records).payloads for records in (3, 5)]
    loud = {name: scale(params, 1e6) for name, params in honest[0].items()}
    released: list[Aggregate] = []
    for payloads in (honest, [loud, honest[1]], honest[1:]):
        cohort = Cohort(1, tuple(Reply(client, one, 1, None) for client, one in enumerate(payloads)), 4, 2.0)
        released.append(aggregator.mean(cohort, noise=Noise.seeded(0), template=wanted))
    # with clipping norm 1, one client changes the mean by at most 2 / (number of clients)
    limit = 2 * 1.0 / len(honest)
    for one, other in ((released[0], released[1]), (released[1], released[2])):
        if (moved := _distance(one.payloads, other.payloads)) > limit * (1 + 1e-6):
            raise BrokenLaw(
                f"{title_of(algorithm)}: one client changed the mean under Global DP by {moved:g}, above {limit:g}"
            )
    algorithm.merge(server, released[0])


def _architecture(algorithm: Algorithm) -> str:
    """Return the name of a model for tests of ``algorithm``.

    If clients send or receive only a part of the model, the model has several layers, else one layer. Low-rank factors,
    which ``Unfolding`` multiplies, can be a part of a single layer, so one layer is enough.
    """
    is_part = isinstance(algorithm, Sending) or (isinstance(algorithm, Sizing) and not isinstance(algorithm, Unfolding))
    return "mlp" if is_part else "logistic"


def _model(algorithm: Algorithm) -> torch.nn.Module:
    dataset = load("digits")

    def prepare(model: torch.nn.Module) -> torch.nn.Module:
        if isinstance(algorithm, Rebuilding):
            with torch_alone():
                seed_torch(0, "rebuilt model")
                model = algorithm.rebuilt(model, dataset.input_shape)
        TrainedPart(**getattr(algorithm, "starts_with", {}).get("model", {}))(model)
        if isinstance(algorithm, PartialTraining):
            train_alone(model, algorithm.trains)
        return model

    num_outputs = dataset.num_classes + num_further_outputs(algorithm)
    return models.build(_architecture(algorithm), dataset.input_shape, num_outputs, seed=0, prepare=prepare)


def _initial(algorithm: Algorithm) -> Params:
    return detached(trainable(_model(algorithm)).items())


def _started(algorithm: Algorithm) -> tuple[ServerState, Payloads]:
    server = first_state(algorithm, _initial(algorithm))
    return server, payload_template(algorithm, server)


def _update(algorithm: Algorithm, server: ServerState, records: int, state: Payloads | None = None) -> Any:
    trained, task = _local(algorithm, server, records, state=state), _task(algorithm, server, records, state)
    write_guard = _handed_out(task)
    own = set(task.params) - set(server.params)
    part = {name: value for name, value in task.params.items() if name not in own} if own else task.params
    travels = {name: value for name, value in trained.params.items() if name not in own} if own else trained.params
    update = algorithm.finish(replace(task, params=part), replace(trained, params=travels))
    write_guard.check(algorithm.finish)
    write_guard.check_bits(algorithm.finish)
    return update


def _local(
    algorithm: Algorithm,
    server: ServerState,
    records: int,
    *,
    state: Payloads | None = None,
    trainer: Trainer | None = None,
) -> Trained:
    task, dataset = _task(algorithm, server, records, state), load("digits")
    inputs, labels = to_tensors(dataset.train.take(torch.arange(records).numpy()), dataset)
    write_guard = _handed_out(task)
    used = trainer or Trainer(_model(algorithm), None)
    if isinstance(algorithm, CustomStart):
        task = algorithm.start(task, OnClient(Records.of(inputs, labels), used))
        write_guard.check(algorithm.start)
    job = LocalJob(task, algorithm.plan(task), Records.of(inputs, labels), rng(0, "batches", 0, 1))
    write_guard.check(algorithm.plan)
    models: Mapping[str, FurtherModel] = {}
    if isinstance(algorithm, FurtherModels):
        models = algorithm.further(task)
        write_guard.check(algorithm.further)
    further = [further_job(job, name, one, rng(0, "batches", 0, 1)) for name, one in models.items()]
    runtime = ClientRuntime(algorithm, _model(algorithm), _none, _none, lambda _: task.settings, 4, 0)
    vars(runtime)["trainer"] = used
    trained, *others = runtime.prepare([job, *further])()
    write_guard.check_bits(algorithm.plan, *([job.plan.loss_term.function] if job.plan.loss_term else ()))
    return replace(trained, further={**trained.further, **dict(zip(models, others, strict=True))})


def _none(*_: object) -> Records:
    raise AssertionError("a test passes the records of a client directly, so this function is never called")


def _handed_out(task: LocalTask) -> WriteGuard:
    named = {f"the server's {name!r}": one for name, one in task.broadcast.items()}
    kept = {f"client state {name!r}": one for name, one in task.state.items()}
    return WriteGuard.of({"the global model": task.params, "the pool": task.pool, **named, **kept})


def _task(algorithm: Algorithm, server: ServerState, records: int, state: Payloads | None) -> LocalTask:
    settings, dataset = LocalSettings(0.1, momentum=0.9, weight_decay=1e-4, batch_size=4, epochs=2), load("digits")
    counts = np.bincount(dataset.train.labels[:records], minlength=dataset.num_classes)
    params = {**_initial(algorithm), **server.params} if isinstance(algorithm, Sending) else server.params
    return LocalTask(
        1, 0, 4, records, settings, params, server.broadcast, state or {}, _pool(algorithm),
        tuple(counts.tolist()), initial=_initial(algorithm),
    )  # fmt: skip


def _pool(algorithm: Algorithm) -> Params:
    if not isinstance(algorithm, Sharing):
        return {}
    dataset = load("digits")
    inputs, labels = to_tensors(dataset.train.take(torch.arange(20).numpy()), dataset)
    return algorithm.share(inputs, labels, dataset.num_classes, rng(0, "share", 0))


def _trained(algorithm: Algorithm, out: Path, engine: InProcess, observer: Silent | None = None) -> Params:
    # local settings that the algorithm requires, such as momentum 0
    own: Mapping[str, Any] = getattr(algorithm, "starts_with", {}).get("local", {})
    local = Local(**{"epochs": 1, "batch_size": 32, "learning_rate": 0.1, "momentum": 0.9, **own})
    model = _architecture(algorithm)
    settings: dict[str, Any] = {"partition": Iid(), "clients": 4, "model": model, "rounds": 4, "local": local}
    run(Experiment(algorithm=algorithm, engine=engine, **settings), out, observer=observer)
    return load_file(out / "model.safetensors")


def _expect_payloads(algorithm: Algorithm, sent: Payloads, wanted: Payloads, who: str) -> None:
    layouts = [{name: dict(layout_of(params)) for name, params in one.items()} for one in (sent, wanted)]
    if layouts[0] != layouts[1]:
        raise BrokenLaw(
            f"{title_of(algorithm)}: {who} sends {layouts[0]}, but a client without records sends {layouts[1]}: all "
            "clients must send the same names and shapes"
        )
    if not is_finite(sent):
        raise BrokenLaw(f"{title_of(algorithm)}: {who} sends numbers that are not finite")


def _expect_close(algorithm: Algorithm, who: str, one: Params, other: Params, start: Params) -> None:
    gap = _distance({"": one}, {"": other})
    moved = _distance({"": other}, {"": start})
    if gap > ROUNDING * max(moved, 1e-3):
        raise BrokenLaw(
            f"{title_of(algorithm)}: the model of {who} is at distance {gap:.3g} from that of PyTorch for one client "
            f"(training moved PyTorch's model by {moved:.3g}): these trainers disagree about the local plan"
        )


def _distance(one: Payloads, other: Payloads) -> float:
    gaps = (one[name][key].double() - other[name][key].double() for name in one for key in one[name])
    return float(sum(float(gap.pow(2).sum()) for gap in gaps) ** 0.5)


LAYOUTS: tuple[Layout, ...] = (
    (("conv", (4, 3, 3, 3)), ("bias", (4,)), ("head", (10, 40)), ("scale", ())),
    (("only", (1,)),),
)
MANY, OFF = 1000, 0.25
"""The number of rounds, and the largest relative distance between the sums of received and of sent updates."""


def check_compressor(way: Compressor) -> None:
    """Test ``way``, the settings object of a compressor, against the laws. Raises BrokenLaw for the first broken law.

    1. The compressor does not change when it is written to JSON and read back. 2. Every compressed update has the size
    that ``size`` returns. 3. The compressed update depends only on the update, on the client's stored tensors and on
    ``coins``, the source of random numbers. 4. A finite update is finite after decompression, and an update with NaN or
    infinity is not. 5. The client's stored tensors always have the same names and shapes. 6. Over many rounds, the sum
    of the received updates approaches the sum of the sent updates. This needs error feedback or an unbiased
    compression.
    """
    experiment = Experiment(compress=way)
    if experiment_from(experiment.model_dump(mode="json")) != experiment:
        raise BrokenLaw(f"{title_of(way)}: written to JSON and read back, it differs from {way!r}")
    for layout in LAYOUTS:
        _packs_to_its_size(way, layout)
        _tells_what_is_not_finite(way, layout)
        _adds_up(way, layout)


def _packs_to_its_size(way: Compressor, layout: Layout) -> None:
    held: Payloads = {}
    for number in range(3):
        update = _random_update(layout, number)
        packed, kept = way.pack(update, held, _coins(number))
        size = way.size(layout)
        if (len(packed.numbers), len(packed.bits)) != size or packed.numbers.dtype != torch.float32:
            raise BrokenLaw(
                f"{title_of(way)} packs {len(packed.numbers)} numbers ({packed.numbers.dtype}) and {len(packed.bits)} "
                f"bytes, but size returns {size}: (number of float32 numbers, number of bytes)"
            )
        again, _ = way.pack(update, held, _coins(number))
        if not (torch.equal(packed.numbers, again.numbers) and np.array_equal(packed.bits, again.bits)):
            raise BrokenLaw(
                f"{title_of(way)} packs the same update differently in a second call: draw random numbers only "
                "from coins"
            )
        if number and _shapes(kept) != _shapes(held):
            raise BrokenLaw(
                f"{title_of(way)}: the tensors that a client stores change from {_shapes(held)} to {_shapes(kept)}: "
                "keep their names and shapes"
            )
        arrived = way.unpack(packed, layout, _coins(number))
        if layout_of(arrived) != layout or not torch.isfinite(arrived.flat).all():
            raise BrokenLaw(
                f"{title_of(way)}: a finite update with the tensors {layout} becomes {arrived.flat} with the tensors "
                f"{layout_of(arrived)} after decompression: keep the tensors' names and shapes, and finite numbers"
            )
        held = kept


def _tells_what_is_not_finite(way: Compressor, layout: Layout) -> None:
    packing, update = Packing(way, seed=0), _random_update(layout, 0)
    update.flat[-1] = torch.nan
    packed = packing.pack({"delta": update}, update, {}, 0, 1)[1]["delta"]
    arrived = packing.unpack("delta", packed, layout, 0, 1)
    if torch.isfinite(torch.cat([value.reshape(-1) for value in arrived.values()])).all():
        raise BrokenLaw(
            f"{title_of(way)}: an update with NaN is finite after decompression, so the server cannot detect it"
        )


def _adds_up(way: Compressor, layout: Layout) -> None:
    update, held = _random_update(layout, 0), Payloads()
    total = torch.zeros(num_in(layout), dtype=torch.float64)
    for number in range(MANY):
        packed, held = way.pack(update, held, _coins(number))
        total += way.unpack(packed, layout, _coins(number)).flat
    off = float(torch.linalg.vector_norm(total / MANY - update.flat) / torch.linalg.vector_norm(update.flat))
    if not off <= OFF:
        raise BrokenLaw(
            f"{title_of(way)}: an update is sent {MANY} times, and the mean of the received updates has a relative "
            f"distance of {off:.2g} from the sent update: use error feedback "
            "(strategies.compression.error_feedback), or compress without bias"
        )


def _random_update(layout: Layout, seed: int) -> FlatParams:
    generator = torch.Generator().manual_seed(seed)
    return FlatParams(torch.randn(num_in(layout), generator=generator), layout)


def _coins(number: int) -> Coins:
    return partial(rng, 0, "check", number)


def _shapes(held: Payloads) -> dict[str, Layout]:
    return {name: layout_of(params) for name, params in held.items()}
