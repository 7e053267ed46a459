"""Writes a native cache as the folder of another tool.

Every state is in its place, with zeros where the cache has none: format/native.py says which states a cache has, and
format/drafters.py which ones a kind of draft reads. Masks and ids are complete. An export is refused unless the cache
has every state that the loss of its kind of draft reads.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.exchange.automodel import EMBED, EMBEDDING, HEAD, MAX_SHARDS, AutomodelWriter, facts_of_run
from niels_gpt.eagle3.exchange.foreign import BadSample, ForeignSample, checked_sample
from niels_gpt.eagle3.exchange.tools import KINDS, NUM_LAYERS, SpecForgeWriter, SpeculatorsWriter
from niels_gpt.eagle3.format.drafters import DRAFTERS, drafters_of, targets_of
from niels_gpt.eagle3.format.layout import DTYPES, row_bytes_of
from niels_gpt.eagle3.format.manifest import PRODUCE_AGAIN, is_native, read_manifest
from niels_gpt.eagle3.format.meta import eagle3_meta
from niels_gpt.eagle3.format.native import NativeSample, dequantized
from niels_gpt.eagle3.format.plan import read_record
from niels_gpt.eagle3.format.shards import NativeShards
from niels_gpt.eagle3.format.torch_files import MAX_INFLATED
from niels_gpt.eagle3.format.weights import read_weights
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fresh_folder import fresh_folder
from niels_gpt.work import Progress

_PAIRS = ("dflash", "dspark")
"""Kinds for which SpecForge refuses a sample without two tokens with loss side by side."""
_FOR_DSPARK = "Produce it with --for dspark"


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    samples: int
    tokens: int
    without_aux: int
    """Tokens whose auxiliary states are zeros; 0 for a folder without auxiliary states."""
    without_last: int
    """Tokens whose last hidden state is zeros; 0 for a folder without last hidden states."""
    num_bytes: int
    """Bytes of the files with states."""
    last_hidden: str
    """pre_norm or post_norm: side of the last hidden states in the folder; none: it has none of them."""
    made_for: str
    """The kind of draft: a key of DRAFTERS."""
    left_out: int
    """Samples that the tool would refuse."""
    notes: tuple[str, ...]
    """Conversions on the way."""


@dataclass(frozen=True)
class Source:
    """An open native cache, and what it is exported for."""

    cache: Path
    stored: NativeShards
    made_for: str
    layers: list[int] | None
    """Automodel only: the layers of the features; None: the cache's blocks, and for DSpark's own rule the last one."""
    shard_size: int
    follow_links: bool

    @property
    def manifest(self) -> dict[str, Any]:
        """The cache's manifest."""
        return self.stored.manifest


def export_cache(
    cache: Path,
    tool: str,
    out: Path,
    *,
    made_for: str | None = None,
    layers: list[int] | None = None,
    shard_size: int = 256,
    progress: Progress | None = None,
    follow_links: bool = False,
) -> Exported:
    """Write a native cache as the folder of another tool.

    tool: a key of KINDS. out: absent or empty; the folder appears complete or not at all.
    made_for: the kind of draft that will be trained, which SpecForge has other files for; None: the one that the cache
        was made for, if the tool has it, else its usual one.
    layers, shard_size: of Automodel's cache; see `Source`.
    progress: counts samples.
    Raises: CacheError E710 for a cache of version 1 or 2, one without the states that the tool or the draft needs, or a
        sample too large for an import; CacheError E701 for a damaged sample.
    """
    manifest = read_manifest(cache, follow_links=follow_links)
    own = manifest.get("made_for")
    made_for = made_for or (own if own in KINDS[tool] else KINDS[tool][0])
    refuse_for(tool, cache, manifest, made_for)
    stored, one_dtype = NativeShards.of_cache(cache, follow_links=follow_links), tool != "specforge"
    _refuse_large(cache, stored, one_dtype)
    source = Source(cache, stored, made_for, layers, shard_size, follow_links)
    needs_pair = tool == "specforge" and made_for in _PAIRS
    num_bytes, written = 0, list[int]()
    with fresh_folder(out, sources=[cache]) as work:
        writer = WRITERS[tool](work, source)
        to_post_norm = (manifest["conventions"]["last_hidden"], writer.last_hidden) == ("pre_norm", "post_norm")
        head = TargetHead.of_cache(cache, follow_links=follow_links) if to_post_norm else None
        for index in range(stored.num_samples):
            sample = whole_sample(stored.sample(index), manifest, head, one_dtype=one_dtype)
            _refuse_bad(cache, manifest, index, sample)
            if not needs_pair or bool((sample.loss_mask[1:] & sample.loss_mask[:-1]).any()):
                num_bytes += writer.write(len(written), sample)
                written.append(index)
            if progress is not None:
                progress(index + 1, index + 1, stored.num_samples)
        if not written:
            found = f"not one of {stored.num_samples:,} samples has two tokens with loss side by side"
            raise CacheError(cache, found, f"some, as SpecForge's {made_for} wants them", code="E710")
        writer.finish()
    tokens, aux_rows, target_rows = stored.counts[written].sum(axis=0).tolist()
    return Exported(
        len(written),
        tokens,
        tokens - aux_rows if writer.has_aux else 0,
        0 if writer.last_hidden == "none" else tokens - target_rows,
        num_bytes,
        writer.last_hidden,
        made_for,
        stored.num_samples - len(written),
        (*_notes(tool, manifest, to_post_norm), *writer.notes),
    )


