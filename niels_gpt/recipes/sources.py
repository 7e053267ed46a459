"""The sources' streams of text and chats under the current settings, without what is to be left out."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from niels_gpt.data import dolly, fineweb_edu, gutenberg, local, oasst1, places, roam, wikitext
from niels_gpt.data.exclude import remaining
from niels_gpt.data.types import ChatSample, PretrainSample, source_id
from niels_gpt.recipes.origins import Origin
from niels_gpt.settings import Settings

logger = logging.getLogger(__name__)

Documents = Iterator[tuple[str | None, str, str]]
"""Split (None leaves the choice to the text and the seed), text, and the source's id of the document."""


def fineweb_edu_texts(settings: Settings, origin: Origin, revision: str | None, counters: Counter[str]) -> Documents:
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
    return _texts(settings, _whole(origin, samples), counters)


def gutenberg_texts(settings: Settings, origin: Origin, revision: str | None, counters: Counter[str]) -> Documents:
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
    return _texts(settings, _whole(origin, samples), counters)


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
        samples = wikitext.iter_wikitext(
            config=settings.wikitext_config,
            split=upstream,
            source_root=settings.source_root,
            dataset_id=settings.wikitext_dataset,
            revision=revision,
            counters=counters,
        )
        yield from _texts(settings, samples, counters, split)


def roam_texts(settings: Settings, origin: Origin, counters: Counter[str]) -> Documents:
    """Yield every note with its split; the split goes by file (PR-02), of those with equal text by the first one.

    All notes are read twice, so that 16 bytes of each are held and no text.
    """
    assert origin.root is not None
    paths = [os.fspath(path) for path in origin.files]
    digests = [hashlib.sha256(text.encode()).digest()[:16] for text in roam.load_texts(paths)]
    first = dict(zip(reversed(digests), reversed(paths), strict=True))
    distinct = [path for path, digest in zip(paths, digests, strict=True) if first[digest] == path]
    in_val = set(roam.split_roam_paths(distinct, val_frac=settings.roam_val_frac, seed=settings.seed)[1])
    for split in ("train", "val"):
        of_split = split == "val"
        chosen = [path for path, text in zip(paths, digests, strict=True) if (first[text] in in_val) == of_split]
        names = (os.path.relpath(path, origin.root) for path in chosen)
        texts = zip(names, roam.load_texts(chosen, counters=counters), strict=True)
        notes = (PretrainSample(text, roam.SOURCE, {"path": name}) for name, text in texts)
        yield from _texts(settings, notes, counters, split)


def own_texts(settings: Settings, origin: Origin, counters: Counter[str]) -> Documents:
    """Yield the documents of user-defined text, in order of path and row; the builder splits them by their text."""
    assert origin.own is not None
    found = _found(origin, counters)
    samples = local.iter_texts(found, source=origin.source, field=origin.own.field, counters=counters)
    return _texts(settings, samples, counters)


def chats(
    settings: Settings, origin: Origin, revision: str | None, counters: Counter[str]
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the chats of an sft source, id and messages, in upstream's order, of all upstream splits."""
    if origin.own is not None:
        samples = local.iter_chats(_found(origin, counters), source=origin.source, counters=counters)
    elif origin.source == "dolly15k":
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
    kept: Iterable[ChatSample] = remaining(samples, settings.exclude, counters)
    return (
        (source_id(sample), [{"role": turn.role, "content": turn.content} for turn in sample.messages])
        for sample in kept
    )


def _texts(
    settings: Settings, samples: Iterable[PretrainSample], counters: Counter[str], split: str | None = None
) -> Documents:
    return ((split, sample.text, source_id(sample)) for sample in remaining(samples, settings.exclude, counters))


def _found(origin: Origin, counters: Counter[str]) -> local.LocalFiles:
    assert origin.root is not None
    places.count(counters, "other_files", origin.other_files)
    if origin.other_files:
        logger.info("%s: %d files of kinds that are not read", origin.source, origin.other_files)
    return local.LocalFiles(origin.root, origin.files, origin.other_files)


class SnapshotTooShort(ValueError):
    """All rows of a snapshot were read, and its dataset has more."""


def _whole(origin: Origin, samples: Iterator[PretrainSample]) -> Iterator[PretrainSample]:
    """Pass a stream on; one that a snapshot cuts short must not look like the end of the hub's."""
    yield from samples
    if origin.manifest is not None and origin.ordered and not origin.manifest["ended"]:
        raise SnapshotTooShort(
            f"{origin.root}: this snapshot of {origin.source} ends after {origin.manifest['text_bytes']:,} bytes of "
            "text, and the dataset goes on. Make it longer: python -m niels_gpt.cache.cli snapshot "
            f"{origin.source} {origin.root} --tokens N, or lower the token budgets"
        )
