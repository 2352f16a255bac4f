"""The code of ``fl-sim privacy pate``: the privacy cost of labels from the votes of PATE's teachers."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from matplotlib.figure import Figure

from fl_sim.errors import UserError
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.pate import labelling_cost, smooth_sensitivity
from fl_sim.privacy.renyi import ORDERS
from fl_sim.privacy.terms import delta_advice, rounded_up, valid_delta
from fl_sim.report.picture import save_plot

Name: TypeAlias = Literal["lnmax", "gnmax", "confident"]

PRIVATE: Final = (
    "this epsilon is computed from the votes and is as private as the votes: do not publish it. Publish the "
    "data-independent epsilon, or the noisy epsilon of --release"
)
_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "lnmax": ("--gamma",),
    "gnmax": ("--sigma",),
    "confident": ("--sigma", "--threshold", "--sigma-threshold"),
}
# The moments 1 to 8 in the PATE paper of 2017 correspond to the Renyi orders 2 to 9.
_MOMENTS_2017: Final = np.arange(2.0, 10.0)


@dataclass(frozen=True)
class LabellingRequest:
    """A PATE mechanism with the user's parameters. The unit of noise is one vote.

    ``gamma``: Laplace noise has the scale 1 / ``gamma``. ``sigma``: the standard deviation of Gaussian noise.
    ``target``: an epsilon, or None. If it is given, the plan also states how many queries cost at most this epsilon.
    """

    mechanism: Name
    gamma: float | None
    sigma: float | None
    threshold: float | None
    sigma_threshold: float | None
    delta: float
    target: float | None = None

    def cost(self) -> labelling_cost.LNMaxCost | labelling_cost.GNMaxCost | labelling_cost.ConfidentCost:
        """Return the cost model: the object that computes privacy costs of the mechanism with these parameters.

        Raises UserError for a missing, unneeded or invalid parameter.
        """
        given = {
            "--gamma": self.gamma,
            "--sigma": self.sigma,
            "--threshold": self.threshold,
            "--sigma-threshold": self.sigma_threshold,
        }
        needed = _NEEDS[self.mechanism]
        for name, value in given.items():
            if (value is None) == (name in needed):
                state = "missing" if value is None else "not allowed"
                raise UserError(f"mechanism {self.mechanism} needs {' and '.join(needed)}: {name} is {state}")
            if value is not None and not (0 < value < math.inf or (name == "--threshold" and value == 0)):
                raise UserError(f"{name} {value} gives no guarantee: choose a positive number")
        if self.gamma is not None:
            return labelling_cost.LNMaxCost(self.gamma)
        assert self.sigma is not None
        if self.threshold is None or self.sigma_threshold is None:
            return labelling_cost.GNMaxCost(self.sigma)
        return labelling_cost.ConfidentCost(self.threshold, self.sigma_threshold, self.sigma)


def read_votes(path: Path) -> labelling_cost.Counts:
    """Read the vote counts, integers of shape (queries, classes), from a ``.npy`` file.

    Raises UserError if the file is missing, cannot be read, or contains anything else.
    """
    try:
        with path.open("rb") as file:
            votes = np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path} (votes are a .npy file, written with numpy.save)") from error
    # the header of a .npy file is Python code, and numpy's parser may raise these errors
    except (OSError, ValueError, EOFError, MemoryError, SyntaxError, TokenError) as error:
        raise UserError(f"{path} is no .npy file of numbers ({error}): write the counts with numpy.save") from error
    try:
        return labelling_cost.valid_counts(votes)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def answer(request: LabellingRequest, counts: labelling_cost.Counts) -> dict[str, Any]:
    """Return the privacy cost of all queries, the bill, as a dictionary of JSON values."""
    valid_delta(request.delta)
    if request.target is not None and not 0 < request.target < math.inf:
        raise UserError(f"target epsilon {request.target} is not a positive number: choose one such as 8")
    cost = request.cost()
    found = labelling_cost.analyse(counts, cost, request.delta)
    confident = request.mechanism == "confident"
    # A safe delta is well below 1 / number of records. This number is unknown here. The number of teachers is used in
    # its place, because each teacher has at least one record.
    advice = delta_advice(request.delta, float(counts[0].sum()))
    bill = {
        "unit": "record", "mechanism": request.mechanism, **asdict(cost),
        "queries": len(counts), "teachers": int(counts[0].sum()), "classes": counts.shape[1], "delta": request.delta,
        "epsilon": found.worst_case.least, "epsilon_rdp": found.worst_case.rdp, "epsilon_pld": found.worst_case.pld,
        "epsilon_is": found.worst_case.in_words(),
        "epsilon_data_dependent": found.dependent.total, "epsilon_data_independent": found.independent.total,
        "answers": found.answers, "answers_are": "expected" if confident else "all",
        "epsilon_data_dependent_is": PRIVATE, "as_published": _as_published(request, counts, found),
        "accountant": found.worst_case.accountant, "orders": len(ORDERS),
        "per_query": {
            "epsilon_data_dependent": found.dependent.per_query.tolist(),
            "epsilon_data_independent": found.independent.per_query.tolist(),
            "total_so_far_data_dependent": found.dependent.cumulative.tolist(),
            "total_so_far_data_independent": found.independent.cumulative.tolist(),
        },
        "release": None, "warnings": [advice] if advice else [],
    }  # fmt: skip
    if request.target is not None:
        bill["target_epsilon"] = request.target
        bill["queries_that_fit"] = labelling_cost.queries_within(cost, len(counts), request.delta, request.target)
        bill["queries_that_fit_data_dependent"] = int((found.dependent.cumulative <= request.target).sum())
    return bill


def release(request: LabellingRequest, counts: labelling_cost.Counts) -> dict[str, Any]:
    """Return a noisy upper bound of the data-dependent epsilon. This bound may be published.

    Every call releases new noisy information about the records, with its own privacy cost.
    """
    cost = request.cost()
    if request.mechanism == "confident":
        raise UserError(
            "for confident, --release needs to know which queries were answered, and the votes do not contain this: "
            "run algorithm=pate with algorithm.publish_cost=true, or leave --release out"
        )
    shape = {"queries": len(counts), "teachers": int(counts[0].sum()), "classes": counts.shape[1]}
    terms = smooth_sensitivity.planned(cost, request.delta, **shape)
    published = smooth_sensitivity.release(counts, cost, request.delta, terms, noise=Noise.secret())
    return {**asdict(published), "smoothness": terms.smoothness, "noise": terms.noise, "own_cost": terms.divergence()}


def in_words(bill: dict[str, Any]) -> str:
    """Format ``bill``, a result of the function ``answer``, as lines of text."""
    each, delta, published = bill["per_query"], bill["delta"], bill["as_published"]
    mean = float(np.mean(each["epsilon_data_dependent"]))
    is_expected = bill["answers_are"] == "expected"
    is_private = ". PRIVATE, too: the expected number of answers is computed from the votes" if is_expected else ""
    expected = " (expected)" if is_expected else ""
    facts = {
        "mechanism": _mechanism_in_words(bill),
        "votes": f"{bill['queries']} queries, {bill['teachers']} teachers, {bill['classes']} classes; "
        f"{bill['answers']:.6g} answered{expected}",
        "guarantee, total": f"epsilon {rounded_up(bill['epsilon'])} at delta {delta:g}, all queries, for any votes. "
        f"{bill['epsilon_is']}",
        "data-independent": f"epsilon {bill['epsilon_data_independent']:.4f} total{expected}; "
        f"{each['epsilon_data_independent'][0]:.4f} for the first query alone; by RDP{is_private}",
        "data-dependent": f"epsilon {bill['epsilon_data_dependent']:.4f} total{expected}; {mean:.4f} one query "
        "alone, mean",
        "": f"PRIVATE: {PRIVATE}",
        "as published": f"data-dependent {published['epsilon_data_dependent']:.4f}, data-independent "
        f"{published['epsilon_data_independent']:.4f} ({published['bounds']})",
        "unit": "record: one record of one teacher's shard is replaced or removed",
    }
    if "queries_that_fit" in bill:
        facts["queries that fit"] = (
            f"{bill['queries_that_fit']} within epsilon {bill['target_epsilon']:g} "
            f"({bill['queries_that_fit_data_dependent']} by the data-dependent epsilon, which is private)"
        )
    if bill["release"] is not None:
        facts["released"] = (
            f"epsilon {bill['release']['epsilon']:.4f} at delta {delta:g} for the labels and this epsilon together, "
            f"with these votes; it may be published (with probability {bill['release']['failure']:g} it is too low). "
            "Each call is a further release with its own cost"
        )
    return "\n".join(f"{name:18}{text}" for name, text in facts.items())


def plot(bill: dict[str, Any], counts: labelling_cost.Counts, path: Path) -> None:
    """Draw two figures of the data-independent and the data-dependent epsilon into the file ``path``.

    The first figure shows how the total epsilon grows with the number of queries. The second shows the epsilon of each
    query against the teachers' agreement on it: the number of votes for the most frequent class, minus the number of
    votes for the second class.
    """
    each, numbers = bill["per_query"], np.arange(1, bill["queries"] + 1)
    ordered = np.sort(counts, axis=1)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, style in (("independent", "--"), ("dependent", "-")):
        note = " (private)" if name == "dependent" else ""
        left.plot(numbers, each[f"total_so_far_data_{name}"], style, label=f"data-{name}{note}")
        right.plot(
            ordered[:, -1] - ordered[:, -2], each[f"epsilon_data_{name}"], ".", markersize=3, label=f"data-{name}{note}"
        )
    left.set(xlabel="queries", ylabel=f"total epsilon at delta {bill['delta']:g}", ylim=(0, None))
    right.set(xlabel="gap between the first two classes, votes", ylabel="epsilon of each query alone", ylim=(0, None))
    left.legend()
    figure.suptitle(f"{_mechanism_in_words(bill)}; {bill['teachers']} teachers")
    save_plot(figure, path)


def _as_published(
    request: LabellingRequest, counts: labelling_cost.Counts, found: labelling_cost.Analysis
) -> dict[str, Any]:
    """Return the epsilons by the PATE papers' own bounds, and by the papers' conversion from RDP to epsilon.

    These epsilons can be compared with the tables in the papers.
    """
    orders = np.array(ORDERS)
    dependent, independent = found.dependent.curve, found.independent.curve
    bounds = "Papernot et al. 2018: theorem 6, classic conversion from RDP"
    if request.gamma is not None:
        orders, bounds = _MOMENTS_2017, "Papernot et al. 2017: theorem 3 if it holds, moments 1 to 8"
        each = labelling_cost.independent_2017(request.gamma, orders)
        theorem = labelling_cost.theorem_3(labelling_cost.LNMaxCost(request.gamma).log_q(counts), request.gamma, orders)
        dependent, independent = np.minimum(theorem, each).sum(axis=0), len(counts) * each
    tail = -math.log(request.delta) / (orders - 1)
    return {
        "epsilon_data_dependent": float((dependent + tail).min()),
        "epsilon_data_independent": float((independent + tail).min()),
        "bounds": bounds,
    }


def _mechanism_in_words(bill: dict[str, Any]) -> str:
    if bill["mechanism"] == "lnmax":
        return f"lnmax, Laplace noise of scale {1 / bill['gamma']:g} votes (gamma {bill['gamma']:g})"
    noise = f"Gaussian noise of {bill['sigma']:g} votes"
    if bill["mechanism"] == "gnmax":
        return f"gnmax, {noise}"
    return (
        f"confident gnmax, {noise}, for queries whose largest vote count plus noise (standard deviation "
        f"{bill['sigma_threshold']:g}) reaches {bill['threshold']:g}"
    )
