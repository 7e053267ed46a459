"""`inspect` of the native form: its sizes, and the tokens of one sample."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from niels_gpt.display.numbers import size_text
from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.format.native import dequantized
from niels_gpt.eagle3.inspect.native.opened import NativeCache, NativeRow
from niels_gpt.eagle3.inspect.open_cache import Decoder, Table, likeliest_text, token_text

COUNTED = ("tokens", "supervised", "aux_rows", "target_rows")
"""What is shown of a receipt."""
_TOP = 3  # draft tokens of a target row


def sizes(cache: NativeCache) -> dict[str, Any]:
    """Return the layout of a row of each tensor, and the size of all shards, ready for JSON."""
    tensors = cache.layout.tensors(0, 0, 0, 0)
    return {
        "layout": {
            name: [str(dtype).removeprefix("torch."), list(shape[1:])] for name, (dtype, shape) in tensors.items()
        },
        "shard_bytes": sum(shard_bytes(cache, shard) for shard in cache.shards),
    }


def shard_bytes(cache: NativeCache, shard: int) -> int:
    """Return the size of a shard's file; 0 where it cannot be read."""
    with suppress(OSError):
        return os.stat(shard_path(cache.folder, shard), follow_symlinks=cache.follow_links).st_size
    return 0


def form_text(about: dict[str, Any]) -> str:
    """Return version, dtypes, and what the last hidden states are, as text."""
    manifest = about["manifest"]
    norm = {"pre_norm": "before the final norm", "post_norm": "after the final norm"}
    return (
        f"{manifest['format_version']}, auxiliary states in {manifest['aux_dtype']}, last hidden states in "
        f"{manifest['dtype']}, {norm[manifest['conventions']['last_hidden']]}"
    )


def width_text(about: dict[str, Any]) -> str:
    """Return how long the samples may be, and how large a shard."""
    manifest = about["manifest"]
    return f"at most {manifest['seq_length']:,} tokens, {size_text(manifest['shard_bytes'])} a shard"


def more_rows(about: dict[str, Any]) -> Table:
    """Return what turns a last hidden state into logits."""
    head = about["manifest"]["head"]
    parts = [f"norm {head['norm']}" + ("" if head["eps"] is None else f" with eps {head['eps']:g}")]
    parts += ["lm_head tied to the embeddings" if head["tied"] else "lm_head"]
    parts += [f"logits times {head['logit_scale']:g}"] * (head["logit_scale"] != 1)
    parts += [] if head["softcap"] is None else [f"softcap {head['softcap']:g}"]
    return [("head", f"{', '.join(parts)}; computed in {head['compute_dtype']}")]


def heading(row: NativeRow) -> str:
    """Return a sample's name and counts, and what a row of the table holds."""
    sample = row.sample
    learnt = sample.loss_mask[sample.positions]
    known = row.cache.selected(sample.argmax_ids.numpy())
    return (
        f"{row.cache.name(row.number)}: {row.length:,} tokens, {int(learnt.sum()):,} supervised slots, "
        f"{int((learnt & known).sum()):,} positions, {len(sample.aux_hidden_states):,} auxiliary rows, "
        f"{len(sample.argmax_ids):,} target rows\n"
        "Token t has its id and loss bit, the norms of its auxiliary states,\n"
        "and, in a target row, what the target predicts for token t+1."
    )


def token_rows(row: NativeRow, tokenizer: Decoder | None, chosen: range) -> Table:
    """Return a table of some tokens: id, loss, norms of stored states, and the target row. Raises: CacheError."""
    sample, layers = row.sample, [f"norm {layer}" for layer in row.cache.aux_layer_ids]
    rows: Table = [("token", "id", "text", "loss", *layers, "argmax", "its text", "likeliest draft tokens")]
    places = {int(position): at for at, position in enumerate(sample.positions)}
    within = [at for token, at in places.items() if token in chosen]
    likeliest = dict(zip(within, _likeliest(row, within, tokenizer), strict=True))
    for token in chosen:
        number, loss = int(sample.input_ids[token]), ("-", "yes")[int(sample.loss_mask[token])]
        said = ["-", "-", "-"]
        if (at := places.get(token)) is not None:
            argmax = int(sample.argmax_ids[at])
            said = [str(argmax), token_text(argmax, tokenizer), likeliest[at]]
        rows.append((str(token), str(number), token_text(number, tokenizer), loss, *_norms(row, token), *said))
    return rows


def _norms(row: NativeRow, token: int) -> list[str]:
    """Return the norm of each block's state of a token; "-" where none is stored."""
    sample = row.sample
    if token >= len(sample.aux_hidden_states):
        return ["-"] * len(row.cache.aux_layer_ids)
    states = sample.aux_hidden_states[token]
    if sample.aux_scales is not None:
        states = dequantized(states, sample.aux_scales[token])
    return [f"{norm:.3g}" for norm in states.float().norm(dim=-1).tolist()]


def _likeliest(row: NativeRow, within: list[int], tokenizer: Decoder | None) -> list[str]:
    """Return of some target rows the likeliest draft tokens with their probabilities among the draft's tokens."""
    if not within:
        return []
    selected = row.cache.manifest["selected_token_ids"]
    with torch.no_grad():
        logits = row.cache.head.logits(row.sample.last_hidden_states[np.array(within)], selected).float()
    values, indices = logits.softmax(-1).topk(min(_TOP, len(selected)))
    tokens = ([selected[index] for index in each] for each in indices.tolist())
    return [likeliest_text(each, probs, tokenizer) for each, probs in zip(tokens, values.tolist(), strict=True)]
