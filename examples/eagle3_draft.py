"""A one-layer EAGLE-3 draft, its test-time training, and speculative decoding: used by train_eagle3_draft.py.

Slot p holds the target's hidden states at token p and the embedding of token p+1, and predicts token p+2. Each further
step of training takes the draft's own hidden states in place of the target's, and the next token. So it runs after the
target: it proposes a chain of tokens, and the target checks them in one pass. Those before the first one that is not
the target's most probable token are accepted, and the target's token at that place comes free. The output is thus the
target's greedy output, whatever the draft proposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

Batch = dict[str, Tensor]
Past = tuple[Tensor, ...]  # keys and values, [B, heads of keys, P, head size] each


class Draft(nn.Module):
    """The target's embeddings [V, H], frozen; one decoder layer of a Llama; a head over the draft's tokens.

    Layer and names are as in SpecForge's LlamaForCausalLMEagle3, so that `save_draft` has only to store them.
    config: see `draft_config`. selected: the target's id of each of the draft's, int64 [D]. layers: K, auxiliary ones.
    """

    def __init__(self, config: LlamaConfig, embeddings: Tensor, selected: Tensor, layers: int = 3) -> None:
        super().__init__()
        self.config, width, linear = config, config.hidden_size, partial(nn.Linear, bias=False)
        norm, size = partial(nn.RMSNorm, width, config.rms_norm_eps), config.head_dim
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        self.embed_tokens, self.fc = nn.Embedding.from_pretrained(embeddings.float()), linear(layers * width, width)
        of_attention = {"q_proj": linear(2 * width, queries), "k_proj": linear(2 * width, keys)}
        of_attention |= {"v_proj": linear(2 * width, keys), "o_proj": linear(queries, width)}
        parts = {"self_attn": nn.ModuleDict(of_attention), "mlp": LlamaMLP(config)}
        norms = {name: norm() for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        self.midlayer, self.rotary = nn.ModuleDict(parts | norms), LlamaRotaryEmbedding(config)
        self.norm, self.lm_head = norm(), linear(width, len(selected))
        self.register_buffer("d2t", selected - torch.arange(len(selected)))
        self.register_buffer("t2d", torch.zeros(len(embeddings), dtype=torch.bool).index_fill_(0, selected, True))

    def forward(
        self, ids: Tensor, hidden: Tensor, places: Tensor, past: Past | None, seen: Tensor | None
    ) -> tuple[Tensor, Past]:
        """Return the hidden states [B, S, H] after the layer, and all keys and values.

        ids [B, S], hidden [B, S, H], places [S]: of each slot. past: of earlier slots or steps. seen: which of these
        and of the new ones a slot attends to, bool [S, P + S]; None: all.
        """
        layer: Any = self.midlayer
        attention = layer.self_attn
        both = torch.cat([layer.input_layernorm(self.embed_tokens(ids)), layer.hidden_norm(hidden)], dim=-1)
        projected = (part(both) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        query, key, value = (x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for x in projected)
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(both, places[None]))
        now = (key, value)
        past = now if past is None else tuple(torch.cat(pair, dim=2) for pair in zip(past, now, strict=True))
        mixed = functional.scaled_dot_product_attention(query, *past, seen, enable_gqa=True)
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden)), past

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits over the draft's tokens, [..., D]."""
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    def propose(self, aux: Tensor, ids: Tensor, past: Past | None, chain: int) -> tuple[Tensor, Past]:
        """Return `chain` of the target's ids, and the keys and values of all slots with the target's hidden states.

        aux [n, K * H]: the target's hidden states at its last n tokens. ids [n]: the token after each of them.
        """
        before, new = 0 if past is None else past[0].shape[2], len(ids)
        seen, places = torch.ones(new, before + new, dtype=torch.bool).tril(before), before + torch.arange(new)
        hidden, kept = self(ids[None], self.fc(aux.float())[None], places, past, seen)
        found, past = [], kept
        for step in range(chain):
            if step:
                hidden, past = self(found[-1].view(1, 1), hidden[:, -1:], places[-1:] + step, past, None)
            best = self.logits(hidden[0, -1]).argmax()
            found.append(best + cast(Tensor, self.d2t)[best])
        return torch.stack(found), kept


