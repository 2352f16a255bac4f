"""Every field of every message has a row in docs/privacy/messages.md, and whatever stands in it, a policy holds."""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from safetensors.torch import save_file

from clients.policy import read_policy
from fl_sim.data import load
from fl_sim.engines import remote, wire
from fl_sim.engines.batching import failure
from fl_sim.engines.grid import LocalGrid
from fl_sim.engines.remote import Encryption
from fl_sim.errors import Malformed, RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.packed import Packed, Size
from fl_sim.params import detached
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.simulation.engine_choice import client_app
from fl_sim.stages.dafl.stage import SYNTHESIZE
from fl_sim.stages.feature_sums import SUMMARISE
from fl_sim.stages.pate.procedure import VOTE
from fl_sim.stages.private_start import MEASURE
from fl_sim.stages.shares import SHARE
from fl_sim.types import ClientUpdate

PAGE = Path(__file__).parents[2] / "docs/privacy/messages.md"
CLIENT, TASKS = 3, (wire.TRAIN, SHARE, SYNTHESIZE, VOTE, SUMMARISE, MEASURE, "nothing")
TICKET = remote.Ticket(bytes(range(32)), simulation_only=False, counts=(0, 0, 0, 180, 0, 0, 0, 0, 0, 0))
GROUP = {"w": torch.zeros(2)}
ORDER = wire.TaskConfig("{}", 1, 0.1, "", "", most_steps={3: 1})
SERVERS = {
    "task_content": wire.task_content(ORDER, GROUP, {"control": GROUP}),
    "config_content": wire.config_content(ORDER),
    "state_records": RecordDict(dict(wire.state_records({"control": GROUP}))),
    "Signer.records": RecordDict(
        dict(remote.Signer.fresh().records(TICKET, wire.TRAIN, 0, wire.config_content(ORDER)))
    ),
}
PACKED = {"delta": Packed(torch.zeros(2), np.zeros(3, np.uint8))}
CLIENTS = {
    "update_content": wire.update_content(ClientUpdate({"delta": GROUP}, 5, 0.5, packed=PACKED)),
    "state_records": SERVERS["state_records"],
    "pool_content": wire.pool_content(GROUP),
    "made_content": wire.made_content(torch.zeros(1, 2)),
    "synthetic_content": wire.synthetic_content(torch.zeros(1, 2), "{}"),
    "votes_content": wire.votes_content(np.zeros(3, np.int64)),
    "moments_content": wire.moments_content(np.zeros((2, 3))),
    "sums_content": wire.sums_content(GROUP),
    "who_content": wire.who_content(3),
}


def fields_of(content: RecordDict) -> Iterator[str]:
    """Give the fields of a message: settings and numbers by name, groups of tensors by theirs."""
    for name, record in content.items():
        group = re.sub("/.*", "/*", name)
        named = not isinstance(record, ArrayRecord) or name.startswith("packed/")
        yield from (f"{group}.{key}" for key in record) if named else (group,)


SET_BY_SERVERS = sorted({"type", "client", *(field for one in SERVERS.values() for field in fields_of(one))})
SET_BY_CLIENTS = sorted({"error", *(field for one in CLIENTS.values() for field in fields_of(one))})


def rows(section: str) -> list[str]:
    """Return the first column of the table in a section of the page."""
    [part] = [one for one in PAGE.read_text().split("\n## ") if one.startswith(section)]
    return sorted(re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE))


def test_every_field_of_every_message_has_a_row() -> None:
    made = {
        name for module in (wire,) for name, made in inspect.getmembers(module, inspect.isfunction)
        if name.endswith(("_content", "_records")) and made.__module__ == module.__name__
    }  # fmt: skip
    assert made == {*SERVERS, *CLIENTS} - {"Signer.records"}
    assert rows("From the server") == SET_BY_SERVERS
    assert rows("From a client") == SET_BY_CLIENTS
    closed = Encryption.with_new_key().encrypt(b"")
    assert len(rows("Around both")) == len(closed)


PRIVATE = {
    "model": "logistic", "partition": "label-1", "clients": 10, "rounds": 1,
    "preprocess": {
        "kind": "da-fl", "epsilon": 0.5, "gamma": 1.0, "train_on": "synthetic",
        "generator": {"kind": "mean-embedding", "frequencies": 8}, "labels": {"kind": "exponential", "epsilon": 0.2},
    },
    "calibrate": {"kind": "ccvr", "epsilon": 0.25, "clipping_norm": 100.0},
}  # fmt: skip
"""An order that a policy of epsilon 1 allows: a share and moments."""


