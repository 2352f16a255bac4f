"""``fl-sim data``: which data sets are on this machine, and whether their files are sound."""

import json
from pathlib import Path
from typing import Any

from fl_sim.cli.screen import say
from fl_sim.data import NAMES, Check, Source, find, roots, verify, wanted_files
from fl_sim.errors import RunError


def show_found(data_root: Path | None, *, json_output: bool) -> None:
    """Print which data sets are found, and where the others are looked for."""
    found = {name: find(name, data_root) for name in NAMES}
    if json_output:
        searched = [
            {"path": str(root.path), "origin": root.origin, "exists": root.path.is_dir()} for root in roots(data_root)
        ]
        say(json.dumps({"roots": searched, "data": [_row(name, source) for name, source in found.items()]}))
        return
    for name, source in found.items():
        say(f"{name:14} {_where(source) if source else f'missing; wanted: {wanted_files(name)}'}")
    say("searched: " + ", ".join(f"{root.path} ({root.origin})" for root in roots(data_root)))
    say(
        "your own: csv:PATH, parquet:PATH (a table with a column for the label), npz:PATH (x_train, y_train, x_test, "
        "y_test), folder:PATH (train/CLASS/*.png, test/CLASS/*.png), leaf:PATH, medmnist:PATH, hf:NAME (docs/data.md)"
    )


def verify_all(names: list[str], data_root: Path | None, *, json_output: bool) -> None:
    """Compare the data sets ``names``, or all that are found, with what is published.

    Raises RunError where a file is damaged or a data set asked for is missing.
    """
    wanted = names or [name for name in NAMES if find(name, data_root)]
    checks = []
    for name in wanted:
        checks.append(verify(name, data_root))
        if not json_output:
            _say(checks[-1])
    broken = [check.name for check in checks if not check.ok]
    if json_output:
        rows = [{**_row(c.name, c.source), "ok": c.ok, "problems": list(c.problems), "note": c.note} for c in checks]
        say(json.dumps({"ok": not broken, "data": rows}))
    if broken:
        raise RunError(f"not in order: {', '.join(broken)}")


def _row(name: str, source: Source | None) -> dict[str, Any]:
    path = None if source is None or source.path is None else str(source.path)
    layout = source.layout if source else None
    return {"name": name, "found": source is not None, "layout": layout, "path": path}


def _where(source: Source | None) -> str:
    if source is None:
        return "missing"
    return f"{source.layout:8} {source.path}" if source.path else "embedded in scikit-learn"


def _say(check: Check) -> None:
    say(
        f"{check.name:14} {'ok' if check.ok else 'NOT OK':7} {_where(check.source)}"
        + (f"  ({check.note})" if check.note else "")
    )
    for problem in check.problems:
        say(f"    {problem}")
