"""Figure of synthetic records: each column is a class, and each row is an epsilon.

The layout follows figure 5 in the DA-FL paper (Tang, Wang, Liu 2023). If a synthetic record is a feature vector, the
figure shows an image with similar features. A note says that this image is not real.

This module selects the synthetic records. The caller gives the function that searches for the images (``Finder``),
because the search depends on the data set. Found images are stored in the run directory.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fl_sim.report.figures.samples import (
    Samples,
    Tile,
    about_noise,
    figure_of,
    mark_noise,
    mosaic,
    read_records,
    read_samples,
)
from fl_sim.report.files import PrivacyStatement
from fl_sim.report.groups import SeedGroup
from fl_sim.report.picture import Picture, file_names, png
from fl_sim.report.runs import Problem, SavedRun
from fl_sim.store.files import explain, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADING = "Synthetic records by class and epsilon"
EPSILON = (
    "the privacy budget for one record of a client, for all synthetic records of a run: labels and generator together"
)
"""The meaning of ``epsilon`` in the settings of DA-FL, as text for captions."""
_ACROSS = 2
_MOST_CLASSES = 20
_LEFT, _ABOVE, _RIGHT, _WITHIN, _BETWEEN = 150, 30, 20, 2, 12
"""Widths in pixels of the left, upper and right margins, and of the gaps within and between blocks of images."""

PICTURES: Final = "synthetic-pictures.safetensors"

Images: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.float32]]
"""Images that were found for synthetic feature vectors, and their distances: (images, distances).

The shape of the images is (records, channels, height, width). The shape of the distances is (records,). A distance is
the norm of the difference between an image's features and the synthetic feature vector, divided by the norm of the
vector.
"""

Finder: TypeAlias = Callable[[SavedRun, NDArray[np.float32]], Images]
"""A function that finds images for the synthetic feature vectors of a run.

