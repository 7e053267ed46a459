"""gigatoken as an engine: any number of threads, bounded memory, and which texts are left to the reference.

Its tables are of Unicode 17, those of the library tokenizers are older: a few letters, and the order of some combining
marks, would give other ids.
"""

from __future__ import annotations

import os
import re
import threading
import unicodedata
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.errors import CacheError
from niels_gpt.tokenizers.gigatoken.memory import Memory
from niels_gpt.tokenizers.gigatoken.models import SHOWN, model_of, opened
from niels_gpt.tokenizers.huggingface import is_of_library
from niels_gpt.tokenizers.protocol import FullTokenizer

MAX_GROWTH: Final = 64 << 20
"""Bytes that the process may grow by before gigatoken is opened again. To open it takes 35 MB for GPT-2."""
_LEADS = (0xE0, 0xE1, 0xEA, 0xF0)  # first bytes in utf-8 of what _NEW_LETTERS finds
_NEW_LETTERS = re.compile(
    rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)|\xe1\xab[\x8f-\xab]|\xea\x9f[\x8e\x8f\x92\x94\xb1]"
    rb"|\xf0[\x90\x91\x96\x98\x9e\xab\xac\xb2\xb3]"
)
"""Letters, digits and marks of Unicode 17, in utf-8; in the planes above the first, all of their 4,096 neighbours."""


class GigatokenEngine:
    """gigatoken with a tokenizer. Each call works in the caller's thread, and any number of threads may call."""

    name = "gigatoken"

    def __init__(self, tokenizer: FullTokenizer, *, max_growth: int = MAX_GROWTH) -> None:
        """Open the model of a tokenizer. Raises: UnusableError; CacheError if its file has changed."""
        self._tokenizer = tokenizer
        self._model = model_of(tokenizer)
        self._opened = opened(self._model)
        self._memory = Memory(max_growth)
        self._reopening: dict[int, threading.Lock] = {}  # by process: a fork may copy a lock while it is held

    @property
    def literals(self) -> tuple[str, ...]:
        """The literals that are tokens; see Model."""
        return self._model.literals

    @property
    def times_reopened(self) -> int:
        """How often its cache was dropped."""
        return self._memory.times_reopened

    def may_differ(self, text: bytes) -> bool:
        """Whether the reference has to encode a text, since their tables of Unicode differ on it.

        Where a tokenizer composes characters (NFC), gigatoken is opened without that: a text that is composed by newer
        tables than the reference's is so by the older ones too, and any other text is the reference's.
        """
        if text.isascii():
            return False
        if any(lead in text for lead in _LEADS) and _NEW_LETTERS.search(text):
            return True
        return self._model.composes and not unicodedata.is_normalized("NFC", str(text, "utf-8"))

    def encode(self, texts: Sequence[bytes]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return ids and lengths; see niels_gpt.tokenizers.engine.Engine."""
        import awkward

        current = self._opened  # another thread may replace it meanwhile
        try:
            # Not with its own threads: a forked child would not have them, and wait for ever.
            rows = current.encode_batch(texts if isinstance(texts, list) else list(texts), parallel=False)
        except BaseException as error:
            if not is_of_library(error):
                raise
            found = f"gigatoken cannot encode a text ({str(error)[:SHOWN]!a})"
            remedy = "Build with the reference: --engine reference"
            raise CacheError(self._tokenizer.model_path, found, remedy=remedy, code="E411") from error
        del current
        ids, lengths = awkward.flatten(rows).to_numpy(), awkward.num(rows).to_numpy()
        self._bound_cache(sum(map(len, texts)))
        return ids, lengths

    def _bound_cache(self, num_bytes: int) -> None:
        lock = self._reopening.setdefault(os.getpid(), threading.Lock())
        if lock.acquire(blocking=False):  # one thread does this, and none waits for it
            try:
                if self._memory.is_full(num_bytes):
                    self._opened = opened(self._model)
            finally:
                lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return GigatokenEngine, (self._tokenizer,)
