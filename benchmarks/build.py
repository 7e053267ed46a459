"""How fast caches are built: as a share of SentencePiece alone (the limit), and against the nanoGPT way (a peer).

Run: python benchmarks/build.py [--data MIRROR] [--tokenizer SPM_MODEL] [--rounds 7] [--only SECTION ...] [--quick]

All of it is in one run. The ways of a section take turns, in another order in each round; a ratio is the median of the
rounds' ratios, for the speed of a machine that others use changes by a third within minutes. The seconds printed are
medians too. Every process and every module is warm before the first round.

    workers  the whole build (checks, hashes, fsync, journal, commit) against `encode(list, return_type="numpy")` of the
             same texts to one uint16 array, on as many threads; the peer is `datasets.map` with as many processes, then
             a memmap filled from 1,024 shards, written anew from what nanoGPT's prepare.py does
    sft      the chat builder against the same limit, of its messages
    memory   peak MiB of a process that builds from a stream of the corpus 1, 4 and 16 times over
    shards   the corpus in 1 to 1,000 shards, beside the bare writes, fsyncs and renames of as many files; opening 1,000
             of them against a loop of np.memmap
    verify   deep verification against sha256sum, and against hashlib, of the same files

The text is fineweb-edu's and dolly's of --data or of NIELS_GPT_TEST_DATA, a mirror; else the packaged sample, repeated.
"""

import argparse
import functools
import hashlib
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from niels_gpt.cache import PretrainTokenStreamDataset, build_pretrain_cache, build_sft_cache, read_meta
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.inspection.verify import Limits, verify
from niels_gpt.recipes.produce import Measured
from niels_gpt.tokenizer import SentencePieceTokenizer
from niels_gpt.tokenizer_training import train_tokenizer

VOCAB_SIZE = 16_000
BATCH_CHARS = 1 << 20
PEER_SHARDS = 1_024
SAMPLE_BYTES = 12_000_000  # the packaged sample is repeated up to so many
FLAT_MIB = 16.0

Ways = dict[str, Callable[[], object]]
Seconds = dict[str, list[float]]
Target = tuple[str, str, str, bool]
"""What is aimed at, the bound, what was found, whether that is good."""


class Setup:
    """The text, the tokenizer, and a folder that is empty at the start."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.folder, self.quick = folder, bool(arguments.quick)
        self.rounds = 1 if self.quick else int(arguments.rounds)
        self.data = str(arguments.data or "sample")
        self.texts = list(stream(self.data, 1 if self.quick else times_for(self.data)))
        self.model = str(arguments.tokenizer or self._trained())
        self.tokenizer = SentencePieceTokenizer(self.model)
        self.processor = sentencepiece.SentencePieceProcessor(model_file=self.model)
        self.bytes = sum(len(text.encode()) for text in self.texts)
        self.tokens = sum(map(len, self.processor.encode(self.texts, return_type="numpy")))

    def _trained(self) -> Path:
        path = self.folder / "spm.model"
        path.write_bytes(train_tokenizer(stream(self.data, 1), vocab_size=VOCAB_SIZE).model)
        return path

    def build(self, *, num_threads: int = 1, executor: Executor | None = None, shards: int = 1) -> Path:
        """Build a cache of all texts anew, with end-of-texts and, if in one shard, both splits; returns its path."""
        path = fresh(self.folder / "pretrain")
        build_pretrain_cache(
            self.texts,
            path,
            tokenizer=self.tokenizer,
            max_train_tokens=19 * self.tokens,  # more than there are: nothing is cut, 1 document of 20 goes to val
            max_val_tokens=self.tokens if shards == 1 else 0,
            shard_bytes=2**27 if shards == 1 else -(-2 * (self.tokens + len(self.texts)) // shards),
            seed=0,
            shuffle_buffer=None,
            append_eot=True,
            num_threads=num_threads,
            executor=executor,
        )
        return path


def times_for(data: str) -> int:
    """Return how often the text is to be repeated: once, but for the sample, which is small."""
    return 1 if data != "sample" else max(1, SAMPLE_BYTES // sum(len(text) for text in stream(data, 1)))


def stream(data: str, times: int) -> Iterator[str]:
    """Yield the corpus so many times over, read from its files each time."""
    for _ in range(times):
        yield from (sample.text for sample in iter_fineweb_edu(source_root=data))


def fresh(path: Path) -> Path:
    """Remove a cache with all its versions; returns its path."""
    shutil.rmtree(path.parent / ".versions" / path.name, ignore_errors=True)
    path.unlink(missing_ok=True)
    return path


def measured(ways: Ways, rounds: int) -> Seconds:
    """Return the seconds of each way in each round. One round before them is not counted: it warms up."""
    seconds: Seconds = {name: [] for name in ways}
    order = random.Random(0)
    for number in range(rounds + 1):
        for name in order.sample(list(ways), len(ways)):
            begin = time.perf_counter()
            ways[name]()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(seconds: Seconds, ours: str, other: str) -> float:
    """Return the median of the rounds' speeds of `ours`, as multiples of the speed of `other`."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[other], strict=True))


