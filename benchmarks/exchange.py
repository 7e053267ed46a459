"""What exports, imports and transfers cost beside plain copies of the same bytes: as ratios within one run.

Run: python benchmarks/exchange.py [--shards 1000] [--rounds 2] [--models FOLDER] [--folder FOLDER] [--quick]

    exports by link   megatron, datatrove, olmo, beside `cp -al` (hard links) and `cp -a` of the same cache
    rewritten         modded-nanogpt, litdata, hf, beside `cp -a`
    import by link    of the Megatron folder, beside the sha256 of the same bytes with hashlib, in seconds of CPU: one
                      import of few bytes and one of all, so that loading the tokenizer and its trial are seen apart
    pull              of file://, beside `cp -a`; of S3 on loopback (moto) some shards, beside `cp -a` of them
    disk              what the exports by link take more of it, by du

A cache of shards of 1 MiB (--shard-mib) with documents of 1,024 tokens; each shard is a file by itself, and repeats the
sample's text. Exports and pulls wait for the disk, so what they are compared with does too: `sync -f` follows each cp.
All ways are in each round, in
another order each time; a ratio is the median of the rounds' ratios. What was written is removed after each way, and
that is not timed.
--models: a folder with gpt2_tokenizer, or NIELS_GPT_TEST_MODELS; without it a tokenizer is trained.
"""

import argparse
import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from measuring import Seconds, Ways, measured, ratio

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import scale_caches

from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.exchange.exporting import export_cache
from niels_gpt.exchange.formats import FORMATS
from niels_gpt.exchange.output import MANIFEST_NAME
from niels_gpt.settings import usable_cores
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer

DOCUMENT_TOKENS = 1_024
LINKED = ("megatron", "datatrove", "olmo")
REWRITTEN = tuple(name for name in ("modded-nanogpt", "litdata", "hf") if name in FORMATS)
S3_SHARDS = 64  # of 1 MiB


def tokenizer_of(models: str | None, folder: Path) -> Path:
    """Return GPT-2's tokenizer, or a trained one."""
    if models:
        return Path(models) / "gpt2_tokenizer"
    corpus = (sample.text for sample in iter_fineweb_edu(source_root="sample"))
    (folder / "spm.model").write_bytes(train_tokenizer(corpus, vocab_size=8000, max_bytes=5_000_000).model)
    return folder / "spm.model"


def made(root: Path, shards: int, shard_bytes: int, ids: list[int]) -> Path:
    """Make a cache that repeats the ids, and return its folder."""
    documents = shards * shard_bytes // 2 // DOCUMENT_TOKENS
    return scale_caches.make_cache(root, shards=shards, shard_bytes=shard_bytes, documents=documents, ids=ids)


def copy(source: Path, target: Path, flags: str) -> None:
    """Copy with cp, and wait for the disk."""
    command = f"cp {flags} {shlex.quote(str(source))} {shlex.quote(str(target))} && sync -f {shlex.quote(str(target))}"
    subprocess.run(["sh", "-c", command], check=True)


def hash_all(folder: Path) -> None:
    """Compute the sha256 of each token file, on all cores."""

    def digest(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(usable_cores()) as executor:
        list(executor.map(digest, sorted(folder.rglob("*.bin"))))


def bytes_used(*folders: Path) -> int:
    """Return what folders take of the disk; a file with several names once."""
    run = subprocess.run(["du", "-c", "-s", "-B1", *map(str, folders)], capture_output=True, text=True, check=True)
    return int(run.stdout.splitlines()[-1].split()[0])


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's S3 on loopback with a bucket; yields its name. The environment names the server."""
    import boto3

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, quiet = f"http://127.0.0.1:{port}", subprocess.DEVNULL
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_S3": url}
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=quiet, stderr=quiet)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        boto3.client("s3").create_bucket(Bucket="bench")
        yield "bench"
    finally:
        server.terminate()
        server.wait()


