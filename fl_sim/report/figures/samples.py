"""Figures with example images of each class, one row per class: synthetic records of a run, or real records.

Images are enlarged by an integer factor, so that pixels are not blurred. The file ``samples.png`` of a run shows
synthetic records of as many clients as possible. A figure of real images shows the first training records of each
class.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from fl_sim.report.picture import DPI, plain, png
from fl_sim.types import Examples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Tile: TypeAlias = NDArray[np.uint8]
"""An RGB image of shape (height, width, 3). All tiles of a figure have the same size."""
EMPTY = 238
"""Grey value, 0 to 255, of the tile that replaces a missing image."""
BOTTOM = 16
"""Height in pixels of the margin below the tiles."""
_PAPER = 255
_TARGET = 52
"""Approximate height or width in pixels to which small images are enlarged."""
_UNRELATED = 0.2
"""Correlation of neighbouring pixels below which an image counts as noise.

In images of digits, the correlation is more than 0.28.
"""
_FRAME = "#d55e00"
_LINE, _LETTER = 25, 8.4
"""Height of a line and width of a letter in pixels, for a title with a font size of 8 points."""

SAMPLES = "samples.png"
PER_CLASS = 10
"""Largest number of images of a class in a figure."""
MOST_CLASSES = 100
_GAP = 4
"""Number of white pixels between neighbouring images."""
_LEFT, _RIGHT = 95, 150
"""Widths in pixels of the left and the right margin."""

MOST_RECORD_CLASSES = 40
MOST_PIXELS = 128
"""Largest height or width in pixels of a real image in a figure. Larger images are subsampled."""
_NAMES = 150
"""Width in pixels of the margin that contains the names of the classes."""


def images(inputs: NDArray[np.uint8]) -> list[Tile]:
    """Return ``inputs``, images of shape (records, channels, height, width), as tiles of a figure.

    Small images are enlarged to a height or width of about 50 pixels. Images with one channel are shown in grey, and
    images with three channels as RGB. For any other number of channels, the mean of all channels is shown in grey.
    Raises ValueError if the records are not images.
    """
    if inputs.ndim != 4:
        raise ValueError(f"records of shape {inputs.shape[1:]} are not images")
    if inputs.shape[1] not in {1, 3}:
        inputs = inputs.mean(axis=1, keepdims=True).astype(np.uint8)
    factor = max(1, round(_TARGET / max(inputs.shape[2:])))
    large = inputs.repeat(factor, axis=2).repeat(factor, axis=3)
    return [np.broadcast_to(one.transpose(1, 2, 0), (*one.shape[1:], 3)) for one in large]


def noise(inputs: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a flag for each image: True if it looks like noise, with nearly uncorrelated neighbouring pixels.

    ``inputs``: images of shape (records, channels, height, width). The result has shape (records,). An image of one
    colour does not count as noise.
    """
    grey = inputs.astype(np.float64).mean(axis=1)
    grey -= grey.mean(axis=(1, 2), keepdims=True)
    variance = (grey**2).mean(axis=(1, 2))
    related = (grey[:, 1:] * grey[:, :-1]).mean(axis=(1, 2)) + (grey[:, :, 1:] * grey[:, :, :-1]).mean(axis=(1, 2))
    return np.asarray((variance > 0) & (related / 2 < _UNRELATED * variance))


def mark_noise(axes: "Axes", places: Sequence[tuple[int, int]], size: tuple[int, int]) -> None:
    """Draw a frame around each image that looks like noise.

    ``places``: the upper left corners (x, y) of the images that look like noise. ``size``: (height, width) of an image.
    """
    from matplotlib.patches import Rectangle  # noqa: PLC0415 (a second to import)

    for left, top in places:
        frame = Rectangle(
            (left - 1, top - 1), size[1] + 1, size[0] + 1, fill=False, edgecolor=_FRAME, linewidth=1, clip_on=False
        )
        axes.add_patch(frame)


def about_noise(number: int, shown: int) -> list[str]:
    """Return the lines of the caption about images that look like noise.

    ``number``: the number of images that look like noise, among ``shown`` images. If ``number`` is 0, the text is
    empty.
    """
    if not number:
        return []
    what = f"{number} of {shown} images look like noise (orange frames): neighbouring pixels are unrelated."
    return [f"{what} The generator learned too little, or epsilon was too small; the picture is not damaged."]


def mosaic(rows: Sequence[Sequence[Tile | None]], gap: int) -> Tile:
    """Return one image with all tiles in ``rows``: small images, ``gap`` white pixels apart.

    A place whose tile is None stays white.
    """
    height, width = next(tile.shape[:2] for row in rows for tile in row if tile is not None)
    across = max(len(row) for row in rows)
    sheet = np.full((len(rows) * (height + gap) - gap, across * (width + gap) - gap, 3), _PAPER, dtype=np.uint8)
    for number, row in enumerate(rows):
        for column, tile in enumerate(row):
            if tile is not None:
                top, left = number * (height + gap), column * (width + gap)
                sheet[top : top + height, left : left + width] = tile
    return sheet


