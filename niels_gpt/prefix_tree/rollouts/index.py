"""check_index: whether the index of a rollout cache fits itself and the sizes of the files that it points into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from niels_gpt.cache.mmap import public_file
from niels_gpt.prefix_tree.rollouts.format import GROUP_COLUMNS, Ints, scored_tokens
from niels_gpt.prefix_tree.rollouts.records import PER_SAMPLE, PER_TOKEN
from niels_gpt.storage.errors import REBUILD, CacheError

_PIECE = 1 << 18  # samples that are checked at once, and at least one group
MAX_TOKENS = 1 << 31
"""Of a sample: more would overflow its attention pairs."""


def check_index(folder: Path, split: str, groups: Ints, samples: Ints, sizes: Mapping[str, int]) -> None:
    """Raise CacheError unless every number of the index is as docs/formats.md has it.

    groups: int64 [groups, 9]. samples: int64 [samples, 5]. sizes: entries of the files by name: tokens, bytes of loss
    bits and ids, and float32 of each field. What only the ids tell (shared prefixes) is left to the deep check.
    """
    path = public_file(folder / f"index/{split}_groups.npy")
    counts, column = groups[:, 1], dict(zip(GROUP_COLUMNS, groups.T, strict=True))
    if counts.min() < 1 or counts.max() > len(samples):
        raise CacheError(path, f"a group of {counts.min()} samples", "1 or more", REBUILD, code="E203")
    ends = np.cumsum(counts)  # no overflow: each is at most the number of rows, and so is their number
    if ends[-1] != len(samples) or not np.array_equal(column["first_sample"], ends - counts):
        raise CacheError(path, "first_sample", f"sums of samples, {len(samples)} in all", REBUILD, code="E203")
    begins = dict.fromkeys(("first_token", "first_byte", "first_score"), 0)
    for first, last in _pieces(ends):
        rows = samples[ends[first] - counts[first] : ends[last - 1]]
        problem = _row_problem(rows, counts[first:last], sizes["tokens"])
        if problem:
            name = public_file(folder / f"index/{split}_samples.npy")
            raise CacheError(name, f"{problem} in groups {first} to {last - 1}", remedy=REBUILD, code="E203")
        for key, expected in _derived(rows, counts[first:last]).items():
            actual = column[key][first:last]
            if key in begins:
                at = begins[key]
                begins[key] = at + int(expected.sum())
                expected = at + np.cumsum(expected) - expected
            if not np.array_equal(actual, expected):
                wrong = int((actual != expected).argmax())
                found = f"{key} of group {first + wrong} is {actual[wrong]}"
                raise CacheError(path, found, f"{expected[wrong]} by its samples", REBUILD, code="E203")
    _check_ends(folder, split, begins, len(samples), sizes)
    lines = column["first_id"]
    if lines[0] != 0 or (np.diff(lines) < 1).any() or lines[-1] >= sizes["ids"]:
        raise CacheError(path, "first_id", "rising bytes of the file of ids", REBUILD, code="E203")


def _check_ends(folder: Path, split: str, ends: Mapping[str, int], samples: int, sizes: Mapping[str, int]) -> None:
    expected = {"tokens": ends["first_token"], "loss": ends["first_byte"]}
    expected |= {name: ends["first_score"] for name in PER_TOKEN} | dict.fromkeys(PER_SAMPLE, samples)
    for name, size in sizes.items():
        if size != expected.get(name, size):
            path = public_file(folder / f"{split}_{name}.bin")
            raise CacheError(path, f"{size} entries", f"{expected[name]} by the index", REBUILD, code="E203")


def sums(groups: Ints, samples: Ints) -> dict[str, int]:
    """Return what meta.json counts of a split, under its keys; groups, samples and tokens are in `totals`."""
    lengths, prompts, targets, _, _ = samples.T
    return {
        "groups": len(groups),
        "samples": len(samples),
        "tokens": int(lengths.sum()),
        "tokens_after": int(groups[:, 7].sum()),
        "pairs": int((lengths * (lengths + 1) // 2).sum()),
        "pairs_after": int(groups[:, 8].sum()),
        "loss_tokens": int(targets.sum()),
        "scores": int(scored_tokens(lengths, prompts).sum()),
        "samples_without_target": int((targets == 0).sum()),
    }


def _pieces(ends: Ints) -> Iterator[tuple[int, int]]:
    """Yield ranges of groups with at most _PIECE samples, or of one group."""
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(ends.searchsorted(begin + _PIECE, side="right")))
        yield first, last
        first = last


def _row_problem(rows: Ints, counts: Ints, tokens: int) -> str | None:
    """Return what is wrong with the samples of whole groups; None if nothing is."""
    lengths, prompts, targets, order, lcps = rows.T
    starts = np.cumsum(counts) - counts
    if lengths.min() < 1 or lengths.max() > min(tokens, MAX_TOKENS):
        return "a sample of 0 tokens, or of more than there are"
    if (prompts < -1).any() or (prompts >= lengths).any():
        return "a prompt that is not shorter than its sample"
    if (targets < 0).any() or (targets >= lengths).any():
        return "more targets than tokens after the first"
    if (order < 0).any() or (order >= counts.repeat(counts)).any():
        return "an order beyond its group"
    places = order + starts.repeat(counts)
    if not (np.bincount(places, minlength=len(rows)) == 1).all():
        return "an order that names a sample twice"
    sizes = lengths[places]
    before = np.minimum(sizes, np.append(0, sizes[:-1]))
    before[starts] = 0
    if (lcps < 0).any() or (lcps > before).any():
        return "an lcp that is longer than its samples"
    return None


def _derived(rows: Ints, counts: Ints) -> dict[str, Ints]:
    """Return what the samples of whole groups say of each group: the sizes of its parts, and its folding."""
    lengths, prompts, _, order, lcps = rows.T
    starts = np.cumsum(counts) - counts

    def sums(values: Ints) -> Ints:
        return np.add.reduceat(values, starts)

    total, sizes = sums(lengths), lengths[order + starts.repeat(counts)]
    shared = lcps.copy()
    shared[starts] = sizes[starts]
    prefix = np.where(counts > 1, np.minimum.reduceat(shared, starts), 0)
    return {
        "prefix": prefix,
        "first_token": total - (counts - 1) * prefix,
        "first_byte": -(-total // 8),
        "first_score": sums(scored_tokens(lengths, prompts)),
        "tokens_after": sums(sizes - lcps),
        "pairs_after": sums((sizes * (sizes + 1) - lcps * (lcps + 1)) // 2),
    }
