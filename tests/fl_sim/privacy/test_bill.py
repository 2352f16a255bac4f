"""One bill: everything about the same records adds up, nothing is counted twice, and no guarantee is none."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from dp_accounting import dp_event

from fl_sim.privacy import bill
from fl_sim.privacy.accounting import bounds, epsilon
from fl_sim.privacy.bill import Bill, Payment, RunPayments, bills, payments_of_unit, whole_run
from fl_sim.privacy.events import BoundedRangeDpEvent, amplify_fixed_size, amplify_poisson, under_replacement
from fl_sim.privacy.terms import Adjacency

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


def run(
    *payments: Payment, data: str = "digits", clients: str = "label-1, 10 clients", bare: bool = False
) -> RunPayments:
    return RunPayments(data, clients, payments, bare)


def only(*runs: RunPayments) -> Bill:
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
    cheaper, bare = payment(QUIET, identity="b"), replace(whole, epsilon=None, charged=())
    for order in ([cheaper, part, whole], [part, cheaper, whole], [whole, cheaper, part]):
        [total] = only(*map(run, order)).totals
        assert total.plain[0] == pytest.approx((cheaper.epsilon or 0) + (whole.epsilon or 0))
    for order in ([cheaper, whole, bare], [bare, whole, cheaper]):
        assert [total.releases for total in only(*map(run, order)).totals] == [1]


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


def test_a_record_pays_for_the_dearest_client_wherever_that_stands() -> None:
    cheap, dear, cheaper = (Counter({dp_event.GaussianDpEvent(noise): 1}) for noise in (8.0, 4.0, 16.0))
    [carried] = payments_of_unit(run(payment(charged=(cheap, dear, cheaper))), "record")
    assert carried.epsilon == bounds(Counter({under_replacement(dp_event.GaussianDpEvent(4.0)): 1}), 1e-5).least
    assert len(carried.charged) == 3


def test_two_events_that_are_one_where_a_record_changes_both_count() -> None:
    often, hardly_less = (amplify_poisson(dp_event.GaussianDpEvent(4.0), rate) for rate in (0.5, 0.5 - 2**-22))
    [carried] = payments_of_unit(run(payment(charged=(Counter({often: 3, hardly_less: 4}),))), "record")
    assert carried.charged == (Counter({under_replacement(often): 7}),)


def test_what_clients_pay_is_added_to_a_records_own_releases_under_their_adjacency() -> None:
    rounds, own = payment(dp_event.GaussianDpEvent(8.0), 1), payment(FIXED, unit="record")
    assert {one.adjacency for one in payments_of_unit(run(rounds, own), "record")} == {REPLACE}
    assert {one.adjacency for one in payments_of_unit(run(rounds), "record")} == {ADD}


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
    assert "The private releases alone cost epsilon" in told.in_words
    lost = only(run(payment()), RunPayments("digits", "", None, bare=False), RunPayments("", "", None, bare=False))
    assert lost.epsilon is None
    assert "none, since the releases of 2 of the 3 runs are not known" in lost.in_words
    noiseless = only(run(payment()), run(payment(epsilon=None, charged=())))
    assert noiseless.epsilon is None
    assert (noiseless.bare, noiseless.totals[0].releases) == (1, 1)


def test_one_release_without_a_guarantee_is_seen_wherever_it_stands_and_one_that_some_units_are_in_counts() -> None:
    private, bare = payment(), payment(epsilon=None, charged=())
    for order in ([private, bare], [bare, private]):
        assert (only(run(*order)).bare, only(run(*order)).epsilon) == (1, None)
    nothing, something = Counter(), Counter({POISSON: 10})
    for charged in ((nothing, something), (something, nothing)):
        assert only(run(payment(charged=charged, epsilon=0.5))).epsilon == 0.5


def test_a_delta_of_one_and_more_is_no_guarantee() -> None:
    for deltas, together in (((0.5, 0.25), 2.0), ((0.5, 0.5), None), ((0.75, 0.5), None)):
        told = only(*(run(payment(charged=(), epsilon=1.0, delta=delta)) for delta in deltas))
        assert (told.epsilon, told.delta) == (together, 1.0 if together is None else 0.75)


def test_simulated_releases_are_counted_among_the_private_ones() -> None:
    seeded = payment(simulation_only=True)
    told = only(run(seeded, seeded), run(payment()), run(replace(seeded, epsilon=None)))
    assert (told.simulated, told.totals[0].releases) == (2, 3)
    assert "1 of these releases drew their noise from a published seed" in only(run(seeded)).in_words


def test_a_run_is_elsewhere_bare_or_of_no_release_and_not_two_of_these() -> None:
    record = payment(unit="record")
    client, _ = bills([run(payment()), run(record), run(record, bare=True), run()])
    assert (client.runs, client.elsewhere, client.bare, client.unknown) == (4, 1, 1, 0)
    assert "Not included here: 1 of the runs" in client.in_words


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
    assert "Not included here: 3 of the runs" in places["digits", "client", "iid, 10 clients"].in_words


def test_runs_that_share_a_name_or_a_content_have_one_bill_in_the_place_and_under_the_name_of_the_first() -> None:
    def about(data: str, content: str) -> RunPayments:
        return replace(run(payment(charged=(), epsilon=1.0), data=data), content=content)

    told = bills([about("a", "x"), about("other", "z"), about("b", "y"), about("b", "x"), about("c", "y")])
    assert [(one.data, one.also, one.totals[0].plain[0]) for one in told] == [
        ("a", ("b", "c"), 4.0),
        ("other", (), 1.0),
    ]


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
    assert "have no guarantee" in vast.in_words


def test_events_of_two_adjacencies_are_not_composed() -> None:
    [total] = only(run(payment(FIXED)), run(payment(adjacency=REPLACE))).totals
    assert total.joint == total.plain
    twice = [run(payment(FIXED)), run(payment(adjacency=REPLACE))] * 2
    [total] = only(*twice).totals
    parts = [bounds(Counter({event: 20}), 1e-5).least for event in (FIXED, POISSON)]
    assert total.joint == (pytest.approx(sum(parts)), 2e-5)
    assert total.joint[0] < total.plain[0]
    one, other = Counter({POISSON: 1}), Counter({FIXED: 1})
    for charged in ((one + other,), (one, other), (Counter[dp_event.DpEvent](), one + other)):
        of_two_kinds = payment(charged=charged, epsilon=1.0)
        [total] = only(run(of_two_kinds), run(of_two_kinds)).totals
        assert total.joint == total.plain == (2.0, 2e-5)


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
    sole = payment(charged=(noisy,), epsilon=9.0)
    [total] = only(run(mixed), run(sole)).totals
    for counts in (picky + noisy, noisy + noisy):
        assert total.plain[0] > total.joint[0] >= epsilon(list(counts.elements()), 1e-5) - 1e-12


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
