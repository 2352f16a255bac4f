"""What mkdocs alone does not do: pages made from the program, and from files outside of docs that pages link to."""

import importlib
import inspect
import json
import operator
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.structure.files import File, Files

from fl_sim.cli.run import title_of
from fl_sim.cli.verbs import app
from fl_sim.experiment.reference import Group, groups
from fl_sim.kinds import field_defaults
from fl_sim.report.gallery import Entry, page_of, read_gallery
from fl_sim.report.table import cell_text
from fl_sim.settings import OneOf, kinds_of
from fl_sim.tables.labels import label

TOP = Path(__file__).resolve().parents[2]
DOCS = TOP / "docs"
SETTINGS_WITH_KINDS = (
    "algorithm", "partition", "sampler", "aggregator", "preprocess", "preprocess.generator", "calibrate", "compress",
    "attack", "devices", "server",
)  # fmt: skip
_BESIDE = {
    "preprocess.generator": "preprocess=da-fl", "preprocess=private-start": "aggregator=global-dp",
    "aggregator=distributed-dp": "aggregator.epsilon=8", "aggregator=distributed-dp-sgd": "aggregator.epsilon=8",
    "server=fedasync": "devices=log-normal", "server=fedbuff": "devices=log-normal",
    "devices=profile": "devices.path=devices.csv",
}  # fmt: skip
"""What a kind needs beside it: {a setting: before its kind, or a kind: after it}."""
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
_CODE = re.compile(r"^( *)<!-- code: ([\w.:]+) -->$", re.MULTILINE)
_METHODS = {"methods.md", "partial-training.md"}
"""Pages with tables of methods and attacks."""
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "sh", ".md": ""}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every notebook, and for every file and folder outside of docs that a page links to."""
    if (examples := str(TOP / "examples")) not in sys.path:  # here: mkdocs resets the path after it imported this file
        sys.path.append(examples)
    tables = read_gallery(DOCS / "results") if (DOCS / "results").is_dir() else []
    waiting = {path for page in files.documentation_pages() for path in _outside(Path(page.abs_src_path))}
    waiting |= {TOP / entry.about.file for entry in tables} | {_source(group) for group in _kinds()}
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
    for group in _kinds():
        files.append(File.generated(config, _kind_page(group), content=_about_kind(group, tables)))
    for notebook in sorted(DOCS.glob("notebooks/*.ipynb")):
        files.append(File.generated(config, _page_of(notebook), content=_read_notebook(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    """Let links to files lead to the pages made of them, and fill in what the program says of itself."""
    for mark, made in _MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    markdown = _CODE.sub(_quoted, markdown)
    if page.file.src_uri in _METHODS:
        markdown = _with_parameters(markdown)
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


def _quoted(mark: re.Match[str]) -> str:
    """Return the source of a function or class, as a block indented as far as its mark."""
    module, name = mark[2].split(":")
    found = operator.attrgetter(name)(importlib.import_module(module))
    code = textwrap.dedent(inspect.getsource(found)).rstrip()
    return textwrap.indent(f"```python\n{code}\n```", mark[1])


def _with_parameters(markdown: str) -> str:
    """Add a column to the tables of methods and attacks: parameters with defaults. A kind's name links to its page."""
    lines, setting = [], ""
    for line in markdown.splitlines():
        head, row = re.match(r"\| `(algorithm|attack)=` \|", line), re.match(r"\| `([\w-]+)` \|(.*)", line)
        if head:
            setting, lines = head[1], [*lines, f"{line} parameters |"]
        elif setting and row:
            first = f"| [`{row[1]}`](kinds/{setting}-{row[1]}.md) |"
            lines.append(f"{first}{row[2]} {_parameters(kinds_of(setting)[row[1]])} |")
        else:
            setting = setting if line.startswith("|") else ""
            lines.append(f"{line}---|" if setting else line)
    return "\n".join(lines)


def _parameters(kind: type) -> str:
    given = {name: str(value).lower() for name, value in field_defaults(kind).items() if name != "kind"}
    return ", ".join(f"`{name}` {value}" for name, value in given.items())


def _kinds() -> list[Group]:
    """Return every kind of the settings that are chosen in an experiment itself."""
    if not (DOCS / "kinds.md").exists():
        return []
    return [group for group in groups() if group.kind and group.name in SETTINGS_WITH_KINDS]


