"""Records that are alike: representatives speak for all, labels spread along what is alike and not across."""

import numpy as np
import pytest
import torch

from fl_sim.data import load
from fl_sim.training.loop import to_tensors
from strategies.pate import semi_supervised
from strategies.pate.semi_supervised import descriptors, representatives, spread


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    dataset = load("digits")
    return to_tensors(dataset.train, dataset)


def _blobs(sizes: tuple[int, ...]) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    centres = 10 * torch.eye(len(sizes))
    rows = [
        centre + 0.1 * torch.randn(size, len(sizes), generator=random)
        for centre, size in zip(centres, sizes, strict=True)
    ]
    return torch.cat(rows)


def test_representatives_come_from_every_group() -> None:
    chosen = representatives(_blobs((40, 50, 30)), 3)
    assert set(np.searchsorted([40, 90], chosen, side="right")) == {0, 1, 2}


def test_a_greedy_choice_gains_the_most_at_every_step() -> None:
    inputs = _digits()[0][:150]
    rows = descriptors(inputs)
    away = torch.cdist(rows, rows)
    likeness = torch.exp(-((away / away.sort(dim=1).values[:, 10].median()) ** 2))
    spoken_for = torch.zeros(150)
    for best in representatives(inputs, 20):
        gains = (likeness - spoken_for).clamp(min=0).sum(dim=1)
        assert float(gains[best]) == pytest.approx(float(gains.max()), rel=1e-4)
        spoken_for = torch.maximum(spoken_for, likeness[best])


def test_every_record_is_asked_about_once_however_many_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _digits()[0][:120]
    whole = representatives(inputs, 120)
    assert sorted(whole) == list(range(120))
    assert np.array_equal(representatives(inputs, 30), whole[:30])
    monkeypatch.setattr(semi_supervised, "_MOST_CHOSEN", 10)
    few = representatives(inputs, 120)
    assert np.array_equal(few[:10], whole[:10])
    assert np.array_equal(few[10:], np.setdiff1d(np.arange(120), whole[:10]))
    monkeypatch.setattr(semi_supervised, "_MOST_COMPARED", 50)
    assert sorted(representatives(inputs, 120)) == list(range(120))
    assert set(representatives(inputs, 10)) <= set(range(50))


def test_representatives_make_better_students_of_neighbours() -> None:
    inputs, labels = _digits()
    accuracies = []
    for rows in (representatives(inputs, 30), np.arange(30)):
        shares = spread(torch.cat([inputs[rows], inputs]), labels[rows], 10)[30:]
        accuracies.append(float((shares.argmax(dim=1) == labels).float().mean()))
        assert torch.allclose(shares.sum(dim=1), torch.ones(len(inputs)), atol=1e-5)
    assert accuracies[0] > accuracies[1] + 0.02
    assert accuracies[0] > 0.88


def test_labels_spread_within_a_group_and_not_across() -> None:
    inputs = _blobs((40, 40, 40))
    order = torch.tensor([0, 40, 80, *range(1, 40), *range(41, 80), *range(81, 120)])
    shares = spread(inputs[order], torch.tensor([2, 0, 1]), 4)
    groups = torch.cat([torch.tensor([2, 0, 1]), torch.tensor([2, 0, 1]).repeat_interleave(39)])
    assert torch.equal(shares.argmax(dim=1), groups)
    assert float(shares.max(dim=1).values.min()) > 0.99


def test_records_that_are_all_alike_are_no_error() -> None:
    same = torch.ones(30, 1, 8, 8)
    assert sorted(representatives(same, 30)) == list(range(30))
    assert torch.isfinite(spread(same, torch.tensor([1, 2]), 3)).all()


def test_descriptors_are_of_length_1_and_know_a_shade_from_a_shape() -> None:
    images = _digits()[0][:50]
    for inputs in (images, images.expand(-1, 3, -1, -1), torch.rand(20, 3, 32, 20), torch.rand(9, 5), images[:, :, :5]):
        assert torch.allclose(descriptors(inputs).norm(dim=1), torch.ones(len(inputs)), atol=1e-4)
    own = descriptors(images)
    lighter = descriptors(images + 0.7)
    assert torch.allclose(own, lighter, atol=1e-3)
    assert float((own @ own.T).fill_diagonal_(0).max()) < 0.999
