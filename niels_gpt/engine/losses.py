"""Counts losses in texts that are kept: changed by decoding, or with unknown ids; and warns of them.

The builders count dropped texts. All counts are in each checkpoint, so a resumed build has the same ones.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from niels_gpt.chat_template import roles_counted, roles_of
from niels_gpt.signals import ODD_TEXTS, Counts, warn_of_signals
from niels_gpt.tokenizers.protocol import Ids

if TYPE_CHECKING:  # what prints losses loads no tokenizer's library
    from niels_gpt.encoding import EncodedTexts, TextEncoder

logger = logging.getLogger(__name__)

ROUNDTRIP_TEXTS: Final = 1_000
ROUNDTRIP_BYTES: Final = 1 << 18
"""The first texts of a build are decoded and compared, up to this number or this many utf-8 bytes: about 20 ms."""
ROUNDTRIP_SHARE: Final = 256
"""A later text is compared if its digest is a multiple of this, so threads and resumes change nothing."""
UNKNOWN_IDS: Final = "unknown_ids"

_TEXTS, _DIFFER, _BYTES = "roundtrip_texts", "roundtrip_differ", "roundtrip_bytes"
_COMPARED_IDS = 1 << 10  # only the beginning of a longer text is compared, so that one book does not use all bytes


class Losses:
    """Counts losses in the texts that enter a cache, in `warnings`. `warn` logs them at the end."""

    def __init__(self, encoder: TextEncoder, warnings: Counts) -> None:
        self._warnings = warnings
        self._decode = getattr(encoder.tokenizer, "decode", None)
        self._encode = encoder.tokenizer.encode
        self._unk_id: int | None = getattr(encoder.tokenizer, "unk_id", None)
        self._num_starts, self._num_ends = int(encoder.prepend is not None), int(encoder.append is not None)
        self._changed = ""  # an example of a text that decoding changes
        self._unknown = ""  # an example of an unknown character

    def look(
        self,
        texts: Sequence[bytes | str],
        encoded: EncodedTexts,
        kept: NDArray[np.int64],
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        """Count the losses in a batch.

        texts: all texts of the batch. kept: int64 numbers of the texts in the cache, ascending.
        lengths: int64 [texts], tokens of each text that enter the cache; None if no text is truncated.
        """
        if self._unk_id is not None and (encoded.ids == self._unk_id).any():
            self._count_unknown(texts, encoded, kept, encoded.lengths if lengths is None else lengths)
        if self._decode is None:
            return
        ends, is_drawn = np.cumsum(encoded.lengths), encoded.digests % ROUNDTRIP_SHARE == 0
        for number in (kept[is_drawn[kept]] if self._compared_enough() else kept).tolist():
            is_lossy = not ODD_TEXTS.issuperset(encoded.notes.get(number, ()))
            if is_lossy or not texts[number]:  # counted already, or nothing to lose
                continue
            if not is_drawn[number] and self._compared_enough():
                continue
            start, end = int(ends[number] - encoded.lengths[number]), int(ends[number])
            of_text = encoded.ids[start + self._num_starts : end - self._num_ends]
            self._compare(_string(texts[number]), of_text)

    def _compared_enough(self) -> bool:
        return self._warnings[_TEXTS] >= ROUNDTRIP_TEXTS or self._warnings[_BYTES] >= ROUNDTRIP_BYTES

    def _compare(self, text: str, ids: Ids) -> None:
        assert self._decode is not None
        decoded = self._decode(ids[:_COMPARED_IDS])
        if len(ids) > _COMPARED_IDS:
            decoded = decoded.rstrip("\ufffd")  # a character of several bytes that is truncated
            text = text[: len(decoded)]
        self._warnings[_TEXTS] += 1
        self._warnings[_BYTES] += len(text.encode())
        if decoded != text:
            from niels_gpt.tokenizers.probes import first_difference

            self._warnings[_DIFFER] += 1
            self._changed = self._changed or first_difference(text, decoded)

    def _count_unknown(
        self, texts: Sequence[bytes | str], encoded: EncodedTexts, kept: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        is_unknown, starts = encoded.ids == self._unk_id, np.cumsum(encoded.lengths) - encoded.lengths
        for number in kept.tolist():
            count = int(np.count_nonzero(is_unknown[starts[number] : starts[number] + lengths[number]]))
            self._warnings[UNKNOWN_IDS] += count
            if count and not self._unknown:
                text = _string(texts[number])
                unknown = (character for character in text if self._unk_id in self._encode(character))
                self._unknown = f", such as {next(unknown, text[:20])!a}"

    def warn(self, where: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        """Log the losses of a cache that was just built, with an example if this run has seen one."""
        warn_of_losses(where, meta, self._changed, self._unknown)


def warn_of_losses(
    where: str | os.PathLike[str], meta: Mapping[str, Any], changed: str = "", unknown: str = ""
) -> None:
    """Log the losses of a cache that was just made (W401, W402, W310), and its signs of an odd source (W314).

    changed: an example of a text that decoding changes. unknown: an unknown character, as the end of a sentence.
    """
    trip = meta["roundtrip"]
    if trip["differ"]:
        logger.warning(
            "%s: the tokenizer is lossy: %d of %d texts%s change when they are encoded and decoded%s. A "
            "tokenizer that is trained here with the default normalization loses nothing",
            where,
            trip["differ"],
            trip["texts"],
            " of its partitions" if "partitions" in meta else "",
            f"; {changed}" if changed else "",
            extra={"code": "W401"},
        )
    warn_of_unknown(where, meta["unknown_ids"], unknown)
    warn_of_signals(where, meta)
    if meta["kind"] == "sft":
        _warn_of_roles(where, meta)


def warn_of_unknown(where: str | os.PathLike[str], count: int, example: str = "") -> None:
    """Log W402 if ids of a cache that was just built are the unknown id. example: an end of the sentence."""
    if count:
        logger.warning(
            "%s: %d ids are the unknown id: the tokenizer has no piece for a character%s, and no bytes to spell it",
            where,
            count,
            example,
            extra={"code": "W402"},
        )


def _string(text: bytes | str) -> str:
    return text if isinstance(text, str) else text.decode()


def loss_keys(warnings: Counts) -> dict[str, Any]:
    """Return the keys of meta.json made from the counts: roundtrip, lossless, unknown_ids, noticed, first_noticed."""
    texts, differ = warnings.get(_TEXTS, 0), warnings.get(_DIFFER, 0)
    elsewhere = (_TEXTS, _DIFFER, _BYTES, UNKNOWN_IDS)
    return {
        "roundtrip": {"texts": texts, "differ": differ},
        "lossless": differ == 0 if texts else None,
        "unknown_ids": warnings.get(UNKNOWN_IDS, 0),
        "noticed": {key: number for key, number in sorted(warnings.items()) if key not in elsewhere and number},
        **warnings.keys_of_meta(),
    }


def loss_table(meta: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, str]:
    """Return the losses in a meta.json as rows of a table: title -> text.

    without: counters to leave out. Values in another form than in docs/formats.md are left out too: another tool may
    have written the file.
    """
    rows = {}
    source = meta.get("source")
    counters = source.get("counters") if isinstance(source, Mapping) else None
    trip, kept = meta.get("roundtrip"), _numbers(meta.get("noticed")) | roles_counted(_numbers(counters))
    kept = {name: number for name, number in kept.items() if name not in without}
    if kept:
        rows["noticed"] = ", ".join(f"{name} {number:,}" for name, number in sorted(kept.items()))
    if isinstance(trip, Mapping) and _numbers(trip).get("texts"):
        texts, differ = _numbers(trip)["texts"], _numbers(trip).get("differ", 0)
        of = f"{texts:,} probe texts" if meta.get("kind") == "tokenizer" else f"{texts:,} compared"
        rows["round trip"] = f"lossy: {differ:,} of {of} differ" if differ else f"{texts:,} compared texts come back"
    if "unknown_ids" in meta:
        rows["unknown ids"] = f"{_numbers(meta).get('unknown_ids', 0):,}"
    return rows


def _numbers(value: Any) -> dict[str, int]:
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(key): number for key, number in items if type(number) is int}


def _warn_of_roles(where: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    roles = Counter(roles_of(meta["noticed"])) + Counter(roles_of(meta["source"]["counters"]))
    if roles:
        logger.warning(
            "%s: chats are left out, for a message of another role than system, user and assistant: %s. Give these "
            "messages one of the three roles, or remove them from the chats, and build again",
            where,
            ", ".join(f"{role!a} {number}" for role, number in roles.most_common()),
            extra={"code": "W310"},
        )
