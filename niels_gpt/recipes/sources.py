"""What each source is under the current settings: its dataset, its files or revision, and its streams of text."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from niels_gpt.data import dolly, fineweb_edu, gutenberg, hub, oasst1, places, roam, wikitext
from niels_gpt.settings import Settings

Documents = Iterator[tuple[str | None, str]]
"""Pairs (split, text); split None leaves the choice to the token budgets."""


@dataclass(frozen=True)
class Origin:
    """Where one source comes from."""

    source: str
    """fineweb_edu, wikitext, roam, gutenberg, dolly15k or oasst1."""
    dataset: str
    """The hub's dataset id, or the source's own name; dataset_name in meta.json."""
    config: str | None
    """The hub's config; dataset_config in meta.json."""
    kind: str
    """hub, mirror or sample."""
    streaming: bool
    """Whether the hub is streamed; files are not."""
    licence: str
    """Of the text."""
    root: Path | None = None
    """Folder that the files are named relative to; None on the hub."""
    files: tuple[Path, ...] = ()
    """What is read, in order; empty on the hub."""
    stub: bool = False
    """Whether nothing is read: gutenberg on the hub, unless gutenberg_from_hub is set (PR-03)."""

    def facts(self, recorded: Mapping[str, Any] | None, *, ask_hub: bool = True) -> dict[str, Any]:
        """Return what meta.json says of the source; `fingerprint` in it changes when the text does.

        recorded: the facts of the committed cache; its hub revision counts, and the hub is not asked (D12).
        ask_hub: False where an unknown revision may stay unknown; a stub, which reads nothing, never asks.
        Raises: ConnectionError if the hub must be asked and cannot be.
        """
        facts: dict[str, Any] = {"kind": self.kind, "licence": self.licence}
        if self.root is not None:
            fingerprint = places.files_fingerprint(self.root, self.files)
            return {**facts, "files": len(self.files), "revision": None, "fingerprint": fingerprint}
        known = recorded or {}
        revision = known.get("revision") if str(known.get("fingerprint")).startswith(f"{self.dataset}@") else None
        if revision is None and ask_hub and not self.stub:
            revision = hub.revision_of(self.dataset)
        fingerprint = f"{self.dataset}@{revision}"
        return {**facts, "revision": revision, "fingerprint": fingerprint, "datasets_version": version("datasets")}


def origin_of(settings: Settings, source: str) -> Origin:
    """Return where a source comes from.

    Raises: FileNotFoundError if the mirror, or the folder of notes, is not there.
    """
    dataset, config, streaming = {
        "fineweb_edu": (settings.fineweb_edu_dataset, settings.fineweb_edu_config, True),
        "wikitext": (settings.wikitext_dataset, settings.wikitext_config, False),
        "roam": ("roam", None, False),
        "gutenberg": (settings.gutenberg_dataset, None, True),
        "dolly15k": (settings.dolly_dataset, None, False),
        "oasst1": (settings.oasst1_dataset, None, False),
    }[source]
    root = places.mirror_root(settings.source_root)
    files: tuple[Path, ...] = ()
    if source == "roam":
        root = roam.roam_dir_of(settings.source_root, roam_dir=settings.roam_dir)
        files = tuple(Path(path) for path in roam.list_roam_paths(root))
    elif root is not None:
        files = tuple(_mirror_files(root, source, dataset, config))
    kind = "sample" if settings.source_root == "sample" else "hub" if root is None else "mirror"
    licence = places.licence_of(source, settings.source_root)
    stub = source == "gutenberg" and root is None and not settings.gutenberg_from_hub
    return Origin(source, dataset, config, kind, streaming and root is None, licence, root, files, stub)


def _mirror_files(root: Path, source: str, dataset: str, config: str | None) -> list[Path]:
    """Return the files that the source's loader reads: what else lies there changes no fingerprint."""
    if source == "fineweb_edu":
        return places.split_files(root, dataset, split="train", folders=(str(config), f"data/{config}"))
    if source == "wikitext":
        return places.split_files(root, dataset, split="all", suffixes=wikitext.SUFFIXES, folders=(str(config),))
    if source == "gutenberg":
        return places.split_files(root, gutenberg.FOLDER, split="all", suffixes=places.KNOWN_SUFFIXES)
    return places.split_files(root, dataset, split="all", folders=("data",) if source == "oasst1" else ())


