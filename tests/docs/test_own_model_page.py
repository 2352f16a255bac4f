"""The examples with models of other libraries, on the page about adding a model, train in small."""

import re
from pathlib import Path

import numpy as np
import pytest

from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run

PAGE = (Path(__file__).parents[2] / "docs/adding/model.md").read_text()
EXAMPLES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
FUNCTIONS = [
    f"{file}:{name}" for file, text in EXAMPLES.items() for name in re.findall(r"^def (\w+)", text, re.MULTILINE)
]


def test_there_is_an_example_of_each_library_in_at_most_twenty_lines() -> None:
    assert FUNCTIONS == ["vision:small_resnet", "vision:small_vit", "texts:small_bert", "texts:adapted_bert"]
    for library in ("torchvision", "timm", "transformers", "peft"):
        assert any(f"import {library}" in text or f"from {library}" in text for text in EXAMPLES.values())
    assert all(len(text.splitlines()) <= 20 for text in EXAMPLES.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, and with small images and texts."""
    for file, text in EXAMPLES.items():
        (tmp_path / f"{file}.py").write_text(text)
    coins = np.random.default_rng(1)
    labels = np.arange(12) % 2
    images, texts = coins.integers(0, 255, (12, 16, 16, 1), dtype=np.uint8), coins.integers(1, 257, (12, 6))
    texts[:, 4:] = 0
    parts = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(tmp_path / "images.npz", **parts)
    np.savez(tmp_path / "texts.npz", **{**parts, "x_train": texts, "x_test": texts, "vocabulary": 257})
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
@pytest.mark.parametrize("model", FUNCTIONS)
def test_every_example_trains(model: str, folder: Path) -> None:
    data = f"npz:{folder / ('texts' if model.startswith('texts') else 'images')}.npz"
    base = {"data": data, "clients": 2, "partition": "iid", "rounds": 1, "engine": "inprocess", "model": model}
    result = run(experiment_from(base), folder / "run")
    assert result["status"] == "finished"
    if model == "texts:adapted_bert":
        assert result["num_parameters"] == 4 * 2 * (32 + 32) + 32 * 2 + 2  # query and value, rank 4, and the head
