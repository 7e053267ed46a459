"""The four sentinels of the chat format, and the search for one in a text (PR-01, PR-03; D6)."""

from __future__ import annotations

import re
from typing import Final

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
"""Literals that no source text may contain: the sentinels, and their short forms in older models of this format."""

_RESERVED = re.compile("|".join(map(re.escape, RESERVED_LITERALS)))


def find_reserved_literal(text: str) -> str | None:
    """Return the first reserved literal in a text, or None.

    Builders check the ids as well: a model's normalization may create a sentinel.
    """
    if "|" not in text or "<|" not in text:  # nearly every text; searching one character is much faster
        return None
    match = _RESERVED.search(text)
    return None if match is None else match.group()
