"""Every row of the reference file, which lies outside the project ($FL_SIM_REFERENCE, or ../shared/reference)."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import compute_epsilon

from fl_sim.privacy.accounting import epsilon_of_counts, noise_multiplier, steps_that_fit
from fl_sim.privacy.events import amplify_fixed_size, amplify_poisson
from fl_sim.privacy.renyi import ORDERS, rdp_curve
from fl_sim.testing_fixtures import SetFineness

_DEFAULT = Path(__file__).resolve().parents[4] / "shared" / "reference"
_FILE = Path(os.environ.get("FL_SIM_REFERENCE", _DEFAULT)) / "accounting.json"
_REFERENCE: dict[str, Any] = json.loads(_FILE.read_text()) if _FILE.is_file() else {}

needs_reference = pytest.mark.skipif(not _REFERENCE, reason=f"no {_FILE}: set FL_SIM_REFERENCE to its directory")
_ROWS = _REFERENCE.get("rows", [{"note": "no reference file", "epsilon": {}}])
_SAMPLED = [row for row in _ROWS if "wor_pld_truncated_upper" in row["epsilon"]] or _ROWS
_POINTS = _REFERENCE.get("calibration", [{}])


@pytest.fixture
def wide_interval(set_fineness: SetFineness) -> None:
    """Take a tenth of the PLD's points: still within 3e-4 of the reference, in a fifth of the time."""
    set_fineness(losses=10)


def _note(row: dict[str, Any]) -> str:
    return str(row["note"])


def _poisson(row: dict[str, Any]) -> dp_event.DpEvent:
    return amplify_poisson(dp_event.GaussianDpEvent(row["sigma"]), row["q"])


def _fixed_size(row: dict[str, Any]) -> dp_event.DpEvent:
    return amplify_fixed_size(dp_event.GaussianDpEvent(row["sigma"]), row["B"], row["N"])


@needs_reference
@pytest.mark.parametrize("row", _ROWS, ids=_note)
def test_rdp_and_pld_of_poisson_sampling_match_the_reference(row: dict[str, Any]) -> None:
    counts = {_poisson(row): row["steps"]}
    by_rdp = epsilon_of_counts(counts, row["delta"])
    by_pld = epsilon_of_counts(counts, row["delta"], accountant="pld")
    assert by_rdp == pytest.approx(row["epsilon"]["dpacc_rdp"], rel=1e-3)
    assert by_rdp == pytest.approx(row["epsilon"]["opacus_rdp"], rel=1e-3)
    assert by_pld == pytest.approx(row["epsilon"]["dpacc_pld"], rel=1e-3)
    assert by_pld <= by_rdp


@needs_reference
@pytest.mark.parametrize("row", _ROWS, ids=_note)
def test_rdp_at_integer_orders_matches_a_reference_by_quadrature(row: dict[str, Any]) -> None:
    integers = [place for place, order in enumerate(ORDERS) if order == int(order) and order <= 64]
    curve = row["steps"] * rdp_curve(_poisson(row))
    ours = compute_epsilon(np.array(ORDERS)[integers], curve[integers], row["delta"])[0]
    assert ours == pytest.approx(row["epsilon"]["own_rdp_quadrature"], rel=1e-6)


@needs_reference
@pytest.mark.parametrize("row", _SAMPLED, ids=_note)
@pytest.mark.usefixtures("wide_interval")
def test_fixed_size_is_the_sound_bound_and_never_the_naive_one(row: dict[str, Any]) -> None:
    counts, known = {_fixed_size(row): row["steps"]}, row["epsilon"]
    by_pld = epsilon_of_counts(counts, row["delta"], accountant="pld")
    by_rdp = epsilon_of_counts(counts, row["delta"])
    assert by_pld == pytest.approx(known["wor_pld_truncated_upper"], rel=1e-3)
    assert known["wor_lower_bound_instance"] < by_pld <= by_rdp
    assert by_rdp < known["wor_rdp_replace_one_correct_nm_half_sigma"]  # a looser theorem, also sound
    assert by_rdp > known["wor_rdp_replace_one_NAIVE_nm_sigma"]  # wrong: takes z relative to 2 S


@needs_reference
@pytest.mark.parametrize("point", _POINTS, ids=str)
def test_noise_multiplier_matches_the_reference_and_keeps_the_target(point: dict[str, Any]) -> None:
    amplify = partial(amplify_poisson, sampling_rate=point["q"])
    found = noise_multiplier(amplify, point["steps"], point["eps"], point["delta"])
    assert found == pytest.approx(point["sigma_rdp"], rel=1e-3)
    event = amplify(dp_event.GaussianDpEvent(found))
    assert epsilon_of_counts({event: point["steps"]}, point["delta"]) <= point["eps"]
    assert steps_that_fit(event, point["eps"], point["delta"]) >= point["steps"]


@needs_reference
@pytest.mark.parametrize("point", [point for point in _POINTS if point.get("steps", 0) <= 100] or _POINTS, ids=str)
@pytest.mark.usefixtures("quick_accounting")
def test_noise_multiplier_by_pld_matches_the_reference(point: dict[str, Any]) -> None:
    amplify = partial(amplify_poisson, sampling_rate=point["q"])
    found = noise_multiplier(amplify, point["steps"], point["eps"], point["delta"], accountant="pld")
    assert found == pytest.approx(point["sigma_pld"], rel=1e-3)
    spent = epsilon_of_counts(
        {amplify(dp_event.GaussianDpEvent(found)): point["steps"]}, point["delta"], accountant="pld"
    )
    assert spent <= point["eps"]


@needs_reference
@pytest.mark.parametrize("row", _REFERENCE.get("gan_plus_exponential_mechanism", [{}]), ids=str)
def test_exponential_mechanism_adds_as_zcdp(row: dict[str, Any]) -> None:
    counts = {_poisson(row): row["steps"], dp_event.ZCDpEvent(row["em_eps"] ** 2 / 8): 1}
    assert epsilon_of_counts(counts, row["delta"]) == pytest.approx(row["rdp_zcdp_eps2_8"], rel=1e-3)
