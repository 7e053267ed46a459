"""Every damage of a finished cache with its file and bytes. verify.py asks the same questions as named checks.

Quick: meta.json and its own checksum, what it says of itself, presence and sizes, headers, files that nobody names.
Deep: also the sha256 of each file, and what its bytes must be (contents.py), in one reading and a few MiB of memory.
A file whose bytes are not as written is reported as that, and no other file is judged by it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.build.describe import content_sha256
from niels_gpt.build.writer import OFFSET_DTYPE, npy_header
from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import KINDS
from niels_gpt.fileio import META_NAME, CacheError, walked
from niels_gpt.inspection.accounts import account_problems
from niels_gpt.inspection.checksums import damaged_blocks, damaged_entries, damaged_meta_bit, stored_checksums
from niels_gpt.inspection.contents import Damage, IdScan, LinesScan, OffsetsScan, Scan, Shape, header_damage
from niels_gpt.inspection.readers import refusals
from niels_gpt.records import file_records, meta_crc32, open_regular, parse_object, path_inside, read_regular, shortened
from niels_gpt.versions import VERSION_DIGITS

Progress = Callable[[int, int, int | None], None]
"""Called now and then with the files begun, the bytes read, and the bytes to be read in all."""
Record = dict[str, Any]

_ANY_KIND = f"expected one of {', '.join(KINDS)}"
_READ_BYTES = 1 << 22
_MAX_PLACES = 20  # named in one file
_LEFTOVER = re.compile(r"\.meta\.json\.[0-9a-f]+\.tmp")  # of a process that was killed; gc removes it


def find_damage(cache: Path, *, deep: bool, progress: Progress | None = None) -> list[Damage]:
    """Return what is wrong with the cache at `cache`, [] for a good one. Nothing outside its folder is opened.

    cache: the public folder, such as cache/sft/oasst1, or a version's own. It is resolved once.
    deep: read every file; a tokenizer's model, which is small, is always read.
    """
    try:
        folder = cache.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle; Python 3.13 has an OSError for it
        return [Damage(META_NAME, 0, 0, str(error))]
    meta, bytes_wrong = described(folder)
    found = list(bytes_wrong)
    if meta is None:
        return found
    if meta.get("kind") not in KINDS:
        kind = shortened(meta.get("kind"))
        return [_whole(folder, Damage(META_NAME, 0, 0, f"not of a cache of this project: kind is {kind}, {_ANY_KIND}"))]
    try:
        found += _damages(folder, meta, deep, progress)
    except (CacheError, OSError) as error:
        found.append(Damage(META_NAME, 0, 0, str(error)))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        found.append(Damage(META_NAME, 0, 0, f"not as docs/formats.md describes it ({error!r})"))
    foreign = _foreign(folder, meta, found)
    if not foreign and not bytes_wrong:  # else readers look no further
        found += _refused(folder, found)
    found = foreign or found
    return [_whole(folder, damage) for damage in dict.fromkeys(found)]


def described(folder: Path) -> tuple[dict[str, Any] | None, list[Damage]]:
    """Return the meta.json of a version and what is wrong with its bytes; None where it cannot be trusted.

    With a single flipped bit it is returned as it was written.
    """
    try:
        raw = read_regular(folder / META_NAME)
    except FileNotFoundError:
        return None, [Damage(META_NAME, 0, 0, "no such file, expected the description of a cache")]
    except (CacheError, OSError) as error:
        return None, [Damage(META_NAME, 0, 0, str(error))]
    if (located := damaged_meta_bit(raw)) is not None:
        (byte, bit), meta = located
        problem = f"bit {bit} of byte {byte} is flipped: 0x{raw[byte]:02x}, expected 0x{raw[byte] ^ (1 << bit):02x}"
        return meta, [Damage(META_NAME, byte, byte + 1, f"{problem} by its meta_crc32")]
    try:
        meta = parse_object(raw)
    except ValueError as error:
        return None, [Damage(META_NAME, _place(error.__cause__, raw), len(raw), str(error))]
    stored, crc = meta_crc32(raw)
    if stored == crc or (stored is None and "checksums" not in meta):  # older builders wrote neither
        return meta, []
    said = "no meta_crc32" if stored is None else "another meta_crc32 than its bytes have"
    return None, [Damage(META_NAME, 0, len(raw), f"{said}, expected {crc:08x}; the other files were not looked at")]


def _place(error: BaseException | None, raw: bytes) -> int:
    """Return the byte at which the parser stopped."""
    if isinstance(error, UnicodeDecodeError):
        return error.start
    return len(raw.decode()[: error.pos].encode()) if isinstance(error, JSONDecodeError) else 0


def _damages(folder: Path, meta: dict[str, Any], deep: bool, progress: Progress | None) -> Iterator[Damage]:
    records = file_records(meta)
    raw = read_regular(folder / META_NAME)
    for key, problem in account_problems(meta, records):
        place = max(0, raw.find(f'\n  "{key}":'.encode()) + 1)
        end = raw.find(b"\n", place) if place else len(raw)
        yield Damage(META_NAME, place, end, problem)
    yield from _strangers(folder, {META_NAME, *(record["name"] for record in records)})
    whole: list[Record] = []
    for record in records:
        damage = file_damage(folder, record)
        if damage is not None:
            yield damage
        else:
            whole.append(record)
    starts = {record["name"]: record for record in meta.get("index", {}).values()}
    for record in whole:
        if record["name"] in starts:
            damage = header_damage(record["name"], _beginning(folder / record["name"]), record["entries"])
            yield from [] if damage is None else [damage]
    if deep and meta["kind"] != "tokenizer" and meta.get("built") is not False:
        yield from _deep_damages(_Reading(folder, meta, whole, progress))
    elif deep or meta["kind"] == "tokenizer":
        yield from sha256_damages(folder, meta, whole, progress=progress)


def _foreign(folder: Path, meta: dict[str, Any], found: Sequence[Damage]) -> list[Damage]:
    """Return the one damage of a meta.json that describes other files than those that are there; else nothing.

    A version that has the name of its content is described by its own: it is the files that are damaged.
    """
    try:
        names = {record["name"] for record in file_records(meta) if record["bytes"]}
    except CacheError:
        return []
    wrong = sorted({damage.file for damage in found} & {name for name in names if os.path.lexists(folder / name)})
    is_its_own = folder.name == str(meta.get("content_sha256"))[:VERSION_DIGITS]
    if is_its_own or len(wrong) < 2 or 2 * len(wrong) <= len(names):
        return []
    said = f"{len(wrong)} of the {len(names)} files that it names are here and hold something else ({wrong[0]}, ...)"
    return [Damage(META_NAME, 0, 0, f"of another cache, it seems: {said}. Those were not judged by it")]


def _refused(folder: Path, found: Sequence[Damage]) -> Iterator[Damage]:
    """Yield why a reader refuses the cache, unless the reason is a damage that is known."""
    for reason in refusals(folder, models=not found):  # a model is opened once its sha256 is right
        inside = reason.startswith(f"{folder}/")
        name, _, problem = reason.removeprefix(f"{folder}/").partition(": ") if inside else (META_NAME, "", reason)
        key = problem.partition(" ")[0]
        if not any(known.file in reason and (known.file != META_NAME or key in known.problem) for known in found):
            yield Damage(name, 0, 0, f"the readers refuse it: {problem}")


def _strangers(folder: Path, known: set[str]) -> Iterator[Damage]:
    """Find what meta.json does not name, links above all. Links are not followed."""
    for _, names, about in walked(folder):
        name = "/".join(names)
        if not stat.S_ISDIR(about.st_mode) and name not in known and not _LEFTOVER.fullmatch(name):
            what = "a symbolic link" if stat.S_ISLNK(about.st_mode) else "a file"
            yield Damage(name, 0, about.st_size, f"{what} that the cache's {META_NAME} does not name")


def file_damage(folder: Path, record: Record) -> Damage | None:
    """Look whether a file that meta.json names is there, is a file, and has its size."""
    name, size = record["name"], record["bytes"]
    try:
        with open(open_regular(path_inside(folder, name)), "rb") as file:
            found = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return Damage(name, 0, size, f"no such file, expected {size} bytes by its {META_NAME}")
    except (CacheError, OSError) as error:
        return Damage(name, 0, size, str(error).removeprefix(f"{folder / name}: "))
    if found != size:
        return Damage(name, min(found, size), max(found, size), f"{found} bytes, expected {size} by its {META_NAME}")
    return None


def sha256_damages(
    folder: Path, meta: dict[str, Any], records: Sequence[Record], *, progress: Progress | None = None
) -> Iterator[Damage]:
    """Compare the sha256 of files that have their sizes; with block checksums, say which bytes differ."""
    reading, checksums = _Reading(folder, meta, records, progress), meta.get("checksums", {}).get("name")
    for record in sorted(records, key=lambda record: bool(record["name"] == checksums)):  # last: it needs the others
        yield from reading.damages(record, [])


class _Reading:
    """Reads files that are there and have their sizes, each once."""

    def __init__(
        self, folder: Path, meta: dict[str, Any], records: Sequence[Record], progress: Progress | None
    ) -> None:
        self.folder, self.meta, self._progress = folder, meta, progress
        self.files = {record["name"]: record for record in records}
        self.sound: set[str] = set()
        """The names of the files that are as they were written."""
        self._begun = self._done = 0
        self._buffer = memoryview(bytearray(_READ_BYTES))  # one for all files: to clear it takes as long as to hash
        self._total = sum(record["bytes"] for record in records)

    def damages(self, record: Record, scans: Sequence[Scan]) -> Iterator[Damage]:
        """Compare a file's sha256, and yield what the scans find in it."""
        name, folder, meta = record["name"], self.folder, self.meta
        if name not in self.files:
            return
        try:
            sha256 = self._read(folder / name, scans)
        except (CacheError, OSError) as error:
            yield Damage(name, 0, record["bytes"], str(error))
            return
        located = False
        if sha256 == record["sha256"]:
            self.sound.add(name)
        elif _is_in_meta(meta, record, sha256):
            self.sound.add(name)
            said = f"sha256 of {name} is {record['sha256'][:12]}, but the file and content_sha256 say {sha256[:12]}"
            yield Damage(META_NAME, 0, 0, said)
        else:
            found = list(_places(folder, meta, record, sha256, self.sound))
            located = found[0].offset > 0 or found[0].end < record["bytes"]
            yield from found
        for scan in scans:
            if not located or isinstance(scan, IdScan):  # what follows from a known damage is not one more
                yield from scan.damages()

    def _read(self, path: Path, scans: Sequence[Scan]) -> str:
        self._begun += 1
        digest = hashlib.sha256()
        with open(open_regular(path), "rb", buffering=0) as file:
            while count := file.readinto(self._buffer):
                content = self._buffer[:count]
                digest.update(content)
                for scan in scans:
                    scan.feed(content)
                self._done += count
                if self._progress is not None:
                    self._progress(self._begun, self._done, self._total)
        return digest.hexdigest()


