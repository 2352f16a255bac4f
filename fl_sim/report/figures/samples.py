"""``samples.png`` of a run with synthetic records: a row for each class, taken evenly from the clients' shares."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from fl_sim.report.figures.sheet import EMPTY, Tile, figure_of, images, mosaic
from fl_sim.report.picture import png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = "samples.png"
PER_CLASS = 10
MOST_CLASSES = 100
_GAP = 4
_LEFT, _RIGHT = 95, 150  # pixels


@dataclass(frozen=True)
class Samples:
    """A pool and whose records they are: ``labels`` and ``clients`` are (records,).

    ``inputs``: images of the records at ``places``, which ascend: of all of them, unless images had to be found.
    """

    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    clients: NDArray[np.int64]
    num_classes: int
    places: NDArray[np.int64]

    @property
    def nothing(self) -> Tile:
        """Return what stands in the place of an image that is not there."""
        (black,) = images(np.zeros((1, *self.inputs.shape[1:]), dtype=np.uint8))
        return np.full_like(black, EMPTY)

    def some(self, label: int, most: int) -> list[Tile]:
        """Return up to ``most`` images of a class, those of ``first``."""
        return images(self.inputs[np.searchsorted(self.places, self.first(label, most))])

    def first(self, label: int, most: int) -> NDArray[np.int64]:
        """Return up to ``most`` records of a class, always the same: every client's first, every client's second..."""
        places = np.flatnonzero(self.labels == label)
        clients = self.clients[places]
        turns = np.array([np.count_nonzero(clients[:number] == one) for number, one in enumerate(clients)])
        order = np.lexsort((clients, turns)) if len(places) else places
        return places[order[:most]]


def read_samples(pool: Path, counts: Sequence[Sequence[int]]) -> Samples:
    """Read a run's pool of images as ``read_records`` does. Raises ValueError where it holds none, too."""
    samples = read_records(pool, counts)
    if samples.inputs.ndim != 4:
        raise ValueError(f"records of shape {samples.inputs.shape[1:]} are no images")
    return samples


def read_records(pool: Path, counts: Sequence[Sequence[int]]) -> Samples:
    """Read a run's pool, of images or of vectors. ``counts``: for each client how many records of each class it made.

    Raises OSError or an error of safetensors where the file cannot be read, ValueError where it does not fit
    ``counts``.
    """
    tensors = load_file(pool)
    inputs, labels = tensors["inputs"], np.asarray(tensors["labels"], dtype=np.int64)
    owned = np.array(counts, dtype=np.int64)
    fits = owned.ndim == 2 and owned.sum() == len(labels)
    expected = [np.repeat(np.arange(owned.shape[1]), one) for one in owned] if fits else []
    if not expected or not np.array_equal(labels, np.concatenate(expected)) or len(inputs) != len(labels):
        raise ValueError(f"{pool.name} does not hold the records that the run's result states")
    clients = np.repeat(np.arange(len(owned)), owned.sum(axis=1))
    return Samples(inputs, labels, clients, owned.shape[1], np.arange(len(labels)))


def write_samples(
    out: Path, pool: Path, counts: Sequence[Sequence[int]], settings: Mapping[str, Any], note: str = ""
) -> list[str]:
    """Write ``samples.png`` into the run directory ``out``; return warnings, for a picture must never cost a run.

    ``settings``: the experiment's, as in ``config.toml``; ``note``: what the data stand in for. A pool without records
    has no picture.
    """
    try:
        samples = read_samples(pool, counts)
        if len(samples.labels):
            (out / SAMPLES).write_bytes(png(draw(samples, settings, note)))
    except Exception as error:  # noqa: BLE001 (whatever it is, the run goes on)
        return [f"{SAMPLES} could not be drawn: {type(error).__name__}: {error}"]
    return []


def draw(samples: Samples, settings: Mapping[str, Any], note: str = "") -> "Figure":
    """Draw up to ten images of each class, a row a class; a class without any is shown as empty."""
    shown = min(samples.num_classes, MOST_CLASSES)
    rows = [samples.some(label, PER_CLASS) for label in range(shown)]
    nothing = samples.nothing
    sheet = mosaic([[*row, *[None] * (PER_CLASS - len(row))] if row else [nothing] * PER_CLASS for row in rows], _GAP)
    title = caption(samples, settings, note)
    if shown < samples.num_classes:
        title.append(f"the first {shown} of {samples.num_classes} classes")
    figure, axes = figure_of(sheet, title, left=_LEFT, above=0, right=_RIGHT)
    step = nothing.shape[0] + _GAP
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
    """Return what a reader must know of the picture: what it shows, and what the records were promised."""
    chosen = settings["preprocess"]
    givers = len(set(samples.clients.tolist()))
    gammas = chosen.get("client_gammas") or [chosen["gamma"]]
    gamma = f"{gammas[0]:g}" if len(set(gammas)) == 1 else f"{min(gammas):g} to {max(gammas):g}, by client"
    return [
        f"{settings['data']}: SYNTHETIC records, made by the generator {chosen['generator']['kind']}; none is real",
        promise(chosen),
        f"gamma {gamma}; {len(samples.labels)} records from {givers} of {settings['clients']} clients",
        *([f"data: {note}"] if note else []),
    ]


def promise(preprocess: Mapping[str, Any]) -> str:
    """Return the privacy that the settings ask for, in words; what was spent in fact is in the run's result."""
    if math.isinf(preprocess["epsilon"]):
        return "epsilon inf: made without noise, so with no privacy guarantee"
    seeded = " (noise from the seed: a simulation only)" if preprocess["noise"] == "seeded" else ""
    return (
        f"epsilon at most {preprocess['epsilon']:g} at delta {preprocess['delta']:g} for every record of a client, "
        f"labels and generator together{seeded}"
    )
