"""Trackers keep what they are told in the tests' own folders."""

import importlib
import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(params=["tensorboard", "mlflow", "wandb", "trackio"])
def tracker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of the trackers, if it is installed."""
    name: str = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a new database takes seconds
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    if name == "trackio":
        for module in ("trackio", "trackio.utils", "trackio.sqlite_storage"):
            monkeypatch.setattr(importlib.import_module(module), "TRACKIO_DIR", tmp_path / "trackio")
    return name
