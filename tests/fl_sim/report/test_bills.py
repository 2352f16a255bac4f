"""What a report reads of a run's payments: its releases by identity, as events where they are certain, and its gaps."""

import json

import pytest

from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.events import from_json
from fl_sim.report.payments import bills_of, payments_of
from fl_sim.report.runs import find, read_all

GAUSSIAN = {"kind": "gaussian", "noise_multiplier": 3.0}
PAID = {
    "unit": "client", "epsilon": 5.0, "delta": 1e-5, "ledger": "0123456789abcdef",
    "planned_events": [{"event": GAUSSIAN, "times": 4}],
}  # fmt: skip
FACTS = {"labels": {"kind": "bounded-range", "epsilon": 0.1}, "generator": GAUSSIAN, "generator_steps": 3}


def change(path, **values):
    file = path / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return path


def payments(path):
    [run] = find([path]).runs
    return payments_of(run)


def test_a_run_under_global_dp_pays_with_its_ledgers_events(write_experiment):
    [one] = payments(change(write_experiment("a"), privacy=[PAID]))
    assert (one.identity, one.unit, one.epsilon) == ("0123456789abcdef", "client", 5.0)
    assert one.charged == ({from_json(GAUSSIAN): 4},)


def test_a_published_cost_includes_the_labels_that_it_is_about(write_experiment, tmp_path):
    labels = PAID | {"unit": "record", "epsilon": 2.0}
    published = labels | {"ledger": f"{PAID['ledger']}, published", "epsilon": 2.5, "planned_events": None}
    voted = {
        "teachers": 10, "mechanism": {"kind": "lnmax", "gamma": 0.1}, "evaluation_records": 9, "queries_asked": 9,
        "queries_answered": 9, "label_accuracy": 0.5, "student": "fixmatch", "private_kept": False,
    }  # fmt: skip
    change(write_experiment("a", algorithm={"kind": "mine:Vote"}), privacy=[labels, published], pate=voted)
    change(write_experiment("b", algorithm={"kind": "mine:Vote"}, seed=1), privacy=[labels], pate=voted)
    assert [bill["epsilon"] for bill in bills_of(read_all([tmp_path]))[0]] == [2.5]


def test_where_a_budget_is_what_holds_no_events_are_composed(write_experiment):
    [one] = payments(change(write_experiment("a"), privacy=[PAID | {"budget": 5.0}]))
    assert one.charged == ()
    [old] = payments(change(write_experiment("b"), privacy=[PAID | {"planned_events": None, "ledger": ""}]))
    assert (old.charged, old.identity) == ((), "")


def test_a_pool_is_one_release_and_each_different_bill_of_a_client_counts(write_experiment):
    path = write_experiment("a", preprocess={"epsilon": 1.0})
    made = json.loads((path / "result.json").read_text())["preprocess"]
    more = FACTS | {"generator_steps": 5}
    clients = [{"counts": [1, 0, 2], "refused": "", "facts": facts} for facts in (FACTS, more, FACTS, {})]
    [one] = payments(change(path, preprocess=made | {"clients": clients}))
    assert one.identity == made["pool"]
    labels, generator = (from_json(FACTS[name]) for name in ("labels", "generator"))
    assert one.charged == ({labels: 1, generator: 3}, {labels: 1, generator: 5})
    nothing = [{"counts": [0, 0, 0], "refused": "too few", "facts": None}]
    [one] = payments(change(path, preprocess=made | {"clients": nothing}))
    assert one.charged == ({},)


@pytest.mark.parametrize(
    ("preprocess", "privacy", "bare"),
    [
        (None, [], True),
        (None, [PAID], False),
        (None, [PAID | {"epsilon": None}], True),
        ({"train_on": "own-and-synthetic"}, [PAID | {"unit": "record"}], True),
        ({"train_on": "synthetic"}, [PAID | {"unit": "record"}], False),
        ({"train_on": "own-and-synthetic"}, [PAID | {"unit": "record"}, PAID], False),
    ],
)
def test_what_trains_on_raw_records_without_noise_is_bare(write_experiment, tmp_path, preprocess, privacy, bare):
    change(write_experiment("private"), privacy=[PAID | {"unit": unit} for unit in ("record", "client")])
    change(write_experiment("other", preprocess=preprocess), privacy=privacy)
    told = bills_of(read_all([tmp_path]))[0]
    assert {bill["unit"]: bill["runs_without_guarantee"] for bill in told} == {"record": bare, "client": bare}


