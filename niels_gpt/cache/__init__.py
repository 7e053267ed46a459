"""Token caches on disk: their public builders and readers. The spec (PR-03) fixes the names of these modules.

Files:

    formats.py            names, dtypes and constants of every file, which builders take from here; the loss mask of the
                          project's own chats, by their sentinels
    meta.py               writes and reads meta.json; decides which keys readers require, which tokenizer must match
    checksums.py          compares blocks with their stored CRC-32 when a reader opens or reads a file

Build:

    build_cache.py        build_pretrain_cache and build_sft_cache: the signatures of the spec
    build_pretrain.py     build_pretrain: documents -> shards; the settings in meta.json
    shards.py             decides where a shard ends, which document is truncated or dropped; writes the shards
    build_sft.py          build_sft: chats -> one token file per split, by the project's own template
    build_templated.py    the same by any other chat template: a bit for each token says whether it carries loss
    joining.py            joins partitions into one cache: adds up receipts, links and streams their files; mends them
    joining_chats.py      joins the files of an sft cache

Read:

    reader.py             Reader: opens, holds and identifies a cache for every reader; names a cache and a split of it
    mounts.py             a cache at a URL: a folder that stands for it, and the blocks that are fetched into it
    mmap.py               opens, checks and maps token files and offsets files
    pretrain_dataset.py   PretrainTokenStreamDataset: which windows of T + 1 tokens a batch has
    sft_split.py          SFTSplit: the examples of a split, read by ranges of tokens, and which tokens carry loss
    loss_bits.py          loss of chats of another template: a bit for each token; how a batch's are taken from them
    sft_counts.py         which rows T makes of the examples; which are truncated, dropped, split or warned of
    sft_dataset.py        SFTExampleDataset: random rows of an sft cache, one example each

Look:

    documents.py          looks at a split: documents, lengths, ids, loss, source ids
    kind/                 the kinds pretrain and sft: every operation of niels_gpt.kinds for token caches
    cli.py                python -m niels_gpt.cache.cli; the code is in niels_gpt/commands/

The names below are imported at their first use, so that reading metadata does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
    from niels_gpt.cache.meta import read_meta, sha256_file, write_meta
    from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
    from niels_gpt.cache.sft_dataset import SFTExampleDataset
    from niels_gpt.storage.errors import CacheError

_HOMES = {
    "CacheError": "niels_gpt.storage.errors",
    "PretrainTokenStreamDataset": "niels_gpt.cache.pretrain_dataset",
    "SFTExampleDataset": "niels_gpt.cache.sft_dataset",
    "build_pretrain_cache": "niels_gpt.cache.build_cache",
    "build_sft_cache": "niels_gpt.cache.build_cache",
    "read_meta": "niels_gpt.cache.meta",
    "sha256_file": "niels_gpt.cache.meta",
    "write_meta": "niels_gpt.cache.meta",
}

__all__ = [
    "CacheError",
    "PretrainTokenStreamDataset",
    "SFTExampleDataset",
    "build_pretrain_cache",
    "build_sft_cache",
    "read_meta",
    "sha256_file",
    "write_meta",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
