"""What goes wrong when data are split over clients."""


class ImpossibleSplit(ValueError):  # noqa: N818 (names what happened)
    """The request cannot be met by any split; the message names the numbers and what to change."""
