"""``fl-sim init``: a table's file to begin with."""

from pathlib import Path
from typing import Final

from fl_sim.cli.screen import say
from fl_sim.errors import UserError

COMMENTED: Final = Path(__file__).parents[1] / "tables" / "commented.toml"


def write_table_file(path: Path) -> None:
    """Write a table's file with comments to ``path``, which must not be there yet."""
    text = COMMENTED.read_text(encoding="utf-8").replace("FILE", str(path)).replace("DIR", f"results/{path.stem}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{path} is there already, and is left as it is: give another name") from error
    say(f"{path} is a table's file with comments: change it, and 'fl-sim table {path}' runs it")
