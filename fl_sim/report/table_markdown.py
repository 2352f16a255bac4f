"""``table.md``: a table in Markdown, with everything that is told below it."""

from collections.abc import Sequence

from fl_sim.printable import in_a_line
from fl_sim.report.table import MEASURES, Table, differences, further, notes, targets, texts


def markdown(table: Table) -> str:
    """Return the table in Markdown: differences to the best row, what targets took, further measures, and notes."""
    heads = [f"{column} {measure}" for column in table.columns for measure in MEASURES]
    rows = [(row, [f"**{text}**" if best else text for text, best in cells]) for row, cells in texts(table)]
    return "\n\n".join(
        [_grid(heads, rows), *below(table), "\n".join(f"{in_a_line(note)}  " for note in notes(table))]
    ).rstrip()


def below(table: Table) -> list[str]:
    """Return paragraphs: the title of each further table and the table itself."""
    parts: list[str] = []
    for grid in (differences(table), targets(table), *further(table)):
        parts += [f"{in_a_line(grid.title)}:", _grid(grid.heads, grid.rows)] if grid else []
    return parts


def _grid(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    lines = [["Method", *heads], ["---", *["---:"] * len(heads)], *([row, *cells] for row, cells in rows)]
    return "\n".join(
        f"| {' | '.join(in_a_line(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )
