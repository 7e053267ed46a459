"""Everything that a GPU can run of this project: correctness against the CPU first, then speed as ratios.

Run: python tools/gpu_checks.py [--only NAME ...] [--list] [--json FILE] [--device cpu] [--quick] [--folder DIR]

Prints a table. A check whose numbers are wrong, that raises or that takes longer than --limit seconds is FAILED; the
rest runs on, and the exit status is 1. Without a GPU it says so and exits with 0. --device cpu runs every check that a
CPU can run at tiny sizes, where the figures mean nothing, and names the others with the reason.
Speeds are shares of the speed of the line that has 1.000, medians of rounds in which the ways take turns.
--folder: where caches are written; one in memory leaves the disk out. The packages of the extra eagle3 must be there.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from eagle3_native import DRAFT, HIDDEN, LONGEST, States, masks_of, write_native
from loader_caches import build
from measuring import Seconds, Ways, measured, ratio

from niels_gpt.eagle3 import make_target_cache
from niels_gpt.eagle3.cache import CachedEagle3Dataset, build_cached_eagle3_dataloader
from niels_gpt.eagle3.format.plan import make_plan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.forward import DenseForward, NativeForward
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import build_native_dataloader
from niels_gpt.eagle3.placement import Placement
from niels_gpt.eagle3.target import capture, load_target
from niels_gpt.prefix_tree.attention import Backend, block_mask, dense_mask, model_inputs
from niels_gpt.prefix_tree.edges import LossEdges, edge_logprobs, folded_cross_entropy, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import body_forward, logits_head
from niels_gpt.prefix_tree.padded import PaddedRollouts
from niels_gpt.prefix_tree.policy import PolicyLoss
from niels_gpt.prefix_tree.tree_rows import tree_row
from niels_gpt.sampling import EpochStream, prefetch
from niels_gpt.sampling.packing.masks import block_causal_mask

VOCAB = 32_000
SIZES = {"small": (1024, 8, 3), "large": (2048, 22, 2.75)}
"""Width, layers, and how many times wider their inner layer is, of the models that make steps."""
GROUPS = {
    "small": ((1024, 64, 8), (1024, 1024, 8)),
    "large": ((512, 128, 8), (1024, 64, 8), (1024, 256, 8), (1024, 1024, 8)),
}
"""Tokens of a prompt, tokens of each completion, completions."""
FORMS: dict[str, dict[str, Any]] = {
    "native": {"format_version": "native-1", "aux_dtype": "bf16", "shard_bytes": 1 << 30},
    "native, fp8": {"format_version": "native-1", "aux_dtype": "fp8", "shard_bytes": 1 << 30},
    "version 2, top 10": {"format_version": 2, "target_probs_topk": 10, "shard_size": 64},
    "version 1": {"format_version": 1, "shard_size": 64},
}
NO_FLEX = "FlexAttention has no backward pass on a CPU"
NEAR = {torch.float32: 2e-3, torch.bfloat16: 4e-2}
"""How far apart a GPU and a CPU in float32 may be, as a share of the norm, by the dtype that the GPU computes in."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    what: str
    verdict: str
    """ok, FAILED, skipped, or figure: a speed, which is never wrong."""
    value: float | None = None
    """Distance as a share of the norm; for a figure, the share of the speed of the line with 1."""
    limit: float | None = None
    """Largest distance that is ok."""
    why: str = ""


