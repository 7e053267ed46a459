"""How fast the readers serve batches: as a share of a bare gather (the limit), and beside other projects' readers.

Run: python benchmarks/loaders.py [--rounds 15] [--peers DIR] [--only SECTION ...] [--cold FOLDER] [--quick]

All of it is in one process, on one thread, from the page cache. Each way first draws batches until all of the files
have been read, or for 5 s; then they take turns, in another order in each round; a ratio is the median of the rounds'
ratios. Every way gives B rows of T tokens as x and y: int64, contiguous, y one token later, which is checked once of
each. Of a library with several documented ways, the fastest is taken.

    pretrain  50 million tokens in 1, 100 and 1,000 shards. The limit: random rows of one mapped file of all tokens, no
              shards, no checks, cast into fresh x and y; for information, the same into arrays that are there.
              `rank 0 of 8` has 8 times the global batch, so as many rows of its own. The peers: nanoGPT's get_batch,
              rewritten from what it does (one file, however many shards others have); megatron-core's
              IndexedDataset, one prefix a shard; litdata's TokensLoader; datasets (Arrow) and mosaicml-streaming (MDS),
              which hold rows of T + 1 tokens
    mixture   three caches of 6, 3 and 1 parts: rank 0 of 1, of 64 and of 1,024, as many rows each, beside get_batch
    sft       get_batch beside a bare gather of the same rows without a mask, beside itself where loss is in bits, and
              beside that gather with a mask made by Python, token by token: written element by element into a tensor,
              or into lists that become one
    sft_stream  SFTStream beside sft get_batch, of the same split: with over_length="truncate" and "split",
              by sentinels and by loss bits
    segments  EpochStream(documents=True) and PackedStream, position_ids read as well, beside get_batch of the same
              cache: documents of 1,000 tokens on average; and PackedStream of the chats beside sft get_batch
    wide      ids of 32 bits (128,256 of them): every sampler beside the bare gather of the same rows: random, read by
              position, in order, or padded examples (with their masked targets, stored as a second array)
    opening   a split of 1,000 shards: seconds to open it, and anonymous memory before and after 5,000 batches
    cold      only with --cold: shards on a real disk, their page cache dropped before each way: mapped, mapped with
              MADV_RANDOM, read by pread; seconds, and bytes that the disk gave

Disk: 1.5 GB where temporary files go (TMPDIR; without peers 0.4 GB), and 1 GiB in FOLDER. --quick is to see that it
runs: 3 rounds unless --rounds says otherwise, each an eighth as long, 3 million tokens, 0.3 s to warm up, 500 batches,
one cold shard of eight; it prints no aims.

Peers that are not installed, or fail, are named and left out. They are looked for in DIR, after everything else, so
that they do not replace numpy or torch: pip install --target DIR --no-deps, and what loader_peers.PACKAGES lists.
"""

import argparse
import functools
import gc
import itertools
import math
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from loader_caches import SHARDS, ManyIds, build
from loader_cold import bench_cold, why_not
from loader_peers import PACKAGES, PEERS, Corpus, Draw, Pair, Tokens, pair, title
from loader_rounds import SHAPES, checked, compare, repeated, surviving, target
from loader_sft import EOT, MASKS, chats, sft_gathers, with_bits
from loader_streams import bench_segments, bench_sft_stream, sft_cache
from measuring import Seconds, Ways, measured, ratio, spread

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset, build_sft_cache
from niels_gpt.cache.mmap import mmap_tokens
from niels_gpt.sampling import EpochStream, MixtureStream, iter_eval

LIMIT, FILLED = "bare gather", "gather into arrays there"


def gathers(tokens: Tokens, B: int, T: int, cast: Callable[[Tokens], Pair]) -> list[Draw]:
    """Return two bare gathers of rows at random starts: one numpy index, and one join of slices."""
    last, size = len(tokens) - T, tokens.itemsize
    windows, file = np.lib.stride_tricks.as_strided(tokens, (last, T + 1), (size, size)), memoryview(tokens).cast("B")

    def joined() -> Pair:
        starts = (size * torch.randint(last, (B,))).tolist()
        parts = [file[start : start + size * (T + 1)] for start in starts]
        return cast(np.frombuffer(bytearray().join(parts), dtype=tokens.dtype).reshape(B, T + 1))

    return [lambda: cast(windows[torch.randint(last, (B,)).numpy()]), joined]


def filling(B: int, T: int) -> Callable[[Tokens], Pair]:
    """Return a cast of rows [B, T + 1] into one of two pairs that are there, in turn: no reader can give those away."""
    turns = itertools.cycle([np.zeros((2, B, T), dtype=np.int64) for _ in range(2)])

    def fill(rows: Tokens) -> Pair:
        x, y = next(turns)
        x[...], y[...] = rows[:, :-1], rows[:, 1:]
        return torch.from_numpy(x), torch.from_numpy(y)

    return fill


