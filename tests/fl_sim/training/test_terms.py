"""Every part of a plan has the gradient of its formula, written plainly here, record by record."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fl_sim.errors import UserError
from fl_sim.local_plan import Ascent, Batch, Contrast, Distillation, LocalPlan, LossTerm, Mix, Pull, Suppression
from fl_sim.params import detached
from fl_sim.seeding import rng, torch_kept
from fl_sim.training.features import feature_sums, head_of
from fl_sim.training.loop import train
from fl_sim.training.losses import contrasted, distilled, suppressed
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

CLASSES, FEATURES = 4, 5
LABELS = {
    "all classes": [0, 1, 2, 3, 1, 0, 2], "absent classes": [3, 1, 1, 3, 1, 3, 3], "one class": [2] * 7,
    "one record": [1],
}  # fmt: skip
Plain = Callable[["Seen"], torch.Tensor]


def model() -> nn.Module:
    with torch_kept():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, FEATURES), nn.Tanh(), nn.Linear(FEATURES, CLASSES)).double()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


START = detached(model().named_parameters())
PREVIOUS = {name: value + 0.3 * noise(*value.shape, seed=7) for name, value in START.items()}


class Seen:
    """What the plain formulas see of a batch under some weights, with Python's loops."""

    def __init__(self, params: Params, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        network = model()
        body = network[:2]
        self.labels = labels.tolist()
        self.logits = functional_call(network, dict(params), (inputs,))
        self.anchor = functional_call(network, START, (inputs,))
        self.features, self.received, self.previous = (
            functional_call(body, {name: value for name, value in tensors.items() if name[0] == "0"}, (inputs,))
            for tensors in (params, START, PREVIOUS)
        )


def cross_entropy(seen: Seen, scale: list[float] | None = None, shift: list[float] | None = None) -> torch.Tensor:
    scale, shift = scale or [1.0] * CLASSES, shift or [0.0] * CLASSES
    total = torch.zeros((), dtype=torch.float64)
    for logits, label in zip(seen.logits, seen.labels, strict=True):
        exponents = [scale[c] * logits[c] + shift[c] for c in range(CLASSES) if shift[c] != float("-inf")]
        total = total + torch.stack(exponents).exp().sum().log() - scale[label] * logits[label] - shift[label]
    return total / len(seen.labels)


def distillation(seen: Seen, classes: list[bool], temperature: float, *, exclude_true: bool) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for own, received, label in zip(seen.logits, seen.anchor, seen.labels, strict=True):
        kept = [c for c in range(CLASSES) if classes[c] and not (exclude_true and c == label)]
        if kept:
            q, p = ((logits[kept] / temperature).exp() for logits in (own, received))
            p, q = p / p.sum(), q / q.sum()
            total = total + temperature**2 * (p * (p.log() - q.log())).sum()
    return total / len(seen.labels)


def suppression(seen: Seen, shares: list[float]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for c, share in enumerate(shares):
        if share > 0:
            sizes = [
                logits[c].exp() / share / CLASSES if label != c else torch.ones((), dtype=torch.float64)
                for logits, label in zip(seen.logits, seen.labels, strict=True)
            ]
            total = total + share * torch.stack(sizes).mean().log()
    return total


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt())


def contrast(seen: Seen, temperature: float) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for z, received, previous in zip(seen.features, seen.received, seen.previous, strict=True):
        near, far = (cosine(z, other) / temperature for other in (received, previous))
        total = total - (near.exp() / (near.exp() + far.exp())).log()
    return total / len(seen.labels)


def pull(seen: Seen, prototypes: torch.Tensor, present: list[bool]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for z, label in zip(seen.features, seen.labels, strict=True):
        total = total + (((z - prototypes[label]) ** 2).sum() if present[label] else 0)
    return total / len(seen.labels)


SHIFT, SCALE, SHARES = [0.5, -1.0, 2.0, 0.0], [1.0, 0.3, 2.0, 1.0], [0.4, 0.0, 0.2, 0.4]
ONLY_2 = [False, False, True, False]
SOME, PROTOTYPES = [True, True, False, True], noise(CLASSES, FEATURES, seed=3)
PARTS: dict[str, tuple[LocalPlan, Plain]] = {
    "shift": (LocalPlan(logit_shift=torch.tensor(SHIFT)), lambda seen: cross_entropy(seen, shift=SHIFT)),
    "scale": (LocalPlan(logit_scale=torch.tensor(SCALE)), lambda seen: cross_entropy(seen, scale=SCALE)),
    "both": (
        LocalPlan(logit_scale=torch.tensor(SCALE), logit_shift=torch.tensor(SHIFT)),
        lambda seen: cross_entropy(seen, SCALE, SHIFT),
    ),
    "distillation": (
        LocalPlan(distillation=Distillation(0.7, 2.0)),
        lambda seen: cross_entropy(seen) + 0.7 * distillation(seen, [True] * 4, 2.0, exclude_true=False),
    ),
    "not-true distillation": (
        LocalPlan(distillation=Distillation(0.7, 3.0, exclude_true=True)),
        lambda seen: cross_entropy(seen) + 0.7 * distillation(seen, [True] * 4, 3.0, exclude_true=True),
    ),
    "distillation of some classes": (
        LocalPlan(distillation=Distillation(0.7, classes=torch.tensor(SOME))),
        lambda seen: cross_entropy(seen) + 0.7 * distillation(seen, SOME, 1.0, exclude_true=False),
    ),
    "distillation of one class or none": (
        LocalPlan(distillation=Distillation(0.7, classes=torch.tensor(ONLY_2), exclude_true=True)),
        lambda seen: cross_entropy(seen) + 0.7 * distillation(seen, ONLY_2, 1.0, exclude_true=True),
    ),
    "suppression": (
        LocalPlan(suppression=Suppression(torch.tensor(SHARES), 0.5)),
        lambda seen: cross_entropy(seen) + 0.5 * suppression(seen, SHARES),
    ),
    "contrast": (
        LocalPlan(contrast=Contrast(5.0, 0.5, PREVIOUS)),
        lambda seen: cross_entropy(seen) + 5.0 * contrast(seen, 0.5),
    ),
    "pull": (
        LocalPlan(pull=Pull(PROTOTYPES, torch.tensor(SOME), 0.3)),
        lambda seen: cross_entropy(seen) + 0.3 * pull(seen, PROTOTYPES, SOME),
    ),
    "all at once": (
        LocalPlan(
            logit_shift=torch.tensor(SHIFT), suppression=Suppression(torch.tensor(SHARES)),
            distillation=Distillation(0.1, classes=torch.tensor(SOME)), contrast=Contrast(1.0, 0.5, PREVIOUS),
            pull=Pull(PROTOTYPES, torch.tensor(SOME), 0.3),
        ),
        lambda seen: cross_entropy(seen, shift=SHIFT) + suppression(seen, SHARES) + contrast(seen, 0.5)
        + 0.1 * distillation(seen, SOME, 1.0, exclude_true=False) + 0.3 * pull(seen, PROTOTYPES, SOME),
    ),
}  # fmt: skip


def records(labels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return noise(len(labels), 6, seed=1), torch.tensor(labels, dtype=torch.int64)


def trained(plan: LocalPlan, labels: list[int], start: Params, **others: Any) -> Trained:
    """Where training from the received model ends, having been moved to ``start`` by a first step."""
    settings = LocalSettings(**{  # type: ignore[arg-type]
        "learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0, "batch_size": 100, "epochs": 1, **others,
    })  # fmt: skip
    task = LocalTask(1, 0, 1, len(labels), settings, start)
    return train(model(), task, plan, *records(labels), rng(0, "batches"))


def flat(params: Params) -> torch.Tensor:
    return torch.cat([value.flatten() for value in params.values()])


def second_gradient(plan: LocalPlan, labels: list[int]) -> tuple[Params, torch.Tensor]:
    """Return where the first step from the received model led, and the gradient there.

    By the difference of one epoch and two of one batch each; at the received model itself distillation has none.
    """
    first, second = (trained(plan, labels, START, epochs=epochs, learning_rate=0.5).params for epochs in (1, 2))
    return first, (flat(first) - flat(second)) / 0.5


def gradient(plain: Plain, params: Params, labels: list[int]) -> torch.Tensor:
    weights = {name: value.clone().requires_grad_() for name, value in params.items()}
    found = torch.autograd.grad(plain(Seen(weights, *records(labels))), list(weights.values()))
    return torch.cat([value.flatten() for value in found])


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_the_gradient_of_its_formula(part: str, labels: list[int]) -> None:
    plan, plain = PARTS[part]
    there, found = second_gradient(plan, labels)
    torch.testing.assert_close(found, gradient(plain, there, labels), rtol=1e-6, atol=1e-8)
    assert trained(plan, labels, START).loss == pytest.approx(float(plain(Seen(START, *records(labels)))), rel=1e-6)


def test_not_true_distillation_is_that_of_fedntds_released_code() -> None:
    """algorithms/fedntd/criterion.py of Lee-Gihun/FedNTD at 043269e, which leaves T^2 out: its loss and gradient."""
    own = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.0, 1.0, 2.0, -1.0], [0.3, 0.1, -0.7, 2.2]], requires_grad=True)
    received = torch.tensor([[0.2, 1.0, -0.5, 2.0], [1.0, -1.0, 0.0, 0.4], [2.0, 0.6, 0.1, -0.3]])
    released = {1.0: (1.3087374, [0.1116951, -0.1892877, 0.0775926, 0, 0, 0.0436180, 0.1185660, -0.1621840,
                                  -0.2253150, 0, -0.0246645, 0.2499796]),
                3.0: (0.1675249, [0.0143062, -0.0283745, 0.0140682, 0, 0, 0.0103498, 0.0144443, -0.0247942,
                                  -0.0248236, 0, -0.0074456, 0.0322692])}  # fmt: skip
    for temperature, (loss, slopes) in released.items():
        batch = seen_as_batch(own, torch.tensor([3, 0, 1]), logits_of=lambda params, _: received)
        found = distilled(batch, 1.0, temperature, True).mean() / temperature**2  # noqa: FBT003
        assert float(found.detach()) == pytest.approx(loss, abs=1e-6)
        assert torch.autograd.grad(found, own)[0].flatten().tolist() == pytest.approx(slopes, abs=1e-6)


