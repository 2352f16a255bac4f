"""Noisy sums and counts on a worst case, and versions with planted faults, for ``release_audit.py``.

Releases about a record: the mean embedding, moments of features, class Gaussians, marginals of tables. Releases about a
client: a round of Global DP with adaptive clipping, and the sums of a private start.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from audited_gan import FAR, Array
from dp_accounting import dp_event

from clients import private_moments
from clients.dafl import marginals, noisy_moments
from clients.dafl.generator import GeneratorBill, PrivateRecords
from clients.dafl.marginals import CellTable, Edge, Marginals
from clients.dafl.noisy_moments import Gaussian, MeanEmbedding
from clients.frequency_sums import FrequencyQuestion, answer, black_frame, shapes_of
from clients.images import lowest_frequencies
from clients.private_moments import Protection
from fl_sim.privacy.audit import World
from fl_sim.privacy.mechanisms import Noise, update_noise_multiplier
from fl_sim.types import Cohort, Params, Reply
from strategies import global_dp
from strategies.global_dp import AdaptiveClipping, GlobalDP
from strategies.private_start import PrivateStart, classes_of, frame_of

_CERTAIN: Final = 50.0
"""The log likelihood ratio of an output that is possible in one world only."""


@dataclass(frozen=True)
class EmbeddingRelease:
    """Both sums of the mean embedding, of the audited record alone or of no record.

    ``_SHARE``: the budget share of the first release. ``clipped``: True if records are clipped. ``split``: True if the
    two releases share the budget, False if each takes the whole budget. ``count_noised``: True if the number of records
    has noise.
    """

    name: str
    noise_multiplier: float
    clipped: bool = True
    split: bool = True
    count_noised: bool = True

    _SHARE = 0.5

    def __call__(self, world: World, run: int) -> Array:
        """Return the sums, (13,): count, 3 means, 3 squares; 6 products."""
        settings = MeanEmbedding(frequencies=3, mean_share=self._SHARE)
        records = PrivateRecords(torch.full((world, 1, 2, 2), FAR), torch.zeros(world, dtype=torch.int64), 1)
        bill = GeneratorBill(dp_event.GaussianDpEvent(self.noise_multiplier), 1, self.noise_multiplier, 1.0)
        sums: list[Array] = []
        release, whole = noisy_moments.ClassSums.sums, 1.0 if self.split else math.sqrt(self._SHARE)

        def kept(one: noisy_moments.ClassSums, features: Array, norm: float, *classes: Any) -> tuple[Array, float]:
            spent = replace(one, noise_multiplier=one.noise_multiplier * whole)
            released, std = release(spent, features, norm, *classes)
            if not sums and not self.count_noised:
                released[:, 0] = features[:, 0].sum()
            sums.append(released.ravel() / norm)
            return released, std

        with mock.patch.object(noisy_moments.ClassSums, "sums", kept), _unclipped(noisy_moments, self.clipped):
            settings.generate(records, np.array([1]), bill, Noise.seeded(run), np.random.default_rng(0))
        return np.concatenate(sums)


@dataclass(frozen=True)
class MomentsRelease:
    """The moments of CCVR, of the audited record alone or of no record, in units of the clipping norm.

    ``sensitivity``: the sensitivity that the noise assumes. ``count_noised``: True if the number of records has noise.
    """

    name: str
    noise_multiplier: float
    sensitivity: float = private_moments.LONGEST
    count_noised: bool = True

    def __call__(self, world: World, run: int) -> Array:
        """Return the moments, (6,): count, 2 sums, 3 products."""
        feature = np.array([[FAR, FAR]]) if world else np.full((1, 2), np.nan)
        with mock.patch.object(Protection, "std", self.noise_multiplier * self.sensitivity):
            released = private_moments.private_moments(
                feature, np.zeros(1, np.int64), 1, Protection(1.0, 1e-5, 2.0, "seeded"), Noise.seeded(run)
            )[0]
        return released if self.count_noised else np.concatenate([[float(world)], released[1:]])


@dataclass(frozen=True)
class GaussianRelease:
    """Both sums of the class Gaussians, of the audited record alone or of nothing, in units of what a record moves.

    ``clipped``: whether anything is. ``split``: whether the two releases share the budget, or each takes it whole.
    """

    name: str
    noise_multiplier: float
    clipped: bool = True
    split: bool = True

    _SHARE = 0.5

    def __call__(self, world: World, run: int) -> Array:
        """Return the sums, (7,): 2 of the centre; 2 sums and 3 products."""
        settings = Gaussian(centre_share=self._SHARE)
        records = PrivateRecords(torch.tensor([[FAR, FAR]]), torch.tensor([0 if world else 1]), 2)
        bill = GeneratorBill(dp_event.GaussianDpEvent(self.noise_multiplier), 1, self.noise_multiplier, 1.0)
        sums: list[Array] = []
        sum_of, moments_of = noisy_moments.GaussianRelease.sum_of, noisy_moments.GaussianRelease.moments_of
        whole = 1.0 if self.split else math.sqrt(self._SHARE)

        def centre(one: noisy_moments.GaussianRelease, *rows: Any) -> Array:
            sums.append(sum_of(replace(one, noise_multiplier=one.noise_multiplier * whole), *rows))
            return sums[-1]

        def ball(one: noisy_moments.GaussianRelease, *rows: Any) -> tuple[Array, float]:
            moments, std = moments_of(replace(one, noise_multiplier=one.noise_multiplier * whole), *rows)
            sums.append(moments / noisy_moments.LONGEST)
            return moments, std

        with (
            mock.patch.object(noisy_moments.GaussianRelease, "sum_of", centre),
            mock.patch.object(noisy_moments.GaussianRelease, "moments_of", ball),
            _unclipped(noisy_moments, self.clipped),
        ):
            settings.generate(records, np.array([1, 0]), bill, Noise.seeded(run), np.random.default_rng(0))
        return np.concatenate(sums)


@dataclass(frozen=True)
class MarginalsRelease:
    """Counts of a table's two columns, the choice of pairs, and the counts of a pair, as evidence about one record.

    ``tables``: the number of tables that the noise assumes, each with the record in one cell; None: all tables.
    ``choice_noised``: True if the choice has noise. ``split``: True if the three parts share the budget, False if each
    part takes the whole budget.
    """

    name: str
    noise_multiplier: float
    tables: int | None = None
    choice_noised: bool = True
    split: bool = True

    _SHARES = (0.8, 0.05, 0.15)  # the accountant charges more for the choice than the choice reveals about one record

    @property
    def parts(self) -> tuple[float, float, float]:
        """Return the noise multiplier of the columns' counts, the epsilon of the choice, the multiplier of the pair."""
        columns, choice, pair = (math.sqrt(share) / self.noise_multiplier for share in self._SHARES)
        return 1 / columns, 2 * choice, 1 / pair

    def __call__(self, world: World, run: int) -> Array:
        """Return the log likelihood ratio of the whole release, (1,), to someone who knows all other records."""
        others = round(self._expected / 2)  # as many of either kind: neither choice is certain
        inputs = torch.tensor([[-1.0, -1.0]] * others + [[1.0, 1.0]] * others + [[-1.0, -1.0]])
        labels = torch.tensor([0] * 2 * others + [0 if world else 1])
        bill = GeneratorBill(dp_event.NoOpDpEvent(), 1, self.noise_multiplier, 1.0)
        of_all = (inputs.numpy() > 0).astype(np.int64)
        seen: list[float] = []
        released, chosen_pairs = marginals.released, marginals.chosen_pairs

        def counted(tables: Sequence[Array], z: float, noise: Noise, purpose: str) -> tuple[list[Array], float]:
            z *= 1.0 if self.split else math.sqrt(self._SHARES[0 if purpose == "columns" else 2])
            z *= 1.0 if self.tables is None else math.sqrt(self.tables / max(1, len(tables)))
            noisy, std = released(tables, z, noise, purpose)
            for exact, found in zip(tables, noisy, strict=True):
                place = (0,) * exact.ndim  # the audited record's cell
                seen.append(float(found[place] - (exact[place] - world) - 0.5) / std**2)
            return noisy, std

        def chosen(table: CellTable, ones: Sequence[Array], std: float, epsilon: float, noise: Noise) -> list[Edge]:
            epsilon *= (1.0 if self.split else self._SHARES[1] ** -0.5) if self.choice_noised else 1e6
            edges = chosen_pairs(table, ones, std, epsilon, noise)
            tables = [
                CellTable(of_all[: 2 * others + one], np.zeros(2 * others + one, np.int64), 1, table.sizes)
                for one in (0, 1)
            ]
            odds = [epsilon / 2 * (marginals.score(one, ones, (0, 1)) - self._expected) for one in tables]
            without, with_record = (-np.logaddexp(0, -value if edges else value) for value in odds)
            seen.append(float(np.clip(with_record - without, -_CERTAIN, _CERTAIN)))
            return edges

        records = PrivateRecords(inputs, labels, 2)
        with (
            mock.patch.object(marginals, "released", counted),
            mock.patch.object(marginals, "chosen_pairs", chosen),
            mock.patch.object(marginals, "fitted") as model,  # slow, and after the release
        ):
            model.return_value.sample.return_value = of_all
            Marginals(cells=2, columns_share=self._SHARES[0], pairs_share=self._SHARES[1]).generate(
                records, np.array([1, 0]), bill, Noise.seeded(run), np.random.default_rng(0)
            )
        return np.array([sum(seen)])

    @property
    def _expected(self) -> float:
        """Return the expected score of the pair from noise alone. The pair has four cells and one class."""
        return math.sqrt(2 / math.pi) * self.parts[2] * 4


