"""`inspect`: what a cache was made from and in which form, and the slots of one sample, as tables of text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from niels_gpt.display.numbers import count_text, size_text
from niels_gpt.eagle3.format.layout import SIDECAR
from niels_gpt.eagle3.format.plan import PLAN_NAME
from niels_gpt.eagle3.inspect.native import show as native
from niels_gpt.eagle3.inspect.native.opened import NativeCache, NativeRow
from niels_gpt.eagle3.inspect.open_cache import Decoder, Table, refuse_malformed
from niels_gpt.eagle3.inspect.opening import open_cache
from niels_gpt.eagle3.inspect.published import show as published
from niels_gpt.eagle3.inspect.published.opened import PublishedCache, Row
from niels_gpt.storage.errors import PositionError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import shortened

_FIRST_IDS = 8  # of selected_token_ids
_DIGITS = 12  # of a sha256


@refuse_malformed
def description(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """Return what a cache records about itself, ready for JSON.

    manifest: all keys; of selected_token_ids the number and the first few. layout: dtype and shape of each field of a
    sample; of a native cache, of each tensor's row. shard_bytes: of all shards together. sample_bytes: where all
    samples have one size. num_shards, shards_found: declared and existing.
    plan: sidecar/plan.json; None where there is none. has_receipts: whether this project wrote the shards. complete:
    whether there is a meta.json; None for a cache that the producer of this project did not make.
    Raises: FileNotFoundError, CacheError.
    """
    return _description(open_cache(path, follow_links=follow_links))


def _description(cache: PublishedCache | NativeCache) -> dict[str, Any]:
    selected = cache.manifest.get("selected_token_ids") or []
    return {
        "cache": str(cache.path),
        "manifest": {
            **cache.manifest,
            "selected_token_ids": {"count": len(selected), "first": selected[:_FIRST_IDS]},
        },
        **(native.sizes(cache) if isinstance(cache, NativeCache) else published.sizes(cache)),
        "num_shards": cache.num_shards,
        "shards_found": len(cache.shards),
        "plan": cache.plan if os.path.lexists(cache.folder / SIDECAR / PLAN_NAME) else None,
        "has_receipts": cache.is_ours,
        "complete": (cache.folder / META_NAME).is_file() if cache.is_planned else None,
    }


@refuse_malformed
def summary(path: Path, *, follow_links: bool = False) -> Table:
    """Return a cache's description as pairs of a name and a value. Raises: as `description`."""
    cache = open_cache(path, follow_links=follow_links)
    about, form = _description(cache), native if isinstance(cache, NativeCache) else published
    manifest, plan, selected = about["manifest"], about["plan"], about["manifest"]["selected_token_ids"]
    state, sidecar = _state(about)
    size = f"{about['shards_found']:,} of {about['num_shards']:,}, {size_text(about['shard_bytes'])}"
    rows: Table = [
        ("cache", f"{path} ({state})"),
        ("form", form.form_text(about)),
        ("target", _printable(str(manifest.get("target_model")))),
        ("auxiliary layers", f"blocks {', '.join(map(str, manifest.get('aux_layer_ids') or []))}, counted from 0"),
        (
            "draft vocabulary",
            f"{selected['count']:,} of {manifest.get('target_vocab_size'):,} ids: "
            f"{', '.join(map(str, selected['first']))}, ...",
        ),
        ("samples", f"{manifest['num_samples']:,} of {form.width_text(about)}"),
        ("shards", size),
        *form.more_rows(about),
    ]
    rows += [(name, f"{shape} {dtype}") for name, (dtype, shape) in about["layout"].items()]
    if imported := manifest.get("imported"):
        return [*rows, ("imported", _imported_text(imported))]
    return [*rows, *(_plan_rows(plan) if plan else [("sidecar", sidecar)])]


def _imported_text(imported: Any) -> str:
    """Return which tool an imported cache is from, and how its layers and norm are known."""
    samples = imported["proved"]["samples"]
    known = f"found with the target on {count_text(samples)} samples" if samples else "as stated, not compared"
    return _printable(f"from {imported['from']}; layers and norm {known}")


def _state(about: dict[str, Any]) -> tuple[str, str]:
    """Return whether a cache is complete, and what its sidecar holds where there is no plan, as text."""
    if about["complete"] is not None:
        state = "complete" if about["complete"] else "not finished: precompute --resume continues it"
        return state, f"{PLAN_NAME} is missing: verify names what else is"
    if about["has_receipts"]:
        return "without a plan", "receipts, and no plan: precompute did not make this cache"
    return "without a sidecar", "none: another tool wrote this cache"


