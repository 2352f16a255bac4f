"""Backdoors: attacks after which the model predicts the target class for every image that has a trigger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.kinds import Choices
from fl_sim.local_plan import LocalPlan
from fl_sim.types import Dataset, Examples, Reply
from strategies.aggregators import as_rows
from strategies.attacks import HostileClients, Seen, with_row


class Backdoor(HostileClients):
    """Hostile clients stamp a trigger on a share of their images, and label these images ``target`` (Gu et al. 2017).

    With the default settings this is the attack BadNets. The trigger is a white square of ``size`` x ``size`` pixels in
    the lower right corner. ``poisoned_share``: the share of a hostile client's records, rounded up and drawn from the
    run's seed, that get the trigger. With ``parts`` 4 the square has four parts, and each hostile client stamps one
    part (DBA, Xie et al. 2020); models are tested with the whole square. ``boost``: the factor of hostile updates. A
    factor of n / (number of hostile clients), for n clients of equal weight, replaces the model by the hostile one
    (Bagdasaryan et al. 2020, equation 3). ``loss_share``: a number a. Hostile clients minimise a times their loss plus
    (1 - a) times the squared distance to the received model, so that their updates stay short (constrain-and-scale,
    equation 4, with a Euclidean distance).

    Each tested round and ``result.json`` have the attack success rate beside the accuracy. For this rate the test
    records of all other classes get the trigger. The rate is the share of these records for which the model predicts
    ``target``. These test records have no feature skew.
    """

    kind: Literal["backdoor"] = "backdoor"
    sees_honest: ClassVar[bool] = False
    clients: int = Field(1, ge=1)
    target: int = Field(0, ge=0)
    size: int = Field(4, ge=1)
    poisoned_share: float = Field(0.5, gt=0, le=1)
    parts: Literal[1, 4] = 1
    boost: float = Field(1.0, gt=0, le=1e6)
    loss_share: float = Field(1.0, gt=0, le=1)
    computes_with_records: ClassVar[bool] = True
    stage: ClassVar[str] = "fl_sim.stages.backdoor:BackdoorSuccess"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a sentence if there are fewer hostile clients than parts of the trigger."""
        del experiment
        few = f"attack.parts={self.parts} with {self.clients} hostile clients: nobody stamps the other parts"
        return [few] if self.clients < self.parts else []

    def tampered(self, examples: Examples, number: int, coins: np.random.Generator) -> Examples:
        """Return a hostile client's records; some of them get the target label and the trigger, or a part of it."""
        chosen = coins.permutation(len(examples))[: int(np.ceil(self.poisoned_share * len(examples) - 1e-9))]
        inputs, labels = examples.inputs.copy(), examples.labels.copy()
        inputs[chosen] = self.stamped(inputs[chosen], None if self.parts == 1 else number % 4)
        labels[chosen] = self.target
        return replace(examples, inputs=inputs, labels=labels)

    def stamped(self, images: NDArray[Any], part: int | None = None) -> NDArray[Any]:
        """Return a copy of ``images``, (n, channels, height, width), with the trigger or its ``part``, from 0 to 3."""
        images, ends = images.copy(), (-self.size, -(self.size // 2), None)
        rows = columns = slice(ends[0], None)
        if part is not None:
            rows, columns = (slice(*ends[half : half + 2]) for half in divmod(part, 2))
        images[..., rows, columns] = np.iinfo(images.dtype).max if images.dtype.kind == "u" else 1
        return images

    def triggered(self, dataset: Dataset) -> Examples:
        """Return the test records of other classes than ``target``, with the trigger and the label ``target``.

        Raises UserError if the records are no images, if the trigger does not fit, or if all or none of them
        are of class ``target``.
        """
        shape, others = dataset.input_shape, np.flatnonzero(dataset.test.labels != self.target)
        if len(shape) != 3:
            raise UserError(
                "attack backdoor needs images, and the records here are none: take another data set or attack"
            )
        smallest = 1 if self.parts == 1 else 2
        if not smallest <= self.size <= min(shape[1:]):
            raise UserError(
                f"attack.size={self.size} does not fit: the trigger of {self.parts} parts has {smallest} to "
                f"{min(shape[1:])} pixels a side on images of {shape[1]} x {shape[2]} pixels"
            )
        if self.target >= dataset.num_classes or len(others) in (0, len(dataset.test)):
            raise UserError(
                f"attack.target={self.target}: {dataset.name} has {dataset.num_classes} classes, and its test records "
                "must contain the target class and another one; set another attack.target"
            )
        test = dataset.test.take(others)
        return replace(test, inputs=self.stamped(test.inputs), labels=np.full_like(test.labels, self.target))

    def planned(self, plan: LocalPlan) -> LocalPlan:
        """Return the plan of a hostile client, with the squared distance to the received model in its loss."""
        distance = 2 * (1 - self.loss_share)
        return replace(
            plan, gradient_scale=self.loss_share * plan.gradient_scale, proximal_mu=plan.proximal_mu + distance
        )

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return ``boost`` times each update of a hostile client."""
        del seen
        return [with_row(reply, as_rows([reply])[0] * self.boost) for reply in hostile] if self.boost != 1 else hostile
