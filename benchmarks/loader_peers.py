"""Other projects' readers of token ids, for loaders.py: each as its documentation says, in this process.

A peer is a function of a corpus, B and T that returns one or several ways to draw a batch; the fastest counts. All give
x and y as `pair` does, by casts into fresh memory, of rows at random or of a shuffled epoch.
"""

import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

PACKAGES = (
    "megatron-core==0.16.1 litdata==0.2.76 lightning-utilities==0.15.3 boto3==1.44.5 botocore==1.44.5 "
    "s3transfer==0.19.3 jmespath==1.1.0 mosaicml-streaming==0.13.0 catalogue==2.0.10 Brotli==1.2.1 "
    "python-snappy==0.7.3 cramjam==2.14.0 zstd==1.5.7.2"
)
Pair = tuple[torch.Tensor, torch.Tensor]
Draw = Callable[[], Any]
Tokens = NDArray[np.unsignedinteger[Any]]


class Corpus(NamedTuple):
    """The same tokens as one mapped file, `path`, and as a split of so many shards; work: a folder for the peers."""

    tokens: Tokens
    path: Path
    split: Path
    shards: int
    work: Path

    def shard(self, number: int) -> Tokens:
        """Return the tokens of a shard."""
        size = len(self.tokens) // self.shards
        return self.tokens[number * size : (number + 1) * size]

    def rows(self, width: int) -> Tokens:
        """Return all tokens as rows, but for those that do not fill one: [rows, width]."""
        count = len(self.tokens) // width
        return self.tokens[: count * width].reshape(count, width)


def pair(rows: Tokens) -> Pair:
    """Return x and y of rows [B, T + 1], by numpy's casts, each into fresh memory."""
    return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield from it, epoch after epoch."""
    while True:
        yield from batches


def nanogpt(corpus: Corpus, B: int, T: int) -> list[Draw]:
    """Map the file again at each batch, slice it twice a row, cast each slice and stack them."""

    def draw() -> Pair:
        data = np.memmap(corpus.path, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - T, (B,))
        x = torch.stack([torch.from_numpy(data[s : s + T].astype(np.int64)) for s in starts])
        return x, torch.stack([torch.from_numpy(data[s + 1 : s + 1 + T].astype(np.int64)) for s in starts])

    return [draw]


def megatron(corpus: Corpus, B: int, T: int) -> list[Draw]:
    """Read windows by IndexedDataset.get, of one prefix for each shard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
        from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    prefixes = [str(corpus.work / f"megatron_{shard}") for shard in range(corpus.shards)]
    for shard, prefix in enumerate(prefixes):
        if not os.path.exists(f"{prefix}.idx"):
            builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
            builder.add_document(corpus.shard(shard), [len(corpus.shard(shard))])
            builder.finalize(f"{prefix}.idx")
    shards, last = [IndexedDataset(prefix) for prefix in prefixes], len(corpus.shard(0)) - T

    def draw() -> Pair:
        numbers = torch.randint(corpus.shards * last, (B,)).tolist()
        return pair(np.stack([shards[n // last].get(0, n % last, T + 1) for n in numbers]))

    return [draw]


def litdata(corpus: Corpus, B: int, T: int) -> list[Draw]:
    """Iterate over shuffled blocks of T + 1 tokens, stacked here or by its loader in this process."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.cache import Cache

    folder = corpus.work / "litdata"
    if not folder.exists():
        cache = Cache(str(folder), chunk_size=len(corpus.shard(0)), item_loader=TokensLoader())
        for shard in range(corpus.shards):
            cache._add_item(shard, torch.tensor(corpus.shard(shard)))
        cache.done()
        cache.merge(1)

    def blocks() -> Any:
        return StreamingDataset(str(folder), item_loader=TokensLoader(block_size=T + 1), shuffle=True, drop_last=True)

    one_by_one = endless(blocks())
    loader = endless(StreamingDataLoader(blocks(), batch_size=B, num_workers=0, drop_last=True))
    return [
        lambda: pair(torch.stack([next(one_by_one) for _ in range(B)]).numpy()),
        lambda: pair(next(loader).numpy()),
    ]


def arrow(corpus: Corpus, B: int, T: int) -> list[Draw]:
    """Take random rows of a mapped Arrow dataset, as torch, as numpy and as Arrow."""
    import datasets
    import pyarrow as pa

    folder, rows = corpus.work / f"arrow_{T}", corpus.rows(T + 1)
    datasets.disable_progress_bars()
    if not folder.exists():
        starts = pa.array(np.arange(len(rows) + 1) * (T + 1), pa.int32())
        ids = pa.ListArray.from_arrays(starts, pa.array(rows.reshape(-1)))
        datasets.Dataset(pa.table({"ids": ids})).save_to_disk(str(folder), num_shards=corpus.shards)
    data = datasets.load_from_disk(str(folder))

    def drawn(form: str) -> Callable[[], Any]:
        formed = data.with_format(form)
        return lambda: formed[torch.randint(len(rows), (B,)).tolist()]["ids"]

    as_torch, as_numpy, as_arrow = drawn("torch"), drawn("numpy"), drawn("arrow")

    def torch_pair() -> Pair:
        ids = as_torch()
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return [
        torch_pair,
        lambda: pair(np.stack(as_numpy())),
        lambda: pair(as_arrow().combine_chunks().values.to_numpy().reshape(B, T + 1)),
    ]


def mosaic(corpus: Corpus, B: int, T: int) -> list[Draw]:
    """Take rows of an MDS dataset: shuffled by its iterator, and at random by their numbers."""
    if "streaming" not in sys.modules:
        # Without its __init__.py, which imports torchvision for pictures.
        spec = importlib.util.find_spec("streaming")
        if spec is None:
            raise ModuleNotFoundError("No module named 'streaming'")
        sys.modules["streaming"] = importlib.util.module_from_spec(spec)
    from streaming.base import MDSWriter, StreamingDataset

    folder, rows = corpus.work / f"mds_{T}", corpus.rows(T + 1)
    if not folder.exists():
        limit = rows.nbytes // corpus.shards + 2_000 + 4 * len(rows) // corpus.shards
        with MDSWriter(out=str(folder), columns={"ids": f"ndarray:uint16:{T + 1}"}, size_limit=limit) as writer:
            for row in rows:
                writer.write({"ids": row})
    data = StreamingDataset(local=str(folder), batch_size=B, shuffle=True)

    def shuffled() -> Iterator[Any]:
        try:
            yield from endless(data)
        finally:
            data._iterator.exit()  # as it does itself before another epoch: else its threads stay

    samples = shuffled()
    return [
        lambda: pair(np.stack([next(samples)["ids"] for _ in range(B)])),
        lambda: pair(np.stack([data[row]["ids"] for row in torch.randint(len(rows), (B,)).tolist()])),
    ]


PEERS = {  # by the name of a row: the peer, and the package whose version is shown
    "nanoGPT, one file": (nanogpt, None),
    "Megatron IndexedDataset": (megatron, "megatron-core"),
    "litdata TokensLoader": (litdata, "litdata"),
    "datasets (Arrow)": (arrow, "datasets"),
    "MosaicML Streaming": (mosaic, "mosaicml-streaming"),
}


def title(name: str) -> str:
    """Return the name of a row, of a peer with its version. Raises: PackageNotFoundError."""
    package = PEERS[name][1] if name in PEERS else None
    return f"{name} {importlib.metadata.version(package)}" if package else name
