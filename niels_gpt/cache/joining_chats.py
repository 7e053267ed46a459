"""Join units of an sft cache: tokens and loss bits end to end, shifted offsets, duplicates counted over all.

A damaged file of such a cache is not mended: the cache is built again as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.build_sft import DIGESTS_OF, packed
from niels_gpt.cache.build_templated import REMEDIES
from niels_gpt.cache.formats import (
    BLOCK_BYTES,
    LOSS_KEYS,
    SPLITS,
    check_loss_keys,
    has_loss_bits,
    npy_header,
    num_bytes,
    token_dtype_of,
)
from niels_gpt.cache.joining import (
    MAX_DIGESTS,
    check_entries,
    check_form,
    lines_of,
    no_train,
    shifted,
    summed_up,
    warn_of_empty_val,
    whole,
    written,
)
from niels_gpt.encoding import DIGEST_BYTES
from niels_gpt.engine.checkpoints import CHECKSUMS
from niels_gpt.engine.journal import write_whole
from niels_gpt.engine.losses import warn_of_losses, warn_of_unknown
from niels_gpt.engine.meta import Source
from niels_gpt.engine.split import count_duplicates, warn_of_share
from niels_gpt.engine.units import PartitionPlan
from niels_gpt.signals import warn_of_signals
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import wrong_value

SAME = (
    *("tokenizer_sha256", "vocab_size", "token_dtype", "special_token_ids", "seed", "built", "split_rule"),
    *("on_special", "val_frac", "chat_template", "pad_id"),
)
"""Keys of meta.json that are equal in all units of an sft cache; the last two only beside loss bits."""
_OF_SPLITS = dict.fromkeys(SPLITS, 0)
_COUNTED = ("examples", "tokens")
_ZEROS: dict[str, Any] = {
    "totals": {f"{split}_{key}": 0 for key in _COUNTED for split in SPLITS},
    "supervised_tokens": _OF_SPLITS,
    "utf8_bytes": _OF_SPLITS,
    "roundtrip": {"texts": 0, "differ": 0},
    "examples_read": 0,
    "unknown_ids": 0,
    "dropped": {},
    "noticed": {},
}

Meta = dict[str, Any]


class _Part(NamedTuple):
    """Counts of a unit, kept while the files of all units are streamed."""

    folder: Path
    examples: Mapping[str, int]
    tokens: Mapping[str, int]


def join(work: Path, plan: PartitionPlan, source: Source, units: Iterator[tuple[Path, Meta]]) -> Meta:
    """Write all files of an sft cache to `work`, meta.json last. Returns the meta. See `UnitKind.join`.

    Raises: NoTextError without an example for train; CacheError E510 for a file of another unit.
    """
    parts = list[_Part]()

    def take(folder: Path, meta: Meta) -> None:
        examples, tokens = ({split: meta["totals"][f"{split}_{key}"] for split in SPLITS} for key in _COUNTED)
        parts.append(_Part(folder, examples, tokens))

    sums = summed_up(units, SAME, _ZEROS, _of_unit, take)
    if not sums.counts["totals"]["train_tokens"]:
        raise no_train(plan, sums, "examples_read", REMEDIES)
    fileio.make_dir(work / "index")
    files = _streamed(work, parts, sums.counts["totals"], sums.known)
    duplicates = {
        split: count_duplicates(*(part.folder / name for part in parts), folder=work, max_digests=MAX_DIGESTS)
        for split, name in DIGESTS_OF.items()
    }
    return written(work, plan, source, sums, "sft", **files, duplicates=duplicates)


def check_receipt(meta: Meta) -> None:
    """Raise an error for a receipt that `join` cannot take: it reads files by the names of our builder."""
    bits = [f"{split}_loss.bits" for split in SPLITS] if has_loss_bits(meta) else []
    files = [f"{split}_{name}" for name in ("tokens.bin", "idx.npy") for split in SPLITS]
    names = [*files, *(f"index/{split}_ids.txt" for split in SPLITS), *bits, CHECKSUMS, *DIGESTS_OF.values()]
    check_form(meta, SAME, _ZEROS, names, optional=LOSS_KEYS)
    check_loss_keys(meta, META_NAME)
    digests = dict(zip(SPLITS, meta["files"], strict=True))
    for split in SPLITS:
        examples, tokens = (meta["totals"][f"{split}_{key}"] for key in _COUNTED)
        check_entries(meta, split, split, examples)
        if [record["tokens"] for record in meta["shards"][split]] != [tokens]:
            raise wrong_value(META_NAME, f"shards.{split}", meta["shards"][split], f"one file of {tokens} tokens")
        if digests[split]["bytes"] != DIGEST_BYTES * examples or tokens < examples or bool(tokens) != bool(examples):
            raise CacheError(META_NAME, "its digests or tokens are not of as many examples", code="E202")


def warn_of_whole(path: Path, meta: Meta) -> None:
    """Log what shows only in the whole cache: an unexpected share of val, odd chats, an empty val."""
    warn_of_share(path, meta)
    if has_loss_bits(meta):
        warn_of_unknown(path, meta["unknown_ids"])
        warn_of_signals(path, meta)
    else:
        warn_of_losses(path, meta)
    warn_of_empty_val(path, meta, meta["totals"]["train_examples"] - meta["duplicates"]["train"])


def _of_unit(meta: Meta) -> dict[str, int]:
    """Return tokens and examples of a unit for `partitions.of_each`."""
    return {f"{split}_{key}": meta["totals"][f"{split}_{key}"] for key in _COUNTED for split in SPLITS}


def _streamed(work: Path, parts: list[_Part], totals: Mapping[str, int], known: Meta) -> Meta:
    """Write all files but meta.json. Returns their keys of meta.json."""
    crcs, itemsize = list[bytes](), token_dtype_of(known, META_NAME).itemsize
    keys: Meta = {"shards": {}, "index": {}, "ids": {}, **({"loss_bits": {}} if "chat_template" in known else {})}

    def write(name: str, content: Iterator[Any]) -> Meta:
        return write_whole(work, name, content, crcs)

    for split in SPLITS:
        tokens = (whole(part.folder / f"{split}_tokens.bin", itemsize * part.tokens[split]) for part in parts)
        record = write(f"{split}_tokens.bin", (block for some in tokens for block in some))
        keys["shards"][split] = [{**record, "tokens": totals[f"{split}_tokens"]}]
    for split in SPLITS:
        entries = totals[f"{split}_examples"]
        keys["index"][split] = {**write(f"{split}_idx.npy", _starts(parts, split, entries)), "entries": entries}
    for split in SPLITS:
        lines = (line for part in parts for line in lines_of(part.folder, split, part.examples[split]))
        keys["ids"][split] = {**write(f"index/{split}_ids.txt", lines), "entries": totals[f"{split}_examples"]}
    for split in SPLITS if "loss_bits" in keys else ():
        keys["loss_bits"][split] = write(f"{split}_loss.bits", packed(_loss(parts, split)))
    return {**keys, "checksums": {**write_whole(work, CHECKSUMS, crcs), "block_bytes": BLOCK_BYTES}}


def _starts(parts: list[_Part], split: str, entries: int) -> Iterator[bytes]:
    """Yield the offsets of all units."""
    yield npy_header(entries)
    before = 0
    for part in parts:
        path, count, tokens = part.folder / f"{split}_idx.npy", part.examples[split], part.tokens[split]
        yield from shifted(path, count, tokens, before, has_end=False)
        before += tokens


def _loss(parts: list[_Part], split: str) -> Iterator[NDArray[np.uint8]]:
    """Yield 0 or 1 for each token of all units. The bits of a unit need not end at a byte."""
    for part in parts:
        left = part.tokens[split]
        for block in whole(part.folder / f"{split}_loss.bits", num_bytes(left)):
            values = np.unpackbits(np.frombuffer(block, dtype=np.uint8), bitorder="little")[:left]
            left -= len(values)
            yield values
