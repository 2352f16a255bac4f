"""The comparison of two versions has a case for every kind of every open setting, and names what differs."""

from operator import attrgetter

import pytest

from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.groups import Local
from fl_sim.settings import OneOf, kinds_of


@pytest.fixture
def same_bits(load_benchmark):
    return load_benchmark("same_bits")


def test_all_open_settings_but_the_engine_are_compared(same_bits):
    fields = {**Experiment.model_fields, **{f"local.{name}": field for name, field in Local.model_fields.items()}}
    is_open = {name for name, field in fields.items() if any(isinstance(one, OneOf) for one in field.metadata)}
    assert set(same_bits.OPEN) == is_open - {
        "engine",
        "local.schedule",
    }  # --ray is for engines; schedules have no group


def test_every_kind_makes_an_experiment_and_is_resumed(same_bits, tmp_path):
    same_bits.write_inputs(tmp_path)
    cases = {case.name: case for case in same_bits.cases()}
    for setting in same_bits.OPEN:
        for kind in kinds_of(setting):
            plain, resumed = cases[f"{setting} {kind}"], cases[f"{setting} {kind}, resumed"]
            given = [one.format(inputs=tmp_path) for one in plain.settings]
            assert attrgetter(setting)(experiment_from(with_overrides({}, given))).kind == kind
            assert resumed.settings == plain.settings
            assert 0 < resumed.stop_after < 3
    assert len(cases) >= 150


def test_names_of_settings_that_need_more_are_names_of_kinds(same_bits):
    known = {(setting, kind) for setting in same_bits.OPEN for kind in kinds_of(setting)}
    assert set(same_bits.KINDS) <= known


def test_what_differs_is_named(same_bits):
    left = dict.fromkeys(("model", "rounds", "result", "pool", "ledger"), "a")
    assert same_bits.verdict(left, left) == "same"
    assert same_bits.verdict(left, {**left, "rounds": "b", "ledger": "b"}) == "rounds, ledger"
    assert same_bits.verdict({"error": "no"}, {"error": "no"}) == "refused"
    assert same_bits.verdict({"error": "no"}, left) == "old: no | new: ran"
    assert same_bits.verdict({"error": "no"}, {"error": "never"}) == "old: no | new: never"


def test_digests_leave_out_seconds_and_see_everything_else(same_bits, tmp_path):
    def digests(seconds: float, accuracy: float) -> dict[str, str]:
        out = tmp_path / f"{seconds}-{accuracy}" / "out"
        out.mkdir(parents=True)
        (out / "model.safetensors").write_bytes(b"weights")
        (out / "rounds.jsonl").write_text(f'{{"round": 1, "seconds": {seconds}}}\n')
        (out / "result.json").write_text(f'{{"final_accuracy": {accuracy}, "seconds": {{"train": {seconds}}}}}')
        return same_bits.digests(out.parent)

    assert digests(1.0, 0.5) == digests(2.0, 0.5)
    assert same_bits.verdict(digests(3.0, 0.5), digests(3.0, 0.25)) == "result"
