"""The figure of delta over epsilon: the curve of a statement's planned releases, beside the stated pair."""

import json
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event, pld

from fl_sim.cli.report import PAGE, write_report
from fl_sim.privacy import events
from fl_sim.privacy.accounting import bounds
from fl_sim.report.figures.delta import HEADING, curve_of, delta_pictures
from fl_sim.report.files import PrivacyStatement
from fl_sim.report.runs import find

STEP = dp_event.PoissonSampledDpEvent(0.25, dp_event.GaussianDpEvent(1.5))
PLANNED = [{"event": events.to_json(STEP), "times": 20}]
SAID: dict[str, Any] = {
    "unit": "record", "epsilon": bounds({STEP: 20}, 1e-5).least, "delta": 1e-5, "planned_events": PLANNED,
}  # fmt: skip


def test_the_curve_is_that_of_the_planned_releases_and_has_the_stated_pair() -> None:
    curve = curve_of(PrivacyStatement.model_validate(SAID))
    assert curve is not None
    accountant = pld.PLDAccountant()
    accountant.compose(STEP, 20)
    theirs = [accountant.get_delta(epsilon) for epsilon in curve.epsilons]
    assert np.allclose(curve.deltas, theirs, rtol=2e-3, atol=1e-9)
    assert list(curve.deltas) == sorted(curve.deltas, reverse=True)
    at = float(np.exp(np.interp(curve.epsilon, curve.epsilons, np.log(curve.deltas))))
    assert at == pytest.approx(curve.delta, rel=0.1)
    assert curve.epsilons[0] == 0
    assert curve.epsilons[-1] > curve.epsilon


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": None}, {"planned_events": None}, {"budget": SAID["epsilon"]},
        {"planned_events": [{"event": {"kind": "no event"}, "times": 20}]}, {"planned_events": [{"times": -1}]},
        {"planned_events": [{"event": {"kind": "zcdp", "rho": 0.1, "xi": 0.0}, "times": 1}]},
    ],
)  # fmt: skip
def test_a_statement_without_known_releases_has_no_curve(changes: dict[str, Any]) -> None:
    assert curve_of(PrivacyStatement.model_validate({**SAID, **changes})) is None


def test_a_report_has_the_figure_once_for_equal_statements(write_experiment: Any, readable: Any, tmp_path: Any) -> None:
    for seed in (0, 1):
        place = write_experiment(f"run-{seed}", seed=seed)
        result = json.loads((place / "result.json").read_text())
        (place / "result.json").write_text(json.dumps(result | {"privacy": [SAID]}))
    [picture] = delta_pictures(find([tmp_path]).runs)
    readable(picture)
    assert picture.heading == HEADING
    write_report([tmp_path], tmp_path / "page", paper=False, pictures=False, target=None, json_output=True)
    assert (tmp_path / "page" / picture.name).read_bytes() == picture.png
    assert HEADING in (tmp_path / "page" / PAGE).read_text()


def test_runs_without_statements_have_no_figure(write_experiment: Any, tmp_path: Any) -> None:
    write_experiment("run")
    assert delta_pictures(find([tmp_path]).runs) == []
