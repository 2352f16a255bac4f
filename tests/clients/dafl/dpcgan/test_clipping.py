import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from clients.dafl.dpcgan import clipping
from clients.dafl.dpcgan.clipping import clipped_sum
from clients.dafl.dpcgan.nets import paper, small
from clients.dafl.dpcgan.training import Weights
from fl_sim.native.images import ImageDiscriminator
from fl_sim.native.kernel import load_kernel
from fl_sim.native.perceptrons import Perceptron, Shown

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Networks and pairs, and who sums their gradients."""

    pairs: Callable[[int], tuple[nn.Sequential, Batch]]
    is_compiled: bool = False

    def __call__(self, number: int) -> tuple[nn.Sequential, Batch]:
        return self.pairs(number)

    def sum(self, net: nn.Sequential, real: torch.Tensor, fake: torch.Tensor, norm: float) -> torch.Tensor:
        if not self.is_compiled:
            return clipped_sum(net, real, fake, norm)
        kernel, why_not = load_kernel()
        if kernel is None:
            pytest.skip(why_not)
        if isinstance(net[0], nn.Conv2d):  # classes are planes of ones
            planes = net[0].in_channels - 1
            weights = Weights([net])  # the compiled code reads one vector
            assert len(weights.vector)
            images = [
                Shown(half[:, :1].flatten(1).numpy(), half[:, 1:, 0, 0].argmax(1).numpy()) for half in (real, fake)
            ]
            return torch.from_numpy(
                ImageDiscriminator(kernel, net, planes).clipped_sum(*images, norm * (1 - clipping.MARGIN))
            )
        rows = [Shown(half.numpy()) for half in (real, fake)]
        return torch.from_numpy(Perceptron(kernel, net).clipped_sum(*rows, norm * (1 - clipping.MARGIN)))


def small_case(pairs: int, classes: int = 3) -> tuple[nn.Sequential, Batch]:
    torch.manual_seed(0)
    nets = small((1, 8, 8), classes, latent_dim=4, resolution=8, widths=(12, 12))
    one_hot = torch.eye(3)[torch.randint(3, (2, pairs))][..., :classes]
    real, fake = (nets.join(torch.rand(pairs, 64), one_hot[half]) for half in range(2))
    return nets.discriminator, (real, fake)


def paper_case(pairs: int) -> tuple[nn.Sequential, Batch]:
    torch.manual_seed(0)
    nets = paper((1, 28, 28), 2, latent_dim=4)
    classes = torch.eye(2)[torch.randint(2, (2, pairs))]
    real, fake = (nets.join(nets.view(torch.rand(pairs, 1, 28, 28) * 2 - 1), classes[half]) for half in range(2))
    return nets.discriminator, (real, fake)


SMALL, COMPILED, PAPER = Case(small_case), Case(small_case, is_compiled=True), Case(paper_case)
IMAGES = Case(paper_case, is_compiled=True)
every_case = pytest.mark.parametrize(
    "case", [SMALL, COMPILED, PAPER, IMAGES], ids=["small", "compiled", "paper", "paper compiled"]
)
perceptrons = pytest.mark.parametrize("case", [SMALL, COMPILED], ids=["small", "compiled"])


def loss_of(scores: torch.Tensor, pairs: int) -> torch.Tensor:
    scores = scores.flatten()
    return functional.softplus(-scores[:pairs]).sum() + functional.softplus(scores[pairs:]).sum()


def one_by_one(net: nn.Sequential, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return every pair's gradient, (pairs, parameters), by a backward pass of its own."""
    rows = []
    for x, made in zip(real, fake, strict=True):
        loss = loss_of(net(torch.stack([x, made])), 1)
        rows.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(net.parameters()))]))
    return torch.stack(rows).double()


