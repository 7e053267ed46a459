"""How fast caches are built: as a share of SentencePiece alone (the limit), and against the nanoGPT way (a peer).

Run: python benchmarks/build.py [--data MIRROR] [--tokenizer SPM_MODEL] [--rounds 7] [--only SECTION ...] [--quick]

All of it is in one run. The ways of a section take turns, in another order in each round; a ratio is the median of the
rounds' ratios, for the speed of a machine that others use changes by a third within minutes. The seconds printed are
medians too. Every process and every module is warm before the first round. On a machine with other work, whose load is
printed, two workers of two cores say little: there the CPU seconds, of this process, are the ones to look at.

    workers  the whole build (checks, hashes, fsync, journal, commit) against `encode(list, return_type="numpy")` of the
             same texts to one uint16 array, on as many threads; the peer is `datasets.map` with as many processes, then
             a memmap filled from 1,024 shards, rewritten from what nanoGPT's prepare.py does
    sft      the chat builder against the same limit, of its messages
    memory   peak MiB of a process that builds from a stream of the corpus 1, 4 and 16 times over
    shards   the corpus in 1 to 1,000 shards, beside the bare writes, fsyncs and renames of as many files; opening 1,000
             of them against a loop of np.memmap
    verify   deep verification against sha256sum, and against hashlib, of the same files: 1,000 shards of 120 kB, and
             one of 128 MiB

The text is fineweb-edu's and dolly's of --data or of NIELS_GPT_TEST_DATA, a mirror; else the packaged sample, repeated.
"""

import argparse
import hashlib
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from measuring import Seconds, Ways, fill_memmap, ratio

from niels_gpt.cache import PretrainTokenStreamDataset, build_pretrain_cache, build_sft_cache, read_meta
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.records import Measurement
from niels_gpt.tokenizer import SentencePieceTokenizer
from niels_gpt.tokenizer_training import train_tokenizer

VOCAB_SIZE = 16_000
SAMPLE_BYTES = 12_000_000  # the packaged sample is repeated up to so many
FLAT_MIB = 16  # more for 16 times the corpus: it is held nowhere