@dataclass(frozen=True)
class StartReleases:
    """Three answers of one client to the server that asks for a private start, beside one that sends nothing.

    The auditor knows what the client would send, and looks along it. ``clipped``: whether answers are. ``split``:
    whether the three releases share the budget, or each takes it whole.
    """

    name: str
    noise_multiplier: float
    clipped: bool = True
    split: bool = True

    _CLASSES, _FREQUENCIES, _SHAPE = 2, 4, (1, 4, 4)

    def __call__(self, world: World, run: int) -> Array:
        """Return the log likelihood ratio of all three answers, (1,)."""
        settings = PrivateStart(noise_multiplier=self.noise_multiplier, frequencies=self._FREQUENCIES)
        rounds = GlobalDP(noise="seeded")
        inputs, labels = torch.full((3, *self._SHAPE), FAR), np.zeros(3, np.int64)
        order, _ = lowest_frequencies(self._SHAPE, self._FREQUENCIES)
        seen: list[float] = []

        def released(question: FrequencyQuestion) -> tuple[Params, float]:
            release = settings.release(question.step, rounds)
            if not self.split:
                release = release.model_copy(update={"noise_multiplier": self.noise_multiplier})
            if not self.clipped:
                release = replace_norm(release, 1000.0)
            template = {
                name: torch.zeros(shape)
                for name, shape in shapes_of(question.step, self._CLASSES, self._FREQUENCIES).items()
            }
            own = answer(question, inputs, labels, self._CLASSES)
            replies = (Reply(0, {"sums": template}, 0, None), Reply(1, {"sums": own}, 0, None))[: 1 + world]
            cohort = Cohort(question.step - 3, replies, 2, 2.0)
            mean = release.mean(cohort, noise=Noise.seeded(run), template={"sums": template}).payloads["sums"]
            flat, along = (
                np.concatenate([part[name].double().numpy().ravel() for name in template]) for part in (mean, own)
            )
            moved = float(2 * flat @ along / np.linalg.norm(along)) / settings.clipping_norms[question.step - 1]
            seen.append((moved - 0.5) / settings.release(question.step, rounds).noise_multiplier ** 2)
            return mean, release.noise_multiplier * release.clipping_norm / 2

        frame = frame_of(
            *released(FrequencyQuestion(1, 3.0, black_frame(self._SHAPE, order))), self._SHAPE, self._FREQUENCIES
        )
        classes = classes_of(*released(FrequencyQuestion(2, 3.0, frame)))
        released(FrequencyQuestion(3, 3.0, frame, classes.means))
        return np.array([sum(seen)])


