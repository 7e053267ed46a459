"""RolloutStream: epochs of a rollout cache as bins, forests of several groups under a token budget.

An epoch is a seeded permutation of the groups, cut into windows of about 32 bins; `plan_bins` packs the groups of a
window. All of it is decided on the numbers of the index, so every rank and worker knows all bins, and reads the tokens
of its own only. A position is the number of samples that all ranks have consumed, and every bin ends at one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from niels_gpt.cache.mmap import public_file, public_name
from niels_gpt.cache.reader import Opening
from niels_gpt.prefix_tree.bins import SampleSizes, plan_bins
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset, values_of
from niels_gpt.prefix_tree.rollouts.records import PER_SAMPLE, Ints, Sample
from niels_gpt.sampling.permutation import ROUNDS, permute, random_keys
from niels_gpt.sampling.state import key_check, limited
from niels_gpt.sampling.stream import Stream
from niels_gpt.storage.errors import REBUILD, CacheError, NoLength, StateError
from niels_gpt.storage.meta_json import checked_int

STREAM_VERSION = 1
"""Raised when the same seed gives other bins, as after a change of `plan_bins`: a state would mean other samples."""

_WINDOW_BINS = 32
_ROWS_AHEAD = 64  # planned ahead of those that are read, of a cache at a URL
_PURPOSE = 21  # of the keys: another order than that of an EpochStream with the same seed


@dataclass(frozen=True, eq=False, repr=False)
class RolloutBin:
    """S samples of some groups as one row; fields as in its LossEdges. `groups` and `samples` stay on the CPU."""

    forest: PrefixForest
    groups: Tensor
    """int64 [S]: the group of each sample in the cache. Samples of a group stand side by side."""
    samples: Tensor
    """int64 [S]: the number of each sample in the split, for `RolloutDataset.locate`. Empty for filler."""
    fields: Mapping[str, Tensor]
    """float32 [M] for each field of the cache: the value of each supervised token, as in `LossEdges.sample_edge`."""
    sample_fields: Mapping[str, Tensor]
    """float32 [S]: `advantage` and `reward`, where the cache has them by sample."""
    loss_tokens: int
    """M, the supervised tokens of this row."""
    step_loss_tokens: int
    """Targets in the rows of all ranks in this step: a mean over tokens divides a sum by it. May be 0."""
    step_samples: int
    """The samples of all ranks in this step."""
    state: dict[str, Any]
    """The stream's `state_dict` after this step, the same on every rank."""

    @property
    def is_filler(self) -> bool:
        """Whether the last step had no bin left for this rank: a sample without targets, so that all ranks run."""
        return not len(self.samples)

    @property
    def advantages(self) -> Tensor:
        """Return the advantage of each supervised token, given by token or by sample: [M]. Raises: KeyError."""
        return self.fields["advantages" if "advantages" in self.fields else "advantage"]

    def __repr__(self) -> str:
        """Return the sizes."""
        groups = len(set(self.groups.tolist()))
        return f"RolloutBin({self.forest!r}, {groups} groups, {self.loss_tokens} supervised tokens)"

    def to(self, device: torch.device | str) -> RolloutBin:
        """Return the bin with its forest and fields on a device; `groups` and `samples` stay where they are."""
        fields, of_samples = ({k: v.to(device) for k, v in each.items()} for each in (self.fields, self.sample_fields))
        return replace(self, forest=self.forest.to(device), fields=fields, sample_fields=of_samples)


class _Part(NamedTuple):
    """Some samples of a group."""

    group: int
    samples: Ints  # their rising numbers in the group
    is_whole: bool


class _Planned(NamedTuple):
    """A bin that is not read yet."""

    parts: list[_Part]
    samples: int
    loss_tokens: int
    tokens: int  # of the row, folded


class _Epoch(NamedTuple):
    """The order of an epoch: its groups, and where windows begin among them and among their samples."""

    order: Ints
    starts: Ints  # [windows + 1]
    samples: Ints  # [windows + 1]


