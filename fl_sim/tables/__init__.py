"""Tables of runs. Here: the file of a table, which is a preset, the user's own, or a new one with comments."""

from contextlib import suppress
from pathlib import Path

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened

PRESETS = Path(__file__).parent / "presets"
COMMENTED = Path(__file__).parent / "commented.toml"


def file_or_preset(name: str) -> tuple[Path, str]:
    """Return the file of the preset ``name``, else the file at that path; and a message if there are both.

    A preset's name means the preset in every folder. Raises UserError if there is neither.
    """
    presets, there = sorted(path.stem for path in PRESETS.glob("*.toml")), Path(name)
    if name in presets:
        which = f"{name} is taken for the preset; the file of that name in this folder is ./{name}"
        return PRESETS / f"{name}.toml", which if there.is_file() else ""
    with suppress(OSError):  # an impossible path is refused when it is read
        if not there.exists():
            raise UserError(
                f"no file or preset {shortened(name)!r}{guess(name, presets)}; presets: {', '.join(presets)} (settings "
                "are given as key=value, for example rounds=50)"
            )
    return there, ""


def write_table_file(path: Path) -> None:
    """Write a table's file with comments to ``path``, which must not exist."""
    text = COMMENTED.read_text(encoding="utf-8").replace("FILE", str(path)).replace("DIR", f"results/{path.stem}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{path} is there already, and is left as it is: give another name") from error
