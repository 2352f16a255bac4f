"""The code of ``fl-sim data`` and ``partition``: data sets on this machine, their content, and partitions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fl_sim.cli.running_verbs import RunArguments
from fl_sim.cli.screen import say
from fl_sim.data import NAMES, DataSource, find, is_own, load, roots, verify, wanted_files
from fl_sim.data.dataset import card_of
from fl_sim.errors import RunError, UserError, in_a_line, printable
from fl_sim.importing import importing
from fl_sim.kinds import short_form
from fl_sim.types import Dataset
from partitions import ByRound, label_counts
from partitions.assign import USUAL_MIN_SIZE

_MOST: Final = 20
"""Largest number of printed classes, and of printed values of a record."""
_LONGEST: Final = 200
"""Largest number of printed characters of a text. With --json, the whole text is printed."""
_BAR: Final = 30
_MOST_CLIENTS: Final = 30
_MOST_COLUMNS: Final = 12
_QUANTILES: Final = {"min": 0.0, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


def show_found(data_root: Path | None, *, json_output: bool) -> None:
    """Print the data sets that are found on this machine, and the folders that are searched."""
    found = {name: find(name, data_root) for name in NAMES}
    if json_output:
        searched = [
            {"path": str(root.path), "origin": root.origin, "exists": root.path.is_dir()} for root in roots(data_root)
        ]
        say(json.dumps({"roots": searched, "data": [_row(name, source) for name, source in found.items()]}))
        return
    for name, source in found.items():
        say(f"{name:14} {_where(source)}{'' if source else f'; wanted: {wanted_files(name)}'}")
    say("searched: " + ", ".join(f"{root.path} ({root.origin})" for root in roots(data_root)))
    say(
        "your own: csv:PATH, parquet:PATH (a table with a column for the label), npz:PATH (x_train, y_train, x_test, "
        "y_test), folder:PATH (train/CLASS/*.png, test/CLASS/*.png), leaf:PATH, medmnist:PATH, hf:NAME, "
        "domains:A+B (several data sets; docs/data.md)"
    )


def verify_all(names: list[str], data_root: Path | None, *, json_output: bool) -> None:
    """Compare data sets with their published checksums, shapes and numbers of records, and print the results.

    ``names``: the data sets to check; empty: all data sets on this machine. Raises RunError if a file is damaged, or if
    a data set in ``names`` is missing.
    """
    wanted = names or [name for name in NAMES if find(name, data_root)]
    checks = []
    for name in wanted:
        check = verify(name, data_root)
        checks.append(check)
        if not json_output:
            note = f"  ({check.note})" if check.note else ""
            say(f"{check.name:14} {'ok' if check.ok else 'NOT OK':7} {_where(check.source)}{note}")
            for problem in check.problems:
                say(f"    {problem}")
    broken = [check.name for check in checks if not check.ok]
    if json_output:
        rows = [{**_row(c.name, c.source), "ok": c.ok, "problems": list(c.problems), "note": c.note} for c in checks]
        say(json.dumps({"ok": not broken, "data": rows}))
    if broken:
        raise RunError(f"damaged or missing: {', '.join(broken)}")


def show_card(
    arguments: list[str], sheet: Path | None, data_root: Path | None, *, with_records: bool, json_output: bool
) -> None:
    """Print the description of a data set. If ``sheet`` is given, also draw some of its images into this file.

    ``arguments``: the name of the data set, then settings ``data.KEY=VALUE``. ``with_records``: True also prints the
    first records. Raises UserError for an unknown name, or if ``sheet`` is given and the records are not images.
    """
    from fl_sim.experiment.experiment import experiment_from, with_overrides  # noqa: PLC0415 (slow, only here)

    name, *overrides = arguments
    if strange := [text for text in overrides if not text.startswith("data.")]:
        raise UserError(f"{strange[0]}: after the name, give only settings of the data, such as data.label=outcome")
    dataset = load(experiment_from(with_overrides({"data": name}, overrides)).data, data_root)
    card = card_of(dataset, with_records=with_records)
    if sheet is not None:
        _draw(dataset, sheet)
        card |= {"sheet": str(sheet), "shows_records": True}
    if json_output:
        say(json.dumps(card))
    else:
        _print_card(_in_lines(card))
    if card["shows_records"] and is_own(dataset.name):
        say("This description shows records of your data. If the records are private, so is the description.", err=True)


def show_partition(given: RunArguments, plot: Path | None, data_root: Path | None, *, json_output: bool) -> None:
    """Print the number of records of each class on every client.

    If ``plot`` is given, also draw these numbers into this file. In some partitions, records move between clients
    during the run. The drawing then shows the shards before the first move. The printed text has the numbers before the
    first move and after the last move.
    """
    with importing():
        from fl_sim.cli.run import parse_experiment  # noqa: PLC0415 (slow, only here)
        from fl_sim.experiment.shards import moving_of, shards_of  # noqa: PLC0415
        from fl_sim.report.figures.partition import draw_partition  # noqa: PLC0415
        from fl_sim.tables.labels import label  # noqa: PLC0415

    experiment = parse_experiment(given)
    data, clients, seed = experiment.data, experiment.clients, experiment.seed_of_partition
    dataset = load(data, data_root)
    scheme = experiment.partition
    moving = moving_of(dataset, scheme, clients, seed) if isinstance(scheme, ByRound) else None
    parts = shards_of(dataset, scheme, clients, seed) if moving is None else moving.first
    counts = label_counts(dataset.train.labels, parts, dataset.num_classes)
    left_out = np.bincount(dataset.train.labels, minlength=dataset.num_classes) - counts.sum(axis=0)
    title = f"{data}, {label(scheme)}, {clients:,} clients, seed {seed}"
    later = None if moving is None else label_counts(dataset.train.labels, moving.last, dataset.num_classes)
    start, end = (moving.moves_in[0], moving.moves_in[-1]) if moving is not None and moving.moves_in else (0, 0)
    first_title = f"{title}, before round {start}" if end else title
    if plot is not None:
        draw_partition(counts, plot, first_title)
    _warn(counts, left_out)
    if json_output:
        sizes = counts.sum(axis=1).tolist()
        result = {"data": data, "data_note": dataset.note, "scheme": short_form(scheme), "clients": clients,
                  "seed": seed, "sizes": sizes, "label_counts": counts.tolist(),
                  "left_out": left_out.tolist()}  # fmt: skip
        if later is not None:
            result["moves"] = {"first_round": start, "last_round": end, "sizes": later.sum(axis=1).tolist(),
                               "label_counts": later.tolist()}  # fmt: skip
        say(json.dumps(result))
        return
    note = f" ({dataset.note})" if dataset.note else ""
    _print_split(counts, first_title + note)
    if later is not None and end:
        _print_split(later, f"{title}, from round {end} on{note}")
    if plot is not None:
        say(f"drawn to {plot}")


def _row(name: str, source: DataSource | None) -> dict[str, Any]:
    path = None if source is None or source.path is None else str(source.path)
    layout = source.layout if source else None
    return {"name": name, "found": source is not None, "layout": layout, "path": path}


def _where(source: DataSource | None) -> str:
    if source is None:
        return "missing"
    if source.layout == "embedded":
        return "embedded in scikit-learn"
    return f"{source.layout:8} {source.path or ''}".rstrip()


def _in_lines(value: Any) -> Any:
    """Return a copy of ``value`` for printing, in which each text is a single line.

    The reason: names from files, such as class names, may contain line breaks.
    """
    if isinstance(value, str):
        return in_a_line(value)
    if isinstance(value, list):
        return [_in_lines(one) for one in value]
    return {in_a_line(key): _in_lines(one) for key, one in value.items()} if isinstance(value, dict) else value


def _draw(dataset: Dataset, sheet: Path) -> None:
    if dataset.train.inputs.ndim != 4:
        raise UserError(f"--sheet draws images, and the records of {dataset.name} are not images: leave --sheet out")
    if sheet.suffix.lower() != ".png":
        raise UserError(f"cannot draw to {sheet}: give a file name that ends in .png")
    from fl_sim.report.figures.samples import draw_records  # noqa: PLC0415 (matplotlib: a second to import)
    from fl_sim.report.picture import png  # noqa: PLC0415
    from fl_sim.store.files import readable_os_errors, write_whole  # noqa: PLC0415

    classes = dataset.classes or tuple(f"class {label}" for label in range(dataset.num_classes))
    drawn = png(draw_records(dataset.train, classes, [f"{dataset.name}: training records", dataset.note]))
    with readable_os_errors():
        sheet.parent.mkdir(parents=True, exist_ok=True)
        write_whole(sheet, drawn)


def _print_card(card: Mapping[str, Any]) -> None:
    say(card["name"])
    for line in filter(None, (card["note"], *card["counted"])):
        say(f"  {line}")
    records, inputs = card["records"], card["inputs"]
    what = "x".join(map(str, inputs["shape"]))
    kind = {
        "images": f"images, channels x height x width {what}",
        "tokens": f"sequences of up to {what} tokens, from 1 to below {inputs.get('vocabulary')}; 0 is padding",
        "numbers": f"{what} numbers per record",
    }[inputs["kind"]]
    validation = f", {records['validation']:,} for evaluate.validation=given" if "validation" in records else ""
    say(f"records   {records['train']:,} to train, {records['test']:,} to test{validation}")
    say(f"inputs    {kind} ({inputs['type']})")
    _print_classes(card["classes"])
    _print_clients(card["clients"])
    _print_columns(card)
    if card["inferred"]:
        say("\n  ".join(["assumed (no setting states it)", *card["inferred"]]))
    for fact in card["read_off"]:
        say(f"read from the records: {fact}")
    if card.get("first_records"):
        _print_records(card["first_records"])
    if "sheet" in card:
        say(f"drawn to {card['sheet']}")


def _print_classes(classes: list[dict[str, Any]]) -> None:
    if not classes:
        say("classes   none: the records have no labels")
        return
    say(f"classes   {len(classes)}: training and test records")
    width = max(len(one["name"]) for one in classes[:_MOST])
    largest = max(one["train"] for one in classes)
    for one in classes[:_MOST]:
        bar = "#" * round(_BAR * one["train"] / largest)
        say(f"  {one['name']:{width}} {one['train']:9,} {one['test']:9,}  {bar}")
    if len(classes) > _MOST:
        say(f"  ... and {len(classes) - _MOST:,} more (all of them with --json)")


def _print_clients(clients: dict[str, Any] | None) -> None:
    if clients is None:
        say("clients   the data set does not assign records to clients")
        return
    say(
        f"clients   {clients['count']:,}: {clients['smallest']:,} to {clients['largest']:,} training records each, "
        f"median {clients['median']:g}; {clients['with_one_record']:,} with one record, "
        f"{clients['with_test_records']:,} with test records of their own; they are the clients of a run with "
        f"partition=natural clients={clients['count']}"
    )
    most = max(step["clients"] for step in clients["histogram"])
    for step in clients["histogram"]:
        held = f"{step['from']:,}" if step["from"] == step["to"] else f"{step['from']:,}-{step['to']:,}"
        say(f"  {held:>19} {step['clients']:9,}  {'#' * round(_BAR * step['clients'] / most)}")


def _print_columns(card: Mapping[str, Any]) -> None:
    if not card["columns"]:
        return
    ranges = {one["name"]: f" (here {one['from']:g}..{one['to']:g})" for one in card.get("ranges", [])}
    say("columns")
    width = max(len(column["name"]) for column in card["columns"])
    for column in card["columns"]:
        held = ranges.get(column["name"], "") if column["is"].startswith("number, unchanged") else ""
        say(f"  {column['name']:{width}}  {column['is']}{held}")


def _print_records(rows: list[dict[str, Any]]) -> None:
    say(f"first     {len(rows)} training records, as models see them")
    for row in rows:
        if "text" in row:
            shown = row["text"] if len(row["text"]) <= _LONGEST else f"{row['text'][:_LONGEST]}..."
            say(f"  {row['class']}: {shown}" if "class" in row else f"  {shown}")
            continue
        cells = [
            (name if "=" in name and value == 1 else f"{name} {value:g}")
            if isinstance(value, float)
            else f"{name} {value}"
            for name, value in row.items()
            if "=" not in name or value
        ]
        left = [*cells[:_MOST], f"... {len(cells) - _MOST - 1} more", cells[-1]] if len(cells) > _MOST + 1 else cells
        say(f"  {', '.join(left)}")


def _warn(counts: NDArray[np.int64], left_out: NDArray[np.int64]) -> None:
    sizes = counts.sum(axis=1)
    num_small, num_empty = np.count_nonzero(sizes < USUAL_MIN_SIZE), np.count_nonzero(sizes == 0)
    if num_small:
        none = f"; {num_empty:,} of them have no records and do not train" if num_empty else ""
        say(
            f"warning: {num_small:,} of {len(sizes):,} clients have fewer than {USUAL_MIN_SIZE} records{none}", err=True
        )
    if left_out.any():
        classes = ", ".join(str(c) for c in np.flatnonzero(left_out))
        say(
            f"warning: {left_out.sum():,} of {left_out.sum() + sizes.sum():,} training records belong to no client: "
            f"no client has records of class {classes}; use at least {len(left_out)} clients, or more "
            "classes per client, such as partition=label-2",
            err=True,
        )


def _print_split(counts: NDArray[np.int64], title: str) -> None:
    num_clients, num_classes = counts.shape
    wide = num_classes <= _MOST_COLUMNS
    shown = num_clients if num_clients <= _MOST_CLIENTS else 10
    table = Table(title=Text(printable(title)), box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")
    for heading in ("client", "records", *(map(str, range(num_classes)) if wide else ("classes",))):
        table.add_column(heading, justify="right")
    if not wide:
        table.add_column("largest (class: records)")
    for client in range(shown):
        row = counts[client]
        order = np.argsort(-row, kind="stable")[:5]
        largest = "  ".join(f"{c}: {row[c]}" for c in order if row[c])
        cells = [str(n) if n else "." for n in row] if wide else [str(np.count_nonzero(row)), largest]
        table.add_row(str(client), str(row.sum()), *cells)
    console = Console(soft_wrap=True)
    console.print(table)
    if shown < num_clients:
        console.print(f"... and {num_clients - shown:,} more clients (all of them with --json)")
    for what, values in ("records", counts.sum(axis=1)), ("classes", np.count_nonzero(counts, axis=1)):
        numbers = np.quantile(values, list(_QUANTILES.values()), method="nearest")
        quantiles = ", ".join(f"{name} {number}" for name, number in zip(_QUANTILES, numbers, strict=True))
        console.print(f"{what} a client: {quantiles}")
