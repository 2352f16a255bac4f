"""Partitions: rules that assign the records of a data set to clients, mostly by their labels. Requires only numpy.

A partition returns one array of record indices for each client; no record belongs to two clients.
"""

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
