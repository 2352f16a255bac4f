"""One law for whatever is released with noise: what a unit moves, over the noise, is never above what is charged.

Every mechanism runs in two worlds, with one unit and with nothing in its place. Noise is left out and written down, and
the second world hears what the first one released, so that its sums are those of the same question. Then, of all
releases of a mechanism together, the movement in standard deviations is held against its event. Sums are looked at
after they are rounded to the grid. A place in the code that draws noise and is not listed here fails.
"""

import ast
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from clients.dafl.dpcgan import nets, training, with_opacus
from clients.dafl.dpcgan.settings import DpCgan
from clients.dafl.generator import PrivateRecords
from clients.dafl.labels import ExponentialMechanism, Geometric
from clients.dafl.marginals import CellTable, Marginals, score
from clients.dafl.noisy_moments import Gaussian, MeanEmbedding
from clients.frequency_sums import STEPS, FrequencyQuestion, answer, black_frame
from clients.gram import SENSITIVITY
from clients.images import lowest_frequencies
from clients.noisy_counts import counting_cost, noisy_count
from clients.paid_rounds import ClientProtection
from clients.private_gram import private_products
from clients.private_moments import Protection, private_moments
from clients.private_updates import ClientPrivateUpdates, noise_std, update_cost
from fl_sim import models
from fl_sim.clipping import FLAT, Clipping
from fl_sim.errors import UserError
from fl_sim.local_plan import LocalPlan, PrivateSteps
from fl_sim.params import detached, trainable
from fl_sim.privacy import mechanisms, modular_sums, record_sums
from fl_sim.privacy.events import pure_epsilon
from fl_sim.privacy.integer_noise import Mechanism
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.modular_sums import SumGrid, signed
from fl_sim.privacy.pate import smooth_sensitivity
from fl_sim.privacy.pate.labelling_cost import ConfidentCost, Cost, GNMaxCost, LNMaxCost
from fl_sim.privacy.record_sums import RecordGrid
from fl_sim.training import per_record
from fl_sim.training.private_steps import train_privately
from fl_sim.types import ClientUpdate, Cohort, LocalSettings, LocalTask, Reply
from strategies.global_dp import GlobalDP
from strategies.pate.labelling import ConfidentGNMax, GNMax, LNMax
from strategies.private_start import PrivateStart

PROJECT = Path(__file__).resolve().parents[3]
SOURCES = ("fl_sim", "strategies", "clients", "partitions")
DRAWS = {"gaussian", "gaussian_number", "laplace", "standard_normal", "stream_key", "uniform", "taking_part", "words"}

HELD = {
    ("strategies/global_dp.py", "global-dp update"): "global_dp",
    ("strategies/global_dp.py", "global-dp count"): "global_dp",
    ("clients/private_gram.py", "products of features"): "products",
    ("clients/private_moments.py", "class moments"): "moments",
    ("clients/private_updates.py", "client update"): "client_update",
    ("clients/noisy_counts.py", "right answers"): "right_answers",
    ("clients/dafl/noisy_moments.py", "mean embedding: "): "generators",
    ("clients/dafl/noisy_moments.py", ""): "generators",
    ("clients/dafl/marginals.py", "marginals: "): "generators",
    ("clients/dafl/marginals.py", "marginals: which pair"): "pairs",
    ("clients/dafl/labels.py", "label selection"): "labels",
    ("clients/dafl/dpcgan/training.py", "discriminator gradient"): "dp_cgan",
    ("clients/dafl/dpcgan/with_opacus.py", "discriminator gradient"): "dp_cgan",
    ("fl_sim/training/private_steps.py", "noise "): "private_steps",
    ("strategies/pate/labelling.py", "pate votes"): "votes",
    ("strategies/pate/labelling.py", "pate threshold"): "votes",
    ("fl_sim/privacy/pate/smooth_sensitivity.py", "pate cost"): "published_cost",
    ("fl_sim/privacy/integer_noise.py", ""): "integer_sums",
}
"""{(file, purpose of the noise): which tests below hold its law}."""

