"""Names and dtypes of the files of a token cache, and the rule which tokens carry loss; docs/formats.md has the bytes.

A pretrain cache:  train/shard_00000.bin ... val/shard_00000.bin ... index/{train,val}_docs.npy meta.json
An sft cache:      train_tokens.bin train_idx.npy val_tokens.bin val_idx.npy meta.json
                   with another chat template also train_loss.bits val_loss.bits: see loss_bits.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.meta_json import checked_count, checked_sha256, wrong_value
from niels_gpt.tokenizers.protocol import NARROW, Ids, TokenDtype, integer, token_dtype_of

try:  # of the extra `fast`: the same numbers, ten times as fast as a zlib without vector instructions
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

SPLITS = ("train", "val")
FORMAT_VERSION = 1
PARTITIONED_VERSION = 2  # of a cache of several partitions, or imported, whose shards may be short anywhere
OFFSET_DTYPE: np.dtype[np.int64] = np.dtype("<i8")
BLOCK_BYTES = 1 << 16
"""Bytes of a file for each CRC-32 in index/crc32.bin."""
_NPY_HEADER_BYTES = 128
DEFAULT_SHARD_BYTES = 2**27
"""Default bytes of a pretrain shard: "128 MB" (PR-03)."""

SHARD_GLOB = "shard_*.bin"
IGNORE_INDEX = -100
"""Target that torch's cross entropy ignores (PR-03)."""

BORDERS = ("index", "document_end", "manifest", "rows", "files")
"""Values of `imported.borders`: where an import found the borders of documents."""

LOSS_KEYS = ("loss_bits", "chat_template", "pad_id")
"""Keys of meta.json: a cache has all of them or none."""

IMPORTED_TEMPLATE = {"sha256": None, "mask_by": "imported", "loss_on": "imported"}
"""`chat_template` of an imported cache, whose loss came with the tokens."""

OF_EACH = {
    "pretrain": ("tokens", "docs", "shards"),
    "sft": ("tokens", "examples"),
    "rollouts": ("tokens", "groups", "samples"),
}
"""Counts in `partitions.of_each` for each partition and split, by the kind of the cache."""

__all__ = [
    "BLOCK_BYTES",
    "BORDERS",
    "DEFAULT_SHARD_BYTES",
    "FORMAT_VERSION",
    "IGNORE_INDEX",
    "IMPORTED_TEMPLATE",
    "LOSS_KEYS",
    "NARROW",
    "OFFSET_DTYPE",
    "OF_EACH",
    "PARTITIONED_VERSION",
    "SHARD_GLOB",
    "SPLITS",
    "Ids",
    "TokenDtype",
    "check_format",
    "check_loss_keys",
    "check_partitions",
    "flat_targets",
    "format_version_of",
    "has_loss_bits",
    "has_no_text_bytes",
    "is_imported",
    "masked_targets",
    "npy_header",
    "num_blocks",
    "num_bytes",
    "reply_edges",
    "reply_runs",
    "reply_runs_of",
    "signed_dtype",
    "target_mask",
    "token_dtype_of",
]


def num_blocks(num_bytes: int) -> int:
    """Return how many blocks with a checksum a file has; 0 for an empty one."""
    return -(-num_bytes // BLOCK_BYTES)


def npy_header(count: int) -> bytes:
    """Return the 128 bytes that numpy.save writes before an int64 [count] array (NEP 1, version 1.0)."""
    entry = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}".encode()
    return b"\x93NUMPY\x01\x00v\x00" + entry.ljust(_NPY_HEADER_BYTES - 11) + b"\n"


def format_version_of(meta: Mapping[str, Any]) -> int:
    """Return the format version that a meta.json must have: 2 if shards may be short, else 1.

    Shards may be short in a pretrain cache of several partitions, and in an imported cache of any kind. The files of
    chats and rollouts do not depend on the number of partitions.
    """
    is_partitioned = "partitions" in meta and meta.get("kind") == "pretrain"
    return PARTITIONED_VERSION if is_partitioned or is_imported(meta) else FORMAT_VERSION


def is_imported(meta: Mapping[str, Any] | None) -> bool:
    """Return whether another tool cut the files of a cache: its shards have any lengths."""
    return meta is not None and "imported" in meta and meta.get("kind") in ("pretrain", "sft")


