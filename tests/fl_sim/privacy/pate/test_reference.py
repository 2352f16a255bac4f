"""Every vector of the reference file, which lies outside the project ($FL_SIM_REFERENCE, or ../shared/reference)."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_sim.privacy.pate import labelling_cost

_DEFAULT = Path(__file__).resolve().parents[5] / "shared" / "reference"
_FILE = Path(os.environ.get("FL_SIM_REFERENCE", _DEFAULT)) / "pate.json"
_REFERENCE: dict[str, Any] = json.loads(_FILE.read_text()) if _FILE.is_file() else {}

pytestmark = pytest.mark.skipif(not _REFERENCE, reason=f"no {_FILE}: set FL_SIM_REFERENCE to its directory")

MOMENTS = np.arange(2.0, 102.0)  # the orders of the paper's moments 1 to 100


def rows(name: str) -> list[dict[str, Any]]:
    return list(_REFERENCE.get(name, [{}]))


def votes(kind: str, queries: int) -> labelling_cost.Counts:
    """250 teachers, 10 classes; see ``votes_formula`` in the file."""
    counts = np.zeros((queries, 10), dtype=np.int64)
    for query in range(queries):
        top = {
            "unanimous": 250,
            "strong": 235 - (7 * query) % 60,
            "mixed": 245 - (37 * query) % 160,
            "weak": 60 + (11 * query) % 60,
        }[kind]
        counts[query, query % 10], left = top, 250 - top
        for step in range(1, 10):
            taken = left if step == 9 else -(-left // 2)
            counts[query, (query + step) % 10] = taken
            left -= taken
    assert (counts.sum(axis=1) == 250).all()
    return counts


def published_2017(counts: labelling_cost.Counts, gamma: float, orders: np.ndarray) -> np.ndarray:
    """Return the curves by the paper's bounds, each where it holds."""
    theorem = labelling_cost.theorem_3(labelling_cost.LNMaxCost(gamma).log_q(counts), gamma, orders)
    return np.minimum(theorem, labelling_cost.independent_2017(gamma, orders))


def classic(curve: np.ndarray, orders: np.ndarray, delta: float) -> float:
    return float((curve - np.log(delta) / (orders - 1)).min())


@pytest.mark.parametrize("row", rows("lnmax"), ids=lambda row: f"{row.get('votes')}-{row.get('queries')}")
def test_lnmax_matches_the_reference(row: dict[str, Any]) -> None:
    gamma, delta, counts = row["gamma"], row["delta"], votes(row["votes"], row["queries"])
    curve = published_2017(counts, gamma, MOMENTS).sum(axis=0)
    independent = len(counts) * labelling_cost.independent_2017(gamma, MOMENTS)
    assert classic(curve[:8], MOMENTS[:8], delta) == pytest.approx(row["eps"], rel=1e-9)
    assert classic(curve[:8], MOMENTS[:8], delta) == pytest.approx(row["eps_published_code"], rel=1e-9)
    assert classic(curve, MOMENTS, delta) == pytest.approx(row["eps_moments_1..100"], rel=1e-9)
    assert classic(independent, MOMENTS, delta) == pytest.approx(row["eps_data_independent_1..100"], rel=1e-9)
    assert classic(independent[:8], MOMENTS[:8], delta) == pytest.approx(row["eps_data_independent_1..8"], rel=1e-9)
    for moment, total in row["moments_totals"].items():
        assert (int(moment) * curve)[int(moment) - 1] == pytest.approx(total, rel=1e-9)
    ours = labelling_cost.analyse(counts, labelling_cost.LNMaxCost(gamma), delta)
    assert ours.dependent.total <= row["eps_moments_1..100"]
    assert ours.independent.total < row["eps_data_independent_1..100"]
    assert labelling_cost.LNMaxCost(gamma).pure_epsilon * len(counts) == pytest.approx(row["basic_composition"])


@pytest.mark.parametrize("row", rows("gnmax"), ids=lambda row: f"{row.get('votes')}-{row.get('queries')}")
def test_gnmax_matches_the_reference(row: dict[str, Any]) -> None:
    counts, sigma, delta = votes(row["votes"], row["queries"]), row["sigma"], row["delta"]
    orders = np.array([row["order"], row["order_cks"], row["order_di"]])
    curve = labelling_cost.GNMaxCost(sigma).dependent(counts, orders).sum(axis=0)
    tail = np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    assert classic(curve[:1], orders[:1], delta) == pytest.approx(row["eps_classic"], rel=1e-9)
    assert (curve + tail)[1] == pytest.approx(row["eps_cks"], rel=1e-9)
    independent = len(counts) * labelling_cost.GNMaxCost(sigma).worst_case(orders)
    assert classic(independent[2:], orders[2:], delta) == pytest.approx(row["eps_data_independent_classic"], rel=1e-9)
    # The reference looks at coarser orders than we do.
    ours = labelling_cost.analyse(counts, labelling_cost.GNMaxCost(sigma), delta).dependent.total
    assert row["eps_cks"] * (1 - 2e-3) <= ours <= row["eps_cks"] * (1 + 1e-9)


