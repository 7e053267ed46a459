"""How fast EAGLE-3 caches are read and written: against a plain copy of the same bytes, and against nemo-automodel.

Run: python benchmarks/eagle3.py [--rounds 9] [--samples 208] [--shard-size 32] [--threads 1]
         [--only SECTION ...] [--folder DIR] [--profile] [--quick]

All but the last four are in one run, on one cache of version 1: S=512, 3H=768, D=2048, bf16, 2.9 MB a row, 600 MB by
default, read from the page cache. The ways of a section take turns, in another order in each round; a ratio is the
median of the rounds' ratios, and what is printed of time is a median too. One round before them is not counted.

    views    a row, nothing of it touched: microseconds, in sequence and at random
    cloned   a row, every byte copied to new memory; the limit clones the same slices of one torch tensor over the
             mapped file. Once with everything mapped already, and once reopened: a first epoch, its page faults and
             all. Beside it: np.copyto of the same bytes into buffers that exist, and os.preadv into them
    batches  the dataloader, 8 rows a batch, in this process, shuffled; the limit stacks the same slices
    write    a new shard, of 93 MB by default: write_shard, and the producer's ShardWriter, both with a sha256 of each
             row, fsync and a receipt; the limit is one file of the same bytes, in pieces of 8 MiB, synced and renamed.
             The checksums take as long as the file, on other cores: on a machine that is busy they wait for one
    native   the native form, H=4,096: batches of 8 samples without distributions; the limit copies the same bytes to
             new memory. In CPU time: a machine that is busy changes it less
    probs    the same with distributions, made by TargetHead on the CPU, beside version 1's read from a cold disk
    bytes    bytes a token of both forms for real chats: of NIELS_GPT_TEST_DATA, by a tokenizer of NIELS_GPT_TEST_MODELS
    precompute   whole runs of each form, in CPU time, beside bare forward passes of the same padded batches

The peer is nemo-automodel 0.5.0 where NIELS_GPT_PEERS has it (tests/eagle3/test_eagle3_peer.py), in this process, too.
It does not sync what it writes. --profile prints, after each section, where the time of ours goes.
"""

import argparse
import cProfile
import hashlib
import os
import pstats
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import eagle3_native
import eagle3_precompute
import numpy as np
import torch
from measuring import Seconds, Ways, measured, ratio
from torch import Tensor

from niels_gpt.eagle3 import cache
from niels_gpt.eagle3.format.layout import Layout, header_bytes, row_bytes_of
from niels_gpt.eagle3.format.shard_writer import ShardWriter

BATCH = 8
LAYOUT = Layout(seq_length=512, aux_hidden_dim=768, draft_vocab_size=2048, topk=0, dtype="bf16")
PIECE = 2**23


class Setup:
    """A cache with `samples` rows in a folder, and the peer if it is here."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.rounds = 1 if arguments.quick else int(arguments.rounds)
        self.shard_size = int(arguments.shard_size)
        self.samples = 2 * self.shard_size if arguments.quick else int(arguments.samples)
        self.profile, self.folder, self.cache = bool(arguments.profile), folder, str(folder / "cache")
        self.shard = random_rows(self.shard_size)
        self.peer = the_peer()
        cache.write_manifest(self.cache, manifest(self.samples, self.shard_size))
        for index, begin in enumerate(range(0, self.samples, self.shard_size)):
            rows = min(self.shard_size, self.samples - begin)
            cache.write_shard(self.cache, index, {name: tensor[:rows] for name, tensor in self.shard.items()})
        self.sequence = list(range(self.samples))
        self.shuffled = random.Random(0).sample(self.sequence, self.samples)
        self.orders = {"in sequence": self.sequence, "at random": self.shuffled}

    def libraries(self) -> dict[str, Any]:
        """Ours, and the peer's where it is here: the two have the same names."""
        return {"ours": cache} | ({"peer": self.peer} if self.peer else {})


