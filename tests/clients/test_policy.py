"""A client's own policy: no order, seed or setting buys more than its owner allows, and nothing raw leaves it."""

import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from clients.client_task import Client
from clients.policy import Policy, read_policy
from fl_sim.engines import wire
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.privacy.accounting import epsilon_at, epsilon_of_counts, fixed_order
from fl_sim.privacy.events import BoundedRangeDpEvent
from fl_sim.privacy.ledger import Charge
from fl_sim.simulation.rounds import runtime_of

GAUSSIAN = dp_event.GaussianDpEvent(5.0)


def _policy(folder: Path, text: str = "epsilon = 10.0") -> Policy:
    folder.mkdir(exist_ok=True)
    (folder / "policy.toml").write_text(text)
    return read_policy(folder / "policy.toml")


def _order(*overrides: str) -> Experiment:
    quick = [
        "preprocess.generator=mean-embedding", "preprocess.generator.frequencies=8", "preprocess.epsilon=6",
        "model=logistic",
    ]  # fmt: skip
    return experiment_from(with_overrides({"preprocess": "da-fl"}, [*quick, *overrides]))


def _share(policy: Policy, experiment: Experiment, client: int, folder: Path) -> torch.Tensor:
    runtime = runtime_of(experiment.model_dump_json(), "")
    order = wire.TaskConfig(experiment.model_dump_json(), 0, 0.0, "", str(folder), task="synthesize")
    answer = runtime.tasks["synthesize"].run(Client(client, runtime, order, wire.config_content(order), policy))
    return wire.read_made(answer)


def test_a_policy_is_read_whole(tmp_path: Path) -> None:
    text = "epsilon = 3.0\ndelta = 1e-6\nallow_raw_updates = true"
    policy = _policy(tmp_path, text)
    assert (policy.epsilon, policy.delta, policy.allow_raw_updates, policy.allow_votes) == (3.0, 1e-6, True, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "epsilon"), ("epsilon = -1", "epsilon = -1"), ("epsilon = inf", "epsilon = inf"),
        ("epsilon = nan", "epsilon = nan"), ("epsilon = 1\nnoise = 'seeded'", "unknown key 'noise'"),
        ("epsilon = 1\ndelta = 1.5", "delta = 1.5"), ("epsilon", "not TOML"), ("a=" + "[" * 9999, "not TOML"),
        ("#" * 100_000, "too long"), ("epsilon = 1\npath = '/'", "unknown key 'path'"),
    ],
)  # fmt: skip
def test_what_is_no_policy_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        _policy(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_policy(tmp_path / "missing.toml")
    with pytest.raises(UserError, match="too long"):
        read_policy(Path("/dev/zero"))


def test_new_seeds_splits_settings_and_folders_buy_no_more_than_the_policy_allows(tmp_path: Path) -> None:
    policy, refused = _policy(tmp_path, "epsilon = 7.0"), []
    orders = [_order(), _order("seed=1"), _order("clients=5"), _order("partition=iid"), _order("preprocess.epsilon=5")]
    for number, order in enumerate(orders):
        try:
            _share(policy, order, 3, tmp_path / f"server {number}")
        except RunError as error:
            refused.append(str(error))
    assert len(refused) == 4
    assert "allows epsilon 7 at delta 1e-05 per record over all releases" in refused[0]
    counts = Counter(charge.event for charge in policy.open_ledger().charges)
    assert counts.total() == 2
    assert epsilon_of_counts(counts, policy.delta) <= 7
    assert not list(tmp_path.glob("server*"))  # what is private lies where the client wants it


def test_the_same_order_gets_the_same_share_and_costs_nothing_more(tmp_path: Path) -> None:
    policy = _policy(tmp_path)
    first = _share(policy, _order(), 3, tmp_path / "a")
    assert torch.equal(first, _share(policy, _order(), 3, tmp_path / "b"))
    assert len(policy.open_ledger().charges) == 2


def test_smaller_orders_fit_until_the_sum_is_reached(tmp_path: Path) -> None:
    policy = _policy(tmp_path, "epsilon = 4.0")
    fitting = next(n for n in range(1000) if epsilon_of_counts({GAUSSIAN: n + 1}, policy.delta) > 4.0)
    for number in range(fitting):
        policy.pay({f"release {number}": GAUSSIAN}, "key")
    policy.pay({"release 0": GAUSSIAN}, "key")  # the same release once more
    with pytest.raises(RunError, match="the request would exceed it"):
        policy.pay({"another": GAUSSIAN}, "key")
    assert [charge.event for charge in policy.open_ledger().charges] == [GAUSSIAN] * fitting


def test_of_an_order_that_does_not_fit_nothing_is_charged_and_many_at_once_share_one_epsilon(tmp_path: Path) -> None:
    policy = _policy(tmp_path, "epsilon = 2.0")
    with pytest.raises(RunError):
        policy.pay({"a": GAUSSIAN, "b": dp_event.GaussianDpEvent(0.1)}, "key")
    assert policy.open_ledger().charges == ()

    def pay(number: int) -> bool:
        try:
            policy.pay({f"release {number}": GAUSSIAN}, "key")
        except RunError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        paid = sum(pool.map(pay, range(30)))
    assert len(policy.open_ledger().charges) == paid
    assert epsilon_of_counts({GAUSSIAN: paid}, policy.delta) <= 2.0 < epsilon_of_counts({GAUSSIAN: paid + 1}, 1e-5)


def test_noise_that_the_server_could_draw_again_is_refused(tmp_path: Path) -> None:
    policy = _policy(tmp_path)
    with pytest.raises(RunError, match="allows secret noise only"):
        _share(policy, _order("preprocess.noise=seeded"), 3, tmp_path / "a")
    with pytest.raises(RunError, match="the request would exceed it"):
        _share(policy, _order("preprocess.epsilon=inf"), 3, tmp_path / "a")
    assert not policy.ledger.exists() or not policy.open_ledger().charges


def test_a_policys_ledger_that_is_lost_or_cut_is_missed(tmp_path: Path) -> None:
    policy = _policy(tmp_path)
    policy.pay({"a": GAUSSIAN}, "key")
    policy.pay({"b": GAUSSIAN}, "key")
    whole = policy.ledger.read_bytes()
    for broken in (None, b"", whole[: whole.rindex(b'{"release')]):
        policy.ledger.unlink() if broken is None else policy.ledger.write_bytes(broken)
        with pytest.raises(RunError, match=r"ledger\.jsonl"):
            policy.pay({"c": GAUSSIAN}, "key")
    policy.ledger.write_bytes(whole)
    (policy.home / "receipt.json").write_text("nonsense")
    with pytest.raises(RunError, match="damaged"):
        policy.pay({"c": GAUSSIAN}, "key")


def test_what_a_policy_keeps_is_readable_by_the_client_alone(tmp_path: Path) -> None:
    policy = _policy(tmp_path)
    _share(policy, _order(), 3, tmp_path / "a")
    kept = [policy.home, *policy.home.rglob("*")]
    assert {path.name for path in kept} >= {"policy.toml.private", "ledger.jsonl", "receipt.json", "share.safetensors"}
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in kept} == {0}