def figure_of(
    sheet: Tile, title: Sequence[str], *, left: int, above: int, right: int, narrowest: int = 900
) -> "tuple[Figure, Axes]":
    """Return (figure, its axes). The figure shows the image ``sheet`` in its own size, below the ``title``.

    The coordinates of the axes are the pixels of ``sheet``. ``title``: lines of text. ``left``, ``above``, ``right``:
    widths of the margins for labels, in pixels. ``narrowest``: the smallest width of the figure in pixels. If the
    figure would be narrower, its right margin is widened.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second to import)

    height, width = sheet.shape[:2]
    wide = max(left + width + right, narrowest)
    lines = [line for text in title for line in textwrap.wrap(text, int((wide - 30) / _LETTER))]
    high = 20 + len(lines) * _LINE + above + height + BOTTOM
    figure = Figure(figsize=(wide / DPI, high / DPI))
    axes = figure.add_axes((left / wide, BOTTOM / high, width / wide, height / high))
    axes.imshow(sheet, interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    figure.text(14 / wide, 1 - 10 / high, plain("\n".join(lines)), fontsize=8, va="top", linespacing=1.3)
    return figure, axes


@dataclass(frozen=True)
class Samples:
    """The synthetic records of a run (its pool).

    ``labels`` and ``clients``: the class and the client of each record in the whole pool, of shape (records,).
    ``places``: ascending indices of the records in ``inputs``. For images, these are all records of the pool; for
    feature vectors, possibly only the records to draw. ``inputs``: the inputs of the records with the indices
    ``places``.
    """

    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    clients: NDArray[np.int64]
    num_classes: int
    places: NDArray[np.int64]

    @property
    def nothing(self) -> Tile:
        """Return a grey tile in the size of an image. A figure shows it in place of a missing image."""
        (black,) = images(np.zeros((1, *self.inputs.shape[1:]), dtype=np.uint8))
        return np.full_like(black, EMPTY)

    def some(self, label: int, most: int) -> list[Tile]:
        """Return up to ``most`` synthetic images of the class ``label`` as tiles of a figure.

        The method ``first`` selects these images.
        """
        return images(self.inputs[np.searchsorted(self.places, self.first(label, most))])

    def noise(self, label: int, most: int) -> list[bool]:
        """Return a flag for each image that ``some`` returns for the class ``label``: True if it looks like noise."""
        found: list[bool] = noise(self.inputs[np.searchsorted(self.places, self.first(label, most))]).tolist()
        return found

    def first(self, label: int, most: int) -> NDArray[np.int64]:
        """Return indices of up to ``most`` records of the class ``label``, from as many clients as possible.

        The first record of every client comes first, then the second record of every client, and so on.
        """
        places = np.flatnonzero(self.labels == label)
        clients = self.clients[places]
        earlier = np.array([np.count_nonzero(clients[:number] == one) for number, one in enumerate(clients)])
        order = np.lexsort((clients, earlier)) if len(places) else places
        return places[order[:most]]


def read_samples(pool: Path, counts: Sequence[Sequence[int]]) -> Samples:
    """Return the synthetic images in the file ``pool``. Raise ValueError if its records are not images.

    ``counts``: for each client, its number of records of each class. Also raises the errors of ``read_records``.
    """
    samples = read_records(pool, counts)
    if samples.inputs.ndim != 4:
        raise ValueError(f"records of shape {samples.inputs.shape[1:]} are not images")
    return samples


def read_records(pool: Path, counts: Sequence[Sequence[int]]) -> Samples:
    """Return the synthetic records (images or feature vectors) in the file ``pool``.

    ``counts``: for each client, its number of records of each class. Raises OSError or an error of safetensors for an
    unreadable file, and ValueError for a file that contradicts ``counts``.
    """
    tensors = load_file(pool)
    inputs, labels = tensors["inputs"], np.asarray(tensors["labels"], dtype=np.int64)
    owned = np.array(counts, dtype=np.int64)
    fits = owned.ndim == 2 and owned.sum() == len(labels)
    expected = [np.repeat(np.arange(owned.shape[1]), one) for one in owned] if fits else []
    if not expected or not np.array_equal(labels, np.concatenate(expected)) or len(inputs) != len(labels):
        raise ValueError(f"{pool.name} does not contain the records that the run's result.json states")
    clients = np.repeat(np.arange(len(owned)), owned.sum(axis=1))
    return Samples(inputs, labels, clients, owned.shape[1], np.arange(len(labels)))


def write_samples(
    out: Path, pool: Path, counts: Sequence[Sequence[int]], settings: Mapping[str, Any], note: str = ""
) -> list[str]:
    """Write ``samples.png``, a figure of synthetic records, into the run directory ``out``; return warnings.

    If the figure cannot be written, the error is returned as a warning, and the run continues. ``pool``: the file of
    the synthetic records. ``counts``: for each client, its number of records of each class. ``settings``: the settings
    of the experiment, as in ``config.toml``. ``note``: text that says that the data set is stand-in data. Without
    synthetic records, no file is written.
    """
    try:
        samples = read_samples(pool, counts)
        if len(samples.labels):
            (out / SAMPLES).write_bytes(png(draw(samples, settings, note)))
    except Exception as error:  # noqa: BLE001 (a missing figure must not stop the run)
        return [f"{SAMPLES} could not be drawn: {type(error).__name__}: {error}"]
    return []


def draw(samples: Samples, settings: Mapping[str, Any], note: str = "") -> "Figure":
    """Return a figure with up to ten synthetic images of each class, one row for each class.

    A class without records gets grey tiles. ``settings``: the settings of the experiment. ``note``: text that says that
    the data set is stand-in data.
    """
    shown = min(samples.num_classes, MOST_CLASSES)
    rows = [samples.some(label, PER_CLASS) for label in range(shown)]
    nothing = samples.nothing
    sheet = mosaic([[*row, *[None] * (PER_CLASS - len(row))] if row else [nothing] * PER_CLASS for row in rows], _GAP)
    noisy = [samples.noise(label, PER_CLASS) for label in range(shown)]
    title = caption(samples, settings, note)
    title += about_noise(sum(map(sum, noisy)), sum(map(len, noisy)))
    if shown < samples.num_classes:
        title.append(f"the first {shown} of {samples.num_classes} classes")
    figure, axes = figure_of(sheet, title, left=_LEFT, above=0, right=_RIGHT)
    step, across = nothing.shape[0] + _GAP, nothing.shape[1] + _GAP
    places = [(column * across, label * step) for label, row in enumerate(noisy) for column in np.flatnonzero(row)]
    mark_noise(axes, places, nothing.shape[:2])
    for label, row in enumerate(rows):
        middle = label * step + (step - _GAP) / 2
        axes.text(-10, middle, f"class {label}", ha="right", va="center", fontsize=8)
        number = int(np.count_nonzero(samples.labels == label))
        axes.text(sheet.shape[1] + 10, middle, f"{number} in the pool", va="center", fontsize=7, color="0.4")
        if not row:
            words = "the pool holds no sample of this class"
            axes.text(sheet.shape[1] / 2, middle, words, ha="center", va="center", fontsize=8, color="0.35")
    return figure


def caption(samples: Samples, settings: Mapping[str, Any], note: str) -> list[str]:
    """Return the lines of the figure's title: data set, generator, privacy budget, number of records, and ``note``."""
    chosen = settings["preprocess"]
    givers = len(set(samples.clients.tolist()))
    gammas = chosen.get("client_gammas") or [chosen["gamma"]]
    gamma = f"{gammas[0]:g}" if len(set(gammas)) == 1 else f"{min(gammas):g} to {max(gammas):g}, by client"
    return [
        f"{settings['data']}: SYNTHETIC records of the generator {chosen['generator']['kind']}; no record is real",
        promise(chosen),
        f"gamma {gamma}; {len(samples.labels)} records from {givers} of {settings['clients']} clients",
        *([f"data: {note}"] if note else []),
    ]


