"""litdata: a folder for each split, train/ and val/, with chunk-0-N.bin for each shard and index.json, for its
    TokensLoader.

A chunk, little-endian, has a document as each item:
    uint32          n, the items
    uint32 [n + 1]  where each item begins in the file, in bytes, and where the last one ends
    the ids, end to end: uint16, or int32 where ours are uint32 (below 2**31 these are the same bytes)
`index.json` names the chunks in order, with their bytes, items and tokens ("dim"), and the type of the ids as litdata
records it for tensors: no_header_tensor:20 is uint16, no_header_tensor:16 is int32; it knows no uint32.
StreamingDataset(FOLDER/train, item_loader=TokensLoader(block_size=T)) reads blocks of T tokens without regard to items,
and does not read tokens after the last whole block of a chunk. A document in two shards is an item in each.
litdata writes the time as `updated_at`, to see that a local copy is stale. Here `updated_at` is the sha256, in hex
digits, over the sha256 of the chunks, so that the same tokens give the same file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.exchange.foreign import (
    ForeignFile,
    ForeignFolder,
    manifest_files,
    names_below,
    read_manifest,
    read_pieces,
    split_of,
    usable_name,
)
from niels_gpt.exchange.formats.listing import Listing
from niels_gpt.exchange.output import Output, TokenCache, TokenFile
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import open_regular, parse_object, path_inside, read_regular, shortened

_INDEX = "index.json"
_OFFSET = np.dtype("<u4")
_MAX = np.iinfo(np.uint32).max
_TYPE_OF_WIDTH = {2: "no_header_tensor:20", 4: "no_header_tensor:16"}
_TORCH = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
_NUMPY = {0: "i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "u1", 5: "<u2", 6: "<u4", 7: "<u8"}
_TYPE = re.compile(r"no_header_(tensor|numpy):(\d{1,3})")


def write(cache: TokenCache, output: Output) -> None:
    """Write a chunk for each shard, and index.json for each split.

    Raises: CacheError E220 for a shard whose chunk has 4 GiB or more.
    """
    for split in SPLITS:
        chunks = []
        for number, file in enumerate(cache.files(split)):
            offsets = _offsets_of(file)
            name = f"chunk-0-{number}.bin"
            output.write(f"{split}/{name}", (np.array([len(offsets) - 1], dtype=_OFFSET), offsets, file.ids), [file])
            output.note("documents_cut_between_files", int(file.continues))
            about = {"chunk_size": len(offsets) - 1, "dim": file.tokens, "filename": name}
            chunks.append({"chunk_bytes": int(offsets[-1]), **about})
        if chunks:
            index = {"chunks": chunks, "config": _config(cache, chunks)}
            hashes = "".join(record["sha256"] for record in output.records[-len(chunks) :])
            index["updated_at"] = hashlib.sha256(hashes.encode()).hexdigest()
            output.write(f"{split}/{_INDEX}", [json.dumps(index, sort_keys=True).encode()])


def _offsets_of(file: TokenFile) -> NDArray[np.uint32]:
    """Return where each item begins in the chunk of a shard, then where the last one ends, in bytes: [items + 1]."""
    ends = file.ends
    width, begin = file.cache.dtype.itemsize, 4 * (len(ends) + 2)
    if (size := begin + width * file.tokens) > _MAX:
        found = f"{file.record['name']} would be a chunk of {size:,} bytes, and litdata counts them in 32 bits"
        remedy = "Build the cache with a --shard-bytes of 1,000,000,000 or less, or export it to hf"
        raise CacheError(file.cache.path, found, remedy=remedy, code="E220")
    return (begin + width * np.append(0, ends)).astype(_OFFSET)


def _config(cache: TokenCache, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `config` as litdata's writer makes it for tensors."""
    return {
        "chunk_bytes": max(chunk["chunk_bytes"] for chunk in chunks),
        "chunk_size": None,
        "compression": None,
        "compression_batch_size": None,
        "compression_level": None,
        "data_format": [_TYPE_OF_WIDTH[cache.dtype.itemsize]],
        "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
        "encryption": None,
        "ipc_compression": None,
        "item_loader": "TokensLoader",
        "types": "tensor",
    }


