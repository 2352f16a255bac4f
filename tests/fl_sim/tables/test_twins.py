"""Two classes of the user's own with one title are told apart, or refused in words."""

import sys
from pathlib import Path

import pytest

from fl_sim.errors import UserError
from fl_sim.tables.plan import plan_table, table_settings


def test_two_classes_with_one_title_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_twins.py").write_text(
        "from typing import ClassVar\nfrom strategies.algorithm import Averaging\n"
        'class A(Averaging):\n    title: ClassVar[str] = "Mine"\n'
        'class B(Averaging):\n    title: ClassVar[str] = "Mine"\n'
    )
    base = {"model": "logistic", "rounds": 1, "clients": 2, "partition": "iid"}
    grid = {"algorithm": ["own_twins:A", "own_twins:B"]}
    settings = table_settings({"base": base, "grid": grid, "centralized": False}, [], "the test")
    with pytest.raises(UserError, match=r"own_twins:A and own_twins:B have one title.*give each class"):
        plan_table(settings)
    sys.modules.pop("own_twins")
