"""Several streams mixed by weights, the same share of each in every block of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.mmap import TokenFiles
from niels_gpt.fileio import CacheError
from niels_gpt.records import checked_int
from niels_gpt.sampling.epochs import EpochStream
from niels_gpt.sampling.permutation import ROUNDS, permute, random_keys
from niels_gpt.sampling.state import key_check, limited
from niels_gpt.sampling.stream import STREAM_VERSION, Places, SampleStream

WhenExhausted = Literal["repeat", "stop"] | int
_SPAN = 2**16  # samples of all ranks whose composition is computed at once: some milliseconds


class Phase(NamedTuple):
    """A run of blocks of the same composition. All arrays: int64 [sources]."""

    first: int
    """The first sample of it."""
    first_block: int
    counts: NDArray[np.int64]
    """Samples of each source in one block."""
    consumed: NDArray[np.int64]
    """Samples of each source before the phase."""
    blocks: int | None
    """None: without end."""

    @property
    def size(self) -> int:
        """Samples of a block."""
        return int(self.counts.sum())


class MixtureStream(SampleStream):
    """Samples of several EpochStreams: of every `block_size` in a row, source s has exactly `counts[s]`.

    Which places of a block are whose is a seeded permutation, another in each block; a source's samples come in their
    own order. So a sample follows from its number alone, as in an EpochStream, and state, ranks and workers are as
    there.
    """

    max_span = _SPAN

    def __init__(
        self,
        streams: Sequence[EpochStream],
        weights: Sequence[float],
        *,
        seed: int,
        block_size: int = 2048,
        when_exhausted: WhenExhausted | Sequence[WhenExhausted] = "repeat",
    ) -> None:
        """streams: with the same T, global_batch_size, rank, world_size and device, which are then the mixture's.

        weights: of each stream, above 0; only their ratios count, rounded to `counts` by the largest remainder.
        when_exhausted: of all streams, or of each: "repeat" its epochs without end; "stop" the mixture when it was seen
            once; or a number of epochs, after which the other streams fill its place.
        Raises: ValueError for arguments that do not fit together, CacheError for caches of different tokenizers.
        """
        if isinstance(streams, EpochStream):
            raise ValueError("streams is one stream, expected a sequence of them")
        self.streams, self.weights = list(streams), [float(weight) for weight in weights]
        self.block_size, self.seed = checked_int("block_size", block_size, 1), checked_int("seed", seed, -(2**63))
        self.when_exhausted: list[Any] = [when_exhausted] * len(self.streams)
        if isinstance(when_exhausted, Sequence) and not isinstance(when_exhausted, str):
            self.when_exhausted = list(when_exhausted)
        self._check()
        like = self.streams[0]
        super().__init__(
            global_batch_size=like.global_batch_size, rank=like.rank, world_size=like.world_size, device=like.device
        )
        self.T = like.T
        self._keys = random_keys(self.seed, ROUNDS, purpose=1)
        self.vocab_size = next((n for stream in self.streams if (n := stream.split.vocab_size) is not None), None)
        files = [stream.split.files for stream in self.streams]
        self.files, self._first_files = TokenFiles.joined(files), np.cumsum([0, *(len(part.paths) for part in files)])
        self._to_places = self.files.first_tokens - np.concatenate([part.first_tokens for part in files])
        stops = [rule == "stop" for rule in self.when_exhausted]
        self._phases, last_of_stop = _phases(self.weights, self._limits(), stops, block_size)
        self.counts = self._phases[0].counts
        """Samples of each source in a block, int64 [sources], until one is exhausted and others fill its place."""
        self.num_samples = self._end(last_of_stop)

    def _check(self) -> None:
        if not self.streams or {len(self.weights), len(self.when_exhausted)} != {len(self.streams)}:
            raise ValueError(
                f"{len(self.streams)} streams, {len(self.weights)} weights, {len(self.when_exhausted)} entries of "
                "when_exhausted: expected as many of each"
            )
        for number, weight in enumerate(self.weights):
            if not 0 < weight < math.inf:
                raise ValueError(f"weights[{number}]={weight}: expected a number above 0")
        if sum(self.weights) == math.inf:
            raise ValueError(f"weights={self.weights}: their sum is no longer a number")
        for number, rule in enumerate(self.when_exhausted):
            good = rule in ("repeat", "stop") if isinstance(rule, str) else type(rule) is int and rule >= 1
            if not good:
                raise ValueError(f"when_exhausted[{number}]={rule!r}: expected repeat, stop, or epochs from 1 on")
        first = self.streams[0]
        for number, stream in enumerate(self.streams):
            if not isinstance(stream, EpochStream):
                raise ValueError(f"streams[{number}] is a {type(stream).__name__}, expected an EpochStream")
            if stream.epochs is not None:
                raise ValueError(f"streams[{number}] has epochs={stream.epochs}: say it in when_exhausted")
            for name in ("T", "global_batch_size", "rank", "world_size", "device"):
                if getattr(stream, name) != getattr(first, name):
                    raise ValueError(
                        f"streams[{number}] has {name}={getattr(stream, name)}, expected {getattr(first, name)} as in "
                        "streams[0]"
                    )
            self._check_tokenizer(stream)

    def _check_tokenizer(self, stream: EpochStream) -> None:
        """Raise unless a stream's ids mean what those of the streams before it mean, as far as their meta.json says."""
        mine = stream.split.fingerprint()["tokenizer_sha256"], stream.split.vocab_size
        for other in self.streams:
            theirs = other.split.fingerprint()["tokenizer_sha256"], other.split.vocab_size
            if any(one != two and None not in (one, two) for one, two in zip(mine, theirs, strict=True)):
                raise CacheError(
                    f"{stream.split.folder}: ids of tokenizer {str(mine[0])[:12]} (vocab_size {mine[1]}), expected "
                    f"tokenizer {str(theirs[0])[:12]} (vocab_size {theirs[1]}) as in {other.split.folder}. Rebuild one "
                    "of them: python -m niels_gpt.cache.cli build-all"
                )

    def _limits(self) -> list[int | None]:
        """Return how many samples of each source there are in all; None: without end."""
        epochs = [
            {"repeat": None, "stop": 1}.get(rule) if isinstance(rule, str) else rule for rule in self.when_exhausted
        ]
        return [
            None if n is None else limited("when_exhausted", n, stream.num_windows)
            for n, stream in zip(epochs, self.streams, strict=True)
        ]

    def identity(self) -> dict[str, Any]:
        """Return what decides which window of which source a sample is: the arguments, and the streams' identities."""
        return {
            "stream": STREAM_VERSION,
            "seed": self.seed,
            "key_check": key_check(self._keys),
            "block_size": self.block_size,
            "weights": self.weights,
            "when_exhausted": self.when_exhausted,
            "sources": [stream.identity() for stream in self.streams],
        }

    def _progress(self, consumed: int) -> dict[str, int]:
        return {"consumed_samples": consumed}

    def _end(self, last_of_stop: dict[int, int]) -> int | None:
        """Return how many samples there are. last_of_stop: which one of the last block ends it, of its source."""
        last = self._phases[-1]
        if last.blocks is None:
            return None
        if not last_of_stop:
            return last.first + last.blocks * last.size
        sources, ranks = self._composition(last, np.zeros(1, dtype=np.int64))
        ends = [(sources[0] == s) & (ranks[0] == rank) for s, rank in last_of_stop.items()]
        return last.first + min(int(np.argmax(end)) for end in ends) + 1

    def locate(self, samples: NDArray[np.int64]) -> Places:
        """Return where the windows lie that samples of these numbers are, among the files of all sources: [n]."""
        shards, places, sources, numbers = np.empty((4, len(samples)), dtype=np.int64)
        phase_of = np.searchsorted([phase.first for phase in self._phases], samples, side="right") - 1
        for phase_number in np.unique(phase_of):
            phase, own = self._phases[phase_number], np.flatnonzero(phase_of == phase_number)
            blocks, positions = np.divmod(samples[own] - phase.first, phase.size)
            named = np.unique(blocks)
            at_once = max(1, _SPAN // phase.size)
            for part in (named[first : first + at_once] for first in range(0, len(named), at_once)):
                here = np.flatnonzero((blocks >= part[0]) & (blocks <= part[-1]))
                found = np.searchsorted(part, blocks[here]), positions[here]
                source, rank = (whole[found] for whole in self._composition(phase, part))
                sources[own[here]] = source
                numbers[own[here]] = phase.consumed[source] + blocks[here] * phase.counts[source] + rank
        for number in np.unique(sources):
            of_source = sources == number
            shards[of_source], places[of_source], _ = self.streams[number].locate(numbers[of_source])
        shards += self._first_files[sources]
        return Places(shards, places + self._to_places[shards], sources)

    def _composition(self, phase: Phase, blocks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample of some blocks, and how many of that source precede it in its block.

        blocks: [b], counted from the phase's first. Both int64 [b, samples of a block].
        """
        positions, size = np.tile(np.arange(phase.size), len(blocks)), phase.size
        slots = permute(positions, size, self._keys, np.repeat(phase.first_block + blocks, size))
        ends = np.cumsum(phase.counts)
        sources = np.searchsorted(ends, slots.reshape(len(blocks), size), side="right")
        by_source = np.argsort(sources.astype(np.uint16), axis=1, kind="stable")
        ranks = np.empty_like(sources)
        counted = np.arange(size) - np.repeat(ends - phase.counts, phase.counts)
        np.put_along_axis(ranks, by_source, np.broadcast_to(counted, ranks.shape), axis=1)
        return sources, ranks


def _phases(
    weights: list[float], limits: list[int | None], stops: list[bool], block_size: int
) -> tuple[list[Phase], dict[int, int]]:
    """Return the phases of a mixture: a source that ends begins a new one. There are at most two for each source.

    Also: where the mixture stops in the only block of its last phase: source -> which one of its samples in the block
    is its last. Empty where it does not stop.
    """
    phases: list[Phase] = []
    left: list[float] = [math.inf if limit is None else limit for limit in limits]
    consumed = np.zeros(len(weights), dtype=np.int64)
    first = first_block = 0
    while any(left):
        counts = _shared_out(
            block_size, weights, [math.inf if stop else n for n, stop in zip(left, stops, strict=True)]
        )
        if not phases and not counts.all():
            rare = int(np.argmin(counts))
            raise ValueError(
                f"weights[{rare}]={weights[rare]} of {math.fsum(weights)}: gets no sample of a block of "
                f"block_size={block_size}, expected a larger block_size or weight"
            )
        # Of a source that stops the mixture the block with its last sample is a phase of its own.
        full = [
            n if n == math.inf else (n - stop) // count
            for n, count, stop in zip(left, counts.tolist(), stops, strict=True)
            if count
        ]
        ending = {s: int(left[s]) - 1 for s, stop in enumerate(stops) if stop and left[s] <= counts[s]}
        blocks = 1 if ending else min(full)
        phases.append(Phase(first, first_block, counts, consumed.copy(), None if blocks == math.inf else int(blocks)))
        if ending or blocks == math.inf:
            return phases, ending
        left = [n - blocks * count for n, count in zip(left, counts.tolist(), strict=True)]
        consumed += int(blocks) * counts
        first, first_block = first + int(blocks) * phases[-1].size, first_block + int(blocks)
    return phases, {}


def _shared_out(total: int, weights: list[float], left: list[float]) -> NDArray[np.int64]:
    """Return how many of `total` samples each source gives: by weight, but none more than it has left."""
    counts = np.zeros(len(weights), dtype=np.int64)
    open_ = [s for s, n in enumerate(left) if n]
    while open_:
        rest = total - int(counts.sum())
        share = _largest_remainder(rest, [weights[s] for s in open_])
        short = [s for s, count in zip(open_, share, strict=True) if left[s] < count]
        for s, count in zip(open_, share, strict=True):
            counts[s] = left[s] if s in short else 0 if short else count
        if not short:
            break
        open_ = [s for s in open_ if s not in short]
    return counts


def _largest_remainder(total: int, weights: list[float]) -> list[int]:
    quotas = [total * (weight / math.fsum(weights)) for weight in weights]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda s: (counts[s] - quotas[s], s))
    for s in by_remainder[: total - sum(counts)]:
        counts[s] += 1
    return counts