def read(source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
    """Look into a folder of litdata, or a folder with one for each split. Chunks keep the order of index.json.

    Each item is a document; items without tokens are left out and counted.
    """
    manifest = read_manifest(source, "litdata")
    records = manifest_files(manifest)
    names = (
        [name for name in names_below(source, _INDEX) if name.rpartition("/")[2] == _INDEX] if source.is_dir() else []
    )
    if not names:
        raise CacheError(source, f"no {_INDEX} in it or below it", "a folder that litdata wrote", code="E221")
    by_split: dict[str, list[ForeignFile]] = {split: [] for split in SPLITS}
    noticed: Counter[str] = Counter()
    for index in names:
        folder = index.rpartition("/")[0]
        for chunk, dtype in _chunks(source / index):
            name = f"{folder}/{chunk['filename']}".lstrip("/")
            split = split_of(name, val_glob)
            if split is None:
                noticed["files_of_a_test_split"] += 1
                continue
            path = path_inside(source, name)
            noticed["empty_documents"] += int(chunk["chunk_size"]) - len(_ends(path, chunk, dtype))
            noticed["empty_files"] += not chunk["dim"]
            if chunk["dim"]:
                by_split[split].append(_file(path, name, split, chunk, dtype, records))
    files = [*by_split["train"], *by_split["val"]]
    if not files:
        raise CacheError(source, f"no tokens in the chunks that {_INDEX} names", "chunks of litdata", code="E221")
    return Listing([], manifest, noticed).folder(files)


def _file(
    path: Path, name: str, split: str, chunk: dict[str, Any], dtype: np.dtype[Any], records: Mapping[str, Any]
) -> ForeignFile:
    return ForeignFile(
        split,
        name,
        tokens=chunk["dim"],
        pieces=partial(read_pieces, path, dtype, offset=4 * (chunk["chunk_size"] + 2), count=chunk["dim"]),
        ends=partial(_ends, path, chunk, dtype),
        continues=bool(records[name]["of"][0]["continues"]) if name in records else False,
    )


def _chunks(path: Path) -> Iterator[tuple[dict[str, Any], np.dtype[Any]]]:
    """Yield the checked facts about each chunk in an index.json, and the type of its ids."""
    try:
        index = parse_object(read_regular(path))
        dtype, seen = _dtype_of(index["config"]), set[str]()
        for number, chunk in enumerate(index["chunks"]):
            name = chunk["filename"]
            if not isinstance(name, str) or "/" in name or name in seen:
                raise ValueError(f"chunks[{number}].filename is {shortened(name)}, expected another file's name")
            seen.add(usable_name(path, name))
            for key in ("chunk_bytes", "chunk_size", "dim"):
                if not isinstance(chunk[key], int) or isinstance(chunk[key], bool) or not 0 <= chunk[key] <= _MAX:
                    expected = "the tokens of a chunk of TokensLoader" if key == "dim" else "a count below 2**32"
                    raise ValueError(f"chunks[{number}].{key} is {shortened(chunk[key])}, expected {expected}")
            yield chunk, dtype
    except KeyError as error:
        raise CacheError(path, f"has no {error}", "an index of litdata", code="E221") from error
    except (TypeError, AttributeError) as error:
        raise CacheError(path, f"not an index of litdata ({error})", code="E221") from error
    except CacheError:
        raise
    except ValueError as error:
        raise CacheError(path, str(error), code="E221") from error


def _dtype_of(config: dict[str, Any]) -> np.dtype[Any]:
    """Return the type of the ids. Raises: ValueError if there is none, and for compressed or encrypted chunks."""
    for key in ("compression", "ipc_compression", "encryption"):
        if config.get(key) is not None:
            raise ValueError(f"{key} is {shortened(config[key])}, expected null: write it with litdata without {key}")
    if config.get("item_loader", "TokensLoader") != "TokensLoader":
        raise ValueError(f"item_loader is {shortened(config['item_loader'])}, expected TokensLoader")
    found = config["data_format"]
    match = (
        _TYPE.fullmatch(found[0]) if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str) else None
    )
    kinds = _TORCH if match is not None and match[1] == "tensor" else _NUMPY
    if match is None or int(match[2]) not in kinds:
        raise ValueError(
            f"data_format is {shortened(found)}, expected integers in one dimension, such as no_header_tensor:20"
        )
    return np.dtype(kinds[int(match[2])])


def _ends(path: Path, chunk: Mapping[str, Any], dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """Return where the documents of a chunk end, in tokens: int64, ascending. Raises: CacheError E221, E204, E205."""
    items, tokens, begin = int(chunk["chunk_size"]), int(chunk["dim"]), 4 * (int(chunk["chunk_size"]) + 2)
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != chunk["chunk_bytes"] or size != begin + tokens * dtype.itemsize:
                expected = f"{chunk['chunk_bytes']:,} by {_INDEX}: {items:,} items, {tokens:,} tokens of {dtype}"
                raise CacheError(path, f"{size:,} bytes", expected, code="E221")
            head = np.frombuffer(file.read(begin), dtype=_OFFSET).astype(np.int64)
    except FileNotFoundError as error:
        raise CacheError(path, "no such file", f"a chunk that {_INDEX} names", code="E221") from error
    if len(head) != items + 2:
        raise CacheError(path, "ends while it is read", f"{size:,} bytes", code="E203")
    lengths, rests = np.divmod(np.diff(head[1:]), dtype.itemsize)
    if head[0] != items or head[1] != begin or head[-1] != size or (lengths < 0).any() or rests.any():
        expected = (
            f"{items:,} items that ascend from byte {begin:,} to {size:,}, in whole ids of {dtype.itemsize} bytes"
        )
        raise CacheError(path, "its header has other items or offsets", expected, code="E221")
    return np.cumsum(lengths[lengths > 0])
