"""Measure what caches of very many shards and documents cost to open, read, check and seal, without their tokens.

    python tools/simulate_scale.py                                        15,000 and 150,000 shards of 128 MiB
    python tools/simulate_scale.py --only open batches --shards 1000      some of it
    python tools/simulate_scale.py --json > figures.json

The caches are made as docs/formats.md says, in a temporary folder that is removed; what reads, checks and seals them is
the real code. Their shards are hard links of a few real files: 10^13 tokens take 2 GB of disk, and pass every check.
Two costs are left out: those of disks, for all that is read is in the page cache, and those of network file systems,
where each file that is looked at is a message or more.

Each row is measured in a new process: seconds, peak memory, and how much of that came on top of the imports. Where
shards are mapped, it is the memory at the end, without the pages of the files, which the kernel may take back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from scale_caches import make_cache, make_partitions

from niels_gpt.display.numbers import size_text
from niels_gpt.display.tables import table
from niels_gpt.recipes.records import Measurement
from niels_gpt.storage.meta_json import MAX_JSON_BYTES, MAX_JSON_VALUES

Found = dict[str, Any]
"""Numbers by name: what one measurement found."""
Work = Callable[[], Found]

B, T = 32, 1024
BATCHES = 300
SHARDS_OF_PARTITION = 15  # 10^12 tokens in 1,000 partitions


# --- what is measured -------------------------------------------------------------------------------------------------
# Each function prepares what is not measured, imports above all, and returns what is. A `seconds` that this returns
# takes the place of its time.


def meta_json(cache: Path) -> Work:
    from niels_gpt.cache.meta import reader_meta

    raw = (cache / "meta.json").read_bytes()
    values = sum(map(raw.count, (b",", b"[", b"{")))
    shares = {"of_limit": max(len(raw) / MAX_JSON_BYTES, values / MAX_JSON_VALUES)}

    def work() -> Found:
        reader_meta(cache.resolve(), "pretrain")
        return {"bytes": len(raw), "values": values, **shares}

    return work


def opened(cache: Path) -> Work:
    from niels_gpt.cache import PretrainTokenStreamDataset

    def work() -> Found:
        data = PretrainTokenStreamDataset(cache / "train", T=T, device="cpu")
        return {"windows": data.num_windows, **of_process()}

    return work


def batches(cache: Path, io: Any) -> Work:
    import torch

    from niels_gpt.cache import PretrainTokenStreamDataset

    data = PretrainTokenStreamDataset(cache / "train", T=T, device="cpu", io=io)
    generator = torch.Generator().manual_seed(0)

    def work() -> Found:
        seconds = []
        for _ in range(BATCHES):
            begin = time.perf_counter()
            data.get_batch(B=B, generator=generator)
            seconds.append(time.perf_counter() - begin)
        warm = statistics.median(seconds[BATCHES // 2 :])
        return {"seconds": seconds[0], "warm_milliseconds": 1000 * warm, **of_process()}

    return work


def every_shard(cache: Path) -> Work:
    """Read a window of each shard, as a long run does."""
    from niels_gpt.cache.pretrain_dataset import PretrainSplit

    split = PretrainSplit(cache / "train")
    order = np.random.default_rng(0).permutation(len(split.lengths))

    def work() -> Found:
        for first in range(0, len(order), B):
            shards = order[first : first + B]
            split.rows(shards, np.zeros(len(shards), dtype=np.int64), T)
        return of_process()

    return work


def stream(cache: Path) -> Work:
    from niels_gpt.sampling import EpochStream

    def work() -> Found:
        begin = time.perf_counter()
        made = EpochStream(cache / "train", T=T, global_batch_size=B, seed=0)
        rows = iter(made)
        next(rows)
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        for _ in range(BATCHES):
            next(rows)
        warm = (time.perf_counter() - begin) / BATCHES
        state_bytes = len(json.dumps(made.state_dict()))
        return {"seconds": first, "warm_milliseconds": 1000 * warm, "state_bytes": state_bytes, **of_process()}

    return work


def mixture(cache: Path) -> Work:
    from niels_gpt.sampling import EpochStream, MixtureStream

    def work() -> Found:
        begin = time.perf_counter()
        parts = [EpochStream(cache / "train", T=T, global_batch_size=B, seed=seed) for seed in range(2)]
        made = MixtureStream(parts, [3, 1], seed=0)
        next(iter(made))
        first = time.perf_counter() - begin
        return {"seconds": first, "state_bytes": len(json.dumps(made.state_dict())), **of_process()}

    return work


def documents_stream(cache: Path) -> Work:
    from niels_gpt.sampling import EpochStream

    def work() -> Found:
        next(iter(EpochStream(cache / "train", T=T, global_batch_size=B, seed=0, documents=True)))
        return of_process()

    return work


def verified(cache: Path) -> Work:
    from niels_gpt.kinds.verify import find_damage

    def work() -> Found:
        return {"damages": len(find_damage(cache, deep=False))}

    return work


def listed(cache: Path) -> Work:
    from niels_gpt.commands import report
    from niels_gpt.recipes.records import recorded_outcomes

    def work() -> Found:
        outcomes, damaged = recorded_outcomes(cache.parent.parent)
        return {"caches": len(report.listed(cache.parent.parent, outcomes, damaged))}

    return work


def stats(cache: Path) -> Work:
    from niels_gpt.kinds.look import stats as stats_of

    def work() -> Found:
        return {"rows": len(stats_of(cache))}

    return work


def collected(cache: Path) -> Work:
    from niels_gpt.recipes.gc import collect

    def work() -> Found:
        removed = list(collect(cache.parent.parent, dry_run=False))
        return {"removed": len(removed)}

    return work


def journal(folder: Path, checkpoints: int) -> Work:
    """Write a journal of so many checkpoints; reading it is what a build that resumes does first."""
    from niels_gpt.cache.shards import FILES
    from niels_gpt.engine.journal import Checkpoint, Journal

    identity = {"kind": "pretrain"}
    files = {name: (1 << 40, "0" * 64) for name in (*FILES, "texts.bin")}
    state = {"docs": {"train": 1 << 30, "val": 1 << 20}, "tokens": {"train": 1 << 40, "val": 1 << 30}}
    made = Journal(folder, identity)
    for number in range(checkpoints):
        made.append(Checkpoint(number, None, files, [], {**state, "utf8_bytes": state["tokens"]}))
    made.close()

    def work() -> Found:
        read = Journal(folder, identity)
        read.close()
        return {"bytes": read.path.stat().st_size}

    return work


def fingerprint(folder: Path, files: int, file_bytes: int) -> Work:
    """Write files of a source; their fingerprint is what every build and every partition takes first."""
    from niels_gpt.data.files.walk import files_fingerprint, walk_files

    content = os.urandom(file_bytes)
    for number in range(files):
        (folder / f"{number:06}.parquet").write_bytes(content)

    def work() -> Found:
        files_fingerprint(folder, walk_files(folder, suffixes=[".parquet"]))
        return {"bytes": files * file_bytes}

    return work


def sealed(path: Path, deep: bool) -> Work:
    """Seal partitions; their tokens have no tokenizer and no source, so the builder's seal is called, and no recipe."""
    from niels_gpt.cache.kind.tokens import PRETRAIN
    from niels_gpt.engine.meta import Source
    from niels_gpt.engine.units import plans_of, seal

    (plan,) = plans_of(path)

    def work() -> Found:
        meta = seal(plan, PRETRAIN.units, source=Source("simulated"), deep=deep)
        files = sum(map(len, meta["shards"].values()))
        return {
            "shards": files,
            "bytes": (path / "meta.json").stat().st_size,
            "duplicates": meta["duplicates"]["train"],
        }

    return work


