"""Decide how much of a hub source a snapshot keeps: a mirror that later builds read in the hub's place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from niels_gpt.data.files import snapshot
from niels_gpt.data.sources import SOURCES
from niels_gpt.data.upstream_rows import row_text
from niels_gpt.hub import datasets as hub
from niels_gpt.recipes.resolve import ResolvedSource, mirror_folder, resolve_source
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import SourceError
from niels_gpt.work import Progress

_HUB_SPECS = [spec for spec in SOURCES.values() if spec.hub_splits]
SPLITS = {spec.name: spec.hub_splits for spec in _HUB_SPECS}
"""Hub sources and their splits there."""
ORDER_SETTINGS = tuple(
    name
    for name in ("seed", *(each for spec in _HUB_SPECS for each in (spec.shuffle_buffer, spec.dataset, spec.config)))
    if name is not None
)
"""Settings that must be equal in a build from a snapshot for its rows to have the hub's order."""
READS = (*ORDER_SETTINGS, "revision", *(name for spec in _HUB_SPECS for name in spec.budget_settings))
"""Settings that decide what a snapshot keeps."""
UTF8_BYTES_PER_TOKEN = 5.0
"""More than most vocabularies reach on text (4.2 measured on English web pages with 16,000 pieces), so that a snapshot
of N tokens suffices for a build of N tokens. A build whose tokenizer needs more fails and says so."""
READ_AHEAD_BYTES = 1 << 23
"""Most bytes that a builder reads beyond what it writes: two batches of 2**20 characters, of up to 4 bytes each."""


def take_snapshot(
    settings: Settings, name: str, dest: Path, *, tokens: int | None, progress: Progress | None = None
) -> tuple[Path, dict[str, Any]]:
    """Keep the rows of a hub source in `dest`. Returns their folder and its manifest.

    `dest` is then a mirror: a build with source_root=dest and these settings gives the bytes of a build from the hub.
    An interrupted snapshot resumes; a finished one grows if more tokens are requested.
    tokens: need of a build of a streamed source, UTF8_BYTES_PER_TOKEN bytes of text each; None: both budgets.
    Raises: ValueError for a source that is not on the hub; ConnectionError; CacheError for another snapshot in `dest`.
    """
    if name not in SPLITS:
        raise SourceError(
            f"{name} is not on the hub, expected one of {', '.join(SPLITS)}. Notes and user-defined sources are "
            "files already: copy their folder",
            code="E103",
        )
    spec = SOURCES[name]
    from_hub: dict[str, Any] = {spec.from_hub: True} if spec.from_hub else {}
    source = resolve_source(replace(settings, source_root="hub", **from_hub), name)
    if tokens is not None and not spec.streaming:
        raise SourceError(f"--tokens {tokens}: {name} is small and kept whole; leave --tokens out", code="E307")
    max_text_bytes = None
    if spec.streaming:
        if tokens is None:
            tokens = sum(getattr(settings, budget) for budget in spec.budget_settings)
        max_text_bytes = int(tokens * UTF8_BYTES_PER_TOKEN) + READ_AHEAD_BYTES + spec.snapshot_margin_bytes
    folder = dest / mirror_folder(spec, source.dataset, source.config)
    manifest = snapshot.take(
        folder,
        _about(source, snapshot.read_manifest(folder)),
        lambda revision, split: _rows(source, revision, split),
        splits=spec.hub_splits,
        text_of=row_text if spec.streaming else lambda row: str(row.get("text", "")),
        max_text_bytes=max_text_bytes,
        progress=progress,
    )
    return folder, manifest


def _about(source: ResolvedSource, started: dict[str, Any] | None) -> dict[str, Any]:
    """Return the manifest's keys that describe the dataset. started: manifest of an earlier run."""
    from importlib.metadata import version

    recorded = None
    if started is not None and source.asked_revision in (None, started["revision"]):
        recorded = {**started, "fingerprint": f"{source.dataset}@{started['revision']}"}
    provenance = source.provenance(recorded)
    if started is not None and started["revision"] != provenance["revision"]:
        raise SourceError(
            f"a snapshot of revision {started['revision']} was started there, asked was {provenance['revision']}. "
            "Choose another folder, or leave --revision out to resume it",
            code="E307",
        )
    names = ("licence", "attribution", "revision", "asked_revision")
    return {
        **{name: provenance[name] for name in names if name in provenance},
        "dataset": source.dataset,
        "config": source.config,
        "shuffle": None if source.shuffle is None else dict(source.shuffle),
        "datasets_version": version("datasets"),
    }


def _rows(source: ResolvedSource, revision: str, split: str) -> Any:
    shuffle = source.shuffle or {}
    return hub.rows(
        source.dataset,
        config=source.config,
        split=split,
        streaming=source.streaming,
        revision=revision,
        shuffle_seed=shuffle.get("seed"),
        shuffle_buffer=shuffle.get("buffer"),
    )
