"""Keep what a table of the gallery was made of, so that another machine, or another day, goes on with it.

    python benchmarks/gallery.py keep results/label-skew docs/results/label-skew
    python benchmarks/gallery.py go-on docs/results/label-skew results/label-skew

``keep`` copies ``table.json`` and ``table.csv`` of a table's directory to its folder of the gallery, and packs there,
in ``runs.tar.xz``, the settings, rounds and result of every finished run, without its model. ``go-on`` unpacks them
where nothing is yet: the table's command then runs only what is missing.
"""

import argparse
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

PACKED = "runs.tar.xz"
TABLE = ("table.json", "table.csv")
OF_A_RUN = ("config.toml", "result.json", "rounds.jsonl")


def keep(table: Path, folder: Path) -> int:
    """Copy and pack; return how many finished runs there are. The same runs give the same bytes."""
    if missing := [name for name in TABLE if not (table / name).is_file()]:
        sys.exit(f"{table} has no {' and no '.join(missing)}: give the directory that fl-sim table wrote to (--out)")
    runs = sorted(path.parent for path in table.glob("*/*/result.json") if _finished(path))
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLE:
        shutil.copyfile(table / name, folder / name)
    with tarfile.open(folder / PACKED, "w:xz", preset=9) as packed:
        for path in (run / name for run in runs for name in OF_A_RUN):
            content = path.read_bytes()
            entry = tarfile.TarInfo(str(path.relative_to(table)))  # of no date and no owner
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return len(runs)


def go_on(folder: Path, table: Path) -> int:
    """Unpack to ``table``, which must not be there; return how many runs there are."""
    if table.exists():
        sys.exit(f"{table} is there already: its command goes on with it as it is, or give another directory")
    if not (folder / PACKED).is_file():
        sys.exit(f"{folder} holds no {PACKED}: nothing of this table was kept, and its command begins anew")
    with tarfile.open(folder / PACKED) as packed:
        for entry in packed:  # one by one: the filters of extractall came with Python 3.11.4
            _unpack(packed, entry, table)
    return sum(1 for _ in table.glob("*/*/result.json"))


def _unpack(packed: tarfile.TarFile, entry: tarfile.TarInfo, table: Path) -> None:
    place, content = (table / entry.name).resolve(), packed.extractfile(entry) if entry.isfile() else None
    if content is None or not place.is_relative_to(table.resolve()):
        sys.exit(f"{packed.name} holds {entry.name!r}, which is no file of a table: it was not made by 'keep'")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content.read())


def _finished(result: Path) -> bool:
    return bool(json.loads(result.read_text(encoding="utf-8")).get("status") == "finished")


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["keep", "go-on"])
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    asked = parser.parse_args()
    done = keep if asked.what == "keep" else go_on
    print(f"{done(asked.source, asked.destination)} finished runs are in {asked.destination}")


if __name__ == "__main__":
    main()
