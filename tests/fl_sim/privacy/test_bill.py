"""One bill: everything about the same records adds up, nothing is counted twice, and no guarantee is none."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from dp_accounting import dp_event

from fl_sim.privacy import bill
from fl_sim.privacy.accounting import Adjacency, amplify_fixed_size, amplify_poisson, bounds, epsilon
from fl_sim.privacy.bill import Bill, Paid, Payment, bills, payments_of_unit, whole_run
from fl_sim.privacy.pure import BoundedRangeDpEvent

pytestmark = pytest.mark.usefixtures("quick_accounting")

ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE
POISSON = amplify_poisson(dp_event.GaussianDpEvent(1.0), 0.1)
QUIET = amplify_poisson(dp_event.GaussianDpEvent(2.0), 0.1)
FIXED = amplify_fixed_size(dp_event.GaussianDpEvent(4.0), 30, 1000)


def payment(event: dp_event.DpEvent = POISSON, times: int = 10, identity: str = "", **changes: object) -> Payment:
    counts = Counter({event: times})
    relation = REPLACE if event == FIXED else ADD
    if "epsilon" not in changes:
        changes["epsilon"] = epsilon([event] * times, 1e-5)
    whole = {"unit": "client", "delta": 1e-5, "adjacency": relation, "charged": (counts,), **changes}
    return Payment(identity=identity, **whole)  # type: ignore[arg-type]


def run(*payments: Payment, data: str = "digits", clients: str = "label-1, 10 clients", bare: bool = False) -> Paid:
    return Paid(data, clients, payments, bare)


def only(*runs: Paid) -> Bill:
    [one] = bills(runs)
    return one


def test_all_releases_about_the_same_units_add_up_and_the_joint_bound_is_that_of_all_events() -> None:
    each = [payment(), payment(), payment(QUIET, 20)]
    told = only(*(run(one) for one in each))
    [total] = told.totals
    assert total.releases == 3
    assert total.plain == (pytest.approx(sum(one.epsilon or 0 for one in each)), pytest.approx(3e-5))
    assert total.joint == (bounds(Counter({POISSON: 20, QUIET: 20}), 1e-5).least, 1e-5)
    assert max(one.epsilon or 0 for one in each) < total.joint[0] < total.plain[0]
    assert (told.epsilon, told.delta) == total.joint
    assert "Privacy of all 3 runs together, of one client of digits (label-1, 10 clients): epsilon" in told.in_words
    assert "by composing all events" in told.in_words
    assert "at delta 3e-05 as the plain sum (3 private releases under adding or removing one)" in told.in_words
    json.dumps(told.to_json(), allow_nan=False)


def test_a_release_that_several_runs_use_is_paid_for_once_at_its_dearest() -> None:
    whole, part, other = payment(identity="a"), payment(times=5, identity="a"), payment(identity="b")
    for order in ([part, whole, other], [whole, part, other]):
        [total] = only(*map(run, order)).totals
        assert total.releases == 2
        assert total.plain[0] == pytest.approx(2 * (whole.epsilon or 0))
    unknown = payment()
    assert only(run(unknown), run(unknown)).totals[0].releases == 2


def test_releases_of_several_deltas_are_composed_at_the_largest_in_any_order() -> None:
    large, small = payment(), payment(QUIET, 20, delta=1e-7)
    for order in ([large, small], [small, large]):
        [total] = only(*map(run, order)).totals
        joint = bounds(Counter({POISSON: 10, QUIET: 20}), 1e-5).least
        assert total.joint == (pytest.approx(joint, rel=1e-9), 1e-5)
        assert total.plain[1] == pytest.approx(1.01e-5)


def test_rounds_that_hide_a_client_cost_a_record_what_replacing_the_clients_data_does() -> None:
    gaussian = dp_event.GaussianDpEvent(4.0)
    rounds, pool = payment(gaussian, 5), payment(QUIET, unit="record")
    paid = run(rounds, pool)
    [own, carried] = payments_of_unit(paid, "record")
    assert own == pool
    half = bounds(Counter({dp_event.GaussianDpEvent(2.0): 5}), 1e-5).least
    assert carried.epsilon == pytest.approx(half, rel=1e-3)
    assert whole_run(paid.payments or (), "record").epsilon == pytest.approx((pool.epsilon or 0) + carried.epsilon)
    assert payments_of_unit(run(replace(rounds, on_records=False), pool), "record") == (pool,)
    assert payments_of_unit(paid, "client", paid.clients) == (rounds,)


def test_a_budget_or_an_event_that_is_not_known_under_replacement_is_carried_over_by_group_privacy() -> None:
    budget = payment(charged=(), epsilon=1.0)
    [carried] = payments_of_unit(run(budget), "record")
    assert (carried.epsilon, carried.delta) == (2.0, pytest.approx((1 + math.e) * 1e-5))
    [same] = payments_of_unit(run(replace(budget, adjacency=REPLACE)), "record")
    assert (same.epsilon, same.delta) == (1.0, 1e-5)
    unknown = payment(BoundedRangeDpEvent(1.0), 1, epsilon=1.0)
    assert payments_of_unit(run(unknown), "record")[0].epsilon == 2.0
    [planned] = payments_of_unit(run(replace(budget, plan=(Counter({dp_event.GaussianDpEvent(4.0): 5}),))), "record")
    assert planned.delta == 1e-5, "what was planned within the budget bounds it, too"
    [none] = payments_of_unit(run(replace(budget, epsilon=None)), "record")
    assert none.epsilon is None


def test_one_release_costs_what_its_run_says() -> None:
    one = payment(epsilon=0.123)
    single = only(run(one))
    assert (single.epsilon, single.delta) == (0.123, 1e-5)
    assert "epsilon 0.123 at delta 1e-05 (1 private release under" in single.in_words


def test_without_a_guarantee_anywhere_there_is_none_together() -> None:
    told = only(run(payment()), run(bare=True), run(bare=True), run(payment()))
    assert told.epsilon is None
    assert told.to_json()["epsilon"] is None
    assert "none, since 2 of the 4 runs released something about the same records without" in told.in_words
    assert "The private releases among themselves cost epsilon" in told.in_words
    lost = only(run(payment()), Paid("digits", "", None, bare=False), Paid("", "", None, bare=False))
    assert lost.epsilon is None
    assert "none, since it is not known what 2 of the 3 runs released" in lost.in_words
    noiseless = only(run(payment()), run(payment(epsilon=None, charged=())))
    assert noiseless.epsilon is None
    assert (noiseless.bare, noiseless.totals[0].releases) == (1, 1)


def test_units_data_sets_and_the_clients_of_other_splits_have_bills_of_their_own() -> None:
    record = payment(unit="record")
    told = bills([
        run(payment()), run(payment(), clients="iid, 10 clients"), run(record), run(record, clients="iid, 10 clients"),
        run(payment(), data="mnist"),
    ])  # fmt: skip
    places = {(one.data, one.unit, one.clients): one for one in told}
    assert set(places) == {
        ("digits", "client", "label-1, 10 clients"), ("digits", "client", "iid, 10 clients"), ("digits", "record", ""),
        ("mnist", "client", "label-1, 10 clients"),
    }  # fmt: skip
    assert places["digits", "record", ""].totals[0].releases == 4, "rounds that protect a client cost its records, too"
    assert places["digits", "record", ""].elsewhere == 0
    assert places["digits", "client", "iid, 10 clients"].totals[0].releases == 1
    assert "In no sum here: 3 of the runs" in places["digits", "client", "iid, 10 clients"].in_words


def test_two_adjacencies_meet_only_by_group_privacy() -> None:
    add, replace = payment(), payment(FIXED)
    told = only(run(add), run(replace))
    assert [total.adjacency for total in told.totals] == [ADD, REPLACE]
    assert add.epsilon is not None
    assert replace.epsilon is not None
    assert told.epsilon == pytest.approx(2 * add.epsilon + replace.epsilon)
    assert told.delta == pytest.approx((1 + math.exp(add.epsilon)) * 1e-5 + 1e-5)
    assert "under replacing one client" in told.in_words.lower()
    vast = only(run(payment(epsilon=800.0)), run(replace))
    assert vast.epsilon is None
    assert "promise nothing" in vast.in_words


def test_events_of_two_adjacencies_are_not_composed() -> None:
    [total] = only(run(payment(FIXED)), run(payment(adjacency=REPLACE))).totals
    assert total.joint == total.plain


def test_what_is_not_known_as_events_is_added_to_what_is() -> None:
    old = payment(charged=(), epsilon=1.5, delta=1e-6)
    [total] = only(run(payment()), run(payment()), run(old)).totals
    assert total.joint == (pytest.approx(epsilon([POISSON] * 20, 1e-5, accountant="pld") + 1.5), pytest.approx(1.1e-5))
    [total] = only(run(old), run(old)).totals
    assert total.joint == total.plain == (3.0, 2e-6)


def test_units_that_were_charged_differently_cost_the_dearest_at_every_order() -> None:
    picky, noisy = Counter({BoundedRangeDpEvent(3.0): 1}), Counter({dp_event.GaussianDpEvent(1.0): 1})
    mixed = payment(charged=(picky, noisy), epsilon=9.0)
    [total] = only(run(mixed), run(mixed)).totals
    for counts in (picky + picky, picky + noisy, noisy + noisy):
        assert total.joint[0] >= epsilon(list(counts.elements()), 1e-5) - 1e-12


def test_nothing_released_costs_nothing_and_zero_is_said() -> None:
    nothing = payment(epsilon=0.0, charged=(Counter(),))
    told = only(run(nothing))
    assert told.epsilon == 0.0
    assert told.delta == 0.0
    assert "nothing is released" in told.in_words
    assert only(run(nothing), run(payment())).totals[0].releases == 1


def test_many_kinds_of_events_are_not_left_to_the_slow_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bill, "bounds", lambda *_: pytest.fail("the PLD was asked"))
    many = [
        payment(amplify_poisson(dp_event.GaussianDpEvent(2 + step / 20), 0.1), 1, epsilon=1.0) for step in range(13)
    ]
    [total] = only(*map(run, many)).totals
    assert total.joint[0] == epsilon([event for one in many for event in one.charged[0]], 1e-5)
