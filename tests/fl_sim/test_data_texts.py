"""Texts in tables: what becomes of a column of texts, its labels and clients, and what is refused by row and column."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from fl_sim.cli.data import show_card
from fl_sim.data import find, load, read
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.run import run

GOOD, BAD = "a good film", "a bad and dull film"


def reviews(folder: Path, texts: list[str], name: str = "r.csv") -> Path:
    """Write a table of texts from two sources; every other text is good."""
    rows = [f'"{text}",{("good", "bad")[i % 2]},{("tv", "web")[i // 2 % 2]},{i}' for i, text in enumerate(texts)]
    (folder / name).write_text("\n".join(["review,mood,source,number", *rows]) + "\n")
    return folder / name


SETTINGS = "text=review:label=mood:client=source:test=0.25"


def test_texts_are_bytes_with_named_labels_and_clients_and_other_columns_are_left_out(tmp_path):
    found = load(f"csv:{reviews(tmp_path, [GOOD, BAD] * 8)}:{SETTINGS}")
    assert (found.vocabulary, found.classes, found.sources) == (257, ("bad", "good"), ("tv", "web"))
    assert {found.text_of(row) for row in found.train.inputs[found.train.labels == 1]} == {GOOD}
    assert found.train.inputs[found.train.labels == 1][0, : len(GOOD)].tolist() == [b + 1 for b in GOOD.encode()]
    assert (len(found.train), len(found.test), found.input_shape) == (12, 4, (len(BAD),))
    assert np.bincount(found.test.groups).tolist() == [2, 2]
    assert dict(found.shown)["number"] == "left out: only the texts are records"
    assert found.read_off[1:] == ("the length of the longest text (set data.max_length=NUMBER to make it public)",)
    assert found.note == (
        "texts review: bytes of UTF-8, cut after 256 tokens; label mood: 2 classes; 2 clients by source; "
        "0.25 of every client's records are for testing, drawn by test_seed 0"
    )


def test_without_labels_a_language_model_learns_the_same_bits(tmp_path, capsys):
    path = reviews(tmp_path, [f"{word} {i}" for i, word in enumerate([GOOD, BAD] * 12)])
    found, labelled = (load(f"csv:{path}:{name}") for name in (SETTINGS.replace(":label=mood", ""), SETTINGS))
    assert (found.num_classes, found.has_labels, found.classes, labelled.has_labels) == (1, False, (), True)
    np.testing.assert_array_equal(found.train.inputs, labelled.train.inputs)
    np.testing.assert_array_equal(found.test.groups, labelled.test.groups)
    assert "the texts have no labels, and a model predicts their next tokens; 2 clients by source" in found.note
    assert found.inferred[1].startswith("no column is called label: ")
    assert not any("class" in line for line in found.read_off)
    data = f"csv:{path}:text=review:client=source:test=0.25:max_length=8"
    settings = {"partition": "natural", "clients": 2, "rounds": 1, "evaluate": {"clients": "own"}}
    settings["engine"] = "inprocess"
    for name, more in (("without", ""), ("with", ":label=mood")):
        run(experiment_from({**settings, "data": f"{data}{more}", "model": "decoder"}), tmp_path / name)
    ends = [load_file(tmp_path / name / "model.safetensors") for name in ("without", "with")]
    assert all(torch.equal(ends[1][name], value) for name, value in ends[0].items())
    result = json.loads((tmp_path / "without" / "result.json").read_text())
    assert json.loads((tmp_path / "without" / "rounds.jsonl").read_text())["test_perplexity"] > 1
    assert "by_class" not in result["personal"]
    assert job_of(experiment_from({**settings, "data": data})).experiment.model.name == "decoder"
    show_card([data], None, None, with_records=True, json_output=False)
    assert "classes   none: the records have no labels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"partition=label-k divides records by their labels, and csv:\S+ has no labels: set data\.label=COLUMN"),
        (
            {"partition": {"kind": "domain", "over": "dirichlet:0.3"}},
            "partition=domain divides records by their labels",
        ),
        ({"partition": "permute-labels:2"}, "partition=permute-labels divides records by their labels"),
        ({"partition": "iid", "model": "gru"}, r"has no labels, and model gru predicts classes: .* model=decoder"),
        ({"data": ":classes=a+b"}, r"data\.classes lists the labels, and there is no label column"),
    ],
    ids=str,
)
def test_what_needs_labels_says_so(tmp_path, changes, message):
    data = f"csv:{reviews(tmp_path, [GOOD, BAD] * 8)}:text=review:client=source:test=0.25{changes.get('data', '')}"
    settings = {"clients": 2, **changes, "data": data}
    with pytest.raises(UserError, match=message):
        job_of(experiment_from(settings))


def test_characters_have_a_token_each_and_foreign_ones_share_one(tmp_path):
    texts = ["ab\u00e9", "ba\u4e2d"] * 4
    found = load(f"csv:{reviews(tmp_path, texts)}:{SETTINGS}:tokenizer=characters:alphabet=ab")
    assert found.vocabulary == 4
    assert sorted({*map(tuple, found.train.inputs.astype(int).tolist())}) == [(1, 2, 3), (2, 1, 3)]
    assert {found.text_of(row) for row in found.train.inputs} == {"ab\ufffd", "ba\ufffd"}


def test_long_texts_are_cut_and_counted_and_a_length_that_is_set_reads_nothing_off(tmp_path):
    texts = ["x" * 100_000, "\u00e9" * 3, *["words alone"] * 6]
    found = load(f"csv:{reviews(tmp_path, texts)}:{SETTINGS}:max_length=5:classes=bad+good")
    assert found.input_shape == (5,)
    assert found.counted == ("8 of 8 texts are longer than 5 tokens and are cut there (data.max_length)",)
    assert found.read_off == ()
    assert load(f"csv:{reviews(tmp_path, texts)}:{SETTINGS}").counted[0].startswith("1 of 8 texts are longer than 256")
    assert load(f"csv:{reviews(tmp_path, texts[2:])}:{SETTINGS}:max_length=20").input_shape == (20,)
    assert load(f"csv:{reviews(tmp_path, texts[2:])}:{SETTINGS}:max_length={len(texts[2])}").counted == ()


def test_texts_keep_their_spaces_and_words_that_mean_empty_elsewhere(tmp_path):
    found = load(f"csv:{reviews(tmp_path, [' N/A', '? ', 'null', 'a'] * 3)}:{SETTINGS}:max_length=9")
    shown = {found.text_of(row) for part in (found.train, found.test) for row in part.inputs}
    assert shown == {" N/A", "? ", "null", "a"}


def test_parquet_and_batches_give_the_same_texts(tmp_path, monkeypatch):
    texts = [f"{word} {i}" for i, word in enumerate([GOOD, BAD] * 20)]
    path = tmp_path / "r.parquet"
    sources = [("tv", "web")[i // 2 % 2] for i in range(40)]
    table = {"review": texts, "mood": ["good", "bad"] * 20, "source": sources, "number": [*range(40)]}
    pyarrow.parquet.write_table(pa.table(table), path)
    monkeypatch.setattr("fl_sim.data.table_file.ROWS", 7)
    found, same = load(f"parquet:{path}:{SETTINGS}"), load(f"csv:{reviews(tmp_path, texts)}:{SETTINGS}")
    np.testing.assert_array_equal(found.train.inputs, same.train.inputs)
    np.testing.assert_array_equal(found.train.labels, same.train.labels)


def test_records_with_a_blank_text_or_an_unlisted_class_may_be_left_out(tmp_path):
    path = reviews(tmp_path, [GOOD, BAD, " ", BAD, *[GOOD, BAD] * 4])
    path.write_text(path.read_text().replace(f'"{GOOD}",good,tv,4', f'"{GOOD}",neutral,tv,4'))
    with pytest.raises(UserError, match=r"row 3, column 'review' is empty: fill it in, or remove all records"):
        load(f"csv:{path}:{SETTINGS}")
    found = load(f"csv:{path}:{SETTINGS}:missing=drop:classes=bad+good")
    assert len(found.train) + len(found.test) == 10
    assert found.counted[0] == "2 records with an empty cell or a class that is not listed are left out"
    texts = {found.text_of(row) for part in (found.train, found.test) for row in part.inputs[part.labels == 1]}
    assert texts == {GOOD}  # labels and texts stay together


def test_numbers_that_are_names_stay_names_and_words_beside_few_numbers_too(tmp_path):
    path = reviews(tmp_path, ["12", "7", "ICU", "12"] * 3)
    assert load(f"csv:{path}:{SETTINGS}:drop=number").names == ("review=7", "review=12", "review=ICU")
    words = [*map(str, range(150)), *(f"word{i}" for i in range(150))]
    assert load(f"csv:{reviews(tmp_path, words)}:{SETTINGS}").vocabulary == 257


@pytest.mark.parametrize(
    ("texts", "more", "message"),
    [
        (["1", "2.5"], ":tokenizer=bytes", r"column 'review' holds numbers, but data\.tokenizer is for texts"),
        ([GOOD, BAD], ":max_length=0", r"data\.max_length = '0': it must be a whole number of tokens, 1 to 100,000"),
        ([GOOD, BAD], ":tokenizer=byts", r"data\.tokenizer = 'byts' \(did you mean 'bytes'\?\): it must be characters"),
        ([GOOD, BAD], ":alphabet=abc", r"data\.alphabet is for data\.tokenizer=characters"),
        ([GOOD, BAD], ":tokenizer=characters:alphabet=aba", "names the character 'a' twice"),
        ([GOOD, BAD], ":scale=records", r"data\.scale is for columns of numbers or categories, but"),
        ([GOOD, BAD], ":range.number=0..9", r"data\.range is for columns of numbers or categories"),
        ([GOOD, BAD], ":missing=middle", r"data\.missing=middle is for numbers; for texts, data\.missing=drop"),
        ([GOOD, BAD], ":text=mood", r"text is set twice"),
    ],
)
def test_what_does_not_fit_texts_is_refused_in_one_line(tmp_path, texts, more, message):
    with pytest.raises(UserError, match=message) as caught:
        load(f"csv:{reviews(tmp_path, texts * 4)}:{SETTINGS}{more}")
    assert "\n" not in str(caught.value)


def test_a_setting_of_texts_needs_one_column_of_texts(tmp_path):
    with pytest.raises(UserError, match=r"data\.tokenizer is for a column of texts, and data\.text names 0"):
        load(f"csv:{reviews(tmp_path, [GOOD, BAD] * 4)}:label=mood:test=0.5:tokenizer=bytes")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_texts_that_are_not_utf_8_are_refused_with_the_cure(tmp_path, kind):
    raw = [b"caf\xe9 au lait", b"a good film"] * 4
    if kind == "csv":
        path = reviews(tmp_path, [GOOD, BAD] * 4)
        path.write_bytes(path.read_bytes().replace(b"good film", b"caf\xe9"))
    else:
        path = tmp_path / "r.parquet"
        texts = pa.array(raw, pa.binary()).view(pa.string())
        moods, sources = ["good", "bad"] * 4, ["tv"] * 4 + ["web"] * 4
        pyarrow.parquet.write_table(pa.table({"review": texts, "mood": moods, "source": sources}), path)
    with pytest.raises(UserError, match=r"UTF-?8.*save it as UTF-8"):
        load(f"{kind}:{path}:{SETTINGS}")


def test_the_description_shows_texts(tmp_path, capsys):
    path = reviews(tmp_path, [GOOD, "x" * 300] * 4)
    show_card([f"csv:{path}:{SETTINGS}:max_length=300"], None, None, with_records=True, json_output=False)
    said = capsys.readouterr().out
    assert f"good: {GOOD}\n" in said
    assert f"bad: {'x' * 200}...\n" in said
    show_card([f"csv:{path}:{SETTINGS}"], None, None, with_records=True, json_output=True)
    card = json.loads(capsys.readouterr().out)
    assert card["first_records"][0] == {"text": GOOD, "class": "good"}
    assert (card["inputs"]["kind"], "ranges" in card) == ("tokens", False)


def test_a_run_on_texts_learns_their_labels_by_source_and_prints_what_was_cut(tmp_path):
    texts = [("a good film %d", "a bad one %d")[i % 2] % i for i in range(40)] + ["good" * 9, "bad" * 9]
    settings = {"data": f"csv:{reviews(tmp_path, texts)}:{SETTINGS}:max_length=16", "partition": "natural",
                "clients": 2, "rounds": 4, "engine": "inprocess",
                "local": {"learning_rate": 0.02, "optimizer": "adam", "epochs": 4, "batch_size": 8}}  # fmt: skip
    result = run(experiment_from(settings), tmp_path / "run")
    assert (result["model"], result["final_accuracy"]) == ("gru", 1.0)
    assert re.search(r"2 of 42 texts are longer than 16 tokens", json.dumps(result))


WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "a": 3, "good": 4, "bad": 5, "film": 6}


def tokenizer(folder: Path, words: dict[str, int], special: Sequence[str] = ()) -> Path:
    """Write a tokenizer.json of whole words, with a first token for the whole text, as BERT's has."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", words["[CLS]"])]
    )
    made.enable_padding(length=50)  # the file's own settings of padding and truncation do not count
    made.enable_truncation(2)
    made.add_special_tokens([*special])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_of_a_model_keeps_its_numbers_and_its_digest_is_in_the_note(tmp_path):
    place = tokenizer(tmp_path / "model", WORDS)
    path = reviews(tmp_path, ["a good film", "a bad dull film"] * 4)
    found = load(f"csv:{path}:{SETTINGS}:tokenizer={place}")
    rows = {tuple(map(int, row)) for row in found.train.inputs}
    assert rows == {(2, 3, 4, 6, 0), (2, 3, 5, 1, 6)}
    assert found.vocabulary == 7
    digest = hashlib.sha256((place / "tokenizer.json").read_bytes()).hexdigest()
    assert f"tokenizer.json {digest[:12]}, cut after" in found.note
    assert found.text_of(found.train.inputs[found.train.labels == 1][0]) == "[CLS] a good film"
    short = load(f"csv:{path}:{SETTINGS}:tokenizer={place}/tokenizer.json:max_length=4")
    assert short.counted == ("4 of 8 texts are longer than 4 tokens and are cut there (data.max_length)",)
    tokenizer(place, {**WORDS, "dull": 7})  # a changed file is read again
    assert load(f"csv:{path}:{SETTINGS}:tokenizer={place}").vocabulary == 8