def test_the_contrast_is_that_of_released_code() -> None:
    """algorithms/moon/criterion.py of Lee-Gihun/FedNTD at fd7e20c: its loss and gradient."""
    z = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 2.0]], requires_grad=True)
    features = {"previous": torch.tensor([[0.2, 1.0, -0.5], [1.0, -1.0, 0.0]]),
                "received": torch.tensor([[2.0, 0.6, 0.1], [0.3, 0.1, -0.7]])}  # fmt: skip
    batch = seen_as_batch(
        torch.zeros(2, 4), torch.tensor([0, 1]), features=z, data={"w": torch.zeros(1)}, anchor={"w": torch.ones(1)},
        features_of=lambda params, _: features["received" if params["w"] else "previous"],
    )  # fmt: skip
    released = {0.5: (0.6816983, [-0.0198745, -0.0137728, -0.0153424, 0.1000973, -0.3270902, 0.1635451]),
                3.0: (0.6572253, [-0.0109863, -0.0076134, -0.0084810, 0.0126616, -0.0413746, 0.0206873])}  # fmt: skip
    for temperature, (loss, slopes) in released.items():
        found = contrasted(batch, 1.0, temperature).mean()
        assert float(found.detach()) == pytest.approx(loss, abs=1e-6)
        assert torch.autograd.grad(found, z)[0].flatten().tolist() == pytest.approx(slopes, abs=1e-6)