class Node:
    """Client 3 with a policy of epsilon 1, its app, and what a server may send it."""

    def __init__(self, folder: Path, node: Mapping[str, str]) -> None:
        LocalGrid(10)  # sets the identity that Flower wants before a message can be made
        self.folder, self.app = folder, client_app()
        (folder / "policy.toml").write_text("epsilon = 1.0\n")
        self.policy = read_policy(folder / "policy.toml")
        self.config = {"partition-id": CLIENT, "num-partitions": 10, "policy": str(self.policy.path), **node}
        job = job_of(experiment_from(PRIVATE))
        self.order = wire.TaskConfig(job.experiment.model_dump_json(), 1, 0.1, "", str(folder / "server"), run="a")
        self.params = detached(job.model().named_parameters())
        private = job.dataset.train.take(job.shards[CLIENT])
        self.private = folder / "private.safetensors"
        tensors = {"inputs": torch.from_numpy(private.inputs), "labels": torch.from_numpy(private.labels)}
        save_file(tensors, self.private)
        save_file(tensors, folder / "synthetic-0123456789abcdef.safetensors")

    def asked(self, task: str, content: RecordDict, client: int = CLIENT) -> Message | Exception:
        content = wire.with_config(content, replace(wire.read_task_config(content), task=task))
        message = Message(content, 1000 + client, wire.TRAIN)
        message.metadata.__dict__["_message_id"] = "one"
        try:
            return self.app(message, Context(1, 1003, dict(self.config), RecordDict(), {}))
        except (RunError, UserError, ValueError, OSError, AssertionError, KeyError) as error:
            return error

    def content(self, **changes: Any) -> RecordDict:
        return wire.task_content(replace(self.order, **changes), self.params, {})

    def experiment(self, **changes: Any) -> str:
        return experiment_from({**PRIVATE, **changes}).model_dump_json()

    @property
    def spent(self) -> float:
        if not self.policy.ledger.exists():
            return 0.0
        charges = [charge.event for charge in self.policy.open_ledger().charges]
        return epsilon_of_counts({event: charges.count(event) for event in charges}, 1e-5)


def told(node: Node, **changes: Any) -> list[RecordDict]:
    return [node.content(**{name: value}) for name, values in changes.items() for value in values]


def forged(node: Node, **fields: Any) -> list[RecordDict]:
    content = node.content()
    signed = remote.Signer.fresh().records(TICKET, SYNTHESIZE, CLIENT, content)
    return [RecordDict({**content, "ticket": ConfigRecord({**signed["ticket"], **fields})})]


def with_model(node: Node, value: float) -> RecordDict:
    filled = {name: torch.full_like(tensor, value) for name, tensor in node.params.items()}
    return wire.task_content(node.order, filled, {})


def _da_fl(**changes: Any) -> dict[str, Any]:
    return {"preprocess": {**PRIVATE["preprocess"], **changes}}  # type: ignore[dict-item]


