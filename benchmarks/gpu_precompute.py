"""Section `precompute` of gpu.py: whole runs beside the forward passes of their batches."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_models import VOCAB, finished, llama, show
from measuring import Ways, measured
from torch import Tensor

from niels_gpt.eagle3 import make_target_cache
from niels_gpt.eagle3.format.plan import make_plan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.forward import DenseForward, NativeForward
from niels_gpt.eagle3.head import TargetHead

FORMS: dict[str, dict[str, Any]] = {
    "native": {"format_version": "native-1", "aux_dtype": "bf16", "shard_bytes": 1 << 30},
    "version 2, top 10": {"format_version": 2, "target_probs_topk": 10, "shard_size": 64},
    "version 1": {"format_version": 1, "shard_size": 64},
}


class Row:
    """A sample of random ids; the last two thirds carry loss."""

    def __init__(self, number: int, longest: int) -> None:
        draw = np.random.default_rng(number)
        length = int(draw.integers(longest * 9 // 10, longest + 1))
        self.id, self.input_ids = str(number), draw.integers(VOCAB, size=length).tolist()
        self.loss_mask = (np.arange(length) >= length // 3).astype(int).tolist()


def settings_of(form: str, options: argparse.Namespace, hidden: int, longest: int) -> dict[str, Any]:
    """Return what `make_target_cache` takes beside samples and target."""
    sizes = {"target_vocab_size": VOCAB, "draft_vocab_size": VOCAB, "seq_length": longest, "dtype": "bf16"}
    manifest = {"target_model": "random", "aux_layer_ids": [1, 3, 4], **sizes, **FORMS[form]}
    manifest |= {"hidden_size": hidden} if form == "native" else {"aux_hidden_dim": 3 * hidden}
    manifest["selected_token_ids"] = list(range(VOCAB))
    return {
        "manifest": manifest,
        "target": {"name": "random", "vocab_size": VOCAB, "hidden_size": hidden, "config_sha256": "c" * 64},
        "tokenizer": {"sha256": "a" * 64, "template_sha256": None, "mask_by": "given", "pad_id": 0},
        "run": {"device": options.device, "threads": 8, "attention": "sdpa", "compute_dtype": "bf16"},
    }


def bench_precompute(options: argparse.Namespace, folder: Path) -> None:
    """Compare whole runs with the forward passes of their batches, with and without the work on their outputs."""
    hidden, layers, longest = (128, 8, 64) if options.quick else (2048, 22, 1100)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64}
    sizes |= {"num_key_value_heads": max(1, hidden // 512), "intermediate_size": 11 * hidden // 4}
    model = llama(options.device, **sizes)
    print(f"precompute: {sum(each.numel() for each in model.parameters()) / 1e9:.2f} billion parameters")
    for form in FORMS:
        count = (6, 6) if options.quick else (512, 64)
        rows = [Row(number, longest) for number in range(count[form == "version 1"])]
        tokens = sum(len(row.input_ids) for row in rows)
        ways = ways_of(model, rows, settings_of(form, options, hidden, longest), folder / "c")
        waited = {name: finished(way, options.device) for name, way in ways.items()}
        remove = partial(shutil.rmtree, folder / "c", ignore_errors=True)
        print(f" {form}: {len(rows)} samples, {tokens:,} tokens")
        show(measured(waited, min(options.rounds, 2), after=remove), "bare forward passes", tokens)


def ways_of(model: Any, rows: list[Row], given: dict[str, Any], out: Path) -> Ways:
    """Return the forward passes of a run, the same with what is stored of them, and the run itself, into `out`."""
    samples, device = Samples.of_rows(rows), given["run"]["device"]
    plan = make_plan(samples=samples, source={}, dropped={}, batch_size=8, max_batch_tokens=16_384, **given)
    if plan.is_native:
        head = TargetHead.of_model(model)
        plan = plan.with_head(head.facts(), head.last_hidden)
    forward: Any = (NativeForward if plan.is_native else DenseForward)(plan, samples, model, device)
    keep = {"logits_to_keep": 1} if plan.is_native else {}

    @torch.no_grad()
    def bare() -> None:
        for ids, mask in inputs(plan, samples, device):
            model(input_ids=ids, attention_mask=mask, use_cache=False, **keep)

    def made() -> None:
        for shard, batches in enumerate(plan.batches):
            for batch in batches:
                forward(shard, batch)

    def whole() -> None:
        make_target_cache(out, rows, lambda _: model, **given)

    return {"bare forward passes": bare, "and what is stored": made, "the whole run": whole}


def inputs(plan: Any, samples: Any, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the ids and the attention mask of each batch of a plan, on the device."""
    for shard, batches in enumerate(plan.batches):
        for width, rows in batches:
            own = [samples.row(plan.first_of(shard) + row)[0] for row in rows]
            ids = torch.zeros(len(own), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, each in enumerate(own):
                ids[row, : len(each)], mask[row, : len(each)] = torch.from_numpy(each), 1
            yield ids.to(device), mask.to(device)
