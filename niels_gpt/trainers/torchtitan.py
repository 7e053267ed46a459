"""Streams as a data loader of torchtitan 0.3.0: a run resumes with another data-parallel degree, in mid-epoch.

    CacheRows           one cache, and which rows of it; several make a mixture
    StreamDataLoader    its BaseDataLoader: `config.dataloader = StreamDataLoader.Config(sources=[CacheRows(...)])`
    SequenceSource      a SourceConfig for the Grain loader of its main branch (pull request 4088): rows by number

torchtitan says which part of the data a loader gives, how many rows, and how long they are. The global batch is shared
by all data-parallel ranks: rank r of W has rows r * B up to (r + 1) * B of each W * B rows, in one order that the seed
gives. With gradient accumulation a step takes several of them. Positions begin at 0 in each segment of a batch, and
from them torchtitan makes its attention masks; without segments a row is one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch.utils.data import DataLoader
from torchtitan.config import Configurable

from niels_gpt.cache.sft_counts import OverLength
from niels_gpt.sampling.batch import Batch
from niels_gpt.sampling.epochs import EpochStream
from niels_gpt.sampling.examples import SFTStream
from niels_gpt.sampling.mixture import MixtureStream
from niels_gpt.sampling.packing.stream import PackedStream
from niels_gpt.sampling.random_access import RandomAccess
from niels_gpt.sampling.stream import Stream
from niels_gpt.storage.errors import CacheError, StateError, StreamUseError, UsageError
from niels_gpt.storage.meta_json import shortened

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ModuleNotFoundError:  # its main branch
    from torchtitan.components.data.loader import BaseDataLoader

_STREAMS: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "windows": (EpochStream, {}, {"random_offset"}),
    "documents": (EpochStream, {"documents": True}, {"random_offset"}),
    "packed": (PackedStream, {}, {"over_length"}),
    "chats": (SFTStream, {}, {"over_length", "require_targets"}),
}
"""Of each kind of rows its stream, what makes them that, and which of the options below it has."""


@dataclass(kw_only=True, slots=True)
class CacheRows:
    """A cache, and which rows of it a loader gives."""

    cache: str
    """Folder or URL of a cache, or of a split in it."""
    split: str | None = None
    """`train` or `val`, where `cache` does not say it."""
    rows: Literal["windows", "documents", "packed", "chats"] = "windows"
    """Windows, also with the documents in them kept apart; whole documents or chats packed; or one chat a row."""
    weight: float = 1.0
    """Share of the rows, where there are several sources."""
    epochs: int | None = None
    """After so many it is exhausted, and other sources take its place; None: as `infinite` of the loader says."""
    over_length: OverLength | None = None
    """Of packed rows and chats: what becomes of longer ones; None: as `PackedStream` and `SFTStream` do by default."""
    require_targets: bool = False
    """Of chats: leave out rows without a target."""
    random_offset: bool = False
    """Of windows: see `EpochStream`."""
    local: str | None = None
    """Of a URL: the folder here for what is fetched."""
    max_bytes: str | None = None
    """Of a URL: most bytes in `local`, such as "50 GiB"."""

    def open(self, **arguments: Any) -> Stream[Batch]:
        """Open the stream with the other arguments of its class.

        Raises: UsageError for other rows than those above, and for an option that they lack; the errors of the stream.
        """
        if self.rows not in _STREAMS:
            raise UsageError(f"{self.cache}: rows={shortened(self.rows)}, expected one of {', '.join(_STREAMS)}")
        opener, made, takes = _STREAMS[self.rows]
        options = {name: getattr(self, name) for name in ("over_length", "require_targets", "random_offset")}
        options = {name: value for name, value in options.items() if value}
        if extra := options.keys() - takes:
            raise UsageError(
                f"{self.cache}: rows={self.rows!r} with {', '.join(sorted(extra))}, which they do not have"
            )
        stream: Stream[Batch] = opener(
            self.cache,
            split=self.split,
            local=self.local,
            max_bytes=self.max_bytes,
            **made,
            **options,
            **arguments,
        )
        return stream


def _opened(config: Any, *, infinite: bool, drop_last: bool = False, **shape: int) -> Stream[Any]:
    """Open the stream of a Config below. shape: T, global_batch_size, rank, world_size."""
    sources: list[CacheRows] = config.sources
    if (config.open is None) == (not sources):
        raise UsageError(f"{type(config).__qualname__}: expected either sources or open")
    if config.open is not None:
        stream: Stream[Any] = config.open(**shape)
        for name, value in {**shape, "device": "cpu"}.items():
            if getattr(stream, name, None) != value:
                raise UsageError(f"open: {stream!r}, expected a stream with {name}={value!r}")
        if stream.num_samples is None and not infinite:
            raise UsageError(f"open: {stream!r} has no end, expected one because of infinite=False")
        return stream
    arguments: dict[str, Any] = {**shape, "seed": config.seed}
    epochs = [(None if infinite else 1) if of.epochs is None else of.epochs for of in sources]
    if len(sources) == 1:
        return sources[0].open(**arguments, epochs=epochs[0], drop_last=drop_last)
    return MixtureStream(
        [of.open(**arguments) for of in sources],
        [of.weight for of in sources],
        seed=config.seed,
        block_size=config.block_size,
        when_exhausted=["repeat" if count is None else count for count in epochs],
        drop_last=drop_last,
    )


def _check_tokenizer(stream: Stream[Any], tokenizer: Any) -> None:
    """Raise CacheError E402 if a cache is of another tokenizer.json, or has ids that the tokenizer lacks."""
    folder, sha256 = getattr(tokenizer, "tokenizer_path", None), None
    path = Path(folder or "", "tokenizer.json")
    if folder is not None and path.is_file():
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    for source in stream.samples.sources:
        known, remedy = source.identity().get("tokenizer_sha256"), "Take the tokenizer of the cache as hf_assets_path, "
        remedy += "or pass check_tokenizer=False where both give equal ids"
        if None not in (sha256, known) and known != sha256:
            found, expected = f"tokenizer_sha256 is {shortened(known)}", f"{shortened(sha256)}, of {path}"
            raise CacheError(source.units.folder, found, expected, remedy, code="E402")
        size = source.units.vocab_size
        if size is not None and size > tokenizer.get_vocab_size():
            expected = f"at most {tokenizer.get_vocab_size()}, of torchtitan's tokenizer"
            raise CacheError(source.units.folder, f"vocab_size is {size}", expected, remedy, code="E402")


def _converted(batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Return the tensors of a batch as torchtitan takes them, and its state."""
    positions = batch.position_ids
    if positions is None:
        positions = torch.arange(batch.x.shape[1]).expand(batch.x.shape)
    return {"input": batch.x, "positions": positions}, batch.y, batch.state


