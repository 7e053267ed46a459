"""A row of the table of sources: how a source is found, loaded, split, credited and built; and a loader's request.

The commands, the recipes, the training of the tokenizer, snapshots, the disk estimate and the Dagster assets read these
rows. A setting of a source, such as its dataset id, a token budget or a filter, is a field of niels_gpt/settings.py
that its row names: a flag is made from it.
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
    """Author and address of the text."""


@dataclass(frozen=True)
class LoadRequest:
    """What to read, and how."""

    settings: Settings
    found: LocalFiles | None
    """The files to read; None: the hub."""
    revision: str | None
    """The hub's commit; None for files."""
    counters: Counter[str]
    """Receives dropped and repaired rows, by reason."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Our split -> upstream's, for the splits that exist; {} for a source without `SourceSpec.splits`."""
    position: dict[str, int] | None = None
    """Where to start; the loader keeps its position in it: see data.reader.Position. None: from the beginning."""
    blocks: bool = False
    """Whether documents of files may come as TextBlocks."""
    raw: bool = False
    """Whether chats of files come as RawChats, for a chat template."""
    partition: Partition | None = None
    """Part of the source to read: see `SourceSpec.partition_rule`. None: all of it."""

    @property
    def reading(self) -> dict[str, Any]:
        """Arguments that every loader of a built-in source takes."""
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
    """One source: all that recipes, commands and assets know about it."""

    name: str
    """Name of the source in flags and messages, and of its cache FAMILY/NAME."""
    family: str
    """pretrain (documents), sft (chats), trees (chats as trees) or rollouts (groups of token ids)."""
    description: str
    """Description of the cache in Dagster's UI."""
    credit: Credit
    """Licence and attribution, unless a dataset card states others."""
    load: Loader
    """Function that returns the samples under the settings, in upstream's order."""
    files: Callable[[Settings, Path | None], LocalFiles]
    """Function that returns the files that `load` reads below a mirror's root; they make the source's fingerprint. The
    root is None only for a source that is not on the hub."""
    dataset: str | None = None
    """Setting of the hub's dataset id; None: the source is not on the hub."""
    config: str | None = None
    """Setting of the dataset's config."""
    folder: str | None = None
    """Folder of a mirror; None: DATASET or DATASET/CONFIG."""
    from_hub: str | None = None
    """Setting that must be true to read the hub. If it is false, or a mirror lacks the folder, a stub is made."""
    hub_splits: tuple[str, ...] = ()
    """Splits that a snapshot keeps."""
    streaming: bool = False
    """Whether the hub's dataset is too large to download and is streamed."""
    shuffle_buffer: str | None = None
    """Setting of the size of the shuffle buffer, in the hub's stream or else in the builder."""
    reads: tuple[str, ...] = ()
    """Further settings that decide the samples of `load`."""

    splits: Mapping[str, str] | None = None
    """Our split -> upstream's, where upstream has splits. A cache whose mirror lacks one is marked partial."""
    split_rule: str | None = None
    """How `load` assigns splits, for meta.json. None: the builder does, by text: by `val_frac` if set, else budgets."""
    val_frac: str | None = None
    """Setting of the share of val."""
    budgets: bool = False
    """Whether the settings NAME_train_tokens and NAME_val_tokens bound the cache."""
    partition_rule: str = PARTITION_RULE
    """Files and rows that `load` reads for a partition, in words."""
    has_documents: bool = True
    """Whether the settings document_start and document_end apply: a token before and after each document."""

    training_rank: int = 0
    """Order in the training of a tokenizer, low ranks first. Each source takes at most an equal part of the bytes that
    are left, so the largest source comes last and fills the rest."""
    training_texts: Loader | None = None
    """Function that returns the documents to train a tokenizer on; None: `load`."""
    hub_text_bytes: int = 0
    """UTF-8 bytes of the hub's text, rounded up from its dataset page: a disk estimate without budgets or files."""
    snapshot_margin_bytes: int = 0
    """Text that a snapshot keeps beyond its tokens, four standard deviations: documents go to splits by chance."""

    def __post_init__(self) -> None:
        """Check that the row decides the split. Raises: ValueError for a pretrain source without one."""
        if self.family == "pretrain" and not (self.split_rule or self.val_frac or self.budgets):
            raise ValueError(f"{self.name}: expected a split_rule, a val_frac or budgets: which documents go to val?")

    @property
    def key(self) -> str:
        """Key of the cache: FAMILY/NAME."""
        return f"{self.family}/{self.name}"

    @property
    def budget_settings(self) -> tuple[str, ...]:
        """Settings of the token budgets of train and val; () without budgets."""
        return (f"{self.name}_train_tokens", f"{self.name}_val_tokens") if self.budgets else ()

    @property
    def own_settings(self) -> tuple[str, ...]:
        """Settings that decide the bytes of this source's cache and are not common to its family."""
        tokens = ("document_start", "document_end") if self.family == "pretrain" and self.has_documents else ()
        named = (self.shuffle_buffer, self.dataset, self.config, self.from_hub, self.val_frac)
        return (*tokens, *filter(None, named), *self.budget_settings, *self.reads)

    @property
    def settings(self) -> tuple[str, ...]:
        """All settings that decide the cache's bytes. They are part of its recipe's fingerprint."""
        return (*_COMMON_SETTINGS.get(self.family, ()), *self.own_settings)


def mirror_files(settings: Settings, root: Path | None, folder: str, *, split: str = "all", **how: Any) -> LocalFiles:
    """Return the files of a source in a mirror. how: suffixes and folders of mirrors.split_files."""
    assert root is not None  # of a source on the hub
    links, forks = list[Path](), list[Path]()
    how |= {"not_followed": links, "forks": forks}
    files = mirrors.split_files(root, folder, split=split, follow_links=settings.follow_links, **how)
    return LocalFiles(root, tuple(files), 0, links=tuple(links), resource_forks=len(forks))
