"""Which tokens hold the characters of a reply, and whether a text's beginning has the tokens that it has alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from niels_gpt.eagle3.templates import Spans

_CHECKED_EDGES = 16


def mask_of(offsets: NDArray[np.int64], spans: Spans) -> tuple[NDArray[np.bool_], bool]:
    """Return which tokens hold a character of a span, bool [tokens], and whether one holds others as well.

    offsets: int64 [tokens, 2], start and end of each token in characters of the text.
    """
    starts, ends = offsets[:, 0].copy(), offsets[:, 1]
    # Some tokenizers take white space off a token's offsets: one of spaces alone begins where the last one ended.
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
    """Return the ends of a text's beginnings whose tokens are compared: the first 16 and the last, but the whole."""
    inner = [edge for edge in edges if 0 < edge < len(text)]
    return sorted({*inner[:_CHECKED_EDGES], *inner[-1:]})


def first_foreign(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str, edge: int, alone: Sequence[int]
) -> int | None:
    """Return the first token in which text[:edge] alone is not the beginning of the text, or None.

    ids, offsets: of the text.
    alone: ids of text[:edge].
    The last word of the beginning, with the white space around it, may be divided into other tokens: it can merge with
    what follows, and white space at an end of a text is one token where in front of a word it may be two.
    """
    at = next((place for place, (one, two) in enumerate(zip(ids, alone, strict=False)) if one != two), None)
    if at is None:
        return None if len(alone) <= len(ids) else len(ids)
    return None if offsets[at][0] >= _last_word(text[:edge]) else at


def _last_word(text: str) -> int:
    """Return where the last word begins, in characters, the white space in front of it included."""
    words = text.rsplit(maxsplit=1)
    if len(words) < 2:
        return 0
    return len(words[0].rstrip())