class StreamDataLoader(BaseDataLoader):
    """Batches of a stream: `({"input": int64 [B, T], "positions": int64 [B, T]}, labels int64 [B, T])`, on the CPU.

    labels: the token after each of `input`, -100 where there is no loss. T is `training.seq_len`. Where the stream ends
    iteration does, on all ranks after the same batch, and the Trainer stops.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What a config function or the command line says: `--dataloader.seed 3`, `--dataloader.sources.0.weight 2`."""

        sources: list[CacheRows] = field(default_factory=list)
        """One cache, or several that are mixed by their weights, with exact shares."""
        open: Annotated[Callable[..., Stream[Any]] | None, tyro.conf.Suppress] = None
        """Instead of sources: a function that opens a stream of T, global_batch_size, rank and world_size, on the CPU.

        Seed and drop_last are then its own.
        """
        seed: int = 42
        """Of the order, with which no field of torchtitan's own has to do."""
        infinite: bool = True
        """Epoch after epoch without end; False: one of each source. torchtitan's Validator sets it."""
        drop_last: bool = False
        """Where it ends: skip the last batch if it is short, as CUDA graphs need it."""
        block_size: int = 2048
        """Rows of a mixture in which each source has its share."""
        num_workers: int = 0
        """Processes that read ahead. May change from run to run."""
        prefetch_factor: int | None = None
        """Batches that each of them reads ahead; None: 2."""
        pin_memory: bool = False
        """Copy batches to pinned memory."""
        changed: bool = False
        """Go on from a run with another seq_len, seed, or other sources or weights: see `Stream.load_state_dict`."""
        check_tokenizer: bool = True
        """Refuse caches of another tokenizer than the one at hf_assets_path."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Open the stream of a data-parallel rank. Called by `Config.build`.

        snapshot_every_n_steps: not needed, since each batch has its state.
        Raises: UsageError, the errors of the streams; CacheError E402 for a cache of another tokenizer.
        """
        if getattr(config, "dataset", "") or getattr(config, "dataset_path", None):
            raise UsageError("StreamDataLoader has no dataset and dataset_path: caches are named by sources")
        size = local_batch_size * dp_world_size
        shape: dict[str, Any] = {"T": seq_len, "global_batch_size": size, "rank": dp_rank, "world_size": dp_world_size}
        self._stream = _opened(config, infinite=config.infinite, drop_last=config.drop_last, **shape)
        if config.check_tokenizer:
            _check_tokenizer(self._stream, tokenizer)
        self._state = self._stream.state_dict()
        self._config: Any = config
        self._batches: object = None

    @property
    def stream(self) -> Stream[Any]:
        """The stream, for its identity and length. Workers read ahead of it: training is where `state_dict` says."""
        return self._stream

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches from the current position on.

        Raises: the errors of `Stream.__iter__`, as after the end. A second time with workers it asks for a state to be
            loaded first, which may be the loader's own.
        """
        batches = self._batches = self._read()
        for inputs, labels, state in batches:
            if self._batches is not batches:
                raise StreamUseError("another iterator was started, or a state was loaded: iterate again")
            self._state = state
            yield inputs, labels

    def _read(self) -> Iterable[tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]]:
        workers, pin_memory = self._config.num_workers, self._config.pin_memory
        if not (workers or pin_memory):
            return map(_converted, self._stream)  # a DataLoader would take longer than the batch
        collate: Any = _converted
        options = {"prefetch_factor": self._config.prefetch_factor} if workers else {}
        return DataLoader(
            self._stream, batch_size=None, collate_fn=collate, num_workers=workers, pin_memory=pin_memory, **options
        )

    def state_dict(self) -> dict[str, str]:
        """Return the state after the last batch that was given out, equal on all ranks.

        It is one string of JSON, because torch.distributed.checkpoint looks up each key of a nested state by itself.
        """
        return {"state": json.dumps(self._state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batch of a state, with any data-parallel degree, local batch size and workers.

        Raises: StateError, CacheError E108: see `Stream.load_state_dict`.
        """
        try:
            state = json.loads(state_dict["state"])
        except (KeyError, TypeError, ValueError) as error:
            found = f"dataloader: {shortened(state_dict)}, expected the state of a StreamDataLoader"
            remedy = "checkpoint.exclude_from_loading = ['dataloader'] starts the data at its beginning"
            raise StateError(f"{found}. {remedy}") from error
        self._stream.load_state_dict(state, changed=self._config.changed)
        self._state, self._batches = self._stream.state_dict(), None


