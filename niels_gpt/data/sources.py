"""The table of the built-in sources: one row says how a source is found, loaded, split, credited and built.

A new source is a loader (a module beside this one) and a row in SOURCES. The commands, the recipes, the training of
the tokenizer, snapshots, the disk estimate and the Dagster assets read the table. A setting of a source, such as its
dataset id, a token budget or a filter, is a field of niels_gpt/settings.py that its row names: a flag is made of it.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.data import dolly, fineweb_edu, gutenberg, oasst1, roam, wikitext
from niels_gpt.data.files import mirrors
from niels_gpt.data.files.part import PARTITION_RULE, TREES_RULE, is_first
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.reader import from_position
from niels_gpt.data.types import ChatSample, PretrainSample, RawChat, SequenceGroup, TextBlock
from niels_gpt.data.upstream_rows import UpstreamRows, documents_of_pieces
from niels_gpt.documents import Partition
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import SourceError, SourceNotFound

_HUB = "https://huggingface.co/datasets/"
_COMMON_SETTINGS = {
    "pretrain": ("seed", "shard_bytes", "on_special", "max_document_bytes"),
    "sft": ("seed", "on_special", "sft_val_frac", "max_document_bytes", "chat_template", "loss_on"),
    "trees": ("seed", "on_special", "sft_val_frac", "max_document_bytes"),
    "rollouts": ("seed", "rollouts_val_frac", "rollouts_vocab_size", "max_document_bytes"),
}


class Credit(NamedTuple):
    """Licence and attribution of a text."""

    licence: str
    """The licence's usual name."""
    attribution: str
    """Whom to name, and where the text is found."""


@dataclass(frozen=True)
class LoadRequest:
    """What a loader is asked to read."""

    settings: Settings
    found: LocalFiles | None
    """The files to read; None: the hub."""
    revision: str | None
    """The hub's commit; None for files."""
    counters: Counter[str]
    """Receives what the loader drops or repairs, by reason."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Of a source with `SourceSpec.splits`: those that are there, with upstream's names."""
    position: dict[str, int] | None = None
    """Where to start, and receives where the loader is: see data.reader.Position. None: from the beginning."""
    blocks: bool = False
    """Whether documents of files may come as TextBlocks, many at a time."""
    raw: bool = False
    """Whether chats of files come as RawChats, for a chat template."""
    partition: Partition | None = None
    """The part of the source to read: see `SourceSpec.partition_rule`. None: all of it."""

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments that every loader of a built-in source takes."""
        return {
            "source_root": self.settings.source_root,
            "revision": self.revision,
            "counters": self.counters,
            "max_document_bytes": self.settings.max_document_bytes,
            "follow_links": self.settings.follow_links,
        }

    def documents(self, source: str, folder: str, **how: Any) -> Iterator[PretrainSample | TextBlock]:
        """Read a built-in source from its files; folder: below the mirror's root; how: as UpstreamRows.of_files."""
        assert self.found is not None
        if is_first(self.partition):
            self.found.note_what_is_beside(self.counters)
        rows = UpstreamRows(source, self.counters, self.settings.max_document_bytes, self.partition)
        how |= {"folder": self.found.root / folder, "blocks": self.blocks}
        return documents_of_pieces(rows.of_files(self.found.files, **how), rows)


