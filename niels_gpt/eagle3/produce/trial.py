"""A target that was just loaded runs over a few tokens, before anything is written: does it run, is it as planned?"""

from __future__ import annotations

from typing import Any

import torch

from niels_gpt.eagle3.format.plan import Plan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.target import HFEagle3TargetModel, capture
from niels_gpt.storage.errors import TargetError

_TRIAL_TOKENS = 8
Found = tuple[dict[str, Any], str] | None
"""What a native manifest states of the target's head: `head`, and last_hidden; None for the other forms."""


def try_target(plan: Plan, samples: Samples, model: Any, device: torch.device) -> Found:
    """Run a target over the first tokens of the first sample; nothing is written.

    Returns what a native manifest states of its head.
    Raises: ValueError where it does not run, or returns tensors of other sizes than the plan states, and as
        `TargetHead.of_model`.
    """
    ids = torch.from_numpy(samples.row(0)[0][:_TRIAL_TOKENS].astype("int64"))[None].to(device)
    try:
        sizes, head = _run(plan, model, ids)
    except OSError:
        raise
    except Exception as error:  # of the model's code, torch, or a library
        if getattr(error, "code", None) == "E705":  # has a text of its own
            raise
        advice = "" if plan.run.get("attention") == "eager" else ". If its attention is why: --attention eager"
        raise TargetError(
            f"{plan.target.get('name')}: the target was loaded, and could not be run over {ids.shape[1]} tokens "
            f"({type(error).__name__}: {error}){advice}. Nothing was written"
        ) from error
    manifest = plan.manifest
    aux = manifest["hidden_size"] * len(manifest["aux_layer_ids"]) if plan.is_native else manifest["aux_hidden_dim"]
    expected = aux, manifest["target_vocab_size"]
    if sizes != expected:
        raise TargetError(
            f"{plan.target.get('name')}: it gives {sizes[0]} hidden states and {sizes[1]} logits a token, expected "
            f"{expected[0]} and {expected[1]} by its config. Nothing was written"
        )
    return None if head is None else (head.facts(), head.last_hidden)


def _run(plan: Plan, model: Any, ids: torch.Tensor) -> tuple[tuple[int, int], TargetHead | None]:
    """Return the number of hidden states and of logits that the target gives a token, and its head."""
    layers = plan.manifest["aux_layer_ids"]
    if plan.is_native:
        aux, _, _ = capture(model.eval(), ids, torch.ones_like(ids), layers)
        head = TargetHead.of_model(model)
        return (aux.shape[-2] * aux.shape[-1], head.vocab_size), head
    outputs = HFEagle3TargetModel(model, layers).generate_batch(ids, torch.ones_like(ids), torch.zeros_like(ids))
    return (outputs.aux_hidden_states.shape[-1], outputs.logits.shape[-1]), None
