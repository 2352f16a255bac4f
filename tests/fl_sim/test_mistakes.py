"""Messages about mistakes in settings, and texts that are safe on a terminal and in a spreadsheet."""

import ast
import re
from pathlib import Path

import pytest

import fl_sim
from fl_sim.__main__ import main
from fl_sim.data.places import find
from fl_sim.errors import MOST_LETTERS, UserError, as_cell, in_a_line, printable
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.groups import Local
from fl_sim.other_words import OTHER_WORDS
from fl_sim.settings import kinds_of

LONG = "9" * 5000


def refusal(**settings: object) -> str:
    with pytest.raises(UserError) as caught:
        experiment_from(settings)
    return str(caught.value)


def test_five_short_mistakes_are_all_told():
    told = refusal(clients=0, rounds=0, model=2, round_timeout=-1, evaluate_every="x")
    assert told.count("; ") == 4
    assert "more mistake" not in told


def test_of_seven_short_mistakes_five_are_told():
    told = refusal(clients=0, rounds=0, model=2, round_timeout=-1, evaluate_every="x", seed="x", device=2)
    assert told.count("; ") == 5
    assert told.endswith("; and 2 more mistakes")


def test_what_is_told_of_long_values_stays_short_and_counts_the_rest():
    told = refusal(partition=LONG, algorithm=LONG, aggregator=LONG, compress=LONG, attack=LONG)
    assert told.startswith("partition = '999")
    assert " ... " in told
    assert len(told) <= 1000
    whole = told.count("package.module:Class")
    assert 1 <= whole < 5
    assert told.endswith(f"; and {5 - whole} more mistakes")


def test_one_mistake_is_told_however_long_and_one_more_is_one():
    told = refusal(partition=LONG, algorithm=LONG)
    assert told.endswith("; and 1 more mistake")
    assert len(refusal(algorithm=LONG)) <= 700


def test_a_value_of_usual_length_is_quoted_whole():
    name = "csv:" + "/folder" * 30
    assert f"normalise = {name!r}" in refusal(normalise=name)


SOURCE = Path(fl_sim.__file__).parent


def test_characters_that_steer_a_terminal_are_written_out():
    assert printable("a\x1b[31mb\x07\x9b2J\x7f\r\u202ec\ud800\u2028d\te\nf") == (
        r"a\x1b[31mb\x07\x9b2J\x7f\r\u202ec\ud800\u2028d" + "\te\nf"
    )
    assert printable("Zürich ✓ 日本 45 %") == "Zürich ✓ 日本 45 %"
    assert in_a_line("a\r\n  b\tc\u2029d\x1b") == r"a b c d\x1b"


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"), ("+cmd|x", "'+cmd|x"), ("-1+2", "'-1+2"), ("@SUM(A1)", "'@SUM(A1)"), (" =x", "' =x"),
        ("\t=x", "'\t=x"), ("\uff1d1", "'\uff1d1"), ("-0.5", "-0.5"), ("+5e3", "+5e3"), ("-inf", "-inf"),
        ("a=1", "a=1"), ("", ""), ("5", "5"),
    ],
)  # fmt: skip
def test_formulas_become_texts_and_numbers_stay(text, cell):
    assert as_cell(text) == cell


def test_all_that_the_command_line_prints_passes_the_screen():
    prints = {}
    for path in SOURCE.rglob("*.py"):
        found = [
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"typer.echo", "click.echo", "typer.secho"}
        ]
        prints |= {str(path.relative_to(SOURCE)): found} if found else {}
    assert prints == {"cli/screen.py": ["typer.echo"]}


@pytest.mark.parametrize(
    "message", ["9" * 5000, f"x = {'a' * 100_000!r}: no", "valid: " + ", ".join(map(str, range(5000)))]
)
def test_a_refusal_is_short_whatever_it_quotes(message):
    said = str(UserError(f"data.path: {message}; take another one"))
    assert len(said) <= MOST_LETTERS
    assert said.startswith("data.path: ")
    assert said.endswith("; take another one")
    assert " ... " in said


def test_a_refusal_of_usual_length_is_left_as_it_is():
    message = f"there is no file {'/folder' * 60}: {' '.join(['word'] * 400)}"
    assert str(UserError(message)) == message
    assert re.search(r"\S{300}", str(UserError("y" * 611))) is not None
    assert str(UserError("y" * 610)) == "y" * 610


SETTING = re.compile(r"[a-z_.]+=[^ ,]+")


@pytest.mark.parametrize("meant", sorted(set(OTHER_WORDS.values())))
def test_what_a_word_is_answered_with_are_settings_of_ours(meant: str) -> None:
    for together in meant.split(", "):
        settings = SETTING.findall(together)
        assert settings
        experiment_from(with_overrides({"clients": 10}, settings))


