"""PATE in whole runs on the embedded digits: votes are kept to their owner, labels are paid for once, then shared."""

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_sim.data import load
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.report.runs import read_run
from fl_sim.simulation.run import Silent, run
from fl_sim.stages.pate import noisy_labels
from fl_sim.stages.pate.noisy_labels import votes_key
from fl_sim.stages.pate.procedure import ask_teachers
from fl_sim.stages.pate.run import evaluate, student_data
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.tables.labels import caption, label
from fl_sim.training.loop import to_tensors
from strategies.pate.labelling import UNANSWERED, Labelled
from strategies.pate.semi_supervised import representatives
from strategies.pate.settings import PublicSplit
from strategies.pate.student import StudentData, Supervised

pytestmark = pytest.mark.usefixtures("coarse_losses")

QUICK = (
    "clients=6", "model=logistic", "local.epochs=15", "engine=inprocess", "rounds=3", "algorithm.public_records=200",
    "algorithm.queries=60", "algorithm.student=supervised", "algorithm.student.steps=9",
    "algorithm.labelling.mechanism=lnmax:2",
)  # fmt: skip


def pate(*overrides: str) -> Experiment:
    return experiment_from(with_overrides({"algorithm": "pate"}, [*QUICK, *overrides]))


def public_split(experiment: Experiment) -> PublicSplit:
    return experiment.algorithm.public_split(load("digits"), experiment.seed)


def test_a_student_learns_from_noisy_votes_and_the_bill_is_the_ledgers(tmp_path: Path) -> None:
    result = run(pate("algorithm.student.steps=150"), tmp_path / "run")
    (said,) = result["privacy"]
    facts = result["pate"]
    assert result["final_accuracy"] > 0.75
    assert facts["label_accuracy"] > 0.85
    assert (facts["queries_asked"], facts["queries_answered"]) == (60, 60)
    assert (facts["teachers"], facts["public_records"], facts["evaluation_records"]) == (6, 200, 160)
    event = pate().algorithm.labelling.mechanism.charges()[1]
    assert said["epsilon"] == epsilon_of_counts({event: 60}, 1e-5, accountant="pld")
    assert (said["unit"], said["delta"], said["adjacency"]) == ("record", 1e-5, "replace-one")
    assert "The server, which sees the votes" in said["does_not_cover"]
    rounds = read_rounds(tmp_path / "run")
    assert [one.round for one in rounds] == [1, 2, 3]
    assert {one.epsilon for one in rounds} == {said["epsilon"]}
    assert rounds[-1].test_accuracy == result["final_accuracy"]
    assert result["bytes"]["total"] == {"down": 0, "up": 6 * (128 + 8 * 200)}  # a vote a public record
    assert result["measures"]["test_records"] == 160
    assert result["measures"]["balanced_accuracy"] == rounds[-1].balanced_accuracy
    assert "private" in result["measures"]["left_out"]["client_accuracy"]
    assert rounds[-1].test_loss < rounds[0].test_loss


def test_representatives_are_asked_about_unless_the_pools_order_is_asked_for(tmp_path: Path) -> None:
    pool, dataset = public_split(pate()).pool, load("digits")
    votes, rows = {}, {}
    for asking in ("representative", "in-order"):
        change = f"algorithm.asking={asking}", "algorithm.labelling.mechanism=none", "algorithm.keep_private=true"
        result = run(pate(*change), tmp_path / asking)
        rows[asking], votes[asking] = (np.load(tmp_path / asking / f"{name}.npy") for name in ("queries", "votes"))
        labels = np.load(tmp_path / asking / "labels.npy")
        assert np.array_equal(labels, votes[asking].argmax(axis=1))
        assert result["pate"]["label_accuracy"] == float((labels == pool.labels[rows[asking]]).mean())
        assert (result["pate"]["asking"], result["pate"]["labels_reused"]) == (asking, False)
    assert np.array_equal(rows["in-order"], np.arange(60))
    assert np.array_equal(rows["representative"], representatives(to_tensors(pool, dataset)[0], 60))
    both = np.intersect1d(*rows.values())
    assert 0 < len(both) < 60
    for row in both:
        first, second = (votes[asking][rows[asking] == row] for asking in votes)
        assert np.array_equal(first, second)


