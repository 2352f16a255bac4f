"""What mkdocs alone does not do: pages made from the program, and from files outside of docs that pages link to."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.structure.files import File, Files

from fl_sim.cli.run import title_of
from fl_sim.cli.verbs import app
from fl_sim.experiment.reference import Group, groups
from fl_sim.report.gallery import page_of, read_gallery
from fl_sim.settings import kinds_of

TOP = Path(__file__).resolve().parents[2]
DOCS = TOP / "docs"
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "sh", ".md": ""}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every notebook, and for every file and folder outside of docs that a page links to."""
    tables = read_gallery(DOCS / "results") if (DOCS / "results").is_dir() else []
    waiting = {path for page in files.documentation_pages() for path in _outside(Path(page.abs_src_path))}
    waiting |= {TOP / entry.about.file for entry in tables}
    made: set[Path] = set()
    while waiting:
        made |= waiting
        inside = {file for path in waiting if path.is_dir() for file in path.glob("*.py")}
        further = {other for path in waiting if path.suffix == ".md" for other in _outside(path)}
        waiting = (inside | further) - made
    for path in sorted(made):
        files.append(File.generated(config, _page_of(path), content=_shown(path)))
    for entry in tables:
        files.append(File.generated(config, f"results/{entry.name}.md", content=page_of(entry, "../..")))
    for notebook in sorted(DOCS.glob("notebooks/*.ipynb")):
        files.append(File.generated(config, _page_of(notebook), content=_read_notebook(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    """Let links to files lead to the pages made of them, and fill in what the program says of itself."""
    for mark, made in _MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    uri = Path(page.file.src_uri)
    origin = TOP / uri.relative_to("source") if uri.is_relative_to("source") else DOCS / uri

    def there(link: re.Match[str]) -> str:
        path = origin.parent.joinpath(link[0]).resolve()
        if path.name == "table.json" and path.is_relative_to(DOCS / "results"):  # a table's page is made from it
            return os.path.relpath(f"results/{path.parent.name}.md", uri.parent)
        is_elsewhere = path.suffix == ".ipynb" or not (path.is_relative_to(DOCS) and origin.is_relative_to(DOCS))
        is_page = is_elsewhere and path.exists() and path.is_relative_to(TOP)
        return os.path.relpath(_page_of(path), uri.parent) if is_page else link[0]

    return _LINK.sub(there, markdown)


def _outside(page: Path) -> Iterator[Path]:
    """Find the files and folders of the repository outside of docs that a page of Markdown links to."""
    for link in _LINK.findall(page.read_text()):
        path = page.parent.joinpath(link).resolve()
        if path.exists() and path.is_relative_to(TOP) and not path.is_relative_to(DOCS):
            yield path


def _page_of(path: Path) -> str:
    """Return which page of the site a file or folder of the repository is."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix().replace(".ipynb", ".md")
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


def _read_notebook(path: Path) -> str:
    """Return a notebook as a page: its words, its code, and what that printed and drew."""
    parts = [f'<a href="{path.name}" download>The notebook itself</a>']
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"````python\n{text}\n````" if cell["cell_type"] == "code" else text)
        parts += [_output(output) for output in cell.get("outputs", [])]
    title, *others = parts[1:]
    return "\n\n".join([title, parts[0], *others])


def _output(output: dict[str, Any]) -> str:
    shown = output.get("data", {})
    if "image/png" in shown:
        return f"![What the cell draws](data:image/png;base64,{''.join(shown['image/png']).replace(chr(10), '')})"
    if "text/markdown" in shown:
        return "".join(shown["text/markdown"])
    return f"````text\n{''.join(output.get('text', shown.get('text/plain', ''))).rstrip()}\n````"


def _knobs() -> str:
    """Return which settings to turn where a method diverges, as its message says."""
    rows = [
        f"| {kind} | {_cell(method.knobs)} |"
        for kind, method in kinds_of("algorithm").items()
        if hasattr(method, "knobs")
    ]
    return "\n".join(["| method | what its message says |", "|---|---|", *rows])


def _settings() -> str:
    """Return the reference of all settings: a table for each group."""
    return "\n".join(_section(group) for group in groups())


def _section(group: Group) -> str:
    title = f"`{title_of(group)}`" if group.name else "An experiment"
    heading = f"{'###' if group.kind or group.within else '##'} {title}"
    rows = [
        f"| `{one.name}` | {_cell(one.takes)} | {_code(one.default)} | {_cell(one.meaning)} |" for one in group.settings
    ]
    table = ["", "| setting | takes | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([heading, "", _text(group.about), *table, ""])


def _code(default: str) -> str:
    return f"`{default}`" if default not in {"", "left out", "none, it must be given"} else default


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
_MADE = {"<!-- every setting -->": _settings, "<!-- every command -->": _commands, "<!-- every knob -->": _knobs}
