"""``fl-sim report --pictures``: images for the synthetic feature vectors of a run, and how far the search is."""

import sys
import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from fl_sim.data.known import KNOWN
from fl_sim.report.figures.by_epsilon import Images
from fl_sim.report.progress import Line, Part, clock
from fl_sim.report.runs import Run

if TYPE_CHECKING:
    from fl_sim.data.features import Features


def find_images(run: Run, vectors: NDArray[np.float32]) -> Images:
    """Return images whose features are near ``vectors``, and show how far the search is.

    Nothing but the vectors, the shape of the images and the public transform is looked at. Raises ValueError where the
    shape is not known, or the transform is none of this version's, or does not make such vectors.
    """
    from fl_sim.data.images_of_features import images_of  # noqa: PLC0415 (torch: a plain report needs none of it)

    features, shape = _features_of(run), _shape_of(run)
    console = Console(file=sys.stderr)
    console.print(
        f"finding images for {len(vectors)} synthetic feature vectors of {run.path}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    begun, searching_since, share = time.monotonic(), 0.0, 0.0

    def parts() -> list[Part]:
        now = time.monotonic()
        left = f"{clock((now - searching_since) * (1 / share - 1))} left" if share else ""
        return [Part(f"{share:.0%}", 0), Part(f"{clock(now - begun)} so far", 2), Part(left, 1)]

    with Progress(Line(console), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("finding images", total=1.0, parts=parts)

        def tell(done: float) -> None:
            nonlocal share, searching_since
            searching_since = searching_since or time.monotonic()  # what is prepared before takes seconds, too
            share = done
            bar.update(task, completed=done)

        return images_of(vectors, shape, features, tell)


def _features_of(run: Run) -> "Features":
    match run.config.features:
        case "scattering" | "whitened-scattering" as features:
            return features
        case other:
            raise ValueError(f"features={other} is nothing that this version of fl-sim knows")


def _shape_of(run: Run) -> tuple[int, int, int]:
    """Return the shape of the images behind the vectors. Older runs do not tell it; that of known sets is public."""
    known = KNOWN.get(run.config.data)
    told = run.outcome.image_shape if run.outcome else None
    match tuple(told or (known.shape if known else ())):
        case (int(channels), int(height), int(width)):
            return channels, height, width
        case _:
            raise ValueError(
                "its result.json does not tell the shape of the images that it had features of: run it again with this "
                "version of fl-sim, into a fresh directory"
            )