def ours(split: Path, B: int, T: int) -> dict[str, list[Draw]]:
    """Return the readers of this project. From 1 MiB of int64 on they fill the memory of batches that are gone."""
    ways: dict[str, list[Draw]] = {}
    for io in ("mmap", "pread"):
        data = PretrainTokenStreamDataset(split, T=T, device="cpu", io=io)
        ways[f"get_batch, {io}"] = [functools.partial(data.get_batch, B=B, generator=torch.Generator().manual_seed(0))]
    for name, world in (("EpochStream", 1), ("EpochStream, rank 0 of 8", 8)):
        stream = EpochStream(split, T=T, global_batch_size=world * B, seed=0, rank=0, world_size=world)
        ways[name] = [functools.partial(next, iter(stream))]
    return ways


def bench_shape(corpus: Corpus, B: int, T: int, arguments: argparse.Namespace, failures: dict[str, str]) -> Seconds:
    """Compare all readers in one shape and number of shards."""
    bare = {LIMIT: gathers(corpus.tokens, B, T, pair), FILLED: gathers(corpus.tokens, B, T, filling(B, T))}
    ways = {name: checked(name, draws, B, T) for name, draws in (bare | ours(corpus.split, B, T)).items()}
    for name in [name for name in PEERS if name not in failures]:
        with surviving(name, failures):
            title(name)
            ways[name] = checked(name, PEERS[name][0](corpus, B, T), B, T)
    seconds = compare(ways, B, arguments, failures)
    print(f"{corpus.shards} shards, B={B}, T={T}: {1 / statistics.median(seconds[LIMIT]):,.0f} batches/s at most")
    for name in seconds:
        print(f"  {title(name):<32} {spread(seconds, name, LIMIT)}", flush=True)
    return seconds


def bench_pretrain(root: Path, arguments: argparse.Namespace) -> None:
    """Compare all readers in all shapes and numbers of shards."""
    results: dict[tuple[int, int, int], Seconds] = {}
    failures: dict[str, str] = {}
    path = build(root, 1, arguments.tokens) / "shard_00000.bin"
    tokens = mmap_tokens(path)
    for shards in SHARDS:
        split = build(root, shards, arguments.tokens)
        with tempfile.TemporaryDirectory(dir=root) as work:
            for B, T in SHAPES:
                corpus = Corpus(tokens, path, split, shards, Path(work))
                results[B, T, shards] = bench_shape(corpus, B, T, arguments, failures)
                gc.collect()
    print(f"\nshare of the speed of the bare gather, median of {arguments.rounds} rounds")
    for head, place in (("B x T", 0), ("shards", 1)):
        cells = [(f"{B} x {T}", f"{shards:,}")[place] for B, T, shards in results]
        print(f"  {head:<32} " + " ".join(f"{cell:>9}" for cell in cells))
    for name in next(iter(results.values())):
        cells = [
            f"{ratio(seconds, name, LIMIT):9.3f}" if name in seconds else "        -" for seconds in results.values()
        ]
        print(f"  {title(name):<32} " + " ".join(cells))
    if failures:
        print(f"  left out: {', '.join(failures)}: pip install --target DIR --no-deps {PACKAGES}")
    print(
        f"  The {LIMIT} and the peers cast into fresh memory. From 1 MiB of int64 on (64 x 2048) this project's readers"
    )
    print(f"  fill that of batches that are gone, so they may be above the limit there; {FILLED}: no aim.")
    least = min(ratio(seconds, "get_batch, mmap", LIMIT) for seconds in results.values())
    target("get_batch / the bare gather, least of all", least, 0.8, arguments)
    for name in ("EpochStream", "EpochStream, rank 0 of 8"):
        least = min(ratio(seconds, name, "get_batch, mmap") for seconds in results.values())
        target(f"{name} / get_batch, least of all", least, 0.5, arguments)


def bench_mixture(root: Path, arguments: argparse.Namespace) -> None:
    """Compare a mixture on one rank with one on many, where a rank has the same rows of a larger global batch."""
    split, least = build(root, 1, arguments.tokens), math.inf
    print("\nmixture of three, as a share of the speed of get_batch")
    for B, T in SHAPES:
        ways = {"get_batch": ours(split, B, T)["get_batch, mmap"]}
        for world in (1, 64, 1024):
            streams = [EpochStream(split, T=T, global_batch_size=world * B, seed=s, world_size=world) for s in range(3)]
            ways[f"of {world}"] = [functools.partial(next, iter(MixtureStream(streams, [0.6, 0.3, 0.1], seed=0)))]
        seconds = compare({name: checked(name, draws, B, T) for name, draws in ways.items()}, B, arguments, {})
        shares = (f"rank 0 {name} {spread(seconds, name, 'get_batch')}" for name in ways if name != "get_batch")
        print(f"  {B} x {T}: {', '.join(shares)}", flush=True)
        least = min(least, ratio(seconds, "of 64", "of 1"))
    target("a mixture on 64 ranks / on one, least of all", least, 0.5, arguments)