@dataclass(frozen=True)
class ClippedRound:
    """A round of Global DP with adaptive clipping: an update of the clipping norm, or none, and whether it was within.

    Updates and count share the budget evenly. ``times``: what is wrong with the noise of both. ``count_is_paid``:
    whether the updates' noise leaves room for it. ``count_noised``: whether it is. ``centred``: whether a client adds
    a half to the count or takes one off.
    """

    name: str
    noise_multiplier: float
    times: float = 1.0
    count_is_paid: bool = True
    count_noised: bool = True
    centred: bool = True

    def __call__(self, world: World, run: int) -> Array:
        """Return the log likelihood ratio of the sum and the next clipping norm, (1,)."""
        z = self.noise_multiplier * self.times
        count_noise = z / math.sqrt(2)
        settings = GlobalDP(
            noise_multiplier=z, noise="seeded", adaptive_clipping=AdaptiveClipping(count_noise=count_noise)
        )
        adaptive = settings.adaptive_clipping
        assert adaptive is not None
        update_noise = update_noise_multiplier(z, count_noise) if self.count_is_paid else z
        template = {"model": {"weight": torch.zeros(1)}}
        reply = Reply(1, {"model": {"weight": torch.ones(1)}}, 0, None)
        cohort = Cohort(1, (reply,) * world, 2, 1.0)
        noisy = GlobalDP.count_noise
        with (
            mock.patch.object(global_dp, "update_noise_multiplier", return_value=update_noise),
            mock.patch.object(GlobalDP, "count_noise", noisy if self.count_noised else lambda *_: 1e-3),
        ):
            aggregate, norm = settings.release(cohort, noise=Noise.seeded(run), template=template, clipping_norm=1.0)
        update = float(aggregate.payloads["model"]["weight"])
        count = adaptive.target_quantile - math.log(norm) / adaptive.learning_rate - 0.5
        if not self.centred:
            count += 0.5 * world
        moved, std = 0.5 if self.centred else 1.0, count_noise if self.count_noised else 1e-3
        ratio = (update - 0.5) / update_noise**2 + moved * (count - moved / 2) / std**2
        return np.array([float(np.clip(ratio, -_CERTAIN, _CERTAIN))])


def replace_norm(release: GlobalDP, times: float) -> GlobalDP:
    """Return a release with ``times`` the clipping norm and the same noise."""
    return release.model_copy(
        update={"clipping_norm": release.clipping_norm * times, "noise_multiplier": release.noise_multiplier / times}
    )


@contextmanager
def _unclipped(module: ModuleType, clipped: bool) -> Iterator[None]:  # noqa: FBT001 (a switch)
    keep: Callable[[float, float], float] = lambda _, __: 1.0  # noqa: E731
    with mock.patch.object(module, "clip_factor", module.clip_factor if clipped else keep):
        yield