def by_opacus(net: nn.Sequential, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return every pair's gradient, (pairs, parameters), from hooks: one backward pass, then real and fake added."""
    from opacus.grad_sample import GradSampleModule  # noqa: PLC0415 (loads slowly, and every worker collects all tests)

    hooked = GradSampleModule(net, loss_reduction="sum")
    loss_of(hooked(torch.cat([real, fake])), len(real)).backward()
    samples = torch.cat([weight.grad_sample.flatten(1) for weight in net.parameters()], 1)
    hooked.to_standard_module()
    return (samples[: len(real)] + samples[len(real) :]).double()


def clipped(gradients: torch.Tensor, norm: float) -> torch.Tensor:
    return (gradients * (norm / gradients.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("oracle", [one_by_one, by_opacus])
@every_case
@pytest.mark.parametrize("norm", [0.3, 3.0, float("inf")])
def test_the_sum_is_that_of_every_pairs_own_gradient_clipped_as_one_vector(
    oracle: Callable[..., torch.Tensor], case: Case, norm: float
) -> None:
    net, (real, fake) = case(6)
    gradients = oracle(net, real, fake)
    expected = clipped(gradients, norm * (1 - clipping.MARGIN))
    found = case.sum(net, real, fake, norm)
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(gradients.norm(dim=1).max()))


@every_case
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3, 1e30])
@pytest.mark.parametrize("norm", [0.1, 1.0])
def test_no_record_moves_the_sum_by_more_than_the_clipping_norm(case: Case, scale: float, norm: float) -> None:
    net, (real, fake) = case(20)
    real[0] *= scale
    moved = case.sum(net, real, fake, norm) - case.sum(net, real[1:], fake[1:], norm)
    assert moved.norm() <= norm


@perceptrons
def test_a_record_that_pulls_alone_moves_the_sum_by_all_of_the_clipping_norm(case: Case) -> None:
    net, (real, fake) = case(20)
    moved = case.sum(net, real, fake, 0.1) - case.sum(net, real[1:], fake[1:], 0.1)
    assert moved.norm() == pytest.approx(0.1, rel=2e-3)


@perceptrons
def test_clipping_in_large_batches_stays_within_the_margin_for_rounding(case: Case) -> None:
    net, (real, fake) = case(6000)
    moved = case.sum(net, real, fake, 1.0) - case.sum(net, real[1:], fake[1:], 1.0)
    assert moved.norm() <= 1.0


@perceptrons
def test_a_pair_is_clipped_as_one_vector_and_not_half_by_half(case: Case) -> None:
    net, (real, _) = case(1)
    # A fake that equals its record cancels its pull, up to the difference of the two errors at the score: the pair is
    # far shorter than either half, and a bound that would cut both leaves it whole.
    with torch.no_grad():
        score = net(real).flatten()
    own = torch.autograd.grad(net(real).sum(), list(net.parameters()))
    length = torch.cat([part.flatten() for part in own]).norm() * (torch.sigmoid(score) - torch.sigmoid(-score)).abs()
    torch.testing.assert_close(
        case.sum(net, real, real, float(2 * length)).norm().float(), length[0], rtol=1e-3, atol=0.0
    )


@every_case
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_record_that_is_not_finite_counts_as_zero(case: Case, value: float) -> None:
    net, (real, fake) = case(5)
    real[2].view(-1)[3] = value
    others = [0, 1, 3, 4]
    for norm in (0.5, float("inf")):
        found, expected = case.sum(net, real, fake, norm), case.sum(net, real[others], fake[others], norm)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@perceptrons
def test_no_pairs_sum_to_zero(case: Case) -> None:
    net, (real, fake) = case(2)
    assert torch.equal(
        case.sum(net, real[:0], fake[:0], 1.0),
        torch.zeros(sum(weight.numel() for weight in net.parameters()), dtype=torch.float64),
    )


def with_weights(net: nn.Sequential, scale: float) -> nn.Sequential:
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(scale)
    return net


