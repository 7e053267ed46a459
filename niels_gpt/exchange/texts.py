"""Measure the text in an assembled cache: its bytes, and whether encoding it again gives the same ids.

The length of a text is a sum over its ids where a sample of documents proves that; else all documents are decoded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.mmap import load_idx, mmap_tokens
from niels_gpt.exchange.assembling import Assembled
from niels_gpt.kinds.kind import Kind
from niels_gpt.tokenizers.document_tokens import DocumentToken
from niels_gpt.tokenizers.protocol import FullTokenizer, Ids

logger = logging.getLogger(__name__)

_SAMPLE_DOCUMENTS = 128  # of each split
_SAMPLE_TOKENS = 1 << 12  # of each of them
_LAST_TOKENS = 16  # of a document that is cut: not compared
_MOST_CHANGED = 0.2  # of the ids, after decoding and encoding
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_WORD_START = "\u2581"
_PRINTED = {*range(33, 127), *range(161, 173), *range(174, 256)}
_BYTE_LEVEL = frozenset(map(chr, _PRINTED)) | frozenset(chr(256 + at) for at in range(256 - len(_PRINTED)))
"""The characters that stand for bytes in a byte-level vocabulary."""


@dataclass(frozen=True)
class _Table:
    """Bytes of text by id."""

    num_bytes: NDArray[np.int64]
    """[vocab_size]; 0 of control tokens, which no text has."""
    stripped: NDArray[np.int64]
    """[vocab_size]: bytes less where the id begins a document."""


class Texts:
    """Documents of an assembled cache with their tokenizer."""

    def __init__(
        self, done: Assembled, kind: Kind, tokenizer: FullTokenizer, end: DocumentToken | None, start: int | None
    ) -> None:
        """start: the id that may begin a document."""
        self._done, self._kind, self._tokenizer = done, kind, tokenizer
        self._end, self._start = -1 if end is None else end.id, -1 if start is None else start
        self._control = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
        self._control[sorted(tokenizer.control_ids)] = True
        self._samples = [each for split in SPLITS for each in self._sampled(split)]

    def roundtrip(self, where: Path) -> dict[str, Any]:
        """Return `roundtrip`: documents in the sample, and how many change when they are encoded again.

        Warns W205 if most ids change: another tokenizer seems to have produced them.
        """
        differ = changed = total = 0
        for ids, is_cut in self._samples:
            count, control = self._changed(ids, is_cut), self._control[ids]
            if count and control.any():
                count = min(count, self._changed(ids[~control], is_cut))
            differ, changed, total = differ + (count > 0), changed + count, total + len(ids)
        if changed > _MOST_CHANGED * total:
            logger.warning(
                "%s: %.0f %% of the ids of %d documents change when they are decoded and encoded again, as ids of "
                "another tokenizer do. Look at their text: niels-gpt show %s",
                *(where, 100 * changed / total, len(self._samples), where),
                extra={"code": "W205"},
            )
        return {"texts": len(self._samples), "differ": differ}

    def _changed(self, ids: Ids, is_cut: bool) -> int:
        """Return how many ids of a document change. The last ids of a cut document do not count."""
        try:
            again = np.asarray(self._tokenizer.encode(self._tokenizer.decode(ids.tolist())), dtype=np.int64)
        except ValueError:
            return len(ids)
        compared = max(0, len(ids) - _LAST_TOKENS) if is_cut else len(ids)
        if np.array_equal(again[:compared], ids[:compared]) and (is_cut or len(again) == len(ids)):
            return 0
        least = min(len(ids), len(again))
        begin = int(np.argmin(np.append(again[:least] == ids[:least], False)))
        end = int(np.argmin(np.append(again[::-1][:least] == ids[::-1][:least], False)))
        return max(1, len(ids) - begin - end)

    def utf8_bytes(self) -> dict[str, int]:
        """Return the utf-8 length of the text by split, without the tokens that begin and end documents."""
        table = next((each for each in self._tables() if self._is_proved(each)), None)
        if table is None:
            logger.info("the text is counted by decoding every document; --no-utf8-bytes leaves that out")
            return {split: sum(map(self._decoded_bytes, self._documents(split))) for split in SPLITS}
        of_start, of_end = (0 if each < 0 else int(table.num_bytes[each]) for each in (self._start, self._end))
        return {
            split: int(self._done.id_counts[split] @ table.num_bytes)
            - self._done.ended[split] * of_end
            - (self.with_start[split] * of_start if of_start else 0)
            - (self._stripped(split, table) if table.stripped.any() else 0)
            for split in SPLITS
        }

    def _tables(self) -> Iterator[_Table]:
        pieces = [self._tokenizer.token(token_id) for token_id in range(self._tokenizer.vocab_size)]
        added = set(getattr(self._tokenizer, "added_tokens", dict)())
        none = np.zeros(len(pieces), dtype=np.int64)
        if getattr(self._tokenizer, "kind", "") == "huggingface":
            lengths = (
                len(piece) if piece not in added and _BYTE_LEVEL.issuperset(piece) else len(piece.encode())
                for piece in pieces
            )
            yield _Table(np.where(self._control, 0, np.fromiter(lengths, np.int64, len(pieces))), none)
        words = [piece.replace(_WORD_START, " ") if not _BYTE_PIECE.fullmatch(piece) else "0" for piece in pieces]
        if self._tokenizer.unk_id is not None:
            words[self._tokenizer.unk_id] = self._tokenizer.decode([self._tokenizer.unk_id])
        sizes = np.where(self._control, 0, np.fromiter((len(word.encode()) for word in words), np.int64, len(words)))
        starts = [at for at, piece in enumerate(pieces) if piece.startswith(_WORD_START)]
        stripped = none.copy()
        stripped[starts] = [int(not self._tokenizer.decode([at]).startswith(" ")) for at in starts]
        yield _Table(sizes, np.where(self._control, 0, stripped))

    def _is_proved(self, table: _Table) -> bool:
        """Return whether sums of the table equal the lengths of the decoded sample."""
        for sample, is_cut in self._samples:
            ids = sample[~self._control[sample]]
            for _ in range(4 * is_cut):  # perhaps inside a character
                if len(ids) and self._tokenizer.decode(ids.tolist()).endswith("\ufffd"):
                    ids = ids[:-1]
            if len(ids) and int(table.num_bytes[ids].sum() - table.stripped[ids[0]]) != self._decoded_bytes(ids):
                return False
        return bool(self._samples)

    def _decoded_bytes(self, ids: Ids) -> int:
        return len(self._tokenizer.decode(ids[~self._control[ids]].tolist()).encode())

    def _stripped(self, split: str, table: _Table) -> int:
        """Return how many bytes the tokenizer strips from the first tokens of the documents of a split."""
        return sum(
            int(table.stripped[text[0]])
            for ids in self._documents(split)
            if len(text := ids[:8][~self._control[ids[:8]]])
        )

    @cached_property
    def with_start(self) -> dict[str, int]:
        """Documents by split that begin with `start`."""
        found = dict.fromkeys(SPLITS, 0)
        for split in SPLITS:
            bounds, first = self._bounds(split), 0
            for record in self._done.shards[split]:
                at, last = np.searchsorted(bounds, [first, first + record["tokens"]])
                if record["tokens"]:
                    found[split] += int(np.count_nonzero(self._mapped(record)[bounds[at:last] - first] == self._start))
                first += record["tokens"]
        return found

    # --- documents ----------------------------------------------------------------------------------------------------

    def _bounds(self, split: str) -> NDArray[np.int64]:
        """Return starts of the documents of a split, then the end of the last one. For a pretrain cache the mapped
        file."""
        tokens = sum(record["tokens"] for record in self._done.shards[split])
        if not tokens:
            return np.zeros(1, dtype=np.int64)
        has_loss = self._kind.has_loss
        name = f"{split}_idx.npy" if has_loss else f"index/{split}_docs.npy"
        starts = load_idx(self._done.work / name, num_tokens=tokens + 1)
        return np.append(starts, np.int64(tokens)) if has_loss else starts

    def _documents(self, split: str) -> Iterator[Ids]:
        """Yield the ids of each document, without the tokens that begin and end it."""
        bounds, number, position = self._bounds(split), 0, 0
        parts: list[Ids] = []
        for record in self._done.shards[split]:
            if not record["tokens"]:
                continue
            ids = self._mapped(record)
            first, last = position, position + len(ids)
            while number < len(bounds) - 1 and int(bounds[number + 1]) <= last:
                end = int(bounds[number + 1])
                parts.append(ids[position - first : end - first])
                yield self._without_added(np.concatenate(parts))
                parts, position, number = [], end, number + 1
            if position < last:
                parts.append(ids[position - first :])
            position = last

    def _sampled(self, split: str) -> Iterator[tuple[Ids, bool]]:
        """Yield beginnings of documents, spread evenly over the split, and whether each one is cut."""
        bounds = self._bounds(split)
        firsts = np.cumsum([0, *(record["tokens"] for record in self._done.shards[split])])
        chosen = np.unique(np.linspace(0, len(bounds) - 2, _SAMPLE_DOCUMENTS).astype(np.int64)).tolist()
        for number in chosen if len(bounds) > 1 else ():
            begin, end = int(bounds[number]), int(bounds[number + 1])
            at = int(firsts.searchsorted(begin, side="right")) - 1
            ids = self._mapped(self._done.shards[split][at])[begin - firsts[at] : end - firsts[at]]
            is_cut = len(ids) < end - begin or len(ids) > _SAMPLE_TOKENS
            ids = self._without_added(ids)[:_SAMPLE_TOKENS]
            if len(ids):
                yield np.array(ids), is_cut

    def _mapped(self, record: dict[str, Any]) -> Ids:
        return mmap_tokens(self._done.work / record["name"], expected_bytes=record["bytes"], dtype=self._done.dtype)

    def _without_added(self, ids: Ids) -> Ids:
        ids = ids[1:] if len(ids) and int(ids[0]) == self._start else ids
        return ids[:-1] if len(ids) and int(ids[-1]) == self._end else ids
