"""A ledger belongs to records as they lie in their file: no other reading of them begins a fresh one."""

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import dp_event

from clients.client_task import Client
from clients.policy import Policy, open_ledger
from fl_sim.data import fingerprint
from fl_sim.engines import wire
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import Job, job_of
from fl_sim.privacy.accounting import compose, epsilon_of_counts, epsilon_of_curve
from fl_sim.simulation.client_ledgers import (
    JointCost,
    joint_cost,
    joint_cost_in_words,
    ledger_path,
    ledgers_root,
)
from fl_sim.simulation.rounds import procedure_of
from fl_sim.stages.dafl.stage import releasing_client
from partitions import Parts

pytestmark = pytest.mark.usefixtures("quick_accounting")

DELTA, EVENT = 1e-5, dp_event.GaussianDpEvent(4.0)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FL_SIM_LEDGERS", str(tmp_path / "ledgers"))
    monkeypatch.chdir(tmp_path)
    rows = [f"{20 + row},{'fm'[row % 2]},h{row % 3},{row // 2 % 2}" for row in range(60)]
    path = tmp_path / "plain.csv"
    path.write_text("\n".join(["age,sex,place,ill", *rows]) + "\n")
    return path


def job(*settings: str, place: str = "plain.csv", partition: str = "natural", **more: object) -> Job:
    roles = {"label": "ill", "client": "place", "test": "0.25", "range.age": "0..100"}
    given = roles | dict(setting.split("=", 1) for setting in settings)
    name = ":".join([f"csv:{place}", *(f"{key}={value}" for key, value in given.items() if value)])
    clients = {"clients": 2 if given["client"] == "sex" else 3}
    return job_of(experiment_from({"data": name, "model": "logistic", "partition": partition, **clients, **more}))


def charge(one: Job, release: str) -> None:
    for client in range(one.experiment.num_clients):
        open_ledger(ledger_path(one, client)).charge(EVENT, release=release, noise=release)


def cost(times: int) -> float:
    return epsilon_of_counts({EVENT: times}, DELTA)


@pytest.mark.parametrize(
    "setting",
    ["range.age=0..101", "drop=sex", "test=0.3", "test_seed=4", "missing=drop", "label=sex", "client=sex",
     "scale=records", "category.sex=f+m+x", "delimiter=comma", "range.age=", "text=age"],
)  # fmt: skip
def test_another_reading_of_a_file_adds_to_its_ledger(table: Path, setting: str) -> None:
    first, other = job(), job(*([setting, "range.age="] if setting == "text=age" else [setting]))
    charge(first, "one")
    charge(other, "two")
    for one in (first, other):
        assert joint_cost(one, DELTA).epsilon == pytest.approx(cost(2))
        assert joint_cost(one, DELTA).shares == 2
    assert ledger_path(first, 0).parent.parent == ledger_path(other, 0).parent.parent


def test_a_copy_another_spelling_and_another_order_of_the_lines_do_so_too(table: Path, tmp_path: Path) -> None:
    shutil.copy(table, tmp_path / "copy.csv")
    head, *rows = table.read_text().splitlines()
    (tmp_path / "reversed.csv").write_text("\n".join([head, *reversed(rows)]))
    for number, place in enumerate(("plain.csv", "./plain.csv", "copy.csv", "reversed.csv")):
        charge(job(place=place), f"release {number}")
    assert joint_cost(job(), DELTA).epsilon == pytest.approx(cost(4))


def test_a_file_with_other_records_has_its_own(table: Path, tmp_path: Path) -> None:
    charge(job(), "one")
    (tmp_path / "other.csv").write_text(table.read_text().replace("45,", "46,"))
    assert joint_cost(job(place="other.csv"), DELTA).shares == 0


def test_other_clients_of_the_same_records_are_another_deal(table: Path) -> None:
    """A record of client 1 in one deal and of client 0 in the other pays for both: no maximum over the two."""
    by_place, by_sex = job(), job("client=sex")
    open_ledger(ledger_path(by_place, 1)).charge(EVENT, release="one", noise="")
    open_ledger(ledger_path(by_sex, 0)).charge(EVENT, release="two", noise="")
    assert joint_cost(by_place, DELTA).epsilon == pytest.approx(cost(2))


def earlier_place(one: Job) -> Path:
    """Where the version before kept a ledger: named by what is read, and by the settings of the deal."""
    experiment = one.experiment
    dealt = {**experiment.chosen("partition", "clients"), "seed": experiment.seed_of_partition}
    name = hashlib.sha256(json.dumps(dealt, sort_keys=True).encode()).hexdigest()[:16]
    return ledgers_root() / f"records-{fingerprint(experiment.data, one.root)[:20]}" / name


def test_ledgers_of_earlier_versions_are_still_used_and_joined(table: Path) -> None:
    one, other = job(), job("range.age=0..101")
    for client in range(3):
        path = earlier_place(one) / f"client-{client}.jsonl"
        open_ledger(path).charge(EVENT, release="long ago", noise="old")
        assert ledger_path(one, client) == path
    charge(other, "now")
    assert joint_cost(one, DELTA).epsilon == pytest.approx(cost(2))
    assert joint_cost(other, DELTA).epsilon == pytest.approx(cost(2))
    charge(one, "now")
    assert joint_cost(other, DELTA).epsilon == pytest.approx(cost(3))


