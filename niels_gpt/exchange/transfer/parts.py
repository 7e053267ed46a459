"""Stages a part of a pretrain cache: whole shards from the first on, and what belongs to them of the index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache.documents import id_lines
from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import find_meta
from niels_gpt.cache.mmap import load_idx
from niels_gpt.engine.meta import Source
from niels_gpt.exchange.assembling import About, assemble
from niels_gpt.exchange.foreign import ForeignFile, read_pieces
from niels_gpt.exchange.output import Modes, continues_at, ends_in
from niels_gpt.exchange.transfer.arrival import Arrival, keep
from niels_gpt.exchange.transfer.described import Described
from niels_gpt.exchange.transfer.jobs import Tally
from niels_gpt.exchange.transfer.remote import Bucket
from niels_gpt.kinds.kind import kinds
from niels_gpt.kinds.verify import find_damage
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, id_of_line
from niels_gpt.storage.meta_json import path_inside, resolved
from niels_gpt.tokenizers.document_tokens import DocumentToken
from niels_gpt.tokenizers.protocol import TOKEN_DTYPES
from niels_gpt.tokenizers.vocabulary import end_of_documents
from niels_gpt.work import Progress

Chosen = dict[str, list[dict[str, Any]]]
"""The records of the shards to stage, by split."""
_VOCABULARY = ("tokenizer_sha256", "vocab_size", "token_dtype", "special_token_ids")
_AS_WHOLE = ("seed", "split_rule", "roundtrip", "lossless", "document_start")


def chosen_shards(remote: Described, split: str | None, max_bytes: int | None) -> Chosen:
    """Return the shards to stage: those of `split`, or of train and then val, as many as fit into `max_bytes`.

    Raises: ValueError where none fits, for another split, and for a kind of cache that is staged whole.
    """
    if not remote.kind.has_parts:
        able = " or ".join(kind.name for kind in kinds() if kind.has_parts)
        why = f"a part of a cache of kind {remote.kind.name} cannot be staged: only shards of {able} are read alone"
        raise ValueError(f"{why}. Leave out --split and --max-bytes")
    if split not in (None, *SPLITS):
        raise ValueError(f"--split {split}: expected {' or '.join(SPLITS)}")
    left, found = max_bytes, Chosen({name: [] for name in SPLITS})
    wanted = [(name, record) for name in SPLITS if split in (None, name) for record in remote.meta["shards"][name]]
    for name, record in wanted:
        if left is not None:
            if record["bytes"] > left:
                break
            left -= int(record["bytes"])
        found[name].append(record)
    if not any(found.values()):
        first = f"the first shard has {wanted[0][1]['bytes']:,}" if wanted else "there is no shard"
        limit = f"--split {split}" if max_bytes is None else f"--max-bytes {max_bytes}"
        raise ValueError(f"{limit}: {first}")
    return found


def stage_part(
    bucket: Bucket, remote: Described, dest: Path, chosen: Chosen, *, jobs: int, progress: Progress | None
) -> tuple[Path, dict[str, Any], int, int]:
    """Fetch some shards and commit them at `dest` as a cache; returns its version, its meta.json, and bytes fetched
    and kept. Nothing is fetched where this part is there already. Raises: as `pull`.
    """
    staged = _key(remote, chosen)
    if (there := _found(dest, staged)) is not None:
        return there[0], there[1], 0, sum(record["bytes"] for records in chosen.values() for record in records)
    identity = {"stage": staged}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    with versions.resumable(dest, key) as (work, notes):
        keep(notes, identity)
        fetched, wanted = notes / "files", _wanted(remote, chosen)
        tally = Tally(sum(int(record["bytes"]) for record in wanted), progress)
        fileio.make_dir(fetched)
        Arrival(bucket, remote, fetched, tally).fetch(wanted, jobs)
        fileio.remove(work)  # half a cache, of a run that was killed
        fileio.make_dir(work)
        files = [file for split in SPLITS for file in _files(fetched, remote.meta, split, chosen[split])]
        meta = assemble(work, files, _about(remote, len(files), staged), Modes())
        version = versions.commit(work, dest, str(meta["content_sha256"]))
    return version, meta, tally.moved, tally.kept


def _key(remote: Described, chosen: Chosen) -> dict[str, Any]:
    """Return `staged` of meta.json: of which cache, and how many shards of each split."""
    return {"of": remote.content_sha256, **{f"{split}_shards": len(chosen[split]) for split in SPLITS}}


def _found(dest: Path, staged: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    try:
        folder = resolved(dest)
        meta = find_meta(folder)
    except (OSError, CacheError):
        return None
    is_same = meta is not None and meta.get("staged") == staged
    return (folder, meta) if is_same and meta and not find_damage(folder, deep=False) else None


def _wanted(remote: Described, chosen: Chosen) -> list[dict[str, Any]]:
    """Return the records of the files to fetch: shards, and the whole index of their splits."""
    found = []
    for split in filter(chosen.get, SPLITS):
        found += [*chosen[split], remote.meta["index"][split], *filter(None, [remote.meta.get("ids", {}).get(split)])]
    return found


def _files(folder: Path, meta: dict[str, Any], split: str, records: list[dict[str, Any]]) -> Iterator[ForeignFile]:
    if not records:
        return
    bounds = load_idx(path_inside(folder, meta["index"][split]["name"]), num_tokens=np.iinfo(np.int64).max)
    names = _Names(folder, meta, split) if split in meta.get("ids", {}) else None
    dtype, first = TOKEN_DTYPES[meta["token_dtype"]], 0
    for record in records:
        path, tokens = path_inside(folder, record["name"]), int(record["tokens"])
        ends = ends_in(bounds, first, tokens)
        continues = continues_at(bounds, first)
        yield ForeignFile(
            split,
            str(record["name"]),
            tokens,
            partial(read_pieces, path, dtype),
            partial(ends_in, bounds, first, tokens),
            token_file=path,
            itemsize=dtype.itemsize,
            ids=None if names is None else partial(names.next, len(ends), continues),
            continues=continues,
        )
        first += tokens


class _Names:
    """The source ids of a split, read once, shard by shard."""

    def __init__(self, folder: Path, meta: dict[str, Any], split: str) -> None:
        self._lines = id_lines(folder, meta, split)
        self._last = ""

    def next(self, count: int, continues: bool) -> Iterator[str]:
        """Yield the names of the documents of the next shard, its first again where it continues the one before."""
        if continues:
            yield self._last
        for line in islice(self._lines, count - continues):
            self._last = id_of_line(line)
            yield self._last


def _about(remote: Described, files: int, staged: dict[str, Any]) -> About:
    meta = remote.meta
    source = dict(meta.get("source") or {})
    counters = source.pop("counters", {})
    end = end_of_documents(meta, META_NAME)
    keys = {key: meta[key] for key in _AS_WHOLE if key in meta}
    return About(
        remote.kind,
        {key: meta[key] for key in _VOCABULARY if key in meta},
        Source(
            meta.get("dataset_name"), meta.get("dataset_config"), meta.get("streaming", False), source, {}, counters
        ),
        {"format": "niels_gpt", "borders": "index", "files": files, "tokenizer": None},
        None if end is None else DocumentToken(end[1], end[0]),
        keys={**keys, "staged": staged},
    )
