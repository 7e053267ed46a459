"""Making EAGLE-3 caches on a CPU: the CPU time of whole runs, beside bare forward passes of the same padded batches.

Section `precompute` of eagle3.py, for a random Llama of 8 layers and samples of 90 to 120 % of a length:

    small    H=512, V=32,000, a draft vocabulary of 8,000
    tiny     H=128, as in a test of a pipeline: what a run does beside the target weighs most here

A bare pass computes what the form stores: all logits for versions 1 and 2; for the native form one slot's logits, and
those of the target rows, by the same lm_head. Beside it: what is computed for the cache, not written; and the run, from
samples to meta.json, but without imports and loading. A run of one sample is the least that a run takes: plan, trial,
weights, manifest, and this sample; without it, the rest is compared with the rest of the forward passes. All of it is
CPU time of this process and its threads.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measuring import Ways, measured
from numpy.typing import NDArray
from torch import Tensor

from niels_gpt.eagle3 import make_target_cache
from niels_gpt.eagle3.format.plan import make_plan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.forward import DenseForward, NativeForward
from niels_gpt.eagle3.head import TargetHead

VOCAB, DRAFT = 32_000, 8_000
FORMS: dict[str, dict[str, Any]] = {
    "version 1": {"format_version": 1, "shard_size": 32},
    "version 2, top 64": {"format_version": 2, "target_probs_topk": 64, "shard_size": 32},
    "native": {"format_version": "native-1", "aux_dtype": "bf16", "shard_bytes": 1 << 30},
    "native, fp8": {"format_version": "native-1", "aux_dtype": "fp8", "shard_bytes": 1 << 30},
}
TARGETS = {"small": (512, 16, 128), "tiny": (128, 32, 128)}
"""Hidden size, samples, and length of a sample."""
LIMIT, ONE = "bare forward passes", "a run of one sample"


class Row(NamedTuple):
    """A sample of random ids; the last two thirds carry loss."""

    id: str
    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.int64]


def rows_of(number: int, length: int) -> list[Row]:
    """Return so many samples of 90 to 120 % of a length."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(length * 9 // 10, length * 6 // 5 + 1, size=number).tolist()
    masks = [(np.arange(each) >= each // 3).astype(np.int64) for each in lengths]
    return [Row(str(at), draw.integers(VOCAB, size=len(mask)), mask) for at, mask in enumerate(masks)]


def settings_of(form: str, hidden: int, longest: int) -> dict[str, Any]:
    """Return what `make_target_cache` takes beside samples and target."""
    sizes = {"target_vocab_size": VOCAB, "draft_vocab_size": DRAFT, "seq_length": longest, "dtype": "bf16"}
    manifest = {"target_model": "random", "aux_layer_ids": [1, 3, 4], **sizes, **FORMS[form]}
    manifest |= {"hidden_size": hidden} if form.startswith("native") else {"aux_hidden_dim": 3 * hidden}
    manifest["selected_token_ids"] = list(range(0, VOCAB, VOCAB // DRAFT))
    threads = torch.get_num_threads()
    return {
        "manifest": manifest,
        "target": {"name": "random", "vocab_size": VOCAB, "hidden_size": hidden, "config_sha256": "c" * 64},
        "tokenizer": {"sha256": "a" * 64, "template_sha256": None, "mask_by": "given", "pad_id": 0},
        "run": {"device": "cpu", "threads": threads, "attention": "sdpa", "compute_dtype": "fp32"},
    }


def bench_precompute(arguments: argparse.Namespace, folder: Path) -> None:
    """Compare runs of each form with the forward passes of their batches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for name, (hidden, number, length) in TARGETS.items():
        number = 8 if arguments.quick else number
        sizes = {"hidden_size": hidden, "num_hidden_layers": 8, "num_attention_heads": hidden // 64}
        config = LlamaConfig(vocab_size=VOCAB, intermediate_size=11 * hidden // 4, **sizes)
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        rows = rows_of(number, length)
        for form in FORMS:
            ways = ways_of(model, rows, settings_of(form, hidden, length * 6 // 5), folder / "cache")
            remove = partial(shutil.rmtree, folder / "cache", ignore_errors=True)
            rounds = 1 if arguments.quick else min(arguments.rounds, 5)
            seconds = measured(ways, rounds, after=remove, clock=time.process_time)
            tokens = [len(row.input_ids) for row in rows]
            print(f"precompute, {name}, {form}: {number} samples, {sum(tokens):,} tokens")
            for way, found in seconds.items():
                share = statistics.median(a / b for a, b in zip(found, seconds[LIMIT], strict=True))
                print(f"  {way:<36} {statistics.median(found) * 1e3:9.1f} ms, {share:.2f} of the limit", flush=True)
            others = 1 - tokens[0] / sum(tokens)
            each = zip(seconds["the run"], seconds[ONE], seconds[LIMIT], strict=True)
            share = statistics.median((run - one) / (bare * others) for run, one, bare in each)
            print(f"  the other samples of the run: {share:.2f} of their forward passes")


def ways_of(model: Any, rows: list[Row], given: dict[str, Any], out: Path) -> Ways:
    """Return the forward passes of a run, the same with what is computed for the cache, and the run into `out`."""
    samples = Samples.of_rows(rows)
    plan = make_plan(samples=samples, source={}, dropped={}, batch_size=8, max_batch_tokens=16_384, **given)
    if plan.is_native:
        head = TargetHead.of_model(model)
        plan = plan.with_head(head.facts(), head.last_hidden)
    forward: Any = (NativeForward if plan.is_native else DenseForward)(plan, samples, model)

    @torch.no_grad()
    def bare() -> None:
        for ids, mask, targets in inputs(plan, samples):
            if plan.is_native:
                model.lm_head(model.model(input_ids=ids, attention_mask=mask, use_cache=False)[0][targets])
            else:
                model(input_ids=ids, attention_mask=mask, use_cache=False)

    def made() -> None:
        for shard, batches in enumerate(plan.batches):
            for batch in batches:
                forward(shard, batch)

    def run(of: list[Row]) -> None:
        make_target_cache(out, of, lambda _: model, **given)

    ways: Ways = {LIMIT: bare, "and what is stored, computed": made, "the run": partial(run, rows)}
    return ways | {ONE: partial(run, rows[:1])}


def inputs(plan: Any, samples: Samples) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the ids and the attention mask of each batch of a plan, and which slots have a target row."""
    for shard, batches in enumerate(plan.batches):
        for width, rows in batches:
            own = [samples.row(plan.first_of(shard) + row) for row in rows]
            ids = torch.zeros(len(own), width, dtype=torch.int64)
            mask, targets = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
            for row, (each, loss) in enumerate(own):
                ids[row, : len(each)], mask[row, : len(each)] = torch.from_numpy(each.astype(np.int64)), 1
                targets[row, : len(each)] = torch.from_numpy(loss != 0)
            yield ids, mask, targets


SECTIONS = {"precompute": bench_precompute}