def refuse_for(tool: str, cache: Path, manifest: dict[str, Any], made_for: str) -> None:
    """Raise CacheError E710 for a cache that a tool cannot train such a draft from. tool: a key of KINDS."""
    if not is_native(manifest):
        found = (
            f"is version {manifest['format_version']}: it has the target's probabilities, not its last hidden states"
        )
        remedy = f"Produce it with --format native; {tool} computes probabilities itself"
        raise CacheError(cache, found, "a native cache", remedy, code="E710")
    if made_for not in KINDS[tool]:
        expected = f"one of {', '.join(KINDS[tool])}, which {tool} trains from files"
        raise CacheError(cache, f"asked for {made_for}", expected, code="E710")
    layers, is_theirs = len(manifest["aux_layer_ids"]), (tool, made_for) == ("specforge", "eagle3")
    if (layers != NUM_LAYERS) if is_theirs else (not layers and made_for != "mtp"):
        expected = f"{NUM_LAYERS}, which SpecForge's EAGLE-3 takes" if is_theirs else "one or more"
        raise CacheError(cache, f"has {layers} auxiliary layers", expected, code="E710")
    if tool == "speculators" and manifest["conventions"]["last_hidden"] == "post_norm":
        found = "has last hidden states after the final norm, which cannot be undone"
        remedy = "precompute stores those before it, and so does an import from speculators"
        with suppress(CacheError):
            refuse_for("specforge", cache, manifest, made_for)
            words = ["niels-gpt", "eagle3", "export", str(cache), "OUT", "--to", "specforge", "--for", made_for]
            remedy += f". SpecForge takes the ones after it: {shlex.join(words)}"
        raise CacheError(cache, found, "those before it, which speculators takes", remedy, code="E710")
    reads_last = (tool, made_for) != ("specforge", "dflash")
    if reads_last and made_for not in drafters_of(manifest):
        found = f"has target rows for {targets_of(manifest)} only"
        reads = DRAFTERS[made_for].reads
        remedy = f"Produce it with --for {made_for}, or with --targets {reads}"
        raise CacheError(cache, found, f"{reads}, as the loss of {made_for} reads them", remedy, code="E710")


def _refuse_large(cache: Path, stored: NativeShards, one_dtype: bool) -> None:
    """Raise CacheError for a sample that is too large for an import once every token has its states."""
    layers, size = len(stored.manifest["aux_layer_ids"]), stored.manifest["hidden_size"]
    aux, last = _dtypes(stored.manifest, one_dtype)
    longest = int(stored.counts[:, 0].max(initial=0))
    size = longest * (row_bytes_of((aux, (layers, size))) + row_bytes_of((last, (size,))))
    if size > MAX_INFLATED:
        found = f"a sample of {longest:,} tokens would have {size:,} bytes with a state for each"
        raise CacheError(cache, found, f"{MAX_INFLATED:,} at most", "Make the cache of shorter samples", code="E710")


def _refuse_bad(cache: Path, manifest: dict[str, Any], index: int, sample: ForeignSample) -> None:
    """Raise CacheError for states that are not finite, or token ids beyond the target's vocabulary."""
    parts, sizes = (sample.input_ids, sample.loss_mask, sample.aux, sample.last), ("hidden_size", "target_vocab_size")
    try:
        checked_sample(f"sample {index}", *parts, *(manifest[size] for size in sizes))
    except BadSample as error:
        remedy = f"Find all damage: {shlex.join(['niels-gpt', 'eagle3', 'verify', str(cache)])}"
        found = f"{error.name} is {error.reason}: {error.found}"
        raise CacheError(cache, found, remedy=remedy, code="E701") from error


