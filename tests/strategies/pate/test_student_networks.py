"""Residual and forest students: the networks are what they say, the forest is scikit-learn's, tree by tree."""

import numpy as np
import pytest
import torch

from clients.teacher import RandomForest
from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.seeding import rng
from fl_sim.training.loop import to_tensors
from strategies.pate.networks import Forest, StudentBlock, conv_classifier, forest_of, gan_classifier, start_from
from strategies.pate.semi_supervised import FeatureMatchingGan
from strategies.pate.student import ForestStudent, Nobody, ResidualStudent, StudentData, predict


def _digits(num_labels: int) -> tuple[StudentData, torch.Tensor, torch.Tensor]:
    dataset = load("digits")
    inputs, labels = to_tensors(dataset.train, dataset)
    return StudentData(inputs[:num_labels], labels[:num_labels], inputs, 10), *to_tensors(dataset.test, dataset)


@pytest.mark.parametrize("classes", [(0, 1, 2, 3, 4, 5, 6, 7, 8, 9), (2, 7), (5,)])
def test_a_forest_of_tensors_says_what_scikit_learns_says(classes: tuple[int, ...]) -> None:
    data, inputs, _ = _digits(400)
    chosen = torch.isin(data.labels, torch.tensor(classes))
    rows = data.labelled[chosen].flatten(1).numpy()
    grown = RandomForest(trees=7, min_leaf=2).fit(rows, data.labels[chosen].numpy(), rng(0, "test"))
    forest, theirs = forest_of(grown, 10), grown.predict_proba(inputs.flatten(1).numpy())
    ours = forest(inputs).exp()
    assert torch.allclose(ours[:, list(classes)], torch.from_numpy(theirs).float().clamp(min=1e-3), atol=1e-6)
    again = Forest(*forest.feature.shape, 10)
    again.load_state_dict(forest.state_dict())
    assert torch.equal(again(inputs), forest(inputs))


class Heard(Nobody):
    def __init__(self) -> None:
        self.steps, self.rates = list[int](), list[float]()

    def __call__(self, step: int, learning_rate: float, model: torch.nn.Module) -> None:
        del model
        self.steps.append(step)
        self.rates.append(learning_rate)


def test_a_forest_student_learns_and_repeats() -> None:
    data, inputs, labels = _digits(300)
    student = ForestStudent(trees=50)
    watch = Heard()
    forest = student.train(data, student.network((1, 8, 8), 10), 0, watch)
    assert float((predict(forest, inputs) == labels).float().mean()) > 0.85
    assert torch.equal(forest(inputs), student.train(data, forest, 0)(inputs))
    assert not torch.equal(forest(inputs), student.train(data, forest, 1)(inputs))
    assert watch.steps == [1]


def test_shallow_residual_students_have_basic_blocks_and_deep_ones_bottlenecks() -> None:
    def convolutions(student: ResidualStudent) -> list[tuple[int, ...]]:
        model = student.network((3, 32, 32), 100)
        first = next(module for module in model.modules() if isinstance(module, StudentBlock))
        return [layer.kernel_size for layer in first.body if isinstance(layer, torch.nn.Conv2d)]

    assert convolutions(ResidualStudent(blocks=5, width=8)) == [(3, 3), (3, 3)]
    assert convolutions(ResidualStudent(blocks=6, width=8)) == [(1, 1), (3, 3), (1, 1)]
    assert convolutions(ResidualStudent(blocks=6, width=8, block="basic")) == [(3, 3), (3, 3)]


@pytest.mark.parametrize(("norm", "block"), [("batch", "basic"), ("group", "bottleneck")])
def test_a_residual_student_maps_images_to_classes_and_learns(norm: str, block: str) -> None:
    data, inputs, labels = _digits(200)
    student = ResidualStudent(blocks=1, width=8, norm=norm, block=block, steps=80, batch_size=50)
    torch.manual_seed(0)
    start = student.network((1, 8, 8), 10)
    norms = {type(module).__name__ for module in start.modules()} & {"BatchNorm2d", "GroupNorm"}
    assert norms == {{"batch": "BatchNorm2d", "group": "GroupNorm"}[norm]}
    model = student.train(data, start, 0)
    assert float((predict(model, inputs) == labels).float().mean()) > 0.6
    short = student.model_copy(update={"steps": 8})
    assert torch.equal(*(short.train(data, start, 0)(inputs) for _ in range(2)))


def test_the_rate_of_a_residual_student_falls_in_steps() -> None:
    student = ResidualStudent(steps=100, learning_rate=0.1, decay_at=(0.5, 0.75))
    watch = Heard()
    data, _, _ = _digits(20)
    small = student.model_copy(update={"steps": 8, "blocks": 1, "width": 8})
    small.train(data, small.network((1, 8, 8), 10), 0, watch)
    assert [student.rate(step) for step in (0, 49, 50, 74, 75, 99)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])
    assert watch.rates == pytest.approx([0.1] * 4 + [0.01] * 2 + [1e-3] * 2)


def test_a_residual_student_needs_images() -> None:
    with pytest.raises(UserError, match=r"at least 4x4, .*shape \(61,\)"):
        ResidualStudent().network((61,), 2)


def test_pate_g_plays_with_convolutions_on_colour_images() -> None:
    images = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    data = StudentData(images[:20], torch.arange(20) % 4, images, 4)
    student = FeatureMatchingGan(steps=2, batch_size=8)
    model = student.train(data, student.network((3, 16, 16), 4), 0)
    assert any(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    assert np.isfinite(model(images).detach().numpy()).all()
    assert conv_classifier((3, 32, 32), 7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 16)])
def test_pate_gs_layers_start_with_outputs_of_mean_0_and_deviation_1(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = (gan_classifier if shape[0] == 1 else conv_classifier)(shape, 4).eval()  # without noise: it is repeatable
    records = 3 + 5 * torch.rand(300, *shape)
    start_from(model, records)
    trained = []
    for layer in model.children():
        records = layer(records).detach()
        if torch.nn.utils.parametrize.is_parametrized(layer):
            over = [axis for axis in range(records.ndim) if axis != 1]
            assert torch.allclose(records.mean(dim=over), torch.zeros(records.shape[1]), atol=1e-3)
            assert torch.allclose(records.std(dim=over), torch.ones(records.shape[1]), atol=1e-3)
            trained.append(layer.parametrizations.weight.original0.requires_grad)
    assert trained == [False] * (len(trained) - 1) + [True]
