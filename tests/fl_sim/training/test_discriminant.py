"""The linear discriminant is scikit-learn's, and a class without records is never found."""

import numpy as np
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from fl_sim.models import build
from fl_sim.params import copy_into
from fl_sim.training.discriminant import linear_discriminant


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
