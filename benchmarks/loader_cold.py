"""Windows that are not in the page cache: mapped, mapped with MADV_RANDOM, and by pread, for loaders.py --cold."""

import functools
import gc
import mmap
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from unittest import mock

import torch
from measuring import Ways, measured, spread

from niels_gpt.cache import PretrainTokenStreamDataset

SHARD_BYTES = 2**27
ADVISED = "get_batch, mmap, MADV_RANDOM"  # as the product reads what is larger than half of the memory
WINDOWS = ((256, 1024), (2048, 1024), (16384, 512))  # T, and how many windows a round


class Disk:
    """Shards on a disk, and the ways to read windows of them."""

    def __init__(self, folder: Path, shards: int) -> None:
        self.folder, self.read, self.shape, self.seed = folder, dict[str, list[int]](), (0, 0), 0
        self.paths = [folder / f"shard_{shard:05d}.bin" for shard in range(shards)]
        for path in self.paths:
            path.write_bytes(os.urandom(SHARD_BYTES))
        self.drop()

    def drop(self) -> None:
        """Drop the shards from the page cache. What is mapped stays there: so nothing may be."""
        gc.collect()
        for path in self.paths:
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)

    def generator(self) -> torch.Generator:
        """Return a generator of this run of a way: what one has read helps no other, whatever stays in a cache."""
        return torch.Generator().manual_seed(self.seed)

    def bare(self, way: str) -> None:
        """Read windows at random starts, from files reopened."""
        count, T = self.shape
        handles = [os.open(path, os.O_RDONLY) for path in self.paths]
        maps = [] if way == "pread" else [mmap.mmap(handle, 0, access=mmap.ACCESS_READ) for handle in handles]
        for mapped in maps if way == "mmap, MADV_RANDOM" else []:
            mapped.madvise(mmap.MADV_RANDOM)
        row, last = bytearray(2 * T + 2), SHARD_BYTES // 2 - T
        for window in torch.randint(len(handles) * last, (count,), generator=self.generator()).tolist():
            shard, start = window // last, 2 * (window % last)
            if maps:
                row[:] = maps[shard][start : start + len(row)]
            else:
                os.preadv(handles[shard], [row], start)
        for opened in maps:
            opened.close()
        for handle in handles:
            os.close(handle)

    def ours(self, way: str) -> None:
        """Read as many windows by get_batch, from a dataset reopened."""
        count, T = self.shape
        data = PretrainTokenStreamDataset(self.folder, T=T, device="cpu", io=way.split(", ")[1])
        generator = self.generator()
        with mock.patch("niels_gpt.cache.mmap.memory_bytes", lambda: 1 if way == ADVISED else 2**60):
            for _ in range(count // 32):
                data.get_batch(B=32, generator=generator)

    def counted(self, way: str) -> None:
        """Read windows in that way, and note what the disk gave."""
        self.seed += 1
        before = disk_bytes()
        (self.ours if way.startswith("get_batch") else self.bare)(way)
        self.read.setdefault(way, []).append(disk_bytes() - before)


def disk_bytes() -> int:
    """Return how much this process has had read from disks."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def why_not(folder: Path, shards: int) -> str | None:
    """Return why nothing cold can be read in this folder; None if it can."""
    try:
        if (free := shutil.disk_usage(folder).free) < shards * SHARD_BYTES:
            return f"{folder}: {free:,} bytes are free, expected {shards * SHARD_BYTES:,}"
        with tempfile.TemporaryDirectory(dir=folder) as work:
            disk = Disk(Path(work), 1)
            before = disk_bytes()
            disk.paths[0].read_bytes()
            found = disk_bytes() - before
    except OSError as error:
        return f"{error}: expected a folder to write to"
    if found < SHARD_BYTES // 2:
        return f"{folder}: is on no disk: of {SHARD_BYTES:,} bytes not in the page cache, {found:,} came from one"
    return None


def bench_cold(folder: Path, rounds: int, shards: int) -> None:
    """Read windows that are not in the page cache."""
    disk, limit = Disk(folder, shards), "mmap, kernel's default"
    names = (limit, "mmap, MADV_RANDOM", "pread", "get_batch, mmap", ADVISED, "get_batch, pread")
    for T, count in WINDOWS:
        disk.shape, disk.read = (count, T), {}
        ways: Ways = {name: functools.partial(disk.counted, name) for name in names}
        seconds = measured(ways, rounds, after=disk.drop)
        print(f"\ncold: {count} windows of {T + 1} tokens, as a multiple of the speed of {limit}")
        for name, found in seconds.items():
            middle, read = statistics.median(found) / count, statistics.median(disk.read[name]) / count
            each = f"{middle * 1e6:8.1f} us and {read / 1024:7.1f} KiB read for {(2 * T + 2) / 1024:.1f} KiB"
            print(f"  {name:<30} {spread(seconds, name, limit)}  {each}", flush=True)