def table(seconds: Seconds, tokens: int, limits: dict[str, str]) -> None:
    """Print a row for each way; limits: the way that each one is held against."""
    print(f"  {'way':<48} {'seconds':>8} {'Mtok/s':>7}  of the limit")
    for name, found in seconds.items():
        share = f"{ratio(seconds, name, limits[name]):12.2f}" if name in limits else f"{'':12}"
        middle = statistics.median(found)
        print(f"  {name:<48} {middle:8.3f} {tokens / middle / 1e6:7.2f}  {share}", flush=True)


def encode_whole(setup: Setup, texts: list[str], num_threads: int) -> object:
    """Encode one list of texts to one uint16 array: the limit."""
    return np.concatenate(
        setup.processor.encode(texts, return_type="numpy", num_threads=num_threads), dtype="<u2", casting="unsafe"
    )


def encode_batches(setup: Setup, num_threads: int) -> object:
    """Encode lists of 1 MiB, as whoever holds no whole corpus has to."""
    done, batch, chars = [], [], 0
    for text in itertools.chain(setup.texts, [None]):
        if batch and (text is None or chars + len(text) > BATCH_CHARS):
            done.append(encode_whole(setup, batch, num_threads))
            batch, chars = [], 0
        if text is not None:
            batch.append(text)
            chars += len(text)
    return np.concatenate(done)


@functools.lru_cache
def opened(model: str) -> Any:
    """Return the processor of a model, opened once in each process."""
    return sentencepiece.SentencePieceProcessor(model_file=model)


def tokenize(row: dict[str, str], model: str, eot: int) -> dict[str, Any]:
    """Encode one row, as nanoGPT's `process` does."""
    ids = opened(model).encode(row["text"])
    ids.append(eot)
    return {"ids": ids, "len": len(ids)}


def nanogpt(setup: Setup, dataset: Any, num_proc: int) -> None:
    """Map, sum the lengths, fill a memmap from shards, flush."""
    eot = setup.tokenizer.special_token_ids()["eot"]
    mapped = dataset.map(
        tokenize, fn_kwargs={"model": setup.model, "eot": eot}, num_proc=num_proc, remove_columns=["text"]
    )
    array = np.memmap(
        setup.folder / "train.bin", dtype=np.uint16, mode="w+", shape=(int(np.sum(mapped["len"], dtype=np.uint64)),)
    )
    place, num_shards = 0, min(PEER_SHARDS, len(mapped))
    for index in range(num_shards):
        batch = mapped.shard(num_shards=num_shards, index=index, contiguous=True).with_format("numpy")
        ids = np.concatenate(batch["ids"])
        array[place : place + len(ids)] = ids
        place += len(ids)
    array.flush()


def dataset_of(setup: Setup) -> Any:
    """Return the texts as a dataset on disk, memory-mapped, with its caching off; made before the clock starts."""
    import datasets

    datasets.disable_caching()
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": setup.texts}).save_to_disk(setup.folder / "dataset")
    return datasets.load_from_disk(setup.folder / "dataset")


def bench_workers(setup: Setup) -> list[Target]:
    """Compare the whole build with the limit and the peer, on one worker and on two."""
    dataset = dataset_of(setup)
    ways: Ways = {}
    with ExitStack() as pools:
        for n in (1, 2):
            ways[f"limit, whole list, {n} threads"] = functools.partial(encode_whole, setup, setup.texts, n)
            ways[f"SentencePiece, lists of 1 MiB, {n} threads"] = functools.partial(encode_batches, setup, n)
        ways["ours, in the caller's thread"] = functools.partial(setup.build, num_threads=0)
        for n in (1, 2):
            ways[f"ours, {n} threads"] = functools.partial(setup.build, num_threads=n)
        for kind, n in itertools.product(("spawn", "forkserver"), (1, 2)):
            pool = pools.enter_context(ProcessPoolExecutor(n, multiprocessing.get_context(kind)))
            ways[f"ours, {n} processes, {kind}"] = functools.partial(setup.build, executor=pool)
        for n in (1, 2):
            ways[f"peer, datasets.map and memmap, {n} processes"] = functools.partial(nanogpt, setup, dataset, n)
        seconds = measured(ways, setup.rounds)
    limits = {name: f"limit, whole list, {2 if ' 2 ' in name else 1} threads" for name in ways}
    print(f"workers: {len(setup.texts):,} texts, {setup.bytes / 1e6:.1f} MB, {setup.tokens:,} tokens")
    table(seconds, setup.tokens, limits)
    found = [
        at_least(
            f"build / limit, {n} threads", ratio(seconds, f"ours, {n} threads", f"limit, whole list, {n} threads"), 0.9
        )
        for n in (1, 2)
    ]
    peer = [ratio(seconds, f"ours, {n} threads", f"peer, datasets.map and memmap, {n} processes") for n in (1, 2)]
    return [*found, *(at_least(f"build / peer, {n} workers", peer[n - 1], 1.0) for n in (1, 2))]


