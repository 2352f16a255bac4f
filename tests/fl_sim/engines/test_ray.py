"""The Ray engine: clients that raise, return NaN, hang, exit or kill their actor, and what is left of the run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from fl_sim.data import load
from fl_sim.engines.batching import CLIENT_RAISED, TOO_LATE, WORKER_DIED, ClientBatching, Exchange
from fl_sim.engines.own_ray import MODE, TOKEN
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.own_code import load_object
from fl_sim.simulation.run import Silent, run
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.training.loop import to_tensors

start = pytest.importorskip("fl_sim.engines.ray_start")  # before Ray itself: it sets what Ray reads when imported
import ray  # noqa: E402

from fl_sim.engines.actor_pool import Node, Worker  # noqa: E402
from fl_sim.engines.ray import RayGrid  # noqa: E402
from fl_sim.engines.ray_start import RayResources, check_head, start_or_join, stop_or_leave  # noqa: E402

pytestmark = pytest.mark.cluster

PROJECT = Path(__file__).parents[3]
PATIENCE = 120.0
"""Seconds for what takes a few on an idle machine."""


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A module of the user's own in the current folder, which nobody put on the path, and one Ray for all tests."""
    folder = tmp_path_factory.mktemp("users_code")
    shutil.copy(Path(__file__).with_name("misbehaving.py"), folder / "users_misbehaving.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [entry for entry in sys.path if entry])
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # they would lack the import path that actors get
        start_or_join(RayResources(actors=3), 3)
        load_object("users_misbehaving:client_app", "app")
        yield sys.modules["users_misbehaving"]
        stop_or_leave()


@pytest.fixture(scope="module")
def grid(misbehaving: ModuleType) -> Iterator[RayGrid]:
    made = RayGrid(misbehaving.client_app, 8, RayResources(actors=2))
    yield made
    made.close()


def send(grid: RayGrid, content: object, timeout: float = PATIENCE) -> list[Message]:
    return grid.send_and_receive([Message(content, node, "train") for node in grid.get_node_ids()], timeout=timeout)


def failures(replies: list[Message]) -> dict[int, tuple[int, str]]:
    return {client: (reply.error.code, reply.error.reason) for client, reply in enumerate(replies) if reply.has_error()}


def reports(replies: list[Message], key: str) -> list[object]:
    return [reply.content.metric_records["report"][key] for reply in replies]


def until_both_answer(grid: RayGrid, misbehaving: ModuleType) -> list[Message]:
    """Send until both actors are up and take part: whoever is up first begins."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        replies = send(grid, misbehaving.order("", 0, seconds=0.1))
        if len(set(reports(replies, "pid"))) == 2:
            return replies
    raise AssertionError("the second actor did not start")


def test_two_actors_share_the_clients_and_replies_keep_the_order(grid: RayGrid, misbehaving: ModuleType) -> None:
    replies = until_both_answer(grid, misbehaving)
    assert reports(replies, "client") == list(range(8))
    assert set(reports(replies, "threads")) == {1}
    assert os.getpid() not in reports(replies, "pid")


@pytest.mark.parametrize(("action", "reason"), [("raise", "ValueError: my data is bad"), ("exit", "SystemExit: 3")])
def test_a_client_that_raises_or_exits_is_one_error_reply(
    grid: RayGrid, misbehaving: ModuleType, action: str, reason: str
) -> None:
    [(client, (code, said))] = failures(send(grid, misbehaving.order(action, 3))).items()
    assert (client, code) == (3, CLIENT_RAISED)
    assert re.fullmatch(rf"{reason} \(.*misbehaving\.py:\d+, in misbehave\)", said)


def test_a_client_that_kills_its_actor_is_named_and_those_trained_with_it_are_answered(
    misbehaving: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    together = ClientBatching(misbehaving.player, [1, 2, 3, 4, 5, 6, 7, 8], stack=4)
    stacks = RayGrid(misbehaving.client_app, 8, RayResources(actors=1), batching=together)
    replies = send(stacks, misbehaving.order("kill", 3), timeout=2 * PATIENCE)  # three actors start, one after another
    next_ones = send(stacks, misbehaving.order("", 0), timeout=2 * PATIENCE)
    stacks.close()
    assert failures(next_ones) == {}
    assert failures(replies) == {3: (WORKER_DIED, "the worker died (out of memory?) while client 3 trained")}
    assert reports([*replies[:3], *replies[4:]], "client") == [0, 1, 2, 4, 5, 6, 7]
    assert capfd.readouterr().out == ""  # Ray would print a paragraph there


def test_an_actor_that_dies_once_is_replaced_within_the_exchange(
    grid: RayGrid, misbehaving: ModuleType, tmp_path: Path
) -> None:
    replies = send(grid, misbehaving.order("kill", 5, once=str(tmp_path / "done")))
    assert (tmp_path / "done").exists()
    assert reports(replies, "client") == list(range(8))


def test_what_waits_at_an_actor_is_not_to_blame_for_what_runs_there(
    misbehaving: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, waited = ClientBatching(misbehaving.player, [1] * 8, stack=2), []
    alone, take_ahead = RayGrid(misbehaving.client_app, 8, RayResources(actors=1), batching=pairs), Exchange.take_ahead

    def noted(*asked: Any) -> list[Message]:
        batch = take_ahead(*asked)
        waited.extend(batch)
        return batch

    monkeypatch.setattr(Exchange, "take_ahead", noted)
    send(alone, misbehaving.order("", 0), timeout=2 * PATIENCE)  # now it is known that clients take no time
    killed = failures(send(alone, misbehaving.order("kill", 2), timeout=2 * PATIENCE))
    assert waited
    assert killed == {2: (WORKER_DIED, "the worker died (out of memory?) while client 2 trained")}
    send(alone, misbehaving.order("", 0), timeout=2 * PATIENCE)
    late = failures(send(alone, misbehaving.order("hang", 2), timeout=3.0))
    alone.close()
    assert late.pop(2) == (TOO_LATE, "no answer within 3 s: it was still training")
    waited = "no answer within 3 s: it waited for client 2, which did not finish"
    assert late == dict.fromkeys(range(3, 8), (TOO_LATE, waited))


def test_what_messages_share_is_sent_to_an_actor_once_as_long_as_it_needs_it() -> None:
    worker = Worker(None, Node("node", "localhost", 1, room=1))
    assert worker.lacks({1: b"first", 2: b"second"}) == {1: b"first", 2: b"second"}
    assert worker.lacks({2: b"second", 3: b"third"}) == {2: None, 3: b"third"}
    assert worker.lacks({1: b"first"}) == {1: b"first"}


def test_the_exchange_ends_at_its_deadline_and_the_next_one_works(grid: RayGrid, misbehaving: ModuleType) -> None:
    until_both_answer(grid, misbehaving)  # so the deadline is for the clients alone
    start, hangs, spins = time.monotonic(), misbehaving.order("hang", 2), misbehaving.order("spin", 6)
    messages = [Message(spins if node % 8 == 6 else hangs, node, "train") for node in grid.get_node_ids()]
    failed = failures(grid.send_and_receive(messages, timeout=1.5))
    assert time.monotonic() - start < PATIENCE  # a client hangs for a thousand
    assert failed.pop(2) == failed.pop(6) == (TOO_LATE, "no answer within 1.5 s: it was still training")
    assert not {0, 1} & set(failed)
    waited = re.compile(r"no answer within 1.5 s: it waited for client [26].*, which did not finish")
    assert all(waited.search(why) for _, why in failed.values())
    assert failures(send(grid, misbehaving.order("", 0))) == {}


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_waiting_is_heard_at_once_and_the_next_exchange_works(
    grid: RayGrid, misbehaving: ModuleType
) -> None:
    start = time.monotonic()
    code = f"import os, signal, time; time.sleep(1); os.kill({os.getpid()}, signal.SIGINT)"
    interrupter = subprocess.Popen([sys.executable, "-c", code])
    with pytest.raises(KeyboardInterrupt):
        send(grid, misbehaving.order("hang", 0))
    assert time.monotonic() - start < PATIENCE  # the client hangs for a thousand
    interrupter.wait()
    assert failures(send(grid, misbehaving.order("", 0))) == {}


def test_an_app_that_cannot_be_made_fails_all_messages_with_its_reason(misbehaving: ModuleType) -> None:
    broken = RayGrid(misbehaving.broken_app, 3, RayResources(actors=1))
    failed = failures(send(broken, misbehaving.order("", 0)))
    assert set(failed.values()) == {(WORKER_DIED, "no worker can start: RuntimeError: no such library")}
    assert len(failed) == 3
    broken.close()


def test_what_the_cluster_does_not_have_is_the_users_mistake(misbehaving: ModuleType) -> None:
    with pytest.raises(UserError, match=r"64 Ray actors with engine\.cpus=1 .* 3 processors"):
        RayGrid(misbehaving.client_app, 99, RayResources(actors=64))
    with pytest.raises(UserError, match=r"set engine\.gpus=0"):
        RayGrid(misbehaving.client_app, 2, RayResources(gpus=0.5))
    assert ray.is_initialized()  # the engine did not start this Ray, so it does not stop it


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:9", r"cannot join the Ray cluster at '127\.0\.0\.1:9': .*refused; start one with `ray start"),
        ("somewhere", "cannot join the Ray cluster at 'somewhere': an address is host:port"),
        ("ray://127.0.0.1:10001", r"\(no ray://\)"),
    ],
)
def test_an_address_where_no_cluster_is_is_the_users_mistake_and_said_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.setattr("fl_sim.engines.ray_start.is_own_token", lambda: False)
    monkeypatch.setattr("fl_sim.engines.ray_start.ray.is_initialized", lambda: False)
    with pytest.raises(UserError, match=said):
        start_or_join(RayResources(address=address), 2)


def test_a_ray_whose_head_process_is_gone_ends_the_run_with_what_to_do() -> None:
    with pytest.raises(RunError, match=r"gcs_server\) at 127\.0\.0\.1:9 is gone .*: start the same command again"):
        check_head("127.0.0.1:9")


def test_a_run_whose_own_node_is_gone_does_not_wait_for_others(
    misbehaving: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    lonely = RayGrid(misbehaving.client_app, 2, RayResources(actors=1))
    monkeypatch.setattr("fl_sim.engines.actor_pool.ray.nodes", list)
    monkeypatch.setattr(lonely, "_node", "127.0.0.1:9")
    with pytest.raises(RunError, match=r"Ray's node at 127\.0\.0\.1:9 \(raylet\) is gone: start the same command"):
        send(lonely, misbehaving.order("", 0))
    lonely.close()


def plain_environment() -> dict[str, str]:
    """Return what programs start with that have no Ray of their own yet."""
    ours = (MODE, TOKEN, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    return {name: value for name, value in os.environ.items() if name not in ours}


def test_who_has_had_a_ray_of_its_own_cannot_join_one_that_does_not_know_its_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fl_sim.engines.ray_start.is_own_token", lambda: True)
    monkeypatch.setattr("fl_sim.engines.ray_start.ray.is_initialized", lambda: False)
    with pytest.raises(UserError, match=r"join that cluster in a fresh Python"):
        start_or_join(RayResources(address="127.0.0.1:9"), 2)


def test_a_ray_that_was_imported_too_early_for_a_token_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE)
    monkeypatch.setattr("fl_sim.engines.ray_start.ray.init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.setattr("fl_sim.engines.ray_start.ray.is_initialized", lambda: False)
    with pytest.raises(UserError, match="Ray was imported before this run could set a secret token"):
        start_or_join(RayResources(), 1)


@pytest.fixture
def cluster() -> Iterator[str]:
    """A Ray cluster of another process, as anyone starts it, by its address."""
    code = (
        "import ray; started = ray.init(address='local', num_cpus=2, include_dashboard=False); "
        "print(started.address_info['gcs_address'], flush=True); input(); ray.shutdown()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=plain_environment()
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.communicate("\n", timeout=PATIENCE)


@pytest.mark.slow
def test_a_run_joins_a_cluster_by_its_address_and_leaves_it_running(cluster: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fl_sim", "run", "model=logistic", "rounds=2", "engine=ray", "--json"]
    for attempt in ("first", "second"):
        finished = subprocess.run(
            [*command, f"engine.address={cluster}", "--out", str(tmp_path / attempt)],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=plain_environment(),
        )
        assert finished.returncode == 0, finished.stderr
        assert json.loads(finished.stdout)["engine"] == "ray"
    run(experiment_from({"model": "logistic", "rounds": 2, "engine": "inprocess"}), tmp_path / "own")
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "second", "own")]
    assert all(torch.equal(models[0][name], model[name]) for model in models for name in models[0])


class Trigger(Silent):
    """After the first round, makes the model kill its process at a record of client 3."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def finished_round(self, record: RoundRecord) -> None:
        dataset = load("digits", None)
        shard = job_of(experiment_from({})).shards[3]
        inputs, _ = to_tensors(dataset.train.take(shard[:1]), dataset)
        self._flag.write_text(json.dumps(inputs.flatten().tolist()))


def test_a_run_with_a_client_that_fails_says_which_and_keeps_what_it_has(
    misbehaving: ModuleType, tmp_path: Path
) -> None:
    settings = {"model": "users_misbehaving:model", "rounds": 3, "engine": {"kind": "ray", "actors": 1}}
    misbehaving.FLAG.unlink(missing_ok=True)
    with pytest.raises(RunError, match=r"client 3 in round 2 failed: the worker died \(out of memory\?\)"):
        run(experiment_from(settings), tmp_path / "run", observer=Trigger(misbehaving.FLAG))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["engine"], result["rounds"]) == ("failed", "ray", 1)
    assert "client 3 in round 2" in result["error"]
    assert [record.round for record in read_rounds(tmp_path / "run")] == [1]
    assert (tmp_path / "run" / "model.safetensors").exists()


def processes_of(session: int) -> list[str]:
    """Return what still runs in a session of processes, apart from zombies."""
    listing = subprocess.run(["ps", "-e", "-o", "sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()]
    return [row[2] for row in rows if int(row[0]) == session and not row[1].startswith("Z")]


def test_ctrl_c_on_the_command_line_leaves_no_process_behind_and_nothing_on_standard_output(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "fl_sim",
        "run",
        "model=logistic",
        "rounds=100000",
        "engine=ray",
        "engine.actors=1",
    ]
    process = subprocess.Popen(
        [*command, "--json", "--out", str(out)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE
    while len(read_rounds(out)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert output == ""
    assert "Traceback" not in errors
    assert json.loads((out / "result.json").read_text())["status"] == "interrupted"
    deadline = time.monotonic() + PATIENCE
    while (left := processes_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
