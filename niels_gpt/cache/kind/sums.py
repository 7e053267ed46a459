"""Which sums and sizes of a token cache's meta.json must agree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from niels_gpt.cache.checksums import CRC_DTYPE
from niels_gpt.cache.formats import (
    OFFSET_DTYPE,
    SPLITS,
    has_loss_bits,
    is_imported,
    num_blocks,
    num_bytes,
    token_dtype_of,
)
from niels_gpt.kinds.checks import Problem, partition_sums, vocabulary_sums
from niels_gpt.kinds.files import HEADER_BYTES
from niels_gpt.kinds.kind import Cache
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.tokenizers.protocol import token_dtype_name

Meta = dict[str, Any]


def wrong_sums(cache: Cache) -> Iterator[Problem]:
    """Yield what does not agree within the meta.json of a pretrain or sft cache."""
    meta = cache.meta
    yield from vocabulary_sums(meta, may_lack_sentinels=meta["kind"] != "sft" or has_loss_bits(meta))
    if cache.is_stub and any(record["bytes"] for record in cache.records):
        yield "built", "built is false, but it names files that hold something"
    if not isinstance(meta.get("source", {}), dict):
        yield "source", f"source is a {type(meta['source']).__name__}, expected an object"
    for split in SPLITS:
        yield from _split_sums(meta, split)
    if "checksums" in meta:
        name = meta["checksums"]["name"]
        blocks = sum(num_blocks(record["bytes"]) for record in cache.records if record["name"] != name)
        yield from _compare("checksums", "checksums.bytes", meta["checksums"]["bytes"], CRC_DTYPE.itemsize * blocks)
    if meta["kind"] == "sft":
        yield from partition_sums(meta)
    yield from _document_counts(meta)


def _compare(key: str, name: str, value: Any, expected: Any) -> Iterator[Problem]:
    if value != expected:
        yield key, f"{name} is {value!r}, expected {expected!r} by the rest of it"


def _split_sums(meta: Meta, split: str) -> Iterator[Problem]:
    shards, key = meta["shards"][split], f"{split}_tokens"
    tokens = sum(record["tokens"] for record in shards)
    yield from _compare("totals", f"totals.{key}", meta["totals"][key], tokens)
    yield from _compare(key, key, meta.get(key, tokens), tokens)
    expected = token_dtype_name(meta["vocab_size"])
    yield from _compare("token_dtype", "token_dtype", meta.get("token_dtype", "uint16-le"), expected)
    itemsize, may_be_short = token_dtype_of(meta, META_NAME).itemsize, {len(shards) - 1}
    if "partitions" in meta and meta["kind"] == "pretrain":
        ends = list(accumulate(each[f"{split}_shards"] for each in meta["partitions"]["of_each"]))
        may_be_short = {end - 1 for end in ends}
        yield from _partition_sums(meta, split, ends)
    if is_imported(meta):
        may_be_short = {*range(len(shards))}
    for number, record in enumerate(shards):
        name = f"shards.{split}[{number}]"
        yield from _compare("shards", f"{name}.bytes", record["bytes"], itemsize * record["tokens"])
        if meta["kind"] == "pretrain" and number not in may_be_short:
            yield from _compare("shards", f"{name}.tokens", record["tokens"], meta["shard_bytes"] // itemsize)
    if meta.get("built") is False:
        return
    index = meta["index"][split]
    index_bytes = HEADER_BYTES + OFFSET_DTYPE.itemsize * index["entries"]
    yield from _compare("index", f"index.{split}.bytes", index["bytes"], index_bytes)
    if has_loss_bits(meta):
        yield from _compare(
            "loss_bits", f"loss_bits.{split}.bytes", meta["loss_bits"][split]["bytes"], num_bytes(tokens)
        )
    if "ids" in meta:
        documents = index["entries"] - (meta["kind"] == "pretrain")
        yield from _compare("ids", f"ids.{split}.entries", meta["ids"][split]["entries"], documents)


def _partition_sums(meta: Meta, split: str, ends: list[int]) -> Iterator[Problem]:
    """Compare the numbers of each partition with its shards, and their sums with the cache's.

    ends: the number of the shard after the last one of each partition.
    """
    of_each, shards = meta["partitions"]["of_each"], meta["shards"][split]
    yield from _compare("partitions", "partitions.total", meta["partitions"]["total"], len(of_each))
    for name, whole in (("docs", meta["docs"][split]), ("shards", len(shards))):
        total = sum(each[f"{split}_{name}"] for each in of_each)
        yield from _compare("partitions", f"the sum of {split}_{name} in partitions.of_each", total, whole)
    for number, (each, first, end) in enumerate(zip(of_each, [0, *ends], ends, strict=False)):
        tokens, key = sum(record["tokens"] for record in shards[first:end]), f"{split}_tokens"
        yield from _compare("partitions", f"partitions.of_each[{number}].{key}", each[key], tokens)


def _document_counts(meta: Meta) -> Iterator[Problem]:
    """Compare the numbers of documents or examples: kept, dropped, read."""
    if meta.get("built") is False:
        return
    sft = meta["kind"] == "sft"
    kept = {split: meta["index"][split]["entries"] - (not sft) for split in SPLITS}
    for split in SPLITS:
        if sft:
            key = f"{split}_examples"
            yield from _compare("totals", f"totals.{key}", meta["totals"][key], kept[split])
            yield from _compare(key, key, meta.get(key, kept[split]), kept[split])
        else:
            yield from _compare("docs", f"docs.{split}", meta["docs"][split], kept[split])
        count = meta.get("duplicates", {}).get(split, 0)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= max(kept[split] - 1, 0):
            yield "duplicates", f"duplicates.{split} is {count!r}, expected less than the {kept[split]} that are there"
    key = "examples_read" if sft else "documents_read"
    yield from _compare(key, key, meta[key], sum(kept.values()) + sum(meta["dropped"].values()))
