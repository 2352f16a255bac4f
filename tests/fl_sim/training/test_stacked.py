"""Clients trained as one stack end where one after another does, with and without a graph of the step."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_sim.local_plan import LocalAlgorithm, LocalPlan
from fl_sim.models import MODELS
from fl_sim.params import detached
from fl_sim.seeding import rng, torch_kept
from fl_sim.training import stacked
from fl_sim.training.loop import train
from fl_sim.training.records import Precision, Records, Scale, Source
from fl_sim.training.stacked import Launcher, StackedTrainer, width_for
from fl_sim.training.trainer import LocalJob
from fl_sim.types import LocalSettings, LocalTask, Params
from strategies.fedavg import FedAvg
from strategies.fedmix import FedMix, NaiveMix
from strategies.fednova import FedNova
from strategies.fedprox import FedProx
from strategies.scaffold import Scaffold

SHAPE = (1, 16, 16)
SIZES = (1, 40, 0, 7, 64, 23)
SETTINGS = LocalSettings(0.02, 0.9, 1e-4, batch_size=16, epochs=2)
ALGORITHMS = [FedAvg(), FedProx(mu=0.1), Scaffold(), FedNova(), FedMix(), NaiveMix()]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def model(name: str, device: str = "cpu") -> nn.Module:
    with torch_kept():
        torch.manual_seed(6)
        return MODELS[name](SHAPE, 10).to(device)


def noise(params: Params, seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.01 * torch.randn(value.shape, generator=generator) for name, value in params.items()}


def jobs(
    algorithm: LocalAlgorithm, name: str, settings: LocalSettings = SETTINGS, device: str = "cpu"
) -> list[LocalJob]:
    params = detached(model(name).named_parameters())
    generator = torch.Generator().manual_seed(0)
    pool = {"inputs": torch.randn(3, *SHAPE, generator=generator), "labels": torch.full((3, 10), 0.1)}
    made = []
    for client, size in enumerate(SIZES):
        rate = settings.learning_rate * (1 + client / 10)
        task = LocalTask(
            1, client, len(SIZES), size, replace(settings, learning_rate=rate), params, {"control": noise(params, 1)},
            {"control": noise(params, 2 + client)} if client % 2 else {}, pool,
        )  # fmt: skip
        inputs = torch.randn(size, *SHAPE, generator=generator).to(device)
        labels = torch.randint(0, 10, (size,), generator=generator).to(device)
        made.append(LocalJob(task, algorithm.plan(task), Records.of(inputs, labels), rng(0, "batches", client)))
    return made


def flat(params: Params) -> torch.Tensor:
    return torch.cat([value.double().cpu().reshape(-1) for value in params.values()])


def assert_agree(made: Callable[[], list[LocalJob]], name: str, device: str = "cpu", within: float = 5e-5) -> None:
    found, expected = made(), made()
    for job, twin, trained in zip(found, expected, StackedTrainer(model(name, device)).train(found), strict=True):
        alone = train(model(name, device), twin.task, twin.plan, *twin.records.tensors(), twin.generator)
        assert trained.num_steps == alone.num_steps
        assert trained.params.keys() == alone.params.keys()
        assert trained.momentum_buffers.keys() == alone.momentum_buffers.keys()
        assert trained.loss == (None if alone.loss is None else pytest.approx(alone.loss, rel=1e-4))
        moved = float((flat(alone.params) - flat(job.task.params)).norm())
        assert float((flat(trained.params) - flat(alone.params)).norm()) <= within * moved
        if alone.momentum_buffers:
            buffers = flat(alone.momentum_buffers)
            assert float((flat(trained.momentum_buffers) - buffers).norm()) <= 10 * within * float(buffers.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.kind)
def test_a_stack_ends_where_the_one_by_one_loop_does(algorithm: LocalAlgorithm, device: str) -> None:
    assert_agree(lambda: jobs(algorithm, "niid-cnn", device=device), "niid-cnn", device)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "niid-cnn"])
def test_every_model_of_ours_can_be_stacked(name: str) -> None:
    settings = replace(SETTINGS, epochs=1, learning_rate=0.005)
    assert_agree(lambda: jobs(Scaffold(), name, settings), name)


def test_without_momentum_or_decay_it_is_plain_sgd() -> None:
    settings = LocalSettings(0.05, 0.0, 0.0, batch_size=16, epochs=1)
    assert_agree(lambda: jobs(FedAvg(), "mlp", settings), "mlp")


def test_warm_momentum_goes_on_where_it_was() -> None:
    def warm() -> list[LocalJob]:
        return [
            replace(job, plan=LocalPlan(momentum_buffers=noise(job.task.params, job.task.client)))
            for job in jobs(FedAvg(), "mlp")
        ]

    assert_agree(warm, "mlp")


def test_frozen_and_unused_parameters_stay_as_they_were() -> None:
    def partly() -> nn.Module:
        made = model("mlp")
        made.register_parameter("unused", nn.Parameter(torch.ones(2)))
        made.get_parameter("1.weight").requires_grad = False
        return made

    def made() -> list[LocalJob]:
        params = detached(partly().named_parameters())
        return [replace(job, task=replace(job.task, params=params)) for job in jobs(FedAvg(), "mlp")]

    for job, twin, trained in zip(made(), made(), StackedTrainer(partly()).train(made()), strict=True):
        alone = train(partly(), twin.task, twin.plan, *twin.records.tensors(), twin.generator)
        for name in ("unused", "1.weight"):
            assert torch.equal(trained.params[name], job.task.params[name])
        assert float((flat(trained.params) - flat(alone.params)).norm()) <= 1e-4 * float(flat(alone.params).norm())


def test_the_same_stack_gives_the_same_bits() -> None:
    forward = StackedTrainer(model("niid-cnn")).train(jobs(Scaffold(), "niid-cnn"))
    again = StackedTrainer(model("niid-cnn")).train(jobs(Scaffold(), "niid-cnn"))
    assert all(torch.equal(flat(one.params), flat(two.params)) for one, two in zip(forward, again, strict=True))


def test_bfloat16_stays_near_and_keeps_float32_weights() -> None:
    settings = replace(SETTINGS, epochs=1)
    whole = StackedTrainer(model("mlp")).train(jobs(FedAvg(), "mlp", settings))
    half = StackedTrainer(model("mlp"), "bfloat16").train(jobs(FedAvg(), "mlp", settings))
    for job, one, two in zip(jobs(FedAvg(), "mlp", settings), whole, half, strict=True):
        moved = float((flat(one.params) - flat(job.task.params)).norm())
        assert float((flat(one.params) - flat(two.params)).norm()) <= 0.1 * moved
        assert all(value.dtype == torch.float32 for value in two.params.values())
        assert moved == 0 or not torch.equal(flat(one.params), flat(two.params))


def as_bytes(made: list[LocalJob], sources: int, device: str = "cpu") -> list[LocalJob]:
    """Return ``made`` with other records: every client's a range of bytes that lie in one source or in several."""
    generator = torch.Generator().manual_seed(7)
    scale = Scale(torch.full((1, 1, 1, 1), 33.3), torch.full((1, 1, 1, 1), 78.6)).to(torch.device(device))
    total = sum(SIZES)
    shared = []
    for _ in range(sources):
        inputs = torch.randint(0, 256, (total, *SHAPE), generator=generator, dtype=torch.uint8).to(device)
        shared.append(Source(inputs, torch.randint(0, 10, (total,), generator=generator).to(device), scale))
    ends = [sum(SIZES[: place + 1]) for place in range(len(SIZES))]
    return [
        replace(job, records=Records(tuple((source, range(end - size, end)) for source in shared)))
        for job, size, end in zip(made, SIZES, ends, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sources", [1, 2])
def test_clients_whose_records_are_ranges_of_bytes_end_there_too(sources: int, device: str) -> None:
    settings = replace(SETTINGS, epochs=1)
    assert_agree(lambda: as_bytes(jobs(Scaffold(), "niid-cnn", settings), sources, device), "niid-cnn", device)


def test_bytes_and_floats_give_the_same_bits() -> None:
    made = as_bytes(jobs(FedAvg(), "niid-cnn"), 1)
    floats = [
        replace(job, records=Records.of(*twin.records.tensors()))
        for job, twin in zip(jobs(FedAvg(), "niid-cnn"), made, strict=True)
    ]
    left, right = (StackedTrainer(model("niid-cnn")).train(some) for some in (made, floats))
    assert all(torch.equal(flat(one.params), flat(two.params)) for one, two in zip(left, right, strict=True))


def rounds(trainer: StackedTrainer, algorithm: LocalAlgorithm, device: str = "cpu") -> list[torch.Tensor]:
    """Return where all clients are after each of three rounds of ``trainer``, the last with the first few alone."""
    once = replace(SETTINGS, epochs=1)
    first = as_bytes(jobs(algorithm, "mlp", once), 1, device)
    source, pool = first[0].records.parts[0][0], first[0].task.pool
    found = []
    for server_round in range(3):
        made = []
        for job in as_bytes(jobs(algorithm, "mlp", once), 1, device):
            records = Records(((source, job.records.parts[0][1]),))
            task = replace(job.task, server_round=server_round, pool=pool)
            made.append(replace(job, task=task, plan=algorithm.plan(task), records=records))
        results = trainer.train(made[: 6 - server_round])
        found.append(torch.cat([flat(trained.params) for trained in results]))
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.kind)
def test_steps_that_are_taken_as_one_launch_end_where_others_do(
    algorithm: LocalAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The step that a GPU captures, with clients that are finished among those who train; a stand-in launches it.
    monkeypatch.setattr(stacked, "captures_on", lambda device: True)
    captured = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        step()
        captured.append(step)
        return step

    as_one = rounds(StackedTrainer(model("mlp"), capture=capture, plain_steps=0), algorithm)
    assert len(captured) == 4  # for 6, 3, 2 and 1 clients
    for one, other in zip(as_one, rounds(StackedTrainer(model("mlp"), graphs=False), algorithm), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("algorithm", [FedProx(mu=2.0), Scaffold()], ids=lambda algorithm: algorithm.kind)
def test_what_a_stack_keeps_in_memory_is_of_this_round(algorithm: LocalAlgorithm) -> None:
    """The model that a proximal term pulls to, and the offsets, are those that came with the round, not the first's."""
    trainer, settings = StackedTrainer(model("mlp")), replace(SETTINGS, epochs=1, momentum=0.0)
    first = as_bytes(jobs(algorithm, "mlp", settings), 1)  # the same records each time, or the trainer starts anew
    for server_round in range(3):

        def made(server_round: int = server_round) -> list[LocalJob]:
            turned = []
            for job in first:
                moved_on = noise(job.task.params, 90 + server_round)
                params = {name: value + moved_on[name] for name, value in job.task.params.items()}
                state = {name: noise(params, 10 * server_round + job.task.client) for name in job.task.state}
                task = replace(job.task, params=params, state=state)
                turned.append(LocalJob(task, algorithm.plan(task), job.records, rng(0, "batches", job.task.client)))
            return turned

        for twin, trained in zip(made(), trainer.train(made()), strict=True):
            alone = train(model("mlp"), twin.task, twin.plan, *twin.records.tensors(), twin.generator)
            moved = float((flat(alone.params) - flat(twin.task.params)).norm())
            assert float((flat(trained.params) - flat(alone.params)).norm()) <= 1e-3 * moved


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.kind)
def test_cuda_graphs_end_where_single_launches_do(algorithm: LocalAlgorithm) -> None:
    trainer = StackedTrainer(model("mlp", "cuda"), plain_steps=1)
    as_one = rounds(trainer, algorithm, "cuda")  # a warning, were one not captured, would be an error
    assert trainer.num_graphs == 4
    plainly = rounds(StackedTrainer(model("mlp", "cuda"), graphs=False), algorithm, "cuda")
    for one, other in zip(as_one, plainly, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_every_model_of_ours_can_be_captured_in_every_precision(name: str, precision: Precision) -> None:
    trainer = StackedTrainer(model(name, "cuda"), precision, plain_steps=1)
    first = as_bytes(jobs(FedAvg(), name), 1, "cuda")
    source = first[0].records.parts[0][0]
    for _ in range(2):
        made = [
            replace(job, records=Records(((source, twin.records.parts[0][1]),)))
            for job, twin in zip(jobs(FedAvg(), name), first, strict=True)
        ]
        results = trainer.train(made)
    assert trainer.num_graphs == 4
    assert all(bool(torch.isfinite(flat(trained.params)).all()) for trained in results)


def test_empty_clients_alone_stay_where_they_are() -> None:
    (job,) = (job for job in jobs(FedAvg(), "mlp") if not len(job.records))
    (trained,) = StackedTrainer(model("mlp")).train([job])
    assert (trained.num_steps, trained.loss, trained.momentum_buffers) == (0, None, {})
    assert torch.equal(flat(trained.params), flat(job.task.params))


def test_no_clients_are_no_results() -> None:
    assert StackedTrainer(model("mlp")).train([]) == []


class Counting:
    """A stand-in for StackedStep: clients that are still training move by one, and by a half the next time."""

    capacity = 10

    def __init__(self) -> None:
        self.active = torch.zeros((), dtype=torch.int64)
        self.weights = torch.zeros(self.capacity)
        self.buffers = torch.zeros(self.capacity)
        self.widths: list[int] = []

    def __call__(self, width: int) -> None:
        self.widths.append(width)
        live = torch.arange(width) < self.active
        self.buffers[:width] = torch.where(live, self.buffers[:width] / 2 + 1, self.buffers[:width])
        self.weights[:width] += torch.where(live, self.buffers[:width], 0.0)

    def state(self) -> list[torch.Tensor]:
        return [self.weights, self.buffers]


def expected(*steps: int) -> list[torch.Tensor]:
    """Return the state after steps of so many clients each."""
    counting = Counting()
    for active in steps:
        counting.active.fill_(active)
        counting(active)
    return counting.state()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def test_widths_halve_from_the_capacity_and_hold_whoever_still_trains() -> None:
    assert [width_for(active, 100) for active in (100, 51, 50, 26, 25, 13, 7, 4, 2, 1)] == [
        100, 100, 50, 50, 25, 13, 7, 4, 2, 1,
    ]  # fmt: skip
    for capacity in range(1, 40):
        widths = {width_for(active, capacity) for active in range(1, capacity + 1)}
        assert all(active <= width_for(active, capacity) <= capacity for active in range(1, capacity + 1))
        assert len(widths) <= capacity.bit_length() + 1


def test_a_step_is_captured_once_for_each_width_and_nobody_moves_meanwhile() -> None:
    step, captured = Counting(), []

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        for _ in range(3):
            call()
        captured.append(step.widths[-1])
        return call

    launch = Launcher(step, capture)  # type: ignore[arg-type]
    steps = (9, 10, 7, 4, 3, 5, 1)
    for active in steps:
        launch(active)
    assert captured == [10, 5, 3, 1]
    assert same(step.state(), expected(*steps))


def test_a_launch_is_made_after_so_many_plain_steps_of_its_width() -> None:
    step, captured = Counting(), []

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        captured.append(len(step.widths))
        return call

    launch = Launcher(step, capture, plain_steps=2)  # type: ignore[arg-type]
    for active in (10, 4, 10, 4, 10):
        launch(active)
    assert step.widths[:4] == [10, 4, 10, 4]
    assert (captured, launch.num_graphs) == ([4], 1)
    assert same(step.state(), expected(10, 4, 10, 4, 10))


def test_without_capture_a_step_is_taken_with_as_many_as_still_train() -> None:
    step = Counting()
    launch = Launcher(step, None)  # type: ignore[arg-type]
    for active in (9, 3):
        launch(active)
    assert step.widths == [9, 3]
    assert same(step.state(), expected(9, 3))


def test_where_nothing_can_be_captured_steps_go_on_and_say_so() -> None:
    step = Counting()

    def broken(call: Callable[[], None]) -> Callable[[], None]:
        call()
        raise RuntimeError("operation not permitted when stream is capturing")

    launch = Launcher(step, broken)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="no CUDA graph: RuntimeError: operation not permitted"):
        launch(6)
    launch(6)  # and not again
    launch(2)
    assert same(step.state(), expected(6, 6, 2))


@pytest.mark.parametrize("wrong", [lambda step: None, lambda step: step(9), lambda step: step.weights.fill_(torch.nan)])
def test_a_launch_that_does_something_else_is_not_used(wrong: Callable[[Counting], object]) -> None:
    step = Counting()
    launch = Launcher(step, lambda call: lambda: void(wrong(step)))  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="its result differs from that of the plain step"):
        launch(10)
    launch(10)
    assert same(step.state(), expected(10, 10))


def void(value: object) -> None:
    """Drop a value."""


def test_a_launch_is_wrong_however_little_what_is_wrong_weighs() -> None:
    step = Counting()
    step.weights.fill_(1e4)  # whose rounding is more than all that happens to the buffers
    launch = Launcher(step, lambda call: lambda: void(step.weights[:10].add_(1)))  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="its result differs from that of the plain step"):
        launch(10)