def _plan_rows(plan: dict[str, Any]) -> Table:
    target, tokenizer, samples = plan["target"], plan["tokenizer"], plan["samples"]
    revision = target.get("revision") or f"weights {str(target.get('weights_sha256'))[:_DIGITS]}"
    lost = ", ".join(f"{why} {count:,}" for why, count in {**plan["dropped"], **plan["altered"]}.items())
    start = tokenizer.get("document_start")
    start_text = f", chats begin with {start['token']} (id {start['id']})" if start else ""
    values = {
        "made from": f"{target.get('name')}, {revision}, config {str(target.get('config_sha256'))[:_DIGITS]}",
        "tokenizer": f"{str(tokenizer['sha256'])[:_DIGITS]}, loss mask by {tokenizer['mask_by']}, pad id "
        f"{tokenizer['pad_id']}{start_text}",
        "source": _flat(plan["source"]),
        "dropped or truncated": lost or "nothing",
        "tokens": f"{count_text(samples['tokens'])}, {count_text(samples['supervised_tokens'])} of them supervised",
        "run": ", ".join(f"{name} {value}" for name, value in plan["run"].items()),
    }
    return [(name, _printable(value)) for name, value in values.items()]


def _flat(values: dict[str, Any], of: str = "") -> str:
    """Return the values of nested objects on one line; sha256 are shortened, what is null is left out."""
    parts = []
    for name, value in values.items():
        if isinstance(value, dict):
            parts.append(_flat(value, f"{of}{name}."))
        elif value is not None:
            parts.append(f"{of}{name} {str(value)[:_DIGITS] if name == 'fingerprint' else value}")
    return ", ".join(filter(None, parts))


@refuse_malformed
def shard_rows(path: Path, *, first: int = 5, follow_links: bool = False) -> Table:
    """Return a table of the first shards: samples, bytes, and what their receipts count."""
    cache = open_cache(path, follow_links=follow_links)
    names = native.COUNTED if isinstance(cache, NativeCache) else published.COUNTED
    rows: Table = [("shard", "samples", "size", *(name.replace("_", " ") for name in names))]
    for shard in cache.shards[:first]:
        counts = (cache.receipt(shard) or {"facts": {}})["facts"]
        columns = [f"{counts[name]:,}" if name in counts else "-" for name in names]
        size = (
            native.shard_bytes(cache, shard)
            if isinstance(cache, NativeCache)
            else cache.layout.shard_bytes(cache.rows_of(shard))
        )
        rows.append((f"{shard:06d}", f"{cache.rows_of(shard):,}", size_text(size), *columns))
    if len(cache.shards) > first:
        rows.append((f"and {len(cache.shards) - first:,} more", *[""] * (2 + len(names))))
    return rows


# --- one sample -------------------------------------------------------------------------------------------------------


@refuse_malformed
def sample_heading(path: Path, number: int, *, follow_links: bool = False) -> str:
    """Return a sample's name, and how many tokens and positions it has. Raises: as `slot_rows`."""
    row = _row(open_cache(path, follow_links=follow_links), number)
    return native.heading(row) if isinstance(row, NativeRow) else published.heading(row)


@refuse_malformed
def slot_rows(
    path: Path,
    number: int,
    tokenizer: Decoder | None = None,
    *,
    begin: int = 0,
    slots: int = 32,
    follow_links: bool = False,
) -> Table:
    """Return a table of some slots of sample `number` of the cache: id, masks, likeliest draft tokens, norms.

    Of a native cache it has the raw tokens: what is stored of each, the target's most probable token, and the
    likeliest draft tokens by the target's head.
    tokenizer: of the target, for the text of the ids; None: ids alone. begin: the first slot; slots: how many.
    Raises: FileNotFoundError, CacheError; ValueError for a sample or a slot that does not exist.
    """
    row = _row(open_cache(path, follow_links=follow_links), number)
    if not 0 <= begin < max(1, row.length):
        raise PositionError(f"slot {begin}: sample {number} has {row.length} tokens, expected 0 to {row.length - 1}")
    chosen = range(begin, min(row.length, begin + slots))
    if isinstance(row, NativeRow):
        return native.token_rows(row, tokenizer, chosen)
    return published.slot_rows(row, tokenizer, chosen)


def _row(cache: PublishedCache | NativeCache, number: int) -> Row | NativeRow:
    if not 0 <= number < cache.num_samples:
        raise PositionError(f"sample {number}: there are {cache.num_samples}, expected 0 to {cache.num_samples - 1}")
    return cache.row(number)


def _printable(text: str) -> str:
    return text if text.isprintable() else shortened(text)
