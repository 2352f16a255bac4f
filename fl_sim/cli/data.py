"""``fl-sim data``: which data sets are on this machine, whether their files are sound, and what is in them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_sim.cli.screen import say
from fl_sim.data import NAMES, Check, Source, find, is_own, load, roots, verify, wanted_files
from fl_sim.data.dataset import card_of
from fl_sim.errors import RunError, UserError, in_a_line
from fl_sim.types import Dataset

_MOST = 20  # lines of classes, of columns, and numbers in a record that are printed
_BAR = 30


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


def show_card(
    arguments: list[str], sheet: Path | None, data_root: Path | None, *, with_records: bool, json_output: bool
) -> None:
    """Print the card of the data set that was typed, and draw some of its images where ``sheet`` names a file.

    Raises UserError for a name that is none, and for a sheet of what are no images.
    """
    from fl_sim.experiment.experiment import experiment_from, with_overrides  # noqa: PLC0415 (slow, only here)

    name, *overrides = arguments
    if strange := [text for text in overrides if not text.startswith("data.")]:
        raise UserError(f"{strange[0]}: after the name stand settings of the data alone, such as data.label=outcome")
    dataset = load(experiment_from(with_overrides({"data": name}, overrides)).data, data_root)
    card = card_of(dataset, with_records=with_records)
    if sheet is not None:
        _draw(dataset, sheet)
        card |= {"sheet": str(sheet), "shows_records": True}
    if json_output:
        say(json.dumps(card))
    else:
        _print(_in_lines(card))
    if card["shows_records"] and is_own(dataset.name):
        say("This card shows records of your data: where these are private, it is, too.", err=True)


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


def _in_lines(value: Any) -> Any:
    """Return a card whose texts, names from files among them, are one line each."""
    if isinstance(value, str):
        return in_a_line(value)
    if isinstance(value, list):
        return [_in_lines(one) for one in value]
    return {in_a_line(key): _in_lines(one) for key, one in value.items()} if isinstance(value, dict) else value


def _draw(dataset: Dataset, sheet: Path) -> None:
    if dataset.train.inputs.ndim != 4:
        raise UserError(f"--sheet draws images, and the records of {dataset.name} are numbers; leave it out")
    if sheet.suffix.lower() != ".png":
        raise UserError(f"cannot draw to {sheet}: use a name that ends in .png")
    from fl_sim.report.figures.samples import draw_records  # noqa: PLC0415 (matplotlib: a second to import)
    from fl_sim.report.picture import png  # noqa: PLC0415
    from fl_sim.store.files import in_words, write_whole  # noqa: PLC0415

    classes = dataset.classes or tuple(f"class {label}" for label in range(dataset.num_classes))
    drawn = png(draw_records(dataset.train, classes, [f"{dataset.name}: training records", dataset.note]))
    with in_words():
        sheet.parent.mkdir(parents=True, exist_ok=True)
        write_whole(sheet, drawn)


def _print(card: Mapping[str, Any]) -> None:
    say(card["name"])
    for line in filter(None, (card["note"], *card["counted"])):
        say(f"  {line}")
    records, inputs = card["records"], card["inputs"]
    what = "x".join(map(str, inputs["shape"]))
    kind = {
        "images": f"images, channels x height x width {what}",
        "tokens": f"sequences of up to {what} tokens below {inputs.get('vocabulary')}, 0 is padding",
        "numbers": f"{what} numbers a record",
    }[inputs["kind"]]
    validation = f", {records['validation']:,} for evaluate.validation=given" if "validation" in records else ""
    say(f"records   {records['train']:,} to train, {records['test']:,} to test{validation}")
    say(f"inputs    {kind} ({inputs['type']})")
    _print_classes(card["classes"])
    _print_clients(card["clients"])
    _print_columns(card)
    _print_inferred(card["inferred"])
    for fact in card["read_off"]:
        say(f"read off the records: {fact}")
    _print_first(card.get("first_records", []))
    if "sheet" in card:
        say(f"drawn to {card['sheet']}")


def _print_classes(classes: list[dict[str, Any]]) -> None:
    say(f"classes   {len(classes)}: training and test records")
    width = max(len(one["name"]) for one in classes[:_MOST])
    largest = max(one["train"] for one in classes)
    for one in classes[:_MOST]:
        bar = "#" * round(_BAR * one["train"] / largest)
        say(f"  {one['name']:{width}} {one['train']:9,} {one['test']:9,}  {bar}")
    _print_more(classes)


def _print_clients(clients: dict[str, Any] | None) -> None:
    if clients is None:
        say("clients   the data do not say whose records are whose")
        return
    say(
        f"clients   {clients['count']:,}: {clients['smallest']:,} to {clients['largest']:,} training records each, "
        f"median {clients['median']:g}; {clients['with_one_record']:,} with one record, "
        f"{clients['with_test_records']:,} with test records of their own; each is one by partition=natural "
        f"clients={clients['count']}"
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
        held = ranges.get(column["name"], "") if column["is"].startswith("number, as it is") else ""
        say(f"  {column['name']:{width}}  {column['is']}{held}")


def _print_inferred(lines: list[str]) -> None:
    if lines:
        say("taken for granted")
    for line in lines:
        say(f"  {line}")


def _print_first(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    say(f"first     {len(rows)} training records, as models see them")
    for row in rows:
        cells = [_cell(name, value) for name, value in row.items() if "=" not in name or value]
        left = [*cells[:_MOST], f"... {len(cells) - _MOST - 1} more", cells[-1]] if len(cells) > _MOST + 1 else cells
        say(f"  {', '.join(left)}")


def _cell(name: str, value: object) -> str:
    if isinstance(value, float):
        return name if "=" in name and value == 1 else f"{name} {value:g}"
    return f"{name} {value}"


def _print_more(lines: list[dict[str, Any]]) -> None:
    if len(lines) > _MOST:
        say(f"  ... and {len(lines) - _MOST:,} more (all of them with --json)")