def of_process() -> Found:
    """Return the memory that is no page of a file, the files open and the ranges of memory mapped in this process."""
    process = Path("/proc/self")
    return {
        "peak_bytes": memory("RssAnon"),
        "descriptors": len(os.listdir(process / "fd")),
        "maps": (process / "maps").read_text().count("\n"),
    }


OF_SHARDS: dict[str, tuple[Callable[..., Work], dict[str, Any]]] = {
    "meta": (meta_json, {}),
    "open": (opened, {}),
    "batches": (batches, {"io": "mmap"}),
    "batches by pread": (batches, {"io": "pread"}),
    "every shard": (every_shard, {}),
    "stream": (stream, {}),
    "mixture": (mixture, {}),
    "verify": (verified, {}),
    "list": (listed, {}),
    "stats": (stats, {}),
    "gc": (collected, {}),
}
OF_DOCUMENTS: dict[str, tuple[Callable[..., Work], dict[str, Any]]] = {
    "documents": (documents_stream, {}),
    "stats": (stats, {}),
    "verify": (verified, {}),
}
NAMES = (*OF_SHARDS, "documents", "seal", "journal", "fingerprint")


# --- running ----------------------------------------------------------------------------------------------------------


def child(prepare: Callable[..., Work], arguments: dict[str, Any]) -> Found:
    """Measure in this process."""
    work = prepare(**arguments)
    anonymous, resident = memory("RssAnon"), memory("VmRSS")
    with Measurement() as measured:
        found = work()
    found = {"seconds": measured.seconds, "peak_bytes": measured.peak_bytes, **found}
    before = anonymous if "maps" in found else resident
    return {**found, "added_bytes": max(0, found["peak_bytes"] - before)}


