"""What no way to compress updates goes together with, and the stage that compresses a run's."""

from fl_sim.kinds import Choices, hides_clients, kind_of, path_in
from strategies.algorithm import Central, Dealing
from strategies.compression.rand_k import RandK
from strategies.compression.top_k import TopK
from strategies.coordinate_median import CoordinateMedian
from strategies.feddyn import Dynamic
from strategies.scaffold import Scaffold
from strategies.trimmed_mean import TrimmedMean


def check_compression(experiment: Choices) -> None:
    """Raise ValueError where compression has no place in an ``experiment``, whichever way it is."""
    compress, algorithm = experiment.compress, experiment.algorithm
    kind, has_rounds = kind_of(compress), not path_in(type(algorithm), "procedure")
    if not has_rounds or isinstance(algorithm, Dealing) or (isinstance(algorithm, Central) and algorithm.is_central):
        raise ValueError(
            f"compress {kind} has no place beside algorithm {kind_of(algorithm)}, whose clients send no updates: leave "
            "compress out, or take another algorithm, such as fedavg"
        )
    if isinstance(algorithm, Scaffold | Dynamic) and not compress.keeps_error:
        raise ValueError(
            f"algorithm {kind_of(algorithm)} cannot run with compress {kind}, which is right on average only: what "
            "clients keep and what the server adds up would drift apart, round by round; take one with error feedback, "
            "such as compress=top-k, or leave compress out"
        )
    if hides_clients(experiment.aggregator) and not (type(compress) is RandK and not compress.keeps_error):
        raise ValueError(
            f"compress {kind} cannot run under aggregator global-dp: what a client leaves out depends on its records, "
            "or comes in a later round, and the guarantee here is stated for what is left out without a look at them: "
            "take compress=rand-k, whose places are drawn, or leave compress out"
        )
    if isinstance(compress, TopK | RandK) and isinstance(experiment.aggregator, CoordinateMedian | TrimmedMean):
        raise ValueError(
            f"aggregator {kind_of(experiment.aggregator)} cannot run with compress {kind}: most clients leave out any "
            "one number, which counts as 0, so the middle is 0 and nothing would be learnt; take aggregator krum, "
            "multi-krum, geometric-median or norm-bound, or compress=qsgd"
        )
