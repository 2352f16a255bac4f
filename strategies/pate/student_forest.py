"""A random forest as PATE's student for tables of numbers, held as tensors: no pickle is needed to keep or read it."""

from __future__ import annotations

from clients.teacher import RandomForest, as_table
from fl_sim.importing import torch
from fl_sim.seeding import rng
from strategies.pate.student import StudentData, Watch, nobody

_LEAST = 1e-3
"""The least probability a forest gives a class: a cross-entropy of infinity would say nothing."""


class ForestStudent(RandomForest):
    """A forest that is grown on the labelled records alone."""

    @property
    def steps(self) -> int:
        """Return 1: a forest is grown at once."""
        return 1

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return a forest without trees."""
        del input_shape
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        return networks.Forest(0, 1, num_classes)

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a forest of the labelled records."""
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        del model
        inputs, labels = as_table(data.labelled.numpy(force=True)), data.labels.numpy(force=True)
        forest = networks.forest_of(self.fit(inputs, labels, rng(seed, "forest student")), data.num_classes)
        watch(1, 0.0, forest)
        return forest