@dataclass
class Run:
    """The choices of a run, and the lines found so far."""

    device: str
    quick: bool
    rounds: int
    folder: Path
    check: str = ""
    rows: list[Row] = field(default_factory=list)

    def add(
        self, what: str, verdict: str, value: float | None = None, limit: float | None = None, why: str = ""
    ) -> None:
        """Add a line to the table, and print it."""
        row = Row(self.check, what, verdict, value, limit, why)
        self.rows.append(row)
        number = "" if value is None else f"{value:.3f}" if limit is None else f"{value:.1e} < {limit:.0e}"
        print(f"{row.check:<17} {what:<56} {verdict:<8} {number:>15} {why}".rstrip(), flush=True)

    def near(self, what: str, found: Tensor, expected: Tensor, limit: float) -> None:
        """Compare numbers: their distance must be at most `limit` of the norm. Both may be on any device."""
        one, other = found.detach().cpu().double(), expected.detach().cpu().double()
        apart = float((one - other).norm() / other.norm()) if one.shape == other.shape else float("nan")
        self.add(what, "ok" if apart <= limit else "FAILED", apart if math.isfinite(apart) else None, limit)

    def equal(self, what: str, found: Sequence[Any], expected: Sequence[Any]) -> None:
        """Compare tensors or other values, which must be equal."""

        def same(one: Any, other: Any) -> bool:
            return torch.equal(one.cpu(), other.cpu()) if isinstance(one, Tensor) else bool(one == other)

        good = len(found) == len(expected) > 0 and all(map(same, found, expected))
        self.add(what, "ok" if good else "FAILED", why="" if good else "not equal")

    def figures(self, title: str, seconds: Seconds, limit: str, *, tokens: int = 0, note: str = "") -> None:
        """Add the speed of each way as a share of that of `limit`; tokens: of one way, for tokens a second."""
        for name, found in seconds.items():
            middle = statistics.median(found)
            speed = f", {tokens / middle:,.0f} tokens/s" if tokens else f", {note}" if note else ""
            self.add(f"{title}{name}", "figure", ratio(seconds, name, limit), why=f"{middle * 1e3:.2f} ms{speed}")

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    def finished(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return some work that ends when the device has done it."""

        def run() -> None:
            work()
            if self.on_gpu:
                torch.cuda.synchronize()

        return run


# --- folded rows ------------------------------------------------------------------------------------------------------


def group_of(prompt: int, completion: int, count: int, vocab: int = VOCAB) -> tuple[list[int], list[list[int]]]:
    """Return random ids of a prompt, and of completions."""
    ids = np.random.default_rng(prompt + completion).integers(vocab, size=prompt + completion * count).tolist()
    return ids[:prompt], [ids[at : at + completion] for at in range(prompt, len(ids), completion)]


def check_block_mask(run: Run) -> None:
    """block_mask and FlexAttention under it, forward and backward, beside sdpa under the dense mask on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    prompt, completion = (100, 40) if run.quick else (1000, 200)
    forest = PrefixForest.from_rollout_group(*group_of(prompt, completion, 4))
    rows, there = len(forest.input_ids), forest.to(run.device)
    attend: Any = torch.compile(flex_attention, dynamic=False) if run.on_gpu else flex_attention
    for window in (None, 64):
        mask = block_mask(there, window=window, forward_only=not run.on_gpu)
        wanted = create_block_mask(mask.mask_mod, None, None, rows, rows, device=run.device)
        name = "no window" if window is None else f"window of {window}"
        run.equal(f"{name}: the blocks of create_block_mask", [mask.to_dense()], [wanted.to_dense()])
        for dtype in (torch.float32, torch.bfloat16):
            whole = torch.randn(4, 1, 4, rows, 64, generator=torch.Generator().manual_seed(0))
            whole = whole.to(dtype)
            here = [each.to(run.device).requires_grad_(run.on_gpu) for each in whole[:3]]
            plain = [each.float().requires_grad_() for each in whole[:3]]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of flex_attention that is not compiled
                found = attend(*here, block_mask=mask)
            expected = scaled_dot_product_attention(*plain, attn_mask=dense_mask(forest, window=window))
            title = f"{name}, {str(dtype)[6:]}: "
            run.near(f"{title}output", found, expected, NEAR[dtype])
            if not run.on_gpu:
                run.add(f"{title}gradients", "skipped", why=NO_FLEX)
                continue
            found.backward(whole[3].to(run.device))
            expected.backward(whole[3].float())
            for letter, one, other in zip("qkv", here, plain, strict=True):
                assert one.grad is not None and other.grad is not None
                run.near(f"{title}gradient of {letter}", one.grad, other.grad, 2 * NEAR[dtype])


def small_model(kind: str, attention: str, device: str) -> Any:
    """Return a small model with random weights on a device. kind: llama, or qwen2, which has a window in one layer."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"vocab_size": 97, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    if kind == "qwen2":
        types = ["sliding_attention", "full_attention"]
        sizes |= {"layer_types": types, "sliding_window": 6, "use_sliding_window": True}
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.float().eval().to(device)


def small_samples() -> list[list[int]]:
    """Return samples that share two beginnings, each longer than the window of `small_model`."""
    draw = np.random.default_rng(0)
    prompt, turn, *replies = (draw.integers(3, 97, size=length).tolist() for length in (9, 5, 6, 4, 7, 1))
    return [[*prompt, *turn, *replies[0]], [*prompt, *turn, *replies[1]], prompt + replies[2], prompt + replies[3]]


def loss_and_gradients(model: Any, forest: PrefixForest, backend: Backend) -> tuple[Tensor, Tensor]:
    """Return the log-probs of all targets, and all gradients of the loss as one vector, on the CPU in float32."""
    edges = LossEdges.from_forest(forest).to(model.device)
    hidden, head = body_forward(model, forest, backend=backend)
    logp = sample_logprobs(edge_logprobs(hidden, edges, head, chunk=7), edges).detach()
    hidden, head = body_forward(model, forest, backend=backend)
    folded_cross_entropy(hidden, edges, head, chunk=7).backward()
    grads = [each.grad.flatten().float().cpu() for each in model.parameters() if each.grad is not None]
    return logp.float().cpu(), torch.cat(grads)


def check_route(run: Run, attention: str, backend: Backend) -> None:
    """Compare log-probs and gradients of a folded row with those under a dense mask in eager attention on the CPU."""
    if attention == "flex_attention" and not run.on_gpu:
        run.add("log-probs and gradients", "skipped", why=NO_FLEX)
        return
    forest = PrefixForest.from_sequences(small_samples())
    for kind in ("llama", "qwen2"):
        wanted = loss_and_gradients(small_model(kind, "eager", "cpu"), forest, "dense")
        for dtype in (torch.float32, torch.bfloat16):
            model = small_model(kind, attention, run.device).to(dtype)
            found = loss_and_gradients(model, forest, backend)
            for what, one, other, more in zip(("log-probs", "gradients"), found, wanted, (1, 3), strict=True):
                run.near(f"{kind}, {str(dtype)[6:]}: {what}", one, other, more * NEAR[dtype])


def check_segments(run: Run) -> None:
    """Folded rows by segments, the attention "prefix_tree"."""
    check_route(run, "sdpa", "prefix_tree")


def check_dense(run: Run) -> None:
    """Folded rows under a dense mask, by sdpa."""
    check_route(run, "sdpa", "dense")


def check_flex(run: Run) -> None:
    """Folded rows by FlexAttention; rows of many lengths, which torch.compile must not refuse."""
    check_route(run, "flex_attention", "auto")
    if not run.on_gpu:
        return
    model, plain = (small_model("llama", attention, run.device) for attention in ("flex_attention", "sdpa"))
    for number in range(12):  # torch.compile keeps eight versions of a function by default
        shared = [each % 97 for each in range(3, 40 + 9 * number)]
        forest = PrefixForest.from_sequences([[*shared, 5, 6, 7], [*shared, *range(9, 20 + number)]])
        with torch.no_grad():
            found = model(**model_inputs(forest, model)).logits
            wanted = plain(**model_inputs(forest, plain, backend="dense")).logits
        run.near(f"row {number} of 12 lengths: logits", found, wanted, NEAR[torch.float32])


def check_tree_rows(run: Run) -> None:
    """Rows in TRL's layouts by the attention "prefix_tree", beside the samples run alone on the CPU."""
    samples = small_samples()
    forest = PrefixForest.from_sequences(samples).to(run.device)
    edges, alone = LossEdges.from_forest(forest), small_model("llama", "eager", "cpu")
    wanted = []
    for sample in samples:
        logits = alone(input_ids=torch.tensor([sample]), use_cache=False).logits[0, :-1]
        wanted.append(-cross_entropy(logits, torch.tensor(sample[1:]), reduction="none"))
    expected = torch.cat(wanted)
    of_alone = torch.autograd.grad(expected.mean(), list(alone.parameters()))
    layouts: dict[str, dict[str, bool]] = {"default": {}, "fork_early": {"fork_early": True}}
    for name, layout in {**layouts, "one_label=False": {"one_label": False}}.items():
        model = small_model("llama", "sdpa", run.device)
        model_inputs(forest, model, backend="prefix_tree")  # sets the attention
        row = tree_row(forest, edges, **layout)
        keys = {key: row[key] for key in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
        ids, positions = row["input_ids"][None], row["position_ids"][None]
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **keys).logits
        if "shift_labels" in row:
            index = row["token_index"]
            found = logits[0].log_softmax(-1)[index, row["shift_labels"][index]]
        else:
            found = sample_logprobs(edge_logprobs(logits, edges), edges)
        run.near(f"{name}: log-probs", found, expected, NEAR[torch.float32])
        grads = torch.autograd.grad(found.mean(), list(model.parameters()))
        one, other = (torch.cat([each.flatten().cpu() for each in some]) for some in (grads, of_alone))
        run.near(f"{name}: gradients", one, other, 3 * NEAR[torch.float32])


def check_padded(run: Run) -> None:
    """A padded batch: folded, scored and put back on the device, beside the same on the CPU."""
    samples, draw = small_samples(), torch.Generator().manual_seed(0)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(each) for each in samples], batch_first=True)
    seen = torch.arange(ids.shape[1]) < torch.tensor([[len(each)] for each in samples])
    old, gain = torch.randn(2, *ids[:, 9:].shape, generator=draw) * 0.3 - torch.tensor([4.6, 0])[:, None, None]
    found: list[list[Tensor]] = []
    for device in (run.device, "cpu"):
        on = [each.to(device) for each in (ids, seen, seen[:, 9:])]
        columns = {"old_logprobs": old.to(device), "advantages": gain.to(device)}
        batch = PaddedRollouts.from_padded(*on, uid=[0, 0, 1, 1], columns=columns)
        model = small_model("llama", "sdpa", device)
        hidden, head = body_forward(model, batch.forest)
        logp = sample_logprobs(edge_logprobs(hidden, batch.edges, head), batch.edges)
        loss, metrics = PolicyLoss("grpo")(logp, batch.edges, **batch.columns)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        folded = [batch.unfold(column) for column in batch.columns.values()]
        near = [batch.unfold(logp), loss[None], torch.cat([each.flatten() for each in grads])]
        found.append([*folded, metrics["clip_low"], *near])
    run.equal("columns, put back, and the share that is clipped", found[0][:3], found[1][:3])
    named = ("log-probs", "loss", "gradients")
    for name, one, other, more in zip(named, found[0][3:], found[1][3:], (1, 3, 3), strict=True):
        run.near(name, one, other, more * NEAR[torch.float32])


