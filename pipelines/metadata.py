"""An outcome as a MaterializeResult: a picture, the main facts, meta.json key by key, decoded examples.

Dagster's page shows the entries in order and plots every number. So numbers that are no results, such as settings, are
text.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import dagster as dg

from niels_gpt.cache.formats import SPLITS
from niels_gpt.chat.tokenizers import CacheBackend
from niels_gpt.display.numbers import many, share_text, size_text
from niels_gpt.display.sketch import sketch
from niels_gpt.kinds.kind import Cache, Held, Kind, kind_named, look_command
from niels_gpt.kinds.look import tokenizer_for
from niels_gpt.recipes.records import Outcome
from niels_gpt.recipes.resolve import listing_of, resolve_source
from niels_gpt.recipes.tokenizer import opened
from niels_gpt.settings import Settings
from niels_gpt.storage.fileio import META_NAME, canonical_json
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer

Metadata = dict[str, dg.MetadataValue[Any]]

LISTING = "listing"
"""Entry of an observation: `listing_digest` of the files that it has read."""
_LISTING_DIGITS = 16
_MIB = 2**20
_SHOWN_TOKENS = 120  # of an item in the table of examples
_MOST_PARTITIONS = 100  # rows of a table in the event log
_MOST_REASONS = 3  # named in one line
_MIRRORED_ELSEWHERE = frozenset({"manifest"})
"""Keys of meta.json that a kind gives one by one, in its `more_results`."""
_RESULTS = frozenset(
    {
        *(f"{split}_{unit}" for split in SPLITS for unit in ("groups", "samples", "examples", "tokens")),
        *(f"{unit}_read" for unit in ("documents", "examples", "samples", "groups")),
        *("documents", "documents_with_reserved_literal", "documents_with_u2581"),  # of a tokenizer's texts
        *("bytes_given", "bytes_seen", "share_seen", "unknown_ids"),
        *("coverage", "disk_bytes", "bytes_per_token", "utf8_bytes_per_token"),
        *("supervised_share", "kept_mass", "draft_mass"),
        *(
            "num_samples",
            "num_shards",
            "samples",
            "shards",
            "tokens",
            "supervised_tokens",
            "positions",
            "aux_rows",
            "target_rows",
        ),
        *("folding/token_factor", "folding/pair_factor"),
    }
)
"""Keys of meta.json and manifest.json whose numbers change from one build to the next; the others are settings."""


def materialize_result(outcome: Outcome) -> dg.MaterializeResult[None]:
    """Return the materialization of an outcome. Its data version is the content: equal bytes make nothing stale."""
    kind = _kind(outcome.meta)
    cache = Cache(outcome.path, outcome.path.resolve(), outcome.meta, kind)
    held, more = kind.held(outcome.meta), kind.more_results(cache)
    meta = {key: value for key, value in _mirrored(outcome).items() if key not in _MIRRORED_ELSEWHERE or not more}
    picture, examples = _to_look_at(cache)
    return dg.MaterializeResult(
        # In the order in which the asset's page shows it: what a person looks at comes first.
        metadata={
            **picture,
            **_in_words(outcome),
            **examples,
            **_partition_table(outcome),
            **_of_the_run(outcome),
            # under Dagster's own names: its page shows them at the top, and plots them
            **({"dagster/row_count": dg.MetadataValue.int(held.total(kind.unit))} if kind.unit else {}),
            "dagster/size_bytes": dg.MetadataValue.int(outcome.disk_bytes),
            **_derived(outcome, held),
            **meta,
            **{name: _typed(name, value) for name, value in more.items()},
        },
        data_version=dg.DataVersion(data_version(outcome.path, outcome.meta)),
    )


def data_version(path: Path, meta: Mapping[str, Any]) -> str:
    """Return the data version of a cache: its content_sha256; of a tokenizer.json and the files beside it, of what
    recipes compare of them: its ids, special tokens and chat template."""
    content = str(meta["content_sha256"])
    if meta.get("tokenizer_kind") != "huggingface" or len(meta["files"]) == 1:  # the kind: of a tokenizer alone
        return content
    try:
        tokenizer = opened(Path(os.path.abspath(path)), content)
        chat = CacheBackend(cast(HuggingFaceTokenizer, tokenizer))
    except (OSError, ValueError):  # a cache that needs these files names the fault
        return content
    of_chats = [chat.template, sorted(chat.variables.items()), sorted(chat.special_tokens)]
    facts = [tokenizer.sha256, sorted(tokenizer.control_ids), tokenizer.eos_id, *of_chats]
    return sha256(canonical_json(facts)).hexdigest()


def listing_digest(settings: Settings, name: str) -> str | None:
    """Return sixteen digits of the names, sizes and times of a source's files; None of a dataset on the hub.

    Raises: as `resolve_source`; OSError.
    """
    listing = listing_of(resolve_source(settings, name))
    return listing and listing[:_LISTING_DIGITS]


def observation_metadata(
    settings: Settings, name: str, provenance: Mapping[str, Any], warning: str | None
) -> dict[str, Any]:
    """Return the entries of an observation for the page of raw/NAME: the main facts, then the provenance.

    name: a source, or the key of its cache or observed asset. provenance: the source's part of a meta.json.
    """
    found: dict[str, Any] = {"warning": warning or "none"}
    with suppress(OSError, ValueError):  # a file that has just gone
        source = resolve_source(settings, name)
        abouts = [] if source.root is None else [(source.root / file).stat() for file in source.files]
        if abouts:  # not of a dataset on the hub
            found["size of the files"] = size_text(sum(about.st_size for about in abouts))
            found["newest change"] = dg.MetadataValue.timestamp(max(about.st_mtime for about in abouts))
    stated = ("files", "revision", "fingerprint")
    order = [*stated, *(key for key in sorted(provenance) if key not in stated)]
    return {**found, **{key: provenance[key] for key in order if provenance.get(key) is not None}}


def _kind(meta: Mapping[str, Any]) -> Kind:
    kind = kind_named(meta["kind"])
    assert kind is not None, meta["kind"]
    return kind


def _mirrored(outcome: Outcome) -> Metadata:
    """Return every key of meta.json as typed metadata. Numbers are results, which Dagster's UI plots over the runs.

    The lists of files, which grow with the corpus, are mirrored as count, tokens, bytes and the place of the full list.
    So are the partitions: their number, their rule, and the least, the mean and the greatest of each count.
    """
    meta, listed = outcome.meta, {"listed_in": str(outcome.path / META_NAME)}
    lists = dict[str, Any]()
    for key in ("shards", "files"):
        if isinstance(meta.get(key), dict):
            lists[key] = {split: _sums(records) for split, records in meta[key].items()} | listed
        elif key in meta:
            lists[key] = _sums(meta[key]) | listed
    if "partitions" in meta:
        lists["partitions"] = _ranges(meta["partitions"]) | listed
    return {key: _typed(key, value) for key, value in sorted({**meta, **lists}.items())}


def _typed(key: str, value: Any) -> dg.MetadataValue[Any]:
    """Return a value as an entry. A number that is no result of a build is text, for Dagster plots every number."""
    if value is None:
        return dg.MetadataValue.null()
    if isinstance(value, bool):  # before int, for a bool is one
        return dg.MetadataValue.bool(value)
    if isinstance(value, int | float) and key not in _RESULTS:
        return dg.MetadataValue.text(str(value))
    if isinstance(value, int):
        return dg.MetadataValue.int(value)
    if isinstance(value, float):
        return dg.MetadataValue.float(value)
    return dg.MetadataValue.text(value) if isinstance(value, str) else dg.MetadataValue.json(value)


def _ranges(partitions: dict[str, Any]) -> dict[str, Any]:
    """Return the partitions of a meta.json with the range of each count in the place of the list."""
    of_each = partitions["of_each"]
    ranges = {
        key: {"min": min(counts), "mean": round(sum(counts) / len(counts), 1), "max": max(counts)}
        for key in of_each[0]
        for counts in [[each[key] for each in of_each]]
    }
    return {**{key: value for key, value in partitions.items() if key != "of_each"}, "of_each": ranges}


def _sums(records: list[dict[str, Any]]) -> dict[str, Any]:
    sums = {"files": len(records)}
    for key in ("tokens", "bytes"):
        if all(key in record for record in records):
            sums[key] = sum(record[key] for record in records)
    return sums


def _in_words(outcome: Outcome) -> Metadata:
    """Return what a person asks first. These names have spaces; the keys of meta.json have none."""
    found = {"holds": held_in_words(outcome.meta)}
    if "dropped" in outcome.meta:
        most = sorted(outcome.meta["dropped"].items(), key=lambda item: (-item[1], item[0]))
        named = ", ".join(f"{reason} {count:,}" for reason, count in most[:_MOST_REASONS])
        found["left out"] = f"{named}{', ...' if len(most) > _MOST_REASONS else ''}" or "nothing"
    found["look inside"] = look_command(outcome.key, outcome.path)
    return {name: dg.MetadataValue.text(text) for name, text in found.items()}


def held_in_words(meta: Mapping[str, Any]) -> str:
    """Return what a cache holds, by its meta.json: 53 train, 1 val examples, 5,208 tokens, 73 % with loss."""
    held = _kind(meta).held(meta)
    if meta.get("built") is False:
        return "nothing: a stub; the settings leave its source out"
    parts = [f"{sum(counts.values()):,} {thing}s" for thing, counts in held.counts.items()]
    for thing, counts in [*held.counts.items()][:1]:
        if "" not in counts:
            parts[0] = ", ".join(f"{count:,} {split}" for split, count in counts.items()) + f" {thing}s"
    if "partitions" in meta:
        parts.append(many(meta["partitions"]["total"], "partition"))
    tokens = held.total("token")
    if held.loss and tokens:
        parts.append(f"{share_text(held.loss / tokens)} with loss")
    return ", ".join([*parts, *filter(None, [held.note])])


def _partition_table(outcome: Outcome) -> Metadata:
    """Return the partitions of a cache as a table, one row each; where there are many, the first ones."""
    of_each = (outcome.meta.get("partitions") or {}).get("of_each") or []
    rows = [dg.TableRecord({"partition": number, **each}) for number, each in enumerate(of_each[:_MOST_PARTITIONS])]
    found: Metadata = {"partition_table": dg.MetadataValue.table(rows)} if rows else {}
    if rest := len(of_each) - len(rows):
        found["partition_table/rest"] = dg.MetadataValue.text(
            f"{rest:,} more: partitions.of_each in {outcome.path / META_NAME}"
        )
    return found


def _of_the_run(outcome: Outcome) -> Metadata:
    """Return facts of this run; meta.json has none of them (D10)."""
    value = dg.MetadataValue
    found: Metadata = {
        "run/state": value.text("reused: nothing it depends on has changed" if outcome.reused else "built"),
        "run/seconds": value.float(round(outcome.seconds, 3)),
        "run/recipe_fingerprint": value.text(outcome.fingerprint),
    }
    if outcome.engine is not None:
        found["run/engine"] = value.text(outcome.engine)
    if outcome.peak_bytes is not None:
        found["run/peak_memory_mib"] = value.float(round(outcome.peak_bytes / _MIB, 1))
    if outcome.tokens_per_second is not None:
        found["run/tokens_per_second"] = value.float(round(outcome.tokens_per_second, 1))
    return found


def _derived(outcome: Outcome, held: Held) -> Metadata:
    """Return ratios to plot, which meta.json lacks."""
    meta, tokens, found = outcome.meta, held.total("token"), dict[str, float]()
    if tokens and "utf8_bytes" in meta:
        found["utf8_bytes_per_token"] = round(sum(meta["utf8_bytes"].values()) / tokens, 3)
    if tokens and held.loss:  # else every token has loss, or there is none
        found["supervised_share"] = round(held.loss / tokens, 4)
    return {name: dg.MetadataValue.float(ratio) for name, ratio in found.items()}


def _to_look_at(cache: Cache) -> tuple[Metadata, Metadata]:
    """Return a sketch, and a short table of pieces as `show` prints them: both go to the event log.

    The part that carries loss stands in [[ ]]. A cache that cannot be read gets the reason instead, so that its checks
    have the last word.
    """
    kind = cache.kind
    try:
        shown = kind.distributions(cache)
        places = [] if cache.is_stub else kind.places(cache)
        tokenizer = tokenizer_for(cache, is_needed=kind.needs_tokenizer) if places else None
        how: dict[str, Any] = {"tokens": _SHOWN_TOKENS, "color": False}
        rows = [
            {"split": split, "text": kind.show(cache, tokenizer, split=split, at=at, **how)} for split, at in places
        ]
    except (ValueError, OSError, LookupError, TypeError) as error:
        return {"picture": dg.MetadataValue.text(f"the cache cannot be read: {error}")}, {}
    picture: Metadata = {"picture": dg.MetadataValue.md(sketch(f"{kind.unit}s", shown))} if shown else {}
    return picture, {"examples": dg.MetadataValue.table([dg.TableRecord(row) for row in rows])} if rows else {}