def fineweb_edu_texts(settings: Settings, revision: str | None, counters: Counter[str]) -> Documents:
    """Yield fineweb-edu's documents; the hub's stream comes shuffled by `datasets` (D8), a mirror's in file order."""
    samples = fineweb_edu.iter_fineweb_edu(
        name=settings.fineweb_edu_config,
        shuffle=settings.shuffle_buffer > 0,
        shuffle_buffer_size=settings.shuffle_buffer,
        seed=settings.seed,
        source_root=settings.source_root,
        dataset_id=settings.fineweb_edu_dataset,
        revision=revision,
        counters=counters,
    )
    return ((None, sample.text) for sample in samples)


def gutenberg_texts(settings: Settings, revision: str | None, counters: Counter[str]) -> Documents:
    """Yield gutenberg's books, in the order that `fineweb_edu_texts` describes."""
    samples = gutenberg.iter_gutenberg(
        dataset_id=settings.gutenberg_dataset,
        # In a folder of books a name that begins with "test", as testament.txt, is no split.
        split="train" if settings.source_root == "hub" else "all",
        shuffle=settings.gutenberg_shuffle_buffer > 0,
        shuffle_buffer_size=settings.gutenberg_shuffle_buffer,
        seed=settings.seed,
        source_root=settings.source_root,
        revision=revision,
        counters=counters,
    )
    return ((None, sample.text) for sample in samples)


def wikitext_splits(settings: Settings, origin: Origin) -> dict[str, str]:
    """Return which of train and val upstream has, with upstream's names: a mirror may lack one."""
    wanted = {"train": "train", "val": "validation"}
    if origin.root is None:
        return wanted
    found = {places.split_of(path) for path in origin.files}
    return {split: upstream for split, upstream in wanted.items() if upstream in found}


def wikitext_texts(
    settings: Settings, revision: str | None, counters: Counter[str], splits: Mapping[str, str]
) -> Documents:
    """Yield wikitext's lines with their split, in upstream's order; a blank line is counted."""
    for split, upstream in splits.items():
        for sample in wikitext.iter_wikitext(
            config=settings.wikitext_config,
            split=upstream,
            source_root=settings.source_root,
            dataset_id=settings.wikitext_dataset,
            revision=revision,
            counters=counters,
        ):
            yield split, sample.text


def roam_texts(settings: Settings, origin: Origin, counters: Counter[str]) -> Documents:
    """Yield every note with its split; the split goes by file (PR-02)."""
    paths = [os.fspath(path) for path in origin.files]
    train, val = roam.split_roam_paths(paths, val_frac=settings.roam_val_frac, seed=settings.seed)
    for split, chosen in (("train", train), ("val", val)):
        for text in roam.load_texts(chosen, counters=counters):
            yield split, text


def chats(
    settings: Settings, source: str, revision: str | None, counters: Counter[str]
) -> Iterator[list[dict[str, str]]]:
    """Yield the chats of dolly15k or oasst1 as message lists, in upstream's order, of all upstream splits."""
    if source == "dolly15k":
        samples = dolly.iter_dolly_sft(
            split="all",
            seed=settings.seed,
            shuffle=False,
            include_system=settings.dolly_include_system,
            source_root=settings.source_root,
            dataset_id=settings.dolly_dataset,
            revision=revision,
            counters=counters,
        )
    else:
        samples = oasst1.iter_oasst1_sft(
            split="all",
            seed=settings.seed,
            shuffle_trees=False,
            english_only=settings.oasst1_english_only,
            max_messages=settings.oasst1_max_messages,
            source_root=settings.source_root,
            dataset_id=settings.oasst1_dataset,
            revision=revision,
            counters=counters,
        )
    return ([{"role": turn.role, "content": turn.content} for turn in sample.messages] for sample in samples)