Part = tuple[str | None, Iterable[PretrainSample | TextBlock | ChatSample | RawChat | SequenceGroup]]
"""Samples in order, and their split; None leaves it to the builder."""
Loader = Callable[[LoadRequest], Iterable[Part]]


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """One source: everything that recipes, commands and assets know of it."""

    name: str
    """Of the cache, FAMILY/NAME, and of the source in flags and messages."""
    family: str
    """pretrain (documents), sft (chats), trees (chats as trees) or rollouts (groups of token ids)."""
    description: str
    """Of the cache, for Dagster's UI."""
    credit: Credit
    """Used where no dataset card says otherwise."""
    load: Loader
    """Returns the samples under the settings, in upstream's order."""
    files: Callable[[Settings, Path | None], LocalFiles]
    """Returns the files that `load` reads in a mirror (its root; None only for a source that is not on the hub). The
    source's fingerprint is made of them."""
    dataset: str | None = None
    """The setting that holds the hub's dataset id; None: the source is not on the hub."""
    config: str | None = None
    """The setting that holds the dataset's config."""
    folder: str | None = None
    """Of a mirror; None: DATASET or DATASET/CONFIG."""
    from_hub: str | None = None
    """The setting that must be true for the hub to be read; else, or in a mirror without the folder, a stub is made."""
    hub_splits: tuple[str, ...] = ()
    """The splits that a snapshot keeps."""
    streaming: bool = False
    """Whether the hub's dataset is too large to download and is streamed."""
    shuffle_buffer: str | None = None
    """The setting that holds the size of the shuffle buffer, of the hub's stream or else of the builder."""
    reads: tuple[str, ...] = ()
    """More settings that decide what `load` returns."""

    splits: Mapping[str, str] | None = None
    """Our split -> upstream's, where upstream has splits. A cache whose mirror lacks one is marked partial."""
    split_rule: str | None = None
    """How `load` assigns splits, for meta.json. None: the builder does, by text: by `val_frac` if set, else budgets."""
    val_frac: str | None = None
    """The setting that holds the share of val."""
    budgets: bool = False
    """Whether the settings NAME_train_tokens and NAME_val_tokens bound the cache."""
    partition_rule: str = PARTITION_RULE
    """Which of its files and rows `load` reads for a partition, in words."""
    has_documents: bool = True
    """Whether the settings document_start and document_end apply: a token before and after each document."""

    training_rank: int = 0
    """A tokenizer is trained on sources of lower rank first. Each takes at most an equal part of the bytes that are
    left, so the largest source comes last and fills the rest."""
    training_texts: Loader | None = None
    """What a tokenizer is trained on, as documents; None: what `load` returns."""
    hub_text_bytes: int = 0
    """utf-8 bytes of the hub's text, rounded up from its dataset page: the disk estimate without budgets or files."""
    snapshot_margin_bytes: int = 0
    """Text that a snapshot keeps beyond its tokens, four standard deviations: documents go to splits by chance."""

    def __post_init__(self) -> None:
        """Refuse a row that says nothing of the split."""
        if self.family == "pretrain" and not (self.split_rule or self.val_frac or self.budgets):
            raise ValueError(f"{self.name}: expected a split_rule, a val_frac or budgets: which documents go to val?")

    @property
    def key(self) -> str:
        """Of the cache: FAMILY/NAME."""
        return f"{self.family}/{self.name}"

    @property
    def budget_settings(self) -> tuple[str, ...]:
        """The settings that hold the token budgets of train and val; () without budgets."""
        return (f"{self.name}_train_tokens", f"{self.name}_val_tokens") if self.budgets else ()

    @property
    def own_settings(self) -> tuple[str, ...]:
        """The settings that decide the bytes of this source's cache and are not common to its family."""
        tokens = ("document_start", "document_end") if self.family == "pretrain" and self.has_documents else ()
        named = (self.shuffle_buffer, self.dataset, self.config, self.from_hub, self.val_frac)
        return (*tokens, *filter(None, named), *self.budget_settings, *self.reads)

    @property
    def settings(self) -> tuple[str, ...]:
        """All settings that decide the cache's bytes: they are part of its recipe's fingerprint."""
        return (*_COMMON_SETTINGS.get(self.family, ()), *self.own_settings)


def credit_of(source: str, source_root: str | os.PathLike[str]) -> Credit:
    """Return the credit of a built-in source's text; the sample is MIT throughout, written for this project."""
    if source not in SOURCES:
        raise SourceError(f"unknown source {source!r}; expected one of {', '.join(SOURCES)}", code="E103")
    return Credit("MIT", "the niels_gpt project") if str(source_root) == "sample" else SOURCES[source].credit


def _mirror_files(settings: Settings, root: Path | None, folder: str, *, split: str = "all", **how: Any) -> LocalFiles:
    assert root is not None  # of a source on the hub
    links, forks = list[Path](), list[Path]()
    how |= {"not_followed": links, "forks": forks}
    files = mirrors.split_files(root, folder, split=split, follow_links=settings.follow_links, **how)
    return LocalFiles(root, tuple(files), 0, links=tuple(links), resource_forks=len(forks))


def _fineweb_edu_files(settings: Settings, root: Path | None) -> LocalFiles:
    folders = (settings.fineweb_edu_config, f"data/{settings.fineweb_edu_config}")
    return _mirror_files(settings, root, settings.fineweb_edu_dataset, split="train", folders=folders)


def _load_fineweb_edu(request: LoadRequest) -> list[Part]:
    """The hub's stream is shuffled by `datasets` (D8); a mirror's rows are in file order."""
    if request.found is not None:
        return [(None, request.documents(fineweb_edu.SOURCE, request.settings.fineweb_edu_dataset))]
    settings = request.settings
    samples = fineweb_edu.iter_fineweb_edu(
        name=settings.fineweb_edu_config,
        shuffle=settings.shuffle_buffer > 0,
        shuffle_buffer_size=settings.shuffle_buffer,
        seed=settings.seed,
        dataset_id=settings.fineweb_edu_dataset,
        partition=request.partition,
        **request.reading,
    )
    return [(None, samples)]


