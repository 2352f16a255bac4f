"""Global DP in whole runs: pay before release, stop in time, let nothing else out, forget no charge."""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dp_accounting import dp_event
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from safetensors.torch import load_file

from fl_sim.__main__ import main
from fl_sim.engines import wire
from fl_sim.engines.batching import CLIENT_RAISED, failure
from fl_sim.engines.grid import InProcessGrid
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.events import amplify_fixed_size, amplify_poisson
from fl_sim.privacy.terms import Adjacency
from fl_sim.simulation.engine_choice import client_app
from fl_sim.simulation.run import Silent, run
from fl_sim.store import run_directory
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.types import ClientUpdate
from strategies.algorithm import payload_template
from strategies.fedavg import FedAvg
from strategies.fednova import FedNova
from strategies.global_dp import GlobalDP
from strategies.private import open_private_rounds
from strategies.samplers import Everyone, FixedSize, Poisson
from strategies.scaffold import Scaffold

pytestmark = pytest.mark.usefixtures("quick_accounting")

QUICK = {"model": "logistic", "rounds": 4, "clients": 12, "partition": "iid", "engine": "inprocess"}


def private(**changes: object) -> Experiment:
    aggregator = {"kind": "global-dp", "noise": "seeded", "delta": 1e-3, **changes.pop("aggregator", {})}  # type: ignore[dict-item]
    return experiment_from({**QUICK, "aggregator": aggregator, **changes})


class StopAfter(Silent):
    def __init__(self, server_round: int) -> None:
        self._last = server_round

    def finished_round(self, record: RoundRecord) -> None:
        if record.round == self._last:
            raise KeyboardInterrupt


class Watching(Silent):
    def __init__(self) -> None:
        self.heard: list[int] = []

    def replied(self, replies: int) -> None:
        self.heard.append(replies)


def charges(out: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()[1:]]
    return [{key: value for key, value in line.items() if key != "chain"} for line in lines]  # every log has its own id


def test_poisson_is_the_default_of_a_private_run_and_nobody_else() -> None:
    assert private().sampler == Poisson(sampling_rate=0.1)
    assert private(sampler={"sampling_rate": 0.3}).sampler == Poisson(sampling_rate=0.3)
    assert private(sampler="full").sampler == Everyone()
    assert experiment_from({}).sampler == Everyone()


def test_every_round_is_charged_what_its_mechanism_costs(tmp_path: Path) -> None:
    result = run(private(sampler="poisson:0.4"), tmp_path / "run")
    event = amplify_poisson(dp_event.GaussianDpEvent(1.0), 0.4)
    wanted = [epsilon([event] * rounds, 1e-3) for rounds in (1, 2, 3, 4)]
    assert [record.epsilon for record in read_rounds(tmp_path / "run")] == pytest.approx(wanted, rel=1e-9)
    said = result["privacy"][0]
    assert said["epsilon_rdp"] == pytest.approx(wanted[-1], rel=1e-9)
    assert said["epsilon"] == said["epsilon_realised"] == epsilon([event] * 4, 1e-3, accountant="pld") < wanted[-1]
    assert [charge["release"] for charge in charges(tmp_path / "run")] == [f"round {r}" for r in (1, 2, 3, 4)]


