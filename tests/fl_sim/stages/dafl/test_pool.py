"""A pool on disk: no client's lie and no damage gets into a run, and no ledger that is gone makes a pool cheaper."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from clients.client_task import Client
from fl_sim.engines import wire
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.events import from_json
from fl_sim.simulation.client_ledgers import joint_cost, ledger_path
from fl_sim.simulation.rounds import runtime_of
from fl_sim.stages.dafl.bill import statement
from fl_sim.stages.dafl.pool import FACTS, Pool, load, store
from fl_sim.stages.dafl.stage import SYNTHESIZE, Synthesize

pytestmark = pytest.mark.usefixtures("coarse_losses")

Answer = tuple[torch.Tensor, str]
Change = Callable[[dict[str, Any]], Any]


def _order(*overrides: str) -> Experiment:
    quick = [
        "preprocess.generator=mean-embedding", "preprocess.generator.frequencies=8", "preprocess.labels=exponential:2",
        "clients=2", "model=logistic",
    ]  # fmt: skip
    return experiment_from(with_overrides({"preprocess": "da-fl"}, [*quick, *overrides]))


def _answers(experiment: Experiment, folder: Path) -> list[Answer]:
    runtime = runtime_of(experiment.model_dump_json(), "")
    order = wire.TaskConfig(experiment.model_dump_json(), 0, 0.0, "", str(folder / "clients"), task=SYNTHESIZE)
    clients = [Client(client, runtime, order, wire.config_content(order)) for client in range(experiment.clients)]
    task, dataset = runtime.tasks[SYNTHESIZE], job_of(experiment).dataset
    assert isinstance(task, Synthesize)
    answers = task.run_together(clients)
    shape, classes = dataset.input_shape, dataset.num_classes
    return [wire.read_synthetic(one, shape, classes, 10_000) for one in answers if isinstance(one, wire.RecordDict)]


def _made(folder: Path, experiment: Experiment) -> Pool:
    folder.mkdir(exist_ok=True)
    store(folder, _answers(experiment, folder), job_of(experiment), 1.0)
    return load(folder, job_of(experiment), reused=False)


def _put(key: str, value: Any) -> Change:
    def change(said: dict[str, Any]) -> dict[str, Any]:
        return {**said, key: value}

    return change


def _fact(key: str, value: Any) -> Change:
    def change(said: dict[str, Any]) -> dict[str, Any]:
        return {**said, "facts": {**said["facts"], key: value}}

    return change


LIES: dict[str, Change] = {
    "a class that does not exist": lambda said: {**said, "counts": [*said["counts"], 1]},
    "a class too few": lambda said: {**said, "counts": said["counts"][:-1]},
    "a negative count": lambda said: {**said, "counts": [-1, said["counts"][0] + 1, *said["counts"][1:]]},
    "counts that are no numbers": _put("counts", ["1"] * 10),
    "counts that are truth values": lambda said: {**said, "counts": [bool(count) for count in said["counts"]]},
    "counts of another sum": lambda said: {**said, "counts": [said["counts"][0] + 1, *said["counts"][1:]]},
    "an enormous count": lambda said: {**said, "counts": [2**62, *said["counts"][1:]]},
    "no counts": lambda said: {key: value for key, value in said.items() if key != "counts"},
    "an unknown key": _put("more", 1),
    "that its ledger is here": _put("here", True),  # noqa: FBT003
    "a reason of two lines": _put("refused", "a\nb"),
    "an endless reason": _put("refused", "a" * 100_000),
    "records that cost nothing": lambda said: {**said, "facts": {}, "receipt": None},
    "no receipt": _put("receipt", None),
    "a receipt of something else": _put("receipt", {"ledger": 1}),
    "labels that cost nothing": _fact("labels_epsilon", 0.0),
    "labels of another event": _fact("labels", {"kind": "bounded-range", "epsilon": 0.0}),
    "an unknown event": _fact("generator", {"kind": "magic"}),
    "an event under another adjacency": _fact(
        "generator", {"kind": "fixed-size", "cohort": 1, "population": 2, "noise_multiplier": 1.0}
    ),
    "no steps": _fact("generator_steps", 0),
    "a number of steps that is none": _fact("generator_steps", 1.5),
    "endlessly many steps": _fact("generator_steps", 10**30),
    "a list": lambda said: [said],
    "a number": lambda said: 1,
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    folder = tmp_path_factory.mktemp("honest")
    before = os.environ.get("FL_SIM_LEDGERS")
    os.environ["FL_SIM_LEDGERS"] = str(folder / "ledgers")
    try:
        return _answers(_order(), folder)
    finally:
        os.environ.pop("FL_SIM_LEDGERS")
        if before is not None:
            os.environ["FL_SIM_LEDGERS"] = before


def _refused(answers: list[Answer], folder: Path, client: int = 1) -> str:
    with pytest.raises(RunError) as caught:
        store(folder, answers, job_of(_order()), 1.0)
    assert str(caught.value).startswith(f"client {client} sent no synthetic records that can be used: ")
    assert "\n" not in str(caught.value)
    assert not list(folder.iterdir())
    return str(caught.value)


@pytest.mark.parametrize("lie", LIES)
def test_a_client_that_says_what_cannot_be_is_named_and_nothing_is_kept(
    tmp_path: Path, honest: list[Answer], lie: str
) -> None:
    records, text = honest[1]
    _refused([honest[0], (records, json.dumps(LIES[lie](json.loads(text))))], tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", "[" * 100_000, "9" * 5000, '{"counts": "' + "x" * 10**6, "a secret record"]
)
def test_what_is_not_json_is_named_without_quoting_it(tmp_path: Path, honest: list[Answer], text: str) -> None:
    assert "secret" not in _refused([honest[0], (honest[1][0], text)], tmp_path)


def test_records_of_another_shape_or_beyond_their_range_are_refused(tmp_path: Path, honest: list[Answer]) -> None:
    records, text = honest[0]
    broken = [records[:-1], records.flatten(1), records[:, :, :-1], records * 3, records + torch.nan, records / 0]
    for one in broken:
        _refused([(one, text), honest[1]], tmp_path, client=0)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5).map(str))
@hypothesis_settings(max_examples=60)
def test_no_answer_and_no_pool_file_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, honest: list[Answer], content: bytes | str
) -> None:
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    folder = tmp_path_factory.mktemp("pool")
    _refused([honest[0], (honest[1][0], text)], folder)
    (folder / FACTS).write_text(text)
    with pytest.raises(UserError, match="is damaged: delete that folder"):
        load(folder, job_of(_order()), reused=True)


def test_a_damaged_pool_is_refused_in_one_sentence_whichever_byte_is_wrong(tmp_path: Path) -> None:
    _made(tmp_path / "pool", _order())
    names = [FACTS, next(path.name for path in (tmp_path / "pool").glob("synthetic-*"))]
    whole = {name: (tmp_path / "pool" / name).read_bytes() for name in names}
    for name, content in whole.items():
        cases = [b"", b"\0" * len(content), content[:-1], content[: len(content) // 2], content + b" x", content * 3]
        cases += [
            content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]
            for place in range(0, len(content), 997)
        ]
        for case in cases:
            (tmp_path / "pool" / name).write_bytes(case)
            with pytest.raises(
                UserError, match="is damaged: delete that folder; the pool is then made again"
            ) as caught:
                load(tmp_path / "pool", job_of(_order()), reused=True)
            assert "\n" not in str(caught.value)
        (tmp_path / "pool" / name).unlink()
        (tmp_path / "pool" / name).symlink_to("/dev/zero")
        with pytest.raises(UserError, match="missing or far too large"):
            load(tmp_path / "pool", job_of(_order()), reused=True)
        (tmp_path / "pool" / name).unlink()
        (tmp_path / "pool" / name).write_bytes(content)
    assert load(tmp_path / "pool", job_of(_order()), reused=True).reused


@pytest.mark.parametrize("words", [1, None, ["native"], "a\nb", "x" * 1001])
def test_who_trained_is_told_in_a_few_words_or_the_pool_is_damaged(tmp_path: Path, words: Any) -> None:
    made = _made(tmp_path / "pool", _order())
    facts = json.loads((tmp_path / "pool" / FACTS).read_text())
    (tmp_path / "pool" / FACTS).write_text(json.dumps({**facts, "trainer": words}))
    with pytest.raises(UserError, match="is damaged"):
        load(tmp_path / "pool", job_of(_order()), reused=True)
    del facts["trainer"]  # as earlier versions wrote it
    (tmp_path / "pool" / FACTS).write_text(json.dumps(facts))
    assert load(tmp_path / "pool", job_of(_order()), reused=True).parts == made.parts


def _edited(folder: Path, change: Change) -> None:
    facts = json.loads((folder / FACTS).read_text())
    facts["clients"][1] = change(facts["clients"][1])
    (folder / FACTS).write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "change",
    [
        _fact("generator", {"kind": "gaussian", "noise_multiplier": 50.0}),
        lambda said: {**said, "facts": {}, "receipt": None, "counts": said["counts"]},
        _fact("labels_epsilon", 0.1),
    ],
)
def test_a_pool_file_that_tells_a_smaller_cost_than_the_ledger_is_not_believed(tmp_path: Path, change: Change) -> None:
    _made(tmp_path / "pool", _order())
    _edited(tmp_path / "pool", change)
    with pytest.raises(UserError, match="is damaged"):
        load(tmp_path / "pool", job_of(_order()), reused=True)


def test_a_pool_whose_ledger_is_gone_or_shorter_is_refused_with_both_ways_on(tmp_path: Path) -> None:
    _made(tmp_path / "pool", _order())
    ledger = ledger_path(job_of(_order()), 1)
    whole = ledger.read_bytes()
    for broken in (None, whole[: whole.rindex(b'{"release')]):
        ledger.unlink() if broken is None else ledger.write_bytes(broken)
        with pytest.raises(RunError, match=r"client-1\.jsonl .*client 1's part of the pool.*delete .*charged again"):
            load(tmp_path / "pool", job_of(_order()), reused=True)
    ledger.write_bytes(whole)
    load(tmp_path / "pool", job_of(_order()), reused=True)


def test_clients_elsewhere_keep_their_own_ledgers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("FL_SIM_LEDGERS", str(tmp_path / "client's own"))
        answers = _answers(_order(), tmp_path)
    store(tmp_path, answers, job_of(_order()), 1.0)
    pool = load(tmp_path, job_of(_order()), reused=True)
    assert not any(part.here for part in pool.parts)
    said = statement(pool, _order())
    assert said["epsilon"] > 0
    assert said["epsilon_together"] is None
    assert "not known here: a client's ledger is with the client" in str(said["guarantee"])


def test_deleted_pools_other_settings_and_other_seeds_stay_on_the_bill(tmp_path: Path) -> None:
    first = statement(_made(tmp_path / "pool", _order()), _order())
    assert first["shares_together"] == 1
    assert first["epsilon_together"] == first["epsilon"]
    shutil.rmtree(tmp_path / "pool")
    orders = [_order(), _order("preprocess.epsilon=5"), _order("seed=1"), _order("clients=3")]
    said = [statement(_made(tmp_path / str(number), order), order) for number, order in enumerate(orders)]
    assert [one["shares_together"] for one in said] == [2, 3, 4, 5]
    assert "The clients' ledgers hold up to 5 releases about the same records" in str(said[-1]["guarantee"])
    assert "if no release was chosen by the result of an earlier one" in str(said[-1]["guarantee"])
    assert said[-1]["epsilon"] == first["epsilon"]
    # Here all clients of an order pay the same, so that the joint bound is known exactly.
    counts: dict[Any, int] = {}
    for number, order in [(0, orders[0]), *enumerate(orders)]:
        facts = load(tmp_path / str(number), job_of(order), reused=True).parts[0].facts
        for event in (from_json(facts["labels"]), from_json(facts["generator"])):
            counts[event] = counts.get(event, 0) + 1
    assert said[-1]["epsilon_together"] == pytest.approx(epsilon_of_counts(counts, 1e-5), rel=1e-9)
    assert said[-1]["epsilon_together"] > 1.5 * first["epsilon"]


def test_a_run_that_releases_nothing_still_says_what_was_released_before(tmp_path: Path) -> None:
    first = statement(_made(tmp_path / "0", _order()), _order())
    nothing = _order("preprocess.epsilon=2.001")
    said = statement(_made(tmp_path / "1", nothing), nothing)
    assert (said["epsilon"], said["shares_together"]) == (0, 1)
    assert said["epsilon_together"] >= first["epsilon"] * (1 - 1e-9)
    assert "hold up to 1 releases" in str(said["guarantee"])


def test_a_ledger_that_cannot_be_read_makes_the_sum_unknown_and_not_smaller(tmp_path: Path) -> None:
    other = _order("seed=1", "partition=iid")
    _made(tmp_path / "0", other)
    ledger_path(job_of(other), 0).write_text("nonsense\n")
    pool = _made(tmp_path / "1", _order())
    with pytest.raises(RunError):
        joint_cost(job_of(_order()), 1e-5)
    said = statement(pool, _order())
    assert said["epsilon_together"] is None
    assert "joint cost of all releases about the same records is not known here" in str(said["guarantee"])


def test_a_pool_is_named_by_its_content(tmp_path: Path) -> None:
    path = _made(tmp_path / "pool", _order()).path
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:16] in path.name
