"""What is typed after a verb: FILE or PRESET, and KEY=VALUE settings.

Nothing of an experiment is imported here: a file that is not there is told without waiting for the settings of all
kinds.
"""

from pathlib import Path
from typing import Any, NamedTuple

from fl_sim.cli.screen import say
from fl_sim.errors import UserError
from fl_sim.settings import read_table
from fl_sim.tables.files import file_or_preset


class Given(NamedTuple):
    """What was typed, and read.

    ``name``: FILE or PRESET, None where neither is; ``path``: the file that it stands for; ``table``: what that holds,
    nothing where there is none; ``overrides``: the key=value settings.
    """

    name: str | None
    path: Path | None
    table: dict[str, Any]
    overrides: list[str]


def read(arguments: list[str] | None, default: str | None = None) -> Given:
    """Read what ``[FILE or PRESET] [key=value ...]`` names; without one ``default``.

    Says which was taken where a preset and a file have the same name. Raises UserError for two files, and for one that
    cannot be read.
    """
    arguments = arguments or []
    files = [argument for argument in arguments if "=" not in argument]
    if len(files) > 1:
        raise UserError(f"one FILE or PRESET at most, got {', '.join(files)}; settings are given as key=value")
    overrides = [argument for argument in arguments if "=" in argument]
    _tell_of_repeated(overrides)
    name = files[0] if files else default
    if name is None:
        return Given(None, None, {}, overrides)
    path, which = file_or_preset(name)
    if which:
        say(which, err=True)
    return Given(name, path, read_table(path), overrides)


def _tell_of_repeated(overrides: list[str]) -> None:
    last = {override.partition("=")[0]: override for override in overrides}
    for override in overrides:
        if override not in last.values():
            say(f"{override} does not count: {last[override.partition('=')[0]]} comes after it", err=True)