def test_a_run_that_is_stopped_is_promised_what_all_its_rounds_cost(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(private(sampler="poisson:0.4"), tmp_path / "run", observer=StopAfter(2))
    said = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"][0]
    event = amplify_poisson(dp_event.GaussianDpEvent(1.0), 0.4)
    assert said["epsilon"] == epsilon([event] * 4, 1e-3, accountant="pld")
    assert said["epsilon_realised"] == epsilon([event] * 2, 1e-3, accountant="pld")
    assert "no guarantee" in said["guarantee"]


def test_a_fixed_cohort_is_charged_under_replacing_a_client(tmp_path: Path) -> None:
    result = run(private(sampler="fixed-size:3", rounds=2), tmp_path / "run")
    event = amplify_fixed_size(dp_event.GaussianDpEvent(1.0), 3, 12)
    wanted = epsilon([event] * 2, 1e-3, accountant="pld")
    assert result["privacy"][0]["epsilon"] == pytest.approx(wanted, rel=1e-9)
    assert result["privacy"][0]["adjacency"] == str(Adjacency.REPLACE_ONE)


def test_the_run_stops_before_the_round_that_would_overrun_its_budget(tmp_path: Path) -> None:
    result = run(private(aggregator={"epsilon": 6.0}, sampler="poisson:0.4", rounds=50), tmp_path / "run")
    event = amplify_poisson(dp_event.GaussianDpEvent(1.0), 0.4)
    spent = len(read_rounds(tmp_path / "run"))
    assert 0 < spent < 50
    assert epsilon([event] * spent, 1e-3) <= 6.0 < epsilon([event] * (spent + 1), 1e-3)
    assert result["status"] == "finished"
    assert f"budget spent after {spent} rounds" in result["stopped"]


def test_the_round_after_which_the_budget_is_spent_is_evaluated(tmp_path: Path) -> None:
    slow = private(aggregator={"epsilon": 6.0}, sampler="poisson:0.4", rounds=50, evaluate_every=40)
    result = run(slow, tmp_path / "run")
    assert result["rounds"] < 40
    assert [record.test_accuracy is None for record in read_rounds(tmp_path / "run")][-2:] == [True, False]
    assert result["final_accuracy"] is not None


def test_nothing_about_single_clients_is_written_or_shown(tmp_path: Path) -> None:
    watching = Watching()
    run(private(sampler="poisson:0.5"), tmp_path / "run", observer=watching)
    assert not watching.heard
    written = {path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.suffix != ".safetensors"}
    assert sorted(written) == ["config.toml", "ledger.jsonl", "result.json", "rounds.jsonl"]
    for record in read_rounds(tmp_path / "run"):
        assert record.train_loss is None
        assert record.cohort is None
        assert record.seconds is None
    told = json.loads(written["result.json"])
    assert not {"train_loss", "cohort", "norms", "losses", "sizes"} & told.keys()
    assert set(told["seconds"].values()) <= {10.0, 60.0, 600.0}
    statement = told["privacy"][0]
    assert {"unit", "epsilon", "delta", "adjacency", "sampling", "covers", "does_not_cover"} <= statement.keys()
    assert statement["unit"] == "client"
    assert "simulation" in statement["does_not_cover"]  # the noise was seeded


@pytest.mark.parametrize("kind", ["global-dp", "da-fl", "pate"])
def test_the_screen_tells_nothing_about_time_or_single_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    settings = {
        "global-dp": ["aggregator=global-dp", "clients=12", "rounds=40"],
        "da-fl": ["preprocess=da-fl", "preprocess.generator=mean-embedding", "preprocess.generator.frequencies=8",
                  "clients=3", "partition=iid", "rounds=40"],
        "pate": ["algorithm=pate", "clients=4", "algorithm.queries=20", "algorithm.student.steps=20", "rounds=5"],
    }[kind]  # fmt: skip
    monkeypatch.setattr(
        sys, "argv", ["fl-sim", "run", "model=logistic", "engine=inprocess", *settings, "--out", str(tmp_path / "run")]
    )
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    shown = capsys.readouterr()
    assert not re.search(r"s/round|clients are done|clients in|\d\.\d+ s\b|cohort", shown.err + shown.out)
    assert re.search(r"at most (10|60|600) s on engine", shown.out)
    if kind != "pate":  # which rounds are shown is fixed beforehand, not by the clock
        assert [int(number) for number in re.findall(r"round (\d+)/40", shown.err)] == [*range(2, 41, 2)]
    assert all(record.seconds is None for record in read_rounds(tmp_path / "run"))


def test_what_clients_keep_in_an_interrupted_private_run_is_told_closed_to_others_and_gone_in_the_end(
    tmp_path: Path,
) -> None:
    class Told(StopAfter):
        said = ""

        def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
            self.said = engine

    told, out, before = Told(2), tmp_path / "run", os.umask(0)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(private(algorithm="scaffold"), out, observer=told)
    finally:
        os.umask(before)
    assert f"client states are private: only you can read {out / 'clients'}" in told.said
    modes = {path.name: path.stat().st_mode & 0o777 for path in (out / "clients", *(out / "clients").iterdir())}
    assert modes == {"clients": 0o700, "states.bin": 0o600, "layout.json": 0o600, "seal.json": 0o600}
    run(private(algorithm="scaffold"), out)
    assert not (out / "clients").exists()


def _cut(ledger: Path, lines: int) -> None:
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:lines]))


