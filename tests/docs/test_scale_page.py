"""docs/scale.md: what it draws out follows from the costs that it states, and what it calls exact is."""

import re
from pathlib import Path

import pytest

from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.rounds import procedure_of

PAGE = (Path(__file__).parents[2] / "docs/scale.md").read_text()


def stated(row: str) -> str:
    """Return the second cell of the row that begins with ``row``."""
    (cell,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", PAGE, re.MULTILINE)
    return str(cell)


def cost(row: str, **values: float) -> float:
    """Return what the formula in ``row`` makes of ``values``."""
    formula = re.sub(r"(?<=[0-9)m]) (?=[(KPm])", " * ", stated(row))
    assert set(re.findall(r"[A-Za-z]\w*", formula.replace("e-", ""))) <= {*values, "e8"}
    return float(eval(formula, {"__builtins__": {}}, values))


@pytest.mark.parametrize(
    ("costs", "drawn_out", "unit"),
    [
        ("clients, processor seconds a round", "a round, clients", 1),
        ("the server, processor seconds a round", "a round, the server", 1),
        ("before the first round, processor seconds", "before the first round", 1),
        ("memory, bytes", "memory of the process that leads", 1e9),
        ("bytes a round, to clients and back (exact)", "to clients and back in a round", 1e9),
    ],
)
def test_what_is_drawn_out_follows_from_the_costs(costs: str, drawn_out: str, unit: float) -> None:
    said = float(re.findall(r"[0-9.]+", stated(drawn_out))[0])
    assert cost(costs, K=1e7, m=1e4, P=46_410) / unit == pytest.approx(said, rel=0.06)


def test_bytes_of_a_round_are_as_the_page_has_them() -> None:
    job = job_of(experiment_from({"model": "2nn", "clients": 10, "rounds": 1}))
    traffic = procedure_of(job).traffic()["rounds"]
    parameters = sum(weights.numel() for weights in job.model().parameters())
    said = cost("bytes a round, to clients and back (exact)", m=10, P=parameters, K=10)
    assert traffic.down + traffic.up == said
