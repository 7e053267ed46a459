"""The builders of the spec (PR-03), build_pretrain_cache and build_sft_cache, with optional extras (D2)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.chat_template import Message
from niels_gpt.engine.meta import Source
from niels_gpt.tokenizers.protocol import Tokenizer
from niels_gpt.work import Progress

__all__ = ["Message", "build_pretrain_cache", "build_sft_cache"]


def build_pretrain_cache(
    texts: Iterable[str],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    max_train_tokens: int,
    max_val_tokens: int,
    shard_bytes: int,
    seed: int,
    shuffle_buffer: int | None,
    source_name: str | None = None,
    source_config: str | None = None,
    streaming: bool = False,
    document_start: str | None = None,
    document_end: str = "none",
    on_special: str = "drop",
    num_threads: int = 1,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> None:
    """Write out_dir/{train,val}/shard_*.bin, out_dir/index/{train,val}_docs.npy and out_dir/meta.json.

    Tokens are little-endian uint16, or uint32 for more than 65,536 ids. Equal texts in equal order, seed and tokenizer
    give equal bytes. A killed build resumes when it is called again with the same texts and arguments.
    texts: one document each; by default the shards are exactly the concatenated `tokenizer.encode(text)` (D4).
    max_train_tokens, max_val_tokens: budgets in tokens. A hash of seed and text decides the split, and the share of val
        is max_val_tokens / both (D5).
    shuffle_buffer: documents in the shuffle buffer; None: the order of the stream.
    document_start, document_end: tokens that begin and end each document, see `build_pretrain`; "eot" is the
        end-of-text sentinel.
    on_special: drop and count a text that holds a special token ("drop"), raise ValueError ("raise"), or encode it as
        plain text ("text").
    num_threads: threads that encode; 0: the caller's thread. executor: any concurrent.futures.Executor that encodes
        instead. Neither changes the output.
    Raises: ValueError for bad arguments; NoTextError E303 for an empty train split; CacheError E503 while another
        process builds here, E504 if `out_dir` is no cache, E505 for a damaged unfinished build, E306 if documents
        changed since a killed run; WorkerDied E506, ForkedBuild E508.
    """
    build_pretrain(
        ((None, text) for text in texts),
        out_dir,
        tokenizer=tokenizer,
        max_train_tokens=max_train_tokens,
        max_val_tokens=max_val_tokens,
        shard_bytes=shard_bytes,
        seed=seed,
        shuffle_buffer=shuffle_buffer,
        document_start=document_start,
        document_end=document_end,
        on_special=on_special,
        num_threads=num_threads,
        executor=executor,
        source=Source(name=source_name, config=source_config, streaming=streaming),
        progress=progress,
    )


def build_sft_cache(
    examples: Iterable[Sequence[Message]] | Iterable[Sequence[Mapping[str, Any]]],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    val_frac: float,
    seed: int,
    source_name: str | None = None,
    source_config: str | None = None,
    streaming: bool = False,
    on_special: str = "drop",
    num_threads: int = 1,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> None:
    """Write out_dir/{train,val}_tokens.bin, out_dir/{train,val}_idx.npy and out_dir/meta.json.

    idx has one int64 offset per example, in tokens; the last length follows from the file size (D3). Equal examples in
    equal order, seed and tokenizer give equal bytes. A killed build resumes when it is called again with the same
    examples and arguments.
    Raises: ValueError for bad arguments; NoTextError E303 if no example is left; CacheError E503 while another process
        builds here, E504 if `out_dir` is no cache, E505 for a damaged unfinished build, E306 if examples changed since
        a killed run; WorkerDied E506, ForkedBuild E508.
    """
    build_sft(
        examples,
        out_dir,
        tokenizer=tokenizer,
        val_frac=val_frac,
        seed=seed,
        on_special=on_special,
        num_threads=num_threads,
        executor=executor,
        source=Source(name=source_name, config=source_config, streaming=streaming),
        progress=progress,
    )