def test_no_word_is_a_setting_of_ours_at_the_top() -> None:
    assert not set(OTHER_WORDS) & set(Experiment.model_fields)


@pytest.mark.parametrize("word", ["lr", "epochs", "batch_size", "fraction_fit", "num_clients", "epsilon"])
def test_the_word_is_answered_wherever_it_is_typed(word: str) -> None:
    places = [word] if word in Local.model_fields else [word, f"local.{word}"]
    for place in places:
        with pytest.raises(UserError) as caught:
            experiment_from(with_overrides({}, [f"{place}=1"]))
        assert f"unknown key {place!r} (here: {OTHER_WORDS[word]}); valid here: " in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("num-server-rounds=5", "'num-server-rounds' (here: rounds=50)"),
        ("Learning-Rate=0.1", "'Learning-Rate' (here: local.learning_rate=0.01)"),
        ("local.learning-rate=0.1", "(here: local.learning_rate=0.01)"),
        ("fraction-fit=0.1", "(here: sampler=poisson:0.1, or sampler=fixed-size:10)"),
        ("algorithm=MOON", "(did you mean 'moon'?)"),
        ("algorithm=FedAvgM", "(did you mean 'fedavgm'?)"),
        ("local.batchSize=3", "(did you mean 'batch_size'?)"),
    ],
)
def test_case_and_hyphens_of_other_programs_do_not_hide_what_is_meant(typed: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        experiment_from(with_overrides({}, [typed]))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("MNIST", "did you mean 'mnist'?"), ("CIFAR-10", "did you mean 'cifar10'?"), ("FMNIST", "data=fashion-mnist"),
        ("femnist", "data=leaf:FOLDER"), ("FashionMNIST", "data=fashion-mnist"), ("mnits", "did you mean 'mnist'?"),
    ],
)  # fmt: skip
def test_a_data_set_in_the_spelling_of_other_programs_is_answered_with_its_name_here(typed: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"unknown data set {typed!r} (")) as caught:
        find(typed)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "typed", ["algorithm=dp-sgd", "opacus=true", "dp_sgd=true", "aggregator=DP-SGD", "local.opacus=1", "algorithm=dp"]
)
def test_record_level_noise_in_training_is_answered_with_its_setting_and_others(typed: str) -> None:
    with pytest.raises(UserError) as caught:
        experiment_from(with_overrides({}, [typed]))
    said = str(caught.value)
    offered = re.findall(r"(?:aggregator|preprocess|algorithm|local.privacy)=[a-z-]+", said.partition("for noise")[2])
    assert offered == [
        "local.privacy=dp-sgd", "aggregator=global-dp", "preprocess=da-fl", "algorithm=pate", "local.privacy=local-dp",
    ]  # fmt: skip
    for setting in offered:
        assert setting.partition("=")[2] in kinds_of(setting.partition("=")[0])


@pytest.mark.parametrize("typed", ["algorithm=ldp", "aggregator=LocalDpMod", "local_dp=true"])
def test_noise_on_an_update_is_answered_with_its_setting(typed: str) -> None:
    with pytest.raises(UserError, match=r"local\.privacy=local-dp local\.privacy\.epsilon=8"):
        experiment_from(with_overrides({}, [typed]))


@pytest.mark.parametrize("typed", ["algorithm=secagg", "aggregator=skellam", "secure_aggregation=true"])
def test_secure_aggregation_is_answered_with_the_setting_that_simulates_it(typed: str) -> None:
    with pytest.raises(UserError, match=r"aggregator=distributed-dp aggregator\.epsilon=8.*simulated by a plain sum"):
        experiment_from(with_overrides({}, [typed]))


def test_an_option_of_other_programs_is_answered_with_the_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, said in (("--lr=0.1", "(here: local.learning_rate=0.01)"), ("--rounds=5", "(for example rounds=50)")):
        monkeypatch.setattr("sys.argv", ["fl-sim", "run", option])
        with pytest.raises(SystemExit):
            main()
        assert f"without dashes before them {said}" in capsys.readouterr().err


def test_several_values_in_the_place_of_one_are_answered_with_how_they_are_tried() -> None:
    for given in ("local.learning_rate=0.01,0.1", "algorithm=fedavg,fedprox", "seed=0,1"):
        with pytest.raises(UserError, match=f"'fl-sim sweep {given}'"):
            experiment_from(with_overrides({}, [given]))
    with pytest.raises(UserError) as caught:
        experiment_from({"rounds": "many"})
    assert "sweep" not in str(caught.value)
