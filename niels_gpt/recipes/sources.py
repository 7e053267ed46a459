"""Open a source for a builder: stream its documents or chats with their ids, without the entries of --exclude."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from niels_gpt.chat.protocol import Chat
from niels_gpt.data.exclude import Exclusion, read_exclusion, remaining
from niels_gpt.data.files.text import WITH_NUL, note
from niels_gpt.data.spec import Loader, LoadRequest
from niels_gpt.data.types import ChatSample, PretrainSample, RawChat, SequenceGroup, TextBlock, source_id
from niels_gpt.documents import DocumentBatch, Partition
from niels_gpt.recipes.resolve import ResolvedSource, listing_of
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError, SourceError
from niels_gpt.storage.remedies import build_command

Documents = Iterator[tuple[str | None, str, str]]
"""Split (None leaves the choice to the text and the seed), text, and id of the document in its source."""
BATCH_BYTES = 1 << 20  # of text in a batch, which ends with the document that reaches it ...
BATCH_DOCUMENTS = 2_000  # ... or with this many
Chats = Iterator[tuple[str, list[dict[str, str]]]]
"""Id of the chat in its source, and its messages."""


class SnapshotTooShort(SourceError, code="E307"):
    """All rows of a snapshot were read, and its dataset has more."""


def document_rows(
    settings: Settings,
    source: ResolvedSource,
    revision: str | None,
    counters: Counter[str],
    position: dict[str, int] | None = None,
) -> Documents:
    """Yield the documents of a pretrain source one by one, in upstream's order.

    counters, position: see LoadRequest.
    Raises: SnapshotTooShort at the end of a snapshot that is cut short; the errors of the source's loader.
    """
    parts = _parts(settings, source, revision, counters, position)
    return ((split, sample.text, source_id(sample)) for split, sample in parts)


def document_batches(
    settings: Settings,
    source: ResolvedSource,
    revision: str | None,
    counters: Counter[str],
    position: dict[str, int] | None = None,
    partition: Partition | None = None,
) -> Iterator[DocumentBatch]:
    """Yield the same documents as `document_rows` in columns, many at a time for files, without Python for each row.

    counters, position: how far the loader has read, which may be more than the last batch.
    partition: read only its documents: see LoadRequest.
    """
    blocks = settings.exclude is None
    parts = _parts(settings, source, revision, counters, position, blocks=blocks, partition=partition)
    return _batches(parts, _Gathered(counters, {} if position is None else position))


def _batches(parts: Iterator[tuple[str | None, Any]], gathered: _Gathered) -> Iterator[DocumentBatch]:
    try:
        for split, item in parts:
            yield from gathered.add(split, item)
    except Exception:  # such as a damaged file: full batches of the documents before it are used
        yield from gathered.rest()
        raise
    yield from gathered.rest()


class _Gathered:
    """Documents gathered to a batch, each with the loader's counters and position when it gave the document."""

    def __init__(self, counters: Counter[str], position: Mapping[str, int]) -> None:
        self._counters, self._position = counters, position
        self._begin(None, ())

    def add(self, split: str | None, item: PretrainSample | TextBlock) -> Iterator[DocumentBatch]:
        """Take documents, and yield a batch when it is full. All documents of a block share the counters."""
        if isinstance(item, PretrainSample):
            position = {name: [value] for name, value in self._position.items()}
            item = TextBlock(item.source, [item.text.encode()], [source_id(item)], position)
        if split != self._split or item.position.keys() != self._places.keys():
            yield from self.rest()
            self._begin(split, item.position)
        if not self._states or self._states[-1][1] != self._counters:
            self._states.append((len(self._texts), dict(self._counters)))
        self._texts += item.texts
        self._ids += item.ids
        self._num_bytes += sum(map(len, item.texts))
        for name, values in item.position.items():
            self._places[name] += values
        if self._num_bytes >= BATCH_BYTES or len(self._texts) >= BATCH_DOCUMENTS:
            yield from self.rest()

    def rest(self) -> Iterator[DocumentBatch]:
        """Yield the documents gathered so far, if any."""
        if self._texts:
            batch = DocumentBatch(self._texts, self._ids, self._split, self._states, self._places, is_checked=True)
            self._begin(self._split, self._places)
            yield batch

    def _begin(self, split: str | None, places: Iterable[str]) -> None:
        self._split, self._num_bytes = split, 0
        self._places: dict[str, list[int]] = {name: [] for name in places}
        self._texts, self._ids = list[bytes](), list[str]()
        self._states = list[tuple[int, dict[str, int]]]()


def chats(
    settings: Settings,
    source: ResolvedSource,
    revision: str | None,
    counters: Counter[str],
    position: dict[str, int] | None = None,
    partition: Partition | None = None,
) -> Chats:
    """Yield the chats of an sft source in upstream's order, from all upstream splits. Raises: the errors of
    `document_rows`."""
    parts = _parts(settings, source, revision, counters, position, partition=partition)
    return ((source_id(sample), _messages(sample)) for _, sample in parts)


def template_chats(
    settings: Settings,
    source: ResolvedSource,
    revision: str | None,
    counters: Counter[str],
    position: dict[str, int] | None = None,
    partition: Partition | None = None,
) -> Iterator[Chat]:
    """Yield the chats of an sft source for a chat template: any roles, calls of tools, further fields.

    Raises: the errors of `document_rows`.
    """
    # The call opens the source, as the streams above do: counts made then are not made again by a resumed build.
    parts = _parts(settings, source, revision, counters, position, raw=True, partition=partition)
    return (_raw(sample) for _, sample in parts)


