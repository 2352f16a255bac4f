"""The subcommands of ``fl-sim privacy``: plan a privacy budget before a run, and audit the privacy mechanism.

Slow modules are imported only when a subcommand runs, so that ``--help`` is fast.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from fl_sim.cli.screen import say
from fl_sim.errors import UserError
from fl_sim.importing import LazyModule, importing
from fl_sim.own_code import load_object

if TYPE_CHECKING:
    from fl_sim.cli.privacy import counts as counts_code
    from fl_sim.cli.privacy import distributed as sums_code
    from fl_sim.cli.privacy import pate as pate_code
    from fl_sim.cli.privacy import plan as plan_code
    from fl_sim.cli.privacy import selection as selection_code
    from fl_sim.cli.privacy.plan import PlannedReleases, Sampling
else:
    pate_code, plan_code = LazyModule("fl_sim.cli.privacy.pate"), LazyModule("fl_sim.cli.privacy.plan")
    sums_code = LazyModule("fl_sim.cli.privacy.distributed")
    selection_code = LazyModule("fl_sim.cli.privacy.selection")
    counts_code = LazyModule("fl_sim.cli.privacy.counts")

app = typer.Typer(
    help="Plan a privacy budget, or audit the noise mechanism of Global DP.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Rate = Annotated[
    float | None, typer.Option(help="Poisson sampling: the probability that a unit takes part in a step, in (0, 1].")
]
_Noise = Annotated[
    float | None,
    typer.Option(
        help="Standard deviation of the noise on the sum, divided by the clipping norm; computed if left out."
    ),
]
_Delta = Annotated[float, typer.Option(help="The delta: well below 1 / number of protected units.")]
_SumNoise = Annotated[
    float | None,
    typer.Option(
        help="Noise of all clients together, divided by the clipping norm; computed if left out.", min=1e-6, max=1e6
    ),
]
_Dropped = Annotated[
    int, typer.Option(help="Also compute the epsilon if this number of clients drops out in each round.")
]
_Epsilon = Annotated[float | None, typer.Option(help="Largest allowed epsilon; if left out, the epsilon is computed.")]
_Accountant = Annotated[
    Literal["rdp", "pld"], typer.Option(help="The accountant of the plan; the epsilons of both accountants are shown.")
]
_Plot = Annotated[Path | None, typer.Option(help="Draw epsilon over steps into this file.", metavar="FILE.png")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_LARGEST_RANGE: Final = 10**6
_BAR: Final = 40
_MOST_ROWS: Final = 25


@app.command("global-dp")
def global_dp(  # noqa: PLR0913 (one parameter per option)
    *,
    sampling_rate: _Rate = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    cohort: Annotated[
        int | None, typer.Option(help="Clients per round, sampled without replacement from all clients.")
    ] = None,
    noise_multiplier: _Noise = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Number of rounds; if left out, the largest number that --epsilon allows is computed."),
    ] = None,
    delta: _Delta = 1e-5,
    epsilon: _Epsilon = None,
    accountant: _Accountant = "rdp",
    groups: Annotated[
        int | None, typer.Option(help="Number of groups of clients that take part in turn, one group per round.")
    ] = None,
    noise_bands: Annotated[
        int, typer.Option(help="Number of rounds over which noise is correlated; with --groups.", min=1)
    ] = 1,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive-clipping", help="Adaptive clipping: each round also releases a noisy count of clients."
        ),
    ] = False,
    count_noise: Annotated[
        float | None, typer.Option(help="Noise multiplier of the noisy count; computed if left out.", min=1e-3, max=1e6)
    ] = None,
    start_noise: Annotated[
        float | None, typer.Option(help="Noise multiplier of the sums of a private start.", min=1e-3)
    ] = None,
    plot: _Plot = None,
    json_output: _Json = False,
) -> None:
    """Plan client-level privacy: give two of --noise-multiplier, --rounds and --epsilon; the third is computed.

    For example:

      fl-sim privacy global-dp --sampling-rate 0.1 --noise-multiplier 1.0 --rounds 54 --delta 1e-5

      fl-sim privacy global-dp --sampling-rate 0.1 --rounds 100 --epsilon 8

      fl-sim privacy global-dp --clients 1000 --cohort 100 --noise-multiplier 2.0 --epsilon 8 --json

      fl-sim privacy global-dp --clients 1000 --groups 10 --noise-bands 10 --rounds 100 --epsilon 8
    """
    if groups is None or sampling_rate is not None or cohort is not None:
        # the function _sampling raises an error for contradictory options --sampling-rate, --cohort and --clients
        _sampling("client", sampling_rate, cohort, clients)
    rounds_of = load_object("strategies.private_plan:global_rounds", "planner")
    sampling = rounds_of(
        sampling_rate, cohort, clients, groups=groups, noise_bands=noise_bands, adaptive=adaptive,
        count_noise=count_noise, start_noise=start_noise,
    )  # fmt: skip
    _plan(sampling, noise_multiplier, rounds, delta, epsilon, accountant, plot=plot, json_output=json_output)


@app.command("dp-sgd")
def dp_sgd(  # noqa: PLR0913 (one parameter per option)
    *,
    sampling_rate: _Rate = None,
    records: Annotated[int | None, typer.Option(help="Number of records.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Expected batch size; Poisson sampling with rate batch size / records.")
    ] = None,
    noise_multiplier: _Noise = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Number of steps; if left out, the largest number that --epsilon allows is computed."),
    ] = None,
    delta: _Delta = 1e-5,
    epsilon: _Epsilon = None,
    accountant: _Accountant = "rdp",
    plot: _Plot = None,
    json_output: _Json = False,
) -> None:
    """Plan the privacy of DP-SGD: give two of --noise-multiplier, --steps and --epsilon; the third is computed.

    --records is the number of records of one data holder, such as a client with local.privacy=dp-sgd. --steps is the
    number of its local steps in a round, times the number of its rounds. If --noise-multiplier, --steps and --epsilon
    are all given, the delta at this epsilon is computed. 'fl-sim plan' computes the costs of all clients of a run.

    For example:

      fl-sim privacy dp-sgd --records 60000 --batch-size 250 --noise-multiplier 1.3 --steps 3600

      fl-sim privacy dp-sgd --records 6000 --batch-size 64 --steps 5000 --epsilon 10 --accountant pld
    """
    if batch_size is not None:
        if records is None or sampling_rate is not None:
            raise UserError(
                "--batch-size goes with --records and without --sampling-rate: the sampling rate is the batch size "
                "divided by the number of records"
            )
        if not 1 <= batch_size <= records:
            raise UserError(f"a batch of {batch_size} does not fit {records} records: choose 1 to {records}")
        sampling_rate = batch_size / records
    if sampling_rate is None:
        raise UserError("the sampling of records is not given: give --records and --batch-size, or --sampling-rate")
    sampling = _sampling("record", sampling_rate, None, records)
    _plan(sampling, noise_multiplier, steps, delta, epsilon, accountant, plot=plot, json_output=json_output)


@app.command("local-dp")
def local_dp(
    *,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Standard deviation of the noise / clipping norm; computed if left out.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds of one client; if left out, the largest number that --epsilon allows is computed."),
    ] = None,
    delta: _Delta = 1e-5,
    epsilon: _Epsilon = None,
    accountant: _Accountant = "rdp",
    plot: _Plot = None,
    json_output: _Json = False,
) -> None:
    """Plan the privacy of a client that adds noise to its own updates: give two of noise, rounds and epsilon.

    The setting is local.privacy=local-dp. The guarantee covers the replacement of all data of a client. This
    replacement changes the clipped update by at most twice the clipping norm.

    For example:

      fl-sim privacy local-dp --rounds 10 --epsilon 8
    """
    sampling = plan_code.Sampling("client", None, 1, 1)
    _plan(sampling, noise_multiplier, rounds, delta, epsilon, accountant, plot=plot, json_output=json_output)


@app.command("distributed-dp")
def distributed_dp(  # noqa: PLR0913 (one parameter per option)
    *,
    clients: Annotated[int, typer.Option(help="Number of clients that answer in a round.", min=1)],
    parameters: Annotated[
        int, typer.Option(help="Number of values that a client sends, such as the model's size.", min=1)
    ],
    noise_multiplier: _SumNoise = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds of one client; if left out, the largest number that --epsilon allows is computed.", min=1
        ),
    ] = None,
    delta: _Delta = 1e-5,
    epsilon: _Epsilon = None,
    mechanism: Annotated[
        Literal["skellam", "discrete-gaussian"], typer.Option(help="Distribution of a client's noise.")
    ] = "skellam",
    bits: Annotated[int, typer.Option(help="Bits of each sent number.", min=8, max=20)] = 16,
    headroom: Annotated[float, typer.Option(help="2^bits / 2, in standard deviations of a sum.", min=1)] = 4.0,
    dropped: _Dropped = 0,
    json_output: _Json = False,
) -> None:
    """Plan privacy without a trusted server: give two of --noise-multiplier, --rounds and --epsilon.

    The setting is aggregator=distributed-dp. The guarantee covers the removal of all data of a client. Secure
    aggregation hides single updates: the server sees only sums. A run only simulates secure aggregation.

    For example:

      fl-sim privacy distributed-dp --clients 100 --parameters 7850 --rounds 10 --epsilon 8
    """
    with importing():
        from fl_sim.privacy.modular_sums import SumGrid  # noqa: PLC0415 (slow)

    grid = SumGrid(parameters, clients, 1.0, 1.0, mechanism, bits, headroom)
    plan = sums_code.answer(sums_code.SumsRequest(grid, noise_multiplier, rounds, epsilon, delta, dropped))
    for warning in plan["warnings"]:
        say(f"warning: {warning}", err=True)
    say(json.dumps(plan) if json_output else sums_code.in_words(plan))


@app.command("distributed-dp-sgd")
def distributed_dp_sgd(  # noqa: PLR0913 (one parameter per option)
    *,
    clients: Annotated[int, typer.Option(help="Number of clients that answer in a round.", min=1)],
    records: Annotated[int, typer.Option(help="Number of records of all clients together.", min=1)],
    parameters: Annotated[int, typer.Option(help="Number of trained parameters.", min=1)],
    noise_multiplier: _SumNoise = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds, each a step; if left out, the largest number that --epsilon allows.", min=1),
    ] = None,
    delta: _Delta = 1e-5,
    epsilon: _Epsilon = None,
    dropped: _Dropped = 0,
    json_output: _Json = False,
) -> None:
    """Plan DP-SGD without a trusted server: give two of --noise-multiplier, --rounds and --epsilon.

    The setting is aggregator=distributed-dp-sgd. The guarantee covers the removal of one record. Secure aggregation
    hides single messages: the server sees only sums over all records. A run only simulates secure aggregation.

    For example:

      fl-sim privacy distributed-dp-sgd --clients 10 --records 50000 --parameters 19450 --rounds 200 --epsilon 3
    """
    with importing():
        from fl_sim.privacy.record_sums import RecordGrid  # noqa: PLC0415 (slow)

    grid = RecordGrid(parameters, clients, 1.0, 1.0)
    plan = sums_code.answer(
        sums_code.SumsRequest(grid, noise_multiplier, rounds, epsilon, delta, dropped, "record", records)
    )
    grid.with_noise(plan["noise_multiplier"]).check_records(records)
    for warning in plan["warnings"]:
        say(f"warning: {warning}", err=True)
    say(json.dumps(plan) if json_output else sums_code.in_words(plan))


@app.command("selection")
def plan_selection(  # noqa: PLR0913 (one parameter per option)
    *,
    trials: Annotated[float, typer.Option(help="Expected number of runs, each with settings drawn at random.")],
    sampling_rate: Annotated[
        float, typer.Option(help="Probability that a unit takes part in a step of a run, in (0, 1].")
    ],
    steps: Annotated[int, typer.Option(help="Number of noisy steps (or rounds) of one run.", min=1, max=10**9)],
    noise_multiplier: _Noise = None,
    delta: _Delta = 1e-5,
    epsilon: Annotated[
        float | None, typer.Option(help="Largest allowed epsilon of the selection; then the noise is computed.")
    ] = None,
    distribution: Annotated[
        Literal["negative-binomial", "poisson"], typer.Option(help="Distribution of the number of runs.")
    ] = "negative-binomial",
    eta: Annotated[
        float | None, typer.Option(help="Shape of negative-binomial, above -1; 1 (default): geometric, 0: logarithmic.")
    ] = None,
    json_output: _Json = False,
) -> None:
    """Plan the privacy cost of choosing settings, if only the best of a random number of private runs is published.

    The number of runs stays secret. So the cost is much smaller than if all results were published (Papernot and
    Steinke 2022). Give --noise-multiplier or --epsilon; the other one is computed.

    For example:

      fl-sim privacy selection --trials 20 --sampling-rate 0.01 --noise-multiplier 1.3 --steps 1000

      fl-sim privacy selection --trials 20 --eta 0 --sampling-rate 0.01 --steps 1000 --epsilon 4
    """
    request = selection_code.SelectionRequest(
        sampling_rate, noise_multiplier, steps, epsilon, delta, selection_code.trials_of(distribution, trials, eta)
    )
    plan = selection_code.answer(request)
    say(json.dumps(plan) if json_output else selection_code.in_words(plan))


@app.command("counts")
def plan_counts(
    *,
    count_noise: Annotated[
        float | None, typer.Option(help="Standard deviation of the noise on a count; computed if left out.")
    ] = None,
    measurements: Annotated[
        int | None,
        typer.Option(
            help="Measurements of a client's model; if left out, the largest number that --epsilon allows.",
            min=1, max=10**9,
        ),
    ] = None,
    delta: _Delta = 1e-5,
    epsilon: _Epsilon = None,
    records: Annotated[
        int | None, typer.Option(help="Test records of a client, for the error of its accuracy.", min=1)
    ] = None,
    json_output: _Json = False,
) -> None:  # fmt: skip
    """Plan the privacy of noisy counts of correct predictions: give two of noise, measurements and epsilon.

    Clients count the correct predictions on their own test records. The settings are evaluate.clients=own and
    evaluate.count_noise in a run with local.privacy=dp-sgd. The guarantee covers a single test record of a client.

    For example:

      fl-sim privacy counts --measurements 10 --epsilon 1 --records 200
    """
    plan = counts_code.answer(counts_code.CountsRequest(count_noise, measurements, epsilon, delta, records))
    for warning in plan["warnings"]:
        say(f"warning: {warning}", err=True)
    say(json.dumps(plan) if json_output else counts_code.in_words(plan))


@app.command("labels")
def plan_labels(
    *,
    records: Annotated[int, typer.Option(help="Number of private records of the class.")],
    gamma: Annotated[float, typer.Option(help="Number of synthetic records per private record.")],
    largest: Annotated[
        int, typer.Option("--range", help="Largest number of synthetic records of a class. This number is public.")
    ],
    epsilon: Annotated[float, typer.Option(help="Privacy cost of the noisy number of one class.")] = 0.1,
    mechanism: Annotated[
        Literal["exponential", "geometric"], typer.Option(help="Distribution of the noisy number of labels.")
    ] = ("exponential"),
    classes: Annotated[int, typer.Option(help="Number of classes, for the epsilon of all classes together.")] = 10,
    false_positive: Annotated[
        float, typer.Option(help="Probability that a class without records gets labels; 1 means no threshold.")
    ] = 0.01,
    json_output: _Json = False,
) -> None:
    """Compute the privacy cost of DA-FL's labels, and the distribution of the number of synthetic records of a class.

    In DA-FL, a client makes about gamma synthetic records for each private record of a class. The number of synthetic
    records contains noise, so that nobody can infer from it whether a single record is present. The command prints the
    distribution of this number and the record-level epsilon.

    For example:

      fl-sim privacy labels --records 600 --gamma 0.05 --epsilon 0.1 --range 400

      fl-sim privacy labels --records 600 --gamma 0.05 --epsilon 0.1 --range 400 --mechanism geometric --json
    """
    found = _label_costs(mechanism, records, gamma, epsilon, largest, classes=classes, false_positive=false_positive)
    say(json.dumps(found) if json_output else _label_costs_in_words(found))


@app.command("pate")
def plan_pate(  # noqa: PLR0913 (one parameter per option)
    *,
    votes: Annotated[Path, typer.Option(help="Vote counts: integers, shape (queries, classes).", metavar="COUNTS.npy")],
    mechanism: Annotated[
        Literal["lnmax", "gnmax", "confident"],
        typer.Option(help="Laplace noise, Gaussian noise, or Gaussian noise with a threshold."),
    ],
    gamma: Annotated[float | None, typer.Option(help="lnmax: Laplace noise of scale 1 / gamma votes.")] = None,
    sigma: Annotated[float | None, typer.Option(help="gnmax, confident: noise on every count, in votes.")] = None,
    threshold: Annotated[float | None, typer.Option(help="confident: votes that the top count must reach.")] = None,
    sigma_threshold: Annotated[
        float | None, typer.Option(help="confident: noise on the top count in this test, in votes.")
    ] = None,
    delta: _Delta = 1e-5,
    epsilon: Annotated[
        float | None, typer.Option(help="Also compute the number of queries that fit this epsilon.")
    ] = None,
    release: Annotated[
        bool,
        typer.Option("--release", help="Also publish the data-dependent epsilon with noise; each call costs privacy."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw epsilon over queries.", metavar="FILE.png")] = None,
    json_output: _Json = False,
) -> None:
    """Compute the record-level epsilon of labels by PATE. Do not publish the data-dependent epsilon: it is private.

    For example:

      fl-sim privacy pate --votes counts.npy --mechanism lnmax --gamma 0.05 --delta 1e-5

      fl-sim privacy pate --votes counts.npy --mechanism confident --sigma 40 --threshold 200 --sigma-threshold 150
    """
    request = pate_code.LabellingRequest(mechanism, gamma, sigma, threshold, sigma_threshold, delta, epsilon)
    request.cost()
    counts = pate_code.read_votes(votes)
    bill = pate_code.answer(request, counts)
    if release:
        bill["release"] = pate_code.release(request, counts)
    if plot is not None:
        pate_code.plot(bill, counts, plot)
    for warning in bill["warnings"]:
        say(f"warning: {warning}", err=True)
    say(json.dumps(bill) if json_output else pate_code.in_words(bill))


@app.command("audit")
def run_audit(
    *,
    noise_multiplier: Annotated[
        float, typer.Option(help="Noise multiplier whose claimed privacy is tested.", min=0.1)
    ] = 1.0,
    runs: Annotated[
        int, typer.Option(help="Number of simulated rounds with the audited client, and also without it.", min=100)
    ] = 4000,
    seed: Annotated[
        int | None, typer.Option(help="Makes the noise repeatable; without a seed every audit has fresh noise.")
    ] = None,
    json_output: _Json = False,
) -> None:
    """Test the claimed privacy of the Global DP aggregator, and of variants with deliberate faults, on worst-case data.

    The audit should find the fault of each variant, and no fault of the real aggregator.

    For example:

      fl-sim privacy audit --noise-multiplier 1.0 --runs 4000
    """
    with importing():
        from dp_accounting import GaussianDpEvent  # noqa: PLC0415

        from fl_sim.cli.privacy.audit import TRUE_MECHANISM, audit_global_dp, refuted_epsilon  # noqa: PLC0415 (slow)
        from fl_sim.privacy.accounting import epsilon_of_counts  # noqa: PLC0415
        from fl_sim.privacy.mechanisms import Noise  # noqa: PLC0415

    noise = Noise.secret() if seed is None else Noise.seeded(seed)
    findings = audit_global_dp(noise_multiplier, num_runs=runs, noise=noise)
    at_delta = epsilon_of_counts({GaussianDpEvent(noise_multiplier): 1}, 1e-5, accountant="pld")
    proven = refuted_epsilon(findings[0], noise_multiplier, 1e-5)
    if json_output:
        shown = [{**asdict(finding), "caught": finding.caught} for finding in findings]
        head = {"unit": "client", "noise_multiplier": noise_multiplier, "runs": runs, "confidence": 0.95}
        tight = {"claimed_epsilon": at_delta, "refuted_epsilon": proven, "tightness": proven / at_delta}
        say(json.dumps({**head, "true_mechanism": TRUE_MECHANISM, **tight, "mechanisms": shown}))
        return
    say(
        f"noise multiplier {noise_multiplier:g}, {runs} rounds with the audited client and {runs} without it, "
        "95 % confidence; deltas at epsilon 0 and 1"
    )
    say(f"{'mechanism':32}{'delta(0) >=':>12}{'delta(1) >=':>12}{'epsilon >=':>12}  verdict")
    claimed = findings[0].profile.claimed
    say(f"{'claimed (epsilon at delta 1e-5)':32}{claimed[0]:12.3f}{claimed[2]:12.3f}{at_delta:12.2f}")
    for finding in findings:
        profile = finding.profile
        if profile.claimed != claimed:
            claimed = profile.claimed
            say(f"{'claimed by sampling, 16 rounds':32}{claimed[0]:12.3f}{claimed[2]:12.3f}")
        verdict = "CLAIM REFUTED" if profile.refuted else ("noise is wrong" if finding.caught else "nothing found")
        bounds = f"{profile.lower_bounds[0]:12.3f}{profile.lower_bounds[2]:12.3f}{profile.epsilon_lower_bound:12.2f}"
        say(f"{finding.mechanism:32}{bounds}  {verdict}")
    say(
        f"tightness {proven / at_delta:.2f}: these runs would refute a claim of {TRUE_MECHANISM!r} below epsilon "
        f"{proven:.2f}; its claim is {at_delta:.2f}"
    )


def _sampling(unit: str, rate: float | None, cohort: int | None, population: int | None) -> "Sampling":
    if rate is None and (cohort is None or population is None):
        raise UserError(f"how are {unit}s sampled? Give --sampling-rate, or --{unit}s and --cohort")
    if rate is not None and cohort is not None:
        raise UserError("--sampling-rate means Poisson sampling, --cohort a fixed cohort size: give one of them")
    if rate is not None and not 0 < rate <= 1:
        raise UserError(
            f"sampling rate {rate} is not in (0, 1]: give the probability that one {unit} takes part in a step"
        )
    if population is not None and population < 1:
        raise UserError(f"{population} {unit}s: give at least 1")
    return plan_code.Sampling(unit, rate, cohort, population)


def _plan(
    sampling: "PlannedReleases",
    noise: float | None,
    steps: int | None,
    delta: float,
    target: float | None,
    accountant: Literal["rdp", "pld"],
    *,
    plot: Path | None,
    json_output: bool,
) -> None:
    request = plan_code.BudgetRequest(sampling, noise, steps, target, delta, accountant)
    answer = plan_code.answer(request)
    if plot is not None:
        plan_code.plot(request, answer, plot)
    for warning in answer["warnings"]:
        say(f"warning: {warning}", err=True)
    say(json.dumps(answer) if json_output else plan_code.in_words(answer))


def _label_costs(
    mechanism: Literal["exponential", "geometric"],
    records: int,
    gamma: float,
    epsilon: float,
    largest: int,
    *,
    classes: int,
    false_positive: float,
) -> dict[str, Any]:
    """Return the privacy cost of DA-FL's label selection, and a probability distribution for one class, as JSON values.

    The distribution is for the noisy number of synthetic records of the class. The result also has the mean and the
    standard deviation of this number.
    """
    if records < 0:
        raise UserError(f"{records} records: give 0 or more")
    if not 0 < epsilon < math.inf:
        raise UserError(f"epsilon {epsilon} is not a positive number: choose one such as 0.1")
    if largest > _LARGEST_RANGE:
        raise UserError(f"a range up to {largest} is too long to print: give at most {_LARGEST_RANGE}")
    if classes < 1:
        raise UserError(f"{classes} classes: give at least 1")
    if not 0 < false_positive <= 1:
        raise UserError(f"a false-positive probability of {false_positive} is not in (0, 1]: choose one such as 0.01")
    with importing():
        import numpy as np  # noqa: PLC0415

        from clients.dafl.labels import ExponentialMechanism, Geometric  # noqa: PLC0415
    kind = ExponentialMechanism if mechanism == "exponential" else Geometric
    picker = kind(epsilon=epsilon, false_positive=false_positive)
    pmf = picker.pmf(records, gamma, largest)
    counts = np.arange(largest + 1)
    mean = float(pmf @ counts)
    threshold = picker.threshold(gamma, largest)
    totals = picker.totals(classes)
    return {
        "unit": "record", "mechanism": mechanism, "records": records, "gamma": gamma, "range": largest,
        "classes": classes, "epsilon": epsilon, "delta": 0.0, "epsilon_parallel": totals.parallel,
        "epsilon_sequential": totals.sequential, "epsilon_replace_one": totals.replace_one,
        "target": gamma * records, "mean": mean, "standard_deviation": math.sqrt(float(pmf @ (counts - mean) ** 2)),
        "threshold": threshold, "false_positive": false_positive, "dropped": float(pmf[:threshold].sum()),
        "mean_of_absent_class": float(picker.pmf(0, gamma, largest) @ counts), "pmf": pmf.tolist(),
    }  # fmt: skip


def _label_costs_in_words(found: dict[str, Any]) -> str:
    """Format ``found``, a result of ``_label_costs``, as lines of text.

    If the distribution has many values, only the values around its mean are shown.
    """
    lines = [
        f"synthetic labels    {found['mean']:.4g} on average, standard deviation {found['standard_deviation']:.4g}",
        f"target              {found['target']:.6g} = gamma x records; at most {found['range']}",
        f"threshold           {found['threshold']}; a class with fewer labels gets none",
        f"  of this class     {found['dropped']:.3g} is the probability that this class gets no labels",
        f"  of an absent one  {found['false_positive']:g} at most is the probability that an absent class gets labels",
        f"absent class        {found['mean_of_absent_class']:.3g} labels on average without the threshold",
        f"epsilon             {found['epsilon_parallel']:g} for all classes together, since a record is in one class",
        f"  sequential        {found['epsilon_sequential']:g} added up over {found['classes']} classes",
        f"  replace one       {found['epsilon_replace_one']:g} if a record is replaced by one of another class",
        "unit                record, add-or-remove-one; delta 0",
        "",
        f"{'labels':>8}  probability",
    ]
    pmf = found["pmf"]
    first = min(max(0, round(found["mean"]) - _MOST_ROWS // 2), max(0, len(pmf) - _MOST_ROWS))
    shown = range(first, min(first + _MOST_ROWS, len(pmf)))
    lines += [f"{count:8}  {pmf[count]:.6f} {'#' * round(_BAR * pmf[count] / max(pmf))}".rstrip() for count in shown]
    return "\n".join(lines)
