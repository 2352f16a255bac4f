"""Workers without the driver's disk execute the clients that were sent, and the files of these stay at home."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message

from clients.app import build_client_app
from fl_sim.engines import remote, wire
from fl_sim.engines.batching import CLIENT_RAISED, answer, failure, node_context
from fl_sim.engines.grid import LocalGrid
from fl_sim.engines.remote import Parcel
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import Job, job_of
from fl_sim.params import detached
from fl_sim.simulation.client_ledgers import ledger_path
from fl_sim.simulation.remote_workers import ClientStore, WorkerSetup, worker_app
from fl_sim.stages.dafl.stage import SYNTHESIZE
from fl_sim.stages.feature_sums import SUMMARISE
from partitions import Parts

CLIENT = 3
SIGNER = remote.Signer.fresh()


@pytest.fixture
def job() -> Job:
    release = {"kind": "da-fl", "generator": "mean-embedding", "gamma": 0.2}
    return job_of(experiment_from({"model": "logistic", "clients": 6, "partition": "iid", "preprocess": release}))


@pytest.fixture
def message(job: Job, tmp_path: Path) -> Message:
    """The message that asks a client for synthetic records."""
    grid = LocalGrid(6)
    order = wire.TaskConfig(
        job.experiment.model_dump_json(), 0, 0.0, str(tmp_path / "data"), str(tmp_path / "clients"), task=SYNTHESIZE
    )
    made = Message(wire.config_content(order), [*grid.get_node_ids()][CLIENT], wire.TRAIN)
    made.metadata.__dict__["_message_id"] = "one"
    return made


def charges(job: Job) -> int:
    path = ledger_path(job, CLIENT)
    return path.read_text().count("\n") - 1 if path.exists() else 0


def sent(store: ClientStore, message: Message) -> tuple[Parcel, remote.Ticket]:
    parcel = store.before(message)
    assert isinstance(parcel, Parcel)
    content = wire.RecordDict({**parcel.content, **parcel.own})
    return parcel, SIGNER.read(SYNTHESIZE, CLIENT, content)


def test_a_share_is_paid_for_before_a_worker_is_told_and_once(job: Job, message: Message, tmp_path: Path) -> None:
    key, share = (tmp_path / f"clients/client-{CLIENT}" / name for name in ("key", "share.safetensors"))
    store = ClientStore(job, SIGNER)
    parcel, ticket = sent(store, message)
    assert charges(job) == 2
    assert key.read_bytes() == ticket.key
    assert sent(store, message)[1] == ticket  # a worker died: sent again
    store = ClientStore(job, SIGNER)
    assert sent(store, message)[1] == ticket  # the driver was killed
    assert charges(job) == 2
    assert not share.exists()

    content = wire.RecordDict({**parcel.content, **parcel.own})
    assert str(tmp_path) not in repr(content)
    away = Message(content, metadata=message.metadata)
    done = store.after(message, answer(worker_app(WorkerSetup.of(job, SIGNER)), away, 6))
    assert share.exists()
    assert not key.exists()
    again = ClientStore(job, SIGNER).before(message)  # and is there for good
    assert isinstance(again, Message)
    shape, classes = job.dataset.input_shape, job.dataset.num_classes
    first, second = (wire.read_synthetic(one.content, shape, classes, 10_000) for one in (done, again))
    assert bool((first[0] == second[0]).all())
    assert first[1] == second[1]
    assert charges(job) == 2


def test_a_client_that_fails_keeps_its_key_and_what_it_paid(job: Job, message: Message, tmp_path: Path) -> None:
    store = ClientStore(job, SIGNER)
    _, ticket = sent(store, message)
    failed = store.after(message, failure(message, CLIENT_RAISED, "out of memory"))
    assert wire.error_of(failed) == "out of memory"
    assert sent(ClientStore(job, SIGNER), message)[1] == ticket
    assert charges(job) == 2


def _answer_of(job: Job, content: wire.RecordDict, message: Message, signer: remote.Signer) -> Message:
    return answer(worker_app(WorkerSetup.of(job, signer)), Message(content, metadata=message.metadata), 6)


@pytest.mark.parametrize(
    "changed", ["nothing", "client", "task", "round", "run", "counts", "key", "driver", "signature"]
)
def test_a_worker_takes_a_ticket_for_the_message_that_its_driver_signed_alone(
    job: Job, message: Message, changed: str
) -> None:
    """All else is refused in words, with nothing released."""
    parcel, ticket = sent(ClientStore(job, SIGNER), message)
    client, task, order = CLIENT, SYNTHESIZE, wire.read_task_config(parcel.content)
    content, signer = parcel.content, SIGNER
    signed = {
        "nothing": lambda: parcel.own,
        "client": lambda: SIGNER.records(ticket, task, client + 1, content),
        "task": lambda: SIGNER.records(ticket, SUMMARISE, client, content),
        "round": lambda: SIGNER.records(
            ticket, task, client, wire.with_config(content, replace(order, server_round=1))
        ),
        "run": lambda: SIGNER.records(ticket, task, client, wire.with_config(content, replace(order, run="another"))),
        "counts": lambda: _altered(parcel, counts=[0, 0, 0, 180, 0, 0, 0, 0, 0, 0]),
        "key": lambda: _altered(parcel, key=bytes(32)),
        "driver": lambda: remote.Signer.fresh().records(ticket, task, client, content),
        "signature": lambda: _altered(parcel, signature=bytes(32)),
    }[changed]()
    reply = _answer_of(job, wire.RecordDict({**content, **signed}), message, signer)
    if changed == "nothing":
        assert wire.error_of(reply) is None
    else:
        assert wire.error_of(reply) == remote.NO_TICKET


def _altered(parcel: Parcel, **fields: object) -> dict[str, ConfigRecord]:
    return {"ticket": ConfigRecord({**parcel.own["ticket"], **fields})}  # type: ignore[dict-item]


@pytest.mark.parametrize("guard", ["policy", "owner"])
def test_where_a_policy_or_an_owner_is_not_even_a_signed_ticket_is_taken(
    job: Job, message: Message, guard: str, tmp_path: Path
) -> None:
    parcel, _ = sent(ClientStore(job, SIGNER), message)
    away = Message(wire.RecordDict({**parcel.content, **parcel.own}), metadata=message.metadata)
    (tmp_path / "policy.toml").write_text("epsilon = 100.0")
    place = (
        {"policy": str(tmp_path / "policy.toml")} if guard == "policy" else {"data": "digits", "state": str(tmp_path)}
    )
    context = node_context(message.metadata.dst_node_id, 6)
    context.node_config = {**context.node_config, **place}
    app = build_client_app(lambda *_: WorkerSetup.of(job, SIGNER).runtime, SIGNER)
    if guard == "owner":  # its run has no name: that is refused first, so it gets one, signed
        order = replace(wire.read_task_config(parcel.content), run="a")
        content = wire.with_config(parcel.content, order)
        ticket = SIGNER.read(SYNTHESIZE, CLIENT, away.content)
        signed = SIGNER.records(ticket, SYNTHESIZE, CLIENT, content)
        away = Message(wire.RecordDict({**content, **signed}), metadata=message.metadata)
        assert wire.error_of(app(away, context)) == remote.NO_TICKET
        return
    with pytest.raises(RunError, match="the message contains a ticket"):
        app(away, context)
    assert not (tmp_path / "policy.toml.private").exists()


def test_shards_that_were_dealt_otherwise_are_other_records() -> None:
    setup = WorkerSetup.of(job_of(experiment_from({"model": "logistic", "clients": 3})), remote.Signer.fresh())
    first, second, third = (setup.shards[client] for client in range(3))
    for shards in (Parts.of([second, first, third]), Parts.of([first[:-1], np.append(second, first[-1]), third])):
        with pytest.raises(RunError, match="the received records differ from those that were sent"):
            replace(setup, shards=shards).runtime  # noqa: B018 (made when it is asked for)
    assert setup.runtime.num_clients == 3


@pytest.mark.parametrize(("kind", "noise_multiplier"), [("dp-sgd", 1.0), ("local-dp", 1.5)])
def test_private_rounds_are_charged_by_the_driver_before_a_worker_without_disk_makes_them(
    kind: str, noise_multiplier: float, tmp_path: Path
) -> None:
    privacy = {"kind": kind, "noise_multiplier": noise_multiplier, "epsilon": 12.0}
    settings = {"model": "logistic", "clients": 6, "partition": "iid", "rounds": 3, "algorithm": "scaffold"}
    job = job_of(experiment_from({**settings, "local": {"privacy": privacy, "batch_size": 200, "momentum": 0.0}}))
    params = detached(job.model().named_parameters())
    order = wire.TaskConfig(job.experiment.model_dump_json(), 1, 0.1, "", str(tmp_path / "clients"), run="ab" * 8)
    zeros = {"control": {name: torch.zeros_like(value) for name, value in params.items()}}
    app = worker_app(WorkerSetup.of(job, SIGNER))
    weights = []
    for server_round in (1, 2, 3):
        content = wire.task_content(replace(order, server_round=server_round), params, zeros)
        message = Message(content, [*LocalGrid(6).get_node_ids()][CLIENT], wire.TRAIN)
        message.metadata.__dict__["_message_id"] = "one"
        store = ClientStore(job, SIGNER)
        parcel = store.before(message)
        assert isinstance(parcel, Parcel)
        assert charges(job) == min(server_round, 2)  # epsilon 12 allows two rounds
        whole = wire.RecordDict({**parcel.content, **parcel.own})
        reply = answer(app, Message(whole, metadata=message.metadata), 6)
        weights.append(reply.content.metric_records["report"]["num-examples"])
        bare = wire.RecordDict({name: one for name, one in whole.items() if name != "ticket"})
        refused = wire.error_of(answer(app, Message(bare, metadata=message.metadata), 6))
        assert refused is not None
        assert "no access to the client's privacy ledger" in refused
        store.after(message, reply)
    assert weights == [1, 1, 0]
    assert charges(job) == 2
