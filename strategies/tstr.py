"""TSTR, "train on synthetic, test on real": classifiers train only on records from the clients' generators.

Esteban, Hyland and Raetsch 2017 (RCGAN), section 4.1. As in DPImageBench (Gong et al. 2025), several classifiers are
trained, and the classifier that is best on held-out *synthetic* records is tested.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from fl_sim.errors import UserError
from fl_sim.kinds import Choices, kind_of, replaces_records
from fl_sim.settings import Settings, known_model
from fl_sim.types import Dataset

DISCRIMINANT, QUADRATIC, OWN = "discriminant", "quadratic-discriminant", "model"
"""Names of classifiers: linear and quadratic discriminant analysis in closed form, and the experiment's own model.

All other names of classifiers are names of models.
"""


def _known_classifier(name: str) -> str:
    if name in {DISCRIMINANT, QUADRATIC, OWN}:
        return name
    try:
        return known_model(name)
    except UserError as error:
        raise UserError(f"{error}; or take {DISCRIMINANT}, {QUADRATIC} or {OWN} (the experiment's own)") from None


class Tstr(Settings):
    """The server trains classifiers only on the clients' synthetic records, and the best classifier is tested.

    ``classifiers``: names of models, "model" for the experiment's own model, and "discriminant" (linear) and
    "quadratic-discriminant" for discriminant analysis in closed form. Models are trained with the experiment's
    ``local`` settings. ``holdout``: the share of the synthetic records that is left out of training, and on which the
    best classifier is chosen. No test record is used for this choice. No client trains: nothing but the synthetic
    records is published.
    """

    kind: Literal["tstr"] = "tstr"
    title: ClassVar[str] = "TSTR"
    procedure: ClassVar[str] = "fl_sim.stages.tstr:TstrProcedure"
    starts_with: ClassVar[Mapping[str, Any]] = {
        "preprocess": {"kind": "da-fl", "train_on": "synthetic"},
        "local": {"epochs": 20, "optimizer": "adam", "learning_rate": 1e-3},
        "evaluate": {"test": "last"},
    }
    classifiers: tuple[Annotated[str, AfterValidator(_known_classifier)], ...] = Field(
        (DISCRIMINANT, "logistic", "mlp", OWN), min_length=1
    )
    holdout: float = Field(0.1, gt=0, lt=1)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings of rounds, such as attacks: no client trains, so there are no rounds."""
        preprocess = experiment.preprocess
        if not replaces_records(preprocess) or getattr(preprocess, "server_epochs", False):
            raise ValueError(
                "algorithm tstr trains only on synthetic records, at the server: take preprocess=da-fl with "
                "preprocess.train_on=synthetic and without preprocess.server_epochs"
            )
        for name, wanted in (("aggregator", "mean"), ("sampler", "full"), ("attack", "none"), ("calibrate", "none")):
            if (given := kind_of(getattr(experiment, name))) != wanted:
                raise ValueError(
                    f"algorithm tstr has no rounds, so {name} {given} would have no effect: leave {name} out"
                )
        if (batch_norm := experiment.local.batch_norm) != "none":
            raise ValueError(
                f"algorithm tstr cannot run with local.batch_norm={batch_norm}, as it averages no models: leave "
                "local.batch_norm out, and take models without running statistics"
            )

    def bound_rounds(self, rounds: int, dataset: Dataset) -> int:
        """Return 1: clients do not train in rounds, so the whole run counts as one round."""
        del rounds, dataset
        return 1

    def names(self, model: str) -> tuple[str, ...]:
        """Return the names of the classifiers to train, each name once.

        ``model``: the name that replaces "model", the experiment's own model.
        """
        return tuple(dict.fromkeys(model if name == OWN else name for name in self.classifiers))

    def check_size(self, num_records: int) -> None:
        """Raise UserError if ``num_records`` synthetic records are too few for a training and a held-out part."""
        if not 1 <= round(self.holdout * num_records) < num_records:
            raise UserError(
                f"algorithm.holdout={self.holdout:g} cannot split {num_records} synthetic records into training and "
                "held-out ones: take a larger preprocess.gamma, or another holdout"
            )

    def reports(self) -> str:
        """Return a phrase that names the evaluated model: the best classifier on held-out synthetic records."""
        return "the classifier that is best on held-out synthetic records"

    def note(self) -> str:
        """Return the note below result tables: one sentence on how the accuracy is measured."""
        return (
            "TSTR: classifiers train on the clients' synthetic records alone, at the server, and the classifier "
            f"with the best accuracy on held-out synthetic records ({100 * self.holdout:g} %) is tested on the real "
            "test records; there are no rounds."
        )
