"""Models for tokens: padding changes nothing, and a decoder sees no token that it predicts."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from fl_sim import models
from fl_sim.token_models import TOKEN_MODELS
from fl_sim.training.per_record import clipped_sum_of
from fl_sim.training.trainer import Trainer

SHORT, LONG = torch.tensor([[3.0, 7, 2]]), torch.tensor([[3.0, 7, 2, 0, 0], [1, 2, 3, 4, 5]])
CLASSIFIERS = ("gru", "lstm", "transformer")


def made(name: str, length: int = 5, classes: int = 4) -> torch.nn.Module:
    return models.build(name, (length,), classes, seed=0, vocabulary=9)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_padding_and_other_records_change_no_logits(name):
    model = made(name)
    torch.testing.assert_close(model(LONG)[:1], model(SHORT), rtol=1e-5, atol=1e-6)


def test_padding_and_other_texts_change_no_loss_of_a_decoder():
    model = made("decoder")
    labels = torch.zeros(2, dtype=torch.int64)
    for whole, alone in zip(model.loss_of(LONG, labels), model.loss_of(SHORT, labels[:1]), strict=True):
        torch.testing.assert_close(whole[:1], alone, rtol=1e-5, atol=1e-6)
    assert model.loss_of(LONG, labels).counts.tolist() == [2, 4]
    one = model.loss_of(torch.tensor([[4.0, 0, 0, 0, 0]]), labels[:1])
    assert (one.losses.item(), one.counts.item()) == (0, 0)


def test_a_decoder_predicts_each_token_from_those_before_it():
    model = made("decoder")
    logits = model(LONG[1:])
    changed = LONG[1:].clone()
    changed[0, 3] = 8
    other = model(changed)
    torch.testing.assert_close(logits[:, :3], other[:, :3])
    assert not torch.allclose(logits[:, 3:], other[:, 3:])
    outcome = model.loss_of(LONG[1:], torch.zeros(1, dtype=torch.int64))
    expected = functional.cross_entropy(logits[0, :4], LONG[1, 1:].long())
    torch.testing.assert_close(outcome.losses[0], expected)
    assert outcome.right.item() == (logits[0, :4].argmax(1) == LONG[1, 1:]).sum()


def test_the_lstm_is_the_published_one_of_shakespeare():
    model = models.build("lstm", (80,), 80, seed=0, vocabulary=81)
    by_layer = [2 * 4 * 256 + 4 * 256 * (width + 256) for width in (8, 256)]
    assert sum(weight.numel() for weight in model.parameters()) == 81 * 8 + sum(by_layer) + 80 * 257


@pytest.mark.parametrize("name", TOKEN_MODELS)
def test_gradients_of_each_record_are_those_of_the_record_alone(name):
    model = made(name)
    inputs, labels = LONG, torch.tensor([1, 3])
    trained = dict(model.named_parameters())
    total = torch.zeros(sum(weight.numel() for weight in trained.values()), dtype=torch.float64)
    for record, label in zip(inputs, labels, strict=True):
        if name == "decoder":
            loss = model.loss_of(record[None], label[None]).losses[0]
        else:
            loss = functional.cross_entropy(model(record[None]), label[None])
        found = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(trained.values()))]).double()
        total += found * min(1, 0.5 / found.norm())
    summed = torch.from_numpy(clipped_sum_of(model, trained, 0.0)(inputs, labels, 0.5))
    torch.testing.assert_close(summed, total, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["transformer", "decoder"])
def test_transformers_of_many_clients_are_computed_at_once(name):
    model = made(name)
    params = {key: torch.stack([value, 2 * value]) for key, value in model.named_parameters()}
    inputs = torch.stack([LONG, LONG])
    found = torch.vmap(lambda own, records: functional_call(model, own, (records,)))(params, inputs)
    torch.testing.assert_close(found[0], model(LONG), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TOKEN_MODELS)
def test_clients_of_models_for_tokens_train_side_by_side(name):
    trainer = Trainer(made(name), None)
    assert trainer.is_parallel((5,))
    assert trainer.is_stackable() == (name in {"transformer", "decoder"})
    dropping = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5)
    assert not Trainer(dropping, None).is_parallel((5,))
