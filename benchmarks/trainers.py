"""Batches through the adapters of niels_gpt.trainers, beside each trainer's own loader of the same tokens.

Run: python benchmarks/trainers.py [--only grain] [--tokens 8000000] [--rounds 7]

    grain   StreamDataset, and rows of StreamSource in Grain's `.batch`. Beside it Grain's own way: for windows a source
            over a memmap with `.shuffle`, for packed rows documents of that memmap, shuffled, in its first-fit packing;
            and the stream itself

Each way gives batches of 8 x 1,024 tokens of one cache, in turns with the others; its speed is a median of the rounds'
ratios. Seconds are CPU time of this process with all of its threads.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader_caches import Letters
from loader_streams import texts
from measuring import Ways, measured, ratio
from numpy.typing import NDArray

from niels_gpt.cache import build_pretrain_cache
from niels_gpt.sampling import EpochStream, PackedStream

B, T = 8, 1_024


def cache_of(root: Path, tokens: int) -> Path:
    """Build documents of 1,000 tokens, on average, in shards."""
    sizes = {"max_train_tokens": tokens, "max_val_tokens": 0, "shard_bytes": tokens, "shuffle_buffer": None}
    build_pretrain_cache(texts(2 * tokens), root / "notes", tokenizer=Letters(), seed=0, **sizes)
    return root / "notes"


def compare(name: str, ways: dict[str, Iterable[Any]], own: str, rounds: int, batches: int = 200) -> None:
    """Print how many times the speed of the trainer's own loader each other way has. own: its name."""
    iterators: dict[str, Iterator[Any]] = {way: iter(found) for way, found in ways.items()}

    def draw(iterator: Iterator[Any]) -> None:
        for _ in islice(iterator, batches):
            pass

    turns: Ways = {way: partial(draw, iterator) for way, iterator in iterators.items()}
    seconds = measured(turns, rounds, clock=time.process_time)
    shares = (f"{way} {ratio(seconds, way, own):.2f}" for way in ways if way != own)
    print(f"  {name}, times {own}: {', '.join(shares)}", flush=True)


# --- grain ------------------------------------------------------------------------------------------------------------


class Memmap:
    """A source of a user's own: ranges of tokens of memory-mapped files."""

    def __init__(self, ranges: list[tuple[NDArray[Any], int, int]], targets: bool) -> None:
        """ranges: of a file, from token to token. targets: split into inputs and labels, of one token less."""
        self.ranges, self.targets = ranges, targets

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        tokens, begin, end = self.ranges[index]
        ids = tokens[begin:end].astype(np.int64)
        return {"input_ids": ids[:-1], "labels": ids[1:]} if self.targets else {"input_ids": ids}


def memmaps(cache: Path) -> tuple[Memmap, Memmap]:
    """Return windows of T + 1 tokens at stride T, and documents in pieces of at most T tokens."""
    files = [np.memmap(path, np.uint16, mode="r") for path in sorted((cache / "train").glob("*.bin"))]
    windows = [(file, at, at + T + 1) for file in files for at in range(0, len(file) - T, T)]
    starts = np.load(cache / "index" / "train_docs.npy")
    firsts = np.cumsum([0, *map(len, files)])
    pieces = []
    for file, first in zip(files, firsts.tolist(), strict=False):
        inside = np.unique(np.clip(starts - first, 0, len(file))).tolist()
        for begin, end in pairwise(inside):
            pieces += [(file, at, min(at + T, end)) for at in range(begin, end, T)]
    return Memmap(windows, True), Memmap(pieces, False)


def compare_grain(cache: Path, rounds: int) -> None:
    """Compare windows and packed rows, without and with threads that read ahead."""
    import grain

    from niels_gpt.trainers.grain import StreamDataset, StreamSource

    windows, pieces = memmaps(cache)
    for threads in (0, 16):
        read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)

        def own(source: Memmap, read: Any = read) -> Any:
            return grain.MapDataset.source(source).shuffle(seed=0).repeat(1_000)

        def rows(stream: Any, read: Any = read) -> Any:
            return grain.MapDataset.source(StreamSource(stream)).batch(B).to_iter_dataset(read)

        packed = grain.experimental.FirstFitPackIterDataset(
            own(pieces).to_iter_dataset(read), length_struct={"input_ids": T}, num_packing_bins=64
        )
        kinds: dict[str, tuple[Any, Callable[[], Any]]] = {
            "windows": (own(windows).batch(B).to_iter_dataset(read), partial(EpochStream, cache / "train")),
            "packed rows": (packed.batch(B), partial(PackedStream, cache)),
        }
        for kind, (grains, opened) in kinds.items():
            made = partial(opened, T=T, global_batch_size=B, seed=0, epochs=1_000)
            ways = {"Grain's own": grains, "StreamSource": rows(made())}
            ways |= {"StreamDataset": StreamDataset(made()), "the stream": made()}
            compare(f"{kind}, {threads} threads", ways, "Grain's own", rounds)


CASES: dict[str, Callable[[Path, int], None]] = {"grain": compare_grain}


def main() -> None:
    """Print the ratios of each trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="this trainer")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="of the cache (8,000,000)")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as root:
        cache = cache_of(Path(root), arguments.tokens)
        for name, case in CASES.items():
            if arguments.only in (None, name):
                print(f"{name}, {B} x {T:,} tokens")
                case(cache, arguments.rounds)


if __name__ == "__main__":
    main()
