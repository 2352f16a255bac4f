"""One self-contained HTML page on finished runs: tables, figures, privacy, data, failures, versions.

Its tables and pictures need no script. Where there is one, it draws the curves and further figures from a block of
JSON; style and scripts are the files in ``web``, and the page allows these alone, by their digests.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Final

from fl_sim.report.figures.curves import HEADINGS, OVER_TIME
from fl_sim.report.groups import Panel
from fl_sim.report.page_data import page_data
from fl_sim.report.page_sections import (
    all_runs,
    bill,
    comparison,
    data_notes,
    failures,
    privacy,
    section,
    to_target,
    versions,
)
from fl_sim.report.page_tables import table_section
from fl_sim.report.page_words import groups_of, summary, title_of
from fl_sim.report.picture import Picture
from fl_sim.report.runs import Found

_WEB: Final = Path(__file__).parent / "web"
_SCRIPTS: Final = ("elements.js", "scales.js", "curves.js", "rows.js", "confusion.js", "tables.js", "page.js")
"""In this order; together they are one script."""

_MOST_BYTES: Final = 2_700_000
"""Of a page with its pictures, which are left out where there is no room: it is to be sent, and to open at once."""


_DRAWN_BY_SCRIPT: Final = {*HEADINGS.values(), OVER_TIME}


def page(
    found: Found,
    panels: Sequence[Panel],
    pictures: Sequence[Picture],
    costs: Sequence[str],
    aim: float | None = None,
) -> str:
    """Return the page as HTML. It refers to nothing outside itself.

    ``costs``: what all runs together cost, in words. ``aim``: a test accuracy in [0, 1]; the page tells what it took.
    """
    groups = groups_of(panels)
    title, told = escape(title_of(panels)), escape(summary(groups))
    style, script = _web()
    data = page_data(panels, aim)
    headings = dict.fromkeys(one.heading for one in pictures)
    before = [
        *data_notes(panels),
        *failures(found, groups),
        *(table_section(place, table) for place, table in found.tables.items()),
        comparison(groups),
        *([] if aim is None else [to_target(groups, aim)]),
        '<div id="live"></div>',
    ]
    after = [privacy(groups), *bill(costs), all_runs(groups), versions(groups)]
    shown = _shown(pictures, _MOST_BYTES - sum(map(len, (style, script, data, *before, *after))))
    figures = [_figures(heading, [one for one in pictures if one.heading == heading], shown) for heading in headings]
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="color-scheme" content="light dark"><meta name="description" content="{told}">'
        f"<title>{title}</title><style>{style}</style>"
    )
    body = "\n".join([*before, *figures, *after])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n'
        '<a class="skip" href="#main">Skip to the results</a>\n'
        f"<header><h1>{title}</h1><p>{told}</p></header>\n"
        f'<main id="main">\n{body}\n</main>\n'
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


@cache
def _web() -> tuple[str, str]:
    """Return the style and the script. The script sees nothing of other pages and leaves no name behind."""
    style = (_WEB / "page.css").read_text(encoding="utf-8")
    parts = "\n".join((_WEB / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return style, f'"use strict";\n(() => {{\n{parts}}})();\n'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _shown(pictures: Sequence[Picture], room: int) -> set[str]:
    """Return the names of the pictures that fit into ``room`` bytes; those that the script draws, too, come last."""
    names = set()
    for picture in sorted(pictures, key=lambda one: one.heading in _DRAWN_BY_SCRIPT):
        size = 4 * len(picture.png) // 3
        if size <= room:
            names.add(picture.name)
            room -= size
    return names


def _figures(heading: str, pictures: Sequence[Picture], shown: set[str]) -> str:
    """Return a section of pictures; what has no room on the page is told by the name of its file."""
    figures = []
    for picture in pictures:
        details = "".join(f"<li>{escape(line)}</li>" for line in picture.details)
        image = f"<p>{escape(picture.name)} is in the folder of this page.</p>"
        if picture.name in shown:
            source = base64.b64encode(picture.png).decode()
            image = f'<img loading="lazy" alt="{escape(picture.caption[0])}" src="data:image/png;base64,{source}">'
        figures.append(
            f"<figure>{image}<figcaption>{'<br>'.join(map(escape, picture.caption))}"
            f"{f'<ul>{details}</ul>' if details else ''}</figcaption></figure>"
        )
    content = section(heading, "".join(figures))
    return content.replace("<section>", '<section class="still">', 1) if heading in _DRAWN_BY_SCRIPT else content
