"""SFTStream, and streams whose rows have segments, beside get_batch of the same cache: sections of loaders.py."""

import argparse
import functools
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from loader_caches import Letters
from loader_peers import Draw
from loader_rounds import SHAPES, compare, target
from loader_sft import chats, with_bits
from measuring import ratio, spread

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset, build_pretrain_cache, build_sft_cache
from niels_gpt.sampling import Batch, EpochStream, PackedStream, SFTStream

DOCUMENT = 1_000  # tokens, on average


def masked(name: str, draw: Draw, B: int, T: int) -> list[Draw]:
    """Return the draw after one batch: y is x one token later, or -100."""
    x, y = draw()
    assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous(), f"{name}: not int64"
    kept = y[:, :-1] != -100
    assert x.shape == y.shape == (B, T) and torch.equal(x[:, 1:][kept], y[:, :-1][kept]), f"{name}: not {B} rows of {T}"
    return [draw]


def sft_cache(root: Path) -> Path:
    """Build the chats of the section sft, unless they are there; return the cache."""
    if not (root / "s").exists():
        build_sft_cache(chats(3_000), root / "s", tokenizer=Letters(), val_frac=0.1, seed=0)
    return root / "s"


def get_batch_of(data: SFTExampleDataset | PretrainTokenStreamDataset, B: int) -> Draw:
    """Return get_batch, without the y that has no mask."""
    draw = functools.partial(data.get_batch, B=B, generator=torch.Generator().manual_seed(0))
    return (lambda: draw()[::2]) if isinstance(data, SFTExampleDataset) else draw


def opened(stream: type[SFTStream] | type[PackedStream], cache: Path, B: int, T: int, over_length: str) -> Draw:
    """Return the batches of a stream of a cache of chats, opened without its warning of targets that T loses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = iter(stream(cache, T=T, global_batch_size=B, seed=0, over_length=over_length))
    return functools.partial(next, batches)


def bench_sft_stream(root: Path, arguments: argparse.Namespace) -> None:
    """Compare SFTStream with get_batch of the same split: by sentinels, then by loss bits."""
    caches, least = {"sentinels": sft_cache(root), "loss bits": with_bits(sft_cache(root))}, math.inf
    print("\nSFTStream, as a share of the speed of sft get_batch")
    for (B, T), (loss, cache) in itertools.product(SHAPES, caches.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # examples that T cuts
            data = SFTExampleDataset.open(cache, "train", T=T)
        draws = {"get_batch": get_batch_of(data, B)}
        draws |= {each: opened(SFTStream, cache, B, T, each) for each in ("truncate", "split")}
        seconds = compare({name: masked(name, draw, B, T) for name, draw in draws.items()}, B, arguments, {})
        shares = (f"{name} {spread(seconds, name, 'get_batch')}" for name in draws if name != "get_batch")
        print(f"  {B} x {T}, {loss}: {', '.join(shares)}", flush=True)
        least = min(least, *(ratio(seconds, name, "get_batch") for name in draws))
    target("SFTStream / sft get_batch, least of all", least, 0.8, arguments)


def texts(tokens: int) -> Iterator[str]:
    """Yield texts of 1 to 2 * DOCUMENT letters."""
    generator = torch.Generator().manual_seed(0)
    for size in torch.randint(1, 2 * DOCUMENT, (tokens // DOCUMENT,), generator=generator).tolist():
        yield bytes(torch.randint(97, 123, (size,), generator=generator).tolist()).decode()


def with_positions(batches: Iterable[Batch]) -> Draw:
    """Return a draw that reads position_ids as well, as a model that keeps segments apart does."""
    iterator = iter(batches)

    def draw() -> Batch:
        batch = next(iterator)
        assert batch.position_ids is not None
        return batch

    return draw


def bench_segments(root: Path, arguments: argparse.Namespace) -> None:
    """Compare the streams whose rows have segments with get_batch of the same split, both families."""
    notes, least = root / "notes", [math.inf, math.inf]
    limit = arguments.tokens // 5
    sizes = {"max_train_tokens": limit, "max_val_tokens": 0, "shard_bytes": 2 * limit, "shuffle_buffer": None}
    build_pretrain_cache(texts(2 * limit), notes, tokenizer=Letters(), seed=0, **sizes)
    print(
        f"\nstreams with segments, documents of {DOCUMENT:,} tokens, as a share of get_batch; then position_ids as well"
    )
    for B, T in SHAPES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # examples that T cuts
            chats_of = SFTExampleDataset.open(sft_cache(root), "train", T=T)
        plain, sft, common = "get_batch", "sft get_batch", {"T": T, "global_batch_size": B, "seed": 0}
        limits = {plain: get_batch_of(PretrainTokenStreamDataset(notes / "train", T=T, device="cpu"), B)}
        limits[sft] = get_batch_of(chats_of, B)
        streams = {
            "documents=True": functools.partial(EpochStream, notes / "train", documents=True, **common),
            "PackedStream": functools.partial(PackedStream, notes, **common),
            "PackedStream of chats": functools.partial(PackedStream, sft_cache(root), **common),
        }
        bare = {name: functools.partial(next, iter(make())) for name, make in streams.items()}
        placed = {f"{name}, placed": with_positions(make()) for name, make in streams.items()}
        draws = limits | bare | placed
        seconds = compare({name: masked(name, draw, B, T) for name, draw in draws.items()}, B, arguments, {})
        for number, names in enumerate((bare, placed)):
            beside = {name: sft if "chats" in name else plain for name in names}
            shares = (f"{name} {spread(seconds, name, limit)}" for name, limit in beside.items())
            print(f"  {B} x {T}: {', '.join(shares)}", flush=True)
            least[number] = min(least[number], *(ratio(seconds, *pair) for pair in beside.items()))
    for each, also in zip(least, ("", " with position_ids"), strict=True):
        target(f"streams with segments{also} / get_batch of the same family, least of all", each, 0.6, arguments)
