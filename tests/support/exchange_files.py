"""A small target, its states over some chats, and these as the files of SpecForge and speculators.

The files are written here by the rules of the two packages, not by the project's exporter.
"""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor

from niels_gpt.eagle3.exchange import proof
from niels_gpt.eagle3.native import NativeEagle3Dataset

BLOCKS, HIDDEN, LAYERS, VOCAB = (1, 3, 4), 16, 8, 400
SLOTS = 64
HEADER = 7  # the last token of a reply's header
PROOF_TOKENS = proof.PROOF_TOKENS
"""Tokens of a sample that the target is run over to find the convention of a folder."""


@dataclass(frozen=True)
class Chat:
    """One sample of L tokens, all unshifted: ids int64, raw mask bool; states float32 [L, n, H] and [L, H]."""

    ids: Tensor
    mask: Tensor
    blocks: Tensor
    pre: Tensor
    post: Tensor

    @property
    def aux(self):
        """[L, 3, H]"""
        return self.blocks[:, list(BLOCKS)]


def small_model(model_type="llama", **changed):
    """A model of random weights, whose blocks give states that are far apart."""
    import transformers

    config = transformers.CONFIG_MAPPING[model_type](
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        initializer_range=0.2,
        **{"head_dim": HIDDEN // 2, **changed},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
        if hasattr(model.model, "norm"):
            torch.nn.init.normal_(model.model.norm.weight, mean=1.0, std=0.3)
    return model


def chats(model, number=10):
    """Chats of two replies each, and their states by hooks of this function's own."""
    chance = torch.Generator().manual_seed(1)
    made = []
    for index in range(number):
        header, parts, mask = torch.tensor([5, HEADER]), [], []
        for turn in range(2):
            reply = torch.randint(20, VOCAB, (3 + index + turn,), generator=chance)
            parts += [torch.randint(20, VOCAB, (2,), generator=chance), header, reply]
            mask += [0] * 4 + [1] * len(reply)
        if index % 2:  # ends with a question
            parts.append(torch.randint(20, VOCAB, (4,), generator=chance))
            mask += [0] * 4
        ids = torch.cat(parts)
        made.append(Chat(ids, torch.tensor(mask) == 1, *states_of(model, ids)))
    return made


def states_of(model, ids):
    """The outputs of all blocks [L, n, H], that of the last one, and what lm_head takes [L, H]."""
    seen = []
    hooks = [layer.register_forward_hook(lambda _, __, out: seen.append(out[0])) for layer in model.model.layers]
    hooks.append(model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0])))
    with torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    blocks = torch.stack([each.reshape(len(ids), HIDDEN) for each in seen[:-1]], dim=1)
    return blocks, blocks[:, -1], seen[-1]


def in_bf16(chat):
    """The same with states of bf16."""
    states = {name: getattr(chat, name).to(torch.bfloat16) for name in ("blocks", "pre", "post")}
    return replace(chat, **states)


SPECFORGE_KEYS = {
    "eagle3": ("hidden_state", "aux_hidden_state"),
    "dspark": ("target_last_hidden_states", "hidden_states"),
}


def specforge_dict(chat, kind="eagle3", **changed):
    """What a file of SpecForge holds for a kind of draft."""
    last, aux = SPECFORGE_KEYS[kind]
    states = {last: chat.post[None], aux: chat.aux.flatten(1)[None]}
    return {"input_ids": chat.ids, "loss_mask": chat.mask.long(), **states, **changed}


def write_specforge(folder, given, kind="eagle3"):
    """Write files in the order of the chats, the last of them with gzip."""
    (folder / "rows_0-2000").mkdir(parents=True)
    for index, chat in enumerate(given):
        path = folder / "rows_0-2000" / f"data_{index:03d}.ckpt"
        if index + 1 < len(given):
            torch.save(specforge_dict(chat, kind), path)
            continue
        content = io.BytesIO()
        torch.save(specforge_dict(chat, kind), content)
        path.with_suffix(".ckpt.gz").write_bytes(gzip.compress(content.getvalue()))
    return folder


def write_speculators(folder, given):
    """Write the rows and their files."""
    import datasets

    rows = [{"input_ids": c.ids.tolist(), "loss_mask": c.mask.long().tolist(), "seq_len": len(c.ids)} for c in given]
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(str(folder))
    datasets.enable_progress_bars()
    (folder / "hidden_states").mkdir()
    for index, chat in enumerate(given):
        write_row(folder, index, chat)
    return folder


