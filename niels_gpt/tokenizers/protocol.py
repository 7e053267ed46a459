"""What builders and readers need of a tokenizer, whatever made it, and what identifies it.

Both adapters have all members of `Tokenizer`: SentencePieceTokenizer (niels_gpt/tokenizer.py) and HuggingFaceTokenizer
(huggingface.py). A caller's own object needs the first three only; the functions below give the others their defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.fileio import sha256_file

KINDS: Final = ("sentencepiece", "huggingface")
PROBE = "The quick brown fox jumps over 13 lazy dogs; (naïve) {code} = [0x7F]\n\tДа, 漢字 🦊!"
NARROW_IDS: Final = 1 << 16
"""Ids that fit uint16. A cache of a larger vocabulary has tokens of 32 bits (D18)."""
MAX_IDS: Final = 1 << 31
"""The most ids of a cache's vocabulary: each then fits int32 too, which every device can cast."""
TOKEN_DTYPES: Final[dict[str, np.dtype[Any]]] = {"uint16-le": np.dtype("<u2"), "uint32-le": np.dtype("<u4")}
"""`token_dtype` in meta.json, and the dtype of the token files."""

Ids = NDArray[np.unsignedinteger[Any]]
"""Tokens of a cache: uint16 or uint32, as its meta.json says."""


class Tokenizer(Protocol):
    """The members that a builder cannot do without."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: the largest one and 1, added tokens included."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS."""

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the four sentinels by sys, usr, asst and eot; {} for a tokenizer without them."""


class FullTokenizer(Tokenizer, Protocol):
    """The members of both adapters."""

    kind: str
    """One of KINDS."""
    model_path: str
    """The file that the ids come from: spm.model or tokenizer.json."""

    @property
    def sha256(self) -> str:
        """The hex sha256 of the file at `model_path` when it was opened; `tokenizer_sha256` in meta.json."""

    @property
    def unk_id(self) -> int | None:
        """The id of characters without a piece; None if there is no such id."""

    @property
    def eos_id(self) -> int | None:
        """The id that the tokenizer's makers end a text with; None if it names none."""

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that no text may give: special tokens and the sentinels, without the unknown id.

        Where the literal of one is in a text, `encode` may give the id itself; builders find it (D26).
        """

    def encode_batch(self, texts: Sequence[str], /, *, num_threads: int = 1) -> list[NDArray[Any]]:
        """Return the ids of each text as an integer array [tokens]; threads change the speed only."""

    def encode_plain(self, texts: Sequence[str], /) -> list[NDArray[Any]]:
        """Return the ids of each text with the literals of control tokens as plain text: no control id.

        Raises: ValueError for a tokenizer that cannot.
        """

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of ids, special tokens included."""

    def token_id(self, literal: str, /) -> int | None:
        """Return the id of one token by its literal, such as "<|endoftext|>"; None if there is none."""

    def token(self, token_id: int, /) -> str:
        """Return the literal of an id, for people: of a byte piece, what the vocabulary calls it."""


def ids_before(ids: Sequence[int], of_text: Sequence[int]) -> tuple[int, ...]:
    """Return the ids before the ids of a text, which are among `ids`; () where they are not."""
    count = next((at for at in range(len(ids)) if [*ids[at : at + len(of_text)]] == [*of_text]), 0)
    return tuple(ids[:count])


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of a cache's tokens: uint16 little-endian, or uint32 for ids of 65,536 and more (D18)."""
    return np.dtype("<u2" if vocab_size <= NARROW_IDS else "<u4")


def token_dtype_name(vocab_size: int) -> str:
    """Return `token_dtype` of a cache's meta.json: "uint16-le", or "uint32-le" for ids of 65,536 and more (D18)."""
    dtype = token_dtype(vocab_size)
    return next(name for name, each in TOKEN_DTYPES.items() if each == dtype)


def control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return `control_ids` of a tokenizer; the sentinels of one that does not have the member."""
    known: frozenset[int] | None = getattr(tokenizer, "control_ids", None)
    return frozenset(tokenizer.special_token_ids().values()) if known is None else known


def tokenizer_sha256(tokenizer: Tokenizer) -> str | None:
    """Return the sha256 of the model that a tokenizer opened; None for a tokenizer without a model.

    Call it before a build: the file at `model_path` may be replaced later.
    """
    known: str | None = getattr(tokenizer, "sha256", None)
    path = getattr(tokenizer, "model_path", None)
    return known if known is not None or path is None else sha256_file(path)


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """Return what identifies a tokenizer: its model's sha256, or without a model the sha256 of PROBE's ids."""
    known = tokenizer_sha256(tokenizer)
    if known is not None:
        return known
    try:
        identity = repr(list(tokenizer.encode(PROBE)))
    except Exception as error:  # a tokenizer that cannot encode PROBE is identified by its type
        identity = f"{type(tokenizer)} {type(error)}"
    return sha256(identity.encode()).hexdigest()
