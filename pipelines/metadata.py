"""An outcome as a MaterializeResult: a picture, what a person asks first, meta.json key by key, decoded examples.

Dagster's page shows the entries in their order, but plots every number, by name: so what is no result is text.
"""

import base64
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import dagster as dg

from niels_gpt.cache.formats import SPLITS
from niels_gpt.chat.backends import CacheBackend
from niels_gpt.display.numbers import count_text, many, number_of, share_text, size_text
from niels_gpt.inspection.plot import plot
from niels_gpt.inspection.show import sample_texts
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY, Outcome
from niels_gpt.recipes.tokenizer import opened
from niels_gpt.settings import Settings
from niels_gpt.storage.fileio import META_NAME, canonical_json
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer
from pipelines.describe import look_inside

Metadata = dict[str, dg.MetadataValue[Any]]

_MIB = 2**20
_SHOWN_TOKENS = 300  # of the first group of rollouts
_FIRST_IDS = 8  # of the draft's vocabulary: a list of 32,000 belongs into a file
_MOST_PARTITIONS = 100  # rows of a table in the event log
_MOST_REASONS = 3  # named in one line
_UNITS = {"pretrain": "document", "sft": "example", "rollouts": "group"}
_RESULTS = frozenset(
    {
        *(f"{split}_{unit}" for split in SPLITS for unit in ("groups", "samples", "examples", "tokens")),
        *(f"{unit}_read" for unit in ("documents", "examples", "samples", "groups")),
        *("documents", "documents_with_reserved_literal", "documents_with_u2581"),  # of a tokenizer's texts
        *("bytes_given", "bytes_seen", "share_seen", "unknown_ids"),
        *("coverage", "disk_bytes", "bytes_per_token", "supervised_share", "kept_mass", "draft_mass"),
        *("num_samples", "num_shards"),
    }
)
"""Keys of meta.json and manifest.json whose numbers change from one build to the next; the others are settings."""