def test_raw_updates_and_votes_leave_a_client_only_where_its_owner_says_so(tmp_path: Path) -> None:
    policy = _policy(tmp_path)
    policy.check_training(own_records=False)
    with pytest.raises(RunError, match="allow_raw_updates = true"):
        policy.check_training(own_records=True)
    with pytest.raises(RunError, match="allow_votes = true"):
        policy.check_vote()
    generous = _policy(tmp_path / "generous", "epsilon = 1\nallow_raw_updates = true\nallow_votes = true")
    generous.check_training(own_records=True)
    generous.check_vote()


@pytest.mark.parametrize(
    ("preprocess", "pool", "own"),
    [("none", "", True), ("da-fl", "pool", True), ("da-fl", "", True), ("synthetic", "pool", False),
     ("synthetic", "", True)],
)  # fmt: skip
def test_a_site_says_when_training_would_look_at_the_clients_own_records(preprocess: str, pool: str, own: bool) -> None:  # noqa: FBT001
    settings = {
        "none": [],
        "da-fl": ["preprocess=da-fl"],
        "synthetic": ["preprocess=da-fl", "preprocess.train_on=synthetic"],
    }
    experiment = experiment_from(with_overrides({}, [*settings[preprocess], "model=logistic"]))
    assert runtime_of(experiment.model_dump_json(), "").trains_on_own(pool) is own


def test_refusals_are_the_same_whatever_the_records_are(tmp_path: Path) -> None:
    said = set()
    for client in (0, 7):
        policy = _policy(tmp_path / str(client), "epsilon = 1.0")
        with pytest.raises(RunError) as caught:
            _share(policy, _order(), client, tmp_path / "a")
        said.add(str(caught.value))
    assert len(said) == 1


