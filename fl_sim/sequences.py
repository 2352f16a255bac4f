"""The network for sequences of tokens: an embedding, a GRU (Cho et al. 2014) and a linear head.

A record is a row of whole numbers, kept as float32 as all numbers of records are: tokens from 1, and behind the last
one zeros as padding.
"""

import torch
from torch import nn

EMBEDDING, HIDDEN = 8, 128


class GatedRecurrent(nn.Module):
    """Embeds tokens in 8 numbers as LEAF's program does, and makes logits of the state after the last token.

    Padding stands behind it, so no state that counts has seen any: padding is masked exactly.
    """

    def __init__(self, vocabulary: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING, padding_idx=0)
        self.recurrent = nn.GRU(EMBEDDING, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) tokens to (batch, classes) logits."""
        tokens = inputs.long()
        states, _ = self.recurrent(self.embedding(tokens))
        last = (tokens != 0).sum(1).clamp(min=1) - 1
        logits: torch.Tensor = self.head(states[torch.arange(len(tokens), device=tokens.device), last])
        return logits


def tokens_like(input_shape: tuple[int, ...], vocabulary: int) -> torch.Tensor:
    """Return two records of tokens to try a model with."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (2, *input_shape), generator=generator).to(torch.float32)
