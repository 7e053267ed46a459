"""Checks of meta.json: its bytes, the sums and sizes in it that must agree, and the warnings about the source.

Decides when a build is warned about dropped documents (`dropped_share`), about documents in another encoding
(`repaired_share`), and about a source that ended before the token budget (`budget_reached`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from niels_gpt.builders.meta_keys import content_sha256, why_unmet
from niels_gpt.cache.checksums import CRC_DTYPE, covered_files
from niels_gpt.cache.formats import (
    OFFSET_DTYPE,
    SPLITS,
    check_format,
    has_loss_bits,
    is_imported,
    num_blocks,
    num_bytes,
)
from niels_gpt.cache.meta import KINDS
from niels_gpt.display.numbers import number_of, share_text
from niels_gpt.inspection.file_checks import (
    HEADER_BYTES,
    CacheFiles,
    Damage,
)
from niels_gpt.signals import above, found_in
from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES
from niels_gpt.storage.checks import Figures
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import meta_crc32, parse_object, read_regular, shortened
from niels_gpt.tokenizers.files import MODEL_NAME, TOKENIZER_JSON
from niels_gpt.tokenizers.protocol import token_dtype_name
from niels_gpt.tokenizers.vocabulary import integer, most_ids, token_dtype_of

_CRC_KEY = "meta_crc32"
_UNREAD = ("too_large", "unreadable_row")  # counters of every loader
_UNREAD_USER_DEFINED = (  # of user files
    *(*_UNREAD, "malformed", "missing_field", "not_text", "unknown_role", "weight_0", "git_lfs_pointer"),
)
_MAX_REPAIRED_SHARE = 0.01  # of the documents or examples read: more point to files of another encoding
_NOT_LOST = frozenset({"split_full", "groups_without_sample"})
"""Dropped because the split had all that was asked for; counted by its samples already."""

Meta = dict[str, Any]
Problem = tuple[str, str]
"""A key of meta.json, and what was found there and expected."""


# --- its bytes --------------------------------------------------------------------------------------------------------


def described(folder: Path) -> Meta | Damage:
    """Return the meta.json of a version, or why it cannot be trusted: then nothing else can be checked."""
    try:
        raw = read_regular(folder / META_NAME)
    except FileNotFoundError:
        return Damage(META_NAME, 0, 0, "no such file, expected the description of a cache")
    except CacheError as error:
        return Damage(META_NAME, 0, 0, error.problem)
    except OSError as error:
        return Damage(META_NAME, 0, 0, str(error))
    try:
        meta = parse_object(raw)
    except ValueError as error:
        return Damage(META_NAME, _byte_of(error.__cause__, raw), len(raw), str(error))
    stored, actual = meta_crc32(raw)
    if stored == actual or (stored is None and "checksums" not in meta and not _has_damaged_crc_key(meta)):
        return _of_known_kind(meta)  # older builders wrote neither a CRC-32 nor checksums
    what = f"no {_CRC_KEY}" if stored is None else f"another {_CRC_KEY} than its bytes have"
    return Damage(META_NAME, 0, len(raw), f"{what}, expected {actual:08x}; the other files were not looked at")


def _of_known_kind(meta: Meta) -> Meta | Damage:
    if meta.get("kind") in KINDS:
        return meta
    kind, expected = shortened(meta.get("kind")), ", ".join(KINDS)
    return Damage(META_NAME, 0, 0, f"not of a cache of this project: kind is {kind}, expected one of {expected}")


def _byte_of(error: BaseException | None, raw: bytes) -> int:
    """Return the byte at which the parser stopped."""
    if isinstance(error, UnicodeDecodeError):
        return error.start
    return len(raw.decode()[: error.pos].encode()) if isinstance(error, JSONDecodeError) else 0


def _has_damaged_crc_key(meta: Meta) -> bool:
    """Whether a key differs from `meta_crc32` in one character."""
    keys = (key for key in meta if len(key) == len(_CRC_KEY))
    return any(sum(a != b for a, b in zip(key, _CRC_KEY, strict=True)) == 1 for key in keys)


# --- sums and sizes ---------------------------------------------------------------------------------------------------


def sum_damages(files: CacheFiles) -> Iterator[Damage]:
    """Yield what does not agree within meta.json, each with its line.

    Raises: LookupError, TypeError and the like where a key is missing or of another type.
    """
    check_format(files.meta, str(files.folder / META_NAME))
    raw = read_regular(files.folder / META_NAME)
    for key, problem in _sum_problems(files.meta, files.records):
        start = max(0, raw.find(f'\n  "{key}":'.encode()) + 1)
        end = raw.find(b"\n", start) if start else len(raw)
        yield Damage(META_NAME, start, end, problem)


def content_sha256_problem(meta: Meta, records: list[dict[str, Any]]) -> str | None:
    """Compare content_sha256 with the records of the files; None where it is right."""
    actual = content_sha256(records)
    if actual == meta["content_sha256"]:
        return None
    return f"content_sha256 is {str(meta['content_sha256'])[:12]}, but the files it names give {actual[:12]}"


def _sum_problems(meta: Meta, records: list[dict[str, Any]]) -> Iterator[Problem]:
    if problem := content_sha256_problem(meta, records):
        yield "content_sha256", problem
    if meta["kind"] == "rollouts":  # its vocabulary may be unknown, and its index is compared by its own checks
        return
    yield from _vocabulary(meta)
    if meta["kind"] == "tokenizer":
        models = [record for record in records if record["name"] in (MODEL_NAME, TOKENIZER_JSON)]
        if [record["sha256"] for record in models] != [meta["tokenizer_sha256"]]:
            name = models[0]["name"] if models else MODEL_NAME
            yield "tokenizer_sha256", f"tokenizer_sha256 is not the sha256 of {name}"
        return
    if meta.get("built") is False and any(record["bytes"] for record in records):
        yield "built", "built is false, but it names files that hold something"
    if not isinstance(meta.get("source", {}), dict):
        yield "source", f"source is a {type(meta['source']).__name__}, expected an object"
    for split in SPLITS:
        yield from _split_sums(meta, split)
    if "checksums" in meta:
        blocks = sum(num_blocks(record["bytes"]) for record in covered_files(meta))
        yield from _compare("checksums", "checksums.bytes", meta["checksums"]["bytes"], CRC_DTYPE.itemsize * blocks)
    yield from _document_counts(meta)


def _compare(key: str, name: str, value: Any, expected: Any) -> Iterator[Problem]:
    if value != expected:
        yield key, f"{name} is {value!r}, expected {expected!r} by the rest of it"


def _vocabulary(meta: Meta) -> Iterator[Problem]:
    size, ids = meta.get("vocab_size"), meta.get("special_token_ids")
    most = most_ids(meta, META_NAME)
    if integer(size, 1, most + 1) is None:
        yield "vocab_size", f"vocab_size is {size!r}, expected 1 to {most:,}"
    elif ids == {} and (meta["kind"] != "sft" or has_loss_bits(meta)):
        pass  # of a tokenizer without the sentinels
    elif not isinstance(ids, dict) or not all(
        isinstance(ids.get(name), int) and 0 <= ids[name] < size for name in SPECIAL_TOKEN_NAMES
    ):
        yield "special_token_ids", f"special_token_ids are {ids!r}, expected an id of the {size} for each sentinel"


def _split_sums(meta: Meta, split: str) -> Iterator[Problem]:
    shards, key = meta["shards"][split], f"{split}_tokens"
    tokens = sum(record["tokens"] for record in shards)
    yield from _compare("totals", f"totals.{key}", meta["totals"][key], tokens)
    yield from _compare(key, key, meta.get(key, tokens), tokens)
    expected = token_dtype_name(meta["vocab_size"])
    yield from _compare("token_dtype", "token_dtype", meta.get("token_dtype", "uint16-le"), expected)
    itemsize, may_be_short = token_dtype_of(meta, META_NAME).itemsize, {len(shards) - 1}
    if "partitions" in meta:
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
    """Compare the numbers of each partition with its shards, and their sums with those of the cache.

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


