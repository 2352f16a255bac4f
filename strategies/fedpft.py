"""FedPFT: the server trains the head on features drawn from the clients' mixtures (Beitollahi et al. 2024)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from clients.mixtures import Covariance, MixtureForm
from fl_sim.errors import UserError
from strategies.feature_sums import MOST_BYTES
from strategies.head_training import HeadTraining
from strategies.one_message import OneMessage


class FedPFT(OneMessage):
    """Each client sends one Gaussian mixture of its features for each class; the server trains the head on samples.

    A record's feature is the input of the initial model's last layer. Client i fits a mixture of ``components``
    Gaussians to each of its classes c, by scikit-learn's expectation maximisation with default settings. It sends the
    parameters of the mixtures, and the numbers n_ic of records. The server draws n_ic features from each mixture
    (Beitollahi et al. 2024, algorithm 1), and trains the head on these features by AdamW and cross-entropy. The head
    starts from the initial model's head.

    ``components``: the number K of Gaussians; at most one for each record of the class. ``covariance``: "full", "diag"
    or "spherical". With K = 1, the Gaussian has the mean and the covariance of the class's features.
    ``added_variance``: scikit-learn's reg_covar, which is added to all variances. ``learning_rate``, ``epochs`` and
    ``batch_size``: settings of the head's training at the server. The default values come from the released code
    (Flower's baseline ``fedpft``).

    Deviations from the released code: numbers are sent with 64 bits, not 16. Classes with at most K records are also
    used. The fit ends at scikit-learn's tolerance, 1e-3. Mixtures have no noise, so this method is not private. The
    paper's private variant has one noisy Gaussian for each class. To use it, set ``preprocess=da-fl`` and
    ``preprocess.generator=gaussian``, and train on the drawn vectors with ``algorithm=tstr``.
    """

    kind: Literal["fedpft"] = "fedpft"
    title: ClassVar[str] = "FedPFT"
    stage: ClassVar[str] = "fl_sim.stages.fedpft:HeadFromMixtures"
    components: int = Field(1, ge=1, le=1000)
    covariance: Covariance = "spherical"
    added_variance: float = Field(1e-6, gt=0)
    learning_rate: float = Field(1e-4, gt=0)
    epochs: int = Field(50, ge=1, le=10**6)
    batch_size: int = Field(32, ge=1)

    @property
    def form(self) -> MixtureForm:
        """The settings of the Gaussian mixtures: number of components, type of covariance, added variance."""
        return MixtureForm(self.components, self.covariance, self.added_variance)

    @property
    def training(self) -> HeadTraining:
        """The settings of the head's training at the server: learning rate, epochs, batch size, AdamW."""
        return HeadTraining("algorithm", self.learning_rate, self.epochs, self.batch_size, "adamw")

    def check_head(self, num_features: int, num_classes: int) -> None:
        """Raise UserError if a client's mixtures are too large for one message."""
        if (size := 8 * num_classes * self.form.width(num_features)) > MOST_BYTES:
            raise UserError(
                f"fedpft: mixtures of {num_features} features and {num_classes} classes are {size >> 20} MiB a client, "
                f"more than {MOST_BYTES >> 20}: take fewer components, or algorithm.covariance=diag or spherical"
            )

    def reports(self) -> str:
        """Return a phrase that describes the evaluated model."""
        return "the initial model with a head that the server trained on features drawn from the clients' mixtures"

    def note(self) -> str:
        """Return the note below result tables: one sentence on how the model is made."""
        return "FedPFT: clients send Gaussian mixtures of the initial model's features once; there are no rounds."
