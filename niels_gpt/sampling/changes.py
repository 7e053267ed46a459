"""What a mixture with other sources or weights takes over from the state of a run.

    state       sources A at 700, B at 250, C at 50; consumed_samples = 1,000
    mixture     sources B, A with another T, D
    origin      sample 1,000; B at 250, A at 0 (a new epoch), D at 0; C was removed

A source of the state is one of the mixture if their identities are equal: content, T, seed and all other arguments. Of
equal ones the first goes to the first. The mixture begins at its origin, and each source at its position there, so that
no sample of a source that stayed is lost or repeated. The origin is a part of the later states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from niels_gpt.sampling.shares import Origin
from niels_gpt.sampling.state import check_checksum, content_of, refuse_tokenizer, same, state_count, state_numbers
from niels_gpt.storage.errors import StateError
from niels_gpt.storage.meta_json import printable, shortened

_PROGRESS = ("epoch", "consumed_samples", "positions")
_ARGUMENTS = ("weights", "when_exhausted", "block_size", "seed")
_NO_IDENTITY = {*_PROGRESS, "checksum", "worker"}
_DEPTH = 6  # of lists and dicts in a state


class Change(NamedTuple):
    """How a mixture continues a run."""

    origin: Origin
    report: str
    """What differs between the arguments and the sources of both."""


def is_unchanged(state: Any, identity: Mapping[str, Any]) -> bool:
    """Return whether a state is of a mixture with the same arguments and sources. identity: without its origin."""
    return isinstance(state, Mapping) and all(key in state and same(state[key], identity[key]) for key in identity)


def origin_of(state: Any, sources: int) -> Origin:
    """Return where the mixture of a state began. Raises: ValueError for an origin that cannot be."""
    origin = state.get("origin") if isinstance(state, Mapping) else None
    if origin is None:
        return Origin(0, (0,) * sources)
    if not isinstance(origin, dict) or origin.keys() != {"sample", "positions"}:
        raise StateError(f"state: origin is {shortened(origin)}, expected a sample and positions")
    sample, positions = state_count(origin, "sample"), state_numbers(origin, "positions", sources)
    consumed = state_count(state, "consumed_samples")
    if not sum(positions) <= sample <= consumed:
        raise StateError(
            f"state: its origin is sample {sample} with {sum(positions)} samples of the sources, expected at most "
            f"{sample}, and consumed_samples, which is {consumed}, not below it"
        )
    return Origin(sample, tuple(positions))


def continued(state: Any, identity: Mapping[str, Any], names: Sequence[str], limits: Sequence[int | None]) -> Change:
    """Return how a mixture continues the run of a state: of another mixture, or of a stream of one cache.

    identity: of the mixture. names, limits: of each source of it the name, and the total number of samples.
    Raises: ValueError for a state without positions or a wrong checksum, and for what is no state; CacheError for
        another tokenizer.
    """
    known, positions, consumed = _read(state)
    sources: Sequence[dict[str, Any]] = identity["sources"]
    for given in known:
        for mine in sources:
            refuse_tokenizer(given.get("tokenizer_sha256"), mine.get("tokenizer_sha256"), "state")
    resumed = _matched(known, sources, range(len(known)), same)
    rest = [number for number in range(len(known)) if number not in resumed]
    left = [source if number is None else {} for source, number in zip(sources, resumed, strict=True)]
    renewed = _matched(known, left, rest, lambda one, other: bool(other) and content_of(one) == content_of(other))
    removed = [number for number in rest if number not in renewed]
    parts = []
    for source, name, old, again, limit in zip(sources, names, resumed, renewed, limits, strict=True):
        if old is None:
            parts.append(f"new: {name}" if again is None else _renewed(name, known[again], positions[again], source))
        elif limit is not None and positions[old] >= limit:
            parts.append(f"ended: {name}, which has had {positions[old]:,} of {limit:,} samples")
    parts += [f"removed, after {positions[number]:,} samples: {_described(known[number])}" for number in removed]
    if parts:
        stayed = [name for name, old in zip(names, resumed, strict=True) if old is not None]
        parts.insert(0, f"resumed: {', '.join(stayed) or 'none'}")
    if arguments := _differences(state, identity, [key for key in _ARGUMENTS if key in state]):
        parts.insert(0, arguments)
    return Change(Origin(consumed, tuple(0 if old is None else positions[old] for old in resumed)), "; ".join(parts))


def _matched(
    known: Sequence[dict[str, Any]], sources: Sequence[dict[str, Any]], free: Sequence[int], is_same: Any
) -> list[int | None]:
    """Return for each source the number of a known one that is the same, each at most once; None: there is none."""
    unused, found = list(free), []
    for source in sources:
        number = next((each for each in unused if is_same(known[each], source)), None)
        if number is not None:
            unused.remove(number)
        found.append(number)
    return found


def _read(state: Any) -> tuple[list[dict[str, Any]], list[int], int]:
    """Return the sources of a state, the position of each, and the samples consumed by all. Raises: ValueError."""
    expected = "expected what state_dict() of a mixture, or of a stream of one cache, returned"
    if not isinstance(state, Mapping) or not _is_plain(dict(state), _DEPTH):
        raise StateError(f"state: {shortened(state)}, {expected}")
    consumed, identity = state_count(state, "consumed_samples"), [key for key in state if key not in _NO_IDENTITY]
    if "worker" in state:
        raise StateError("state: of a StatefulDataLoader's worker. Only batch.state can be loaded with changed=True")
    if "split" in state:  # of a stream of one cache
        check_checksum(state, identity, _PROGRESS)
        return [{key: state[key] for key in identity}], [consumed], consumed
    sources = state.get("sources")
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        raise StateError(f"state: sources is {shortened(sources)}, {expected}")
    if "positions" not in state:
        raise StateError(
            "state: of an earlier release, without the positions of its sources. Load it without changed=True into "
            "the mixture as it was, and change from batch.state of the next batch"
        )
    positions = state_numbers(state, "positions", len(sources))
    check_checksum(state, identity, _PROGRESS)
    if sum(positions) > consumed:
        raise StateError(f"state: positions sum to {sum(positions)}, expected at most {consumed}, consumed_samples")
    return sources, positions, consumed


def _is_plain(value: Any, depth: int) -> bool:
    """Return whether a value is fit for JSON, with at most `depth` levels of lists and dicts."""
    if isinstance(value, dict):
        keys, values = value.keys(), value.values()
        return depth > 0 and all(isinstance(key, str) for key in keys) and all(_is_plain(v, depth - 1) for v in values)
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(one, depth - 1) for one in value)
    return isinstance(value, int | float | str | None)


def _renewed(name: str, known: Mapping[str, Any], position: int, source: Mapping[str, Any]) -> str:
    """Return that a source begins a new epoch, and which of its arguments differ."""
    changed = _differences(known, source, [key for key in {**known, **source} if key != "key_check"])
    return printable(f"a new epoch of {name}, which had {position:,} samples: {changed}")


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return which of some keys differ, with both values; "" for none."""
    changed = [key for key in keys if not same(one.get(key), other.get(key))]
    return ", ".join(f"{key} {shortened(one.get(key))} -> {shortened(other.get(key))}" for key in changed)


def _described(source: Mapping[str, Any]) -> str:
    """Return what a state says of a source, which has no name there."""
    shown = [str(shortened(source[key])) for key in ("split", "content_sha256") if source.get(key) is not None]
    return printable(f"{' '.join(shown)}, {shortened(source.get('tokens'))} tokens")
