"""Padded batches of rollouts with the shapes of verl, their log-probs without folding, and gradients."""

import numpy as np
import torch

PROMPT, RESPONSE = 7, 9  # columns


def verl_batch(seed=0, groups=3, group=4, vocab=97, dtype=torch.float64):
    """Return a batch as of verl: left-padded prompts, right-padded responses, a tool's output in some, and columns.

    Responses of a group begin alike. Row 1 equals row 0, and the response of row 2 is empty. Old log-probs and
    advantages of two rows differ where they share tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    rows = groups * group
    ids = torch.randint(2, vocab, (rows, PROMPT + RESPONSE), generator=draw)
    ids[:, : PROMPT + 3] = ids[::group, : PROMPT + 3].repeat_interleave(group, 0)
    prompts = torch.randint(2, PROMPT + 1, (groups,), generator=draw).repeat_interleave(group)
    responses = torch.randint(1, RESPONSE + 1, (rows,), generator=draw)
    responses[2] = 0
    ids[1], responses[1] = ids[0], responses[0]
    column = torch.arange(PROMPT + RESPONSE)
    seen = (column >= PROMPT - prompts[:, None]) & (column < PROMPT + responses[:, None])
    tool = torch.zeros_like(seen)
    tool[::2, PROMPT + 2 : PROMPT + 4] = True
    return {
        "input_ids": ids * seen,
        "attention_mask": seen.long(),
        "response_mask": (seen & ~tool)[:, PROMPT:].long(),
        "old_log_probs": torch.randn(rows, RESPONSE, generator=draw, dtype=dtype) * 0.3 - 4.6,
        "ref_log_prob": torch.randn(rows, RESPONSE, generator=draw, dtype=dtype) * 0.3 - 4.6,
        "advantages": torch.randn(rows, 1, generator=draw, dtype=dtype).expand(-1, RESPONSE).contiguous(),
        "values": torch.randn(rows, RESPONSE, generator=draw, dtype=dtype) * 0.3,
        "returns": torch.randn(rows, RESPONSE, generator=draw, dtype=dtype) * 0.3,
        "uid": np.array([f"group {row // group}" for row in range(rows)], dtype=object),
    }


def unfolded(model, batch, temperature=1.0):
    """Return log-probs and entropies [B, R] of the padded batch, and the hidden states that predict [B, R, D]."""
    ids, seen = batch["input_ids"], batch["attention_mask"]
    inputs = {"input_ids": ids, "attention_mask": seen, "position_ids": (seen.cumsum(1) - 1).clamp(0)}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, -RESPONSE - 1 : -1]
    logp = (model.lm_head(hidden) / temperature).log_softmax(-1)
    targets = ids[:, -RESPONSE:, None]
    return logp.gather(-1, targets)[..., 0], -(logp.exp() * logp).sum(-1), hidden


def gradient(loss, *modules):
    """Return the gradient of a loss by all parameters of modules, in one axis."""
    parameters = [each for module in modules for each in module.parameters()]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters, **options)])