def bench_sft(setup: Setup) -> list[Target]:
    """Compare the chat builder with the limit of its messages."""
    samples = iter_dolly_sft(source_root=setup.data)
    chats = [[{"role": turn.role, "content": turn.content} for turn in sample.messages] for sample in samples]
    texts = [turn["content"] for chat in chats for turn in chat]

    def build(num_threads: int) -> None:
        path = fresh(setup.folder / "sft")
        build_sft_cache(chats, path, tokenizer=setup.tokenizer, val_frac=0.1, seed=0, num_threads=num_threads)

    ways: Ways = {}
    for n in (1, 2):
        ways[f"limit, whole list, {n} threads"] = functools.partial(encode_whole, setup, texts, n)
        ways[f"ours, {n} threads"] = functools.partial(build, n)
    seconds = measured(ways, setup.rounds)
    print(f"sft: {len(chats):,} chats, {len(texts):,} messages, {sum(map(len, texts)) / 1e6:.1f} M characters")
    table(
        seconds,
        sum(map(len, setup.processor.encode(texts, return_type="numpy"))),
        {f"ours, {n} threads": f"limit, whole list, {n} threads" for n in (1, 2)},
    )
    return [
        at_least(
            f"sft build / limit, {n} threads",
            ratio(seconds, f"ours, {n} threads", f"limit, whole list, {n} threads"),
            0.9,
        )
        for n in (1, 2)
    ]


def peak_of_build(data: str, model: str, times: int, folder: str) -> tuple[float, float, int]:
    """Build from a stream, in a process of its own; returns its peak MiB, its seconds and its tokens."""
    tokenizer = SentencePieceTokenizer(model)
    logging.getLogger("niels_gpt").setLevel(logging.ERROR)
    path = Path(folder, f"memory{times}")
    bounds = {"max_train_tokens": 10**12, "max_val_tokens": 10**10, "shard_bytes": 2**23}
    with Measured() as run:
        build_pretrain_cache(
            stream(data, times),
            path,
            tokenizer=tokenizer,
            seed=0,
            shuffle_buffer=None,
            append_eot=True,
            num_threads=2,
            **bounds,
        )
    totals = read_meta(str(path / "meta.json"))["totals"]
    return (run.peak_bytes or 0) / 2**20, run.seconds, sum(totals.values())


def bench_memory(setup: Setup) -> list[Target]:
    """Compare the peaks of 1, 4 and 16 times the corpus."""
    base = times_for(setup.data)
    peaks = {}
    print(f"memory: 2 threads; {'MiB':>8} {'tokens':>13} {'Mtok/s':>7}")
    for times in (1, 4) if setup.quick else (1, 4, 16):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            peak, seconds, tokens = pool.submit(
                peak_of_build, setup.data, setup.model, times * base, str(setup.folder)
            ).result()
        peaks[times] = peak
        print(f"  {times:>2} times over    {peak:8.1f} {tokens:13,} {tokens / seconds / 1e6:7.2f}", flush=True)
        fresh(setup.folder / f"memory{times * base}")
    last = max(peaks)
    grown = peaks[last] - peaks[1]
    print(f"  {last} times over / once: {peaks[last] / peaks[1]:.3f}")
    return [(f"peak memory, {last} times over", f"at most {FLAT_MIB:+.0f} MiB", f"{grown:+.1f} MiB", grown <= FLAT_MIB)]