@pytest.mark.parametrize("checkpoint", ["with checkpoint", "without"])
@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: _cut(path, 1),
        lambda path: _cut(path, 2),
        lambda path: path.write_bytes(path.read_bytes().replace(b"round 2", b"round 3")),
        lambda path: path.write_bytes((path.parents[1] / "other" / "ledger.jsonl").read_bytes()),
    ],
    ids=["deleted", "empty", "no charges", "one lost", "edited", "another run's"],
)
def test_a_run_goes_on_with_the_ledger_that_paid_for_it_alone(tmp_path: Path, damage, checkpoint: str) -> None:
    """With a fresh ledger a resumed run claimed 4.85 for a truth of 6.34."""
    out, experiment = tmp_path / "run", private(aggregator={"noise": "secret"})
    for name in ("run", "other"):
        with pytest.raises(KeyboardInterrupt):
            run(experiment, tmp_path / name, observer=StopAfter(2))
    if checkpoint == "without":
        (out / "checkpoint.safetensors").unlink()
        _cut(tmp_path / "other" / "ledger.jsonl", 2)
    damage(out / "ledger.jsonl")
    with pytest.raises(RunError, match=r"ledger\.jsonl .*unchanged copy.* or start a new run"):
        run(experiment, out)
    with pytest.raises(RunError, match=r"ledger\.jsonl"):  # the first refusal has not removed the proof
        run(experiment, out)


def test_a_ledger_that_is_no_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    out, experiment = tmp_path / "run", private()
    with pytest.raises(KeyboardInterrupt):
        run(experiment, out, observer=StopAfter(1))
    (out / "ledger.jsonl").unlink()
    (out / "ledger.jsonl").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"ledger\.jsonl is not a file that this program wrote"):
        run(experiment, out)


def test_a_round_that_was_seen_is_paid_for_though_it_has_no_checkpoint(tmp_path: Path) -> None:
    out, experiment = tmp_path / "run", private(aggregator={"noise": "secret"})
    with pytest.raises(KeyboardInterrupt):
        run(experiment, out, observer=StopAfter(1))
    before = (out / "checkpoint.safetensors").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run(experiment, out, observer=StopAfter(2))
    (out / "checkpoint.safetensors").write_bytes(before)
    again = tmp_path / "again"
    shutil.copytree(out, again)
    _cut(again / "ledger.jsonl", 2)
    with pytest.raises(RunError, match="holds 1 charges, but 2 rounds were released"):
        run(experiment, again)
    run(experiment, out)
    assert [charge["release"] for charge in charges(out)] == [f"round {r}" for r in (1, 2, 2, 3, 4)]


def test_a_charge_of_a_round_that_never_ended_stays_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, experiment = tmp_path / "run", private(aggregator={"noise": "secret"}, rounds=2)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run_directory, "append_round", die)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, out)
    result = run(experiment, out)["privacy"][0]
    assert [charge["release"] for charge in charges(out)] == ["round 1", "round 1", "round 2"]
    whole = run(experiment, tmp_path / "whole")["privacy"][0]
    assert result["epsilon"] >= result["epsilon_realised"] > whole["epsilon_realised"]


