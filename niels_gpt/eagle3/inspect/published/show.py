"""`inspect` of versions 1 and 2: their sizes, and the slots of one sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from niels_gpt.display.numbers import size_text
from niels_gpt.eagle3.inspect.open_cache import Decoder, Table, likeliest_text, token_text
from niels_gpt.eagle3.inspect.published.opened import AUX, INDICES, PROBS, VALUES, PublishedCache, Row
from niels_gpt.storage.errors import CacheError

COUNTED = ("tokens", "supervised", "positions")
"""What is shown of a receipt."""
_TOP = 3  # draft tokens of a slot


def sizes(cache: PublishedCache) -> dict[str, Any]:
    """Return layout and sizes, ready for JSON."""
    last = cache.num_shards - 1
    return {
        "layout": {
            name: [str(dtype).removeprefix("torch."), list(shape)]
            for name, (dtype, shape) in cache.layout.fields.items()
        },
        "sample_bytes": cache.layout.row_bytes,
        "shard_bytes": max(0, last) * cache.layout.shard_bytes(cache.shard_size)
        + (cache.layout.shard_bytes(cache.rows_of(last)) if last >= 0 else 0),
    }


def form_text(about: dict[str, Any]) -> str:
    """Return version, dtype and probabilities as text."""
    manifest = about["manifest"]
    topk = manifest.get("target_probs_topk")
    kept = f"the {topk:,} largest probabilities of each slot" if VALUES in about["layout"] else "all probabilities"
    return f"version {manifest['format_version']}, {manifest['dtype']}, {kept}"


def width_text(about: dict[str, Any]) -> str:
    """Return how wide the samples are, and how many a shard has."""
    return f"{about['manifest']['seq_length']:,} slots, {about['manifest']['shard_size']:,} a shard"


def more_rows(about: dict[str, Any]) -> Table:
    """Return the size of a sample."""
    size, slots = about["sample_bytes"], about["manifest"]["seq_length"]
    return [("a sample", f"{size_text(size)}, {size_text(size // slots)} a slot")]


def heading(row: Row) -> str:
    """Return a sample's name and counts, and what a slot holds."""
    positions, supervised = int(row.fields["position_mask"].sum()), int((row.fields["loss_mask"] == 1).sum())
    return (
        f"{row.cache.name(row.number)}: {row.length:,} tokens, {supervised:,} supervised slots, "
        f"{positions:,} positions\n"
        "Slot p has the hidden states of token p, the id of token p+1,\nand the target's distribution of token p+2."
    )


def slot_rows(row: Row, tokenizer: Decoder | None, chosen: range) -> Table:
    """Return a table of some slots: id, masks, norms, likeliest draft tokens. Raises: CacheError."""
    layers = [f"norm {layer}" for layer in row.cache.aux_layer_ids]
    rows: Table = [("slot", "id", "text", "loss", "position", *layers, "likeliest draft tokens")]
    for slot in chosen:
        fields = {name: tensor[slot] for name, tensor in row.fields.items()}
        token = int(fields["input_ids"])
        masks = [("-", "yes")[int(bool(fields[name].any()))] for name in ("loss_mask", "position_mask")]
        norms = fields[AUX].float().view(max(1, len(layers)), -1).norm(dim=-1).tolist()
        likeliest = _likeliest(row, fields, tokenizer)
        text = token_text(token, tokenizer)
        rows.append((str(slot), str(token), text, *masks, *(f"{n:.3g}" for n in norms), likeliest))
    return rows


def _likeliest(row: Row, fields: dict[str, Tensor], tokenizer: Decoder | None) -> str:
    """Return the likeliest draft tokens of a slot with their probabilities. fields: of the slot."""
    selected = row.cache.manifest["selected_token_ids"]
    if VALUES in fields:
        values, indices = fields[VALUES][:_TOP], fields[INDICES][:_TOP]
    else:
        values, indices = fields[PROBS].float().topk(min(_TOP, len(fields[PROBS])))
    for index in indices.tolist():
        if not 0 <= index < len(selected):
            remedy = f"Look at it: niels-gpt eagle3 verify {row.cache.path}"
            raise CacheError(row.cache.path, f"draft id {index}", f"0 to {len(selected) - 1}", remedy, code="E701")
    return likeliest_text([selected[index] for index in indices.tolist()], values.tolist(), tokenizer)
