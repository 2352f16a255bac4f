import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray

from clients.dafl.dpcgan.settings import DpCgan
from clients.dafl.dpcgan.training import CompiledTraining, Drawn, GanClient, StackTraining, views_of_average
from clients.dafl.generator import GeneratorBill, GeneratorRequest, PrivateRecords
from fl_sim.errors import RunError
from fl_sim.privacy.accounting import delta_profile
from fl_sim.privacy.audit import EPSILONS, audit_profile, noise_calibration, run_mechanism
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.renyi import ORDERS

SHAPE = (1, 8, 8)
TINY = DpCgan(discriminator_steps=6, batch_size=20, ratio=2, discriminator_width=8, generator_width=8)


def records_of(*labels: int, num_classes: int = 3, shape: tuple[int, ...] = SHAPE) -> PrivateRecords:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(len(labels), *shape, generator=generator) * 2 - 1
    return PrivateRecords(inputs, torch.tensor(labels, dtype=torch.int64), num_classes)


def counts_of(*counts: int) -> NDArray[np.int64]:
    return np.array(counts, dtype=np.int64)


RECORDS = records_of(*[0, 1, 2] * 20)
COUNTS = counts_of(4, 0, 5)


def priced(settings: DpCgan, num_records: int) -> GeneratorBill:
    """Return a bill like that of epsilon 10, which takes seconds to find."""
    rate = min(1.0, settings.batch_size / num_records)
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(0.8))
    return GeneratorBill(event, settings.discriminator_steps, 0.8, rate)


BILL = priced(TINY, 60)


def release(
    settings: DpCgan = TINY,
    records: PrivateRecords = RECORDS,
    counts: NDArray[np.int64] = COUNTS,
    bill: GeneratorBill | None = None,
    noise: Noise | None = None,
    seed: int = 0,
) -> torch.Tensor:
    bill = bill or priced(settings, len(records.labels))
    return settings.generate(records, counts, bill, noise or Noise.seeded(1), np.random.default_rng(seed))


@dataclass(frozen=True)
class Watched(Noise):
    """Counts what was drawn for what."""

    draws: Counter[str] = field(default_factory=Counter)

    def gaussian(self, count: int, std: float, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        self.draws[purpose] += 1
        return super().gaussian(count, std, purpose=purpose, server_round=server_round)

    def standard_normal(self, count: int, *, purpose: str, server_round: int) -> NDArray[np.float64]:
        self.draws[purpose] += 1
        return super().standard_normal(count, purpose=purpose, server_round=server_round)


def watched() -> Watched:
    return Watched(Noise.seeded(1).key, simulation_only=True)


def begun(
    settings: DpCgan = TINY,
    records: PrivateRecords = RECORDS,
    counts: NDArray[np.int64] = COUNTS,
    bill: GeneratorBill = BILL,
    noise: Noise | None = None,
) -> tuple[GanClient, CompiledTraining | StackTraining]:
    """Return a client, and its training before the first step."""
    client = GanClient(
        settings, GeneratorRequest(records, counts, bill, noise or Noise.seeded(0), np.random.default_rng(0))
    )
    kernel = client.kernel
    return client, CompiledTraining(settings, client, kernel) if kernel else StackTraining(settings, [client])


def views_of(training: CompiledTraining | StackTraining) -> Callable[[Drawn], torch.Tensor]:
    if isinstance(training, CompiledTraining):
        return training.views_of_average
    return partial(views_of_average, training.clients[0])


@pytest.mark.usefixtures("computed_by")
def test_the_release_has_as_many_records_of_each_class_as_were_counted() -> None:
    made = release()
    assert made.shape == (9, *SHAPE)
    assert made.dtype == torch.float32
    assert made.min() >= -1
    assert made.max() <= 1


@pytest.mark.parametrize("settings", [TINY, TINY.model_copy(update={"networks": "paper", "discriminator_steps": 2})])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (1, 12, 40)])
def test_images_of_any_size_come_out_as_they_went_in(settings: DpCgan, shape: tuple[int, ...]) -> None:
    made = release(settings, records_of(*[0, 1] * 5, shape=shape))
    assert made.shape == (9, *shape)
    assert made.abs().max() <= 1


