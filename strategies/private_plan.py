"""The privacy cost of Global DP in plans, which are forecasts of a run's cost before the run.

Plans cover sampling, groups, noise bands, adaptive clipping and a private start. Plans and runs use the same functions
to compute noisy releases and their noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from dp_accounting import dp_event

from fl_sim.errors import UserError
from fl_sim.own_code import load_object
from fl_sim.privacy.accounting import epsilon_of_counts, most_that_fit
from fl_sim.privacy.mechanisms import update_noise_multiplier
from fl_sim.privacy.terms import Accountant, rounded_up
from strategies.global_dp import AdaptiveClipping, GlobalDP, Releasing, releases_beforehand
from strategies.private import noise_within, planned_charges
from strategies.samplers import AnySampler, Cyclic, FixedSize, Poisson


@dataclass(frozen=True)
class GlobalRounds:
    """Rounds of Global DP, by ``aggregator``, with cohorts from ``sampler``. A plan forecasts their privacy cost.

    ``population``: the number of clients, None if it is unknown. ``start``: a private start, whose noisy sums come
    before the rounds; None without one. The noise multiplier of ``aggregator`` is not read.
    """

    unit: ClassVar[str] = "client"
    aggregator: GlobalDP
    sampler: AnySampler
    population: int | None
    start: Releasing | None = None

    def amplify(self, event: dp_event.DpEvent) -> dp_event.DpEvent:
        """Return the privacy event of a round whose cohort is sampled. ``event``: the event without sampling."""
        return self.sampler.amplify(event, self.population or 0)

    def charges(self, noise: float, steps: int) -> Mapping[dp_event.DpEvent, int]:
        """Return all releases, {event: number}: those of ``steps`` rounds and those of a private start."""
        return self._charges_of(self.aggregator.model_copy(update={"noise_multiplier": noise}), steps)

    def least_noise(self, steps: int, target: float, delta: float, accountant: Accountant) -> float:
        """Return the least noise multiplier with which all releases cost at most epsilon ``target``.

        A run with ``aggregator.noise_multiplier=from-epsilon`` uses this noise multiplier.
        """
        self._check_start(target, delta, accountant)
        aggregator = self.aggregator.model_copy(update={"delta": delta, "accountant": accountant})
        return noise_within(aggregator, target, partial(self._charges_of, rounds=steps))

    def most_steps(self, noise: float, target: float, delta: float, accountant: Accountant) -> int:
        """Return the largest number of rounds that cost at most epsilon ``target``, including a private start."""
        self._check_start(target, delta, accountant)
        apart = self.sampler.rounds_apart
        return apart * most_that_fit(
            lambda turns: self.charges(noise, turns * apart), target, delta, accountant=accountant
        )

    def further(self, noise: float) -> Mapping[str, str]:
        """Return further lines of the plan, {label: sentence}: groups, correlated noise, adaptive clipping, start."""
        found = {}
        if isinstance(self.sampler, Cyclic):
            found["turns"] = (
                f"one of {self.sampler.groups} groups in each round: a client pays once in {self.sampler.groups} rounds"
            )
        if self.aggregator.noise_bands > 1:
            found["noise bands"] = (
                f"{self.aggregator.noise_bands}: correlated noise costs as much as independent noise, because a client "
                "takes part at most once in the rounds of a band"
            )
        if self.aggregator.adaptive_clipping is not None:
            aggregator = self.aggregator.model_copy(update={"noise_multiplier": noise})
            counts = aggregator.count_noise(self.sampler.expected_size(self.population or 0))
            found["adaptive clipping"] = (
                f"{100 * (noise / (2 * counts)) ** 2:.3g} % of the cost, in 1 / noise^2, is for counts with noise "
                f"{counts:.6g}; updates have the noise multiplier {update_noise_multiplier(noise, counts):.6g}"
            )
        if self.start is not None:
            number = len(self.start.releases(self.aggregator))
            found["private start"] = f"{number} noisy sums before the first round"
        return found

    def _charges_of(self, aggregator: GlobalDP, rounds: int) -> Mapping[dp_event.DpEvent, int]:
        beforehand = releases_beforehand(self.start, aggregator)
        return planned_charges(aggregator, self.sampler, self.population or 0, rounds, beforehand)

    def _check_start(self, target: float, delta: float, accountant: Accountant) -> None:
        """Raise UserError if the private start costs more than epsilon ``target``, even without any round."""
        spent = epsilon_of_counts(self.charges(1.0, 0), delta, accountant=accountant)
        if spent > target:
            raise UserError(
                f"the private start by itself costs epsilon {rounded_up(spent)}, more than {target:g}: give a larger "
                "--start-noise or a larger --epsilon"
            )


def global_rounds(
    rate: float | None,
    cohort: int | None,
    clients: int | None,
    *,
    groups: int | None,
    noise_bands: int,
    adaptive: bool,
    count_noise: float | None,
    start_noise: float | None,
) -> GlobalRounds:
    """Return the rounds of Global DP that the options of ``fl-sim privacy global-dp`` describe.

    Without ``groups``, either ``rate`` or ``cohort`` is required. With ``groups``, ``rate`` is optional. Raises
    UserError for options that do not fit.
    """
    if groups is not None and (groups < 1 or cohort is not None or (clients is not None and groups > clients)):
        raise UserError(
            f"--groups {groups} must be from 1 to the number of --clients, and does not fit --cohort: choose another "
            "number, or leave --cohort out"
        )
    if groups is not None and start_noise is not None:
        raise UserError(
            "a private start samples from all clients, but --groups samples from one group: leave the private start or "
            "--groups out"
        )
    if (adaptive or count_noise is not None) and clients is None and (count_noise is None or cohort is not None):
        raise UserError("the noise of adaptive clipping depends on the expected cohort size: give --clients")
    sampler: AnySampler
    if groups is not None:
        sampler = Cyclic(groups=groups, sampling_rate=1.0 if rate is None else rate)
    elif rate is not None:
        sampler = Poisson(sampling_rate=rate)
    else:
        assert cohort is not None
        sampler = FixedSize(cohort_size=cohort)
    clipping = AdaptiveClipping(count_noise=count_noise) if adaptive or count_noise is not None else None
    aggregator = GlobalDP(noise_bands=noise_bands)
    aggregator.check_bands(sampler)
    start = None
    if start_noise is not None:
        start = load_object("strategies.private_start:PrivateStart", "preprocess")(noise_multiplier=start_noise)
    return GlobalRounds(aggregator.model_copy(update={"adaptive_clipping": clipping}), sampler, clients, start)