HOSTILE: dict[str, Callable[[Node], list[RecordDict]]] = {
    "order.task": lambda node: [node.content()],
    "type": lambda node: [node.content()],
    "client": lambda node: [node.content()],
    "order.experiment": lambda node: told(
        node, experiment=[
            "", "{}", node.experiment(**_da_fl(epsilon="inf")), node.experiment(**_da_fl(noise="seeded")),
            node.experiment(**_da_fl(epsilon=5.0)), node.experiment(**_da_fl(train_on="own-and-synthetic")),
node.experiment(calibrate={"kind": "ccvr"}, **_da_fl(train_on="own-and-synthetic")),
            node.experiment(calibrate="none", preprocess="none"),
        ],
    ),
    "order.server-round": lambda node: told(node, server_round=[0, -1, 10**9]),
    "order.learning-rate": lambda node: told(node, learning_rate=[float("nan"), float("inf"), -1.0]),
    "order.data-root": lambda node: told(node, data_root=["/", "/dev/null", str(node.folder)]),
    "order.state-dir": lambda node: told(node, state_dir=["", "/dev/null", str(node.folder / "elsewhere")]),
    "order.pool": lambda node: told(node, pool=[str(node.private), "/dev/zero", "/etc/passwd"]),
    "order.synthetic": lambda node: told(
        node, synthetic=[str(node.private), "/dev/zero", str(node.folder / "synthetic-0123456789abcdef.safetensors")]
    ),
    "order.run": lambda node: told(node, run=["", "..", "../../elsewhere", "/tmp", "a/b"]),
    "order.facts": lambda node: told(node, facts=["", "{}", '{"shape": [1, 8, 8], "classes": 10, "mean": [1e30]}']),
    "order.most-steps": lambda node: told(node, most_steps=[{CLIENT: 10**12}, {CLIENT: -1}]),
    "params": lambda node: [with_model(node, value) for value in (float("nan"), 1e30, 0.0)],
    "broadcast/*": lambda node: [wire.task_content(node.order, node.params, {"more": node.params})],
    "kept/*": lambda node: [RecordDict({**node.content(), **wire.state_records({"more": node.params})})],
    "ticket.key": forged,
    "ticket.simulation-only": lambda node: forged(node, **{"simulation-only": True}),
    "ticket.counts": lambda node: forged(node, counts=[180] * 10),
    "ticket.signature": lambda node: forged(node, signature=bytes(32)) + forged(node, signature="none"),
}  # fmt: skip


