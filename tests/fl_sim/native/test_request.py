"""The compiled trainer refuses, in words, whatever is not as long as it reads: no foreign memory, no dead process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim.errors import RunError
from fl_sim.local_plan import Contrast, Distillation, LocalPlan, Mix, Pull, Suppression
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.native.layers import FIELDS, Stack, describe
from fl_sim.native.request import Draws, KernelJob
from fl_sim.params import FlatParams, detached, flattened, layout_of
from fl_sim.seeding import rng, torch_kept
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params

SHAPE, COUNT = (2, 8, 8), 9
pytestmark = pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")


def model() -> nn.Module:
    with torch_kept():
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, 2, 1),
            nn.MaxPool2d(2, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        )  # fmt: skip


def mix(records: torch.Tensor, labels: torch.Tensor) -> Mix:
    return Mix(records, labels, weight=0.1, linearise=False)


def kernel() -> Kernel:
    loaded, _ = load_kernel()
    assert loaded is not None
    return loaded


def stack() -> Stack:
    described = describe(model(), SHAPE)
    assert described is not None
    return described


def lesson() -> KernelJob:
    """What is right in every part, so that each test can spoil one."""
    params = detached(model().named_parameters())
    like = {name: torch.zeros_like(value) for name, value in params.items()}
    pool = mix(torch.zeros(5, *SHAPE), torch.full((5, 3), 1 / 3))
    plan = LocalPlan(dict(like), dict(like), 0.1, momentum_buffers=dict(like), mix=pool)
    task = LocalTask(1, 0, 1, COUNT, LocalSettings(0.1, 0.9, 0.0, 4, 2), params)
    draws = Draws.of(task, plan, COUNT, rng(0, "test"))
    return KernelJob(task, plan, torch.zeros(COUNT, *SHAPE), torch.zeros(COUNT, dtype=torch.int64), draws)


def changed(params: Params, name: str, value: torch.Tensor | None) -> Params:
    """Return ``params`` with another tensor of this name, or with none."""
    return {key: given for key, given in {**params, name: value}.items() if given is not None}


def with_params(change: Callable[[Params], Params]) -> Callable[[KernelJob], KernelJob]:
    return lambda given: given._replace(task=replace(given.task, params=change(given.task.params)))


def with_plan(**parts: Any) -> Callable[[KernelJob], KernelJob]:
    return lambda given: given._replace(plan=replace(given.plan, **parts))


def with_terms(**parts: Any) -> Callable[[KernelJob], KernelJob]:
    """In place of the mixing pool."""
    return with_plan(mix=None, **parts)


def pull(classes: int, features: int, present: torch.Tensor) -> Pull:
    return Pull(torch.zeros(classes, features), present, 1.0)


def with_draws(**parts: Any) -> Callable[[KernelJob], KernelJob]:
    return lambda given: given._replace(draws=replace(given.draws, **parts))


def with_settings(**parts: Any) -> Callable[[KernelJob], KernelJob]:
    return lambda given: given._replace(task=replace(given.task, settings=replace(given.task.settings, **parts)))


def of_type(dtype: torch.dtype) -> Callable[[Params], Params]:
    return lambda params: {name: value.to(dtype) for name, value in params.items()}


def cut(params: Params) -> Params:
    whole = flattened(params)
    return FlatParams(whole.flat[:-1], whole.layout)


ALL = torch.ones(3, dtype=torch.bool)
ORDER, PARTNERS = lesson().draws.order, lesson().draws.partners
WRONG: dict[str, tuple[Callable[[KernelJob], KernelJob], str]] = {
    "no weights": (with_params(lambda _: {}), r"the weights do not fit the model: 0\.weight is missing"),
    "a weight less": (with_params(lambda had: changed(had, "8.bias", None)), r"8\.bias is missing"),
    "a weight more": (with_params(lambda had: changed(had, "9.bias", torch.zeros(1))), r"the model has no 9\.bias"),
    "a smaller weight": (
        with_params(lambda had: changed(had, "8.weight", torch.zeros(1, 4))), r"has the shape \(1, 4\), not \(3, 4\)"
    ),
    "a larger weight": (with_params(lambda had: changed(had, "8.bias", torch.zeros(400))), r"\(400,\), not \(3,\)"),
    "a vector cut off": (with_params(cut), r"the weights have the shape \(\d+,\) .* needs \(\d+,\)"),
    "doubles": (with_params(of_type(torch.float64)), "float64 on cpu; the compiled trainer needs .* float32"),
    "halves": (with_params(of_type(torch.float16)), "float16"),
    "offsets": (with_plan(gradient_offset={"0.bias": torch.zeros(4)}), "the gradient offsets do not fit the model"),
    "step offsets": (with_plan(step_offset={"0.bias": torch.zeros(4)}), "the step offsets do not fit the model"),
    "momentum": (with_plan(momentum_buffers={"0.bias": torch.zeros(4)}), "the momentum buffers do not fit the model"),
    "no records": (lambda had: had._replace(inputs=had.inputs[:0], labels=had.labels[:0]), "not 0 records"),
    "records too few": (lambda had: had._replace(inputs=had.inputs[:-1]), r"the records have the shape \(8, 2, 8, 8\)"),
    "records too many": (lambda had: had._replace(labels=had.labels[:-1]), r"the records .* needs \(8, 2, 8, 8\)"),
    "other channels": (lambda had: had._replace(inputs=had.inputs[:, :1]), r"needs \(9, 2, 8, 8\)"),
    "as many numbers in another shape": (lambda had: had._replace(inputs=had.inputs.reshape(9, 8, 4, 4)), "needs"),
    "vectors": (lambda had: had._replace(inputs=had.inputs.flatten(1)), r"the shape \(9, 128\)"),
    "bytes": (lambda had: had._replace(inputs=had.inputs.to(torch.uint8)), "uint8 on cpu"),
    "sparse records": (lambda had: had._replace(inputs=had.inputs.to_sparse()), "sparse_coo float32"),
    "short labels": (lambda had: had._replace(labels=had.labels.to(torch.int32)), "the labels .* int32"),
    "labels in a table": (lambda had: had._replace(labels=had.labels[:, None]), r"the labels have the shape \(9, 1\)"),
    "an epoch less": (with_draws(order=ORDER[:1]), r"the order of the records have the shape \(1, 9\)"),
    "a record less": (with_draws(order=ORDER[:, :-1]), r"\(2, 8\)"),
    "half the bytes": (with_draws(order=ORDER.astype(np.int32)), "int32"),
    "a place beyond the records": (with_draws(order=ORDER + 1), "indices of records that do not exist"),
    "a place before them": (with_draws(order=ORDER - 1), "indices of records that do not exist"),
    "too few partners": (with_draws(partners=PARTNERS[:-1]), r"the mixing partners have the shape \(5,\)"),
    "no partners": (with_draws(partners=PARTNERS[:0]), r"\(0,\)"),
    "a partner beyond the pool": (with_draws(partners=PARTNERS + 5), "indices of records that do not exist"),
    "a partner before it": (with_draws(partners=PARTNERS - 5), "indices of records that do not exist"),
    "a pool of other records": (
        with_plan(mix=mix(torch.zeros(5, 2, 8, 7), torch.zeros(5, 3))), r"the mixing pool's records have"
    ),
    "a pool of other classes": (
        with_plan(mix=mix(torch.zeros(5, *SHAPE), torch.zeros(5, 2))), r"the mixing pool's labels .*\(5, 2\)"
    ),
    "a pool of doubles": (
        with_plan(mix=mix(torch.zeros(5, *SHAPE).double(), torch.zeros(5, 3))), "the mixing pool's records"
    ),
    "a scale too short": (with_terms(logit_scale=torch.ones(2)), r"the scale of the logits have the shape \(2,\)"),
    "a shift in a table": (with_terms(logit_shift=torch.ones(1, 3)), r"the shift of the logits .*\(1, 3\)"),
    "a shift of doubles": (with_terms(logit_shift=torch.ones(3).double()), "the shift of the logits .* float64"),
    "numbers for a mask": (with_terms(distillation=Distillation(1.0, classes=torch.ones(3))), "classes .* float32"),
    "a mask too long": (with_terms(distillation=Distillation(1.0, classes=ALL.repeat(2))), r"\(6,\)"),
    "shares too few": (with_terms(suppression=Suppression(torch.ones(2))), r"the shares of the classes .*\(2,\)"),
    "no previous model": (with_terms(contrast=Contrast(1.0, 0.5, {})), "the contrast's previous weights do"),
    "prototypes too short": (with_terms(pull=pull(3, 3, ALL)), r"the prototypes .* needs \(3, 4\)"),
    "prototypes too few": (with_terms(pull=pull(2, 4, ALL)), r"the prototypes .* needs \(3, 4\)"),
    "classes too few": (with_terms(pull=pull(3, 4, ALL[:2])), r"the present classes .*\(2,\)"),
    "mixing with a teacher": (with_plan(distillation=Distillation(1.0)), "mixing together with distillation"),
    "no batch": (with_settings(batch_size=0), "in batches of 0"),
    "a batch below 0": (with_settings(batch_size=-4), "in batches of -4"),
    "no epoch": (with_settings(epochs=0), "for 0 epochs"),
}  # fmt: skip


@pytest.mark.parametrize("spoil", WRONG)
def test_what_does_not_fit_is_refused_in_words(spoil: str) -> None:
    spoiled, said = WRONG[spoil]
    with pytest.raises((ValueError, IndexError), match=said):
        kernel().train(stack(), [lesson(), spoiled(lesson())])
    kernel().train(stack(), [lesson()])  # what is right is taken


def test_a_batch_size_beyond_64_bits_is_all_records() -> None:
    [huge] = kernel().train(stack(), [with_settings(batch_size=2**64)(with_draws(partners=PARTNERS[:2])(lesson()))])
    [whole] = kernel().train(stack(), [with_settings(batch_size=9)(with_draws(partners=PARTNERS[:2])(lesson()))])
    assert huge.num_steps == 2
    assert torch.equal(flattened(huge.params).flat, flattened(whole.params).flat)


def test_a_pool_with_more_labels_than_records_is_refused_before_anything_is_drawn_from_it() -> None:
    """What FedMix's clients share: by its labels a partner was drawn whose record was foreign memory."""
    with pytest.raises(RunError, match="5 averaged records and 6 rows of class proportions"):
        mix(torch.zeros(5, *SHAPE), torch.full((6, 3), 1 / 3))


