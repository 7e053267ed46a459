"""An EAGLE-3 cache for people: what it was made from and in which form, and the slots of one sample as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from niels_gpt.eagle3.layout import SIDECAR
from niels_gpt.eagle3.opened import Opened, described_by, open_cache, tables_of
from niels_gpt.eagle3.plan import PLAN_NAME
from niels_gpt.eagle3.row_checks import AUX, INDICES, PROBS, VALUES, Row
from niels_gpt.fileio import META_NAME, CacheError
from niels_gpt.records import shortened

_FIRST_IDS = 8  # of selected_token_ids
_TOP = 3  # draft tokens of a slot
_DIGITS = 12  # of a sha256

Table = list[tuple[str, ...]]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _described(look: Callable[Concatenate[Path, _P], _R]) -> Callable[Concatenate[Path, _P], _R]:
    """Make a CacheError of what a malformed file leads to."""

    @wraps(look)
    def described(cache: Path, /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        with described_by(cache):
            return look(cache, *arguments, **named)

    return described


class Decoder(Protocol):
    """Turns ids back into text."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of some ids."""


@_described
def description(cache: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """Return what a cache says of itself, as JSON has it.

    manifest: all keys; of selected_token_ids the number and the first few. layout: fields, dtypes and shapes of a
    sample, bytes of a sample. shards: how many, and samples, bytes and facts of the first few, by their receipts.
    plan: sidecar/plan.json; None where there is none. complete: whether there is a meta.json; None for a cache that
    the producer of this project did not make. has_receipts: whether this project wrote the shards.
    Raises: FileNotFoundError, CacheError.
    """
    opened = open_cache(cache, follow_links=follow_links)
    selected = opened.manifest.get("selected_token_ids") or []
    about = {"count": len(selected), "first": selected[:_FIRST_IDS]}
    fields = opened.layout.fields
    return {
        "cache": str(cache),
        "manifest": {**opened.manifest, "selected_token_ids": about},
        "layout": {name: [str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in fields.items()},
        "sample_bytes": opened.layout.row_bytes,
        "shard_bytes": _shard_bytes(opened),
        "num_shards": opened.num_shards,
        "shards_found": len(opened.shards),
        "plan": _plan(opened),
        "has_receipts": opened.is_ours,
        "complete": (opened.folder / META_NAME).is_file() if opened.is_planned else None,
    }


@_described
def summary(cache: Path, *, follow_links: bool = False) -> Table:
    """Return a cache's description as pairs of a name and a value. Raises: as `description`."""
    said = description(cache, follow_links=follow_links)
    manifest, plan = said["manifest"], said["plan"]
    selected = manifest["selected_token_ids"]
    topk = manifest.get("target_probs_topk")
    kept = f"the {topk:,} largest probabilities of each slot" if VALUES in said["layout"] else "all probabilities"
    first = ", ".join(map(str, selected["first"]))
    rows = [
        ("cache", f"{cache} ({_state(said)})"),
        ("form", f"version {manifest['format_version']}, {manifest['dtype']}, {kept}"),
        ("target", _printable(str(manifest.get("target_model")))),
        ("captured", f"blocks {', '.join(map(str, manifest.get('aux_layer_ids') or []))}, counted from 0"),
        ("draft vocabulary", f"{selected['count']:,} of {manifest.get('target_vocab_size'):,} ids: {first}, ..."),
        (
            "samples",
            f"{manifest['num_samples']:,} of {manifest['seq_length']:,} slots, {manifest['shard_size']:,} a shard",
        ),
        ("shards", f"{said['shards_found']:,} of {said['num_shards']:,}, {said['shard_bytes']:,} bytes"),
        ("a sample", f"{said['sample_bytes']:,} bytes, {said['sample_bytes'] / manifest['seq_length']:,.0f} a slot"),
    ]
    rows += [(name, f"{shape} {dtype}") for name, (dtype, shape) in said["layout"].items()]
    return [*rows, *(_plan_rows(plan) if plan else [("sidecar", _without_plan(said))])]


def _shard_bytes(cache: Opened) -> int:
    """Return the size of all shards as there should be; all but the last have as many samples."""
    if not cache.num_shards:
        return 0
    last = cache.layout.shard_bytes(cache.rows_of(cache.num_shards - 1))
    return (cache.num_shards - 1) * cache.layout.shard_bytes(cache.shard_size) + last


def _without_plan(said: dict[str, Any]) -> str:
    if said["complete"] is not None:
        return f"{PLAN_NAME} is missing: verify names what else is"
    return (
        "receipts, and no plan: write_shard wrote this cache"
        if said["has_receipts"]
        else ("none: another tool wrote this cache")
    )


def _state(said: dict[str, Any]) -> str:
    if said["complete"] is None:
        return "without a plan" if said["has_receipts"] else "without a sidecar"
    return "complete" if said["complete"] else "not finished: precompute --resume goes on"


def _plan(cache: Opened) -> dict[str, Any] | None:
    if not os.path.lexists(cache.folder / SIDECAR / PLAN_NAME):
        return None
    return cache.plan


def _plan_rows(plan: dict[str, Any]) -> Table:
    target, run, tokenizer = plan["target"], plan["run"], plan["tokenizer"]
    of = target.get("revision") or f"weights {str(target.get('weights_sha256'))[:_DIGITS]}"
    samples = plan["samples"]
    return [
        (
            "made from",
            _printable(f"{target.get('name')}, {of}, config {str(target.get('config_sha256'))[:_DIGITS]}"),
        ),
        (
            "tokenizer",
            _printable(f"{str(tokenizer['sha256'])[:_DIGITS]}, loss mask by {tokenizer['mask_by']}, ")
            + f"pad id {tokenizer['pad_id']}",
        ),
        ("source", _printable(json.dumps(plan["source"], ensure_ascii=False))),
        (
            "left out or cut",
            _printable(", ".join(f"{why} {count:,}" for why, count in {**plan["dropped"], **plan["altered"]}.items()))
            or "nothing",
        ),
        ("tokens", f"{samples['tokens']:,}, {samples['supervised_tokens']:,} of them with loss"),
        ("run", _printable(", ".join(f"{name} {value}" for name, value in run.items()))),
    ]


@_described
def shard_rows(cache: Path, *, first: int = 5, follow_links: bool = False) -> Table:
    """Return a table of the first shards: samples, bytes, tokens, slots with loss, positions, by their receipts."""
    opened = open_cache(cache, follow_links=follow_links)
    rows: Table = [("shard", "samples", "bytes", "tokens", "with loss", "positions")]
    for shard in opened.shards[:first]:
        facts = (opened.receipt(shard) or {"facts": {}})["facts"]
        counts = [f"{facts[name]:,}" if name in facts else "-" for name in ("tokens", "supervised", "positions")]
        size = opened.layout.shard_bytes(opened.rows_of(shard))
        rows.append((f"{shard:06d}", f"{opened.rows_of(shard):,}", f"{size:,}", *counts))
    if len(opened.shards) > first:
        rows.append((f"and {len(opened.shards) - first:,} more", *[""] * 5))
    return rows


# --- one sample -------------------------------------------------------------------------------------------------------


@_described
def sample_heading(cache: Path, number: int, *, follow_links: bool = False) -> str:
    """Return which sample it is, and how many tokens and positions it has. Raises: as `slot_rows`."""
    opened = open_cache(cache, follow_links=follow_links)
    row = _row(opened, number)
    positions, supervised = int(row.fields["position_mask"].sum()), int((row.fields["loss_mask"] == 1).sum())
    return (
        f"{opened.name(number)}: {row.length:,} tokens, {supervised:,} slots with loss, {positions:,} positions. "
        "Slot p has the hidden states of token p, the id of token p+1, and the target's distribution of token p+2"
    )


@_described
def slot_rows(
    cache: Path,
    number: int,
    tokenizer: Decoder | None = None,
    *,
    begin: int = 0,
    slots: int = 32,
    follow_links: bool = False,
) -> Table:
    """Return a table of some slots of sample `number` of the cache: id, masks, likeliest draft tokens, norms.

    tokenizer: of the target, for the text of the ids; None: ids alone. begin: the first slot; slots: how many.
    Raises: FileNotFoundError, CacheError; ValueError for a sample or a slot that is not there.
    """
    opened = open_cache(cache, follow_links=follow_links)
    row = _row(opened, number)
    if not 0 <= begin < max(1, row.length):
        raise ValueError(f"slot {begin}: sample {number} has {row.length} tokens, expected 0 to {row.length - 1}")
    layers = [f"norm {layer}" for layer in row.aux_layer_ids]
    rows: Table = [("slot", "id", "text", "loss", "position", "likeliest draft tokens", *layers)]
    for slot in range(begin, min(row.length, begin + slots)):
        fields = {name: tensor[slot] for name, tensor in row.fields.items()}
        token = int(fields["input_ids"])
        masks = [("-", "yes")[int(bool(fields[name].any()))] for name in ("loss_mask", "position_mask")]
        norms = fields[AUX].float().view(max(1, len(layers)), -1).norm(dim=-1).tolist()
        likeliest = _likeliest(fields, opened.manifest["selected_token_ids"], tokenizer)
        rows.append((str(slot), str(token), _text(token, tokenizer), *masks, likeliest, *(f"{n:.3g}" for n in norms)))
    return rows


def _row(cache: Opened, number: int) -> Row:
    if not 0 <= number < cache.num_samples:
        raise ValueError(f"sample {number}: there are {cache.num_samples}, expected 0 to {cache.num_samples - 1}")
    return cache.row(number, tables_of(cache, number // cache.shard_size))


def _likeliest(fields: dict[str, torch.Tensor], selected: list[int], tokenizer: Decoder | None) -> str:
    if VALUES in fields:
        values, indices = fields[VALUES][:_TOP], fields[INDICES][:_TOP]
    else:
        values, indices = fields[PROBS].float().topk(min(_TOP, len(fields[PROBS])))
    found = []
    for value, index in zip(values.tolist(), indices.tolist(), strict=True):
        if not 0 <= index < len(selected):
            raise CacheError(f"draft id {index}, expected 0 to {len(selected) - 1}: look at it with verify")
        text = f" {_text(selected[index], tokenizer)}" if tokenizer else ""
        found.append(f"{selected[index]}{text} {value:.3f}")
    return ", ".join(found)


def _text(token: int, tokenizer: Decoder | None) -> str:
    return repr(tokenizer.decode([token])) if tokenizer else "-"


def _printable(text: str) -> str:
    return text if text.isprintable() else shortened(text)
