"""A table as a whole LaTeX ``table`` environment, to be taken into a paper as it is."""

import re
from typing import Final

from fl_sim.printable import in_a_line
from fl_sim.report.table import MEASURES, Grid, Table, differences, notes, targets, texts

_FITTED: Final = r"\leavevmode\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\box0}\else\box0\fi\par\medskip"
"""Shows what was put in box 0, shrunk to the width of the text where it is wider."""

_SPECIAL: Final = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "[": "{[}",
    "]": "{]}", **{character: "\\" + character for character in "&%$#_{}"},
}  # fmt: skip


def latex(table: Table, label: str) -> str:
    """Return the environment: caption, label, the table, differences to the best row, what targets took, and notes.

    ``label`` is put after ``tab:``. It needs the packages booktabs and graphicx.
    """
    said = notes(table)
    return "\n".join([
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table}[tbp]",
        r"\centering",
        rf"\caption{{{' '.join(map(_escape, said[:1]))}}}",
        rf"\label{{tab:{_label(label)}}}",
        r"\small",
        *_fitted(_tabular(table)),
        *_below(differences(table)),
        *_below(targets(table)),
        *([r"\begin{minipage}{\linewidth}\footnotesize", *(rf"{_escape(note)}\par" for note in said[1:]),
           r"\end{minipage}"] if said[1:] else []),
        r"\end{table}",
    ])  # fmt: skip


def _tabular(table: Table) -> list[str]:
    last = len(table.columns) * len(MEASURES) + 1
    groups = "".join(rf" & \multicolumn{{2}}{{c}}{{{_escape(column)}}}" for column in table.columns)
    rules = "".join(rf"\cmidrule(lr){{{start}-{start + 1}}}" for start in range(2, last + 1, 2))
    lines = [rf"\begin{{tabular}}{{l{'r' * (last - 1)}}}", r"\toprule"]
    measures = "".join(f" & {measure}" for measure in MEASURES) * len(table.columns)
    lines += [rf"{groups.removeprefix(' ')} \\", rules, rf"Method{measures} \\", r"\midrule"]
    first_bound = next((row for row in table.rows if row in table.upper_bounds), None)
    for row, cells in texts(table):
        lines += [r"\midrule"] if row == first_bound else []
        shown = (rf"\textbf{{{_escape(text)}}}" if best else _escape(text) for text, best in cells)
        lines.append(rf"{' & '.join([_escape(row), *shown])} \\")
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _below(grid: Grid | None) -> list[str]:
    """Return a further tabular with its title."""
    if grid is None:
        return []
    lines = [rf"\begin{{tabular}}{{l{'r' * len(grid.heads)}}}", r"\toprule"]
    lines += [rf"{' & '.join(['Method', *map(_escape, grid.heads)])} \\", r"\midrule"]
    lines += [rf"{' & '.join([_escape(row), *map(_escape, cells)])} \\" for row, cells in grid.rows]
    return [rf"{_escape(grid.title)}:\par\smallskip", *_fitted([*lines, r"\bottomrule", r"\end{tabular}"])]


def _fitted(lines: list[str]) -> list[str]:
    return [r"\setbox0=\hbox{%", *lines[:-1], lines[-1] + "}", _FITTED]


def _label(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9:.-]+", "-", name).strip("-") or "results"


def _escape(text: str) -> str:
    escaped = "".join(_SPECIAL.get(character, character) for character in in_a_line(text))
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)  # a minus, not a hyphen
