"""The code of ``fl-sim unlearn`` and ``fl-sim attack``: unlearning a client, and attacks on a run's privacy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_sim.cli.screen import say, waiting
from fl_sim.importing import importing, torch

if TYPE_CHECKING:
    from fl_sim.report.files import PrivacyStatement
    from fl_sim.threats.approximate import Approximate
    from fl_sim.threats.finished import FinishedRun, Judged
    from fl_sim.threats.membership import Rate


def show_unlearning(run: Path, client: int, out: Path | None, data_root: Path | None, *, json_output: bool) -> None:
    """Unlearn ``client`` by retraining ``run`` without its records, and print the measures of the new run.

    ``out``: the directory of the new run; None: the default, in the parent folder of ``run``.
    """
    with importing():
        from fl_sim.threats.finished import FinishedRun  # noqa: PLC0415 (slow, only here)
        from fl_sim.threats.unlearning import beginning_of, check_client, unlearn  # noqa: PLC0415

    finished = FinishedRun.of(run, data_root)
    check_client(finished, client)
    say(f"training continues {beginning_of(finished, client).why}", err=True)
    made = unlearn(finished, client, out or _retrained(run, client))
    if json_output:
        say(json.dumps(made))
        return
    _say_measures(made)
    cost = made["cost"]
    say(
        f"cost: {cost['rounds']} of {cost['rounds_of_retraining']} rounds ({cost['rounds_saved']} saved), "
        f"{cost['seconds']:.1f} s; the run itself took {cost['seconds_of_the_run']:.1f} s"
    )
    say(f"the model is bit-identical to retraining without client {client}: {made['out']}")
    say(f"{made['run']} still holds the model that was trained on these records: delete it if they must be forgotten")


def show_federaser(
    run: Path, client: int, out: Path | None, data_root: Path | None, *, calibration: float, json_output: bool
) -> None:
    """Unlearn ``client`` by FedEraser, and print the measures.

    ``calibration``: the number of local steps in FedEraser's training, as a fraction of the steps in the original run.
    """
    with importing():
        from fl_sim.threats.federaser import FedEraser  # noqa: PLC0415 (slow, only here)

    _show_approximation(run, client, "federaser", FedEraser(calibration), out, data_root, json_output=json_output)


def show_ascent(
    run: Path, client: int, out: Path | None, data_root: Path | None,
    *, radius: float, rounds: int, json_output: bool,
) -> None:  # fmt: skip
    """Unlearn ``client`` by gradient ascent, and print the measures.

    The model stays in a ball around an estimate of the other clients' mean model. ``radius``: the radius of this ball,
    divided by the mean distance from the estimate to random models. ``rounds``: the number of rounds in which the other
    clients train after the ascent.
    """
    with importing():
        from fl_sim.threats.gradient_ascent import GradientAscent  # noqa: PLC0415 (slow, only here)

    method = GradientAscent(radius=radius, rounds=rounds)
    _show_approximation(run, client, "gradient-ascent", method, out, data_root, json_output=json_output)


def _show_approximation(
    run: Path, client: int, name: str, method: Approximate, out: Path | None, data_root: Path | None,
    *, json_output: bool,
) -> None:  # fmt: skip
    with importing():
        from fl_sim.threats.approximate import unlearn_approximately  # noqa: PLC0415 (slow, only here)
        from fl_sim.threats.finished import FinishedRun  # noqa: PLC0415

    finished, exact = FinishedRun.of(run, data_root), _retrained(run, client)
    out = out or run.with_name(f"{run.name}-{name}-{client}")
    made = unlearn_approximately(finished, client, method, name, out, exact)
    if json_output:
        say(json.dumps(made))
        return
    _say_measures(made)
    cost = made["cost"]
    again = f" and {cost['recomputed_steps']:,} to compute stored updates again" if cost["recomputed_steps"] else ""
    say(
        f"cost: {cost['steps']:,} local steps{again}, against {cost['steps_of_retraining']:,} of retraining; "
        f"{cost['seconds']:.1f} s, and the run itself took {cost['seconds_of_the_run']:.1f} s"
    )
    if "exact" in made:
        say(
            f"distance to the model retrained without client {client}: {made['distance_to_exact']:.3g} (L2); "
            f"before: {made['distance_before']:.3g}"
        )
    else:
        say(f"distance to the model retrained without client {client}: unknown, because {exact} has no such model")
    say(f"{name} is an approximation without any guarantee that the records are forgotten: {made['out']}")
    say(f"{made['run']} still holds the model that was trained on these records: delete it if they must be forgotten")


def _retrained(run: Path, client: int) -> Path:
    """Return the default directory for the new run, which is retrained without the records of ``client``."""
    return run.with_name(f"{run.name}-without-{client}")


def _say_measures(made: Mapping[str, Any]) -> None:
    """Print the measures of the models before and after unlearning, and of the retrained model if it exists."""
    shown = {
        title: made[name] for title, name in (("before", "before"), ("after", "after"), ("retrained", "exact"))
        if name in made
    }  # fmt: skip
    rows = {
        "accuracy on test records": "test_accuracy",
        "accuracy on other clients' records": "kept_accuracy",
        "accuracy on forgotten records": "forgotten_accuracy",
    }
    say("".join(["".ljust(36), *(f"{title:>20}" for title in shown)]))
    for title, name in rows.items():
        say("".join([title.ljust(36), *(f"{_percent(one[name]):>20}" for one in shown.values())]))
    for name in made["after"]["further"]:
        values = (one["further"].get(name) for one in shown.values())
        said = ("-" if value is None else f"{value:.4g}" for value in values)
        say("".join([name.replace("_", " ").ljust(36), *(f"{one:>20}" for one in said)]))
    areas = (f"{_area(one['membership']):>20}" for one in shown.values())
    say("".join(["membership of forgotten records".ljust(36), *areas]))
    say("(membership: .5 is chance; in brackets, the interval of 95 % confidence)")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _area(found: Mapping[str, Any] | None) -> str:
    return "-" if found is None else f"{found['area']:.3f} [{found['low']:.2f}, {found['high']:.2f}]"


def show_membership(run: Path, data_root: Path | None, *, json_output: bool) -> None:
    """Print how well an attacker recognises training records of ``run`` by their loss.

    The function also prints the run's epsilon.
    """
    with importing():
        from fl_sim.store.run_directory import read_model  # noqa: PLC0415 (slow, only here)
        from fl_sim.threats.finished import FinishedRun, Judged, logits_of  # noqa: PLC0415

    finished = FinishedRun.of(run, data_root)
    finished.refuse_private_records("attack membership")
    model, params = finished.job.whole_model(), read_model(run)
    parts = [finished.held_by(client) for client, count in enumerate(finished.job.shards.sizes.tolist()) if count]
    members, others = (
        Judged.of(torch.cat([logits_of(model, params, inputs) for inputs, _ in some]), torch.cat([y for _, y in some]))
        for some in (parts, [finished.test])
    )
    facts = _measured(members, others)
    facts = {"attack": "membership", "method": "loss", "run": str(run), **facts, "privacy": finished.facts["privacy"]}
    if json_output:
        say(json.dumps(facts))
        return
    say(
        f"{facts['members']:,} training records against {facts['others']:,} test records, by a threshold of the loss: "
        f"area under the curve {_area(facts['area'])} (.5 is chance)"
    )
    _say_rates(members, others, finished)


def show_lira(run: Path, shadows: int, data_root: Path | None, *, json_output: bool) -> None:
    """Print how well the attack LiRA recognises training records of ``run``.

    ``shadows``: the number of shadow runs. A shadow run trains the same model on a random part of the records.
    """
    with importing():
        from fl_sim.threats.finished import FinishedRun  # noqa: PLC0415 (slow, only here)
        from fl_sim.threats.lira import attack, check_shadows  # noqa: PLC0415

    check_shadows(shadows)
    finished = FinishedRun.of(run, data_root)
    finished.refuse_private_records("attack membership")
    folder, left_out = run.with_name(f"{run.name}-shadows"), finished.job.experiment.left_out
    with waiting() as show:
        scored = attack(finished, shadows, folder, show)
    (members, others), by_loss = scored.split(scored.by_score), _measured(*scored.split(scored.by_loss))
    over_rounds = _measured(*scored.split(scored.over_rounds))
    unscored = int((~scored.is_scored).sum())
    facts: dict[str, Any] = {
        "attack": "membership", "method": "lira", "run": str(run), "shadows": shadows, "shadow_runs": str(folder),
        "form": "online" if left_out else "offline", "rounds_used": list(scored.rounds), "unscored": unscored,
        **_measured(members, others), "over_rounds": over_rounds, "by_loss": by_loss,
        "privacy": list(finished.facts["privacy"]),
    }  # fmt: skip
    if json_output:
        say(json.dumps(facts))
        return
    compared = f"records that the run left out (left_out={left_out:g})" if left_out else "test records (offline form)"
    say(
        f"{facts['members']:,} training records against {facts['others']:,} {compared}, by LiRA with {shadows} shadow "
        f"runs in {folder}: area under the curve {_area(facts['area'])} (.5 is chance)"
    )
    if len(scored.rounds) > 1:
        say(f"by the summed scores of {len(scored.rounds)} rounds: area under the curve {_area(over_rounds['area'])}")
    say(f"by a threshold of the loss on the same records: area under the curve {_area(by_loss['area'])}")
    if unscored:
        say(f"{unscored:,} records are in all shadow runs or in none and were not scored: more --shadows help")
    _say_rates(members, others, finished)


def _measured(members: Judged, others: Judged) -> dict[str, Any]:
    """Return the measures of a membership attack as JSON values, such as the area under its ROC curve.

    ``members``: losses and accuracy of the model on training records of the run. ``others``: the model's losses and
    accuracy on records that the run did not use.
    """
    from fl_sim.threats.membership import area_by_loss  # noqa: PLC0415 (slow, only here)

    area = area_by_loss(members, others)
    return {
        "members": len(members.losses), "others": len(others.losses), "accuracy_of_members": members.accuracy,
        "accuracy_of_others": others.accuracy, "area": area and asdict(area),
        "rates": [asdict(one) for _, one in _rates(members, others) if one],
    }  # fmt: skip


def _rates(members: Judged, others: Judged) -> list[tuple[float, Rate | None]]:
    from fl_sim.threats.membership import rate_at  # noqa: PLC0415 (slow, only here)

    return [(share, rate_at(members, others, share)) for share in (0.001, 0.01)]


def _say_rates(members: Judged, others: Judged, finished: FinishedRun) -> None:
    """Print the true-positive rates of a membership attack, and the largest rates that the run's epsilon allows.

    Also print the privacy statements of the run.
    """
    from fl_sim.threats.membership import most_allowed  # noqa: PLC0415 (slow, only here)

    for share, one in _rates(members, others):
        if one is None:
            say(f"true positives at {100 * share:g} % false positives: unknown, because there are too few non-members")
            continue
        within = [most_allowed(*statement.of_run, share) for statement in finished.covering]
        bound = f"; the run's epsilon allows at most {_percent(max(within))}" if within else ""
        interval = f"[{100 * one.low:.2f}, {100 * one.high:.2f}]"
        say(f"true positives at {100 * share:g} % false positives: {_percent(one.rate)} {interval}{bound}")
    say_privacy(finished.privacy)


def show_canaries(run: Path, data_root: Path | None, *, json_output: bool) -> None:
    """Print a lower bound on the epsilon of ``run``, and the epsilon that the run claims.

    The records are canaries: an attacker guesses which of them the run used for training. The bound follows from the
    number of right guesses.
    """
    with importing():
        from fl_sim.threats.canaries import audit  # noqa: PLC0415 (slow, only here)
        from fl_sim.threats.finished import FinishedRun  # noqa: PLC0415

    finished = FinishedRun.of(run, data_root)
    finished.refuse_private_records("attack canaries")
    found = audit(finished)
    facts = {"attack": "canaries", "run": str(run), **asdict(found), "privacy": list(finished.facts["privacy"])}
    if json_output:
        say(json.dumps(facts))
        return
    say(
        f"{found.correct:,} of {found.guesses:,} guesses about {found.canaries:,} records are right: at delta "
        f"{found.delta:g}, epsilon is at least {found.epsilon_lower_bound:.2f} with 95 % confidence (the largest "
        f"bound that this audit can prove: {found.limit:.2f})"
    )
    if found.claimed is None:
        say("the run claims no epsilon for a training record of its model")
    else:
        verdict = "REFUTED" if found.epsilon_lower_bound > found.claimed else "not refuted"
        say(f"the run claims epsilon {found.claimed:.3g} for a record: {verdict}")
    say_privacy(finished.privacy)


def show_crafted(run: Path, runs: int, data_root: Path | None, *, json_output: bool) -> None:
    """Print a lower bound on the epsilon of the private local steps of ``run``, by crafted canaries.

    ``runs``: the number of audit runs. They repeat the private steps of one client on crafted records.
    """
    with importing():
        from fl_sim.threats.crafted import audit_crafted  # noqa: PLC0415 (slow, only here)
        from fl_sim.threats.finished import FinishedRun  # noqa: PLC0415

    finished = FinishedRun.of(run, data_root)
    with waiting() as show:
        found = audit_crafted(finished, runs, show)
    facts = {
        "attack": "canaries", "run": str(run), "crafted": True, **asdict(found),
        "privacy": list(finished.facts["privacy"]),
    }  # fmt: skip
    if json_output:
        say(json.dumps(facts))
        return
    verdict = "REFUTED" if found.epsilon_lower_bound > found.claimed else "not refuted"
    say(
        f"{found.canaries:,} crafted canaries in {found.runs} audit runs of {found.steps} steps, with the sampling "
        f"rate {found.sampling_rate:.4g} and the noise multiplier {found.noise_multiplier:.4g} of the run's client "
        "with the largest epsilon:"
    )
    say(
        f"at delta {found.delta:g}, epsilon is at least {found.epsilon_lower_bound:.2f} with 95 % confidence (from "
        f"guesses in all audit runs together: {found.one_run:.2f}); point estimate {found.estimate:.2f}"
    )
    say(
        f"the run claims epsilon {found.claimed:.3g} for a record: {verdict}; lower bound / claim "
        f"{found.epsilon_lower_bound / found.claimed:.2f}"
    )
    say_privacy(finished.privacy)


def show_property(run: Path, data_root: Path | None, *, json_output: bool) -> None:
    """Print how accurately an attacker guesses clients' classes from their synthetic records in ``run``.

    Also print the epsilon of the label selection, and the privacy statements of ``run``.
    """
    with importing():
        from fl_sim.threats.finished import FinishedRun  # noqa: PLC0415 (slow, only here)
        from fl_sim.threats.property import held_by_clients, infer, pool_of  # noqa: PLC0415

    finished = FinishedRun.of(run, data_root)
    settings, published = pool_of(finished)
    finished.refuse_private_records("attack property")
    found = infer(published, held_by_clients(finished))
    epsilon = settings.labels_epsilon(published.shape[1])
    facts = {
        "attack": "property", "run": str(run), **asdict(found), "labels_epsilon": epsilon,
        "privacy": list(finished.facts["privacy"]),
    }  # fmt: skip
    if json_output:
        say(json.dumps(facts))
        return
    say(
        f"synthetic records of {found.clients - found.silent} of {found.clients} clients; the attacker reads "
        "class counts from them (in brackets: guesses without the pool):"
    )
    say(f"a client holds a class or not: {_percent(found.held)} right ({_percent(found.held_by_chance)})")
    say(f"a client's largest class: {_percent(found.largest)} right ({_percent(found.largest_by_chance)})")
    say(
        f"class proportions: total variation distance to the truth {found.distance:.3f} "
        f"({found.distance_by_chance:.3f})"
    )
    noise = "no noise, so no epsilon" if epsilon is None else f"epsilon {epsilon:g} for one record"
    say(
        f"label selection: {noise}. An epsilon for one record does not cover a property of the whole client: for n "
        "records together it is n times as large"
    )
    say_privacy(finished.privacy)


def say_privacy(privacy: Sequence[PrivacyStatement]) -> None:
    """Print the privacy statements of a run: epsilon, the covered outputs, and the outputs that are not covered."""
    if not privacy:
        say("privacy of the run: none (epsilon is not defined)")
    for one in privacy:
        say(f"privacy of the run: {one.promise} {one.limits}")
