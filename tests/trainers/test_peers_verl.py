"""Losses on folded rows equal verl's own functions' on its padded batch.

Where its wheel lies unpacked in a folder named verl-0.9.1, and NIELS_GPT_PEERS names the folder above it. .ci/run makes
it so; elsewhere these tests are left out. verl imports Ray and vLLM's surroundings, so its functions are taken out of
its files, unchanged.
"""

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from support.float64_models import float64_llama
from support.padded_batches import gradient, unfolded, verl_batch

from niels_gpt.prefix_tree.edges import at_predictions, edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.heads import body_forward
from niels_gpt.prefix_tree.padded import PaddedRollouts
from niels_gpt.prefix_tree.policy import PolicyLoss, value_loss

PEERS = os.environ.get("NIELS_GPT_PEERS")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(PEERS is None, reason="verl is not here: set NIELS_GPT_PEERS to a folder with its wheel"),
]
TENSORS = ("verl/utils/torch_functional.py", ["clip_by_value", "masked_sum", "masked_mean"])
LOSSES = (
    "verl/trainer/ppo/core_algos.py",
    ["agg_loss", "compute_policy_loss_vanilla", "compute_value_loss", "kl_penalty_forward"],
)


def functions(path, names, **known):
    """Return functions of one of verl's files by name, without their decorators."""
    tree = ast.parse((Path(str(PEERS)) / "verl-0.9.1" / path).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(found) == len(names)
    for node in found:
        node.decorator_list = []
    scope = {"torch": torch, "Optional": Optional, "Any": Any, **known}
    exec(compile(ast.Module(found, []), path, "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


@pytest.fixture(scope="module")
def verl():
    tensors = functions(*TENSORS)
    return functions(*LOSSES, verl_F=tensors, ActorConfig=dict, AlgoConfig=frozenset)


class Config(dict):
    """verl's configuration of an actor: entries by name and by attribute."""

    def __getattr__(self, name):
        return self[name]


def assert_same(mine, theirs, *modules):
    torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)  # verl adds 1e-8 to counts
    one, other = gradient(mine, *modules), gradient(theirs, *modules)
    assert float(other.norm()) > 0 and float((one - other).norm() / other.norm()) < 1e-7


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("token-mean", "dapo"), ("seq-mean-token-mean", "grpo"), ("seq-mean-token-sum-norm", "dr_grpo")],
)
def test_policy_and_critic_are_those_of_verl(verl, mode, kind):
    llama, data = float64_llama(), verl_batch(dtype=torch.float64)
    head = torch.nn.Linear(32, 1, dtype=torch.float64)
    theirs, _, hidden = unfolded(llama, data)
    data["old_log_probs"] = theirs.detach() + data["old_log_probs"] + 4.6
    mask, filled = data["response_mask"], int((data["response_mask"].sum(1) > 0).sum())
    total = {"batch_num_tokens": int(mask.sum()), "global_batch_size": filled, "loss_scale_factor": 20}
    config = Config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5, global_batch_info=total)
    clipped, metrics = verl.compute_policy_loss_vanilla(
        data["old_log_probs"], theirs, data["advantages"], mask, mode, config
    )
    kl = verl.kl_penalty_forward(theirs, data["ref_log_prob"], "low_var_kl")
    policy_of_verl = clipped + 0.05 * verl.agg_loss(kl, mask, mode, **total)
    values = head(hidden)[..., 0]
    critic_of_verl, share = verl.compute_value_loss(values, data["returns"], data["values"], mask, 0.2, mode, **total)

    batch = PaddedRollouts.from_padded(
        *(data[name] for name in ("input_ids", "attention_mask", "response_mask")), uid=data["uid"]
    )
    old, ref, advantages, old_values, returns = (
        batch.fold(data[name]) for name in ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    )
    hidden, lm_head = body_forward(llama, batch.forest, backend="prefix_tree")
    logp = sample_logprobs(edge_logprobs(hidden, batch.edges, lm_head), batch.edges)
    normalizer = {"dapo": int(mask.sum()), "grpo": filled, "dr_grpo": filled * 20}[kind]
    policy = PolicyLoss(kind, clip_high=0.28, ratio_max=1.5, kl_coef=0.05)
    mine, shares = policy(
        logp, batch.edges, old_logprobs=old, advantages=advantages, ref_logprobs=ref, normalizer=normalizer
    )
    assert_same(mine, policy_of_verl, llama)
    both = float(shares["clip_low"] + shares["clip_high"])
    assert both == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6) and both > 0
    critic, shares = value_loss(
        at_predictions(head(hidden)[..., 0], batch.edges),
        batch.edges,
        old_values=old_values,
        returns=returns,
        loss_type=kind,
        normalizer=normalizer,
    )
    assert_same(critic, critic_of_verl, llama, head)
    assert float(shares["clip_share"]) == pytest.approx(float(share), abs=1e-6)
