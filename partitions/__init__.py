"""Partitions: rules that split a data set over clients, from labels to disjoint index arrays. Requires only numpy."""

from partitions.assign import label_counts
from partitions.feature_skew import FeatureNoise, Natural
from partitions.label_skew import Dirichlet, LabelK, Shards
from partitions.quantity import Iid, Quantity
from partitions.scheme import ByGroup, EvaluationSkew, FeatureSkew, ImpossibleSplit, Parts, Scheme

__all__ = [
    "ByGroup",
    "Dirichlet",
    "EvaluationSkew",
    "FeatureNoise",
    "FeatureSkew",
    "Iid",
    "ImpossibleSplit",
    "LabelK",
    "Natural",
    "Parts",
    "Quantity",
    "Scheme",
    "Shards",
    "label_counts",
]