def bare_files(folder: Path, count: int, num_bytes: int) -> None:
    """Write so many files as a builder must: write, fsync, rename, fsync of the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    directory = os.open(folder, os.O_RDONLY)
    content = bytes(-(-num_bytes // count))
    for number in range(count):
        with open(folder / "open", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(folder / "open", folder / str(number))
        os.fsync(directory)
    os.close(directory)


def bench_shards(setup: Setup) -> list[Target]:
    """Compare builds of few and of many shards, and opening the many with a bare loop."""
    counts = (1, 10, 100) if setup.quick else (1, 10, 100, 1_000)
    ways: Ways = {f"ours, {count} shards": functools.partial(setup.build, shards=count) for count in counts}
    for count in counts[1:]:
        ways[f"bare files, {count}"] = functools.partial(bare_files, setup.folder / "bare", count, 2 * setup.tokens)
    seconds = measured(ways, min(setup.rounds, 3))
    print("shards: 1 thread; the speed is relative to one shard")
    for name, found in seconds.items():
        share = f"{ratio(seconds, name, 'ours, 1 shards'):6.2f}" if name.startswith("ours") else ""
        print(f"  {name:<20} {statistics.median(found):8.3f} s {share}")
    train = setup.build(shards=counts[-1]) / "train"
    files = sorted(train.glob("*.bin"))
    opening: Ways = {
        "ours": lambda: PretrainTokenStreamDataset(train, T=64, device="cpu"),
        "loop": lambda: [np.memmap(path, dtype=np.uint16, mode="r") for path in files],
    }
    seconds = measured(opening, 10 * setup.rounds)
    times = 1 / ratio(seconds, "ours", "loop")
    middle = {name: statistics.median(found) * 1e3 for name, found in seconds.items()}
    print(f"  opening {len(files):,} shards: {middle['ours']:.1f} ms, a loop of np.memmap {middle['loop']:.1f} ms")
    return [(f"opening {len(files):,} shards / np.memmap", "at most 3.00", f"{times:.2f}", times <= 3)]


def bench_verify(setup: Setup) -> list[Target]:
    """Compare deep verification with sha256sum of all files of a cache."""
    tokenizer, path = setup.tokenizer, setup.folder / "verified"
    texts = itertools.chain.from_iterable(itertools.repeat(setup.texts, 1 if setup.quick else 8))
    bounds = {"max_train_tokens": 10**12, "max_val_tokens": 10**10, "shard_bytes": 2**24}
    build_pretrain_cache(
        texts, path, tokenizer=tokenizer, seed=0, shuffle_buffer=None, append_eot=True, num_threads=2, **bounds
    )
    files = [str(file) for file in path.resolve().rglob("*") if file.is_file()]

    def hash_all() -> None:
        for name in files:
            with open(name, "rb") as file:
                hashlib.file_digest(file, "sha256")

    def check() -> None:
        found = [problem for problems in verify(path, Limits(deep=True)).values() for problem in problems]
        assert not found, found

    ways: Ways = {
        "verify, deep": check,
        "sha256sum": lambda: subprocess.run(["sha256sum", *files], check=True, capture_output=True),
        "hashlib": hash_all,
    }
    seconds = measured(ways, setup.rounds)
    total = sum(os.path.getsize(name) for name in files) / 1e6
    print(f"verify: {len(files)} files, {total:.1f} MB")
    for name, found in seconds.items():
        print(f"  {name:<20} {statistics.median(found):8.3f} s {total / statistics.median(found):8.0f} MB/s")
    return [at_least("verify --deep / sha256sum", ratio(seconds, "verify, deep", "sha256sum"), 0.5)]


def at_least(name: str, found: float, bound: float) -> Target:
    """Return a target for a ratio that should be large."""
    return name, f"at least {bound:.2f}", f"{found:.2f}", found >= bound


SECTIONS = {
    "workers": bench_workers,
    "sft": bench_sft,
    "memory": bench_memory,
    "shards": bench_shards,
    "verify": bench_verify,
}


def main() -> None:
    """Run the sections and print a table of what was aimed at."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("NIELS_GPT_TEST_DATA"), help="a mirror folder")
    parser.add_argument("--tokenizer", help="spm.model; by default one is trained on the text")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round of little text: does it run at all?")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    arguments = parser.parse_args()
    logging.getLogger("niels_gpt").setLevel(logging.ERROR)  # that the budgets are not met is meant
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(arguments, Path(folder))
        targets = [target for name in arguments.only for target in SECTIONS[name](setup)]
    print(f"\n{'target':<34} {'aim':<18} {'found':>10}")
    for name, aim, found, good in targets:
        print(f"{name:<34} {aim:<18} {found:>10}  {'ok' if good else 'NOT OK'}")
    sys.exit(0 if all(good for *_, good in targets) or arguments.quick else 1)


if __name__ == "__main__":
    main()