def test_records_that_are_not_images_come_out_as_they_went_in() -> None:
    assert release(records=records_of(*[0, 1] * 10, shape=(7,))).shape == (9, 7)


@pytest.mark.usefixtures("computed_by")
def test_the_same_seeds_release_the_same_bits_and_others_do_not() -> None:
    assert torch.equal(release(), release())
    assert not torch.equal(release(), release(noise=Noise.seeded(2)))
    assert not torch.equal(release(), release(seed=1))


@pytest.mark.parametrize(("num_records", "epsilon"), [(60, 10.0), (15, 10.0), (15, 1.0)])
def test_the_bill_is_what_dp_accounting_says_of_its_steps_and_not_less(num_records: int, epsilon: float) -> None:
    bill = TINY.bill(num_records, 3, epsilon, 1e-5)
    assert bill.steps == TINY.discriminator_steps
    assert bill.sampling_rate == min(1.0, 20 / num_records)
    event = dp_event.GaussianDpEvent(bill.noise_multiplier)
    if bill.sampling_rate < 1:
        event = dp_event.PoissonSampledDpEvent(bill.sampling_rate, event)
    assert bill.event == event
    spent = RdpAccountant(ORDERS).compose(dp_event.SelfComposedDpEvent(event, bill.steps)).get_epsilon(1e-5)
    assert 0.999 * epsilon < spent <= epsilon


@pytest.mark.usefixtures("computed_by")
def test_noise_is_drawn_exactly_as_often_as_the_bill_says() -> None:
    noise = watched()
    release(noise=noise)
    assert noise.draws["discriminator gradient"] == BILL.steps


def test_the_gradient_carries_the_stated_noise(steps: list[Any]) -> None:
    settings = TINY.model_copy(update={"discriminator_steps": 100, "ratio": 400, "clipping_norm": 0.5})
    bill = priced(settings, 60)
    release(settings, bill=bill)
    assert len(steps) == 100
    residuals = [
        (step.gradient.double() * bill.sampling_rate * 60 - step.total) / (bill.noise_multiplier * 0.5)
        for step in steps
        if step.gradient is not None
    ]
    assert min(noise_calibration(torch.stack(residuals).numpy()).values()) > 1e-3


def test_the_batch_is_divided_by_its_expected_size_whatever_its_size(steps: list[Any]) -> None:
    bill = TINY.bill(60, 3, math.inf, 1e-5)
    release(counts=counts_of(4, 4, 5), bill=bill)
    assert len({len(step.real) for step in steps}) > 1
    for step in steps:
        assert step.gradient is not None
        torch.testing.assert_close(step.gradient, (step.total / 20).float())


def test_records_join_a_step_by_independent_coins(steps: list[Any]) -> None:
    settings = TINY.model_copy(update={"discriminator_steps": 150, "ratio": 400})
    release(settings, counts=counts_of(4, 4, 5))
    sizes = np.array([len(step.real) for step in steps])
    assert abs(sizes.mean() - 20) < 4 * math.sqrt(60 / 3 * 2 / 3 / 150)
    assert 0.6 < sizes.var() / (60 / 3 * 2 / 3) < 1.5
    together = sum(bool((step.real[:, None] == step.real).all(2).sum() > len(step.real)) for step in steps)
    assert together == 0  # no record twice


@pytest.mark.parametrize("networks", ["small", "paper"])
def test_an_empty_batch_is_zero_plus_noise(steps: list[Any], networks: str) -> None:
    bill = GeneratorBill(BILL.event, 6, 1.0, 1e-9)
    made = release(TINY.model_copy(update={"networks": networks}), bill=bill)
    assert made.isfinite().all()
    for step in steps:
        assert len(step.real) == 0
        assert step.total.norm() == 0
        assert step.gradient is not None
        assert step.gradient.norm() > 0


