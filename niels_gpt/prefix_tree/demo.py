"""One policy-gradient step (GRPO) on a group of rollouts, folded and unfolded: an example to copy from.

    python -m niels_gpt.prefix_tree.demo
    python -m niels_gpt.prefix_tree.demo --prompt 1024 --completion 32 --samples 8 --plot mask.png

Folding changes only `folded_logprobs` in a training step; `policy_loss` is the usual loss. The model is a small Llama
of transformers (extra `eagle3`) with random weights. The prediction counts its FLOPs and the pairs that the attention
computes, as `stats` does; the times include the padding of the unfolded batch. --plot needs the extra `pipelines`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niels_gpt.commands.console import run as run_command
from niels_gpt.commands.prefix_tree import demo_command
from niels_gpt.prefix_tree.attention import Backend, hf_forward, model_inputs
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.fold import CROSS_ENTROPY_IGNORE_IDX, fold_shared_prefix_rollouts
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import logits_head
from niels_gpt.prefix_tree.savings.count import flop_factor
from niels_gpt.prefix_tree.savings.models import shape_of_model
from niels_gpt.prefix_tree.verify import verify_fold
from niels_gpt.storage.fileio import write_bytes

VOCAB, CLIP, ROUNDS = 512, 0.2, 5
TOLERANCE = 1e-4  # float32

Group = tuple[list[int], list[list[int]]]
Head = Callable[[Tensor], Tensor]
Step = Callable[[], Tensor]


def folded_logprobs(
    model: Any, head: Head, forest: PrefixForest, edges: LossEdges, backend: Backend = "auto"
) -> Tensor:
    """Return the log-prob of every completion token, sample by sample [M]; shared tokens are computed once.

    head: `logits_head(model)`, made once for all steps.
    """
    hidden = model.model(**model_inputs(forest, model, backend=backend)).last_hidden_state
    return sample_logprobs(edge_logprobs(hidden, edges, head), edges)


def unfolded_logprobs(model: Any, group: Group) -> Tensor:
    """Return the same from a causal batch, padded on the right, that repeats the prompt for each completion."""
    prompt, completions = group
    samples = [torch.tensor(prompt + completion) for completion in completions]
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    rows = [states[len(prompt) - 1 : len(sample) - 1] for states, sample in zip(hidden, samples, strict=True)]
    targets = torch.cat([sample[len(prompt) :] for sample in samples])
    return -torch.nn.functional.cross_entropy(model.lm_head(torch.cat(rows)), targets, reduction="none")


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """Return the clipped loss of PPO; all arguments have one value for each completion token [M]."""
    ratio = (logprobs - old_logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * weights).sum()


def random_group(prompt: int, completion: int, samples: int, seed: int) -> Group:
    """Return a prompt and completions of half to full length; two are equal, and two share their first token."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint((completion + 1) // 2, completion + 1, (samples,), generator=draw).tolist()
    ids = iter(torch.randint(VOCAB, (prompt + sum(lengths),), generator=draw).tolist())
    first, *completions = [list(islice(ids, length)) for length in (prompt, *lengths)]
    completions[1] = list(completions[0])
    completions[3][0] = completions[2][0]
    return first, completions


def tiny_llama(seed: int) -> Any:
    """Return a Llama of 4 layers and width 128 with random weights. Raises: ImportError without transformers."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ImportError("the model of the demo needs transformers: pip install 'niels-gpt[eagle3]'") from error
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2**16,
    )
    return LlamaForCausalLM(config)


def gradients(model: Any, loss: Tensor) -> Tensor:
    """Return all gradients of a loss as one vector."""
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])


def median_seconds(steps: dict[str, Step], model: Any) -> list[float]:
    """Return the median seconds of each step, forward and backward, over rounds in which the steps alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            begin = time.perf_counter()
            gradients(model, step())
            seconds[name].append(time.perf_counter() - begin)
    return [statistics.median(times) for times in seconds.values()]


