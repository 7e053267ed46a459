"""MixtureStream: several streams mixed by weights, each with its exact share."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.mmap import TokenFiles
from niels_gpt.cache.pretrain_dataset import gathered, split_rows
from niels_gpt.sampling.batch import Batch, Rows, Segments
from niels_gpt.sampling.changes import continued, is_unchanged, origin_of
from niels_gpt.sampling.epochs import EpochStream
from niels_gpt.sampling.permutation import random_keys
from niels_gpt.sampling.position import ResumableStream
from niels_gpt.sampling.shares import MAX_BLOCK, Origin, Weights, phases, stages_of
from niels_gpt.sampling.state import check_identity, key_check, limited
from niels_gpt.sampling.stream import CacheStream, SampleStream
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import REBUILD, CacheError, StateError
from niels_gpt.storage.meta_json import checked_int

WhenExhausted = Literal["repeat", "stop"] | int
MIXTURE_VERSION = 2
"""Version of the order: increased when the same number means another sample. 1 rounded the counts of each block."""


class MixtureStream(SampleStream):
    """Samples of several streams of one cache each, such as EpochStreams, by weight, in blocks.

    The counts of a block are integers; remainders are carried over to the next block, so that every source gets its
    exact share in the long run, however small. The seed decides which places of a block belong to which source, drawn
    for each block; the samples of a source keep their order. A sample follows from its number alone, as in an
    EpochStream, and a rank computes only its samples. State, ranks and workers are as in an EpochStream.
    """

    def __init__(
        self,
        streams: Sequence[CacheStream],
        weights: Weights,
        *,
        seed: int,
        block_size: int = 2048,
        when_exhausted: WhenExhausted | Sequence[WhenExhausted] = "repeat",
        drop_last: bool = False,
    ) -> None:
        """Mix streams of the same T, global_batch_size, rank, world_size and device, which the mixture takes over.

        weights: of each stream, above 0 and at least 2 ** -32 of their sum. Only their ratios count, exactly those of
            the decimal numbers that Python prints for them: 0.1 is a tenth. Or stages: [(0, [4, 1]), (100_000, [1, 1])]
            has other weights from sample 100,000 on, with exact shares within each stage. In a stage a weight may be
            0; a stage after the end of the mixture is never reached.
        when_exhausted: for all streams or for each: "repeat" its epochs without end; "stop" the mixture after one
            epoch; or a number of epochs, after which the other streams take its place. In the block in which a stream
            ends, the others fill what it lacks of its share: so the shares of a mixture that stops there are not exact.
        drop_last: when the mixture ends, skip the last batch if it is short.
        Raises: ValueError for arguments that do not fit together, CacheError for caches of different tokenizers.
        """
        if isinstance(streams, CacheStream):
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
            device=first.device,
            drop_last=drop_last,
        )
        self.T = first.T
        self._keys = random_keys(self.seed, 1, purpose=1)
        self._joined = self._joined_files()
        self._begin(Origin(0, (0,) * len(self.streams)))
        self._check_left()
        self._warn_of_last_batch()

    def _begin(self, origin: Origin) -> None:
        """Let the mixture begin at a sample of a run. Raises: ValueError if its stages or sources do not last."""
        stops = [rule == "stop" for rule in self.when_exhausted]
        limits = self._limits()
        for number, (limit, stop, position) in enumerate(zip(limits, stops, origin.positions, strict=True)):
            if stop and limit is not None and position >= limit:
                raise StateError(f"streams[{number}] has had its epoch, and stops the mixture at once")
        found, stopped = phases(self.stages, limits, stops, self.block_size, origin)
        if not found:
            raise StateError(f"no source has samples left at sample {origin.sample}: allow more epochs")
        self._phases = found
        self._origin, self._key = origin, self._keys[0] + np.uint64(origin.sample)
        self._firsts: NDArray[np.int64] = np.array([phase.first for phase in self._phases])
        self._positions: dict[int, list[int]] = {}  # of each source, at the ends of the next batches
        self.counts = self.counts_of(0)
        """Samples of each source in the first block: int64 [sources]."""
        self.num_samples = self._end(stopped)

    def _check(self) -> None:
        if not self.streams or len(self.when_exhausted) != len(self.streams):
            raise ValueError(
                f"{len(self.streams)} streams, {len(self.when_exhausted)} entries of when_exhausted: expected as many"
            )
        for number, rule in enumerate(self.when_exhausted):
            valid = rule in ("repeat", "stop") if isinstance(rule, str) else type(rule) is int and rule >= 1
            if not valid:
                raise ValueError(f"when_exhausted[{number}]={rule!r}: expected repeat, stop, or a number of epochs")
        first = self.streams[0]
        for number, stream in enumerate(self.streams):
            if not isinstance(stream, CacheStream):
                raise ValueError(f"streams[{number}] is a {type(stream).__name__}, expected a stream of one cache")
            if stream.epochs is not None:
                raise ValueError(f"streams[{number}] has epochs={stream.epochs}: pass it in when_exhausted")
            for name in ("T", "global_batch_size", "rank", "world_size", "device"):
                if getattr(stream, name) != getattr(first, name):
                    raise ValueError(
                        f"streams[{number}] has {name}={getattr(stream, name)}, expected {getattr(first, name)} as in "
                        "streams[0]"
                    )
            self._check_tokenizer(stream)

    def _check_tokenizer(self, stream: CacheStream) -> None:
        """Raise CacheError if meta.json shows that a stream and another one have different tokenizers."""
        mine = stream.split.fingerprint()["tokenizer_sha256"], stream.split.vocab_size
        for other in self.streams:
            theirs = other.split.fingerprint()["tokenizer_sha256"], other.split.vocab_size
            if any(one != two and None not in (one, two) for one, two in zip(mine, theirs, strict=True)):
                raise CacheError(
                    stream.folder,
                    f"ids of tokenizer {str(mine[0])[:12]} (vocab_size {mine[1]})",
                    f"tokenizer {str(theirs[0])[:12]} (vocab_size {theirs[1]}) as in {other.folder}",
                    REBUILD,
                    code="E402",
                )

    def _limits(self) -> list[int | None]:
        """Return the total number of samples of each source; None: without end."""
        epochs = [
            {"repeat": None, "stop": 1}.get(rule) if isinstance(rule, str) else rule for rule in self.when_exhausted
        ]
        return [
            None if n is None else limited("when_exhausted", n, stream.samples_per_epoch)
            for n, stream in zip(epochs, self.streams, strict=True)
        ]

    @property
    def weights(self) -> list[Any]:
        """Return the weight of each stream, or [sample, weights] of each stage."""
        if len(self.stages) == 1:
            return list(self.stages[0].weights)
        return [[stage.first, list(stage.weights)] for stage in self.stages]

    def _weights_of(self, source: int) -> str:
        """Return the weights of a source: 4.0, from sample 100,000 on 1.0."""
        later = [f", from sample {stage.first:,} on {stage.weights[source]}" for stage in self.stages[1:]]
        return f"{self.stages[0].weights[source]}{''.join(later)}"

    def __repr__(self) -> str:
        """Return the caches and their weights, the shape of a batch, the rank and the position."""
        parts = [f"{self._weights_of(number)} {_named(stream)}" for number, stream in enumerate(self.streams)]
        return f"MixtureStream({'; '.join(parts)}; {self._described()})"

    def _sources(self) -> dict[str, object]:
        return {
            f"source {number}": f"weight {self._weights_of(number)}: {_named(of)}"
            for number, of in enumerate(self.streams)
        }

    def identity(self) -> dict[str, Any]:
        """Return what decides which window of which source a sample is: the arguments, and the streams' identities.

        Of a mixture that resumed a changed run also its origin.
        """
        origin = {"sample": self._origin.sample, "positions": list(self._origin.positions)}
        return {
            "stream": MIXTURE_VERSION,
            "seed": self.seed,
            "key_check": key_check(self._keys),
            "block_size": self.block_size,
            "weights": self.weights,
            "when_exhausted": self.when_exhausted,
            "sources": [stream.identity() for stream in self.streams],
            **({"origin": origin} if self._origin.sample else {}),
        }

    def _progress(self, consumed: int) -> dict[str, Any]:
        positions = self._positions.get(consumed)
        if positions is None:
            (positions,) = self._positions_at(np.array([consumed]))
        return {"consumed_samples": consumed, "positions": positions.copy()}

    def _prepare(self, consumed: NDArray[np.int64]) -> None:
        self._positions = dict(zip(consumed.tolist(), self._positions_at(consumed), strict=True))

    def _positions_at(self, consumed: NDArray[np.int64]) -> list[list[int]]:
        """Return how many samples of each source come before each of these samples."""
        phase_of = np.maximum(self._firsts.searchsorted(consumed, side="right") - 1, 0)
        positions = np.empty((len(consumed), len(self.streams)), dtype=np.int64)
        for number in np.unique(phase_of).tolist():
            of_phase = phase_of == number
            positions[of_phase] = self._phases[number].positions(consumed[of_phase], self._key)
        found: list[list[int]] = positions.tolist()
        return found

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_other_content: bool = False, changed: bool = False
    ) -> None:
        """Resume where a state was taken, as `ResumableStream.load_state_dict`, or continue that run with changes.

        changed: the state may be of a mixture with other weights, sources, block_size, seed or when_exhausted, or of a
            stream of one cache. The sources of the state that are in this mixture too, with equal content, T, seed and
            other arguments, continue from their positions: each sample once an epoch across the change. Others begin
            at 0: a new source, and one of the same content with other arguments, which begins a new epoch. Warns of
            all that differs (W103). consumed_samples continues to count, and numbers of epochs count from the
            source's very beginning. Later states load plainly into a mixture with these arguments. A state of a mixture
            with the same arguments is loaded plainly.
        Raises: as `ResumableStream.load_state_dict`; with changed also ValueError for a state without positions, of an
            earlier release, and if no source is left or one with "stop" has had its epoch.
        """
        self.check_not_ahead()
        before, report = self._origin, ""
        if changed and allow_other_content:
            raise ValueError("changed=True with allow_other_content=True: a source of other content is a new source")
        identity = {key: value for key, value in self.identity().items() if key != "origin"}
        is_change = changed and not is_unchanged(state, identity)
        if is_change:
            names = [stream.name for stream in self.streams]
            origin, report = continued(state, identity, names, self._limits())
        else:
            check_identity(state, identity, "state", allow_other_content)
            origin = origin_of(state, len(self.streams))
        try:
            if origin != before:
                self._begin(origin)
            if is_change:
                self._check_left(origin.sample)
                self._resume_at(origin.sample)
            else:
                ResumableStream.load_state_dict(self, state, allow_other_content=allow_other_content)
        except ValueError:
            if self._origin != before:
                self._begin(before)
            raise
        if report:
            text = f"the mixture changes at sample {origin.sample:,}: {report}"
            warnings.warn(CodedWarning("W103", text), stacklevel=2)
        if origin != before or self._consumed % self.global_batch_size:
            self._warn_of_last_batch()

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

    def counts_of(self, block: int) -> NDArray[np.int64]:
        """Return how many samples of each source a block has, counted from 0: int64 [sources]; zeros after the end.

        Two blocks of the same sources differ by the remainders that are carried over. A block in which a source with
        "stop" ends is only served up to the last sample of that source.
        """
        block = checked_int("block", block, 0)
        phase = next(phase for phase in reversed(self._phases) if phase.first_block <= block)
        number = block - phase.first_block
        if phase.blocks is not None and number >= phase.blocks:
            return np.zeros(len(self.streams), dtype=np.int64)
        return np.array(phase.before(number + 1), dtype=np.int64) - np.array(phase.before(number), dtype=np.int64)

    def _joined_files(self) -> _JoinedFiles | None:
        """Return the files of plain windows, which are then read together; None where a source has other rows."""
        plain = [stream for stream in self.streams if type(stream) is EpochStream and not stream.documents]
        self._has_segments = len(plain) < len(self.streams)
        """Whether batches name segments: of all sources if one does, so that a batch of any rows has the same form."""
        if self._has_segments or len({stream.files.io for stream in plain}) > 1:
            return None
        files = [stream.files for stream in plain]
        joined, counts = TokenFiles.joined(files), [0, *(len(part.paths) for part in files)]
        to_places = joined.first_tokens - np.concatenate([part.first_tokens for part in files])
        vocab_size = next((n for stream in plain if (n := stream.split.vocab_size) is not None), None)
        return _JoinedFiles(joined, np.cumsum(counts)[:-1], to_places, vocab_size)

    def locate(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the source of each sample, and where it is in it: int64 [1 + columns, n]."""
        sources, numbers = np.empty((2, len(samples)), dtype=np.int64)
        phase_of = self._firsts.searchsorted(samples, side="right") - 1
        for number in np.unique(phase_of).tolist():
            of_phase = phase_of == number
            sources[of_phase], numbers[of_phase] = self._phases[number].located(samples[of_phase], self._key)
        places = np.zeros((1 + max(stream.COLUMNS for stream in self.streams), len(samples)), dtype=np.int64)
        places[0] = sources
        order = sources.astype(np.min_scalar_type(len(self.streams))).argsort(kind="stable")
        ends = np.cumsum(np.bincount(sources, minlength=len(self.streams))).tolist()
        for stream, begin, end in zip(self.streams, [0, *ends[:-1]], ends, strict=True):
            of_source = order[begin:end]
            places[1 : 1 + stream.COLUMNS, of_source] = stream.locate(numbers[of_source])
        return places

    def read(self, places: NDArray[np.int64]) -> Rows:
        """Return samples as rows. places: from `locate`. Raises: CacheError for an id outside the vocabulary."""
        sources = places[0]
        if (joined := self._joined) is not None:
            shards = places[1] + joined.first_files[sources]
            at = places[2] + joined.to_places[shards]
            return Rows(*split_rows(gathered(joined.files, joined.vocab_size, shards, at, self.T + 1), self.device))
        parts = []
        for source in np.unique(sources).tolist():
            (rows,) = np.nonzero(sources == source)
            stream = self.streams[source]
            parts.append((rows, stream.read(places[1 : 1 + stream.COLUMNS, rows])))
        if not parts:
            empty = torch.empty((2, 0, self.T), dtype=torch.int64, device=self.device)
            return Rows(empty[0], empty[1], Segments.whole_rows(0, self.T) if self._has_segments else None)
        inverse = torch.from_numpy(np.concatenate([rows for rows, _ in parts]).argsort()).to(self.device)
        x, y = (torch.cat([getattr(part, name) for _, part in parts])[inverse] for name in "xy")
        if not self._has_segments:
            return Rows(x, y)
        segments = [(rows, part.segments or Segments.whole_rows(len(rows), self.T)) for rows, part in parts]
        return Rows(x, y, Segments.interleaved(segments, self.T))

    def _batch(self, work: NDArray[np.int64], state: dict[str, Any]) -> Batch:
        return Batch.of_rows(self.read(work), state, torch.from_numpy(work[0].copy()))


def _named(stream: CacheStream) -> str:
    return f"{type(stream).__name__} of {stream.name}"


class _JoinedFiles(NamedTuple):
    """The files of plain windows of all sources."""

    files: TokenFiles
    first_files: NDArray[np.int64]  # of each source
    to_places: NDArray[np.int64]  # of each file: what to add to a place in the files of its source
    vocab_size: int | None
