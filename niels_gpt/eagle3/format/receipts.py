"""What a reader does with a version and its receipts: it holds the version, names it, and compares what it reads.

manifest.json, plan.json and receipts are compared with the sha256 in meta.json, once a process. A shard is compared
with the size and the header of its receipt when a process first maps it; with check="blocks" each sample with its
checksum when it is first read. Caches of other tools have neither meta.json nor receipts.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from niels_gpt.cache.checksums import checked_check
from niels_gpt.eagle3.format.layout import MANIFEST_NAME, PathLike, read_meta_bytes, shard_path
from niels_gpt.eagle3.format.meta import eagle3_meta, file_sha256
from niels_gpt.eagle3.format.shard_writer import read_receipt, receipt_path
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.locks import hold_version
from niels_gpt.storage.meta_json import file_records, parse_object, resolved

_compared: set[tuple[int, ...]] = set()  # files that this process, or the one it was forked from, has compared
_AGAIN = "Remove the shard and produce it again: precompute --resume"


def version_of(cache_dir: PathLike) -> str:
    """Return the folder of the version that a cache's public name points to now; of another folder its path."""
    path = Path(cache_dir)
    return os.fspath(resolved(path) if path.is_symlink() else cache_dir)


def fingerprint(cache_dir: PathLike, num_samples: int, *, follow_links: bool) -> dict[str, Any]:
    """Return the identity of a cache for a checkpoint: samples, manifest_sha256, content_sha256, tokenizer_sha256.

    The last two are None without a meta.json of this project. Raises: CacheError for a damaged one.
    """
    meta = eagle3_meta(Path(cache_dir), follow_links) or {}
    return {
        "samples": num_samples,
        "manifest_sha256": file_sha256(Path(cache_dir) / MANIFEST_NAME, follow_links=follow_links),
        "content_sha256": meta.get("content_sha256"),
        "tokenizer_sha256": meta.get("tokenizer_sha256"),
    }


def compare_once(
    cache_dir: PathLike,
    name: str,
    *,
    follow_links: bool = False,
    remedy: str = "Remove the file and run the same precompute command with --resume, or produce the cache again",
    code: str = "E701",
) -> None:
    """Compare a small file of a cache with the sha256 in its meta.json, once a process; nothing where none is there.

    A file that cannot be looked at is not compared: its reader says why. remedy, code: of the error.
    Raises: CacheError for another sha256; as `open_file` for a link.
    """
    path = Path(cache_dir, name)
    try:
        key = _key(os.stat(path))
    except OSError:
        return
    if key not in _compared and name in (digests := _digests_in(cache_dir, follow_links)):
        _compare(path, name, digests, remedy, follow_links, code)
        _compared.add(key)


def _compare(
    path: Path, name: str, digests: Mapping[str, str], remedy: str, follow_links: bool, code: str = "E701"
) -> None:
    """Compare a file with its digest, if there is one. Raises: CacheError."""
    named = digests.get(name)
    if named is not None and (actual := file_sha256(path, follow_links=follow_links)) != named:
        raise CacheError(path, f"sha256 {actual[:12]}", f"{named[:12]} by {META_NAME}", remedy, code=code)


def _digests_in(cache_dir: PathLike, follow_links: bool) -> dict[str, str]:
    """Return the sha256 of each file by its name; {} where no meta.json of this project can be read."""
    with suppress(ValueError, OSError):
        return _read_digests(os.fspath(cache_dir), follow_links, _key(os.stat(Path(cache_dir, META_NAME))))
    return {}


@functools.lru_cache(maxsize=4)
def _read_digests(cache_dir: str, follow_links: bool, _key: tuple[int, ...]) -> dict[str, str]:
    """_key: of meta.json, which may be replaced."""
    meta = parse_object(read_meta_bytes(Path(cache_dir), follow_links=follow_links))
    return {str(record["name"]): str(record["sha256"]) for record in file_records(meta)}


def _key(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


class Receipts:
    """The receipts of an open cache, which it keeps from gc. May be pickled."""

    def __init__(self, cache_dir: PathLike, check: str = "ends", *, follow_links: bool = False) -> None:
        """check: as for `niels_gpt.cache.pretrain_dataset.PretrainSplit`. Raises: ValueError for another one."""
        checked_check(check)
        self.every_sample = check == "blocks"
        self._cache_dir, self._follow_links = os.fspath(cache_dir), follow_links
        self._hold = hold_version(Path(cache_dir))
        compare_once(cache_dir, MANIFEST_NAME, follow_links=follow_links)
        self._receipts: dict[int, dict[str, Any] | None] = {}  # of shards whose samples are compared
        self._seen: dict[int, bytearray] = {}  # of each shard: a byte for each sample that was compared

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_receipts": {}}

    def check_header(self, shard: int, header: bytes) -> None:
        """Compare a shard's size and header with its receipt, once a process. Raises: CacheError E701."""
        path = shard_path(self._cache_dir, shard)
        about = os.stat(path)
        key = _key(about)
        if key in _compared:
            return
        receipt = self._receipt(shard)
        if receipt is None:
            return
        by = f"by {receipt_path(self._cache_dir, shard)}"
        if about.st_size != receipt["bytes"]:
            raise CacheError(path, f"{about.st_size} bytes", f"{receipt['bytes']} {by}", _AGAIN, code="E701")
        if hashlib.sha256(header).hexdigest() != receipt["header_sha256"]:
            found = f"bytes 0 to {len(header)}, its header, are not those that were written, {by}"
            raise CacheError(path, found, remedy=_AGAIN, code="E701")
        _compared.add(key)

    def _receipt(self, shard: int) -> dict[str, Any] | None:
        """Return a shard's receipt, None without one. Raises: CacheError E701 for another than meta.json names."""
        receipt = read_receipt(self._cache_dir, shard, follow_links=self._follow_links)
        if receipt is not None:
            where = receipt_path(self._cache_dir, shard)
            name, digests = os.path.relpath(where, self._cache_dir), _digests_in(self._cache_dir, self._follow_links)
            _compare(where, name, digests, _AGAIN, self._follow_links)
        return receipt

    def check_sample(self, shard: int, row: int, damage: Callable[[int, str], str]) -> None:
        """Compare a sample with its receipt at its first read; without a receipt nothing is compared.

        damage: takes the slots and the checksum of the receipt; returns the damage, or "". Raises: CacheError E701.
        """
        if shard not in self._receipts:
            self._receipts[shard] = self._receipt(shard)
        receipt = self._receipts[shard]
        if receipt is None:
            return
        seen = self._seen.setdefault(shard, bytearray(receipt["samples"]))
        if row >= len(seen) or not seen[row]:
            where = receipt_path(self._cache_dir, shard)
            if row >= len(seen):
                raise CacheError(where, f"{len(seen)} samples", f"sample {row} of the shard too", _AGAIN, code="E701")
            if wrong := damage(receipt["slots"][row], receipt["xxh3_128"][row]):
                found = f"sample {row} of the shard: {wrong}, by {where}"
                raise CacheError(shard_path(self._cache_dir, shard), found, remedy=_AGAIN, code="E701")
            seen[row] = 1
