"""Short names of rows say what sets a row apart from others of its method, and nothing else."""

import pytest

from fl_sim.report.row_names import short_names


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (["DA-FL (gamma=0.5, generator=dp-cgan (steps=5)) + FedAvg", "FedAvg"], ["DA-FL + FedAvg", "FedAvg"]),
        (["FedProx (mu=0.01)", "FedProx (mu=0.1)"], ["FedProx (mu=0.01)", "FedProx (mu=0.1)"]),
        (["DA-FL (gamma=1, a=2) + X", "DA-FL (gamma=2, a=2) + X"], ["DA-FL (gamma=1) + X", "DA-FL (gamma=2) + X"]),
        (["FedX (ours)", "FedY (ours) (mu=1)"], ["FedX (ours)", "FedY (ours)"]),
        (["FedAvg", "FedAvg, FedBuff (concurrency=20)"], ["FedAvg", "FedAvg, FedBuff"]),
        (["A, aggregator=mean", "A, aggregator=krum:2"], ["A", "A, aggregator=krum:2"]),
        (["B, aggregator=krum:2 (c=d (e=1)), f=2"], ["B, aggregator=krum:2 (c=d (e=1))"]),
    ],
)
def test_a_name_keeps_only_the_settings_in_which_rows_of_its_method_differ(rows: list[str], shown: list[str]) -> None:
    assert list(short_names(rows).values()) == shown
