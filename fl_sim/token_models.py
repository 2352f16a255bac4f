"""fl-sim's models for sequences of tokens: recurrent networks, and small transformers for CPUs.

A record is a row of whole numbers, stored as float32 like all records: tokens from 1, then zeros as padding. Padding
changes no output. No model draws random numbers in training (there is no dropout).
"""

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from fl_sim.own_loss import Outcome

TokenFactory: TypeAlias = Callable[[int, int, int], nn.Module]
"""A function (vocabulary, maximum length, number of classes) -> model."""

_EMBEDDING: Final = 8  # the width of the embedding in LEAF's Shakespeare models
_WIDTH, _LAYERS, _HEADS, _HIDDEN = 128, 2, 4, 512  # the sizes of the transformers
# replaces minus infinity in the attention mask, so that the softmax of an empty text is finite
_FAR_BELOW: Final = -1e30
_DEVIATION: Final = 0.02  # the standard deviation of the initial embeddings, as in GPT-2


class GatedRecurrent(nn.Module):
    """A recurrent model for tokens: an embedding of size 8 as in LEAF, a GRU (Cho et al. 2014) and a linear head.

    The head receives the GRU's state after the last token, so padding does not change the logits.
    """

    def __init__(self, vocabulary: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, _EMBEDDING, padding_idx=0)
        self.recurrent = nn.GRU(_EMBEDDING, 128, batch_first=True)
        self.head = nn.Linear(128, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) tokens to (batch, classes) logits."""
        tokens = inputs.long()
        states, _ = self.recurrent(self.embedding(tokens))
        logits: torch.Tensor = self.head(_at_last(states, tokens))
        return logits


class LongShortTerm(nn.Module):
    """LEAF's model of Shakespeare: an embedding of size 8, two LSTM layers of 256 units, and a linear head.

    Table 9 of Reddi et al. 2021 (FedAdam) has the same model. The head receives the state after the last token.
    """

    def __init__(self, vocabulary: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, _EMBEDDING, padding_idx=0)
        self.recurrent = nn.LSTM(_EMBEDDING, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) tokens to (batch, classes) logits."""
        tokens = trimmed(inputs.long())
        states, _ = self.recurrent(self.embedding(tokens))
        logits: torch.Tensor = self.head(_at_last(states, tokens))
        return logits


class Transformer(nn.Module):
    """A small pre-norm transformer (Vaswani et al. 2017) with two layers of width 128 and four heads.

    The head receives the mean over the tokens of a text, so the model classifies texts.
    """

    def __init__(self, vocabulary: int, length: int, num_outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, _WIDTH)
        self.positions = nn.Embedding(length, _WIDTH)
        for part in (self.embedding, self.positions):
            nn.init.normal_(part.weight, std=_DEVIATION)
        self.blocks = nn.ModuleList([Block(_WIDTH, _HEADS, _HIDDEN) for _ in range(_LAYERS)])
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, num_outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) tokens to (batch, classes) logits."""
        tokens = trimmed(inputs.long())
        is_token = tokens != 0
        states = self._states(tokens, is_token[:, None, None, :])
        weights = is_token / is_token.sum(1, keepdim=True).clamp(min=1)
        logits: torch.Tensor = self.head((states * weights[..., None]).sum(1))
        return logits

    def _states(self, tokens: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        """Return the states after the last layer, (batch, length, width).

        ``sees``: the attention mask, (..., length, length). Entry (i, j) is True if position i may use position j.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        states: torch.Tensor = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            states = block(states, sees)
        normal: torch.Tensor = self.norm(states)
        return normal


class Decoder(Transformer):
    """A small language model: at each position of a text, it predicts the next token from the tokens so far.

    The loss of a text is the mean cross-entropy of its predictions. The labels of the records are ignored. No token
    attends to padding, which comes last, and padding is not predicted.
    """

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary, length, vocabulary)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) tokens to logits of the next token, (batch, length, vocabulary)."""
        tokens = inputs.long()
        length = tokens.shape[1]
        before = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        logits: torch.Tensor = self.head(self._states(tokens, before))
        return logits

    def loss_of(self, inputs: torch.Tensor, labels: torch.Tensor) -> Outcome:
        """Return the loss and the number of right predictions of each text. A text of one token has no prediction."""
        del labels
        tokens = trimmed(inputs.long())
        targets, logits = tokens[:, 1:], self(tokens)[:, :-1]
        counts = (targets != 0).sum(1)
        each = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=0, reduction="none")
        right = ((logits.argmax(2) == targets) & (targets != 0)).sum(1)
        return Outcome(each.sum(1) / counts.clamp(min=1), right, counts)


class Block(nn.Module):
    """One layer of a transformer: attention and a perceptron, both with layer norm and a residual connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, states: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        """Map states (batch, length, width) to states of the same shape. ``sees``: as in ``Transformer``."""
        parts = self.mixed(self.norms[0](states)).unflatten(-1, (3, self.heads, -1))
        # each of these tensors has the shape (batch, heads, length, width of a head)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        # torch's scaled_dot_product_attention is not used, because it does not support vmap on CPUs.
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        attended = scores.masked_fill(~sees, _FAR_BELOW).softmax(-1) @ value
        states = states + self.out(attended.transpose(1, 2).flatten(2))
        after: torch.Tensor = states + self.perceptron(self.norms[1](states))
        return after


def _at_last(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the states (batch, width) at the last token of each text, from ``states`` (batch, length, width)."""
    last = (tokens != 0).sum(1).clamp(min=1) - 1
    return states[torch.arange(len(tokens), device=tokens.device), last]


def trimmed(tokens: torch.Tensor) -> torch.Tensor:
    """Return ``tokens`` (batch, length) without the columns that contain only padding, to save time.

    Under ``vmap``, a shape may not depend on values, so the tokens are returned unchanged.
    """
    try:
        used = (tokens != 0).any(0).nonzero()
    except RuntimeError:
        return tokens
    return tokens[:, : int(used[-1]) + 1 if len(used) else 1]


TOKEN_MODELS: Final[Mapping[str, TokenFactory]] = {
    "gru": lambda vocabulary, _, num_classes: GatedRecurrent(vocabulary, num_classes),
    "lstm": lambda vocabulary, _, num_classes: LongShortTerm(vocabulary, num_classes),
    "transformer": Transformer,
    "decoder": lambda vocabulary, length, _: Decoder(vocabulary, length),
}
"""{name: function that creates a model for sequences of tokens}."""
