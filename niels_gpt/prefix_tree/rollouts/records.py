"""Samples of a rollout cache: as a caller gives them, as checked arrays, and as the files store them.

train_tokens.bin                uint16 or uint32: of each group the prefix of all its samples once, then the rest
                                of each sample
train_loss.bin                  a bit for each token of each sample, lowest bit first; a group begins at a byte
train_logprobs.bin ...          float32 for each scored token of each sample
train_reward.bin ...            float32 for each sample
index/train_groups.npy          int64 [groups * 9], GROUP_COLUMNS of each
index/train_samples.npy         int64 [samples * 5], SAMPLE_COLUMNS of each
index/train_ids.txt             a line for each group: its id

Arrays are NumPy's. Callers may give lists, tuples and tensors too.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from niels_gpt.documents import Rollout as Rollout
from niels_gpt.signals import WITHOUT_PROMPT
from niels_gpt.tokenizers.protocol import MAX_IDS

PER_TOKEN = ("logprobs", "advantages")
"""Fields with a float32 for each scored token; see `Rollout`."""
PER_SAMPLE = ("advantage", "reward")
"""Fields with one float32 for each sample."""
FIELDS = (*PER_TOKEN, *PER_SAMPLE)
_POSITIVE = 1e-4  # a log-prob above it is no rounding


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """The samples of one prompt, or the threads of one tree. It is split, shuffled and folded as a whole."""

    id: str
    """The group's name in its source."""
    samples: Sequence[Rollout] = field(default_factory=list)
    """A list, not a generator: it is read more than once."""

    def __post_init__(self) -> None:
        """Raise ValueError for samples that can be read only once."""
        if not hasattr(self.samples, "__len__"):
            raise ValueError(f"samples are a {type(self.samples).__name__}, expected a list")


class Sample(NamedTuple):
    """A rollout that passed `checked`, as arrays."""

    ids: npt.NDArray[np.int64]  # [L]
    prompt_length: int
    loss_mask: npt.NDArray[np.bool_]  # [L]
    fields: Mapping[str, npt.NDArray[np.float32]]  # [scored tokens], or [1] for a value of the sample

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of targets after the first token, which no row predicts."""
        return int(np.count_nonzero(self.loss_mask[1:]))


def checked(rollout: Rollout, vocab_size: int | None) -> Sample | str:
    """Return a rollout as arrays, or the counter of the reason to drop it.

    vocab_size: refuses ids of this number or more; None: of 2**31 or more.

    The counters: malformed (values of other types), empty_sample, empty_completion, mismatched_lengths (a mask, field
    or prompt that does not fit the ids), ids_outside_vocabulary, not_finite (a field), and target_without_score (a
    target in the prompt of a sample that has fields by token).
    """
    try:
        ids, prompt = _integers(rollout.ids), operator.index(rollout.prompt_length)
        mask = None if rollout.loss_mask is None else _mask(rollout.loss_mask)
        fields = _fields(rollout)
    except (TypeError, ValueError, OverflowError):
        return "malformed"
    if not len(ids):
        return "empty_sample"
    if prompt == len(ids):
        return "empty_completion"
    start = max(prompt, 0)
    sizes = {len(values) for name, values in fields.items() if name in PER_TOKEN}
    if not -1 <= prompt < len(ids) or sizes - {len(ids) - start} or (mask is not None and len(mask) != len(ids)):
        return "mismatched_lengths"
    if ids.min() < 0 or ids.max() >= (MAX_IDS if vocab_size is None else vocab_size):
        return "ids_outside_vocabulary"
    if not all(np.isfinite(values).all() for values in fields.values()):
        return "not_finite"
    if mask is None:
        mask = np.arange(len(ids)) >= start
    elif sizes and mask[:start].any():
        return "target_without_score"
    return Sample(ids, prompt, mask, fields)


def odd_in_sample(sample: Sample) -> list[str]:
    """Return the counters of a sample's signs: it is kept, and may be wrong."""
    found = []
    if sample.prompt_length < 0:
        found.append(WITHOUT_PROMPT)
    elif sample.prompt_length == 0:
        found.append("empty_prompts")
    logprobs = sample.fields.get("logprobs")
    if logprobs is not None and len(logprobs):
        if logprobs.max() > _POSITIVE:
            found.append("positive_logprobs")
        elif len(logprobs) > 1 and not logprobs.any():
            found.append("zero_logprobs")
    return found


def odd_in_group(samples: Sequence[Sample]) -> list[str]:
    """Return the counters of a group's signs: it is kept, and may be wrong."""
    if len(samples) == 1:
        return ["groups_of_one"]
    first = samples[0]
    size = max(first.prompt_length, 1)  # of an unknown prompt the first token at least
    prompt = first.ids[:size].tolist()
    same = all(each.prompt_length == first.prompt_length and each.ids[:size].tolist() == prompt for each in samples[1:])
    return [] if same or first.prompt_length == 0 else ["prompts_differ"]


def _array(values: Any) -> npt.NDArray[Any]:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values  # NumPy has no bfloat16
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "biuf"):
        raise TypeError(f"{array.dtype} of shape {list(array.shape)}")
    return array


def _integers(values: Any) -> npt.NDArray[np.int64]:
    array = _array(values)
    if len(array) and array.dtype.kind not in "iu":
        raise TypeError(f"ids are {array.dtype}")
    if array.dtype == np.uint64 and len(array) and array.max() >= 1 << 63:
        raise OverflowError("an id of 2**63 or more")
    return array.astype(np.int64, copy=False)


def _mask(values: Any) -> npt.NDArray[np.bool_]:
    array = _array(values)
    if not np.isin(array, (0, 1)).all():
        raise ValueError("a mask has values other than 0 and 1")
    return array.astype(np.bool_)


def _fields(rollout: Rollout) -> dict[str, npt.NDArray[np.float32]]:
    if isinstance(rollout.advantage, str | bytes) or isinstance(rollout.reward, str | bytes):
        raise TypeError("a text in place of a number")
    found: dict[str, Any] = {"logprobs": rollout.logprobs, "reward": rollout.reward}
    by_token = rollout.advantage is not None and np.ndim(rollout.advantage) == 1
    found["advantages" if by_token else "advantage"] = rollout.advantage
    with np.errstate(over="ignore"):  # too large for float32: infinite, which is refused
        return {
            name: _array(found[name] if name in PER_TOKEN else [float(found[name])]).astype(np.float32)
            for name in FIELDS
            if found.get(name) is not None
        }


# --- as the files store them ------------------------------------------------------------------------------------------


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
    "order",  # in the k-th row of a group: the sample that is k-th when they are sorted by their ids
    "lcp",  # in the k-th row: tokens that this k-th sample shares with the one sorted before it; 0 for the first
)
Ints = npt.NDArray[np.int64]
BIT_ORDER: Final = "little"


def scored_tokens(tokens: Ints, prompts: Ints) -> Ints:
    """Return the number of scored tokens of samples: [samples]."""
    return tokens - np.maximum(prompts, 0)


class StoredGroup(NamedTuple):
    """A group as arrays, in the form of the files."""

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
    """Return the order of sequences sorted by their ids, and the tokens that each shares with its predecessor there.

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
    """Return the form of a field, in the words of `LossEdges.field`: "token" or "sample"."""
    assert name in FIELDS
    return "token" if name in PER_TOKEN else "sample"
