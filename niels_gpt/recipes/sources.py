"""The sources' streams of text and chats under the current settings, without what is to be left out."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from niels_gpt.data import dolly, fineweb_edu, gutenberg, local, oasst1, places, roam, wikitext
from niels_gpt.data.exclude import Sample, remaining
from niels_gpt.data.text_files import WITH_NUL, note
from niels_gpt.data.types import ChatSample, PretrainSample, source_id
from niels_gpt.recipes.origins import Origin
from niels_gpt.settings import Settings

logger = logging.getLogger(__name__)

_MOST_KINDS = 12  # suffixes in a message

Documents = Iterator[tuple[str | None, str, str]]
"""Split (None leaves the choice to the text and the seed), text, and the source's id of the document."""
Shared = dict[str, int] | None
"""Where a stream of files is, and begins: see data.position. None where nobody wants to know."""


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
        **_reading(settings),
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
        **_reading(settings),
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
    settings: Settings,
    revision: str | None,
    counters: Counter[str],
    splits: Mapping[str, str],
    position: Shared = None,
) -> Documents:
    """Yield wikitext's lines with their split, in upstream's order; a blank line is counted."""
    shared: dict[str, int] = {} if position is None else position
    streams: list[Documents] = []
    for split, upstream in splits.items():
        samples = wikitext.iter_wikitext(
            config=settings.wikitext_config,
            split=upstream,
            source_root=settings.source_root,
            dataset_id=settings.wikitext_dataset,
            revision=revision,
            counters=counters,
            position=shared,
            **_reading(settings),
        )
        streams.append(_texts(settings, samples, counters, split))
    return chain.from_iterable(_one_by_one(streams, shared))


def _one_by_one(streams: Sequence[Documents], shared: dict[str, int]) -> Iterator[Documents]:
    """Yield the streams from the one on that `shared` names as `stream`; each begins with a place of its own."""
    first = shared.get("stream", 0)
    for number, stream in enumerate(streams):
        if number > first or "stream" not in shared:
            shared.clear()
            shared["stream"] = number
        if number >= first:
            yield stream


def roam_texts(settings: Settings, origin: Origin, counters: Counter[str]) -> Documents:
    """Yield every note with its split; the split goes by file (PR-02), of those with equal text by the first one.

    All notes are read twice, so that 16 bytes of each are held and no text.
    """
    assert origin.root is not None
    places.note_links(counters, origin.links)
    read = partial(roam.iter_notes, folder=origin.root, max_document_bytes=settings.max_document_bytes)
    digests = {
        note.meta["path"]: hashlib.sha256(note.text.encode()).digest()[:16]
        for note in read(map(os.fspath, origin.files), counters=counters)
    }
    first = {digest: name for name, digest in reversed(digests.items())}
    distinct = [name for name, digest in digests.items() if first[digest] == name]
    in_val = set(roam.split_roam_paths(distinct, val_frac=settings.roam_val_frac, seed=settings.seed)[1])
    counted = Counter(counters)  # what the first reading has counted and logged, the second one does not
    for split in ("train", "val"):
        chosen = (name for name, digest in digests.items() if (first[digest] in in_val) == (split == "val"))
        notes = read((os.path.join(origin.root, name) for name in chosen), counters=counted)
        yield from _texts(settings, notes, counters, split)


def own_texts(settings: Settings, origin: Origin, counters: Counter[str], position: Shared = None) -> Documents:
    """Yield the documents of user-defined text, in order of path and row; the builder splits them by their text."""
    assert origin.own is not None
    found = _found(origin, counters)
    samples = local.iter_texts(
        found,
        source=origin.source,
        field=origin.own.field,
        counters=counters,
        max_document_bytes=settings.max_document_bytes,
        position=position,
    )
    return _texts(settings, samples, counters)


def chats(
    settings: Settings, origin: Origin, revision: str | None, counters: Counter[str], position: Shared = None
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the chats of an sft source, id and messages, in upstream's order, of all upstream splits."""
    if origin.own is not None:
        samples = local.iter_chats(
            _found(origin, counters),
            source=origin.source,
            counters=counters,
            max_document_bytes=settings.max_document_bytes,
            position=position,
        )
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
            position=position,
            **_reading(settings),
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
            **_reading(settings),
        )
    kept: Iterable[ChatSample] = _kept(settings, samples, counters)
    return (
        (source_id(sample), [{"role": turn.role, "content": turn.content} for turn in sample.messages])
        for sample in kept
    )


def _texts(
    settings: Settings, samples: Iterable[PretrainSample], counters: Counter[str], split: str | None = None
) -> Documents:
    return ((split, sample.text, source_id(sample)) for sample in _kept(settings, samples, counters))


def _kept(settings: Settings, samples: Iterable[Sample], counters: Counter[str]) -> Iterator[Sample]:
    """Yield what is not to be left out; texts with NUL characters are counted: UTF-16 read as UTF-8 has them."""
    for sample in remaining(samples, settings.exclude, counters):
        texts = [sample.text] if isinstance(sample, PretrainSample) else [turn.content for turn in sample.messages]
        if any("\0" in text for text in texts):
            problem = "a text with NUL characters, a sign of UTF-16 without a byte-order mark; kept as it is"
            note(counters, WITH_NUL, f"{sample.source}, {source_id(sample)}: {problem}")
        yield sample


def _reading(settings: Settings) -> dict[str, Any]:
    return {"max_document_bytes": settings.max_document_bytes, "follow_links": settings.follow_links}


def _found(origin: Origin, counters: Counter[str]) -> local.LocalFiles:
    assert origin.root is not None
    places.note_links(counters, origin.links)
    if origin.other_files:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in origin.other_kinds[:_MOST_KINDS])
        more = ". --as-text .SUFFIX,... reads more kinds as text" if origin.own and origin.own.family != "sft" else ""
        logger.warning("%s: %d files of kinds that are not read: %s%s", origin.source, origin.other_files, kinds, more)
        places.count(counters, "other_files", origin.other_files)
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
