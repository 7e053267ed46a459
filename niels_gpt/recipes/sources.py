"""The streams that builders read: a source's documents or chats with their ids, without what --exclude lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from niels_gpt.data.exclude import Sample, remaining
from niels_gpt.data.files.text import WITH_NUL, note
from niels_gpt.data.sources import Loader, LoadRequest
from niels_gpt.data.types import ChatSample, PretrainSample, source_id
from niels_gpt.recipes.resolve import ResolvedSource
from niels_gpt.settings import Settings

Documents = Iterator[tuple[str | None, str, str]]
"""Split (None leaves the choice to the text and the seed), text, and the document's id in its source."""
Chats = Iterator[tuple[str, list[dict[str, str]]]]
"""The chat's id in its source, and its messages."""


class SnapshotTooShort(ValueError):
    """All rows of a snapshot were read, and its dataset has more."""

    code = "E307"


def documents(
    settings: Settings,
    source: ResolvedSource,
    revision: str | None,
    counters: Counter[str],
    position: dict[str, int] | None = None,
) -> Documents:
    """Yield the documents of a pretrain source in upstream's order.

    counters, position: see LoadRequest.
    Raises: SnapshotTooShort at the end of a snapshot that is cut short; as the source's loader.
    """
    parts = _parts(settings, source, revision, counters, position)
    return ((split, sample.text, source_id(sample)) for split, sample in parts)


def chats(
    settings: Settings,
    source: ResolvedSource,
    revision: str | None,
    counters: Counter[str],
    position: dict[str, int] | None = None,
) -> Chats:
    """Yield the chats of an sft source in upstream's order, of all upstream splits. Otherwise as `documents`."""
    parts = _parts(settings, source, revision, counters, position)
    return (
        (source_id(sample), [{"role": turn.role, "content": turn.content} for turn in sample.messages])
        for _, sample in parts
    )


def training_texts(settings: Settings, source: ResolvedSource, revision: str | None) -> Iterator[str]:
    """Yield the texts of a source that a tokenizer is trained on: documents, or messages."""
    counters: Counter[str] = Counter()  # the builders count; here a loss costs a piece at most
    load = source.spec.training_texts or source.spec.load
    for _, sample in _parts(settings, source, revision, counters, None, load):
        yield from _texts_of(sample)


def _parts(
    settings: Settings,
    source: ResolvedSource,
    revision: str | None,
    counters: Counter[str],
    position: dict[str, int] | None,
    load: Loader | None = None,
) -> Iterator[tuple[str | None, Any]]:
    """Yield samples with their split: PretrainSamples of a pretrain source, ChatSamples of an sft source."""
    request = LoadRequest(settings, source.found, revision, counters, source.splits, position)
    loaded = (load or source.spec.load)(request)
    return chain.from_iterable(_kept(settings, source, split, samples, counters) for split, samples in loaded)


def _kept(
    settings: Settings, source: ResolvedSource, split: str | None, samples: Iterable[Sample], counters: Counter[str]
) -> Iterator[tuple[str | None, Sample]]:
    """Yield the samples that are not excluded. Texts with NUL characters are counted: UTF-16 read as UTF-8 has them."""
    for sample in remaining(_whole(source, samples), settings.exclude, counters):
        if any("\0" in text for text in _texts_of(sample)):
            problem = "a text with NUL characters, a sign of UTF-16 without a byte-order mark; kept as it is"
            note(counters, WITH_NUL, f"{sample.source}, {source_id(sample)}: {problem}")
        yield split, sample


def _texts_of(sample: PretrainSample | ChatSample) -> list[str]:
    return [sample.text] if isinstance(sample, PretrainSample) else [turn.content for turn in sample.messages]


def _whole(source: ResolvedSource, samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the samples. The end of a snapshot that is cut short is an error, not the end of the hub's stream."""
    yield from samples
    if source.manifest is not None and source.streaming and not source.manifest["ended"]:
        raise SnapshotTooShort(
            f"{source.root}: this snapshot of {source.source} ends after {source.manifest['text_bytes']:,} bytes of "
            "text, and the dataset has more. Make it longer: niels-gpt snapshot "
            f"{source.source} {source.root} --tokens N, or lower the token budgets"
        )
