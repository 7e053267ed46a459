"""Pretrain caches of very many shards and documents that take little disk: for simulate_scale.py.

They are as docs/formats.md says. Their shards are hard links of a few real files.
"""

from __future__ import annotations

import itertools
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache.formats import BLOCK_BYTES, npy_header
from niels_gpt.cache.shards import TEXTS_OF
from niels_gpt.engine.checkpoints import CHECKSUMS
from niels_gpt.engine.meta import Source, write_description
from niels_gpt.engine.units import PartitionPlan, fix_plan
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.versions import PLAN_KIND

MAX_LINKS = 30_000  # of one file; ext4 allows 65,000
VOCAB = 50_257
CHUNK = 1 << 20  # documents whose index is written at once
NAME = Path("pretrain", "simulated")


class LinkedShards:
    """Hard links of one content, which is written to the disk once for MAX_LINKS of them."""

    def __init__(self, folder: Path, num_bytes: int, seed: int, ids: Sequence[int] | None = None) -> None:
        """ids: repeated until the shard is full; None: random ones."""
        if ids is None:
            ids = np.random.default_rng(seed).integers(VOCAB, size=num_bytes // 2, dtype=np.uint16)
        ids = np.resize(np.asarray(ids, dtype=np.uint16), num_bytes // 2)
        self._content, self._folder, self._links = ids.tobytes(), folder, 0
        self.num_bytes = len(self._content)
        self._sha256 = ""
        blocks = range(0, num_bytes, BLOCK_BYTES)
        crcs = [zlib.crc32(self._content[at : at + BLOCK_BYTES]) for at in blocks]
        self.checksums = np.array(crcs, dtype="<u4").tobytes()
        """Those of index/crc32.bin for one shard."""

    def link(self, work: Path, name: str) -> dict[str, Any]:
        """Make one shard; returns its record."""
        real = self._folder / f"{self._links // MAX_LINKS}.bin"
        if self._links % MAX_LINKS == 0:
            real.parent.mkdir(parents=True, exist_ok=True)
            real.write_bytes(self._content)
            self._sha256 = fileio.sha256_file(real)
        os.link(real, work / name)
        self._links += 1
        return {"name": name, "tokens": self.num_bytes // 2, "bytes": self.num_bytes, "sha256": self._sha256}


def make_cache(
    root: Path, *, shards: int, shard_bytes: int, documents: int, version: int = 0, ids: Sequence[int] | None = None
) -> Path:
    """Make a pretrain cache below `root`, with one shard and one document in val; returns its public folder.

    version: another number gives other tokens. ids: what each shard repeats, instead of random ids.
    """
    linked = LinkedShards(root / f"real{version}", shard_bytes, version, ids)
    path = make_files(root / NAME, linked, shards=shards, documents=documents)
    shutil.rmtree(root / f"real{version}")  # the links stay
    return path


def make_partitions(root: Path, *, partitions: int, shards: int, shard_bytes: int, documents: int) -> PartitionPlan:
    """Fix a plan and make all of its partitions, each with so many shards; returns the plan.

    documents: of all of them, every third one a duplicate.
    """
    linked, nothing = LinkedShards(root / "real", shard_bytes, 0), dict[str, Any]()
    sha256 = "0" * 64
    content = {"plan_version": 1, "kind": PLAN_KIND, "cache": NAME.as_posix(), "partitions": partitions}
    content |= {"rule": "simulated", "fingerprint": sha256, "recipe": nothing, "source": nothing, "code": nothing}
    content |= {"tokenizer_sha256": sha256, "tokenizer_content_sha256": sha256, "listing": None, "exclude_sha256": None}
    plan = fix_plan(root / NAME, content)
    for number in range(partitions):
        claim = {"number": number, "total": partitions, "plan": plan.sha256}
        count = documents * (number + 1) // partitions - documents * number // partitions
        path = plan.unit_path(number)
        make_files(path, linked, shards=shards, documents=count, tokenizer_sha256=sha256, partition=claim)
    shutil.rmtree(root / "real")
    return plan


def make_files(path: Path, linked: LinkedShards, *, shards: int, documents: int, **keys: Any) -> Path:
    """Make the files of a cache at `path`. keys: of meta.json; with `partition` it is a receipt."""
    work = path.with_name(f"{path.name}.work")
    counts, docs = {"train": shards - 1, "val": 1}, {"train": documents - 1, "val": 1}
    for folder in (*counts, "index"):
        (work / folder).mkdir(parents=True)
    records = {
        split: [linked.link(work, f"{split}/shard_{number:05}.bin") for number in range(count)]
        for split, count in counts.items()
    }
    totals = {split: sum(record["tokens"] for record in records[split]) for split in counts}
    index = {split: written(work, f"index/{split}_docs.npy", starts(docs[split], totals[split])) for split in counts}
    ids = {split: written(work, f"index/{split}_ids.txt", id_lines(docs[split])) for split in counts}
    if "partition" in keys:
        keys["files"] = [
            written(work, TEXTS_OF[split], digests(docs[split], keys["partition"]["number"])) for split in counts
        ]
    rest = (blocks_of(work / record["name"]) for record in (*index.values(), *ids.values(), *keys.get("files", ())))
    checksums = written(work, CHECKSUMS, itertools.chain(itertools.repeat(linked.checksums, shards), rest))
    meta = write_description(
        work,
        vocabulary={"vocab_size": VOCAB, "token_dtype": "uint16-le", "special_token_ids": {}},
        source=Source("simulated"),
        counters=Counter(),
        shards=records,
        index={split: {**record, "entries": docs[split] + 1} for split, record in index.items()},
        totals={f"{split}_tokens": total for split, total in totals.items()},
        ids={split: {**record, "entries": docs[split]} for split, record in ids.items()},
        checksums={**checksums, "block_bytes": BLOCK_BYTES},
        shard_bytes=linked.num_bytes,
        docs=docs,
        documents_read=documents,
        utf8_bytes={split: 4 * total for split, total in totals.items()},
        **{**KEYS, **keys},
    )
    return published(work, path, str(meta["content_sha256"]))


KEYS: dict[str, Any] = {
    "kind": "pretrain",
    "built": True,
    "seed": 0,
    "split_rule": "simulated",
    "tokenizer_sha256": None,
    "document_end": None,
    "on_special": "drop",
    "val_frac": None,
    "shuffle": {"algorithm": None, "buffer": 0},
    "max_train_tokens": None,
    "max_val_tokens": None,
    "dropped": {},
    "noticed": {},
    "duplicates": {"train": 0, "val": 0},
    "cut": {"documents": 0, "tokens": 0},
    "unknown_ids": 0,
    "roundtrip": {"texts": 0, "differ": 0},
    "lossless": None,
}
"""Keys of meta.json that are the same in all of these caches."""


def published(work: Path, path: Path, content_sha256: str) -> Path:
    """Do what a commit does, without its fsync of each file."""
    version = versions.versions_dir(path) / content_sha256[: versions.VERSION_DIGITS]
    version.parent.mkdir(parents=True, exist_ok=True)
    work.rename(version)
    path.unlink(missing_ok=True)
    path.symlink_to(version.relative_to(path.parent))
    return path


def written(work: Path, name: str, parts: Iterable[bytes]) -> dict[str, Any]:
    """Write a file from its parts; returns its record."""
    with open(work / name, "wb") as file:
        file.writelines(parts)
    return {"name": name, "bytes": (work / name).stat().st_size, "sha256": fileio.sha256_file(work / name)}


def starts(documents: int, tokens: int) -> Iterator[bytes]:
    """Yield the .npy file of the starts of documents of equal length."""
    yield npy_header(documents + 1)
    for first in range(0, documents + 1, CHUNK):
        numbers = np.arange(first, min(first + CHUNK, documents + 1), dtype=np.int64)
        # In two parts, for the product of documents and tokens may be above 2**63.
        whole, rest = divmod(tokens, documents)
        yield (numbers * whole + numbers * rest // documents).astype("<i8").tobytes()


def id_lines(documents: int) -> Iterator[bytes]:
    """Yield lines as long as those of fineweb-edu, whose ids are UUIDs in angle brackets."""
    for first in range(0, documents, CHUNK):
        yield b"".join(b"<urn:uuid:%036d>\n" % number for number in range(first, min(first + CHUNK, documents)))


def digests(documents: int, seed: int) -> Iterator[bytes]:
    """Yield the text digests of documents, every third one that of the document before."""
    generator = np.random.default_rng(seed)
    for first in range(0, documents, CHUNK):
        some = generator.integers(1 << 63, size=min(CHUNK, documents - first), dtype=np.uint64)
        some[2::3] = some[1:-1:3]
        yield some.astype("<u8").tobytes()


def blocks_of(path: Path) -> bytes:
    """Return the CRC-32 of the blocks of a file."""
    with open(path, "rb") as file:
        return b"".join(zlib.crc32(block).to_bytes(4, "little") for block in iter(lambda: file.read(BLOCK_BYTES), b""))
