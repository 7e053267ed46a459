"""The object that `dataset[i]` returns: a document or an example as people read it.

Sentinels have short names, such as <|eot|>. Supervised tokens are in [[ ]]; in a notebook they are green. The tokenizer
is opened for the first text, so ids and mask need no SentencePiece.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from niels_gpt.display.tables import escaped_html, shown
from niels_gpt.storage.meta_json import printable
from niels_gpt.tokenizers.protocol import Ids

_MORE = " …"
_REPR_CHARACTERS = 60
_HTML_TOKENS, _HTML_CHARACTERS = 2_000, 20_000  # a notebook file stores them
_NO_TEXT = (ImportError, LookupError, OSError, RuntimeError, ValueError)  # SentencePiece raises the second and fourth
_SUPERVISED = "color:#1a7f37;font-weight:600"


class Decoder(Protocol):
    """Turns ids into text. With `control_ids` and `token` it shows special tokens too."""

    @property
    def sha256(self) -> str:
        """The sha256 of the model file."""

    def decode(self, ids: Any, /) -> str:
        """Return the text of a sequence of ids."""


class Decoded:
    """A document of a pretrain cache, or an example of an sft cache.

    ids: uint16 or uint32 [tokens], read-only. mask: bool [tokens], true for supervised tokens; None for a document:
    all of its tokens are supervised. `str` gives the text with supervised tokens in [[ ]].
    """

    def __init__(
        self,
        name: str,
        ids: Ids,
        mask: NDArray[np.bool_] | None,
        sentinels: Mapping[int, str],
        tokenizer: Callable[[], Decoder],
    ) -> None:
        """name: names cache, split and number. sentinels: short names by id. tokenizer: called for every text."""
        self.name, self.mask, self._sentinels, self._tokenizer = name, mask, dict(sentinels), tokenizer
        self.ids = ids.view()
        self.ids.flags.writeable = False

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def text(self) -> str:
        """The text, with short names for sentinels.

        Raises: ImportError without SentencePiece; FileNotFoundError, CacheError without the tokenizer of these ids.
        """
        return decoded_text(self.ids, self._sentinels, self._tokenizer())

    def __str__(self) -> str:
        """Return the text with supervised tokens in [[ ]], control characters escaped. Raises the errors of `text`."""
        return "".join(f"[[{shown(text)}]]" if is_target else shown(text) for is_target, text in self._parts(len(self)))

    def __repr__(self) -> str:
        """Return name, sizes and the beginning of the text on one line; without a tokenizer the first ids."""
        try:
            parts = self._parts(_REPR_CHARACTERS)
        except _NO_TEXT:
            beginning = " ".join(map(str, self.ids[:12].tolist())) + (_MORE if len(self) > 12 else "")
        else:
            text = "".join(f"[[{text}]]" if is_target else text for is_target, text in parts)
            whole = printable(text[: _REPR_CHARACTERS + 1])
            is_cut = len(whole) > _REPR_CHARACTERS or len(self) > _REPR_CHARACTERS
            beginning = whole[:_REPR_CHARACTERS] + (_MORE if is_cut else "")
        return f"<{self._head()}: {beginning}>"

    def _repr_html_(self) -> str:
        try:
            parts = self._parts(_HTML_TOKENS)
        except _NO_TEXT as error:
            parts = [(False, f"{self.ids}\n{error}")]
        pieces, left = [], _HTML_CHARACTERS
        for is_target, text in parts:
            pieces.append(escaped_html(text[: max(left, 0)], _SUPERVISED if is_target else ""))
            left -= len(text)
        more = _MORE if len(self) > _HTML_TOKENS or left < 0 else ""
        head = escaped_html(self._head())
        return f'<div><b>{head}</b><pre style="white-space:pre-wrap">{"".join(pieces)}{more}</pre></div>'

    def _head(self) -> str:
        supervised = "" if self.mask is None else f", {int(self.mask.sum()):,} supervised"
        return printable(f"{self.name}: {len(self):,} tokens{supervised}")

    def _parts(self, num_tokens: int) -> list[tuple[bool, str]]:
        """Return the text of the first tokens in runs, each with whether it is supervised; a document is one run."""
        ids, tokenizer = self.ids[:num_tokens], self._tokenizer()
        mask = np.zeros(len(ids), dtype=np.bool_) if self.mask is None else self.mask[:num_tokens]
        return [
            (bool(mask[start]), decoded_text(ids[start:end], self._sentinels, tokenizer))
            for start, end in runs(mask)
            if start < end
        ]


class DecodedItems(ABC):
    """Documents or examples by number, as in a list: dataset[0], dataset[-1], dataset[2:5]."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of items."""

    @abstractmethod
    def _item(self, number: int) -> Decoded:
        """Return item `number`, 0 <= number < len(self)."""

    def __bool__(self) -> bool:
        return True

    @overload
    def __getitem__(self, index: int) -> Decoded: ...
    @overload
    def __getitem__(self, index: slice) -> list[Decoded]: ...

    def __getitem__(self, index: int | slice) -> Decoded | list[Decoded]:
        """Return an item, or a list of items for a slice. Raises: IndexError."""
        count = len(self)
        if isinstance(index, slice):
            return [self._item(number) for number in range(*index.indices(count))]
        number = operator.index(index)
        if not -count <= number < count:
            raise IndexError(f"index {number}: expected {-count} <= index < {count}")
        return self._item(number % count)

    def __iter__(self) -> Iterator[Decoded]:
        return map(self._item, range(len(self)))


def decoded_text(ids: Ids, sentinels: Mapping[int, str], tokenizer: Decoder) -> str:
    """Return the text of ids. Sentinels have short names; other special tokens have their literals.

    SentencePiece's own decoding would leave special tokens out.
    """
    is_special, literal = is_special_token(ids, sentinels, tokenizer), getattr(tokenizer, "token", str)
    return "".join(
        "".join(sentinels.get(id) or literal(id) for id in ids[start:end].tolist())
        if is_special[start]
        else tokenizer.decode(ids[start:end].tolist())
        for start, end in runs(is_special)
        if start < end
    )


def is_special_token(ids: Ids, sentinels: Mapping[int, str], tokenizer: Decoder) -> NDArray[np.bool_]:
    """Return which ids are sentinels or other special tokens: bool [tokens]."""
    control: Collection[int] = getattr(tokenizer, "control_ids", ())
    return np.isin(ids, [*sentinels, *control])


def runs(values: NDArray[Any]) -> list[tuple[int, int]]:
    """Return start and end of each run of equal values; [(0, 0)] for no values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(pairwise(edges))
