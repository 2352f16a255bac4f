"""A random forest as PATE's student for tables of numbers, held as tensors: no pickle is needed to keep or read it."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from clients.forest import RandomForest, as_table
from fl_sim.seeding import rng
from strategies.pate.student import StudentData, Watch, nobody

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier

_LEAST = 1e-3
"""The least probability a forest gives a class: a cross-entropy of infinity would say nothing."""


class ForestStudent(RandomForest):
    """A forest that is grown on the labelled records alone."""

    @property
    def steps(self) -> int:
        """Return 1: a forest is grown at once."""
        return 1

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return a forest without trees."""
        del input_shape
        return Forest(0, 1, num_classes)

    def train(self, data: StudentData, model: nn.Module, seed: int, watch: Watch = nobody) -> nn.Module:
        """Return a forest of the labelled records."""
        del model
        inputs, labels = as_table(data.labelled.numpy(force=True)), data.labels.numpy(force=True)
        forest = forest_of(self.fit(inputs, labels, rng(seed, "forest student")), data.num_classes)
        watch(1, 0.0, forest)
        return forest


class Forest(nn.Module):
    """Decision trees as padded tables, one row a tree: where a node's ``left`` child is itself, it is a leaf.

    A record goes left where its ``feature`` is at most the node's ``threshold``; ``value`` are a leaf's class shares.
    """

    def __init__(self, num_trees: int, num_nodes: int, num_classes: int) -> None:
        super().__init__()
        shape = (num_trees, num_nodes)
        for name in ("feature", "left", "right"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64))
        self.register_buffer("threshold", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("value", torch.zeros((*shape, num_classes)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of the trees' mean class shares, shape (n, classes)."""
        rows = inputs.flatten(1)
        tables = dict(self.named_buffers())
        trees = torch.arange(len(tables["feature"]), device=rows.device).expand(len(rows), -1)
        node = torch.zeros_like(trees)
        while True:
            smaller = rows.gather(1, tables["feature"][trees, node]) <= tables["threshold"][trees, node]
            below = torch.where(smaller, tables["left"][trees, node], tables["right"][trees, node])
            if torch.equal(below, node):
                return tables["value"][trees, node].mean(dim=1).clamp(min=_LEAST).log()
            node = below


def forest_of(grown: "RandomForestClassifier", num_classes: int) -> Forest:
    """Return scikit-learn's forest as tensors; classes that it has not seen have share 0."""
    trees = [one.tree_ for one in grown.estimators_]
    forest = Forest(len(trees), max(tree.node_count for tree in trees), num_classes)
    tables = dict(forest.named_buffers())
    seen = torch.from_numpy(np.asarray(grown.classes_, dtype=np.int64))
    for number, tree in enumerate(trees):
        own, is_leaf = np.arange(tree.node_count), tree.children_left < 0
        columns = {
            "feature": np.where(is_leaf, 0, tree.feature),
            "threshold": np.where(is_leaf, 0.0, tree.threshold),
            "left": np.where(is_leaf, own, tree.children_left),
            "right": np.where(is_leaf, own, tree.children_right),
        }
        for name, column in columns.items():
            tables[name][number, : tree.node_count] = torch.from_numpy(column)
        shares = tree.value[:, 0] / tree.value[:, 0].sum(axis=1, keepdims=True)
        tables["value"][number, : tree.node_count, seen] = torch.from_numpy(shares).to(torch.float32)
    return forest
