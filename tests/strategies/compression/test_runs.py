"""Whole runs whose updates are compressed: they learn, send what they say, and end in the same bits however they go."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fl_sim.errors import Diverged, RunError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.store.run_directory import STATE, RoundRecord, read_rounds
from fl_sim.store.tensors import LAYOUT

KINDS = ("top-k:0.05", "rand-k:0.2", "qsgd:3", "powersgd:2", "signsgd")
D, HEADERS = 650, {"top-k:0.05": 2, "rand-k:0.2": 1, "qsgd:3": 2, "powersgd:2": 1, "signsgd": 2}
"""A logistic model of digits: 64 x 10 and 10."""


def settings(compress: Any, **others: Any) -> Any:
    table = {
        "partition": "dirichlet:0.5", "clients": 5, "model": "logistic", "rounds": 6, "compress": compress, "seed": 2,
        "local": {"epochs": 2, "batch_size": 16, "learning_rate": 0.05}, "engine": {"kind": "inprocess", "workers": 1},
    }  # fmt: skip
    return experiment_from({**table, **others})


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def assert_same(left: Path, right: Path) -> None:
    first, second = weights(left), weights(right)
    assert all(torch.equal(first[name], second[name]) for name in first)
    rounds = [[vars(record) | {"seconds": 0} for record in read_rounds(out)] for out in (left, right)]
    assert rounds[0] == rounds[1]


class Break(Silent):
    def finished_round(self, record: RoundRecord) -> None:
        if record.round == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("compress", KINDS)
def test_a_run_learns_and_reports_the_bytes_of_its_formula(compress: str, tmp_path: Path) -> None:
    result = run(settings(compress), tmp_path)
    assert result["final_accuracy"] > 0.85  # whole updates: 0.94
    numbers, bits = {
        "top-k:0.05": (33, -(-33 * 10 // 8)),
        "rand-k:0.2": (130, 0),
        "qsgd:3": (2, 8 * -(-D // 22)),
        "powersgd:2": (2 * (10 + 64) + 10, 0),
        "signsgd": (2, -(-D // 8)),
    }[compress]
    up = 128 * HEADERS[compress] + 4 * numbers + bits
    rounds = read_rounds(tmp_path)
    assert {record.bytes_up for record in rounds} == {5 * up}
    assert {record.bytes_down for record in rounds} == {5 * (128 + 4 * D)}
    assert result["bytes"]["each_client_in_a_round"]["up"] == up
    estimate = procedure_of(job_of(settings(compress), None)).traffic()["rounds"]
    assert estimate.up == 6 * 5 * up


@pytest.mark.parametrize("compress", KINDS)
def test_workers_and_a_resume_change_no_bits(compress: str, tmp_path: Path) -> None:
    run(settings(compress), tmp_path / "whole")
    run(settings(compress, engine={"kind": "inprocess", "workers": 3}), tmp_path / "three")
    assert_same(tmp_path / "whole", tmp_path / "three")
    with pytest.raises(KeyboardInterrupt):
        run(settings(compress), tmp_path / "resumed", observer=Break())
    run(settings(compress), tmp_path / "resumed")
    assert_same(tmp_path / "whole", tmp_path / "resumed")


def test_a_finished_run_goes_on_to_more_rounds_with_what_its_clients_held_back(tmp_path: Path) -> None:
    run(settings("top-k", rounds=9), tmp_path / "whole")
    run(settings("top-k", rounds=4), tmp_path / "longer")
    run(settings("top-k", rounds=9), tmp_path / "longer")
    assert_same(tmp_path / "whole", tmp_path / "longer")


@pytest.mark.parametrize("compress", KINDS)
@pytest.mark.parametrize("algorithm", ["fedavg", "moon"])
def test_one_client_and_clients_without_records_are_no_exception(compress: str, algorithm: str, tmp_path: Path) -> None:
    of_one = settings(compress, algorithm=algorithm, rounds=2, clients=1, partition="iid")
    split = {"kind": "dirichlet", "beta": 0.02, "min_size": 0}
    of_many = settings(compress, algorithm=algorithm, rounds=2, clients=25, partition=split)
    assert min(map(len, job_of(of_many, None).shards)) == 0
    for name, experiment in (("one", of_one), ("many", of_many)):
        run(experiment, tmp_path / name)
        assert len(read_rounds(tmp_path / name)) == 2


def test_scaffolds_control_variates_are_compressed_with_an_error_of_their_own(tmp_path: Path) -> None:
    result = run(settings("top-k:0.1", algorithm="scaffold", rounds=10), tmp_path)
    assert result["final_accuracy"] > 0.85
    layout = json.loads((tmp_path / STATE / LAYOUT).read_text())
    assert [name for name, _ in layout["groups"]] == [
        "control",
        "held-back/delta/error",
        "held-back/control_delta/error",
    ]
    assert read_rounds(tmp_path)[0].bytes_up == 5 * 2 * (2 * 128 + 65 * 4 + -(-65 * 10 // 8))


@pytest.mark.parametrize(
    ("algorithm", "whole"),
    [("fednova", 128 + 4), ("feddisco", 128 + 4), ("fedproto", 128 + 4 * (10 * 64 + 10)), ("fedprox", 0)],
)
def test_what_has_not_the_models_shapes_travels_whole(algorithm: str, whole: int, tmp_path: Path) -> None:
    run(settings("signsgd", algorithm=algorithm, rounds=2), tmp_path)
    assert read_rounds(tmp_path)[0].bytes_up == 5 * (2 * 128 + 2 * 4 + -(-D // 8) + whole)


def test_training_that_diverges_is_told_as_it_is_of_whole_updates(tmp_path: Path) -> None:
    for compress in ("none", *KINDS):
        with pytest.raises(Diverged, match=r"(?s)client \d in round \d .*(loss|not finite).*learning_rate"):
            run(settings(compress, local={"learning_rate": 1e30, "epochs": 2}), tmp_path / compress)


def test_a_way_of_ones_own_is_taken_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halves.py").write_text(
        "from typing import ClassVar\n"
        "from fl_sim.packed import Packed, Size\n"
        "from fl_sim.params import FlatParams, num_in\n"
        "from fl_sim.settings import Settings\n"
        "class Half(Settings):\n"
        "    keeps_error: ClassVar[bool] = False\n"
        "    def size(self, layout):\n        return Size(0, 2 * num_in(layout))\n"
        "    def pack(self, update, held, coins):\n"
        "        return Packed.of(update.flat[:0], update.flat.half().numpy().view('u1')), {}\n"
        "    def unpack(self, packed, layout, coins):\n"
        "        import torch\n"
        "        return FlatParams(torch.from_numpy(packed.bits.view('f2').astype('f4')), layout)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = run(settings("halves:Half"), tmp_path / "run")
    assert result["final_accuracy"] > 0.9
    assert read_rounds(tmp_path / "run")[0].bytes_up == 5 * (128 + 2 * D)
    assert 'kind = "halves:Half"' in (tmp_path / "run" / "config.toml").read_text()


def test_without_compression_files_are_as_they_were(tmp_path: Path) -> None:
    run(settings("none", rounds=1), tmp_path)
    assert "compress" not in (tmp_path / "config.toml").read_text()
    assert read_rounds(tmp_path)[0].bytes_up == 5 * (128 + 4 * D)


def test_what_a_client_sends_wrongly_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strategies.compression.error_feedback import TopK  # noqa: PLC0415

    packed_well = TopK.encode

    def packed_ill(self: Any, update: Any, coins: Any) -> Any:
        packed = packed_well(self, update, coins)
        packed.bits[:] = 0
        return packed

    monkeypatch.setattr(TopK, "encode", packed_ill)
    monkeypatch.setattr("strategies.compression.error_feedback.subtract", lambda left, _: left)
    monkeypatch.setattr(TopK, "pack", lambda self, update, held, coins: (self.encode(update, coins), {"error": update}))
    with pytest.raises(RunError, match="client 0 in round 1 sent positions that are not in ascending order"):
        run(settings("top-k"), tmp_path)