def promise(preprocess: Mapping[str, Any]) -> str:
    """Return the privacy budget in the settings of DA-FL as text. The spent epsilon is in the run's ``result.json``."""
    if math.isinf(preprocess["epsilon"]):
        return "epsilon inf: made without noise, so with no privacy guarantee"
    seeded = " (noise from the seed: a simulation only)" if preprocess["noise"] == "seeded" else ""
    return (
        f"epsilon at most {preprocess['epsilon']:g} at delta {preprocess['delta']:g} for every record of a client, "
        f"labels and generator together{seeded}"
    )


def draw_records(part: Examples, classes: Sequence[str], title: Sequence[str]) -> "Figure":
    """Return a figure with up to ten real images of each class of ``part``, one row for each class.

    The figure shows at most 40 classes. ``classes``: the names of the classes. ``title``: lines of text. Images of more
    than 128 pixels are subsampled: for example, only every second or every third pixel is shown.
    """
    shown = min(len(classes), MOST_RECORD_CLASSES)
    every = -(-max(part.inputs.shape[2:]) // MOST_PIXELS)
    small = part.inputs[:, :, ::every, ::every]
    places = [np.flatnonzero(part.labels == label)[:PER_CLASS] for label in range(shown)]
    rows = [images(np.asarray(small[some])) if len(some) else [] for some in places]
    sheet = mosaic([[*row, *[None] * (PER_CLASS - len(row))] for row in rows], _GAP)
    more = [f"the first {shown} of {len(classes)} classes"] if shown < len(classes) else []
    figure, axes = figure_of(sheet, [*title, *more], left=_NAMES, above=0, right=20)
    step = (sheet.shape[0] + _GAP) / shown
    for label in range(shown):
        name = classes[label] if len(classes[label]) <= 18 else f"{classes[label][:17]}..."
        axes.text(-10, label * step + (step - _GAP) / 2, name, ha="right", va="center", fontsize=8)
    return figure
