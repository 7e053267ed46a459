"""What a meta.json says twice, or what follows from what it says of the files: sums, sizes, counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from niels_gpt.build.describe import FORMAT_VERSION, content_sha256
from niels_gpt.build.writer import OFFSET_DTYPE, TOKEN_BYTES, TOKEN_DTYPE_NAME, npy_header
from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import KINDS
from niels_gpt.inspection.checksums import CRC_DTYPE, covered_files, num_blocks
from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES
from niels_gpt.tokenizer import MODEL_NAME

Problem = tuple[str, str]
"""A key of meta.json, and what was found there and expected."""


def account_problems(meta: dict[str, Any], records: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    """Yield what does not add up in a meta.json. records: of all its files.

    Raises: LookupError, TypeError and their like where a key is missing or is of another type.
    """
    kind = meta.get("kind")
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    if meta.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise ValueError(f"format_version is {meta['format_version']!r}, expected {FORMAT_VERSION}")
    found = content_sha256(list(records))
    if found != meta["content_sha256"]:
        said = str(meta["content_sha256"])[:12]
        yield "content_sha256", f"content_sha256 is {said}, but the files it names give {found[:12]}"
    yield from _vocabulary(meta)
    if kind == "tokenizer":
        models = [record["sha256"] for record in records if record["name"] == MODEL_NAME]
        if models != [meta["tokenizer_sha256"]]:
            yield "tokenizer_sha256", f"tokenizer_sha256 is not the sha256 of {MODEL_NAME}"
        return
    if meta.get("built") is False and any(record["bytes"] for record in records):
        yield "built", "built is false, but it names files that hold something"
    if not isinstance(meta.get("source", {}), dict):
        yield "source", f"source is a {type(meta['source']).__name__}, expected an object"
    for split in SPLITS:
        yield from _of_split(meta, split)
    if "checksums" in meta:
        blocks = sum(num_blocks(record["bytes"]) for record in covered_files(meta))
        yield from _compare("checksums", "checksums.bytes", meta["checksums"]["bytes"], CRC_DTYPE.itemsize * blocks)
    yield from _documents(meta)


def _compare(key: str, what: str, found: Any, expected: Any) -> Iterator[Problem]:
    if found != expected:
        yield key, f"{what} is {found!r}, expected {expected!r} by the rest of it"


def _vocabulary(meta: dict[str, Any]) -> Iterator[Problem]:
    size, ids = meta.get("vocab_size"), meta.get("special_token_ids")
    if not isinstance(size, int) or not 0 < size <= 1 << 16:
        yield "vocab_size", f"vocab_size is {size!r}, expected 1 to 65,536"
    elif not isinstance(ids, dict) or not all(
        isinstance(ids.get(name), int) and 0 <= ids[name] < size for name in SPECIAL_TOKEN_NAMES
    ):
        yield "special_token_ids", f"special_token_ids are {ids!r}, expected an id of the {size} for each sentinel"


def _of_split(meta: dict[str, Any], split: str) -> Iterator[Problem]:
    shards, key = meta["shards"][split], f"{split}_tokens"
    tokens = sum(record["tokens"] for record in shards)
    yield from _compare("totals", f"totals.{key}", meta["totals"][key], tokens)
    yield from _compare(key, key, meta.get(key, tokens), tokens)
    yield from _compare("token_dtype", "token_dtype", meta.get("token_dtype", TOKEN_DTYPE_NAME), TOKEN_DTYPE_NAME)
    for number, record in enumerate(shards):
        name = f"shards.{split}[{number}]"
        yield from _compare("shards", f"{name}.bytes", record["bytes"], TOKEN_BYTES * record["tokens"])
        if meta["kind"] == "pretrain" and number + 1 < len(shards):
            full = meta["shard_bytes"] // TOKEN_BYTES
            yield from _compare("shards", f"{name}.tokens", record["tokens"], full)
    if meta.get("built") is False:
        return
    index, header = meta["index"][split], len(npy_header(0))
    of_index = header + OFFSET_DTYPE.itemsize * index["entries"]
    yield from _compare("index", f"index.{split}.bytes", index["bytes"], of_index)
    if "ids" in meta:
        documents = index["entries"] - (meta["kind"] == "pretrain")
        yield from _compare("ids", f"ids.{split}.entries", meta["ids"][split]["entries"], documents)


def _documents(meta: dict[str, Any]) -> Iterator[Problem]:
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
        found = meta.get("duplicates", {}).get(split, 0)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= max(kept[split] - 1, 0):
            yield "duplicates", f"duplicates.{split} is {found!r}, expected less than the {kept[split]} that are there"
    key = "examples_read" if sft else "documents_read"
    yield from _compare(key, key, meta[key], sum(kept.values()) + sum(meta["dropped"].values()))
