"""The disk: whether a folder can be written, how large a cache gets, and whether it fits.

All of it is checked before the target is loaded.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.eagle3.format.layout import (
    EMBEDDINGS_NAME,
    INT_FIELDS,
    MANIFEST_NAME,
    SIDECAR,
    WEIGHTS_NAME,
    PathLike,
    refuse_links,
    row_bytes_of,
)
from niels_gpt.eagle3.format.manifest import is_native, manifest_bytes
from niels_gpt.eagle3.format.plan import TargetPlan, shards_of_part
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.resume import finished_meta, leftovers
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import canonical_json

_BLOCK = 4096
_RECEIPT_BYTES = 60  # of a sample: its checksum as text and its number of slots
_SHARD_BYTES = 900  # of a shard: the rest of its receipt, and the record of that in meta.json


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes, before anything is written."""

    samples: int
    tokens: int
    """Padding not counted."""
    supervised_share: float
    max_length: int
    """Tokens of the longest sample."""
    shards: int
    shards_done: int
    """Shards that an earlier run finished."""
    shards_left: int
    """Shards that this run builds."""
    batches: int
    apparent_bytes: int
    """Bytes of all files of the finished cache, holes included."""
    to_write_bytes: int
    """Most bytes to write, without finished files and, if the file system has them, holes; 0 for a finished cache."""
    free_bytes: int
    """Bytes free for this user, plus the temporary files of a killed run, which will be removed."""
    has_holes: bool
    """Whether padding takes no disk space there."""
    bytes_per_token: float
    """Bytes of the shards, padding and headers included, divided by the tokens without padding: as in meta.json."""
    token_bytes: dict[str, float]
    """Bytes of each tensor, by slot or by token, as in meta.json: `TargetPlan.token_bytes`."""
    format_version: int | str
    """The manifest's format_version."""

    @property
    def fits(self) -> bool:
        """Whether this run has enough room."""
        return self.to_write_bytes <= self.free_bytes

    @property
    def mean_length(self) -> float:
        """Mean tokens of a sample."""
        return self.tokens / self.samples


def estimate(
    cache_dir: PathLike,
    plan: TargetPlan,
    samples: Samples,
    *,
    done: Collection[int] = (),
    part: tuple[int, int] | None = None,
) -> Estimate:
    """Estimate what a run writes into a folder, which may be absent.

    done: finished shards. part: (i, N), i from 1: the partition to build; None: all shards.
    """
    folder = _existing(cache_dir)
    holes = has_holes(folder)
    lengths, sizes = samples.lengths, [plan.bytes_of(shard) for shard in range(plan.num_shards)]
    wanted = shards_of_part(plan.num_shards, part)
    left = sorted({*wanted} - {*done})
    unused = leftovers(cache_dir, wanted if part else None)
    shard_of = np.repeat(np.arange(plan.num_shards), np.diff(plan.firsts))
    written = _written_bytes(plan, lengths, holes)[np.isin(shard_of, left)]
    names = sum(len(name) + 1 for name in samples.source_ids)
    sidecar = 5 * len(samples.ids) + 8 * len(lengths) + names + len(plan.batches_bytes())
    sidecar += len(manifest_bytes(plan.manifest))  # a line for each id of the draft's
    sidecar += 2 * len(canonical_json(plan.record)) + _BLOCK  # meta.json has most of it, too
    small = _weights_bytes(plan) + sidecar + _RECEIPT_BYTES * len(lengths) + _SHARD_BYTES * len(sizes)
    is_whole = not left and finished_meta(cache_dir, plan) is not None
    return Estimate(
        samples=len(lengths),
        tokens=int(lengths.sum()),
        supervised_share=samples.supervised / int(lengths.sum()),
        max_length=int(lengths.max()),
        shards=len(sizes),
        shards_done=len(done),
        shards_left=len(left),
        batches=sum(len(plan.batches[shard]) for shard in left) if part else sum(map(len, plan.batches)),
        apparent_bytes=sum(sizes) + small,
        to_write_bytes=0 if is_whole else int(written.sum()) + max(0, small - _small_bytes(cache_dir)),
        free_bytes=shutil.disk_usage(folder).free + sum(path.stat().st_blocks * 512 for path in unused),
        has_holes=holes,
        bytes_per_token=sum(sizes) / int(lengths.sum()),
        token_bytes=plan.token_bytes,
        format_version=plan.manifest["format_version"],
    )


