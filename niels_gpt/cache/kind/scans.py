"""Checks of what a cache's files hold: ids, sentinels, offsets and source ids, scanned as streams.

Decides what a valid token stream is: which sentinels stand where in a document and in an example, and which ids exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.documents import supervised_counts
from niels_gpt.cache.formats import OFFSET_DTYPE, SPLITS, has_loss_bits, is_imported, token_dtype_of
from niels_gpt.cache.meta import control_ids_of
from niels_gpt.display.numbers import many
from niels_gpt.kinds.files import HEADER_BYTES, Damage, FileChecks, Record, Scan
from niels_gpt.storage.checks import Figures
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.tokenizers.protocol import Ids
from niels_gpt.tokenizers.vocabulary import end_of_documents, start_of_documents

_OFFSET_BYTES = OFFSET_DTYPE.itemsize
_MAX_EXAMPLES = 5  # named in one problem
_FEW_IDS = 8  # compared one by one, which is faster then


def content_damages(files: FileChecks) -> Iterator[Damage]:
    """Read every readable file of a pretrain or sft cache; yield wrong sha256 sums and wrong contents.

    The token files of an sft cache are read a second time, for its supervised tokens.

    Contents that span files are judged only where all of these files are as they were written.
    """
    meta, pretrain = files.meta, files.meta["kind"] == "pretrain"
    for split in SPLITS:
        index, shards = meta["index"][split], meta["shards"][split]
        num_tokens = sum(record["tokens"] for record in shards)
        yield from _scanned(files, index, OffsetsScan(index["name"], num_tokens, with_end=pretrain))
        if index["name"] in files.sound and "partitions" in meta:
            offsets = _offsets(files, index)
            yield from _partition_damages(meta, split, offsets if pretrain else np.append(offsets, num_tokens))
        if split in meta.get("ids", {}):
            ids = meta["ids"][split]
            yield from _scanned(files, ids, LinesScan(ids["name"], index["entries"] - pretrain))
        bits = [meta["loss_bits"][split]] if has_loss_bits(meta) else []
        for record in bits:
            yield from _scanned(files, record)
        stream = None
        can_be_read = index["name"] in files.sound and all(record["name"] in files.readable for record in shards)
        if can_be_read and not bits:
            stream = SentinelScan(meta, _offsets(files, index), control_ids_of(files.folder, meta), split)
        for record in shards:
            yield from _scanned(files, record, IdScan(record["name"], meta), stream)
        if can_be_read and all(record["name"] in files.sound for record in (*shards, *bits)):
            yield from (damages := [] if stream is None else list(stream.damages()))
            if not pretrain and not damages:
                yield from supervised_damages(files, split, supervised_counts(files.folder, meta, split))
    # The checksums last: their entries are compared with the blocks of each file when that file is read.
    for record in (*meta.get("files", []), *([meta["checksums"]] if "checksums" in meta else [])):
        yield from _scanned(files, record)


def _scanned(
    files: FileChecks, record: Record, scan: Scan | None = None, stream: SentinelScan | None = None
) -> Iterator[Damage]:
    """Read one file; yield its own damage, and that of its contents unless it follows from damage of known bytes."""
    if record["name"] not in files.readable:
        return
    if stream is not None:
        stream.begin_file(record["name"])
    damages = files.read(record, [each for each in (scan, stream) if each is not None])
    yield from damages
    located = any((damage.offset, damage.end) != (0, record["bytes"]) for damage in damages if damage.file != META_NAME)
    if scan is not None and record["name"] in files.readable and (not located or isinstance(scan, IdScan)):
        yield from scan.damages()


def _offsets(files: FileChecks, record: Record) -> NDArray[np.int64]:
    count = record["entries"]
    if not count:
        return np.zeros(0, dtype=OFFSET_DTYPE)
    path = files.folder / record["name"]
    mapped: NDArray[np.int64] = np.memmap(path, dtype=OFFSET_DTYPE, mode="r", offset=HEADER_BYTES, shape=(count,))
    return mapped.view(np.ndarray)


def id_damages(files: FileChecks, figures: Figures) -> Iterator[Damage]:
    """Yield the ids that are not in the vocabulary, and the token files that cannot be read."""
    tokens, greatest, vocab_size = 0, -1, int(files.meta["vocab_size"])
    itemsize, records = token_dtype_of(files.meta, files.folder / META_NAME).itemsize, files.records
    num_shards = sum(map(len, files.meta["shards"].values()))
    for record in records[:num_shards]:
        if (damage := files.size_damage(record)) is not None:
            yield damage
            continue
        if record["bytes"] % itemsize:
            expected = f"{record['bytes']} bytes, expected a multiple of {itemsize}"
            yield Damage(record["name"], 0, record["bytes"], expected)
            continue
        scan = IdScan(record["name"], files.meta)
        try:
            for content in files.pieces(record):
                scan.feed(content)
        except (CacheError, OSError) as error:  # the other files are still checked
            yield Damage(record["name"], 0, record["bytes"], str(error))
            continue
        tokens, greatest = tokens + scan.num_tokens, max(greatest, scan.greatest)
        yield from scan.damages()
    if tokens:
        figures.say(
            f"The greatest id of {many(tokens, 'token')} is {greatest:,}; the vocabulary has {many(vocab_size, 'id')}.",
            tokens=tokens,
            greatest_id=greatest,
            vocab_size=f"{vocab_size:,}",
        )
    else:
        figures.say("There are no tokens.", tokens=0)


def supervised_damages(files: FileChecks, split: str, counts: NDArray[np.int64]) -> Iterator[Damage]:
    """Yield the examples without a supervised token, and a sum other than the one in meta.json.

    counts: of `supervised_counts`.
    """
    meta, shards = files.meta, files.meta["shards"]
    expected = int(meta["supervised_tokens"][split])
    without = np.flatnonzero(counts == 0)
    if len(without) and not is_imported(meta):  # an import has noticed them
        named = ", ".join(map(str, without[:_MAX_EXAMPLES].tolist())) + " and more" * (len(without) > _MAX_EXAMPLES)
        problem = (
            f"{len(without):,} of {len(counts):,} examples have no token that carries loss, expected at least one in "
            f"each. Examples: {named}"
        )
        yield Damage(shards[split][0]["name"], 0, shards[split][0]["bytes"], problem)
    if (total := int(counts.sum())) != expected:
        problem = f"supervised_tokens.{split} is {expected:,}, but {total:,} tokens carry loss"
        yield Damage(META_NAME, 0, 0, problem)


class OffsetsScan:
    """An offsets file: begins at 0 and ascends strictly."""

    def __init__(self, name: str, num_tokens: int, *, with_end: bool) -> None:
        """num_tokens: of the split; with_end: the last entry is that number, as in the index of a pretrain cache."""
        self._name, self._tokens, self._with_end = name, num_tokens, with_end
        self._count, self._last = 0, -1
        self._header_left = HEADER_BYTES
        self._damage: Damage | None = None

    def feed(self, content: memoryview, /) -> None:
        """Take the next bytes."""
        skipped = min(self._header_left, len(content))
        self._header_left -= skipped
        values = np.frombuffer(content[skipped:], dtype=OFFSET_DTYPE)
        if not len(values) or self._damage is not None:
            return
        before = np.concatenate([[self._last], values[:-1]])
        wrong = values <= before if self._count else np.concatenate([values[:1] != 0, values[1:] <= before[1:]])
        if wrong.any():
            first = int(np.argmax(wrong))
            expected = f"more than {before[first]}" if self._count + first else "0"
            self._damage = self._at(self._count + first, f"is {values[first]}, expected {expected}")
        self._count += len(values)
        self._last = int(values[-1])

    def damages(self) -> Iterator[Damage]:
        """Yield the first wrong entry."""
        if self._damage is not None:
            yield self._damage
        elif self._with_end and self._last != self._tokens:
            yield self._at(self._count - 1, f"is {self._last}, expected the split's {self._tokens} tokens")
        elif not self._with_end and self._last >= self._tokens > 0:
            yield self._at(self._count - 1, f"is {self._last}, expected less than the split's {self._tokens} tokens")

    def _at(self, entry: int, problem: str) -> Damage:
        start = HEADER_BYTES + _OFFSET_BYTES * entry
        return Damage(self._name, start, start + _OFFSET_BYTES, f"entry {entry} {problem}")


class IdScan:
    """A token file: every id is below vocab_size."""

    def __init__(self, name: str, meta: dict[str, Any]) -> None:
        self._name, self._vocab_size, self._dtype = name, int(meta["vocab_size"]), token_dtype_of(meta, META_NAME)
        self._num_wrong = self._first = self._id = self.num_tokens = 0
        self.greatest = -1
        """The greatest id, -1 without any."""

    def feed(self, content: memoryview, /) -> None:
        """Take the next bytes."""
        tokens = np.frombuffer(content, dtype=self._dtype)
        greatest = int(tokens.max()) if len(tokens) else -1
        self.greatest = max(self.greatest, greatest)
        if greatest >= self._vocab_size:
            wrong = np.flatnonzero(tokens >= self._vocab_size)
            if not self._num_wrong:
                self._first, self._id = self.num_tokens + int(wrong[0]), int(tokens[wrong[0]])
            self._num_wrong += len(wrong)
        self.num_tokens += len(tokens)

    def damages(self) -> Iterator[Damage]:
        """Yield the first id that is not in the vocabulary, with the number of all such ids."""
        if self._num_wrong:
            problem = (
                f"token {self._first} is id {self._id}, expected ids below vocab_size {self._vocab_size}; "
                f"{self._num_wrong:,} of {self.num_tokens:,} tokens are not"
            )
            size = self._dtype.itemsize
            yield Damage(self._name, size * self._first, size * (self._first + 1), problem)


class LinesScan:
    """A file of source ids: ASCII, one line for each document."""

    def __init__(self, name: str, num_documents: int) -> None:
        self._name, self._documents = name, num_documents
        self._lines = self._num_bytes = 0
        self._last, self._non_ascii = b"\n", -1

    def feed(self, content: memoryview, /) -> None:
        """Take the next bytes."""
        piece = bytes(content)
        if self._non_ascii < 0 and not piece.isascii():
            self._non_ascii = self._num_bytes + next(place for place, byte in enumerate(piece) if byte > 127)
        self._lines += piece.count(b"\n")
        self._num_bytes += len(piece)
        self._last = piece[-1:] or self._last

    def damages(self) -> Iterator[Damage]:
        """Yield the first byte that is not ASCII, and a wrong number of lines."""
        if self._non_ascii >= 0:
            yield Damage(self._name, self._non_ascii, self._non_ascii + 1, "not ASCII")
        if self._last != b"\n":
            yield Damage(self._name, self._num_bytes - 1, self._num_bytes, "the last line has no end")
        elif self._lines != self._documents:
            problem = f"{self._lines:,} lines, expected {self._documents:,}, one for each document"
            yield Damage(self._name, 0, self._num_bytes, problem)


def _is_one_of(tokens: Ids, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    if len(ids) > _FEW_IDS:
        return np.isin(tokens, ids)
    found = np.zeros(len(tokens), dtype=np.bool_)
    for token in ids.tolist():
        found |= tokens == token
    return found


def _ends(meta: dict[str, Any], split: str, unit: str) -> NDArray[np.int64]:
    """Return where each partition ends in a split, in tokens, docs or examples: int64 [partitions]."""
    counts = [each[f"{split}_{unit}"] for each in meta["partitions"]["of_each"]]
    return np.cumsum(np.array(counts, dtype=np.int64))


def _partition_damages(meta: dict[str, Any], split: str, bounds: NDArray[np.int64]) -> Iterator[Damage]:
    """Yield the first partition whose documents and tokens in meta.json do not end at one place of the index.

    bounds: where each document starts, and where the last one ends.
    """
    unit = "docs" if meta["kind"] == "pretrain" else "examples"
    docs, tokens = _ends(meta, split, unit), _ends(meta, split, "tokens")
    found = bounds[np.clip(docs, 0, len(bounds) - 1)]
    for number in np.flatnonzero(found != tokens)[:1].tolist():
        problem = (
            f"partitions.of_each[{number}] ends {split} at token {tokens[number]:,}, but its {split}_{unit} end it at "
            f"{found[number]:,}, by the index"
        )
        yield Damage(META_NAME, 0, 0, problem)


def _cut_places(meta: dict[str, Any], split: str, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the last token of each document that may be cut and lack its end: of the last one of each partition.

    bounds: where each document of the split starts, and where the last one ends.
    """
    if not meta.get("cut", {}).get("documents", 0) or len(bounds) < 2:
        return np.zeros(0, dtype=np.int64)
    return (_ends(meta, split, "tokens") if "partitions" in meta else bounds[-1:]) - 1


