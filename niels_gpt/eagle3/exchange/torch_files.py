"""Files of torch.save from strangers: read with weights_only, after their sizes were bounded.

torch.load(weights_only=True) runs none of a file's code. What is left is a file that takes far more memory than its
size: by compression, inside the zip archive or around it. Members of the archive must not be larger than the file, as
torch.save compresses nothing, and a gzip stream is inflated to a limit.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from niels_gpt.eagle3.format.layout import open_file
from niels_gpt.storage.meta_json import shortened

MAX_INFLATED = 1 << 33
"""Limit of a sample's file: 8 GiB. A sample of 65,536 tokens of a 120B target has 1.2 GB."""
MAX_RATIO, RATIO_FROM = 200, 1 << 26
"""A gzip stream may inflate to more than 64 MiB only if that is at most 200 times its size. States take half of their
size as gzip, zeros a thousandth."""
_MAX_PICKLE = 1 << 20
_PART = 1 << 20


def load_tensors(path: Path, names: tuple[str, ...], *, follow_links: bool = False) -> dict[str, Tensor]:
    """Return the named tensors of a file of torch.save that holds a dict, mapped from the file; gzip where it ends .gz.

    Raises: FileNotFoundError; CacheError for a link; ValueError that says what is wrong with the file.
    """
    with open(open_file(path, follow_links=follow_links), "rb") as file:
        if path.suffix != ".gz":
            return _tensors(path, file, names)
        with tempfile.NamedTemporaryFile(prefix="niels-gpt-", suffix=".ckpt") as inflated:
            inflate(file, inflated)
            return _tensors(Path(inflated.name), inflated, names)


def inflate(source: IO[bytes], target: IO[bytes], most: int = MAX_INFLATED, ratio_from: int = RATIO_FROM) -> None:
    """Copy what a gzip stream inflates to. Raises: ValueError for a damaged one, and for one that inflates too far."""
    size, done = os.fstat(source.fileno()).st_size, 0
    limit = min(most, max(ratio_from, MAX_RATIO * size))
    try:
        with gzip.open(source) as stream:
            while part := stream.read(_PART):
                done += len(part)
                if done > limit:
                    raise ValueError(f"{size:,} bytes of gzip inflate to more than {limit:,}")
                target.write(part)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"no whole gzip stream ({error})") from error
    target.flush()


def _tensors(path: Path, file: IO[bytes], names: tuple[str, ...]) -> dict[str, Tensor]:
    _refuse_odd_archive(file)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle's, zipfile's or torch's, depending on the damage
        raise ValueError(f"torch.load(weights_only=True) refuses it ({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, expected a dict of {', '.join(names)}")
    for name in names:
        _refuse_odd_tensor(name, content.get(name))
    return {name: content[name] for name in names}


def _refuse_odd_archive(file: IO[bytes]) -> None:
    """Raise ValueError unless the file is a zip archive whose members take no more memory than the file has bytes."""
    size = file.seek(0, os.SEEK_END)
    try:
        members = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise ValueError(f"no whole archive of torch.save ({error})") from error
    total = sum(each.file_size for each in members)
    pickled = max((each.file_size for each in members if each.filename.endswith(".pkl")), default=0)
    if total > size or pickled > _MAX_PICKLE:
        expected = f"not more than the file has, and {_MAX_PICKLE:,} of pickle at most"
        raise ValueError(f"an archive of {size:,} bytes with {total:,} in its members, expected {expected}")


def _refuse_odd_tensor(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a plain tensor whose elements all lie in its own part of the file."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {shortened(value)}, expected a tensor")
    plain = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
    if not plain or value.is_quantized or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ValueError(f"{name} is no plain tensor: {value.dtype} {list(value.shape)}")
