"""What every privacy statement of a result says of its limits, whatever it is about."""

import pytest

from fl_sim.data import tuned_on
from fl_sim.privacy.statement import UncoveredFacts, beside


@pytest.mark.parametrize(
    ("unit", "person"),
    [
        ("record", " A person with several records, at one client or at several, pays for each of them."),
        ("client", " A person with records at several clients pays for each of these clients."),
        ("household", ""),
    ],
)
def test_every_statement_says_who_pays_several_times_and_what_was_tuned_on_its_records(unit: str, person: str) -> None:
    bare = {"unit": unit, "does_not_cover": "The server."}
    [said] = beside([bare], UncoveredFacts(("names",), tuned_on=tuned_on("mnist")))
    words = said["does_not_cover"]
    assert words.startswith(f"The server.{person} Choices made beforehand on these training records")
    assert words.endswith("names.")
    [other] = beside([bare], UncoveredFacts(tuned_on=tuned_on("svhn")))
    assert other["does_not_cover"] == f"The server.{person}"