class _Row(NamedTuple):
    """The parts of a rank's bin."""

    planned: _Planned
    is_filler: bool
    step_loss_tokens: int
    step_samples: int


class RolloutStream(Stream[RolloutBin]):
    """Bins of a split, epoch after epoch: each sample exactly once an epoch, and a group in one bin where it fits.

    A step is the next `world_size` bins; rank r gets the r-th of them, so all ranks have the same number. The bins of a
    window come in falling size, more or less: rows of a step are about equal, except the last bins of a window, which
    may be small, and for a step that crosses into the next window. Where the last step of the stream has fewer bins
    than ranks, the others get filler. The state is the same on every rank, and a run may resume with other ranks and
    workers. See docs/rollouts.md.
    """

    def __init__(
        self,
        cache: str | os.PathLike[str],
        max_tokens: int,
        *,
        split: str | None = None,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        oversize: str = "error",
        **opening: Unpack[Opening],
    ) -> None:
        """cache, split, opening: see `RolloutDataset`.

        max_tokens: the most tokens of a row after folding. A larger group is cut into several bins.
        epochs: how many until the stream ends; None: never.
        oversize: for a sample with more than max_tokens: "error" refuses the cache here, "own_bin" exceeds the budget.

        Raises:
            FileNotFoundError, CacheError: as `RolloutDataset`.
            ValueError: a number out of range, or a sample above the budget.
        """
        world_size = checked_int("world_size", world_size, 1)
        super().__init__(global_batch_size=world_size, rank=rank, world_size=world_size, seed=seed, epochs=epochs)
        self.max_tokens = checked_int("max_tokens", max_tokens, 1)
        if oversize not in ("error", "own_bin"):
            raise ValueError(f"oversize={oversize!r}: expected 'error' or 'own_bin'")
        self.oversize = oversize
        self._keys = random_keys(self.seed, ROUNDS, purpose=_PURPOSE)
        self.dataset = RolloutDataset(cache, split, **opening)
        self.samples_per_epoch = len(self.dataset.samples)
        self._end = None if self.epochs is None else limited("epochs", self.epochs, self.samples_per_epoch)
        lengths = self.dataset.samples[:, 0]
        if oversize == "error" and lengths.max() > self.max_tokens:
            group, number = self.dataset.locate(int(lengths.argmax()))
            raise ValueError(
                f"{public_name(self.dataset.folder)}: sample {number} of group {group} has "
                f"{lengths.max()} tokens, and {int((lengths > self.max_tokens).sum())} samples are above "
                f"max_tokens={self.max_tokens}. Raise max_tokens, or pass oversize='own_bin'"
            )

    def __repr__(self) -> str:
        """Return the cache, the budget, the rank and the position."""
        of = f"rank {self.rank} of {self.world_size}, consumed_samples={self._consumed}"
        return f"RolloutStream({self.dataset!r}, bins of {self.max_tokens:,} tokens, {of})"

    def _rows(self) -> str:
        return f"a bin of {self.max_tokens:,} tokens at most"

    def _sources(self) -> dict[str, object]:
        return {"cache": repr(self.dataset)}

    @property
    def num_samples(self) -> int | None:
        """Samples of rollouts until the stream ends; None: without end."""
        return self._end

    def __len__(self) -> int:
        """Return the number of steps from the first sample to the end, the same on every rank. It plans all epochs.

        Raises: NoLength (a TypeError, E109) for a stream without end.
        """
        if self.num_samples is None:
            raise NoLength("this RolloutStream has no end and no length. Count steps instead")
        return sum(1 for _ in self._steps(0))

    def identity(self) -> dict[str, Any]:
        """Return what decides the bins: the stream's arguments and the content of its split."""
        arguments = {"stream": STREAM_VERSION, "seed": self.seed, "key_check": key_check(self._keys)}
        return {
            **arguments,
            "max_tokens": self.max_tokens,
            "oversize": self.oversize,
            **self.dataset.fingerprint(),
        }

    def _progress(self, consumed: int) -> dict[str, int]:
        return {"epoch": consumed // self.samples_per_epoch, "consumed_samples": consumed}

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_other_content: bool = False, changed: bool = False
    ) -> None:
        """Resume exactly where a state was taken, with any rank, world_size and number of workers.

        allow_other_content: resume in a cache of other content, at the last bin that ends at or before that number of
            samples.
        changed: refused: a change would begin a new epoch, which a new stream does, too.
        Raises: the errors of `Stream.load_state_dict`; ValueError for a position inside a bin, and for changed.
        """
        if changed:
            raise StateError("changed=True: a RolloutStream cannot change in a run. Open a new one, without a state")
        before = self._consumed
        self._load(state, allow_other_content)
        at = self._bin_begin(self._consumed)
        if at != self._consumed and not allow_other_content:
            found, self._consumed = self._consumed, before
            raise StateError(f"state: consumed_samples is {found}, inside a bin that begins at {at}: it was edited")
        self._consumed = at

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _epoch(self, number: int) -> _Epoch:
        count, groups = len(self.dataset), self.dataset.groups
        order = permute(np.arange(count), count, self._keys, np.array([number]))
        tokens, samples = np.cumsum(groups[order, 7]), np.cumsum(groups[order, 1])
        window = (tokens - groups[order, 7]) // (_WINDOW_BINS * self.max_tokens)
        starts = np.append(np.flatnonzero(np.diff(window, prepend=-1)), count)
        return _Epoch(order, starts, np.append(0, samples)[starts])

    def _bins(self, epoch: _Epoch, window: int) -> list[_Planned]:
        """Return the bins of a window of an epoch, from the largest to the smallest or so."""
        groups = epoch.order[epoch.starts[window] : epoch.starts[window + 1]]
        firsts, counts = self.dataset.groups[groups, :2].T
        offsets = np.append(0, np.cumsum(counts))
        rows = np.arange(offsets[-1]) + (firsts - offsets[:-1]).repeat(counts)
        _, _, _, order, shared = self.dataset.samples[rows].T
        numbers = firsts.repeat(counts) + order  # of the sorted samples
        lengths, _, targets = self.dataset.samples[numbers, :3].T
        plan = plan_bins(SampleSizes(lengths, shared, offsets), self.max_tokens, oversize=self.oversize)
        group = np.repeat(np.arange(len(groups)), counts)
        bins = []
        for places, tokens in zip(plan.bins, plan.tokens, strict=True):
            parts = []
            for some in np.split(places, np.flatnonzero(np.diff(group[places])) + 1):
                at = int(group[some[0]])
                parts.append(_Part(int(groups[at]), np.sort(order[some]), len(some) == counts[at]))
            bins.append(_Planned(parts, len(places), int(targets[places].sum()), tokens))
        return bins

    def _planned(self, base: int) -> Iterator[tuple[_Planned, int]]:
        """Yield the bins from the one that begins at a position on, each with the samples consumed after it."""
        number, inside = divmod(base, self.samples_per_epoch)
        while self.epochs is None or number < self.epochs:
            epoch = self._epoch(number)
            first = int(epoch.samples.searchsorted(inside, side="right")) - 1
            for window in range(first, len(epoch.starts) - 1):
                at = int(epoch.samples[window])
                for planned in self._bins(epoch, window):
                    begins, at = at, at + planned.samples
                    if begins >= inside:
                        yield planned, number * self.samples_per_epoch + at
            number, inside = number + 1, 0

    def _bin_begin(self, consumed: int) -> int:
        """Return the position of the last bin that begins at or before one."""
        number, inside = divmod(consumed, self.samples_per_epoch)
        if not inside:
            return consumed
        epoch = self._epoch(number)
        window = int(epoch.samples.searchsorted(inside, side="right")) - 1
        sizes = [planned.samples for planned in self._bins(epoch, window)]
        begins = int(epoch.samples[window]) + np.append(0, np.cumsum(sizes))
        return number * self.samples_per_epoch + int(begins[begins <= inside].max())

    def _steps(self, base: int) -> Iterator[tuple[list[_Planned], int]]:
        """Yield the bins of each step, at most one for each rank, and the samples consumed after it."""
        bins = self._planned(base)
        while step := list(islice(bins, self.world_size)):
            yield [planned for planned, _ in step], step[-1][1]

    def _work(self, base: int, worker: int, workers: int) -> Iterator[tuple[_Row, int, int]]:
        rows = self._own_rows(base, worker, workers)
        if not self.dataset.is_fetched:
            yield from rows
            return
        ahead = deque(islice(rows, _ROWS_AHEAD))
        while ahead:
            groups = [part.group for row, _, _ in ahead for part in row.planned.parts]
            self.dataset.will_read(np.array(groups))
            for _ in range(-(-len(ahead) // 2)):
                yield ahead.popleft()
            ahead.extend(islice(rows, _ROWS_AHEAD - len(ahead)))

    def _own_rows(self, base: int, worker: int, workers: int) -> Iterator[tuple[_Row, int, int]]:
        steps = self._steps(base)
        while turn := list(islice(steps, workers)):
            if worker < len(turn):
                bins, consumed = turn[worker]
                sums = sum(planned.loss_tokens for planned in bins), sum(planned.samples for planned in bins)
                is_filler = self.rank >= len(bins)
                yield _Row(bins[0 if is_filler else self.rank], is_filler, *sums), consumed, turn[-1][1]

    # --- the tokens ---------------------------------------------------------------------------------------------------

    def _batch(self, work: _Row, state: dict[str, Any]) -> RolloutBin:
        parts = work.planned.parts
        if work.is_filler:
            parts = [_Part(parts[0].group, parts[0].samples[:1], False)]
        read = [self.dataset.read(part.group, part.samples.tolist()) for part in parts]
        if work.is_filler:
            read = [[sample._replace(loss_mask=np.zeros_like(sample.loss_mask)) for sample in read[0]]]
        folded = self.dataset.folded
        forest = PrefixForest.joined(
            [folded(part.group, some, part.is_whole) for part, some in zip(parts, read, strict=True)]
        )
        if not work.is_filler and forest.num_tokens != work.planned.tokens:
            path = public_file(self.dataset.folder / f"index/{self.dataset.split}_samples.npy")
            found = (
                f"lcp: samples of groups {[part.group for part in parts][:9]} fold into {work.planned.tokens} tokens"
            )
            raise CacheError(path, found, f"{forest.num_tokens} by their ids", REBUILD, code="E203")
        samples = [sample for some in read for sample in some]
        numbers = np.concatenate([part.samples + self.dataset.groups[part.group, 0] for part in parts])
        groups = np.repeat([part.group for part in parts], [len(part.samples) for part in parts])
        none = slice(0, 0) if work.is_filler else slice(None)
        single = [name for name in self.dataset.fields if name in PER_SAMPLE]
        return RolloutBin(
            forest=forest,
            groups=torch.from_numpy(groups[none]),
            samples=torch.from_numpy(numbers[none]),
            fields={name: _of_targets(samples, name) for name in self.dataset.fields},
            sample_fields={
                name: torch.from_numpy(np.concatenate([sample.fields[name] for sample in samples])) for name in single
            },
            loss_tokens=0 if work.is_filler else work.planned.loss_tokens,
            step_loss_tokens=work.step_loss_tokens,
            step_samples=work.step_samples,
            state=state,
        )


def _of_targets(samples: list[Sample], name: str) -> Tensor:
    """Return a field of each supervised token, sample by sample: no row predicts the first token of a sample."""
    found = []
    for sample in samples:
        wanted = sample.loss_mask.copy()
        wanted[0] = False
        values = values_of(sample, name)
        found.append(values.repeat(wanted.sum()) if name in PER_SAMPLE else values[wanted])
    return torch.from_numpy(np.concatenate(found))