def test_suppression_stops_where_only_records_of_the_class_are_left() -> None:
    """Without a lower bound, as the paper has it, training runs away with it."""
    labels, shares = torch.tensor([0, 2, 2]), torch.tensor([0.5, 0.0, 0.5, 0.0])
    logits = torch.full((3, 4), -1e4, requires_grad=True)
    found = suppressed(seen_as_batch(logits, labels, data={"shares": shares}), 2.0)
    assert float(found.detach()) == pytest.approx(math.log(1 / 3) + math.log(2 / 3))
    assert not torch.autograd.grad(found, logits)[0].any()


def seen_as_batch(logits: torch.Tensor, labels: torch.Tensor, **others: Any) -> Batch:
    never: Any = lambda *_: pytest.fail("not asked for")  # noqa: E731
    weights = torch.full((len(labels),), 1 / len(labels))
    parts = {"anchor": {}, "data": {}, "logits_of": never, "features_of": never, **others}
    return Batch(inputs=torch.zeros(len(labels), 1), labels=labels, weights=weights, logits=logits, params={}, **parts)


def test_a_shift_of_minus_infinity_takes_a_class_out() -> None:
    shift = [0.0, 0.5, float("-inf"), float("-inf")]
    labels = [0, 1, 1, 0]
    there, found = second_gradient(LocalPlan(logit_shift=torch.tensor(shift)), labels)
    expected = gradient(lambda seen: cross_entropy(seen, shift=shift), there, labels)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    head = {name: value for name, value in there.items() if name[0] == "2"}
    assert all(torch.equal(value[2:], START[name][2:]) for name, value in head.items())


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("adaptive", [False, True])
def test_ascent_takes_the_gradient_uphill(share: float, *, adaptive: bool) -> None:
    labels, ascent = LABELS["all classes"], Ascent(0.3, adaptive=adaptive, share=share)
    here, weights = gradient(cross_entropy, START, labels), flat(START)
    step = weights**2 * here / (weights * here).norm() if adaptive else here / here.norm()
    above = dict(zip(START, (weights + 0.3 * step).split([value.numel() for value in START.values()]), strict=True))
    uphill = {name: above[name].view(value.shape) for name, value in START.items()}
    expected = (1 - share) * here + share * gradient(cross_entropy, uphill, labels)
    result = trained(LocalPlan(ascent=ascent), labels, START)
    torch.testing.assert_close(flat(START) - flat(result.params), expected, rtol=1e-9, atol=1e-12)
    assert result.loss == trained(LocalPlan(), labels, START).loss  # that at w, not uphill


