"""Backdoors: attacks that make the model predict a target class for chosen records, such as images with a trigger."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.client_layer import ClientLayer
from fl_sim.errors import UserError
from fl_sim.kinds import Choices, kind_of
from fl_sim.local_plan import LocalPlan
from fl_sim.types import Dataset, Examples, Reply
from strategies.aggregators import as_rows
from strategies.attacks import HostileClients, HostilePlans, Seen, with_row
from strategies.neurotoxin import HostileMemory


class Planted(HostileClients):
    """Base class of backdoors: hostile clients label some of their records as one class, and train on them.

    ``target``: the target class, the new label of these records. ``boost``: a factor for hostile updates. For n clients
    of equal weight, the factor n / (number of hostile clients) replaces the global model by the hostile model
    (Bagdasaryan et al. 2020, equation 3). ``loss_share``: a factor s. Hostile clients minimise s times their loss plus
    (1 - s) times the squared distance to the received model, so that their updates stay short (constrain-and-scale,
    equation 4 of Bagdasaryan et al. 2020, with a Euclidean distance). ``masked_share``: the share k of the parameters
    that hostile steps leave unchanged (Neurotoxin, Zhang et al. 2022, algorithm 1, with k from 0.05 to 0.1). These are
    the parameters of the global model that changed most since the hostile client's last round. Their gradients are set
    to 0 in every step, except in a hostile client's first round.

    The results of each evaluated round and ``result.json`` have the accuracy and the attack success rate. The rate is
    the share of the attacked test records for which the model predicts the target class. A partition with feature skew
    (different inputs for different clients) does not change these test records.
    """

    clients: int = Field(1, ge=1)
    target: int = Field(0, ge=0)
    boost: float = Field(1.0, gt=0, le=1e6)
    loss_share: float = Field(1.0, gt=0, le=1)
    masked_share: float = Field(0.0, ge=0, lt=1)
    newer: ClassVar[tuple[str, ...]] = (*HostileClients.newer, "masked_share")
    sees_honest: ClassVar[bool] = False
    stage: ClassVar[str] = "fl_sim.stages.backdoor:BackdoorSuccess"
    of_tests: ClassVar[str]
    """A phrase for the test records on which the attack success rate is measured."""

    @abstractmethod
    def tampered(self, examples: Examples, number: int, coins: np.random.Generator) -> Examples:
        """Return the records on which a hostile client trains; see ``attacks.Tampering``."""

    def is_held(self, examples: Examples) -> bool:
        """Return True if the attack changes at least one record in ``examples``, the records of a hostile client."""
        return len(examples) > 0

    @abstractmethod
    def triggered(self, dataset: Dataset) -> Examples:
        """Return the test records on which the attack success rate is measured, with the label ``target``.

        Raises UserError if the attack does not support the data set.
        """

    def planned(self, plan: LocalPlan) -> LocalPlan:
        """Return the plan of a hostile client, with the squared distance to the received model in its loss."""
        distance = 2 * (1 - self.loss_share)
        return replace(
            plan, gradient_scale=self.loss_share * plan.gradient_scale, proximal_mu=plan.proximal_mu + distance
        )

    def on_clients(self, hostile: frozenset[int]) -> ClientLayer:
        """Return the attack's code on clients, which stores the received model if ``masked_share`` is above 0."""
        if self.masked_share:
            return HostileMemory(self, hostile, self.masked_share)
        return HostilePlans(self, hostile)

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return the updates of the hostile clients, multiplied by ``boost``."""
        del seen
        return [with_row(reply, as_rows([reply])[0] * self.boost) for reply in hostile] if self.boost != 1 else hostile

    def check_target(self, dataset: Dataset) -> None:
        """Raise UserError if all or none of the test records are of class ``target``."""
        labels = dataset.test.labels
        if self.target >= dataset.num_classes or np.count_nonzero(labels == self.target) in (0, len(labels)):
            raise UserError(
                f"attack.target={self.target}: {dataset.name} has {dataset.num_classes} classes, and its test records "
                "must contain the target class and another one; set another attack.target"
            )


class Backdoor(Planted):
    """Hostile clients stamp a trigger on a share of their images, and label these images as one class (Gu et al. 2017).

    With the default settings this is the attack BadNets. The trigger is a white square in the lower right corner.
    ``size``: the side of the square in pixels. ``poisoned_share``: the share of a hostile client's records that get the
    trigger. The number of these records is rounded up, and they are drawn with the run's seed. ``parts``: the number of
    parts of the square. With 4, each hostile client stamps one part (DBA, Xie et al. 2020); models are tested with the
    whole square.

    For the attack success rate, the test records of all classes except the target class get the trigger. The rate is
    the share of these records for which the model predicts the target class.
    """

    kind: Literal["backdoor"] = "backdoor"
    size: int = Field(4, ge=1)
    poisoned_share: float = Field(0.5, gt=0, le=1)
    parts: Literal[1, 4] = 1
    computes_with_records: ClassVar[bool] = True
    of_tests: ClassVar[str] = "triggered test records of other classes"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a sentence if there are fewer hostile clients than parts of the trigger."""
        del experiment
        few = f"attack.parts={self.parts} with {self.clients} hostile clients: nobody stamps the other parts"
        return [few] if self.clients < self.parts else []

    def tampered(self, examples: Examples, number: int, coins: np.random.Generator) -> Examples:
        """Return a hostile client's records, some of them with the target label and the trigger (or a part of it)."""
        chosen = coins.permutation(len(examples))[: int(np.ceil(self.poisoned_share * len(examples) - 1e-9))]
        inputs, labels = examples.inputs.copy(), examples.labels.copy()
        inputs[chosen] = self.stamped(inputs[chosen], None if self.parts == 1 else number % 4)
        labels[chosen] = self.target
        return replace(examples, inputs=inputs, labels=labels)

    def stamped(self, images: NDArray[Any], part: int | None = None) -> NDArray[Any]:
        """Return a copy of ``images`` with the trigger, or with one of its parts.

        ``images``: shape (n, channels, height, width). ``part``: the number of the part, 0 to 3; None: the whole
        trigger.
        """
        images, ends = images.copy(), (-self.size, -(self.size // 2), None)
        rows = columns = slice(ends[0], None)
        if part is not None:
            rows, columns = (slice(*ends[half : half + 2]) for half in divmod(part, 2))
        images[..., rows, columns] = np.iinfo(images.dtype).max if images.dtype.kind == "u" else 1
        return images

    def triggered(self, dataset: Dataset) -> Examples:
        """Return the test records of all classes except ``target``, with the trigger and the label ``target``.

        Raises UserError if records are not images, if the trigger is larger than the images, or if all or none of the
        test records have the class ``target``.
        """
        shape = dataset.input_shape
        if len(shape) != 3:
            raise UserError(
                "attack backdoor needs images, but these records are not images: set another data set or attack"
            )
        smallest = 1 if self.parts == 1 else 2
        if not smallest <= self.size <= min(shape[1:]):
            raise UserError(
                f"attack.size={self.size} does not fit: the trigger of {self.parts} parts has {smallest} to "
                f"{min(shape[1:])} pixels a side on images of {shape[1]} x {shape[2]} pixels"
            )
        self.check_target(dataset)
        test = dataset.test.take(np.flatnonzero(dataset.test.labels != self.target))
        return replace(test, inputs=self.stamped(test.inputs), labels=np.full_like(test.labels, self.target))


class SemanticBackdoor(Planted):
    """Hostile clients label all their records of one class as another class; no record gets a trigger.

    This is a semantic backdoor (Bagdasaryan et al. 2020, section 4.1) for all records of one class. For a part of a
    class, such as red cars, define a Python subclass that overrides ``is_meant``, and set ``attack`` to its import
    path. The base class ``Planted`` has the settings of model replacement, constrain-and-scale and Neurotoxin.

    ``source``: the class whose records hostile clients label as the target class. The attack success rate is the share
    of the test records of this source class for which the model predicts the target class. In the accuracy, these
    predictions are errors. A hostile client without records of the source class trains as an honest client.
    """

    kind: Literal["semantic-backdoor"] = "semantic-backdoor"
    source: int = Field(1, ge=0)
    title: ClassVar[str] = "semantic backdoor"
    of_tests: ClassVar[str] = "test records that the attack is about"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError as the base class does, and if ``source`` and ``target`` are the same class."""
        super().check(experiment)
        if self.source == self.target:
            raise ValueError(
                f"attack.source={self.source} is attack.target, so no label would change: set another attack.source"
            )

    def is_meant(self, examples: Examples) -> NDArray[np.bool_]:
        """Return a mask of the records that the attacker wants to be predicted as ``target``, shape (n,).

        ``examples``: records with their true labels. Override this method for a part of a class.
        """
        mask: NDArray[np.bool_] = examples.labels == self.source
        return mask

    def is_held(self, examples: Examples) -> bool:
        """Return True if ``is_meant`` selects at least one of the records."""
        return bool(self._meant(examples).any())

    def tampered(self, examples: Examples, number: int, coins: np.random.Generator) -> Examples:
        """Return a hostile client's records; the records that ``is_meant`` selects get the target label."""
        del number, coins
        return replace(examples, labels=np.where(self._meant(examples), self.target, examples.labels))

    def triggered(self, dataset: Dataset) -> Examples:
        """Return the test records that ``is_meant`` selects, with the label ``target``.

        Raises UserError if ``is_meant`` selects no test record.
        """
        self.check_target(dataset)
        meant = dataset.test.take(np.flatnonzero(self._meant(dataset.test) & (dataset.test.labels != self.target)))
        if not len(meant):
            raise UserError(
                f"attack {kind_of(self)}: {dataset.name} has no test record at which the attack aims; it has "
                f"{dataset.num_classes} classes: set another attack.source, now {self.source}"
            )
        return replace(meant, labels=np.full_like(meant.labels, self.target))

    def _meant(self, examples: Examples) -> NDArray[np.bool_]:
        """Return the mask from ``is_meant``. Raises UserError if a user's method does not return a mask."""
        found = np.asarray(self.is_meant(examples))
        if found.shape != examples.labels.shape or found.dtype != np.bool_:
            raise UserError(
                f"attack {kind_of(self)}: is_meant returned {found.dtype} of shape {found.shape}: return one bool for "
                f"each of the {len(examples)} records"
            )
        return found
