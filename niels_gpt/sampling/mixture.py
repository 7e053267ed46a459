"""MixtureStream: several streams mixed by weights, each with its exact share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch

from niels_gpt.cache.mmap import TokenFiles
from niels_gpt.sampling.epochs import Epochs, LocatedWindows, Units, Windows
from niels_gpt.sampling.permutation import random_keys
from niels_gpt.sampling.shares import MAX_BLOCK, Stage, Weights, phases, stages_of
from niels_gpt.sampling.state import Origin, key_check, limited
from niels_gpt.sampling.stream import Located, Numbers, Samples, Stream
from niels_gpt.storage.errors import REBUILD, CacheError, StateError
from niels_gpt.storage.meta_json import checked_int, shortened

WhenExhausted = Literal["repeat", "stop"] | int
MIXTURE_VERSION = 2
"""Version of the order: increased when the same number means another sample. 1 rounded the counts of each block."""


class Mixture(Samples):
    """Samples of several sources by weight, in blocks, with exact shares; shares.py has the rules."""

    def __init__(
        self, sources: Sequence[Epochs], stages: list[Stage], block_size: int, when_exhausted: list[Any], seed: int
    ) -> None:
        self._sources, self.stages, self.block_size, self.seed = list(sources), stages, block_size, seed
        self.when_exhausted = when_exhausted
        self._keys = random_keys(seed, 1, purpose=1)
        self._join_files()
        self.begin(Origin(0, (0,) * len(self.sources)))

    def begin(self, origin: Origin) -> None:
        stops = [rule == "stop" for rule in self.when_exhausted]
        limits = self.limits()
        for number, (limit, stop, position) in enumerate(zip(limits, stops, origin.positions, strict=True)):
            if stop and limit is not None and position >= limit:
                raise StateError(f"streams[{number}] has had its epoch, and stops the mixture at once")
        found, stopped = phases(self.stages, limits, stops, self.block_size, origin)
        if not found:
            raise StateError(f"no source has samples left at sample {origin.sample}: allow more epochs")
        self._phases = found
        self.origin, self._key = origin, self._keys[0] + np.uint64(origin.sample)
        self._firsts: Numbers = np.array([phase.first for phase in self._phases])
        self._positions: dict[int, list[int]] = {}  # of each source, at the ends of the next batches
        self.num_samples = self._end(stopped)

    def _end(self, stopped: Sequence[int]) -> int | None:
        """Return the number of samples; None: without end. stopped: the sources that stop it in the last block."""
        last = self._phases[-1]
        if last.blocks is None:
            return None
        end = last.first + last.blocks * last.size
        if not stopped:
            return end
        sources, _ = last.located(np.arange(last.first, end), self._key)
        return last.first + min(int(np.flatnonzero(sources == s)[-1]) for s in stopped) + 1

    def limits(self) -> list[int | None]:
        found: list[int | None] = []
        for rule, source in zip(self.when_exhausted, self.sources, strict=True):
            epochs = {"repeat": None, "stop": 1}.get(rule) if isinstance(rule, str) else rule
            found.append(None if epochs is None else limited("when_exhausted", epochs, source.samples_per_epoch))
        return found

    @property
    def sources(self) -> list[Epochs]:
        return self._sources

    @property
    def weights(self) -> list[Any]:
        """Return the weight of each source, or [sample, weights] of each stage."""
        if len(self.stages) == 1:
            return list(self.stages[0].weights)
        return [[stage.first, list(stage.weights)] for stage in self.stages]

    def identity(self) -> dict[str, Any]:
        """Return the arguments and the sources' identities."""
        return {
            "stream": MIXTURE_VERSION,
            "seed": self.seed,
            "key_check": key_check(self._keys),
            "block_size": self.block_size,
            "weights": self.weights,
            "when_exhausted": self.when_exhausted,
            "sources": [source.identity() for source in self.sources],
        }

    def progress(self, consumed: int) -> dict[str, Any]:
        positions = self._positions.get(consumed)
        if positions is None:
            (positions,) = self._positions_at(np.array([consumed]))
        return {"consumed_samples": consumed, "positions": positions.copy()}

    def prepare(self, consumed: Numbers) -> None:
        self._positions = dict(zip(consumed.tolist(), self._positions_at(consumed), strict=True))

    def _positions_at(self, consumed: Numbers) -> list[list[int]]:
        """Return how many samples of each source come before each of these samples."""
        phase_of = np.maximum(self._firsts.searchsorted(consumed, side="right") - 1, 0)
        positions = np.empty((len(consumed), len(self.sources)), dtype=np.int64)
        for number in np.unique(phase_of).tolist():
            of_phase = phase_of == number
            positions[of_phase] = self._phases[number].positions(consumed[of_phase], self._key)
        found: list[list[int]] = positions.tolist()
        return found

    def counts_of(self, block: int) -> Numbers:
        """Return how many samples of each source a block has, counted from 0: int64 [sources]; zeros after the end."""
        phase = next(phase for phase in reversed(self._phases) if phase.first_block <= block)
        number = block - phase.first_block
        if phase.blocks is not None and number >= phase.blocks:
            return np.zeros(len(self.sources), dtype=np.int64)
        return np.array(phase.before(number + 1), dtype=np.int64) - np.array(phase.before(number), dtype=np.int64)

    def _join_files(self) -> None:
        """Join the files of plain windows, whose rows are then read by one call; not where a source has other rows."""
        plain = [of for source in self.sources if isinstance(of := source.units, Windows) and not of.documents]
        self._has_segments = len(plain) < len(self.sources)
        """Whether batches name segments: of all sources if one does, so that a batch of any rows has the same form."""
        self._joined: TokenFiles | None = None
        if self._has_segments or len({of.files.io for of in plain}) > 1:
            return
        files = [of.files for of in plain]
        self._joined, counts = TokenFiles.joined(files), [0, *(len(part.paths) for part in files)]
        self._first_files: Numbers = np.cumsum(counts)[:-1]
        self._to_places = self._joined.first_tokens - np.concatenate([part.first_tokens for part in files])
        """For each file, the number that turns a place in the files of its source into a place in the joined files."""
        self._vocab_size = next((of.vocab_size for of in plain if of.vocab_size is not None), None)

    def drawn(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the source of each sample, and its number in the source: int64 [n] both."""
        sources, within = np.empty((2, len(numbers)), dtype=np.int64)
        phase_of = self._firsts.searchsorted(numbers, side="right") - 1
        for number in np.unique(phase_of).tolist():
            of_phase = phase_of == number
            sources[of_phase], within[of_phase] = self._phases[number].located(numbers[of_phase], self._key)
        return sources, within

    def locate(self, numbers: Numbers) -> Located:
        sources, within = self.drawn(numbers)
        order = sources.astype(np.min_scalar_type(len(self.sources))).argsort(kind="stable")
        ends = np.cumsum(np.bincount(sources, minlength=len(self.sources))).tolist()
        at = [order[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        parts: list[Any] = [source.locate(within[some]) for source, some in zip(self.sources, at, strict=True)]
        if self._joined is None:
            return _Mixed(sources, list(zip(at, parts, strict=True)), self._has_segments)
        shards, places = np.empty((2, len(numbers)), dtype=np.int64)
        for some, part, first_file in zip(at, parts, self._first_files, strict=True):
            shards[some], places[some] = part.shards + first_file, part.places
        places += self._to_places[shards]
        T = self.sources[0].units.T
        return _Joined(sources, LocatedWindows(self._joined, self._vocab_size, T, shards, places))


class _Joined:
    """Located windows of all sources, read as if their files were of one split."""

    def __init__(self, sources: Numbers, windows: LocatedWindows) -> None:
        """sources: of each window: int64 [n]."""
        self._sources, self._windows = sources, windows

    def read(self, first: int, count: int, device: str) -> _Drawn:
        return _Drawn(self._windows.read(first, count, device), self._sources[first : first + count])


class _Mixed:
    """Located samples of sources of any kind."""

    def __init__(self, sources: Numbers, parts: list[tuple[Numbers, Located]], has_segments: bool) -> None:
        """sources: of each sample: int64 [n]. parts: of each source the places of its samples, ascending, and these."""
        self._sources, self._parts, self._has_segments = sources, parts, has_segments

    def read(self, first: int, count: int, device: str) -> _Drawn:
        read = []
        for at, located in self._parts:
            begin, end = at.searchsorted((first, first + count)).tolist()
            if end > begin:
                read.append((at[begin:end] - first, located.read(begin, end - begin, device)))
        if not read:  # an empty batch has a form, too
            read.append((np.zeros(0, dtype=np.int64), self._parts[0][1].read(0, 0, device)))
        rows = type(read[0][1]).interleaved(read, self._has_segments)
        return _Drawn(rows, self._sources[first : first + count])


class _Drawn:
    """Rows of a batch, and the source of each."""

    def __init__(self, rows: Any, sources: Numbers) -> None:
        self._rows, self._sources = rows, sources

    def batch(self, state: dict[str, Any]) -> Any:
        return self._rows.batch(state, torch.from_numpy(self._sources.copy()))


class MixtureStream(Stream[Any]):
    """Samples of several streams of one cache each, such as EpochStreams, by weight, in blocks.

    The counts of a block are integers; remainders are carried over to the next block, so that every source gets its
    exact share in the long run, however small. The seed decides which places of a block belong to which source, drawn
    for each block; the samples of a source keep their order. A sample depends only on its number, as in an EpochStream,
    and a rank computes only its samples. State, ranks and workers are as in an EpochStream.
    """

    def __init__(
        self,
        streams: Sequence[Stream[Any]],
        weights: Weights,
        *,
        seed: int,
        block_size: int = 2048,
        when_exhausted: WhenExhausted | Sequence[WhenExhausted] = "repeat",
        drop_last: bool = False,
    ) -> None:
        """Mix streams of the same T, global_batch_size, rank, world_size and device, which the mixture takes over.

        weights: of each stream, above 0 and at least 2 ** -32 of their sum. Only their ratios count, exactly as the
            decimal numbers that Python prints: 0.1 is a tenth. Or stages: [(0, [4, 1]), (100_000, [1, 1])]
            has other weights from sample 100,000 on, with exact shares within each stage. In a stage a weight may be
            0; a stage after the end of the mixture is never reached.
        when_exhausted: for all streams or for each: "repeat" its epochs without end; "stop" the mixture after one
            epoch; or a number of epochs, after which the other streams take its place. In the block in which a stream
            ends, the others fill its missing share, so the shares of a mixture that stops there are not exact.
        drop_last: when the mixture ends, skip the last batch if it is short.
        Raises: ValueError for arguments that do not fit together, CacheError for caches of different tokenizers.
        """
        if isinstance(streams, Stream):
            raise ValueError("streams is one stream, expected a sequence of them")
        self.streams = list(streams)
        self.stages = stages_of(weights, len(self.streams))
        self.block_size, self.seed = checked_int("block_size", block_size, 1), checked_int("seed", seed, -(2**63))
        if self.block_size > MAX_BLOCK:
            raise ValueError(f"block_size={block_size}: expected at most {MAX_BLOCK}")
        self.when_exhausted: list[Any] = [when_exhausted] * len(self.streams)
        if isinstance(when_exhausted, Sequence) and not isinstance(when_exhausted, str):
            self.when_exhausted = list(when_exhausted)
        self._check()
        first = self.streams[0]
        super().__init__(
            global_batch_size=first.global_batch_size,
            rank=first.rank,
            world_size=first.world_size,
            seed=self.seed,
            device=first.device,
            drop_last=drop_last,
        )
        self.samples: Mixture
        sources = self._sources_of()
        self.T = sources[0].units.T
        self._serve(Mixture(sources, self.stages, self.block_size, self.when_exhausted, self.seed))

    @property
    def counts(self) -> Numbers:
        """Samples of each source in the first block: int64 [sources]."""
        return self.counts_of(0)

    def _sources_of(self) -> list[Epochs]:
        return [cast(Epochs, stream.samples) for stream in self.streams]

    def _check(self) -> None:
        if not self.streams or len(self.when_exhausted) != len(self.streams):
            raise ValueError(
                f"{len(self.streams)} streams, {len(self.when_exhausted)} entries of when_exhausted: expected as many"
            )
        for number, rule in enumerate(self.when_exhausted):
            valid = rule in ("repeat", "stop") if isinstance(rule, str) else type(rule) is int and rule >= 1
            if not valid:
                raise ValueError(f"when_exhausted[{number}]={rule!r}: expected repeat, stop, or a number of epochs")
        stated: dict[str, tuple[Any, int]] = {}  # what a source does not say may fit
        for number, stream in enumerate(self.streams):
            if not isinstance(getattr(stream, "samples", None), Epochs):
                raise ValueError(f"streams[{number}] is a {type(stream).__name__}, expected a stream of one cache")
            if stream.samples.origin.sample:
                raise ValueError(f"streams[{number}] continues a changed run: open it again, without a state")
            if stream.epochs is not None:
                raise ValueError(f"streams[{number}] has epochs={stream.epochs}: pass it in when_exhausted")
            for name, value in self._form(stream).items():
                expected, first = stated.setdefault(name, (value, number))
                if value != expected:
                    found = f"{name}={shortened(value)}, expected {shortened(expected)} as in streams[{first}]"
                    raise ValueError(f"streams[{number}] has {found}")
        for source in self._sources_of():
            self._check_tokenizer(source.units)

    @staticmethod
    def _form(stream: Stream[Any]) -> dict[str, Any]:
        """Return what streams of a mixture have in common."""
        units = cast(Epochs, stream.samples).units
        arguments = {name: getattr(stream, name) for name in ("global_batch_size", "rank", "world_size", "device")}
        return {**units.form(), "T": units.T, **arguments}

    def _check_tokenizer(self, units: Units) -> None:
        """Raise CacheError E402 if meta.json shows that a source and another one have different tokenizers."""
        mine = units.fingerprint()["tokenizer_sha256"], units.vocab_size
        for other in (source.units for source in self._sources_of()):
            theirs = other.fingerprint()["tokenizer_sha256"], other.vocab_size
            if any(one != two and None not in (one, two) for one, two in zip(mine, theirs, strict=True)):
                raise CacheError(
                    units.folder,
                    f"ids of tokenizer {str(mine[0])[:12]} (vocab_size {mine[1]})",
                    f"tokenizer {str(theirs[0])[:12]} (vocab_size {theirs[1]}) as in {other.folder}",
                    REBUILD,
                    code="E402",
                )

    @property
    def weights(self) -> list[Any]:
        """Return the weight of each stream, or [sample, weights] of each stage."""
        return self.samples.weights

    def _weights_of(self, source: int) -> str:
        """Return the weights of a source: 4.0, from sample 100,000 on 1.0."""
        later = [f", from sample {stage.first:,} on {stage.weights[source]}" for stage in self.stages[1:]]
        return f"{self.stages[0].weights[source]}{''.join(later)}"

    def __repr__(self) -> str:
        """Return the caches and their weights, the shape of a batch, the rank and the position."""
        parts = [f"{self._weights_of(number)} {_named(stream)}" for number, stream in enumerate(self.streams)]
        return f"MixtureStream({'; '.join(parts)}; {self._described()})"

    def _rows(self) -> str:
        return self.streams[0]._rows()

    def _sources(self) -> dict[str, object]:
        return {
            f"source {number}": f"weight {self._weights_of(number)}: {_named(of)}"
            for number, of in enumerate(self.streams)
        }

    def counts_of(self, block: int) -> Numbers:
        """Return how many samples of each source a block has, counted from 0: int64 [sources]; zeros after the end.

        Two blocks of the same sources differ by the remainders that are carried over. A block in which a source with
        "stop" ends is only served up to the last sample of that source.
        """
        return self.samples.counts_of(checked_int("block", block, 0))


def _named(stream: Stream[Any]) -> str:
    return f"{type(stream).__name__} of {cast(Epochs, stream.samples).units.name}"
