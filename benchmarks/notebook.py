"""Executes a notebook in an empty folder and writes the new outputs into its file.

    python benchmarks/notebook.py docs/notebooks/first_table.ipynb

Supported outputs: printed text, the value of a cell's last expression as Markdown, and figures of matplotlib.
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


def executed(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Execute a cell in the namespace ``names`` and return its outputs in the notebook format."""
    outputs: list[dict[str, Any]] = []
    plt.show = lambda: outputs.extend(map(_drawn, plt.get_fignums()))
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)  # noqa: S102 (code of this repository)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)  # noqa: S307
    if text := printed.getvalue():
        outputs.insert(0, {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        shown = {"text/markdown": _lines(value._repr_markdown_()), "text/plain": _lines(repr(value)[:200])}
        outputs.append({"data": shown, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _drawn(number: int) -> dict[str, Any]:
    figure, content = plt.figure(number), io.BytesIO()
    figure.savefig(content, format="png", dpi=100, bbox_inches="tight")
    data = {"image/png": base64.b64encode(content.getvalue()).decode(), "text/plain": _lines(repr(figure))}
    plt.close(figure)
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def main() -> None:
    """Read the command line, and execute the notebook."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook.resolve()
    notebook, names = json.loads(path.read_text()), dict[str, Any]()
    plt.switch_backend("agg")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, cell in enumerate(cells, 1):
            cell["outputs"] = executed("".join(cell["source"]), names, number)
            cell["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