def materialize_result(outcome: Outcome) -> dg.MaterializeResult[None]:
    """Return what Dagster records of an outcome; its data version is the content, so equal bytes make nothing stale."""
    meta, (picture, examples) = mirrored(outcome), _to_look_at(outcome)
    headline = [f"{split}_{unit}" for unit in ("groups", "samples", "examples", "tokens") for split in SPLITS]
    return dg.MaterializeResult(
        # In the order in which the asset's page shows it: what a person looks at comes first.
        metadata={
            **picture,
            **_in_words(outcome),
            **_figures(outcome),
            **{key: meta[key] for key in headline if key in meta},
            **_of_the_run(outcome),
            **_partition_table(outcome),
            **examples,
            **meta,
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


def draft_vocab_result(outcome: Outcome) -> dg.MaterializeResult[None]:
    """Return what Dagster records of eagle3/draft_vocab: meta.json key by key, and a picture of coverage by size."""
    from niels_gpt.recipes.eagle3.draft_vocab import picture

    meta = mirrored(outcome)
    try:
        png = base64.b64encode(picture(outcome.meta, outcome.key)).decode()
        shown: dg.MetadataValue[Any] = dg.MetadataValue.md(f"![coverage by size](data:image/png;base64,{png})")
    except (LookupError, TypeError, ValueError) as error:
        shown = dg.MetadataValue.text(f"the cache cannot be read: {error!r}")
    return dg.MaterializeResult(
        metadata={
            "picture": shown,
            **_in_words(outcome),
            **_figures(outcome),
            "coverage": meta["coverage"],
            **_of_the_run(outcome),
            **meta,
        },
        data_version=dg.DataVersion(str(outcome.meta["content_sha256"])),
    )


def targets_result(outcome: Outcome) -> dg.MaterializeResult[None]:
    """Return what Dagster records of eagle3/targets: manifest.json key by key, and what meta.json adds to it."""
    from niels_gpt.eagle3.format.manifest import read_manifest

    meta, manifest = mirrored(outcome), read_manifest(outcome.path)
    del meta["manifest"]
    selected = manifest["selected_token_ids"]
    manifest["selected_token_ids"] = {"count": len(selected), "first": selected[:_FIRST_IDS]}
    sizes = outcome.meta.get("token_bytes", {})
    return dg.MaterializeResult(
        metadata={
            **_picture_of_targets(outcome),
            **_in_words(outcome),
            **_figures(outcome),
            **{name: dg.MetadataValue.int(number) for name, number in outcome.meta["totals"].items()},
            **{name: meta[name] for name in ("bytes_per_token", "supervised_share", "kept_mass", "draft_mass")},
            **{f"token_bytes/{part}": _typed(f"token_bytes/{part}", size) for part, size in sizes.items()},
            **_of_the_run(outcome),
            **meta,
            "sidecar_version": meta["format_version"],
            **{name: _typed(name, manifest[name]) for name in sorted(manifest)},
        },
        data_version=dg.DataVersion(str(outcome.meta["content_sha256"])),
    )


def observation_metadata(
    settings: Settings, name: str, provenance: Mapping[str, Any], warning: str | None
) -> dict[str, Any]:
    """Return what the page of raw/NAME shows of an observation: what a person asks first, then the provenance.

    name: of the source, or the key of its cache or observable. provenance: the source's part of a meta.json.
    """
    found: dict[str, Any] = {"warning": warning or "none"}
    if abouts := _files_of(settings, name):
        found["size of the files"] = size_text(sum(about.st_size for about in abouts))
        found["newest change"] = dg.MetadataValue.timestamp(max(about.st_mtime for about in abouts))
    stated = ("files", "revision", "fingerprint")
    order = [*stated, *(key for key in sorted(provenance) if key not in stated)]
    return {**found, **{key: provenance[key] for key in order if provenance.get(key) is not None}}


def _files_of(settings: Settings, name: str) -> list[os.stat_result]:
    """Return size and times of the files of a source; [] of a dataset on the hub, and where one has just gone."""
    try:
        source = resolve_source(settings, name)
        return [] if source.root is None else [(source.root / file).stat() for file in source.files]
    except (OSError, ValueError):
        return []


def _picture_of_targets(outcome: Outcome) -> Metadata:
    from niels_gpt.eagle3.inspect.plot import plot as plot_targets
    from niels_gpt.eagle3.inspect.stats import stats

    try:
        png = base64.b64encode(plot_targets(stats(outcome.path), outcome.key)).decode()
    except (ValueError, OSError) as error:
        return {"picture": dg.MetadataValue.text(f"the cache cannot be read: {error}")}
    return {"picture": dg.MetadataValue.md(f"![lengths, entropy, mass](data:image/png;base64,{png})")}


def mirrored(outcome: Outcome) -> Metadata:
    """Return every key of meta.json as typed metadata. Numbers are results, which Dagster's UI plots over the runs.

    The lists of files, which grow with the corpus, are mirrored as count, tokens, bytes and the place of the full list.
    So are the partitions: their number, their rule, and the least, the mean and the greatest of each count.
    """
    listed_in = str(outcome.path / META_NAME)
    lists: dict[str, Any] = {
        key: _counted(outcome.meta[key], listed_in) for key in ("shards", "files") if key in outcome.meta
    }
    if "partitions" in outcome.meta:
        lists["partitions"] = {**_ranges(outcome.meta["partitions"]), "listed_in": listed_in}
    meta: dict[str, Any] = {**outcome.meta, **lists}
    return {key: _typed(key, meta[key]) for key in sorted(meta)}


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


def _counted(value: Any, listed_in: str) -> dict[str, Any]:
    sums = {split: _sums(records) for split, records in value.items()} if isinstance(value, dict) else _sums(value)
    return {**sums, "listed_in": listed_in}


def _ranges(partitions: dict[str, Any]) -> dict[str, Any]:
    """Return the partitions of a meta.json with the range of each count in the place of the list."""
    of_each = partitions["of_each"]
    ranges = {
        key: {"min": min(counts), "mean": round(sum(counts) / len(counts), 1), "max": max(counts)}
        for key in of_each[0]
        for counts in [[each[key] for each in of_each]]
    }
    return {**{key: value for key, value in partitions.items() if key != "of_each"}, "of_each": ranges}


def _sums(records: list[dict[str, Any]]) -> dict[str, int]:
    sums = {"files": len(records)}
    for key in ("tokens", "bytes"):
        if all(key in record for record in records):
            sums[key] = sum(record[key] for record in records)
    return sums


def _in_words(outcome: Outcome) -> Metadata:
    """Return what a person wants to know, in a few words each. A name with a space is no key of meta.json."""
    meta, found = outcome.meta, dict[str, str]()
    found["holds"] = _held(outcome)
    if (totals := meta.get("totals")) and "train_tokens" in totals:
        found["tokens of each split"] = ", ".join(f"{totals[f'{split}_tokens']:,} {split}" for split in SPLITS)
    if (share := _supervised_share(outcome)) is not None:
        found["tokens with loss"] = share_text(share)
    if "dropped" in meta:
        most = sorted(meta["dropped"].items(), key=lambda item: (-item[1], item[0]))
        named = ", ".join(f"{reason} {count:,}" for reason, count in most[:_MOST_REASONS])
        found["left out"] = f"{named}{', ...' if len(most) > _MOST_REASONS else ''}" if named else "nothing"
    found["size on disk"] = size_text(outcome.disk_bytes)
    speed = outcome.tokens_per_second
    found["time to build"] = "none, it was up to date"
    if not outcome.reused:
        found["time to build"] = f"{outcome.seconds:,.3g} s" + (f", {count_text(speed)} tokens/s" if speed else "")
    found["look inside"] = look_inside(outcome.key, outcome.path)
    words: Metadata = {name: dg.MetadataValue.text(text) for name, text in found.items()}
    return {**words, "path": dg.MetadataValue.path(outcome.path.absolute())}


def _held(outcome: Outcome) -> str:
    meta, totals = outcome.meta, outcome.meta.get("totals") or {}
    if meta.get("built") is False:
        return "nothing: a stub, for its source was not asked for"
    if meta["kind"] == "tokenizer":
        return f"{number_of(meta['vocab_size'], 'id')}, {meta['tokenizer_kind']}"
    if meta["kind"] == "draft_vocab":
        of = f"{meta['target_vocab_size']:,} ids, for {share_text(meta['coverage'])} of the supervised tokens"
        return f"{meta['draft_vocab_size']:,} of the target's {of}"
    if meta["kind"] == "eagle3":
        return f"{many(totals['samples'], 'sample')}, {many(totals['tokens'], 'token')}"
    rows = meta["docs"] if meta["kind"] == "pretrain" else {each: totals[f"{each}_{_unit(meta)}s"] for each in SPLITS}
    parts = f", {many(meta['partitions']['total'], 'partition')}" if "partitions" in meta else ""
    return ", ".join(f"{rows[split]:,} {split}" for split in SPLITS) + f" {_unit(meta)}s{parts}"


def _unit(meta: Mapping[str, Any]) -> str:
    return _UNITS[meta["kind"]]


def _figures(outcome: Outcome) -> Metadata:
    """Return rows and bytes under Dagster's own names: its page shows them at the top, and plots them."""
    meta, totals = outcome.meta, outcome.meta.get("totals") or {}
    found: Metadata = {"dagster/size_bytes": dg.MetadataValue.int(outcome.disk_bytes)}
    rows: int | None = None
    if meta["kind"] == "pretrain":
        rows = sum((meta.get("docs") or {}).values())
    elif meta["kind"] in _UNITS:
        rows = sum(totals.get(f"{split}_{_unit(meta)}s", 0) for split in SPLITS)
    elif meta["kind"] == "eagle3":
        rows = totals["samples"]
    return found if rows is None else {"dagster/row_count": dg.MetadataValue.int(rows), **found}


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


def _supervised_share(outcome: Outcome) -> float | None:
    """Return the tokens with loss as a share of all, 0 to 1; None where every token has it, or there is none."""
    meta = outcome.meta
    if "supervised_share" in meta:
        return float(meta["supervised_share"])
    supervised = meta.get("loss_tokens") if meta["kind"] == "rollouts" else meta.get("supervised_tokens")
    return sum(supervised.values()) / outcome.tokens if supervised and outcome.tokens else None


def _of_the_run(outcome: Outcome) -> Metadata:
    """Return what differs between two builds of the same bytes, or is derived; meta.json has none of it (D10)."""
    meta, value = outcome.meta, dg.MetadataValue
    found: Metadata = {
        "run/state": value.text("reused: nothing it depends on has changed" if outcome.reused else "built"),
        "run/seconds": value.float(round(outcome.seconds, 3)),
        "run/recipe_fingerprint": value.text(outcome.fingerprint),
        "meta_json": value.path((outcome.path / META_NAME).absolute()),
        "size_mib": value.float(round(outcome.disk_bytes / _MIB, 3)),
    }
    for name in ("licence", "attribution", "revision"):
        if (fact := (meta.get("source") or {}).get(name)) is not None:
            found[name] = value.text(str(fact))
    if outcome.engine is not None:
        found["run/engine"] = value.text(outcome.engine)
    if outcome.peak_bytes is not None:
        found["run/peak_memory_mib"] = value.float(round(outcome.peak_bytes / _MIB, 1))
    if outcome.tokens_per_second is not None:
        found["run/tokens_per_second"] = value.float(round(outcome.tokens_per_second, 1))
    tokens = outcome.tokens
    if tokens and "utf8_bytes" in meta:
        found["bytes_per_token"] = value.float(round(sum(meta["utf8_bytes"].values()) / tokens, 3))
    if "dropped" in meta:
        found["dropped_total"] = value.int(sum(meta["dropped"].values()))
    if meta.get("kind") == "rollouts":
        after = sum(meta["tokens_after"].values())
        found["folding/token_factor"] = value.float(round(tokens / after, 4))
        found["folding/pair_factor"] = value.float(
            round(sum(meta["pairs"].values()) / sum(meta["pairs_after"].values()), 4)
        )
    if (share := _supervised_share(outcome)) is not None:
        found["supervised_share"] = value.float(round(share, 4))
    return found


def _to_look_at(outcome: Outcome) -> tuple[Metadata, Metadata]:
    """Return a picture of the lengths, under 20 kB, and a short table of decoded pieces: both go to the event log.

    In an sft cache the part that carries loss stands in [[ ]]. A cache that cannot be read gets the reason instead, so
    that its checks have the last word.
    """
    if outcome.key == TOKENIZER_KEY:
        return {}, {}
    if outcome.meta["kind"] == "rollouts":
        return _look_at_rollouts(outcome)
    try:
        png = base64.b64encode(plot(outcome.path)).decode()
        tokenizer = load_tokenizer(outcome.path.parent.parent / TOKENIZER_KEY, follow_links=False)
        rows = [] if outcome.meta["built"] is False else sample_texts(outcome.path, tokenizer)
    except (ValueError, OSError) as error:
        return {"picture": dg.MetadataValue.text(f"the cache cannot be read: {error}")}, {}
    picture: Metadata = {"picture": dg.MetadataValue.md(f"![lengths](data:image/png;base64,{png})")}
    return picture, {"examples": dg.MetadataValue.table([dg.TableRecord(row) for row in rows])} if rows else {}


def _look_at_rollouts(outcome: Outcome) -> tuple[Metadata, Metadata]:
    """Return a picture of what folding saves, and the first group with its loss in [[ ]]."""
    from niels_gpt.recipes.rollouts import look

    try:
        tokenizer = None
        if outcome.meta["tokenizer_sha256"] is not None:
            tokenizer = load_tokenizer(outcome.path.parent.parent / TOKENIZER_KEY, follow_links=False)
        png = base64.b64encode(look.picture(outcome.path, outcome.key)).decode()
        group = look.show(outcome.path, tokenizer, split="train", group=0, num_tokens=_SHOWN_TOKENS)
    except (ValueError, OSError) as error:
        return {"picture": dg.MetadataValue.text(f"the cache cannot be read: {error}")}, {}
    picture: Metadata = {"picture": dg.MetadataValue.md(f"![what folding saves](data:image/png;base64,{png})")}
    return picture, {"first_group": dg.MetadataValue.text(group)}
