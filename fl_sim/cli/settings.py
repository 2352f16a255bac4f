"""``fl-sim settings``: what every setting takes, its default, and what it means."""

import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from fl_sim.cli.screen import say
from fl_sim.errors import UserError
from fl_sim.experiment.reference import Group, groups
from fl_sim.mistakes import elsewhere, guess

_WIDEST = 110


def show_settings(name: str | None, *, json_output: bool) -> None:
    """Print what is said of the setting, the group of settings or the kind called ``name``; None: the first of all."""
    every = groups()
    chosen = [group for group in every if not group.kind] if name is None else find(name, every)
    chosen = [group for group in chosen if name is not None or group.name in {"", "local", "evaluate"}]
    if json_output:
        say(json.dumps([asdict(group) for group in chosen]))
        return
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    for group in chosen:
        say("\n".join([*_printed(group, width), ""]))
    if name is None:
        say("Further: 'fl-sim settings NAME', where NAME is a setting, the start of one, or a kind, such as")
        say("local.schedule, preprocess, scaffold or poisson.")


def find(name: str, every: Sequence[Group]) -> list[Group]:
    """Return the groups, or parts of them, that ``name`` stands for; ``algorithm=fedprox`` is the kind in its group.

    Raises UserError where it stands for nothing.
    """
    setting, _, kind = name.partition("=")
    kind = re.sub(r"-\d+$", "-k", kind.partition(":")[0])
    if kind or "=" in name:
        found = [group for group in every if (group.name, group.kind) == (setting, kind)]
    else:
        found = [group for group in every if name == group.kind or (group.name + ".").startswith(name + ".")]
        alone = {setting: group for group in every for setting in group.settings if setting.name == name}
        found = [Group(group.name, group.kind, group.within, "", (one,)) for one, group in alone.items()] + found
    if found:
        return found
    names = {group.kind or group.name for group in every} | {
        setting.name for group in every for setting in group.settings
    }
    meant = elsewhere(name) or guess(kind or name, names - {""})
    raise UserError(f"no setting or kind is called {name!r}{meant}; 'fl-sim settings' lists them")


def _printed(group: Group, width: int) -> list[str]:
    title = title_of(group)
    lines = [*([title] if title and group.about else []), *textwrap.wrap(plain(group.about), width)]
    for setting in group.settings:
        default = f" (default: {setting.default})" if setting.default else ""
        head = f"{setting.name}: {setting.takes}{default}"
        lines += [
            "",
            *_wrapped(head, width, "  ", "      "),
            *_wrapped(plain(setting.meaning), width, "      ", "      "),
        ]
    return lines if lines[0] else lines[1:]  # a setting by itself has no title


def title_of(group: Group) -> str:
    """Return what chooses a group, as it is typed, and what has to be chosen before that."""
    title = f"{group.name}={group.kind}" if group.kind else group.name
    return f"{title}, with {group.within}" if group.within else title


def plain(text: str) -> str:
    """Return a docstring's text as it is shown in a terminal."""
    return text.replace("``", "")


def _wrapped(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