# --- warnings about the source ----------------------------------------------------------------------------------------


def budget_problems(meta: Meta, figures: Figures) -> Iterator[str]:
    """Yield the splits with fewer tokens than their budget, but for the bundled sample, and those the source lacks."""
    totals = meta["totals"]
    if meta["built"] is False and "budget_reached" not in meta:
        figures.say("A stub: nothing was asked for.")
        return
    _say_budgets(meta, figures)
    if meta["built"] == "partial":
        empty = [split for split in SPLITS if not totals[f"{split}_tokens"]]
        yield f"built is partial: the source lacks a split. Empty: {' and '.join(empty) or 'none'}"
    if meta["source"].get("kind") == "sample":
        return  # it is small on purpose
    for split in SPLITS:
        if meta["budget_reached"][split] is False:  # null: no budget
            yield (
                f"{split} has {totals[f'{split}_tokens']:,} of {meta[f'max_{split}_tokens']:,} tokens: "
                f"{why_unmet(meta)}. Give it more text, or lower the budget"
            )


def _say_budgets(meta: Meta, figures: Figures) -> None:
    counts = {f"{split}_tokens": int(meta["totals"][f"{split}_tokens"]) for split in SPLITS}
    asked = [meta[f"max_{split}_tokens"] for split in SPLITS]
    limits = [f"{number_of(count, 'token')}" if count is not None else "no limit" for count in asked]
    said = ", ".join(
        f"{split} has {number_of(counts[f'{split}_tokens'], 'token')} ({limit} asked for)"
        for split, limit in zip(SPLITS, limits, strict=True)
    )
    is_sample = " The bundled sample is small on purpose." if meta["source"].get("kind") == "sample" else ""
    figures.say(
        f"{said[0].upper()}{said[1:]}.{is_sample}",
        **counts,
        asked=", ".join(f"{split} {limit}" for split, limit in zip(SPLITS, limits, strict=True)),
    )


