"""The four sentinels of the chat format, and how text that contains one is recognized (PR-01, PR-03; D6)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPECIAL_TOKENS: Final[tuple[str, str, str, str]] = (
    "<|ngpt_sys_84a5023f67d74cf29cc4001becde983c|>",
    "<|ngpt_usr_84a5023f67d74cf29cc4001becde983c|>",
    "<|ngpt_asst_84a5023f67d74cf29cc4001becde983c|>",
    "<|ngpt_eot_84a5023f67d74cf29cc4001becde983c|>",
)
"""Literals in the order system, user, assistant, end of turn (PR-03)."""

SPECIAL_TOKEN_NAMES: Final[tuple[str, str, str, str]] = ("sys", "usr", "asst", "eot")
"""The keys of `special_token_ids`, in the order of SPECIAL_TOKENS."""

RESERVED_LITERALS: Final[tuple[str, ...]] = (*SPECIAL_TOKENS, *(f"<|{name}|>" for name in SPECIAL_TOKEN_NAMES))
"""Literals that no source text may contain: the sentinels, and the short forms of older models of this format."""

_RESERVED = re.compile("|".join(map(re.escape, RESERVED_LITERALS)))


def find_reserved_literal(text: str) -> str | None:
    """Return the first reserved literal in a text, or None.

    Builders check the ids as well (`sentinel_lookup`): a model's normalization may create a sentinel.
    """
    if "|" not in text or "<|" not in text:  # nearly every text; searching one character is much faster
        return None
    match = _RESERVED.search(text)
    return None if match is None else match.group()


def sentinel_lookup(special_ids: Mapping[str, int], vocab_size: int) -> NDArray[np.bool_]:
    """Return a bool table [vocab_size], true at the sentinels: `table[ids].any()` is true if `ids` contains one.

    Raises: ValueError for an id outside the vocabulary.
    """
    import numpy as np

    table = np.zeros(vocab_size, dtype=np.bool_)
    for name, token_id in special_ids.items():
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"special id {name}={token_id}: expected 0 <= id < vocab_size={vocab_size}")
        table[token_id] = True
    return table