COINS = {
    ("strategies/private.py", "cohort "): "who takes part: held against the rate that is charged in test_mechanisms",
    ("clients/dafl/dpcgan/training.py", "records of a step"): "who takes part, as above",
    ("fl_sim/training/private_steps.py", "batch "): "who takes part, as above",
    ("clients/dafl/dpcgan/training.py", "latent vectors"): "looks at no record",
    ("fl_sim/privacy/modular_sums.py", "rounding of a share, try "): "whatever they are, the rounded norm is bounded",
    ("fl_sim/privacy/record_sums.py", "rounding of a share"): "the same for all neighbours, which it moves by a step",
    ("clients/dafl/dpcgan/training.py", "classes of fakes"): "looks at counts that were released",
}
"""The same for secret coins that no sum is hidden by."""

REPEATED = {("fl_sim/threats/observed.py", "noise "): "an attack on a finished run draws a step's noise from a seed"}
"""Noise of a released step, drawn again with public coins: it protects nothing, and no ledger is charged."""


def _purposes(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DRAWS:
            for keyword in node.keywords:
                if keyword.arg == "purpose":
                    value = keyword.value.values[0] if isinstance(keyword.value, ast.JoinedStr) else keyword.value
                    yield value.value if isinstance(value, ast.Constant) else ""


def test_every_place_that_draws_noise_is_held_to_the_law() -> None:
    found = {
        (path.relative_to(PROJECT).as_posix(), purpose)
        for room in SOURCES
        for path in sorted((PROJECT / room).rglob("*.py"))
        for purpose in _purposes(path)
    }
    assert found == set(HELD) | set(COINS) | set(REPEATED)
    tests = {name for name in globals() if name.startswith("test_")}
    for law in set(HELD.values()):
        assert any(law in name for name in tests), f"no test holds the law of {law}"


@dataclass
class Worlds:
    """What was added up, and with which noise: each is (sum rounded to the grid, its noise's standard deviation)."""

    first: list[tuple[np.ndarray, float]] = field(default_factory=list)
    second: list[tuple[np.ndarray, float]] = field(default_factory=list)
    is_second: bool = False

    def spy(self, total: np.ndarray, std: float, steps: np.ndarray) -> np.ndarray:
        rounded = mechanisms.add_noise(np.array(total, dtype=np.float64), std, np.zeros_like(steps))
        if not self.is_second:
            self.first.append((rounded.copy(), std))
            return rounded
        self.second.append((rounded.copy(), std))
        return self.first[len(self.second) - 1][0].copy()

    @property
    def moved(self) -> list[tuple[np.ndarray, float]]:
        """Return how far each sum moved and the noise on it, which is the same in both worlds."""
        assert len(self.first) == len(self.second) > 0
        assert [std for _, std in self.first] == [std for _, std in self.second]
        return [(one - other, std) for (one, std), (other, _) in zip(self.first, self.second, strict=True)]

    @property
    def gaussian(self) -> float:
        """Return 1 / z^2 of all releases together: squared movements in standard deviations."""
        return math.fsum(float((moved**2).sum()) / std**2 for moved, std in self.moved)


@pytest.fixture
def worlds() -> Callable[[Callable[..., Any]], Worlds]:
    """Return what runs a mechanism with a unit, and with nothing in its place."""

    def both(mechanism: Callable[..., Any]) -> Worlds:
        found = Worlds()
        original, spied, patch = mechanisms.add_noise, 0, pytest.MonkeyPatch()
        for module in [one for one in sys.modules.values() if isinstance(one, ModuleType)]:
            name = getattr(module, "__name__", "")
            ours = name.split(".")[0] in SOURCES and name != mechanisms.__name__
            if ours and vars(module).get("add_noise") is original:
                patch.setattr(module, "add_noise", found.spy)
                spied += 1
        assert spied >= 5
        try:
            mechanism(there=True)
            found.is_second = True
            mechanism(there=False)
        finally:
            patch.undo()
        return found

    return both


Both = Callable[[Callable[..., Any]], Worlds]
NOISE = Noise.seeded(0)


def reply(client: int, values: np.ndarray) -> Reply:
    return Reply(client, {"model": {"w": torch.from_numpy(values)}}, 1, None)


@pytest.mark.parametrize("length", [0.3, 1.0, 1e3, math.inf])
@pytest.mark.parametrize(
    ("noise_multiplier", "clipping"),
    [
        *((0.7, one) for one in (None, {}, {"count_noise": 3.0}, {"count_noise": 2.0**19})),
        *((40.0, one) for one in (None, {}, {"count_noise": 20.1}, {"count_noise": 2.0**19})),
    ],
)
def test_global_dp(worlds: Both, length: float, noise_multiplier: float, clipping: dict[str, float] | None) -> None:
    settings = GlobalDP(noise_multiplier=noise_multiplier, clipping_norm=0.37, adaptive_clipping=clipping)
    draw = np.random.default_rng(1)
    own, others = draw.normal(size=50), draw.normal(size=(6, 50)) / 9
    own *= length * 0.37 / np.linalg.norm(own) if math.isfinite(length) else math.nan
    template = {"model": {"w": torch.zeros(50, dtype=torch.float64)}}

    def release(*, there: bool) -> None:
        replies = [reply(0, own)] * there + [reply(1 + place, values) for place, values in enumerate(others)]
        cohort = Cohort(1, tuple(replies), 7, 5.0)
        settings.release(cohort, noise=NOISE, template=template, clipping_norm=0.37)

    found = worlds(release).gaussian
    assert found <= noise_multiplier**-2 * (1 + 1e-12)
    if length == 1.0:
        assert found > 0.95 * noise_multiplier**-2


@pytest.mark.parametrize("count_noise", [2.0**20, 2.0**21 + 1, 1e9])
def test_global_dp_refuses_counts_that_the_grid_would_move_by_more_than_a_half(count_noise: float) -> None:
    with pytest.raises((UserError, ValueError), match="count_noise"):
        GlobalDP(noise_multiplier=0.7, adaptive_clipping={"count_noise": count_noise})
    with pytest.raises((UserError, ValueError), match="as count_noise, which must be below"):
        GlobalDP(noise_multiplier=count_noise, adaptive_clipping={})


@pytest.mark.parametrize("expected", [1e3, 1e8])
def test_global_dp_takes_no_count_noise_by_itself_that_is_too_coarse(worlds: Both, expected: float) -> None:
    settings = GlobalDP(noise_multiplier=0.7, adaptive_clipping={})
    template = {"model": {"w": torch.zeros(3, dtype=torch.float64)}}

    def release(*, there: bool) -> None:
        replies = (reply(0, np.array([0.1, 0.0, 0.0])),) * there
        settings.release(Cohort(1, replies, 7, expected), noise=NOISE, template=template, clipping_norm=0.37)

    (_, _), (count, std) = worlds(release).moved
    assert abs(count[0]) == 0.5
    assert std < 2**20


@pytest.mark.parametrize("noise_multiplier", [0.5, 3.0])
@pytest.mark.parametrize("brightness", [-1.0, 1.0])
def test_global_dp_of_a_private_start(worlds: Both, noise_multiplier: float, brightness: float) -> None:
    settings, spent = PrivateStart(noise_multiplier=noise_multiplier), 0.0
    shape, size = (1, 6, 6), 7
    order, _ = lowest_frequencies(shape, size)
    draw = np.random.default_rng(0)
    images = torch.from_numpy(np.clip(brightness + draw.normal(size=(4000, *shape)), -1, 1)).float()
    labels = draw.integers(0, 3, 4000)
    for step in STEPS:
        means = draw.normal(size=(3, size)) if step == 3 else None
        sent = answer(FrequencyQuestion(step, 1.0, black_frame(shape, order), means), images, labels, 3)
        template = {"sums": {name: torch.zeros_like(value) for name, value in sent.items()}}
        mechanism = settings.release(step, GlobalDP())

        def release(*, there: bool, sent: Any = sent, template: Any = template, mechanism: Any = mechanism) -> None:
            replies = (Reply(0, {"sums": sent}, 1, None),) * there
            mechanism.release(
                Cohort(1, replies, 3, 3.0), noise=NOISE, template=template, clipping_norm=mechanism.clipping_norm
            )

        spent += worlds(release).gaussian
    assert 0.95 * noise_multiplier**-2 < spent <= noise_multiplier**-2 * (1 + 1e-12)


def _check_sums(worlds: Both, protection: Protection, length: float, release: Callable[..., object]) -> None:
    """Compare worlds with and without a record, whose feature is ``length`` times the clipping norm 2."""
    draw = np.random.default_rng(2)
    features, labels = draw.normal(size=(30, 4)), draw.integers(0, 3, 30)
    features[7] *= length * 2 / np.linalg.norm(features[7])

    def released(*, there: bool) -> None:
        rows = features.copy()
        if not there:
            rows[7] = math.nan  # counts as no record
        release(rows, labels)

    found, claimed = worlds(released).gaussian, protection.event.noise_multiplier**-2
    assert found <= claimed * (1 + 1e-12)
    if length >= 1:
        assert found > 0.95 * claimed


@pytest.mark.parametrize("epsilon", [0.1, 8.0])
@pytest.mark.parametrize("length", [0.2, 1.0, 1e4])
def test_moments(worlds: Both, epsilon: float, length: float) -> None:
    protection = Protection(epsilon, 1e-5, 2.0, "seeded")
    _check_sums(worlds, protection, length, lambda rows, labels: private_moments(rows, labels, 3, protection, NOISE))


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
@pytest.mark.parametrize("length", [0.2, 1.0, 1e4])
def test_products(worlds: Both, epsilon: float, length: float) -> None:
    protection = Protection(epsilon, 1e-5, 0.0, "seeded", SENSITIVITY)
    _check_sums(
        worlds, protection, length, lambda rows, labels: private_products(rows, labels, 3, 2.0, protection, NOISE)
    )


def records_of(generator: object, *, there: bool) -> PrivateRecords:
    """Return 60 records of which the last is as far out as can be, or is missing."""
    draw = np.random.default_rng(3)
    labels = np.arange(60) % 2
    shape = (1, 4, 4) if isinstance(generator, MeanEmbedding) else (5,)
    inputs = np.clip(draw.normal(size=(60, *shape)) / 3, -1, 1)
    inputs[-1] = 1.0
    if isinstance(generator, Marginals):
        inputs[:] = inputs[:, :1]  # columns that tell each other, so that pairs of them are counted, too
    if not there:  # its number stays public: of vectors it is one that counts as zero, of a table it is in no cell
        inputs, labels = (inputs[:-1], labels[:-1]) if isinstance(generator, Marginals) else (inputs, labels)
        if not isinstance(generator, Marginals):
            inputs[-1] = math.nan
    return PrivateRecords(torch.from_numpy(inputs).float(), torch.from_numpy(labels), 2)


@pytest.mark.parametrize("epsilon", [1.0, 10.0])
@pytest.mark.parametrize(
    "generator", [MeanEmbedding(frequencies=6), Gaussian(), Marginals(cells=3)], ids=lambda one: one.kind
)
def test_generators(worlds: Both, generator: Any, epsilon: float) -> None:
    bill = generator.bill(60, 2, epsilon, 1e-5)
    assert bill.steps == 1
    found = worlds(
        lambda *, there: generator.generate(
            records_of(generator, there=there), np.array([3, 3]), bill, NOISE, np.random.default_rng(0)
        )
    )
    if isinstance(bill.event, dp_event.ZCDpEvent):  # the rest is for choosing pairs
        assert found.gaussian / 2 <= bill.event.rho * (1 - generator.pairs_share) * (1 + 1e-9)
        counted = (
            1 - generator.pairs_share if epsilon > 1 else generator.columns_share
        )  # with little, no pair is chosen
        assert found.gaussian / 2 > 0.95 * bill.event.rho * counted
        return
    assert found.gaussian <= bill.event.noise_multiplier**-2 * (1 + 1e-12)
    assert found.gaussian > 0.7 * bill.event.noise_multiplier**-2


@dataclass(frozen=True)
class _Everybody(Noise):
    """Noise of a source by whose coins all records join every batch."""

    def taking_part(self, count: int, sampling_rate: float, *, purpose: str, server_round: int) -> np.ndarray:
        return np.ones(count, np.bool_)


@pytest.mark.parametrize("name", ["2nn", "niid-cnn", "gru"])
@pytest.mark.parametrize("clipping_norm", [0.01, 1e3])
@pytest.mark.parametrize("clipping", [FLAT, Clipping(by_layer=True), Clipping(stability=1e-5)])
def test_private_steps(worlds: Both, name: str, clipping_norm: float, clipping: Clipping) -> None:
    """Where a record joins every step, it moves them together by at most the cost of as many Gaussian releases."""
    local = LocalSettings(0.1, 0.9, 1e-3, batch_size=5, epochs=3)  # one step an epoch
    draw = torch.Generator().manual_seed(3)
    model = models.build(name, (9,) if name == "gru" else (1, 28, 28), 4, 0, vocabulary=7 if name == "gru" else 0)
    inputs = torch.randint(1, 7, (5, 9), generator=draw).float()
    inputs = inputs if name == "gru" else torch.randn(5, 1, 28, 28, generator=draw)
    labels = torch.tensor([0, 1, 2, 3, 0])
    start = detached(trainable(model).items())
    steps = PrivateSteps(clipping_norm, 1.3, _Everybody(bytes(32), simulation_only=True), "model", clipping)

    def release(*, there: bool) -> None:
        # Nothing in the place of the first record: a gradient that is not finite counts as zeros.
        patch = pytest.MonkeyPatch()
        if not there:
            patch.setattr(per_record, "_factors", lambda *given: list(map(_without_first, factors(*given))))
        train_privately(model, LocalTask(1, 0, 1, 5, local, start), LocalPlan(private=steps), inputs, labels)
        patch.undo()

    factors = per_record._factors
    found = worlds(release).gaussian
    assert found <= 3 * 1.3**-2 * (1 + 1e-12)
    if clipping_norm == 0.01:
        assert found > 0.95 * 3 * 1.3**-2


@pytest.mark.parametrize("length", [0.3, 1.0, 1e3, math.inf])
@pytest.mark.parametrize("noise_multiplier", [0.7, 40.0])
def test_client_update(worlds: Both, length: float, noise_multiplier: float, tmp_path: Path) -> None:
    """Of one client the two updates that are furthest apart: this unit's data are replaced, not left out."""
    values = np.random.default_rng(1).normal(size=50)
    values *= length * 0.37 / np.linalg.norm(values) if math.isfinite(length) else math.nan
    template = {"delta": {"w": torch.zeros(20)}, "control": {"w": torch.zeros(30)}}
    protection = ClientProtection(None, 1e-5, 0.37, noise_multiplier, "seeded")
    half, cost = ClientPrivateUpdates(protection, "", 1, template), update_cost(protection, 1)

    def release(*, there: bool) -> None:
        own = torch.from_numpy(values if there else -values)
        update = ClientUpdate({"delta": {"w": own[:20]}, "control": {"w": own[20:]}}, 9, 0.5)
        half._released(update, std=noise_std(protection, cost), noise=NOISE, server_round=1)

    found, claimed = worlds(release).gaussian, cost.event.noise_multiplier**-2
    assert claimed == pytest.approx(4 * noise_multiplier**-2)  # a sensitivity of two clipping norms
    assert found <= claimed * (1 + 1e-12)
    if length >= 1 and math.isfinite(length):
        assert found > 0.95 * claimed


@pytest.mark.parametrize("count_noise", [0.001, 0.7, 2.0**20 - 1])
def test_right_answers(worlds: Both, count_noise: float) -> None:
    """A record is answered right or is not there; rounding and limits come after the noise."""
    cost = counting_cost(ClientProtection(None, 1e-5, 0.37, count_noise, "seeded"), 3)
    found = worlds(lambda *, there: noisy_count(41 + there, 60, cost.noise_multiplier, NOISE, 1)).gaussian
    assert cost.charge == dp_event.GaussianDpEvent(count_noise)  # and the clipping norm of gradients is no part of it
    assert found == pytest.approx(count_noise**-2)


@pytest.mark.parametrize("mechanism", get_args(Mechanism))
@pytest.mark.parametrize("length", [0.3, 1.0, 1e3, math.inf])
@pytest.mark.parametrize("noise_multiplier", [0.7, 40.0])
def test_integer_sums(
    mechanism: Mechanism, length: float, noise_multiplier: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(1).normal(size=50)
    values *= length * 0.37 / np.linalg.norm(values) if math.isfinite(length) else math.nan
    grid, variances = SumGrid(50, 3, 0.37, noise_multiplier, mechanism), list[float]()

    def none(mechanism: str, variance: float, noise: Noise, count: int, **more: object) -> np.ndarray:
        variances.append(variance)
        return np.zeros(count, np.int64)

    monkeypatch.setattr(modular_sums, "drawn", none)
    sums = [
        sum(modular_sums.share_of(row, grid, NOISE, seed=3, server_round=1) for row in (values * there, 0 * values))
        for there in (1.0, 0.0)
    ]
    moved, event = modular_sums.centred(sums[0] - sums[1], grid), grid.event(2)
    assert event.variance == variances[0] + variances[1]  # a third client dropped out
    assert float((moved**2).sum()) <= event.l2**2 * (1 + 1e-12)
    assert float(np.abs(moved).sum()) <= event.l1 * (1 + 1e-12)
    if length >= 1 and math.isfinite(length):
        assert float((moved**2).sum()) > 0.95 * event.l2**2


@pytest.mark.parametrize("noise_multiplier", [0.2, 3.0, 50.0])
@pytest.mark.parametrize("length", [0.4, 1.0, 5.0])
def test_integer_sums_of_records(length: float, noise_multiplier: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record of a client, clipped as its trainer clips it, beside 60 others, and with nothing in its place."""
    draw, norm = np.random.default_rng(1), 0.37
    gradients = torch.from_numpy(draw.normal(size=(61, 50)))
    gradients *= length * norm / gradients.norm(dim=1, keepdim=True)
    grid, variances = RecordGrid(50, 3, norm, noise_multiplier), list[float]()

    def none(mechanism: str, variance: float, noise: Noise, count: int, **more: object) -> np.ndarray:
        variances.append(variance)
        return np.zeros(count, np.int64)

    monkeypatch.setattr(record_sums, "drawn", none)
    clipped = (gradients * (norm / gradients.norm(dim=1, keepdim=True)).clamp(max=1)).numpy()
    sums = [
        sum(record_sums.record_share(rows.sum(axis=0), grid, NOISE, 1) for rows in (mine, clipped[:9]))
        for mine in (clipped, clipped[1:])
    ]
    moved, event = signed(np.asarray(sums[0] - sums[1]), grid.bits), grid.event(2)
    assert event.variance == variances[0] + variances[1]  # a third client dropped out
    assert float((moved**2).sum()) <= event.l2**2 * (1 + 1e-12)
    assert float(np.abs(moved).sum()) <= event.l1 * (1 + 1e-12)
    if length >= 1:
        assert float((moved**2).sum()) > 0.95 * event.l2**2


def _without_first(factors: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(factors[:1]), factors[1:]])


@pytest.mark.parametrize("seed", range(5))
def test_pairs_of_columns_are_scored_by_what_a_record_moves_by_one(seed: int) -> None:
    draw = np.random.default_rng(seed)
    cells, labels = draw.integers(0, 3, (40, 3)), draw.integers(0, 2, 40)
    whole, without = (CellTable(cells[rows], labels[rows], 2, (3, 3, 3)) for rows in (slice(None), slice(1, None)))
    ones = [one + draw.normal(size=one.shape) for one in whole.ones()]
    for pair in ((0, 1), (0, 2), (1, 2)):
        assert abs(score(whole, ones, pair) - score(without, ones, pair)) <= 1 + 1e-9


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
@pytest.mark.parametrize("kind", [ExponentialMechanism, Geometric])
def test_labels(kind: Any, epsilon: float) -> None:
    picker, most = kind(epsilon=epsilon), 0.0
    for held in range(30):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.abs(np.log(picker.pmf(held, 0.3, 20)) - np.log(picker.pmf(held + 1, 0.3, 20)))
        most = max(most, float(np.nanmax(ratio)))
    assert 0.5 * epsilon < most <= pure_epsilon(picker.event(1)) * (1 + 1e-9)


@pytest.mark.parametrize("gradients", ["own", "opacus"])
def test_dp_cgan(worlds: Both, monkeypatch: pytest.MonkeyPatch, gradients: str) -> None:
    monkeypatch.setattr(nets, "load_kernel", lambda: (None, "PyTorch is asked for"))
    assert training.add_noise is with_opacus.add_noise is mechanisms.add_noise
    generator = DpCgan(
        discriminator_steps=3, batch_size=60, snapshots=1, gradients=gradients, discriminator_width=8,
        generator_width=8, clipping_norm=0.01,  # shorter than any gradient here, so that the bound is reached
    )  # fmt: skip
    bill = generator.bill(60, 2, 20.0, 1e-5)
    assert isinstance(bill.event, dp_event.GaussianDpEvent)  # all records take part in every step

    def release(*, there: bool) -> None:
        draw = np.random.default_rng(4)
        inputs = np.clip(draw.normal(size=(60, 1, 8, 8)) / 2, -1, 1)
        if not there:
            inputs[-1] = math.nan  # its gradient is not finite, and is left out
        records = PrivateRecords(torch.from_numpy(inputs).float(), torch.from_numpy(np.arange(60) % 2), 2)
        generator.generate(records, np.array([2, 2]), bill, NOISE, np.random.default_rng(0))

    found = worlds(release)
    assert len(found.moved) == 3
    for moved, std in found.moved:
        assert 0.99 < float(np.linalg.norm(moved)) / std * bill.event.noise_multiplier <= 1 + 1e-12


@pytest.mark.parametrize("mechanism", [LNMax(gamma=0.3), GNMax(sigma=7.0), ConfidentGNMax(threshold=1, sigma=7.0)])
@pytest.mark.parametrize("change", [(0, 1), (2, 0), (1, 2)])
def test_votes(worlds: Both, mechanism: Any, change: tuple[int, int]) -> None:
    votes = np.array([9, 4, 7])
    moved = votes.copy()
    moved[change[0]] -= 1
    moved[change[1]] += 1
    test, each = mechanism.charges()

    def release(*, there: bool) -> None:
        counts = votes if there else moved
        mechanism.passes(counts, noise=NOISE, query=3)
        mechanism.winner(counts, noise=NOISE, query=3)

    found = worlds(release)
    if isinstance(mechanism, LNMax):
        [(movement, scale)] = found.moved
        assert np.abs(movement).sum() / scale == pytest.approx(each.count * pure_epsilon(each.event))
        assert (np.abs(movement) <= 1).all()
        return
    claimed = sum(one.noise_multiplier**-2 for one in (test, each) if one is not None)
    assert found.gaussian <= claimed * (1 + 1e-12)
    assert found.gaussian > 0.95 * each.noise_multiplier**-2


@pytest.mark.parametrize(
    "cost", [LNMaxCost(0.2), GNMaxCost(3.0), ConfidentCost(12.0, 4.0, 3.0)], ids=lambda one: type(one).__name__
)
def test_published_cost(cost: Cost) -> None:
    # Both numbers: the cost moves by at most its sensitivity, and the sensitivity by at most a factor e^kappa.
    terms, draw = smooth_sensitivity.PublicationTerms(8.0, 0.02, 6.0), np.random.default_rng(5)
    for _ in range(15):
        predictions = draw.choice(3, size=(20, 4), p=(0.8, 0.15, 0.05))
        other = predictions.copy()
        other[0] = draw.integers(0, 3, 4)
        votes, moved = (
            np.stack([(one == label).sum(axis=0) for label in range(3)], axis=1) for one in (predictions, other)
        )
        totals = [float(cost.curves(one, np.ones(4), np.array([8.0]))[0].sum()) for one in (votes, moved)]
        scales = [smooth_sensitivity.smooth_sensitivity(one, cost, terms) for one in (votes, moved)]
        assert abs(totals[0] - totals[1]) <= min(scales) * (1 + 1e-9)
        assert abs(math.log(scales[0] / scales[1])) <= terms.smoothness * (1 + 1e-9)