def run(
    *,
    prompt: int,
    completion: int,
    samples: int,
    seed: int,
    threads: int,
    attention: str,
    plot: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the step both ways and say the differences; returns them, and whether they are within TOLERANCE: `ok`."""
    torch.set_num_threads(threads)
    group = random_group(prompt, completion, samples, seed)
    forest = PrefixForest.from_rollout_group(*group)
    if plot is not None:
        from niels_gpt.prefix_tree.savings.plot import check_picture, plot_mask

        check_picture(plot, forest.num_tokens)
    model = tiny_llama(seed)
    backend: Backend = "prefix_tree" if attention == "prefix_tree" else "dense"
    model.set_attn_implementation("eager" if attention == "eager" else "sdpa")
    head = logits_head(model)  # model.lm_head, and the scale or cap that some models add
    edges = LossEdges.from_forest(forest)
    ways: dict[str, Step] = {
        "unfolded": lambda: unfolded_logprobs(model, group),
        "folded": lambda: folded_logprobs(model, head, forest, edges, backend),
    }

    draw = torch.Generator().manual_seed(seed)
    rewards = torch.rand(len(group[1]), generator=draw)
    advantages = edges.field((rewards - rewards.mean()) / (rewards.std() + 1e-6), per="sample")
    lengths = torch.tensor([len(completion) for completion in group[1]])
    weights = edges.field(1 / (lengths * len(lengths)), per="sample")  # a mean over samples of means over their tokens
    with torch.no_grad():  # of an earlier policy: samples that share a token have different values for it
        now = [way() for way in ways.values()]
    old = now[0] + 0.3 * torch.randn(now[0].shape, generator=draw)

    def step(logprobs: Step) -> Step:
        return lambda: policy_loss(logprobs(), old, advantages, weights)

    steps = {name: step(way) for name, way in ways.items()}
    predicted = flop_factor(forest.stats(), shape_of_model(model), backend)
    say(sizes(group, forest, edges, backend))
    say(f"training FLOPs   predicted for this model and attention: {predicted:.2f}x")
    unfolded, folded = median_seconds(steps, model)
    say(f"forward+backward {unfolded:.3f} s unfolded, {folded:.3f} s folded: {unfolded / folded:.2f}x")
    gradient, other = (gradients(model, step()) for step in steps.values())
    apart, off = (now[0] - now[1]).abs().max(), (gradient - other).abs().max() / gradient.abs().max()
    say(f"log-probs        differ by {apart:.1e} at most")
    say(f"gradients        differ by {off:.1e} of the largest one at most")
    whole = [group[0] + completion for completion in group[1]]
    report = verify_fold(hf_forward(model), forest, samples=whole, seed=seed)
    say(f"\nverify_fold: {report}")
    if plot is not None:
        write_bytes(plot, plot_mask(forest))
    ok = bool(report.ok and max(apart, off) < TOLERANCE)
    seconds = {"flop_factor": predicted, "seconds_unfolded": unfolded, "seconds_folded": folded}
    return {"ok": ok, **seconds, "logprobs_differ": float(apart), "gradients_differ": float(off)}


def sizes(group: Group, forest: PrefixForest, edges: LossEdges, backend: Backend) -> str:
    """Return the tokens, attention pairs and supervised tokens of both."""
    stats = forest.stats()
    labels = fold_shared_prefix_rollouts(*group).labels
    labelled = sum(label != CROSS_ENTROPY_IGNORE_IDX for label in labels)
    before, after = stats.tokens_before, stats.tokens_after
    dense = f" (the dense mask computes {after**2:,})" if backend == "dense" else ""
    return (
        f"tokens           {before:,} unfolded, {after:,} folded: {before / after:.2f}x\n"
        f"attention pairs  {stats.pairs_before:,} unfolded, {stats.pairs_after:,} folded: "
        f"{stats.pairs_before / stats.pairs_after:.2f}x{dense}\n"
        f"supervised       {edges.num_loss_tokens:,} tokens by LossEdges, {labelled:,} by one label a row: "
        f"that loses the first token of each of {len(group[1])} completions"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments, default those of the process; returns the exit status."""
    return run_command(demo_command(lambda: run), argv, "python -m niels_gpt.prefix_tree.demo")


if __name__ == "__main__":
    sys.exit(main())
