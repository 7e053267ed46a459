"""Documents and chats that --exclude leaves out: a file of source ids and sha256 of texts, one per line.

    # decontamination: the questions of our evaluation
    5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03
    <urn:uuid:39147604-bfbe-4ed5-b19c-54105f8ae8a7>
    journal/2024-05-01.md

64 hex digits are an id, or the sha256 of a text's UTF-8, exactly as its source has it; text after a space, such as the
file name that `sha256sum` prints, is ignored. Anything else is an id. A document has these ids: its row's `id`, its
file's path below the source's folder, and for oasst1 the ids of its tree and messages. A chat is left out if one of its
ids, or the text of one of its messages, is listed; a group of rollouts if its id or its file is. Blank lines, and lines
that start with `#` and a space, are ignored.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

from niels_gpt.data.types import ChatSample, PretrainSample, RawChat, SequenceGroup
from niels_gpt.storage.errors import SourceError, SourceNotFound
from niels_gpt.storage.fileio import open_for_reading

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample", PretrainSample, ChatSample, RawChat, SequenceGroup)

EXCLUDED = "excluded"
MAX_BYTES = 1 << 28
"""Limit of the file: four million sha256."""
_DIGEST = re.compile(r"([0-9a-fA-F]{64})(\s.*)?")
_ID_FIELDS = ("id", "path", "message_tree_id")


@dataclass(frozen=True)
class Exclusion:
    """A parsed file of --exclude, and the entries that matched."""

    entries: frozenset[str]
    """Ids, and sha256 in lower case."""
    matched: set[str] = field(default_factory=set, compare=False)
    """Entries that named something since this process read the file."""
    resumed: set[str] = field(default_factory=set, compare=False)
    """Sources that this process resumed behind their first row, so that `matched` may lack their entries."""
    absent: dict[Path, frozenset[str]] = field(default_factory=dict, compare=False)
    """Cache folder -> entries that its source was read for and does not have, for caches that were reused."""

    @cached_property
    def facts(self) -> dict[str, int | str]:
        """Facts for meta.json: the number of entries, and a sha256 that does not depend on their order."""
        lines = "".join(f"{entry}\n" for entry in sorted(self.entries))
        return {"entries": len(self.entries), "sha256": _digest_of(lines)}

    @cached_property
    def _has_digests(self) -> bool:
        return any(_DIGEST.fullmatch(entry) for entry in self.entries)

    def matching(self, sample: PretrainSample | ChatSample | RawChat | SequenceGroup) -> frozenset[str]:
        """Return the entries that name a sample. It is left out if there is one."""
        names = [str(sample.meta[key]) for key in _ID_FIELDS if key in sample.meta]
        ids = sample.meta.get("message_ids")
        names += ids if isinstance(ids, list) else ()  # a file's row may hold anything there
        if self._has_digests:
            names += [name.lower() for name in names if _DIGEST.fullmatch(name)]
            texts = [sample.text] if isinstance(sample, PretrainSample) else []
            texts += [turn.content for turn in sample.messages] if isinstance(sample, ChatSample) else []
            texts += sample.texts if isinstance(sample, RawChat) else []
            names += map(_digest_of, texts)
        return self.entries.intersection(names)


def read_exclusion(path: str | os.PathLike[str]) -> Exclusion:
    """Read the file of --exclude.

    Raises: SourceNotFound E301 if it does not exist; NotRegularError E205 if it is not a regular file; SourceError E206
        if it is larger than MAX_BYTES, E302 if it is not UTF-8, E303 if it has no entry.
    """
    file = Path(path).expanduser()
    try:
        state = file.stat()
        return _read(file.absolute(), state.st_mtime_ns, state.st_size)
    except FileNotFoundError:
        raise SourceNotFound(
            f"{os.fspath(path)}: no such file, expected ids or sha256 of texts, one a line, that --exclude leaves out"
        ) from None
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{os.fspath(path)}: not a utf-8 text file ({error}), expected ids or sha256, one a line"
        ) from None


@lru_cache(maxsize=1)
def _read(path: Path, mtime_ns: int, size: int) -> Exclusion:
    """Parse a file. A build and each asset read it; the cache holds while modification time and size stay the same."""
    if size > MAX_BYTES:
        raise SourceError(f"{path}: {size:,} bytes, expected a list of at most {MAX_BYTES:,}", code="E206")
    with open(open_for_reading(path, follow_links=True), "rb") as file:
        lines = file.read(size).decode("utf-8-sig").split("\n")
    entries = [line.strip() for line in lines if line.strip() and not re.match(r"\s*#(\s|$)", line)]
    if not entries:
        raise SourceError(f"{path}: no entry in it, expected ids or sha256 of texts, one a line", code="E303")
    return Exclusion(frozenset(found[1].lower() if (found := _DIGEST.fullmatch(entry)) else entry for entry in entries))


def remaining(samples: Iterable[Sample], exclude: str | None, counters: Counter[str]) -> Iterator[Sample]:
    """Yield the samples that the file `exclude` does not list. The others count as "excluded", which may be 0.

    exclude: None: yield all. The file is read at the first sample; the number of matched entries is logged at the end.
    Raises: the errors of `read_exclusion`.
    """
    if exclude is None:
        yield from samples
        return
    exclusion = read_exclusion(exclude)
    matched: set[str] = set()
    counters[EXCLUDED] += 0
    try:
        for sample in samples:
            entries = exclusion.matching(sample)
            matched |= entries
            exclusion.matched.update(entries)
            if entries:
                counters[EXCLUDED] += 1
            else:
                yield sample
    finally:
        total = len(exclusion.entries)
        if matched:  # W313 names the entries that name nothing in any source
            logger.info("%s: %d of its %d entries named a document that was read", exclude, len(matched), total)


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
