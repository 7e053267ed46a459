"""Token caches on disk: formats, builders, readers and the command line (PR-03).

    formats.py            names and dtypes of every file
    meta.py               meta.json: write, read, check
    mmap.py               memory-mapped token files and offsets
    build_cache.py        build_pretrain_cache, build_sft_cache
    pretrain_dataset.py   PretrainTokenStreamDataset: random windows
    sft_dataset.py        SFTExampleDataset: one example a row, loss on the replies
    cli.py                python -m niels_gpt.cache.cli

The names below are imported when they are first used: a program that only reads metadata does not pay for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
    from niels_gpt.cache.meta import read_meta, sha256_file, write_meta
    from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
    from niels_gpt.cache.sft_dataset import SFTExampleDataset
    from niels_gpt.fileio import CacheError

_HOMES = {
    "CacheError": "niels_gpt.fileio",
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
