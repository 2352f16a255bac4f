"""Images moved at random: every one a window of the padded image, mirrored or not, and drawn alike by every trainer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_sim import models
from fl_sim.local_plan import Ascent, Contrast, Distillation, LocalPlan, Mix
from fl_sim.native.kernel import load_kernel
from fl_sim.native.layers import describe
from fl_sim.native.request import Draws, KernelJob
from fl_sim.params import detached
from fl_sim.seeding import rng, torch_kept
from fl_sim.training.loop import train
from fl_sim.training.records import Records, Scale, Source, black_of, moved
from fl_sim.training.stacked import StackedTrainer
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import Augment, LocalSettings, LocalTask, Params, Trained

SHAPE, CLASSES = (2, 5, 4), 3
SIZES = (5, 16, 0, 7)
BLACK = (-0.5, -2.0)
BOTH = Augment(crop=2, flip=True, black=BLACK)
REFLECTED = replace(BOTH, reflect=True)
SETTINGS = LocalSettings(0.05, 0.9, 1e-2, batch_size=4, epochs=2.5, augment=BOTH)
CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def model() -> nn.Module:
    with torch_kept():
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES))


def jobs(settings: LocalSettings, plan: LocalPlan | None = None) -> list[LocalJob]:
    params, made = detached(model().named_parameters()), []
    for client, size in enumerate(SIZES):
        task = LocalTask(1, client, len(SIZES), size, settings, params)
        records = Records.of(images(size, client), torch.arange(size) % CLASSES)
        made.append(LocalJob(task, plan or LocalPlan(), records, rng(0, "batches", client)))
    return made


def by_loop(given: list[LocalJob]) -> list[Trained]:
    return [train(model(), one.task, one.plan, *one.records.tensors(), one.generator) for one in given]


def flat(params: Params) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in params.values()])


def windows(image: torch.Tensor, *, reflect: bool = False) -> dict[tuple[int, int, int], torch.Tensor]:
    """Return every window of ``image``, written down plainly: padded, cut out, mirrored."""
    channels, height, width = SHAPE
    padded = torch.tensor(BLACK).view(-1, 1, 1).expand(channels, height + 4, width + 4).clone()
    padded[:, 2 : 2 + height, 2 : 2 + width] = image
    if reflect:
        padded = functional.pad(image, (2, 2, 2, 2), mode="reflect")
    found = {}
    for down in range(5):
        for right in range(5):
            window = padded[:, down : down + height, right : right + width]
            found[down, right, 0], found[down, right, 1] = window, window.flip(2)
    return found


@pytest.mark.parametrize("augment", [BOTH, REFLECTED])
def test_every_image_is_a_window_of_the_padded_one_mirrored_or_not(augment: Augment) -> None:
    [image] = images(1)
    expected = windows(image, reflect=augment.reflect)
    moves = torch.tensor(list(expected))
    found = moved(image.expand(50, *SHAPE), moves, augment, black_of(augment, CPU))
    of_stacks = moved(image.expand(5, 10, *SHAPE), moves.view(5, 10, 3), augment, black_of(augment, CPU))
    assert torch.equal(found, torch.stack([*expected.values()]))
    assert torch.equal(of_stacks.flatten(0, 1), found)
    assert torch.equal(expected[2, 2, 0], image)


def test_windows_are_uniform_and_every_other_image_is_mirrored() -> None:
    drawn = BOTH.draw(50_000, rng(0, "draw"))
    counts = torch.bincount(torch.from_numpy(drawn @ [10, 2, 1]), minlength=50).double()
    assert len(counts) == 50
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 85.4  # the 99.9 % point of chi-square with 49 degrees
    assert not Augment(crop=2).draw(100, rng(0, "draw"))[:, 2].any()
    assert not Augment(flip=True).draw(100, rng(0, "draw"))[:, :2].any()


def test_nothing_is_drawn_where_nothing_moves() -> None:
    generator = rng(0, "draw")
    assert not Augment().draw(9, generator).any()
    assert generator.integers(2**40) == rng(0, "draw").integers(2**40)
    records = torch.ones(3, 7)  # of any shape
    assert moved(records, torch.zeros(3, 3), Augment(), black_of(Augment(), CPU)) is records


def test_each_pass_is_shuffled_and_then_moved_anew_and_trained_on_by_plain_sgd() -> None:
    job = jobs(replace(SETTINGS, epochs=2))[1]
    network, generator, (inputs, labels) = model(), rng(0, "batches", 1), job.records.tensors()
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9, weight_decay=1e-2)
    for _ in range(2):
        order = torch.from_numpy(generator.permutation(16))
        moves = [tuple(move) for move in BOTH.draw(16, generator).tolist()]
        seen = torch.stack([windows(inputs[row])[move] for row, move in zip(order, moves, strict=True)])
        for batch, targets in zip(seen.split(4), labels[order].split(4), strict=True):
            optimizer.zero_grad()
            functional.cross_entropy(network(batch), targets).backward()
            optimizer.step()
    [trained] = by_loop([job])
    assert torch.equal(flat(trained.params), flat(detached(network.named_parameters())))


CONTRAST = Contrast(1.0, 0.5, detached(model().named_parameters()))
MIXING = LocalPlan(mix=Mix(torch.ones(3, *SHAPE), torch.full((3, CLASSES), 1 / 3), 0.1, linearise=True))


@pytest.mark.parametrize("plan", [LocalPlan(), MIXING], ids=["plain", "mixing"])
def test_a_stack_moves_images_as_the_loop_does(plan: LocalPlan) -> None:
    trainer = StackedTrainer(model())
    for _ in range(2):
        for one, other in zip(trainer.train(jobs(SETTINGS, plan)), by_loop(jobs(SETTINGS, plan)), strict=True):
            assert one.loss == (None if other.loss is None else pytest.approx(other.loss, rel=1e-4))
            torch.testing.assert_close(flat(one.params), flat(other.params), rtol=0, atol=3e-6)
    [still] = by_loop([jobs(replace(SETTINGS, augment=Augment()), plan)[1]])
    assert float((flat(still.params) - flat(other.params)).norm()) > 1e-2


def test_bytes_are_moved_as_what_they_are_normalised_to() -> None:
    pixels = torch.randint(256, (16, *SHAPE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scale = Scale(torch.full((1, 2, 1, 1), 30.0), torch.full((1, 2, 1, 1), 60.0))
    normalised = scale.normalise_(pixels.float())
    given = jobs(SETTINGS)[1]
    labels = torch.arange(16) % CLASSES
    ends = []
    for source in (Source(pixels, labels, scale), Source(normalised, labels)):
        [trained] = StackedTrainer(model()).train([replace(given, records=source.whole(), generator=rng(0, "batches"))])
        ends.append(flat(trained.params))
    assert torch.equal(*ends)


NETWORKS = {
    "convolution": (model, SHAPE),
    "bordered": (lambda: models.build("dafl-cnn", (3, 9, 8), CLASSES, 0), (3, 9, 8)),
    "linear": (lambda: models.build("mlp", (1, 17, 11), CLASSES, 0), (1, 17, 11)),
}


@needs_kernel
@pytest.mark.parametrize(
    "plan", [LocalPlan(), MIXING, LocalPlan(ascent=Ascent(0.1))], ids=["plain", "mixing", "uphill"]
)
@pytest.mark.parametrize(
    "augment", [BOTH, Augment(7, flip=True, black=BLACK), Augment(flip=True, black=BLACK), REFLECTED]
)
def test_the_compiled_trainer_moves_images_as_the_loop_does(plan: LocalPlan, augment: Augment) -> None:
    settings, trainer = replace(SETTINGS, augment=augment), Trainer(model(), load_kernel()[0])
    assert trainer.is_native(SHAPE, plan, settings)
    for one, other in zip(trainer.train_all(jobs(settings, plan)), by_loop(jobs(settings, plan)), strict=True):
        assert one.loss == (None if other.loss is None else pytest.approx(other.loss, rel=1e-4))
        torch.testing.assert_close(flat(one.params), flat(other.params), rtol=0, atol=3e-6)


@needs_kernel
@pytest.mark.parametrize("padding", ["black", "reflected"])
@pytest.mark.parametrize("name", NETWORKS)
def test_images_of_any_shape_are_moved_alike_by_the_compiled_trainer(name: str, padding: str) -> None:
    made, shape = NETWORKS[name]
    black = tuple(-0.5 * channel for channel in range(shape[0]))
    augment = Augment(4, flip=True, black=black, reflect=padding == "reflected")
    settings = LocalSettings(0.05, 0.9, 1e-3, batch_size=20, epochs=2, augment=augment)
    inputs = torch.randn(33, *shape, generator=torch.Generator().manual_seed(0))
    task = LocalTask(1, 0, 1, 33, settings, detached(made().named_parameters()))
    labels = torch.arange(33) % CLASSES
    job = LocalJob(task, LocalPlan(), Records.of(inputs, labels), rng(0, "batches"))
    found = Trainer(made(), load_kernel()[0]).train(job)
    expected = train(made(), task, LocalPlan(), inputs, labels, rng(0, "batches"))
    torch.testing.assert_close(flat(found.params), flat(expected.params), rtol=0, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize("plan", [LocalPlan(distillation=Distillation(1.0)), LocalPlan(contrast=CONTRAST)])
def test_the_compiled_trainer_hands_on_what_compares_moved_images_with_a_model(plan: LocalPlan) -> None:
    trainer = Trainer(model(), load_kernel()[0])
    assert not trainer.is_native(SHAPE, plan, SETTINGS)
    assert trainer.is_native(SHAPE, plan)
    for one, other in zip(trainer.train_all(jobs(SETTINGS, plan)), by_loop(jobs(SETTINGS, plan)), strict=True):
        assert torch.equal(flat(one.params), flat(other.params))
    kernel, stack, job = load_kernel()[0], describe(model(), SHAPE), jobs(SETTINGS, plan)[1]
    assert kernel is not None
    assert stack is not None
    draws = Draws.of(job.task, plan, 16, job.generator)
    with pytest.raises(ValueError, match=r"not support augmentation together with (contrast|distillation)"):
        kernel.train(stack, [KernelJob(job.task, plan, *job.records.tensors(), draws)])


@needs_kernel
def test_moves_that_do_not_fit_are_refused_before_the_compiled_trainer_reads_them() -> None:
    kernel, stack, job = load_kernel()[0], describe(model(), SHAPE), jobs(SETTINGS)[1]
    assert kernel is not None
    assert stack is not None
    draws = Draws.of(job.task, job.plan, 16, job.generator)
    given = KernelJob(job.task, job.plan, *job.records.tensors(), draws)
    with pytest.raises(ValueError, match=r"the moves of the images have the shape \(2, 16, 3\)"):
        kernel.train(stack, [given._replace(draws=replace(draws, moves=draws.moves[:2]))])
    for augment in (Augment(2, flip=True, black=BLACK[:1]), Augment(-1, flip=True, black=BLACK)):
        task = replace(job.task, settings=replace(SETTINGS, augment=augment))
        with pytest.raises(ValueError, match=r"images with 2 channels .*black for each"):
            kernel.train(stack, [given._replace(task=task)])
    far = replace(draws, moves=np.full_like(draws.moves, 2**62))  # read as the farthest that there is
    for augment in (BOTH, REFLECTED, replace(REFLECTED, crop=99)):
        task = replace(job.task, settings=replace(SETTINGS, augment=augment))
        [trained] = kernel.train(stack, [given._replace(draws=far, task=task)])
        assert bool(torch.isfinite(flat(trained.params)).all())
