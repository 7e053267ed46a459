"""Read torch.save files of strangers with bounded memory and without running code.

torch.load(weights_only=True) runs none of a file's code. A file may still take far more memory than its size: by
compression inside the zip archive or around it, by holes, or by a pickle that builds something large. So members of the
archive must be stored uncompressed, as torch.save writes and torch maps them. The pickle may name only what torch.save
writes for tensors, and may reuse only texts and names: a part that is reused at each of sixty levels takes for ever to
hash. A gzip stream is inflated up to a limit.
"""

from __future__ import annotations

import errno
import gzip
import os
import pickletools
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from niels_gpt.eagle3.format.layout import WITHOUT_HOLES, PathLike, open_file, refuse_sparse
from niels_gpt.storage.meta_json import shortened

MAX_INFLATED = 1 << 33
"""Limit of a sample's file: 8 GiB. A sample of 65,536 tokens of a 120B target has 1.2 GB."""
MAX_RATIO, RATIO_FROM = 200, 1 << 26
"""A gzip stream may inflate to more than 64 MiB only up to 200 times its size. States compress to about half, zeros to
a thousandth."""
_MAX_PICKLE = 1 << 20
_MAX_TUPLES = 20_000
"""Most tuples in a pickle: torch.save writes four for a tensor. Hashing deeply nested tuples crashes Python."""
_USED_AGAIN = ("BINUNICODE", "GLOBAL")
_STORAGES = ("BFloat16", "Half", "Float", "Double", "Bool", "Byte", "Char", "Short", "Int", "Long")
_GLOBALS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
_GLOBALS |= {f"torch {each}Storage" for each in _STORAGES}
_CHUNK = 1 << 20


def load_tensors(path: Path, names: tuple[str, ...], *, follow_links: bool = False) -> dict[str, Tensor]:
    """Return the named tensors of a torch.save file that holds a dict, mapped from the file; a .gz file is inflated.

    Raises: FileNotFoundError; CacheError for a link or a sparse file; ValueError for any other fault of the file;
        OSError for a fault of the machine, such as a full disk or missing permission.
    """
    with open(open_file(path, follow_links=follow_links), "rb") as file:
        refuse_sparse(file.fileno(), str(path), *WITHOUT_HOLES)
        if path.suffix != ".gz":
            return _tensors(path, file, names)
        with tempfile.NamedTemporaryFile(prefix="niels-gpt-", suffix=".ckpt") as inflated:
            inflate(file, inflated)
            return _tensors(Path(inflated.name), inflated, names)


def inflate(source: IO[bytes], target: IO[bytes], most: int = MAX_INFLATED, ratio_from: int = RATIO_FROM) -> None:
    """Inflate a gzip stream into `target`.

    Raises: ValueError for a damaged stream and one that inflates too far; OSError if `target` cannot be written.
    """
    size, done = os.fstat(source.fileno()).st_size, 0
    limit = min(most, max(ratio_from, MAX_RATIO * size))
    try:
        with gzip.open(source) as stream:
            while part := stream.read(_CHUNK):
                done += len(part)
                if done > limit:
                    raise ValueError(f"{size:,} bytes of gzip inflate to more than {limit:,}")
                target.write(part)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"no whole gzip stream ({error})") from error
    target.flush()


def _tensors(path: Path, file: IO[bytes], names: tuple[str, ...]) -> dict[str, Tensor]:
    content = load_dict(path, file)
    for name in names:
        refuse_odd_tensor(name, content.get(name))
    return {name: content[name].detach() for name in names}


def load_dict(path: PathLike, file: IO[bytes]) -> dict[Any, Any]:
    """Return the dict in a torch.save file, opened as `file`. Its tensors are mapped and unchecked.

    Raises: ValueError for a fault of the file; OSError.
    """
    refuse_odd_archive(file)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # pickle's, zipfile's or torch's, depending on the damage
        raise ValueError(f"torch.load(weights_only=True) refuses it ({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, expected a dict of tensors")
    return content


def refuse_odd_archive(file: IO[bytes]) -> None:
    """Raise ValueError unless the file is a zip archive that takes no more memory than the file has bytes."""
    size = file.seek(0, os.SEEK_END)
    try:
        archive = zipfile.ZipFile(file)
        members = archive.infolist()
        pickles = [each for each in members if each.filename.lower().endswith(".pkl")]
        packed = [each.filename for each in members if each.compress_type != zipfile.ZIP_STORED]
        total, pickled = (sum(each.file_size for each in some) for some in (members, pickles))
        if packed or total > size or pickled > _MAX_PICKLE or len({each.filename for each in members}) < len(members):
            found = f"an archive of {size:,} bytes with {total:,} in its members, {pickled:,} of pickle, "
            expected = f"not more than the file has, each name once, none compressed, and {_MAX_PICKLE:,} of pickle"
            raise ValueError(f"{found}{len(packed)} compressed, expected {expected} at most")
        for each in pickles:
            _refuse_odd_pickle(archive.read(each))
    except (zipfile.BadZipFile, EOFError, OverflowError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # what a wrong offset in the archive gives
            raise
        raise ValueError(f"no whole archive of torch.save ({error})") from error


def _refuse_odd_pickle(content: bytes) -> None:
    """Raise ValueError for a pickle with anything but what torch.save writes for tensors in dicts and lists."""
    kept: dict[Any, str] = {}  # number in the pickle's memo -> the opcode that made the part
    made, tuples, named, again = "", 0, set(), False
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name.endswith("PUT"):
                kept[argument] = made
                continue
            made = opcode.name
            named |= {str(argument)} if made == "GLOBAL" else set()
            again |= made.endswith("GET") and kept.get(argument) not in _USED_AGAIN
            tuples += made.startswith("TUPLE")
    except Exception as error:  # of any kind, depending on the damage
        raise ValueError(f"no whole pickle ({type(error).__name__})") from error
    if odd := sorted(named - _GLOBALS):
        raise ValueError(f"its pickle names {shortened(odd[0])}, expected only tensors of torch.save")
    if again or tuples > _MAX_TUPLES:
        raise ValueError(f"its pickle uses a part twice, or has more than {_MAX_TUPLES:,} tuples, unlike torch.save's")


def refuse_odd_tensor(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a plain tensor whose elements all lie in its own part of the file."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {shortened(value)}, expected a tensor")
    plain = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
    if not plain or value.is_quantized or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ValueError(f"{name} is no plain tensor: {value.dtype} {list(value.shape)}")