def _wikitext_files(settings: Settings, root: Path | None) -> LocalFiles:
    how: dict[str, Any] = {"suffixes": wikitext.SUFFIXES, "folders": (settings.wikitext_config,)}
    return _mirror_files(settings, root, settings.wikitext_dataset, **how)


def _load_wikitext(request: LoadRequest) -> Iterator[Part]:
    """The lines of train, then of val, in upstream's order."""
    position: dict[str, int] = {} if request.position is None else request.position
    settings = request.settings
    read = partial(
        wikitext.iter_wikitext,
        config=settings.wikitext_config,
        dataset_id=settings.wikitext_dataset,
        position=position,
        partition=request.partition,
        **request.reading,
    )
    return from_position([(split, read(split=upstream)) for split, upstream in request.splits.items()], position)


def _roam_files(settings: Settings, root: Path | None) -> LocalFiles:
    follow, links, forks = settings.follow_links, list[Path](), list[Path]()
    folder = roam.roam_dir_of(settings.source_root, roam_dir=settings.roam_dir, follow_links=follow)
    files = tuple(Path(path) for path in roam.list_roam_paths(folder, follow_links=follow, links=links, forks=forks))
    if links and not files:
        raise SourceNotFound(
            f"expected .md files in {folder}, found symbolic links only, such as {min(links)}, which are not "
            "followed: pass --follow-links if they may be"
        )
    return LocalFiles(folder, files, 0, links=tuple(links), resource_forks=len(forks))


def _load_roam(request: LoadRequest) -> Iterator[Part]:
    """The notes of train, then of val. The split goes by file (PR-02); notes with equal text follow the first one."""
    assert request.found is not None
    if is_first(request.partition):
        request.found.note_what_is_beside(request.counters)
    yield from roam.notes_by_split(
        request.found.files,
        folder=request.found.root,
        val_frac=request.settings.roam_val_frac,
        seed=request.settings.seed,
        counters=request.counters,
        max_document_bytes=request.settings.max_document_bytes,
        partition=request.partition,
    )


def _gutenberg_files(settings: Settings, root: Path | None) -> LocalFiles:
    # All splits: in a folder of books a name that begins with "test", such as testament.txt, is no split.
    return _mirror_files(settings, root, gutenberg.FOLDER, suffixes=mirrors.KNOWN_SUFFIXES)


def _load_gutenberg(request: LoadRequest) -> list[Part]:
    """Books, in the order that `_load_fineweb_edu` describes."""
    if request.found is not None:
        books = request.documents(gutenberg.SOURCE, gutenberg.FOLDER, book_suffixes=gutenberg.BOOK_SUFFIXES)
        return [(None, books)]
    settings = request.settings
    samples = gutenberg.iter_gutenberg(
        dataset_id=settings.gutenberg_dataset,
        shuffle=settings.gutenberg_shuffle_buffer > 0,
        shuffle_buffer_size=settings.gutenberg_shuffle_buffer,
        seed=settings.seed,
        partition=request.partition,
        **request.reading,
    )
    return [(None, samples)]


def _dolly_files(settings: Settings, root: Path | None) -> LocalFiles:
    return _mirror_files(settings, root, settings.dolly_dataset)


def _load_dolly(request: LoadRequest) -> list[Part]:
    samples = dolly.iter_dolly_sft(
        split="all",
        seed=request.settings.seed,
        shuffle=False,
        include_system=request.settings.dolly_include_system,
        dataset_id=request.settings.dolly_dataset,
        position=request.position,
        partition=request.partition,
        **request.reading,
    )
    return [(None, samples)]


def _oasst1_files(settings: Settings, root: Path | None) -> LocalFiles:
    return _mirror_files(settings, root, settings.oasst1_dataset, folders=("data",))


def _load_oasst1(request: LoadRequest) -> list[Part]:
    samples = oasst1.iter_oasst1_sft(
        split="all",
        seed=request.settings.seed,
        shuffle_trees=False,
        english_only=request.settings.oasst1_english_only,
        max_messages=request.settings.oasst1_max_messages,
        dataset_id=request.settings.oasst1_dataset,
        partition=request.partition,
        **request.reading,
    )
    return [(None, samples)]