def test_the_gradient_is_scaled_before_offset_pull_and_weight_decay() -> None:
    labels, offset = LABELS["all classes"], {name: noise(*value.shape, seed=4) for name, value in START.items()}
    plan = LocalPlan(gradient_scale=0.1, gradient_offset=offset, proximal_mu=0.7)
    first, second = (trained(plan, labels, START, epochs=n, weight_decay=0.01).params for n in (1, 2))
    own = gradient(cross_entropy, first, labels)
    expected = 0.1 * own + flat(offset) + 0.7 * (flat(first) - flat(START)) + 0.01 * flat(first)
    torch.testing.assert_close(flat(first) - flat(second), expected, rtol=1e-7, atol=1e-8)


NOTHING = {
    "shift": LocalPlan(logit_shift=torch.zeros(CLASSES)), "scale": LocalPlan(logit_scale=torch.ones(CLASSES)),
    "distillation": LocalPlan(distillation=Distillation(0.0)), "radius": LocalPlan(ascent=Ascent(0.0)),
    "share": LocalPlan(ascent=Ascent(0.1, share=0.0)), "scale of gradients": LocalPlan(gradient_scale=1.0),
    "suppression": LocalPlan(suppression=Suppression(torch.tensor(SHARES), 0.0)),
    "contrast": LocalPlan(contrast=Contrast(0.0, 0.5, PREVIOUS)), "sums": LocalPlan(class_features=True),
    "pull": LocalPlan(pull=Pull(PROTOTYPES, torch.tensor(SOME), 0.0)),
    "nobody present": LocalPlan(pull=Pull(PROTOTYPES, torch.zeros(CLASSES, dtype=torch.bool), 1.0)),
    "no class": LocalPlan(distillation=Distillation(1.0, classes=torch.zeros(CLASSES, dtype=torch.bool))),
}  # fmt: skip


@pytest.mark.parametrize("part", NOTHING)
def test_without_strength_it_is_plain_sgd_bit_for_bit(part: str) -> None:
    settings = {"epochs": 2, "batch_size": 3, "momentum": 0.9, "learning_rate": 0.1}
    plain = trained(LocalPlan(), LABELS["all classes"], START, **settings)
    found = trained(NOTHING[part], LABELS["all classes"], START, **settings)
    assert torch.equal(flat(found.params), flat(plain.params))
    assert found.loss == plain.loss


def test_a_previous_model_that_is_the_received_one_has_gradient_zero_exactly() -> None:
    settings = {"epochs": 3, "batch_size": 3, "learning_rate": 0.5}
    plain = trained(LocalPlan(), LABELS["all classes"], START, **settings)
    found = trained(LocalPlan(contrast=Contrast(5.0, 0.5, START)), LABELS["all classes"], START, **settings)
    assert torch.equal(flat(found.params), flat(plain.params))


@pytest.mark.parametrize("part", PARTS)
def test_a_client_without_records_stays_where_it_is(part: str) -> None:
    result = trained(PARTS[part][0], [], START)
    assert (result.num_steps, result.loss) == (0, None)
    assert torch.equal(flat(result.params), flat(START))


def test_sums_of_features_are_those_of_the_new_model_class_by_class() -> None:
    result = trained(LocalPlan(class_features=True), LABELS["absent classes"], START)
    inputs, labels = records(LABELS["absent classes"])
    features = Seen(result.params, inputs, labels).features
    expected = torch.stack([features[labels == c].sum(0) for c in range(CLASSES)])
    assert result.feature_sums is not None
    torch.testing.assert_close(result.feature_sums, expected)
    nobody = trained(LocalPlan(class_features=True), [], START).feature_sums
    assert nobody is not None
    assert torch.equal(nobody, torch.zeros(CLASSES, FEATURES, dtype=nobody.dtype))


