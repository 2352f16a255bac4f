"""Settings of DA-FL, in which clients publish private synthetic records before the rounds.

Source: Tang, Wang, Liu 2023, "DA-FL", Journal on Communications 44(1). The code for one client is in
clients/dafl/share.py.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from clients.dafl.dpcgan.settings import DpCgan
from clients.dafl.generator import Generator, ShapedGenerator
from clients.dafl.labels import ExponentialMechanism, LabelPicker
from clients.dafl.marginals import Marginals
from clients.dafl.noisy_moments import Gaussian, MeanEmbedding
from fl_sim.data.dataset import check_unit_range
from fl_sim.errors import UserError
from fl_sim.kinds import Choices, UsingPool, kind_of
from fl_sim.settings import OneOf, Settings
from fl_sim.types import Dataset

AnyGenerator: TypeAlias = DpCgan | MeanEmbedding | Marginals | Gaussian


class DaFl(Settings):
    """Before the rounds, a client publishes about ``gamma`` times as many synthetic records as it has own records.

    ``epsilon`` (inf: no noise, for comparison) and ``delta``: the privacy budget per record, for label selection and
    generator together. ``generator``: "dp-cgan" is the paper's generator, and gives better accuracy if clients also
    train on their own records; "mean-embedding" takes a second, and gives better accuracy if clients train on synthetic
    records only; "marginals" is for tables, "gaussian" for public features. ``labels``: the mechanism that selects the
    number of synthetic records of each class. ``client_gammas``: one gamma per client, in place of ``gamma``.
    ``train_on``: the training records in the rounds: the client's own records and the pool of all synthetic records
    (the default), only the pool ("synthetic"), or only its own records ("own"). With "synthetic", the whole run is
    private by post-processing. With "own", only the server uses the pool, for ``server_epochs`` or as the public
    records of an algorithm such as FedDF; the rounds may then use another protection, such as local.privacy=dp-sgd.
    ``server_epochs``: the number of epochs for which the server trains the first model on the pool before the first
    round; 0, as in the paper, means a start from random weights (the server receives the pool nevertheless). ``noise``:
    "secret" protects the records and differs from run to run; "seeded" is equal in every run and protects no record,
    for simulations only.
    """

    kind: Literal["da-fl"] = "da-fl"
    title: ClassVar[str] = "DA-FL"
    stage: ClassVar[str] = "fl_sim.stages.dafl.stage:SynthesisStage"
    is_private: ClassVar[bool] = True
    computes_with_records: ClassVar[bool] = True
    epsilon: float = Field(10.0, gt=0, allow_inf_nan=True)
    delta: float = Field(1e-5, gt=0, lt=1)
    gamma: float = Field(0.05, gt=0, le=1)
    client_gammas: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    generator: Annotated[AnyGenerator, OneOf("generator", Generator)] = DpCgan()
    labels: Annotated[LabelPicker, OneOf("labels")] = ExponentialMechanism()
    train_on: Literal["own-and-synthetic", "synthetic", "own"] = "own-and-synthetic"
    server_epochs: int = Field(0, ge=0)
    noise: Literal["secret", "seeded"] = "secret"

    @classmethod
    def captions(cls, chosen: Sequence["DaFl"], values: Callable[[Iterable[Any]], str]) -> list[str]:
        """Return captions for a table of runs: how clients make synthetic records, and with which privacy budget."""
        gammas = values([one.client_gammas or one.gamma for one in chosen])
        made_by = values([kind_of(one.generator) for one in chosen])
        epsilon, delta = (values([getattr(one, name) for one in chosen]) for name in ("epsilon", "delta"))
        line = (
            f"DA-FL: before round 1 every client releases synthetic records, gamma = {gammas} times as many as it "
            f"holds, made by {made_by}; budget epsilon = {epsilon} at delta = {delta} for labels and generator "
            f"together; clients train on {values([one.train_on for one in chosen])} records."
        )
        if any(one.server_epochs for one in chosen):
            epochs = values([one.server_epochs for one in chosen])
            line += f" The server trains the first model on the pool for {epochs} epoch{'' if epochs == '1' else 's'}."
        return [line]

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for a wrong length of ``client_gammas``, or if neither clients nor server use the pool."""
        used = isinstance(experiment.algorithm, UsingPool) and experiment.algorithm.uses_pool
        if self.train_on == "own" and not self.server_epochs and not used:
            raise ValueError(
                "preprocess.train_on=own without preprocess.server_epochs leaves the pool of synthetic records without "
                "a use: set preprocess.server_epochs=5, or another number"
            )
        if self.client_gammas and len(self.client_gammas) != experiment.clients:
            raise ValueError(
                f"preprocess.client_gammas has {len(self.client_gammas)} values for {experiment.clients} clients: "
                "give one value for each client, or set preprocess.gamma for all clients"
            )

    def check_data(self, dataset: Dataset, features: str) -> None:
        """Raise UserError if the generator does not support the shape or the range of the records of ``dataset``.

        Also raise UserError if epsilon is too small for the label selection. ``features``: the experiment's setting.
        """
        self.generator_epsilon(dataset.num_classes)
        if isinstance(self.generator, ShapedGenerator):
            self.generator.check_shape(dataset.input_shape)
        if features == "none":
            check_unit_range(dataset, "da-fl")
        elif isinstance(self.generator, Marginals):
            raise UserError(
                f"preprocess.generator marginals is for tables, and features={features} gives records of "
                f"{dataset.input_shape[0]} features that are no table columns: set preprocess.generator=gaussian"
            )

    def check_budget(self, experiment: Choices, records: Sequence[int], num_classes: int) -> None:
        """Raise UserError if no client can make useful synthetic records within ``epsilon``.

        ``records``: the number of records of each client.
        """
        del experiment
        refused = ""
        for held in sorted(set(records), reverse=True):
            bill = self.generator.bill(held, num_classes, self.generator_epsilon(num_classes), self.delta)
            if not bill.refused:
                return
            refused = refused or bill.refused
        if refused:
            raise UserError(
                f"preprocess.epsilon={self.epsilon:g} lets no client release a synthetic record (for the largest "
                f"client, {refused}): set a larger epsilon, fewer clients, or preprocess=none"
            )

    def labels_epsilon(self, num_classes: int) -> float | None:
        """Return the epsilon per record of a client's label selection, at delta 0; None without noise."""
        return None if math.isinf(self.epsilon) else self.labels.total_epsilon(num_classes)

    @property
    def replaces_records(self) -> bool:
        """Return True if clients train only on the pool (the synthetic records of all clients)."""
        return self.train_on == "synthetic"

    @property
    def supplies_rounds(self) -> bool:
        """Return True if clients train on the pool (the synthetic records of all clients) in the rounds."""
        return self.train_on != "own"

    def gamma_of(self, client: int) -> float:
        """Return the client's gamma, the approximate number of its synthetic records for each of its own records."""
        return self.client_gammas[client] if self.client_gammas else self.gamma

    def release_of(self, client: int, seed: int, features: str = "") -> str:
        """Return the name under which a privacy ledger lists the synthetic records of ``client``.

        Each ledger covers one client's records. Two sets of synthetic records with the same name in a ledger have the
        same settings. They can differ only if their noise keys (the secret seeds of the noise) differ. ``features``:
        the version of the public transform of the records; empty if the records are not transformed.
        """
        afterwards = {"train_on", "server_epochs", "gamma", "client_gammas"}
        settings = self.model_dump(mode="json", exclude=afterwards) | {"gamma": self.gamma_of(client)}
        return hashlib.sha256(
            json.dumps([settings, seed, client, *filter(None, [features])], sort_keys=True).encode()
        ).hexdigest()[:16]

    def generator_epsilon(self, num_classes: int) -> float:
        """Return eps_0, the epsilon that remains for the generator.

        It is the setting ``epsilon`` minus the epsilon of the label selection. Raises UserError if this difference is
        not positive.
        """
        used = self.labels.total_epsilon(num_classes)
        left = self.epsilon - used
        if left <= 0:
            raise UserError(
                f"preprocess.epsilon = {self.epsilon:g} is used up by the labels ({used:g}): set a larger epsilon, "
                "or a smaller preprocess.labels.epsilon"
            )
        return left
