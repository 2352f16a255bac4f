"""One self-contained HTML page on finished runs: tables, figures, privacy, data, failures, versions."""

import base64
from collections.abc import Sequence
from html import escape

from fl_sim.report.groups import Group, Panel, parameters
from fl_sim.report.page_tables import row_start, table_section
from fl_sim.report.page_words import (
    Groups,
    groups_of,
    how_picked,
    percent,
    privacy_in_short,
    privacy_in_words,
    runs_of,
    spread,
    summary,
    title_of,
)
from fl_sim.report.picture import Picture
from fl_sim.report.runs import Found, Run
from fl_sim.report.targets import taken

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2630; max-width: 1180px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin-top: 2em; }
p { margin: .4em 0; } .small, figcaption { font-size: .87em; color: #51606e; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9em; }
th, td { text-align: left; padding: .25em .5em; border-bottom: 1px solid #e3e8ec; vertical-align: top; }
th { border-bottom: 1px solid #8796a3; font-weight: 600; } .n { text-align: right; } .n, .k { white-space: nowrap; }
.bound td { border-top: 1px solid #8796a3; font-style: italic; } .path { overflow-wrap: anywhere; }
.bar { display: block; height: 4px; margin-left: auto; background: #9db8cf; }
.note { border-left: 4px solid #d98324; background: #fdf5ea; padding: .4em .8em; }
.bad { border-left: 4px solid #b2182b; background: #fbeff0; padding: .4em .8em; }
figure { margin: 1em 0; } img { max-width: 100%; height: auto; }
"""


_BILL = (
    "Whoever sees all of these runs sees all of their releases, so whoever's records they are about pays for each of "
    "them: every epsilon and every seed. A release that several runs use is paid for once. Both figures hold; deltas "
    "add up with the plain sum."
)


def page(
    found: Found, panels: Sequence[Panel], pictures: Sequence[Picture], bill: Sequence[str], target: float | None = None
) -> str:
    """Return the page as HTML. It refers to nothing outside itself.

    ``bill``: what all runs together cost, in words. ``target``: a test accuracy in [0, 1]; the page tells what it took.
    """
    groups = groups_of(panels)
    title = title_of(panels)
    tables = [table_section(place, table) for place, table in found.tables.items()]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(summary(groups))}</p>",
        *_data_notes(panels),
        *_failures(found, groups),
        *tables,
        _comparison(groups),
        *([] if target is None else [_to_target(groups, target)]),
        *(_figures(heading, pictures) for heading in dict.fromkeys(one.heading for one in pictures)),
        _privacy(groups),
        *_bill(bill),
        _all_runs(groups),
        _versions(groups),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def _data_notes(panels: Sequence[Panel]) -> list[str]:
    told = dict.fromkeys((panel.data, panel.note) for panel in panels if panel.note)
    return [f'<p class="note"><b>{escape(data)}</b>: {escape(note)}</p>' for data, note in told]


def _failures(found: Found, groups: Groups) -> list[str]:
    lines = [
        (f"{run.status}: {label}, {where}, seed {run.config.seed}", run.error, run.path)
        for where, some in groups.items()
        for label, one in some
        for run in one.runs
        if run.status != "finished"
    ]
    lines += [("", problem.error, problem.path) for problem in found.problems]
    told = {path for *_, path in lines}
    for place, table in found.tables.items():
        for one in table.results:
            if one.status != "finished" and (path := place / one.directory) not in told:
                told.add(path)  # the upper bound stands in several columns
                lines.append((f"{one.status}: {one.row}, {one.column}, seed {one.seed}", one.error, path))
    if not lines:
        return []
    items = "".join(
        f"<li>{': '.join(escape(text) for text in (what, why) if text)} "
        f'<span class="small path">({escape(str(path))})</span></li>'
        for what, why, path in lines
    )
    return [f'<div class="bad"><b>Failed, unfinished or left out</b><ul>{items}</ul></div>']


def _comparison(groups: Groups) -> str:
    longest = max((run.outcome.seconds.total for run in runs_of(groups) if run.outcome), default=0.0)
    heads = (
        "Method",
        "Data",
        "Partition",
        "Clients",
        "Model",
        "Seeds",
        "Final %",
        "Best %",
        "Seconds",
        "Privacy (limits: below)",
        "Status",
    )
    rows = "".join(_row(label, one, longest) for some in groups.values() for label, one in some)
    return (
        f"<h2>Comparison</h2>{_grid(heads, rows)}"
        f'<p class="small">Test accuracy after the last round, and in the best evaluated round ({how_picked(groups)}); '
        "wall-clock seconds of a run. Mean ± sample standard deviation over the finished seeds.</p>"
    )


def _to_target(groups: Groups, target: float) -> str:
    rows = "".join(
        f"<tr><td>{escape(one.method)}</td><td>{escape(one.where)}</td>"
        f"{''.join(f'<td class=n>{cell}</td>' for cell in one.cells)}</tr>"
        for one in taken(groups, target)
    )
    return (
        f"<h2>To a test accuracy of {100 * target:g} %</h2>"
        f"{_grid(('Method', 'Data', 'Rounds', 'MB', 'Seconds', 'Runs that got there'), rows)}"
        '<p class="small">Up to the first evaluated round with that accuracy, and with what was done before the first '
        "round; MB: a million bytes of arrays to and from all clients. Mean ± sample standard deviation over the "
        "finished runs that got there.</p>"
    )


def _row(label: str, one: Group, longest: float) -> str:
    run, done = one.runs[0], [run.outcome for run in one.finished if run.outcome]
    seconds = [outcome.seconds.total for outcome in done]
    width = 100 * sum(seconds) / len(seconds) / longest if seconds and longest > 0 else 0
    own = parameters(one)
    states = dict.fromkeys(run.status for run in one.runs)
    count = {state: sum(run.status == state for run in one.runs) for state in states}
    status = "finished" if list(states) == ["finished"] else ", ".join(f"{n} {state}" for state, n in count.items())
    note = '<br><span class="small">see the data note above</span>' if one.note else ""
    cells = [
        f'<td>{escape(label)}{f"""<br><span class="small">{escape(own)}</span>""" if own else ""}</td>',
        f"<td>{escape(one.data)}{note}</td>",
        *(f'<td class="k">{escape(text)}</td>' for text in (one.partition, str(run.config.clients), run.config.model)),
        f"<td>{', '.join(str(run.config.seed) for run in one.runs)}</td>",
        f'<td class="n">{spread(percent(outcome.final_accuracy) for outcome in done)}</td>',
        f'<td class="n">{spread(percent(outcome.best_accuracy) for outcome in done)}</td>',
        f'<td class="n">{spread(seconds)}<span class="bar" style="width:{width:.0f}%"></span></td>',
        f"<td>{escape(', '.join(dict.fromkeys(privacy_in_short(run) for run in one.runs)))}</td>",
        f"<td>{escape(status)}</td>",
    ]
    return f"{row_start(is_bound=one.is_bound)}{''.join(cells)}</tr>"


def _grid(heads: Sequence[str], rows: str) -> str:
    return f'<div class="wide"><table><tr>{"".join(f"<th>{head}</th>" for head in heads)}</tr>{rows}</table></div>'


def _figures(heading: str, pictures: Sequence[Picture]) -> str:
    shown = []
    for picture in (one for one in pictures if one.heading == heading):
        source = base64.b64encode(picture.png).decode()
        details = "".join(f"<li>{escape(line)}</li>" for line in picture.details)
        shown.append(
            f'<figure><img alt="{escape(picture.caption[0])}" src="data:image/png;base64,{source}">'
            f"<figcaption>{'<br>'.join(map(escape, picture.caption))}{f'<ul>{details}</ul>' if details else ''}"
            "</figcaption></figure>"
        )
    return f"<h2>{escape(heading)}</h2>{''.join(shown)}"


def _privacy(groups: Groups) -> str:
    who: dict[str, list[str]] = {}
    for where, some in groups.items():
        for label, one in some:
            for run in one.runs:
                who.setdefault(privacy_in_words(run), []).append(f"{label}, {where}, seed {run.config.seed}")
    items = []
    for words, runs in who.items():
        names = escape("; ".join(runs))
        if len(who) == 1:
            told = f"All {len(runs)} runs" if len(runs) > 1 else "The run"
        else:
            told = names if len(runs) <= 4 else f"<details><summary>{len(runs)} runs</summary>{names}</details>"
        items.append(f'<li>{escape(words)} <span class="small">{told}</span></li>')
    return f"<h2>Privacy</h2><ul>{''.join(items)}</ul>"


def _bill(lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    told = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return [f'<h2>What all of this costs together</h2>{told}<p class="small">{_BILL}</p>']


def _all_runs(groups: Groups) -> str:
    heads = (
        "Run",
        "Seed",
        "Engine",
        "Rounds",
        "Final %",
        "Best %",
        "Seconds",
        "of them training",
        "Status",
        "Directory",
    )
    rows = "".join(
        _run(f"{label}, {where}", run) for where, some in groups.items() for label, one in some for run in one.runs
    )
    count = len(runs_of(groups))
    return f"<h2>Runs</h2><details><summary>All {count} runs</summary>{_grid(heads, rows)}</details>"


def _run(label: str, run: Run) -> str:
    outcome = run.outcome
    numbers = [
        f"{len(run.rounds)} of {run.config.rounds}",
        spread([percent(outcome.final_accuracy)] if outcome else [], digits=2),
        spread([percent(outcome.best_accuracy)] if outcome else [], digits=2),
        spread([outcome.seconds.total] if outcome else []),
        spread([outcome.seconds.train] if outcome else []),
    ]
    texts_before = (label, str(run.config.seed), outcome.engine if outcome else "-")
    cells = [
        *(f"<td>{escape(text)}</td>" for text in texts_before),
        *(f'<td class="n">{number}</td>' for number in numbers),
        f"<td>{escape(run.status)}</td>",
        f'<td class="small path">{escape(str(run.path))}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _versions(groups: Groups) -> str:
    told: dict[str, int] = {}
    for run in runs_of(groups):
        if run.outcome:
            words = ", ".join(f"{name} {version}" for name, version in run.outcome.versions.items())
            told[words] = told.get(words, 0) + 1
    lines = [words if len(told) == 1 else f"{words} ({number} runs)" for words, number in told.items()]
    return f"<h2>Versions</h2><p>{'<br>'.join(map(escape, lines)) or 'not recorded: no run has a result'}</p>"
