"""The local loop against torch.optim.SGD, and evaluation against a plain computation."""

from threading import get_ident

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_sim.local_plan import LocalPlan
from fl_sim.params import detached
from fl_sim.seeding import rng, seed_torch, torch_kept
from fl_sim.training import loop
from fl_sim.training.evaluation import evaluate
from fl_sim.training.loop import Descent, to_tensors, train
from fl_sim.training.records import Scale
from fl_sim.types import Dataset, Examples, LocalSettings, LocalTask

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def _cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def _data(size=23):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(3, (size,), generator=generator)


def _task(model, settings, size=23):
    return LocalTask(1, 0, 1, size, settings, detached(model.named_parameters()))


def _plain(model, settings, inputs, labels, *shuffles):
    """torch.optim.SGD, one entry of ``shuffles`` after another."""
    optimizer = torch.optim.SGD(
        model.parameters(), settings.learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    losses = []
    model.train()
    for shuffle in shuffles:
        for _ in range(settings.epochs):
            for batch in torch.from_numpy(shuffle.permutation(len(labels))).split(settings.batch_size):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(inputs[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return detached(model.named_parameters()), losses


def _equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_training_is_torchs_sgd_bit_for_bit(momentum, weight_decay):
    settings = LocalSettings(0.05, momentum, weight_decay, batch_size=5, epochs=4)  # 23 = 4 * 5 + 3
    inputs, labels = _data()
    model = _cnn()
    trained = train(model, _task(_cnn(), settings), LocalPlan(), inputs, labels, rng(0, "test"))
    params, losses = _plain(_cnn(), settings, inputs, labels, rng(0, "test"))
    assert _equal(trained.params, params)
    assert not _equal(trained.params, detached(_cnn().named_parameters()))
    assert trained.num_steps == settings.num_steps(23) == 20
    assert trained.loss == pytest.approx(np.mean(losses), rel=1e-6)


def test_warm_buffers_go_on_bit_for_bit():
    settings = LocalSettings(0.05, 0.9, 0.01, batch_size=5, epochs=2)
    inputs, labels = _data()
    model, task, plan = _cnn(), _task(_cnn(), settings), LocalPlan()
    for server_round in (1, 2, 3):
        trained = train(model, task, plan, inputs, labels, rng(0, "test", server_round))
        task = LocalTask(server_round, 0, 1, 23, settings, trained.params)
        plan = LocalPlan(momentum_buffers=trained.momentum_buffers)
    params, _ = _plain(_cnn(), settings, inputs, labels, *(rng(0, "test", r) for r in (1, 2, 3)))
    assert _equal(trained.params, params)


def test_training_writes_to_nothing_it_was_given():
    settings = LocalSettings(0.05, 0.9, 0.01, batch_size=5, epochs=1)
    inputs, labels = _data()
    task = _task(_cnn(), settings)
    given = {name: torch.ones_like(value) for name, value in task.params.items()}
    plan = LocalPlan(gradient_offset=given, proximal_mu=0.1, momentum_buffers=given)
    before = {name: value.clone() for name, value in task.params.items()}
    trained = train(_cnn(), task, plan, inputs, labels, rng(0, "test"))
    again = train(_cnn(), task, plan, inputs, labels, rng(0, "test"))
    assert _equal(task.params, before)
    assert all(torch.equal(value, torch.ones_like(value)) for value in given.values())
    assert _equal(trained.params, again.params)
    assert _equal(trained.momentum_buffers, again.momentum_buffers)


def test_what_is_left_in_the_model_does_not_matter_and_the_shuffle_does():
    settings = LocalSettings(0.05, 0.9, 0.0, batch_size=5, epochs=1)
    inputs, labels = _data()
    task, model = _task(_cnn(), settings), _cnn()
    first = train(model, task, LocalPlan(), inputs, labels, rng(0, "test"))
    second = train(model, task, LocalPlan(), inputs, labels, rng(0, "test"))
    other = train(model, task, LocalPlan(), inputs, labels, rng(1, "test"))
    assert _equal(first.params, second.params)
    assert not _equal(first.params, other.params)


class _Partly(nn.Module):
    """A weight that is used, one that is not, one that is frozen."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs):
        return self.used(inputs) + self.frozen


def test_unused_and_frozen_parameters_are_left_alone_even_by_weight_decay():
    torch.manual_seed(0)
    model = _Partly()
    settings = LocalSettings(0.1, 0.9, 0.5, batch_size=4, epochs=2)
    task = LocalTask(1, 0, 1, 8, settings, detached(model.named_parameters()))
    inputs, labels = torch.randn(8, 4), torch.arange(8) % 3
    trained = train(model, task, LocalPlan(), inputs, labels, rng(0, "test"))
    assert trained.params["unused"].tolist() == [1.0, 1.0]
    assert trained.params["frozen"].tolist() == [1.0, 1.0, 1.0]
    assert not torch.equal(trained.params["used.weight"], task.params["used.weight"])
    assert sorted(trained.momentum_buffers) == ["used.bias", "used.weight"]


class _Sum(nn.Module):
    """logits = x + (left + right): autograd hands the very same gradient tensor to both."""

    def __init__(self):
        super().__init__()
        self.left = nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))
        self.right = nn.Parameter(torch.tensor([1.0, 0.0, -1.0]))

    def forward(self, inputs):
        return inputs + (self.left + self.right)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_two_parameters_with_one_gradient_tensor_are_both_right(weight_decay):
    model = _Sum()
    inputs, labels = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    gradients = torch.autograd.grad(functional.cross_entropy(model(inputs), labels), list(model.parameters()))
    assert gradients[0].data_ptr() == gradients[1].data_ptr()  # the trap is there
    settings = LocalSettings(0.5, 0.9, weight_decay, batch_size=3, epochs=3)
    task = LocalTask(1, 0, 1, 6, settings, detached(model.named_parameters()))
    trained = train(_Sum(), task, LocalPlan(), inputs, labels, rng(0, "test"))
    params, _ = _plain(_Sum(), settings, inputs, labels, rng(0, "test"))
    assert _equal(trained.params, params)

    offsets = {"left": torch.tensor([1.0, 2.0, 3.0]), "right": torch.tensor([-1.0, 0.0, 5.0])}
    settings = LocalSettings(0.5, 0.9, weight_decay, batch_size=6, epochs=1)
    task = LocalTask(1, 0, 1, 6, settings, task.params)
    trained = train(_Sum(), task, LocalPlan(offsets), inputs, labels, rng(0, "test"))
    for name, gradient in zip(("left", "right"), gradients, strict=True):
        expected = task.params[name] - 0.5 * (gradient + offsets[name] + weight_decay * task.params[name])
        torch.testing.assert_close(trained.params[name], expected)


class _Means(nn.Module):
    """The mean of token vectors, and a head. One embedding is stored with a column for each token, as in adapters."""

    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(60, 4), nn.Linear(8, 3)
        self.columns = nn.Parameter(torch.randn(4, 60))

    def forward(self, inputs):
        tokens = inputs.long()
        found = torch.cat([self.rows(tokens), functional.embedding(tokens, self.columns.T)], dim=2)
        return self.head(found.mean(1))


@pytest.mark.parametrize(
    ("optimizer", "momentum", "weight_decay", "clip_norm"),
    [("sgd", 0.9, 0.0, 0.0), ("adam", 0.0, 0.0, 0.5), ("adam", 0.0, 0.01, 0.0), ("adamw", 0.0, 0.01, 0.0)],
)
def test_large_parameters_are_updated_in_parts_with_the_same_bits(
    monkeypatch, optimizer, momentum, weight_decay, clip_norm
):
    torch.manual_seed(0)
    model, generator = _Means(), torch.Generator().manual_seed(2)
    inputs = torch.randint(60, (48, 2), generator=generator).float()
    inputs[24:] = torch.arange(48.0).view(24, 2)
    labels = torch.randint(3, (48,), generator=generator)
    settings = LocalSettings(0.1, momentum, weight_decay, 3, 1, clip_norm=clip_norm, optimizer=optimizer)
    task = _task(model, settings, 48)
    whole = train(model, task, LocalPlan(), inputs, labels, rng(0, "batches"))
    before, parts, sizes = (Descent._part, Descent._update), [], set()

    def part_of(self, name, weight, gradient):
        if (part := before[0](self, name, weight, gradient)) is not None:
            parts.append((name, part[0]))
        return part

    def update(self, name, weight, *rest):
        sizes.add(weight.numel())
        before[1](self, name, weight, *rest)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(loop, "LARGE", 200)
    monkeypatch.setattr(loop, "BLOCK", 32)  # at most one vector of the processor
    monkeypatch.setattr(Descent, "_part", part_of)
    monkeypatch.setattr(Descent, "_update", update)
    again = train(model, task, LocalPlan(), inputs, labels, rng(0, "batches"))
    assert _equal(again.params, whole.params)
    assert _equal(again.momentum_buffers, whole.momentum_buffers)
    assert set(parts) == (set() if weight_decay else {("rows.weight", 0), ("columns", 1)})
    assert len(parts) < 2 * whole.num_steps  # later steps update the whole parameter
    assert (240 in sizes) == (optimizer == "sgd")  # the whole embedding at once
    assert (32 in sizes) == (optimizer != "sgd")


def test_no_records_mean_no_step_no_loss_and_an_untouched_model():
    model = _cnn()
    task = _task(_cnn(), LocalSettings(0.1, 0.9, 0.1, batch_size=4, epochs=3), 0)
    trained = train(
        model, task, LocalPlan(), torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64), rng(0, "test")
    )
    assert (trained.num_steps, trained.loss, trained.momentum_buffers) == (0, None, {})
    assert _equal(trained.params, task.params)
    assert task.settings.num_steps(0) == 0


def test_dropout_follows_the_seed_around_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    inputs, labels = _data()
    task = LocalTask(1, 0, 1, 23, LocalSettings(0.1, 0.0, 0.0, 5, 1), detached(model.named_parameters()))

    def trained(*keys):
        with torch_kept():
            seed_torch(0, "local", *keys)
            return train(model, task, LocalPlan(), inputs, labels, rng(0, "test")).params

    assert _equal(trained(3, 1), trained(3, 1))
    assert not _equal(trained(3, 1), trained(3, 2))
    assert not _equal(trained(3, 1), trained(4, 1))


def test_evaluation_is_the_plain_accuracy_and_mean_loss_without_dropout():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout(0.9))
    params = detached(model.named_parameters())
    inputs, labels = _data(1203)  # 500 + 500 + 203
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()  # evaluate must bring its own
    model.train()
    found = evaluate(model, params, inputs, labels)

    logits = inputs.flatten(1).double() @ params["1.weight"].double().T + params["1.bias"].double()
    right = sum(int(row.argmax()) == int(label) for row, label in zip(logits, labels, strict=True))
    log_probabilities = logits - logits.logsumexp(1, keepdim=True)
    plain = -sum(float(row[label]) for row, label in zip(log_probabilities, labels, strict=True)) / 1203
    assert found.accuracy == right / 1203
    assert found.loss == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_bytes_are_normalised_batch_by_batch_as_they_are_evaluated(device):
    images = np.random.default_rng(0).integers(0, 256, (1203, 1, 8, 8), dtype=np.uint8)
    examples = Examples(images, np.arange(1203) % 3)
    data = Dataset("d", examples, examples, 3, (0.13,), (0.31,))
    params = detached(_cnn().named_parameters())
    expected = evaluate(_cnn(), params, *to_tensors(examples, data))
    scale = Scale.of(data, images.dtype, 4).to(torch.device(device))
    inputs, labels = torch.from_numpy(images).to(device), torch.from_numpy(examples.labels).to(device)
    found = evaluate(_cnn().to(device), params, inputs, labels, scale=scale)
    if device == "cpu":
        assert (found.accuracy, found.loss) == (expected.accuracy, expected.loss)
    assert found.accuracy == pytest.approx(expected.accuracy, abs=1.5 / 1203)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


def test_any_number_of_threads_evaluates_to_the_same_bits():
    model = _cnn()
    params = detached(model.named_parameters())
    inputs, labels = _data(2203)
    seen = set()
    model.register_forward_hook(lambda *_: seen.add((get_ident(), torch.get_num_threads())))
    alone = evaluate(model, params, inputs, labels)
    assert seen == {(get_ident(), 1)}
    for workers in (2, 5):
        found = evaluate(model, params, inputs, labels, workers=workers)
        assert (found.accuracy, found.loss) == (alone.accuracy, alone.loss)
    assert len(seen) > 1
    assert {threads for _, threads in seen} == {1}


def test_a_model_is_trained_with_dropout_after_it_was_evaluated():
    def made():
        return nn.Sequential(_cnn(), nn.Dropout(0.5))

    inputs, labels = _data()
    model, settings = made(), LocalSettings(0.05, 0.9, 0.0, batch_size=5, epochs=1)
    task = _task(model, settings)
    evaluate(model, task.params, inputs, labels)
    torch.manual_seed(5)
    trained = train(model, task, LocalPlan(), inputs, labels, rng(0, "test"))
    plain = made()
    torch.manual_seed(5)
    assert _equal(trained.params, _plain(plain, settings, inputs, labels, rng(0, "test"))[0])


def test_bytes_are_normalised_by_channel():
    inputs = np.array([[[[0, 255]], [[51, 102]]]], dtype=np.uint8)  # one record, two channels, 1 x 2
    inputs.flags.writeable = False
    examples = Examples(inputs, np.array([1]))
    tensors, labels = to_tensors(examples, Dataset("d", examples, examples, 2, (0.5, 0.2), (0.25, 0.1)))
    assert tensors.dtype == torch.float32
    assert tensors.flatten().tolist() == pytest.approx([-2.0, 2.0, 0.0, 2.0], abs=1e-6)
    assert labels.tolist() == [1]


def test_float_features_are_taken_as_they_are_less_mean_over_std():
    features = np.array([[1.0, 10.0], [3.0, -10.0]], dtype=np.float32)
    examples = Examples(features, np.array([0, 1]))
    tensors, _ = to_tensors(examples, Dataset("d", examples, examples, 2, (1.0, 0.0), (2.0, 5.0)))
    assert tensors.tolist() == [[0.0, 2.0], [1.0, -2.0]]
    assert features[0, 0] == 1.0  # the caller's array is not written to
