"""How fast a training reader starts and reads from a bucket: this project's, litdata's and `datasets`' streaming.

Run: python benchmarks/buckets.py [--rounds 3] [--peers DIR] [--only READER ...] [--shards 20] [--delay-ms 30]
    [--mb-per-s N] [--folder FOLDER] [--quick]

One cache of shards of 8 MiB, ids of 16 bits, its litdata export, and the same rows of T + 1 ids as parquet, in a bucket
of moto's S3 server on loopback, behind a proxy that waits before each request. Server and proxy share this machine's
cores with the reader, so what counts are ratios within one run. Each reader reads one epoch as batches of 16 x 1,024
tokens, int64, in a process of its own, with an empty folder; readers take turns in each round. Figures are medians.

    plain             requests of 8 MiB by boto3, eight at once, of the same token files: the limit of the server
    straight          EpochStream of the URL, with a folder that holds all
    straight, again   the same with the folder that the first epoch filled
    straight, shards  order="shards" with a folder of a tenth, at least 16 MiB, and one stretch open at a time
    stage             `stage`, then EpochStream of the copy
    litdata           StreamingDataset, TokensLoader, shuffle=True, drop_last=True, in StreamingDataLoader; by boto3,
                      because its obstore refuses plain http
    datasets          load_dataset("parquet", streaming=True), shuffled in a buffer of 1,000 rows, in batches of numpy

    first     seconds until the first batch, from the call that opens, without imports; of `stage` with the copying
    epoch     seconds until the last batch, from the same call; tokens/s of that, and as a share of the plain requests'
    bytes     that the server sent, as a multiple of the token files; requests
    memory    peak of the process above what it had after its imports; of `stage` with pages of the copy, which it maps

Disk: 3 times the cache in FOLDER (TMPDIR). --quick: three shards, one round. Peers that are not installed are left out;
they are looked for in DIR, in the process that needs them: pip install --target DIR --no-deps litdata==0.2.76
lightning-utilities==0.15.3 boto3==1.44.5 botocore==1.44.5 s3transfer==0.19.3 jmespath==1.1.0
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exchange import made, tokenizer_of

from niels_gpt.cache.meta import reader_meta
from niels_gpt.exchange.exporting import export_cache
from niels_gpt.exchange.transfer.fetch import stage
from niels_gpt.exchange.transfer.push import push
from niels_gpt.sampling import EpochStream
from niels_gpt.storage.meta_json import resolved
from niels_gpt.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.s3_server import S3Server

B, T, SHARD_BYTES, PART = 16, 1_024, 8 << 20, 8 << 20
CACHE, LITDATA, PARQUET = "s3://team/cache", "s3://team/litdata/train", "s3://team/parquet"
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]


def pairs(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and y of rows [B, T + 1], each in fresh memory."""
    ids = np.asarray(rows)
    return torch.from_numpy(ids[:, :-1].astype(np.int64)), torch.from_numpy(ids[:, 1:].astype(np.int64))


