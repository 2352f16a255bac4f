"""Both discriminants are scikit-learn's, and a class without records is never found."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis

from fl_sim.errors import UserError
from fl_sim.models import build
from fl_sim.params import copy_into
from fl_sim.training.discriminant import QuadraticDiscriminant, linear_discriminant, quadratic_discriminant


def _records(num_classes=3, num_records=600, size=5, seed=0):
    coins = np.random.default_rng(seed)
    labels = coins.choice(num_classes, num_records, p=[0.5, 0.3, 0.2])
    mixing = coins.normal(size=(size, size))
    inputs = coins.normal(size=(num_records, size)) @ mixing + 2 * coins.normal(size=(num_classes, size))[labels]
    return torch.from_numpy(inputs).float(), torch.from_numpy(labels)


def _logits(params, inputs, num_classes):
    model = build("logistic", tuple(inputs.shape[1:]), num_classes, 0)
    with torch.no_grad():
        copy_into(dict(model.named_parameters()), params)
        return model(inputs)


def test_it_is_scikit_learns_discriminant():
    inputs, labels = _records()
    found = _logits(linear_discriminant(inputs, labels, 3, ridge=0.0), inputs, 3).softmax(dim=1).numpy()
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(inputs.double().numpy(), labels.numpy())
    assert np.abs(found - theirs.predict_proba(inputs.double().numpy())).max() < 1e-4


def test_the_ridge_keeps_it_finite_where_records_are_few():
    inputs, labels = torch.eye(3, 40), torch.tensor([0, 1, 2])
    params = linear_discriminant(inputs, labels, 3)
    assert all(value.isfinite().all() for value in params.values())
    assert (_logits(params, inputs, 3).argmax(dim=1) == labels).all()


def test_records_that_are_all_the_same_are_told_by_their_number():
    params = linear_discriminant(torch.ones(4, 2), torch.tensor([0, 1, 1, 1]), 2)
    assert _logits(params, torch.ones(1, 2), 2).argmax() == 1


def test_a_class_without_records_is_never_found():
    inputs, labels = _records()
    params = linear_discriminant(inputs, labels, 4)
    assert _logits(params, 100 * inputs, 4).argmax(dim=1).max() < 3


def _quadratic_logits(params, inputs, num_classes):
    model = QuadraticDiscriminant(inputs[0].numel(), num_classes)
    with torch.no_grad():
        copy_into(dict(model.named_parameters()), params)
        return model(inputs)


def test_with_covariances_of_their_own_it_is_scikit_learns_quadratic_discriminant():
    inputs, labels = _records()
    inputs[labels == 1] *= torch.tensor([1.0, 3.0, 0.5, 1.0, 2.0])
    found = _quadratic_logits(quadratic_discriminant(inputs, labels, 3, own_share=1.0, ridge=0.0), inputs, 3)
    theirs = QuadraticDiscriminantAnalysis().fit(inputs.double().numpy(), labels.numpy())
    assert np.abs(found.softmax(dim=1).numpy() - theirs.predict_proba(inputs.double().numpy())).max() < 0.01


def test_with_the_covariance_of_all_alone_it_is_the_linear_discriminant():
    inputs, labels = _records()
    found = _quadratic_logits(quadratic_discriminant(inputs, labels, 3, own_share=0.0, ridge=0.1), inputs, 3)
    expected = _logits(linear_discriminant(inputs, labels, 3, ridge=0.1), inputs, 3)
    assert torch.allclose(found.softmax(dim=1), expected.softmax(dim=1), atol=1e-4)


def test_classes_that_differ_in_nothing_but_their_spread_are_told_apart():
    coins = np.random.default_rng(0)
    labels = torch.arange(2000) % 2
    inputs = torch.from_numpy(coins.normal(size=(2000, 8))).float() * (1.0 + 2.0 * labels[:, None])
    found = _quadratic_logits(quadratic_discriminant(inputs, labels, 2, own_share=1.0, ridge=0.0), inputs, 2)
    assert (found.argmax(dim=1) == labels).float().mean() > 0.95


def test_the_quadratic_one_never_finds_a_class_without_records_and_is_finite_where_they_are_few():
    inputs, labels = _records()
    params = quadratic_discriminant(inputs, labels, 4)
    assert _quadratic_logits(params, inputs, 4).argmax(dim=1).max() < 3
    few = quadratic_discriminant(torch.eye(3, 40), torch.tensor([0, 1, 2]), 3)
    assert all(value.isfinite().all() for value in few.values())


def test_matrices_that_no_model_should_have_are_refused():
    with pytest.raises(UserError, match=r"30,000 x 30,000 .* features=scattering"):
        quadratic_discriminant(torch.zeros(2, 3, 100, 100), torch.tensor([0, 1]), 10)