def test_sums_of_features_do_not_depend_on_how_records_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = records(LABELS["all classes"])
    whole = feature_sums(model(), START, inputs, labels)
    monkeypatch.setattr("fl_sim.training.features._BATCH", 2)
    torch.testing.assert_close(feature_sums(model(), START, inputs, labels), whole)


class Named(nn.Module):
    """A model whose last linear layer is not where logits come from."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES)
        self.aside = nn.Linear(2, 2)


class Headless(nn.Module):
    """A model without a linear layer."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def test_the_head_is_what_is_named_so_or_the_last_linear_layer() -> None:
    network, named = model(), Named()
    assert head_of(network) is network[2]  # type: ignore[index]
    assert head_of(named) is named.head
    with pytest.raises(UserError, match=r"needs features.* but Headless has none: set self.head"):
        head_of(Headless())


def test_a_head_that_is_called_twice_is_refused() -> None:
    class Twice(Named):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(inputs) + self.head(-inputs)
            return out

    with pytest.raises(UserError, match="the head of Twice is called 2 times"):
        feature_sums(Twice(), {}, torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("part", [{"logit_shift": torch.zeros(CLASSES)}, {"logit_scale": torch.ones(CLASSES)}])
def test_mixing_beside_adjusted_logits_is_refused(part: dict[str, Any]) -> None:
    mix = Mix(torch.zeros(1, 6), torch.zeros(1, CLASSES), 0.1, linearise=True)
    with pytest.raises(UserError, match=r"cannot shift or scale logits .* leave one of them out"):
        LocalPlan(mix=mix, **part)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (LocalPlan(logit_shift=torch.zeros(1)), r"logit_shift must have the shape \(4,\) .* not \(1,\)"),
        (LocalPlan(logit_scale=torch.zeros(3)), r"logit_scale must have the shape \(4,\)"),
        (LocalPlan(distillation=Distillation(1.0, classes=torch.ones(2) > 0)), r"a distillation must have the shape"),
        (LocalPlan(suppression=Suppression(torch.ones(5))), r"suppression must have the shape \(4,\)"),
        (LocalPlan(pull=Pull(torch.zeros(4, 3), torch.ones(4) > 0, 1.0)), r"prototypes must have the shape \(4, 5\)"),
        (LocalPlan(pull=Pull(PROTOTYPES, torch.ones(1) > 0, 1.0)), r"present classes must have the shape \(4,\)"),
    ],
)  # fmt: skip
def test_tensors_of_another_shape_are_refused_by_name(plan: LocalPlan, message: str) -> None:
    with pytest.raises(UserError, match=message):
        trained(plan, [0, 1], START)


def test_a_previous_model_of_other_names_is_refused() -> None:
    with pytest.raises(ValueError, match=r"previous weights do not fit the model: 2.weight is missing"):
        trained(
            LocalPlan(contrast=Contrast(1.0, 0.5, {"0.weight": START["0.weight"], "0.bias": START["0.bias"]})),
            [0],
            START,
        )


def test_a_term_of_ones_own_sees_features() -> None:
    def length(batch: Batch) -> torch.Tensor:
        assert batch.features is not None
        assert torch.equal(batch.features, batch.features_of(batch.params, batch.inputs))
        return batch.features.pow(2).sum(1)

    plan = LocalPlan(loss_term=LossTerm(length, features=True))
    there, found = second_gradient(plan, LABELS["all classes"])

    def plain(seen: Seen) -> torch.Tensor:
        return cross_entropy(seen) + seen.features.pow(2).sum() / len(seen.labels)

    torch.testing.assert_close(found, gradient(plain, there, LABELS["all classes"]), rtol=1e-6, atol=1e-8)


def test_a_record_without_features_has_no_direction_and_a_contrast_does_not_move_it() -> None:
    """Divided by the least norm that there is, its gradient would be some 1e8 and end the run."""
    network = nn.Sequential(nn.Linear(6, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES)).double()
    params = {**START, "0.bias": START["0.bias"] - 100}
    task = LocalTask(1, 0, 1, 7, LocalSettings(0.1, 0.0, 0.0, 7, 2), params)
    given = noise(7, 6), torch.tensor(LABELS["all classes"])
    plain, found = (
        train(network, task, plan, *given, rng(0, "test"))
        for plan in (LocalPlan(), LocalPlan(contrast=Contrast(2.0, 0.5, START)))
    )
    assert all(torch.equal(value, plain.params[name]) for name, value in found.params.items())
