"""What both adapters share: checks of their arguments, and how a pickled one opens its file again. Without numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from niels_gpt.storage.errors import CacheError, SourceError, TokenizerError

if TYPE_CHECKING:
    from niels_gpt.tokenizers.protocol import FullTokenizer

T = TypeVar("T", bound="FullTokenizer")


def checked_ids(ids: Any, vocab_size: int, where: str) -> list[int]:
    """Return a 1-D sequence, array or tensor of ids as a list.

    where: the model, for messages.
    Raises: TokenizerError E409 for an id outside the vocabulary; ValueError for more than one dimension.
    """
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if isinstance(values, list) and {*map(type, values)} == {int} and min(values) >= 0 and max(values) < vocab_size:
        return values if values is not ids else values.copy()  # without a step of Python for each id
    if not isinstance(values, list) or any(isinstance(value, list) for value in values):
        raise ValueError(f"ids of shape {tuple(getattr(ids, 'shape', ()))}: expected one dimension")
    wrong = next((value for value in values if not 0 <= value < vocab_size), None)
    if wrong is not None:
        raise TokenizerError(f"id {wrong}: expected 0 <= id < vocab_size={vocab_size} of {where}", code="E409")
    return [int(value) for value in values]


def refuse_surrogates(texts: Sequence[str], error: Exception) -> None:
    """Raise SourceError E304 for the first lone surrogate in texts that a library refused with `error`."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as bad:
            raise SourceError(
                f"text {index}, character {bad.start}: lone surrogate {text[bad.start]!a}, which utf-8 cannot "
                "hold. Replace it first, for instance by U+FFFD",
                code="E304",
            ) from error


def changed(path: str) -> CacheError:
    """Return the error for a tokenizer's file that changed after it was opened."""
    remedy = "Do not change the tokenizer during a run, and start again"
    return CacheError(path, "has another sha256 than when it was opened", remedy=remedy, code="E402")


def reopened(open_again: Callable[[], T], sha256: str) -> T:
    """Unpickle a tokenizer: open its file again. Raises: CacheError E402 if the file has changed."""
    tokenizer = open_again()
    if tokenizer.sha256 != sha256:
        raise changed(tokenizer.model_path)
    return tokenizer
