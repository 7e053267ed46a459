"""Lightning: `StreamDataModule`, a data module whose position in the data is in every checkpoint of the Trainer.

Lightning makes batches ahead of the one that it trains on: one where the data has no length, and more with workers of a
DataLoader. So the position is not asked of the stream. It is `batch.state` of the last batch that was trained on, which
loads on any number of devices and workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from niels_gpt.sampling.stream import Stream
from niels_gpt.storage.errors import NoLength, StateError, StreamUseError


class StreamDataModule(LightningDataModule):
    """The batches of a stream, for `Trainer.fit(model, datamodule=...)`; `training_step` gets a `Batch`.

    A further fit continues where the last one ended.

    A stream of some epochs is one epoch of Lightning: `Trainer(max_epochs=1)`. With `limit_train_batches` Lightning's
    epochs are parts of the stream, one after the other. The last part may be shorter: Lightning, which counts to the
    limit, does not validate after it. A stream without end takes `max_steps`, or `limit_train_batches`.
    """

    def __init__(
        self,
        open_stream: Callable[[int, int], Stream[Any]],
        *,
        open_validation: Callable[[int, int], Iterable[Any]] | None = None,
        changed: bool = False,
        **loader: Any,
    ) -> None:
        """Keep the functions. Both get the rank of this process and the number of ranks, among those that share data.

        open_stream: returns the stream at its start; called where an epoch of Lightning begins.
        open_validation: returns the batches of one validation, such as `iter_eval(...)`.
        changed: continue a run with another T, seed, or other sources or weights: see `Stream.load_state_dict`.
        loader: arguments of the DataLoader for training, such as num_workers and pin_memory.
        Raises: StreamUseError for an argument that would change batches or their order.
        """
        super().__init__()
        if taken := loader.keys() & {"batch_size", "collate_fn", "in_order"}:
            raise StreamUseError(
                f"{', '.join(sorted(taken))} of the DataLoader: batches and their order are the stream's. Change "
                "them in open_stream, or in training_step"
            )
        self._open_stream, self._open_validation, self._loader = open_stream, open_validation, loader
        self._changed = changed
        if open_validation is not None:  # else the model's own val_dataloader is asked
            self.val_dataloader = self._validation  # type: ignore[method-assign]
        self._before: dict[str, Any] | None = None  # the state before the batch that was taken last
        self._after: dict[str, Any] | None = None  # and after it; None: the start of the stream
        self._total: Any = None  # Lightning's counts of batches, which it keeps up to date
        self._counts = 0, 0  # of those that were started and processed before that one

    def _ranks(self) -> tuple[int, int]:
        if self.trainer is None:
            raise StreamUseError("this data module has no Trainer: pass it to trainer.fit(model, datamodule=...)")
        ranks = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return ranks["rank"], ranks["num_replicas"]

    def train_dataloader(self) -> Iterable[Any]:
        """Return an iterable over the batches after the last one that was trained on.

        Raises: what open_stream and `Stream.load_state_dict` raise, as StateError for a state of other data; StateError
            for a checkpoint without a position; StreamUseError for a stream of another rank or world size, for
            `overfit_batches`, and for a training_step with `dataloader_iter`.
        """
        ranks, trainer = self._ranks(), cast(Any, self.trainer)
        if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
            raise StreamUseError(
                "training_step(dataloader_iter) does not tell which batch is trained on, and a checkpoint needs its "
                "position: expected training_step(batch, batch_idx)"
            )
        if trainer.overfit_batches:
            raise StreamUseError("overfit_batches: each epoch of Lightning takes the stream's next batches")
        loop = trainer.fit_loop
        if loop.restarting and loop.epoch_loop.batch_progress.total.processed and self._after is None:
            raise StateError(
                f"the checkpoint was trained on batches, and has no position of a {type(self).__name__}. To start the "
                "data at its beginning, load the model's weights alone, without ckpt_path"
            )

        def opened() -> Stream[Any]:
            stream = self._open_stream(*ranks)
            if (stream.rank, stream.world_size) != ranks:
                found = f"rank {stream.rank} of {stream.world_size}"
                raise StreamUseError(f"open_stream{ranks} returned a stream of {found}: pass on both arguments")
            self._before = self._after = self._position()
            if self._after is not None:
                stream.load_state_dict(self._after, changed=self._changed)
            return stream

        def counted() -> tuple[int, int]:
            """Return how many batches of Lightning's epoch were trained on, and samples of the stream."""
            position = self._position()
            trained = loop.epoch_loop.batch_progress.current.processed if loop.restarting else 0
            return trained, 0 if position is None else position["consumed_samples"]

        return _Batches(opened, counted, self._loader)

    def _validation(self) -> Iterable[Any]:
        assert self._open_validation is not None
        return _Validation(self._open_validation, self._ranks())

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note the state of a batch that is now trained on. Lightning calls this in place of the model's hook."""
        if self.trainer is None:
            return batch
        if self.trainer.training:
            self._before, self._after = self._position(), batch.state
            self._total = self.trainer.fit_loop.epoch_loop.batch_progress.total
            self._counts = self._total.started, self._total.processed
        return self.trainer.lightning_module.on_before_batch_transfer(batch, dataloader_idx)

    def _position(self) -> dict[str, Any] | None:
        """Return the state after the last batch that was trained on: not the one taken last if an error came first."""
        if self._after is self._before:
            return self._after
        started, processed = self._counts
        return self._after if self._total.started > started and self._total.processed > processed else self._before

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was trained on, equal on all ranks. Lightning calls this."""
        return {"stream": self._position()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the position at which the stream is opened next. Lightning calls this."""
        self._before = self._after = state_dict["stream"]


class _Batches:
    """An iterable over a stream, opened again for each epoch of Lightning."""

    def __init__(
        self, opened: Callable[[], Stream[Any]], counted: Callable[[], tuple[int, int]], loader: dict[str, Any]
    ) -> None:
        self._opened, self._counted, self._loader = opened, counted, loader
        self._stream, self._is_new = opened(), True

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the position on. Lightning also calls this to see whether it works, and takes none.

        Raises: StreamUseError where the stream has ended: the epoch would be empty.
        """
        if not self._is_new:
            self._stream = self._opened()
        self._is_new, stream = False, self._stream
        if stream.num_samples is not None and not self._left():
            raise StreamUseError(
                f"the stream has ended after its {stream.num_samples} samples, and an epoch of Lightning is to begin. "
                "Pass Trainer(max_epochs=1), and to open_stream how many epochs to train on"
            )
        yield from DataLoader(stream, batch_size=None, **self._loader)

    def __len__(self) -> int:
        """Return the batches of this epoch of Lightning, if nothing limits it: those before a checkpoint and the rest.

        At least 1: after the end Lightning shall ask for a batch, and get the error. Raises: NoLength.
        """
        return max(1, self._counted()[0] + self._left())

    def _left(self) -> int:
        """Return how many batches are not trained on yet. Raises: NoLength for a stream without end."""
        stream, consumed = self._stream, self._counted()[1]
        if stream.num_samples is None:
            raise NoLength(f"this {type(stream).__name__} has no end and no length")
        left = stream.num_samples - consumed + (0 if stream.drop_last else stream.global_batch_size - 1)
        return left // stream.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the data module has the position. Lightning warns of a loader without these two methods."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class _Validation:
    def __init__(self, open_validation: Callable[[int, int], Iterable[Any]], ranks: tuple[int, int]) -> None:
        self._open, self._ranks = open_validation, ranks

    def __iter__(self) -> Iterator[Any]:
        yield from self._open(*self._ranks)
