"""Decide what a valid token cache is: sums in meta.json; ids, sentinels, offsets and source ids in its files.

Files are scanned as streams. The rules: which sentinels stand where in a document and in an example, and which ids
exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.checksums import CRC_DTYPE
from niels_gpt.cache.documents import supervised_counts
from niels_gpt.cache.formats import (
    OFFSET_DTYPE,
    SPLITS,
    has_loss_bits,
    is_imported,
    num_blocks,
    num_bytes,
    token_dtype_of,
)
from niels_gpt.cache.meta import control_ids_of
from niels_gpt.display.numbers import many
from niels_gpt.kinds.checks import Problem, partition_sums, vocabulary_sums
from niels_gpt.kinds.files import HEADER_BYTES, Damage, FileChecks, Record, Scan
from niels_gpt.kinds.kind import Cache
from niels_gpt.storage.checks import Figures
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.mounted import MOUNTED
from niels_gpt.tokenizers.document_tokens import end_of_documents, start_of_documents
from niels_gpt.tokenizers.protocol import Ids, token_dtype_name

_OFFSET_BYTES = OFFSET_DTYPE.itemsize
_MAX_EXAMPLES = 5  # named in one problem
_FEW_IDS = 8  # compared one by one, which is faster then
Meta = dict[str, Any]


# --- the sums and sizes of meta.json ----------------------------------------------------------------------------------


def wrong_sums(cache: Cache) -> Iterator[Problem]:
    """Yield contradictions within the meta.json of a pretrain or sft cache."""
    meta = cache.meta
    yield from vocabulary_sums(meta, may_lack_sentinels=meta["kind"] != "sft" or has_loss_bits(meta))
    if cache.is_stub and any(record["bytes"] for record in cache.records):
        yield "built", "built is false, but it names files that hold something"
    if not isinstance(meta.get("source", {}), dict):
        yield "source", f"source is a {type(meta['source']).__name__}, expected an object"
    for split in SPLITS:
        yield from _split_sums(meta, split)
    if "checksums" in meta:
        name = meta["checksums"]["name"]
        blocks = sum(num_blocks(record["bytes"]) for record in cache.records if record["name"] != name)
        yield from _compare("checksums", "checksums.bytes", meta["checksums"]["bytes"], CRC_DTYPE.itemsize * blocks)
    if meta["kind"] == "sft":
        yield from partition_sums(meta)
    yield from _document_counts(meta)


def _compare(key: str, name: str, value: Any, expected: Any) -> Iterator[Problem]:
    if value != expected:
        yield key, f"{name} is {value!r}, expected {expected!r} by the rest of it"


def _split_sums(meta: Meta, split: str) -> Iterator[Problem]:
    shards, key = meta["shards"][split], f"{split}_tokens"
    tokens = sum(record["tokens"] for record in shards)
    yield from _compare("totals", f"totals.{key}", meta["totals"][key], tokens)
    yield from _compare(key, key, meta.get(key, tokens), tokens)
    expected = token_dtype_name(meta["vocab_size"])
    yield from _compare("token_dtype", "token_dtype", meta.get("token_dtype", "uint16-le"), expected)
    itemsize, may_be_short = token_dtype_of(meta, META_NAME).itemsize, {len(shards) - 1}
    if "partitions" in meta and meta["kind"] == "pretrain":
        ends = list(accumulate(each[f"{split}_shards"] for each in meta["partitions"]["of_each"]))
        may_be_short = {end - 1 for end in ends}
        yield from _partition_sums(meta, split, ends)
    if is_imported(meta):
        may_be_short = {*range(len(shards))}
    for number, record in enumerate(shards):
        name = f"shards.{split}[{number}]"
        yield from _compare("shards", f"{name}.bytes", record["bytes"], itemsize * record["tokens"])
        if meta["kind"] == "pretrain" and number not in may_be_short:
            yield from _compare("shards", f"{name}.tokens", record["tokens"], meta["shard_bytes"] // itemsize)
    if meta.get("built") is False:
        return
    index = meta["index"][split]
    index_bytes = HEADER_BYTES + OFFSET_DTYPE.itemsize * index["entries"]
    yield from _compare("index", f"index.{split}.bytes", index["bytes"], index_bytes)
    if has_loss_bits(meta):
        yield from _compare(
            "loss_bits", f"loss_bits.{split}.bytes", meta["loss_bits"][split]["bytes"], num_bytes(tokens)
        )
    if "ids" in meta:
        documents = index["entries"] - (meta["kind"] == "pretrain")
        yield from _compare("ids", f"ids.{split}.entries", meta["ids"][split]["entries"], documents)


def _partition_sums(meta: Meta, split: str, ends: list[int]) -> Iterator[Problem]:
    """Compare the counts of each partition with its shards, and their sums with the cache's.

    ends: number of the shard after the last one of each partition.
    """
    of_each, shards = meta["partitions"]["of_each"], meta["shards"][split]
    yield from _compare("partitions", "partitions.total", meta["partitions"]["total"], len(of_each))
    for name, whole in (("docs", meta["docs"][split]), ("shards", len(shards))):
        total = sum(each[f"{split}_{name}"] for each in of_each)
        yield from _compare("partitions", f"the sum of {split}_{name} in partitions.of_each", total, whole)
    for number, (each, first, end) in enumerate(zip(of_each, [0, *ends], ends, strict=False)):
        tokens, key = sum(record["tokens"] for record in shards[first:end]), f"{split}_tokens"
        yield from _compare("partitions", f"partitions.of_each[{number}].{key}", each[key], tokens)


def _document_counts(meta: Meta) -> Iterator[Problem]:
    """Compare the counts of kept, dropped and read documents or examples."""
    if meta.get("built") is False:
        return
    sft = meta["kind"] == "sft"
    kept = {split: meta["index"][split]["entries"] - (not sft) for split in SPLITS}
    for split in SPLITS:
        if sft:
            key = f"{split}_examples"
            yield from _compare("totals", f"totals.{key}", meta["totals"][key], kept[split])
            yield from _compare(key, key, meta.get(key, kept[split]), kept[split])
        else:
            yield from _compare("docs", f"docs.{split}", meta["docs"][split], kept[split])
        count = meta.get("duplicates", {}).get(split, 0)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= max(kept[split] - 1, 0):
            yield "duplicates", f"duplicates.{split} is {count!r}, expected less than the {kept[split]} that are there"
    key = "examples_read" if sft else "documents_read"
    yield from _compare(key, key, meta[key], sum(kept.values()) + sum(meta["dropped"].values()))


# --- the contents of the files ----------------------------------------------------------------------------------------


def content_damages(files: FileChecks) -> Iterator[Damage]:
    """Read every readable file of a pretrain or sft cache. Yields wrong sha256 sums and wrong contents.

    Reads the token files of an sft cache twice, the second time for its supervised tokens. Judges contents that span
    files only if all of these files are as they were written.
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
            if not pretrain and not damages and str(files.folder) not in MOUNTED:  # at a URL it is read once
                yield from supervised_damages(files, split, supervised_counts(files.folder, meta, split))
    # The checksums last: their entries are compared with the blocks of each file when that file is read.
    for record in (*meta.get("files", []), *([meta["checksums"]] if "checksums" in meta else [])):
        yield from _scanned(files, record)


