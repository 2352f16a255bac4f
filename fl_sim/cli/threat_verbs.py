"""The commands (verbs) about threats, with their options and help. The code of a verb is imported when it runs."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fl_sim.cli.running_verbs import AsJson, DataRoot
from fl_sim.importing import LazyModule

if TYPE_CHECKING:
    from fl_sim.cli import gradient_threats as gradient_code
    from fl_sim.cli import threats as threats_code
else:
    gradient_code = LazyModule("fl_sim.cli.gradient_threats")
    threats_code = LazyModule("fl_sim.cli.threats")


class Unlearning(StrEnum):
    """The methods of ``fl-sim unlearn``."""

    EXACT = "exact"
    FEDERASER = "federaser"
    ASCENT = "gradient-ascent"


RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run.")]
AttackedModel = Annotated[
    Literal["initial", "final"], typer.Option(help="The model before the first or after the last round.")
]


def unlearn(  # noqa: PLR0913 (one parameter per option)
    run: RunDirectory,
    *,
    client: Annotated[int, typer.Option(help="The ID of the client whose records are forgotten.")],
    method: Annotated[Unlearning, typer.Option(help="The method of unlearning.")] = Unlearning.EXACT,
    calibration: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="federaser: share of a round's local steps (default: 0.5).")
    ] = None,
    radius: Annotated[
        float | None,
        typer.Option(min=0, help="gradient-ascent: radius of the ball / distance to random models (default: 1/3)."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=0, help="gradient-ascent: rounds of the other clients afterwards (default: 3).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the new model (default: RUN-without-CLIENT or RUN-METHOD-CLIENT).")
    ] = None,
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:
    """Remove the influence of a client's records from a finished run, by retraining or approximately.

    The default method retrains the model in a new run with the setting forgotten=CLIENT: the client has no records, and
    all other settings and random numbers are the same. Rounds before the client's first round are not repeated if RUN
    stored its state before this round (the setting keep_every). In all cases, the model is bit-identical to full
    retraining. RUN itself does not change: delete it afterwards, because its model was trained on the records.

    The command prints measures of the models before and after unlearning. They are the accuracies on test records, on
    the other clients' records and on the forgotten records, and the membership of the forgotten records. Membership is
    the probability that a forgotten record has a smaller loss than a test record of the same class (.5 is chance). The
    command also prints the cost compared with full retraining. If the last round has further measures, such as the
    success rate of a backdoor, they are printed, too.

    The other methods are approximations, without any guarantee that the records are forgotten. They write a model, and
    no run. "federaser" (Liu et al. 2021) repeats each round that follows a stored state (keep_every), without the
    client. The other clients train for fewer steps. The result of these steps gives the direction of an update, and the
    original update gives its length. "gradient-ascent" (Halimi et al. 2022) needs the client: it increases the loss on
    the client's records, within a ball around an estimate of the other clients' mean model. Then the other clients
    train for some rounds. If a retrained run is in RUN-without-CLIENT, the command also prints its measures and the
    distance to its model.

    Runs that promise privacy are refused: their privacy ledgers are never refunded.

    For example:

      fl-sim run clients=50 partition=iid sampler=fixed-size:3 rounds=40 keep_every=5 --out results/all

      fl-sim unlearn results/all --client 7

      fl-sim unlearn results/all --client 7 --method federaser
    """
    options = {
        Unlearning.FEDERASER: {"calibration": calibration},
        Unlearning.ASCENT: {"radius": radius, "rounds": rounds},
    }
    for owner, given in options.items():
        for name, value in given.items():
            if value is not None and method is not owner:
                raise typer.BadParameter(
                    f"this option is for --method {owner.value}: leave it out", param_hint=f"--{name}"
                )
    if method is Unlearning.EXACT:
        threats_code.show_unlearning(run, client, out, data_root, json_output=json_output)
    elif method is Unlearning.FEDERASER:
        threats_code.show_federaser(
            run, client, out, data_root, calibration=0.5 if calibration is None else calibration,
            json_output=json_output,
        )  # fmt: skip
    else:
        threats_code.show_ascent(
            run, client, out, data_root, radius=1 / 3 if radius is None else radius,
            rounds=3 if rounds is None else rounds, json_output=json_output,
        )  # fmt: skip


attack_app = typer.Typer(help="Attack the privacy of a finished run.", no_args_is_help=True, rich_markup_mode=None)


@attack_app.command("membership")
def attack_membership(
    run: RunDirectory,
    *,
    method: Annotated[
        Literal["loss", "lira"], typer.Option(help="loss: a threshold of the loss; lira: LiRA, with shadow runs.")
    ] = "loss",
    shadows: Annotated[int, typer.Option(help="LiRA: the number of shadow runs, at least 8.")] = 16,
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:
    """Test how well an attacker can distinguish training records of a finished run from unused records.

    --method loss compares the losses of the final model on training records and on test records. This attack is weak.
    --method lira trains shadow runs with and without each record. It then computes two likelihoods of the attacked
    model's confidence in the record: one for models with this record, and one for models without it (Carlini et al.
    2022). The shadow runs stay in RUN-shadows, where a repeated command continues them. LiRA compares training records
    with the records that the run left out (the setting left_out), or else with test records. It attacks the final
    model, and also sums its scores over all stored rounds (the setting keep_every).

    The command prints the area under the ROC curve, and the true-positive rates at .1 % and 1 % false positives, with
    intervals of 95 % confidence. If the run's model has a record-level privacy guarantee, the command also prints the
    largest rate that epsilon and delta allow. An epsilon that covers only synthetic records is no guarantee for the
    model. A stronger attack may reach a higher rate, up to that bound.

    For example:

      fl-sim attack membership results/all

      fl-sim run left_out=0.5 --out results/half

      fl-sim attack membership results/half --method lira --shadows 16
    """
    if method == "lira":
        threats_code.show_lira(run, shadows, data_root, json_output=json_output)
    else:
        threats_code.show_membership(run, data_root, json_output=json_output)


@attack_app.command("inversion")
def attack_inversion(  # noqa: PLR0913 (one parameter per option)
    run: RunDirectory,
    *,
    records: Annotated[
        int, typer.Option(min=0, help="Records to try (default: 20 for the analytic form, else 4).")
    ] = 0,
    method: Annotated[
        Literal["auto", "analytic", "optimise"],
        typer.Option(help="The form of the attack; auto: analytic for one record, if possible."),
    ] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Records in one gradient, of one client.")] = 1,
    imprint: Annotated[
        bool, typer.Option("--imprint", help="The server sends an imprint layer in place of the first layer.")
    ] = False,
    model: AttackedModel = "final",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the optimiser (default: 400).")] = None,
    variation: Annotated[
        float | None, typer.Option(min=0, help="Weight of the total variation in the optimiser (default: 0.1).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="PNG file (default: inversion.png in RUN).")] = None,
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:  # fmt: skip
    """Reconstruct training records and labels from the gradients of single local steps.

    The attacker knows the model and sees the gradient of one record, or of a batch. If the model's first layer is
    linear, the record is computed exactly from the gradient. Otherwise an optimiser searches for images with the same
    gradient (Geiping et al. 2020). This is easier for models with wide layers than for small models.

    For a batch, --method analytic computes a record exactly if some neuron of the first layer is active for this record
    only (Boenisch et al. 2023). With --imprint, a malicious server replaces the first layer. The gradients of the new
    layer separate the records by their mean brightness, so more records are computed exactly (Fowl et al. 2022). The
    command compares each record with the nearest reconstruction. An attacker could not do this, and does not know which
    reconstructions are exact.

    With local.privacy=dp-sgd, the gradient is clipped and noisy as in a step of the run. A second attack then guesses
    which of 10 records a noisy gradient comes from. The command prints the share of right guesses, and the largest
    share that any attacker can reach against the noise of one step. Global DP does not stop these attacks, because the
    server, which is trusted, sees the updates without noise. The command refuses runs in which no gradient of a
    training record leaves a client: clients send only sums, only synthetic records, or updates with noise.

    For example:

      fl-sim attack inversion results/all --model initial --steps 2000

      fl-sim attack inversion results/all --method analytic --batch 8
    """
    asked = {
        "records": records, "method": method, "batch": batch, "at": model, "steps": steps, "variation": variation,
        "imprint": imprint,
    }  # fmt: skip
    gradient_code.show_inversion(run, asked, out, data_root, json_output=json_output)


@attack_app.command("labels")
def attack_labels(
    run: RunDirectory,
    *,
    clients: Annotated[int, typer.Option(min=1, help="Number of attacked clients (the first with records).")] = 20,
    model: AttackedModel = "final",
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:
    """Estimate a client's number of records of each class from one batch's gradient, and from the update of a round.

    The attacker knows the model and has the test records, and reads the gradient of the last layer's bias. The command
    prints true and estimated counts, and the mean absolute error of the estimate. As a baseline, it also prints the
    error of a guess from the class proportions of all records. Gradients and updates have the same clipping and noise
    as in the run.

    For example:

      fl-sim attack labels results/all --model initial
    """
    gradient_code.show_labels(run, clients, model, data_root, json_output=json_output)


@attack_app.command("canaries")
def attack_canaries(
    run: RunDirectory,
    *,
    crafted: Annotated[
        bool, typer.Option("--crafted", help="Audit the private steps of one client with worst-case records.")
    ] = False,
    audit_runs: Annotated[
        int | None, typer.Option(min=1, max=1000, help="--crafted: number of audit runs (default: 5).")
    ] = None,
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:
    """Prove a lower bound on the epsilon of a finished run by canaries: its training records, or crafted records.

    Canaries are records about which an attacker guesses whether the model was trained on them. The run must have
    left_out=0.5, so that each record was used with probability 1/2. The command guesses which records were used, from
    the loss of the final model (Steinke, Nasr, Jagielski 2023). It prints the lower bound of epsilon that follows from
    the right guesses with 95 % confidence, and the epsilon that the run claims. Ordinary records are weak canaries, so
    the bound is usually far below the claim.

    --crafted is for runs with local.privacy=dp-sgd and any left_out. The command repeats the private steps of the
    client with the largest epsilon on crafted records (Nasr et al. 2023). The gradients of these records are as long as
    the clipping norm, and orthogonal. The attacker sees the model after every step. The bound is closer to the claim,
    and more audit runs bring it closer. This audit tests the noise, the batches, the clipping and the stated privacy
    cost of the private steps, but not the run's own model.

    For example:

      fl-sim run left_out=0.5 --out results/half

      fl-sim attack canaries results/half
    """
    if crafted:
        threats_code.show_crafted(run, audit_runs or 5, data_root, json_output=json_output)
        return
    if audit_runs is not None:
        raise typer.BadParameter("this option is for --crafted: leave it out", param_hint="--audit-runs")
    threats_code.show_canaries(run, data_root, json_output=json_output)


@attack_app.command("property")
def attack_property(run: RunDirectory, *, data_root: DataRoot = None, json_output: AsJson = False) -> None:
    """Infer each client's classes and their proportions from the pool of synthetic records.

    The attacker sees the number of synthetic records of each class that a client published (preprocess=da-fl). The
    command prints how often guesses from these numbers are right, and how often guesses without the pool are right
    (chance). It also prints the epsilons of the label selection and of the run. These epsilons protect a single record,
    not a property of all records of a client, such as class proportions.

    For example:

      fl-sim run preprocess=da-fl partition=label-2 --out results/pool

      fl-sim attack property results/pool
    """
    threats_code.show_property(run, data_root, json_output=json_output)
