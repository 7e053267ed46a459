"""Keep the raw text of a hub source once, as a mirror that later builds read in the hub's place."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from niels_gpt.data import hub, snapshot
from niels_gpt.data.fineweb_edu import _select_text_field
from niels_gpt.recipes.origins import Origin, mirror_folder, origin_of
from niels_gpt.settings import Settings

SPLITS = {
    "fineweb_edu": ("train",),
    "wikitext": ("train", "validation", "test"),
    "gutenberg": ("train",),
    "dolly15k": ("train",),
    "oasst1": ("train", "validation"),
}
"""The hub sources and their splits there."""
ORDER_SETTINGS = (
    *("seed", "shuffle_buffer", "gutenberg_shuffle_buffer", "fineweb_edu_dataset", "fineweb_edu_config"),
    *("wikitext_dataset", "wikitext_config", "gutenberg_dataset", "dolly_dataset", "oasst1_dataset"),
)
"""What must be the same in a build from a snapshot for its rows to be those of the hub, in their order."""
READS = (
    *ORDER_SETTINGS,
    *("revision", "fineweb_edu_train_tokens", "fineweb_edu_val_tokens"),
    *("gutenberg_train_tokens", "gutenberg_val_tokens"),
)
"""The settings that decide what a snapshot keeps."""
BYTES_PER_TOKEN = 5.0
"""More than any vocabulary that fits uint16 reaches on text (4.2 measured on English web pages with 16,000 pieces), so
that a snapshot of N tokens is enough for a build of N tokens whatever its tokenizer."""
READ_AHEAD_BYTES = 1 << 23  # a builder reads up to a batch (2**20 characters) more than it writes; twice that, at most
CHANCE_BYTES = {"fineweb_edu": 1 << 24, "gutenberg": 1 << 29}
"""Documents are split by chance, and whole, so that one split is full before the other and more is read than both hold:
four standard deviations of it, for pages of 4,000 tokens and books of 150,000, beyond what BYTES_PER_TOKEN gives."""


def take_snapshot(
    settings: Settings, source: str, dest: Path, *, tokens: int | None, progress: snapshot.Progress | None = None
) -> tuple[Path, dict[str, Any]]:
    """Keep the rows of a hub source below `dest`; returns their folder and its manifest.

    `dest` is then a mirror: a build with source_root=dest and these settings gives the bytes of a build from the hub.
    An interrupted snapshot goes on where it stopped; a finished one grows where more tokens are asked for.
    tokens: how many a build may want of a streamed source, BYTES_PER_TOKEN bytes of text each; None: its two budgets.
    Raises: ValueError for a source that is not on the hub; ConnectionError; CacheError as snapshot.take.
    """
    if source not in SPLITS:
        raise ValueError(
            f"{source} is not on the hub, expected one of {', '.join(SPLITS)}. Notes, and text of your own, are files "
            "already: copy their folder"
        )
    origin = origin_of(replace(settings, source_root="hub", gutenberg_from_hub=True), source)
    if tokens is not None and not origin.streaming:
        raise ValueError(f"--tokens {tokens}: {source} is small and kept whole; leave --tokens out")
    if origin.streaming and tokens is None:
        tokens = getattr(settings, f"{source}_train_tokens") + getattr(settings, f"{source}_val_tokens")
    folder = dest / mirror_folder(source, origin.dataset, origin.config)
    manifest = snapshot.take(
        folder,
        _about(origin, snapshot.read_manifest(folder)),
        lambda revision, split: _rows(origin, revision, split),
        splits=SPLITS[source],
        text_of=_select_text_field if origin.streaming else lambda row: str(row.get("text", "")),
        max_text_bytes=None if tokens is None else _text_bytes(source, tokens),
        progress=progress,
    )
    return folder, manifest


def _text_bytes(source: str, tokens: int) -> int:
    return int(tokens * BYTES_PER_TOKEN) + READ_AHEAD_BYTES + CHANCE_BYTES[source]


def _about(origin: Origin, begun: dict[str, Any] | None) -> dict[str, Any]:
    known = begun if begun is not None and origin.asked_revision in (None, begun["revision"]) else None
    facts = origin.facts(None if known is None else {**known, "fingerprint": f"{origin.dataset}@{known['revision']}"})
    if begun is not None and begun["revision"] != facts["revision"]:
        raise ValueError(
            f"a snapshot of revision {begun['revision']} has been begun there, asked was {facts['revision']}. Choose "
            "another folder, or leave --revision out to go on with it"
        )
    names = ("licence", "attribution", "revision", "asked_revision")
    return {
        **{name: facts[name] for name in names if name in facts},
        "dataset": origin.dataset,
        "config": origin.config,
        "shuffle": None if origin.shuffle is None else dict(origin.shuffle),
        "datasets_version": version("datasets"),
    }


def _rows(origin: Origin, revision: str, split: str) -> Any:
    shuffle = origin.shuffle or {}
    return hub.rows(
        origin.dataset,
        config=origin.config,
        split=split,
        streaming=origin.streaming,
        revision=revision,
        shuffle_seed=shuffle.get("seed"),
        shuffle_buffer=shuffle.get("buffer"),
    )
