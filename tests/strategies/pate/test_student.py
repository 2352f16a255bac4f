"""Students on the embedded digits: unlabelled records help, wrong labels are doubted, nothing but the seed matters."""

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.training.loop import to_tensors
from strategies.fixmatch import Augmentation
from strategies.pate.networks import GaussianNoise, gan_classifier, student_cnn
from strategies.pate.semi_supervised import FeatureMatchingGan, FixMatch
from strategies.pate.student import Batches, Student, StudentData, Supervised, predict

SHAPE = (1, 8, 8)
SMALL = Augmentation(rotation=10, scale=0.1, shear=0.1, shift=0.15, elastic=0.05, erase=0.25)
SUPERVISED = Supervised(steps=150, augmentation=SMALL)
FIXMATCH = FixMatch(steps=200, batch_size=30, unlabelled_ratio=3, augmentation=SMALL)
GAN = FeatureMatchingGan(steps=300, batch_size=50)


def digits(num_labels: int, num_wrong: int = 0) -> tuple[StudentData, torch.Tensor, torch.Tensor]:
    dataset = load("digits", None)
    inputs, labels = to_tensors(dataset.train, dataset)
    chosen = torch.cat([torch.nonzero(labels == label)[: num_labels // 10, 0] for label in range(10)])
    noisy = labels[chosen].clone()
    wrong = torch.arange(num_wrong) * (num_labels // max(num_wrong, 1))
    noisy[wrong] = (noisy[wrong] + 3) % 10
    return StudentData(inputs[chosen], noisy, inputs, 10), *to_tensors(dataset.test, dataset)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return student_cnn(SHAPE, 10)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), GaussianNoise(0.5), nn.Linear(100, 10))


def accuracy(student: Student, data: StudentData, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    model = perceptron() if isinstance(student, FeatureMatchingGan) else network()
    return float((predict(student.train(data, model, 0), inputs) == labels).float().mean())


def test_unlabelled_records_help() -> None:
    data, inputs, labels = digits(20)
    alone, together = (accuracy(student, data, inputs, labels) for student in (SUPERVISED, FIXMATCH))
    assert alone > 0.65
    assert together > alone + 0.05


def test_the_gan_student_beats_its_classifier_alone() -> None:
    data, inputs, labels = digits(30)
    torch.manual_seed(0)
    flat = StudentData(data.labelled.flatten(1), data.labels, data.unlabelled.flatten(1), 10)
    plain = Supervised(steps=200, learning_rate=1e-3).train(flat, perceptron(), 0)
    alone = float((predict(plain, inputs.flatten(1)) == labels).float().mean())
    assert alone > 0.7
    assert accuracy(GAN, data, inputs, labels) > alone + 0.02


def test_wrong_labels_are_doubted() -> None:
    data, inputs, labels = digits(100, num_wrong=20)
    trusting, doubting = (FIXMATCH.model_copy(update={"doubt_after": share, "steps": 140}) for share in (1.0, 0.15))
    trusted, doubted = (accuracy(student, data, inputs, labels) for student in (trusting, doubting))
    assert doubted > trusted
    assert doubted > 0.9


@pytest.mark.parametrize("student", [Supervised(steps=3), FixMatch(steps=3, batch_size=8), FeatureMatchingGan(steps=3)])
def test_the_seed_decides_and_nothing_else_is_touched(student: Student) -> None:
    data, inputs, _ = digits(20)
    start = perceptron() if isinstance(student, FeatureMatchingGan) else network()
    before = {name: value.clone() for name, value in start.state_dict().items()}
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = student.train(data, start, 5)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(7)
    again, other = student.train(data, start, 5), student.train(data, start, 6)
    assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())
    with torch.no_grad():
        assert torch.equal(first(inputs), again(inputs))
        assert not torch.equal(first(inputs), other(inputs))
    assert not first.training


def test_tables_of_numbers_are_learnt_as_they_are() -> None:
    data, inputs, labels = digits(100)
    flat = StudentData(data.labelled.flatten(1), data.labels, data.unlabelled.flatten(1), 10)
    torch.manual_seed(0)
    model = Supervised(steps=150).train(flat, nn.Linear(64, 10), 0)
    assert float((predict(model, inputs.flatten(1)) == labels).float().mean()) > 0.8
    with pytest.raises(UserError, match="unlabelled images"):
        FixMatch().train(flat, nn.Linear(64, 10), 0)


def test_what_nobody_can_learn_from_is_refused() -> None:
    data, _, _ = digits(20)
    with pytest.raises(UserError, match="nothing to learn from"):
        StudentData(data.labelled[:0], data.labels[:0], data.unlabelled, 10)
    with pytest.raises(UserError, match="20 labelled records with 19 labels"):
        StudentData(data.labelled, data.labels[1:], data.unlabelled, 10)
    with pytest.raises(UserError, match="leave unanswered queries out"):
        StudentData(data.labelled, data.labels - 1, data.unlabelled, 10)
    empty = StudentData(data.labelled, data.labels, data.unlabelled[:0], 10)
    for student in (FixMatch(), FeatureMatchingGan()):
        with pytest.raises(UserError, match="take supervised"):
            student.train(empty, network(), 0)


def test_batches_show_every_record_before_any_comes_again() -> None:
    stream = Batches(10, 4, torch.Generator().manual_seed(0))
    seen = torch.cat([next(stream) for _ in range(5)])
    assert torch.equal(torch.bincount(seen, minlength=10), torch.full((10,), 2))
    assert len(next(Batches(3, 50, torch.Generator().manual_seed(0)))) == 3


def test_networks_fit_their_images_and_noise_is_for_training_only() -> None:
    for shape in ((1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 15, 9)):
        for factory in (student_cnn, gan_classifier):
            assert factory(shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)
    noise, zeros = GaussianNoise(0.5), torch.zeros(10_000)
    assert float(noise(zeros).std()) == pytest.approx(0.5, rel=0.05)
    assert torch.equal(noise.eval()(zeros), zeros)


# Views.

NOTHING = Augmentation(rotation=0, scale=0, shear=0, shift=0, elastic=0, erase=0)


def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_view_that_moves_nothing_is_the_image() -> None:
    images = torch.rand(5, 3, 9, 9, generator=random())
    for view in (NOTHING.weak(images, random()), NOTHING.strong(images, random())):
        assert torch.allclose(view, images, atol=1e-5)


def test_images_move_each_by_itself_within_their_reach() -> None:
    dot = torch.zeros(400, 1, 21, 21)
    dot[:, :, 10, 10] = 1.0
    shifted = NOTHING.model_copy(update={"shift": 0.4}).strong(dot, random())
    weights = shifted.sum(dim=(1, 2)) / shifted.sum(dim=(1, 2, 3))[:, None]
    places = (weights * torch.arange(21)).sum(dim=1) - 10
    assert 3.5 < float(places.abs().max()) <= 4.3  # 0.4 of half of 21
    assert float(places.std()) > 1.5
    weak = NOTHING.model_copy(update={"shift": 0.4}).weak(dot, random())
    assert float((weak[:, 0, 8:13, 8:13].sum(dim=(1, 2)) / weak.sum(dim=(1, 2, 3))).min()) == pytest.approx(1.0)


def test_half_of_the_images_are_mirrored_where_that_is_asked_for() -> None:
    images = torch.arange(4.0).expand(1000, 1, 4, 4).contiguous()
    flipped = NOTHING.model_copy(update={"flip": True}).weak(images, random())
    mirrored = (flipped[:, 0, 0, 0] > flipped[:, 0, 0, 3]).float().mean()
    assert float(mirrored) == pytest.approx(0.5, abs=0.06)


def test_a_strong_view_has_a_square_erased_and_a_weak_one_has_not() -> None:
    ones = torch.ones(200, 2, 20, 20)
    ones[0, 0, 0, 0] = -1.0  # the darkest value there is
    erase = NOTHING.model_copy(update={"erase": 0.5})
    erased = (erase.strong(ones, random())[1:] < 0).float().sum(dim=(1, 2, 3)) / 2
    assert 60 < float(erased.max()) <= 121
    assert float((erased > 0).float().mean()) > 0.9
    assert torch.allclose(erase.weak(ones, random())[1:], ones[1:])


def test_views_are_repeatable() -> None:
    images = torch.rand(6, 1, 8, 8, generator=random())
    assert torch.equal(SMALL.strong(images, random()), SMALL.strong(images, random()))
    assert not np.allclose(SMALL.strong(images, random()), SMALL.weak(images, random()))
