"""What a GPU makes of this project: precompute, distributions, batches made ahead, folded steps, as ratios in one run.

Run: python benchmarks/gpu.py [--only SECTION ...] [--rounds 3] [--folder DIR] [--device cuda] [--quick]

    precompute  tokens a second of a random Llama of 1.1 billion parameters in bf16 over rows of about 1,000 ids, of
                the native form, of version 2 with the 10 most probable tokens and of version 1, as shares of the bare
                forward passes of the same batches; and of what is made of the outputs, before anything is written
    probs       TargetHead.target_probs of batches of a native cache (H=4,096, D=32,000), beside the CPU's
    prefetch    a step of some ms whose batches are read in the loop, and by prefetch(stream, 4, device)
    step        forward and backward in bf16 of a Llama of 8 layers of width 1,024, and of one of 1.2 billion
                parameters, of a prompt and 8 completions: folded by flex_attention and under a dense mask, beside the
                plain causal batch of the same samples
    lengths     the folded step by flex_attention over rows of as many lengths: what torch.compile takes of it

--folder: where caches are written, default a folder in /tmp; one in memory leaves the disk out. --quick: tiny sizes,
which run on a CPU too, where the figures mean nothing. The packages of the extra eagle3 must be there.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle3_native import DRAFT, HIDDEN, LONGEST, States, masks_of, write_native
from folded_steps import folded_logprobs
from gpu_models import VOCAB, finished, llama, show
from gpu_precompute import bench_precompute
from loader_caches import build
from measuring import Ways, measured
from torch import Tensor

from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import build_native_dataloader
from niels_gpt.prefix_tree.attention import Backend
from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import logits_head
from niels_gpt.sampling import EpochStream, prefetch

SIZES = {"small": (1024, 8, 3), "large": (2048, 22, 2.75)}
"""Width, layers, and how many times wider their inner layer is, of the models that make steps."""
GROUPS = ((512, 128, 8), (1024, 64, 8), (1024, 256, 8), (1024, 1024, 8))
"""Tokens of a prompt, tokens of each completion, completions."""


def bench_probs(options: argparse.Namespace, folder: Path) -> None:
    """Compare the distributions of a batch on the device with those on the CPU, and with reading the batch."""
    samples = 2 if options.quick else 8
    masks = masks_of(samples)
    write_native(folder / "native", masks, States(LONGEST, [torch.bfloat16]), "bf16")
    (batch,) = build_native_dataloader(folder / "native", samples, False)
    heads = {
        f"{device}, {str(dtype)[6:]}": TargetHead({"lm_head": torch.rand(DRAFT, HIDDEN)}, dtype=dtype).to(device)
        for device, dtype in (("cpu", torch.float32), (options.device, torch.float32), (options.device, torch.bfloat16))
    }
    ways: Ways = {"reading the batch": lambda: list(build_native_dataloader(folder / "native", samples, False))}
    for name, head in heads.items():
        ways[name] = finished(partial(head.target_probs, batch), options.device)
    seconds = measured(ways, options.rounds)
    rows = sum(int(mask[1:].sum()) for mask in masks)
    print(
        f"probs: {samples} samples, {rows:,} distributions of {DRAFT:,}; {torch.get_num_threads()} threads of the CPU"
    )
    show(seconds, "cpu, float32", rows)
    shutil.rmtree(folder / "native")


def bench_prefetch(options: argparse.Namespace, folder: Path) -> None:
    """Compare steps whose batches are read in the loop, or made ahead, with steps over one batch that is there."""
    steps, width = (5, 64) if options.quick else (100, 8192)
    split = build(folder / "pretrain", 4, 400_000 if options.quick else 40_000_000)
    left, right = torch.randn(2, width, width, device=options.device, dtype=torch.bfloat16)

    def stream(device: str = "cpu") -> EpochStream:
        return EpochStream(str(split), T=1024, global_batch_size=128, seed=0, device=device)

    def step(batch: Any) -> float:
        for _ in range(4):
            torch.mm(left, right)
        return float(batch.x.sum())  # waits, as a loop that logs its loss

    def steps_of(batches: Any) -> None:
        for _, batch in zip(range(steps), batches, strict=False):
            step(batch)

    def ahead() -> None:
        with prefetch(stream(), 4, options.device) as batches:
            steps_of(batches)

    one = next(iter(stream())).to(options.device)
    ways: Ways = {
        "the step alone": lambda: steps_of([one] * steps),
        "read in the loop, .to(device)": lambda: steps_of(batch.to(options.device) for batch in stream()),
        "read in the loop, device=": lambda: steps_of(stream(options.device)),
        "prefetch(stream, 4, device)": ahead,
    }
    print(f"prefetch: {steps} steps, batches of 128 x 1,024 ids")
    show(measured(ways, options.rounds), "the step alone", steps * 128 * 1024)


def gradients_of(model: Any, logprobs: Callable[[], Tensor]) -> Callable[[], object]:
    """Return a step: forward, backward, and the gradients dropped."""

    def step() -> None:
        (-logprobs().mean()).backward()
        model.zero_grad(set_to_none=True)

    return step


def plain_logprobs(model: Any, ids: Tensor, prompt: int) -> Tensor:
    """Return the log-probs of the completions of a plain causal batch [N, P + C]; the head sees their rows only."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
    logits = model.lm_head(hidden.flatten(0, 1)).float()
    return -torch.nn.functional.cross_entropy(logits, ids[:, prompt:].flatten(), reduction="none")


