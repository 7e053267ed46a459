"""What a state of a stream holds, its checksum, and which states are refused; the state may come from anywhere.

Decides also what a stream with other arguments, or a mixture with other sources, takes over from the state of a run:

    state       sources A at 700, B at 250, C at 50; consumed_samples = 1,000
    mixture     sources B, A with another T, D
    origin      sample 1,000; B at 250, A at 0 (a new epoch), D at 0; C was removed

A source of the state is one of the mixture if their identities are equal: content, T, seed and all other arguments. A
stream of one cache is a mixture of one source. Of equal ones the first goes to the first. The mixture begins at its
origin, and each source at its position there, so that no sample of a source that stayed is lost or repeated. The origin
is a part of the later states.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.errors import CacheError, StateError
from niels_gpt.storage.meta_json import printable, shortened

MAX_SAMPLES = 2**62
"""The largest number of samples that is counted."""

_CONTENT = ("split", "tokens", "samples", "manifest_sha256", "content_sha256", "tokenizer_sha256")
"""What a fingerprint of a token cache or of an EAGLE-3 cache has."""
_PROGRESS = ("epoch", "consumed_samples", "positions")
_ARGUMENTS = ("weights", "when_exhausted", "block_size", "seed")
_NO_IDENTITY = {*_PROGRESS, "checksum", "worker"}
AS_IT_WAS = "Open the stream as it was, or start without the state"
_DEPTH = 6  # of lists and dicts in a state


def limited(name: str, epochs: int, num_windows: int) -> int:
    """Return the samples of some epochs. Raises: ValueError for more than MAX_SAMPLES."""
    if epochs * num_windows > MAX_SAMPLES:
        raise StateError(f"{name}={epochs}: expected at most {MAX_SAMPLES // num_windows} epochs of {num_windows}")
    return epochs * num_windows


def key_check(keys: NDArray[np.uint64]) -> str:
    """Return a checksum of keys, eight hex digits: another version of torch may draw other keys from a seed."""
    return f"{zlib.crc32(keys.astype('<u8').tobytes()):08x}"


def state_count(state: Mapping[str, Any], key: str) -> int:
    """Return a count of a state. Raises: ValueError if it is not an integer from 0 to MAX_SAMPLES."""
    count = state.get(key)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_SAMPLES:
        raise StateError(f"state: {key} is {shortened(count)}, expected an integer from 0 to {MAX_SAMPLES}")
    return count


def state_numbers(state: Mapping[str, Any], key: str, count: int) -> list[int]:
    """Return a list of counts of a state. Raises: ValueError unless it has `count` valid counts."""
    numbers = state.get(key)
    if not isinstance(numbers, list) or len(numbers) != count:
        raise StateError(f"state: {key} is {shortened(numbers)}, expected a list of {count} counts")
    return [state_count({key: number}, key) for number in numbers]


def copier(identity: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return a function that makes deep copies of an identity: every batch has one, so this must be quick."""
    is_flat = not any(isinstance(one, dict | list) for one in identity.values())
    return identity.copy if is_flat else partial(copied, identity)


def copied(value: Any) -> Any:
    """Return a deep copy of a dict or list of scalars, dicts and lists."""
    copy = value.copy()
    for key, one in copy.items() if type(copy) is dict else enumerate(copy):
        if type(one) is dict or type(one) is list:
            copy[key] = copied(one)
    return copy


def identity_crc(identity: Mapping[str, Any]) -> int:
    """Return the CRC-32 of what decides the order; `sealed` continues it with the part of a state that changes."""
    return zlib.crc32(json.dumps(identity, sort_keys=True).encode())


def sealed(
    identity: dict[str, Any], crc: int, progress: Mapping[str, Any], worker: Sequence[int] = ()
) -> dict[str, Any]:
    """Return a state: the identity of the stream, which it takes over, its progress, and a checksum of both.

    crc: from `identity_crc`. progress: integers, and lists of them, which the state takes over. worker: in a DataLoader
    worker, [worker, workers, global_batch_size].
    """
    identity.update(progress)
    identity["checksum"] = _checksum(crc, progress, worker)
    if worker:
        identity["worker"] = list(worker)
    return identity


def check_checksum(state: Mapping[str, Any], identity: Iterable[str], progress: Iterable[str]) -> None:
    """Raise ValueError if the checksum of a state does not match its values, which have the right types.

    identity, progress: the keys of both. Uses the values of the state, not of the stream: the content may differ where
    that was allowed, and a state of an earlier release may lack a part of the progress.
    """
    if "checksum" not in state:
        return
    crc = identity_crc({key: state[key] for key in identity})
    computed = _checksum(crc, {key: state[key] for key in progress if key in state}, state.get("worker", ()))
    if state["checksum"] != computed:
        raise StateError(
            f"state: checksum is {shortened(state['checksum'])}, but its values give {computed!r}: it was edited or "
            "damaged. Copy it again from where it was saved; to use an edited state, remove its checksum"
        )


def _checksum(crc: int, progress: Mapping[str, Any], worker: Sequence[int]) -> str:
    numbers = ",".join(map(str, [*progress.values(), *worker]))
    return f"{zlib.crc32(numbers.encode(), crc):08x}"


