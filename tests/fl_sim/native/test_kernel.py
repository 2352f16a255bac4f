"""The compiled trainer does what fl_sim.training.loop.train does, to float32 rounding, for any stack of its layers."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_sim.local_plan import Ascent, LocalPlan, Mix
from fl_sim.models import MODELS, ResidualBlock
from fl_sim.native.kernel import Kernel
from fl_sim.native.layers import describe
from fl_sim.native.request import Draws, KernelJob
from fl_sim.params import detached, flattened
from fl_sim.seeding import rng
from fl_sim.training.loop import train
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

ROUNDING = 2e-5
"""How far results may lie apart, as a share of how far training moved the model; 1e-7 to 6e-6 is seen."""
ONE_BIT = 0.1
"""How far they may where a ReLU or a pooling window was decided by the last bit of a number.

PyTorch in float32 ends as far from PyTorch in float64 then. Other records decide whether it was that: see ``agree``.
"""

COMPILED = [name for name in MODELS if name != "random-features"]  # whose cosine the compiled trainer lacks

torch.manual_seed(8)  # of the weights below: with some, the last bit of one number sends a gradient another way
PADDED = nn.Sequential(
    nn.Conv2d(2, 5, 4, 2, 1), nn.MaxPool2d(3, 2, 1), nn.ReLU(), nn.Conv2d(5, 7, (2, 3), padding=(1, 2)), nn.Flatten(),
    nn.ReLU(), nn.Linear(168, 10),
)  # fmt: skip
STRIDED = nn.Sequential(
    nn.ReLU(), nn.Conv2d(2, 7, 3, 2, 1), nn.MaxPool2d(2), nn.Conv2d(7, 3, 1, bias=False), nn.ReLU(), nn.MaxPool2d(2, 1),
    nn.Flatten(), nn.Linear(18, 11), nn.ReLU(), nn.Linear(11, 10, bias=False),
)  # fmt: skip
ROUTED = nn.Sequential(  # channels that are no multiple of a vector, odd sizes, ReLU behind the pooling and none at all
    nn.Conv2d(2, 20, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(20, 9, 3, padding=2), nn.MaxPool2d(2),
    nn.Conv2d(9, 6, 5, padding=4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 4 * 4, 10),
)  # fmt: skip


def records(count: int, shape: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + count)
    return torch.randn(count, *shape, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def like(params: Params, scale: float, seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(value.shape, generator=generator) for name, value in params.items()}


def both(
    kernel: Kernel,
    model: nn.Module,
    settings: LocalSettings,
    plan: LocalPlan,
    inputs: torch.Tensor,
    labels: torch.Tensor,
) -> tuple[LocalTask, Trained, Trained]:
    """Return the task, where PyTorch ends, and where the kernel does."""
    count, shape = len(labels), tuple(inputs.shape[1:])
    task = LocalTask(1, 0, 1, count, settings, detached(model.named_parameters()))
    expected = train(copy.deepcopy(model), task, plan, inputs, labels, rng(0, "test"))
    stack = describe(model, shape)
    assert stack is not None
    draws = Draws.of(task, plan, count, rng(0, "test"))
    return task, expected, kernel.train(stack, [KernelJob(task, plan, inputs, labels, draws)])[0]


def agree(
    kernel: Kernel, model: nn.Module, settings: LocalSettings, plan: LocalPlan, count: int, shape: tuple[int, ...]
) -> None:
    """Assert that both end at the same place to rounding, on one of three sets of records."""
    errors = []
    for seed in range(3):
        task, expected, found = both(kernel, model, settings, plan, *records(count, shape, seed))
        assert found.num_steps == expected.num_steps
        assert list(found.momentum_buffers) == list(expected.momentum_buffers)
        errors.append(
            max(
                far(found.params, expected.params, task.params),
                far(found.momentum_buffers, expected.momentum_buffers) if settings.momentum else 0.0,
                abs(found.loss / expected.loss - 1),
            )
        )
        if errors[-1] <= ROUNDING:
            break
    assert max(errors) <= ONE_BIT
    assert errors[-1] <= ROUNDING


def far(found: Params, expected: Params, start: Params | None = None) -> float:
    """Return how far ``found`` lies from ``expected``, as a share of how far that lies from ``start`` or from 0."""
    assert [(name, value.shape) for name, value in found.items()] == [
        (name, value.shape) for name, value in expected.items()
    ]
    flat = [torch.cat([value.double().reshape(-1) for value in params.values()]) for params in (found, expected)]
    moved = flat[1] - (torch.cat([value.double().reshape(-1) for value in start.values()]) if start else 0.0)
    return float((flat[0] - flat[1]).norm() / moved.norm())


@pytest.mark.parametrize("count", [1, 37, 150])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("niid-cnn", (1, 28, 28)), ("niid-cnn", (3, 32, 32)), ("dafl-cnn", (1, 8, 8)), ("dafl-cnn", (3, 14, 15)),
     ("mlp", (1, 8, 8)), ("mlp", (13,)), ("logistic", (1, 8, 8)), ("resnet", (3, 8, 10)), ("resnet", (1, 6, 6))],
)  # fmt: skip
def test_our_models_end_where_pytorch_does(kernel: Kernel, name: str, shape: tuple[int, ...], count: int) -> None:
    torch.manual_seed(1)
    settings = LocalSettings(0.01, 0.9, 1e-3, batch_size=64, epochs=1)
    agree(kernel, MODELS[name](shape, 10), settings, LocalPlan(), count, shape)


@pytest.mark.parametrize("batch_size", [1, 7, 16, 33, 100])
@pytest.mark.parametrize("model", [PADDED, STRIDED, ROUTED], ids=["padded", "strided", "routed"])
def test_any_kernel_stride_padding_and_batch_size(kernel: Kernel, model: nn.Module, batch_size: int) -> None:
    settings = LocalSettings(0.02, 0.5, 1e-3, batch_size, epochs=2)
    agree(kernel, model, settings, LocalPlan(), 41, (2, 13, 15))


def odd_block(channels: int, body: nn.Module, shortcut: nn.Module) -> ResidualBlock:
    block = ResidualBlock(channels, channels, 1)
    block.body, block.shortcut = body, shortcut
    return block


RESIDUAL = nn.Sequential(  # parts of every size, readers with different borders, pooling and ReLU within and behind
    nn.GroupNorm(1, 2), nn.ReLU(), nn.Conv2d(2, 6, 3, 2, 1),
    odd_block(8, nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.GroupNorm(6, 6, eps=0.1)), nn.Conv2d(6, 6, 5, padding=2)),
    odd_block(8, nn.Sequential(nn.ReLU(), nn.Conv2d(6, 9, 3, 2, 1)), nn.Conv2d(6, 9, 1, 2)),
    odd_block(8, nn.GroupNorm(3, 9), nn.Identity()), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(9, 10),
)  # fmt: skip


@pytest.mark.parametrize("count", [1, 41])
def test_residual_blocks_of_any_content(kernel: Kernel, count: int) -> None:
    settings = LocalSettings(0.02, 0.5, 1e-3, batch_size=33, epochs=2)
    agree(kernel, RESIDUAL, settings, LocalPlan(), count, (2, 13, 15))


@pytest.mark.parametrize("linearise", [True, False])
@pytest.mark.parametrize("model", [PADDED, STRIDED, ROUTED], ids=["padded", "strided", "routed"])
def test_mixed_losses(kernel: Kernel, model: nn.Module, *, linearise: bool) -> None:
    pool, labels = records(5, (2, 13, 15))
    proportions = (nn.functional.one_hot(labels, 10) + nn.functional.one_hot(labels.flip(0), 10)) / 2
    settings = LocalSettings(0.02, 0.5, 1e-3, batch_size=20, epochs=2)
    agree(kernel, model, settings, LocalPlan(mix=Mix(pool, proportions, 0.3, linearise)), 41, (2, 13, 15))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_offset_proximal_term_and_warm_buffers(kernel: Kernel, momentum: float) -> None:
    torch.manual_seed(4)
    model = MODELS["niid-cnn"]((1, 16, 16), 10)
    params = detached(model.named_parameters())
    plan = LocalPlan(like(params, 0.01, 3), proximal_mu=0.5, momentum_buffers=like(params, 0.02, 4))
    settings = LocalSettings(0.05, momentum, 1e-2, batch_size=16, epochs=3)
    agree(kernel, model, settings, plan, 50, (1, 16, 16))
    found = both(kernel, model, settings, plan, *records(50, (1, 16, 16)))[2]
    assert plan.momentum_buffers is not None
    assert torch.equal(
        plan.momentum_buffers["0.bias"], like(params, 0.02, 4)["0.bias"]
    )  # the caller's stay as they were
    for changed in (LocalPlan(plan.gradient_offset), LocalPlan(proximal_mu=0.5)):  # each of the parts counts
        other = both(kernel, model, settings, changed, *records(50, (1, 16, 16)))[2]
        assert not torch.equal(other.params["0.weight"], found.params["0.weight"])


def test_numbers_too_small_for_a_full_float32_count_as_zero_in_the_kernel_alone(kernel: Kernel) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 10))
    buffers = {name: torch.full_like(value, 1.2e-38) for name, value in detached(model.named_parameters()).items()}
    settings, plan = LocalSettings(0.1, 0.9, 0.0, 8, 1), LocalPlan(momentum_buffers=buffers)
    _, expected, found = both(kernel, model, settings, plan, torch.zeros(8, 1, 2, 2), torch.arange(8))
    assert expected.momentum_buffers["1.weight"].unique().tolist() == pytest.approx([0.9 * 1.2e-38])
    assert found.momentum_buffers["1.weight"].unique().tolist() == [0.0]
    assert float(torch.tensor(1e-30) * torch.tensor(1e-9)) > 0


def test_the_error_is_that_of_float32_and_no_more(kernel: Kernel) -> None:
    """Against the same training in float64 the kernel is as near as PyTorch, give or take a factor of three."""
    torch.manual_seed(3)
    shape, settings = (3, 16, 16), LocalSettings(0.01, 0.9, 1e-4, batch_size=16, epochs=2)
    model = MODELS["dafl-cnn"](shape, 10)
    _, expected, found = both(kernel, model, settings, LocalPlan(), *records(60, shape))
    exact = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(exact.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    inputs, labels = records(60, shape)
    generator = rng(0, "test")
    for _ in range(2):
        for batch in torch.split(torch.from_numpy(generator.permutation(60)), 16):
            optimizer.zero_grad()
            functional.cross_entropy(exact(inputs[batch].double()), labels[batch]).backward()
            optimizer.step()
    truth = detached(exact.named_parameters())
    errors = [
        sum(float((result.params[name].double() - truth[name]).square().sum()) for name in truth) ** 0.5
        for result in (found, expected)
    ]
    assert 0 < errors[0] < 3 * errors[1]


def test_the_same_bits_every_time_and_in_every_thread(kernel: Kernel) -> None:
    model = MODELS["dafl-cnn"]((1, 8, 8), 10)
    settings = LocalSettings(0.05, 0.9, 1e-4, batch_size=16, epochs=2)

    def trained(_: int) -> Params:
        return both(kernel, model, settings, LocalPlan(), *records(50, (1, 8, 8)))[2].params

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(trained, range(6)))
    assert all(torch.equal(result[name], results[0][name]) for result in results for name in result)


@pytest.mark.parametrize("count", [1, 41, 150])
@pytest.mark.parametrize(
    ("model", "shape"),
    [*((MODELS[name]((3, 16, 16), 10), (3, 16, 16)) for name in COMPILED),
     (PADDED, (2, 13, 15)), (STRIDED, (2, 13, 15)), (ROUTED, (2, 13, 15)), (RESIDUAL, (2, 13, 15))],
    ids=[*COMPILED, "padded", "strided", "routed", "residual"],
)  # fmt: skip
def test_logits_are_those_of_pytorch(kernel: Kernel, model: nn.Module, shape: tuple[int, ...], count: int) -> None:
    inputs, _ = records(count, shape)
    stack = describe(model, shape)
    assert stack is not None
    params = flattened(detached(model.named_parameters())).flat
    with torch.no_grad():
        expected = model(inputs)
    found = kernel.infer(stack, params, inputs)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 4e-6 * float(expected.abs().max())
    assert torch.equal(kernel.infer(stack, params, inputs), found)
    alone = torch.cat([kernel.infer(stack, params, part) for part in torch.split(inputs, 17)])
    assert float((alone - found).abs().max()) <= 4e-6 * float(expected.abs().max())


@pytest.mark.parametrize("count", [1, 20])
def test_nan_in_the_model_stays_visible(kernel: Kernel, count: int) -> None:
    model = MODELS["niid-cnn"]((1, 16, 16), 10)
    with torch.no_grad():
        model[0].weight[2, 0, 0, 0] = torch.nan
    settings = LocalSettings(0.1, 0.9, 0.0, 16, 1)
    found = both(kernel, model, settings, LocalPlan(), *records(count, (1, 16, 16)))[2]
    assert found.loss != found.loss
    assert not torch.isfinite(found.params["11.weight"]).any()


def test_a_label_outside_the_classes_is_refused(kernel: Kernel) -> None:
    model = MODELS["logistic"]((4,), 3)
    stack = describe(model, (4,))
    assert stack is not None
    task = LocalTask(1, 0, 1, 2, LocalSettings(0.1, 0.0, 0.0, 2, 1), detached(model.named_parameters()))
    for wrong in (3, -1):
        draws = Draws.of(task, LocalPlan(), 2, rng(0, "test"))
        with pytest.raises(IndexError, match="outside of the model's 3 classes"):
            kernel.train(stack, [KernelJob(task, LocalPlan(), torch.zeros(2, 4), torch.tensor([0, wrong]), draws)])


@pytest.mark.parametrize("ascent", [None, Ascent(0.05), Ascent(0.5, adaptive=True, share=0.5)])
def test_layers_too_wide_for_a_cache_go_through_in_parts(kernel: Kernel, ascent: Ascent | None) -> None:
    """More than 1 MB of a minibatch's numbers, forward and back; an ascent's length is summed up as parts are known."""
    model = nn.Sequential(nn.Linear(5000, 21), nn.ReLU(), nn.Linear(21, 10))
    settings = LocalSettings(0.02, 0.9, 1e-3, batch_size=80, epochs=2)
    agree(kernel, model, settings, LocalPlan(ascent=ascent), 100, (5000,))