def _is_in_meta(meta: dict[str, Any], record: Record, sha256: str) -> bool:
    """Whether content_sha256 says that a file is good and its record is not."""
    others = [found for found in file_records(meta) if found["name"] != record["name"]]
    said: str = meta["content_sha256"]
    return content_sha256([*others, {**record, "sha256": sha256}]) == said


def _places(folder: Path, meta: dict[str, Any], record: Record, sha256: str, sound: set[str]) -> Iterator[Damage]:
    name, size = record["name"], record["bytes"]
    said = f"sha256 {sha256[:12]}, expected {record['sha256'][:12]} by its {META_NAME}"
    if name == meta.get("checksums", {}).get("name"):
        found = [blocks for blocks, _ in damaged_entries(folder, meta, sound)]
    else:
        stored = stored_checksums(folder, meta).get(name)
        found = [] if stored is None else damaged_blocks(folder / name, stored, size, record["sha256"])
    for start, end, flip in found[:_MAX_PLACES]:
        if flip is None:
            yield Damage(name, start, end, f"{said}; bytes {start} to {end} differ")
        else:
            yield Damage(name, flip.byte, flip.byte + 1, f"{said}; bit {flip.bit} of byte {flip.byte} is flipped")
    if len(found) > _MAX_PLACES:
        yield Damage(name, found[_MAX_PLACES].start, found[-1].end, f"and {len(found) - _MAX_PLACES} places more")
    if not found:
        yield Damage(name, 0, size, said)