class SequenceSource(Configurable):
    """Rows of a stream by number, as `TextSequence(input_ids, labels, positions)`: int64 [T] each, without padding.

    In `SingleDatasetConfig(source=SequenceSource.Config(...))` without a processor, whose loader has shuffle=False. It
    gives each data-parallel rank a run of consecutive indices. So index i of rank r's run is row i * W + r of the
    stream: all ranks together read the rows of one global batch after another, the same ones on any number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """What a config function says."""

        T: int
        """`training.seq_len`, which torchtitan does not pass to a source."""
        sources: list[CacheRows] = field(default_factory=list)
        """See StreamDataLoader."""
        open: Annotated[Callable[..., Stream[Any]] | None, tyro.conf.Suppress] = None
        """Instead of sources: see StreamDataLoader."""
        seed: int = 42
        """Of the order."""
        block_size: int = 2048
        """See StreamDataLoader."""
        length: int | None = None
        """Rows, of as many epochs as that takes; None: one epoch. The loader's repeat begins again after them."""
        sequence: Annotated[Callable[..., Any] | None, tyro.conf.Suppress] = None
        """The class of a row; None: torchtitan.components.data.TextSequence."""

    def __init__(self, config: Config, *, dataset_iteration_policy: Any) -> None:
        """Open the stream. Raises: UsageError for a loader that shuffles; the errors of the streams."""
        if dataset_iteration_policy.shuffle:
            raise UsageError("rows of a stream are shuffled already: set GrainDataLoader.Config(shuffle=False)")
        self._sequence: Any = config.sequence
        if self._sequence is None:
            from torchtitan.components.data import TextSequence

            self._sequence = TextSequence
        is_endless = config.length is not None
        stream = _opened(config, infinite=is_endless, T=config.T, global_batch_size=1, rank=0, world_size=1)
        self._rows = RandomAccess(stream, length=config.length)
        self._world_size = dataset_iteration_policy.dp_world_size

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        """Return a row. Raises: IndexError; CacheError for an id outside the vocabulary."""
        index = range(len(self))[index]
        size, larger = divmod(len(self), self._world_size)  # of the ranks' runs; the first ones have a row more
        if index < larger * (size + 1):
            rank, place = divmod(index, size + 1)
        else:
            rank, place = divmod(index - larger, size)
        batch = self._rows[place * self._world_size + rank]
        inputs, labels, _ = _converted(batch)
        end = _tokens(batch)
        columns = {"input_ids": inputs["input"], "labels": labels, "positions": inputs["positions"]}
        return self._sequence(**{name: each[0, :end].numpy() for name, each in columns.items()})


def _tokens(batch: Batch) -> int:
    """Return how many tokens the only row of a batch has before its padding."""
    is_padding = batch.is_padding
    if batch.cu_seqlens is None or is_padding is None or not is_padding[-1]:
        return batch.x.shape[1]
    return int(batch.cu_seqlens[-2])
