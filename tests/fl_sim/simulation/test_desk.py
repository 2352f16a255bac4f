"""At home: a release is paid for before a worker is told of it, and a driver that was killed pays no second time."""

from pathlib import Path

import pytest
from flwr.app import Message

from fl_sim.engines import releases, wire
from fl_sim.engines.apart import Parcel
from fl_sim.engines.grid import CLIENT_RAISED, LocalGrid, answer, failure
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import Job, job_of
from fl_sim.simulation.client_ledgers import ledger_path
from fl_sim.simulation.desk import HomeDesk
from fl_sim.simulation.travelling import TravellingJob, travelling_app

CLIENT = 3


@pytest.fixture
def job() -> Job:
    release = {"kind": "da-fl", "generator": "mean-embedding", "gamma": 0.2}
    return job_of(experiment_from({"model": "logistic", "clients": 6, "partition": "iid", "preprocess": release}))


@pytest.fixture
def message(job: Job, tmp_path: Path) -> Message:
    """The message that asks a client for synthetic records."""
    grid = LocalGrid(6)
    order = wire.Order(job.experiment.model_dump_json(), 0, 0.0, str(tmp_path / "data"), str(tmp_path / "clients"))
    made = Message(wire.share_content(order), [*grid.get_node_ids()][CLIENT], wire.SYNTHESIZE)
    made.metadata.__dict__["_message_id"] = "one"
    return made


def charges(job: Job) -> int:
    path = ledger_path(job, CLIENT)
    return path.read_text().count("\n") - 1 if path.exists() else 0


def sent(desk: HomeDesk, message: Message) -> tuple[Parcel, wire.Ticket]:
    parcel = desk.before(message)
    assert isinstance(parcel, Parcel)
    ticket = wire.read_ticket(wire.RecordDict({**parcel.content, **parcel.own}))
    assert ticket is not None
    return parcel, ticket


def test_a_share_is_paid_for_before_a_worker_is_told_and_once(job: Job, message: Message, tmp_path: Path) -> None:
    key, share = (tmp_path / f"clients/client-{CLIENT}" / name for name in ("key", "share.safetensors"))
    desk = HomeDesk(job)
    parcel, ticket = sent(desk, message)
    assert charges(job) == 2
    assert key.read_bytes() == ticket.key
    assert sent(desk, message)[1] == ticket  # a worker died: sent again
    desk = HomeDesk(job)
    assert sent(desk, message)[1] == ticket  # the driver was killed
    assert charges(job) == 2
    assert not share.exists()

    content = wire.RecordDict({**parcel.content, **parcel.own})
    assert str(tmp_path) not in repr(content)
    away = Message(content, metadata=message.metadata)
    done = desk.after(message, answer(travelling_app(TravellingJob.of(job)), away, 6))
    assert share.exists()
    assert not key.exists()
    again = HomeDesk(job).before(message)  # and is there for good
    assert isinstance(again, Message)
    shape, classes = job.dataset.input_shape, job.dataset.num_classes
    first, second = (releases.read_synthetic(one.content, shape, classes, 10_000) for one in (done, again))
    assert bool((first[0] == second[0]).all())
    assert first[1] == second[1]
    assert charges(job) == 2


def test_a_client_that_fails_keeps_its_key_and_what_it_paid(job: Job, message: Message, tmp_path: Path) -> None:
    desk = HomeDesk(job)
    _, ticket = sent(desk, message)
    failed = desk.after(message, failure(message, CLIENT_RAISED, "out of memory"))
    assert wire.error_of(failed) == "out of memory"
    assert sent(HomeDesk(job), message)[1] == ticket
    assert charges(job) == 2