@pytest.mark.parametrize("row", rows("confident"), ids=lambda row: f"{row.get('votes')}-{row.get('queries')}")
def test_confident_gnmax_matches_the_reference(row: dict[str, Any]) -> None:
    counts, cost = (
        votes(row["votes"], row["queries"]),
        labelling_cost.ConfidentCost(row["T"], row["sigma1"], row["sigma2"]),
    )
    chance, orders = cost.chance_of_answer(counts), np.array([row["order"], row["order_di"]])
    dependent, independent = (curves.sum(axis=0) for curves in cost.curves(counts, chance, orders))
    assert chance.sum() == pytest.approx(row["expected_answered"], rel=1e-9)
    assert classic(dependent[:1], orders[:1], row["delta"]) == pytest.approx(row["eps_data_dep_expected"], rel=1e-9)
    assert classic(independent[1:], orders[1:], row["delta"]) == pytest.approx(row["eps_data_indep_expected"], rel=1e-9)
    ours = labelling_cost.analyse(counts, cost, row["delta"])
    assert ours.answers == pytest.approx(row["expected_answered"], rel=1e-9)
    assert ours.dependent.total < row["eps_data_dep_expected"]  # the better conversion
    assert ours.dependent.total <= ours.independent.total < row["eps_data_indep_expected"]


@pytest.mark.parametrize("row", rows("per_query"), ids=lambda row: str(row.get("votes")))
def test_single_queries_match_the_reference(row: dict[str, Any]) -> None:
    counts = np.array([row["votes"]])
    log_q = labelling_cost.LNMaxCost(0.05).log_q(counts)
    assert np.exp(log_q[0]) == pytest.approx(row["q_lnmax_gamma0.05"], rel=1e-9)
    moments = published_2017(counts, 0.05, MOMENTS[:8])[0] * (MOMENTS[:8] - 1)
    assert moments == pytest.approx(row["alpha_lnmax_gamma0.05_l1..8"], rel=1e-9)
    assert labelling_cost.GNMaxCost(40.0).log_q(counts)[0] == pytest.approx(row["logq_gnmax_sigma40"], rel=1e-9)
    curve = labelling_cost.GNMaxCost(40.0).dependent(counts, np.array([2.0, 5.0, 10.0, 20.0, 40.0]))[0]
    assert curve == pytest.approx(row["rdp_gnmax_sigma40_orders_2_5_10_20_40"], rel=1e-9)


@pytest.mark.parametrize("row", rows("soundness"), ids=lambda row: f"{row.get('mech')}-{row.get('votes')}")
def test_bounds_match_the_reference_and_lie_above_the_exact_worst_neighbour(row: dict[str, Any]) -> None:
    counts = np.array([row["votes"]])
    for order, exact, bound in row["worst"]:
        if row["mech"] == "LNMax":
            # Listed by moment, times which the divergence at the next order is the moment.
            at = np.array([order + 1.0])
            assert order * published_2017(counts, row["gamma"], at)[0, 0] == pytest.approx(bound, rel=1e-9)
            ours = order * labelling_cost.LNMaxCost(row["gamma"]).dependent(counts, at)[0, 0]
            assert exact <= ours <= bound * (1 + 1e-9)
            assert row["q_exact"] <= np.exp(labelling_cost.LNMaxCost(row["gamma"]).log_q(counts)[0])
        else:
            ours = labelling_cost.GNMaxCost(row["sigma"]).dependent(counts, np.array([float(order)]))[0, 0]
            assert ours == pytest.approx(bound, rel=1e-7)
            assert exact <= ours
            assert row["q_exact"] <= np.exp(labelling_cost.GNMaxCost(row["sigma"]).log_q(counts)[0])


def test_the_published_script_leaves_its_domain_and_we_do_not() -> None:
    counts, gamma, orders = np.array([[12, 7, 1], [10, 10, 0]]), 0.5, np.array([2.0, 5.0, 9.0])
    log_q = labelling_cost.LNMaxCost(gamma).log_q(counts)
    holds = np.exp(log_q) < (np.exp(2 * gamma) - 1) / (np.exp(4 * gamma) - 1)
    assert Counter(holds.tolist()) == {True: 1, False: 1}
    q, less = np.exp(log_q[1]), orders - 1
    with np.errstate(invalid="ignore"):
        script = np.log((1 - q) * ((1 - q) / (1 - np.exp(2 * gamma) * q)) ** less + q * np.exp(2 * gamma * less))
    worst = {1: 0.22416660697676655, 4: 1.7062939557476664, 8: 4.066188937346237}  # by quadrature
    assert not all(script[place] >= worst[int(moment)] for place, moment in enumerate(less))
    assert np.isinf(labelling_cost.theorem_3(log_q, gamma, orders)[1]).all()
    assert (
        less * labelling_cost.LNMaxCost(gamma).dependent(counts, orders)[1] >= [worst[int(moment)] for moment in less]
    ).all()
