"""One step of a small Llama on a group of rollouts, folded and unfolded: for prefix_tree.py and tools/gpu_checks.py.

Run: python benchmarks/folded_steps.py [--rounds 7] [--quick]

    for models of three widths and groups around the size where both are as fast: forward and backward by segments and
    under a dense mask, in CPU time, which of them `model_inputs` takes, and the time of its choice to the better one's
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import partial
from timeit import timeit
from typing import Any

import torch
from measuring import Ways, measured, ratio
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from niels_gpt.prefix_tree.attention import Backend, model_inputs
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.segments import NAME

VOCAB = 512
WIDTHS = ((128, 4), (512, 8), (1024, 16))  # of a model, and its heads
# Tokens of prompt, of each of N completions: rows of 40 to 1,500 tokens in 5 to 84 nodes.
GRID = (
    (16, 6, 4),
    (32, 16, 4),
    (32, 16, 8),
    (64, 8, 16),
    (64, 24, 8),
    (64, 8, 32),
    (128, 64, 4),
    (256, 32, 8),
    (512, 4, 64),
    (512, 128, 8),
)


def folded_logprobs(model: Any, head: Any, forest: PrefixForest, edges: LossEdges, backend: Backend = "auto") -> Tensor:
    """Return the log-prob of every completion token, sample by sample [M]; shared tokens are computed once.

    head: `logits_head(model)`, made once for all steps.
    """
    hidden = model.model(**model_inputs(forest, model, backend=backend)).last_hidden_state
    return sample_logprobs(edge_logprobs(hidden, edges, head), edges)


def unfolded_logprobs(model: Any, group: tuple[list[int], list[list[int]]]) -> Tensor:
    """Return the same from a causal batch, padded on the right, that repeats the prompt for each completion."""
    prompt, completions = group
    samples = [torch.tensor(prompt + completion) for completion in completions]
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    rows = [states[len(prompt) - 1 : len(sample) - 1] for states, sample in zip(hidden, samples, strict=True)]
    targets = torch.cat([sample[len(prompt) :] for sample in samples])
    return -torch.nn.functional.cross_entropy(model.lm_head(torch.cat(rows)), targets, reduction="none")


def tiny_llama(seed: int, *, layers: int = 4, width: int = 128, heads: int = 4) -> Any:
    """Return a Llama with random weights, by default of 4 layers and width 128; two heads share keys."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=43 * width // 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2**16,
    )
    return LlamaForCausalLM(config)


def gradients(model: Any, loss: Tensor) -> Tensor:
    """Return all gradients of a loss as one vector."""
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])


def step(model: Any, forest: PrefixForest, backend: Backend) -> None:
    """Run forward and backward of a model's body on a folded row."""
    states = model.model(**model_inputs(forest, model, backend=backend)).last_hidden_state
    torch.autograd.grad(states.sum(), list(model.model.parameters()))


def compare(width: int, heads: int, case: tuple[int, int, int], rounds: int) -> float:
    """Print both ways of one step, and which one is taken; returns the time of that one to the better one's."""
    draw = random.Random(0)
    prompt, *completions = (draw.choices(range(VOCAB), k=size) for size in (case[0], *[case[1]] * case[2]))
    forest = PrefixForest.from_rollout_group(prompt, completions)
    rows = len(forest.input_ids)
    models = [tiny_llama(0, layers=2, width=width, heads=heads) for _ in range(3)]
    once: Ways = {
        "segments": partial(step, models[0], forest, "prefix_tree"),
        "dense": partial(step, models[1], forest, "dense"),
    }
    times = max(1, 200_000 // (rows * width))  # in a round, so that a short step is not lost in the clock's

    seconds = measured(
        {name: partial(timeit, run, number=times) for name, run in once.items()}, rounds, clock=time.process_time
    )
    taken = "segments" if NAME in model_inputs(forest, models[2]) else "dense"
    dense = ratio(seconds, "segments", "dense")  # of the speed: above 1 where segments are faster
    loss = max(1.0, 1 / dense if taken == "segments" else dense)
    each = [statistics.median(seconds[name]) / times * 1e3 for name in once]
    name, nodes = ", ".join(map(str, case)), len(forest.node_starts)
    print(f"  {width:>5} {name:<12} {rows:>6} {nodes:>6} {each[0]:9.2f} {each[1]:9.2f}", end="")
    print(f"  {dense:14.2f}  {taken:<9} {loss:5.2f}", flush=True)
    return loss


def main() -> None:
    """Compare both ways over the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each case (7)")
    parser.add_argument("--quick", action="store_true", help="one round of two cases: does it run at all?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"one step of 2 layers, torch {torch.__version__}, one thread; ms of CPU time, medians")
    print("  width P, R, N        rows  nodes  segments     dense  dense/segments  taken      loss")
    widths, grid, rounds = (WIDTHS[:1], GRID[:2], 1) if arguments.quick else (WIDTHS, GRID, arguments.rounds)
    losses = [compare(*width, case, rounds) for width in widths for case in grid]
    mean, most = statistics.mean(losses), max(losses)
    print(f"  time of the way that is taken, to the better one's: {mean:.3f} in the mean, {most:.2f} at most")


if __name__ == "__main__":
    main()
