"""Which tokens of a text are supervised, by their offsets; and whether tokenization is prefix-stable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from niels_gpt.chat.templates import Spans

_CHECKED_EDGES = 16


def mask_of(offsets: NDArray[np.int64], spans: Spans) -> tuple[NDArray[np.bool_], bool]:
    """Return which tokens hold a character of a span, bool [tokens], and whether one holds others as well.

    offsets: int64 [tokens, 2], start and end of each token in characters of the text.
    """
    starts, ends = offsets[:, 0].copy(), offsets[:, 1]
    # Some tokenizers leave white space out of the offsets. A token of spaces alone starts where the last one ended.
    blank = np.flatnonzero(starts == ends)
    starts[blank[blank > 0]] = ends[blank[blank > 0] - 1]
    mask = np.zeros(len(offsets), dtype=np.bool_)
    merged = False
    for first, last in spans:
        inside = (starts < last) & (ends > first)
        merged = merged or bool((inside & ((starts < first) | (ends > last))).any())
        mask |= inside
    return mask, merged


def checked_edges(edges: Sequence[int], text: str) -> list[int]:
    """Return the ends of the prefixes whose tokens are compared: the first 16 and the last, without the whole text."""
    inner = [edge for edge in edges if 0 < edge < len(text)]
    return sorted({*inner[:_CHECKED_EDGES], *inner[-1:]})


def first_difference(
    ids: Sequence[int], offsets: NDArray[np.int64], text: str, edge: int, alone: Sequence[int]
) -> int | None:
    """Return the first token in which `alone`, the ids of text[:edge], is not a prefix of the text's ids, or None.

    ids, offsets: of the text, offsets as of `mask_of`.
    The last word of the prefix, with the white space around it, may have other tokens: it can merge with what follows,
    and white space at an end of a text is one token where before a word it may be two.
    """
    at = next((place for place, (one, two) in enumerate(zip(ids, alone, strict=False)) if one != two), None)
    if at is None:
        return None if len(alone) <= len(ids) else len(ids)
    words = text[:edge].rsplit(maxsplit=1)
    last_word = len(words[0].rstrip()) if len(words) > 1 else 0
    return None if offsets[at, 0] >= last_word else at