def bench_sft(root: Path, arguments: argparse.Namespace) -> None:
    """Compare get_batch with the same rows without a mask, and with masks made by loops over their tokens."""
    sft_cache(root)
    bits = with_bits(root / "s")
    print("\nsft get_batch, as a multiple of the speed of")
    least = math.inf
    for B, T in SHAPES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # examples that T cuts
            data = SFTExampleDataset(
                root / "s/train_tokens.bin", root / "s/train_idx.npy", T=T, device="cpu", eot_id=EOT
            )
            of_bits = SFTExampleDataset.open(bits, "train", T=T)
        get_batch = functools.partial(data.get_batch, B=B, generator=torch.Generator().manual_seed(0))
        bare, (_, y, expected) = checked(LIMIT, sft_gathers(root / "s", B, T), B, T), get_batch()
        ways: dict[str, list[Draw]] = {"get_batch": [get_batch], LIMIT: bare}
        by_bits = functools.partial(of_bits.get_batch, B=B, generator=torch.Generator().manual_seed(0))
        assert torch.equal(by_bits()[2], expected), "loss bits: another mask"
        ways["loss bits"] = [by_bits]
        for name, mask in MASKS.items():
            assert torch.equal(mask(y), expected), f"{name}: another mask"
            ways[name] = [lambda draw=draw, mask=mask: mask(draw()[1]) for draw in bare]
        seconds = compare(ways, B, arguments, {})
        print(f"  {B} x {T}: {LIMIT}, no mask {spread(seconds, 'get_batch', LIMIT)}; itself by loss bits", end=" ")
        print(f"{spread(seconds, 'get_batch', 'loss bits')}; with a mask in Python")
        print("    " + ", ".join(f"{name} {spread(seconds, 'get_batch', name)}" for name in MASKS), flush=True)
        least = min(least, ratio(seconds, "get_batch", "element by element"))
    target("get_batch / mask in Python, element by element, least of all", least, 100, arguments)


