"""Global DP: clip every client's update, sum, add noise, divide by a fixed number (Geyer et al. 2017, algorithm 1).

w <- w + (1/m) (sum_k Delta_k / max(1, |Delta_k| / S) + N(0, z^2 S^2 I)), where w is the model, Delta_k the update of
client k, m the expected cohort size, S the clipping norm and z the noise multiplier. The privacy cost of a round
depends on the sampling of clients. Adaptive clipping (Andrew et al. 2021, algorithm 1) replaces the paper's median of
norms, which is computed without noise. With cyclic sampling of clients, the noise may be correlated over rounds
(``strategies.correlated_noise``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, is_own_kind, kind_of, off
from fl_sim.local_plan import Sharing
from fl_sim.own_code import load_object
from fl_sim.params import layout_of, num_parameters, payload_vector, payloads_in
from fl_sim.privacy.mechanisms import (
    Noise,
    add_noise,
    clip_factor,
    clipping_norm_on_grid,
    next_clipping_norm,
    update_noise_multiplier,
)
from fl_sim.privacy.terms import rounded_up
from fl_sim.settings import Settings
from fl_sim.types import Aggregate, Cohort, Payloads, Reply
from strategies.correlated_noise import CorrelatedNoise
from strategies.samplers import Cyclic

if TYPE_CHECKING:
    from dp_accounting import dp_event

COVERS: Final = (
    "All global models of this run together: an observer of every global model learns little more about one client's "
    "data than if this client had not taken part."
)
DOES_NOT_COVER: Final = (
    "The server itself, which sees each client's update before clipping and noise, and the network between clients "
    "and server. Choices made by looking at private data: hyper-parameters tuned on it, the best of several runs. "
    "Patterns that many clients share: the model is meant to learn them."
)


FROM_EPSILON: Final = "from-epsilon"
"""The value of ``noise_multiplier`` for the smallest noise multiplier that the budget ``epsilon`` allows."""

MOST_COUNT_NOISE: Final = 2.0**20
"""Upper bound of ``count_noise``: with larger noise, counts would be rounded to whole numbers.

