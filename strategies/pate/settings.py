"""Settings of PATE: teachers vote on a public pool, and a student learns from the noisy majority labels.

PATE: private aggregation of teacher ensembles (Papernot et al. 2017 and 2018). With student "resnet" and a public pool
from the training set the method is Diff-RN.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from clients.teacher import AnyTeacher, NetworkTeacher
from fl_sim.errors import UserError
from fl_sim.kinds import Choices, inner_split, is_own_kind, kind_of
from fl_sim.seeding import rng
from fl_sim.settings import OneOf, Settings, kinds_of
from fl_sim.types import Dataset, Examples
from strategies.algorithm import Split
from strategies.pate.labelling import Labelling, LNMax, NoNoise
from strategies.pate.semi_supervised import FeatureMatchingGan, FixMatch
from strategies.pate.student import ForestStudent, ResidualStudent, Student, Supervised

AnyStudent: TypeAlias = FixMatch | FeatureMatchingGan | Supervised | ResidualStudent | ForestStudent

_TEACHERS_START: Mapping[str, Any] = {
    "partition": "iid",
    "local": {"epochs": 50, "batch_size": 32, "learning_rate": 0.03, "weight_decay": 5e-3},
}
"""Default settings of the teachers: small IID shards and many local epochs."""

_VOTES_PER_NOISE = 3  # a run warns if (number of teachers) / (scale of the noise, in votes) is below this
_SHARE = {"test": 0.9, "train": 0.2}
"""The default size of the public pool, as a share of the test or training records."""


@dataclass(frozen=True)
class PublicSplit:
    """A split into private records, public pool and evaluation records.

    ``private``: indices into the training records. ``pool``: the public pool. Its labels are used only for
    measurements, and no student sees them.
    """

    private: NDArray[np.int64]
    pool: Examples
    evaluation: Examples


class Pate(Settings):
    """Clients are the teachers; each trains once, on its shard, with the experiment's ``model`` and ``local`` settings.

    ``teachers``: the model that clients train, networks or forests. ``labelling``: the rule that turns the clients'
    votes into noisy labels, and its privacy budget. ``student``: the model that learns from these labels. ``queries``:
    the number of records of the public pool that teachers vote on, within the labelling's budget. ``asking``: the order
    of queries. With "representative" the records that resemble many others in the pool come first. Teachers agree on
    most of these records, and a student learns more from them. "in-order" is the pool's order, as in the papers.
    ``public`` "test": the pool is the first ``public_records`` test records, and the other test records are for
    evaluation; "train": the pool is drawn from the training records before these are split. ``public_records``: the
    size of the pool; None: nine tenths of the test records, or a fifth of the training records. ``overlap``: the
    treatment of private records that are also in the public pool. With "refuse" the run is refused; with "drop-private"
    these records are left out of the teachers' shards. ``student_seed``: the seed of the student's training only.
    Another value trains a new student on the same labels; None: the run's seed. ``publish_cost``: also publish a noisy
    bound on the data-dependent epsilon. ``keep_private``: write the votes and all values that are computed from them
    into the run directory. This run directory must then not be published.
    """

    kind: Literal["pate"] = "pate"
    procedure: ClassVar[str] = "fl_sim.stages.pate.procedure:PateProcedure"
    title: ClassVar[str] = "PATE"
    is_private: ClassVar[bool] = True
    starts_with: ClassVar[Mapping[str, Any]] = _TEACHERS_START
    queries: int = Field(1000, ge=1)
    asking: Literal["representative", "in-order"] = "representative"
    labelling: Labelling = Labelling()
    student: Annotated[AnyStudent, OneOf("student", Student)] = FixMatch()
    teachers: Annotated[AnyTeacher, OneOf("teachers")] = NetworkTeacher()
    public: Literal["test", "train"] = "test"
    public_records: int | None = Field(None, ge=1)
    overlap: Literal["refuse", "drop-private"] = "refuse"
    student_seed: int | None = Field(None, ge=0)
    publish_cost: bool = False
    keep_private: bool = False

    @model_validator(mode="after")
    def _sensible(self) -> "Pate":
        mechanism = self.labelling.mechanism.kind
        if self.publish_cost and mechanism not in {"lnmax", "gnmax", "confident"}:
            raise ValueError(f"publish_cost is for lnmax, gnmax and confident, not for {mechanism}: leave it out")
        if self.labelling.budget == "data-dependent" and not self.keep_private:
            raise ValueError(
                "with a data-dependent budget the number of labels is as private as the votes: set keep_private=true "
                "and do not publish the run, or take budget data-independent"
            )
        return self

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings that PATE does not use, such as a sampler, and for a user-defined partition.

        In a user-defined partition one more record may change the shards of several teachers, so no epsilon is known.
        """
        for name, wanted in (
            ("aggregator", "mean"),
            ("sampler", "full"),
            ("preprocess", "none"),
            ("calibrate", "none"),
        ):
            if (given := kind_of(getattr(experiment, name))) != wanted:
                raise ValueError(
                    f"algorithm pate cannot run with {name} {given}: all teachers vote once, and pate adds the noise "
                    f"itself; leave {name} out"
                )
        if (batch_norm := experiment.local.batch_norm) != "none":
            raise ValueError(
                f"algorithm pate cannot run with local.batch_norm={batch_norm}, as it averages no models: leave "
                "local.batch_norm out, and take a model without running statistics"
            )
        splits = (experiment.partition, inner_split(experiment.partition))
        own = next((split for split in splits if split is not None and is_own_kind(split)), None)
        if own is None or isinstance(self.labelling.mechanism, NoNoise):
            return
        raise ValueError(
            f"algorithm pate cannot state an epsilon for partition {kind_of(own)}: in a user-defined "
            "partition, one more record may change the shards of several teachers; take one of "
            f"{', '.join(kinds_of('partition'))}, or algorithm.labelling.mechanism=none"
        )

    def check_budget(self, experiment: Choices, records: Sequence[int], num_classes: int) -> None:
        """Raise UserError if the labelling's budget is smaller than the cost of one query."""
        del experiment
        self.labelling.check_budget(len(records), num_classes)

    def bound_rounds(self, rounds: int, dataset: Dataset) -> int:
        """Return the number of rounds, at most one for each training step of the student.

        Raises UserError for data on which no student can train, such as text tokens.
        """
        if dataset.vocabulary:
            raise UserError(
                f"algorithm pate cannot run on {dataset.name}: its students compute with the numbers of a record, and "
                "these are tokens; take another data set or algorithm"
            )
        self.student.network(dataset.input_shape, dataset.num_classes)
        return min(rounds, self.student.steps)

    def public_split(self, dataset: Dataset, seed: int) -> PublicSplit:
        """Return the private records, the public pool and the records to evaluate on."""
        return split_off(dataset, self.public, self.public_records, seed)

    def deal(self, dataset: Dataset, split: Split, seed: int) -> Sequence[NDArray[np.int64]]:
        """Return each teacher's shard (its private records), as indices into the training set.

        Raises UserError if the pool contains private records and ``overlap`` does not drop them, or if a teacher has no
        records.
        """
        public = self.public_split(dataset, seed)
        parts = split(public.private)
        both = overlap(dataset.train.take(public.private), public.pool)
        if both.any() and self.overlap == "refuse":
            raise UserError(
                f"{int(both.sum())} of {len(both)} private records of {dataset.name} are in the public pool, too (the "
                f"first is training record {int(public.private[both.argmax()])}): what is public cannot be kept "
                "private. Take a pool without them, or algorithm.overlap=drop-private, which leaves them out of the "
                "teachers' shards"
            )
        shards = [public.private[part[~both[part]]] for part in parts]
        if empty := [teacher for teacher, shard in enumerate(shards) if not len(shard)]:
            raise UserError(
                f"{len(empty)} of {len(shards)} teachers hold no record (the first is teacher {empty[0]}): take fewer "
                "clients, or partition=iid"
            )
        return shards

    @property
    def pools_test_records(self) -> bool:
        """Return True if the public pool consists of test records."""
        return self.public == "test"

    @property
    def pool_in_words(self) -> str:
        """Return a phrase for reports that names the records of the public pool."""
        return "the first test records" if self.pools_test_records else "a part of the training records"

    def note(self) -> str:
        """Return the note on PATE that is printed below tables of results."""
        pool = self.pool_in_words
        return (
            "PATE: clients are teachers that train once, for the local epochs given, and vote on a public pool, "
            f"{pool}; rounds are epochs of the student, and accuracy is measured on the test records outside the pool, "
            "so it is not measured on the same records as that of other methods."
        )

    def warning_of_noise(self, num_teachers: int) -> str:
        """Return a warning if the noise is large compared with the number of teachers, otherwise an empty string."""
        mechanism = self.labelling.mechanism
        if isinstance(mechanism, NoNoise):
            return ""
        scale = 1 / mechanism.gamma if isinstance(mechanism, LNMax) else mechanism.sigma
        if num_teachers >= _VOTES_PER_NOISE * scale:
            return ""
        return (
            f"noise of {scale:g} votes on the votes of {num_teachers} teachers: labels will be little better than "
            f"chance; take {_VOTES_PER_NOISE * scale:.0f} clients or more, or less noise for a larger epsilon"
        )