def in_order(path: Path, B: int, T: int) -> Draw:
    """Return a bare gather of the windows at stride T, batch after batch; each pass maps the file, as a reader does."""

    def a_pass() -> Iterator[Pair]:
        tokens = mmap_tokens(path, dtype=np.dtype("<u4"))
        shape, stride = ((len(tokens) - 1) // T, T + 1), tokens.itemsize
        windows = np.lib.stride_tricks.as_strided(tokens, shape, (T * stride, stride))
        for first in range(0, len(windows) - B + 1, B):
            yield pair(windows[np.arange(first, first + B)])

    return functools.partial(next, itertools.chain.from_iterable(iter(a_pass, None)))


def by_position(path: Path, tokens: Tokens, B: int, T: int) -> Draw:
    """Return a bare gather of random rows by positioned reads of one file."""
    file, last, size = os.open(path, os.O_RDONLY), len(tokens) - T, tokens.itemsize

    def read() -> Pair:
        rows = np.empty((B, T + 1), dtype=tokens.dtype)
        for row, start in zip(rows, (size * torch.randint(last, (B,))).tolist(), strict=True):
            os.preadv(file, [row], start)
        return pair(rows)

    return read


def endless(make: Callable[[], Iterator[Pair]]) -> Iterator[Pair]:
    """Yield passes without end, without what each of them ends with: it may be a short batch."""
    while True:
        yield from (now for now, _ in itertools.pairwise(make()))


def bench_wide(root: Path, arguments: argparse.Namespace) -> None:
    """Compare every sampler of a cache of 128,256 ids, 32 bits each, with the bare gather of the same kind of rows."""
    tokenizer, least = ManyIds(), math.inf
    split = build(root, 1, arguments.tokens, tokenizer)
    tokens = mmap_tokens(split / "shard_00000.bin", dtype=np.dtype("<u4"))
    build_sft_cache(chats(3_000), root / "wide_sft", tokenizer=tokenizer, val_frac=0.1, seed=0)
    print("\nids of 32 bits, as a share of the speed of the bare gather of the same rows")
    for B, T in SHAPES:
        mixed = [EpochStream(split, T=T, global_batch_size=B, seed=seed) for seed in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # examples that T cuts
            examples = SFTExampleDataset.open(root / "wide_sft", "train", T=T)
        random = gathers(tokens, B, T, pair)
        of_examples = sft_gathers(root / "wide_sft", B, T, "<u4", tokenizer.more, masked=True)
        reading = ours(split, B, T)
        mixture = iter(MixtureStream(mixed, [0.6, 0.3, 0.1], seed=0))
        evaluation = endless(lambda B=B, T=T: iter_eval(split, B=B, T=T))
        get_batch = functools.partial(examples.get_batch, B=B, generator=torch.Generator().manual_seed(0))
        limits_and_ours: dict[str, tuple[list[Draw], list[Draw]]] = {
            "get_batch": (random, reading["get_batch, mmap"]),
            "get_batch, pread": ([by_position(split / "shard_00000.bin", tokens, B, T)], reading["get_batch, pread"]),
            "EpochStream": (random, reading["EpochStream"]),
            "MixtureStream": (random, [functools.partial(next, mixture)]),
            "iter_eval": ([in_order(split / "shard_00000.bin", B, T)], [functools.partial(next, evaluation)]),
            "SFTExampleDataset": (of_examples, [lambda get_batch=get_batch: get_batch()[:2]]),
        }
        for name, (limit, draws) in limits_and_ours.items():
            ways = {LIMIT: checked(LIMIT, limit, B, T), name: checked(name, draws, B, T)}
            seconds = compare(ways, B, arguments, {})
            print(f"  {B} x {T} {name:<20} {spread(seconds, name, LIMIT)}", flush=True)
            least = min(least, ratio(seconds, name, LIMIT))
    target("ids of 32 bits, every sampler / its bare gather, least of all", least, 0.8, arguments)


def anonymous() -> int:
    """Return the bytes of this process's memory that are of no file."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def bench_opening(root: Path, arguments: argparse.Namespace) -> None:
    """Open a split of 1,000 shards, and see what 5,000 batches leave in memory."""
    split = build(root, SHARDS[-1], arguments.tokens)
    opens: Ways = {
        "PretrainTokenStreamDataset": lambda: PretrainTokenStreamDataset(split, T=256, device="cpu"),
        "EpochStream": lambda: EpochStream(split, T=256, global_batch_size=8, seed=0),
    }
    print(f"\nopening {SHARDS[-1]:,} shards")
    for name, seconds in measured(opens, arguments.rounds).items():
        print(f"  {name}: {statistics.median(seconds) * 1e3:.1f} ms")
    for name, (draw,) in ours(split, 32, 1024).items():
        repeated(name, draw, 100, {})
        before, more = anonymous(), 500 if arguments.quick else 5_000
        repeated(name, draw, more, {})
        growth = f"{anonymous() - before:+,} bytes after {more:,} more"
        print(f"  {name}: {before / 2**20:.1f} MiB of anonymous memory after 100 batches, {growth}", flush=True)


def run_cold(_: Path, arguments: argparse.Namespace) -> None:
    """Read what is not in the page cache, if a folder is given for it."""
    if arguments.cold:
        with tempfile.TemporaryDirectory(dir=arguments.cold) as folder:
            bench_cold(Path(folder), max(1, arguments.rounds // 3), arguments.cold_shards)


SECTIONS = {
    "opening": bench_opening,
    "sft": bench_sft,
    "sft_stream": bench_sft_stream,
    "segments": bench_segments,
    "mixture": bench_mixture,
    "pretrain": bench_pretrain,
    "wide": bench_wide,
    "cold": run_cold,
}


def parsed() -> argparse.Namespace:
    """Return the arguments, checked, and what --quick makes of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="15 by default, 3 with --quick; cold: a third of them")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where other projects' readers are installed")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--cold", type=Path, metavar="FOLDER", help="a folder on a real disk, for 1 GiB")
    parser.add_argument("--quick", action="store_true", help="little of everything, and no aims")
    found = parser.parse_args()
    found.tokens, found.seconds, found.warm_seconds = (3_000_000, 0.01, 0.3) if found.quick else (50_000_000, 0.08, 5)
    found.rounds = (3 if found.quick else 15) if found.rounds is None else found.rounds
    found.cold_shards = 1 if found.quick else 8
    if found.rounds < 1:
        parser.error(f"--rounds {found.rounds}: expected 1 or more")
    if found.peers and not found.peers.is_dir():
        parser.error(f"--peers {found.peers}: no such folder")
    if found.only == ["cold"] and not found.cold:
        parser.error("--only cold: expected --cold FOLDER beside it")
    if found.cold and "cold" in found.only and (error := why_not(found.cold, found.cold_shards)):
        parser.error(f"--cold: {error}")
    return found


def main() -> None:
    """Run the sections."""
    arguments = parsed()
    sys.path += [str(arguments.peers)] if arguments.peers else []
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in SECTIONS if name in arguments.only]:
            SECTIONS[name](Path(folder), arguments)


if __name__ == "__main__":
    main()
