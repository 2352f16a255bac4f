"""What ``[tune]`` may say."""

from typing import Any

import pytest
from pydantic import ValidationError

from fl_sim.tables.tuning_settings import Tune


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("trials", 1, 10_000), ("rounds", 0, 10**9), ("halving", 2, None), ("seed", 0, None)],
)
def test_numbers_of_a_search_have_limits_that_may_be_taken(name: str, least: int, most: int | None) -> None:
    def tune(value: int) -> Any:
        return getattr(Tune.model_validate({name: value}), name)

    taken = [least, least + 1, *([most - 1, most] if most else [10**12])]
    assert [tune(value) for value in taken] == taken
    for value in (least - 1, *([most + 1] if most else [])):
        with pytest.raises(ValidationError, match=rf"{name}\n.*(greater|less) than or equal"):
            tune(value)
