"""Rows, columns, directories and captions of a table name what distinguishes their runs."""

import inspect

import pytest

from clients.dafl.settings import DaFl
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.settings import kinds_of
from fl_sim.tables.labels import RowName, caption, duration_in_words, label, row_labels, run_name
from strategies.global_dp import AdaptiveClipping, GlobalDP
from strategies.pate.labelling import ConfidentGNMax, GNMax, Labelling
from strategies.pate.settings import Pate
from strategies.pate.student import Supervised


def test_what_a_group_of_settings_holds_is_named_as_it_is_set() -> None:
    labelling = Labelling(mechanism=GNMax(sigma=6.0), epsilon=2.0)
    assert label(Pate(labelling=labelling)) == "PATE (labelling.mechanism=gnmax:6, labelling.epsilon=2)"
    assert label(Pate(labelling=Labelling())) == "PATE"


def test_what_stands_in_place_of_a_default_is_named_by_its_class_even_where_nothing_in_it_is_changed() -> None:
    assert label(GlobalDP(adaptive_clipping=AdaptiveClipping())).endswith("(adaptive_clipping=AdaptiveClipping)")
    assert label(GlobalDP(adaptive_clipping=AdaptiveClipping(learning_rate=0.5))).endswith(
        "(adaptive_clipping=AdaptiveClipping (learning_rate=0.5))"
    )
    assert label(GlobalDP(adaptive_clipping=AdaptiveClipping(target_quantile=0.9))).endswith(
        "(adaptive_clipping=AdaptiveClipping (target_quantile=0.9))"
    )


def test_a_model_of_a_tables_base_is_named_in_rows_as_a_model_of_its_grid_is() -> None:
    chosen = (experiment_from({"model": model}) for model in ("logistic", {"name": "mlp", "trainable": "head"}))
    base, other = (RowName("FedAvg", {}, one) for one in chosen)
    grid = RowName("FedAvg", {"model": "2nn"}, base.experiment)
    labels = row_labels({"base": base, "grid": grid, "other": other})
    assert [shown for shown, _ in labels.values()] == [
        "FedAvg, model=logistic", "FedAvg, model=2nn", "FedAvg, model=mlp (trainable=head)",
    ]  # fmt: skip


def test_kinds_within_settings_are_named_with_what_is_not_their_default() -> None:
    written = label(Pate(student=Supervised(steps=7), labelling=Labelling(mechanism=ConfidentGNMax(sigma=3.0))))
    assert written == "PATE (labelling.mechanism=confident (sigma=3), student=supervised:7)"
    assert label(DaFl(gamma=0.5)).startswith("DA-FL")


def test_an_algorithm_that_has_nothing_to_say_of_momentum_leaves_no_line_behind() -> None:
    kinds = ("scaffold", "fedmix", "fedavg")
    experiments = [experiment_from({"algorithm": kind, "local": {"momentum": 0.0}}) for kind in kinds]
    lines = caption(experiments, {}, {}, has_bound=False)
    assert [line for line in lines if line.startswith("SCAFFOLD trains without local momentum, as in its paper.")]
    assert not [line for line in lines if len(line) < 10]


@pytest.mark.parametrize("kind", kinds_of("algorithm"))
def test_who_advises_on_momentum_is_asked_for_nothing_else(kind: str) -> None:
    advice = getattr(kinds_of("algorithm")[kind], "advice", None)
    assert advice is None or list(inspect.signature(advice).parameters) == ["self", "momentum"]


def test_a_table_of_pate_takes_no_momentum_for_a_number_of_teachers() -> None:
    lines = caption([experiment_from({"algorithm": "pate", "clients": 250})], {}, {}, has_bound=False)
    assert not [line for line in lines if "votes of" in line]


ON_TEST = "on the test set and therefore optimistic"
OPTIMISTIC = "the best evaluated round, picked on the test set and therefore optimistic"
TENTH = "10 % of every client's training records"
GIVEN = "the validation records that the data come with"


@pytest.mark.parametrize(
    ("evaluated", "told"),
    [
        ([{}], OPTIMISTIC),
        ([{"test": "never"}], "the same, because nothing is measured"),
        ([{"test": "never"}, {}], OPTIMISTIC),
        ([{"test": "last"}], "the same, because the test records are used once, after the last round"),
        ([{"test": "last"}, {}], OPTIMISTIC),
        (
            [{"validation": 0.25}, {"validation": 0.1}],
            "the round that is best on validation, 10 % or 25 % of every client's training records",
        ),
        (
            [{"validation": 0.1}, {}],
            f"the round that is best on validation, {TENTH}; without them, {ON_TEST}",
        ),
        ([{"validation": "given"}], f"the round that is best on validation, {GIVEN}"),
        (
            [{"validation": "given"}, {"validation": 0.1}],
            f"the round that is best on validation, {TENTH} or {GIVEN}",
        ),
    ],
)
def test_a_caption_says_on_which_records_the_best_round_of_several_kinds_of_runs_is_picked(
    evaluated: list[dict[str, object]], told: str
) -> None:
    private = {"aggregator": {"kind": "global-dp", "noise_multiplier": 1.0}}  # only private runs may measure nothing
    experiments = [
        experiment_from({"evaluate": one, **(private if "never" in one.values() else {})}) for one in evaluated
    ]
    assert caption(experiments, {}, {}, has_bound=False)[0].endswith(f"; best: {told}.")