def _scanned(
    files: FileChecks, record: Record, scan: Scan | None = None, stream: SentinelScan | None = None
) -> Iterator[Damage]:
    """Read one file. Yields its own damage, and wrong contents unless they follow from damaged bytes that are known."""
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
    """Yield ids outside the vocabulary, and token files that cannot be read."""
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
    """Yield examples without a supervised token, and a sum that differs from meta.json.

    counts: from `supervised_counts`.
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
    """Check that an offsets file begins at 0 and ascends strictly."""

    def __init__(self, name: str, num_tokens: int, *, with_end: bool) -> None:
        """num_tokens: of the split. with_end: the last entry is num_tokens, as in the index of a pretrain cache."""
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
    """Check that every id in a token file is below vocab_size."""

    def __init__(self, name: str, meta: dict[str, Any]) -> None:
        self._name, self._vocab_size, self._dtype = name, int(meta["vocab_size"]), token_dtype_of(meta, META_NAME)
        self._num_wrong = self._first = self._id = self.num_tokens = 0
        self.greatest = -1
        """Greatest id; -1 without any."""

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
        """Yield the first id outside the vocabulary, with the number of all such ids."""
        if self._num_wrong:
            problem = (
                f"token {self._first} is id {self._id}, expected ids below vocab_size {self._vocab_size}; "
                f"{self._num_wrong:,} of {self.num_tokens:,} tokens are not"
            )
            size = self._dtype.itemsize
            yield Damage(self._name, size * self._first, size * (self._first + 1), problem)


class LinesScan:
    """Check a file of source ids: ASCII, one line for each document."""

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
    """Yield the first partition whose documents and tokens in meta.json end at different places of the index.

    bounds: starts of the documents, then the end of the last one.
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
    """Return the last token of each document that may be cut and lack its end: the last document of each partition.

    bounds: starts of the split's documents, then the end of the last one.
    """
    if not meta.get("cut", {}).get("documents", 0) or len(bounds) < 2:
        return np.zeros(0, dtype=np.int64)
    return (_ends(meta, split, "tokens") if "partitions" in meta else bounds[-1:]) - 1


class SentinelScan:
    """Check the special tokens of a split's token stream, which may span several files.

    Pretrain: each document begins with the token of `document_start` and ends with the token of `document_end`, if
    there is one. They and other special tokens stand nowhere else, except in an imported cache, whose documents may
    hold any token.
    Sft: each example begins with a role. A role is followed by ids and an end-of-text, and that by the next role. With
    loss bits a chat template decides the order: nothing is scanned.
    Keeps only the first wrong token.
    """

    def __init__(
        self, meta: dict[str, Any], bounds: NDArray[np.int64], control: Collection[int] = (), split: str = "train"
    ) -> None:
        """bounds: starts of the documents, in tokens; for a pretrain split also the end of the last one.
        control: ids that no text has, with or without the sentinels."""
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
        """Assign the next bytes to this file."""
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
        """Yield the first wrong token. Called after the last file."""
        if self._damage is None and self._sft and self._end != self._num_tokens - 1:
            self._keep(self._num_tokens - 1, "ends the last example, expected an end-of-text")
        if self._damage is not None:
            yield self._damage

    def _check_documents(self, places: NDArray[np.int64], ids: NDArray[np.int64], end: int) -> None:
        """places, ids: positions and ids of the special tokens in the next tokens, which end at position `end`."""
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
        """Check examples. Takes the arguments of `_check_documents`."""
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
