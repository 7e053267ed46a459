"""`inspect`: what a cache was made from and in which form, and the slots of one sample, as tables of text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from niels_gpt.display.numbers import count_text, size_text
from niels_gpt.eagle3.format.layout import SIDECAR
from niels_gpt.eagle3.format.plan import PLAN_NAME
from niels_gpt.eagle3.inspect.open_cache import refuse_malformed
from niels_gpt.eagle3.inspect.opening import open_cache
from niels_gpt.eagle3.inspect.published.opened import AUX, INDICES, PROBS, VALUES, PublishedCache, Row
from niels_gpt.storage.codes import coded
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import shortened

_FIRST_IDS = 8  # of selected_token_ids
_TOP = 3  # draft tokens of a slot
_DIGITS = 12  # of a sha256

Table = list[tuple[str, ...]]


class Decoder(Protocol):
    """Turns ids back into text."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of some ids."""


@refuse_malformed
def description(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """Return what a cache records about itself, ready for JSON.

    manifest: all keys; of selected_token_ids the number and the first few. layout: dtype and shape of each field of a
    sample. sample_bytes; shard_bytes: of all shards together. num_shards, shards_found: declared and existing.
    plan: sidecar/plan.json; None where there is none. has_receipts: whether this project wrote the shards. complete:
    whether there is a meta.json; None for a cache that the producer of this project did not make.
    Raises: FileNotFoundError, CacheError.
    """
    cache = open_cache(path, follow_links=follow_links)
    selected = cache.manifest.get("selected_token_ids") or []
    fields, last = cache.layout.fields, cache.num_shards - 1
    return {
        "cache": str(path),
        "manifest": {
            **cache.manifest,
            "selected_token_ids": {"count": len(selected), "first": selected[:_FIRST_IDS]},
        },
        "layout": {name: [str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in fields.items()},
        "sample_bytes": cache.layout.row_bytes,
        "shard_bytes": max(0, last) * cache.layout.shard_bytes(cache.shard_size)
        + (cache.layout.shard_bytes(cache.rows_of(last)) if last >= 0 else 0),
        "num_shards": cache.num_shards,
        "shards_found": len(cache.shards),
        "plan": cache.plan if os.path.lexists(cache.folder / SIDECAR / PLAN_NAME) else None,
        "has_receipts": cache.is_ours,
        "complete": (cache.folder / META_NAME).is_file() if cache.is_planned else None,
    }


@refuse_malformed
def summary(path: Path, *, follow_links: bool = False) -> Table:
    """Return a cache's description as pairs of a name and a value. Raises: as `description`."""
    about = description(path, follow_links=follow_links)
    manifest, plan, selected = about["manifest"], about["plan"], about["manifest"]["selected_token_ids"]
    topk, slots = manifest.get("target_probs_topk"), manifest["seq_length"]
    kept = f"the {topk:,} largest probabilities of each slot" if VALUES in about["layout"] else "all probabilities"
    state, sidecar = _state(about)
    rows = [
        ("cache", f"{path} ({state})"),
        ("form", f"version {manifest['format_version']}, {manifest['dtype']}, {kept}"),
        ("target", _printable(str(manifest.get("target_model")))),
        ("captured", f"blocks {', '.join(map(str, manifest.get('aux_layer_ids') or []))}, counted from 0"),
        (
            "draft vocabulary",
            f"{selected['count']:,} of {manifest.get('target_vocab_size'):,} ids: "
            f"{', '.join(map(str, selected['first']))}, ...",
        ),
        ("samples", f"{manifest['num_samples']:,} of {slots:,} slots, {manifest['shard_size']:,} a shard"),
        ("shards", f"{about['shards_found']:,} of {about['num_shards']:,}, {size_text(about['shard_bytes'])}"),
        ("a sample", f"{size_text(about['sample_bytes'])}, {size_text(about['sample_bytes'] // slots)} a slot"),
    ]
    rows += [(name, f"{shape} {dtype}") for name, (dtype, shape) in about["layout"].items()]
    return [*rows, *(_plan_rows(plan) if plan else [("sidecar", sidecar)])]


def _state(about: dict[str, Any]) -> tuple[str, str]:
    """Return whether a cache is complete, and what its sidecar holds where there is no plan, as text."""
    if about["complete"] is not None:
        state = "complete" if about["complete"] else "not finished: precompute --resume continues it"
        return state, f"{PLAN_NAME} is missing: verify names what else is"
    if about["has_receipts"]:
        return "without a plan", "receipts, and no plan: write_shard wrote this cache"
    return "without a sidecar", "none: another tool wrote this cache"


def _plan_rows(plan: dict[str, Any]) -> Table:
    target, tokenizer, samples = plan["target"], plan["tokenizer"], plan["samples"]
    revision = target.get("revision") or f"weights {str(target.get('weights_sha256'))[:_DIGITS]}"
    lost = ", ".join(f"{why} {count:,}" for why, count in {**plan["dropped"], **plan["altered"]}.items())
    values = {
        "made from": f"{target.get('name')}, {revision}, config {str(target.get('config_sha256'))[:_DIGITS]}",
        "tokenizer": f"{str(tokenizer['sha256'])[:_DIGITS]}, loss mask by {tokenizer['mask_by']}, pad id "
        f"{tokenizer['pad_id']}",
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
    """Return a table of the first shards: samples, bytes, tokens, slots with loss, positions, by their receipts."""
    cache = open_cache(path, follow_links=follow_links)
    rows: Table = [("shard", "samples", "size", "tokens", "supervised", "positions")]
    for shard in cache.shards[:first]:
        counts = (cache.receipt(shard) or {"facts": {}})["facts"]
        columns = [f"{counts[name]:,}" if name in counts else "-" for name in ("tokens", "supervised", "positions")]
        samples = cache.rows_of(shard)
        rows.append((f"{shard:06d}", f"{samples:,}", size_text(cache.layout.shard_bytes(samples)), *columns))
    if len(cache.shards) > first:
        rows.append((f"and {len(cache.shards) - first:,} more", *[""] * 5))
    return rows


# --- one sample -------------------------------------------------------------------------------------------------------


@refuse_malformed
def sample_heading(path: Path, number: int, *, follow_links: bool = False) -> str:
    """Return a sample's name, and how many tokens and positions it has. Raises: as `slot_rows`."""
    row = _row(open_cache(path, follow_links=follow_links), number)
    positions, supervised = int(row.fields["position_mask"].sum()), int((row.fields["loss_mask"] == 1).sum())
    return (
        f"{row.cache.name(number)}: {row.length:,} tokens, {supervised:,} supervised slots, {positions:,} positions\n"
        "Slot p has the hidden states of token p, the id of token p+1,\nand the target's distribution of token p+2."
    )


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

    tokenizer: of the target, for the text of the ids; None: ids alone. begin: the first slot; slots: how many.
    Raises: FileNotFoundError, CacheError; ValueError for a sample or a slot that does not exist.
    """
    row = _row(open_cache(path, follow_links=follow_links), number)
    if not 0 <= begin < max(1, row.length):
        raise coded(
            "E106", ValueError(f"slot {begin}: sample {number} has {row.length} tokens, expected 0 to {row.length - 1}")
        )
    layers = [f"norm {layer}" for layer in row.cache.aux_layer_ids]
    rows: Table = [("slot", "id", "text", "loss", "position", *layers, "likeliest draft tokens")]
    for slot in range(begin, min(row.length, begin + slots)):
        fields = {name: tensor[slot] for name, tensor in row.fields.items()}
        token = int(fields["input_ids"])
        masks = [("-", "yes")[int(bool(fields[name].any()))] for name in ("loss_mask", "position_mask")]
        norms = fields[AUX].float().view(max(1, len(layers)), -1).norm(dim=-1).tolist()
        likeliest = _likeliest(row, fields, tokenizer)
        rows.append((str(slot), str(token), _text(token, tokenizer), *masks, *(f"{n:.3g}" for n in norms), likeliest))
    return rows


def _row(cache: PublishedCache, number: int) -> Row:
    if not 0 <= number < cache.num_samples:
        raise coded(
            "E106", ValueError(f"sample {number}: there are {cache.num_samples}, expected 0 to {cache.num_samples - 1}")
        )
    return cache.row(number)


def _likeliest(row: Row, fields: dict[str, Tensor], tokenizer: Decoder | None) -> str:
    """Return the likeliest draft tokens of a slot with their probabilities. fields: of the slot."""
    selected = row.cache.manifest["selected_token_ids"]
    if VALUES in fields:
        values, indices = fields[VALUES][:_TOP], fields[INDICES][:_TOP]
    else:
        values, indices = fields[PROBS].float().topk(min(_TOP, len(fields[PROBS])))
    parts = []
    for value, index in zip(values.tolist(), indices.tolist(), strict=True):
        if not 0 <= index < len(selected):
            remedy = f"Look at it: niels-gpt eagle3 verify {row.cache.path}"
            raise CacheError(row.cache.path, f"draft id {index}", f"0 to {len(selected) - 1}", remedy, code="E701")
        parts.append(
            f"{_text(selected[index], tokenizer) if tokenizer else selected[index]} {f'{value:.3f}'.removeprefix('0')}"
        )
    return ", ".join(parts)


def _text(token: int, tokenizer: Decoder | None) -> str:
    return repr(tokenizer.decode([token])) if tokenizer else "-"


def _printable(text: str) -> str:
    return text if text.isprintable() else shortened(text)
