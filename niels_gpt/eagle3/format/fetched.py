"""Reads the samples of shards at a URL by ranges. `niels_gpt.cache.mounts` describes the folder that holds the pieces.

There is no checksum of a piece. Each sample is compared with its receipt whenever it is read, because another process
may have written the folder; a sample that differs is fetched once more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch

from niels_gpt.buckets.bucket import in_order
from niels_gpt.eagle3.format.layout import MAX_HEADER, Tensors, row_bytes_of, shard_path, tensors_header_in
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.mounted import Mounted

logger = logging.getLogger(__name__)

Span = tuple[int, int]
"""Bytes [begin, end) of a shard's file."""
_BEGIN_BYTES = 1 << 16
_JOBS = 8
_MOST_PLANNED = 4096  # samples
T = TypeVar("T")


class Fetched:
    """The shards of one cache at a URL, for one open reader. May be pickled, and threads may share it."""

    def __init__(self, mount: Mounted, headers: Mapping[int, bytes] = MappingProxyType({})) -> None:
        """headers: of some shards, which a copy brings along."""
        self.mount, self._headers = mount, dict(headers)
        self._begin()

    def _begin(self) -> None:
        self._pid, self._ahead, self._plan = os.getpid(), frozenset[int](), None
        self._alone = _Owner()

    def __reduce__(self) -> tuple[Any, ...]:
        return Fetched, (self.mount, self._headers)

    def size(self, shard: int) -> int:
        """Return the bytes of a shard by meta.json."""
        return self.mount.size(shard_path("", shard))

    def begin_of(self, shard: int) -> bytes:
        """Return the first 64 KiB of a shard, and more if its header is longer."""
        size = self.size(shard)
        begin = self.mount.fetch(shard_path("", shard), 0, min(size, _BEGIN_BYTES))
        end = min(8 + int.from_bytes(begin[:8], "little"), 8 + MAX_HEADER, size)
        return self.bytes_of(shard, begin, 0, max(end, len(begin)))

    def header(self, path: str, shard: int, begin: bytes | None = None) -> tuple[Tensors, bytes]:
        """Return the same as `read_tensors_header`. begin: from `begin_of`; None: the header is kept, for dense shards.

        Raises: CacheError E701.
        """
        if begin is not None:
            return tensors_header_in(path, self.size(shard), BytesIO(begin).read)
        known = self._headers.get(shard) or self.begin_of(shard)
        tensors, header = self.header(path, shard, known)
        self._headers[shard] = header
        return tensors, header

    def bytes_of(self, shard: int, known: bytes, begin: int, end: int) -> bytes:
        """Return bytes of a shard. known: its first ones, which are not fetched again."""
        rest = max(begin, len(known))
        return known[begin:end] + (self.mount.fetch(shard_path("", shard), rest, end) if rest < end else b"")

    def twice(self, shard: int, read: Callable[[], T]) -> T:
        """Return what `read` returns, in a second attempt if the first one finds damage. Raises: CacheError E611."""
        try:
            return read()
        except CacheError as error:
            if error.code != "E701":
                raise
            self._headers.pop(shard, None)
        try:
            return read()
        except CacheError as error:
            if error.code != "E701":
                raise
            self.mount.refuse(shard_path("", shard), f"{error.found}, in a second attempt too", error.expected)

    def each(self, shards: int, read: Callable[[int], T]) -> list[T]:
        """Return what `read` returns for each shard; several are read at once, and an exit does not wait for them."""
        return [*in_order((partial(self.twice, shard, partial(read, shard)) for shard in range(shards)), _JOBS)]

    # --- samples ------------------------------------------------------------------------------------------------------

    def will_read(
        self,
        owner: object,
        numbers: Sequence[int],
        least: int,
        spans: Callable[[int], tuple[int, list[Span]]],
        enough: Callable[[], bool],
    ) -> int:
        """Fetch samples ahead, in this order, and as many as `max_ahead` bytes hold. Returns their number.

        least: of them at least. spans: returns a sample's shard and its bytes there, in the order of reading. enough:
            whether no more shall be asked for.
        """
        self._here()
        planned, num_bytes = list[tuple[int, list[Span]]](), 0
        for number in numbers[: max(_MOST_PLANNED, least)]:
            planned.append(spans(number))
            num_bytes += sum(end - begin for begin, end in planned[-1][1])
            if len(planned) >= least and (num_bytes >= self.mount.max_ahead or enough()):
                break
        self._plan = self._planned(owner, planned)
        self._ahead = frozenset(numbers[: len(planned)])
        return len(planned)

    def _planned(self, owner: object, samples: Sequence[tuple[int, list[Span]]]) -> Any:
        shards = {shard: place for place, shard in enumerate(dict.fromkeys(shard for shard, _ in samples))}
        flat = [(shards[shard], *span) for shard, spans in samples for span in spans]
        files, begins, ends = np.array(flat, dtype=np.int64).reshape(-1, 3).T
        return self.mount.plan(owner, [shard_path("", shard) for shard in shards], files, begins, ends)

    def tensors(self, number: int, shard: int, spans: Mapping[str, Span], forms: Tensors) -> dict[str, torch.Tensor]:
        """Return tensors of a sample, each with memory of its own.

        number: of the sample. spans: the bytes that are read; zeros follow. forms: dtype and shape of each.
        """
        self._here()
        name, plan = shard_path("", shard), self._plan
        if number not in self._ahead:
            plan = self._planned(self._alone, [(shard, [span for span in spans.values() if span[0] < span[1]])])
        tensors = {}
        for field, (begin, end) in spans.items():
            dtype, shape = forms[field]
            size = row_bytes_of(forms[field])
            content = (np.empty if size == end - begin else np.zeros)(size, np.uint8)
            if end > begin:
                self.mount.read_into(content[: end - begin].data, name, begin, plan)
            tensors[field] = torch.from_numpy(content).view(dtype).view(shape)
        return tensors

    def compared(
        self, shard: int, row: int, read: Callable[[], T], wrong: Callable[[T], str], spans: Sequence[Span]
    ) -> T:
        """Return a sample. wrong: returns its damage, "" for none. Raises: CacheError E611 for damage at the URL."""
        name = shard_path("", shard)
        sample = read()
        if found := wrong(sample):
            where = f"{self.mount.url}/{name}: sample {row} of the shard"
            logger.warning("%s: %s, so it is fetched again", where, found, extra={"code": "W611"})
            for span in spans:
                self.mount.forget(name, *span)
            sample = read()
            if found := wrong(sample):
                self.mount.refuse(name, f"sample {row} of the shard: {found}, in a second attempt too")
        return sample

    def _here(self) -> None:
        if self._pid != os.getpid():
            self._begin()


class _Owner:
    """Owns the plan of one sample."""
