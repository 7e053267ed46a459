"""A padded batch of rollouts, as verl has it: folding it and putting it back, and a step of GRPO on both.

Run: python benchmarks/padded_rollouts.py [--rounds 7] [--threads 1] [--quick]

    fold   PaddedRollouts.from_padded with three columns [B, R], and unfold of log-probs and entropies; against the same
           row by row (PrefixForest.from_sequences, LossEdges.field, masked_scatter), and against what removes and
           restores padding without folding: a gather of ids and columns, and an index_put, as verl's unpad and pad do
    step   forward, PolicyLoss and backward of a small Llama (4 layers, width 128, float32) from padded tensors to
           gradients: folded, everything included, against the padded batch with the same loss in plain torch

Times are CPU times. The ways take turns, in another order in each round; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from typing import Any

import torch
from folded_steps import VOCAB, gradients, tiny_llama
from measuring import Ways, measured, ratio
from torch import Tensor

from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import body_forward
from niels_gpt.prefix_tree.padded import PaddedRollouts
from niels_gpt.prefix_tree.policy import PolicyLoss

Batch = dict[str, Any]
# Prompts of a batch, and tokens of the longest prompt and response; 8 responses of each prompt.
FOLDS = ((1, 256, 64), (8, 512, 512), (64, 1024, 1024))
STEPS = ((4, 256, 64), (2, 512, 128))
COLUMNS = {"old_logprobs": "old_log_probs", "ref_logprobs": "ref_log_prob", "advantages": "advantages"}


def verl_batch(groups: int, prompt: int, response: int) -> Batch:
    """Return prompts of at least three quarters of the longest, responses of at least a quarter, and columns [B, R]."""
    draw, rows = torch.Generator().manual_seed(0), 8 * groups
    prompts = torch.randint(prompt * 3 // 4, prompt + 1, (groups,), generator=draw).repeat_interleave(8)
    responses = torch.randint(response // 4, response + 1, (rows,), generator=draw)
    column = torch.arange(prompt + response)
    seen = (column >= prompt - prompts[:, None]) & (column < prompt + responses[:, None])
    ids = torch.randint(1, VOCAB, (rows, prompt + response), generator=draw)
    ids[:, :prompt] = ids[::8, :prompt].repeat_interleave(8, 0)
    return {
        "input_ids": ids * seen,
        "attention_mask": seen.long(),
        "response_mask": seen[:, prompt:].long(),
        "uid": [row // 8 for row in range(rows)],
        **{name: torch.randn(rows, response, generator=draw) / 9 - 6.2 for name in ("old_log_probs", "ref_log_prob")},
        "advantages": torch.randn(rows, 1, generator=draw).expand(-1, response).contiguous(),
    }


def by_padded(data: Batch, uid: Any = None) -> list[Tensor]:
    """Fold and unfold in one call each."""
    tensors = (data[name] for name in ("input_ids", "attention_mask", "response_mask"))
    columns = {name: data[key] for name, key in COLUMNS.items()}
    batch = PaddedRollouts.from_padded(*tensors, uid=uid, columns=columns)
    return [batch.unfold(each) for each in batch.columns.values()]


def by_rows(data: Batch) -> list[Tensor]:
    """Fold and unfold row by row."""
    seen, wanted = data["attention_mask"].bool(), data["response_mask"].bool()
    targets = torch.zeros_like(seen)
    targets[:, -wanted.shape[1] :] = wanted
    forest = PrefixForest.from_sequences(
        [row[kept] for row, kept in zip(data["input_ids"], seen, strict=True)],
        loss_mask=[row[kept] for row, kept in zip(targets, seen, strict=True)],
    )
    edges = LossEdges.from_forest(forest)
    folded = [
        edges.field([row[kept] for row, kept in zip(data[key], wanted, strict=True)], per="target")
        for key in COLUMNS.values()
    ]
    return [torch.zeros(wanted.shape).masked_scatter(wanted, each) for each in folded]


def by_unpadding(data: Batch) -> list[Tensor]:
    """Remove padding and restore it, without folding: indices of the tokens, gathers, and index_put."""
    seen, wanted = data["attention_mask"], data["response_mask"]
    index = seen.flatten().nonzero()[:, 0]
    ids = data["input_ids"].flatten()[index]
    positions = (seen.cumsum(1) - 1).flatten()[index]
    assert len(ids) == len(positions)
    index = wanted.flatten().nonzero()[:, 0]
    columns = [data[key].flatten()[index] for key in COLUMNS.values()]
    return [torch.zeros(wanted.numel()).index_put((index,), each).view(wanted.shape) for each in columns]


def bench_fold(rounds: int, cases: tuple[tuple[int, int, int], ...]) -> None:
    """Compare folding and unfolding."""
    for case in cases:
        data = verl_batch(*case)
        ways: Ways = {
            "from_padded, unfold": partial(by_padded, data),
            "the same by uid": partial(by_padded, data, data["uid"]),
            "by rows": partial(by_rows, data),
            "unpad, pad": partial(by_unpadding, data),
        }
        results: list[Any] = [way() for way in ways.values()]
        assert all(torch.equal(*each) for other in results[1:] for each in zip(results[0], other, strict=True))
        seconds = measured(ways, rounds, clock=time.process_time)
        tokens = int(data["attention_mask"].sum())
        print(f"fold {case}: {len(data['uid'])} rows, {tokens:,} tokens")
        for name, spent in seconds.items():
            middle = statistics.median(spent)
            print(
                f"  {name:<20} {middle * 1e3:8.2f} ms, {middle / tokens * 1e9:6.1f} ns a token; from_padded is "
                f"{ratio(seconds, 'from_padded, unfold', name):.2f} times as fast",
                flush=True,
            )


POLICY = PolicyLoss("dapo", clip_high=0.28, kl_coef=0.01)


def folded_step(model: Any, data: Batch) -> Tensor:
    """Return the gradients of a step from padded tensors, folded."""
    tensors = (data[name] for name in ("input_ids", "attention_mask", "response_mask"))
    columns = {name: data[key] for name, key in COLUMNS.items()}
    batch = PaddedRollouts.from_padded(*tensors, uid=data["uid"], columns=columns)
    hidden, head = body_forward(model, batch.forest)
    logp = sample_logprobs(edge_logprobs(hidden, batch.edges, head), batch.edges)
    return gradients(model, POLICY(logp, batch.edges, **batch.columns)[0])


def padded_step(model: Any, data: Batch) -> Tensor:
    """Return the same without folding."""
    ids, seen, mask = (data[name] for name in ("input_ids", "attention_mask", "response_mask"))
    hidden = model.model(input_ids=ids, attention_mask=seen, use_cache=False).last_hidden_state
    width = mask.shape[1]
    logits = model.lm_head(hidden[:, -width - 1 : -1])
    logp = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -width:].flatten(), reduction="none")
    logp = logp.view(mask.shape)
    ratio, gain = (logp - data["old_log_probs"]).exp(), data["advantages"]
    difference = data["ref_log_prob"] - logp
    loss = -torch.minimum(ratio * gain, ratio.clamp(1 - POLICY.clip_low, 1 + POLICY.clip_high) * gain)
    loss = loss + POLICY.kl_coef * (difference.exp() - difference - 1)
    return gradients(model, (loss * mask).sum() / mask.sum())


def bench_step(rounds: int, cases: tuple[tuple[int, int, int], ...]) -> None:
    """Compare steps."""
    for case in cases:
        data, model, other = verl_batch(*case), tiny_llama(0), tiny_llama(0)
        ways: Ways = {"folded": partial(folded_step, model, data), "padded": partial(padded_step, other, data)}
        torch.testing.assert_close(ways["folded"](), ways["padded"](), atol=1e-5, rtol=1e-3)
        seconds = measured(ways, rounds, clock=time.process_time)
        forest = PrefixForest.from_padded(data["input_ids"], data["attention_mask"], data["response_mask"])
        fewer = len(forest.loss_mask) / forest.num_tokens
        times = ", ".join(f"{name} {statistics.median(spent):.2f} s" for name, spent in seconds.items())
        found = ratio(seconds, "folded", "padded")
        print(f"step {case}: {times}; folded is {found:.2f} times as fast, {fewer:.2f} times fewer tokens", flush=True)


def main() -> None:
    """Read the arguments and run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="torch's (1)")
    parser.add_argument("--quick", action="store_true", help="one round of the smallest cases: does it run at all?")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, load {os.getloadavg()[0]:.1f}")
    few = 1 if arguments.quick else None
    rounds = few or arguments.rounds
    bench_fold(rounds, FOLDS[:few])
    bench_step(rounds, STEPS[:few])


if __name__ == "__main__":
    main()