One client changes the centred count of updates by 1/2. Rounded to 1, this change would exceed the sensitivity 1/2.
"""


class AdaptiveClipping(Settings):
    """Moves the clipping norm towards a quantile of the update norms, by noised counts (Andrew et al. 2021).

    ``target_quantile``: the share of updates that is not clipped. ``learning_rate``: learning rate of the geometric
    update of the clipping norm. ``count_noise``: sigma_b, the standard deviation of the noise on the count, below 2^20.
    None means a twentieth of the expected cohort size, as in the paper, or the noise multiplier if the multiplier is
    larger.
    """

    target_quantile: float = Field(0.5, gt=0, lt=1)
    learning_rate: float = Field(0.2, gt=0)
    count_noise: float | None = Field(None, gt=0, lt=MOST_COUNT_NOISE)


@runtime_checkable
class Amplifying(Protocol):
    """A sampler, such as Poisson, with a known effect on the privacy cost of a round (amplification by sampling)."""

    def amplify(self, event: dp_event.DpEvent, num_clients: int) -> dp_event.DpEvent:
        """Return the privacy event of a round whose cohort is sampled. ``event``: the event without sampling."""
        ...


@runtime_checkable
class Releasing(Protocol):
    """A preprocessing stage that publishes noisy sums under Global DP before the first round."""

    def releases(self, aggregator: GlobalDP) -> tuple[GlobalDP, ...]:
        """Return the privacy mechanisms of all noisy sums that the stage publishes, in the order of publication.

        ``aggregator``: the privacy mechanism of the rounds.
        """
        ...


def releases_beforehand(preprocess: object, aggregator: GlobalDP) -> tuple[GlobalDP, ...]:
    """Return the privacy mechanism of each noisy sum that the stage ``preprocess`` publishes before round 1."""
    return preprocess.releases(aggregator) if isinstance(preprocess, Releasing) else ()


def _no_raw_median(value: Any) -> Any:
    if value == "median":
        raise ValueError(
            "the median of the clients' norms is computed from private data, and clipping to it without noise leaks: "
            "the guarantee would be false. Clip by noised counts instead: adaptive_clipping.target_quantile=0.5"
        )
    return value


class GlobalDP(Settings):
    """Client-level differential privacy (Global DP) for any algorithm whose clients send tensors.

    ``noise_multiplier``: z, the standard deviation of the noise on the sum, divided by the clipping norm. With adaptive
    clipping a noisy count is published, too. The updates then get more noise, so that updates and count together have
    the privacy cost of z. With 0, updates are only clipped, and nothing is guaranteed. With "from-epsilon" the run uses
    the least z with which all rounds together cost no more than the budget. ``clipping_norm``: S, the bound on the norm
    of everything that a client sends, as one vector (with adaptive clipping, the bound in the first round).
    ``epsilon``: the budget at ``delta``: training stops before the round that would exceed this budget. If all rounds
    cost less, a part of the budget stays unused. None sets no limit. ``delta``: the delta of the guarantee.
    ``accountant``: the method that computes the epsilon spent. ``noise``: the source of the noise. With "secret" the
    noise comes from a fresh key of the operating system, so no two runs have the same noise. With "seeded" the noise is
    repeatable. Then the guarantee holds for the method, but not for this run. ``noise_bands``: the number of rounds
    over which the noise is correlated, so that less noise stays in the model; 1 for independent noise. Correlated noise
    needs ``sampler=cyclic`` with at least as many groups. In a resumed run the correlation starts again.
    ``adaptive_clipping``: a table of settings that adapt the clipping norm to the updates. Without it the norm is
    fixed.
    """

    kind: Literal["global-dp"] = "global-dp"
    is_private: ClassVar[bool] = True
    layer: ClassVar[str] = "strategies.private:PrivateRounds"
    starts_with: ClassVar[Mapping[str, Any]] = {"sampler": {"kind": "poisson"}}
    noise_multiplier: float = Field(1.0, ge=0)
    clipping_norm: float = Field(1.0, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    epsilon: float | None = Field(None, gt=0)
    accountant: Literal["rdp", "pld"] = "rdp"
    noise: Literal["secret", "seeded"] = "secret"
    adaptive_clipping: Annotated[AdaptiveClipping | None, BeforeValidator(_no_raw_median)] = None
    noise_bands: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _noise_is_affordable(self) -> GlobalDP:
        if self.adaptive_clipping is not None:
            chosen = self.adaptive_clipping.count_noise
            update_noise_multiplier(self.noise_multiplier, self.noise_multiplier if chosen is None else chosen)
            if chosen is None and self.noise_multiplier >= MOST_COUNT_NOISE:
                raise ValueError(
                    f"adaptive clipping also uses noise_multiplier {self.noise_multiplier:g} as count_noise, which "
                    f"must be below {MOST_COUNT_NOISE:g}: set a smaller noise_multiplier"
                )
        return self

    @model_validator(mode="after")
    def _rounds_are_alike(self) -> GlobalDP:
        if self.noise_bands > 1 and self.adaptive_clipping is not None:
            raise ValueError(
                f"noise_bands={self.noise_bands} correlates the noise of rounds that have the same clipping norm, and "
                "under adaptive_clipping every round has its own: leave one of the two out"
            )
        if self.noise_bands > 1 and self.noise_multiplier == 0:
            raise ValueError(
                f"noise_bands={self.noise_bands} has no noise to correlate at noise_multiplier=0; leave noise_bands out"
            )
        return self

    @classmethod
    def completed(cls, given: Mapping[str, Any], made: Callable[[Mapping[str, Any]], Any]) -> Mapping[str, Any]:
        """Return the experiment's settings ``given``, in which a number replaces ``noise_multiplier="from-epsilon"``.

        ``made``: a function that creates an experiment from such settings.
        """
        if given.get("noise_multiplier") != FROM_EPSILON:
            return given
        without = {name: value for name, value in given.items() if name != "noise_multiplier"}
        experiment = made(without)
        fitted = load_object("strategies.private:fitted", "accountant")  # imported on use: accountants load slowly
        return {**without, "noise_multiplier": fitted(experiment)}

    def check_unchanged(self) -> None:
        """Raise UserError for a user's subclass of ``GlobalDP``: no proof covers its changes."""
        if type(self) is not GlobalDP:
            raise UserError(
                f"aggregator {kind_of(self)} changes global-dp, so its privacy guarantee is not known and no epsilon "
                "can be computed: take global-dp itself, or derive from WeightedMean, which has no guarantee"
            )

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings with which the guarantee in the privacy ledger would be false."""
        self.check_unchanged()
        sampler, stack = experiment.sampler, getattr(experiment.engine, "stack", 0)
        if is_own_kind(sampler) or not isinstance(sampler, Amplifying):
            raise ValueError(
                f"sampler {kind_of(sampler)} cannot run under aggregator global-dp: its effect on the privacy cost is "
                "not known; take full, fixed-size, poisson or cyclic"
            )
        if experiment.sampling_seed is not None:
            raise ValueError(
                f"sampling_seed={experiment.sampling_seed} cannot be set under aggregator global-dp: cohorts are drawn "
                "with the noise's secret key, because a seed would reveal them; leave it out"
            )
        if isinstance(experiment.algorithm, Sharing):
            raise ValueError(
                f"algorithm {kind_of(experiment.algorithm)} cannot run under aggregator global-dp: its clients share "
                "averages of their records without noise, and noise on the updates does not protect these; take "
                "fedavg, fedprox, scaffold or another"
            )
        if stack > 1:
            raise ValueError(
                f"engine.stack={stack} cannot be set under aggregator global-dp: a stack is a group of "
                "clients trained in one batch, so rounding errors of one client's update depend on the other clients, "
                "and noise does not hide that; leave engine.stack out, and clients train one by one"
            )
        self.check_bands(sampler)

    def check_bands(self, sampler: object) -> None:
        """Raise UserError if a client may take part twice within ``noise_bands`` rounds."""
        if self.noise_bands > 1 and not (isinstance(sampler, Cyclic) and sampler.groups >= self.noise_bands):
            raise UserError(
                f"aggregator.noise_bands={self.noise_bands} is private only if a client takes part at most once in any "
                f"{self.noise_bands} rounds in a row: take sampler=cyclic sampler.groups={self.noise_bands} or more"
            )

    def check_hostile(self, attack: str, *, sees_honest: bool) -> None:
        """Raise ValueError for an attack that computes forged updates from honest updates, if noise is secret.

        An honest client's data would then change its own update and the forged updates. So one client could change the
        sum by more than the clipping norm.
        """
        if sees_honest and self.noise == "secret" and self.noise_multiplier:
            raise ValueError(
                f"attack {attack} computes forged updates from honest clients' updates without noise, so no epsilon "
                "would hold for the models of this run: set aggregator.noise=seeded, with which an epsilon is about "
                "the method (a simulation), or attack.knows=own if the attack has this setting"
            )

    def despite_hostile(self) -> str:
        """Return the reason why hostile clients cannot break the guarantee for honest clients: a "because" clause."""
        return "because the server clips every single update before it adds noise"

    def check_budget(self, experiment: Choices, records: Sequence[int], num_classes: int) -> None:
        """Raise UserError if one round costs more than the budget ``epsilon``."""
        del records, num_classes
        if self.epsilon is None:
            return
        assert isinstance(experiment.sampler, Amplifying)
        cost = self.cost({experiment.sampler.amplify(self.event(), experiment.clients): 1})
        if cost > self.epsilon:
            raise UserError(
                f"aggregator.epsilon={self.epsilon:g} does not afford one round, which costs {rounded_up(cost)} at "
                f"delta {self.delta:g}: take a larger aggregator.noise_multiplier, a smaller share of clients in a "
                "round, or a larger epsilon"
            )

    def cost(self, counts: Mapping[dp_event.DpEvent, int]) -> float:
        """Return the epsilon of all rounds and other releases, for comparison with the budget.

        ``counts``: {privacy event: number of releases with this event}.
        """
        from fl_sim.privacy.accounting import epsilon_of_counts  # noqa: PLC0415 (the accountants load slowly)

        return epsilon_of_counts(counts, self.delta, accountant=self.accountant)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return remarks for the user: one sentence for each setting that has no effect in this experiment."""
        del experiment
        return [] if self.noise_multiplier else [off("aggregator.noise_multiplier=0", "no noise, and no privacy")]

    def event(self) -> dp_event.DpEvent:
        """Return the privacy event of a round without the effect of sampling: Gaussian noise with multiplier z.

        With correlated noise, the event is the cost of each round in which a client takes part. The cost of adaptive
        clipping is included: the noised updates and the noised count together cost as much as z. z always refers to
        one clipping norm S. If a client is replaced, the sum changes by up to 2 S. ``amplify_fixed_size`` accounts for
        this factor 2.
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        if self.noise_multiplier == 0:
            return dp_event.NonPrivateDpEvent()
        return dp_event.GaussianDpEvent(self.noise_multiplier)

    def mean(self, cohort: Cohort, *, noise: Noise, template: Payloads) -> Aggregate:
        """Return the noised mean of a round, with a fixed clipping norm and independent noise; see ``release``."""
        assert self.adaptive_clipping is None, "call release(), which returns the next round's clipping norm"
        assert self.noise_bands == 1, "call release(), which takes the state of the correlated noise"
        return self.release(cohort, noise=noise, template=template, clipping_norm=self.clipping_norm)[0]

    def release(
        self,
        cohort: Cohort,
        *,
        noise: Noise,
        template: Payloads,
        clipping_norm: float,
        correlated: CorrelatedNoise | None = None,
    ) -> tuple[Aggregate, float]:
        """Return the noised mean of a round and the next round's clipping norm.

        Charge the cost to the privacy ledger BEFORE this call.

        ``template``: the payload template; its values are not read. All clients have the same weight, whatever their
        num_examples is. The update of a client counts as zeros if the client is missing or answered twice. It also
        counts as zeros if a payload is not finite or differs from the template in names or shapes. Noise and
        denominator (``cohort.expected_size``, public) stay the same, also for an empty cohort. The noise depends only
        on the key and on ``cohort.server_round``. So never release two different cohorts with the same key and round.
        ``correlated``: the state of the correlated noise, carried from round to round; None if ``noise_bands`` is 1.
        """
        correlated = CorrelatedNoise(1) if correlated is None else correlated
        assert correlated.bands == self.noise_bands
        assert cohort.expected_size > 0
        size = sum(num_parameters(params) for params in template.values())
        count_noise, std = self.count_noise(cohort.expected_size), self._std(cohort, clipping_norm)
        # SENSITIVE: ``total`` and ``centred`` have no noise yet. Only their noisy versions leave this method.
        total, centred = self.sums(cohort, template, clipping_norm)
        if std:
            steps = noise.gaussian(size, std, purpose="global-dp update", server_round=cohort.server_round)
            total = correlated.release(total, std, steps)
        flat = total / cohort.expected_size
        aggregate = Aggregate(
            payloads_in(torch.from_numpy(flat), template), participation=cohort.expected_size / cohort.num_clients
        )
        if self.adaptive_clipping is None:
            return aggregate, clipping_norm
        steps = noise.gaussian(1, count_noise, purpose="global-dp count", server_round=cohort.server_round)
        noisy_share = float(add_noise(np.array([centred]), count_noise, steps)[0]) / cohort.expected_size + 0.5
        return aggregate, next_clipping_norm(
            clipping_norm,
            noisy_share,
            target_quantile=self.adaptive_clipping.target_quantile,
            learning_rate=self.adaptive_clipping.learning_rate,
        )

    def sums(
        self, cohort: Cohort, template: Payloads, clipping_norm: float
    ) -> tuple[np.ndarray[Any, np.dtype[np.float64]], float]:
        """Return the sum of clipped updates and the centred count of updates within the norm, both without noise.

        The centred count is the number of updates within the norm minus half the number of finite nonzero updates.
        SENSITIVE. If one client's records are added or removed, the sum changes by at most ``clipping_norm``, and the
        count by at most 1/2. If a client is replaced by another, these two bounds are doubled.
        """
        size, bands = sum(num_parameters(params) for params in template.values()), self.noise_bands
        # With b noise bands, an update changes b noisy sums. The rounding of these sums adds to the change, so the
        # limit is slightly below the clipping norm.
        std, summands = self._std(cohort, clipping_norm), cohort.num_clients * bands
        limit = clipping_norm_on_grid(clipping_norm, std, size * bands, summands=summands)
        return _clipped_sum(_valid(cohort.replies, template), template, size, clipping_norm, limit)

    def check_silence(self, algorithm: object, sent: Payloads) -> None:
        """Raise UserError if a client without records sends numbers other than 0. ``sent``: its payloads.

        The guarantee relies on these zeros.
        """
        loud = [f"{group}.{name}" for group, params in sent.items() for name, one in params.items() if one.any()]
        if loud and self.noise_multiplier:
            raise UserError(
                f"algorithm {kind_of(algorithm)} cannot run under aggregator global-dp: a client without records sends "
                f"numbers other than 0 ({loud[0]}), and the guarantee needs zeros from such a client; let finish send "
                "zeros where num_examples is 0"
            )

    def _std(self, cohort: Cohort, clipping_norm: float) -> float:
        """Return the standard deviation of the noise on each number of the sum of the updates."""
        noise_multiplier = self.noise_multiplier
        if self.adaptive_clipping is not None:
            count_noise = self.count_noise(cohort.expected_size)
            noise_multiplier = update_noise_multiplier(self.noise_multiplier, count_noise)
        return noise_multiplier * clipping_norm

    def count_noise(self, expected_size: float) -> float:
        """Return the standard deviation of the noise on the count of unclipped updates; 0 without adaptive clipping."""
        if self.adaptive_clipping is None:
            return 0.0
        chosen = self.adaptive_clipping.count_noise
        wanted = min(expected_size / 20, MOST_COUNT_NOISE / 2)
        return max(wanted, self.noise_multiplier) if chosen is None else chosen


def _valid(replies: Sequence[Reply], template: Payloads) -> list[Reply]:
    shapes, times = _shapes(template), Counter(reply.client for reply in replies)
    return [reply for reply in replies if times[reply.client] == 1 and _shapes(reply.payloads) == shapes]


def _clipped_sum(
    replies: Sequence[Reply], template: Payloads, size: int, clipping_norm: float, limit: float
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], float]:
    """Return the float64 sum of the updates clipped to ``limit``, and the centred count of updates within the norm.

    The centred count is the number of updates within ``clipping_norm`` minus half the number of all finite nonzero
    updates. Two kinds of updates change neither the sum nor the count: an update of zeros, which a client without
    records sends, and an update that is not finite. Any other update changes the sum by at most ``limit``, and the
    count by exactly 1/2.
    """
    total = torch.zeros(size, dtype=torch.float64)
    centred = 0.0
    for reply in replies:
        row = payload_vector(reply.payloads, template)
        norm = float(torch.linalg.vector_norm(row, dtype=torch.float64))
        factor = clip_factor(norm, limit)
        if factor == 0.0 or norm == 0.0:
            continue
        centred += 0.5 if norm <= clipping_norm else -0.5
        total.add_(row, alpha=factor)
    return total.numpy(), centred


def _shapes(payloads: Payloads) -> dict[str, dict[str, tuple[int, ...]]]:
    return {group: dict(layout_of(params)) for group, params in payloads.items()}