def _kind_page(group: Group) -> str:
    return f"kinds/{group.name}-{group.kind}.md"


def _class_of(group: Group) -> type:
    if "." not in group.name:
        return kinds_of(group.name)[group.kind]
    outer, field = group.name.split(".")
    holder = kinds_of(outer)[group.within.partition("=")[2]].model_fields[field]
    one_of = next(extra for extra in holder.metadata if isinstance(extra, OneOf))
    return one_of.known(holder.annotation)[group.kind]


def _source(group: Group) -> Path:
    """Return the file of a kind's class in this checkout, also where another checkout is installed."""
    path = TOP.joinpath(*_class_of(group).__module__.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _command(group: Group) -> str:
    before, after = _BESIDE.get(group.name, ""), _BESIDE.get(f"{group.name}={group.kind}", "")
    return " ".join(
        filter(None, ["fl-sim run", before, f"{group.name}={group.kind.replace('label-k', 'label-2')}", after])
    )


def _about_kind(group: Group, tables: Sequence[Entry]) -> str:
    """Return a kind's page, made from its class: source, equation, parameters, deviations, and measured accuracies."""
    kind = _class_of(group)
    title = label(kind()) if group.name == "algorithm" else group.kind
    paper = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
    lines = [
        f"# {title}", "", f"`{group.name}={group.kind}`. {_text(paper)}", "",
        _text(inspect.cleandoc(kind.__doc__ or "")), "",
        "````text", _command(group), "````", "",
    ]  # fmt: skip
    if group.settings:
        lines += ["## Parameters", "", *_rows_of(group), ""]
    if deviations := _deviations(title):
        lines += ["## Deviations from papers and released code", "", *deviations, ""]
    if measured := _measured(title, tables):
        lines += ["## Accuracy measured here", "", "Test accuracy in percent; each table's page has its command.", ""]
        lines += ["| table | split | row | accuracy |", "|---|---|---|---|", *measured, ""]
    source = _source(group)
    lines.append(f"Source: [{source.relative_to(TOP)}]({os.path.relpath(source, DOCS / 'kinds')}).")
    return "\n".join(lines) + "\n"


def _deviations(title: str) -> list[str]:
    """Return the paragraphs on a method in the page of methods."""
    paragraphs = re.split(r"\n(?=\* )|\n\n", (DOCS / "methods.md").read_text())
    heads = [(re.match(r"\* (.*?)[.:(]", one), one) for one in paragraphs]
    return [one for head, one in heads if head and re.search(rf"\*\*[^*]*\b{re.escape(title)}\b", head[0] + "**")]


def _measured(title: str, tables: Sequence[Entry]) -> list[str]:
    found = []
    for entry in tables:
        for row in entry.table.rows if entry.table else ():
            if row == title or row.startswith((f"{title} (", f"{title}, ")):
                found += [
                    f"| [{entry.about.title}](../results/{entry.name}/table.json) | {column} | {row} | {text} |"
                    for column in entry.table.columns
                    if (text := cell_text(entry.table.at(row, column), "last")) != "-"
                ]
    return found


def _list_of_kinds() -> str:
    """Return the list of all kinds, by setting."""
    lines = []
    for name in SETTINGS_WITH_KINDS:
        rows = [f"* [`{one.kind}`]({_kind_page(one)}): {_text(one.about)}" for one in _kinds() if one.name == name]
        lines += [f"## `{name}=`", "", *rows, ""]
    return "\n".join(lines)


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
    table = ["", *_rows_of(group)] if group.settings else []
    return "\n".join([heading, "", _text(group.about), *table, ""])


def _rows_of(group: Group) -> list[str]:
    rows = [
        f"| `{one.name}` | {_cell(one.takes)} | {_code(one.default)} | {_cell(one.meaning)} |" for one in group.settings
    ]
    return ["| setting | takes | default | meaning |", "|---|---|---|---|", *rows]


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
_MADE = {
    "<!-- every setting -->": _settings,
    "<!-- every command -->": _commands,
    "<!-- every knob -->": _knobs,
    "<!-- every kind -->": _list_of_kinds,
}