def test_secret_noise_differs_between_runs_and_seeded_noise_does_not(tmp_path: Path) -> None:
    for name, noise in (("a", "secret"), ("b", "secret"), ("c", "seeded"), ("d", "seeded")):
        run(private(aggregator={"noise": noise}, rounds=1, sampler="full"), tmp_path / name)
    models = {name: load_file(tmp_path / name / "model.safetensors") for name in "abcd"}
    assert not torch.equal(models["a"]["1.weight"], models["b"]["1.weight"])
    assert torch.equal(models["c"]["1.weight"], models["d"]["1.weight"])


def test_the_noise_in_the_model_is_z_times_s_over_the_expected_cohort(tmp_path: Path) -> None:
    quiet = {"noise_multiplier": 0.0, "clipping_norm": 2.0}
    loud = {"noise_multiplier": 3.0, "clipping_norm": 2.0}
    for name, aggregator in (("quiet", quiet), ("loud", loud)):
        result = run(private(aggregator=aggregator, rounds=1, sampler="full"), tmp_path / name)
    without, with_noise = (load_file(tmp_path / name / "model.safetensors") for name in ("quiet", "loud"))
    noise = torch.cat([(with_noise[name] - without[name]).reshape(-1) for name in without])
    assert float(noise.std()) == pytest.approx(3.0 * 2.0 / 12, rel=0.15)  # 650 numbers: 5 sigma of their spread
    assert result["privacy"][0]["epsilon"] is not None


def test_clipping_alone_promises_nothing(tmp_path: Path) -> None:
    result = run(private(aggregator={"noise_multiplier": 0.0}, rounds=1), tmp_path / "run")
    assert result["privacy"][0]["epsilon"] is None
    assert read_rounds(tmp_path / "run")[0].epsilon is None


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "scaffold", "fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_every_algorithm_that_only_sends_updates_runs_under_privacy(tmp_path: Path, algorithm: str) -> None:
    result = run(private(algorithm=algorithm, rounds=2), tmp_path / "run")
    assert result["privacy"][0]["steps"] == 2


def test_fednova_needs_a_public_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tau_eff"):
        private(algorithm="fednova")
    run(private(algorithm={"kind": "fednova", "tau_eff": 2.0}, rounds=1), tmp_path / "run")


@pytest.mark.parametrize("algorithm", ["fedmix", "naivemix", "centralized"])
def test_what_cannot_be_private_is_refused_with_the_reason(algorithm: str) -> None:
    with pytest.raises(UserError, match=algorithm):
        private(algorithm=algorithm, sampler="full")


def test_a_run_that_goes_on_with_seeded_noise_ends_in_the_same_bits_and_pays_once(tmp_path: Path) -> None:
    experiment = private(aggregator={"adaptive_clipping": {"target_quantile": 0.5}}, algorithm="scaffold")
    run(experiment, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "broken", observer=StopAfter(2))
    run(experiment, tmp_path / "broken")
    assert charges(tmp_path / "broken") == charges(tmp_path / "whole")
    whole, broken = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def test_a_private_run_that_goes_on_took_at_most_the_time_since_it_began(tmp_path: Path) -> None:
    experiment = private(rounds=2)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", observer=StopAfter(1))
    hour_ago = time.time() - 3500
    os.utime(tmp_path / "run" / "config.toml", (hour_ago, hour_ago))
    assert run(experiment, tmp_path / "run")["seconds"]["total"] == 3600.0
    assert run(experiment, tmp_path / "undisturbed")["seconds"]["total"] <= 60.0


def test_a_finished_private_run_is_not_released_again(tmp_path: Path) -> None:
    experiment = private(aggregator={"noise": "secret"}, rounds=2)
    first = run(experiment, tmp_path / "run")
    assert run(experiment, tmp_path / "run") == first
    assert len(charges(tmp_path / "run")) == 2


def test_running_again_with_new_noise_is_a_second_release_and_paid_for(tmp_path: Path) -> None:
    experiment = private(aggregator={"noise": "secret"}, rounds=2)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", observer=StopAfter(1))
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    again = run(experiment, tmp_path / "run")
    assert [charge["release"] for charge in charges(tmp_path / "run")] == ["round 1", "round 1", "round 2"]
    once = run(experiment, tmp_path / "once")
    assert again["privacy"][0]["epsilon"] > once["privacy"][0]["epsilon"]


