"""Chats for the benchmark of readers, bare gathers of their examples, and masks that Python makes token by token."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader_peers import Draw, Pair, pair

from niels_gpt.cache import read_meta, write_meta
from niels_gpt.cache.formats import target_mask
from niels_gpt.storage.fileio import META_NAME

EOT, ASST = 4, 3


def chats(count: int) -> Iterator[list[dict[str, str]]]:
    """Yield chats of one to three turns, of about 1,000 tokens."""
    lengths = torch.randint(20, 900, (count, 6), generator=torch.Generator().manual_seed(0)).tolist()
    for number, sizes in enumerate(lengths):
        turns = zip(sizes[::2], sizes[1::2], strict=True)
        yield [
            {"role": role, "content": "q" * size}
            for user, assistant in list(turns)[: number % 3 + 1]
            for role, size in (("user", 1 + user // 4), ("assistant", assistant))
        ]


def with_bits(folder: Path) -> Path:
    """Return a copy of a cache of chats that has loss bits for the tokens that the sentinels mark."""
    copy = folder.with_name("loss_bits")
    if copy.exists():
        return copy
    shutil.copytree(folder.resolve(), copy)
    meta, known = read_meta(str(copy / META_NAME)), {"sha256": "0" * 64}
    meta |= {"loss_bits": {}, "pad_id": EOT, "chat_template": {**known, "mask_by": "prefix", "loss_on": "assistant"}}
    for split in ("train", "val"):
        tokens = np.fromfile(copy / f"{split}_tokens.bin", "<u2")
        mask = target_mask(tokens[None], np.array([len(tokens)]), asst_id=ASST, eot_id=EOT)[0]
        path = copy / f"{split}_loss.bits"
        path.write_bytes(np.packbits(mask, bitorder="little").tobytes())
        meta["loss_bits"][split] = {"name": path.name, "bytes": path.stat().st_size, **known}
    write_meta(str(copy / META_NAME), meta)
    return copy


def sft_gathers(folder: Path, B: int, T: int, dtype: str = "<u2", more: int = 0, masked: bool = False) -> list[Draw]:
    """Return two bare gathers of padded examples: one numpy index, and a loop of copies. more: added to every id.

    masked: of the targets, too, whose masks were made before and are stored as a second array of tokens; the third
    tensor is then made, as a dataset has to, but not returned.
    """
    tokens, starts = np.fromfile(folder / "train_tokens.bin", dtype), np.load(folder / "train_idx.npy")
    ends = np.append(starts[1:], len(tokens))
    lengths, columns = np.minimum(ends - starts, T + 1), np.arange(T + 1)
    has_loss = target_mask(tokens[None], np.array([len(tokens)]), asst_id=ASST + more, eot_id=EOT + more)[0]
    targets = np.where(has_loss, tokens.astype(np.int32), np.int32(-100))
    sources: list[Any] = [(tokens, EOT + more)] + [(targets, -100)] * masked
    windows = []
    for source, padding in sources:
        padded = np.append(source, np.full(T + 1, padding, dtype=source.dtype))
        windows.append(np.lib.stride_tricks.as_strided(padded, (len(tokens), T + 1), 2 * padded.strides))

    def finished(rows: Any, *others: Any) -> Pair:
        for targets in others:
            torch.from_numpy(targets[:, 1:].astype(np.int64))
        return pair(rows)

    def indexed() -> Pair:
        chosen = torch.randint(len(starts), (B,)).numpy()
        rows, is_padding = [each[starts[chosen]] for each in windows], columns >= lengths[chosen, None]
        for each, (_, padding) in zip(rows, sources, strict=True):
            np.copyto(each, padding, where=is_padding)
        return finished(*rows)

    def looped() -> Pair:
        rows = [np.full((B, T + 1), padding, dtype=source.dtype) for source, padding in sources]
        for row, example in enumerate(torch.randint(len(starts), (B,)).tolist()):
            start, length = starts[example], lengths[example]
            for each, (source, _) in zip(rows, sources, strict=True):
                each[row, :length] = source[start : start + length]
        return finished(*rows)

    return [indexed, looped]


def by_element(y: torch.Tensor) -> torch.Tensor:
    """Return y with -100 where there is no loss, each element written into the tensor."""
    masked = torch.empty_like(y)
    for row, tokens in enumerate(y.tolist()):
        inside = False
        for column, token in enumerate(tokens):
            masked[row, column] = token if inside else -100
            inside = token == ASST or (inside and token != EOT)
    return masked


def by_lists(y: torch.Tensor) -> torch.Tensor:
    """Return the same, written into lists that become a tensor."""
    rows = []
    for tokens in y.tolist():
        inside, row = False, []
        for token in tokens:
            row.append(token if inside else -100)
            inside = token == ASST or (inside and token != EOT)
        rows.append(row)
    return torch.tensor(rows)


MASKS = {"element by element": by_element, "into lists": by_lists}
