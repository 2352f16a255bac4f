"""Who takes part in a round. Statistical tests have fixed seeds and tolerances of more than 4 sigma."""

from fractions import Fraction
from itertools import combinations
from math import sqrt

import numpy as np
import pytest

from fl_sim.errors import UserError
from fl_sim.seeding import rng
from strategies.samplers import Cyclic, Everyone, FixedSize, Poisson

ROUNDS = 20_000


def _draws(sampler, num_clients, rounds=ROUNDS):
    """A (rounds, clients) table of who took part, all from one stream."""
    generator = rng(0, "test")
    present = np.zeros((rounds, num_clients), dtype=bool)
    for row in present:
        row[sampler.sample(num_clients, generator.random, 1)] = True
    return present


def test_everyone_is_everyone_every_round():
    assert Everyone().sample(5, rng(0, "sampler", 1).random, 1).tolist() == [0, 1, 2, 3, 4]
    assert Everyone().expected_size(5) == 5.0


def test_fixed_size_draws_that_many_distinct_clients_in_order():
    for server_round in range(200):
        clients = FixedSize(cohort_size=7).sample(20, rng(0, "sampler", server_round).random, server_round)
        assert len(set(clients.tolist())) == 7
        assert clients.tolist() == sorted(clients.tolist())
        assert set(clients.tolist()) <= set(range(20))


def test_fixed_size_takes_those_with_the_smallest_coins():
    for server_round in range(50):
        clients = FixedSize(cohort_size=30).sample(1_000, rng(0, "sampler", server_round).random, server_round)
        coins = rng(0, "sampler", server_round).random(1_000)
        assert clients.tolist() == np.sort(np.argsort(coins)[:30]).tolist()


def test_fixed_size_draws_again_where_coins_are_equal():
    draws = iter([np.array([0.5, 0.25, 0.5]), np.array([0.75, 0.5, 0.25])])
    assert FixedSize(cohort_size=1).sample(3, lambda _: next(draws), 1).tolist() == [2]


def test_fixed_size_is_uniform_over_all_subsets():
    present = _draws(FixedSize(cohort_size=2), 5)
    p = 1 / 10  # of each of the 10 pairs
    for pair in combinations(range(5), 2):
        share = present[:, pair].all(axis=1).mean()
        assert abs(share - p) < 4.5 * sqrt(p * (1 - p) / ROUNDS)


def test_fixed_size_of_all_is_everyone():
    assert FixedSize(cohort_size=6).sample(6, rng(0, "sampler", 1).random, 1).tolist() == [0, 1, 2, 3, 4, 5]


def test_fixed_size_expects_its_size_and_refuses_more_clients_than_there_are():
    assert FixedSize(cohort_size=3).expected_size(10) == 3.0
    with pytest.raises(UserError, match="fixed-size:11 needs more than the run's 10 clients"):
        FixedSize(cohort_size=11).sample(10, rng(0, "sampler", 1).random, 1)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_poisson_takes_every_client_at_the_rate_and_independently(rate):
    num_clients = 8
    present = _draws(Poisson(sampling_rate=rate), num_clients)
    variance = rate * (1 - rate)
    assert np.abs(present.mean(axis=0) - rate).max() < 4.5 * sqrt(variance / ROUNDS)
    # independence: the cohort size is binomial, and every pair meets at rate^2
    sizes = present.sum(axis=1)
    assert abs(sizes.mean() - num_clients * rate) < 4.5 * sqrt(num_clients * variance / ROUNDS)
    fourth = num_clients * variance * (1 + 3 * (num_clients - 2) * variance)  # central moment of the binomial
    assert abs(sizes.var() - num_clients * variance) < 4.5 * sqrt((fourth - (num_clients * variance) ** 2) / ROUNDS)
    meet = rate**2
    for first, second in combinations(range(num_clients), 2):
        assert abs((present[:, first] & present[:, second]).mean() - meet) < 4.5 * sqrt(meet * (1 - meet) / ROUNDS)
    # and from round to round
    again = (present[1:] & present[:-1]).mean()
    assert abs(again - meet) < 4.5 * sqrt(meet * (1 - meet) * 3 / (ROUNDS * num_clients))