def has_no_text_bytes(meta: Mapping[str, Any]) -> bool:
    """Return whether a cache was imported without counting the bytes of its text, which only bits per byte need."""
    return is_imported(meta) and "utf8_bytes" not in meta


def check_format(meta: Mapping[str, Any], where: str) -> None:
    """Check the format version (1 if absent), `partitions` and `imported` of a meta.json. Raises: CacheError E202."""
    version, expected = meta.get("format_version", FORMAT_VERSION), format_version_of(meta)
    if integer(version, 0, 2**63) != expected:
        raise wrong_value(where, "format_version", version, f"{expected}, which this reader knows")
    check_partitions(meta, where)
    _check_imported(meta, where)


def _check_imported(meta: Mapping[str, Any], where: str) -> None:
    """Check the form of `imported` in a meta.json, if present. Raises: CacheError E202."""
    if not is_imported(meta):
        return
    imported = meta["imported"]
    if not isinstance(imported, dict) or {*imported} != {"format", "borders", "files", "tokenizer"}:
        raise wrong_value(where, "imported", imported, "format, borders, files and tokenizer, and no other key")
    if imported["borders"] not in BORDERS:
        raise wrong_value(where, "imported.borders", imported["borders"], f"one of {', '.join(BORDERS)}")
    checked_count(imported["files"], "imported.files", where)
    for key in ("format", "tokenizer"):
        if not isinstance(imported[key], str) and (key == "format" or imported[key] is not None):
            raise wrong_value(where, f"imported.{key}", imported[key], "text")
    if "partitions" in meta:
        raise wrong_value(where, "imported", imported, "none in a cache of several partitions")
    if meta.get("shard_bytes") is not None:
        raise wrong_value(where, "shard_bytes", meta["shard_bytes"], "null in an imported cache")


def check_partitions(meta: Mapping[str, Any], where: str) -> None:
    """Check the form of `partitions` in a meta.json, if present. Raises: CacheError E202 naming the file `where`."""
    if "partitions" not in meta or meta.get("kind") is None:  # without a kind: of another tool
        return
    partitions, counted = meta["partitions"], OF_EACH.get(str(meta["kind"]))
    if counted is None or not isinstance(partitions, dict) or {*partitions} != {"total", "rule", "of_each"}:
        expected = f"total, rule and of_each of a cache of {', '.join(OF_EACH)}, and no other key"
        raise wrong_value(where, "partitions", partitions, expected)
    checked_count(partitions["total"], "partitions.total", where)
    if not isinstance(partitions["rule"], str):
        raise wrong_value(where, "partitions.rule", partitions["rule"], "text")
    if not isinstance(partitions["of_each"], list):
        raise wrong_value(where, "partitions.of_each", partitions["of_each"], "a list")
    keys = {f"{split}_{name}" for split in SPLITS for name in counted}
    for number, each in enumerate(partitions["of_each"]):
        name = f"partitions.of_each[{number}]"
        if not isinstance(each, dict) or each.keys() != keys:
            raise wrong_value(where, name, each, f"an object of {', '.join(sorted(keys))}")
        for key, count in each.items():
            checked_count(count, f"{name}.{key}", where)


def has_loss_bits(meta: Mapping[str, Any] | None) -> bool:
    """Return whether bits store the loss of a cache; else its sentinels decide."""
    return meta is not None and "loss_bits" in meta


def check_loss_keys(meta: Mapping[str, Any], where: str) -> None:
    """Raise CacheError E202 unless a meta.json has none of `LOSS_KEYS`, or all in the form of docs/formats.md."""
    given = [key for key in LOSS_KEYS if key in meta]
    if not given:
        return
    if missing := [key for key in LOSS_KEYS if key not in meta]:
        problem = f"{given[0]} without {missing[0]}: which tokens carry loss is not known"
        raise CacheError(where, problem, f"all of {', '.join(LOSS_KEYS)}, or none", REBUILD, code="E202")
    if meta.get("kind", "sft") != "sft":
        raise wrong_value(where, "loss_bits", "given", f"none in a cache of kind {meta['kind']!r}")
    if integer(meta["pad_id"], 0, meta.get("vocab_size") or 2**31) is None:
        raise wrong_value(where, "pad_id", meta["pad_id"], "an id below vocab_size")
    template = meta["chat_template"]
    if not isinstance(template, dict) or not all(isinstance(template.get(key), str) for key in ("mask_by", "loss_on")):
        raise wrong_value(where, "chat_template", template, "an object with sha256, mask_by and loss_on")
    if not is_imported(meta) or template != IMPORTED_TEMPLATE:
        checked_sha256(template.get("sha256"), "chat_template.sha256", where)
    for split, shards in meta.get("shards", {}).items():
        tokens = sum(record.get("tokens", 0) for record in shards)
        size = meta["loss_bits"].get(split, {}).get("bytes")
        if size != num_bytes(tokens) and (tokens or size is not None):  # a stub has neither tokens nor bits
            expected = f"{num_bytes(tokens)}, a bit for each of {tokens} tokens"
            raise wrong_value(where, f"loss_bits.{split}.bytes", size, expected)


