r"""Train a two-layer DFlash draft on a native cache, or on the running target, and print the losses.

    niels-gpt eagle3 precompute --target-model MODEL --input-data CHATS --output-dir targets --format native \
        --for dflash
    python examples/train_dflash_draft.py targets
    python examples/train_dflash_draft.py targets --live MODEL

A DFlash draft proposes a block of tokens at once. A block begins with a known token, the anchor; the others are masks.
Its tokens attend to each other, and to the target's hidden states at the tokens before the anchor. Slot k of a block at
token p proposes token p + k, and learns from what the target predicts there: its last hidden state at token p + k - 1.

`--live` takes the same samples in the same order, and the states from the target: the losses are those of the cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from niels_gpt.eagle3 import Eagle3Stream
from niels_gpt.eagle3.format.weights import read_weights
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import FIELDS, NativeEagle3Dataset
from niels_gpt.eagle3.target import capture, load_target

Batch = dict[str, Tensor]


class Layer(nn.Module):
    """One layer: the tokens of the blocks attend to the context and to their own block, then an MLP."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.heads = heads
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = LlamaMLP(config)

    def forward(self, blocks: Tensor, context: Tensor, tables: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """Return the hidden states of the blocks' tokens [B, Q, H].

        blocks [B, Q, H]. context [B, W, H]: the target's features. tables: cos and sin of the W + Q positions.
        seen bool [B, 1, Q, W + Q]: what each token attends to.
        """
        normed = self.before(blocks)
        both = torch.cat([context, normed], dim=1)
        query, key, value = (
            part(given).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, given in ((self.query, normed), (self.key, both), (self.value, both))
        )
        ours = tuple(each[:, -blocks.shape[1] :] for each in tables)
        query = apply_rotary_pos_emb(query, query, *ours)[0]
        key = apply_rotary_pos_emb(key, key, *tables)[0]
        mixed = functional.scaled_dot_product_attention(query, key, value, seen)
        blocks = blocks + self.out(mixed.transpose(1, 2).flatten(2))
        return blocks + cast(Tensor, self.mlp(self.after(blocks)))


class Draft(nn.Module):
    """A DFlash draft with the target's embeddings and lm_head, which stay as they are."""

    def __init__(self, weights: Batch, layers: int, *, depth: int = 2, block: int = 8, mask_id: int = 0) -> None:
        """weights: of the cache. layers: K, of the target. depth: layers. mask_id: the token of unknown slots."""
        super().__init__()
        embeddings = weights["embeddings"].float()
        width = embeddings.shape[1]
        config = LlamaConfig(hidden_size=width, intermediate_size=2 * width, num_attention_heads=max(1, width // 16))
        self.block, self.mask_id = block, mask_id
        self.embed = nn.Embedding.from_pretrained(embeddings)
        self.register_buffer("lm_head", weights.get("lm_head", embeddings).float())
        self.features, self.feature_norm = nn.Linear(layers * width, width, bias=False), nn.RMSNorm(width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(depth))
        self.norm, self.rotary = nn.RMSNorm(width), LlamaRotaryEmbedding(config)

    def forward(self, ids: Tensor, aux: Tensor, anchors: Tensor) -> Tensor:
        """Return the hidden states of the blocks [B, N, block, H].

        ids int64 [B, W]. aux [B, W, K * H]: the target's hidden states. anchors int64 [B, N].
        """
        rows, width = ids.shape
        places = (anchors[..., None] + torch.arange(self.block)).flatten(1)  # [B, Q]
        tokens = torch.full_like(places, self.mask_id)
        tokens[:, :: self.block] = ids.gather(1, anchors)
        context = self.feature_norm(self.features(aux.float()))
        positions = torch.cat([torch.arange(width).expand(rows, -1), places], dim=1)
        tables = self.rotary(context, positions)
        owner = torch.arange(places.shape[1]) // self.block
        before = torch.arange(width) < anchors.repeat_interleave(self.block, dim=1)[..., None]
        seen = torch.cat([before, (owner[:, None] == owner).expand(rows, -1, -1)], dim=-1)[:, None]
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, context, tables, seen)
        return cast(Tensor, self.norm(hidden).unflatten(1, (-1, self.block)))


def drawn_anchors(loss_mask: Tensor, number: int, chance: torch.Generator) -> Tensor:
    """Return anchors drawn from the tokens with loss of each row, int64 [B, number]; with repeats in a short row."""
    return (loss_mask.float() + 1e-12).multinomial(number, replacement=True, generator=chance)


def loss_of(draft: Draft, head: TargetHead, batch: Batch, anchors: Tensor) -> Tensor:
    """Return the mean cross-entropy of the proposals with the target's distributions, in nats."""
    ids, last = batch["input_ids"], batch["last_hidden"]
    slots = anchors[..., None] + torch.arange(draft.block)  # [B, N, block]
    inside = slots < ids.shape[1]
    slots = slots.clamp(max=ids.shape[1] - 1)
    rows = torch.arange(len(ids))[:, None, None]
    learnt = inside & (batch["loss_mask"][rows, slots] == 1)
    learnt[..., 0] = False  # the anchor is known
    hidden = draft(ids, batch["aux_hidden_states"], anchors)[learnt]
    wanted = head.logits(last[rows, slots - 1][learnt]).float().softmax(-1)
    found = functional.linear(hidden, cast(Tensor, draft.lm_head)).log_softmax(-1)
    return -(wanted * found).sum(-1).mean()


def batches(stream: Eagle3Stream, model: Any, layers: list[int], last_hidden: str) -> Iterator[Batch]:
    """Yield the batches of a stream; with a model, with the states of the running target."""
    for batch in stream:
        if model is not None:
            aux, pre_norm, post_norm = capture(model, batch["input_ids"], batch["attention_mask"], layers)
            batch["aux_hidden_states"] = aux.flatten(2)
            batch["last_hidden"] = pre_norm if last_hidden == "pre_norm" else post_norm
        yield batch


def main(argv: list[str] | None = None) -> list[float]:
    """Train; print and return the losses."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("cache", type=Path, help="native cache made with --for dflash, or --targets reply or all")
    made.add_argument("--live", metavar="MODEL", help="take the states from this target instead of the cache")
    made.add_argument("--steps", type=int, default=50, metavar="N")
    made.add_argument("--batch-size", type=int, default=4, metavar="N", help="samples of a step")
    made.add_argument("--anchors", type=int, default=8, metavar="N", help="blocks of a sample")
    made.add_argument("--lr", type=float, default=1e-3)
    options = made.parse_args(argv)
    torch.manual_seed(0)
    data = NativeEagle3Dataset(options.cache, fields=FIELDS)
    stream = Eagle3Stream(data, global_batch_size=options.batch_size, seed=0, epochs=None)
    head, layers = TargetHead.of_cache(options.cache), data.manifest["aux_layer_ids"]
    draft = Draft(read_weights(options.cache), len(layers))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=options.lr)
    model = None
    if options.live:
        model = load_target(options.live, revision=None, dtype=torch.float32, attention="sdpa", device="cpu")
    losses, chance = list[float](), torch.Generator().manual_seed(0)
    given = batches(stream, model, layers, data.manifest["conventions"]["last_hidden"])
    for step, batch in zip(range(options.steps), given, strict=False):
        loss = loss_of(draft, head, batch, drawn_anchors(batch["loss_mask"], options.anchors, chance))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 9:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