def _deep_damages(reading: _Reading) -> Iterator[Damage]:
    meta, files, sound = reading.meta, reading.files, reading.sound
    pretrain = meta["kind"] == "pretrain"
    for split in SPLITS:
        index, shards = meta["index"][split], meta["shards"][split]
        tokens = sum(record["tokens"] for record in shards)
        yield from reading.damages(index, [OffsetsScan(index["name"], tokens, with_end=pretrain)])
        if split in meta.get("ids", {}):
            ids = meta["ids"][split]
            yield from reading.damages(ids, [LinesScan(ids["name"], index["entries"] - pretrain)])
        shape = None
        if index["name"] in sound and all(record["name"] in files for record in shards):
            shape = _shape(reading.folder, meta, index)
        for record in shards:
            scans: list[Scan] = [IdScan(record["name"], meta["vocab_size"])]
            if shape is not None:
                shape.begin(record["name"])
                scans.append(_Fed(shape))
            yield from reading.damages(record, scans)
        if shape is not None and all(record["name"] in sound for record in shards):
            yield from _shape_damages(shape, meta, split)
    if "checksums" in meta:
        yield from reading.damages(meta["checksums"], [])


class _Fed:
    """A scan of several files, which is asked once all of them are known to be as written."""

    def __init__(self, shape: Shape) -> None:
        self.feed = shape.feed

    def damages(self) -> Iterator[Damage]:
        return iter(())


