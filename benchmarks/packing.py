"""Rows without padding: how full they are, and what planning them takes; beside TRL's packing of the same lengths.

Run: python benchmarks/packing.py [CACHE_DIR] [--pieces 10000000] [--rounds 3]

    fill   of CACHE_DIR's pretrain/fineweb_edu, sft/dolly15k and sft/oasst1 at T = 1,024, 2,048 and 8,192: rows, the
           share of their tokens that is not padding, and seconds; without CACHE_DIR left out. It is built by niels-gpt
           build fineweb_edu dolly15k oasst1 --source-root MIRROR --cache-dir CACHE_DIR. "split" cuts longer documents,
           "truncate" leaves out what is beyond T. TRL's trl.pack_dataset gets the same lengths: strategies bfd_split,
           and bfd, which truncates, over the whole dataset and, as it does by default, over 1,000 examples at a time.
           Its seconds include copying the tokens; ours include opening the stream, and no token is read
    plan   of so many pieces of lognormal lengths, as of web documents (median 490 tokens) and of chats (median 120):
           seconds from their offsets to a plan, memory that it keeps, and the most that was in use meanwhile; and
           milliseconds of another epoch

One thread. Memory is what numpy allocates, by tracemalloc, in a run that is not timed.
"""

import argparse
import time
import tracemalloc
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.sampling import PackedStream
from niels_gpt.sampling.packing.pieces import Pieces
from niels_gpt.sampling.packing.plan import Plan, Turn

CACHES = ("pretrain/fineweb_edu", "sft/dolly15k", "sft/oasst1")
LENGTHS = (1_024, 2_048, 8_192)
LOGNORMAL = {"web": (6.2, 1.0), "chats": (4.8, 1.0)}
TRL_BATCH = 1_000


def timed(make: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Return the fewest seconds of some rounds, and what was made in the last."""
    seconds, made = [], None
    for _ in range(rounds):
        made = None
        begin = time.perf_counter()
        made = make()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), made


def show(name: str, rows: int, tokens: int, T: int, lost: int, seconds: float) -> None:
    """Print how full rows are, and what is in none of them."""
    share = lost / (tokens + lost)
    print(f"  {name:34} {rows:7,} rows {tokens / rows / T:8.4%} full, {share:6.2%} of tokens lost, {seconds:7.3f} s")


def starts_of(stream: PackedStream) -> NDArray[np.int64]:
    """Return where the documents or examples of a stream begin, and where the last one ends."""
    split = stream.split
    starts: NDArray[np.int64] = split.documents if isinstance(split, PretrainSplit) else split.starts
    return starts


def trl_rows(lengths: NDArray[np.int64], T: int, strategy: str, batch_size: int) -> tuple[int, int]:
    """Return the rows and tokens that TRL makes of documents of these lengths."""
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int64())
    ids = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(int(lengths.sum()), dtype=np.int32)))
    dataset = datasets.Dataset(pa.table({"input_ids": ids}))
    options = {"batch_size": batch_size, "keep_in_memory": True, "load_from_cache_file": False}
    packed = pack_dataset(dataset, seq_length=T, strategy=strategy, map_kwargs=options)
    return len(packed), sum(sum(row) for row in packed["seq_lengths"])


def bench_fill(folder: Path, name: str, T: int, rounds: int) -> None:
    """Print the fill of a real cache, and TRL's of the same lengths."""
    lengths = np.zeros(0, dtype=np.int64)
    for over_length in ("split", "truncate"):
        opened = partial(PackedStream, folder, T=T, global_batch_size=1, seed=0, over_length=over_length)
        seconds, stream = timed(opened, rounds)
        counts, lengths = stream.counts, np.diff(starts_of(stream))
        if over_length == "split":
            longer = counts.documents_cut / counts.documents
            print(f"{name}, T={T:,}: {counts.documents:,} of {int(lengths.sum()):,} tokens, {longer:.1%} are longer")
        show(f"ours, {over_length}", counts.rows, counts.tokens, T, counts.tokens_lost, seconds)
    for strategy in ("bfd_split", "bfd"):
        for what, size in (("of all", len(lengths)), (f"of {TRL_BATCH:,} at a time", TRL_BATCH)):
            seconds, (rows, tokens) = timed(partial(trl_rows, lengths, T, strategy, size), rounds)
            show(f"TRL, {strategy} {what}", rows, tokens, T, int(lengths.sum()) - tokens, seconds)


def planned(starts: NDArray[np.int64], T: int) -> tuple[Pieces, Plan]:
    """Plan documents as PackedStream does."""
    pieces = Pieces(starts, T, "split", Path("made"))
    plan = Plan(pieces.lengths, T)
    del pieces.lengths
    return pieces, plan


def bench_plan(name: str, starts: NDArray[np.int64], T: int, rounds: int) -> None:
    """Print what it takes to plan many documents."""
    make = partial(planned, starts, T)
    seconds, (_, plan) = timed(make, rounds)
    turn, _ = timed(partial(Turn.of, 1, plan.counts, np.zeros(1, dtype=np.uint64)), rounds)
    pieces, full = len(plan.slots), plan.lengths.sum(dtype=np.int64) / len(plan) / T
    del plan
    tracemalloc.start()
    kept = make()
    now, peak = (size / 2**20 for size in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    del kept
    print(
        f"{name}, T={T:,}: {len(starts) - 1:,} documents in {pieces:,} pieces, {full:.4%} full: {seconds:.2f} s, "
        f"{now:,.0f} MiB kept, {peak:,.0f} MiB at most; another epoch {1e3 * turn:.1f} ms"
    )


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caches", nargs="?", type=Path, metavar="CACHE_DIR")
    parser.add_argument("--pieces", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if arguments.caches is not None:
        for name in CACHES:
            for T in LENGTHS:
                bench_fill(arguments.caches / name, name, T, arguments.rounds)
    for name, (mean, sigma) in LOGNORMAL.items():
        lengths = np.random.default_rng(0).lognormal(mean, sigma, arguments.pieces).astype(np.int64) + 1
        starts = np.append(0, np.cumsum(lengths))
        for T in LENGTHS:
            bench_plan(name, starts, T, arguments.rounds)


if __name__ == "__main__":
    main()
