"""Optuna's TPE proposes what to try next, from what was tried before (Bergstra et al. 2011)."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from fl_sim.errors import UserError
from fl_sim.seeding import rng
from fl_sim.tables.tuning_space import Choices, Knob, Space, Values


def check_installed() -> None:
    """Raise UserError where Optuna, which is an extra, is not installed."""
    if find_spec("optuna") is None:
        raise UserError(
            "tune.search=optuna needs Optuna, which is an extra: pip install 'fl-sim[tune]', or take tune.search=random"
        )


def proposed(space: Space, tried: Sequence[tuple[Values, float | None]], seed: int) -> dict[str, Any]:
    """Return the values to try next, given what was ``tried``: values and accuracies, None where a trial diverged.

    A pure function of its arguments, so a search that was broken off proposes the same again.
    """
    import optuna  # noqa: PLC0415 (an extra)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds = {key: _distribution(knob) for key, knob in space.items()}
    # All draws that are not guided are made before Optuna is asked, so it starts at once.
    number = int(rng(seed, "tuning optuna", len(tried)).integers(2**31))
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=number, n_startup_trials=0)
    )
    for values, accuracy in tried:
        params = {key: _encoded(space[key], value) for key, value in values.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=accuracy or 0.0))
    params = study.ask(kinds).params
    return {key: _decoded(knob, params[key]) for key, knob in space.items()}


def _distribution(knob: Knob) -> Any:
    from optuna import distributions  # noqa: PLC0415

    if isinstance(knob, Choices):
        return distributions.CategoricalDistribution(range(len(knob.values)))
    kind = distributions.IntDistribution if knob.is_whole else distributions.FloatDistribution
    return kind(knob.low, knob.high, log=knob.log)


def _encoded(knob: Knob, value: Any) -> Any:
    return knob.values.index(value) if isinstance(knob, Choices) else value


def _decoded(knob: Knob, value: Any) -> Any:
    return knob.values[value] if isinstance(knob, Choices) else knob.rounded(value)
