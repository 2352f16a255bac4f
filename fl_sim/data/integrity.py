"""Whether the files of a data set are what they should be: checksums, sizes, shapes and counts."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fl_sim.data.naming import KNOWN, KnownSet
from fl_sim.data.places import Source, describe_missing, find
from fl_sim.data.reading import read
from fl_sim.errors import UserError


@dataclass(frozen=True)
class Check:
    """The outcome for one data set: where it is, what is wrong (nothing: ``ok``), and what else a reader must know."""

    name: str
    source: Source | None
    problems: tuple[str, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the set was found and nothing is wrong with it."""
        return self.source is not None and not self.problems


def verify(name: str, data_root: Path | None = None) -> Check:
    """Read all of ``name`` and compare it with what is published.

    Official files: MD5; npz files: the zip's checksums (nobody publishes an MD5 for them); all: shapes, counts, labels.
    Raises UserError for an unknown name.
    """
    source = find(name, data_root)
    if source is None:
        return Check(name, None, (describe_missing(name, data_root),))
    problems = _checksums(name, source)
    if problems:  # and no reading: SciPy's .mat parser can take the process down on a damaged file
        return Check(name, source, tuple(problems))
    try:
        return Check(name, source, (), read(name, source).note)
    except UserError as error:
        return Check(name, source, (str(error),))


def _checksums(name: str, source: Source) -> list[str]:
    known = KNOWN.get(name)
    if source.path is None:
        return []
    if source.layout in {"npz", "medmnist"}:
        return _zip_checksums(source.path)
    if known is None:
        return []
    return [
        f"{source.path / file}: MD5 is {actual}, the official file's is {published}"
        for file, published in _published(known).items()
        if (actual := _md5(source.path / file)) != published
    ]


def _zip_checksums(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, OSError):
        return []  # reading it fails too, and says more
    return [f"{path}: {bad} does not match its checksum; fetch or write the file again"] if bad else []


def _published(known: KnownSet) -> dict[str, str]:
    """Return {file: MD5}."""
    held = {file: md5 for file, md5 in known.files.items() if md5 is not None}
    if held:
        return held
    from torchvision import datasets  # noqa: PLC0415 (seconds to import)

    dataset = getattr(datasets, known.torchvision_class)
    if known.layout == "mat":
        return {file: md5 for _, file, md5 in dataset.split_list.values() if file in known.files}
    meta = (dataset.meta["filename"], dataset.meta["md5"])
    return {f"{dataset.base_folder}/{file}": md5 for file, md5 in (*dataset.train_list, *dataset.test_list, meta)}


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
