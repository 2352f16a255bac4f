"""Sequences of tokens: padding changes nothing, the next character is learnt, and what has no place is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_sim import models
from fl_sim.data import load
from fl_sim.data.tokens import ALPHABET
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.run import run

LINE = "the cat sat. "


def play(folder: Path, length: int = 6, speakers: int = 3) -> str:
    """Write a play whose speakers say the same line again and again, from other places; its end is tested on."""
    for part, places in (("train", range(40)), ("test", range(5, 14))):
        (folder / part).mkdir(parents=True)
        data = {}
        for speaker in range(speakers):
            text = (LINE * 9)[speaker:]
            data[f"s{speaker}"] = {"x": [text[p : p + length] for p in places], "y": [text[p + length] for p in places]}
        users = {"users": [*data], "num_samples": [len(one["y"]) for one in data.values()], "user_data": data}
        (folder / part / "all_data.json").write_text(json.dumps(users))
    return f"leaf:{folder}"


def test_texts_become_tokens_of_leafs_alphabet_and_what_follows_is_the_class(tmp_path):
    found = load(play(tmp_path))
    assert (found.vocabulary, found.num_classes, found.input_shape) == (81, 80, (6,))
    assert "".join(ALPHABET[int(token) - 1] for token in found.train.inputs[0]) == "the ca"
    assert ALPHABET[found.train.labels[0]] == "t"
    assert np.unique(found.train.groups).tolist() == [0, 1, 2]
    assert found.note == "LEAF, texts, what comes next is the class; 3 clients by user"


def test_characters_outside_the_alphabet_are_one_more_class_and_token(tmp_path):
    usual = load(play(tmp_path / "usual"))
    assert "outside" not in "; ".join((*usual.counted, *usual.read_off))
    folder = tmp_path / "foreign"
    play(folder)
    x, y = ["abc", "a\u00e9\U0001f600"], ["\u00e9", "b"]
    content = {"users": ["u"], "num_samples": [2], "user_data": {"u": {"x": x, "y": y}}}
    (folder / "train/all_data.json").write_text(json.dumps(content))
    found = load(f"leaf:{folder}")
    assert (found.vocabulary, found.num_classes, found.classes[-1]) == (82, 81, "another character")
    assert found.train.inputs[1, 1:3].tolist() == [81, 81]
    assert (found.train.labels.tolist(), found.text_of(found.train.inputs[1])) == ([80, 54], "a\ufffd\ufffd")
    assert "3 characters of the records are outside the alphabet" in "; ".join(found.counted)
    assert found.read_off[1] == "that texts contain characters outside the alphabet (data.alphabet lists the alphabet)"


def test_padding_behind_a_sequence_changes_no_bit_of_logits_and_no_gradient():
    model = models.build("gru", (5,), 4, seed=0, vocabulary=9)
    short, long = torch.tensor([[3.0, 7, 2]]), torch.tensor([[3.0, 7, 2, 0, 0]])
    gradients = []
    for tokens in (short, long):
        model.zero_grad()
        logits = model(tokens)
        logits.square().sum().backward()
        gradients.append([logits.detach(), *(weight.grad.clone() for weight in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert not model.embedding.weight.grad[0].any()


def test_the_next_character_of_a_line_is_learnt_by_clients_together(tmp_path):
    settings = {"data": play(tmp_path / "play"), "partition": "natural", "clients": 3, "rounds": 8,
                "local": {"learning_rate": 0.01, "optimizer": "adam", "epochs": 3, "batch_size": 10}}  # fmt: skip
    result = run(experiment_from({**settings, "engine": "inprocess"}), tmp_path / "run")
    assert result["model"] == "gru"
    assert result["final_accuracy"] > 0.9
    assert result["measures"]["client_accuracy_is"] == "accuracy on each client's own test records"


def tokens(folder: Path, **changes: object) -> str:
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 9, (12, 5))
    rows[3, 3:] = 0
    made = {
        "x_train": rows,
        "y_train": np.arange(12) % 3,
        "x_test": rows[:6],
        "y_test": np.arange(6) % 3,
        "vocabulary": 9,
    }
    np.savez(folder / "t.npz", **{name: value for name, value in {**made, **changes}.items() if value is not None})
    return f"npz:{folder}/t.npz"


def test_tokens_of_ones_own_are_named_by_their_vocabulary(tmp_path):
    found = load(tokens(tmp_path))
    assert (found.vocabulary, found.train.inputs.dtype, found.train.inputs[3, 3:].tolist()) == (9, np.float32, [0, 0])
    job = job_of(experiment_from({"data": tokens(tmp_path), "partition": "iid", "clients": 2}))
    assert job.experiment.model.name == "gru"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": None}, "save features as floats; for sequences of tokens add a number vocabulary"),
        ({"vocabulary": 8}, "tokens run from 0 to 8; with vocabulary 8 they must be 1 to 7"),
        ({"vocabulary": 1.5}, "vocabulary must be one whole number from 2"),
        ({"x_test": np.zeros((6, 5))}, "tokens are whole numbers of shape"),
        ({"x_test": np.array([[1, 0, 2, 0, 0]] * 6)}, "record 0 has no token, or padding \\(0\\) before a token"),
        ({"mean": np.array(0.5)}, "tokens .vocabulary is set. are not normalised; remove the array mean"),
    ],
)
def test_what_are_no_tokens_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        load(tokens(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": "mlp"},
            "transformer, decoder are for sequences of tokens, and these records are such",
        ),
        ({"algorithm": "fedmix"}, "algorithm fedmix computes with the numbers in records"),
        ({"preprocess": "da-fl"}, "preprocess da-fl computes with the numbers in records"),
        ({"algorithm": "pate"}, "algorithm pate cannot run on .* its students compute with the numbers"),
        ({"partition": "feature-noise:0.1"}, "partition feature-noise computes with the numbers in records"),
        ({"local": {"augment": "flip"}}, r"local\.augment=flip changes images"),
    ],
)
def test_what_computes_with_numbers_has_no_place_with_tokens(tmp_path, settings, message):
    made = {"data": tokens(tmp_path), "partition": "iid", "clients": 2, **settings}
    with pytest.raises(UserError, match=message):
        job_of(experiment_from(made)).model()


def test_the_model_of_sequences_takes_nothing_else():
    with pytest.raises(UserError, match=r"gru.* for sequences of tokens, and these records are no such sequences"):
        job_of(experiment_from({"model": "gru"})).model()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (["abc", "abd"], ["ab", "c"], "its labels are not single characters"),
        (["abc", ""], ["a", "b"], "others are empty or no texts"),
        ([["1", "text"], ["2", "text"]], [0, 1], r"lists with texts as inputs \(Sent140\)"),
        (["1.jpg", "2.jpg"], [0, 1], r"classes of texts \(Sent140\) or file names as inputs \(CelebA\)"),
    ],
)
def test_other_texts_are_refused_with_the_user(tmp_path, x, y, message):
    play(tmp_path)
    content = {"users": ["u"], "num_samples": [2], "user_data": {"u": {"x": x, "y": y}}}
    (tmp_path / "train/all_data.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        load(f"leaf:{tmp_path}")


@pytest.mark.parametrize("algorithm", ["scaffold", "moon", "fedntd"])
def test_methods_that_know_nothing_of_records_train_on_tokens(tmp_path, algorithm):
    settings = {"data": tokens(tmp_path), "partition": "iid", "clients": 2, "rounds": 1, "engine": "inprocess"}
    assert run(experiment_from({**settings, "algorithm": algorithm}), tmp_path / "run")["status"] == "finished"