def test_tokens_of_a_tokenizer_without_padding_at_0_are_one_higher(tmp_path):
    words = {"[CLS]": 0, "[UNK]": 1, "a": 2, "good": 3, "film": 4}
    place, path = tokenizer(tmp_path / "model", words), reviews(tmp_path, ["a good film", "a film"] * 4)
    found = load(f"csv:{path}:{SETTINGS}:tokenizer={place}")
    assert {tuple(map(int, row)) for row in found.train.inputs} == {(1, 3, 4, 5), (1, 3, 5, 0)}
    assert (found.vocabulary, found.text_of(found.train.inputs[0])) == (6, "[CLS] a good film")
    assert "each token one higher" in found.note


def test_tokens_are_kept_in_a_private_file_and_a_damaged_one_is_made_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fl_sim.data.tokens._CACHED", 1)
    monkeypatch.setenv("FL_SIM_FEATURES", str(tmp_path / "cache"))
    place, path = tokenizer(tmp_path / "model", WORDS), reviews(tmp_path, ["a good film", "a bad film"] * 4)
    name = f"csv:{path}:{SETTINGS}:tokenizer={place}"
    first = read(name, find(name))
    assert "computing the tokens of 8 texts; later runs read them from" in capsys.readouterr().err
    (file,) = (tmp_path / "cache").glob("*/tokens.safetensors")
    assert file.stat().st_mode & 0o777 == 0o600
    np.testing.assert_array_equal(read(name, find(name)).train.inputs, first.train.inputs)
    assert capsys.readouterr().err == ""
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    np.testing.assert_array_equal(read(name, find(name)).train.inputs, first.train.inputs)
    assert "cannot be used" in capsys.readouterr().err
    read(f"{name}:max_length=3", find(name))
    assert len([*(tmp_path / "cache").glob("*/tokens.safetensors")]) == 2


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    path = reviews(tmp_path, ["a good film", "[PAD] a bad film"] * 4)
    place = tokenizer(tmp_path / "model", WORDS, ["[PAD]"])
    with pytest.raises(UserError, match=r"gives its padding token inside of texts, such as for '\[PAD\] a bad film'"):
        load(f"csv:{path}:{SETTINGS}:tokenizer={place}")
    with pytest.raises(UserError, match=r"holds no tokenizer\.json; name its file or its folder"):
        load(f"csv:{path}:{SETTINGS}:tokenizer={tmp_path}/..")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match=r"other\.json is no tokenizer\.json"):
        load(f"csv:{path}:{SETTINGS}:tokenizer={tmp_path}/other.json")
    settings = {
        "data": f"csv:{path}:{SETTINGS}",
        "partition": "natural",
        "clients": 2,
        "model": f"{__name__}:few_tokens",
    }
    with pytest.raises(UserError, match=r"fails for token id 256, the highest of the 257 ids of these records"):
        job_of(experiment_from(settings)).model()


class FewTokens(torch.nn.Module):
    """A model for 200 tokens: enough for the letters of a text, and too few for bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(200, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.embedding(inputs.long()).mean(1)


def few_tokens(input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
    del input_shape, num_classes
    return FewTokens()
