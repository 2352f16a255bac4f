"""``fl-sim report --gallery``: the page of the tables that were run, beside what was published."""

import json
import os
from pathlib import Path

from fl_sim.cli.screen import say
from fl_sim.errors import UserError
from fl_sim.report.gallery import PAGE, gallery_text, read_gallery
from fl_sim.store.run_directory import write_text


def write_gallery(directories: list[Path], out: Path | None, *, json_output: bool) -> None:
    """Write DIR/README.md from the folders in DIR, and print where it is."""
    if len(directories) > 1 or out is not None:
        raise UserError("--gallery takes one DIR, which holds a folder for each table, and writes DIR/README.md")
    (directory,) = directories
    entries = read_gallery(directory)
    page = directory / PAGE
    write_text(page, gallery_text(entries, _root(directory)))
    waiting = [entry.name for entry in entries if entry.table is None]
    if json_output:
        say(json.dumps({"page": str(page), "tables": len(entries) - len(waiting), "to_be_run": waiting}))
        return
    say(f"{page}: {len(entries) - len(waiting)} tables")
    if waiting:
        say(f"still to be run: {', '.join(waiting)}")


def _root(directory: Path) -> str:
    """Return the way from the page to the repository's root, where the tables' files are named from; else upwards."""
    inside = directory.resolve()
    for number, above in enumerate([inside, *inside.parents]):
        if (above / "benchmarks").is_dir():
            return "/".join([os.pardir] * number) or os.curdir
    return os.curdir