class Bench:
    """A cache, and a folder for what is written."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.folder, self.rounds, self.out = folder, int(arguments.rounds), folder / "out"
        self.tokenizer = tokenizer_of(arguments.models, folder)
        opened = load_tokenizer(self.tokenizer)
        scale_caches.VOCAB = opened.vocab_size
        scale_caches.MAX_LINKS = 1  # each shard a file of its own
        ids = opened.encode("\n".join(sample.text for sample in iter_fineweb_edu(source_root="sample")))
        self.cache = made(folder / "cache", arguments.shards, arguments.shard_mib << 20, ids)
        self.version, self.small = self.cache.resolve(), made(folder / "small", S3_SHARDS, 1 << 20, ids).resolve()
        self.clear()

    def clear(self) -> None:
        """Remove what was written, and let the disk finish."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        subprocess.run(["sync", "-f", str(self.out)], check=True)

    def timed(self, ways: Ways, clock: Callable[[], float] = time.perf_counter) -> Seconds:
        """Time ways, and print their seconds."""
        seconds = measured(ways, self.rounds, self.clear, clock)
        for name, times in seconds.items():
            rounds = ", ".join(f"{each:.2f}" for each in times)
            print(f"  {name:<34} {statistics.median(times):7.2f} s  ({rounds})", flush=True)
        return seconds

    def exports(self) -> None:
        """Exports beside cp."""
        ways: Ways = {"cp -al": partial(copy, self.version, self.out / "a", "-al")}
        ways["cp -a"] = partial(copy, self.version, self.out / "a", "-a")
        for name in (*LINKED, *REWRITTEN):
            ways[f"export {name}"] = partial(export_cache, self.cache, name, self.out / "a")
        seconds = self.timed(ways)
        for name in LINKED:
            links, whole = (1 / ratio(seconds, f"export {name}", way) for way in ("cp -al", "cp -a"))
            print(f"  {name}: {links:.2f} times the seconds of cp -al, {whole:.3f} of those of cp -a")
        for name in REWRITTEN:
            print(f"  {name}: {ratio(seconds, f'export {name}', 'cp -a'):.3f} of the speed of cp -a")

    def disk(self) -> None:
        """What exports by link take of the disk."""
        for name in LINKED:
            before, exported = bytes_used(self.version), export_cache(self.cache, name, self.out / name)
            more = bytes_used(self.version, self.out / name) / before - 1
            beside = exported.num_bytes / exported.linked_bytes - 1
            print(f"  {name}: {more:.2%} more of the disk; {beside:.2%} are bytes, the rest fills up blocks")

    def imports(self) -> None:
        """An import by link beside its sha256."""
        from niels_gpt.recipes.exchange import imports

        sources = {"of few bytes": self.folder / "few", "of all": self.folder / "megatron"}
        for name, cache in zip(sources, (self.small, self.cache), strict=True):
            export_cache(cache, "megatron", sources[name])
            (sources[name] / MANIFEST_NAME).unlink()  # it says that the cache has no tokenizer

        def run(source: Path) -> Any:
            to = {"format": "megatron", "cache_dir": self.out / "cache", "tokenizer": str(self.tokenizer)}
            return imports.import_cache(source, "linked", document_end="none", utf8_bytes=False, **to)

        ways: Ways = {}
        for name, source in sources.items():
            ways |= {f"import {name}": partial(run, source), f"sha256 {name}": partial(hash_all, source)}
        seconds = self.timed(ways, time.process_time)
        print(f"  import: {ratio(seconds, 'import of all', 'sha256 of all'):.3f} of the speed of sha256")
        whole, few = (
            [seconds[f"{what} {name}"] for what in ("import", "sha256")] for name in ("of all", "of few bytes")
        )
        more = {
            what: [a - b for a, b in zip(one, other, strict=True)]
            for what, one, other in zip(("import", "sha256"), whole, few, strict=True)
        }
        print(f"  import: {ratio(more, 'import', 'sha256'):.3f} of it for the bytes that the larger one has more")

    def pulls(self) -> None:
        """Pulls beside cp."""
        from niels_gpt.exchange.transfer.fetch import pull
        from niels_gpt.exchange.transfer.push import push

        def fetch(url: str) -> Any:
            return pull(url, self.out / "pretrain" / "pulled")

        with s3_server() as bucket:
            push(self.small, f"s3://{bucket}/small")
            ways: Ways = {
                "cp -a": partial(copy, self.version, self.out / "a", "-a"),
                "pull file://": partial(fetch, self.version.as_uri()),
                f"cp -a, {S3_SHARDS} shards": partial(copy, self.small, self.out / "a", "-a"),
                f"pull s3://, {S3_SHARDS} shards": partial(fetch, f"s3://{bucket}/small"),
            }
            seconds = self.timed(ways)
        names = list(ways)
        print(f"  pull: {ratio(seconds, names[1], names[0]):.3f} of the speed of cp -a from a folder")
        print(f"  pull: {ratio(seconds, names[3], names[2]):.3f} of it from S3 on loopback")


def main() -> None:
    """Make the cache and run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=os.environ.get("NIELS_GPT_TEST_MODELS"), help="folder of tokenizers")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--shards", type=int, default=1_000)
    parser.add_argument("--shard-mib", type=int, default=1, help="MiB of a shard")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=("exports", "disk", "imports", "pulls"), help="some of the parts")
    parser.add_argument("--quick", action="store_true", help="one round of few shards: does it run at all?")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shards, arguments.rounds = 50, 1
    logging.getLogger("niels_gpt").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        bench = Bench(arguments, Path(name))
        size, load = f"{arguments.shards} shards of {arguments.shard_mib} MiB", os.getloadavg()[0]
        print(f"{size}; load {load:.1f} on {os.cpu_count()} cores", flush=True)
        for part in arguments.only or ("exports", "disk", "imports", "pulls"):
            print(part)
            getattr(bench, part)()
            bench.clear()


if __name__ == "__main__":
    main()
