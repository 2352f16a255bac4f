"""The file that a table comes from: a preset's, the user's own, or one with comments to begin with."""

from contextlib import suppress
from pathlib import Path

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened

PRESETS = Path(__file__).parent / "presets"
COMMENTED = Path(__file__).parent / "commented.toml"


def preset_names() -> list[str]:
    """Return the names of the tables that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def file_or_preset(name: str) -> tuple[Path, str]:
    """Return the file of the preset ``name``, else the one at that path; and which was taken where there are both.

    So a preset's name means the same in every folder. Raises UserError where there is neither.
    """
    presets, there = preset_names(), Path(name)
    if name in presets:
        which = f"{name} is taken for the preset; the file of that name in this folder is ./{name}"
        return PRESETS / f"{name}.toml", which if there.is_file() else ""
    with suppress(OSError):  # what no path can be is refused when it is read
        if not there.exists():
            raise UserError(
                f"no file or preset {shortened(name)!r}{guess(name, presets)}; presets: {', '.join(presets)} (settings "
                "are given as key=value, for example rounds=50)"
            )
    return there, ""


def write_table_file(path: Path) -> None:
    """Write a table's file with comments to ``path``, which must not be there yet."""
    text = COMMENTED.read_text(encoding="utf-8").replace("FILE", str(path)).replace("DIR", f"results/{path.stem}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{path} is there already, and is left as it is: give another name") from error
