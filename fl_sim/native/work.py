"""How much a model's layers compute, and which of them PyTorch computes faster than the compiled trainer."""

from fl_sim.native.layers import FIELDS, KINDS, Stack

_MOST_OF_ONE_PIXEL, _MOST_OF_MANY = 300, 1400
"""PyTorch is faster where an output is of more products: with kernels of 1 pixel, and with those of more than 3 x 3.

``benchmarks/large_layers.py`` measures it. 3 x 3 kernels are never slower here, and neither are linear layers.
"""


def rows_of(stack: Stack) -> list[dict[str, int]]:
    """Return every layer's numbers by their names."""
    return [dict(zip(FIELDS, numbers, strict=True)) for numbers in stack.layers.tolist()]


def shapes_of(stack: Stack) -> list[tuple[int, int, int]]:
    """Return channels, height and width of the input and of what every layer writes."""
    shapes = [(int(stack.input_shape[0]), int(stack.input_shape[1]), int(stack.input_shape[2]))]
    for row in rows_of(stack):
        channels, height, width = shapes[row["source"]]
        kind = KINDS[row["kind"]]
        if kind in ("linear", "average"):
            height = width = 1
        if kind in ("linear", "conv"):
            channels = row["outputs"]
        if kind in ("conv", "pool"):
            height, width = _windows(row, "y", height), _windows(row, "x", width)
        halves = 1 + row["pooled"]
        shapes.append((channels, height // halves, width // halves))
    return shapes


def products_in_output(row: dict[str, int]) -> int:
    """Return how many products an output of a layer is the sum of; 0 where it is none."""
    if KINDS[row["kind"]] not in ("conv", "linear"):
        return 0
    return row["inputs"] * max(1, row["kernel_y"] * row["kernel_x"])


def products_of(stack: Stack) -> list[int]:
    """Return the products that every layer computes for a record on its way forward."""
    return [
        products_in_output(row) * channels * height * width * (4 if row["pooled"] else 1)
        for row, (channels, height, width) in zip(rows_of(stack), shapes_of(stack)[1:], strict=True)
    ]


def slower_here(stack: Stack) -> str:
    """Return what PyTorch computes faster, in words, where that is half of the model's work or more; else nothing."""
    slow = {index: row for index, row in enumerate(rows_of(stack)) if _is_slower(row)}
    products = products_of(stack)
    if not slow or 2 * sum(products[index] for index in slow) < sum(products):
        return ""
    row = slow[max(slow, key=lambda index: products[index])]
    return (
        f"convolutions of {row['kernel_y']}x{row['kernel_x']} pixels and {row['inputs']} channels, "
        "which PyTorch computes faster"
    )


def _windows(row: dict[str, int], axis: str, size: int) -> int:
    return (size + 2 * row[f"padding_{axis}"] - row[f"kernel_{axis}"]) // row[f"stride_{axis}"] + 1


def _is_slower(row: dict[str, int]) -> bool:
    if KINDS[row["kind"]] != "conv":
        return False
    side = max(row["kernel_y"], row["kernel_x"])
    return products_in_output(row) > {1: _MOST_OF_ONE_PIXEL}.get(side, _MOST_OF_MANY) and side not in (2, 3)