def training_models(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the same Llama with flex_attention and with sdpa."""
    width, layers, wider = (64, 2, 3) if options.quick else SIZES[size]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    made = {name: llama(options.device, **sizes, intermediate_size=int(wider * width)) for name in ("flex", "sdpa")}
    if options.device == "cuda":
        made["flex"].set_attn_implementation("flex_attention")
    return {name: model.train() for name, model in made.items()}


def folded_step(model: Any, forest: PrefixForest, backend: Backend = "auto") -> Callable[[], object]:
    """Return a folded step, its edges on the model's device."""
    edges, head = LossEdges.from_forest(forest).to(model.device), logits_head(model)
    return gradients_of(model, lambda: folded_logprobs(model, head, forest, edges, backend))


def group_of(prompt: int, completion: int, count: int) -> tuple[list[int], list[list[int]]]:
    """Return random ids of a prompt, and of completions."""
    ids = np.random.default_rng(prompt + completion).integers(VOCAB, size=prompt + completion * count).tolist()
    return ids[:prompt], [ids[at : at + completion] for at in range(prompt, len(ids), completion)]


def bench_step(options: argparse.Namespace, _: Path) -> None:
    """Compare a training step in three ways, of a small model and of a large one."""
    for size in SIZES:
        models = training_models(size, options)
        print(f"step, {sum(each.numel() for each in models['sdpa'].parameters()) / 1e6:,.0f} million parameters")
        for prompt, completion, count in [(24, 8, 4)] if options.quick else GROUPS:
            first, completions = group_of(prompt, completion, count)
            forest, whole = PrefixForest.from_rollout_group(first, completions), [first + each for each in completions]
            ids, stats = torch.tensor(whole, device=options.device), forest.stats()
            plain = partial(plain_logprobs, models["sdpa"], ids, prompt)
            ways: Ways = {
                "plain causal batch, sdpa": gradients_of(models["sdpa"], plain),
                "folded, flex_attention": folded_step(models["flex"], forest),
                "folded, dense mask": folded_step(models["sdpa"], forest, "dense"),
            }
            waited = {name: finished(way, options.device) for name, way in ways.items()}
            seconds = measured(waited, 2 * options.rounds)
            tokens, pairs = stats.tokens_before / stats.tokens_after, stats.pairs_before / stats.pairs_after
            print(f" {prompt} + {completion} x {count}: {tokens:.2f} times fewer tokens, {pairs:.2f} fewer pairs")
            show(seconds, "plain causal batch, sdpa", 0)
        del models


def bench_lengths(options: argparse.Namespace, _: Path) -> None:
    """Time folded steps by flex_attention over rows of many lengths, each a first time and a second one."""
    model, seconds = training_models("small", options)["flex"], list[list[float]]()
    steps = [
        finished(
            folded_step(model, PrefixForest.from_rollout_group(*group_of(300 + 37 * number, 50, 8))), options.device
        )
        for number in range(4 if options.quick else 12)
    ]
    for _ in range(2):
        seconds.append([])
        for step in steps:
            begin = time.perf_counter()
            step()
            seconds[-1].append(time.perf_counter() - begin)
    for name, found in zip(("first", "second"), seconds, strict=True):
        print(f"lengths, {name} time: {' '.join(f'{1e3 * each:.0f}' for each in found)} ms", flush=True)


SECTIONS = {
    "precompute": bench_precompute,
    "probs": bench_probs,
    "prefetch": bench_prefetch,
    "step": bench_step,
    "lengths": bench_lengths,
}


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="default: a temporary one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; the last column: as a share of the speed of the line that has 1")
    for section in options.only:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            SECTIONS[section](options, Path(folder))
        print(f"  ({section} took {time.perf_counter() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
