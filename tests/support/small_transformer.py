"""A small transformer in float64 and a group of two completions, for tests that put a fault where they want it."""

import torch
from torch import nn

from niels_gpt.prefix_tree.forest import PrefixForest

VOCAB = 97
GROUP = ([1, 2], [[10, 11], [20, 21, 22]])  # 5 targets; rows 1 2 10 11 20 21 22
SEQUENCES = [[1, 2, 10, 11], [1, 2, 20, 21, 22]]


class Transformer(nn.Module):
    """Two layers of attention with one head and a residual stream; every position has an embedding."""

    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        torch.manual_seed(3)
        self.token, self.place = nn.Embedding(VOCAB, width), nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)
        self.dropout = nn.Dropout(dropout)
        self.double()

    def forward(self, ids, positions, mask):
        hidden = self.dropout(self.token(ids) + self.place(positions))
        for layer in self.layers:
            query, key, value = layer(hidden).chunk(3, -1)
            scores = (query @ key.mT / 4).masked_fill(~mask[:, 0], -torch.inf)
            hidden = hidden + scores.softmax(-1) @ value
        return self.head(hidden)


def group():
    return PrefixForest.from_rollout_group(*GROUP)


def causal(rows):
    return torch.ones(rows, rows, dtype=torch.bool).tril()[None, None]