def split_off(dataset: Dataset, source: Literal["test", "train"], num_public: int | None, seed: int) -> PublicSplit:
    """Return the private records, the public pool and the evaluation records.

    ``source`` "test": the pool is the first ``num_public`` test records (default: nine tenths) and the others are for
    evaluation, as in Papernot et al. (2017). "train": the pool is drawn from the training records (default: a fifth),
    and teachers do not get its records; the test records are for evaluation. Raises UserError if the pool or one of the
    other two groups of records would be empty.
    """
    part = dataset.test if source == "test" else dataset.train
    size = int(_SHARE[source] * len(part)) if num_public is None else num_public
    if not 0 < size < len(part):
        raise UserError(
            f"a public pool of {size} out of {len(part)} {source} records leaves "
            f"{'no pool' if size <= 0 else 'nothing'} "
            f"{'to label' if size <= 0 else 'to evaluate on' if source == 'test' else 'for teachers'}: choose "
            f"algorithm.public_records from 1 to {len(part) - 1}"
        )
    everything = np.arange(len(dataset.train), dtype=np.int64)
    if source == "test":
        rows = np.arange(len(part), dtype=np.int64)
        return PublicSplit(everything, part.take(rows[:size]), part.take(rows[size:]))
    order = rng(seed, "public pool").permutation(len(part)).astype(np.int64)
    return PublicSplit(np.sort(order[size:]), part.take(order[:size]), dataset.test)


def overlap(private: Examples, pool: Examples) -> NDArray[np.bool_]:
    """Return the mask of private records whose inputs are also in the pool, shape (number of private records,)."""
    public = set(_digests(pool))
    return np.fromiter((digest in public for digest in _digests(private)), dtype=np.bool_, count=len(private))


def _digests(examples: Examples) -> list[bytes]:
    rows = np.ascontiguousarray(examples.inputs)
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]
