"""`inspect`: prints a cache's origin and form, and the slots of one sample, as tables of text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from niels_gpt.display.numbers import count_text, size_text
from niels_gpt.eagle3.format.drafters import rows_text
from niels_gpt.eagle3.format.layout import SIDECAR, shard_path
from niels_gpt.eagle3.format.manifest import is_native
from niels_gpt.eagle3.format.plan import PLAN_NAME
from niels_gpt.eagle3.inspect.forms import DenseCache, NativeCache, open_cache
from niels_gpt.eagle3.inspect.opened import AUX, INDICES, PROBS, VALUES, StoredSample, refuse_malformed
from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS
from niels_gpt.storage.errors import CacheError, PositionError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import shortened
from niels_gpt.storage.mounted import shown

Table = list[tuple[str, ...]]
"""Rows of text; the first one may be the heading."""
_FIRST_IDS = 8  # of selected_token_ids
_DIGITS = 12  # of a sha256
_TOP = 3  # draft tokens of a slot
_NORMS = {"pre_norm": "before the final norm", "post_norm": "after the final norm"}


class Decoder(Protocol):
    """Turns ids back into text."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of ids."""


# --- a cache ----------------------------------------------------------------------------------------------------------


@refuse_malformed
def description(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """Return a cache's own records, ready for JSON.

    manifest: all keys; selected_token_ids as count and first few.
    layout: dtype and shape of each field of a sample; for a native cache, of each tensor's row.
    shard_bytes: of all shards. sample_bytes: if all samples have one size.
    num_shards, shards_found: declared and existing shards.
    plan: content of plan.json, or None. has_receipts: whether this project wrote the shards.
    complete: whether there is a meta.json; None for a cache that this project's producer did not build.
    Raises: FileNotFoundError, CacheError.
    """
    cache = open_cache(path, follow_links=follow_links)
    selected = cache.manifest.get("selected_token_ids") or []
    return {
        "cache": shown(cache.path),
        "manifest": {**cache.manifest, "selected_token_ids": {"count": len(selected), "first": selected[:_FIRST_IDS]}},
        **_sizes(cache),
        "num_shards": cache.num_shards,
        "shards_found": len(cache.shards),
        "plan": cache.plan if os.path.lexists(cache.folder / SIDECAR / PLAN_NAME) else None,
        "has_receipts": cache.is_ours,
        "complete": (cache.folder / META_NAME).is_file() if cache.is_planned else None,
    }


def _sizes(cache: DenseCache | NativeCache) -> dict[str, Any]:
    """Return dtype and shape of the stored fields, and the bytes of a sample and of all shards."""
    if isinstance(cache, NativeCache):
        rows = {name: (dtype, shape[1:]) for name, (dtype, shape) in cache.layout.tensors(0, 0, 0, 0).items()}
        sizes = {"shard_bytes": sum(_shard_bytes(cache, shard) for shard in cache.shards)}
    else:
        rows, last = cache.layout.fields, cache.num_shards - 1
        whole = max(0, last) * cache.layout.shard_bytes(cache.files.shard_size)
        all_shards = whole + (_shard_bytes(cache, last) if last >= 0 else 0)
        sizes = {"sample_bytes": cache.layout.row_bytes, "shard_bytes": all_shards}
    layout = {name: [str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in rows.items()}
    return {"layout": layout, **sizes}


def _shard_bytes(cache: DenseCache | NativeCache, shard: int) -> int:
    """Return a shard's bytes: by the manifest for a dense one, else of its file, 0 if that cannot be read."""
    if isinstance(cache, DenseCache):
        return cache.layout.shard_bytes(cache.files.rows_of(shard))
    with suppress(OSError):
        return os.stat(shard_path(cache.folder, shard), follow_symlinks=cache.follow_links).st_size
    return 0


@refuse_malformed
def summary(path: Path, *, follow_links: bool = False) -> Table:
    """Return a cache's description as pairs of name and value. Raises: FileNotFoundError, CacheError."""
    about = description(path, follow_links=follow_links)
    manifest, plan, selected = about["manifest"], about["plan"], about["manifest"]["selected_token_ids"]
    form, width, *more = (_native_form if is_native(manifest) else _dense_form)(about)
    blocks = ", ".join(map(str, manifest.get("aux_layer_ids") or []))
    state, sidecar = _state(about)
    first = ", ".join(map(str, selected["first"]))
    rows: Table = [
        ("cache", f"{shown(path)} ({state})"),
        ("form", form),
        ("target", _printable(str(manifest.get("target_model")))),
        ("auxiliary layers", f"blocks {blocks}, counted from 0" if blocks else "none"),
        ("draft vocabulary", f"{selected['count']:,} of {manifest.get('target_vocab_size'):,} ids: {first}, ..."),
        ("samples", f"{manifest['num_samples']:,} of {width}"),
        ("shards", f"{about['shards_found']:,} of {about['num_shards']:,}, {size_text(about['shard_bytes'])}"),
        *more,
    ]
    rows += [(name, f"{shape} {dtype}") for name, (dtype, shape) in about["layout"].items()]
    if imported := manifest.get("imported"):
        return [*rows, ("imported", _imported_text(imported))]
    return [*rows, *(_plan_rows(plan) if plan else [("sidecar", sidecar)])]


def _dense_form(about: dict[str, Any]) -> tuple[str, str, tuple[str, str]]:
    """Return (form, width and shard size, a sample's size) of a dense cache as text."""
    manifest, size, topk = about["manifest"], about["sample_bytes"], about["manifest"].get("target_probs_topk")
    kept = f"the {topk:,} largest probabilities of each slot" if VALUES in about["layout"] else "all probabilities"
    return (
        f"version {manifest['format_version']}, {manifest['dtype']}, {kept}",
        f"{manifest['seq_length']:,} slots, {manifest['shard_size']:,} a shard",
        ("a sample", f"{size_text(size)}, {size_text(size // manifest['seq_length'])} a slot"),
    )


def _native_form(about: dict[str, Any]) -> tuple[str, str, tuple[str, str], tuple[str, str]]:
    """Return (form, length and shard size, the target rows, the head) of a native cache as text."""
    manifest, head = about["manifest"], about["manifest"]["head"]
    parts = [f"norm {head['norm']}" + ("" if head["eps"] is None else f" with eps {head['eps']:g}")]
    parts += ["lm_head tied to the embeddings" if head["tied"] else "lm_head"]
    parts += [f"logits times {head['logit_scale']:g}"] * (head["logit_scale"] != 1)
    parts += [] if head["softcap"] is None else [f"softcap {head['softcap']:g}"]
    return (
        f"{manifest['format_version']}, auxiliary states in {manifest['aux_dtype']}, last hidden states in "
        f"{manifest['dtype']}, {_NORMS[manifest['conventions']['last_hidden']]}",
        f"at most {manifest['seq_length']:,} tokens, {size_text(manifest['shard_bytes'])} a shard",
        ("target rows", rows_text(manifest)),
        ("head", f"{', '.join(parts)}; computed in {head['compute_dtype']}"),
    )


def _imported_text(imported: Any) -> str:
    """Return the tool of an imported cache, and how its layers and norm were determined."""
    proved, trusted = imported.get("proved"), imported.get("not_proved")
    samples = proved.get("samples") if isinstance(proved, dict) else None
    known = f"found with the target on {count_text(samples)} samples" if samples else "as stated, not compared"
    if isinstance(trusted, list):
        known += f"; not proved: {', '.join(map(str, trusted))}"
    return _printable(f"from {imported.get('from')}; layers and norm {known}")


def _state(about: dict[str, Any]) -> tuple[str, str]:
    """Return whether a cache is complete, and for a cache without a plan what its sidecar holds, as text."""
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
    """Return nested values on one line: sha256 shortened, nulls left out."""
    parts = []
    for name, value in values.items():
        if isinstance(value, dict):
            parts.append(_flat(value, f"{of}{name}."))
        elif value is not None:
            parts.append(f"{of}{name} {str(value)[:_DIGITS] if name == 'fingerprint' else value}")
    return ", ".join(filter(None, parts))


@refuse_malformed
def shard_rows(path: Path, *, first: int = 5, follow_links: bool = False) -> Table:
    """Return a table of the first shards: samples, bytes, and the counts in their receipts."""
    cache = open_cache(path, follow_links=follow_links)
    names = (
        "tokens",
        "supervised",
        *(("aux_rows",) if isinstance(cache, NativeCache) and cache.manifest["aux_layer_ids"] else ()),
        "target_rows" if isinstance(cache, NativeCache) else "positions",
    )
    rows: Table = [("shard", "samples", "size", *(name.replace("_", " ") for name in names))]
    for shard in cache.shards[:first]:
        counts = cache.facts(shard)
        columns = [f"{counts[name]:,}" if name in counts else "-" for name in names]
        rows.append(
            (f"{shard:06d}", f"{cache.files.rows_of(shard):,}", size_text(_shard_bytes(cache, shard)), *columns)
        )
    if len(cache.shards) > first:
        rows.append((f"and {len(cache.shards) - first:,} more", *[""] * (2 + len(names))))
    return rows


def _printable(text: str) -> str:
    return text if text.isprintable() else shortened(text)


# --- one sample -------------------------------------------------------------------------------------------------------


@refuse_malformed
def sample_heading(path: Path, number: int, *, follow_links: bool = False) -> str:
    """Return a sample's name, and its numbers of tokens and positions.

    Raises: FileNotFoundError, CacheError; ValueError for a sample that does not exist.
    """
    row = _sample(open_cache(path, follow_links=follow_links), number)
    name = f"{row.cache.name(number)}: {row.length:,} tokens"
    if row.positions is not None:
        argmax = row.tensors["argmax_ids"].numpy()
        learnt = row.tensors["loss_mask"].numpy()[row.positions]
        positions = int((learnt & row.cache.selected(argmax)).sum())
        return (
            f"{name}, {int(learnt.sum()):,} supervised slots, {positions:,} positions, "
            f"{len(row.tensors[AUX]):,} auxiliary rows, {len(argmax):,} target rows\n"
            "Token t has its id and loss bit, the norms of its auxiliary states,\n"
            "and, in a target row, what the target predicts for token t+1."
        )
    positions, supervised = int(row.tensors["position_mask"].sum()), int((row.tensors["loss_mask"] == 1).sum())
    return (
        f"{name}, {supervised:,} supervised slots, {positions:,} positions\n"
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
    """Return a table of slots of sample `number`: id, masks, likeliest draft tokens, norms.

    A native cache has raw tokens instead: ids, the target's most probable token, and the likeliest draft tokens by the
    target's head.

    tokenizer: of the target, for the text of ids; None: ids only. begin: first slot. slots: how many.
    Raises: FileNotFoundError, CacheError; ValueError for a sample or slot that does not exist.
    """
    row = _sample(open_cache(path, follow_links=follow_links), number)
    if not 0 <= begin < max(1, row.length):
        raise PositionError(f"slot {begin}: sample {number} has {row.length} tokens, expected 0 to {row.length - 1}")
    chosen, norms = range(begin, min(row.length, begin + slots)), [f"norm {layer}" for layer in row.cache.aux_layer_ids]
    if row.positions is not None:
        heading = ("token", "id", "text", "loss", *norms, "argmax", "its text", "likeliest draft tokens")
        return [heading, *_token_rows(row, tokenizer, chosen)]
    heading = ("slot", "id", "text", "loss", "position", *norms, "likeliest draft tokens")
    return [heading, *_slot_rows(row, tokenizer, chosen)]


def _sample(cache: DenseCache | NativeCache, number: int) -> StoredSample:
    if not 0 <= number < cache.num_samples:
        raise PositionError(f"sample {number}: there are {cache.num_samples}, expected 0 to {cache.num_samples - 1}")
    return cache.sample(number)


def _slot_rows(row: StoredSample, tokenizer: Decoder | None, chosen: range) -> Iterator[tuple[str, ...]]:
    for slot in chosen:
        fields = {name: tensor[slot] for name, tensor in row.tensors.items()}
        if VALUES in fields:
            probs, draft_ids = fields[VALUES][:_TOP], fields[INDICES][:_TOP]
        else:
            probs, draft_ids = fields[PROBS].float().topk(min(_TOP, len(fields[PROBS])))
        masks = [_yes(bool(fields[name].any())) for name in ("loss_mask", "position_mask")]
        token, likeliest = int(fields["input_ids"]), _likeliest(row, draft_ids, probs, tokenizer)
        yield str(slot), str(token), _text(token, tokenizer), *masks, *_norms(row, slot), likeliest


def _token_rows(row: StoredSample, tokenizer: Decoder | None, chosen: range) -> Iterator[tuple[str, ...]]:
    ids, loss = row.ids_and_loss()
    shown = {position: at for at, position in enumerate(row.positions.tolist()) if position in chosen}
    likeliest = dict(zip(shown, _by_the_head(row, [*shown.values()], tokenizer), strict=True))
    for token in chosen:
        number, said = int(ids[token]), ["-", "-", "-"]
        if (at := shown.get(token)) is not None:
            argmax = int(row.tensors["argmax_ids"][at])
            said = [str(argmax), _text(argmax, tokenizer), likeliest[token]]
        yield str(token), str(number), _text(number, tokenizer), _yes(loss[token]), *_norms(row, token), *said


def _by_the_head(row: StoredSample, target_rows: list[int], tokenizer: Decoder | None) -> Iterator[str]:
    """Yield the likeliest draft tokens of target rows, with their probabilities among the draft's tokens."""
    if target_rows:
        selected = row.cache.manifest["selected_token_ids"]
        with torch.no_grad():  # of all rows at once: lm_head is read once
            logits = row.cache.head.logits(row.tensors["last_hidden_states"][target_rows], selected).float()
        for probs, draft_ids in zip(*logits.softmax(-1).topk(min(_TOP, len(selected))), strict=True):
            yield _likeliest(row, draft_ids, probs, tokenizer)


def _likeliest(row: StoredSample, draft_ids: Tensor, probs: Tensor, tokenizer: Decoder | None) -> str:
    """Return draft tokens and their probabilities on one line, such as "7 .412, 3 .200"."""
    selected, path = row.cache.manifest["selected_token_ids"], row.cache.path
    for index in draft_ids.tolist():
        if not 0 <= index < len(selected):
            remedy = f"Look at it: niels-gpt eagle3 verify {path}"
            raise CacheError(path, f"draft id {index}", f"0 to {len(selected) - 1}", remedy, code="E701")
    tokens = (selected[index] for index in draft_ids.tolist())
    named = (_text(token, tokenizer) if tokenizer else token for token in tokens)
    shares = (f"{prob:.3f}".removeprefix("0") for prob in probs.tolist())
    return ", ".join(f"{token} {share}" for token, share in zip(named, shares, strict=True))


def _norms(row: StoredSample, place: int) -> list[str]:
    """Return the norm of each block's state at a slot or token; "-" if none is stored."""
    if place >= len(row.tensors[AUX]):
        return ["-"] * len(row.cache.aux_layer_ids)
    return [f"{norm:.3g}" for norm in row.states(place).float().norm(dim=-1).tolist()]


def _text(token: int, tokenizer: Decoder | None) -> str:
    """Return the text of an id with all escapes written out; "-" without a tokenizer. Sentinels have short names."""
    text = repr(tokenizer.decode([token])) if tokenizer else "-"
    for name, literal in zip(SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS, strict=True):
        text = text.replace(literal, f"<|{name}|>")
    return text


def _yes(is_set: bool) -> str:
    return "yes" if is_set else "-"