def _shape(folder: Path, meta: dict[str, Any], index: Record) -> Shape:
    count, start = index["entries"], len(npy_header(0))
    bounds: NDArray[np.int64] = np.zeros(0, dtype=OFFSET_DTYPE)
    if count:
        bounds = np.memmap(folder / index["name"], dtype=OFFSET_DTYPE, mode="r", offset=start, shape=(count,))
    return Shape(
        meta["special_token_ids"],
        bounds.view(np.ndarray),
        sft=meta["kind"] == "sft",
        append_eot=bool(meta.get("append_eot")),
        cut=meta.get("cut", {}).get("documents", 0) > 0,
    )


def _shape_damages(shape: Shape, meta: dict[str, Any], split: str) -> Iterator[Damage]:
    found = list(shape.damages())
    yield from found
    if meta["kind"] == "sft" and not found and shape.supervised != meta["supervised_tokens"][split]:
        said = meta["supervised_tokens"][split]
        problem = f"supervised_tokens.{split} is {said}, but {shape.supervised} tokens carry loss"
        yield Damage(META_NAME, 0, 0, problem)


def _beginning(path: Path) -> bytes:
    with open(open_regular(path), "rb") as file:
        return file.read(len(npy_header(0)))


def _whole(folder: Path, damage: Damage) -> Damage:
    """Let what is meant of meta.json as a whole be all of its bytes."""
    if damage.file != META_NAME or damage.end or not (folder / META_NAME).is_file():
        return damage
    return damage._replace(end=(folder / META_NAME).stat().st_size)
