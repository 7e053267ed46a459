"""Documents on their way into the token shards of both splits: index, source ids, and the account of each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt import fileio
from niels_gpt.build import pipeline
from niels_gpt.build.describe import Source
from niels_gpt.build.duplicates import count_duplicates
from niels_gpt.build.encode import EncodedTexts, TextEncoder
from niels_gpt.build.losses import Losses, described
from niels_gpt.build.pipeline import Progress
from niels_gpt.build.resume import Build
from niels_gpt.build.seek import first_number
from niels_gpt.build.shuffle import Shuffled
from niels_gpt.build.split import SPLITS, Document, TextSplit, TokenBudget
from niels_gpt.build.stream import DIGEST_BYTES, Batch, Mark, labelled_digest
from niels_gpt.build.writer import OFFSET_DTYPE, TOKEN_BYTES, id_lines, npy_parts
from niels_gpt.fileio import CacheError

_NOT_DROPS = {"documents_read", "cut_documents", "cut_tokens"}
FILES = {
    **{f"{split}.bin": split + "/shard_{:05d}.bin" for split in SPLITS},
    **{f"{split}_docs.bin": None for split in SPLITS},
    **{f"{split}_ids.txt": f"index/{split}_ids.txt" for split in SPLITS},
    **{f"{split}_texts.bin": None for split in SPLITS},
}
"""What a build appends to: the shard of each split that is being filled, and of its documents the starts, the ids and
the first bytes of the sha256 of each text.
"""


def with_ids(documents: Iterable[Sequence[str | None]], position: dict[str, int] | None = None) -> Iterator[Document]:
    """Give a document without an id its number in the stream. Raises: ValueError naming one that is no document.

    position: that of Source; the number of the first document is in it, where that is not the source's first one.
    """
    for number, (split, text, *rest) in enumerate(documents, first_number(position)):
        if not isinstance(text, str):
            raise ValueError(f"document {number}: its text is a {type(text).__name__}, expected a str")
        if split not in (None, *SPLITS):
            raise ValueError(f"document {number}: its split is {split!r}, expected 'train', 'val' or None")
        yield split, text, str(number) if not rest or rest[0] is None else rest[0]


def _texts(document: Document) -> list[str]:
    return [document[1]]


def _name(document: Document) -> str:
    return document[2]


def _label(document: Document) -> str:
    return f"{document[0]}\0{document[2]}"


class Shards:
    """Both splits on disk, and the account of every document that was read."""

    def __init__(
        self,
        build: Build,
        budget: TokenBudget,
        rule: TextSplit,
        encoder: TextEncoder,
        shard_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._build, self._budget, self._rule, self._encoder, self._progress = build, budget, rule, encoder, progress
        self._shard_bytes = shard_bytes // TOKEN_BYTES * TOKEN_BYTES
        zero = dict.fromkeys(SPLITS, 0)
        numbers = {key: zero for key in ("docs", "tokens", "utf8_bytes")}
        state = build.restored({"counts": {}, "noticed": {}, **numbers, "bound": self._bound()})
        self._known_bound = state["bound"] if build.last.documents else None
        self.counts, self.noticed = Counter(state["counts"]), Counter(state["noticed"])
        self.losses = Losses(encoder, self.noticed)
        self.docs, self.tokens, self.utf8_bytes = (dict(state[key]) for key in ("docs", "tokens", "utf8_bytes"))
        for split in SPLITS:
            finished = sum(record["bytes"] for record in build.finished if record["name"].startswith(f"{split}/"))
            build.expect(f"{split}.bin", self.tokens[split] * TOKEN_BYTES - finished)
            build.expect(f"{split}_docs.bin", self.docs[split] * OFFSET_DTYPE.itemsize)
            build.expect(f"{split}_texts.bin", self.docs[split] * DIGEST_BYTES)
        budget.used = self.tokens
        self._expected = None if None in budget.limits.values() else sum(limit or 0 for limit in budget.limits.values())

    def fill(self, documents: Shuffled[Document], source: Source, num_threads: int, executor: Executor | None) -> bool:
        """Read documents until both budgets are full; returns whether the source has ended instead."""
        build = self._build
        if documents.in_order:
            self._seek(source)
        with pipeline.encoded(
            build,
            documents,
            source.counters,
            self._encoder,
            texts=_texts,
            label=_label,
            name=_name,
            exhausted=not self._full(),
            num_threads=num_threads,
            executor=executor,
            report=self._report,
            settled=self._settled,
        ) as batches:
            while not self._full() and (found := next(batches, None)) is not None:
                batch, encoded = found
                taken = self._add(batch, encoded)
                build.take(self._digests(batch, encoded, taken), batch.marks[:taken])
                build.checkpoint(self.state())
                self._report(self.counts["documents_read"])
        return not self._full()

    def _seek(self, source: Source) -> None:
        """Begin the source behind what was taken, if that can be: not where `bound` depends on the texts there."""
        if self._known_bound in (None, self._bound()):
            self._build.seek(source.facts.get("fingerprint"), source.counters, source.position)

    def _settled(self, documents: Iterator[tuple[Document, Mark]]) -> Iterator[tuple[Document, Mark]]:
        """Pass documents on. Raises: CacheError if the split is another one than it was before a kill."""
        settled = documents if self._build.sought else self._rule.settled(documents, self._build.folder)
        for number, document in enumerate(settled):
            if number == 0 and self._known_bound not in (None, self._bound()):
                raise CacheError(
                    f"{self._build.folder}: the source changed behind what had been read, so that another document is "
                    f"the nearest to val. {self._build.remedy}"
                )
            yield document

    def described(self) -> dict[str, Any]:
        """Finish the last shards, the index and the ids; returns what meta.json says of them and of every document."""
        build, index, ids = self._build, {}, {}
        for split in SPLITS:
            fileio.make_dir(build.work / split)
            if build.files[f"{split}.bin"].num_bytes:
                self._finish_shard(split)
        for split in SPLITS:
            entries = self.docs[split] + 1
            starts = build.folder / f"{split}_docs.bin"
            record = build.add(f"index/{split}_docs.npy", npy_parts(starts, entries, self.tokens[split]))
            index[split] = {**record, "entries": entries}
        for split in SPLITS:
            ids[split] = {**build.finish(f"{split}_ids.txt"), "entries": self.docs[split]}
        shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        for record in build.finished:
            of_split = shards[record["name"].partition("/")[0]]
            of_split.append({**record, "tokens": record["bytes"] // TOKEN_BYTES})
        files = {"shards": shards, "index": index, "ids": ids, "checksums": build.add_checksums(shards, index, ids)}
        return {**files, **self._account()}

    def _account(self) -> dict[str, Any]:
        full = {split: self._budget.room(split) == 0 for split in SPLITS}
        unbounded = [split for split in SPLITS if self._budget.limits[split] is None]
        return {
            "totals": {f"{split}_tokens": self.tokens[split] for split in SPLITS},
            "budget_reached": {split: None if split in unbounded else full[split] for split in SPLITS},
            "docs": self.docs,
            "utf8_bytes": self.utf8_bytes,
            "documents_read": self.counts["documents_read"],
            "dropped": {key: self.counts[key] for key in sorted(self.counts) if key not in _NOT_DROPS},
            "duplicates": {split: count_duplicates(self._build.folder / f"{split}_texts.bin") for split in SPLITS},
            "cut": {"documents": self.counts["cut_documents"], "tokens": self.counts["cut_tokens"]},
            **described(self.noticed),
        }

    def state(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps."""
        counters = {"counts": self.counts, "noticed": self.noticed, "bound": self._bound()}
        return {**counters, "docs": self.docs, "tokens": self.tokens, "utf8_bytes": self.utf8_bytes}

    def _bound(self) -> dict[str, int]:
        """Return the bound of the split in two halves: it may be 2**64, and a journal's numbers end at 2**63."""
        return dict(zip(("high", "low"), divmod(self._rule.bound, 1 << 32), strict=True))

    def _full(self) -> bool:
        return self._budget.full("train") and self._budget.full("val")

    def _digests(self, batch: Batch[Document], encoded: EncodedTexts, taken: int) -> list[bytes]:
        pairs = zip(batch.items[:taken], encoded.digests, strict=False)
        return [labelled_digest(_label(document), [digest]) for document, digest in pairs]

    def _add(self, batch: Batch[Document], encoded: EncodedTexts) -> int:
        """Write the documents of a batch, until both budgets are full; returns how many were taken."""
        chosen: dict[str, list[int]] = {split: [] for split in SPLITS}
        lengths, keys = encoded.lengths.tolist(), encoded.keys.tolist()
        cut_bytes: dict[int, int] = {}
        taken, full = 0, self._full()
        for number, document in enumerate(batch.items):
            if full:  # asked before the next document leaves the stream
                break
            taken += 1
            split = document[0] or self._rule.of(keys[number] if keys else 0)
            if self._is_dropped(split, lengths[number], encoded.problems.get(number)):
                continue
            room = self._budget.room(split)
            if room is not None and lengths[number] >= room:
                if lengths[number] > room:
                    cut_bytes[number] = self._cut(encoded, number, lengths[number], room)
                    lengths[number] = room
                self.tokens[split] += lengths[number]
                full = self._full()
            else:
                self.tokens[split] += lengths[number]
            if encoded.notes:
                self.noticed.update(encoded.notes.get(number, ()))
            chosen[split].append(number)
        self.losses.look(batch.payload, encoded, sorted(chosen["train"] + chosen["val"]), lengths)
        for split, numbers in chosen.items():
            if numbers:
                kept = np.array([lengths[number] for number in numbers], dtype=np.int64)
                self._write(split, _ids_of(encoded, numbers)[: int(kept.sum())], kept)
                names = (batch.items[number][2] for number in numbers)
                self._build.files[f"{split}_ids.txt"].write(id_lines(names))
                self._build.files[f"{split}_texts.bin"].write(b"".join(encoded.digests[number] for number in numbers))
                known = encoded.utf8_bytes[numbers].tolist()
                sizes = (cut_bytes.get(number, size) for number, size in zip(numbers, known, strict=True))
                self.utf8_bytes[split] += sum(sizes)
        self.counts["documents_read"] += taken
        return taken

    def _is_dropped(self, split: str, length: int, problem: tuple[str, str] | None) -> bool:
        """Return whether a document is dropped, which is counted."""
        reason = self._encoder.accept(problem) if problem else None if length else "empty"
        if reason is None and self._budget.full(split):
            reason = "split_full"
        if reason is not None:
            self.counts[reason] += 1
        return reason is not None

    def _cut(self, encoded: EncodedTexts, number: int, length: int, room: int) -> int:
        """Count a document that is cut; returns the utf-8 bytes that the ids which are kept stand for."""
        self.counts["cut_documents"] += 1
        self.counts["cut_tokens"] += length - room
        start = int(encoded.lengths[:number].sum())
        of_text = length - (self._encoder.append is not None)
        kept = encoded.ids[start : start + min(room, of_text)].tolist()  # without an end-of-text
        whole = int(encoded.utf8_bytes[number])
        decode = getattr(self._encoder.tokenizer, "decode", None)
        if decode is None:
            return whole * len(kept) // of_text
        return min(len(decode(kept).encode(errors="replace")), whole)

    def _write(self, split: str, ids: NDArray[np.uint16], lengths: NDArray[np.int64]) -> None:
        """Append documents of a split; self.tokens counts them already."""
        ends = self.tokens[split] - int(lengths.sum()) + np.cumsum(lengths)
        self._build.files[f"{split}_docs.bin"].write((ends - lengths).astype(OFFSET_DTYPE))
        self.docs[split] += len(lengths)
        while len(ids):
            filling = self._build.files[f"{split}.bin"]
            room = (self._shard_bytes - filling.num_bytes) // TOKEN_BYTES
            filling.write(ids[:room])
            ids = ids[room:]
            if filling.num_bytes == self._shard_bytes:
                self._finish_shard(split)

    def _finish_shard(self, split: str) -> None:
        self._build.finish_shard(f"{split}.bin")

    def _report(self, documents: int) -> None:
        if self._progress is not None:
            self._progress(documents, sum(self.tokens.values()), self._expected)


def _ids_of(encoded: EncodedTexts, numbers: list[int]) -> NDArray[np.uint16]:
    """Return the ids of some texts of a batch, which ascend, one after another."""
    if len(numbers) == len(encoded.lengths):
        return encoded.ids
    ends = np.cumsum(encoded.lengths)
    wanted = np.asarray(numbers)
    breaks = np.flatnonzero(np.diff(wanted) != 1)
    firsts, lasts = wanted[[0, *(breaks + 1)]], wanted[[*breaks, -1]]
    runs = zip((ends[firsts] - encoded.lengths[firsts]).tolist(), ends[lasts].tolist(), strict=True)
    return np.concatenate([encoded.ids[begin:end] for begin, end in runs])
