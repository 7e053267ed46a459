"""How token files and offsets files are opened, checked and read: by memory map, or by positioned reads; read-only."""

from __future__ import annotations

import os
import re
import resource
import stat
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from niels_gpt.cache.checksums import BlockSums
from niels_gpt.cache.formats import BLOCK_BYTES, NARROW, OFFSET_DTYPE, Ids
from niels_gpt.storage.errors import REBUILD, CacheError, CacheNotFound
from niels_gpt.storage.fileio import PathLike
from niels_gpt.storage.filemaps import (
    HAS_FILE_MAPS,
    FileMaps,
    MapError,
    has_room,
    mapped_file,
    memory_bytes,
    page_starts,
)
from niels_gpt.storage.meta_json import is_sparse, open_regular, printable, shortened
from niels_gpt.storage.mounted import Mounted, shown
from niels_gpt.storage.versions import public_path

_OFFSET_BYTES = 8
_CHUNK = 1 << 20  # offsets checked at a time
_MAX_HEADER = 1 << 16  # the longest one of version 1.0 of .npy
# As numpy.save writes it for any array without fields; numpy.load would evaluate the header.
_NPY_HEADER = re.compile(
    rb"\{'descr': '([^']{1,20})', 'fortran_order': (?:False|True), 'shape': \(([0-9, ]{0,99})\), \} *\n"
)


def mmap_tokens(
    path: PathLike,
    *,
    expected_bytes: int | None = None,
    dtype: np.dtype[Any] = NARROW,
    sums: BlockSums | None = None,
) -> Ids:
    """Map a token file; returns `dtype` [tokens], read-only, as a plain ndarray over the map.

    A plain ndarray slices faster than numpy's memmap class. The garbage collector closes it.
    expected_bytes: the size in meta.json. dtype: little-endian uint16 or uint32, see `token_dtype_of`. sums: the
    checksums that the first and the last block of the file must have.
    Raises: FileNotFoundError; CacheError for an empty file, a part of a token, an unexpected size, and anything that is
        not a regular file: links are not followed.
    """
    handle = _opened(path, "token file")
    try:
        size = _checked_size(path, os.fstat(handle).st_size, expected_bytes, dtype)
        if sums is not None:
            sums.check_opened(Path(path), handle)
        return mapped_file(handle, size).view(dtype)
    finally:
        os.close(handle)


def _checked_size(path: PathLike, size: int, expected_bytes: int | None, dtype: np.dtype[Any]) -> int:
    """Return the size of a token file. Raises: CacheError unless it is as expected, not 0, and of whole tokens."""
    _check_size(path, size, expected_bytes)
    if size == 0:
        raise CacheError(
            path, "an empty file: this split has no token, or it was truncated", remedy=REBUILD, code="E203"
        )
    if size % dtype.itemsize:
        expected = f"a multiple of {dtype.itemsize} ({dtype.name})"
        raise CacheError(path, f"{size} bytes", expected, REBUILD, code="E203")
    return size


def _check_size(path: PathLike, size: int, expected_bytes: int | None) -> None:
    if expected_bytes is not None and size != expected_bytes:
        raise CacheError(path, f"{size} bytes", f"{expected_bytes} by its meta.json", REBUILD, code="E203")


IO = Literal["mmap", "pread"]
"""How windows are read: from a memory map, or by one positioned read each, which is faster on network file systems.

On systems other than Linux windows of shards are always read by positioned reads. Elsewhere they are once the process
has mapped a third as many files as the kernel allows maps (`sysctl vm.max_map_count`: 21,843 files by default).
"""