class SentinelScan:
    """The special tokens of a split's token stream, which may span several files.

    Pretrain: each document begins with the token of `document_start` and ends with the token of `document_end`, if
    there is one, and has them and special tokens nowhere else, but in an imported cache, whose documents may hold
    any token.
    Sft: each example begins with a role; a role is followed by ids and an end-of-text, and that by the next role. With
    loss bits a chat template decides what stands where: nothing is scanned.
    Only the first wrong token is kept.
    """

    def __init__(
        self, meta: dict[str, Any], bounds: NDArray[np.int64], control: Collection[int] = (), split: str = "train"
    ) -> None:
        """bounds: where each document starts, in tokens, and in a pretrain split where the last one ends.

        control: ids that no text has, the sentinels among them or not.
        """
        self._dtype = token_dtype_of(meta, META_NAME)
        self._ids: dict[str, int] = dict(meta["special_token_ids"])
        self._names = {token: name for name, token in self._ids.items()}
        self._bounds, self._sft = bounds, meta["kind"] == "sft"
        start, self._start_token = start_of_documents(meta, META_NAME) or (None, "")
        end, self._end_token = end_of_documents(meta, META_NAME) or (None, "")
        self._start_id, self._end_id = start, end
        others = () if self._sft else (*control, *(each for each in (start, end) if each is not None))
        self._control = np.array(sorted({*self._ids.values(), *others}), dtype=np.int64)
        self._may_stand_inside = is_imported(meta)
        self._may_lack_end = _cut_places(meta, split, bounds)
        self._num_tokens = self._file_start = 0
        self._name = ""
        self._role: tuple[int, int] | None = None  # position and id of the role whose message has not ended
        self._end = -1  # position of the last end-of-text
        self._damage: Damage | None = None

    def begin_file(self, name: str) -> None:
        """The next bytes are those of this file."""
        self._name, self._file_start = name, self._num_tokens

    def feed(self, content: memoryview, /) -> None:
        """Take the next bytes."""
        tokens = np.frombuffer(content, dtype=self._dtype)
        if self._damage is None:
            places = np.flatnonzero(_is_one_of(tokens, self._control))
            sentinels = (places + self._num_tokens, tokens[places].astype(np.int64))
            (self._check_examples if self._sft else self._check_documents)(*sentinels, self._num_tokens + len(tokens))
        self._num_tokens += len(tokens)

    def damages(self) -> Iterator[Damage]:
        """Yield the first wrong token, after the last file."""
        if self._damage is None and self._sft and self._end != self._num_tokens - 1:
            self._keep(self._num_tokens - 1, "ends the last example, expected an end-of-text")
        if self._damage is not None:
            yield self._damage

    def _check_documents(self, places: NDArray[np.int64], ids: NDArray[np.int64], end: int) -> None:
        """places, ids: positions and ids of the special tokens among the next tokens, which end at position `end`."""
        first, last = np.searchsorted(self._bounds, [self._num_tokens, end], side="right")
        ends = self._bounds[first:last] - 1 if self._end_id is not None else self._bounds[:0]
        is_end = ids == (-1 if self._end_id is None else self._end_id)
        if self._start_id is None and np.array_equal(places, ends) and bool(np.all(is_end)):
            return
        missing = np.setdiff1d(ends, places[is_end])
        if len(missing):
            missing = np.setdiff1d(missing, self._may_lack_end)
        stray, bare = ~np.isin(places, ends) | ~is_end, self._bounds[:0]
        if self._start_id is not None:
            first, last = np.searchsorted(self._bounds[:-1], [self._num_tokens, end])
            starts, is_start = self._bounds[first:last], ids == self._start_id
            stray &= ~(is_start & np.isin(places, starts))
            bare = np.setdiff1d(starts, places[is_start])
        if self._may_stand_inside:
            stray[:] = False
        found = []
        if stray.any():
            place, token = int(places[np.argmax(stray)]), int(ids[np.argmax(stray)])
            found.append((place, f"is the {self._named(token)} inside document {self._document(place)}"))
        if len(missing):
            expected = "an end-of-text" if self._end_id in self._names else f"{self._end_token!a} ({self._end_id})"
            place = int(missing[0])
            found.append((place, f"ends document {self._document(place)}, expected {expected}"))
        if len(bare):
            place, expected = int(bare[0]), f"{self._start_token!a} ({self._start_id})"
            found.append((place, f"begins document {self._document(place)}, expected {expected}"))
        if found:
            self._keep(*min(found, key=lambda each: each[0]))

    def _named(self, token: int) -> str:
        if token in self._names:
            return f"sentinel {self._names[token]}"
        if token == self._end_id:
            return f"token {self._end_token!a} ({token}), which ends documents,"
        if token == self._start_id:
            return f"token {self._start_token!a} ({token}), which begins documents,"
        return f"special token {token}"

    def _check_examples(self, places: NDArray[np.int64], ids: NDArray[np.int64], end: int) -> None:
        """As `_check_documents`, for examples."""
        open_roles = [] if self._role is None else [self._role]
        places = np.concatenate([[place for place, _ in open_roles], places]).astype(np.int64)
        ids = np.concatenate([[token for _, token in open_roles], ids]).astype(np.int64)
        is_end = ids == self._ids["eot"]
        end_due = np.arange(len(ids)) % 2 == 1  # role, end, role, end
        follows = np.concatenate([[self._end], places[:-1]]) + 1 == places
        first, last = np.searchsorted(self._bounds, [self._num_tokens, end])
        starts = self._bounds[first:last]
        wrong = places[(is_end != end_due) | (~end_due & ~follows)]
        without_role = starts[~np.isin(starts, places[~is_end])]
        if len(wrong) and not (len(without_role) and without_role[0] < wrong[0]):
            place = int(wrong[0])
            problem = f"is a sentinel out of turn in example {self._document(place)}: a role, ids, an eot"
            self._keep(place, problem)
        elif len(without_role):
            place = int(without_role[0])
            self._keep(place, f"begins example {self._document(place)}, expected the sentinel of a role")
        else:
            pairs = len(ids) // 2
            self._end = int(places[2 * pairs - 1]) if pairs else self._end
            self._role = (int(places[-1]), int(ids[-1])) if len(ids) % 2 else None

    def _document(self, place: int) -> int:
        return int(np.searchsorted(self._bounds, place, side="right")) - 1

    def _keep(self, place: int, problem: str) -> None:
        token, size = place - self._file_start, self._dtype.itemsize
        self._damage = Damage(self._name, size * token, size * (token + 1), f"token {token} {problem}")
