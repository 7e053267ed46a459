"""The layout of a shard: its tensors, dtypes, shapes and offsets. Opens files that may be hostile.

Decides every file name in a cache folder, and the size limits of files that others may have made.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from niels_gpt.storage.errors import CacheError, NotFound, errors_as
from niels_gpt.storage.fileio import META_NAME, NotRegularError, open_for_reading
from niels_gpt.storage.meta_json import checked_count, parse_object, shortened
from niels_gpt.storage.mounted import MOUNTED, let_arrive

PathLike = str | os.PathLike[str]
Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensor name -> dtype and shape of one row; the first dimension is the slots."""
Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensor name -> dtype and whole shape."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AUX_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn}
"""Dtypes of native auxiliary states."""
INT_FIELDS = ("input_ids", "attention_mask", "loss_mask")
FULL_FIELDS = ("target_probs",)
TOPK_FIELDS = ("target_probs_values", "target_probs_indices")
SHARD_NAME = re.compile(r"^shard-(\d{6})\.safetensors$")
SIDECAR = "sidecar"
MANIFEST_NAME, EMBEDDINGS_NAME = "manifest.json", "target_embeddings.safetensors"
WEIGHTS_NAME = "target_weights.safetensors"
"""The weights of a native cache; it has no EMBEDDINGS_NAME."""
WATCH_NAME = "watch.json"
"""How far `eagle3 watch` is; not in a finished cache."""
_WRITTEN = (MANIFEST_NAME, EMBEDDINGS_NAME, WEIGHTS_NAME, META_NAME, WATCH_NAME)
LOCK_NAME = "lock"
"""Sidecar file that the writing process locks."""
_LOCK_FILE = re.compile(r"lock(\.[1-9][0-9]{0,8})?")

# safetensors' names, in the order in which it lays tensors out: by descending alignment, then by name.
_TYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_TYPES.values())}
MAX_HEADER = 1 << 20  # safetensors allows 100 MB; the few tensors of a cache take less than a KiB
MAX_JSON_BYTES = 1 << 24
"""Limit of manifest.json, plan.json and a receipt: 16 MiB. JSON takes up to thirty times its size in memory."""
MAX_ROWS = 200_000
"""Limit of a shard's samples: more do not fit into its receipt."""
_META_BYTES = 1 << 20, 1 << 10  # limits of a meta.json without its records of files, and of a record
SPARSE = 1 << 26, 1 << 16
"""(least, share) of `refuse_sparse` for files with padding, which may be holes: from 64 MiB on, a 65,536th must be on
disk."""
WITHOUT_HOLES = 1 << 24, 16
"""The same for files without padding: from 16 MiB on, a sixteenth must be on disk, which holds even on a compressing
file system."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a dense shard's tensors, as the manifest states them."""

    seq_length: int
    """Slots of a row, S."""
    aux_hidden_dim: int
    """Three times the target's hidden size, 3H."""
    draft_vocab_size: int
    """D."""
    topk: int
    """Probabilities kept in each slot; 0: all D."""
    dtype: str
    """Dtype of the float tensors: a key of DTYPES."""

    @property
    def fields(self) -> Fields:
        """The tensors of a shard, in file order."""
        slots, number = self.seq_length, DTYPES[self.dtype]
        fields: Fields = {name: (torch.int64, (slots,)) for name in INT_FIELDS}
        fields["aux_hidden_states"] = (number, (slots, self.aux_hidden_dim))
        if self.topk:
            fields["target_probs_values"] = (number, (slots, self.topk))
            fields["target_probs_indices"] = (torch.int32, (slots, self.topk))
        else:
            fields["target_probs"] = (number, (slots, self.draft_vocab_size))
        fields["position_mask"] = (torch.bool, (slots, 1))
        return in_file_order(fields)

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample, padding included."""
        return sum(row_bytes_of(field) for field in self.fields.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot; the embeddings are not counted."""
        return self.row_bytes // self.seq_length

    def shard_bytes(self, rows: int) -> int:
        """Return the size of a shard file of `rows` samples, header included."""
        return len(header_bytes(self.fields, rows)) + rows * self.row_bytes


