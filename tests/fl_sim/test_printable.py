"""What comes from files steers no terminal, is no formula in a spreadsheet, and is one line where one is wanted."""

import ast
import re
from pathlib import Path

import pytest

import fl_sim
from fl_sim.errors import MOST_LETTERS, UserError
from fl_sim.printable import as_cell, in_a_line, printable

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
