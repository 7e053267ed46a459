"""Another draft vocabulary for a native cache, without the target and without copying the states.

The draft's vocabulary decides no byte of a native cache but those of manifest.json and meta.json. So the new cache has
these two, and hard links to every other file. It equals what precompute writes for that vocabulary, byte for byte.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.eagle3.format.layout import (
    MANIFEST_NAME,
    SHARD_NAME,
    SIDECAR,
    PathLike,
    is_lock,
    open_file,
    refuse_links,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import is_native, manifest_bytes, read_manifest
from niels_gpt.eagle3.format.meta import eagle3_meta, write_meta
from niels_gpt.eagle3.format.native.shard_reader import MappedShard, NativeShards
from niels_gpt.eagle3.format.native.weights import WEIGHTS_NAME
from niels_gpt.eagle3.totals import Counts, native_positions
from niels_gpt.eagle3.vocab import build_eagle3_token_mapping
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, write_bytes
from niels_gpt.storage.fresh_folder import fresh_folder

logger = logging.getLogger(__name__)


class Redrafted(NamedTuple):
    """A new cache."""

    selected_token_ids: list[int]
    counts: Counts
    linked_bytes: int
    """Of files shared with the old cache."""
    copied_bytes: int
    """Of files that were copied."""


def redraft(
    cache_dir: PathLike,
    out: PathLike,
    *,
    draft_vocab_size: int | None,
    special_token_ids: Sequence[int | None] = (),
    selected_token_ids: Sequence[int] | None = None,
    copy: bool = False,
    follow_links: bool = False,
) -> Redrafted:
    """Write a native cache of another draft vocabulary; `out` is there whole or not at all.

    draft_vocab_size: its tokens, chosen from the stored ids and loss masks as `build_eagle3_token_mapping` does.
    special_token_ids: bos, eos, pad and unk, which come first. selected_token_ids: the vocabulary itself, in place of
    both. copy: copy the files, where `out` is on another file system. follow_links: as `CachedEagle3Dataset`.
    Raises: CacheError for a cache of version 1 or 2, one that is not finished, `out` that exists, lies in the cache or
        is on another file system, and a vocabulary with which a draft could learn nothing; FileNotFoundError.
    """
    folder, to = Path(cache_dir), Path(out)
    if not follow_links:
        refuse_links(folder)
    meta = _meta_of(folder, follow_links)
    shards = NativeShards(folder, follow_links=follow_links)
    selected = [*selected_token_ids] if selected_token_ids is not None else []
    if selected_token_ids is None:
        selected = frequent_tokens(shards, draft_vocab_size, special_token_ids)
    manifest = {**shards.manifest, "draft_vocab_size": len(selected), "selected_token_ids": selected}
    totals = {**meta["totals"], "positions": positions_of(shards, selected)}
    counts = Counts.of_meta({"totals": totals})
    if counts.problem:
        raise CacheError(to, counts.problem, code="E709")
    with fresh_folder(to, sources=[folder]) as work:
        linked, copied = _take_files(folder, work, out=to, copy=copy, follow_links=follow_links)
        write_bytes(work / MANIFEST_NAME, manifest_bytes(manifest))
        known = [record for record in meta["files"] if record["name"] != MANIFEST_NAME]
        write_meta(work, {**meta, "totals": totals}, known=known)
    if counts.warning:
        logger.warning("%s: %s", to, counts.warning, extra={"code": "W703"})
    return Redrafted(selected, counts, linked, copied)


def _meta_of(folder: Path, follow_links: bool) -> dict[str, Any]:
    """Return meta.json of a finished native cache. Raises: CacheError as `redraft`."""
    manifest = read_manifest(folder, follow_links=follow_links)
    if not is_native(manifest):
        found = (
            f"a cache of version {manifest['format_version']}: its distributions are of its own draft vocabulary, and "
            "what was outside of that is lost"
        )
        remedy = "Run precompute with the other --draft-vocab-size; with --format native the next change needs no run"
        raise CacheError(folder, found, "a native cache", remedy, code="E710")
    meta = eagle3_meta(folder, follow_links)
    if meta is None:
        raise CacheError(
            folder / META_NAME, "no such file", "a finished cache", "Run: precompute --resume", code="E702"
        )
    return meta


def frequent_tokens(shards: NativeShards, size: int | None, special: Sequence[int | None]) -> list[int]:
    """Return the tokens that a draft knows, by the stored ids and loss masks; as `redraft`."""

    def batches() -> Iterator[dict[str, Any]]:
        for index in range(shards.num_shards):
            ids, loss = _ids_and_loss(shards.opened(index))
            yield {"input_ids": ids.astype(np.int64), "loss_mask": loss}

    vocab_size = shards.manifest["target_vocab_size"]
    chosen, _ = build_eagle3_token_mapping(
        batches(), target_vocab_size=vocab_size, draft_vocab_size=size, special_token_ids=special
    )
    return [int(number) for number in chosen]


def positions_of(shards: NativeShards, selected: Sequence[int]) -> int:
    """Return the supervised target rows whose most probable token is in the draft's vocabulary."""
    opened = ((shard_path(shards.cache_dir, index), shards.opened(index)) for index in range(shards.num_shards))
    return native_positions(opened, selected, shards.manifest["target_vocab_size"])


def _ids_and_loss(shard: MappedShard) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    ids: NDArray[np.uint32] = shard.tensors["input_ids"].numpy()
    return ids, shard.loss_mask(0, len(ids))


def _take_files(folder: Path, to: Path, *, out: Path, copy: bool, follow_links: bool) -> tuple[int, int]:
    """Link or copy every file but manifest.json and meta.json; return the bytes linked and copied.

    out: what errors call `to`, which gets that name later.
    """
    fileio.make_dir(to / SIDECAR)
    names = [Path(entry.name) for entry in folder.iterdir() if SHARD_NAME.match(entry.name)]
    names += [Path(SIDECAR, entry.name) for entry in (folder / SIDECAR).iterdir() if not is_lock(entry.name)]
    linked = 0
    total = 0
    for name in sorted([*names, Path(WEIGHTS_NAME)]):
        if name.suffix == ".tmp":
            continue
        os.close(open_file(folder / name, follow_links=follow_links))  # refuses what is no file of the cache
        source = os.path.realpath(folder / name)
        total += os.stat(source).st_size
        if copy:
            shutil.copyfile(source, to / name)
            continue
        try:
            os.link(source, to / name)
        except OSError as error:
            if error.errno not in fileio.CANNOT_LINK:
                raise
            found = f"files of {folder} cannot be linked there ({os.strerror(error.errno)})"
            raise CacheError(out, found, "a folder on its file system", "Pass --copy", code="E710") from error
        linked += os.stat(source).st_size
    return linked, total - linked
