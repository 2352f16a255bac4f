"""What mkdocs alone does not do: pages made from the program, and from files outside of docs that pages link to."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.structure.files import File, Files

from fl_sim.cli.verbs import app
from fl_sim.experiment.reference import Group, groups

TOP = Path(__file__).resolve().parents[2]
DOCS = TOP / "docs"
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "sh", ".md": ""}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file and folder outside of docs that a page links to."""
    written = {page.src_uri: Path(page.abs_src_path).read_text() for page in files.documentation_pages()}
    linked = {path for uri, text in written.items() for _, path in _outside(uri, text)}
    listed = {inside for path in linked if path.is_dir() for inside in path.glob("*.py")}
    for path in sorted(linked | listed):
        files.append(File.generated(config, _page_of(path), content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    """Let links out of docs lead to these pages, and fill in what the program says of itself."""
    for mark, made in _MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    here = Path(page.file.src_uri).parent
    targets = {link: os.path.relpath(_page_of(path), here) for link, path in _outside(page.file.src_uri, markdown)}
    return _LINK.sub(lambda found: targets.get(found[0], found[0]), markdown)


def _outside(uri: str, text: str) -> Iterator[tuple[str, Path]]:
    """Find (link, file or folder of the repository) of the links in the page at ``uri`` that lead out of docs."""
    for link in _LINK.findall(text):
        path = (DOCS / uri).parent.joinpath(link).resolve()
        if path.exists() and path.is_relative_to(TOP) and not path.is_relative_to(DOCS):
            yield link, path


def _page_of(path: Path) -> str:
    inside = path.relative_to(TOP).as_posix()
    return f"source/{inside}/index.md" if path.is_dir() else f"source/{inside.removesuffix('.md')}.md"


def _shown(path: Path) -> str:
    name = path.relative_to(TOP).as_posix()
    if path.is_dir():
        inside = "".join(f"* [{file.name}]({file.name}.md)\n" for file in sorted(path.glob("*.py")))
        return f"# {name}\n\n{inside}"
    if path.suffix == ".md":
        return path.read_text()
    return f"# {name}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````\n"


def _settings() -> str:
    """Return the reference of all settings: a table for each group."""
    return "\n".join(_section(group) for group in groups())


def _section(group: Group) -> str:
    title = f"{group.name}={group.kind}" if group.kind else group.name
    heading = f"{'###' if group.kind else '##'} `{title or 'An experiment'}`".replace(
        "`An experiment`", "An experiment"
    )
    rows = [
        f"| `{one.name}` | {_cell(one.takes)} | {_code(one.default)} | {_cell(one.meaning)} |" for one in group.settings
    ]
    table = ["", "| setting | takes | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([heading, "", _text(group.about), *table, ""])


def _code(default: str) -> str:
    return f"`{default}`" if default not in {"", "left out"} else default


def _cell(text: str) -> str:
    return _text(text).replace("|", "&#124;")


def _text(text: str) -> str:
    """Return a docstring's text as Markdown: names in backticks stay, all else is shown as it stands."""
    parts = re.split(r"``(.*?)``", text)
    plain = [re.sub(r"([*_<])", r"\\\1", part) for part in parts[::2]]
    named = [f"`{part}`" for part in parts[1::2]]
    return "".join(part for pair in zip(plain, [*named, ""], strict=True) for part in pair)


def _commands() -> str:
    """Return the help of every verb, as it is printed."""
    return "\n".join(_helps(typer.main.get_command(app), click.Context(click.Command("fl-sim"), info_name="fl-sim")))


def _helps(command: click.Command, above: click.Context) -> Iterator[str]:
    for name, verb in command.commands.items():
        context = click.Context(verb, info_name=name, parent=above)
        context.max_content_width = _WIDTH
        context.terminal_width = _WIDTH
        yield f"## `{context.command_path}`\n\n````text\n{verb.get_help(context)}\n````\n"
        if hasattr(verb, "commands"):
            yield from _helps(verb, context)


_WIDTH = 100
_MADE = {"<!-- every setting -->": _settings, "<!-- every command -->": _commands}
