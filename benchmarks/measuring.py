"""Several ways to do one thing, timed side by side in the same rounds: what the benchmarks here share."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Ways = dict[str, Callable[[], object]]
Seconds = dict[str, list[float]]
PEER_SHARDS = 1_024


def measured(
    ways: Ways,
    rounds: int,
    after: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Return the seconds of each way in each round, without the round that warms up.

    after: not counted. clock: time.process_time counts CPU time, which other work on the machine changes less.
    """
    seconds: Seconds = {name: [] for name in ways}
    order = random.Random(0)
    for number in range(rounds + 1):
        for name in order.sample(list(ways), len(ways)):
            begin = clock()
            ways[name]()
            if number:
                seconds[name].append(clock() - begin)
            after()
    return seconds


def ratio(seconds: Seconds, ours: str, other: str) -> float:
    """Return the median of the rounds' speeds of `ours`, as multiples of the speed of `other`."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[other], strict=True))


def spread(seconds: Seconds, way: str, limit: str) -> str:
    """Return the share of the limit's speed that a way has: the median of the rounds, and the middle half of them."""
    shares = sorted(b / a for a, b in zip(seconds[way], seconds[limit], strict=True))
    quarter = len(shares) // 4
    return f"{statistics.median(shares):.3f} ({shares[quarter]:.3f} to {shares[-1 - quarter]:.3f})"


def fill_memmap(mapped: Any, path: Path) -> None:
    """Write the ids of a tokenized dataset as nanoGPT's prepare.py does: sum `len`, fill a memmap from shards."""
    length = int(np.sum(mapped["len"], dtype=np.uint64))
    array = np.memmap(path, dtype=np.uint16, mode="w+", shape=(length,))
    place, num_shards = 0, min(PEER_SHARDS, len(mapped))
    for index in range(num_shards):
        batch = mapped.shard(num_shards=num_shards, index=index, contiguous=True).with_format("numpy")
        ids = np.concatenate(batch["ids"])
        array[place : place + len(ids)] = ids
        place += len(ids)
    array.flush()