class TokenFiles:
    """Token files of known sizes, each opened at its first read.

    Safe to fork and to pickle. No heap beyond the returned batches: maps use pages of the file, which the kernel may
    reclaim. With io="pread" at most an eighth of the process's file descriptors is used.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, int | None]],
        *,
        io: IO = "mmap",
        in_order: bool = False,
        dtype: np.dtype[Any] | Sequence[np.dtype[Any]] = NARROW,
        sums: BlockSums | Sequence[BlockSums | None] | None = None,
    ) -> None:
        """files: paths with their bytes by meta.json, None without it.

        in_order: windows will be read one after the other, so that read-ahead helps. dtype, sums: of all files, or of
            each; sums: the checksums with which each file is compared when it is opened.
        Raises: ValueError for another io; the errors of `mmap_tokens` for every file, although none is opened yet.
        """
        if io not in get_args(IO):
            raise ValueError(f"io={io!r}: expected one of {', '.join(get_args(IO))}")
        self.in_order = in_order
        dtypes = [dtype] * len(files) if isinstance(dtype, np.dtype) else list(dtype)
        all_sums = [sums] * len(files) if isinstance(sums, BlockSums | None) else list(sums)
        each = zip(files, dtypes, all_sums, strict=True)
        on_disk = [_file_on_disk(path, size, of, sums) for (path, size), of, sums in each]
        self._set_files([path for path, _ in files], on_disk, io)

    def _set_files(self, paths: list[Path], on_disk: list[_OnDisk], io: IO) -> None:
        self.paths, self._on_disk, self.io = paths, on_disk, io
        mounts = [_mount_of(file) for file in on_disk]
        self.is_fetched = any(mounts)
        """Whether a file is at a URL."""
        self._mounts = (  # of each file, with its name there; the table is empty without a mount
            [None if mount is None else (mount, mount.name_of(path)) for path, mount in zip(paths, mounts, strict=True)]
            if self.is_fetched
            else []
        )
        self._is_read = io == "pread" or not HAS_FILE_MAPS or self.is_fetched  # by positioned reads
        sizes, self._dtypes = [file.size for file in on_disk], sorted({file.dtype for file in on_disk}, key=_itemsize)
        self._sizes = sizes
        self.dtype: np.dtype[Any] = self._dtypes[-1] if self._dtypes else NARROW
        """Dtype of rows: the dtype of the widest file."""
        self._itemsizes: NDArray[np.int64] = np.array([file.dtype.itemsize for file in on_disk], dtype=np.int64)
        self.lengths: NDArray[np.int64] = np.array(sizes, dtype=np.int64) // self._itemsizes
        self.first_tokens: NDArray[np.int64] = np.array(page_starts(sizes)[:-1], dtype=np.int64) // self._itemsizes
        """The first token of each file in the numbering of `gather`: in tokens of its own dtype, page by page."""
        self._descriptors: dict[int, _Descriptor] = {}
        self._max_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
        self._maps: FileMaps | None = None
        self._windows: Ids = np.empty((0, 0), dtype=NARROW)
        self._content: memoryview | None = None  # all tokens of the maps, in the numbering of `gather`
        self._plans: dict[Mounted, Any] = {}  # of what is read next, where it is fetched
        self._is_mapped: NDArray[np.bool_] = np.zeros(len(paths), dtype=np.bool_)
        self._num_unmapped = len(paths)

    @classmethod
    def joined(cls, parts: Sequence[TokenFiles]) -> TokenFiles:
        """Return the files of all parts, numbered through; none is opened. Raises: ValueError unless io is the same.

        Parts may have different dtypes; rows then have the wider one, and take longer.
        """
        if len({part.io for part in parts}) != 1:
            raise ValueError(f"io of the parts is {[part.io for part in parts]}: expected one for all")
        checked = any(isinstance(part, CheckedTokenFiles) for part in parts)
        files = (CheckedTokenFiles if checked else TokenFiles)([], io=parts[0].io)
        paths = [path for part in parts for path in part.paths]
        files._set_files(paths, [file for part in parts for file in part._on_disk], files.io)
        return files

    def __reduce__(self) -> tuple[Any, ...]:
        files = list(zip(self.paths, self._sizes, strict=True))
        dtypes = self.dtype if len(self._dtypes) < 2 else [file.dtype for file in self._on_disk]
        sums = [file.sums for file in self._on_disk]
        return partial(type(self), io=self.io, in_order=self.in_order, dtype=dtypes, sums=sums), (files,)

    def itemsize(self, file: int) -> int:
        """Return the bytes of a token of a file."""
        return self._on_disk[file].dtype.itemsize

    def gather(self, files: NDArray[np.int64], places: NDArray[np.int64], width: int) -> Ids:
        """Return `dtype` [B, width]: `width` tokens of file f = files[b], from token places[b] - first_tokens[f] on.

        files, places: [B]. The caller ensures that all tokens are inside the file: memory beside it is not mapped.
        Raises: FileNotFoundError; CacheError for a file that was replaced or truncated; OSError if it cannot be mapped.
        """
        if len(self._dtypes) > 1:
            return self._gather_mixed(files, places, width)
        if not self._are_mapped(files):
            return self._read(files, places - self.first_tokens[files], width, self.dtype)
        windows = self._windows
        if windows.shape[1] != width:
            windows = self._windows = self._windows_of(width, self.dtype)
        rows: Ids = windows[places]
        return rows

    def _gather_mixed(self, files: NDArray[np.int64], places: NDArray[np.int64], width: int) -> Ids:
        rows, itemsizes = np.empty((len(files), width), dtype=self.dtype), self._itemsizes[files]
        for dtype in self._dtypes:
            (chosen,) = np.nonzero(itemsizes == dtype.itemsize)
            if not len(chosen):
                continue
            some, at = files[chosen], places[chosen]
            if self._are_mapped(some):
                rows[chosen] = self._windows_of(width, dtype)[at]
            else:
                rows[chosen] = self._read(some, at - self.first_tokens[some], width, dtype)
        return rows

    def _are_mapped(self, files: NDArray[np.int64]) -> bool:
        """Map some files if they are not mapped. Returns False if there is no room: they are read from now on."""
        if self._is_read:
            return False
        if self._num_unmapped and (self._maps is None or not self._is_mapped[files].all()):
            missing = np.unique(files[~self._is_mapped[files]])
            if not has_room(len(missing)):
                self._is_read = True
                return False
            self._map(missing)
        return True

    def _map(self, files: NDArray[np.int64]) -> None:
        try:
            if self._maps is None:
                # Read-ahead of random windows is wasted if the files do not fit into memory.
                self._is_random = not self.in_order and 2 * sum(self._sizes) > memory_bytes()
                # Two threads here both take the maps of the first, where the files get mapped.
                self._maps = self.__dict__.setdefault("_first_maps", FileMaps(self._sizes))
            for file in files.tolist():
                descriptor = _Descriptor(self._open(file))
                self._maps.add(file, descriptor.number, random=self._is_random)
                self._is_mapped[file] = True
        except MapError as error:
            where = f"{self.paths[0].parent}: {len(self._sizes)} files of {sum(self._sizes)} bytes"
            raise OSError(error.errno, f"{where}: {error.strerror}. Or read them with io='pread'") from error
        self._num_unmapped = int(np.count_nonzero(~self._is_mapped))  # counted: two threads may map the same file

    def _windows_of(self, width: int, dtype: np.dtype[Any]) -> Ids:
        """Return every window of `width` tokens of the files of a dtype: a view, `dtype` [windows, width]."""
        content = np.asarray(self._maps)
        tokens = content[: len(content) // dtype.itemsize * dtype.itemsize].view(dtype)
        return as_strided(tokens, (len(tokens) - width + 1, width), 2 * tokens.strides, writeable=False)

    def gather_ranges(
        self,
        files: NDArray[np.int64],
        places: NDArray[np.int64],
        ends: NDArray[np.int64],
        pads: NDArray[np.int64] | None = None,
        pad_id: int = 0,
    ) -> Ids:
        """Return ranges of tokens end to end: ids [sum]; of file f = files[i] from token places[i] - first_tokens[f].

        files, places, ends: [n]; ends: after the last token, in the numbering of places, above them. pads: int64 [n],
        how many pad_id follow each range; None: none. All files have one dtype. The caller ensures that all tokens are
        inside the file. Raises the errors of `gather`.
        """
        dtype, size = self.dtype, self.dtype.itemsize
        if not self._are_mapped(files):
            begins = (places - self.first_tokens[files]) * size
            self._check_room(files, begins, begins + (ends - places) * size)
            firsts, counts = begins.tolist(), ((ends - places) * size).tolist()
            each = zip(files.tolist(), firsts, counts, strict=True)
            return joined((self._bytes(file, first, count) for file, first, count in each), pads, pad_id, dtype)
        if self._content is None:
            self._content = np.asarray(self._maps).data
        tokens = self._content
        each_range = zip((places * size).tolist(), (ends * size).tolist(), strict=True)
        return joined([tokens[first:last] for first, last in each_range], pads, pad_id, dtype)

    def _bytes(self, file: int, at: int, count: int) -> memoryview:
        content = memoryview(bytearray(count))
        self._read_into(content, file, at)
        return content

    def _read(self, files: NDArray[np.int64], starts: NDArray[np.int64], width: int, dtype: np.dtype[Any]) -> Ids:
        rows, itemsize = np.empty((len(files), width), dtype=dtype), dtype.itemsize
        content, size = rows.reshape(-1).view(np.uint8).data, width * itemsize
        if self.is_fetched:
            self._check_room(files, starts * itemsize, starts * itemsize + size)
        for row, (file, start) in enumerate(zip(files.tolist(), starts.tolist(), strict=True)):
            self._read_into(content[row * size : (row + 1) * size], file, start * itemsize)
        return rows

    def will_read(self, files: NDArray[np.int64], places: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Say what will be read next, in this order, so that files at a URL are fetched ahead. Arguments: `gather`."""
        if not self.is_fetched:
            return
        for mount in {id(each[0]): each[0] for each in self._mounts if each is not None}.values():
            names = [each[1] if each is not None and each[0] is mount else None for each in self._mounts]
            (some,) = np.array([name is not None for name in names])[files].nonzero()
            firsts, sizes = self.first_tokens[files[some]], self._itemsizes[files[some]]
            spans = ((at[some] - firsts) * sizes for at in (places, ends))
            self._plans[mount] = mount.plan(self, names, files[some], *spans)

    def _check_room(self, files: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Raise NoRoomError if a folder of fetched pieces is smaller than a batch. begins, ends: bytes, int64 [n]."""
        if (found := next(filter(None, self._mounts), None)) is not None:
            found[0].check_room(files, begins, ends)

    def _read_into(self, rest: memoryview, file: int, at: int) -> None:
        """Fill memory with the bytes of a file from byte `at` on."""
        if self.is_fetched and (mounted := self._mounts[file]) is not None:
            mount, name = mounted
            mount.read_into(rest, name, at, self._plans.get(mount))
            return
        descriptor = self._descriptor(file)
        while rest and (read := os.preadv(descriptor.number, [rest], at)):
            at, rest = at + read, rest[read:]  # a network file system may return less than requested
        if rest:
            expected = f"{self._sizes[file]}: it was truncated while it was read"
            raise CacheError(self.paths[file], f"ends after {at} bytes", expected, REBUILD, code="E203")

    def _descriptor(self, file: int) -> _Descriptor:
        """Return an open file; if too many are open, the least recently used one is closed."""
        descriptor = self._descriptors.pop(file, None)
        if descriptor is None:
            descriptor = _Descriptor(self._open(file))
            while len(self._descriptors) >= self._max_open:
                del self._descriptors[next(iter(self._descriptors))]
        self._descriptors[file] = descriptor
        return descriptor

    def _open(self, file: int) -> int:
        """Return a descriptor of a file; CacheError unless it is the same file as when this object was made."""
        path, expected = self.paths[file], self._on_disk[file]
        handle = _opened(path, "token file")
        try:
            status = os.fstat(handle)
            _checked_size(path, status.st_size, expected.size, expected.dtype)
            if _identity(status) != expected.identity:
                found = "another file than when it was opened: the cache was replaced"
                raise CacheError(path, found, remedy="Open it again", code="E210")
            if expected.sums is not None:
                expected.sums.check_opened(path, handle)
        except CacheError:
            os.close(handle)
            raise
        return handle


class CheckedTokenFiles(TokenFiles):
    """Token files whose blocks are compared with their checksums when they are first read."""

    def gather(self, files: NDArray[np.int64], places: NDArray[np.int64], width: int) -> Ids:
        """Return as `TokenFiles.gather`. Raises: CacheError E201 for a block that has another checksum."""
        self._touch(files, places, places + width)
        return super().gather(files, places, width)

    def gather_ranges(
        self,
        files: NDArray[np.int64],
        places: NDArray[np.int64],
        ends: NDArray[np.int64],
        pads: NDArray[np.int64] | None = None,
        pad_id: int = 0,
    ) -> Ids:
        """Return the same as `TokenFiles.gather_ranges`. Raises the errors of `gather`."""
        self._touch(files, places, ends)
        return super().gather_ranges(files, places, ends, pads, pad_id)

    def _touch(self, files: NDArray[np.int64], places: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        firsts, sizes = self.first_tokens[files], self._itemsizes[files]
        begins, stops = ((places - firsts) * sizes).tolist(), ((ends - firsts) * sizes).tolist()
        for file, begin, stop in zip(files.tolist(), begins, stops, strict=True):
            sums, size = self._on_disk[file].sums, self._sizes[file]
            if sums is not None and sums.every_block:
                sums.touch(self.paths[file], size, begin, stop, partial(self._block, file))

    def _block(self, file: int, number: int) -> memoryview:
        start = number * BLOCK_BYTES
        return self._bytes(file, start, min(BLOCK_BYTES, self._sizes[file] - start))


def joined(ranges: Iterable[Any], pads: NDArray[np.int64] | None, pad: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return ranges of memory end to end, as `dtype` [sum]; pads[i] times `pad` follow range i; None: none does."""
    if pads is not None and pads.any():
        fill, size = np.full(int(pads.max()), pad, dtype=dtype).view(np.uint8).data, dtype.itemsize
        parts: list[Any] = []
        for part, count in zip(ranges, (pads * size).tolist(), strict=True):
            parts.append(part)
            if count:
                parts.append(fill[:count])
        ranges = parts
    return np.frombuffer(bytearray().join(ranges), dtype=dtype)  # in half the time of numpy assignments


def token_files(files: Sequence[tuple[Path, int | None]], sums: BlockSums, **how: Any) -> TokenFiles:
    """Return files that are compared with the checksums of their cache as it asks for. how: see `TokenFiles`."""
    return (CheckedTokenFiles if sums.every_block and not sums.mount else TokenFiles)(files, sums=sums, **how)


class FetchedItems:
    """The items of one file at a URL: a slice is fetched when it is asked for."""

    def __init__(self, files: TokenFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return int(self._files.lengths[0])

    def __getitem__(self, some: slice) -> NDArray[Any]:
        """Return items of the file, as a copy. Raises: CacheError E610 to E612."""
        begin, end, _ = some.indices(len(self))
        if begin >= end:
            return np.empty(0, dtype=self._files.dtype)
        return self._files.gather_ranges(np.zeros(1, dtype=np.int64), np.array([begin]), np.array([end]))

    def will_read(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Say which slices will be asked for next, in this order: int64 [n] both; some may be empty."""
        (some,) = (begins < ends).nonzero()
        self._files.will_read(np.zeros(len(some), dtype=np.int64), begins[some], ends[some])


class _Descriptor:
    """An open file that is closed with its last reference, so that no other thread reads from a closed one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class _OnDisk(NamedTuple):
    size: int
    identity: tuple[int, ...]
    dtype: np.dtype[Any]
    sums: BlockSums | None


def _itemsize(dtype: np.dtype[Any]) -> int:
    return dtype.itemsize


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns  # the next file may get the same inode number


def _mount_of(file: _OnDisk) -> Mounted | None:
    return None if file.sums is None else file.sums.mount


def _file_on_disk(path: Path, expected_bytes: int | None, dtype: np.dtype[Any], sums: BlockSums | None) -> _OnDisk:
    if sums is not None and sums.mount is not None:
        size = sums.mount.size(sums.mount.name_of(path))
        return _OnDisk(_checked_size(path, size, expected_bytes, dtype), (), dtype, sums)
    try:
        status = os.lstat(path)
    except OSError:
        status = None
    if status is None or not stat.S_ISREG(status.st_mode) or is_sparse(status):  # opening it raises the right error
        handle = _opened(path, "token file")
        status = os.fstat(handle)
        os.close(handle)
    return _OnDisk(_checked_size(path, status.st_size, expected_bytes, dtype), _identity(status), dtype, sums)


def load_idx(
    path: PathLike, *, num_tokens: int, expected_bytes: int | None = None, sums: BlockSums | None = None
) -> NDArray[np.int64]:
    """Map an offsets file; returns int64 [examples]: example i is tokens[idx[i]:idx[i + 1]], the last goes to the end.

    expected_bytes: the size in meta.json. sums: the checksums that its blocks must have.
    Raises: FileNotFoundError; CacheError unless it is a regular file with the header of a 1-D int64 array of its size,
        as numpy.save writes it in version 1.0 or 2.0, and the offsets begin at 0, ascend strictly, and stay below
        `num_tokens`: no example is empty.
    """
    offsets = mapped_npy(path, expected_bytes, sums)
    if len(offsets) == 0:
        raise CacheError(path, "no example in this split, or it was truncated", remedy=REBUILD, code="E203")
    if offsets[0] != 0:
        raise CacheError(path, f"begins at {offsets[0]}", "0", REBUILD, code="E201")
    for start in range(0, len(offsets) - 1, _CHUNK):
        some = offsets[start : start + _CHUNK + 1]
        falling = np.flatnonzero(some[1:] <= some[:-1])  # no differences: with hostile numbers they overflow
        if len(falling):
            raise CacheError(
                path, f"offsets do not ascend at entry {start + falling[0] + 1}", remedy=REBUILD, code="E201"
            )
    if offsets[-1] >= num_tokens:
        tokens = Path(path).name.replace("_idx.npy", "_tokens.bin")
        found = f"offset {offsets[-1]} lies beyond the {num_tokens} tokens of {tokens}"
        raise CacheError(path, found, remedy=REBUILD, code="E203")
    return offsets


def check_starts(
    firsts: Ids,
    starts: NDArray[np.int64],
    roles: Sequence[int],
    *,
    first: int,
    tokens_path: Path,
    idx_path: Path,
) -> None:
    """Raise CacheError unless every example begins with the sentinel of a role, which offsets of other tokens fail.

    firsts, starts: the first id of some examples, and its index in the token file: [n]. first: the number of the first
        of them. roles: ids of the sentinels; empty: not known, any id is accepted.
    """
    if not roles:
        return
    is_role = firsts == roles[0]
    for role in roles[1:]:
        is_role |= firsts == role
    if not is_role.all():
        wrong = int(is_role.argmin())
        begins = f"with which example {first + wrong} begins by {idx_path.name}"
        expected = f"the sentinel of a role ({', '.join(map(str, roles))})"
        why = "The offsets belong to other tokens, or one of the two files is damaged"
        found = f"token {starts[wrong]}, {begins}, is id {firsts[wrong]}"
        raise CacheError(tokens_path, found, expected, f"{why}. {REBUILD}", code="E203")


def mapped_npy(path: PathLike, expected_bytes: int | None, sums: BlockSums | None = None) -> NDArray[np.int64]:
    """Map a .npy file of one dimension of int64; its header is checked against the file's size."""
    handle = _opened(path, "offsets file")
    try:
        size = os.fstat(handle).st_size
        _check_size(path, size, expected_bytes)
        start, count = _header(os.fspath(path), os.pread(handle, _MAX_HEADER, 0))
        if size != start + count * _OFFSET_BYTES:
            expected = f"{start + count * _OFFSET_BYTES} by its own header, which has {count} entries"
            raise CacheError(path, f"{size} bytes", expected, REBUILD, code="E203")
        if sums is not None:
            sums.check_opened(Path(path), handle, whole=True)
        return mapped_file(handle, size)[start:].view(OFFSET_DTYPE)
    finally:
        os.close(handle)


def _header(path: str, begin: bytes) -> tuple[int, int]:
    """Return the byte at which the numbers of a .npy file start, and their count. begin: its first bytes."""
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(begin[:8], 0)
    start = 8 + width + int.from_bytes(begin[8 : 8 + width], "little")
    header = _NPY_HEADER.fullmatch(begin[8 + width : start])
    if not width or start > len(begin) or header is None:
        found = f"not a .npy file of plain numbers: it begins {shortened(begin[:60])}"
        raise CacheError(path, found, remedy=REBUILD, code="E203")
    descr, shape = header.group(1).decode(errors="replace"), header.group(2).decode()
    count = re.fullmatch(r"(\d{1,19}),", shape)
    if descr != np.dtype(OFFSET_DTYPE).str or count is None:
        raise CacheError(path, f"{descr} of shape ({shape})", "int64 [examples]", REBUILD, code="E201")
    return start, int(count.group(1))


def _opened(path: PathLike, what: str) -> int:
    try:
        return open_regular(path)
    except FileNotFoundError:
        from niels_gpt.storage.remedies import build_again

        raise CacheNotFound(f"{os.fspath(path)}: no such {what}. {_removed(path) or build_again(path)}") from None


def public_file(path: Path) -> Path:
    """Return the path of a file or folder of a version under the public name of its cache, for messages.

    Of another path, and of a version that the public name does not point to, it is `path`.
    """
    for folder in (path, *path.parents):
        public = public_path(folder)
        if public is not None and os.path.realpath(public) == str(folder):
            return public / path.relative_to(folder)
    return path


def public_name(path: Path) -> str:
    """Return `public_file`, or of a cache at a URL the URL: one printable line."""
    return printable(shown(public_file(path)))


def _removed(path: PathLike) -> str:
    """Return the remedy if the version of a file is gone, as for a reader that was pickled before gc ran; else ""."""
    for folder in Path(path).parents:
        public = public_path(folder)
        if public is not None and not folder.exists():
            now = public.resolve().name if public.is_symlink() and public.exists() else ""
            today = f"which is version {now} now" if now else "once it is built again"
            return (
                f"This reader needs version {folder.name} of {public}, which gc or a build has removed. Restore that "
                f"version from a copy, or open a new reader of {public}, {today}"
            )
    return ""
