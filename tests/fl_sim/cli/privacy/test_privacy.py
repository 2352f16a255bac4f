"""``fl-sim privacy``: three questions, two units, one JSON object, and errors that help."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event, pld
from typer.testing import CliRunner

from clients.noisy_counts import counting_cost
from clients.paid_rounds import ClientProtection
from fl_sim.cli.privacy import app, audit
from fl_sim.cli.privacy.audit import TRUE_MECHANISM, TRUE_SAMPLING, Finding, audit_global_dp
from fl_sim.errors import UserError
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.mechanisms import Noise
from fl_sim.testing_fixtures import SetFineness

POISSON = ("global-dp", "--sampling-rate", "0.1")
FIXED = ("global-dp", "--clients", "1000", "--cohort", "30")


def call(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    return str(caught.value)


@pytest.mark.usefixtures("quick_accounting")
def test_epsilon_from_noise() -> None:
    plan = call(*POISSON, "--noise-multiplier", "1.0", "--rounds", "54", "--delta", "1e-5")
    assert plan["asked"] == "epsilon"
    assert (plan["unit"], plan["steps"], plan["sampling_rate"], plan["accountant"]) == ("client", 54, 0.1, "rdp")
    assert plan["epsilon"] == plan["epsilon_rdp"] > plan["epsilon_pld"] > 0
    assert plan["adjacency"] == "add-or-remove-one"


@pytest.mark.usefixtures("coarse_losses")
def test_noise_from_epsilon() -> None:
    plan = call(*POISSON, "--rounds", "100", "--epsilon", "8", "--delta", "1e-5")
    assert plan["asked"] == "noise_multiplier"
    assert plan["noise_multiplier"] == pytest.approx(0.99373, rel=1e-3)
    assert plan["epsilon"] <= 8


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_rounds_that_fit(accountant: str) -> None:
    known = (*POISSON, "--noise-multiplier", "1.0", "--accountant", accountant)
    plan = call(*known, "--epsilon", "4")
    assert plan["asked"] == "steps"
    assert plan["steps"] == plan["steps_that_fit"]
    assert plan["epsilon"] <= 4 < call(*known, "--rounds", str(plan["steps"] + 1))["epsilon"]


@pytest.mark.usefixtures("quick_accounting")
def test_everything_given_tells_what_is_spent_and_what_would_fit() -> None:
    plan = call(*POISSON, "--noise-multiplier", "1.0", "--rounds", "200", "--epsilon", "8")
    assert plan["asked"] == "epsilon"
    assert plan["epsilon"] > 8
    assert plan["steps_that_fit"] < 200


@pytest.mark.usefixtures("quick_accounting")
def test_no_round_may_fit() -> None:
    plan = call("global-dp", "--sampling-rate", "1", "--noise-multiplier", "0.5", "--epsilon", "0.1")
    assert (plan["steps"], plan["epsilon"]) == (0, 0.0)


@pytest.mark.usefixtures("quick_accounting")
def test_fixed_size_is_replace_one_and_costs_more() -> None:
    rest = ("--noise-multiplier", "3.0", "--rounds", "50")
    fixed, poisson = call(*FIXED, *rest), call("global-dp", "--sampling-rate", "0.03", *rest)
    assert fixed["adjacency"] == "replace-one"
    assert fixed["sampling_rate"] == poisson["sampling_rate"] == 0.03
    assert fixed["epsilon"] > 1.9 * poisson["epsilon"]


def test_dp_sgd_is_about_records() -> None:
    batches = call(
        "dp-sgd", "--records", "60000", "--batch-size", "250", "--noise-multiplier", "1.3", "--steps", "3600"
    )
    rate = call("dp-sgd", "--sampling-rate", str(250 / 60000), "--noise-multiplier", "1.3", "--steps", "3600")
    assert batches["unit"] == rate["unit"] == "record"
    assert batches["epsilon"] == rate["epsilon"] == pytest.approx(0.9422, rel=1e-3)
    assert batches["epsilon_pld"] == pytest.approx(0.8530, rel=1e-3)


@pytest.mark.usefixtures("quick_accounting")
def test_a_large_delta_is_warned_about_on_standard_error() -> None:
    arguments = [*FIXED, "--noise-multiplier", "3.0", "--rounds", "5", "--delta", "1e-3", "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "not below 1 / 1000" in result.stderr
    assert json.loads(result.stdout)["warnings"]
    assert not call(*FIXED, "--noise-multiplier", "3.0", "--rounds", "5", "--delta", "1e-5")["warnings"]


@pytest.mark.usefixtures("quick_accounting")
def test_people_get_lines_and_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "epsilon.png"
    arguments = [*POISSON, "--noise-multiplier", "1.0", "--rounds", "3", "--epsilon", "4", "--plot", str(path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert path.read_bytes().startswith(b"\x89PNG")
    for word in ("epsilon", "RDP", "PLD", "noise multiplier", "add-or-remove-one", "steps that fit"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("global-dp", "--rounds", "5", "--noise-multiplier", "1"), "how are clients sampled"),
        (("global-dp", "--cohort", "5", "--rounds", "5", "--noise-multiplier", "1"), "how are clients sampled"),
        (("dp-sgd", "--steps", "5", "--noise-multiplier", "1"), "the sampling of records is not given"),
        ((*POISSON, "--cohort", "5", "--rounds", "5", "--noise-multiplier", "1"), "give one of them"),
        ((*POISSON, "--rounds", "5"), "--noise-multiplier and --epsilon are missing"),
        ((*POISSON, "--epsilon", "5"), "--noise-multiplier and --rounds are missing"),
        ((*POISSON, "--noise-multiplier", "1"), "--rounds and --epsilon are missing"),
        ((*POISSON, "--rounds", "0", "--noise-multiplier", "1"), "0 steps"),
        ((*POISSON, "--rounds", "5", "--noise-multiplier", "0"), "gives no guarantee"),
        ((*POISSON, "--rounds", "5", "--noise-multiplier", "nan"), "gives no guarantee"),
        ((*POISSON, "--rounds", "5", "--epsilon", "-1"), "target epsilon -1.0"),
        ((*POISSON, "--rounds", "5", "--noise-multiplier", "1", "--delta", "0"), "delta 0.0"),
        (("global-dp", "--sampling-rate", "1.5", "--rounds", "5", "--noise-multiplier", "1"), "sampling rate 1.5"),
        (("global-dp", "--clients", "9", "--cohort", "10", "--rounds", "5", "--noise-multiplier", "1"), "cohort of 10"),
        (("global-dp", "--clients", "0", "--cohort", "0", "--rounds", "5", "--noise-multiplier", "1"), "0 clients"),
        (
            ("dp-sgd", "--batch-size", "64", "--steps", "5", "--noise-multiplier", "1"),
            "--batch-size goes with --records",
        ),
        (("dp-sgd", "--records", "9", "--batch-size", "64", "--steps", "5", "--noise-multiplier", "1"), "batch of 64"),
        (
            (*POISSON, "--rounds", "2", "--noise-multiplier", "1", "--plot", "no/such/directory/p.png"),
            "cannot write the plot",
        ),
        (
            (*POISSON, "--noise-multiplier", "0.3", "--epsilon", "0.01", "--plot", "p.png"),
            "nothing to plot",
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("quick_accounting")
def test_mistakes_are_named_with_their_fix(arguments: Sequence[str], said: str) -> None:
    assert said in refusal(*arguments)


@pytest.fixture(scope="module")
def findings(set_fineness: SetFineness) -> list[Finding]:
    """An audit whose noise is seeded, so that it ends the same every time; its faults are far beyond the limits."""
    set_fineness(losses=100)  # the claim is still an upper bound
    return audit_global_dp(1.0, num_runs=250, noise=Noise.seeded(0))


def test_the_audit_clears_the_real_aggregator_and_catches_every_planted_fault(findings: list[Finding]) -> None:
    found = {finding.mechanism: finding for finding in findings}
    true = found.pop(TRUE_MECHANISM)
    assert not true.caught
    assert not found.pop(TRUE_SAMPLING).caught
    assert found.pop("cohort from the published seed").profile.refuted
    assert len(found) == 7
    for name, finding in found.items():
        assert finding.profile.refuted, name
        assert min(finding.calibration.values()) < 1e-20, name


def test_the_audit_is_not_vacuous() -> None:
    true = audit_global_dp(1.0, num_runs=2000, noise=Noise.seeded(2), only=TRUE_MECHANISM)[0]
    assert not true.caught
    assert true.profile.power == pytest.approx(1.0, abs=0.1)


def test_the_audit_command_prints_bounds_for_every_mechanism(
    findings: list[Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    def audited(noise_multiplier: float, *, num_runs: int, noise: Noise) -> list[Finding]:
        assert (noise_multiplier, num_runs, noise) == (1.0, 300, Noise.seeded(0))
        return findings

    monkeypatch.setattr(audit, "audit_global_dp", audited)
    arguments = ["audit", "--runs", "300", "--seed", "0"]
    text = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    found = call(*arguments)
    assert found["true_mechanism"] == TRUE_MECHANISM
    assert len(found["mechanisms"]) == 10
    assert text.count("claimed (epsilon at delta 1e-5)") == 1
    assert text.count("claimed by sampling") == 1
    assert 0 < found["tightness"] < 1
    assert f"tightness {found['tightness']:.2f}: these runs would refute a claim of '{TRUE_MECHANISM}' below" in text
    for mechanism in found["mechanisms"]:
        assert mechanism["mechanism"] in text
        assert len(mechanism["profile"]["lower_bounds"]) == 4
    assert text.count("CLAIM REFUTED") >= 5


def test_a_plan_with_noise_steps_and_epsilon_answers_with_delta() -> None:
    given = ("dp-sgd", "--sampling-rate", "0.01", "--noise-multiplier", "1", "--steps", "1000", "--json")
    plain = json.loads(CliRunner().invoke(app, [*given]).stdout)
    assert (plain["delta_at_target"], plain["mu"]) == (None, None)
    asked = json.loads(CliRunner().invoke(app, [*given, "--epsilon", str(plain["epsilon_pld"])]).stdout)
    assert asked["delta_at_target"] == pytest.approx(1e-5, rel=1e-3)
    whole = ("dp-sgd", "--sampling-rate", "1", "--noise-multiplier", "4", "--steps", "9", "--epsilon", "2")
    assert "mu 0.75 (exact, because no step samples units)" in CliRunner().invoke(app, [*whole]).stdout


def test_local_dp_is_about_clients_whose_data_are_replaced() -> None:
    plan = call("local-dp", "--noise-multiplier", "8", "--rounds", "10")
    assert (plan["unit"], plan["adjacency"]) == ("client", "replace-one")
    exact = pld.PLDAccountant()
    exact.compose(dp_event.GaussianDpEvent(4.0), 10)  # two updates differ by two clipping norms
    assert plan["epsilon_pld"] == pytest.approx(exact.get_epsilon(1e-5), rel=1e-4)
    assert plan["mu"] == pytest.approx(2 * 10**0.5 / 8)
    asked = call("local-dp", "--epsilon", str(plan["epsilon"]), "--rounds", "10")
    assert asked["noise_multiplier"] == pytest.approx(8, rel=1e-3)
    shown = CliRunner().invoke(app, ["local-dp", "--rounds", "9", "--epsilon", "8"]).stdout
    assert "full: every client takes part" in shown


DISTRIBUTED = ("distributed-dp", "--clients", "100", "--parameters", "7850")


def test_distributed_dp_finds_each_quantity_from_the_others() -> None:
    plan = call(*DISTRIBUTED, "--rounds", "10", "--epsilon", "8", "--dropped", "20")
    assert (plan["unit"], plan["adjacency"], plan["asked"]) == ("client", "add-or-remove-one", "noise_multiplier")
    assert 7.99 < plan["epsilon"] <= 8.0 < plan["epsilon_with_dropped"]
    assert (plan["numbers"], plan["bytes"]) == (8192, 16384)
    z = str(plan["noise_multiplier"])
    assert call(*DISTRIBUTED, "--rounds", "10", "--noise-multiplier", z)["epsilon"] == plan["epsilon"]
    fits = call(*DISTRIBUTED, "--noise-multiplier", z, "--epsilon", "8")
    assert (fits["asked"], fits["rounds"]) == ("rounds", 10)
    [less] = {plan["epsilon_with_dropped"]} - {plan["epsilon"]}
    fewer = call(*DISTRIBUTED, "--rounds", "10", "--noise-multiplier", str(plan["noise_multiplier"] * 0.8**0.5))
    assert less == pytest.approx(fewer["epsilon"], rel=0.01)
    shown = CliRunner().invoke(app, [*DISTRIBUTED, "--rounds", "10", "--epsilon", "8", "--dropped", "20"]).stdout
    for words in ("8,192 numbers of 16 bits, 16,384 bytes", "trusted: secure aggregation;", "if 20 drop out a round"):
        assert words in shown


def test_distributed_dp_refuses_what_cannot_be_planned() -> None:
    assert "give two of --noise-multiplier, --rounds, --epsilon" in refusal(*DISTRIBUTED, "--rounds", "10")
    assert "at least one must answer" in refusal(*DISTRIBUTED, "--rounds", "1", "--epsilon", "8", "--dropped", "100")
    few = refusal(*DISTRIBUTED, "--rounds", "10", "--epsilon", "1", "--bits", "8")
    assert "out of reach with 8 bits" in few
    broken = refusal(*DISTRIBUTED, "--rounds", "10", "--epsilon", "8", "--delta", "0")
    assert "delta" in broken
    advice = CliRunner().invoke(app, [*DISTRIBUTED, "--rounds", "1", "--epsilon", "8", "--delta", "0.005"])
    assert "warning: delta 0.005 is large for 100 protected units" in advice.stderr


SUMS_OF_RECORDS = ("distributed-dp-sgd", "--clients", "10", "--records", "50000", "--parameters", "7850")


def test_distributed_dp_sgd_finds_each_quantity_from_the_others() -> None:
    plan = call(*SUMS_OF_RECORDS, "--rounds", "100", "--epsilon", "3", "--dropped", "2")
    assert (plan["unit"], plan["adjacency"], plan["asked"]) == ("record", "add-or-remove-one", "noise_multiplier")
    assert 2.99 < plan["epsilon"] <= 3.0 < plan["epsilon_with_dropped"]
    assert (plan["numbers"], plan["bits"], plan["bytes"]) == (7850, 40, 39250)
    assert plan["std_of_mean"] == pytest.approx(plan["noise_multiplier"] / 50_000, rel=1e-6)
    z = str(plan["noise_multiplier"])
    assert call(*SUMS_OF_RECORDS, "--rounds", "100", "--noise-multiplier", z)["epsilon"] == plan["epsilon"]
    fits = call(*SUMS_OF_RECORDS, "--noise-multiplier", z, "--epsilon", "3")
    assert (fits["asked"], fits["rounds"]) == ("rounds", 100)
    shown = CliRunner().invoke(app, [*SUMS_OF_RECORDS, "--rounds", "100", "--epsilon", "3", "--delta", "1e-4"])
    assert "clipping norm of one record" in shown.stdout
    assert "warning: delta 0.0001 is not below 1 / 50000" in shown.stderr


def test_distributed_dp_sgd_refuses_what_cannot_be_planned() -> None:
    assert "give two of --noise-multiplier, --rounds, --epsilon" in refusal(*SUMS_OF_RECORDS, "--rounds", "10")
    assert "may exceed the range" in refusal(*SUMS_OF_RECORDS, "--rounds", "1", "--noise-multiplier", "0.001")


def test_a_plan_of_dp_sgd_names_the_setting_of_a_run_with_this_cost() -> None:
    sampling = ("--sampling-rate", "0.01", "--noise-multiplier", "1", "--delta", "1e-5")
    runner = CliRunner()
    by_records = runner.invoke(app, ["dp-sgd", *sampling, "--steps", "10"]).stdout
    assert "as in local.privacy=dp-sgd of fl-sim run" in by_records
    assert "local.privacy" not in runner.invoke(app, ["global-dp", *sampling, "--rounds", "10"]).stdout
    assert "such as a client with" in " ".join(runner.invoke(app, ["dp-sgd", "--help"]).stdout.split())


def test_the_best_of_random_trials_costs_more_than_one_run_and_less_than_all_published() -> None:
    asked = ("selection", "--trials", "20", "--sampling-rate", "0.01", "--steps", "1000")
    plan = call(*asked, "--noise-multiplier", "1.3")
    assert plan["epsilon_of_one_run"] < plan["epsilon"] < plan["epsilon_if_all_are_published"]
    assert (plan["distribution"], plan["eta"], plan["gamma"]) == ("negative-binomial", 1.0, pytest.approx(1 / 20))
    noisier = call(*asked, "--epsilon", "2", "--eta", "0")
    assert 1.99 < noisier["epsilon"] <= 2
    assert noisier["asked"] == "noise_multiplier"
    shown = CliRunner().invoke(app, [*asked, "--noise-multiplier", "1.3", "--distribution", "poisson"]).stdout
    assert "trials            20 on average, at most 31 with probability 0.99" in shown
    assert "if the number of trials is 0, a result that uses no data is published" in shown
    assert "give one of --noise-multiplier and --epsilon" in refusal(*asked)
    assert "leave it out" in refusal(*asked, "--epsilon", "1", "--eta", "0", "--distribution", "poisson")
    often = ("selection", "--trials", "2", "--sampling-rate", "2", "--steps", "1")
    for given in (("--noise-multiplier", "1"), ("--epsilon", "1")):
        assert "sampling rate 2.0 is not in (0, 1]: give the probability" in refusal(*often, *given)


def test_counts_are_planned_as_a_run_bills_them() -> None:
    plan = call("counts", "--measurements", "10", "--epsilon", "1", "--records", "200")
    run_cost = counting_cost(ClientProtection(1.0, 1e-5, 1.0, None, "secret"), 10)
    assert plan["count_noise"] == run_cost.noise_multiplier
    assert 0.999 < plan["epsilon"] <= 1
    assert plan["measurements_that_fit"] == 10
    assert plan["std_of_accuracy"] == plan["count_noise"] / 200
    # k counts with noise s are one Gaussian mechanism with noise s / sqrt(k)
    single = epsilon_of_counts({dp_event.GaussianDpEvent(plan["count_noise"] / 10**0.5): 1}, 1e-5)
    assert plan["epsilon"] == pytest.approx(single, rel=1e-9)
    fits = call("counts", "--count-noise", "20", "--epsilon", "1")["measurements"]
    assert call("counts", "--count-noise", "20", "--measurements", str(fits))["epsilon"] <= 1
    assert call("counts", "--count-noise", "20", "--measurements", str(fits + 1))["epsilon"] > 1
    assert call("counts", "--count-noise", "0.1", "--measurements", "3", "--epsilon", "1")["epsilon"] > 1
    shown = CliRunner().invoke(app, ["counts", "--count-noise", "20", "--measurements", "3", "--records", "50"])
    assert "a client's error  40 points of accuracy with 50 test records" in shown.stdout
    assert "give two of" in refusal("counts", "--epsilon", "1")
    assert "gives no guarantee" in refusal("counts", "--count-noise", "0", "--measurements", "1")
    assert "is not a positive number" in refusal("counts", "--epsilon", "-1", "--measurements", "1")