CPU = "CPU, "

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

    def build(self, num_threads: int = 1, *, executor: Executor | None = None, shards: int = 1) -> Path:
        """Build a cache of all texts from scratch and return its path; one of several shards has no val split."""
        path, tokens = fresh(self.folder / "pretrain"), self.tokens + len(self.texts)
        val, shard_bytes = (tokens, 2**27) if shards == 1 else (0, 2 * -(-tokens // shards))
        build(self.texts, path, self.tokenizer, 19 * tokens, val, shard_bytes, num_threads, executor)
        return path

    def encode(self, texts: list[str], num_threads: int) -> object:
        """Encode one list of texts to one uint16 array: the limit."""
        ids = self.processor.encode(texts, return_type="numpy", num_threads=num_threads)
        return np.concatenate(ids, dtype="<u2", casting="unsafe")

    def encode_batches(self, num_threads: int) -> object:
        """Encode lists of 1 MiB, for a corpus that does not fit into memory."""
        ends = itertools.accumulate(map(len, self.texts))
        batches = itertools.groupby(zip(self.texts, ends, strict=True), lambda pair: pair[1] >> 20)
        return np.concatenate([self.encode([text for text, _ in batch], num_threads) for _, batch in batches])


def build(
    texts: Iterable[str],
    path: Path,
    tokenizer: SentencePieceTokenizer,
    max_train_tokens: int = 19 * 10**10,  # more than there are: nothing is cut, 1 document of 20 goes to val
    max_val_tokens: int = 10**10,
    shard_bytes: int = 2**24,
    num_threads: int = 2,
    executor: Executor | None = None,
) -> None:
    """Build a cache with end-of-texts."""
    build_pretrain_cache(
        texts,
        path,
        tokenizer=tokenizer,
        max_train_tokens=max_train_tokens,
        max_val_tokens=max_val_tokens,
        shard_bytes=shard_bytes,
        seed=0,
        shuffle_buffer=None,
        document_end="eot",
        num_threads=num_threads,
        executor=executor,
    )


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
    """Return the wall seconds of each way in each round; under "CPU, NAME" those that this process computed.

    One round before them is not counted: it warms up.
    """
    seconds: Seconds = {f"{kind}{name}": [] for kind in ("", CPU) for name in ways}
    order = random.Random(0)
    for number in range(rounds + 1):
        for name in order.sample(list(ways), len(ways)):
            begin = time.perf_counter(), time.process_time()
            ways[name]()
            if number:
                seconds[name].append(time.perf_counter() - begin[0])
                seconds[CPU + name].append(time.process_time() - begin[1])
    return seconds


def table(seconds: Seconds, tokens: int, limits: dict[str, str]) -> None:
    """Print a row for each way; limits: the way that each one is held against."""
    print(f"  {'way':<30} {'seconds':>8} {'Mtok/s':>7}  of the limit  {'CPU s':>7}  of the limit's")
    for name in (name for name in seconds if not name.startswith(CPU)):
        limit, middle = limits.get(name, name), statistics.median(seconds[name])
        share, cpu = ratio(seconds, name, limit), statistics.median(seconds[CPU + name])
        alone = not any(kind in name for kind in ("spawn", "forkserver", "peer"))  # nobody else computes for it
        of_cpu = f"{cpu:7.3f}  {1 / ratio(seconds, CPU + name, CPU + limit):14.2f}" if alone else ""
        print(f"  {name:<30} {middle:8.3f} {tokens / middle / 1e6:7.2f}  {share:12.2f}  {of_cpu}", flush=True)


@lru_cache
def opened(model: str) -> Any:
    """Return the processor of a model, opened once in each process."""
    return sentencepiece.SentencePieceProcessor(model_file=model)


def tokenize(row: dict[str, str], model: str, eot: int) -> dict[str, Any]:
    """Encode one row, as nanoGPT's `process` does."""
    ids = opened(model).encode(row["text"])
    ids.append(eot)
    return {"ids": ids, "len": len(ids)}


def nanogpt(setup: Setup, dataset: Any, num_proc: int) -> None:
    """Map, and write the ids."""
    more = {"model": setup.model, "eot": setup.tokenizer.special_token_ids()["eot"]}
    mapped = dataset.map(tokenize, fn_kwargs=more, num_proc=num_proc, remove_columns=["text"])
    fill_memmap(mapped, setup.folder / "train.bin")


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
    ways: Ways = {"ours, the caller's thread": partial(setup.build, 0)}
    limits = {"ours, the caller's thread": "limit, 1 worker"}
    with ExitStack() as pools:
        for n, workers in ((1, "1 worker"), (2, "2 workers")):
            added: Ways = {
                f"limit, {workers}": partial(setup.encode, setup.texts, n),
                f"lists of 1 MiB, {workers}": partial(setup.encode_batches, n),
                f"ours, threads, {workers}": partial(setup.build, n),
                f"peer, {workers}": partial(nanogpt, setup, dataset, n),
            }
            for kind in ("spawn", "forkserver"):
                pool = pools.enter_context(ProcessPoolExecutor(n, multiprocessing.get_context(kind)))
                added[f"ours, {kind}, {workers}"] = partial(setup.build, executor=pool)
            ways.update(added)
            limits.update(dict.fromkeys(added, f"limit, {workers}"))
        seconds = measured(ways, setup.rounds)
    print(f"workers: {len(setup.texts):,} texts, {setup.bytes / 1e6:.1f} MB, {setup.tokens:,} tokens")
    table(seconds, setup.tokens, limits)
    targets = []
    for workers in ("1 worker", "2 workers"):
        ours = f"ours, threads, {workers}"
        targets.append(at_least(f"build / limit, {workers}", ratio(seconds, ours, f"limit, {workers}"), 0.95))
        targets.append(at_least(f"build / peer, {workers}", ratio(seconds, ours, f"peer, {workers}"), 1.0))
    return targets


def bench_sft(setup: Setup) -> list[Target]:
    """Compare the chat builder with the limit of its messages."""
    samples = iter_dolly_sft(source_root=setup.data)
    chats = [[{"role": turn.role, "content": turn.content} for turn in sample.messages] for sample in samples]
    texts = [turn["content"] for chat in chats for turn in chat]

    def ours(num_threads: int) -> None:
        path = fresh(setup.folder / "sft")
        build_sft_cache(chats, path, tokenizer=setup.tokenizer, val_frac=0.1, seed=0, num_threads=num_threads)

    ways: Ways = {"ours, the caller's thread": partial(ours, 0)}
    limits = {"ours, the caller's thread": "limit, 1 worker"}
    for n, workers in ((1, "1 worker"), (2, "2 workers")):
        ways[f"limit, {workers}"] = partial(setup.encode, texts, n)
        ways[f"ours, threads, {workers}"] = partial(ours, n)
        limits[f"ours, threads, {workers}"] = f"limit, {workers}"
    seconds = measured(ways, setup.rounds)
    print(f"sft: {len(chats):,} chats, {len(texts):,} messages, {sum(map(len, texts)) / 1e6:.1f} M characters")
    table(seconds, sum(map(len, setup.processor.encode(texts, return_type="numpy"))), limits)
    return [
        at_least(f"sft build / {limit}", ratio(seconds, ours, limit), 0.85)
        for ours, limit in limits.items()
        if "threads" in ours
    ]


def peak_of_build(data: str, model: str, times: int, path: Path) -> tuple[float, float, int]:
    """Build from a stream, in a process of its own; returns its peak MiB, its seconds and its tokens."""
    logging.getLogger("niels_gpt").setLevel(logging.ERROR)
    tokenizer = SentencePieceTokenizer(model)
    with Measurement() as run:
        build(stream(data, times), path, tokenizer)
    totals = read_meta(str(path / "meta.json"))["totals"]
    return (run.peak_bytes or 0) / 2**20, run.seconds, sum(totals.values())


def bench_memory(setup: Setup) -> list[Target]:
    """Compare the peaks of 1, 4 and 16 times the corpus."""
    once, path = (1 if setup.quick else times_for(setup.data)), setup.folder / "memory"
    peaks = {}
    print(f"memory: 2 threads {'MiB':>10} {'tokens':>13} {'Mtok/s':>7}")
    for times in (1, 16) if setup.quick else (1, 4, 16):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            job = pool.submit(peak_of_build, setup.data, setup.model, times * once, fresh(path))
            peaks[times], seconds, tokens = job.result()
        print(f"  {times:>2} times over   {peaks[times]:10.1f} {tokens:13,} {tokens / seconds / 1e6:7.2f}", flush=True)
    fresh(path)
    print(f"  16 times over / once: {peaks[16] / peaks[1]:.3f}")
    grown = peaks[16] - peaks[1]
    return [("peak memory, 16 times over - once", f"at most {FLAT_MIB} MiB", f"{grown:+.1f} MiB", grown <= FLAT_MIB)]


def bare_files(folder: Path, count: int, num_bytes: int) -> None:
    """Write so many files as a builder must: write, fsync, rename, fsync of the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    directory = os.open(folder, os.O_RDONLY)
    for number in range(count):
        with open(folder / "open", "wb") as file:
            file.write(bytes(num_bytes // count))
            file.flush()
            os.fsync(file.fileno())
        os.rename(folder / "open", folder / str(number))
        os.fsync(directory)
    os.close(directory)


def bench_shards(setup: Setup) -> list[Target]:
    """Compare builds of few and of many shards, and opening the many with a bare loop."""
    counts = (1, 10, 100) if setup.quick else (1, 10, 100, 1_000)
    ways: Ways = {}
    for count in counts:
        ways[f"ours, {count} shards"] = partial(setup.build, shards=count)
        ways[f"bare files, {count}"] = partial(bare_files, setup.folder / "bare", count, 2 * setup.tokens)
    seconds = measured(ways, min(setup.rounds, 3))
    print("shards: 1 thread; the limit is the build of one shard")
    table(seconds, setup.tokens, {name: "ours, 1 shards" for name in ways if name.startswith("ours")})
    train = setup.build(shards=counts[-1]) / "train"
    files = sorted(train.glob("*.bin"))
    opening: Ways = {
        "ours": lambda: PretrainTokenStreamDataset(train, T=8, device="cpu"),
        "np.memmap": lambda: [np.memmap(path, dtype=np.uint16, mode="r") for path in files],
    }
    seconds = measured(opening, 10 * setup.rounds)
    milliseconds = ", ".join(f"{name} {statistics.median(seconds[name]) * 1e3:.1f} ms" for name in opening)
    print(f"  opening {len(files):,} shards: {milliseconds}")
    times = ratio(seconds, "np.memmap", "ours")
    return [(f"opening {len(files):,} shards / np.memmap", "at most 3.00", f"{times:.2f}", times <= 3)]


def hash_files(files: list[str]) -> None:
    """Hash files with Python's own hashlib."""
    for name in files:
        with open(name, "rb") as file:
            hashlib.file_digest(file, "sha256")


def bench_verify(setup: Setup) -> list[Target]:
    """Compare deep verification with sha256sum of all files of a cache: of many small shards, and of a large one."""
    targets = []
    for name, count, shard_bytes in (("1,000 shards of 120 kB", 1_000, 120_000), ("a shard of 128 MiB", 1, 2**27)):
        tokens, path = count * shard_bytes // 2 // (100 if setup.quick else 1), fresh(setup.folder / "verified")
        build(itertools.cycle(setup.texts), path, setup.tokenizer, tokens, 0, shard_bytes)
        files = [str(file) for file in path.resolve().rglob("*") if file.is_file()]
        damage = find_damage(path, deep=True)
        assert not damage, damage
        ways: Ways = {
            "verify --deep": partial(find_damage, path, deep=True),
            "sha256sum": partial(subprocess.run, ["sha256sum", *files], check=True, capture_output=True),
            "hashlib": partial(hash_files, files),
        }
        seconds = measured(ways, setup.rounds)
        total = sum(os.path.getsize(file) for file in files) / 1e6
        print(f"verify: {name}: {len(files)} files, {total:.1f} MB")
        for way in ways:
            middle = statistics.median(seconds[way])
            print(f"  {way:<20} {middle:8.3f} s {total / middle:8.0f} MB/s")
        print(f"  verify --deep / hashlib {ratio(seconds, 'verify --deep', 'hashlib'):.2f}")
        found = ratio(seconds, "verify --deep", "sha256sum")
        targets.append(at_least(f"verify --deep / sha256sum, {name}", found, 0.5))
    return targets


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
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    arguments = parser.parse_args()
    logging.getLogger("niels_gpt").setLevel(logging.ERROR)  # that the budgets are not met is meant
    warnings.simplefilter("ignore")  # a last shard may be too short for a window
    with tempfile.TemporaryDirectory() as folder:
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        setup = Setup(arguments, Path(folder))
        targets = [target for name in arguments.only for target in SECTIONS[name](setup)]
    print(f"\nload {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n{'target':<50} {'aim':<18} {'found':>10}")
    for name, aim, found, good in targets:
        verdict = "too little text to judge" if arguments.quick else "ok" if good else "NOT OK"
        print(f"{name:<50} {aim:<18} {found:>10}  {verdict}")


if __name__ == "__main__":
    main()
