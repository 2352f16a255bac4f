"""A private start in whole runs: paid for before it is asked for, asked as a round is, kept, and not paid for again."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from safetensors.torch import load_file

from clients.frequency_sums import FrequencyQuestion, black_frame, question_tensors, shapes_of
from fl_sim.engines import wire
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.params import vector_in
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.events import amplify_fixed_size, amplify_poisson
from fl_sim.simulation.rounds import planned_bill
from fl_sim.simulation.run import Silent, run
from fl_sim.simulation.stage import Run
from fl_sim.stages import private_start
from fl_sim.stages.private_start import MEASURE
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.testing_runs import FakeEngine
from fl_sim.types import Params
from strategies.fedavg import FedAvg
from strategies.global_dp import GlobalDP, releases_beforehand
from strategies.private import open_private_rounds
from strategies.private_start import PrivateStart
from strategies.samplers import Everyone, Sampler

pytestmark = pytest.mark.usefixtures("quick_accounting")

START = {"kind": "private-start", "frequencies": 20, "images": 300, "server_epochs": 2}


def private(noise: str = "seeded", preprocess: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    aggregator = {"kind": "global-dp", "noise": noise, "delta": 1e-3, **changes.pop("aggregator", {})}
    quick = {"model": "logistic", "rounds": 2, "clients": 12, "partition": "iid", "engine": "inprocess"}
    sampler = changes.pop("sampler", "full")
    own = {**START, **(preprocess or {})}
    return experiment_from({**quick, "aggregator": aggregator, "sampler": sampler, "preprocess": own, **changes})


def charges(out: Path) -> list[str]:
    return [json.loads(line)["release"] for line in (out / "ledger.jsonl").read_text().splitlines()[1:]]


ALL = [*(f"before round 1: {number} of 3" for number in (1, 2, 3)), "round 1", "round 2"]


class StopAfter(Silent):
    def finished_round(self, record: RoundRecord) -> None:
        if record.round == 1:
            raise KeyboardInterrupt


def test_a_start_is_paid_for_with_the_rounds_and_told(tmp_path: Path) -> None:
    experiment = private(preprocess={"noise_multiplier": 0.8})
    result = run(experiment, tmp_path / "run")
    assert charges(tmp_path / "run") == ALL
    said = result["privacy"][0]
    events = [dp_event.GaussianDpEvent(0.8), *[dp_event.GaussianDpEvent(1.0)] * 2]
    assert said["epsilon"] == pytest.approx(epsilon(events, 1e-3, accountant="pld"), rel=1e-3)
    assert said["epsilon"] == said["epsilon_realised"]
    assert said["steps_planned"] == 5
    assert "images drawn from these" in said["covers"]
    [payment] = planned_bill(job_of(experiment)).payments or ()
    assert payment.epsilon == said["epsilon"]
    assert result["preprocess"] == {"kind": "private-start", "num_images": 300, "releases": 3}
    assert result["titles"]["preprocess"] == "private start"
    assert read_rounds(tmp_path / "run")[0].epsilon == pytest.approx(epsilon(events[:2], 1e-3), rel=1e-3)


@pytest.mark.parametrize("sampler", ["poisson:0.5", "fixed-size:4"])
def test_its_cohorts_are_sampled_and_charged_as_those_of_rounds(tmp_path: Path, sampler: str) -> None:
    experiment = private(preprocess={"noise_multiplier": 3.0}, sampler=sampler, aggregator={"noise_multiplier": 4.0})
    said = run(experiment, tmp_path / "run")["privacy"][0]

    def amplified(event: dp_event.DpEvent) -> dp_event.DpEvent:
        if sampler.startswith("poisson"):
            return amplify_poisson(event, 0.5)
        return amplify_fixed_size(event, 4, 12)

    aggregator = experiment.aggregator
    assert isinstance(aggregator, GlobalDP)
    events = [one.event() for one in releases_beforehand(experiment.preprocess, aggregator)]
    events += [dp_event.GaussianDpEvent(4.0)] * 2
    assert said["epsilon_rdp"] == pytest.approx(epsilon(list(map(amplified, events)), 1e-3), rel=1e-6)


def test_a_start_teaches_more_than_random_weights(tmp_path: Path) -> None:
    """Loud rounds teach nothing: what the model can do after them, it could do before."""
    loud = {"noise_multiplier": 100.0, "clipping_norm": 1e-3}
    quiet = {"noise_multiplier": 0.05, "images": 2000}
    result = run(private(preprocess=quiet, aggregator=loud, rounds=1), tmp_path / "run")
    assert result["final_accuracy"] > 0.75


def test_seeded_noise_repeats_and_secret_noise_does_not(tmp_path: Path) -> None:
    for name, noise in (("a", "seeded"), ("b", "seeded"), ("c", "secret"), ("d", "secret")):
        run(private(noise, rounds=1), tmp_path / name)
    drawn = {name: load_file(next((tmp_path / name).glob("start-*.safetensors")))["inputs"] for name in "abcd"}
    assert torch.equal(drawn["a"], drawn["b"])
    assert not torch.equal(drawn["c"][:100], drawn["d"][:100])


@pytest.mark.parametrize("noise", ["seeded", "secret"])
def test_a_run_that_goes_on_after_its_start_pays_for_it_once(tmp_path: Path, noise: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(private(noise), tmp_path / "run", observer=StopAfter())
    result = run(private(noise), tmp_path / "run")
    assert charges(tmp_path / "run") == ALL
    assert result["bytes"]["before"] == {"private_start": None}
    if noise == "seeded":
        run(private(noise), tmp_path / "whole")
        whole, broken = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
        assert all(torch.equal(whole[name], broken[name]) for name in whole)


def _stopped_before_round_1(experiment: Experiment, out: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(private_start, where, die)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, out)


def test_a_run_that_stops_within_its_start_is_promised_what_all_of_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = private()
    _stopped_before_round_1(experiment, tmp_path / "run", monkeypatch, "classes_of")
    said = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"][0]
    assert (said["steps"], said["steps_planned"]) == (2, 5)
    assert said["epsilon"] == run(experiment, tmp_path / "whole")["privacy"][0]["epsilon"] > said["epsilon_realised"]


def test_images_that_were_kept_are_not_paid_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, out = private("secret"), tmp_path / "run"
    _stopped_before_round_1(experiment, out, monkeypatch, "start_from")
    kept = {path.name: path.read_bytes() for path in out.glob("start*")}
    run(experiment, out)
    assert charges(out) == ALL
    assert {path.name: path.read_bytes() for path in out.glob("start*")} == kept


@pytest.mark.parametrize(("noise", "paid"), [("secret", [*ALL[:3], *ALL]), ("seeded", ALL)])
def test_a_start_that_was_charged_and_not_kept_is_charged_again_under_other_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: str, paid: list[str]
) -> None:
    experiment, out = private(noise), tmp_path / "run"
    _stopped_before_round_1(experiment, out, monkeypatch, "covariances_of")
    said = run(experiment, out)["privacy"][0]
    assert charges(out) == paid
    once = run(experiment, tmp_path / "once")["privacy"][0]
    assert (said["epsilon"] > once["epsilon"]) is (noise == "secret")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda out: (out / "start.json").write_text("{"), "start.json or its file of images is damaged"),
        (lambda out: next(out.glob("start-*")).write_bytes(b"0"), "start.json or its file of images is damaged"),
        (lambda out: next(out.glob("start-*")).unlink(), "start.json or its file of images is damaged"),
        (lambda out: (out / "ledger.jsonl").unlink(), "put an unchanged copy of it back"),
    ],
    ids=["no JSON", "no tensors", "no images", "no ledger"],
)
def test_a_start_that_is_damaged_or_not_paid_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], words: str
) -> None:
    experiment, out = private("secret"), tmp_path / "run"
    _stopped_before_round_1(experiment, out, monkeypatch, "start_from")
    damage(out)
    with pytest.raises(RunError, match=words):
        run(experiment, out)


def test_a_round_whose_start_alone_is_in_the_ledger_was_not_paid_for(tmp_path: Path) -> None:
    experiment, out = private("secret"), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(experiment, out, observer=StopAfter())
    lines = (out / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (out / "ledger.jsonl").write_bytes(b"".join(lines[:4]))
    (out / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match="holds 3 charges, but 1 rounds were released"):
        run(experiment, out)


def test_a_budget_that_does_not_afford_the_start_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"epsilon=3.6 .*preprocess.noise_multiplier"):
        run(private(aggregator={"epsilon": 3.6}), tmp_path / "run")
    with pytest.raises(UserError, match="epsilon=1 does not afford one round"):
        run(private(aggregator={"epsilon": 1.0}), tmp_path / "run")


def test_records_that_are_no_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="draws images, and these records have shape"):
        run(private(features="scattering"), tmp_path / "run")


SHAPE, CLASSES, SIZE, CLIENTS = (1, 4, 4), 2, 6, 5
TEMPLATE = {name: torch.zeros(like) for name, like in shapes_of(2, CLASSES, SIZE).items()}


def _answering(answers: dict[int, Params]) -> FakeEngine:
    """Clients who answer with what ``answers`` has of them; those it does not have fail."""
    return FakeEngine(CLIENTS, lambda client, _: wire.sums_content(answers[client]))


def _released(
    strategy_of: Callable[..., Any],
    out: Path,
    answers: dict[int, Params],
    sampler: Sampler | None = None,
    seed: int = 0,
) -> torch.Tensor:
    out.mkdir(exist_ok=True)
    sampler = sampler or Everyone()
    strategy = strategy_of(FedAvg(), {"w": torch.zeros(2)}, CLIENTS, sampler, seed=seed)
    strategy.aggregator = GlobalDP(noise="seeded")
    beforehand = releases_beforehand(PrivateStart(noise_multiplier=1.0), strategy.aggregator)
    strategy.wrap(open_private_rounds(strategy.aggregator, sampler, CLIENTS, seed, out, None, beforehand=beforehand))
    question = question_tensors(FrequencyQuestion(2, 10.0, black_frame(SHAPE, np.arange(SIZE))))
    grid, job = _answering(answers), SimpleNamespace(experiment=SimpleNamespace(round_timeout=60.0))
    found = private_start.released(Run(job, strategy, grid, out, None), 2, question, TEMPLATE)
    assert charges(out) == ["before round 1: 2 of 3"]
    assert set(map(wire.task_of, grid.asked)) == {MEASURE}
    assert {wire.read_task_config(message.content).server_round for message in grid.asked} == {
        -1
    }  # no round has its noise
    return vector_in(found, tuple((name, tuple(value.shape)) for name, value in TEMPLATE.items())).double()


def _long(client: int) -> Params:
    draw = torch.Generator().manual_seed(client)
    return {name: 100 * torch.randn(value.shape, generator=draw) for name, value in TEMPLATE.items()}


def test_one_client_moves_the_mean_answer_by_the_clipping_norm_over_the_cohort(tmp_path, strategy_of) -> None:
    everybody = {client: _long(client) for client in range(CLIENTS)}
    whole = _released(strategy_of, tmp_path / "whole", everybody)
    for name, gone in {"fails": None, "no-numbers": {k: v * torch.nan for k, v in _long(3).items()},
                       "other-shape": {**_long(3), "counts": torch.zeros(3)}}.items():  # fmt: skip
        others = {**everybody, 3: gone} if gone else {client: one for client, one in everybody.items() if client != 3}
        without = _released(strategy_of, tmp_path / name, others)
        assert float((whole - without).norm()) == pytest.approx(0.4 / CLIENTS, rel=1e-3)


def test_the_noise_on_an_answer_is_z_times_the_norm_over_the_cohort(tmp_path, strategy_of) -> None:
    nothing = {client: {name: value.clone() for name, value in TEMPLATE.items()} for client in range(CLIENTS)}
    drawn = torch.cat([_released(strategy_of, tmp_path / str(seed), nothing, seed=seed) for seed in range(20)])
    expected = 1 / 0.48**0.5 * 0.4 / CLIENTS
    assert float(drawn.std()) == pytest.approx(expected, rel=0.2)  # 280 numbers: 4.7 sigma of their spread
    assert len(set(drawn.tolist())) == len(drawn)


def test_where_everybody_fails_the_start_stops_after_its_charge(tmp_path, strategy_of) -> None:
    with pytest.raises(RunError, match="no client sent a valid update"):
        _released(strategy_of, tmp_path / "run", {})
    assert charges(tmp_path / "run") == ["before round 1: 2 of 3"]
