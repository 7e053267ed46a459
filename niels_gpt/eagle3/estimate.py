"""What a cache will take of the disk, told before the target is loaded."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from niels_gpt.eagle3.folder import finished_meta, leftovers
from niels_gpt.eagle3.layout import INT_FIELDS, SIDECAR, PathLike, row_bytes_of
from niels_gpt.eagle3.manifest import EMBEDDINGS_NAME, MANIFEST_NAME, manifest_bytes
from niels_gpt.eagle3.plan import Plan
from niels_gpt.eagle3.samples import Samples
from niels_gpt.fileio import CacheError

_BLOCK = 4096
_RECEIPT_BYTES = 60  # of a sample: its checksum as text and its number of slots
_META_BYTES = 300  # of a shard: the record of its receipt


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes, before anything is written."""

    samples: int
    tokens: int
    """Real ones, padding left out."""
    supervised_share: float
    max_length: int
    """Tokens of the longest sample."""
    shards: int
    shards_done: int
    """Found finished by a run that goes on."""
    batches: int
    apparent_bytes: int
    """Of all files of the finished cache, holes counted as if they were full."""
    to_write_bytes: int
    """What this run takes of the disk, at most: without what is there, and without holes where there can be any.

    0 where the cache is finished.
    """
    free_bytes: int
    """Of the output folder's file system, for this user, and what a killed run's temporary files will give back."""
    has_holes: bool
    """Whether padding takes no disk there."""
    bytes_per_token: float
    """Apparent size of the shards by real tokens."""
    format_version: int
    """Of the manifest."""

    @property
    def fits(self) -> bool:
        """Whether this run finds room."""
        return self.to_write_bytes <= self.free_bytes

    @property
    def mean_length(self) -> float:
        """Tokens of a sample."""
        return self.tokens / self.samples


def estimate(cache_dir: PathLike, plan: Plan, samples: Samples, *, done: Collection[int] = ()) -> Estimate:
    """Return what a run into a folder, which need not be there yet, will take. done: shards that are finished."""
    folder = _existing(cache_dir)
    holes = has_holes(folder)
    layout, lengths = plan.layout, samples.lengths
    sizes = [layout.shard_bytes(plan.rows_of(shard)) for shard in range(plan.num_shards)]
    used = _used_bytes(plan, lengths) if holes else np.full(len(lengths), layout.row_bytes)
    whose = np.arange(len(lengths)) // plan.manifest["shard_size"]
    left = ~np.isin(whose, sorted(done))
    weights = plan.target["vocab_size"] * plan.target["hidden_size"] * 4 + _BLOCK
    names = sum(len(name) + 1 for name in samples.source_ids)
    sidecar = 5 * len(samples.ids) + 8 * len(lengths) + names + len(plan.batches_bytes())
    sidecar += len(manifest_bytes(plan.manifest))  # a line for each id of the draft's
    small = weights + sidecar + _RECEIPT_BYTES * len(lengths) + _META_BYTES * len(sizes)
    here = _here(cache_dir)  # the embeddings and the sidecar of a run that goes on
    is_whole = not left.any() and finished_meta(cache_dir, plan) is not None
    return Estimate(
        samples=len(lengths),
        tokens=int(lengths.sum()),
        supervised_share=samples.supervised / int(lengths.sum()),
        max_length=int(lengths.max()),
        shards=len(sizes),
        shards_done=len(done),
        batches=sum(map(len, plan.batches)),
        apparent_bytes=sum(sizes) + small,
        to_write_bytes=0 if is_whole else int(used[left].sum()) + max(0, small - here),
        free_bytes=shutil.disk_usage(folder).free + sum(path.stat().st_blocks * 512 for path in leftovers(cache_dir)),
        has_holes=holes,
        bytes_per_token=sum(sizes) / int(lengths.sum()),
        format_version=plan.manifest["format_version"],
    )


def refuse_without_room(cache_dir: PathLike, found: Estimate) -> None:
    """Raise CacheError where a run does not fit."""
    if not found.fits:
        raise CacheError(
            f"{os.fspath(cache_dir)}: this run writes {found.to_write_bytes:,} bytes, and {found.free_bytes:,} are "
            "free there. Make room, name another --output-dir, or ask for less: --limit, --seq-length, "
            "--draft-vocab-size, --target-probs-topk"
        )


def has_holes(folder: PathLike) -> bool:
    """Return whether a file in this folder takes no disk where nothing was written. The probe has no name there.

    Raises: OSError where no file can be made there.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.truncate(64 * _BLOCK)
            os.fsync(probe.fileno())
            return os.fstat(probe.fileno()).st_blocks * 512 < 32 * _BLOCK
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return True  # there is no room for anything either way
        raise OSError(error.errno, f"{error.strerror}: no file can be made there", os.fspath(folder)) from error


def _used_bytes(plan: Plan, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of each sample that are written, in whole blocks: a tensor's row begins anywhere in a block."""
    slots, found = plan.layout.seq_length, np.zeros(len(lengths), np.int64)
    for name, field in plan.layout.fields.items():
        whole = row_bytes_of(field)
        part = np.full(len(lengths), slots) if name in INT_FIELDS else lengths
        found += np.minimum(whole, part * (whole // slots) + _BLOCK)
    return found


def _existing(path: PathLike) -> Path:
    folder = Path(os.path.abspath(path))
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _here(cache_dir: PathLike) -> int:
    """Return the bytes of the small files that an earlier run has left: they are written once."""
    folder = Path(cache_dir)
    files = [folder / EMBEDDINGS_NAME, folder / MANIFEST_NAME, *folder.glob(f"{SIDECAR}/*")]
    return sum(file.stat().st_size for file in files if file.is_file())
