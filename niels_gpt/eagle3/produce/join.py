"""Folders of runs with `part` -> the finished cache, byte for byte that of one run; shards are linked, not copied."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.eagle3.format.layout import (
    EMBEDDINGS_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    SIDECAR,
    WEIGHTS_NAME,
    PathLike,
    refuse_links,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import manifest_bytes
from niels_gpt.eagle3.format.plan import Plan, differing_fields, open_plan
from niels_gpt.eagle3.format.samples import IDS_NAME, SAMPLES_NAME
from niels_gpt.eagle3.format.shard_writer import receipt_path
from niels_gpt.eagle3.format.weights import EMBEDDINGS_RECEIPT, WEIGHTS_RECEIPT
from niels_gpt.eagle3.parts.folder import refuse_running
from niels_gpt.eagle3.produce.finalize import finish, has_target_weights
from niels_gpt.eagle3.produce.resume_checks import is_finished
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import sha256_file, write_bytes
from niels_gpt.storage.fresh_folder import fresh_folder
from niels_gpt.storage.locks import file_lock

_MOST_NAMED = 20


class Joined(NamedTuple):
    """A cache made of parts."""

    meta: dict[str, Any]
    """Its meta.json."""
    linked_bytes: int
    """Of files that it shares with the parts."""
    copied_bytes: int
    """Of files that could not be linked."""


def join(out: PathLike, parts: Sequence[PathLike]) -> Joined:
    """Put the parts of one plan together in `out`, which is there whole or not at all. The parts are not changed.

    Raises: FileNotFoundError for a part without a plan; CacheError where parts have different plans or draft
        vocabularies, where a shard is missing, or is there twice with different bytes, where no part has the samples or
        the target's weights undamaged, while a part is being written, and where `out` holds anything or lies in a part.
    """
    folders = list({os.path.realpath(part): Path(part) for part in parts}.values())
    with fresh_folder(Path(out), sources=folders) as work, ExitStack() as locks:
        for folder in folders:
            refuse_links(folder)
            if (folder / SIDECAR).is_dir():
                locks.enter_context(file_lock(folder / SIDECAR / LOCK_NAME, folder, "is being written", wait=False))
                refuse_running(folder)
        plan = _common_plan(folders)
        sources: dict[str, Path] = {}
        for shard, folder in _shards_of(folders, plan).items():
            sources |= {str(name): folder / name for name in _files_of(shard)}
        for folder, names in _small_files(folders, plan):
            sources |= {name: folder / name for name in names}
        fileio.make_dir(work / SIDECAR)
        for name, content in plan.sidecar_files().items():
            write_bytes(work / SIDECAR / name, content)
        write_bytes(work / MANIFEST_NAME, manifest_bytes(plan.manifest))
        linked = copied = 0
        for name, source in sources.items():
            size = source.stat().st_size
            is_linked = fileio.link_or_copy(source, work / name)
            linked, copied = linked + size * is_linked, copied + size * (not is_linked)
        return Joined(finish(work, plan, Path(out)), linked, copied)


def _files_of(shard: int) -> tuple[Path, Path]:
    """Return a shard and its receipt, below the folder of a cache."""
    return Path(shard_path("", shard)), receipt_path("", shard)


def _common_plan(folders: Sequence[Path]) -> Plan:
    """Return the plan of all parts. Raises: FileNotFoundError, CacheError."""
    try:
        first, *others = (open_plan(folder) for folder in folders)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. Expected a folder that precompute --partition made") from error
    for folder, plan in zip(folders[1:], others, strict=True):
        names = differing_fields(first.record, plan.record)
        names += differing_fields(first.manifest, plan.manifest, "manifest.")
        if names:
            raise CacheError(
                folder,
                f"a partition of another plan than {folders[0]} (different fields: {sorted({*names})})",
                "partitions that were made with the same options but --partition",
                "Make it again with those of the others",
                code="E703",
            )
    return first


def _shards_of(folders: Sequence[Path], plan: Plan) -> dict[int, Path]:
    """Return the part that has each shard. Raises: CacheError."""
    found: dict[int, Path] = {}
    for folder in folders:
        for shard in range(plan.num_shards):
            if not is_finished(folder, plan, shard):
                continue
            other = found.setdefault(shard, folder)
            pairs = ((other / name, folder / name) for name in _files_of(shard))
            if other != folder and not all(filecmp.cmp(*pair, shallow=False) for pair in pairs):
                raise CacheError(
                    shard_path(folder, shard),
                    f"other bytes than those of {shard_path(other, shard)}",
                    "the same ones, for the plan is the same",
                    "Check both folders: niels-gpt eagle3 verify, and leave the damaged one out",
                    code="E701",
                )
    if missing := sorted({*range(plan.num_shards)} - {*found}):
        shown = ", ".join(map(str, missing[:_MOST_NAMED])) + (" ..." if len(missing) > _MOST_NAMED else "")
        raise CacheError(
            folders[0],
            f"{len(missing):,} of {plan.num_shards:,} shards are in none of the folders, or are not finished: {shown}",
            remedy="Make them: precompute --partitions N --partition I makes the shards I, I + N, and so on; the same "
            "command resumes one that was stopped",
            code="E702",
        )
    return dict(sorted(found.items()))


def _small_files(folders: Sequence[Path], plan: Plan) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield, for the samples and the target's weights, a part that has them undamaged and their names.

    Raises: CacheError where there is none.
    """
    samples = {SAMPLES_NAME: plan.samples["sha256"], IDS_NAME: plan.samples["ids_sha256"]}
    weights, receipt = (WEIGHTS_NAME, WEIGHTS_RECEIPT) if plan.is_native else (EMBEDDINGS_NAME, EMBEDDINGS_RECEIPT)

    def has(folder: Path) -> bool:
        return has_target_weights(folder, plan)

    def has_samples(folder: Path) -> bool:
        paths = {folder / SIDECAR / name: sha256 for name, sha256 in samples.items()}
        return all(path.is_file() and sha256_file(path) == sha256 for path, sha256 in paths.items())

    wanted = ((has_samples, tuple(f"{SIDECAR}/{name}" for name in samples)), (has, (weights, f"{SIDECAR}/{receipt}")))
    for is_whole, names in wanted:
        folder = next((each for each in folders if is_whole(each)), None)
        if folder is None:
            raise CacheError(
                folders[0],
                f"no folder has {' and '.join(names)} undamaged",
                remedy="Run the command of a partition again",
                code="E702",
            )
        yield folder, names