def _raw(sample: RawChat | ChatSample) -> Chat:
    if isinstance(sample, RawChat):
        return Chat(source_id(sample), sample.messages, sample.tools)
    return Chat(source_id(sample), _messages(sample))


def _messages(sample: ChatSample) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in sample.messages]


def sequences(
    settings: Settings,
    source: ResolvedSource,
    revision: str | None,
    counters: Counter[str],
    position: dict[str, int] | None = None,
    partition: Partition | None = None,
) -> Iterator[Any]:
    """Yield the threads of trees as ChatSamples, one tree after another, or recorded rollouts as SequenceGroups.

    Raises: the errors of `document_rows`.
    """
    return (sample for _, sample in _parts(settings, source, revision, counters, position, partition=partition))


def training_texts(settings: Settings, source: ResolvedSource, revision: str | None) -> Iterator[str]:
    """Yield the texts of a source for the training of a tokenizer: documents, or messages."""
    load = source.spec.training_texts or source.spec.load
    # The builders count; here a loss costs a piece at most.
    for _, sample in _parts(settings, source, revision, Counter(), None, load):
        yield from _texts_of(sample)


class _Unlogged(Counter[str]):
    """Counters that log nothing: no reason is new to them, and only the first of each is logged."""

    def __missing__(self, key: str) -> int:
        return 1


def named(
    settings: Settings, source: ResolvedSource, revision: str | None, listed: Exclusion, *, raw: bool = False
) -> Iterator[str]:
    """Read a source, and yield the entries of a list of --exclude that name something in it. raw: for a template."""
    plain = replace(settings, exclude=None)
    parts = _parts(plain, source, revision, _Unlogged(), None, raw=raw or settings.chat_template is not None)
    return (entry for _, sample in parts for entry in listed.matching(sample))


def _parts(
    settings: Settings,
    source: ResolvedSource,
    revision: str | None,
    counters: Counter[str],
    position: dict[str, int] | None,
    load: Loader | None = None,
    blocks: bool = False,
    raw: bool = False,
    partition: Partition | None = None,
) -> Iterator[tuple[str | None, Any]]:
    """Return samples with their split: PretrainSamples for pretrain, ChatSamples for sft and trees, SequenceGroups for
    rollouts. Opens the source now, and reads it as they are taken.

    blocks: also TextBlocks. raw: also RawChats.
    """
    request = LoadRequest(settings, source.found, revision, counters, source.splits, position, blocks, raw, partition)
    return _kept(request, source, (load or source.spec.load)(request))


def _kept(
    request: LoadRequest, source: ResolvedSource, loaded: Iterable[tuple[str | None, Iterable[Any]]]
) -> Iterator[tuple[str | None, Any]]:
    """Yield the samples that are not excluded. Counts texts with NUL characters: UTF-16 read as UTF-8 has them.

    Raises: SnapshotTooShort at the end of a snapshot that is cut short, which is not the end of the hub's stream;
        CacheError at the end of a whole source if the time or size of a file has changed meanwhile.
    """
    settings, counters, is_whole = request.settings, request.counters, request.partition is None
    before = source.listing if is_whole else None
    if settings.exclude is not None and request.position:  # a resumed build has set it by now
        read_exclusion(settings.exclude).resumed.add(source.source)
    for split, samples in loaded:
        for sample in remaining(samples, settings.exclude, counters):
            if isinstance(sample, TextBlock):
                for part in _parts_by_nul(sample):
                    if b"\0" in part.texts[0]:
                        _count_nul(counters, sample.source, part.ids[0])
                    yield split, part
                continue
            if any("\0" in text for text in _texts_of(sample)):
                _count_nul(counters, sample.source, source_id(sample))
            yield split, sample
        if source.manifest is not None and source.streaming and not source.manifest["ended"]:
            raise SnapshotTooShort(
                f"{source.root}: this snapshot of {source.source} ends after {source.manifest['text_bytes']:,} bytes "
                f"of text, and the dataset has more. Make it longer: niels-gpt snapshot {source.source} {source.root} "
                "--tokens N, or lower the token budgets"
            )
    if is_whole and listing_of(source) != before:
        remedy = f"When they no longer change: {build_command(settings, source.spec.key, '--restart')}"
        raise CacheError(source.root or "", "its files changed while they were read", remedy=remedy, code="E306")


def _count_nul(counters: Counter[str], source: str, name: str) -> None:
    problem = "a text with NUL characters, a sign of UTF-16 without a byte-order mark; kept unchanged"
    note(counters, WITH_NUL, f"{source}, {name}: {problem}")


def _parts_by_nul(block: TextBlock) -> Iterator[TextBlock]:
    """Cut a block so that a text with NUL characters is always the first of its part."""
    starts = [at for at, text in enumerate(block.texts) if b"\0" in text]
    if not starts:
        yield block
        return
    cuts = sorted({0, *starts, *(at + 1 for at in starts), len(block.texts)})
    for start, stop in pairwise(cuts):
        position = {name: values[start:stop] for name, values in block.position.items()}
        yield TextBlock(block.source, block.texts[start:stop], block.ids[start:stop], position)


def _texts_of(sample: PretrainSample | ChatSample | RawChat | SequenceGroup) -> list[str]:
    if isinstance(sample, RawChat):
        return sample.texts
    if isinstance(sample, ChatSample):
        return [turn.content for turn in sample.messages]
    return [sample.text] if isinstance(sample, PretrainSample) else []
