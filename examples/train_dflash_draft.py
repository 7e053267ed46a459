r"""Train a two-layer DFlash draft on a native cache, or on the running target, and print the losses.

    niels-gpt eagle3 precompute --target-model MODEL --input-data CHATS --output-dir targets --format native \
        --for dflash --dtype fp32
    python examples/train_dflash_draft.py targets
    python examples/train_dflash_draft.py targets --live MODEL

A DFlash draft proposes a block of tokens at once. A block begins with a known token, the anchor; the others are masks.
Its tokens attend to each other, and to the target's hidden states at the tokens before the anchor. Slot k of a block
whose anchor is token p proposes token p + k, and learns what the target predicts there, from its last hidden state at
token p + k - 1. Slots whose token has no loss learn nothing.

Positions and attention follow speculators and SpecForge, the anchors SpecForge's (but one may come twice), and
the loss is the KL divergence of speculators. Simpler than theirs: no norms of queries and keys, no sliding window, no
draft vocabulary, no weights that fall along the block (exp(-(k - 1) / 4) in speculators), and token 0 is the mask.

`--live` takes the same samples in the same order, and the states from the target: the losses are equal, up to
what another padding rounds differently.
"""

from __future__ import annotations

import argparse
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from niels_gpt.eagle3 import Eagle3Stream
from niels_gpt.eagle3.format.drafters import drafters_of
from niels_gpt.eagle3.format.layout import DTYPES
from niels_gpt.eagle3.format.weights import read_weights
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import NativeEagle3Dataset
from niels_gpt.eagle3.target import capture, load_target

DEPTH, BLOCK, ANCHORS, MASK_ID = 2, 8, 8, 0  # layers, tokens of a block, blocks of a sample


