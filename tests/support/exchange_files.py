"""A small target, its states over some chats, and these as the files of SpecForge and speculators.

The files are written here by the rules of the two packages, not by the project's exporter.
"""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass, replace

import torch
from safetensors.torch import save_file
from torch import Tensor

from niels_gpt.eagle3.exchange import proof

BLOCKS, HIDDEN, LAYERS, VOCAB = (1, 3, 4), 16, 8, 400
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


def small_model():
    """A Llama of random weights, whose blocks give states that are far apart."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
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


def specforge_dict(chat, **changed):
    """What a file of SpecForge holds."""
    made = {
        "input_ids": chat.ids,
        "loss_mask": chat.mask.long(),
        "hidden_state": chat.post[None],
        "aux_hidden_state": chat.aux.flatten(1)[None],
    }
    return {**made, **changed}


def write_specforge(folder, given):
    """Write files in the order of the chats, the last of them with gzip."""
    (folder / "rows_0-2000").mkdir(parents=True)
    for index, chat in enumerate(given):
        path = folder / "rows_0-2000" / f"data_{index:03d}.ckpt"
        if index + 1 < len(given):
            torch.save(specforge_dict(chat), path)
            continue
        content = io.BytesIO()
        torch.save(specforge_dict(chat), content)
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


def export_cache(cache, tool, out, **how):
    """Write a native cache as the folder of a tool; returns what was left out of it."""

    from niels_gpt.eagle3.exchange import export

    return export.export_cache(cache, tool, out, **how)


def redraft(cache, out, **how):
    """Give a native cache another draft vocabulary. how: draft_vocab_size and special_token_ids."""
    from niels_gpt.eagle3.derive import redraft

    redraft(cache, out, **how)
