"""Write documents into the token shards of both splits, with index and source ids.

Decides where a shard ends, which document is truncated at its budget, and which documents are dropped.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import repeat
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import OFFSET_DTYPE, SPLITS
from niels_gpt.documents import DocumentBatch, Partition
from niels_gpt.encoding import DIGEST_BYTES, EncodedTexts, TextEncoder
from niels_gpt.engine.build import NoTextError
from niels_gpt.engine.checkpoints import Build
from niels_gpt.engine.journal import npy_parts
from niels_gpt.engine.losses import Losses, loss_keys
from niels_gpt.engine.meta import Source, why_unmet
from niels_gpt.engine.split import (
    TextSplit,
    TokenBudget,
    Waiting,
    count_duplicates,
    count_in_both,
    count_repeated_lines,
)
from niels_gpt.engine.stream import Batch, Change, Chunk, ItemKind
from niels_gpt.signals import BLANK, IN_BOTH, REPEATED_ID, SHORTER_THAN_ID, Counts
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import SourceError
from niels_gpt.storage.fileio import id_lines
from niels_gpt.tokenizers.engine import compared_keys, num_compared
from niels_gpt.tokenizers.protocol import Ids

logger = logging.getLogger(__name__)

Document = tuple[str | None, bytes | str, str]
"""Split (None: by its text), text (bytes: valid utf-8), and id of the document in its source."""
_LONGEST_ID, _WORDS = 1_000, 4  # bytes of a text that may be shorter than an id; spaces of an id that may be a text
_NOT_DROPS = {"documents_read", "cut_documents", "cut_tokens", "pieces_compared"}
FILES: dict[str, str | None] = {
    **{f"{split}.bin": split + "/shard_{:05d}.bin" for split in SPLITS},
    **{f"{split}_docs.bin": None for split in SPLITS},
    **{f"{split}_ids.txt": f"index/{split}_ids.txt" for split in SPLITS},
    **{f"{split}_texts.bin": None for split in SPLITS},
}
"""Files that a build appends to, for each split: the open shard, and starts, source ids and text digests of its
documents."""
TEXTS_OF = {split: f"index/{split}_texts.bin" for split in SPLITS}
"""Text digests, by split, as files of a partition."""


def files_of(partition: Partition | None) -> dict[str, str | None]:
    """Return the files that a build appends to. A partition keeps text digests, to count duplicates over all
    partitions."""
    return FILES if partition is None else FILES | {f"{split}_texts.bin": name for split, name in TEXTS_OF.items()}


def with_ids(
    documents: Iterable[Sequence[str | None] | DocumentBatch], number: int
) -> Iterator[Document | Chunk[Document]]:
    """Give each document without an id its number in the stream; a batch becomes a chunk.

    number: of the first document. Raises: ValueError naming an item that is no document.
    """
    for document in documents:
        if isinstance(document, DocumentBatch):
            _check_split(number, document.split)
            if len(document.texts) != len(document.ids):
                raise ValueError(
                    f"document {number}: its batch has {len(document.texts)} texts and {len(document.ids)} ids"
                )
            if not document.is_checked:
                _check_batch(number, document)
            if len(document):
                yield _chunk(document)
            number += len(document)
            continue
        split, text, *rest = document
        if not isinstance(text, str):
            raise ValueError(f"document {number}: its text is a {type(text).__name__}, expected a str")
        _check_split(number, split)
        name = str(number) if not rest or rest[0] is None else rest[0]
        if not isinstance(name, str):
            raise SourceError(f"document {number}: its id is a {type(name).__name__}, expected a str", code="E304")
        yield split, text, name
        number += 1


def _check_split(number: int, split: str | None) -> None:
    if split not in (None, *SPLITS):
        raise ValueError(f"document {number}: its split is {split!r}, expected 'train', 'val' or None")


def _check_batch(number: int, batch: DocumentBatch) -> None:
    """Raise ValueError for a batch of a caller with malformed values. number: of its first document."""

    def refuse(at: int, found: str) -> NoReturn:
        raise SourceError(f"document {number + at}: {found}", code="E304")

    for at, (text, name) in enumerate(zip(batch.texts, batch.ids, strict=True)):
        if not isinstance(name, str):
            refuse(at, f"its id is a {type(name).__name__}, expected a str")
        if type(text) is not bytes:
            refuse(at, f"its text is a {type(text).__name__}, expected bytes in a batch")
        try:
            text.decode()
        except UnicodeDecodeError as error:
            refuse(at, f"the text of {name!a} is not UTF-8 at byte {error.start}; repair it, and count that")
    short = min(map(len, batch.position.values()), default=len(batch))
    if short < len(batch):
        refuse(short, f"it has no position: a column of its batch ends after {short} of {len(batch)} documents")
    firsts = [first for first, _ in batch.counters]
    if not firsts or firsts[0] != 0 or firsts != sorted(firsts):
        refuse(0, f"the counters of its batch are from the documents {firsts} on, expected 0 and ascending numbers")


def _chunk(batch: DocumentBatch) -> Chunk[Document]:
    items: list[Document] = list(zip(repeat(batch.split), batch.texts, batch.ids))  # C speed: no step for a document
    return Chunk(items, [Change(first, counts, None, batch.position, first) for first, counts in batch.counters])


_DOCUMENTS = ItemKind[Document](
    texts=lambda document: [document[1]],
    label=lambda document: f"{document[0]}\0{document[2]}",
    name=lambda document: document[2],
)


class Shards:
    """Write both splits, and count every document that was read: the Writer of this kind."""

    kind = _DOCUMENTS

    def __init__(
        self,
        build: Build,
        source: Source,
        budget: TokenBudget,
        rule: TextSplit,
        encoder: TextEncoder,
        settings: Mapping[str, Any],
        path: str,
    ) -> None:
        """settings: keys of meta.json that decide the bytes. path: of the cache, for messages."""
        self._build, self._source, self._budget, self._rule, self._path = build, source, budget, rule, path
        self._may_be_empty = settings["built"] == "partial"
        self.encoder = encoder
        self._token_bytes = encoder.dtype.itemsize
        self._shard_bytes = settings["shard_bytes"] // self._token_bytes * self._token_bytes
        zero = dict.fromkeys(SPLITS, 0)
        numbers = {key: zero for key in ("docs", "tokens", "utf8_bytes")}
        state = build.restored({"counts": {}, "noticed": {}, **numbers})
        self._counts, self._warnings = Counter[str](state["counts"]), Counts(state)
        self._names_splits = bool(state.get("names_splits"))
        self._losses = Losses(encoder, self._warnings)
        self._docs, self._tokens, self._utf8_bytes = (dict(state[key]) for key in ("docs", "tokens", "utf8_bytes"))
        for split in SPLITS:
            finished = sum(record["bytes"] for record in build.finished if record["name"].startswith(f"{split}/"))
            build.expect(f"{split}.bin", self._tokens[split] * self._token_bytes - finished)
            build.expect(f"{split}_docs.bin", self._docs[split] * OFFSET_DTYPE.itemsize)
            build.expect(f"{split}_texts.bin", self._docs[split] * DIGEST_BYTES)
        budget.used = self._tokens
        self.expected = None if None in budget.limits.values() else sum(limit or 0 for limit in budget.limits.values())

    def done(self) -> tuple[int, int]:
        """Return the documents read and the tokens written so far."""
        return self._counts["documents_read"], sum(self._tokens.values())

    @property
    def full(self) -> bool:
        """Whether both budgets are full."""
        return self._budget.full("train") and self._budget.full("val")

    def waiting(self, item: Document) -> Waiting | None:
        """Return a document's text if it is kept; None if it names its split."""
        split, text, name = item
        if split is not None:
            return None
        raw = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
        return Waiting(raw if raw and not self.encoder.drops(text) else None, len(raw) + len(name))

    def check_kept(self) -> None:
        """Raise NoTextError if the cache needs a token for train, and has none."""
        if self._tokens["train"] or self._may_be_empty:
            return
        loader = ", ".join(f"{name} {count}" for name, count in sorted(self._source.counters.items())) or "none"
        counts = {key: self._counts[key] for key in sorted(self._counts) if key != "pieces_compared"}
        drops = ", ".join(f"{name} {count}" for name, count in counts.items() if name != "documents_read") or "none"
        read = self._counts["documents_read"]
        raise NoTextError(
            f"{self._path}: no token for the train split: {read} documents read, {self._docs['val']} to val, "
            f"dropped: {drops}, left out by the loader: {loader}. Give it more text"
        )

    def warn(self, out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        """Log oddities of a cache that was just built."""
        self._losses.warn(out_dir, meta)
        warn_of_unmet_budgets(out_dir, meta)

    def described(self) -> dict[str, Any]:
        """Finish the last shards, the index and the ids. Returns the keys of meta.json for them and the counts."""
        build, index, ids = self._build, {}, {}
        for split in SPLITS:
            ids[split] = {**build.finish(f"{split}_ids.txt"), "entries": self._docs[split]}
        self._warnings[REPEATED_ID] = sum(  # of wikitext's splits each begins at 0
            count_repeated_lines(build.path_of(f"{split}_ids.txt"), self._docs[split]) for split in SPLITS
        )
        for split in SPLITS:
            fileio.make_dir(build.work / split)
            if build.files[f"{split}.bin"].num_bytes:
                self._build.finish_shard(f"{split}.bin")
        for split in SPLITS:
            entries = self._docs[split] + 1
            starts = build.path_of(f"{split}_docs.bin")
            record = build.add(f"index/{split}_docs.npy", npy_parts(starts, entries, self._tokens[split]))
            index[split] = {**record, "entries": entries}
        shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        for record in build.finished:
            of_split = shards[record["name"].partition("/")[0]]
            of_split.append({**record, "tokens": record["bytes"] // self._token_bytes})
        files: dict[str, Any] = {"shards": shards, "index": index, "ids": ids}
        if build.keeps("train_texts.bin"):
            files["files"] = [build.finish(f"{split}_texts.bin") for split in SPLITS]
        return {**files, "checksums": build.add_checksums(**files), **self._described_counts()}

    def _described_counts(self) -> dict[str, Any]:
        full = {split: self._budget.room(split) == 0 for split in SPLITS}
        unbounded = [split for split in SPLITS if self._budget.limits[split] is None]
        texts = {split: self._build.path_of(f"{split}_texts.bin") for split in SPLITS}
        duplicates = {split: count_duplicates(path) for split, path in texts.items()}
        if self._names_splits:
            self._warnings[IN_BOTH] = count_in_both([texts["train"]], [texts["val"]])
        return {
            "totals": {f"{split}_tokens": self._tokens[split] for split in SPLITS},
            "budget_reached": {split: None if split in unbounded else full[split] for split in SPLITS},
            "docs": self._docs,
            "utf8_bytes": self._utf8_bytes,
            "documents_read": self._counts["documents_read"],
            "dropped": {key: self._counts[key] for key in sorted(self._counts) if key not in _NOT_DROPS},
            "duplicates": duplicates,
            "cut": {"documents": self._counts["cut_documents"], "tokens": self._counts["cut_tokens"]},
            "compared": compared_keys(self._counts["pieces_compared"]),
            **loss_keys(self._warnings),
        }

    def state(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps."""
        counters = {"counts": self._counts, **self._warnings.state(), "names_splits": int(self._names_splits)}
        return {**counters, "docs": self._docs, "tokens": self._tokens, "utf8_bytes": self._utf8_bytes}

    def add(self, batch: Batch[Document], encoded: EncodedTexts) -> list[bytes]:
        """Write documents until both budgets are full. Returns the digests of the consumed documents."""
        consumed = self._add(batch, encoded)
        texts, end = encoded.digests.tobytes(), DIGEST_BYTES
        labels = [f"{split}\0{name}\0".encode(errors="surrogatepass") for split, _, name in batch.items[:consumed]]
        return [
            sha256(label + texts[at : at + end]).digest()[:end]
            for label, at in zip(labels, range(0, len(texts), end), strict=False)
        ]

    def _add(self, batch: Batch[Document], encoded: EncodedTexts) -> int:
        """Write the documents of a batch until both budgets are full. Returns how many were consumed."""
        lengths, count = encoded.lengths.copy(), len(batch.items)
        in_val = self._in_val(batch.items, encoded.keys)
        fits = lengths > 0
        fits[list(encoded.problems)] = False
        chosen, lasts = {}, {}
        for split, is_in in zip(SPLITS, (~in_val, in_val), strict=True):
            chosen[split], lasts[split] = self._within(split, np.flatnonzero(fits & is_in), lengths)
        # The document that fills the second budget is the last one; those after it are not consumed.
        consumed = min(max(lasts.values()) + 1, count)
        self._check_named(batch.items[:consumed])
        kept = np.concatenate(list(chosen.values()))
        self._count_drops(batch.items[:consumed], encoded, fits[:consumed], len(kept))
        truncated = {split: self._truncated(split, encoded, chosen[split], lengths) for split in SPLITS}
        kept.sort()
        self._note_odd(batch, encoded, kept)
        self._losses.look(batch.payload, encoded, kept, lengths)
        pieces = num_compared(encoded.utf8_bytes[kept], encoded.digests[kept], batch.first + kept)
        self._counts["pieces_compared"] += int(pieces.sum())
        for split, numbers in chosen.items():
            if len(numbers):
                self._append(split, batch.items, encoded, numbers, lengths)
                self._utf8_bytes[split] += int(encoded.utf8_bytes[numbers].sum()) - truncated[split]
        self._counts["documents_read"] += consumed
        return consumed

    def _note_odd(self, batch: Batch[Document], encoded: EncodedTexts, kept: NDArray[np.int64]) -> None:
        """Count oddities of kept documents. kept: ascending numbers."""
        is_short = (encoded.utf8_bytes < _LONGEST_ID).tolist()
        for number in kept.tolist():
            text, name, odd = batch.payload[number], batch.items[number][2], encoded.notes.get(number, ())
            if _is_blank(text):
                odd += (BLANK,)
            if is_short[number] and name.count(" ") >= _WORDS and encoded.utf8_bytes[number] < len(name):
                odd += (SHORTER_THAN_ID,)
            if odd:
                shown = text if isinstance(text, str) else text.decode(errors="replace")
                self._warnings.note(odd, name, shown)

    def _in_val(self, items: list[Document], keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return whether each document goes to val: bool [items]."""
        splits = {item[0] for item in items}
        self._names_splits |= bool(splits - {None})
        if splits == {None}:
            return self._rule.in_val(keys) if len(keys) else np.zeros(len(items), dtype=np.bool_)
        named = np.array([item[0] == "val" for item in items], dtype=np.bool_)
        if None not in splits or not len(keys):
            return named
        return np.where([item[0] is None for item in items], self._rule.in_val(keys), named)

    def _check_named(self, items: list[Document]) -> None:
        """Raise ValueError if a document names no split and no share of val is known."""
        if self._rule.share is None and any(item[0] is None for item in items):
            raise ValueError("a document names no split: expected val_frac, or a bound of the tokens of both splits")

    def _within(
        self, split: str, numbers: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], int]:
        """Return which documents of a split are kept, and the number of the document that fills its budget.

        That number is -1 if the budget is full already, and beyond every number if it does not fill.
        """
        room = self._budget.room(split)
        if room is None:
            return numbers, len(lengths)
        if room == 0:
            return numbers[:0], -1
        filling = int(np.cumsum(lengths[numbers]).searchsorted(room))
        if filling == len(numbers):
            return numbers, len(lengths)
        return numbers[: filling + 1], int(numbers[filling])

    def _count_drops(
        self, items: list[Document], encoded: EncodedTexts, fits: NDArray[np.bool_], num_kept: int
    ) -> None:
        """Count the dropped documents. items: consumed ones. fits: which have tokens and no problem.

        Raises: ValueError for a problem if the encoder refuses it.
        """
        found = Counter(
            str(self.encoder.accept(encoded.problems[number], items[number][2]))
            for number in sorted(encoded.problems)
            if number < len(items)
        )
        num_fit = int(np.count_nonzero(fits))
        found["empty"] = len(fits) - num_fit - found.total()
        found["split_full"] = num_fit - num_kept
        self._counts.update({key: number for key, number in found.items() if number})

    def _truncated(
        self, split: str, encoded: EncodedTexts, numbers: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> int:
        """Truncate the last of a split's documents in `lengths` if it exceeds the budget. Returns the lost bytes."""
        room = self._budget.room(split)
        excess = 0 if room is None else int(lengths[numbers].sum()) - room
        if excess <= 0:
            return 0
        number = int(numbers[-1])
        length = int(lengths[number])
        lengths[number] = length - excess
        return int(encoded.utf8_bytes[number]) - self._truncate(encoded, number, length, length - excess)

    def _append(
        self,
        split: str,
        items: list[Document],
        encoded: EncodedTexts,
        numbers: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Write documents of a split, with their source ids and digests. numbers: ascending."""
        kept = lengths[numbers]
        total, files = int(kept.sum()), self._build.files
        self._tokens[split] += total
        self._write(split, _ids_of(encoded, numbers)[:total], kept)
        files[f"{split}_ids.txt"].write(id_lines([items[number][2] for number in numbers.tolist()]))
        files[f"{split}_texts.bin"].write(encoded.digests[numbers])

    def _truncate(self, encoded: EncodedTexts, number: int, length: int, room: int) -> int:
        """Count a truncated document. Returns the utf-8 bytes of its kept ids."""
        self._counts["cut_documents"] += 1
        self._counts["cut_tokens"] += length - room
        start = int(encoded.lengths[:number].sum())
        first, last = int(self.encoder.prepend is not None), length - (self.encoder.append is not None)
        of_text = last - first
        kept = encoded.ids[start + first : start + min(room, last)].tolist()  # without what begins and ends it
        whole = int(encoded.utf8_bytes[number])
        decode = getattr(self.encoder.tokenizer, "decode", None)
        if decode is None:
            return whole * len(kept) // of_text
        return min(len(decode(kept).encode(errors="replace")), whole)

    def _write(self, split: str, ids: Ids, lengths: NDArray[np.int64]) -> None:
        """Append documents of a split. self._tokens includes them already."""
        ends = self._tokens[split] - int(lengths.sum()) + np.cumsum(lengths)
        self._build.files[f"{split}_docs.bin"].write((ends - lengths).astype(OFFSET_DTYPE))
        self._docs[split] += len(lengths)
        while len(ids):
            filling = self._build.files[f"{split}.bin"]
            room = (self._shard_bytes - filling.num_bytes) // self._token_bytes
            filling.write(ids[:room])
            ids = ids[room:]
            if filling.num_bytes == self._shard_bytes:
                self._build.finish_shard(f"{split}.bin")


def warn_of_unmet_budgets(out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    """Log a warning for each split below its token budget, except in the bundled sample, which is small on purpose."""
    for split in SPLITS:
        if meta["budget_reached"][split] is False and meta["source"].get("kind") != "sample":
            logger.warning(
                "%s: %s has %s of %s tokens: %s",
                out_dir,
                split,
                f"{meta['totals'][f'{split}_tokens']:,}",
                f"{meta[f'max_{split}_tokens']:,}",
                why_unmet(meta),
                extra={"code": "W306"},
            )


def _is_blank(text: bytes | str) -> bool:
    """Return whether a text is only white space; for bytes, more characters than bytes.isspace knows."""
    if text[:1].isalnum():  # nearly every text, and quickly
        return False
    if isinstance(text, str) or text.isascii():
        return text.isspace()
    return text[:_LONGEST_ID].decode(errors="ignore").isspace() and text.decode(errors="replace").isspace()


def _ids_of(encoded: EncodedTexts, wanted: NDArray[np.int64]) -> Ids:
    """Return the ids of some texts of a batch, end to end. wanted: ascending numbers."""
    if len(wanted) == len(encoded.lengths):
        return encoded.ids
    ends = np.cumsum(encoded.lengths)
    breaks = np.flatnonzero(np.diff(wanted) != 1)
    firsts, lasts = wanted[[0, *(breaks + 1)]], wanted[[*breaks, -1]]
    runs = zip((ends[firsts] - encoded.lengths[firsts]).tolist(), ends[lasts].tolist(), strict=True)
    return np.concatenate([encoded.ids[begin:end] for begin, end in runs])