def the_peer() -> ModuleType | None:
    """Import the peer's module, or say that it is left out."""
    folder = Path(os.environ.get("NIELS_GPT_PEERS", "")) / "0.5.0"
    if "NIELS_GPT_PEERS" not in os.environ:
        print("the peer is left out: NIELS_GPT_PEERS is not set")
        return None
    sys.path.insert(0, str(folder))
    import nemo_automodel.components.datasets.llm.eagle3_cache as module

    return module


def random_rows(rows: int) -> dict[str, Tensor]:
    """Return a shard's tensors, no page of which is zeros."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, (dtype, shape) in LAYOUT.fields.items():
        if dtype.is_floating_point:
            made[name] = torch.rand(rows, *shape, generator=generator).to(dtype)
        else:
            made[name] = torch.randint(2, (rows, *shape), generator=generator).to(dtype)
    return made


def manifest(samples: int, shard_size: int) -> dict[str, Any]:
    """Return the manifest of version 1 of so many samples."""
    return {
        "target_model": "none",
        "target_vocab_size": 32_000,
        "draft_vocab_size": LAYOUT.draft_vocab_size,
        "seq_length": LAYOUT.seq_length,
        "dtype": LAYOUT.dtype,
        "num_samples": samples,
        "shard_size": shard_size,
        "aux_hidden_dim": LAYOUT.aux_hidden_dim,
        "aux_layer_ids": [1, 3, 4],
        "selected_token_ids": list(range(LAYOUT.draft_vocab_size)),
    }


class Plain:
    """The same rows by plain means: each shard's file mapped once, each field of it one tensor [rows, ...]."""

    def __init__(self, setup: Setup) -> None:
        self.tables: list[dict[str, Tensor]] = []
        self.files: list[tuple[int, dict[str, int]]] = []
        self._shard_size = setup.shard_size
        for begin in range(0, setup.samples, setup.shard_size):
            path = cache.shard_path(setup.cache, begin // setup.shard_size)
            rows = min(setup.shard_size, setup.samples - begin)
            place, tables, begins = len(header_bytes(LAYOUT.fields, rows)), {}, {}
            whole = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)
            for name, field in LAYOUT.fields.items():
                size = rows * row_bytes_of(field)
                tables[name] = whole[place : place + size].view(field[0]).view(rows, *field[1])
                begins[name] = place
                place += size
            self.tables.append(tables)
            self.files.append((os.open(path, os.O_RDONLY), begins))
        self.buffers = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in LAYOUT.fields.items()}
        self._bytes = {name: buffer.view(torch.uint8).numpy().reshape(-1) for name, buffer in self.buffers.items()}
        self._maps = [
            {name: table.view(rows_of(table), -1).view(torch.uint8).numpy() for name, table in tables.items()}
            for tables in self.tables
        ]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tables, row = self.tables[index // self._shard_size], index % self._shard_size
        return {name: table[row] for name, table in tables.items()}

    def copy(self, index: int) -> None:
        """Copy a row into buffers that exist."""
        for name, table in self._maps[index // self._shard_size].items():
            np.copyto(self._bytes[name], table[index % self._shard_size])

    def preadv(self, index: int) -> None:
        """Read a row into buffers that exist, by the system's call."""
        handle, begins = self.files[index // self._shard_size]
        for name, buffer in self._bytes.items():
            read = os.preadv(handle, [buffer], begins[name] + index % self._shard_size * buffer.nbytes)
            assert read == buffer.nbytes, f"{read} bytes of {buffer.nbytes}"

    def close(self) -> None:
        """Close the files; the maps go with the tensors."""
        for handle, _ in self.files:
            os.close(handle)


def rows_of(table: Tensor) -> int:
    """Return the number of rows of a table."""
    return table.shape[0]


def table(title: str, seconds: Seconds, rows: int, limit: str) -> None:
    """Print a line for each way: time a row, bytes a second, share of the limit's speed, and how that spreads."""
    print(f"{title}\n  {'way':<34} {'us/row':>9} {'GB/s':>7}  of {limit}")
    for name, rounds in seconds.items():
        middle = statistics.median(rounds) / rows
        shares = [b / a for a, b in zip(rounds, seconds[limit], strict=True)]
        spread = f"{statistics.median(shares):5.2f}  ({min(shares):.2f} to {max(shares):.2f})"
        print(f"  {name:<34} {middle * 1e6:9.1f} {LAYOUT.row_bytes / middle / 1e9:7.2f}  {spread}", flush=True)


def target(what: str, found: float, least: float) -> None:
    """Print what is aimed at and what was found."""
    print(f"  {'met ' if found >= least else 'MISSED'} {what}: {found:.2f}, aim {least}")


def profiled(setup: Setup, call: Callable[[], object]) -> None:
    """Print where the time of a call goes, with --profile."""
    if setup.profile:
        profiler = cProfile.Profile()
        profiler.runcall(call)
        pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(14)


def read(rows: Any, order: list[int]) -> None:
    """Take rows, and nothing else."""
    for index in order:
        rows[index]


def clone(rows: Any, order: list[int]) -> None:
    """Take rows and copy each of their tensors to new memory."""
    for index in order:
        for tensor in rows[index].values():
            tensor.clone()


def bench_views(setup: Setup) -> None:
    """Compare rows as views, all shards open."""
    for title, order in setup.orders.items():
        readers = {name: library.CachedEagle3Dataset(setup.cache) for name, library in setup.libraries().items()}
        order = order * 5
        ways: Ways = {name: partial(read, reader, order) for name, reader in readers.items()}
        plain = Plain(setup)
        seconds = measured({**ways, "slices of a mapped tensor": partial(read, plain, order)}, setup.rounds)
        plain.close()
        table(f"views, {title}", seconds, len(order), "slices of a mapped tensor")
        if "peer" in seconds:
            target("the peer's time a row / ours", ratio(seconds, "ours", "peer"), 2.0)
        profiled(setup, ways["ours"])


def bench_cloned(setup: Setup) -> None:
    """Compare rows copied to new memory, all shards mapped, and reopened."""
    limit = "clones of slices"

    def reopened(make: Callable[[], Any], order: list[int]) -> None:
        clone(make(), order)

    for title, order in setup.orders.items():
        plain, ways = Plain(setup), Ways()
        for name, library in setup.libraries().items():
            ways[name] = partial(clone, library.CachedEagle3Dataset(setup.cache), order)
        ways[limit] = partial(clone, plain, order)
        ways["np.copyto into buffers"] = lambda order=order, plain=plain: [plain.copy(row) for row in order]
        ways["os.preadv into buffers"] = lambda order=order, plain=plain: [plain.preadv(row) for row in order]
        seconds = measured(ways, setup.rounds)
        plain.close()
        table(f"cloned, {title}, all mapped", seconds, len(order), limit)
        target("ours / the copy", ratio(seconds, "ours", limit), 0.9)
        profiled(setup, ways["ours"])
        ways = {
            name: partial(reopened, partial(library.CachedEagle3Dataset, setup.cache), order)
            for name, library in setup.libraries().items()
        }

        def plain_anew(order: list[int] = order) -> None:
            plain = Plain(setup)
            clone(plain, order)
            plain.close()

        seconds = measured({**ways, limit: plain_anew}, setup.rounds)
        table(f"cloned, {title}, reopened", seconds, len(order), limit)
        target("ours / the copy", ratio(seconds, "ours", limit), 0.9)
        profiled(setup, ways["ours"])


def bench_batches(setup: Setup) -> None:
    """Compare the dataloaders, in this process."""
    limit, plain, ways = "stacked slices", Plain(setup), Ways()

    def drain(loader: Any) -> None:
        for _ in loader:
            pass

    def stack() -> None:
        batch = None  # the last one lives until the next is there, as in a loop over a loader
        for begin in range(0, setup.samples, BATCH):
            found = [plain[row] for row in setup.shuffled[begin : begin + BATCH]]
            batch = {name: torch.stack([row[name] for row in found]) for name in LAYOUT.fields}
        del batch

    for name, library in setup.libraries().items():
        loader = library.build_cached_eagle3_dataloader(cache_dir=setup.cache, batch_size=BATCH, shuffle=True)
        ways[name] = partial(drain, loader)
    seconds = measured({**ways, limit: stack}, setup.rounds)
    plain.close()
    table(f"batches of {BATCH}, shuffled", seconds, setup.samples, limit)
    profiled(setup, ways["ours"])


def bench_write(setup: Setup) -> None:
    """Compare writers of one shard with one plain file of the same bytes; each writes a new file every time."""
    limit, folder = "plain file, synced", setup.folder / "written"
    content = memoryview(Path(cache.shard_path(setup.cache, 0)).read_bytes())
    rows = min(setup.shard_size, setup.samples)

    def plain(sync: bool) -> None:
        folder.mkdir()
        with open(folder / "part", "wb", buffering=0) as file:
            for begin in range(0, len(content), PIECE):
                file.write(content[begin : begin + PIECE])
            if sync:
                os.fsync(file.fileno())
        os.replace(folder / "part", folder / "whole")

    def by_batches() -> None:
        writer = ShardWriter(folder, 0, LAYOUT.fields, rows)
        for begin in range(0, rows, BATCH):
            part = {name: tensor[begin : begin + BATCH] for name, tensor in setup.shard.items()}
            writer.write(range(begin, begin + BATCH), [LAYOUT.seq_length] * BATCH, part)
        writer.commit()

    ways: Ways = {"write_shard": partial(cache.write_shard, str(folder), 0, setup.shard)}
    ways[f"ShardWriter, {BATCH} rows at a time"] = by_batches
    ways |= {limit: partial(plain, True), "plain file, not synced": partial(plain, False)}
    ways["sha256 alone, one thread"] = lambda: hashlib.sha256(content).digest()
    if setup.peer:
        ways["peer's write_shard, not synced"] = partial(setup.peer.write_shard, str(folder), 0, setup.shard)
    seconds = measured(ways, setup.rounds, after=partial(shutil.rmtree, folder, ignore_errors=True))
    table(f"write a shard of {len(content) / 1e6:.0f} MB", seconds, rows, limit)
    for name in list(ways)[:2]:
        target(f"{name} / the plain file", ratio(seconds, name, limit), 0.8)
        profiled(setup, ways[name])
        shutil.rmtree(folder, ignore_errors=True)


OF_THEIR_OWN: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    **eagle3_native.SECTIONS,
    **eagle3_precompute.SECTIONS,
}
"""Sections that make their own caches."""
SECTIONS = {"views": bench_views, "cloned": bench_cloned, "batches": bench_batches, "write": bench_write}


def main() -> None:
    """Read the arguments, make the cache, run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each section (9)")
    parser.add_argument("--samples", type=int, default=208, help="rows of the cache, 2.9 MB each (208)")
    parser.add_argument("--shard-size", type=int, default=32, help="rows of a shard (32)")
    parser.add_argument("--threads", type=int, default=1, help="torch's, as a loader's worker has (1)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*SECTIONS, *OF_THEIR_OWN],
        default=list(SECTIONS),
        help="some sections only (views to write)",
    )
    parser.add_argument("--folder", help="where the cache is made (a temporary folder)")
    parser.add_argument("--profile", action="store_true", help="print where the time of ours goes")
    parser.add_argument("--quick", action="store_true", help="one round of a small cache: does it run at all?")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("python", " ".join(sys.argv), f"| torch {torch.__version__}, {torch.get_num_threads()} threads,", end=" ")
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name in [name for name in arguments.only if name in OF_THEIR_OWN]:
            OF_THEIR_OWN[name](arguments, Path(folder))
        if names := [name for name in arguments.only if name in SECTIONS]:
            setup = Setup(arguments, Path(folder))
            print(f"{setup.samples} rows of {LAYOUT.row_bytes:,} bytes in shards of {setup.shard_size}")
            for name in names:
                SECTIONS[name](setup)


if __name__ == "__main__":
    main()