def test_a_share_that_a_client_kept_under_its_earlier_name_is_not_made_again(table: Path, tmp_path: Path) -> None:
    one = job(preprocess={"kind": "da-fl", "generator": "marginals"}, evaluate={"test": "never"})
    policy = Policy(tmp_path / "policy.toml", 10.0, DELTA, allow_raw_updates=False, allow_votes=False)

    def folder() -> Path:
        order = wire.TaskConfig("", 0, 0.0, "", str(tmp_path / "unused"))
        client = Client(0, procedure_of(one).runtime(), order, wire.config_content(order), policy)
        return releasing_client(one, client).folder

    now, place = folder(), earlier_place(one)
    assert now.parent == policy.home
    release = now.name.rpartition("-")[2]
    kept = policy.home / f"{place.parent.name}-{place.name}-{release}"
    kept.mkdir(parents=True)
    assert folder() == kept


def test_a_deal_costs_what_its_dearest_client_pays_whichever_that_is(table: Path) -> None:
    one, other = job(), job("client=sex")
    for client, times in enumerate((1, 3, 2)):
        for number in range(times):
            open_ledger(ledger_path(one, client)).charge(EVENT, release=f"release {number}", noise="")
    assert joint_cost(one, DELTA) == JointCost(pytest.approx(cost(3)), 3)
    for number in range(2):
        open_ledger(ledger_path(other, 0)).charge(EVENT, release=f"release {number}", noise="")
    assert joint_cost(one, DELTA) == JointCost(pytest.approx(cost(5)), 5)


def test_the_dearest_client_is_found_order_by_order_and_is_not_the_one_with_most_releases(table: Path) -> None:
    one, pure = job(), dp_event.LaplaceDpEvent(0.5)
    charged = ({pure: 1}, {EVENT: 6}, {dp_event.GaussianDpEvent(40.0): 9})
    for client, counts in enumerate(charged):
        for event, times in counts.items():
            repeated = dp_event.SelfComposedDpEvent(event, times)
            open_ledger(ledger_path(one, client)).charge(repeated, release="one", noise="")
    dearest = np.max([compose(counts) for counts in charged], axis=0)
    found = joint_cost(one, DELTA).epsilon
    assert found == pytest.approx(epsilon_of_curve(dearest, DELTA))
    assert found > max(epsilon_of_curve(compose(counts), DELTA) for counts in charged)


def test_the_generator_of_a_share_is_charged_and_no_share_of_its_own(table: Path) -> None:
    one = job()
    for release in ("labels a", "generator a", "generator b"):
        open_ledger(ledger_path(one, 2)).charge(EVENT, release=release, noise="")
    assert joint_cost(one, DELTA) == JointCost(pytest.approx(cost(3)), 1)


def test_all_earlier_folders_are_found_whoever_asks_first(table: Path) -> None:
    readings = [job(), job("range.age=0..101"), job("range.age=0..102")]
    for one in readings:
        open_ledger(earlier_place(one) / "client-0.jsonl").charge(EVENT, release="long ago", noise="old")
        assert joint_cost(one, DELTA).epsilon == pytest.approx(cost(1)), "its own, before it was joined"
    for one in readings:
        ledger_path(one, 0)
    for one in readings:
        assert joint_cost(one, DELTA) == JointCost(pytest.approx(cost(3)), 3)


def test_a_deal_is_which_client_holds_which_record_and_no_spelling(table: Path) -> None:
    one = job()
    records, bounds = one.shards.records, one.shards.bounds
    moved = bounds.copy()
    moved[1] -= 1  # the first client has one record less, the second one more
    others = [Parts(records[::-1].copy(), bounds), Parts(records, moved)]
    deals = {ledger_path(replace(one, shards=shards), 0).parent for shards in (one.shards, *others)}
    assert len(deals) == 3
    assert ledger_path(job(place="./plain.csv"), 0) == ledger_path(one, 0)


def test_no_client_is_left_out_whatever_its_number(table: Path) -> None:
    path = ledger_path(job(), 0)
    charge(job(), "one")
    for number in range(2):
        open_ledger(path.with_name("client-123.jsonl")).charge(EVENT, release=f"release {number}", noise="")
    assert joint_cost(job(), DELTA) == JointCost(pytest.approx(cost(2)), 2)


def test_what_all_releases_cost_is_said_or_that_they_have_no_epsilon() -> None:
    assert "up to 7 releases" in joint_cost_in_words(JointCost(1.23451, 7), DELTA)
    assert "together they cost epsilon 1.235 at delta 1e-05" in joint_cost_in_words(JointCost(1.23451, 7), DELTA)
    assert "together they have no finite epsilon at delta" in joint_cost_in_words(JointCost(math.inf, 7), DELTA)
