"""How a run measures its models beside the test set: the settings, and the records that are held out for it."""

import math
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, PlainValidator, SerializerFunctionWrapHandler, model_serializer, model_validator

from fl_sim.errors import UserError
from fl_sim.seeding import rng
from fl_sim.settings import Settings
from partitions import Parts


def _share_or_given(value: Any) -> float | Literal["given"]:
    if value == "given":
        return "given"
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 <= share < 1:
        raise ValueError("it is a share of every client's records, at least 0 and below 1, or given")
    return share


Validation: TypeAlias = Annotated[
    float | Literal["given"], PlainValidator(_share_or_given, json_schema_input_type=float | Literal["given"])
]
"""The share of every client's training records that is held out, or "given": records that the data come with."""


class Evaluate(Settings):
    """How the server's model is measured beside the test set.

    ``validation``: the share of every client's training records that is held out, rounded to whole records, at least
    one of a client that holds two or more; clients train on the rest (0: none is held out). The model is measured on
    the held-out records of all clients together, with their true labels and as each client sees them. A server that
    does so is a simulation's convenience: in a real federation clients would measure, and send counts. The test set has
    no part in it. "given" measures it on the validation records that the data set comes with instead (``x_val`` of an
    npz file), which no client holds.

    ``test``: when the test records are looked at: after every evaluated round ("rounds"), after the last alone
    ("last"), or "never", where settings are searched for by validation, or the test records are private.

    ``test_is_public``: the user says that the test records of data of their own are public. A run that promises privacy
    measures models on such records alone: what is measured is published, and no epsilon pays for it.

    ``patience``: the run stops once so many rounds have passed without a better validation accuracy than before (0: it
    does not). ``target_accuracy``: it stops once the validation accuracy is at least this (0: it does not).
    """

    validation: Validation = 0.0
    test: Literal["rounds", "last", "never"] = "rounds"
    test_is_public: bool = False
    patience: int = Field(0, ge=0)
    target_accuracy: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        for name in ("patience", "target_accuracy"):
            if (value := getattr(self, name)) and not self.validation:
                raise ValueError(
                    f"evaluate.{name}={value:g} stops a run by its validation accuracy, and nothing is held out for "
                    f"that: set evaluate.validation, for example to 0.1, or leave evaluate.{name} out"
                )
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what came later where it is not used, so that names and files of runs stay as they were."""
        written: dict[str, Any] = write(self)
        return {key: value for key, value in written.items() if key != "test_is_public" or value}

    @property
    def measures_nothing(self) -> bool:
        """Say whether models are measured on no records at all."""
        return self.test == "never" and not self.validation

    def tests(self, *, is_last: bool) -> bool:
        """Say whether the test records are looked at after an evaluated round."""
        return self.test == "rounds" or (self.test == "last" and is_last)


def held_out(shards: Parts, share: float, seed: int) -> tuple[Parts, Parts]:
    """Return (what each client trains on, what is held out of its records), both in the order of its shard.

    Raises UserError where a client would be left without records to train on, and where nothing would be held out.
    """
    chosen = np.zeros(len(shards.records), dtype=bool)
    for client in np.flatnonzero(shards.sizes > 1).tolist():
        own = chosen[shards.bounds[client] : shards.bounds[client + 1]]
        count = max(1, round(share * len(own)))
        if count == len(own):
            raise UserError(
                f"evaluate.validation={share:g} leaves client {client}, which holds {len(own)} records, none to "
                "train on: take a smaller share, or fewer clients"
            )
        own[rng(seed, "validation", client).permutation(len(own))[:count]] = True
    if not chosen.any():
        raise UserError(
            f"evaluate.validation={share:g} holds nothing out, as no client holds two records: leave it out, or have "
            "fewer clients"
        )
    return shards.where(~chosen), shards.where(chosen)