class Hostile(ClientApp):
    """Clients of ``broken`` raise with a record of theirs in the message; the others train as always."""

    def __init__(self, broken: Callable[[int], bool]) -> None:
        super().__init__()
        self._broken, self._real = broken, client_app()

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == wire.TRAIN and self._broken(int(context.node_config["partition-id"])):
            raise ValueError("bad record [0.25, 0.5]")
        return self._real(message, context)


def test_one_client_that_fails_stops_no_private_run_even_where_it_is_asked_alone(tmp_path: Path) -> None:
    grid = InProcessGrid(Hostile(lambda client: client == 0), 2)
    result = run(private(clients=2, sampler="fixed-size:1", rounds=8), tmp_path / "run", grid=grid)
    assert result["status"] == "finished"
    assert len(charges(tmp_path / "run")) == 8
    assert not (tmp_path / "run" / "private-errors.log").exists()


def test_where_all_clients_fail_the_run_stops_and_what_they_said_is_for_the_owner_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(RunError, match="no client sent a valid update") as stopped:
        run(private(sampler="full"), out, grid=InProcessGrid(Hostile(lambda client: True), 12))
    assert len(charges(out)) == 1  # the charge stays
    kept = out / "private-errors.log"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "client 11 failed: ValueError: bad record [0.25, 0.5]" in kept.read_text()
    shown = [str(stopped.value), *(path.read_text() for path in out.iterdir() if path.suffix in {".json", ".jsonl"})]
    assert not any("0.25" in text or "client 11" in text for text in shown)
    assert json.loads((out / "result.json").read_text())["error"] == str(stopped.value)


def test_a_client_that_fails_counts_as_zeros_over_the_expected_cohort(tmp_path, strategy_of, reply_of) -> None:
    strategy = strategy_of(FedAvg(), {"w": torch.zeros(2)}, 2)
    strategy.aggregator = GlobalDP(noise_multiplier=0.0, clipping_norm=10.0, noise="seeded")
    strategy.wrap(open_private_rounds(strategy.aggregator, Everyone(), 2, 0, tmp_path, None))
    good = reply_of(0, wire.update_content(ClientUpdate({"delta": {"w": torch.tensor([2.0, 4.0])}}, 5, 0.1)))
    sent = Message(wire.who_content(0), 1001, wire.TRAIN)
    sent.metadata.__dict__["_message_id"] = "sent"
    _, metrics = strategy.aggregate_train(1, [good, failure(sent, CLIENT_RAISED, "ValueError: broken")])
    assert metrics is None
    assert strategy.server.params["w"].tolist() == pytest.approx([1.0, 2.0], abs=1e-5)  # over 2, not over who replied


def test_what_clients_send_is_known_without_any_client() -> None:
    params = {"w": torch.zeros(3)}
    sent = {algorithm.kind: payload_template(algorithm, algorithm.init(params)) for algorithm in (FedAvg(), Scaffold())}
    assert sent["fedavg"].keys() == {"delta"}
    assert sent["scaffold"].keys() == {"delta", "control_delta"}
    assert payload_template(FedNova(tau_eff=2.0), FedNova().init(params)).keys() == {"direction"}


def test_a_delta_as_large_as_one_client_is_warned_about(tmp_path: Path) -> None:
    result = run(private(aggregator={"delta": 0.1}, rounds=1), tmp_path / "run")
    [warning] = [one for one in result["warnings"] if "delta" in one]
    assert "0.1" in warning


def test_samplers_amplify_what_they_sample() -> None:
    event = GlobalDP(noise_multiplier=2.0).event()
    assert Everyone().amplify(event, 10) == event
    assert Poisson(sampling_rate=0.2).amplify(event, 10) == amplify_poisson(event, 0.2)
    assert FixedSize(cohort_size=2).amplify(event, 10) == amplify_fixed_size(event, 2, 10)
