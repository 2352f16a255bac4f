"""The commands (verbs) about threats, with their options and help. The code of a verb is imported when it runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_sim.cli.running_verbs import AsJson, DataRoot
from fl_sim.importing import LazyModule

if TYPE_CHECKING:
    from fl_sim.cli import threats as threats_code
else:
    threats_code = LazyModule("fl_sim.cli.threats")

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run.")]


def unlearn(
    run: RunDirectory,
    *,
    client: Annotated[int, typer.Option(help="The number of the client whose records are forgotten.")],
    out: Annotated[Path | None, typer.Option(help="Directory of the new run (default: RUN-without-CLIENT).")] = None,
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:
    """Remove the influence of a client's records from a finished run: make the run that never knew them.

    The new run has the setting forgotten=CLIENT: the client holds no records, and everything else is as before, also
    all random numbers. The new model is that of this run, bit for bit. The rounds before the client's first round are
    not repeated if RUN has kept a state of them (the setting keep_every). In all other cases, training begins with the
    first round. RUN itself stays as it is: delete it afterwards, as its model knows the records.

    The command prints, before and after: the accuracy on test records, on the other clients' records and on the
    forgotten records, and the membership of the forgotten records. This is the probability that a forgotten record has
    a smaller loss than a test record of the same class (.5 is chance). It also prints the cost against retraining.

    Runs that promise privacy are refused: their privacy ledgers are never refunded.

    For example:

      fl-sim run clients=50 partition=iid sampler=fixed-size:3 rounds=40 keep_every=5 --out results/all

      fl-sim unlearn results/all --client 7
    """
    threats_code.show_unlearning(run, client, out, data_root, json_output=json_output)


attack_app = typer.Typer(help="Attack the privacy of a finished run.", no_args_is_help=True, rich_markup_mode=None)


@attack_app.command("membership")
def attack_membership(run: RunDirectory, *, data_root: DataRoot = None, json_output: AsJson = False) -> None:
    """Tell the training records of a finished run from test records, by the loss of the final model.

    The command prints the area under the ROC curve, and the true-positive rates at .1 % and 1 % false positives, with
    intervals of 95 % confidence. If the run promises privacy of records for the model, it prints beside them the
    largest rate that epsilon and delta allow. An epsilon of synthetic records alone is no such promise. This threshold
    attack is a weak one: a stronger attack may find more, up to that bound.

    For example:

      fl-sim attack membership results/all
    """
    threats_code.show_membership(run, data_root, json_output=json_output)


@attack_app.command("inversion")
def attack_inversion(
    run: RunDirectory,
    *,
    records: Annotated[int, typer.Option(min=1, help="Records to try, one of each client.")] = 20,
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:
    """Read training records and labels off the gradients of single records, for a model whose first layer is linear.

    The attacker sees the gradient of one record at the final model. Under local.privacy=dp-sgd, the gradient is clipped
    and noisy as in a step of the run, so the attack fails. The command refuses other kinds of local.privacy and of
    clipping, which it does not know. Global DP does not stop this attack, because the server,
    which is trusted, sees the updates without noise.

    For example:

      fl-sim attack inversion results/all
    """
    threats_code.show_inversion(run, records, data_root, json_output=json_output)