def write_row(folder, index, chat, **changed):
    """Write the file of one row of speculators."""
    states = torch.cat([chat.aux, chat.pre[:, None]], dim=1)
    path = folder / "hidden_states" / f"hs_{index}.safetensors"
    save_file({"token_ids": chat.ids, "hidden_states": states, **changed}, path)


def make_native(
    folder,
    model,
    given,
    layers,
    *,
    targets="all",
    dtype="fp32",
    aux_dtype=None,
    made_for=None,
    shard_bytes=20_000,
    **how,
):
    """Make a native cache of chats as precompute does, each batch of one sample unless `batch_size` says otherwise."""
    from niels_gpt.eagle3 import make_target_cache
    from niels_gpt.eagle3.format.drafters import manifest_keys

    rows = [
        SimpleNamespace(id=str(n), input_ids=c.ids.tolist(), loss_mask=c.mask.int().tolist())
        for n, c in enumerate(given)
    ]
    manifest = {
        "format_version": "native-1",
        "target_model": "small",
        "target_vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "selected_token_ids": list(range(VOCAB)),
        "hidden_size": HIDDEN,
        "aux_layer_ids": list(layers),
        "aux_dtype": aux_dtype or dtype,
        "dtype": dtype,
        "seq_length": SLOTS,
        "shard_bytes": shard_bytes,
        **manifest_keys(targets, layers, made_for),
    }
    about = {"name": "small", "vocab_size": VOCAB, "hidden_size": HIDDEN, "config_sha256": "c" * 64}
    about |= {"num_layers": LAYERS, "model_type": model.config.model_type}
    of_text = {"sha256": "a" * 64, "template_sha256": None, "mask_by": "given", "pad_id": 0}
    run = {"device": "cpu", "threads": 1, "attention": "sdpa", "compute_dtype": "fp32"}
    how = {"batch_size": 1, "tokenizer": of_text, "target": about, "run": run, **how}
    make_target_cache(folder, rows, lambda _: model, manifest, **how)
    return folder


def write_automodel(folder, model, given, layers, *, pad_id=0, shard_size=4, slots=SLOTS, **changed):
    """Write Automodel's DSpark cache by its rule: samples padded, with states of the padding too. changed: manifest."""
    folder.mkdir(parents=True)
    dtype = given[0].blocks.dtype
    weights = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    names = ("embed_tokens.weight", "lm_head.weight")
    save_file(
        {name: each.to(dtype).clone() for name, each in zip(names, weights, strict=True)},
        folder / "target_weights.safetensors",
    )
    rows = [automodel_row(model, chat, layers, pad_id, slots) for chat in given]
    for shard, begin in enumerate(range(0, len(rows), shard_size)):
        part = rows[begin : begin + shard_size]
        tensors = {name: torch.stack([row[name] for row in part]) for name in part[0]}
        save_file(tensors, folder / f"shard-{shard:06d}.safetensors")
    manifest = {
        "format_version": 1,
        "complete": True,
        "target_model": "small",
        "target_model_type": model.config.model_type,
        "target_vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "seq_length": slots,
        "dtype": {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype],
        "num_samples": len(given),
        "shard_size": shard_size,
        "target_hidden_dim": HIDDEN * len(layers),
        "target_last_hidden_dim": HIDDEN,
        "target_layer_ids": list(layers),
        **changed,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True))
    return folder


def automodel_row(model, chat, layers, pad_id=0, slots=SLOTS):
    """Return a row of Automodel's cache; the states of its padding are random."""
    length, dtype = len(chat.ids), chat.blocks.dtype
    ids, loss = torch.full((slots,), pad_id), torch.zeros(slots, dtype=torch.int64)
    ids[:length], loss[:length] = chat.ids, chat.mask
    embedded = model.get_input_embeddings().weight.to(dtype)[ids]
    found = []
    for layer in layers:
        own = {-1: embedded[:length], LAYERS - 1: chat.post}.get(layer)
        found.append(chat.blocks[:, layer] if own is None else own)
    noise = torch.randn(slots - length, HIDDEN, generator=torch.Generator().manual_seed(length)).to(dtype)
    features = torch.cat(
        [torch.cat([each, noise if at != -1 else embedded[length:]]) for at, each in zip(layers, found, strict=True)],
        dim=1,
    )
    return {
        "input_ids": ids,
        "loss_mask": loss,
        "target_hidden_states": features,
        "target_last_hidden_states": torch.cat([chat.post, noise]),
    }


STORED = ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_states", "log_normalizers", "argmax_ids")


def assert_same_samples(left, right):
    ours, theirs = NativeEagle3Dataset(left), NativeEagle3Dataset(right)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in STORED:
            assert torch.equal(torch.as_tensor(getattr(one, name)), torch.as_tensor(getattr(other, name))), name
