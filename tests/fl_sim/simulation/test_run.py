"""A run, its directory, and what is left of it when it fails, is interrupted, killed or cannot write."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flwr.app import Message, RecordDict
from safetensors.torch import load_file

from fl_sim.__main__ import main
from fl_sim.data import load
from fl_sim.errors import RunError, UserError
from fl_sim.experiment import job
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.kinds import short_form
from fl_sim.settings import read_table
from fl_sim.simulation.engine_choice import client_app
from fl_sim.simulation.run import Silent, run
from fl_sim.store import run_directory
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.testing_runs import FakeEngine, played_by
from fl_sim.training.loop import to_tensors
from partitions import Dirichlet, Iid, LabelK

LONG = {"model": "logistic", "rounds": 100_000, "engine": "inprocess", "algorithm": "scaffold"}
QUICK = {"model": "logistic", "rounds": 3, "engine": "inprocess", "local": {"batch_size": 32}}


def quick(**changes: object) -> Experiment:
    return experiment_from({**QUICK, **changes})


class Recorded(Silent):
    def __init__(self, act: object = None) -> None:
        self.rounds: list[int] = []
        self.engine = ""
        self.first_round = 0
        self._act = act

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        self.engine, self.first_round = engine, first_round

    def finished_round(self, record: RoundRecord) -> None:
        self.rounds.append(record.round)
        if callable(self._act):
            self._act(record)


def interrupted(experiment: Experiment, out: Path, after: int = 2) -> None:
    """Leave a run as Ctrl-C after a round leaves it."""

    def stop(record: RoundRecord) -> None:
        if record.round == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, out, observer=Recorded(stop))


def numbers(out: Path) -> list[tuple[object, ...]]:
    return [(r.round, r.test_accuracy, r.test_loss, r.train_loss, r.cohort, r.learning_rate) for r in read_rounds(out)]


def same_model(left: Path, right: Path) -> bool:
    first, second = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_leaves_the_promised_files_and_keys(tmp_path: Path) -> None:
    result = run(quick(), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint.safetensors", "clients.csv", "config.toml", "model.safetensors", "result.json", "rounds.jsonl",
    ]  # fmt: skip
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    wanted = [
        "algorithm",
        "data",
        "partition",
        "seed",
        "engine",
        "trainer",
        "is_private",
        "final_accuracy",
        "best_accuracy",
        "privacy",
        "versions",
    ]
    assert set(wanted) <= result.keys()
    assert result["seconds"].keys() == {"preprocess", "train", "total"}
    assert result["privacy"] == []
    records = read_rounds(tmp_path / "run")
    assert [record.round for record in records] == [1, 2, 3]
    assert result["final_accuracy"] == records[-1].test_accuracy
    assert result["best_accuracy"] == max(record.test_accuracy or 0 for record in records)
    assert all(record.epsilon is None for record in records)


def test_the_written_config_is_the_same_experiment(tmp_path: Path) -> None:
    experiment = quick(algorithm={"kind": "fedprox", "mu": 0.3}, partition="dirichlet:0.3")
    run(experiment, tmp_path / "run")
    assert experiment_from(read_table(tmp_path / "run" / "config.toml")) == experiment


def test_evaluation_every_n_rounds_and_always_after_the_last(tmp_path: Path) -> None:
    run(quick(rounds=5, evaluate_every=2), tmp_path / "run")
    assert [r.round for r in read_rounds(tmp_path / "run") if r.test_accuracy is not None] == [2, 4, 5]


def test_the_schedule_sets_the_learning_rate_of_each_round(tmp_path: Path) -> None:
    run(quick(local={"batch_size": 32, "learning_rate": 0.1, "schedule": "step:2"}, rounds=4), tmp_path / "run")
    assert [r.learning_rate for r in read_rounds(tmp_path / "run")] == pytest.approx([0.1, 0.1, 0.01, 0.01])


def test_federated_runs_learn_and_the_centralized_bound_learns_more(tmp_path: Path) -> None:
    federated = run(quick(partition="iid", rounds=10), tmp_path / "federated")
    central = run(quick(algorithm="centralized", rounds=10), tmp_path / "central")
    assert federated["final_accuracy"] > 0.8
    assert central["final_accuracy"] > federated["final_accuracy"]
    assert central["clients"] == 1
    assert central["partition"] == "centralized"


def test_feature_noise_reaches_the_training_and_grows_with_the_client(tmp_path: Path) -> None:
    clean = run(quick(partition="feature-noise:0.0001", rounds=10), tmp_path / "clean")
    noisy = run(quick(partition="feature-noise:50", rounds=10), tmp_path / "noisy")
    assert noisy["final_accuracy"] < clean["final_accuracy"] - 0.2


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedadam", "fedmix", "centralized"])
def test_an_interrupted_run_goes_on_and_ends_in_the_same_bits(tmp_path: Path, algorithm: str) -> None:
    experiment = quick(algorithm=algorithm, rounds=4)
    run(experiment, tmp_path / "whole")

    interrupted(experiment, tmp_path / "broken")
    assert json.loads((tmp_path / "broken" / "result.json").read_text())["status"] == "interrupted"
    second = Recorded()
    run(experiment, tmp_path / "broken", observer=second)
    assert second.rounds == [3, 4]
    assert second.first_round == 3
    assert numbers(tmp_path / "broken") == numbers(tmp_path / "whole")
    assert same_model(tmp_path / "broken", tmp_path / "whole")


def test_a_run_that_goes_on_counts_the_time_of_all_its_parts(tmp_path: Path) -> None:
    experiment = quick(rounds=4)
    interrupted(experiment, tmp_path / "run")
    before = sum(record.seconds or 0 for record in read_rounds(tmp_path / "run"))
    start = time.perf_counter()
    result = run(experiment, tmp_path / "run")
    assert before < result["seconds"]["total"] <= before + time.perf_counter() - start
    assert result["seconds"]["train"] < result["seconds"]["total"]


def test_a_crash_between_log_and_checkpoint_repeats_no_round_in_the_log(tmp_path: Path) -> None:
    experiment = quick(rounds=3)
    run(experiment, tmp_path / "whole")

    interrupted(experiment, tmp_path / "run", after=1)
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "test_accuracy": 0.5, "test_lo')
    run(experiment, tmp_path / "run")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """A long run in a process of its own, which has done three rounds."""
    out = tmp_path_factory.mktemp("running") / "run"
    code = (
        "import sys; from pathlib import Path; from fl_sim.experiment.experiment import experiment_from; "
        "from fl_sim.simulation.run import run; "
        f"run(experiment_from({LONG!r}), Path(sys.argv[1]))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(out)], cwd=Path(__file__).parents[3]) as process:
        deadline = time.monotonic() + 240
        while len(read_rounds(out)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        yield process, out
        process.kill()


def test_a_second_process_in_the_same_directory_is_refused(running: tuple["subprocess.Popen[bytes]", Path]) -> None:
    first, out = running
    with pytest.raises(RunError, match=rf"{out} is being written by process {first.pid}, started 20\d\d-"):
        run(experiment_from(LONG), out)
    assert first.poll() is None


def test_a_killed_process_loses_at_most_the_running_round(
    running: tuple["subprocess.Popen[bytes]", Path], tmp_path: Path
) -> None:
    process, out = running
    process.kill()
    process.wait()
    done = len(read_rounds(out))
    assert done >= 3
    observer = Recorded(lambda record: (_ for _ in ()).throw(KeyboardInterrupt) if record.round == done + 3 else None)
    with pytest.raises(KeyboardInterrupt):
        run(experiment_from(LONG), out, observer=observer)
    assert observer.first_round in {done, done + 1}
    assert not (out / ".lock").exists()
    whole = Recorded(lambda record: (_ for _ in ()).throw(KeyboardInterrupt) if record.round == done + 3 else None)
    with pytest.raises(KeyboardInterrupt):
        run(experiment_from(LONG), tmp_path / "whole", observer=whole)
    assert numbers(out) == numbers(tmp_path / "whole")


def test_divergence_stops_the_run_names_client_and_round_and_keeps_what_there_is(tmp_path: Path) -> None:
    experiment = quick(local={"learning_rate": 1e30, "momentum": 0.0}, rounds=9)
    with pytest.raises(RunError, match=r"client \d+ in round \d+"):
        run(experiment, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed"
    assert "client" in result["error"]
    assert result["rounds"] == len(read_rounds(tmp_path / "run"))
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in kept.values())


def test_a_client_that_does_not_answer_in_a_rounds_time_ends_the_run_and_is_named(tmp_path: Path) -> None:
    plays = played_by(client_app(), 10)

    def late(client: int, message: Message) -> RecordDict | Message | None:
        if client == 3 and len(grid.waits) == 2:
            raise TimeoutError("no answer within 7 s: it was still training")
        return plays(client, message)

    grid = FakeEngine(10, late)
    with pytest.raises(RunError, match=r"client 3 in round 2 .* within 7 s"):
        run(quick(round_timeout=7), tmp_path / "run", grid=grid)
    assert grid.waits == [7, 7]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["rounds"]) == ("failed", 1)
    assert [record.round for record in read_rounds(tmp_path / "run")] == [1]


def test_a_run_never_overwrites_another(tmp_path: Path) -> None:
    run(quick(), tmp_path / "run")
    with pytest.raises(UserError, match=r"other settings \(seed\)"):
        run(quick(seed=7), tmp_path / "run")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear").write_text("me")
    with pytest.raises(UserError, match="not empty"):
        run(quick(), tmp_path / "letters")
    assert (tmp_path / "letters" / "dear").read_text() == "me"


def test_the_engine_is_no_part_of_what_a_run_is(tmp_path: Path) -> None:
    interrupted(quick(), tmp_path / "run")
    run(quick(engine="auto", round_timeout=5), tmp_path / "run")


def test_a_finished_run_is_not_run_again_and_its_result_is_shown(tmp_path: Path) -> None:
    first, again = run(quick(), tmp_path / "run"), Recorded()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    assert run(quick(engine="auto"), tmp_path / "run", observer=again) == first
    assert not again.rounds
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.usefixtures("quick_accounting")
def test_a_run_that_died_while_it_tidied_up_is_finished(tmp_path: Path) -> None:
    experiment = quick(algorithm="scaffold", aggregator={"kind": "global-dp", "noise": "seeded"})
    interrupted(experiment, tmp_path / "run")
    kept = {path.relative_to(tmp_path / "run"): path.read_bytes() for path in (tmp_path / "run").rglob("*.*")}
    first = run(experiment, tmp_path / "run")
    for path, content in kept.items():
        if path.parts[0] in {"clients", "checkpoint.safetensors"}:
            (tmp_path / "run" / path).parent.mkdir(exist_ok=True)
            (tmp_path / "run" / path).write_bytes(content)
    assert run(experiment, tmp_path / "run") == first
    assert not {"clients", "checkpoint.safetensors"} & {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize("damage", ["another run's", "cut", "of other rounds"])
def test_a_result_that_does_not_belong_to_its_run_is_not_believed(tmp_path: Path, damage: str) -> None:
    run(quick(), tmp_path / "run")
    result = tmp_path / "run" / "result.json"
    if damage == "another run's":
        run(quick(seed=1), tmp_path / "other")
        result.write_bytes((tmp_path / "other" / "result.json").read_bytes())
    elif damage == "cut":
        os.truncate(result, 100)
        (tmp_path / "run" / "checkpoint.safetensors").unlink()
    else:
        rounds = tmp_path / "run" / "rounds.jsonl"
        rounds.write_bytes(b"".join(rounds.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match=r"result\.json"):
        run(quick(), tmp_path / "run")


def test_a_damaged_result_is_written_again_where_the_run_has_kept_what_it_ended_with(tmp_path: Path) -> None:
    first = run(quick(), tmp_path / "run")
    os.truncate(tmp_path / "run" / "result.json", 100)
    again = run(quick(), tmp_path / "run", observer=(observer := Recorded()))
    assert observer.rounds == []
    assert again | {"seconds": 0} == first | {"seconds": 0}


def test_what_a_run_reports_is_the_accuracy_of_its_model_on_the_test_records(tmp_path: Path) -> None:
    result = run(quick(), tmp_path / "run")
    dataset = load("digits", None)
    inputs, labels = to_tensors(dataset.test, dataset)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    logits = inputs.flatten(1) @ weights["1.weight"].T + weights["1.bias"]
    assert result["final_accuracy"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()), abs=1e-6)
    loss = float(torch.nn.functional.cross_entropy(logits, labels))
    assert read_rounds(tmp_path / "run")[-1].test_loss == pytest.approx(loss, rel=1e-4)


def test_the_round_is_in_the_log_before_the_checkpoint_counts_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(quick(), tmp_path / "whole")

    def full(out: Path, record: RoundRecord, chain: str) -> str:
        if record.round == 2:
            raise OSError(28, "No space left on device", str(out / "rounds.jsonl"))
        return rundir_append(out, record, chain)

    rundir_append = run_directory.append_round
    with monkeypatch.context() as patched:
        patched.setattr(run_directory, "append_round", full)
        with pytest.raises(RunError, match=r"rounds\.jsonl: the disk is full"):
            run(quick(), tmp_path / "run")
    assert [record.round for record in read_rounds(tmp_path / "run")] == [1]
    again = Recorded()
    run(quick(), tmp_path / "run", observer=again)
    assert again.rounds == [2, 3]
    assert same_model(tmp_path / "run", tmp_path / "whole")


def test_line_and_checkpoint_are_forced_to_the_disk_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda open_: forced.append(Path(f"/proc/self/fd/{open_}").readlink().name))
    run(quick(rounds=2), tmp_path / "run")
    names = [name.removeprefix(".").partition(".")[0] for name in forced]
    assert [name for name in names if name in {"rounds", "checkpoint"}] == ["rounds", "checkpoint"] * 2
    assert forced.count("run") >= 4  # the folder, after each new name


def test_a_checkpoint_that_is_none_is_refused_with_the_way_out(tmp_path: Path) -> None:
    interrupted(quick(), tmp_path / "run")
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"something else")
    with pytest.raises(UserError, match="delete it to start"):
        run(quick(), tmp_path / "run")


def test_a_disk_that_is_full_ends_the_run_with_a_message(tmp_path: Path) -> None:
    def fill(record: RoundRecord) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="No space left on device"):
        run(quick(), tmp_path / "run", observer=Recorded(fill))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 1


def test_the_default_engine_is_the_one_that_is_faster_and_says_so(tmp_path: Path) -> None:
    observer = Recorded()
    result = run(quick(engine="auto"), tmp_path / "run", observer=observer)
    assert result["engine"] == "inprocess"
    assert "engine inprocess" in observer.engine


def test_a_run_leaves_torch_as_it_found_it(tmp_path: Path) -> None:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    run(quick(), tmp_path / "run")
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_on_the_command_line_ends_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    long = ["model=logistic", "rounds=100000", "engine=inprocess"]
    monkeypatch.setattr(sys, "argv", ["fl-sim", "run", *long, "--out", str(out)])

    def press() -> None:
        while len(read_rounds(out)) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert "interrupted" in errors
    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "interrupted"
    assert result["rounds"] >= 2


def test_short_forms_are_what_a_user_would_type() -> None:
    assert [short_form(s) for s in (LabelK(k=2), Dirichlet(beta=0.05), Iid())] == ["label-2", "dirichlet:0.05", "iid"]


def test_a_run_in_one_process_loads_and_splits_its_data_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, split, cut = [], [], Dirichlet.split
    monkeypatch.setattr(job, "load", lambda *given: loaded.append(given) or load(*given))
    monkeypatch.setattr(Dirichlet, "split", lambda self, *given: split.append(self) or cut(self, *given))
    run(quick(partition="dirichlet:0.5"), tmp_path / "run")
    assert (len(loaded), len(split)) == (1, 1)
