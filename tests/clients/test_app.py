"""The ClientApp: from a message to an update, with what the client keeps."""

import json
import time
from functools import partial
from pathlib import Path
from threading import Barrier, Lock

import pytest
import torch
from flwr.app import Message
from torch import nn

from clients.app import answer_together, build_client_app, train_together
from clients.client_task import ClientRuntime
from fl_sim.engines import wire
from fl_sim.engines.batching import ClientBatching
from fl_sim.engines.grid import Groups, InProcessGrid
from fl_sim.local_plan import LocalPlan
from fl_sim.native.kernel import PreparedTraining, load_kernel
from fl_sim.params import detached
from fl_sim.seeding import rng, seed_torch
from fl_sim.store.tensors import load_state, save_by_content
from fl_sim.training.loop import train
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob
from fl_sim.types import LocalSettings, LocalTask
from strategies.algorithm import payload_template
from strategies.fedavg import FedAvg
from strategies.fedmix import FedMix
from strategies.scaffold import Scaffold


def _model():
    """What PyTorch alone trains."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.AlphaDropout(0.5), nn.Linear(8, 3))


def _without_dropout():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def _records(client, synthetic, server_round=1):
    generator = torch.Generator().manual_seed(client)
    size = 0 if client == 3 else 5 + client
    return Records.of(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))


class _Synthesize:
    """Client i releases i records; client 3 fails."""

    reads_records = reads_state = runs_in_threads = False

    def run(self, client):
        [made] = self.run_together([client])
        if isinstance(made, Exception):
            raise made
        return made

    def run_together(self, clients):
        clients[0].check()
        return [ValueError("bad record") if one.number == 3 else self._made(one) for one in clients]

    def _made(self, client):
        return wire.synthetic_content(torch.full((client.number, 4), 0.5), _said(client.number, client.folder()))


class _Share:
    """What the client is asked to share is its records, moved by its number."""

    reads_records, reads_state, runs_in_threads = True, False, False

    def run(self, client):
        inputs, labels = client.records.tensors()
        return wire.pool_content({"rows": inputs + client.number, "labels": labels.float()})


TASKS = {"synthesize": _Synthesize(), "share": _Share()}


def _own(client, server_round=1):
    return _records(client, "")


def _runtime(algorithm, model, seed=0, records=_records):
    return ClientRuntime(algorithm, model, records, _own, _local, 4, seed, tasks=TASKS)


def _said(client, folder):
    return json.dumps({"counts": [client, 0, 0], "refused": folder.name, "facts": {}, "receipt": None})


def _local(learning_rate):
    return LocalSettings(learning_rate, 0.9, 0.01, batch_size=4, epochs=2)


class Play:
    """Four clients, of which the last is empty, and the messages they get."""

    def __init__(self, algorithm, state_dir, seed=0, pool=""):
        self.asked = []
        self.model = _model()
        self.params = detached(self.model.named_parameters())
        self.algorithm, self.seed, self.state_dir, self.pool = algorithm, seed, state_dir, pool
        runtime = _runtime(algorithm, self.model, seed)

        def runtime_of(experiment, data_root):
            self.asked.append((experiment, data_root))
            return runtime

        self.runtime_of, self.app = runtime_of, build_client_app(runtime_of)
        self.grid = InProcessGrid(self.app, 4)

    def order(self, server_round, task=wire.TRAIN):
        return wire.TaskConfig("experiment", server_round, 0.1, "root", str(self.state_dir), self.pool, task=task)

    def train(self, server_round, *clients, broadcast=None):
        content = wire.task_content(self.order(server_round), self.params, broadcast or {})
        replies = self.grid.send_and_receive([Message(content, 1000 + client, wire.TRAIN) for client in clients])
        assert [wire.error_of(reply) for reply in replies] == [None] * len(clients)
        template = payload_template(self.algorithm, self.algorithm.init(self.params))
        return [
            wire.read_update(client, reply.content, template) for client, reply in zip(clients, replies, strict=True)
        ]


def test_a_task_says_how_many_records_are_of_each_class(tmp_path: Path) -> None:
    class Told(FedAvg):
        def plan(self, task):
            told.append((task.client, task.class_counts))
            return super().plan(task)

    told, play = [], Play(Told(), tmp_path, pool="")
    object.__setattr__(play.runtime_of("", ""), "class_counts", lambda client, synthetic, _: (client, len(synthetic)))
    play.train(1, 0, 2)
    assert told == [(0, (0, 0)), (2, (2, 0))]


def _flat(payload):
    return torch.cat([value.flatten() for value in payload.values()])


def test_a_message_trains_on_the_clients_own_records_with_its_own_seeds(tmp_path: Path):
    play = Play(FedAvg(), tmp_path)
    (update,) = play.train(7, 2)
    inputs, labels = _records(2, "").tensors()
    task = LocalTask(7, 2, 4, len(labels), _local(0.1), play.params)
    model = _model()
    seed_torch(0, "local", 2, 7)
    trained = train(model, task, FedAvg().plan(task), inputs, labels, rng(0, "batches", 2, 7))
    for name, value in trained.params.items():
        assert torch.equal(update.payloads["delta"][name], value - play.params[name])
    assert (update.client, update.num_examples, update.loss) == (2, 7, trained.loss)
    assert play.asked == [("experiment", "root")]


def test_dropout_and_shuffles_differ_by_client_and_round_and_come_again(tmp_path: Path):
    play = Play(FedAvg(), tmp_path)
    runs = [_flat(play.train(server_round, 1)[0].payloads["delta"]) for server_round in (1, 2, 1)]
    assert torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], runs[1])
    other = _flat(Play(FedAvg(), tmp_path, seed=1).train(1, 1)[0].payloads["delta"])
    assert not torch.equal(runs[0], other)


def test_an_update_does_not_depend_on_who_else_was_played_in_this_process(tmp_path: Path):
    together = Play(FedAvg(), tmp_path).train(1, 0, 1, 2)
    alone = Play(FedAvg(), tmp_path).train(1, 2)
    assert torch.equal(_flat(together[2].payloads["delta"]), _flat(alone[0].payloads["delta"]))


def test_an_empty_shard_answers_with_zeros(tmp_path: Path):
    (update,) = Play(FedAvg(), tmp_path).train(1, 3)
    assert (update.num_examples, update.loss) == (0, None)
    assert not _flat(update.payloads["delta"]).any()


def test_what_a_client_keeps_is_there_in_its_next_round(tmp_path: Path):
    play = Play(Scaffold(), tmp_path)
    zeros = {"control": {name: torch.zeros_like(value) for name, value in play.params.items()}}
    (first,) = play.train(1, 1, broadcast=zeros)
    kept = load_state(tmp_path, 1, 2)["control"]
    sent = first.payloads["control_delta"]
    assert all(torch.equal(kept[name], sent[name]) and sent[name].any() for name in sent)  # c_i was 0

    (second,) = play.train(4, 1, broadcast=zeros)
    later = load_state(tmp_path, 1, 5)["control"]
    for name, change in second.payloads["control_delta"].items():
        torch.testing.assert_close(later[name], kept[name] + change)
    (again,) = play.train(4, 1, broadcast=zeros)  # after a crash: from round 1's control, not from its own
    assert torch.equal(_flat(again.payloads["control_delta"]), _flat(second.payloads["control_delta"]))
    assert load_state(tmp_path, 2, 9) == {}


def test_the_broadcast_reaches_the_algorithm(tmp_path: Path):
    play = Play(Scaffold(), tmp_path)
    zeros, ones = (
        {"control": {name: torch.full_like(value, number) for name, value in play.params.items()}}
        for number in (0.0, 1.0)
    )
    plain, corrected = play.train(1, 0, broadcast=zeros)[0], Play(Scaffold(), tmp_path).train(1, 0, broadcast=ones)[0]
    assert (_flat(corrected.payloads["delta"]) < _flat(plain.payloads["delta"])).all()


def _records_of_which_one_is_broken(client, synthetic, server_round=1):
    records = _records(client, synthetic)
    if client == 1:
        raise ValueError("a broken disk")
    if client == 2:
        records.tensors()[1][-1] = 7
    return records


def _train_together(play, records, *, stacked, timeout=None):
    """Have four clients, three of them with records, trained two at a time."""
    runtime = _runtime(FedAvg(), _without_dropout(), records=records)
    together = ClientBatching(partial(train_together, lambda *_: runtime, stacked=stacked), [4, 4, 4, 0], stack=2)
    grid = InProcessGrid(build_client_app(lambda *_: runtime), 4, batching=together)
    content = wire.task_content(play.order(1), play.params, {})
    sent = [Message(content, 1000 + client, wire.TRAIN) for client in range(4)]
    return grid.send_and_receive(sent, timeout=timeout)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_client_that_cannot_train_takes_no_others_of_its_piece_along(tmp_path: Path, stacked):
    play = Play(FedAvg(), tmp_path)
    errors = [wire.error_of(one) for one in _train_together(play, _records_of_which_one_is_broken, stacked=stacked)]
    assert errors[0] is errors[3] is None
    assert "ValueError: a broken disk" in errors[1]
    assert ("index 7 is out of bounds" if stacked else "IndexError") in errors[2]


@pytest.mark.parametrize("stacked", [False, True])
def test_clients_trained_together_answer_as_they_do_alone(tmp_path: Path, stacked):
    play = Play(FedAvg(), tmp_path)
    together = _train_together(play, _records, stacked=stacked)
    play.model = _without_dropout()
    trainer = _runtime(FedAvg(), play.model).trainer
    for client, reply in enumerate(together):
        records = _records(client, "")
        task = LocalTask(1, client, 4, len(records), _local(0.1), play.params)
        trained = trainer.train(LocalJob(task, LocalPlan(), records, rng(0, "batches", client, 1)))
        update = wire.read_update(client, reply.content, {"delta": play.params})
        assert update.num_examples == len(records)
        assert (update.loss is None) == (trained.loss is None) == (client == 3)
        for name, value in trained.params.items():
            torch.testing.assert_close(
                update.payloads["delta"][name], value - play.params[name], rtol=0, atol=1e-6 if stacked else 0
            )


@pytest.mark.skipif(load_kernel()[0] is None, reason="PyTorch lets go of Python's lock at every operation")
def test_threads_are_in_compiled_code_at_once_and_in_python_one_at_a_time(tmp_path: Path, monkeypatch):
    meeting, train, here = Barrier(2, timeout=20), PreparedTraining.train, Lock()

    def one_at_a_time(function, *arguments):
        assert here.acquire(blocking=False), "another thread is here"
        time.sleep(0.01)
        try:
            return function(*arguments)
        finally:
            here.release()

    class Watched(FedAvg):
        def finish(self, task, trained):
            return one_at_a_time(super().finish, task, trained)

    def train_with_another(self):
        meeting.wait()
        return train(self)

    monkeypatch.setattr(PreparedTraining, "train", train_with_another)
    records = partial(one_at_a_time, _records)
    runtime = _runtime(Watched(), _without_dropout(), records=records)
    together = ClientBatching(partial(train_together, lambda *_: runtime), [20, 20, 20, 20])
    grid = InProcessGrid(build_client_app(lambda *_: runtime), 4, workers=2, batching=together)
    content = wire.task_content(Play(FedAvg(), tmp_path).order(1), detached(runtime.model.named_parameters()), {})
    replies = grid.send_and_receive([Message(content, 1000 + client, wire.TRAIN) for client in (0, 1, 2, 0)])
    grid.close()
    assert [wire.error_of(reply) for reply in replies] == [None] * 4


def test_what_is_trained_together_looks_at_its_deadline(tmp_path: Path):
    def slow(client, synthetic, server_round):
        time.sleep(0.1)
        return _records(client, synthetic)

    replies = _train_together(Play(FedAvg(), tmp_path), slow, stacked=False, timeout=0.1)
    errors = [wire.error_of(reply) for reply in replies]
    assert errors[:2] == [None, None]
    assert all("was not started in that time" in error for error in errors[2:])


def test_a_client_says_which_partition_it_plays(tmp_path: Path):
    play = Play(FedAvg(), tmp_path)
    replies = play.grid.send_and_receive([Message(wire.who_content(0), 1000 + i, wire.WHO) for i in (2, 0)])
    assert [wire.read_who(reply.content) for reply in replies] == [2, 0]
    assert play.asked == []


def test_sharing_hands_over_what_the_site_makes_of_the_clients_records(tmp_path: Path):
    play = Play(FedMix(), tmp_path)
    message = Message(wire.config_content(play.order(0, "share")), 1002, wire.TRAIN)
    (reply,) = play.grid.send_and_receive([message])
    inputs, labels = _records(2, "").tensors()
    shared = wire.read_pool(reply.content, {"rows": inputs, "labels": labels}, most_rows=100)
    assert torch.equal(shared["rows"], inputs + 2)
    assert torch.equal(shared["labels"], labels.float())


def test_synthetic_records_travel_with_what_the_client_says_of_them(tmp_path: Path):
    play = Play(FedAvg(), tmp_path)
    message = Message(wire.config_content(play.order(0, "synthesize")), 1002, wire.TRAIN)
    (reply,) = play.grid.send_and_receive([message])
    inputs, said = wire.read_synthetic(reply.content, (4,), 3, most_rows=100)
    assert torch.equal(inputs, torch.full((2, 4), 0.5))
    assert said == _said(2, Path("client-2"))


def test_the_pool_is_read_from_the_file_the_message_names(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    updates = []
    for number in (1.0, 5.0):
        pool = {"inputs": number * torch.randn(6, 4, generator=generator), "labels": torch.full((6, 3), 1 / 3)}
        path = save_by_content(tmp_path, "pool", pool)
        play = Play(FedMix(), tmp_path, pool=str(path))
        updates.append(play.train(1, 0)[0])
        assert torch.equal(_flat(play.train(1, 0)[0].payloads["delta"]), _flat(updates[-1].payloads["delta"]))
    assert not torch.equal(_flat(updates[0].payloads["delta"]), _flat(updates[1].payloads["delta"]))


def test_a_rounds_message_is_unpacked_once_for_all_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    unpacked, read_task = [], wire.read_task
    monkeypatch.setattr(wire, "read_task", lambda content: unpacked.append(content) or read_task(content))
    play = Play(FedAvg(), tmp_path)
    play.train(1, 0, 1, 2)
    play.train(2, 0, 1)
    assert len(unpacked) == 2


def test_the_sites_number_of_threads_is_set(tmp_path: Path):
    torch.set_num_threads(2)
    Play(FedAvg(), tmp_path).train(1, 0)
    assert torch.get_num_threads() == 1


def test_a_client_that_raises_is_an_error_reply(tmp_path: Path):
    play = Play(FedAvg(), tmp_path)
    content = wire.task_content(play.order(1), {"wrong": torch.zeros(1)}, {})
    (reply,) = play.grid.send_and_receive([Message(content, 1000, wire.TRAIN)])
    assert "the weights do not fit the model" in wire.error_of(reply)


def test_clients_release_records_together_and_one_that_fails_is_named(tmp_path: Path):
    play = Play(FedAvg(), tmp_path)
    content = wire.config_content(play.order(0, "synthesize"))
    messages = [Message(content, 1000 + client, wire.TRAIN) for client in range(4)]
    alone = play.grid.send_and_receive(messages)
    groups = Groups(frozenset({"synthesize"}), answer_together(play.runtime_of), 2)
    grid = InProcessGrid(play.app, 4, groups=groups)
    together = grid.send_and_receive(messages)
    grid.close()
    for replies in (alone, together):
        assert [reply.has_error() for reply in replies] == [False, False, False, True]
        assert replies[3].error.reason.startswith("ValueError: bad record")
        sizes = [len(wire.read_synthetic(reply.content, (4,), 3, most_rows=100)[0]) for reply in replies[:3]]
        assert sizes == [0, 1, 2]


def test_what_the_experiment_does_not_ask_for_is_refused_with_what_it_does(tmp_path: Path):
    play = Play(FedAvg(), tmp_path)
    message = Message(wire.config_content(play.order(0, "vote\n")), 1002, wire.TRAIN)
    (reply,) = play.grid.send_and_receive([message])
    assert "the server asks for the task 'vote" in wire.error_of(reply)
    assert "has only the tasks train, synthesize, share" in wire.error_of(reply)