@pytest.mark.parametrize(("delta", "fitting"), [(1e-3, 9), (1e-5, 5), (1e-7, 3)])
def test_the_policys_own_delta_decides_how_much_fits(tmp_path: Path, delta: float, fitting: int) -> None:
    policy = _policy(tmp_path, f"epsilon = 2.0\ndelta = {delta}")
    for number in range(fitting):
        policy.pay({f"release {number}": GAUSSIAN}, f"key {number}")
    with pytest.raises(RunError, match=f"allows epsilon 2 at delta {delta:g} per record"):
        policy.pay({"one more": GAUSSIAN}, "another key")
    assert epsilon_of_counts({GAUSSIAN: fitting}, delta) <= 2 < epsilon_of_counts({GAUSSIAN: fitting + 1}, delta)


KINDS = (
    GAUSSIAN, dp_event.GaussianDpEvent(1.5), dp_event.LaplaceDpEvent(4.0), BoundedRangeDpEvent(0.3),
    dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(0.8)), 50),
)  # fmt: skip


@pytest.mark.parametrize("first", range(len(KINDS)))
def test_releases_that_are_chosen_in_turn_add_up_at_one_order_that_the_first_one_fixed(
    tmp_path: Path, first: int
) -> None:
    """Whatever an adversary asks for next: the smallest epsilon over all orders, taken at the end, proves nothing."""
    policy, events = _policy(tmp_path, "epsilon = 3.0"), [KINDS[first]]
    policy.pay({"first": KINDS[first]}, "key")
    order = fixed_order({KINDS[first]: 1}, 3.0, 1e-5)
    generator = np.random.default_rng(first)
    refused_what_some_order_has_room_for = 0
    for number in range(60):
        event = KINDS[generator.integers(len(KINDS))]
        fits = epsilon_at(order, Counter([*events, event]), 1e-5) <= 3.0
        refused_what_some_order_has_room_for += not fits and epsilon_of_counts(Counter([*events, event]), 1e-5) <= 3.0
        if fits:
            policy.pay({f"release {number}": event}, f"key {number}")
            events.append(event)
        else:
            with pytest.raises(RunError, match="the request would exceed it"):
                policy.pay({f"release {number}": event}, f"key {number}")
        policy = read_policy(policy.path)  # the order is the same in every process
    assert [charge.event for charge in policy.open_ledger().charges] == events
    if first >= 2:  # of Gaussian releases the order of the first one is the best for all: not so of others
        assert refused_what_some_order_has_room_for > 0


def test_what_is_asked_for_under_the_first_key_later_does_not_move_the_order(tmp_path: Path) -> None:
    policy = _policy(tmp_path, "epsilon = 3.0")
    first, then = dp_event.LaplaceDpEvent(4.0), dp_event.SelfComposedDpEvent(GAUSSIAN, 4)
    order = fixed_order({first: 1}, 3.0, 1e-5)
    assert order != fixed_order(Counter([first, then]), 3.0, 1e-5)
    charges = [Charge("a", "key", first, None), Charge("b", "other", GAUSSIAN, None), Charge("c", "key", then, None)]
    assert policy._spent(charges) == epsilon_at(order, Counter([first, GAUSSIAN, then]), 1e-5)


def test_all_that_the_first_order_asks_for_fixes_the_renyi_order_not_its_first_release_alone(tmp_path: Path) -> None:
    policy = _policy(tmp_path, "epsilon = 3.0")
    first, second = dp_event.LaplaceDpEvent(4.0), dp_event.SelfComposedDpEvent(GAUSSIAN, 4)
    order = fixed_order(Counter([first, second]), 3.0, 1e-5)
    assert order != fixed_order({first: 1}, 3.0, 1e-5)
    charges = [Charge("a", "key", first, None), Charge("b", "key", second, None), Charge("c", "other", GAUSSIAN, None)]
    assert policy._spent(charges) == epsilon_at(order, Counter([first, second, GAUSSIAN]), 1e-5)


@pytest.mark.parametrize("event", KINDS)
def test_a_first_release_fits_wherever_some_order_has_room_for_it(tmp_path: Path, event: dp_event.DpEvent) -> None:
    least = epsilon_of_counts({event: 3}, 1e-5)
    for share, fits in ((1.0001, True), (0.9999, False)):
        policy = _policy(tmp_path / str(share), f"epsilon = {least * share}")
        if fits:
            policy.pay({"all": dp_event.SelfComposedDpEvent(event, 3)}, "key")
        else:
            with pytest.raises(RunError, match="the request would exceed it"):
                policy.pay({"all": dp_event.SelfComposedDpEvent(event, 3)}, "key")
