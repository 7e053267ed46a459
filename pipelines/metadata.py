"""An outcome as a MaterializeResult: meta.json key by key, what must not stand in it, a picture, decoded examples."""

import base64
from typing import Any

import dagster as dg

from niels_gpt.cache.formats import SPLITS
from niels_gpt.inspection.plot import plot
from niels_gpt.inspection.show import sample_texts
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY, Outcome
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.tokenizer import load_tokenizer

Metadata = dict[str, dg.MetadataValue[Any]]

_MIB = 2**20
_SHOWN_TOKENS = 300  # of the first group of rollouts
_FIRST_IDS = 8  # of the draft's vocabulary: a list of 32,000 belongs into a file


def materialize_result(outcome: Outcome) -> dg.MaterializeResult[None]:
    """Return what Dagster records of an outcome; its data version is the content, so equal bytes make nothing stale."""
    meta, (picture, examples) = mirrored(outcome), _to_look_at(outcome)
    headline = [f"{split}_{unit}" for unit in ("groups", "samples", "examples", "tokens") for split in SPLITS]
    return dg.MaterializeResult(
        # In the order in which the asset's page shows it: what a person looks at first, the long table last.
        metadata={
            **picture,
            **{key: meta[key] for key in headline if key in meta},
            **_of_the_run(outcome),
            **meta,
            **examples,
        },
        data_version=dg.DataVersion(str(outcome.meta["content_sha256"])),
    )


def draft_vocab_result(outcome: Outcome) -> dg.MaterializeResult[None]:
    """Return what Dagster records of eagle3/draft_vocab: meta.json key by key, and a picture of coverage by size."""
    from niels_gpt.recipes.eagle3.draft_vocab import picture

    meta = mirrored(outcome)
    try:
        png = base64.b64encode(picture(outcome.meta, outcome.key)).decode()
        shown: dg.MetadataValue[Any] = dg.MetadataValue.md(f"![coverage by size](data:image/png;base64,{png})")
    except (LookupError, TypeError, ValueError) as error:
        shown = dg.MetadataValue.text(f"the cache cannot be read: {error!r}")
    first = {name: meta[name] for name in ("draft_vocab_size", "coverage")}
    return dg.MaterializeResult(
        metadata={"picture": shown, **first, **_of_the_run(outcome), **meta},
        data_version=dg.DataVersion(str(outcome.meta["content_sha256"])),
    )


def targets_result(outcome: Outcome) -> dg.MaterializeResult[None]:
    """Return what Dagster records of eagle3/targets: manifest.json key by key, and what meta.json adds to it."""
    from niels_gpt.eagle3.format.manifest import read_manifest

    meta, manifest = mirrored(outcome), read_manifest(outcome.path)
    del meta["manifest"]
    selected = manifest["selected_token_ids"]
    manifest["selected_token_ids"] = {"count": len(selected), "first": selected[:_FIRST_IDS]}
    return dg.MaterializeResult(
        metadata={
            **_picture_of_targets(outcome),
            **{name: dg.MetadataValue.int(number) for name, number in outcome.meta["totals"].items()},
            **{name: meta[name] for name in ("bytes_per_token", "supervised_share", "kept_mass", "draft_mass")},
            **{f"token_bytes/{part}": _typed(size) for part, size in outcome.meta.get("token_bytes", {}).items()},
            **_of_the_run(outcome),
            **meta,
            "sidecar_version": meta["format_version"],
            **{name: _typed(manifest[name]) for name in sorted(manifest)},
        },
        data_version=dg.DataVersion(str(outcome.meta["content_sha256"])),
    )


def _picture_of_targets(outcome: Outcome) -> Metadata:
    from niels_gpt.eagle3.inspect.plot import plot as plot_targets
    from niels_gpt.eagle3.inspect.stats import stats

    try:
        png = base64.b64encode(plot_targets(stats(outcome.path), outcome.key)).decode()
    except (ValueError, OSError) as error:
        return {"picture": dg.MetadataValue.text(f"the cache cannot be read: {error}")}
    return {"picture": dg.MetadataValue.md(f"![lengths, entropy, mass](data:image/png;base64,{png})")}


def mirrored(outcome: Outcome) -> Metadata:
    """Return every key of meta.json as typed metadata; Dagster's UI plots the numbers from one run to the next.

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
    return {key: _typed(meta[key]) for key in sorted(meta)}


def _typed(value: Any) -> dg.MetadataValue[Any]:
    if value is None:
        return dg.MetadataValue.null()
    if isinstance(value, bool):  # before int, for a bool is one
        return dg.MetadataValue.bool(value)
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


def _of_the_run(outcome: Outcome) -> Metadata:
    """Return what differs between two builds of the same bytes, or is derived; meta.json has none of it (D10)."""
    meta, value = outcome.meta, dg.MetadataValue
    found: Metadata = {
        "run/state": value.text("reused: nothing it depends on has changed" if outcome.reused else "built"),
        "run/seconds": value.float(round(outcome.seconds, 3)),
        "run/recipe_fingerprint": value.text(outcome.fingerprint),
        "path": value.path(outcome.path.absolute()),
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
        found["supervised_share"] = value.float(round(sum(meta["loss_tokens"].values()) / tokens, 4))
    if tokens and "supervised_tokens" in meta:
        found["supervised_share"] = value.float(round(sum(meta["supervised_tokens"].values()) / tokens, 4))
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