def test_an_upper_bound_trains_as_long_as_one_client_where_any_of_them_goes_by_steps() -> None:
    by_steps, by_epochs = (experiment_from({"local": one}) for one in ({"steps": 5}, {"epochs": 2}))
    for experiments, told in (([by_epochs, by_steps], "steps as one client"), ([by_epochs], "epochs")):
        assert f"with as many {told} in total" in caption(experiments, {}, {}, has_bound=True)[-1]
    lengths = caption([by_epochs, by_steps], {}, {}, has_bound=False)[2]
    assert "rounds of 2 local epochs, 5 local steps, batch" in lengths


def test_values_that_differ_between_cells_are_all_told_in_the_order_of_the_cells_once_each() -> None:
    cells = [{"clients": 4, "local": {"epochs": 1}}, {"clients": 30, "local": {"epochs": 1, "clip_norm": 2.5}}]
    experiments = [experiment_from(one) for one in [*cells, cells[0]]]
    line = caption(experiments, {}, {}, has_bound=False)[2]
    assert "Settings: 4, 30 clients, " in line
    assert "rounds of 1 local epoch, batch" in line
    assert "gradients clipped to norm 0, 2.5" in line
    by_row = caption(experiments, {}, {}, has_bound=False, places=[["A", "B", "C"], ["x"] * 3])[2]
    assert "Settings: 4 (30 for B) clients, " in by_row
    assert "gradients clipped to norm 0 (2.5 for B)" in by_row
    by_column = caption(experiments, {}, {}, has_bound=False, places=[["A"] * 3, ["x", "y", "x"]])[2]
    assert "clipped to norm 0 (2.5 for y)" in by_column


def test_epochs_on_the_server_are_told_where_any_row_has_them() -> None:
    rows = [experiment_from({"preprocess": {"kind": "da-fl", "server_epochs": epochs}}) for epochs in (0, 3)]
    lines = caption(rows, {}, {}, has_bound=False)
    assert [line for line in lines if "The server trains the first model on the pool for 0, 3 epochs." in line]


def test_numbers_of_features_and_epochs_of_a_calibration_are_told_apart() -> None:
    calibrated = experiment_from({"calibrate": {"kind": "ccvr", "samples_per_class": 70, "epochs": 3}})
    (line,) = [one for one in caption([calibrated], {}, {}, has_bound=False) if one.startswith("CCVR")]
    assert "again on 70 features a class" in line
    assert ", epochs 3; last" in line


def test_a_parameter_has_all_its_digits_and_the_one_in_the_title_is_not_told_twice() -> None:
    prox = experiment_from({"algorithm": {"kind": "fedprox", "mu": 0.0123456}})
    assert label(prox.algorithm) == "FedProx (mu=0.0123456)"
    assert "0.07" in (written := label(experiment_from({"partition": "dirichlet:0.07"}).partition))
    assert written.count("0.07") == 1


def test_a_private_run_took_at_most_what_it_says_in_all() -> None:
    seconds = {"train": 7.0, "total": 12.25}
    assert duration_in_words({"seconds": seconds, "privacy": []}) == "12.2 s"
    assert duration_in_words({"seconds": seconds, "privacy": [{}]}) == "at most 12.25 s"


def test_settings_that_came_later_leave_the_names_of_runs_without_them_as_they_were() -> None:
    plain, held = (job_of(experiment_from(table)) for table in ({}, {"evaluate": {"validation": 0.1}}))
    assert run_name(plain.experiment, plain.dataset) == "fedavg-digits-label-1-seed-0-fd89a2b7"
    assert run_name(held.experiment, held.dataset) != run_name(plain.experiment, plain.dataset)


def test_a_caption_names_groups_of_rows_in_place_of_very_many_rows() -> None:
    def settings(count: int) -> str:
        made = [experiment_from({"local": {"learning_rate": rate}}) for rate in (0.1, 0.2, 0.3)]
        rates, places = [0, 0, 1, 2] * (count // 4), ["A", "A", "B", "B"] * (count // 4)
        rows = [f"row {number}" for number in range(count)]
        return caption([made[one] for one in rates], {}, {}, has_bound=False, places=[places, rows])[2]

    assert "constant learning rate 0.1 (0.2 for row 2, row 6; 0.3 for row 3, row 7)" in settings(8)
    assert "constant learning rate 0.1 (0.2 or 0.3 for B)" in settings(64)