def test_a_run_that_does_not_say_what_it_released_leaves_no_guarantee(write_experiment, tmp_path):
    change(write_experiment("a"), privacy=[PAID])
    assert bills_of(read_all([tmp_path]))[0][0]["epsilon"] == 5.0
    (write_experiment("b") / "result.json").unlink()
    [bill] = bills_of(read_all([tmp_path]))[0]
    assert (bill["epsilon"], bill["runs_not_known"]) == (None, 1)
    damaged = [PAID | {"planned_events": [{"event": {"kind": "other"}, "times": 1}]}]
    change(write_experiment("c"), privacy=damaged)
    [bill], problems = bills_of(read_all([tmp_path]))
    assert bill["runs_not_known"] == 2
    assert ["does not know" in problem.error for problem in problems] == [True]


def test_records_pay_for_what_is_released_about_them_under_other_labels(write_experiment, tmp_path):
    for ledger, data in (("aaaa", "cifar100"), ("bbbb", "cifar100-coarse")):
        change(write_experiment(data, data=data), privacy=[PAID | {"ledger": ledger}])
    [bill] = bills_of(read_all([tmp_path]))[0]
    assert (bill["data"], bill["private_releases"][0]["epsilon_sum"]) == ("cifar100", 10.0)


def test_seeds_are_releases_of_their_own(write_experiment, tmp_path):
    for seed, ledger in enumerate(("aaaa", "bbbb", "bbbb")):
        change(write_experiment(f"run-{seed}", seed=seed), privacy=[PAID | {"ledger": ledger}])
    [bill] = bills_of(read_all([tmp_path]))[0]
    [private] = bill["private_releases"]
    assert (private["releases"], private["epsilon_sum"]) == (2, 10.0)
    assert private["epsilon_joint"] <= epsilon_of_counts({from_json(GAUSSIAN): 8}, 1e-5)
    assert bill["runs"] == 3


KEY, OTHER_KEY = "0a1b2c3d", "ffffffff"


@pytest.mark.parametrize(
    ("runs", "epsilons"),
    [
        ([("csv:a.csv", "x"), ("csv:./a.csv", "x"), ("csv:/srv/a.csv", "x")], [15.0]),
        ([("csv:a.csv", "x"), ("npz:b.npz", "x"), ("csv:c.csv", "y")], [10.0, 5.0]),
        ([("csv:a.csv:label=one", "x"), ("csv:a.csv:label=two:test=0.2", "")], [10.0]),
        ([("csv:a.csv", "x"), ("csv:b.csv", "y"), ("csv:b.csv", "x")], [15.0]),
        ([("cifar100", ""), ("cifar100-coarse", "")], [10.0]),
        ([("mnist", "x"), ("npz:copy.npz", "x")], [10.0]),
        ([("csv:a.csv", "x"), ("csv:b.csv", "y")], [5.0, 5.0]),
    ],
)  # fmt: skip
def test_the_same_records_under_several_names_have_one_bill(write_experiment, tmp_path, runs, epsilons):
    for number, (data, content) in enumerate(runs):
        records = f"{KEY}:{content}" if content else ""
        paid = [PAID | {"unit": "record", "ledger": f"{number:04}"}]
        change(write_experiment(f"run-{number}", data=data), privacy=paid, records=records, is_private=True)
        change(tmp_path / f"run-{number}", preprocess={"kind": "da-fl", "train_on": "synthetic"})
    told = bills_of(read_all([tmp_path]))[0]
    assert [bill["private_releases"][0]["epsilon_sum"] for bill in told] == epsilons
    names = {data.split(":label")[0].removesuffix("-coarse") for data, _ in runs}
    assert {name for bill in told for name in (bill["data"], *bill["also_called"])} == names


@pytest.mark.parametrize(
    ("contents", "by_name"), [(("", ""), 2), ((f"{KEY}:x", ""), 1), ((f"{KEY}:x", f"{OTHER_KEY}:x"), 2),
                              ((f"{KEY}:x", f"{KEY}:y"), 0)],
)  # fmt: skip
def test_where_names_alone_tell_records_apart_the_bill_says_so(write_experiment, tmp_path, contents, by_name):
    for number, records in enumerate(contents):
        place = write_experiment(f"run-{number}", data=f"csv:{number}.csv")
        change(place, privacy=[PAID | {"ledger": f"{number:04}"}], records=records)
    told = bills_of(read_all([tmp_path]))[0]
    assert [bill["runs_told_by_name"] for bill in told] == [by_name] * 2
    said = "If two such names mean the same records, the costs of both add up"
    assert [said in bill["in_words"] for bill in told] == [by_name > 0] * 2


def test_one_name_needs_no_content(write_experiment, tmp_path):
    for number in range(2):
        change(write_experiment(f"run-{number}", data="csv:a.csv", seed=number), privacy=[PAID])
    [bill] = bills_of(read_all([tmp_path]))[0]
    assert bill["runs_told_by_name"] == 0
