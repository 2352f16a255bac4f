"""Tables of runs. This module locates the TOML file that defines a table, or writes an example of such a file."""

from contextlib import suppress
from pathlib import Path

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened

PRESETS = Path(__file__).parent / "presets"
COMMENTED = Path(__file__).parent / "commented.toml"


def file_or_preset(name: str) -> tuple[Path, str]:
    """Return the path of a table's TOML file, and a message for the user if ``name`` is ambiguous (else "").

    ``name``: a preset that comes with fl-sim, or the path of the user's own file. If a preset and a file have the same
    name, the preset is used. The name of a preset thus has the same meaning in every folder. Raises UserError if there
    is neither a preset nor a file ``name``.
    """
    presets, there = sorted(path.stem for path in PRESETS.glob("*.toml")), Path(name)
    if name in presets:
        which = f"{name} means the preset here; for the file {name} in this folder, write ./{name}"
        return PRESETS / f"{name}.toml", which if there.is_file() else ""
    with suppress(OSError):  # an invalid path raises its error later, when the file is read
        if not there.exists():
            raise UserError(
                f"no file or preset {shortened(name)!r}{guess(name, presets)}; presets: {', '.join(presets)} (settings "
                "are given as key=value, for example rounds=50)"
            )
    return there, ""


def write_table_file(path: Path) -> None:
    """Write an example of a table's TOML file, with comments, to ``path``. Raise UserError if the file exists."""
    text = COMMENTED.read_text(encoding="utf-8").replace("FILE", str(path)).replace("DIR", f"results/{path.stem}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{path} exists already and is not overwritten: give another name") from error
