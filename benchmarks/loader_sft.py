"""Chats for the benchmark of readers, bare gathers of their examples, and masks that Python makes token by token."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from loader_peers import Draw, Pair, pair

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


def sft_gathers(folder: Path, B: int, T: int, dtype: str = "<u2", eot: int = EOT) -> list[Draw]:
    """Return two bare gathers of padded examples, without masks: one numpy index, and a loop of copies."""
    tokens, starts = np.fromfile(folder / "train_tokens.bin", dtype), np.load(folder / "train_idx.npy")
    ends = np.append(starts[1:], len(tokens))
    lengths, columns = np.minimum(ends - starts, T + 1), np.arange(T + 1)
    padded = np.append(tokens, np.full(T + 1, eot, dtype=dtype))
    windows = np.lib.stride_tricks.as_strided(padded, (len(tokens), T + 1), 2 * tokens.strides)

    def indexed() -> Pair:
        chosen = torch.randint(len(starts), (B,)).numpy()
        rows = windows[starts[chosen]]
        np.copyto(rows, eot, where=columns >= lengths[chosen, None])
        return pair(rows)

    def looped() -> Pair:
        rows = np.full((B, T + 1), eot, dtype=dtype)
        for row, example in enumerate(torch.randint(len(starts), (B,)).tolist()):
            ids = tokens[starts[example] : starts[example] + lengths[example]]
            rows[row, : len(ids)] = ids
        return pair(rows)

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