def memory(key: str) -> int:
    """Return a line of Linux's /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measured(what: str, of: str, prepare: Callable[..., Work], **arguments: Any) -> Found:
    """Measure in a new process, and print a line of progress. An error is what was found."""
    print(f"{what}, {of} ...", file=sys.stderr, flush=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return {"what": what, "of": of, **pool.apply(child, (prepare, arguments))}
        except Exception as error:  # where the design breaks is a result, too
            return {"what": what, "of": of, "error": f"{type(error).__name__}: {error}"}


@contextmanager
def folder_below(given: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="simulate-scale-") as name:
        yield Path(name)


def of_shards(given: argparse.Namespace, wanted: set[str]) -> Iterator[Found]:
    """Measure a cache of each number of shards."""
    chosen = {name: measure for name, measure in OF_SHARDS.items() if name in wanted}
    for shards in given.shards if chosen else ():
        of = f"{shards:,} shards, {shards * (given.shard_bytes // 2):.1e} tokens"
        with folder_below(given) as root:
            for version in range(3 if "gc" in chosen else 1):  # the oldest of three is removed
                sizes = {"shards": shards, "shard_bytes": given.shard_bytes, "documents": 10 * shards}
                begin = time.perf_counter()
                cache = make_cache(root, **sizes, version=version)
                print(f"made {of} in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
            for name, (prepare, arguments) in chosen.items():
                yield measured(name, of, prepare, cache=cache, **arguments)


def of_documents(given: argparse.Namespace, wanted: set[str]) -> Iterator[Found]:
    """Measure a cache of each number of documents, in ten shards."""
    for documents in given.documents if "documents" in wanted else ():
        with folder_below(given) as root:
            shard_bytes = max(given.shard_bytes, documents)  # of no document less than a few tokens
            cache = make_cache(root, shards=10, shard_bytes=shard_bytes // 2 * 2, documents=documents)
            for name, (prepare, arguments) in OF_DOCUMENTS.items():
                yield measured(name, f"{documents:,} documents", prepare, cache=cache, **arguments)


def of_partitions(given: argparse.Namespace, wanted: set[str]) -> Iterator[Found]:
    """Measure a seal by sizes and a deep one, of each number of partitions with each number of documents."""
    sizes = itertools.product(given.partitions, given.documents, (False, True))
    for partitions, documents, deep in sizes if "seal" in wanted else ():
        num_bytes = partitions * SHARDS_OF_PARTITION * given.seal_bytes
        of = f"{partitions:,} partitions, {documents:,} documents, {size_text(num_bytes)} of shards"
        with folder_below(given) as root:
            made = {"shards": SHARDS_OF_PARTITION, "shard_bytes": given.seal_bytes, "documents": documents}
            path = make_partitions(root, partitions=partitions, **made).path
            yield measured("seal, deep" if deep else "seal, by sizes", of, sealed, path=path, deep=deep)


def of_the_rest(given: argparse.Namespace, wanted: set[str]) -> Iterator[Found]:
    """Measure what has no cache."""
    if "journal" in wanted:
        with folder_below(given) as root:
            of = f"{given.checkpoints:,} checkpoints"
            yield measured("journal", of, journal, folder=root, checkpoints=given.checkpoints)
    if "fingerprint" in wanted:
        with folder_below(given) as root:
            of = f"{given.files:,} files of {size_text(given.file_bytes)}"
            sizes = {"files": given.files, "file_bytes": given.file_bytes}
            yield measured("fingerprint", of, fingerprint, folder=root, **sizes)


def row(found: Found) -> tuple[str, ...]:
    """Return a row of the table."""
    if "error" in found:
        return found["what"], found["of"], "FAILED", "", "", found["error"]
    known = ("what", "of", "seconds", "peak_bytes", "added_bytes")
    sizes = (size_text(found[key]) for key in known[3:])
    rest = (f"{key.replace('_', ' ')} {number_text(value)}" for key, value in found.items() if key not in known)
    return found["what"], found["of"], f"{found['seconds']:.4g}", *sizes, ", ".join(rest)


def number_text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[15_000, 150_000], metavar="N")
    parser.add_argument("--shard-bytes", type=int, default=1 << 27, metavar="N")
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 10_000_000], metavar="N")
    parser.add_argument("--partitions", type=int, nargs="+", default=[100, 1_000], metavar="N")
    parser.add_argument("--seal-bytes", type=int, default=1 << 17, metavar="N", help="of a shard that is sealed")
    parser.add_argument("--checkpoints", type=int, default=2_000, metavar="N", help="of the journal that is read")
    parser.add_argument("--files", type=int, default=15_000, metavar="N", help="of the source")
    parser.add_argument("--file-bytes", type=int, default=1 << 20, metavar="N", help="of each of them")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made; on the disk to be measured")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args()
    if min(given.shards) < 2 or min(given.documents) < 2:
        parser.error("a cache has two shards and two documents at least, one for each split")
    wanted = set(given.only)
    results = [*of_shards(given, wanted), *of_documents(given, wanted), *of_partitions(given, wanted)]
    results += of_the_rest(given, wanted)
    if given.json:
        print(json.dumps(results, indent=2))
    else:
        head = ("what", "of", "seconds", "peak", "on top", "")
        print(table([head, *map(row, results)]))


if __name__ == "__main__":
    main()