def _oasst1_messages(request: LoadRequest) -> list[Part]:
    """Each message once: threads of one tree share their first messages."""
    settings = request.settings
    trees = oasst1.iter_oasst1_trees(
        split="all",
        source_root=settings.source_root,
        dataset_id=settings.oasst1_dataset,
        revision=request.revision,
        counters=request.counters,
    )
    messages = (
        PretrainSample(m["text"], oasst1.SOURCE, {"id": m["message_id"], "message_tree_id": m["message_tree_id"]})
        for m in itertools.chain.from_iterable(trees)
        if m.get("lang") == "en" or not settings.oasst1_english_only
    )
    return [(None, messages)]


_BUILT_IN = (
    SourceSpec(
        name="fineweb_edu",
        family="pretrain",
        description="Token cache of FineWeb-Edu: shuffled web pages with end-of-texts, up to a token budget for train "
        "and for val.",
        credit=Credit("ODC-BY 1.0", f"FineWeb-Edu by Hugging Face, {_HUB}HuggingFaceFW/fineweb-edu"),
        load=_load_fineweb_edu,
        files=_fineweb_edu_files,
        dataset="fineweb_edu_dataset",
        config="fineweb_edu_config",
        hub_splits=("train",),
        streaming=True,
        shuffle_buffer="shuffle_buffer",
        budgets=True,
        training_rank=6,
        snapshot_margin_bytes=1 << 24,  # pages of 4,000 tokens
    ),
    SourceSpec(
        name="wikitext",
        family="pretrain",
        description="Token cache of WikiText: all lines of train and val in upstream's order, without end-of-texts.",
        credit=Credit(
            "CC BY-SA 3.0 and GFDL", f"WikiText by Salesforce, from Wikipedia's authors, {_HUB}Salesforce/wikitext"
        ),
        load=_load_wikitext,
        files=_wikitext_files,
        dataset="wikitext_dataset",
        config="wikitext_config",
        hub_splits=("train", "validation", "test"),
        splits={"train": "train", "val": "validation"},
        split_rule="upstream's own splits; val is upstream's validation",
        has_documents=False,
        training_rank=2,
        hub_text_bytes=550_000_000,
    ),
    SourceSpec(
        name="roam",
        family="pretrain",
        description="Token cache of a folder of markdown notes, split by file, with end-of-texts.",
        credit=Credit("the notes' owner's", "the notes' owner"),
        load=_load_roam,
        files=_roam_files,
        split_rule="by file: of n distinct texts in order of path, the first max(1, int(n * val_frac)) of "
        "torch.randperm(n) seeded with seed go to val (none where n = 1 or val_frac = 0); equal ones follow",
        val_frac="roam_val_frac",
        training_rank=1,
    ),
    SourceSpec(
        name="gutenberg",
        family="pretrain",
        description="Token cache of Project Gutenberg's books; with source_root=hub a stub, unless gutenberg_from_hub "
        "is set.",
        credit=Credit("public domain in the United States", "Project Gutenberg, https://www.gutenberg.org"),
        load=_load_gutenberg,
        files=_gutenberg_files,
        dataset="gutenberg_dataset",
        folder=gutenberg.FOLDER,
        from_hub="gutenberg_from_hub",
        hub_splits=("train",),
        streaming=True,
        shuffle_buffer="gutenberg_shuffle_buffer",
        budgets=True,
        training_rank=5,
        snapshot_margin_bytes=1 << 29,  # books of 150,000 tokens
    ),
    SourceSpec(
        name="dolly15k",
        family="sft",
        description="Token cache of dolly-15k chats: one instruction and one response each; the response carries the "
        "loss.",
        credit=Credit("CC BY-SA 3.0", f"databricks-dolly-15k by Databricks, {_HUB}databricks/databricks-dolly-15k"),
        load=_load_dolly,
        files=_dolly_files,
        dataset="dolly_dataset",
        hub_splits=("train",),
        reads=("dolly_include_system",),
        training_rank=3,
        hub_text_bytes=13_000_000,
    ),
    SourceSpec(
        name="oasst1",
        family="sft",
        description="Token cache of OpenAssistant chats: every path from a root to a leaf of the message trees.",
        credit=Credit("Apache-2.0", f"OpenAssistant Conversations by OpenAssistant, {_HUB}OpenAssistant/oasst1"),
        load=_load_oasst1,
        files=_oasst1_files,
        dataset="oasst1_dataset",
        hub_splits=("train", "validation"),
        reads=("oasst1_english_only", "oasst1_max_messages"),
        partition_rule=TREES_RULE,
        training_rank=4,
        training_texts=_oasst1_messages,
        hub_text_bytes=120_000_000,
    ),
)
SOURCES: dict[str, SourceSpec] = {spec.name: spec for spec in _BUILT_IN}
"""The built-in sources by name, in the order in which build-all builds their caches."""
