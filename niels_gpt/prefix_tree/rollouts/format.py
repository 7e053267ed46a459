"""The files of a rollout cache, the columns of its index, and a group as the arrays that are stored.

train_tokens.bin                uint16 or uint32: of each group the prefix of all its samples once, then the rest
                                of each sample
train_loss.bin                  a bit for each token of each sample, lowest bit first; a group begins at a byte
train_logprobs.bin ...          float32 for each scored token of each sample
train_reward.bin ...            float32 for each sample
index/train_groups.npy          int64 [groups * 9], GROUP_COLUMNS of each
index/train_samples.npy         int64 [samples * 5], SAMPLE_COLUMNS of each
index/train_ids.txt             a line for each group: its id
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from niels_gpt.prefix_tree.rollouts.records import FIELDS, PER_TOKEN, Sample

KIND = "rollouts"
GROUP_COLUMNS = (
    "first_sample",  # number of its first sample in the split
    "samples",
    "prefix",  # tokens that all samples begin with, stored once; 0 for a single sample
    "first_token",  # index in the token file
    "first_byte",  # of its bits in the loss file
    "first_score",  # index in the files of float32 for each scored token
    "first_id",  # byte in the file of ids at which its line begins
    "tokens_after",  # tokens of the group when it is folded
    "pairs_after",  # attention pairs of the group when it is folded
)
SAMPLE_COLUMNS = (
    "tokens",
    "prompt",  # tokens before the completion; -1: not known
    "loss_tokens",  # targets after its first token
    "order",  # of the k-th row of a group: which sample is the k-th when they are sorted by their ids
    "lcp",  # of the k-th row: tokens which that sample shares with the one sorted before it; 0 for the first
)
Ints = npt.NDArray[np.int64]
BIT_ORDER: Final = "little"


def scored_tokens(tokens: Ints, prompts: Ints) -> Ints:
    """Return how many scored tokens samples have: [samples]."""
    return tokens - np.maximum(prompts, 0)


class StoredGroup(NamedTuple):
    """What a group adds to the files of its split."""

    tokens: Ints  # as in the token file
    bits: npt.NDArray[np.uint8]
    fields: Mapping[str, npt.NDArray[np.float32]]
    samples: Ints  # [samples, 5]
    prefix: int

    @property
    def folded(self) -> tuple[int, int]:
        """Return tokens and attention pairs after folding."""
        lengths, lcps = self.samples[self.samples[:, 3], 0], self.samples[:, 4]
        pairs = (lengths * (lengths + 1) - lcps * (lcps + 1)) // 2
        return int((lengths - lcps).sum()), int(pairs.sum())


def stored(samples: Sequence[Sample]) -> StoredGroup:
    """Return the arrays of a group of one or more samples."""
    order, lcps = sorted_prefixes([sample.ids for sample in samples])
    lengths = np.array([len(sample.ids) for sample in samples])
    prefix = int(np.append(lcps[1:], lengths[order[0]]).min()) if len(samples) > 1 else 0
    first = samples[0].ids[:prefix]
    columns = (
        lengths,
        [sample.prompt_length for sample in samples],
        [sample.num_loss_tokens for sample in samples],
        order,
        lcps,
    )
    return StoredGroup(
        tokens=np.concatenate([first, *(sample.ids[prefix:] for sample in samples)]),
        bits=np.packbits(np.concatenate([sample.loss_mask for sample in samples]), bitorder=BIT_ORDER),
        fields={name: np.concatenate([each.fields[name] for each in samples]) for name in samples[0].fields},
        samples=np.stack([np.asarray(column, dtype=np.int64) for column in columns], axis=1),
        prefix=prefix,
    )


def sorted_prefixes(sequences: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return the order of sequences sorted by their ids, and what each shares with the one before it, in that order.

    Equal sequences keep their order. The sum of (length - shared) is the number of tokens after folding.
    """
    order = np.array(
        sorted(range(len(sequences)), key=[each.astype(">u4").tobytes() for each in sequences].__getitem__)
    )
    lcps = np.zeros(len(order), dtype=np.int64)
    for place in range(1, len(order)):
        one, other = sequences[order[place - 1]], sequences[order[place]]
        size = min(len(one), len(other))
        differs = one[:size] != other[:size]
        lcps[place] = differs.argmax() if differs.any() else size
    return order, lcps


def file_of(split: str, name: str) -> str:
    """Return the name of a file of float32, of the loss bits ("loss") or of the tokens ("tokens")."""
    return f"{split}_{name}.bin"


def per(name: str) -> str:
    """Return what a value of a field belongs to, as `LossEdges.field` names it: "token" or "sample"."""
    assert name in FIELDS
    return "token" if name in PER_TOKEN else "sample"
