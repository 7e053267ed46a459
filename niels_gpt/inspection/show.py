"""A decoded window of a pretrain cache, or an example of an sft cache with its loss mask, as text for a terminal."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import check_tokenizer, read_meta, special_id
from niels_gpt.cache.mmap import mmap_tokens
from niels_gpt.fileio import META_NAME, CacheError

_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


class Decoder(Protocol):
    """Anything that turns ids into text, and names the model that it does it with."""

    @property
    def sha256(self) -> str:
        """Of the model file."""

    def decode(self, ids: Any, /) -> str:
        """Return the text of a sequence of ids."""


def show(cache: Path, tokenizer: Decoder, *, split: str, position: int, num_tokens: int, color: bool) -> str:
    """Return a heading and the text at `position`: a token of a pretrain split, or the number of an sft example.

    In an example the tokens that carry loss are green, the others dim; without color they stand in [[ ]].
    num_tokens: tokens shown, at most.
    Raises: FileNotFoundError, CacheError; ValueError for a split or a position that is not there.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: expected at least 1")
    cache = cache.resolve()  # one version, whatever is committed meanwhile
    meta = read_meta(str(cache / META_NAME))
    check_tokenizer(cache, meta, tokenizer.sha256)
    if meta.get("built") is False:
        raise CacheError(f"{cache / META_NAME}: built is false, so there is nothing to show")
    if meta.get("kind") == "sft":
        return _example(cache, meta, tokenizer, split, position, num_tokens, color)
    return _window(cache, meta, tokenizer, split, position, num_tokens)


def _window(cache: Path, meta: dict[str, Any], tokenizer: Decoder, split: str, position: int, num_tokens: int) -> str:
    total = int(meta["totals"][f"{split}_tokens"])
    _check(position, total, f"tokens in {cache}/{split}")
    before = 0
    for record in meta["shards"][split]:
        if position < before + record["tokens"]:
            tokens = mmap_tokens(cache / record["name"], expected_bytes=record["bytes"])
            ids = tokens[position - before :][:num_tokens]
            head = f"{cache}/{split}: tokens {position} to {position + len(ids)} of {total}, in {record['name']}"
            return f"{head}\n{tokenizer.decode(ids.tolist())}"
        before += record["tokens"]
    raise CacheError(f"{cache / META_NAME}: its shards hold {before} tokens, its totals say {total}. Rebuild it")


def _example(
    cache: Path, meta: dict[str, Any], tokenizer: Decoder, split: str, row: int, num_tokens: int, color: bool
) -> str:
    from niels_gpt.cache.sft_dataset import SFTExampleDataset, target_mask

    _check(row, int(meta["totals"][f"{split}_examples"]), f"examples in {cache}/{split}")
    files = (cache / f"{split}_tokens.bin", cache / f"{split}_idx.npy")
    eot = special_id(cache, meta, "eot")
    examples = SFTExampleDataset(*files, T=1, device="cpu", eot_id=eot, tokenizer_sha256=tokenizer.sha256)
    ids = examples.example(row)
    mask = target_mask(ids[None], np.array([len(ids)]), asst_id=examples.asst_id, eot_id=eot)[0]
    head = f"{cache}/{split}: example {row} of {len(examples)}, {len(ids)} tokens, {int(mask.sum())} with loss"
    return head + "\n" + _marked(ids[:num_tokens], mask[:num_tokens], tokenizer, color)


def _marked(ids: NDArray[np.uint16], mask: NDArray[np.bool_], tokenizer: Decoder, color: bool) -> str:
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    parts = []
    for start, end in itertools.pairwise(edges):
        text = tokenizer.decode(ids[start:end].tolist())
        if color:
            parts.append(f"{_GREEN if mask[start] else _DIM}{text}{_PLAIN}")
        else:
            parts.append(f"[[{text}]]" if mask[start] else text)
    return "".join(parts)


def _check(position: int, total: int, what: str) -> None:
    if not 0 <= position < total:
        raise ValueError(f"position {position}: there are {total} {what}, expected 0 <= position < {total}")
