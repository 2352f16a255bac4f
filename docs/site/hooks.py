"""What mkdocs alone does not do: files of the repository that pages link to become pages of the site."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

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
    """Let links out of docs lead to these pages."""
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