def same(one: Any, other: Any) -> bool:
    """Return whether two scalars, or lists and dicts of them, are equal and of the same types; else False."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return isinstance(one, (int, float, str, type(None))) and bool(one == other)


def check_identity(
    state: Any,
    mine: dict[str, Any],
    where: str,
    allow_other_content: bool,
    remedy: str = AS_IT_WAS,
) -> None:
    """Raise unless a state belongs to a stream with this identity.

    where: how errors begin. remedy: where the arguments are others.
    Raises: CacheError for other content, if that is not allowed, and for another tokenizer; ValueError for a state of
        another kind or of a stream with other arguments.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"{where}: {shortened(state)}, expected what state_dict() returned")
    if state.get("kind") != (kind := mine.get("kind")):
        found = f"kind is {shortened(state.get('kind'))}, expected {shortened(kind)} as in this stream"
        raise StateError(f"{where}: {found}. It belongs to another kind of stream: open that one")
    given, own = state.get("order", "all"), mine.get("order", "all")
    if given != own:
        _refuse("order", given, own, where, allow_other_content, remedy)
    for key, value in mine.items():
        if key not in state:
            raise StateError(f"{where}: lacks {key}, expected what state_dict() returned")
        given = state[key]
        if isinstance(value, list) and isinstance(value[0], dict) and isinstance(given, list):
            if len(given) != len(value):
                raise StateError(f"{where}: {key} has {len(given)} entries, expected {len(value)}. {remedy}")
            for number, (one, other) in enumerate(zip(given, value, strict=True)):
                check_identity(one, other, f"{where}: {key}[{number}]", allow_other_content, remedy)
        elif not same(given, value):
            _refuse(key, given, value, where, allow_other_content, remedy)


def _refuse(key: str, given: Any, value: Any, where: str, allow_other_content: bool, remedy: str) -> None:
    """Raise for a value of a state that differs from the stream's, unless it is other content and that is allowed."""
    found, expected = f"{key} is {shortened(given)}", f"{shortened(value)} as in this stream"
    message = f"{where}: {found}, expected {expected}"
    if key == "stream":
        raise StateError(f"{message}. Another release wrote the state, where the same number means another sample")
    if key not in _CONTENT:
        raise StateError(f"{message}. {remedy}")
    if key in ("tokens", "samples"):
        state_count({key: given}, key)
    elif not isinstance(given, str | None):
        raise StateError(f"{message}, of the kind that state_dict() returns")
    if key == "tokenizer_sha256":
        refuse_tokenizer(given, value, where)
    if not allow_other_content:
        remedy = "Open the version that was read, or continue in this text with allow_other_content=True"
        raise CacheError(where, found, expected, remedy, code="E108")


def content_of(identity: Mapping[str, Any]) -> list[Any]:
    """Return what tells the split of an identity from others."""
    return [identity.get(key) for key in _CONTENT]


def refuse_tokenizer(given: Any, mine: Any, where: str) -> None:
    """Raise CacheError if the tokenizer of a state is known to be another than the stream's. where: begins it."""
    if None not in (given, mine) and given != mine:
        found, expected = f"tokenizer_sha256 is {shortened(given)}", f"{shortened(mine)} as in this stream"
        raise CacheError(where, found, expected, "Its ids mean other text: open the cache of the state", code="E108")


# --- changed runs -----------------------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """Where a stream begins in a run: the sample, and how many samples of each source were consumed before it."""

    sample: int
    positions: tuple[int, ...]


class Change(NamedTuple):
    """How a stream continues a run."""

    origin: Origin
    report: str
    """What differs between the arguments and the sources of both."""


def is_unchanged(state: Any, identity: Mapping[str, Any]) -> bool:
    """Return whether a state belongs to a stream with the same arguments and sources. identity: without its origin."""
    if not isinstance(state, Mapping) or state.get("order") != identity.get("order"):
        return False
    return all(key in state and same(state[key], identity[key]) for key in identity)


def origin_of(state: Any, sources: int) -> Origin:
    """Return where the stream of a state began. Raises: ValueError for an origin that cannot be."""
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
    """Return how a stream continues the run of another one, each a mixture or of one cache.

    identity: of the stream, without its origin. names, limits: of each source of it the name, and the total number of
    samples.
    Raises: ValueError for a state without positions or with a wrong checksum, and for anything else that is not a
        state; CacheError E108 for another tokenizer.
    """
    known, positions, consumed = _read(state)
    sources: Sequence[dict[str, Any]] = identity.get("sources", [identity])
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
        if stayed or "sources" in identity:
            parts.insert(0, f"resumed: {', '.join(stayed) or 'none'}")
    if "sources" in identity and (arguments := _differences(state, identity, [k for k in _ARGUMENTS if k in state])):
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
    if "content_sha256" in state:  # of a stream of one cache
        check_checksum(state, identity, _PROGRESS)
        sample, (position,) = origin_of(state, 1)
        return [{key: state[key] for key in identity if key != "origin"}], [position + consumed - sample], consumed
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
    names = ("split", "manifest_sha256", "content_sha256")  # a manifest is of an EAGLE-3 cache
    shown = [str(shortened(source[key])) for key in names if source.get(key) is not None]
    unit = "tokens" if "tokens" in source else "samples"
    return printable(f"{' '.join(shown)}, {shortened(source.get(unit))} {unit}")