def num_bytes(tokens: int) -> int:
    """Return the size of the loss bits of `tokens` tokens, in bytes."""
    return -(-tokens // 8)


def target_mask(ids: Ids, lengths: NDArray[np.int64], *, asst_id: int, eot_id: int) -> NDArray[np.bool_]:
    """Return which tokens carry loss: all after an assistant sentinel, up to and including the next EOT.

    ids [B, S]. lengths [B]: tokens of each row before padding. Returns bool [B, S].

    sys a eot usr b eot asst A B eot pad
     0  0  0   0  0  0   0   1 1  1   0

    A token is inside a reply if, among the tokens before it, the last sentinel is later than the last EOT.
    """
    width = ids.shape[1]
    if not ids.size:
        return np.zeros(ids.shape, dtype=np.bool_)
    last = np.arange(1, len(ids) + 1) * width - 1
    places, opens = reply_edges(ids.reshape(-1), last, asst_id=asst_id, eot_id=eot_id)
    has_loss = np.zeros(len(places), dtype=np.bool_)  # of the tokens up to and including each place
    has_loss[1:] = opens[:-1]
    runs = places + 1
    runs[1:] -= places[:-1] + 1
    is_target = has_loss.repeat(runs).reshape(ids.shape)
    is_target &= np.arange(width) < lengths[:, None]
    return is_target


def reply_edges(
    ids: Ids, last: NDArray[np.int64], *, asst_id: int, eot_id: int, opened: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where loss may begin or end in examples end to end: a sparse form of `target_mask`.

    ids [N]: tokens of the examples. last [examples]: index of the last token of each, ascending.
    opened [examples]: whether each begins inside a reply, as a part of an example may; None: none does.
    Returns places, int64 [K], ascending, and opens, bool [K]: the tokens after places[k], up to and including places[k
    + 1], carry loss exactly if opens[k]. The last token of an example is a place that opens nothing, so places[-1] is
    last[-1], and no reply continues in the next example. (If an example is opened, the last token of the example before
    it opens; opened[0] has no place.)
    """
    # One id for both opens nothing: no sentinel is then later than the last EOT.
    is_asst = ids == asst_id if asst_id != eot_id else np.zeros(ids.shape, dtype=np.bool_)
    is_asst[last] = False
    is_edge = ids == eot_id
    is_edge |= is_asst
    is_edge[last] = True
    if opened is not None:
        is_asst[last[:-1]] = opened[1:]
    places = is_edge.nonzero()[0]
    return places, is_asst[places]


def flat_targets(
    ids: Ids, ends: NDArray[np.int64], opened: NDArray[np.bool_], *, asst_id: int, eot_id: int
) -> NDArray[np.bool_]:
    """Return which tokens of parts of examples, end to end, carry loss: bool [N].

    ids [N]. ends [parts]: index after the last token of each. opened [parts]: whether it begins inside a reply.
    """
    places, opens = reply_edges(ids, ends - 1, asst_id=asst_id, eot_id=eot_id, opened=opened)
    has_loss = np.append(opened[:1], opens[:-1])  # of the tokens up to and including each place
    return has_loss.repeat(np.diff(places, prepend=-1))


def reply_runs(
    rows: Ids, lengths: NDArray[np.int64], *, asst_id: int, eot_id: int, opened: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which targets of padded rows carry loss, run-length encoded.

    rows [B, T + 1]: an example each, from its first token on, padded with eot_id. lengths [B]: tokens before padding.
    opened [B]: whether each row begins inside a reply, as a part of an example may; None: none does.
    Returns has_loss, bool [runs], and runs, int64 [runs]: has_loss.repeat(runs) is bool [B * T], for rows[:, 1:].
    """
    ids, width = rows.reshape(-1), rows.shape[1]
    last = np.arange(-1, ids.size - 1, width) + lengths
    is_eot = ids == eot_id
    # One id for both opens nothing, as in `reply_edges`.
    is_asst = ids == asst_id if asst_id != eot_id else np.zeros(ids.shape, dtype=np.bool_)
    if opened is not None:  # as if its first token, which is no target of the row, were the sentinel
        is_asst[::width] |= opened > is_eot[::width]
    is_asst[last] = False
    is_edge = is_asst.copy()
    is_edge[1:] |= is_eot[1:] > is_eot[:-1]  # an EOT after an EOT ends nothing: padding has no edges
    is_edge[last] = is_edge[-1:] = True
    places = is_edge.nonzero()[0]
    # After a place p of row r the next run begins: at p - r of y, which lacks the first column.
    runs, has_loss = places - places // width, np.zeros(len(places), dtype=np.bool_)
    has_loss[1:] = is_asst[places[:-1]]
    runs[1:] -= runs[:-1].copy()
    return has_loss, runs


def reply_runs_of(
    ids: Ids,
    firsts: NDArray[np.int64],
    lasts: NDArray[np.int64],
    opened: NDArray[np.bool_] | None,
    *,
    asst_id: int,
    eot_id: int,
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Return which tokens of parts of examples carry loss, run-length encoded; there may be padding between the parts.

    ids [N]: the parts, with any eot_id after each. firsts, lasts [parts]: index of the first and last token of each.
    opened [parts]: whether each begins inside a reply; None: none does.
    Returns has_loss, int8 [runs], and runs, int64 [runs]: has_loss.repeat(runs) is int8 [N].
    """
    is_eot = ids == eot_id
    is_asst = ids == asst_id if asst_id != eot_id else np.zeros(ids.shape, dtype=np.bool_)  # as in `reply_edges`
    is_asst[lasts] = False
    if opened is not None:  # as if the token before it were the sentinel
        before = firsts[1:] - 1
        is_asst[before] = opened[1:]
        is_eot[before[opened[1:]]] = False
    is_edge = is_asst.copy()
    is_edge[:1] |= is_eot[:1]
    is_edge[1:] |= is_eot[1:] > is_eot[:-1]  # an EOT after an EOT ends nothing: padding has no edges
    is_edge[lasts] = is_edge[-1:] = True
    places = is_edge.nonzero()[0]
    runs, has_loss = places + 1, np.zeros(len(places), dtype=np.int8)
    runs[1:] -= runs[:-1].copy()
    has_loss[1:] = is_asst[places[:-1]]
    if opened is not None:
        has_loss[:1] = opened[:1]
    return has_loss, runs


def signed_dtype(dtype: np.dtype[Any], vocab_size: int | None) -> np.dtype[Any]:
    """Return the narrowest signed dtype that holds -100 and ids of `dtype`: int16 if all are below 2 ** 15, else int32.

    vocab_size: that all ids are below; None: not known.
    """
    return np.dtype(np.int16 if dtype.itemsize == 2 and vocab_size and vocab_size <= 2**15 else np.int32)


def masked_targets(rows: Ids, has_loss: NDArray[np.bool_], runs: NDArray[np.int64]) -> NDArray[Any]:
    """Return rows[:, 1:] with -100 where there is no loss, by the runs of `reply_runs`: [B, T].

    int32 for rows of uint32, whose ids are below 2 ** 31; else int64.
    """
    # A minimum takes half the time of a choice by a mask, and less of 32 bits than of 64.
    signed = np.int32 if rows.itemsize == 4 else np.int64
    y: NDArray[Any] = rows[:, 1:].view(np.int32) if rows.itemsize == 4 else rows[:, 1:]
    limits = np.array((IGNORE_INDEX, np.iinfo(np.int32).max), dtype=signed)
    masked: NDArray[Any] = limits.take(has_loss).repeat(runs).reshape(y.shape)
    np.minimum(y, masked, out=masked)
    return masked
