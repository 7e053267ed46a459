"""CPU time of a batch of each stream, as a multiple of get_batch of a text and of chats, in one run.

Run: python benchmarks/loader_batches.py PRETRAIN_CACHE SFT_CACHE [--rows 8] [--tokens 256] [--rounds 7]

The ways take turns; each has the least of the rounds. Then the same with position_ids read too.
"""

import argparse
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from loader_streams import get_batch_of, with_positions

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.sampling import EpochStream, PackedStream, SFTStream


def ways_of(text: str, chats: str, B: int, T: int) -> dict[str, Callable[[], object]]:
    """Return a draw of each way."""
    common: dict[str, Any] = {"T": T, "global_batch_size": B, "seed": 0}
    ways: dict[str, Callable[[], object]] = {
        "get_batch": get_batch_of(PretrainTokenStreamDataset(text, split="train", T=T, device="cpu"), B),
        "sft get_batch": get_batch_of(SFTExampleDataset.open(chats, "train", T=T), B),
        "EpochStream": functools.partial(next, iter(EpochStream(text, split="train", **common))),
    }
    streams: dict[str, Callable[[], Any]] = {
        "documents=True": lambda: EpochStream(text, split="train", documents=True, **common),
        "PackedStream": lambda: PackedStream(text, split="train", **common),
        "PackedStream of chats": lambda: PackedStream(chats, split="train", **common),
        "SFTStream": lambda: SFTStream(chats, split="train", **common),
    }
    for name, make in streams.items():
        ways[name] = functools.partial(next, iter(make()))
        ways[f"{name}, position_ids"] = with_positions(make())
    return ways


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", metavar="PRETRAIN_CACHE")
    parser.add_argument("chats", metavar="SFT_CACHE")
    for name, default in (("rows", 8), ("tokens", 256), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    found = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # examples that T cuts
    ways = ways_of(found.text, found.chats, found.rows, found.tokens)
    count = max(64, 4_000_000 // (found.rows * found.tokens))  # whole blocks of rows that are read ahead
    least = dict.fromkeys(ways, float("inf"))
    for number in range(found.rounds + 1):
        for name, draw in ways.items():
            begin = time.process_time()
            for _ in range(count):
                draw()
            if number:
                least[name] = min(least[name], (time.process_time() - begin) / count)
    print(f"{found.rows} x {found.tokens}: microseconds of CPU a batch, times get_batch, times sft get_batch")
    for name, seconds in least.items():
        shares = (f"{seconds / least[each]:8.2f}" for each in ("get_batch", "sft get_batch"))
        print(f"  {name:<36}{seconds * 1e6:9.1f}{''.join(shares)}")


if __name__ == "__main__":
    main()
