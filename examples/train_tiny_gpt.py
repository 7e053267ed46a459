"""Train a small GPT on a CPU from the caches: a pretrain mixture, then chats, with stops and resumes in between.

    python examples/train_tiny_gpt.py --out loss.png
    python examples/train_tiny_gpt.py --pretrain cache/pretrain/{fineweb_edu,roam} --weights 4 1 --sft cache/sft/oasst1
    python examples/train_tiny_gpt.py --permute-tokens --T 32 --global-batch-size 32 --lr 5e-3 --pretrain-steps 500

The first command reads the sample that `make run` builds. The functions from `open_mixture` to `unigram_entropy` show
the readers. A run is a sequence of jobs, as on a cluster: each starts some processes (gloo), loads the checkpoint,
trains up to a step, writes the checkpoint and ends. At each step of --stop-at the next job starts, with the next number
of --world-sizes.

A good result: a stop does not change the losses. With the same number of processes they are equal to the bit; with
another one the order of sums changes, but in float64 the losses agree to 1e-9. The losses of pretraining, on train and
val, end well below the unigram entropy of the text.

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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.utils.data import DataLoader
from tqdm import tqdm

from niels_gpt.cache import SFTExampleDataset, read_meta
from niels_gpt.cache.formats import IGNORE_INDEX
from niels_gpt.sampling import EpochStream, MixtureStream, bits_per_byte, iter_eval

Options = argparse.Namespace  # the command line, from `parse`


class TinyGPT(nn.Module):
    """A transformer that shares its embeddings with its output layer."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        dim, layers = options.dim, 2
        self.tokens, self.places = nn.Embedding(options.vocab_size, dim), nn.Embedding(options.T, dim)
        block = nn.TransformerEncoderLayer(
            dim, dim // 32, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, bias=False
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        generator = torch.Generator().manual_seed(options.seed)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02, generator=generator)
        self.double()  # another world size sums in another order, which float64 does not show in a loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy of all targets together, in nats. x, y: int64 [B, T]."""
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.blocks(self.tokens(x) + self.places.weight, mask=later, is_causal=True)
        logits = (h @ self.tokens.weight.T).flatten(0, 1)
        return functional.cross_entropy(logits, y.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def open_mixture(options: Options, rank: int, world_size: int) -> MixtureStream:
    """Open the train splits of the pretrain caches for one rank."""
    streams = [
        # Every window once per epoch. The global batch size does not depend on world_size: each rank reads its part of
        # every global batch, without communication.
        EpochStream(
            cache / "train",
            T=options.T,
            global_batch_size=options.global_batch_size,
            seed=options.seed,
            rank=rank,
            world_size=world_size,
        )
        for cache in options.pretrain
    ]
    return MixtureStream(streams, options.weights, seed=options.seed)  # an exhausted source starts its next epoch


def open_chats(options: Options, expect: dict[str, Any] | None = None) -> SFTExampleDataset:
    """Open the train split of the sft cache. expect: the fingerprint that it must have."""
    return SFTExampleDataset.open(
        options.sft,
        "train",
        T=options.T,
        require_targets=True,  # skip chats without a reply in their first T + 1 tokens
        expect=expect,
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
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x and y, or y_masked, from the checkpoint's step on: int64 [rows of this rank, T]."""
    if checkpoint["step"] < options.pretrain_steps:
        # The control mixes the rows of all ranks, so each rank reads them all.
        mixture = open_mixture(options, *((0, 1) if options.permute_tokens else (rank, world_size)))
        # The state is the same for all ranks and world sizes. A cache with other content is refused.
        mixture.load_state_dict(checkpoint["stream"])
        # batch_size=None: the stream makes the batches itself. Workers do not change their order.
        loader = DataLoader(mixture, batch_size=None, num_workers=options.workers)
        for batch in itertools.islice(loader, options.pretrain_steps - checkpoint["step"]):
            checkpoint["stream"] = batch.state  # not mixture.state_dict(): workers read ahead of the training
            x, y = batch
            if options.permute_tokens:
                x, y = (part.chunk(world_size)[rank] for part in permuted(x, y, generator))
            yield x, y
    chats = open_chats(options, expect=checkpoint["chats"])  # refuses other content too
    while True:
        # Drawn with replacement, so that the state of the generator is enough to resume. All ranks have the same
        # generator and draw the whole global batch; each takes its rows. y_masked is -100 outside the replies.
        x, _, y_masked = chats.get_batch(B=options.global_batch_size, generator=generator)
        yield x.chunk(world_size)[rank], y_masked.chunk(world_size)[rank]


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
    return {"nats_per_token": sum(nats.values()) / targets, "bits_per_byte": bits}


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
        "chats": open_chats(options).fingerprint() if options.sft_steps else None,
        "losses": [],
        "evaluations": [{"step": 0, **evaluate(model, options)}],
        "unigram_entropy": unigram_entropy(options),
    }
    torch.save(checkpoint, options.out.with_suffix(".pt"))


def train_step(model: TinyGPT, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Take one step on a global batch, of which x and y are this rank's part; return its loss before the step."""
    optimizer.zero_grad()
    loss_sum = model(x, y)
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
    stages = batches(options, checkpoint, generator, rank, world_size)
    for step in tqdm(range(checkpoint["step"], until), f"world size {world_size}", disable=rank > 0):
        checkpoint["losses"].append(train_step(model, optimizer, *next(stages)))
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
    axes.plot(range(begin, len(losses)), losses[begin:], linewidth=0.9, label="sft, the replies")
    val = [(each["step"], each["nats_per_token"]) for each in results["evaluations"]]
    axes.plot(*zip(*val, strict=True), "o", color="tab:red", label="val of pretrain")
    axes.axhline(results["unigram_entropy"], color="black", linestyle="--", label="unigram entropy of pretrain")
    jobs = itertools.pairwise(results["jobs"])
    marks = [(end, f" stopped: world size {before}, then {after}") for (end, before), (_, after) in jobs]
    for step, text in [*marks, (begin, " end of pretraining")]:
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
    add("--pretrain-steps", type=int, default=200, metavar="N", help="steps of the first stage")
    add("--sft-steps", type=int, default=60, metavar="N", help="steps of the second stage")
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
    print(f"unigram entropy of pretrain: {results['unigram_entropy']:.3f} nats per token\nplot: {options.out}")


if __name__ == "__main__":
    main()