@pytest.mark.parametrize(
    ("params", "inputs", "said"),
    [(lambda had: had[:-1], lambda had: had, "the model's weights"),
     (lambda had: torch.cat([had, had]), lambda had: had, "the model's weights"),
     (lambda had: had.double(), lambda had: had, "float64"), (lambda had: had[:, None], lambda had: had, "weights"),
     (lambda had: had, lambda had: had[:, :, :7], "records"), (lambda had: had, lambda had: had.double(), "float64"),
     (lambda had: had, lambda had: had[0], "the records")],
)  # fmt: skip
def test_evaluation_refuses_likewise(params: Any, inputs: Any, said: str) -> None:
    weights, records = flattened(detached(model().named_parameters())).flat, torch.zeros(3, *SHAPE)
    with pytest.raises(ValueError, match=said):
        kernel().infer(stack(), params(weights), inputs(records))
    assert kernel().infer(stack(), weights, records).shape == (3, 3)
    assert kernel().infer(stack(), weights, records[:0]).shape == (0, 3)


def field(layer: int, **changes: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(layers: np.ndarray) -> np.ndarray:
        made = layers.copy()
        for name, value in changes.items():
            made[layer, FIELDS.index(name)] = value
        return made

    return change


def bits_of(number: float) -> int:
    return int(np.float32(number).view(np.int32))


# The rows: 0 convolution with pooling, 1 GroupNorm, 2 strided convolution, 3 pooling, 4 mean of a plane, 5 linear.
@pytest.mark.parametrize(
    "change",
    [*(field(2, kind=kind) for kind in (-1, 1, 2, 3, 4, 5, 6, 7, 8, 99)), field(5, kind=7), field(5, kind=0),
     *(field(2, dropout=bits_of(value)) for value in (1.0, -0.5, float("nan"))), field(5, dropout=bits_of(0.5)),
     field(4, kind=7), field(4, kind=8),
     field(2, stride_y=0), field(2, stride_x=-1), field(2, kernel_y=0), field(2, kernel_x=9),
     field(2, padding_y=3), field(2, padding_y=-1), field(2, kernel_y=70_000, padding_y=69_999),
     field(3, padding_x=2, kernel_x=3), field(3, kernel_y=5), field(2, outputs=0), field(2, outputs=-4),
     field(2, outputs=2**31 - 1), field(2, inputs=5), field(0, inputs=1), field(1, parts=0), field(1, parts=3),
     field(1, bias=0), field(2, source=3), field(2, source=-1), field(2, other=9), field(1, pooled=1),
     field(4, relu=1), field(5, inputs=5), field(5, source=1), lambda layers: layers[:-1], lambda layers: layers[:0],
     lambda layers: layers[::-1]],
)  # fmt: skip
def test_layers_that_are_none_or_do_not_fit_are_refused(change: Callable[[np.ndarray], np.ndarray]) -> None:
    right = stack()
    wrong = Stack(np.ascontiguousarray(change(right.layers)), right.input_shape, right.layout)
    given = lesson()._replace(plan=LocalPlan(), draws=Draws(ORDER, PARTNERS[:0]))
    with pytest.raises((ValueError, IndexError), match=r"do not fit records of shape|classes"):
        kernel().train(wrong, [given])
    kernel().train(right, [given])


@pytest.mark.parametrize("shape", [(2, 8, 0), (0, 8, 8), (-2, -8, 8), (2, 2**20, 2**20), (2**31 - 1, 2**31 - 1, 1)])
def test_a_model_for_records_of_other_sizes_than_they_have_reads_none(shape: tuple[int, ...]) -> None:
    right = stack()
    wrong = Stack(right.layers, np.array(shape, dtype=np.int32), right.layout)
    given = lesson()._replace(plan=LocalPlan(), draws=Draws(ORDER, PARTNERS[:0]))
    with pytest.raises(ValueError, match="the records have the shape"):
        kernel().train(wrong, [given])


@pytest.mark.parametrize("native", [True, False], ids=["compiled", "pytorch"])
@pytest.mark.parametrize(
    "spoil", ["a weight less", "a weight more", "a smaller weight", "offsets", "step offsets", "momentum"]
)
def test_whichever_trainer_takes_a_client_wrong_shapes_are_refused(spoil: str, *, native: bool) -> None:
    """PyTorch would stretch a smaller tensor to the size of its place, without a word."""
    task, plan, inputs, labels, _ = WRONG[spoil][0](lesson())
    if spoil == "momentum":
        plan = replace(plan, momentum_buffers=changed(plan.momentum_buffers or {}, "0.bias", torch.zeros(1)))
    job = LocalJob(task, plan, Records.of(inputs, labels), rng(0, "test"))
    with pytest.raises(ValueError, match="do not fit the model"):
        Trainer(model(), kernel() if native else None).train(job)


def test_layouts_may_differ_in_their_order_alone() -> None:
    given = lesson()
    turned = dict(reversed(given.task.params.items()))
    assert layout_of(turned) != layout_of(given.task.params)
    [one] = kernel().train(stack(), [given])
    [other] = kernel().train(stack(), [with_params(lambda _: turned)(given)])
    assert one.loss == other.loss
