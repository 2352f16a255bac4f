"""The ways to compress updates to choose from, and what none of them goes together with."""

from typing import TypeAlias

from fl_sim.kinds import Choices, kind_of
from strategies.algorithm import Central, Dealing
from strategies.attacks import ALittleIsEnough
from strategies.compression.none import NoCompression
from strategies.compression.power_sgd import PowerSGD
from strategies.compression.qsgd import QSGD
from strategies.compression.rand_k import RandK
from strategies.compression.sign_sgd import SignSGD
from strategies.compression.top_k import TopK
from strategies.coordinate_median import CoordinateMedian
from strategies.feddyn import Dynamic
from strategies.global_dp import GlobalDP
from strategies.scaffold import Scaffold
from strategies.trimmed_mean import TrimmedMean
from strategies.tstr import Tstr

AnyCompressor: TypeAlias = NoCompression | TopK | RandK | QSGD | PowerSGD | SignSGD


def check_compression(experiment: Choices) -> None:
    """Raise ValueError where compression has no place in an ``experiment``, whichever way it is."""
    compress = experiment.compress
    if isinstance(compress, NoCompression):
        return
    kind, algorithm = kind_of(compress), experiment.algorithm
    if (isinstance(algorithm, Central) and algorithm.is_central) or isinstance(algorithm, Dealing | Tstr):
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
    if isinstance(experiment.aggregator, GlobalDP) and not (type(compress) is RandK and not compress.keeps_error):
        raise ValueError(
            f"compress {kind} cannot run under aggregator global-dp: what a client leaves out depends on its records, "
            "or comes in a later round, and the guarantee here is stated for what is left out without a look at them: "
            "take compress=rand-k, whose places are drawn, or leave compress out"
        )
    if isinstance(experiment.attack, ALittleIsEnough):
        raise ValueError(
            f"attack alie cannot run with compress {kind}: what it forges would not travel through that, so no hostile "
            "client could send it; take attack sign-flip or label-flip, or leave compress out"
        )
    if isinstance(compress, TopK | RandK) and isinstance(experiment.aggregator, CoordinateMedian | TrimmedMean):
        raise ValueError(
            f"aggregator {kind_of(experiment.aggregator)} cannot run with compress {kind}: most clients leave out any "
            "one number, which counts as 0, so the middle is 0 and nothing would be learnt; take aggregator krum, "
            "multi-krum, geometric-median or norm-bound, or compress=qsgd"
        )
