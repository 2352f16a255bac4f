"""Partitions: rules that assign the records of a data set to clients, mostly by their labels. Requires only numpy.

A partition returns one array of record indices for each client; no record belongs to two clients. The shards of the
partition ``drift`` change between rounds.
"""

from partitions.assign import label_counts
from partitions.drift import Drift
from partitions.feature_skew import FeatureNoise, Natural
from partitions.group_skew import Colour, Domain, Invert, PermuteLabels, Rotate
from partitions.label_skew import Dirichlet, LabelK, Shards
from partitions.moving import ByRound, MovingParts
from partitions.quantity import Iid, Quantity
from partitions.scheme import (
    ByGroup,
    ByLabels,
    EvaluationSkew,
    FeatureSkew,
    ImpossibleSplit,
    Parts,
    RecordSkew,
    Scheme,
    WithinSources,
    uses_labels,
)

__all__ = [
    "ByGroup",
    "ByLabels",
    "ByRound",
    "Colour",
    "Dirichlet",
    "Domain",
    "Drift",
    "EvaluationSkew",
    "FeatureNoise",
    "FeatureSkew",
    "Iid",
    "ImpossibleSplit",
    "Invert",
    "LabelK",
    "MovingParts",
    "Natural",
    "Parts",
    "PermuteLabels",
    "Quantity",
    "RecordSkew",
    "Rotate",
    "Scheme",
    "Shards",
    "WithinSources",
    "label_counts",
    "uses_labels",
]