def _dtypes(manifest: dict[str, Any], one_dtype: bool) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of auxiliary and last hidden states in an export; see `whole_sample`."""
    last = DTYPES[manifest["dtype"]]
    aux = DTYPES.get(manifest["aux_dtype"], last)
    return (torch.promote_types(aux, last),) * 2 if one_dtype else (aux, last)


def whole_sample(
    sample: NativeSample, manifest: dict[str, Any], head: TargetHead | None = None, *, one_dtype: bool
) -> ForeignSample:
    """Return a stored sample in memory of its own, with states for every token: zeros where none is stored.

    head: its norm is applied to the last hidden states; float8 becomes the manifest's dtype. one_dtype: all states get
    the wider dtype of the two.
    """
    (of_aux, of_last), length = _dtypes(manifest, one_dtype), len(sample.loss_mask)
    aux, last = sample.aux_hidden_states, sample.last_hidden_states
    if sample.aux_scales is not None:
        aux = dequantized(aux, sample.aux_scales, DTYPES[manifest["dtype"]])
    if head is not None:
        last = head.normed(last).to(DTYPES[manifest["dtype"]])
    aux, last = aux.to(of_aux), last.to(of_last)
    return ForeignSample(
        torch.from_numpy(sample.input_ids.astype("int64")),
        torch.from_numpy(sample.loss_mask.copy()),
        _spread(aux, torch.arange(len(aux)), length),
        _spread(last, torch.from_numpy(sample.positions), length),
    )


def _spread(states: Tensor, positions: Tensor, length: int) -> Tensor:
    """Return states [length, ...]: the given ones at their positions, zeros elsewhere."""
    whole = states.new_zeros((length, *states.shape[1:]))
    whole[positions] = states
    return whole


def _notes(tool: str, manifest: dict[str, Any], to_post_norm: bool) -> list[str]:
    notes, enough = list[str](), drafters_of(manifest)
    missing = sorted({*KINDS[tool]} - {*enough})
    if tool == "speculators" and missing:  # one folder for all kinds
        read = "reads" if len(missing) == 1 else "read"
        notes.append(f"for {', '.join(enough)} only: {', '.join(missing)} {read} states that the cache does not have")
    if to_post_norm:
        notes.append("the final norm was applied to the last hidden states")
    if manifest["aux_dtype"] == "fp8" and manifest["aux_layer_ids"]:
        notes.append(f"the auxiliary states were dequantized from float8 to {manifest['dtype']}")
    return notes


# --- the folders ------------------------------------------------------------------------------------------------------


QWEN3 = ("qwen3", "qwen3_moe")
"""Model types for which Automodel trains its Qwen3DSparkModel, with which exports are tested; the embedding of these is
not scaled."""


def _automodel(folder: Path, source: Source) -> AutomodelWriter:
    """Return the writer of Automodel's DSpark cache. Raises: CacheError E710 for what its form or loss cannot hold."""
    manifest, cache, links = source.manifest, source.cache, source.follow_links
    record = read_record(cache, follow_links=links) or {}
    meta = {} if record else eagle3_meta(cache, links) or {}
    target, of_import = (each if isinstance(each, dict) else {} for each in (meta.get("target"), meta.get("source")))
    target = record.get("target", target)
    num_layers, model_type = target.get("num_layers"), target.get("model_type")
    if type(num_layers) is not int or not isinstance(model_type, str):
        found = "does not say how many layers its target has, and of which type it is"
        raise CacheError(cache, found, "a cache of precompute or of import", code="E710")
    layers = _features(source, num_layers, model_type)
    if -(-source.stored.num_samples // source.shard_size) > MAX_SHARDS:
        found = f"{source.stored.num_samples:,} samples, {source.shard_size:,} a shard"
        raise CacheError(cache, found, f"{MAX_SHARDS:,} shards at most", "Pass a larger --shard-size", code="E710")
    weights = _weights(source, model_type)
    notes = list[str]()
    if left_out := sorted({*manifest["aux_layer_ids"]} - ({*layers} - {num_layers - 1})):
        notes.append(f"the outputs of the blocks {left_out} are left out: they are not among the features {layers}")
    if model_type not in QWEN3:
        named = " and ".join(QWEN3)
        notes.append(
            f"Automodel has its Qwen3 draft for {named}; for the target's type, {model_type}, it may have none"
        )
    described = _described(source, layers) | {"target_model_type": model_type, "num_hidden_layers": num_layers}
    tokenizer = record.get("tokenizer", {})
    described |= {
        "mask_generation_prompt": bool(record),  # the role header of precompute's samples carries no loss
        "chat_template_sha256": tokenizer.get("template_sha256") or hashlib.sha256(b"").hexdigest(),
        **(facts_of_run(of_import) if of_import.get("kind") == "automodel" else {}),
    }
    return AutomodelWriter(folder, described, weights, manifest["aux_layer_ids"], tokenizer.get("pad_id", 0), notes)


def _described(source: Source, layers: list[int]) -> dict[str, Any]:
    """Return the keys of Automodel's manifest that the cache's manifest decides."""
    manifest, (dtype, _) = source.manifest, _dtypes(source.manifest, one_dtype=True)
    seed, size = manifest.get("shuffle_seed"), manifest["hidden_size"]
    return {
        "target_model": manifest["target_model"],
        "target_vocab_size": manifest["target_vocab_size"],
        "hidden_size": size,
        "seq_length": manifest["seq_length"],
        "dtype": next(name for name, each in DTYPES.items() if each == dtype),
        "num_samples": source.stored.num_samples,
        "shard_size": source.shard_size,
        "target_hidden_dim": size * len(layers),
        "target_last_hidden_dim": size,
        "target_layer_ids": layers,
        "train_data_path": manifest.get("input_data") or source.cache.name,
        "train_split": manifest.get("split"),
        "shuffle_seed": seed if type(seed) is int else 0,
        "mask_reasoning_content": False,
    }


def _weights(source: Source, model_type: str) -> dict[str, Tensor]:
    """Return the weights of Automodel's cache. Raises: CacheError E710 for a head that is more than lm_head's weights.

    The loss applies lm_head alone to the last hidden states; Gemma 4's draft also the softcap of its config.
    """
    manifest, cache = source.manifest, source.cache
    weights = read_weights(cache, ("embeddings", "lm_head", "lm_head_bias"), follow_links=source.follow_links)
    head, more = manifest["head"], []
    if head["logit_scale"] != 1:
        more.append(f"a logit scale of {head['logit_scale']:g}")
    if head["softcap"] is not None and not model_type.startswith("gemma4"):
        more.append(f"a softcap of {head['softcap']:g}")
    if "lm_head_bias" in weights:
        more.append("a bias of lm_head")
    if more:
        found, expected = f"its target's head has {' and '.join(more)}", "lm_head's weights alone, as Automodel's loss"
        raise CacheError(cache, found, expected, "Train from the cache itself: NativeEagle3Dataset", code="E710")
    given = {EMBED: weights.get("embeddings"), HEAD: weights.get("embeddings" if head["tied"] else "lm_head")}
    shape = manifest["target_vocab_size"], manifest["hidden_size"]
    for name, tensor in given.items():
        if tensor is None or tuple(tensor.shape) != shape:
            found = f"its weights for {name} are {'missing' if tensor is None else [*tensor.shape]}"
            raise CacheError(cache, found, f"{[*shape]} by the manifest", PRODUCE_AGAIN, code="E701")
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def _features(source: Source, num_layers: int, model_type: str) -> list[int]:
    """Return the layers of the features. Raises: CacheError E710 for one that the cache lacks."""
    manifest, last = source.manifest, num_layers - 1
    blocks, is_whole = sorted({*manifest["aux_layer_ids"]} - {last}), targets_of(manifest) == "all"
    has, layers = [*blocks, last] if is_whole else blocks, source.layers
    if layers is None and not has:
        found = f"has the output of block {last} before the final norm, no other block, and not all target rows"
        expected = "other blocks, or the last hidden state of every token"
        raise CacheError(source.cache, found, expected, _FOR_DSPARK, code="E710")
    if layers is None:
        layers = has if manifest.get("made_for") == "dspark" or not blocks else blocks
    offered = [EMBEDDING, *has] if model_type in QWEN3 else has
    fitting = [layer for layer in layers if layer in offered]
    remedy = f"Pass layers that it has: --layers {','.join(map(str, fitting or offered))}" if offered else _FOR_DSPARK
    if sorted({*layers}) != layers or not layers or not -1 <= layers[0] <= layers[-1] <= last:
        expected = f"rising layers from -1, the embedding, to {last}, the last"
        remedy = f"Name them in this order: --layers {','.join(map(str, sorted({*fitting})))}" if fitting else remedy
        raise CacheError(source.cache, f"asked for the layers {layers}", expected, remedy, code="E710")
    if missing := [layer for layer in layers if layer not in (EMBEDDING, *blocks, last)]:
        found = f"has the outputs of the blocks {blocks}"
        raise CacheError(source.cache, found, f"the outputs of {missing} too, for the features", remedy, code="E710")
    if last in layers and not is_whole:
        found = f"has target rows for {targets_of(manifest)} only"
        expected = f"all, as the feature of layer {last} is the last hidden state of every token"
        raise CacheError(source.cache, found, expected, remedy, code="E710")
    if EMBEDDING in layers and model_type not in QWEN3:
        found = f"a target of the type {model_type}, whose embedding may be scaled before the first block"
        raise CacheError(source.cache, found, f"one of {', '.join(QWEN3)} for the feature of -1", remedy, code="E710")
    return layers


WRITERS: dict[str, Callable[[Path, Source], Any]] = {
    "specforge": lambda folder, source: SpecForgeWriter(folder, source.stored.num_samples, source.made_for),
    "speculators": lambda folder, source: SpeculatorsWriter(folder, source.stored.num_samples),
    "automodel": _automodel,
}
"""Tool -> function that begins a folder of it."""