The function raises ValueError if it cannot find such images.
"""

_VERSION: Final = 1
"""Version of the image search. If the search is changed, increase the version, so that older images are not used."""

_LARGEST: Final = 2**28
"""Largest size in bytes of a file with found images. A larger file is not read."""


@dataclass(frozen=True)
class Row:
    """A row of the figure: the synthetic records of one run.

    ``settings``: the settings of the preprocessing. ``statements``: the run's privacy statements with the unit
    "record". ``distance``: the mean distance between the synthetic feature vectors and the features of the found
    images. Each distance is divided by the length of its vector. ``distance`` is None if the synthetic records are
    images.
    """

    run: SavedRun
    settings: Mapping[str, Any]
    samples: Samples
    statements: tuple[PrivacyStatement, ...]
    distance: float | None = None

    @property
    def epsilon(self) -> float:
        """Return the privacy budget of the run: the epsilon in its settings."""
        return float(self.settings["epsilon"])


def sample_pictures(groups: Sequence[SeedGroup], finder: Finder | None = None) -> tuple[list[Picture], list[Problem]]:
    """Return (one figure for each data set, partition and generator, a message for each run that cannot be shown).

    Only runs with synthetic records are shown. The figure shows one run for each epsilon: the run with the most
    synthetic records. Among runs with the same number of records, the run with the lowest seed is shown.

    For feature vectors, the figure shows the stored images. If there are no stored images, ``finder`` searches for
    images. Without ``finder``, a single message names all runs without stored images.
    """
    kinds: dict[tuple[str, str, str], dict[float, Row]] = {}
    problems: list[Problem] = []
    for one, run in with_pools(groups):
        assert run.preprocess is not None
        try:
            row = _row(run, run.preprocess)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            problems.append(_problem(run, error))
            continue
        delta = f"delta {row.settings['delta']:g}"
        features = f", features {run.config.features}" if is_in_features(run) else ""
        title = f"{one.data}, {one.partition}{features}: generator {row.settings['generator']['kind']}"
        rows = kinds.setdefault((title, one.note, delta), {})
        other = rows.setdefault(row.epsilon, row)
        rows[row.epsilon] = min(other, row, key=lambda one: (-len(one.samples.labels), one.run.config.seed))
    chosen = [(key, [rows[epsilon] for epsilon in sorted(rows)]) for key, rows in kinds.items()]
    with_images, more = _with_images([row for _, rows in chosen for row in rows], finder)
    problems += more
    found = [(key, [with_images[row.run.path] for row in rows if row.run.path in with_images]) for key, rows in chosen]
    shown = [(key, rows) for key, rows in found if rows]
    names = file_names([key[0] for key, _ in shown])
    return [
        _picture(f"samples-{name}.png", *key, rows) for name, (key, rows) in zip(names, shown, strict=True)
    ], problems


def with_pools(groups: Sequence[SeedGroup]) -> Iterator[tuple[SeedGroup, SavedRun]]:
    """Yield (group, run) for each run with synthetic records. The runs of a group differ only in the seed."""
    for one in groups:
        for run in one.runs:
            if run.preprocess is not None and run.result is not None and run.result.preprocess.pool:
                yield one, run


def draw(rows: Sequence[Row], title: Sequence[str]) -> "Figure":
    """Return a figure with up to four synthetic images for each class (column) and each run (row)."""
    shown = min(rows[0].samples.num_classes, _MOST_CLASSES)
    blocks = [[_block(row.samples, label) for label in range(shown)] for row in rows]
    more = (
        [f"the first {shown} of {rows[0].samples.num_classes} classes"] if shown < rows[0].samples.num_classes else []
    )
    figure, axes = figure_of(mosaic(blocks, _BETWEEN), [*title, *more], left=_LEFT, above=_ABOVE, right=_RIGHT)
    high, wide = blocks[0][0].shape[:2]
    for label in range(shown):
        middle = label * (wide + _BETWEEN) + wide / 2
        axes.text(middle, -8, f"class {label}", ha="center", va="bottom", fontsize=8)
    tile = rows[0].samples.nothing.shape[:2]
    mark_noise(axes, [
        (label * (wide + _BETWEEN) + at % _ACROSS * (tile[1] + _WITHIN),
         number * (high + _BETWEEN) + at // _ACROSS * (tile[0] + _WITHIN))
        for number, row in enumerate(rows) for label in range(shown)
        for at, is_noise in enumerate(row.samples.noise(label, _ACROSS**2)) if is_noise
    ], tile)  # fmt: skip
    for number, row in enumerate(rows):
        middle = number * (high + _BETWEEN) + high / 2
        axes.text(-12, middle, f"epsilon {row.epsilon:g}", ha="right", va="bottom", fontsize=8)
        axes.text(-12, middle + 4, _spent(row), ha="right", va="top", fontsize=6.5, color="0.35")
        for label in np.flatnonzero(np.bincount(row.samples.labels, minlength=shown)[:shown] == 0).tolist():
            across = label * (wide + _BETWEEN) + wide / 2
            axes.text(across, middle, "none", ha="center", va="center", fontsize=7, color="0.35")
    return figure


def is_in_features(run: SavedRun) -> bool:
    """Return True if the synthetic records of ``run`` are feature vectors, not images."""
    return run.config.features != "none"


def some_vectors(samples: Samples, classes: int, each: int) -> Samples:
    """Return the part of ``samples`` that the figure shows, for samples that are feature vectors.

    The result has up to ``each`` feature vectors of each of the first ``classes`` classes. Raises ValueError if the
    records are not feature vectors.
    """
    if samples.inputs.ndim != 2 or samples.inputs.dtype != np.float32:
        raise ValueError(f"records of shape {samples.inputs.shape[1:]} are not feature vectors")
    firsts = [samples.first(label, each) for label in range(min(classes, samples.num_classes))]
    places = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *firsts]))
    return replace(samples, inputs=samples.inputs[places], places=places)


def stored_images(run: SavedRun, samples: Samples) -> Images | None:
    """Return the stored images for the feature vectors in ``samples``, which an earlier search found; else None.

    The result is None if the file with the images is missing or damaged. It is also None if the images were made for
    other vectors, or by another version of the search.
    """
    path = run.path / PICTURES
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return None
    try:
        with safe_open(path, "np") as file:
            said = file.metadata() or {}
            images, distances = file.get_tensor("images"), file.get_tensor("distances")
    except (OSError, SafetensorError):
        return None
    fits = images.ndim == 4 and images.dtype == np.uint8 and distances.dtype == np.float32
    if not fits or not len(images) == len(distances) == len(samples.places):
        return None
    is_whole = said.get("pool") == _identity(run, samples) and said.get("sha256") == _digest(images, distances)
    return (images, distances) if is_whole else None


def _row(run: SavedRun, settings: Mapping[str, Any]) -> Row:
    assert run.result is not None
    made = run.result.preprocess
    pool, counts = run.path / made.pool, [client.counts for client in made.clients]
    if is_in_features(run):
        samples = some_vectors(read_records(pool, counts), _MOST_CLASSES, _ACROSS**2)
    else:
        samples = read_samples(pool, counts)
    return Row(run, settings, samples, tuple(one for one in run.result.privacy if one.unit == "record"))


def _with_images(rows: Sequence[Row], finder: Finder | None) -> tuple[dict[Path, Row], list[Problem]]:
    """Replace the feature vectors in each row by images whose features are close to the vectors.

    The images are the stored images or, without stored images, the images that ``finder`` finds. Return ({run
    directory: row with images}, an error message for each row without images).
    """
    shown: dict[Path, Row] = {}
    problems: list[Problem] = []
    without: list[Path] = []
    for row in rows:
        path = row.run.path
        if not is_in_features(row.run):
            shown[path] = row
        elif images := stored_images(row.run, row.samples):
            shown[path] = _with(row, images)
        elif finder is None:
            without.append(path)
        else:
            try:
                images = finder(row.run, row.samples.inputs)
                shown[path] = _with(row, images)
                digests = {"pool": _identity(row.run, row.samples), "sha256": _digest(*images)}
                content = save({"images": images[0], "distances": images[1]}, digests)
                write_whole(path / PICTURES, content)
            except ValueError as error:
                problems.append(_problem(row.run, error))
            except OSError as error:
                problems.append(Problem(path, f"the images that were found could not be stored: {explain(error)}"))
    if without:
        place = Path(os.path.commonpath(without))
        of = "are" if len(without) == 1 else f"of {len(without)} runs are"
        hint = f"'fl-sim report {place} --pictures' finds images for them"
        problems.append(Problem(place, f"synthetic records {of} feature vectors, which are not shown: {hint}"))
    return shown, problems


def _with(row: Row, images: Images) -> Row:
    found, distances = images
    distance = float(distances.mean()) if len(distances) else None
    return replace(row, samples=replace(row.samples, inputs=found), distance=distance)


def _problem(run: SavedRun, error: Exception) -> Problem:
    return Problem(run.path, f"its synthetic records cannot be shown: {error}")


def _block(samples: Samples, label: int) -> Tile:
    some = samples.some(label, _ACROSS**2)
    filled = [*some, *[samples.nothing] * (_ACROSS**2 - len(some))]
    return mosaic([filled[start : start + _ACROSS] for start in range(0, len(filled), _ACROSS)], _WITHIN)


def _spent(row: Row) -> str:
    if math.isinf(row.epsilon):
        return "no noise,\nno guarantee"
    if not len(row.samples.labels):
        return "nothing released"
    spent = next((one.epsilon for one in row.statements), None)
    return "no guarantee" if spent is None else f"spent {spent:.3g}"


def _picture(name: str, title: str, note: str, delta: str, rows: Sequence[Row]) -> Picture:
    what = f"{title}. SYNTHETIC records by class (columns) and epsilon (rows); no record is real."
    meaning = f"epsilon: {EPSILON}, at {delta}."
    chosen = (
        "For each class and epsilon, the figure shows up to four records, from as many clients as possible. For each "
        "epsilon, it shows the run with the most records."
    )
    distances = [row.distance for row in rows if row.distance is not None]
    images = []
    if distances:
        least, most = f"{min(distances):.2f}", f"{max(distances):.2f}"
        far = least if least == most else f"{least} to {most}"
        found = (
            "The images were found for synthetic feature vectors: each image was changed until its features were close "
            "to a vector"
        )
        images = [
            f"{found} (mean distance divided by the vector's length: {far}).",
            (
                "The images are not real records. They have no privacy cost, because they were computed from the "
                "vectors alone."
            ),
        ]
    details = [
        f"epsilon {row.epsilon:g} (gamma {row.settings['gamma']:g}, seed {row.run.config.seed}, "
        f"{len(row.samples.labels)} records, {row.run.path}): {' '.join(one.promise for one in row.statements)}"
        for row in rows
    ]
    details += dict.fromkeys(one.limits for row in rows for one in row.statements if one.protects)
    data = [f"Data: {note}"] if note else []
    classes = range(min(rows[0].samples.num_classes, _MOST_CLASSES))
    noisy = [found for row in rows for label in classes for found in row.samples.noise(label, _ACROSS**2)]
    warning = about_noise(sum(noisy), len(noisy))
    picture = png(draw(rows, [what, meaning, *images, *warning, *data]))
    lines = (what, meaning[0].upper() + meaning[1:], *images, chosen, *warning, *data)
    return Picture(name, HEADING, lines, picture, tuple(details))


def _identity(run: SavedRun, samples: Samples) -> str:
    """Return a SHA-256 digest of the synthetic feature vectors in ``samples`` and of the image search.

    Stored images belong to these vectors if they have the same digest.

    The digest depends on the vectors, on the run's feature transform, and on the version of the image search.
    """
    digest = hashlib.sha256(f"{_VERSION} {run.config.features} {samples.inputs.shape}".encode())
    digest.update(np.ascontiguousarray(samples.places).data)
    digest.update(np.ascontiguousarray(samples.inputs).data)
    return digest.hexdigest()


def _digest(images: NDArray[np.uint8], distances: NDArray[np.float32]) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(images).data)
    digest.update(np.ascontiguousarray(distances).data)
    return digest.hexdigest()