def test_the_fakes_do_not_depend_on_the_private_labels(steps: list[Any]) -> None:
    everyone = GeneratorBill(BILL.event, 1, 1.0, 1.0)
    counts = counts_of(4, 4, 5)
    release(counts=counts, bill=everyone)
    swapped = PrivateRecords(RECORDS.inputs, RECORDS.labels.roll(1), 3)
    release(records=swapped, counts=counts, bill=everyone)
    as_one_class = PrivateRecords(RECORDS.inputs, torch.zeros_like(RECORDS.labels), 3)
    release(records=as_one_class, counts=counts, bill=everyone)
    first, second, third = steps
    assert torch.equal(first.fake, second.fake)
    assert torch.equal(first.fake, third.fake)
    assert not torch.equal(first.real, second.real)


def test_fake_classes_follow_the_released_counts(steps: list[Any]) -> None:
    records = records_of(*[0] * 4000)
    release(records=records, counts=counts_of(100, 0, 300), bill=GeneratorBill(BILL.event, 1, 1.0, 1.0))
    shares = steps[0].fake.view(-1, 2, 65)[:, :, -1].mean(0)
    assert shares.tolist() == pytest.approx([0.25, 0.75], abs=0.03)


@pytest.mark.usefixtures("computed_by")
def test_a_generator_step_touches_no_private_tensor() -> None:
    def run(*, poison: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        inputs = RECORDS.inputs.clone()
        labels = RECORDS.labels.clone()
        client, training = begun(TINY.model_copy(update={"ratio": 1}), PrivateRecords(inputs, labels, 3))
        training.discriminator_step(0)
        if poison:
            inputs.fill_(math.nan)
            labels.fill_(-1)
            client.views.fill_(math.nan)
            client.places.fill(-1)
            client.known.fill(False)  # noqa: FBT003 (numpy's)
        training.generator_step()
        client.draw_samples(1.0, views_of(training))
        return [weight.detach() for weight in client.nets.generator.parameters()], client.samples()

    (clean, made), (poisoned, made_poisoned) = run(poison=False), run(poison=True)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    assert torch.equal(made, made_poisoned)


@pytest.mark.usefixtures("computed_by")
def test_a_generator_step_leaves_the_discriminator_alone() -> None:
    client, training = begun()
    net = client.nets.discriminator
    before = [weight.detach().clone() for weight in net.parameters()]
    training.generator_step()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(weight.grad is None for weight in net.parameters())


def test_without_privacy_there_is_no_noise_and_no_clipping(steps: list[Any]) -> None:
    bill = TINY.bill(60, 3, math.inf, 1e-5)
    assert bill == GeneratorBill(dp_event.NonPrivateDpEvent(), 6, 0.0, 1 / 3)
    noise = watched()
    release(bill=bill, noise=noise)
    assert "discriminator gradient" not in noise.draws
    assert {step.bound for step in steps} == {math.inf}


def test_under_privacy_every_step_is_clipped(steps: list[Any]) -> None:
    release()
    assert all(0.99 < step.bound <= 1.0 for step in steps)


def test_one_class_alone_needs_no_label(steps: list[Any]) -> None:
    release(counts=counts_of(0, 7, 0))
    assert {step.real.shape[1] for step in steps} == {64}


def test_records_of_a_class_that_was_not_released_count_for_nothing(steps: list[Any]) -> None:
    everyone = GeneratorBill(BILL.event, 2, 1.0, 1.0)
    release(counts=counts_of(3, 0, 3), bill=everyone)
    assert [len(step.real) for step in steps] == [40, 40]


@pytest.mark.usefixtures("computed_by")
def test_records_that_are_not_finite_do_no_harm() -> None:
    inputs = RECORDS.inputs.clone()
    inputs[::7, 0, 3, 3] = math.nan
    inputs[1::7, 0, 0, 0] = math.inf
    for epsilon in (10.0, math.inf):
        bill = TINY.bill(60, 3, epsilon, 1e-5)
        assert release(records=PrivateRecords(inputs, RECORDS.labels, 3), bill=bill).isfinite().all()


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("which", ["discriminator_learning_rate", "generator_learning_rate"])
def test_training_that_diverges_ends_in_words(which: str) -> None:
    with pytest.raises(RunError, match="not finite: use a lower"):
        release(TINY.model_copy(update={which: 1e38}))


@pytest.mark.parametrize("num_records", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("epsilon", [0.1, 10.0, 1e4, math.inf])
@pytest.mark.usefixtures("quick_accounting")
def test_a_handful_of_records_ends_in_a_decision(num_records: int, epsilon: float) -> None:
    records = records_of(*[1] * num_records)
    bill = TINY.bill(num_records, 3, epsilon, 1e-5)
    if bill.refused:
        assert f"{num_records} records are too few for epsilon {epsilon:g}" in bill.refused
    else:
        assert release(records=records, bill=bill).isfinite().all()


@pytest.mark.usefixtures("quick_accounting")
def test_too_few_is_where_one_parameters_noise_outweighs_all_gradients() -> None:
    bill_of = partial(TINY.bill, num_classes=3, epsilon=10.0, delta=1e-5)
    bills = [bill_of(num_records) for num_records in range(1, 10)]
    assert [bool(bill.refused) for bill in bills] == [bill.noise_multiplier > n for n, bill in enumerate(bills, 1)]
    assert bills[0].refused
    assert not bills[-1].refused


def test_a_client_without_records_is_refused() -> None:
    assert TINY.bill(0, 3, 10.0, 1e-5).refused == "the client holds no records"


def test_samples_are_drawn_throughout_training_and_each_is_of_its_class() -> None:
    client, _ = begun(TINY.model_copy(update={"snapshots": 4}), counts=counts_of(30, 20, 50))
    drawn_at: list[float] = []
    now = 0.0

    def made(drawn: Drawn) -> torch.Tensor:
        latents, places = drawn
        assert latents.shape == (len(places), 10)
        drawn_at.extend([now] * len(places))
        return torch.from_numpy(places)[:, None] / 2 * torch.ones(64)

    for percent in range(1, 101):
        now = percent / 100
        client.draw_samples(now, made)
    assert Counter(drawn_at) == {0.4: 25, 0.6: 25, 0.8: 25, 1.0: 25}
    brightness = client.samples().mean((1, 2, 3))
    assert brightness.tolist() == [-1.0] * 30 + [0.0] * 20 + [1.0] * 50


def test_fewer_samples_than_snapshots_are_spread_over_all_of_training() -> None:
    client, training = begun(counts=counts_of(0, 5, 0))
    assert [len(due) for due in client.due] == [1] * 5
    client.draw_samples(0.35, views_of(training))
    assert not client.made
    client.draw_samples(1.0, views_of(training))
    assert len(client.samples()) == 5


def audited_step(world: int, run: int, *, noise_share: float) -> NDArray[np.float64]:
    """Return a D step's noised sum, in clipping norms: without a record (it counts as zero), and with it."""
    settings = DpCgan(discriminator_width=2, generator_width=2, latent_dim=2)
    record = PrivateRecords(torch.full((1, 3), OUTLIER if world else math.nan), torch.zeros(1, dtype=torch.int64), 1)
    bill = GeneratorBill(AUDITED, 1, noise_share, 1.0)
    _, training = begun(settings, record, counts_of(1), bill, Noise.seeded(run))
    if isinstance(training, CompiledTraining):
        training.discriminator_step(0)
        return training.adversaries.discriminator_adam.gradient.astype(np.float64)
    released: list[list[torch.Tensor]] = []
    training.discriminator_adam.step = released.extend  # type: ignore[method-assign,assignment]
    training.discriminator_step(0)
    vector: NDArray[np.float64] = released[0][0].double().numpy()
    return vector


OUTLIER = -1e4  # the sign that a fresh D takes for a fake, so that its gradient is long
AUDITED = dp_event.GaussianDpEvent(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("noise_share", [1.0, 0.5])
def test_an_audit_of_the_discriminator_step_finds_what_the_bill_says_and_notices_half_the_noise(
    noise_share: float,
) -> None:
    outputs = run_mechanism(partial(audited_step, noise_share=noise_share), 1500)
    audit = audit_profile(*outputs, delta_profile([AUDITED], EPSILONS))
    assert audit.refuted == (noise_share < 1)
    assert audit.power > 0.85


def test_nothing_asked_for_nothing_made() -> None:
    assert release(counts=counts_of(0, 0, 0)).shape == (0, *SHAPE)
