"""FedMix and NaiveMix (Yoon et al. 2021): the losses record by record, and what clients share."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_sim.errors import RunError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.local_plan import LocalPlan, Mix
from fl_sim.params import detached
from fl_sim.seeding import rng
from fl_sim.simulation.run import run
from fl_sim.training.loop import train
from fl_sim.training.losses import mixed_losses
from fl_sim.types import LocalSettings, LocalTask
from strategies.fedmix import FedMix, NaiveMix, averages

SHAPE, CLASSES = (2, 3), 4


def mixed_loss(model, inputs, labels, mean, proportions, weight, *, linearise):
    return mixed_losses(model, inputs, labels, (mean, proportions), weight, linearise=linearise).mean()


def _model(activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), activation(), nn.Linear(5, CLASSES)).double()


def _batch(size=5):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, *SHAPE, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    partner = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return inputs, labels, partner, torch.tensor([0.4, 0.0, 0.2, 0.4], dtype=torch.float64)


def _negative_log(logits, proportions):
    """-sum_c p_c log softmax_c, in so many words."""
    return -(proportions * (logits - logits.logsumexp(0))).sum()


def _fedmix_of_one(model, x, y, x_bar, y_bar, lam):
    point = ((1 - lam) * x).requires_grad_()
    own = _negative_log(model(point[None])[0], functional.one_hot(y, CLASSES).double())
    (slope,) = torch.autograd.grad(own, point, create_graph=True)
    return (1 - lam) * own + lam * _negative_log(model(point[None])[0], y_bar) + lam * (slope * x_bar).sum()


def _naivemix_of_one(model, x, y, x_bar, y_bar, lam):
    logits = model(((1 - lam) * x + lam * x_bar)[None])[0]
    own = _negative_log(logits, functional.one_hot(y, CLASSES).double())
    return (1 - lam) * own + lam * _negative_log(logits, y_bar)


def _value_and_gradient(model, loss):
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("weight", [0.05, 0.2])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize(("linearise", "of_one"), [(True, _fedmix_of_one), (False, _naivemix_of_one)])
def test_loss_and_gradient_are_the_mean_over_records(weight, activation, linearise, of_one):
    model = _model(activation)
    inputs, labels, x_bar, y_bar = _batch()
    ours = _value_and_gradient(model, mixed_loss(model, inputs, labels, x_bar, y_bar, weight, linearise=linearise))
    one_by_one = [of_one(model, x, y, x_bar, y_bar, weight) for x, y in zip(inputs, labels, strict=True)]
    theirs = _value_and_gradient(model, torch.stack(one_by_one).mean())
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_the_third_term_does_not_shrink_with_the_batch():
    # A batch of B copies of one record has that record's loss; a slope of the batch mean would be B times too small.
    model = _model()
    inputs, labels, x_bar, y_bar = _batch(1)
    alone = mixed_loss(model, inputs, labels, 100 * x_bar, y_bar, 0.1, linearise=True)
    copies = mixed_loss(model, inputs.expand(8, *SHAPE), labels.expand(8), 100 * x_bar, y_bar, 0.1, linearise=True)
    without = mixed_loss(model, inputs, labels, 0 * x_bar, y_bar, 0.1, linearise=True)
    torch.testing.assert_close(copies, alone, rtol=1e-12, atol=0)
    assert abs(alone - without) > 0.1  # the term is there at all


def test_the_gradient_flows_through_the_third_term():
    # f(x) = (0, w x): l = log(1 + e^{w x}) for label 0, dl/dx = w s with s = sigmoid(w x). w = 2, x = 1, lambda = 0.1,
    # x_bar = 3, y_bar = (1, 0): L = l(0.9) + 0.3 w s, dL/dw = 0.9 s + 0.3 (s + w s (1 - s) 0.9)
    model = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [2.0]]))
    loss = mixed_loss(
        model, torch.ones(1, 1).double(), torch.tensor([0]), torch.tensor([3.0]).double(),
        torch.tensor([1.0, 0.0]).double(), 0.1, linearise=True,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, model.weight)
    s = 1 / (1 + np.exp(-1.8))
    assert float(loss.detach()) == pytest.approx(np.log(1 + np.exp(1.8)) + 0.3 * 2 * s, rel=1e-12)
    assert float(gradient[1, 0]) == pytest.approx(0.9 * s + 0.3 * (s + 2 * s * (1 - s) * 0.9), rel=1e-12)


def test_fedmix_is_naivemix_to_first_order_on_a_linear_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, CLASSES)).double()
    inputs, labels, x_bar, y_bar = _batch()

    def difference(weight):
        mixed, expanded = (
            mixed_loss(model, inputs, labels, x_bar, y_bar, weight, linearise=linearise).item()
            for linearise in (False, True)
        )
        return abs(mixed - expanded)

    # O(lambda^2): half of lambda, a quarter of the difference; an error of first order would give a half
    assert difference(0.01) / difference(0.005) == pytest.approx(4, rel=0.02)
    assert difference(0.01) < 1e-3


@pytest.mark.parametrize("one_minus", [0, 1])
def test_with_and_without_one_minus_lambda_the_last_term_leaves_an_error_of_second_order(one_minus):
    """The paper's equation has lambda, its algorithm lambda (1 - lambda): NaiveMix is as near to either (tanh network).

    Without the term the error is of first order, so that a ratio of four says something.
    """
    model = _model()
    inputs, labels, x_bar, y_bar = _batch()

    def errors(weight):
        exact, with_term, without = (
            mixed_loss(model, inputs, labels, mean, y_bar, weight, linearise=linearise).item()
            for mean, linearise in ((x_bar, False), (x_bar, True), (0 * x_bar, True))
        )
        term = (with_term - without) * (1 - weight) ** one_minus
        return exact - without - term, exact - without

    (one, first), (half, first_of_half) = errors(0.002), errors(0.001)
    assert one / half == pytest.approx(4, rel=0.02)
    assert first / first_of_half == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize(("algorithm", "linearise"), [(FedMix(), True), (NaiveMix(), False)])
def test_plan_mixes_with_the_pool(algorithm, linearise):
    pool = {"inputs": torch.zeros(3, *SHAPE), "labels": torch.zeros(3, CLASSES)}
    task = LocalTask(1, 0, 1, 5, LocalSettings(0.1, 0.0, 0.0, 5, 1), {}, pool=pool)
    mix = algorithm.plan(task).mix
    assert (mix.weight, mix.linearise) == (0.1, linearise)
    assert mix.inputs is pool["inputs"]
    assert mix.labels is pool["labels"]


def test_with_an_empty_pool_training_is_plain():
    pool = {"inputs": torch.zeros(0, *SHAPE), "labels": torch.zeros(0, CLASSES)}
    task = LocalTask(1, 0, 1, 5, LocalSettings(0.1, 0.0, 0.0, 5, 1), {}, pool=pool)
    assert FedMix().plan(task) == LocalPlan()


@pytest.mark.parametrize(("linearise", "of_one"), [(True, _fedmix_of_one), (False, _naivemix_of_one)])
def test_training_draws_one_partner_a_batch_from_the_whole_pool(linearise, of_one):
    inputs, labels, _, _ = _batch(10)
    generator = torch.Generator().manual_seed(2)
    pool_inputs = torch.randn(4, *SHAPE, generator=generator, dtype=torch.float64)
    pool_labels = torch.softmax(torch.randn(4, CLASSES, generator=generator, dtype=torch.float64), 1)
    model = _model()
    task = LocalTask(1, 0, 1, 10, LocalSettings(0.1, 0.0, 0.0, 4, 2), detached(model.named_parameters()))
    plan = LocalPlan(mix=Mix(pool_inputs, pool_labels, 0.2, linearise))
    trained = train(model, task, plan, inputs, labels, rng(0, "test"))

    plain, draws, partners = _model(), rng(0, "test"), set()
    for _ in range(2):
        for batch in torch.from_numpy(draws.permutation(10)).split(4):
            j = int(draws.integers(4))
            partners.add(j)
            losses = [of_one(plain, inputs[i], labels[i], pool_inputs[j], pool_labels[j], 0.2) for i in batch]
            gradients = torch.autograd.grad(torch.stack(losses).mean(), list(plain.parameters()))
            with torch.no_grad():
                for weight, gradient in zip(plain.parameters(), gradients, strict=True):
                    weight.sub_(0.1 * gradient)
    assert len(partners) > 1
    torch.testing.assert_close(trained.params, detached(plain.named_parameters()), rtol=1e-11, atol=1e-13)


def _records(size):
    """Record i is i everywhere, of class i mod 4, so that a mean says which records are in it."""
    return torch.arange(size, dtype=torch.float32).reshape(-1, 1, 1).expand(-1, *SHAPE), torch.arange(size) % CLASSES


def test_averages_are_means_of_disjoint_groups_and_leave_the_rest_out():
    # Record i is 4^i at one pixel: base-4 digits of a sum say how often each record is in it.
    size, group = 11, 3
    inputs = (4.0 ** torch.arange(size, dtype=torch.float64)).reshape(-1, 1)
    labels = torch.arange(size) % CLASSES
    shared = averages(inputs, labels, CLASSES, group, rng(0, "share", 1))
    members = []
    for mean, proportions in zip(shared["inputs"], shared["labels"], strict=True):
        total = round(float(mean) * group)
        digits = [total // 4**i % 4 for i in range(size)]
        assert set(digits) <= {0, 1}
        chosen = [i for i, digit in enumerate(digits) if digit]
        assert len(chosen) == group
        counts = [sum(i % CLASSES == c for i in chosen) for c in range(CLASSES)]
        assert proportions.tolist() == pytest.approx([count / group for count in counts])
        members += chosen
    assert len(members) == 9  # 11 = 3 groups of 3, and 2 left over
    assert len(set(members)) == 9


@pytest.mark.parametrize("algorithm", [FedMix(records_per_average=4), NaiveMix(records_per_average=4)])
def test_shared_proportions_add_up_to_one(algorithm):
    inputs, labels = _records(30)
    shared = algorithm.share(inputs, labels, CLASSES, rng(0, "share", 0))
    assert shared["inputs"].shape == (7, *SHAPE)
    assert shared["labels"].shape == (7, CLASSES)
    assert shared["labels"].sum(1).tolist() == [1.0] * 7
    assert shared["labels"].dtype == torch.float32


@pytest.mark.parametrize("size", [0, 1, 4])
def test_a_client_with_too_few_records_shares_nothing(size):
    shared = FedMix(records_per_average=5).share(*_records(size), CLASSES, rng(0, "share", 0))
    assert {name: tuple(value.shape) for name, value in shared.items()} == {"inputs": (0, *SHAPE), "labels": (0, 4)}


def test_groups_are_random_and_seeded():
    inputs, labels = _records(40)
    one, again, other = (
        averages(inputs, labels, CLASSES, 5, rng(0, "share", client))["inputs"] for client in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_where_nobody_has_records_enough_to_share_the_run_is_refused(tmp_path):
    settings = {"model": "logistic", "rounds": 1, "algorithm": {"kind": "fedmix", "records_per_average": 100_000}}
    with pytest.raises(RunError, match=r"no client has enough records .* records_per_average=100000 .* fewer clients"):
        run(experiment_from(settings), tmp_path / "run")
