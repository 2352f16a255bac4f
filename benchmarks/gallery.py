"""Keep what a table of the gallery was made of, so that another machine, or another day, goes on with it.

    python benchmarks/gallery.py keep results/label-skew docs/results/label-skew
    python benchmarks/gallery.py go-on docs/results/label-skew results/label-skew
    python benchmarks/gallery.py collect docs/results build/published-runs

``keep`` copies ``table.json`` and ``table.csv`` of a table's directory to its folder of the gallery, and packs there,
in ``runs.tar.xz``, the settings, rounds and result of every finished run, without its model. ``go-on`` unpacks them
where nothing is yet: the table's command then runs only what is missing. ``collect`` copies all archives for
a release.

The archives are no part of the repository: they are attached to releases, from where they are put back into their
folders. Those of before lie in the repository's history, where ``go-on`` and ``collect`` find them in a full clone.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PACKED = "runs.tar.xz"
TABLE = ("table.json", "table.csv")
OF_A_RUN = ("config.toml", "result.json", "rounds.jsonl")


def keep(table: Path, folder: Path) -> int:
    """Copy and pack a table; return the number of finished runs. The same runs give the same bytes."""
    if missing := [name for name in TABLE if not (table / name).is_file()]:
        sys.exit(f"{table} has no {' and no '.join(missing)}: give the directory that fl-sim table wrote to (--out)")
    runs = sorted(path.parent for path in table.glob("*/*/result.json") if _finished(path))
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLE:
        shutil.copyfile(table / name, folder / name)
    with tarfile.open(folder / PACKED, "w:xz", preset=9) as packed:
        for path in (run / name for run in runs for name in OF_A_RUN):
            content = path.read_bytes()
            entry = tarfile.TarInfo(str(path.relative_to(table)))  # without date and owner
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return len(runs)


def go_on(folder: Path, table: Path) -> int:
    """Unpack to the folder ``table``, which must not exist; return the number of runs."""
    if table.exists():
        sys.exit(f"{table} is there already: its command goes on with it as it is, or give another directory")
    archive = find_archive(folder)
    if archive is None:
        sys.exit(
            f"{folder} holds no {PACKED}, nor does the history of its repository: put there the one that is attached "
            "to the release, or let the table's command begin anew"
        )
    with tarfile.open(name=str(folder / PACKED), fileobj=io.BytesIO(archive)) as packed:
        for entry in packed:  # one by one: the filters of extractall came with Python 3.11.4
            _unpack(packed, entry, table)
    return sum(1 for _ in table.glob("*/*/result.json"))


def find_archive(folder: Path) -> bytes | None:
    """Return a folder's archive: the one that lies there, or the last one in the repository's history; None without."""
    path = folder / PACKED
    if path.is_file():
        return path.read_bytes()
    commits = _git(folder, "log", "--format=%H", "--diff-filter=AM", "--", PACKED)
    return _git(folder, "show", f"{commits.split()[0].decode()}:./{PACKED}") if commits and commits.split() else None


def _git(folder: Path, *command: str) -> bytes | None:
    try:
        return subprocess.run(["git", *command], cwd=folder, capture_output=True, check=True).stdout  # noqa: S607
    except (OSError, subprocess.CalledProcessError):
        return None


def collect(gallery: Path, out: Path) -> int:
    """Copy every archive of a gallery to ``out``, as NAME-runs.tar.xz; return how many there are."""
    found = {path.parent.name: find_archive(path.parent) for path in sorted(gallery.glob("*/table.json"))}
    if missing := [name for name, archive in found.items() if archive is None]:
        sys.exit(f"no archive of {', '.join(missing)}: a full clone has those of before, 'keep' makes new ones")
    out.mkdir(parents=True, exist_ok=True)
    for name, archive in found.items():
        (out / f"{name}-{PACKED}").write_bytes(archive or b"")
    return len(found)


def _unpack(packed: tarfile.TarFile, entry: tarfile.TarInfo, table: Path) -> None:
    place, content = (table / entry.name).resolve(), packed.extractfile(entry) if entry.isfile() else None
    if content is None or not place.is_relative_to(table.resolve()):
        sys.exit(f"{packed.name} holds {entry.name!r}, which is no file of a table: it was not made by 'keep'")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content.read())


def _finished(result: Path) -> bool:
    return bool(json.loads(result.read_text(encoding="utf-8")).get("status") == "finished")


def main() -> None:
    """Execute the command of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["keep", "go-on", "collect"])
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    asked = parser.parse_args()
    done = {"keep": keep, "go-on": go_on, "collect": collect}[asked.what]
    what = "archives" if asked.what == "collect" else "finished runs"
    print(f"{done(asked.source, asked.destination)} {what} are in {asked.destination}")


if __name__ == "__main__":
    main()
