"""Lightning: `StreamDataModule`, a data module whose position in the data is in every checkpoint of the Trainer.

Lightning makes batches ahead of the one that it trains on: one where the data has no length, and more with workers of a
DataLoader. So the position is not asked of the stream. It is `batch.state` of the last batch that was trained on, which
loads on any number of devices and workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from niels_gpt.sampling.stream import Stream
from niels_gpt.storage.errors import NoLength, StreamUseError


class StreamDataModule(LightningDataModule):
    """The batches of a stream, for `Trainer.fit(model, datamodule=...)`; `training_step` gets a `Batch`.

    A further fit goes on where the last one ended.

    A stream of some epochs is one epoch of Lightning: `Trainer(max_epochs=1)`. With `limit_train_batches` Lightning's
    epochs are parts of the stream, one after the other. One without end takes `max_steps`, or `limit_train_batches`.
    """

    def __init__(
        self,
        open_stream: Callable[[int, int], Stream[Any]],
        *,
        open_validation: Callable[[int, int], Iterable[Any]] | None = None,
        **loader: Any,
    ) -> None:
        """Keep the functions. Both get the rank of this process and the number of ranks, among those that share data.

        open_stream: returns the stream at its start; called where an epoch of Lightning begins.
        open_validation: returns the batches of one validation, such as `iter_eval(...)`.
        loader: arguments of the DataLoader for training, such as num_workers and pin_memory.
        """
        super().__init__()
        self._open_stream, self._open_validation, self._loader = open_stream, open_validation, loader
        if open_validation is not None:  # else the model's own val_dataloader is asked
            self.val_dataloader = self._validation  # type: ignore[method-assign]
        self._before: dict[str, Any] | None = None  # the state before the batch that was taken last
        self._after: dict[str, Any] | None = None  # and after it; None: the start of the stream
        self._taken = 0  # how many batches Lightning had begun when it took that one
        self._batch_size = 0  # of all batches until there; 0: not known, or it was changed

    def _ranks(self) -> tuple[int, int]:
        if self.trainer is None:
            raise StreamUseError("this data module has no Trainer: pass it to trainer.fit(model, datamodule=...)")
        ranks = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return ranks["rank"], ranks["num_replicas"]

    def train_dataloader(self) -> Iterable[Any]:
        """Return an iterable over the batches after the last one that was trained on.

        Raises: what open_stream and `Stream.load_state_dict` raise, as StateError for a state of other data;
            StreamUseError for a stream of another rank or world size, and for a training_step with `dataloader_iter`.
        """
        ranks = self._ranks()
        assert self.trainer is not None
        if "dataloader_iter" in inspect.signature(self.trainer.lightning_module.training_step).parameters:
            raise StreamUseError(
                "training_step(dataloader_iter) does not tell which batch is trained on, and a checkpoint needs its "
                "position: expected training_step(batch, batch_idx)"
            )

        def opened() -> tuple[Stream[Any], bool]:
            stream = self._open_stream(*ranks)
            if (stream.rank, stream.world_size) != ranks:
                found = f"rank {stream.rank} of {stream.world_size}"
                raise StreamUseError(f"open_stream{ranks} returned a stream of {found}: pass on both arguments")
            if self._after is None:
                self._batch_size = stream.global_batch_size
            else:
                stream.load_state_dict(self._after)
                self._batch_size *= self._batch_size == stream.global_batch_size
            return stream, self._batch_size > 0

        return _Batches(opened, self._loader)

    def _validation(self) -> Iterable[Any]:
        assert self._open_validation is not None
        return _Validation(self._open_validation, self._ranks())

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note the state of a batch that is now trained on. Lightning calls this in place of the model's hook."""
        if self.trainer is None:
            return batch
        if self.trainer.training:
            self._before, self._after = self._after, batch.state
            self._taken = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return self.trainer.lightning_module.on_before_batch_transfer(batch, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was trained on, equal on all ranks. Lightning calls this."""
        state = self._after
        if self.trainer is not None and self._after is not self._before:
            progress = self.trainer.fit_loop.epoch_loop.batch_progress
            current: Any = progress.current
            if progress.total.ready == self._taken or current.processed < current.ready:
                state = self._before  # an error came first, and this is the checkpoint of what was trained
        return {"stream": state, "global_batch_size": self._batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the position at which the stream is opened next. Lightning calls this."""
        self._before = self._after = state_dict["stream"]
        self._batch_size = state_dict["global_batch_size"]


class _Batches:
    """An iterable over a stream, opened again for each epoch of Lightning."""

    def __init__(self, opened: Callable[[], tuple[Stream[Any], bool]], loader: dict[str, Any]) -> None:
        self._opened, self._loader = opened, loader
        (self._stream, self._is_counted), self._is_new = opened(), True

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the stream's position on. Lightning also calls this to see whether it works."""
        if not self._is_new:
            self._stream, self._is_counted = self._opened()
        self._is_new, stream = False, self._stream
        if stream.consumed_samples == stream.num_samples:
            raise StreamUseError(
                f"the stream has ended: all of its {stream.num_samples} samples were trained on, and an epoch of "
                "Lightning is to begin. Pass Trainer(max_epochs=1), and to open_stream how many epochs to train on"
            )
        yield from DataLoader(stream, batch_size=None, **self._loader)

    def __len__(self) -> int:
        """Return the batches of the whole stream: Lightning counts on from the batches before a checkpoint.

        Raises: NoLength for a stream without end, and where earlier batches had another size.
        """
        if not self._is_counted:
            raise NoLength("batches of this run had another global_batch_size, so their number says nothing")
        return len(self._stream)

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
