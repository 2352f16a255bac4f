"""Tables of runs. This module finds a table's definition file, a preset or the user's own, or writes a new one."""

from contextlib import suppress
from pathlib import Path

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened

PRESETS = Path(__file__).parent / "presets"
COMMENTED = Path(__file__).parent / "commented.toml"


def file_or_preset(name: str) -> tuple[Path, str]:
    """Return the path of the preset ``name``, or else of the file ``name``; and a message if both exist.

    The preset has priority, so that its name has the same meaning in every folder. Raises UserError if neither exists.
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
    """Write a commented example of a table's definition to ``path``. Raise UserError if the file exists."""
    text = COMMENTED.read_text(encoding="utf-8").replace("FILE", str(path)).replace("DIR", f"results/{path.stem}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{path} is there already, and is left as it is: give another name") from error