def layout_like(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Return the layout of a shard's stacked tensors, [n, S] and [n, S, width].

    Raises: ValueError naming a field that does not fit the others in dtype or shape.
    """
    probs = tensors[TOPK_FIELDS[0] if TOPK_FIELDS[0] in tensors else FULL_FIELDS[0]]
    shapes = [tuple(tensors["input_ids"].shape), *(tuple(each.shape) for each in (tensors["aux_hidden_states"], probs))]
    names = {dtype: name for name, dtype in DTYPES.items()}
    if [len(shape) for shape in shapes] != [2, 3, 3] or probs.dtype not in names:
        raise ValueError(
            f"input_ids, aux_hidden_states and target_probs are {', '.join(str(list(shape)) for shape in shapes)} and "
            f"{probs.dtype}, expected [n, S], [n, S, 3H], [n, S, D or k] and a dtype of {', '.join(DTYPES)}"
        )
    (rows, slots), width = shapes[0], shapes[2][2]
    if 0 in (rows, slots, shapes[1][2], width):
        raise ValueError(f"tensors of shapes {', '.join(str(list(shape)) for shape in shapes)}: expected no empty ones")
    layout = Layout(slots, shapes[1][2], width, width if TOPK_FIELDS[0] in tensors else 0, names[probs.dtype])
    for name, (dtype, shape) in layout.fields.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != (rows, *shape):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {[rows, *shape]}")
    return layout


def is_lock(name: str) -> bool:
    """Return whether a sidecar file is the lock or one of its leases; they are no part of a cache."""
    return _LOCK_FILE.fullmatch(name) is not None


def shard_path(cache_dir: PathLike, shard_index: int) -> str:
    """Return the path of shard `shard_index` in `cache_dir`. Raises: ValueError beyond 999,999."""
    if not 0 <= shard_index <= 999_999:
        raise ValueError(f"shard {shard_index}: expected 0 to 999,999, for a shard's name has six digits")
    return os.path.join(cache_dir, f"shard-{shard_index:06d}.safetensors")


def header_bytes(fields: Fields, rows: int) -> bytes:
    """Return the safetensors header of a shard of `rows` rows: eight bytes for its length, then JSON.

    Raises: ValueError for a dtype that no cache field has.
    """
    return tensors_header({name: (dtype, (rows, *shape)) for name, (dtype, shape) in fields.items()})


def tensors_header(tensors: Tensors) -> bytes:
    """Return the safetensors header of tensors whose numbers of rows may differ.

    Raises: ValueError for a dtype that no cache tensor has.
    """
    header, end = {}, 0
    for name, (dtype, shape) in in_file_order(tensors).items():
        begin, end = end, end + row_bytes_of((dtype, shape))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: PathLike, *, follow_links: bool = False) -> tuple[Fields, int, bytes]:
    """Return a safetensors file's fields in file order, its number of rows, and its header bytes.

    follow_links: see `open_file`.
    Raises: FileNotFoundError; CacheError E701 unless the file is whole and all its tensors have the same number of
        rows.
    """
    tensors, header = read_tensors_header(path, follow_links=follow_links)
    return *rows_of_equal_number(os.fspath(path), tensors), header


def rows_of_equal_number(where: str, tensors: Tensors) -> tuple[Fields, int]:
    """Return the fields of a dense shard's tensors, and its number of rows. Raises: CacheError E701."""
    rows = {shape[0] if shape else -1 for _, shape in tensors.values()}
    if len(rows) != 1 or -1 in rows:
        raise _damaged(where, f"its tensors have {sorted(rows)} rows", "one number of rows")
    return {name: (dtype, shape[1:]) for name, (dtype, shape) in tensors.items()}, rows.pop()


def read_tensors_header(
    path: PathLike, *, sparse: tuple[int, int] = SPARSE, follow_links: bool = False
) -> tuple[Tensors, bytes]:
    """Return a safetensors file's tensors in file order, with whole shapes, and its header bytes.

    sparse: the arguments `least` and `share` of `refuse_sparse`. follow_links: see `open_file`.
    Raises: FileNotFoundError; CacheError E701 unless the file is whole and has only dtypes that caches have.
    """
    where = os.fspath(path)
    with open(open_file(path, follow_links=follow_links), "rb") as file:
        refuse_sparse(file.fileno(), where, *sparse)
        return tensors_header_in(where, os.fstat(file.fileno()).st_size, file.read)


def tensors_header_in(where: str, size: int, read: Callable[[int], bytes]) -> tuple[Tensors, bytes]:
    """Return the same as `read_tensors_header`. size: of the file. read: returns so many of its next bytes.

    Raises: CacheError E701.
    """
    head = read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
    if not 0 < length <= min(size - 8, MAX_HEADER):
        most = f"{size:,}, the file's size, at most" if length > size - 8 else f"{MAX_HEADER:,} at most"
        raise _damaged(where, f"its first eight bytes give a header of {length:,} bytes", most)
    text = read(length)
    tensors: Tensors = {}
    end = 0
    try:
        header = parse_object(text)
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ is no object of strings")
        for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            tensor = _TYPES[about["dtype"]], tuple(checked_count(part, name, where) for part in about["shape"])
            begin, end = end, end + row_bytes_of(tensor)
            if [checked_count(offset, name, where) for offset in about["data_offsets"]] != [begin, end]:
                raise ValueError(f"the offsets of {shortened(name)} do not fit its shape")
            tensors[name] = tensor
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(where, f"its header is not a list of a cache's tensors ({error!r:.200})") from error
    if size != 8 + length + end:
        raise _damaged(where, f"{size:,} bytes", f"{8 + length + end:,}, as its header states")
    return tensors, head + text


def open_file(path: PathLike, *, follow_links: bool = False) -> int:
    """Open a regular file of a cache read-only. Returns its descriptor, which the caller closes.

    follow_links: open the file that a symbolic link points to, as in a snapshot of the Hugging Face hub.
    Raises: FileNotFoundError; CacheError E205 for a link, a linked sidecar, a folder, a FIFO or any other non-file.
    """
    if MOUNTED:
        let_arrive(path)
    where = os.fspath(path)
    above = os.path.dirname(where)
    if not follow_links and os.path.basename(above) == SIDECAR and os.path.islink(above):
        raise _link_refused(above)
    try:
        with errors_as("E702"):
            return open_for_reading(path, follow_links=follow_links)
    except NotRegularError as error:
        if error.is_link:
            raise _link_refused(where) from error
        raise CacheError(where, "not a regular file", "one of an EAGLE-3 cache", code="E205") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:  # the parent is not a folder
            raise NotFound(errno.ENOTDIR, os.strerror(errno.ENOTDIR), where, code="E702") from error
        if error.errno == errno.ELOOP:  # links in a circle, with follow_links
            raise _link_refused(where) from error
        raise


def _link_refused(where: str) -> CacheError:
    return CacheError(
        where,
        "a symbolic link",
        "a file or folder inside the cache, as nothing outside of it is read or written",
        "Copy what it points to to its place (cp -rL), or, in a snapshot of the Hugging Face hub, read it with "
        "--follow-links, in Python follow_links=True",
        code="E205",
    )


def read_file(path: PathLike, max_bytes: int = MAX_JSON_BYTES, *, follow_links: bool = False) -> bytes:
    """Return the bytes of a regular file.

    Raises: FileNotFoundError; CacheError E205 for a link or non-file; CacheError E206 for more than `max_bytes` bytes.
    """
    with open(open_file(path, follow_links=follow_links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CacheError(path, f"{size:,} bytes", f"at most {max_bytes:,}", code="E206")
        return file.read(size)


def read_meta_bytes(cache_dir: PathLike, *, follow_links: bool = False) -> bytes:
    """Return the bytes of a cache's meta.json, limited by the number of files in the cache.

    Raises: FileNotFoundError; CacheError E205 for a link or non-file; CacheError E206 for a larger file.
    """
    mount, sidecar = MOUNTED.get(os.fspath(cache_dir)), os.path.join(cache_dir, SIDECAR)
    files = 0 if mount is None else len(mount.records)
    for folder in (cache_dir, sidecar) if follow_links or not os.path.islink(sidecar) else (cache_dir,):
        with suppress(OSError):
            files += len(os.listdir(folder))
    most = _META_BYTES[0] + files * _META_BYTES[1]
    return read_file(os.path.join(cache_dir, META_NAME), most, follow_links=follow_links)


def refuse_sparse(
    handle: int, where: str, least: int, share: int, remedy: str = "Produce it again: precompute --resume"
) -> None:
    """Raise CacheError if a file of `least` bytes or more has less than 1/`share` of them on disk.

    Such a file is almost all holes, but reading it takes the memory and time of its stated size.
    """
    status = os.fstat(handle)
    on_disk = status.st_blocks * 512
    if status.st_size >= least and on_disk * share < status.st_size:
        found = f"{status.st_size:,} bytes, of which {on_disk:,} are on disk: almost all of it is holes"
        raise CacheError(where, found, "a file that was written", remedy, code="E203")


def refuse_links(cache_dir: PathLike) -> None:
    """Raise CacheError if a file or folder that a run writes, replaces or removes is a symbolic link.

    The cache folder itself may be a link: the user named it.
    """
    sidecar = os.path.join(cache_dir, SIDECAR)
    if os.path.islink(sidecar):
        raise _link_refused(sidecar)
    for folder in (os.fspath(cache_dir), sidecar):
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                ours = folder == sidecar or entry.name in _WRITTEN or SHARD_NAME.match(entry.name)
                if ours and entry.is_symlink():
                    raise _link_refused(entry.path)


def in_file_order(fields: Fields) -> Fields:
    """Return the fields in file order. Raises: ValueError for a dtype that no cache field has."""
    for name, (dtype, _) in fields.items():
        if dtype not in _RANKS:
            raise ValueError(f"{name} is {dtype}, expected one of {', '.join(map(str, _RANKS))}")
    return dict(sorted(fields.items(), key=lambda item: (_RANKS[item[1][0]], item[0])))


def row_bytes_of(field: tuple[torch.dtype, tuple[int, ...]]) -> int:
    """Return the bytes of a tensor of this dtype and shape."""
    return field[0].itemsize * math.prod(field[1])


def form_text(form: tuple[torch.dtype | None, tuple[int | None, ...]] | None) -> str:
    """Return dtype and shape of a field as text."""
    if form is None:
        return "absent"
    return f"{str(form[0]).removeprefix('torch.')} [{', '.join('any' if n is None else str(n) for n in form[1])}]"


def _damaged(where: str, found: str, expected: str = "") -> CacheError:
    return CacheError(where, found, expected, "Remove the shard and produce it again: precompute --resume", code="E701")