class Layer(nn.Module):
    """The tokens of the blocks attend to the context and to their own block; then an MLP."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.mlp = config.num_attention_heads, LlamaMLP(config)
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, blocks: Tensor, context: Tensor, tables: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """Return the hidden states of the blocks' tokens [B, Q, H].

        blocks [B, Q, H]. context [B, W, H]: the target's features. tables: cos and sin of the W + Q positions.
        seen bool [B, 1, Q, W + Q]: what each token attends to.
        """
        given = torch.cat([context, self.before(blocks)], dim=1)
        parts = (
            part(given).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key, value = parts
        query, key = apply_rotary_pos_emb(query, key, *tables)
        mixed = functional.scaled_dot_product_attention(query[:, :, context.shape[1] :], key, value, seen)
        blocks = blocks + self.out(mixed.transpose(1, 2).flatten(2))
        return blocks + cast(Tensor, self.mlp(self.after(blocks)))


class Draft(nn.Module):
    """A DFlash draft with the target's embeddings and lm_head, which stay as they are."""

    def __init__(self, weights: dict[str, Tensor], features: int) -> None:
        """weights: of the cache. features: K * H, the target's hidden states of a token."""
        super().__init__()
        embeddings = weights["embeddings"].float()
        width = embeddings.shape[1]
        config = LlamaConfig(hidden_size=width, intermediate_size=2 * width, num_attention_heads=max(1, width // 16))
        self.embed = nn.Embedding.from_pretrained(embeddings)
        self.lm_head = nn.Embedding.from_pretrained(weights.get("lm_head", embeddings).float())
        self.features, self.feature_norm = nn.Linear(features, width, bias=False), nn.RMSNorm(width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(DEPTH))
        self.norm, self.rotary = nn.RMSNorm(width), LlamaRotaryEmbedding(config)

    def forward(self, ids: Tensor, aux: Tensor, anchors: Tensor) -> Tensor:
        """Return the hidden states of the blocks [B, N, BLOCK, H].

        ids int64 [B, W]. aux [B, W, K * H]: the target's hidden states. anchors int64 [B, N].
        """
        rows, width = ids.shape
        slots = (anchors[..., None] + torch.arange(BLOCK)).flatten(1)  # [B, Q]
        tokens = torch.full_like(slots, MASK_ID)
        tokens[:, ::BLOCK] = ids.gather(1, anchors)
        context = self.feature_norm(self.features(aux.float()))
        tables = self.rotary(context, torch.cat([torch.arange(width).expand(rows, -1), slots], dim=1))
        of_block = torch.arange(slots.shape[1]) // BLOCK
        before = torch.arange(width) < anchors.repeat_interleave(BLOCK, dim=1)[..., None]
        seen = torch.cat([before, (of_block[:, None] == of_block).expand(rows, -1, -1)], dim=-1)[:, None]
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, context, tables, seen)
        return cast(Tensor, self.norm(hidden).unflatten(1, (-1, BLOCK)))


def loss_of(draft: Draft, head: TargetHead, batch: dict[str, Tensor], chance: torch.Generator) -> Tensor:
    """Return the mean KL divergence of the proposals from the target's distributions, in nats.

    An anchor is a token with loss before another one: its block learns something.
    """
    loss_mask = functional.pad(batch["loss_mask"], (0, BLOCK))
    pairs = loss_mask[:, :-BLOCK] * loss_mask[:, 1 : 1 - BLOCK]
    anchors = (pairs + 1e-12).multinomial(ANCHORS, replacement=True, generator=chance)  # without pairs: anywhere
    slots = anchors[..., None] + torch.arange(BLOCK)  # [B, N, BLOCK]
    rows = torch.arange(len(slots))[:, None, None].expand_as(slots)
    learnt = loss_mask[rows, slots] == 1
    learnt[..., 0] = False  # the anchor is known
    hidden = draft(batch["input_ids"], batch["aux_hidden_states"], anchors)[learnt]
    wanted = head.logits(batch["last_hidden"][rows[learnt], slots[learnt] - 1]).float().log_softmax(-1)
    found = functional.linear(hidden, draft.lm_head.weight).log_softmax(-1)
    return functional.kl_div(found, wanted, reduction="sum", log_target=True) / max(1, len(hidden))


def main(argv: list[str] | None = None) -> list[float]:
    """Train; print and return the losses."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("cache", help="native cache made with --for dflash, or --targets reply or all")
    made.add_argument("--live", metavar="MODEL", help="take the states from this target instead of the cache")
    made.add_argument("--steps", type=int, default=50, metavar="N")
    options = made.parse_args(argv)
    torch.manual_seed(0)
    chance = torch.Generator().manual_seed(0)
    fields = ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden")
    data = NativeEagle3Dataset(options.cache, fields=fields)
    if "dflash" not in (kinds := drafters_of(data.manifest)):
        made.error(f"{options.cache} is enough for {', '.join(kinds)} only: a DFlash draft reads blocks of the target")
    layers, head = data.manifest["aux_layer_ids"], TargetHead.of_cache(options.cache)
    draft = Draft(read_weights(options.cache), len(layers) * data.manifest["hidden_size"])
    optimizer = torch.optim.AdamW((each for each in draft.parameters() if each.requires_grad), lr=1e-3)
    target, losses = None, list[float]()
    if options.live:
        dtype = DTYPES[data.manifest["head"]["compute_dtype"]]
        target = load_target(options.live, revision=None, dtype=dtype, attention="sdpa", device="cpu")
    for step, batch in zip(range(1, options.steps + 1), Eagle3Stream(data, global_batch_size=4, seed=0), strict=False):
        if target is not None:
            aux, before_norm, after_norm = capture(target, batch["input_ids"], batch["attention_mask"], layers)
            is_before = data.manifest["conventions"]["last_hidden"] == "pre_norm"
            batch |= {"aux_hidden_states": aux.flatten(2), "last_hidden": before_norm if is_before else after_norm}
        loss = loss_of(draft, head, batch, chance)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
