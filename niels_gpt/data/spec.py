"""A row of the table of sources: how a source is found, loaded, split, credited and built, and what a loader is asked.

The commands, the recipes, the training of the tokenizer, snapshots, the disk estimate and the Dagster assets read these
rows. A setting of a source, such as its dataset id, a token budget or a filter, is a field of niels_gpt/settings.py
that its row names: a flag is made of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.data.files import mirrors
from niels_gpt.data.files.part import PARTITION_RULE, is_first
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.types import ChatSample, PretrainSample, RawChat, SequenceGroup, TextBlock
from niels_gpt.data.upstream_rows import UpstreamRows
from niels_gpt.documents import Partition
from niels_gpt.settings import Settings

HUB = "https://huggingface.co/datasets/"
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
        """Yield the documents of a built-in source's files; folder: below the mirror's root; how: book_suffixes."""
        assert self.found is not None
        if is_first(self.partition):
            self.found.note_what_is_beside(self.counters)
        rows = UpstreamRows(source, self.counters, self.settings.max_document_bytes, self.partition)
        pieces = rows.of_files(self.found.files, folder=self.found.root / folder, blocks=self.blocks, **how)
        return rows.documents(pieces)


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


def mirror_files(settings: Settings, root: Path | None, folder: str, *, split: str = "all", **how: Any) -> LocalFiles:
    """Return the files of a source in a mirror. how: suffixes and folders of mirrors.split_files."""
    assert root is not None  # of a source on the hub
    links, forks = list[Path](), list[Path]()
    how |= {"not_followed": links, "forks": forks}
    files = mirrors.split_files(root, folder, split=split, follow_links=settings.follow_links, **how)
    return LocalFiles(root, tuple(files), 0, links=tuple(links), resource_forks=len(forks))