@pytest.fixture(params=["", "own records"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    """A node with a policy, whose records are a part of the server's, or its own."""
    if not request.param:
        return Node(tmp_path, {})
    train = load("digits", None).train
    arrays = {"x": train.inputs[:90, 0], "y": train.labels[:90]}
    np.savez(tmp_path / "own.npz", x_train=arrays["x"], y_train=arrays["y"], x_test=arrays["x"], y_test=arrays["y"])
    own = Node(tmp_path, {"data": f"npz:{tmp_path / 'own.npz'}", "state": str(tmp_path / "state")})
    facts = {"shape": [1, 8, 8], "classes": 10, "mean": [0.3], "std": [0.4]}
    own.order = replace(own.order, facts=json.dumps(facts))
    return own


@pytest.mark.parametrize("field", SET_BY_SERVERS)
def test_whatever_a_server_writes_into_a_field_the_policy_holds(node: Node, field: str) -> None:
    """Nothing raw leaves the node, and all releases together are paid for within its epsilon."""
    for content in HOSTILE[field](node):
        for task in TASKS:
            for client in (CLIENT, 4) if field == "client" else (CLIENT,):
                answer = node.asked(task, content, client)
                refused = isinstance(answer, Exception) or answer.has_error()
                if task in {SYNTHESIZE, SUMMARISE} and not field.startswith("ticket"):
                    assert refused or node.spent > 0, "a release without a charge"
                else:
                    assert refused, f"{task} was answered"
                assert node.spent <= 1.0
    places = {path.name for path in node.folder.iterdir()}
    assert places <= {
        "policy.toml", "policy.toml.private", "private.safetensors", "synthetic-0123456789abcdef.safetensors",
        "own.npz", "state", "server", "elsewhere",
    }  # fmt: skip
    assert (node.folder / "elsewhere").exists() <= (field == "order.state-dir" and "data" not in node.config)


def test_what_the_policy_allows_is_answered_so_that_the_others_mean_something(node: Node) -> None:
    share, moments = (node.asked(task, node.content()) for task in (SYNTHESIZE, SUMMARISE))
    assert isinstance(share, Message), share
    assert isinstance(moments, Message), moments
    assert not share.has_error()
    assert not moments.has_error()
    assert 0 < node.spent <= 1.0


@pytest.mark.parametrize("left_out", ["", "policy"])
@pytest.mark.parametrize("task", [SYNTHESIZE, SUMMARISE])
def test_no_server_walks_past_the_ledger_by_a_ticket(tmp_path: Path, task: str, left_out: str) -> None:
    """Neither where there is a policy, nor on any other node that no driver of the run started."""
    node = Node(tmp_path, {})
    node.config.pop(left_out, None)
    [content] = forged(node)
    answer = node.asked(task, content)
    assert str(answer) == remote.NO_TICKET
    assert node.spent == 0
    assert not (tmp_path / "server").exists()


def test_a_run_that_is_called_like_a_path_leads_nowhere(tmp_path: Path) -> None:
    node = Node(tmp_path, {"data": "digits", "state": str(tmp_path / "state")})
    del node.config["policy"]
    facts = json.dumps({"shape": [1, 8, 8], "classes": 10, "mean": [0.3], "std": [0.4]})
    experiment = node.experiment(preprocess="none", calibrate="none")
    for run in ("../../elsewhere", str(tmp_path / "elsewhere"), "..", ""):
        answer = node.asked(wire.TRAIN, node.content(run=run, facts=facts, experiment=experiment))
        assert isinstance(answer, Message)
        assert "has characters other than letters" in (wire.error_of(answer) or "")
    assert not (tmp_path / "elsewhere").exists()


TEMPLATE = {"delta": {"w": torch.zeros(2)}}
SIZES = {"delta": Size(2, 3)}
TWO = ArrayRecord({'[["w", [2]]]': Array(np.zeros(2, np.float32))})


def _update(**changes: Any) -> RecordDict:
    report = MetricRecord({"num-examples": 5, "loss": 0.5})
    return RecordDict({"report": report, "payload/delta": TWO, **changes})


def _packed(numbers: int, bits: int) -> RecordDict:
    return wire.update_content(ClientUpdate({}, 5, 0.5, packed={"delta": Packed.blank(Size(numbers, bits))}))


def _said(**changes: Any) -> RecordDict:
    said = {"counts": [1, 0], "refused": "", "facts": {}, "receipt": None, **changes}
    return wire.synthetic_content(torch.zeros(1, 2), json.dumps(said))


ANSWERS: dict[str, Callable[[], Any]] = {
    "report.num-examples": lambda: wire.read_update(
        3, _update(report=MetricRecord({"num-examples": 101})), TEMPLATE, 100
    ),
    "report.loss": lambda: wire.read_update(
        3, _update(report=MetricRecord({"num-examples": 5, "loss": 1e300})), TEMPLATE, 100
    ),
    "payload/*": lambda: wire.read_update(3, _update(**{"payload/more": TWO}), TEMPLATE, 100),
    "packed/*.numbers": lambda: wire.read_update(
        3, _packed(3, 3), TEMPLATE, 100, SIZES,
    ),
    "packed/*.bits": lambda: wire.read_update(
        3, _packed(2, 4), TEMPLATE, 100, SIZES,
    ),
    "kept/*": lambda: wire.read_update(3, _update(**{"kept/control": TWO}), TEMPLATE, 100),
    "pool": lambda: wire.read_synthetic(wire.synthetic_content(torch.zeros(9, 2), "{}"), (2,), 2, 8),
    "said.json": lambda: wire.read_synthetic(_said(more=1), (2,), 2, 8),
    "votes": lambda: wire.read_votes(wire.votes_content(np.array([0, 2])), 2, 2),
    "moments": lambda: wire.read_moments(wire.moments_content(np.full((2, 3), np.inf)), (2, 3)),
    "sums": lambda: wire.read_sums(wire.sums_content({"w": torch.zeros(3)}), GROUP),
    "report.partition-id": lambda: wire.read_who(RecordDict({"report": MetricRecord({"partition-id": -1})})),
}  # fmt: skip


@pytest.mark.parametrize("field", [field for field in SET_BY_CLIENTS if field != "error"])
def test_whatever_a_client_writes_into_a_field_is_read_as_what_it_must_be_or_not_at_all(field: str) -> None:
    with pytest.raises(Malformed):
        ANSWERS[field]()


def test_what_a_client_says_of_its_failure_is_a_reason_and_no_answer(tmp_path: Path) -> None:
    message = Message(Node(tmp_path, {}).content(), 1003, wire.TRAIN)
    message.metadata.__dict__["_message_id"] = "one"
    assert wire.error_of(failure(message, 1, "\x1b[31m")) is not None


@pytest.mark.parametrize("place", range(3), ids=rows("Around both"))
def test_whatever_somebody_writes_into_an_envelope_does_not_open(place: int) -> None:
    envelopes = Encryption.with_new_key()
    parts = list(envelopes.encrypt(b"secret"))
    parts[place] = [bytes(12), [40], np.zeros(len(parts[2]), np.uint8)][place]
    with pytest.raises(RunError, match="changed in transit"):
        envelopes.decrypt(tuple(parts))