def test_unanswered_queries_reach_no_student(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    train = Supervised.train

    def watched(self: Supervised, data: StudentData, *rest: Any) -> torch.nn.Module:
        seen.append(data)
        return train(self, data, *rest)

    monkeypatch.setattr(Supervised, "train", watched)
    mechanism = "algorithm.labelling.mechanism"
    noise = f"{mechanism}.threshold=6", f"{mechanism}.sigma_threshold=1", f"{mechanism}.sigma=1"
    result = run(pate(f"{mechanism}=confident", *noise), tmp_path / "run")
    labels, rows = (np.load(tmp_path / "run" / f"{name}.npy") for name in ("labels", "queries"))
    answered = labels != UNANSWERED
    assert 0 < result["pate"]["queries_answered"] == answered.sum() < 60
    assert seen[0].labels.tolist() == labels[answered].tolist()
    pool = to_tensors(public_split(pate()).pool, load("digits"))[0]
    assert torch.equal(seen[0].labelled, pool[torch.from_numpy(rows[answered])])
    (said,) = result["privacy"]
    assert said["epsilon_realised"] < said["epsilon"]
    assert {one.epsilon for one in read_rounds(tmp_path / "run")} == {said["epsilon"]}


def test_the_released_model_is_the_student(tmp_path: Path) -> None:
    experiment = pate()
    result = run(experiment, tmp_path / "run")
    dataset = load("digits")
    model = experiment.algorithm.student.network(dataset.input_shape, 10)
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    inputs, labels = to_tensors(public_split(experiment).evaluation, dataset)
    assert evaluate(model, inputs, labels).accuracy == result["final_accuracy"]


def test_a_run_directory_holds_no_teacher_and_no_vote_unless_it_is_asked_to(tmp_path: Path) -> None:
    run(pate(), tmp_path / "run")
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    files = {"config.toml", "rounds.jsonl", "model.safetensors", "result.json", "ledger.jsonl"}
    assert kept == {*files, "labels.npy", "queries.npy"}
    assert "dependent" not in (tmp_path / "run" / "result.json").read_text().replace("Data-dependent figures", "")
    result = run(pate("algorithm.keep_private=true"), tmp_path / "private")
    private = json.loads((tmp_path / "private" / "private.json").read_text())
    counts = np.load(tmp_path / "private" / "votes.npy")
    assert counts.shape == (60, 10)
    assert (counts.sum(axis=1) == 6).all()
    assert 0 < private["epsilon_data_dependent"] <= result["privacy"][0]["epsilon"]
    assert len(private["teacher_accuracy"]) == 6
    assert "have no noise, because of the setting keep_private" in result["privacy"][0]["does_not_cover"]
    for name in ("votes.npy", "private.json"):
        assert stat.S_IMODE((tmp_path / "private" / name).stat().st_mode) == 0o600


def test_the_data_dependent_epsilon_is_said_aloud_as_private_and_written_nowhere(tmp_path: Path) -> None:
    class Listener(Silent):
        heard: list[str] = []  # noqa: RUF012

        def preparing(self, what: str) -> None:
            self.heard.append(what)

    run(pate(), tmp_path / "run", observer=Listener())
    assert "6 teachers train, and vote on 200 public records" in Listener.heard[0]
    assert "data-dependent epsilon" in Listener.heard[1]
    assert "PRIVATE" in Listener.heard[1]


def test_the_cache_of_votes_is_for_its_owner_alone(tmp_path: Path) -> None:
    run(pate(), tmp_path / "run")
    (folder,) = (tmp_path / ".pools").glob("digits-votes-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "votes.npy").stat().st_mode) == 0o600
    (labels,) = folder.glob("labels-*")
    assert not (labels / "key").exists()


def test_students_share_one_labelling_and_other_labellings_share_the_teachers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(pate(), tmp_path / "first")
    monkeypatch.setattr(noisy_labels, "ask_teachers", lambda *_, **__: pytest.fail("the teachers were trained again"))
    second = run(pate("algorithm.student=pate-g", "algorithm.student.steps=5"), tmp_path / "second")
    third = run(pate("algorithm.labelling.mechanism=gnmax:9"), tmp_path / "third")
    assert [one["pate"]["votes_reused"] for one in (first, second, third)] == [False, True, True]
    assert [one["pate"]["labels_reused"] for one in (first, second, third)] == [False, True, False]
    assert first["privacy"] == second["privacy"]
    assert third["privacy"][0]["epsilon"] < first["privacy"][0]["epsilon"]
    labels = [np.load(tmp_path / name / "labels.npy") for name in ("first", "second", "third")]
    assert np.array_equal(labels[0], labels[1])


def test_a_students_own_seed_leaves_teachers_and_labels_alone(tmp_path: Path) -> None:
    results, losses = {}, {}
    seeds = {"first": (), "same": ("algorithm.student_seed=0",), "other": ("algorithm.student_seed=1",)}
    for name, change in seeds.items():
        results[name] = run(pate(*change), tmp_path / name)["pate"]
        losses[name] = read_rounds(tmp_path / name)[-1].test_loss
    assert (results["other"]["votes_reused"], results["other"]["labels_reused"]) == (True, True)
    assert losses["same"] == losses["first"] != losses["other"]


@pytest.mark.parametrize("change", ["algorithm.queries=7", "algorithm.student=fixmatch", "rounds=9",
                                    "algorithm.labelling.mechanism=lnmax"])  # fmt: skip
def test_votes_do_not_depend_on_what_is_done_with_them(change: str) -> None:
    assert votes_key(job_of(pate())) == votes_key(job_of(pate(change)))


@pytest.mark.parametrize("change", ["seed=1", "clients=5", "model=mlp", "local.epochs=3", "partition=label-2",
                                    "algorithm.public_records=100", "algorithm.public=train",
                                    "algorithm.teachers=random-forest"])  # fmt: skip
def test_votes_are_named_by_all_that_determines_them(change: str) -> None:
    assert votes_key(job_of(pate())) != votes_key(job_of(pate(change)))


def test_damaged_votes_are_refused(tmp_path: Path) -> None:
    run(pate(), tmp_path / "run")
    (votes,) = (tmp_path / ".pools").glob("digits-votes-*/votes.npy")
    content = bytearray(votes.read_bytes())
    content[-1] ^= 1
    votes.write_bytes(content)
    with pytest.raises(UserError, match=r"votes in .* damaged: delete votes.npy and votes.json"):
        run(pate(), tmp_path / "second")


def test_the_budget_stops_the_labelling(tmp_path: Path) -> None:
    result = run(pate("algorithm.labelling.mechanism=gnmax:6", "algorithm.labelling.epsilon=3"), tmp_path / "run")
    assert 0 < result["pate"]["queries_asked"] < 60
    assert result["privacy"][0]["epsilon"] <= 3
    with pytest.raises(UserError, match=r"algorithm.labelling.epsilon=0.01 .* costs 4"):
        run(pate("algorithm.labelling.epsilon=0.01"), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_interrupted_run_pays_for_its_labels_once(tmp_path: Path) -> None:
    class Stop(Silent):
        def finished_round(self, record: RoundRecord) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(pate(), tmp_path / "run", observer=Stop())
    assert not (tmp_path / "run" / "model.safetensors").exists()
    whole = run(pate(), tmp_path / "whole")
    again = run(pate(), tmp_path / "run")
    assert again["privacy"] == whole["privacy"]
    assert again["final_accuracy"] == whole["final_accuracy"]
    assert len(read_rounds(tmp_path / "run")) == 3


def test_a_labelling_that_was_killed_goes_on_with_its_own_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = noisy_labels.write_private
    monkeypatch.setattr(
        noisy_labels, "write_private", lambda path, text: (killed if "labels" in path.name else before)(path, text)
    )
    with pytest.raises(KeyboardInterrupt):
        run(pate(), tmp_path / "first")
    monkeypatch.setattr(noisy_labels, "write_private", before)
    (key,) = (tmp_path / ".pools").glob("digits-votes-*/labels-*/key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    result = run(pate(), tmp_path / "second")
    event = pate().algorithm.labelling.mechanism.charges()[1]
    assert result["privacy"][0]["epsilon"] == epsilon_of_counts({event: 60}, 1e-5, accountant="pld")
    assert not key.exists()


def test_seeded_noise_repeats_and_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = pate("algorithm.labelling.noise=seeded", "algorithm.labelling.mechanism=lnmax:0.5")
    first = run(seeded, tmp_path / "first")
    monkeypatch.setenv("FL_SIM_POOLS", str(tmp_path / "other"))
    run(seeded, tmp_path / "second")
    assert np.array_equal(np.load(tmp_path / "first" / "labels.npy"), np.load(tmp_path / "second" / "labels.npy"))
    assert first["privacy"][0]["simulation_only"]


def test_no_noise_is_no_guarantee(tmp_path: Path) -> None:
    result = run(pate("algorithm.labelling.mechanism=none"), tmp_path / "run")
    assert result["privacy"][0]["epsilon"] is None
    assert read_rounds(tmp_path / "run")[0].epsilon is None


def test_a_published_cost_is_a_statement_of_its_own(tmp_path: Path) -> None:
    clear = pate("algorithm.publish_cost=true", "algorithm.labelling.mechanism=lnmax:0.5", "clients=20")
    result = run(clear, tmp_path / "run")
    labels, both = result["privacy"]
    assert "another statement covers this epsilon" in labels["does_not_cover"]
    assert both["covers"].startswith("The labels, all results that are computed from the labels, and")
    assert both["epsilon"] > labels["epsilon"]  # fixed beforehand, and the figure costs something as well
    assert both["epsilon_data_dependent"] == both["published"]["epsilon"]
    assert "not a guarantee" in both["guarantee"]
    again = run(clear, tmp_path / "again")
    assert again["privacy"][1] == both  # not a second release
    (published,) = (tmp_path / ".pools").glob("*/labels-*/published.json")
    published.unlink()
    assert run(clear, tmp_path / "lost")["privacy"][1] == both  # the same noise, the same figure
    with pytest.raises(UserError, match="publish_cost is for lnmax, gnmax and confident, not for none"):
        pate("algorithm.publish_cost=true", "algorithm.labelling.mechanism=none")


def test_the_published_cost_of_confident_labels_counts_the_answers_that_were_given(tmp_path: Path) -> None:
    confident = ("algorithm.labelling.mechanism=confident", "algorithm.labelling.mechanism.threshold=12")
    noise = ("algorithm.labelling.mechanism.sigma=3", "algorithm.labelling.mechanism.sigma_threshold=4")
    result = run(pate("algorithm.publish_cost=true", "clients=20", *confident, *noise), tmp_path / "run")
    labels, both = result["privacy"]
    assert 0 < result["pate"]["queries_answered"] < result["pate"]["queries_asked"]
    assert both["epsilon"] > labels["epsilon_realised"]
    (folder,) = (tmp_path / ".pools").glob("*/labels-*")
    said = json.loads((folder / "published.json").read_text())
    assert both["epsilon_data_dependent"] == said["epsilon"]


@pytest.mark.parametrize("student", ["fixmatch", "pate-g", "supervised", "resnet", "random-forest"])
def test_every_student_runs(tmp_path: Path, student: str) -> None:
    steps = () if student == "random-forest" else ("algorithm.student.steps=3",)
    experiment = with_overrides({"algorithm": "pate"}, [*QUICK[:-3], f"algorithm.student={student}", *steps])
    result = run(experiment_from(experiment), tmp_path / "run")
    assert result["status"] == "finished"
    assert result["rounds"] == (1 if student == "random-forest" else 3)


def test_random_forests_teach_a_random_forest(tmp_path: Path) -> None:
    forests = experiment_from(with_overrides({"algorithm": "pate"}, [
        *QUICK[:-3], "algorithm.teachers=random-forest", "algorithm.teachers.trees=20",
        "algorithm.student=random-forest", "algorithm.student.trees=30", "algorithm.labelling.mechanism=lnmax:2",
    ]))  # fmt: skip
    result = run(forests, tmp_path / "run")
    assert result["final_accuracy"] > 0.6
    assert result["pate"]["teacher"] == "random-forest"


def test_a_teacher_that_fails_stops_no_private_run_but_one_without_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_failure(*args: Any, private: bool, **shape: Any) -> Any:
        votes, silent = ask_teachers(*args, private=private, **shape)
        assert silent == ()
        votes[4] = 0
        return votes, (4,)

    monkeypatch.setattr(noisy_labels, "ask_teachers", with_a_failure)
    result = run(pate("algorithm.keep_private=true"), tmp_path / "run")
    assert result["status"] == "finished"
    assert np.load(tmp_path / "run" / "votes.npy").sum(axis=1).tolist() == [6] * 60
    with pytest.raises(RunError, match=r"teachers 4 failed .* delete votes.npy"):
        run(pate("algorithm.labelling.mechanism=none"), tmp_path / "plain")


def test_where_every_teacher_fails_the_reason_comes_from_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none of 6 teachers voted: local.learning_rate"):
        run(pate("local.learning_rate=1e30"), tmp_path / "run")
    assert read_run(tmp_path / "run").status == "failed"
    with pytest.raises(RunError, match=r"teacher 0.*not finite"):
        run(pate("local.learning_rate=1e30", "algorithm.labelling.mechanism=none"), tmp_path / "plain")
    assert not list((tmp_path / ".pools").glob("digits-votes-*/votes.*"))


def test_settings_that_cannot_be_run_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    cases = {
        "clients=1500": "1500 clients and only 1437 records",
        "algorithm.public_records=360": "leaves nothing to evaluate on",
        "algorithm.public_records=400": "choose algorithm.public_records from 1 to 359",
    }
    for change, words in cases.items():
        with pytest.raises(UserError, match=words):
            run(pate(change), tmp_path / "run")
    with pytest.raises(UserError, match="greater than or equal to 1"):
        pate("algorithm.public_records=0")
    with pytest.raises(UserError, match="leaves nothing for teachers"):
        run(pate("algorithm.public=train", "algorithm.public_records=1437"), tmp_path / "run")
    for change in ("aggregator=global-dp", "preprocess=da-fl", "sampler=poisson:0.5"):
        with pytest.raises(UserError, match="all teachers vote once"):
            pate(change)
    with pytest.raises(UserError, match="set keep_private=true"):
        pate("algorithm.labelling.budget=data-dependent", "algorithm.labelling.epsilon=3")
    assert not (tmp_path / "run").exists()


def test_a_student_that_does_not_fit_the_records_is_refused_before_a_label_is_paid(tmp_path: Path) -> None:
    features = np.random.default_rng(0).random((60, 5), dtype=np.float32)
    labels = np.arange(60) % 2
    np.savez(tmp_path / "table.npz", x_train=features, y_train=labels, x_test=features + 1, y_test=labels)
    with pytest.raises(UserError, match="student fixmatch learns from augmented images"):
        run(pate(f"data=npz:{tmp_path / 'table.npz'}", "algorithm.student=fixmatch"), tmp_path / "run")
    assert not (tmp_path / ".pools").exists()


def test_noise_that_drowns_the_votes_is_warned_about(tmp_path: Path) -> None:
    result = run(pate("algorithm.labelling.mechanism=lnmax"), tmp_path / "run")
    assert "noise of 20 votes on the votes of 6 teachers" in result["warnings"][0]
    assert run(pate("algorithm.labelling.mechanism=lnmax:2"), tmp_path / "clear")["warnings"] == []


def test_a_table_names_splits_without_parameters_and_says_what_rounds_are() -> None:
    assert label(pate().partition) == "iid"
    words = " ".join(caption([pate()], {}, {}, has_bound=False))
    assert "rounds are epochs of the student" in words


def _own_data(path: Path, shared: int) -> str:
    digits = load("digits")
    train, test = digits.train.inputs[:600, 0].copy(), digits.test.inputs[:, 0]
    train[5 : 5 + shared] = test[:shared]
    labels = digits.train.labels[:600].copy()
    labels[5 : 5 + shared] = digits.test.labels[:shared]
    np.savez(path, x_train=train, y_train=labels, x_test=test, y_test=digits.test.labels)
    return f"npz:{path}"


def test_private_records_in_the_public_pool_are_found_by_their_content(tmp_path: Path) -> None:
    data = _own_data(tmp_path / "own.npz", 3)
    with pytest.raises(UserError, match=r"3 of 600 private records .*record 5"):
        run(pate(f"data={data}"), tmp_path / "run")
    result = run(
        pate(f"data={data}", "algorithm.overlap=drop-private", "evaluate.test_is_public=true"), tmp_path / "run"
    )
    assert result["status"] == "finished"


def test_teachers_without_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"teachers hold no record|dirichlet"):
        run(pate("partition=dirichlet:0.01", "clients=100"), tmp_path / "run")


def test_a_pool_from_the_training_records_is_nobodys(tmp_path: Path) -> None:
    experiment = pate("algorithm.public=train", "algorithm.public_records=300")
    split = public_split(experiment)
    assert (len(split.private), len(split.pool), len(split.evaluation)) == (1137, 300, 360)
    everything = load("digits").train
    chosen = np.concatenate([everything.inputs[split.private], split.pool.inputs]).reshape(1437, -1)
    assert sorted(map(bytes, chosen)) == sorted(map(bytes, everything.inputs.reshape(1437, -1)))
    assert run(experiment, tmp_path / "run")["pate"]["evaluation_records"] == 360


def test_a_seed_gives_the_same_votes_for_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for workers in (1, 3):
        monkeypatch.setenv("FL_SIM_POOLS", str(tmp_path / f"pools{workers}"))
        run(pate(f"engine.workers={workers}", "algorithm.keep_private=true"), tmp_path / f"run{workers}")
        seen.append(np.load(tmp_path / f"run{workers}" / "votes.npy"))
    assert np.array_equal(*seen)
    assert torch.get_num_threads() >= 1


def test_a_student_learns_from_the_queries_that_were_answered_and_from_no_other() -> None:
    pool = torch.arange(5.0).reshape(5, 1)
    data = student_data(pool, Labelled(np.array([2, UNANSWERED, 0, UNANSWERED]), 4), 3)
    assert data.labelled.flatten().tolist() == [0.0, 2.0]
    assert data.labels.tolist() == [2, 0]
    assert torch.equal(data.unlabelled, pool)