def test_poisson_may_draw_nobody_and_expects_a_fraction():
    assert any(len(Poisson(sampling_rate=0.1).sample(3, rng(0, "sampler", r).random, r)) == 0 for r in range(20))
    assert Poisson(sampling_rate=0.1).expected_size(25) == 2.5


def test_poisson_at_rate_one_is_everyone():
    assert all(len(Poisson(sampling_rate=1.0).sample(50, rng(0, "sampler", r).random, r)) == 50 for r in range(50))


@pytest.mark.parametrize("sampler", [FixedSize(cohort_size=10), Poisson(sampling_rate=0.2)])
def test_samples_are_seeded_and_differ_from_round_to_round(sampler):
    def cohorts(seed):
        return [
            tuple(sampler.sample(50, rng(seed, "sampler", server_round).random, server_round))
            for server_round in range(1, 21)
        ]

    assert cohorts(0) == cohorts(0)
    assert len(set(cohorts(0))) == 20
    assert set(cohorts(0)).isdisjoint(cohorts(1))
    assert all(list(cohort) == sorted(cohort) for cohort in cohorts(0))


def test_equal_coins_are_drawn_again():
    draws = iter([[0.25, 0.5, 0.25, 0.75], [0.5, 0.75, 0.25, 0.0]])
    assert FixedSize(cohort_size=2).sample(4, lambda _: np.array(next(draws)), 1).tolist() == [2, 3]


@pytest.mark.parametrize("rate", [0.1, 0.3, 1.0, 2.0**-53, 1.5 * 2.0**-53, 2.0**-53 + 2.0**-80, 1e-9])
def test_nobody_takes_part_more_often_than_at_the_rate(rate):
    # a coin is k / 2^53: count the k around the rate for which it says yes
    around = int(rate * 2**53) + np.arange(-3, 4)
    coins = around[(around >= 0) & (around < 2**53)] * 2.0**-53
    yes = coins[Poisson(sampling_rate=rate).sample(len(coins), lambda _: coins, 1)]
    chance = Fraction(float(yes.max())) + Fraction(1, 2**53)  # all coins up to that one
    assert chance <= Fraction(rate) < chance + Fraction(1, 2**53)


def test_a_rate_that_coins_cannot_express_is_refused():
    with pytest.raises(ValueError, match="no client would ever take part"):
        Poisson(sampling_rate=1e-320)


def test_cyclic_gives_every_client_one_turn_in_as_many_rounds_as_there_are_groups():
    def no_coins(_):
        raise AssertionError("at rate 1 nobody is drawn")

    sampler = Cyclic(groups=3)
    turns = [sampler.sample(8, no_coins, server_round).tolist() for server_round in range(1, 8)]
    assert turns[:3] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert turns[3:6] == turns[:3]
    assert sampler.expected_size(8) == 8 / 3
    assert [one.rounds_apart for one in (sampler, Everyone(), FixedSize(), Poisson())] == [3, 1, 1, 1]


def test_cyclic_draws_the_clients_of_its_group_at_the_rate():
    sampler, generator = Cyclic(groups=2, sampling_rate=0.3), rng(0, "test")
    present = np.zeros((ROUNDS, 5), dtype=bool)
    for at, row in enumerate(present):
        row[sampler.sample(5, generator.random, at + 1)] = True
    assert not present[::2, 1::2].any()
    assert not present[1::2, ::2].any()
    share = np.concatenate([present[::2, ::2].ravel(), present[1::2, 1::2].ravel()])
    assert abs(share.mean() - 0.3) < 4.5 * sqrt(0.3 * 0.7 / share.size)
