"""Ways to split a data set over clients: labels in, disjoint index arrays out. Needs numpy alone."""

from partitions.assign import label_counts
from partitions.dirichlet import Dirichlet
from partitions.errors import ImpossibleSplit
from partitions.feature_noise import FeatureNoise
from partitions.iid import Iid
from partitions.label_k import LabelK
from partitions.natural import Natural
from partitions.parts import Parts
from partitions.quantity import Quantity
from partitions.scheme import ByGroup, EvaluationSkew, FeatureSkew, Scheme
from partitions.shards import Shards

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
