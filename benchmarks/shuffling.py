"""How much shuffling order="shards" costs: how mixed its batches are, and the held-out loss of a small model.

Run: python benchmarks/shuffling.py [--mirror FOLDER] [--tokenizer FOLDER] [--tokens 3000000] [--seeds 3] [--quick]

Real text of a mirror, each pretrain source with an equal share, one source after the other and each in the order of its
files: the worst case, because neighbouring shards are alike, and the ends of the cache are not. The cache is cut into
1,192 shards, as many stretches as 10 billion tokens have, less those that are held out. So a group of 16 is the same
part of it. Texts that come twice are not removed.

A model of four embeddings, a hidden layer and the vocabulary predicts each fourth token from the four before it. It has
one epoch of batches of 16 rows of 64 tokens, with Adam and a learning rate that falls to 0. Each seed has its own start
and its own order; all orders of a seed have the same start. Losses are means over a held-out split, in nats.

    same stretch   share of pairs of rows of a batch that are from one stretch
    same source    the same of the text sources; their shares alone give a quarter for four equal ones
    1/4, 1/2, end  held-out loss after so many steps, mean of the seeds
    difference     at the end, of the same seed in order "all": mean, and its standard error; the last line has the
                   standard deviation of the seeds themselves in order "all"
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.recipes import sources
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.sampling import EpochStream, iter_eval
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer

SOURCES = ("wikitext", "fineweb_edu", "gutenberg", "roam")
STRETCHES = 1_192
"""Of 10 billion tokens in stretches of 2 ** 23."""
B, T, CONTEXT, EVERY = 16, 64, 4, 4
_CHARS = 20_000  # of a document: a book is several
ORDERS: dict[str, dict[str, Any] | None] = {
    "all": {},
    **{f"shards, open_shards={count}": {"order": "shards", "open_shards": count} for count in (16, 4, 1)},
    "sequential": None,
}
Rows = NDArray[np.int64]


def texts(mirror: Path, tokenizer: Any, tokens: int) -> Iterator[str]:
    """Yield documents of about as many tokens of each source, one source after the other; long ones are cut."""
    settings = Settings(source_root=str(mirror), tokenizer="")
    for name in SOURCES:
        left = tokens // len(SOURCES)
        for _, text, _ in sources.document_rows(settings, resolve_source(settings, name), None, Counter()):
            for at in range(0, len(text), _CHARS):
                yield text[at : at + _CHARS]
                left -= len(tokenizer.encode(text[at : at + _CHARS])) + 1
                if left <= 0:
                    break
            if left <= 0:
                break


def build(root: Path, mirror: Path, tokenizer: Any, tokens: int) -> Path:
    """Build the cache in the order of the texts; each twentieth document is held out."""
    build_pretrain(
        (("train" if number % 20 else "val", text) for number, text in enumerate(texts(mirror, tokenizer, tokens))),
        root / "text",
        tokenizer=tokenizer,
        max_train_tokens=None,
        max_val_tokens=None,
        shard_bytes=2 * -(-tokens // STRETCHES),
        shuffle_buffer=None,
        seed=0,
        partial=True,
    )
    return root / "text"


def order_of(cache: Path, how: dict[str, Any] | None, seed: int) -> tuple[EpochStream, Rows, Rows]:
    """Return a stream of the cache, and of each of its batches the places and the shards of the rows: [steps, B]."""
    stream = EpochStream(cache / "train", T=T, global_batch_size=B, seed=seed, epochs=1, drop_last=True, **(how or {}))
    count = len(stream) * B
    located: Any = EpochStream(cache / "train", T=T, global_batch_size=B, seed=seed, **(how or {})).samples.locate(
        np.arange(count)
    )
    shards, places = located.shards, located.places
    if how is None:
        by_place = np.argsort(places, kind="stable")
        shards, places = shards[by_place], places[by_place]
    return stream, places.reshape(-1, B), shards.reshape(-1, B)


def same(groups: Rows) -> float:
    """Return the share of pairs of rows of a batch that are of one group. groups: int64 [steps, B]."""
    pairs = B * (B - 1)
    return float(np.mean([(np.bincount(row) ** 2).sum() - B for row in groups])) / pairs


class Model(torch.nn.Module):
    """Four embeddings, a hidden layer, logits."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 24)
        self.rest = torch.nn.Sequential(
            torch.nn.Linear(24 * CONTEXT, 96), torch.nn.GELU(), torch.nn.Linear(96, vocab_size)
        )

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of each fourth target. x, y: int64 [B, T]."""
        context = x.unfold(1, CONTEXT, EVERY)  # [B, positions, CONTEXT]
        logits = self.rest(self.embedding(context).flatten(2))
        targets = y[:, CONTEXT - 1 :: EVERY][:, : logits.shape[1]]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(cache: Path, stream: EpochStream, places: Rows, seed: int, steps: int) -> list[float]:
    """Train for an epoch; return the held-out loss at a quarter, at half and at the end."""
    torch.manual_seed(seed)
    model = Model(int(stream.split.vocab_size or 0))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50) * (1 - step / steps))
    held_out = [(x, y) for x, y in iter_eval(cache / "val", B=256, T=T) if len(x) == 256][:8]
    ids, found = stream.split.files, []
    shards = ids.first_tokens.searchsorted(places, side="right") - 1
    for step in range(steps):
        rows = torch.from_numpy(ids.gather(shards[step], places[step], T + 1).astype(np.int64))
        optimizer.zero_grad()
        model.loss(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        rate.step()
        if step + 1 in (steps // 4, steps // 2, steps):
            with torch.no_grad():
                found.append(statistics.fmean(float(model.loss(x, y)) for x, y in held_out))
    return found


def main() -> None:
    """Build, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", type=Path, default=Path("mirror"))
    parser.add_argument("--tokenizer", type=Path, default=Path("cache/sample/tokenizer"))
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens, two seeds")
    arguments = parser.parse_args()
    tokens, seeds = (arguments.tokens // 10, 2) if arguments.quick else (arguments.tokens, arguments.seeds)
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    tokenizer = load_tokenizer(arguments.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        cache = build(Path(folder), arguments.mirror, tokenizer, tokens)
        found: dict[str, list[list[float]]] = {name: [] for name in ORDERS}
        mixed: dict[str, tuple[float, float]] = {}
        begin = time.perf_counter()
        for seed in range(seeds):
            for name, how in ORDERS.items():
                stream, places, shards = order_of(cache, how, seed)
                of_source = len(SOURCES) * shards // len(stream.split.lengths)
                mixed[name] = same(shards), same(of_source)
                found[name].append(trained(cache, stream, places, seed, len(places)))
                said = f"{name}: {[round(loss, 4) for loss in found[name][-1]]}"
                print(f"seed {seed}, {len(places)} steps, {time.perf_counter() - begin:.0f} s, {said}", flush=True)
        stretches = len(stream.split.lengths)
    print(f"{tokens:,} tokens, {stretches:,} stretches, {seeds} seeds")
    print("| order | same stretch | same source | 1/4 | 1/2 | end | difference |")
    print("|---|---|---|---|---|---|---|")
    ends = [losses[-1] for losses in found["all"]]
    for name, runs in found.items():
        means = " | ".join(f"{statistics.fmean(run[at] for run in runs):.4f}" for at in range(3))
        apart = [run[-1] - end for run, end in zip(runs, ends, strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5
        stretch, source = mixed[name]
        print(f"| {name} | {stretch:.3f} | {source:.3f} | {means} | {statistics.fmean(apart):+.4f} ± {error:.4f} |")
    print(f"standard deviation of the seeds in order all: {statistics.stdev(ends):.4f}")


if __name__ == "__main__":
    main()