# --- batches of tokens ------------------------------------------------------------------------------------------------


def check_documents(run: Run) -> None:
    """Attention over packed documents: the mask made on the device, and FlashAttention of pieces of many lengths."""
    bounds = torch.tensor([0, 7, 8, 40, 42, 64, 96, 128], dtype=torch.int32)
    cu, tokens = bounds.to(run.device), 128
    for dtype in (torch.float32, torch.bfloat16):
        mask = block_causal_mask(cu, (2, 64), dtype=dtype)
        run.equal(f"{str(dtype)[6:]}: the mask", [mask], [block_causal_mask(bounds, (2, 64), dtype=dtype)])
        q, k, v = torch.randn(3, tokens, 2, 64, generator=torch.Generator().manual_seed(0)).to(run.device, dtype)
        pieces = pairwise(bounds.tolist())
        alone = [
            scaled_dot_product_attention(*(x[a:b].transpose(0, 1).float().cpu() for x in (q, k, v)), is_causal=True)
            for a, b in pieces
        ]
        expected = torch.cat(alone, 1).transpose(0, 1)
        found = scaled_dot_product_attention(*(x.view(2, 64, 2, 64).transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
        run.near(f"{str(dtype)[6:]}: under the mask", found.transpose(1, 2).reshape(q.shape), expected, NEAR[dtype])
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        varlen_attn = None
    if varlen_attn is None or not run.on_gpu:
        why = "needs a GPU" if varlen_attn else f"torch {torch.__version__} has no varlen_attn"
        run.add("bfloat16: varlen_attn", "skipped", why=why)
        return
    found = varlen_attn(q, k, v, cu, cu, 32, 32, **causal_of(varlen_attn))
    run.near("bfloat16: varlen_attn", found, expected, NEAR[torch.bfloat16])


def causal_of(varlen_attn: Any) -> dict[str, Any]:
    """Return the argument that makes varlen_attn causal: releases of torch differ."""
    import inspect

    known = inspect.signature(varlen_attn).parameters
    return {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}


def check_prefetch(run: Run) -> None:
    """Batches made ahead, through pinned copies on a stream of their own, while the device is far behind the loop."""
    split = build(run.folder / "pretrain", 4, 400_000)
    how = {"T": 64, "global_batch_size": 64, "seed": 0}
    plain = [batch for _, batch in zip(range(40), EpochStream(str(split), **how), strict=False)]
    for name, stream in {
        "prefetch(stream, 3, device)": prefetch(EpochStream(str(split), **how), 3, run.device),
        "a stream of the device, made ahead": prefetch(EpochStream(str(split), device=run.device, **how), 3),
    }.items():
        found = []
        with stream as ahead:
            for _, batch in zip(range(len(plain)), ahead, strict=False):
                if run.on_gpu:
                    torch.cuda._sleep(10_000_000)  # some ms: the loop lets go of the batch before the copy is read
                found += [batch.x.clone(), batch.y.clone(), batch.state]
                del batch
        if run.on_gpu:
            torch.cuda.synchronize()
        run.equal(name, found, [each for batch in plain for each in (batch.x, batch.y, batch.state)])


# --- EAGLE-3 ----------------------------------------------------------------------------------------------------------


def llama(device: str, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Any:
    """Return a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(max_position_embeddings=1 << 14, **{"vocab_size": VOCAB, **sizes})
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


class Sample:
    """A sample of random ids; the last two thirds carry loss."""

    def __init__(self, number: int, longest: int, vocab: int = VOCAB) -> None:
        draw = np.random.default_rng(number)
        length = int(draw.integers(longest * 9 // 10, longest + 1))
        self.id, self.input_ids = str(number), draw.integers(vocab, size=length).tolist()
        self.loss_mask = (np.arange(length) >= length // 3).astype(int).tolist()


def settings_of(form: str, device: str, hidden: int, longest: int, vocab: int, dtype: str = "bf16") -> dict[str, Any]:
    """Return what `make_target_cache` takes beside samples and target. dtype: of the computation, and stored."""
    sizes = {"target_vocab_size": vocab, "draft_vocab_size": vocab, "seq_length": longest, "dtype": dtype}
    manifest = {"target_model": "random", "aux_layer_ids": [1, 3, 4], **sizes, **FORMS[form]}
    manifest |= {"hidden_size": hidden} if form.startswith("native") else {"aux_hidden_dim": 3 * hidden}
    manifest["selected_token_ids"] = list(range(vocab))
    return {
        "manifest": manifest,
        "target": {"name": "random", "vocab_size": vocab, "hidden_size": hidden, "config_sha256": "c" * 64},
        "tokenizer": {"sha256": "a" * 64, "template_sha256": None, "mask_by": "given", "pad_id": 0},
        "run": {"device": device, "threads": 8, "attention": "sdpa", "compute_dtype": dtype},
    }


def sums_of(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file below a folder, by name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_precompute(run: Run) -> None:
    """Caches of each form: equal bytes in two runs on the device, and numbers near those of the CPU in float32."""
    vocab, hidden = 640, 128
    sizes = {"hidden_size": hidden, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 2}
    plain = llama("cpu", torch.float32, vocab_size=vocab, **sizes)
    rows = [Sample(number, 64, vocab) for number in range(12)]

    def made(form: str, name: str, device: str, dtype: str) -> Path:
        model = copy.deepcopy(plain).to(device, torch.bfloat16 if dtype == "bf16" else torch.float32)
        given = settings_of(form, device, hidden, 64, vocab, dtype)
        make_target_cache(run.folder / form / name, rows, lambda _: model, **given)
        return run.folder / form / name

    for form in FORMS:
        expected = CachedEagle3Dataset(made(form, "cpu", "cpu", "fp32"))
        for dtype, torch_dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            cache = made(form, dtype, run.device, dtype)
            again = sums_of(made(form, f"{dtype} again", run.device, dtype))
            run.equal(f"{form}, {dtype}: bytes of two runs", [sums_of(cache)], [again])
            limit = NEAR[torch.bfloat16 if form.startswith("native") else torch_dtype]
            pairs = list(zip(CachedEagle3Dataset(cache), expected, strict=True))
            run.equal(f"{form}, {dtype}: ids", [a["input_ids"] for a, _ in pairs], [b["input_ids"] for _, b in pairs])
            for name in ("aux_hidden_states", "target_probs"):
                one, other = (torch.cat([pair[side][name].flatten().float() for pair in pairs]) for side in (0, 1))
                if name == "target_probs":  # of a near tie, another one may be among the most probable
                    one, other = (part.view(-1, vocab).topk(4).values for part in (one, other))
                run.near(f"{form}, {dtype}: {name}", one, other, limit)
            if form.startswith("native"):
                compare_loaders(run, f"{form}, {dtype}: ", cache)


def check_tensor_parallel(run: Run) -> None:
    """Caches of a target on two GPUs: equal bytes in two runs, and numbers near those of one GPU."""
    if run.on_gpu and torch.cuda.device_count() < 2:
        run.add("two ranks", "skipped", why=f"torch finds {torch.cuda.device_count()} GPU, and two ranks take two")
        return
    vocab, hidden = 640, 128
    sizes = {"hidden_size": hidden, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 2}
    llama("cpu", torch.float32, vocab_size=vocab, **sizes).save_pretrained(run.folder / "target")
    rows = [Sample(number, 64, vocab) for number in range(12)]

    def made(form: str, name: str, ranks: int) -> Path:
        given = settings_of(form, run.device, hidden, 64, vocab)
        given["run"] |= {"tensor_parallel": ranks} if ranks > 1 else {}
        load = partial(load_ranks, folder=str(run.folder / "target"), ranks=ranks)
        make_target_cache(run.folder / form / name, rows, load, **given)
        return run.folder / form / name

    for form in ("native",) if run.quick else ("native", "version 1"):
        one, two, again = (made(form, name, ranks) for name, ranks in (("one", 1), ("two", 2), ("again", 2)))
        run.equal(f"{form}: bytes of two runs", [sums_of(two)], [sums_of(again)])
        pairs = list(zip(CachedEagle3Dataset(two), CachedEagle3Dataset(one), strict=True))
        run.equal(f"{form}: ids", [a["input_ids"] for a, _ in pairs], [b["input_ids"] for _, b in pairs])
        states = (torch.cat([pair[side]["aux_hidden_states"].flatten().float() for pair in pairs]) for side in (0, 1))
        run.near(f"{form}: aux_hidden_states", *states, NEAR[torch.bfloat16])


def load_ranks(device: torch.device, *, folder: str, ranks: int) -> Any:
    """Load a rank's part of a target; called in its process."""
    from niels_gpt.eagle3.target import load_target

    how: dict[str, Any] = {"dtype": torch.bfloat16, "attention": "sdpa", "placement": Placement(tensor_parallel=ranks)}
    return load_target(folder, revision=None, device=device, **how)


def check_placement(run: Run) -> None:
    """A target that is spread by a device map, and one of bf16 weights in float32: equal states, near the CPU's."""
    folder, sizes = run.folder / "target", {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    llama("cpu", torch.bfloat16, vocab_size=640, num_attention_heads=2, **sizes).save_pretrained(folder)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    first: int | str = 0 if run.device == "cuda" else "cpu"
    limits = {first: num_bytes, "cpu": num_bytes} if run.device == "cuda" else {first: num_bytes}
    ways = {
        "auto": Placement("auto"),
        "auto, half of the weights elsewhere": Placement("auto", limits),
        "bf16 weights": Placement(load_dtype="bf16"),
    }
    ids = torch.arange(48).view(2, 24)

    def states(device: str, placement: Placement = Placement()) -> list[Tensor]:  # noqa: B008
        how: dict[str, Any] = {"revision": None, "dtype": torch.float32, "attention": "sdpa", "device": device}
        model = load_target(str(folder), **how, placement=placement)
        found = capture(model, ids.to(device), torch.ones_like(ids).to(device), [1, 3, 4])
        TargetHead.of_model(model)  # proves the norm on the loaded form
        return [each.cpu() for each in found]

    plain, expected = states(run.device), states("cpu")
    for name, one, other in zip(("aux", "last block", "lm_head's input"), plain, expected, strict=True):
        run.near(f"near the CPU: {name}", one, other, NEAR[torch.float32])
    for title, placement in ways.items():
        run.equal(f"{title}: states", states(run.device, placement), plain)


def compare_loaders(run: Run, title: str, cache: Path) -> None:
    """Compare batches whose distributions the device made with those of the CPU."""
    found, expected = (
        list(build_cached_eagle3_dataloader(cache, 4, False, 0, device=device)) for device in (run.device, "cpu")
    )
    for name in ("input_ids", "loss_mask", "aux_hidden_states"):
        run.equal(f"{title}batches, {name}", [each[name] for each in found], [each[name] for each in expected])
    probs = [torch.cat([each["target_probs"].float().flatten().cpu() for each in some]) for some in (found, expected)]
    run.near(f"{title}batches, target_probs", *probs, NEAR[torch.bfloat16])


def check_head(run: Run) -> None:
    """TargetHead: logits, normalizers and distributions of a native batch, in float32 and in bf16."""
    hidden, vocab = (64, 500) if run.quick else (HIDDEN, DRAFT)
    weights = {"lm_head": torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(0)) / hidden**0.5}
    states = torch.randn(33, hidden, generator=torch.Generator().manual_seed(1))
    slots = torch.arange(33) + 4
    batch = {"input_ids": torch.zeros(2, 20, dtype=torch.int64), "last_hidden_states": states, "target_slots": slots}
    plain = TargetHead(weights, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        head, title = TargetHead(weights, dtype=dtype).to(run.device), f"{str(dtype)[6:]}: "
        run.near(f"{title}logits", head(states), plain(states), NEAR[dtype])
        normalizers, argmax = head.log_normalizer_and_argmax(states)
        expected, of_plain = plain.log_normalizer_and_argmax(states)
        run.near(f"{title}log normalizers", normalizers, expected, NEAR[dtype])
        if dtype == torch.float32:
            run.equal(f"{title}most probable tokens", [argmax], [of_plain])
        run.near(f"{title}target_probs", head.target_probs(batch), plain.target_probs(batch), NEAR[dtype])


def check_native(run: Run) -> None:
    """Batches of native caches in bf16 and fp8: pinned where there is a GPU, and equal after their copy to it."""
    for aux in ("bf16", "fp8"):
        folder = run.folder / aux
        stored = torch.float8_e4m3fn if aux == "fp8" else torch.bfloat16
        write_native(folder, masks_of(2 if run.quick else 8), States(LONGEST, [stored]), aux)
        for batch in build_native_dataloader(folder, 2, False):
            pinned = [each.is_pinned() for each in batch.values()]
            run.equal(f"{aux}: pinned", [all(pinned)], [torch.cuda.is_available()])
            there = [each.to(run.device, non_blocking=True) for each in batch.values()]
            run.equal(f"{aux}: the copy", there, list(batch.values()))


def check_torchtitan(run: Run) -> None:
    """torchtitan's Trainer on a StreamDataLoader: stopped and started again, it has the rows of one run."""
    if not run.on_gpu or find_spec("torchtitan") is None:
        why = "torchtitan is not installed" if run.on_gpu else f"its models want FlexAttention: {NO_FLEX}"
        run.add("rows and losses after a resume", "skipped", why=why)
        return
    from torchtitan_texts import Texts

    texts = Texts(run.folder, 300_000)

    def steps(name: str, last: int) -> dict[str, Any]:
        script, folder = Path(__file__).with_name("torchtitan_steps.py"), run.folder / name
        command = [sys.executable, script, texts.cache / "train", texts.tokenizer, folder, str(last)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return made

    whole, first, second = steps("whole", 6), steps("parts", 3), steps("parts", 6)
    run.equal("rows of the saved steps and after", first["rows"][:2] + second["rows"], whole["rows"])
    losses = [torch.tensor([each["losses"][str(step)] for step in range(3, 7)]) for each in (second, whole)]
    run.near("losses after the resume", losses[0], losses[1], 1e-3)


def check_speculators(run: Run) -> None:
    """speculators' Trainer on a native cache: stopped and started again, it ends with the weights of one run."""
    missing = [name for name in ("speculators", "hs_connectors", "openai", "loguru") if find_spec(name) is None]
    if not run.on_gpu or missing:
        why = f"{', '.join(missing)} not installed" if missing else "speculators' Trainer wants an accelerator"
        run.add("weights after a resume", "skipped", why=why)
        return
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.trainer import Trainer, TrainerConfig
    from transformers import LlamaConfig

    from niels_gpt.trainers.speculators import DraftRows

    vocab, hidden = 640, 128
    sizes = {"hidden_size": hidden, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 2}
    target, cache = llama(run.device, torch.float32, vocab_size=vocab, **sizes), run.folder / "cache"
    target.save_pretrained(run.folder / "target")
    rows = [Sample(number, 64, vocab) for number in range(64)]
    given = settings_of("native, fp8", run.device, hidden, 64, vocab)
    make_target_cache(cache, rows, lambda _: copy.deepcopy(target).to(torch.bfloat16), **given)

    def trained(name: str, epochs: int) -> Tensor:
        data = DraftRows(cache, 256)
        torch.manual_seed(0)
        layer = LlamaConfig.from_pretrained(run.folder / "target", num_hidden_layers=1)
        how: dict[str, Any] = {"verifier_name_or_path": str(run.folder / "target"), "norm_before_residual": True}
        how |= {"target_layer_ids": data.target_layer_ids, "draft_vocab_size": vocab, "ttt_steps": 3}
        model = Eagle3DraftModel.from_training_args(layer, *data.vocab_mappings(), **how)
        saved = {"save_path": str(run.folder / name), "resume_from_checkpoint": True}
        config = TrainerConfig(lr=1e-3, num_epochs=epochs, scheduler_type="none", **saved)
        Trainer(model, config, data.loader(num_workers=1)).run_training()
        return torch.cat([each.detach().float().flatten().cpu() for each in model.parameters() if each.requires_grad])

    whole, _ = trained("whole", 2), trained("parts", 1)
    run.near("weights after a resume", trained("parts", 2), whole, 1e-2)


# --- speed ------------------------------------------------------------------------------------------------------------


def speed_precompute(run: Run) -> None:
    """Whole runs beside the forward passes of their batches, with and without the work on their outputs."""
    hidden, layers, longest = (128, 8, 64) if run.quick else (2048, 22, 1100)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64}
    model = llama(run.device, **sizes, intermediate_size=int(2.75 * hidden))
    for form in FORMS:
        count = (6, 6) if run.quick else (256, 64)
        rows = [Sample(number, longest) for number in range(count[form == "version 1"])]
        tokens = sum(len(row.input_ids) for row in rows)
        ways = ways_of(model, rows, settings_of(form, run.device, hidden, longest, VOCAB), run.folder / "c")
        waited = {name: run.finished(way) for name, way in ways.items()}
        remove = partial(shutil.rmtree, run.folder / "c", ignore_errors=True)
        run.figures(
            f"{form}: ", measured(waited, min(run.rounds, 2), after=remove), "bare forward passes", tokens=tokens
        )


def ways_of(model: Any, rows: list[Sample], given: dict[str, Any], out: Path) -> Ways:
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


def speed_head(run: Run) -> None:
    """Distributions of a native batch on the device, beside those on the CPU and reading the batch."""
    samples = 1 if run.quick else 8
    masks = masks_of(samples)
    write_native(run.folder / "native", masks, States(LONGEST, [torch.bfloat16]), "bf16")
    (batch,) = build_native_dataloader(run.folder / "native", samples, False)
    draft = 100 if run.quick else DRAFT
    places = {("cpu", torch.float32), (run.device, torch.float32), (run.device, torch.bfloat16)}
    ways: Ways = {"reading the batch": lambda: list(build_native_dataloader(run.folder / "native", samples, False))}
    for device, dtype in sorted(places, key=str):
        head = TargetHead({"lm_head": torch.rand(draft, HIDDEN)}, dtype=dtype).to(device)
        ways[f"{device}, {str(dtype)[6:]}"] = run.finished(partial(head.target_probs, batch))
    rows = sum(int(mask[1:].sum()) for mask in masks)
    run.figures(f"{rows:,} rows: ", measured(ways, run.rounds), "cpu, float32")


def speed_prefetch(run: Run) -> None:
    """Steps whose batches are read in the loop, or made ahead, beside steps over one batch that is there."""
    steps, width = (5, 64) if run.quick else (100, 8192)
    split = build(run.folder / "pretrain", 4, 400_000 if run.quick else 40_000_000)
    left, right = torch.randn(2, width, width, device=run.device, dtype=torch.bfloat16)

    def stream(device: str = "cpu") -> EpochStream:
        return EpochStream(str(split), T=1024, global_batch_size=128, seed=0, device=device)

    def steps_of(batches: Any) -> None:
        for _, batch in zip(range(steps), batches, strict=False):
            for _ in range(4):
                torch.mm(left, right)
            float(batch.x.sum())  # waits, as a loop that logs its loss

    def ahead() -> None:
        with prefetch(stream(), 4, run.device) as batches:
            steps_of(batches)

    one = next(iter(stream())).to(run.device)
    ways: Ways = {
        "the step alone": lambda: steps_of([one] * steps),
        "read in the loop, .to(device)": lambda: steps_of(batch.to(run.device) for batch in stream()),
        "read in the loop, device=": lambda: steps_of(stream(run.device)),
        "prefetch(stream, 4, device)": ahead,
    }
    run.figures("", measured(ways, run.rounds), "the step alone", tokens=steps * 128 * 1024)


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
    return -cross_entropy(logits, ids[:, prompt:].flatten(), reduction="none")


def training_models(size: str, run: Run) -> dict[str, Any]:
    """Return the same Llama with flex_attention, where there is a GPU, and with sdpa."""
    width, layers, wider = (64, 2, 3) if run.quick else SIZES[size]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    names = ("flex", "sdpa") if run.on_gpu else ("sdpa",)
    made = {name: llama(run.device, **sizes, intermediate_size=int(wider * width)) for name in names}
    if "flex" in made:
        made["flex"].set_attn_implementation("flex_attention")
    return {name: model.train() for name, model in made.items()}


def folded_step(model: Any, forest: PrefixForest, backend: Backend = "auto") -> Callable[[], object]:
    """Return a folded step, its edges on the model's device."""
    from folded_steps import folded_logprobs

    edges, head = LossEdges.from_forest(forest).to(model.device), logits_head(model)
    return gradients_of(model, lambda: folded_logprobs(model, head, forest, edges, backend))


def speed_step(run: Run) -> None:
    """A training step folded by FlexAttention, by segments and under a dense mask, beside the plain causal batch."""
    for size in ["small"] if run.quick else SIZES:
        models = training_models(size, run)
        for prompt, completion, count in [(24, 8, 4)] if run.quick else GROUPS[size]:
            first, completions = group_of(prompt, completion, count)
            forest = PrefixForest.from_rollout_group(first, completions)
            ids, stats = torch.tensor([first + each for each in completions], device=run.device), forest.stats()
            plain = partial(plain_logprobs, models["sdpa"], ids, prompt)
            ways: Ways = {"plain causal batch": gradients_of(models["sdpa"], plain)}
            if "flex" in models:
                ways["flex_attention"] = folded_step(models["flex"], forest)
            ways["dense mask"] = folded_step(models["sdpa"], forest, "dense")
            seconds = measured({name: run.finished(way) for name, way in ways.items()}, run.rounds)
            fewer = f"{stats.tokens_before / stats.tokens_after:.2f} times fewer tokens"
            run.figures(f"{size}, {prompt} + {completion} x {count}: ", seconds, "plain causal batch", note=fewer)
        del models


def speed_lengths(run: Run) -> None:
    """Folded steps by FlexAttention over rows of many lengths: a first time, which compiles, and a second one."""
    if not run.on_gpu:
        run.add("first and second time", "skipped", why=NO_FLEX)
        return
    model = training_models("small", run)["flex"]
    groups = (group_of(300 + 37 * number, 50, 8) for number in range(4 if run.quick else 8))
    steps = [run.finished(folded_step(model, PrefixForest.from_rollout_group(*group))) for group in groups]
    seconds: Seconds = {}
    for name in ("first time", "second time"):
        seconds[name] = []
        for step in steps:
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    run.figures(f"{len(steps)} lengths: ", seconds, "second time")


CHECKS: dict[str, Callable[[Run], None]] = {
    "block_mask": check_block_mask,
    "segments": check_segments,
    "dense": check_dense,
    "flex": check_flex,
    "tree_rows": check_tree_rows,
    "padded": check_padded,
    "documents": check_documents,
    "prefetch": check_prefetch,
    "head": check_head,
    "native": check_native,
    "torchtitan": check_torchtitan,
    "speculators": check_speculators,
    "precompute": check_precompute,
    "tensor_parallel": check_tensor_parallel,
    "placement": check_placement,
    "speed_prefetch": speed_prefetch,
    "speed_head": speed_head,
    "speed_step": speed_step,
    "speed_lengths": speed_lengths,
    "speed_precompute": speed_precompute,
}


class TooLong(Exception):
    """A check took longer than its limit."""


def run_check(run: Run, name: str, limit: int) -> None:
    """Run one check. An error, or more than `limit` seconds, becomes a line that FAILED."""

    def stop(*_: object) -> None:
        raise TooLong(f"longer than {limit} s")

    begin, run.check = time.perf_counter(), name
    print(f"{name} ...", file=sys.stderr, flush=True)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            CHECKS[name](Run(run.device, run.quick, run.rounds, Path(folder), name, run.rows))
    except Exception as error:
        traceback.print_exc()
        run.add("the whole check", "FAILED", why=" ".join(f"{type(error).__name__}: {error}".split())[:200])
    finally:
        signal.alarm(0)
    print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of the checks, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the lines there")
    parser.add_argument("--device", help="default: cuda; cpu runs tiny sizes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes on a GPU too")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each speed")
    parser.add_argument("--limit", type=int, default=240, help="seconds that a check may take")
    parser.add_argument("--folder", help="default: a temporary one")
    return parser.parse_args()


def main() -> int:
    """Run the checks; return the exit status."""
    options = parsed()
    if options.list:
        print("\n".join(f"{name:<17} {(check.__doc__ or '').splitlines()[0]}" for name, check in CHECKS.items()))
        return 0
    if options.device is None and not torch.cuda.is_available():
        print(f"No GPU: torch {torch.__version__} finds none, so nothing was checked. --device cpu runs tiny sizes.")
        run = Run("", True, 0, Path())
    else:
        device = options.device or "cuda"
        on_cpu = device == "cpu"
        print(f"{'CPU' if on_cpu else torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            run = Run(device, options.quick or on_cpu, 1 if on_cpu else options.rounds, Path(folder))
            for name in options.only:
                run_check(run, name, options.limit)
        found = {verdict: sum(row.verdict == verdict for row in run.rows) for verdict in ("ok", "FAILED", "skipped")}
        print(", ".join(f"{count} {verdict}" for verdict, count in found.items()))
    if options.json:
        about = {"device": run.device or None, "torch": torch.__version__, "rows": [asdict(row) for row in run.rows]}
        options.json.write_text(json.dumps(about, indent=2) + "\n")
    return int(any(row.verdict == "FAILED" for row in run.rows))


if __name__ == "__main__":
    sys.exit(main())
