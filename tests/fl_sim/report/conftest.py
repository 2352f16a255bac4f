"""Run directories made by hand, with pools of synthetic records in them."""

import json
import math

import numpy as np
import pytest
import tomli_w
from matplotlib import rc_context
from matplotlib.text import Text
from safetensors.numpy import save_file

from fl_sim.report.picture import PAPER

TITLES = {"fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD"}
POOL = "synthetic-0123456789abcdef.safetensors"

SMALLEST = 7  # points


@pytest.fixture
def readable():
    """Assert that a picture drawn for a paper is as wide as asked for, with no text that is too small or cut off."""

    def check(picture):
        for layout in PAPER:
            with rc_context(layout.style()):
                figure = picture.draw(layout)
                figure.draw_without_rendering()
            assert figure.get_figwidth() == layout.width
            _assert_legible(figure)

    return check


def _assert_legible(figure):
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    assert len(texts) > 10
    assert all(text.get_fontsize() >= SMALLEST for text in texts)
    assert not [text for text in texts if "$" in text.get_text()], "an exponent would be smaller"
    whole = figure.bbox.padded(1)
    ticks = {id(one) for axes in figure.axes for one in (*axes.get_xticklabels(), *axes.get_yticklabels())}
    for text in (one for one in texts if id(one) not in ticks):  # of ticks some lie outside and are not drawn
        box = text.get_window_extent()
        assert whole.x0 <= box.x0 <= box.x1 <= whole.x1, text
        assert whole.y0 <= box.y0 <= box.y1 <= whole.y1, text


@pytest.fixture
def write_experiment(tmp_path):
    """Write a finished run; with ``preprocess`` one that has a pool with ``counts`` records by client and class."""

    def write(name, accuracy=0.5, *, preprocess=None, counts=((2, 0, 1), (0, 0, 9)), note="", spent=None, **changes):
        path = tmp_path / name
        path.mkdir(parents=True)
        settings = {
            "data": "digits", "seed": 0, "clients": len(counts), "rounds": 1, "model": "mlp",
            "algorithm": {"kind": "fedavg"}, "partition": {"kind": "label-k", "k": 1}, "local": {"epochs": 1},
            "preprocess": {"kind": "none"}, **changes,
        }  # fmt: skip
        kind = settings["algorithm"]["kind"]
        result = {
            "status": "finished", "data_note": note,
            "partition": kind if kind == "centralized" else f"label-{settings['partition']['k']}",
            "engine": "inprocess", "rounds": 1, "final_accuracy": accuracy, "best_accuracy": accuracy, "privacy": [],
            "seconds": {"preprocess": 0, "train": 1, "total": 2}, "versions": {}, "preprocess": {"kind": "none"},
            "titles": {"algorithm": TITLES.get(kind, kind)},
        }  # fmt: skip
        if preprocess is not None:
            chosen = {
                "kind": "da-fl", "epsilon": 10.0, "delta": 1e-5, "gamma": 0.05, "client_gammas": [], "noise": "secret",
                "generator": {"kind": "dp-cgan", "batch_size": 512}, "train_on": "own-and-synthetic", **preprocess,
            }  # fmt: skip
            settings["preprocess"] = chosen
            result["titles"]["preprocess"] = "DA-FL"
            result["preprocess"] = {
                "kind": "da-fl", "pool": POOL, "clients": [{"counts": list(own), "refused": ""} for own in counts]
            }  # fmt: skip
            epsilon = chosen["epsilon"] - 0.25 if spent is None else spent
            result["privacy"] = [{
                "unit": "record", "epsilon": None if math.isinf(epsilon) else epsilon, "delta": chosen["delta"],
                "guarantee": f"spent {epsilon}", "covers": "the pool.",
                "does_not_cover": "The main task is NOT private.",
            }]  # fmt: skip
            write_pool(path / POOL, counts, in_features=changes.get("features", "none") != "none")
        line = {
            "round": 1, "test_accuracy": accuracy, "test_loss": 1.0, "train_loss": None, "epsilon": None, "cohort": 2,
            "learning_rate": 0.1, "seconds": 1.0,
        }  # fmt: skip
        (path / "config.toml").write_text(tomli_w.dumps(settings))
        (path / "rounds.jsonl").write_text(json.dumps(line) + "\n")
        (path / "result.json").write_text(json.dumps(result))
        return path

    return write


def write_pool(path, counts, *, in_features=False):
    """Write images of one grey each: 10 * client + number within its client and class; or vectors of such numbers."""
    grey = [10 * client + number for client, own in enumerate(counts) for n in own for number in range(n)]
    labels = [label for own in counts for label, n in enumerate(own) for _ in range(n)]
    inputs = np.array(grey, dtype=np.uint8).reshape(-1, 1, 1, 1) * np.ones((1, 8, 8), dtype=np.uint8)
    if in_features:
        inputs = inputs.reshape(-1, 64)[:, :7].astype(np.float32)
    save_file({"inputs": inputs, "labels": np.array(labels, dtype=np.int64)}, path)
