"""Train a small GPT on a CPU from the caches: a pretrain mixture that chats join later, with stops and resumes.

    python examples/train_tiny_gpt.py --out loss.png
    python examples/train_tiny_gpt.py --pretrain cache/pretrain/{fineweb_edu,roam} --weights 4 1 --sft cache/sft/oasst1
    python examples/train_tiny_gpt.py --permute-tokens --T 32 --global-batch-size 32 --lr 5e-3 --pretrain-steps 500

The first command reads the sample that `make run` builds. The functions from `open_mixture` to `unigram_entropy` show
the readers. A run is a sequence of jobs, as on a cluster: each starts some processes (gloo), loads the checkpoint,
trains up to a step, writes the checkpoint and ends. At each step of --stop-at the next job starts, with the next number
of --world-sizes.

Text comes as windows in which documents are kept apart, chats as packed rows; no token sees another document or chat.

A good result: a stop does not change the losses. With the same number of processes they are equal to the bit; with
another one the order of sums changes, but in float64 the losses agree to 1e-9. The losses of pretraining, on train and
val, end well below the unigram entropy of the text. The chats of val have the same loss in packed and in padded rows.

--permute-tokens is a control: all tokens of a global batch, [B, T + 1], are shuffled before x and y are taken from
them, so that only the frequency of each token can be learned. The loss must end at the unigram entropy; below it, the
model sees its targets. A network with that fault shows it after some hundred steps where rows are short.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.utils.data import DataLoader
from tqdm import tqdm

from niels_gpt.cache import read_meta
from niels_gpt.cache.formats import IGNORE_INDEX
from niels_gpt.sampling import (
    Batch,
    EpochStream,
    MixtureStream,
    PackedStream,
    SFTStream,
    bits_per_byte,
    block_causal_mask,
    iter_eval,
)

Options = argparse.Namespace  # the command line, from `parse`


class Block(nn.Module):
    """Attention and a network of two layers, each after a norm and added to its input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = dim // 32
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        """Return h [B, T, dim] after the block. mask: as `TinyGPT.forward`."""
        q, k, v = self.qkv(self.norms[0](h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, mask, 0.0, mask is None)
        h = h + self.out(seen.transpose(1, 2).flatten(2))
        return h + cast(Tensor, self.mlp(self.norms[1](h)))


class TinyGPT(nn.Module):
    """A transformer that shares its embeddings with its output layer."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        dim, layers = options.dim, 2
        self.tokens, self.places = nn.Embedding(options.vocab_size, dim), nn.Embedding(options.T, dim)
        self.blocks, self.norm = nn.ModuleList([Block(dim) for _ in range(layers)]), nn.LayerNorm(dim)
        generator = torch.Generator().manual_seed(options.seed)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02, generator=generator)
        self.double()  # another world size sums in another order, which float64 does not show in a loss

    def forward(self, x: Tensor, y: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the cross entropy of all targets together, in nats.

        x, y: int64 [B, T]. positions: of each token in its document, int64 [B, T]; None: in its row.
        mask: true where a token may see another one, bool [B, 1, T, T]; None: all earlier ones.
        """
        h = self.tokens(x) + (self.places.weight if positions is None else self.places(positions))
        for block in self.blocks:
            h = block(h, mask)
        logits = (self.norm(h) @ self.tokens.weight.T).flatten(0, 1)
        return functional.cross_entropy(logits, y.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def open_mixture(options: Options, rank: int, world_size: int) -> MixtureStream:
    """Open the train splits of the caches for one rank."""
    # The global batch size does not depend on world_size: each rank reads its part of every global batch, without
    # communication.
    common: dict[str, Any] = {
        "T": options.T,
        "global_batch_size": options.global_batch_size,
        "seed": options.seed,
        "rank": rank,
        "world_size": world_size,
    }
    # Every window, and every chat, once per epoch. An exhausted source starts its next epoch.
    text = [EpochStream(cache / "train", documents=not options.permute_tokens, **common) for cache in options.pretrain]
    if not options.sft_steps:
        return MixtureStream(text, options.weights, seed=options.seed)
    chats = PackedStream(options.sft, split="train", **common)
    joins = options.pretrain_steps * options.global_batch_size  # the sample at which the chats join
    stages = [(0, [*options.weights, 0]), (joins, [*options.weights, options.chats_weight])]
    return MixtureStream([*text, chats], stages, seed=options.seed)


def inputs(batch: Batch) -> tuple[Tensor | None, ...]:
    """Return the arguments of the model: x, y, positions and mask of a batch."""
    if batch.cu_seqlens is None:
        return batch.x, batch.y, None, None
    return (
        batch.x,
        batch.y,
        batch.position_ids,
        block_causal_mask(batch.cu_seqlens, tuple(batch.x.shape), dtype=torch.bool),
    )


def permuted(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return x and y with all tokens of all rows shuffled."""
    if not torch.equal(x[:, 1:], y[:, :-1]):
        raise RuntimeError("x and y are not one sequence shifted by one token; shuffling would hide that")
    rows = torch.cat([x, y[:, -1:]], dim=1)
    rows = rows.flatten()[torch.randperm(rows.numel(), generator=generator)].view_as(rows)
    return rows[:, :-1], rows[:, 1:]


def batches(
    options: Options, checkpoint: dict[str, Any], generator: torch.Generator, rank: int, world_size: int
) -> Iterator[tuple[Tensor | None, ...]]:
    """Yield the arguments of the model from the checkpoint's step on: this rank's rows."""
    # The control mixes the rows of all ranks, so each rank reads them all.
    mixture = open_mixture(options, *((0, 1) if options.permute_tokens else (rank, world_size)))
    # The state is the same for all ranks and world sizes. A cache with other content is refused.
    mixture.load_state_dict(checkpoint["stream"])
    # batch_size=None: the stream makes the batches itself. Workers do not change their order.
    for batch in DataLoader(mixture, batch_size=None, num_workers=options.workers):
        checkpoint["stream"] = batch.state  # not mixture.state_dict(): workers read ahead of the training
        if options.permute_tokens:
            yield tuple(part.chunk(world_size)[rank] for part in permuted(*batch, generator))
        else:
            yield inputs(batch)


@torch.no_grad()
def evaluate(model: TinyGPT, options: Options) -> dict[str, Any]:
    """Return the loss over all tokens of val, and the bits per byte of each cache, comparable between tokenizers."""
    nats, targets = dict.fromkeys(options.pretrain, 0.0), 0
    for cache in options.pretrain:
        # Every token but the first is a target once. The last window is padded with -100: sum losses and targets.
        for x, y in iter_eval(cache / "val", B=options.global_batch_size, T=options.T):
            nats[cache] += model(x, y).item()
            targets += int((y != IGNORE_INDEX).sum())
    bits = {cache.name: bits_per_byte(loss_sum, cache / "val") for cache, loss_sum in nats.items()}
    chats = loss_of_chats(model, options) if options.sft_steps else {}
    return {"nats_per_token": sum(nats.values()) / targets, "bits_per_byte": bits, "chats": chats}


def loss_of_chats(model: TinyGPT, options: Options) -> dict[str, Any]:
    """Return the loss over all replies of val, nats per token, of packed and of padded rows; and how many rows."""
    # A chat of more than T tokens is cut at the same places in both. Padded rows without a target are left out.
    common: dict[str, Any] = {"T": options.T, "global_batch_size": options.global_batch_size, "seed": options.seed}
    common.update(split="val", epochs=1, over_length="split")
    streams = {
        "packed": PackedStream(options.sft, **common),
        "padded": SFTStream(options.sft, require_targets=True, **common),
    }
    found: dict[str, Any] = {}
    for name, stream in streams.items():
        given = [inputs(batch) for batch in stream]
        targets = sum(int((cast(Tensor, y) != IGNORE_INDEX).sum()) for _, y, _, _ in given)
        found[name] = sum(model(*each).item() for each in given) / targets
        found[f"{name}_rows"] = stream.num_samples
    return found


def unigram_entropy(options: Options) -> float:
    """Return the loss of a model that knows only the frequency of each token of the mixture."""
    shares = torch.zeros(options.vocab_size, dtype=torch.float64)
    for cache, weight in zip(options.pretrain, options.weights, strict=True):
        counts = torch.zeros_like(shares)
        for _, y in iter_eval(cache / "train", B=64, T=1024):
            counts += torch.bincount(y[y != IGNORE_INDEX], minlength=len(shares))
        shares += weight * counts / counts.sum()
    return float(torch.special.entr(shares / shares.sum()).sum())


def begin(options: Options) -> None:
    """Write the checkpoint of step 0. Raises here for a cache that one of the jobs could not open."""
    for world_size in options.world_sizes:
        mixture = open_mixture(options, 0, world_size)
    model = TinyGPT(options)
    checkpoint = {
        "step": 0,
        "pretrain_steps": options.pretrain_steps,
        "jobs": options.jobs,
        "model": model.state_dict(),
        "generator": torch.Generator().manual_seed(options.seed).get_state(),
        "stream": mixture.state_dict(),
        "losses": [],
        "evaluations": [{"step": 0, **evaluate(model, options)}],
        "unigram_entropy": unigram_entropy(options),
    }
    torch.save(checkpoint, options.out.with_suffix(".pt"))


def train_step(model: TinyGPT, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, *apart: Tensor | None) -> float:
    """Take one step on a global batch, of which x and y are this rank's part; return its loss before the step."""
    optimizer.zero_grad()
    loss_sum = model(x, y, *apart)
    loss_sum.backward()
    sums = torch.stack([loss_sum.detach(), (y != IGNORE_INDEX).sum().double()])
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    if dist.is_initialized():
        for part in (sums, *gradients):
            dist.all_reduce(part)
    nats, targets = sums.tolist()
    for gradient in gradients:
        gradient /= targets  # of the global batch: where y is masked, ranks have different numbers of targets
    optimizer.step()
    return float(nats / targets)


def job(rank: int, options: Options, until: int, world_size: int) -> None:
    """Run one process of a job: train from the checkpoint's step up to `until`; rank 0 writes the next checkpoint."""
    torch.set_num_threads(1)  # several would sum in another order
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{options.meeting}", rank=rank, world_size=world_size)
    checkpoint = torch.load(options.out.with_suffix(".pt"), weights_only=True)
    model = TinyGPT(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    model.load_state_dict(checkpoint["model"])
    if "optimizer" in checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
    generator = torch.Generator().set_state(checkpoint["generator"])
    given = batches(options, checkpoint, generator, rank, world_size)
    for step in tqdm(range(checkpoint["step"], until), f"world size {world_size}", disable=rank > 0):
        checkpoint["losses"].append(train_step(model, optimizer, *next(given)))
        if rank == 0 and step + 1 in (options.pretrain_steps, until):
            checkpoint["evaluations"].append({"step": step + 1, **evaluate(model, options)})
    if rank == 0:
        checkpoint.update(step=until, model=model.state_dict(), optimizer=optimizer.state_dict())
        torch.save({**checkpoint, "generator": generator.get_state()}, options.out.with_suffix(".pt"))
    if world_size > 1:
        dist.destroy_process_group()


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw the losses of both stages, the stops, the losses on val and the unigram entropy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes, losses, begin = figure.subplots(), results["losses"], results["pretrain_steps"]
    axes.plot(losses[:begin], linewidth=0.9, label="pretrain")
    axes.plot(range(begin, len(losses)), losses[begin:], linewidth=0.9, label="text and chats")
    val = [(each["step"], each["nats_per_token"]) for each in results["evaluations"]]
    axes.plot(*zip(*val, strict=True), "o", color="tab:red", label="val of pretrain")
    chats = [(each["step"], each["chats"]["packed"]) for each in results["evaluations"] if each["chats"]]
    if chats:
        axes.plot(*zip(*chats, strict=True), "s", color="tab:purple", label="val of chats, the replies")
    axes.axhline(results["unigram_entropy"], color="black", linestyle="--", label="unigram entropy of pretrain")
    jobs = itertools.pairwise(results["jobs"])
    marks = [(end, f" stopped: world size {before}, then {after}") for (end, before), (_, after) in jobs]
    for step, text in [*marks, (begin, " the chats join")]:
        axes.axvline(step, color="gray", linestyle=":")
        axes.annotate(text, (step, 0.98), xycoords=axes.get_xaxis_transform(), va="top", color="gray")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=100)


def parse(argv: list[str] | None) -> Options:
    """Return the command line, with `jobs`: (the step where it ends, processes) of each."""
    made = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add, sample = made.add_argument, [f"cache/sample/pretrain/{name}" for name in ("fineweb_edu", "wikitext", "roam")]
    add("--pretrain", nargs="+", default=sample, metavar="FOLDER", help="caches of text")
    add("--weights", type=float, nargs="+", default=[0.6, 0.3, 0.1], metavar="W", help="of each in the mixture")
    add("--sft", type=Path, default="cache/sample/sft/dolly15k", metavar="FOLDER", help="cache of chats")
    add("--out", type=Path, default="loss.png", help="picture; beside it .json, the numbers, and .pt, the checkpoint")
    add("--pretrain-steps", type=int, default=200, metavar="N", help="steps before the chats join")
    add("--sft-steps", type=int, default=60, metavar="N", help="steps with chats")
    add("--chats-weight", type=float, default=1, metavar="W", help="of the chats, beside --weights, from there on")
    add("--stop-at", type=int, nargs="*", metavar="STEP", help="where jobs end; None: half of pretraining")
    add("--world-sizes", type=int, nargs="+", default=[1, 2], metavar="N", help="processes of each job")
    add("--permute-tokens", action="store_true", help="the control: shuffle tokens; no sft")
    add("--global-batch-size", type=int, default=8, metavar="N", help="rows of a step, of all processes together")
    add("--T", type=int, default=128, metavar="N", help="tokens of a row")
    add("--dim", type=int, default=64, metavar="N", help="width of the network, a multiple of 32")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--seed", type=int, default=0, metavar="N", help="of weights, order and draws")
    add("--workers", type=int, default=0, metavar="N", help="DataLoader workers of a process; they change no loss")
    options = made.parse_args(argv)
    options.pretrain = [Path(folder) for folder in options.pretrain]
    options.vocab_size = read_meta(f"{options.pretrain[0]}/meta.json")["vocab_size"]
    options.sft_steps = 0 if options.permute_tokens else options.sft_steps
    options.meeting = options.out.resolve().with_suffix(".meet")
    stops = [options.pretrain_steps // 2] if options.stop_at is None else options.stop_at
    ends = [*stops, options.pretrain_steps + options.sft_steps]
    if sorted({0, *ends}) != [0, *ends]:
        made.error(f"--stop-at {stops}: expected steps between the first and the last, in order")
    if options.sft_steps and (options.pretrain_steps < 1 or options.chats_weight <= 0):
        made.error("with --sft-steps expected --pretrain-steps of 1 or more and --chats-weight above 0")
    sizes = options.world_sizes[: len(ends)]
    options.jobs = list(itertools.zip_longest(ends, sizes, fillvalue=sizes[-1]))
    return options


def main(argv: list[str] | None = None) -> None:
    """Train, draw the losses, and print the evaluations."""
    options = parse(argv)
    if importlib.util.find_spec("matplotlib") is None:  # fail before the training
        sys.exit("train_tiny_gpt: the picture needs matplotlib: pip install 'niels-gpt[plot]'")
    begin(options)
    for until, world_size in options.jobs:
        if world_size == 1:
            job(0, options, until, world_size)
        else:
            options.meeting.unlink(missing_ok=True)  # left by a run that was killed
            spawn(job, (options, until, world_size), world_size)  # type: ignore[no-untyped-call]
    checkpoint = torch.load(options.out.with_suffix(".pt"), weights_only=True)
    results = {key: value for key, value in checkpoint.items() if key not in ("model", "optimizer", "generator")}
    options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, options.out)
    for each in results["evaluations"]:
        bits = ", ".join(f"{name} {value:.3f}" for name, value in each["bits_per_byte"].items())
        print(f"val at step {each['step']}: {each['nats_per_token']:.3f} nats per token; bits per byte: {bits}")
        if chats := each["chats"]:
            rows = f"{chats['packed_rows']} packed rows and in {chats['padded_rows']} padded ones"
            print(f"    chats: {chats['packed']:.3f} nats per token, in {rows}")
    print(f"unigram entropy of pretrain: {results['unigram_entropy']:.3f} nats per token\nplot: {options.out}")


if __name__ == "__main__":
    main()