def _weights_bytes(plan: TargetPlan) -> int:
    """Return the bytes of the target's stored weights; for the native form an upper bound."""
    table = int(plan.target["vocab_size"] * plan.target["hidden_size"])
    if plan.is_native:  # bf16, where the model computes in it
        return 2 * table * (2 if plan.run.get("compute_dtype") == "bf16" else 4) + _BLOCK
    return table * 4 + _BLOCK


def refuse_unusable(folder: Path) -> None:
    """Raise if no cache can be written into a folder, which may be absent; nothing is changed.

    Raises: CacheError E704 naming a file in the way; CacheError E205 for a link; OSError if no file can be created.
    """
    refuse_links(folder)
    above = [folder.absolute() / SIDECAR, folder.absolute(), *folder.absolute().parents]
    for path in above:
        if os.path.lexists(path) and not path.is_dir():
            raise CacheError(
                path,
                f"blocks --output-dir {folder}",
                "a folder",
                "Move it away, or name another --output-dir",
                code="E704",
            )
    has_holes(next(path for path in above if path.is_dir()))  # makes a file that has no name


def refuse_without_room(cache_dir: PathLike, sizes: Estimate, manifest: Mapping[str, Any]) -> None:
    """Raise CacheError E501 if a run does not fit. manifest: of its plan."""
    if sizes.fits:
        return
    less = ["--limit", "--seq-length"]
    if not is_native(manifest):
        less += ["--format native", "--draft-vocab-size"]
    elif manifest["aux_layer_ids"] and manifest["dtype"] != "fp16" and manifest["aux_dtype"] != "fp8":
        less.append("--aux-dtype fp8")
    raise CacheError(
        cache_dir,
        f"this run writes {sizes.to_write_bytes:,} bytes, but only {sizes.free_bytes:,} are free there",
        remedy=f"Make room, name another --output-dir, or ask for less: {', '.join(less)}",
        code="E501",
    )


def has_holes(folder: PathLike) -> bool:
    """Return whether unwritten parts of a file take no disk space in this folder, tried with a nameless file.

    Raises: OSError if no file can be created there.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.truncate(64 * _BLOCK)
            os.fsync(probe.fileno())
            return os.fstat(probe.fileno()).st_blocks * 512 < 32 * _BLOCK
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return True  # nothing fits either way
        raise OSError(error.errno, f"{error.strerror}: cannot create a file there", os.fspath(folder)) from error


def _written_bytes(plan: TargetPlan, lengths: NDArray[np.int64], holes: bool) -> NDArray[np.int64]:
    """Return the bytes written for each sample: int64 [n].

    With holes, padding is left out, and each tensor adds one block, as rows are not aligned.
    """
    if plan.is_native:
        return plan.native_layout.sample_bytes(plan.counts)
    if not holes:
        return np.full(len(lengths), plan.layout.row_bytes)
    slots, total = plan.layout.seq_length, np.zeros(len(lengths), np.int64)
    for name, field in plan.layout.fields.items():
        whole = row_bytes_of(field)
        part = np.full(len(lengths), slots) if name in INT_FIELDS else lengths
        total += np.minimum(whole, part * (whole // slots) + _BLOCK)
    return total


def _existing(path: PathLike) -> Path:
    folder = Path(os.path.abspath(path))
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _small_bytes(cache_dir: PathLike) -> int:
    """Return the bytes of weights, manifest and sidecar that an earlier run has written."""
    folder = Path(cache_dir)
    files = [folder / EMBEDDINGS_NAME, folder / WEIGHTS_NAME, folder / MANIFEST_NAME, *folder.glob(f"{SIDECAR}/*")]
    return sum(file.stat().st_size for file in files if file.is_file())
