"""What both adapters check of their arguments: ids to decode, and texts that utf-8 cannot hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from niels_gpt.storage.errors import SourceError, TokenizerError


def checked_ids(ids: Any, vocab_size: int, where: str) -> list[int]:
    """Return a sequence, array or tensor of ids as a list.

    where: names the model in errors.
    Raises: ValueError for an id outside the vocabulary, or for more than one dimension.
    """
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(values, list) or any(isinstance(value, list) for value in values):
        raise ValueError(f"ids of shape {tuple(getattr(ids, 'shape', ()))}: expected one dimension")
    wrong = next((value for value in values if not 0 <= value < vocab_size), None)
    if wrong is not None:
        raise TokenizerError(f"id {wrong}: expected 0 <= id < vocab_size={vocab_size} of {where}", code="E409")
    return [int(value) for value in values]


def refuse_surrogates(texts: Sequence[str], error: Exception) -> None:
    """Raise ValueError for the first lone surrogate in some texts, which a library refused with `error`."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as bad:
            raise SourceError(
                f"text {index}, character {bad.start}: lone surrogate {text[bad.start]!a}, which utf-8 cannot "
                "hold. Replace it first, for instance by U+FFFD",
                code="E304",
            ) from error
