"""The sources' streams of text and chats under the current settings, without what is to be left out."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
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
"""Split (None leaves the choice to the token budgets), text, and the source's id of the document."""


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
            **_reading(settings),
        )
        yield from _texts(settings, samples, counters, split)


def roam_texts(settings: Settings, origin: Origin, counters: Counter[str]) -> Documents:
    """Yield every note with its split; the split goes by file (PR-02)."""
    assert origin.root is not None
    places.note_links(counters, origin.links)
    paths = [os.fspath(path) for path in origin.files]
    train, val = roam.split_roam_paths(paths, val_frac=settings.roam_val_frac, seed=settings.seed)
    for split, chosen in (("train", train), ("val", val)):
        notes = roam.iter_notes(
            chosen, folder=origin.root, counters=counters, max_document_bytes=settings.max_document_bytes
        )
        yield from _texts(settings, notes, counters, split)


def own_texts(settings: Settings, origin: Origin, counters: Counter[str]) -> Documents:
    """Yield the documents of text of one's own with their split, in order of path and row; see `_by_hash`."""
    assert origin.own is not None
    found = _found(origin, counters)
    samples = local.iter_texts(
        found,
        source=origin.source,
        field=origin.own.field,
        counters=counters,
        max_document_bytes=settings.max_document_bytes,
    )
    return _by_hash(_kept(settings, samples, counters), val_frac=settings.own_val_frac, seed=settings.seed)


def _by_hash(samples: Iterable[PretrainSample], *, val_frac: float, seed: int) -> Documents:
    """Give each document a split by the sha256 of seed and text: neither length, nor place, nor tokenizer matters.

    So equal texts are in one split, and a new document moves no other. Of the first 2 / val_frac texts, 1,000 at most,
    which are held for that, at least one goes to each split: a small corpus has both, if it has two different texts.
    """
    stream = iter(samples)
    first = list(islice(stream, min(math.ceil(2 / val_frac), 1_000))) if val_frac else []
    shares = [_share_of(sample.text, seed) for sample in first]
    full = sorted(share for sample, share in zip(first, shares, strict=True) if sample.text)
    if len(full) > 1:  # the nearest of them, where none is on the one side or on the other
        bound = min(max(val_frac, math.nextafter(full[0], 1)), full[-1])
        for sample, share in zip(first, shares, strict=True):
            yield "val" if share < bound else "train", sample.text, source_id(sample)
    else:
        yield from (("train", sample.text, source_id(sample)) for sample in first)
    for sample in stream:
        yield "val" if _share_of(sample.text, seed) < val_frac else "train", sample.text, source_id(sample)


def _share_of(text: str, seed: int) -> float:
    digest = hashlib.sha256(f"{seed}\n{text}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8]) / 2**64


def chats(
    settings: Settings, origin: Origin, revision: str | None, counters: Counter[str]
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the chats of an sft source, id and messages, in upstream's order, of all upstream splits."""
    if origin.own is not None:
        samples = local.iter_chats(
            _found(origin, counters),
            source=origin.source,
            counters=counters,
            max_document_bytes=settings.max_document_bytes,
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