@every_case
@pytest.mark.parametrize("scale", [10.0, 1e4])
@pytest.mark.parametrize("score", [1e-4, 1e-2])
def test_no_pair_counts_for_more_than_the_clipping_norm_however_large_the_weights(
    case: Case, scale: float, score: float
) -> None:
    # A fake that equals its record, of a score near zero: two long gradients cancel but for a small rest. Scalar
    # products in float32 lose that rest, and the pair is not clipped at all: it counted for 3.3 times the bound.
    net, (real, _) = case(3)
    with_weights(net, scale)
    for row in range(1 if case is PAPER else 3):  # the paper's networks take a hundred times as long
        with torch.no_grad():
            [*_, last] = [layer for layer in net if isinstance(layer, nn.Linear | nn.Conv2d)]
            last.bias += score - net(real[[row]]).flatten()
        bound = 0.3 * float(case.sum(net, real[[row]], real[[row]], float("inf")).norm())
        moved = case.sum(net, real, real, bound) - case.sum(net, *[real[[i for i in range(3) if i != row]]] * 2, bound)
        for contribution in (case.sum(net, real[[row]], real[[row]], bound), moved):
            assert contribution.norm() <= bound


@every_case
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_pair_counts_for_the_same_whatever_pairs_are_beside_it(case: Case, scale: float) -> None:
    net, (real, fake) = case(40)
    with_weights(net, scale)
    parts = [case.sum(net, real[chosen], fake[chosen], 0.7) for chosen in (slice(0, 1), slice(1, 19), slice(19, 40))]
    torch.testing.assert_close(sum(parts), case.sum(net, real, fake, 0.7), rtol=0, atol=1e-12)


ODD = (0.0, 1e-30, -1e4, float("nan"), float("inf"))


@st.composite
def steps(draw: st.DrawFn, odd: tuple[float, ...] = ODD) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return a discriminator and (real, fake) pairs of which some are out of the ordinary."""
    numbers = st.integers
    torch.manual_seed(draw(numbers(0, 10**6)))
    inputs, wide, pairs = draw(numbers(1, 40)), draw(numbers(1, 20)), draw(numbers(0, 60))
    widths = [inputs, *[wide] * draw(numbers(0, 3)), 1]
    net = nn.Sequential()
    for entered, left in itertools.pairwise(widths):
        if len(net):
            net.append(draw(st.sampled_from([nn.LeakyReLU(0.2), nn.ReLU()])))
        net.append(nn.Linear(entered, left, bias=draw(st.booleans())))
    with_weights(net, draw(st.sampled_from([0.0, 1.0, 1e3])))
    real, fake = torch.rand(2, pairs, inputs)
    for _ in range(draw(numbers(0, 3 if pairs else 0))):
        rows = draw(st.sampled_from([real, fake]))
        rows[draw(numbers(0, pairs - 1))] *= draw(st.sampled_from(odd))
    if 1e30 in odd and pairs and draw(st.booleans()):  # of a pair whose halves are equal the gradients cancel
        fake[0] = real[0]
    return net, real, fake


@given(steps(), st.sampled_from([1e-3, 1.0, float("inf")]))
def test_the_compiled_sum_is_pytorchs_to_rounding(
    step: tuple[nn.Sequential, torch.Tensor, torch.Tensor], norm: float
) -> None:
    net, real, fake = step
    found, expected = COMPILED.sum(net, real, fake, norm), SMALL.sum(net, real, fake, norm)
    alone = [COMPILED.sum(net, real[[row]], fake[[row]], norm).norm() for row in range(len(real))]
    assert (found - expected).norm() <= 1e-4 * sum(alone)


@given(steps((*ODD, 1e30)), st.sampled_from([1e-3, 1.0, 100.0]), st.data())
def test_one_pair_more_or_less_moves_the_compiled_sum_by_the_norm_at_most(
    step: tuple[nn.Sequential, torch.Tensor, torch.Tensor], norm: float, data: st.DataObject
) -> None:
    net, real, fake = step
    gone = data.draw(st.integers(0, max(0, len(real) - 1)))
    others = [row for row in range(len(real)) if row != gone]
    moved = COMPILED.sum(net, real, fake, norm) - COMPILED.sum(net, real[others], fake[others], norm)
    assert moved.isfinite().all()
    assert moved.norm() <= norm