def draft_config(target: PretrainedConfig) -> LlamaConfig:
    """Return the config of a draft's layer: heads, widths and plain RoPE as the target's own config has them."""
    of_text = cast(Any, target.get_text_config())
    heads, rope = of_text.num_attention_heads, getattr(of_text, "rope_parameters", None) or {}
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    return LlamaConfig(
        **{name: getattr(of_text, name) for name in same},
        num_hidden_layers=1,
        num_key_value_heads=getattr(of_text, "num_key_value_heads", heads),
        head_dim=getattr(of_text, "head_dim", None) or of_text.hidden_size // heads,
        rms_norm_eps=getattr(of_text, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10_000))},
        bos_token_id=of_text.bos_token_id,
        eos_token_id=of_text.eos_token_id,
    )


def ttt_losses(draft: Draft, batch: Batch, steps: int) -> Tensor:
    """Return the loss of each step of test-time training, nats per position [steps].

    batch: the fields of a cache. At step k slot p is the draft k proposals behind slot p: it attends to the slots up to
    p of step 0, which have the target's hidden states, and to itself at each later step. Padding, on the right, has no
    position, so the causal mask hides it from all that count.
    """
    ids, mask, probs = batch["input_ids"], batch["position_mask"], batch["target_probs"].float()
    hidden, past, losses = draft.fc(batch["aux_hidden_states"].float()), None, []
    places, itself = torch.arange(ids.shape[1]), torch.eye(ids.shape[1], dtype=torch.bool)
    seen = torch.ones_like(itself).tril()
    for step in range(steps):
        hidden, past = draft(ids, hidden, places + step, past, seen)
        entropies = -(probs * draft.logits(hidden).log_softmax(-1)).sum(-1, keepdim=True)
        losses.append((entropies * mask).sum() / mask.sum().clamp_min(1))
        ids, mask, probs = (functional.pad(x[:, 1:], (0, 0) * (x.dim() - 2) + (0, 1)) for x in (ids, mask, probs))
        seen = torch.cat([seen, itself], dim=1)
    return torch.stack(losses)


def run_target(model: Any, ids: Tensor, past: DynamicCache, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Run the target over the next n tokens; return its hidden states [n, K * H] and most probable tokens [n]."""
    out = model(input_ids=ids[None], past_key_values=past, use_cache=True, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer + 1][0] for layer in layers], dim=-1), out.logits[0].argmax(-1)


@torch.no_grad()
def greedy(model: Any, prompt: Tensor, tokens: int) -> list[int]:
    """Return the target's greedy reply, a token a pass: up to the token that ends it, or so many tokens."""
    past, ids, found, ended = DynamicCache(), prompt, cast("list[int]", []), False
    while len(found) < tokens and not ended:
        ids = run_target(model, ids, past, [0])[1][-1:]
        kept, ended = up_to_end(model, ids)
        found += kept
    return found


@torch.no_grad()
def speculate(
    model: Any, draft: Draft, prompt: Tensor, tokens: int, layers: Sequence[int], chain: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the same reply, by a draft that proposes `chain` tokens a pass; and each pass's accepted and all tokens.

    All tokens: those accepted, and the free one unless the reply ends before it. A pass beyond `tokens` counts in full.
    """
    past, of_draft, passes = DynamicCache(), None, cast("list[tuple[int, int]]", [])
    aux, best = run_target(model, prompt, past, layers)
    ids = torch.cat([prompt[1:], best[-1:]])  # the token after each of aux
    found, ended = up_to_end(model, ids[-1:])
    while len(found) < tokens and not ended:
        proposals, of_draft = draft.propose(aux, ids, of_draft, chain)
        aux, best = run_target(model, torch.cat([ids[-1:], proposals]), past, layers)
        accepted = int((proposals == best[:-1]).cumprod(0).sum())
        if accepted < chain:
            past.crop(accepted - chain)  # forget the rejected ones
        aux, ids = aux[: accepted + 1], best[: accepted + 1]
        kept, ended = up_to_end(model, ids)
        passes.append((min(accepted, len(kept)), len(kept)))
        found += kept
    return found[:tokens], passes


def up_to_end(model: Any, ids: Tensor) -> tuple[list[int], bool]:
    """Return the ids [n] up to the first one that ends a reply, or all; and whether there is such a one."""
    ends = model.config.eos_token_id
    of_all = ends if isinstance(ends, list) else [ends]
    stop = next((place for place, token in enumerate(ids.tolist(), start=1) if token in of_all), None)
    return ids[:stop].tolist(), stop is not None