def straight(folder: Path, **how: Any) -> Callable[[], Pairs]:
    """Return what opens the cache at its URL."""
    size = (
        max(int(os.environ["BENCH_BYTES"]) // 10, 16 << 20) if how else 4 * int(os.environ["BENCH_BYTES"]) + (1 << 30)
    )

    def read() -> Pairs:
        options: dict[str, Any] = {"T": T, "global_batch_size": B, "seed": 1, "epochs": 1, "local": folder / "local"}
        for batch in EpochStream(f"{CACHE}/train", **options, max_bytes=size, **how):
            yield batch.x, batch.y

    return read


def staged(folder: Path) -> Callable[[], Pairs]:
    """Return what copies the cache and opens the copy."""

    def read() -> Pairs:
        stage(CACHE, folder / "staged")
        for batch in EpochStream(folder / "staged" / "train", T=T, global_batch_size=B, seed=1, epochs=1):
            yield batch.x, batch.y

    return read


def by_litdata(folder: Path) -> Callable[[], Pairs]:
    """Return what opens litdata's dataset."""
    sys.path.insert(0, os.environ["BENCH_PEERS"])
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming import downloader

    downloader._OBSTORE_AVAILABLE = False

    def read() -> Pairs:
        how = {"cache_dir": str(folder / "litdata"), "max_cache_size": "100GB", "shuffle": True, "drop_last": True}
        data = StreamingDataset(LITDATA, item_loader=TokensLoader(block_size=T + 1), **how)
        for rows in StreamingDataLoader(data, batch_size=B, num_workers=0, drop_last=True):
            yield pairs(rows)

    return read


def by_datasets(folder: Path) -> Callable[[], Pairs]:
    """Return what opens the parquet files."""
    os.environ["HF_HOME"] = str(folder / "hf")
    import datasets

    def read() -> Pairs:
        options = {"client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
        data = datasets.load_dataset(
            "parquet", data_files=f"{PARQUET}/*.parquet", split="train", streaming=True, storage_options=options
        )
        for rows in data.shuffle(seed=1, buffer_size=1_000).with_format("numpy").iter(B, drop_last_batch=True):
            yield pairs(np.stack(rows["ids"]))

    return read


def plain(_: Path) -> Callable[[], Pairs]:
    """Return what fetches the token files by plain requests, eight at once; a part stands for a batch."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(max_pool_connections=8))
    names = [entry["Key"] for entry in client.list_objects_v2(Bucket="team", Prefix="cache/train/")["Contents"]]

    def part(name: str) -> Any:
        return np.frombuffer(
            client.get_object(Bucket="team", Key=name, Range=f"bytes=0-{PART - 1}")["Body"].read(), "<u2"
        )

    def read() -> Pairs:
        with ThreadPoolExecutor(8) as pool:
            for ids in pool.map(part, (name for name in names if name.endswith(".bin"))):
                yield torch.from_numpy(ids), torch.from_numpy(ids)

    return read


READERS: dict[str, Callable[[Path], Callable[[], Pairs]]] = {
    "plain": plain,
    "straight": straight,
    "straight, again": straight,
    "straight, shards": lambda folder: straight(folder, order="shards", open_shards=1),
    "stage": staged,
    "litdata": by_litdata,
    "datasets": by_datasets,
}


def memory(key: str) -> int:
    """Return bytes of this process's memory by a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def read_one(name: str, folder: Path) -> None:
    """Read an epoch in this process and print what it took."""
    torch.set_num_threads(1)
    import s3fs  # noqa: F401  # `datasets` and this project import it when they open a URL

    read = READERS[name](folder)
    before, begin, first, tokens = memory("VmRSS"), time.perf_counter(), 0.0, 0
    for x, _ in read():
        first = first or time.perf_counter() - begin
        tokens += x.numel()
    all_s = time.perf_counter() - begin
    print(json.dumps({"first": first, "epoch": all_s, "tokens": tokens, "memory": memory("VmHWM") - before}))


def fill(cache: Path, work: Path) -> int:
    """Send the cache and the same tokens in the other formats. Returns the bytes of the token files."""
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    push(cache, CACHE)
    export_cache(cache, "litdata", work / "litdata")
    bucket, files = fsspec.filesystem("s3", skip_instance_cache=True), sorted((cache / "train").glob("*.bin"))
    bucket.put(str(work / "litdata" / "train") + "/", LITDATA.removeprefix("s3://") + "/", recursive=True)
    for file in files:
        ids = np.fromfile(file, dtype="<u2")
        rows = pa.FixedSizeListArray.from_arrays(pa.array(ids[: len(ids) // (T + 1) * (T + 1)]), T + 1).cast(
            pa.list_(pa.uint16())
        )
        pq.write_table(pa.table({"ids": rows}), work / "rows.parquet", row_group_size=1_000)
        bucket.put_file(str(work / "rows.parquet"), f"{PARQUET.removeprefix('s3://')}/{file.stem}.parquet")
    shutil.rmtree(work / "litdata")
    return sum(file.stat().st_size for file in files)


def run(name: str, folder: Path, server: S3Server) -> dict[str, float] | None:
    """Read in a process of its own. Returns what it printed, with what the server sent; None if it failed."""
    sent, requests = server.sent_bytes, server.requests
    command = [sys.executable, __file__, "--read", name, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found | {"bytes": server.sent_bytes - sent, "requests": server.requests - requests}


def show(results: dict[str, list[dict[str, float]]], num_bytes: int) -> None:
    """Print the medians of all rounds."""
    print(f"{'':18}{'first, s':>9}{'epoch, s':>9}{'Mtokens/s':>10}{'of plain':>9}{'bytes':>7}{'requests':>9}{'MiB':>5}")
    for name, rounds in results.items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        each_round = zip(rounds, results.get("plain", rounds), strict=True)
        share = statistics.median(a["tokens"] * b["epoch"] / a["epoch"] / b["tokens"] for a, b in each_round)
        speed = f"{middle['tokens'] / middle['epoch'] / 1e6:10.2f}{share if 'plain' in results else float('nan'):9.2f}"
        cost = f"{middle['bytes'] / num_bytes:7.3f}{middle['requests']:9,.0f}{middle['memory'] / 2**20:5.0f}"
        print(f"{name:18}{middle['first']:9.2f}{middle['epoch']:9.2f}{speed}{cost}", flush=True)


def bench(arguments: argparse.Namespace, work: Path) -> None:
    """Fill the bucket, and let the readers take turns."""
    tokenizer = load_tokenizer(str(tokenizer_of(os.environ.get("NIELS_GPT_TEST_MODELS"), work)))
    from niels_gpt.data.fineweb_edu import iter_fineweb_edu

    ids = [id for sample in iter_fineweb_edu(source_root="sample") for id in tokenizer.encode(sample.text)]
    cache = resolved(made(work / "made", arguments.shards, SHARD_BYTES, ids))
    assert reader_meta(cache) is not None
    with S3Server() as server:
        os.environ.update(server.environment())
        num_bytes = fill(cache, work)
        os.environ |= {"BENCH_BYTES": str(num_bytes), "BENCH_PEERS": str(arguments.peers or "")}
        server.delay_s, server.bytes_per_s = arguments.delay_ms / 1e3, arguments.mb_per_s and arguments.mb_per_s * 1e6
        line = f"{arguments.mb_per_s} MB/s" if arguments.mb_per_s else "no limit of the line"
        print(f"{num_bytes:,} bytes of tokens, {arguments.delay_ms} ms a request, {line}; server on the same cores")
        results: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.only}
        for _ in range(arguments.rounds):
            for name in list(results):
                if name != "straight, again":
                    shutil.rmtree(work / "read", ignore_errors=True)
                found = run(name, work / "read", server)
                if found is None:
                    del results[name]
                else:
                    results[name].append(found)
        show(results, num_bytes)


def main() -> None:
    """Run the readers, or be the process of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where litdata is installed")
    parser.add_argument("--only", nargs="+", choices=READERS, default=list(READERS), metavar="READER")
    parser.add_argument("--shards", type=int, default=20, help="of 8 MiB")
    parser.add_argument("--delay-ms", type=float, default=30.0, help="before each request")
    parser.add_argument("--mb-per-s", type=float, help="of all answers together")
    parser.add_argument("--folder", type=Path, help="for the cache and for what is fetched")
    parser.add_argument("--quick", action="store_true", help="three shards, one round")
    parser.add_argument("--read", choices=READERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read_one(arguments.read, arguments.folder)
        return
    if arguments.quick:
        arguments.shards, arguments.rounds = 3, 1
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        bench(arguments, Path(work))


if __name__ == "__main__":
    main()
