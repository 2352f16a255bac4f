"""How far steps of SGD with momentum reach (Wang et al. 2020, section 4.1), and which algorithms share."""

import pytest

from strategies.algorithm import Sharing, accumulated_momentum
from strategies.fedavg import FedAvg
from strategies.fedmix import FedMix, NaiveMix


@pytest.mark.parametrize(
    ("num_steps", "momentum", "reach"),
    [
        (0, 0.9, 0.0), (1, 0.9, 1.0), (2, 0.9, 2.9), (3, 0.9, 5.61), (10, 0.9, 41.381059609), (940, 0.9, 9310.0),
        (0, 0.0, 0.0), (1, 0.0, 1.0), (7, 0.0, 7.0), (940, 0.0, 940.0), (2, 0.5, 2.5),
    ],
)  # fmt: skip
def test_reach_has_the_papers_values(num_steps, momentum, reach):
    assert accumulated_momentum(num_steps, momentum) == pytest.approx(reach, rel=1e-11, abs=1e-15)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 0.99])
def test_reach_is_the_distance_of_steps_along_a_constant_gradient(momentum):
    velocity, distance = 0.0, 0.0
    for num_steps in range(1, 200):
        velocity = momentum * velocity + 1.0
        distance += velocity
        assert accumulated_momentum(num_steps, momentum) == pytest.approx(distance, rel=1e-10)


def test_only_the_mixing_algorithms_share_before_the_first_round():
    assert [isinstance(algorithm, Sharing) for algorithm in (FedMix(), NaiveMix(), FedAvg())] == [True, True, False]