def dropped_problems(meta: Meta, max_share: float, figures: Figures) -> Iterator[str]:
    """Compare the dropped documents, as a share of those that reached the builder, with the limit.

    Of what the loader left out (source.counters), rows that could not be read or were too large count too. The other
    counters do not tell losses from the rest: `blank` is a separator line of wikitext but a message of oasst1, whose
    other counters count messages too, not examples; `not_english` was asked for; `repaired_utf8` is a repair. A
    user-defined source, and any source of text, has none of those: there rows without a text or a chat count too.
    """
    if meta["built"] is False:
        figures.say("A stub: nothing was read.")
        return
    unit = _unit(meta)
    dropped = {reason: count for reason, count in sorted(meta["dropped"].items()) if reason not in _NOT_LOST}
    counters = meta["source"].get("counters", {})
    all_rows = meta["source"].get("kind") == "own" or meta["kind"] == "pretrain"
    unread = {reason: counters.get(reason, 0) for reason in (_UNREAD_USER_DEFINED if all_rows else _UNREAD)}
    for reason, count in unread.items():
        if count:  # the builder may drop others for the same reason
            dropped[reason] = dropped.get(reason, 0) + count
    read, total = int(meta[f"{unit}_read"]) + sum(unread.values()), sum(dropped.values())
    units = "samples and rows" if unit == "samples" and any(unread.values()) else unit  # a row may hold many samples
    share = total / read if read else 0.0
    figures.say(
        f"{share_text(share)} of {read:,} {units} were dropped, at most {share_text(max_share)} may be.",
        dropped_share=share,
        dropped=total,
        read=read,
        limit=share_text(max_share),
        reasons=", ".join(f"{reason} {count:,}" for reason, count in dropped.items() if count) or "none",
    )
    if total > max_share * read:
        yield (
            f"{total:,} of {read:,} {units} were dropped ({total / read:.2%}), expected at most {max_share:.2%}: "
            + ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
        )


def repaired_problems(meta: Meta, figures: Figures) -> Iterator[str]:
    """Yield the counts of kept documents with repaired or odd text, where they are a large share of those read."""
    if meta["built"] is False:
        figures.say("A stub: nothing was read.")
        return
    read, counters = int(meta[f"{_unit(meta)}_read"]), meta["source"].get("counters", {})
    most = max(counters.get(reason, 0) for reason in _ODD_TEXTS)
    share, limit = most / read if read else 0.0, share_text(_MAX_REPAIRED_SHARE)
    figures.say(
        f"{share_text(share)} of {read:,} {_unit(meta)} were repaired or hold NUL, at most {limit} may.",
        repaired_share=share,
        **{reason: counters.get(reason, 0) for reason in _ODD_TEXTS},
        read=read,
        limit=limit,
    )
    for reason, problem in _ODD_TEXTS.items():
        count = counters.get(reason, 0)
        if count > max(1, _MAX_REPAIRED_SHARE * read):  # a single one is in the build's log
            yield f"of {read:,} {_unit(meta)}, {count:,} {problem} ({reason})"


_ODD_TEXTS = {
    "repaired_utf8": "were not UTF-8 and have U+FFFD where they could not be decoded: convert the files to UTF-8, as "
    "does `iconv -f LATIN1 -t UTF-8`, and build again",
    "texts_with_nul": "hold NUL characters, a sign of UTF-16 without a byte-order mark: convert the files to UTF-8, as "
    "does `iconv -f UTF-16LE -t UTF-8`, and build again",
}


def signal_problems(meta: Meta, figures: Figures) -> Iterator[str]:
    """Yield the signals of the table that are above their share."""
    found = found_in(meta)
    shown = ", ".join(f"{each.signal.counter.rstrip(':')} {each.number:,}" for each in found) or "none"
    figures.say(f"Signs that the source is not what it is taken for: {shown}.", signals=shown)
    yield from map(str, above(meta))


def _unit(meta: Meta) -> str:
    return {"sft": "examples", "rollouts": "samples"}.get(meta["kind"], "documents")
