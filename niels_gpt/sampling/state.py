"""What a state of a stream holds, its checksum, and which states are refused; the state may come from anywhere."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.errors import CacheError, StateError
from niels_gpt.storage.meta_json import shortened

MAX_SAMPLES = 2**62
"""The largest number of samples that is counted."""

_CONTENT = ("split", "tokens", "content_sha256", "tokenizer_sha256")


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
    """Return a list of counts of a state. Raises: ValueError unless it is one of so many valid counts."""
    numbers = state.get(key)
    if not isinstance(numbers, list) or len(numbers) != count:
        raise StateError(f"state: {key} is {shortened(numbers)}, expected a list of {count} counts")
    return [state_count({key: number}, key) for number in numbers]


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
    """Return a state: the identity of the stream, its progress, and a checksum of both.

    crc: from `identity_crc`. progress: integers, and lists of them, which the state takes over. worker: in a DataLoader
    worker, [worker, workers, global_batch_size]. Every batch has a state, so this takes under 2 us for a state without
    lists.
    """
    state = {**copied(identity), **progress, "checksum": _checksum(crc, progress, worker)}
    return {**state, "worker": list(worker)} if worker else state


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
    remedy: str = "Open the stream as it was, or start without the state",
) -> None:
    """Raise unless a state belongs to a stream with this identity.

    where: how errors begin. remedy: where the arguments are others; for a mixture it names changed=True.
    Raises: CacheError for other content, if that is not allowed, and for another tokenizer; ValueError for a state of
        another kind or of a stream with other arguments.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"{where}: {shortened(state)}, expected what state_dict() returned")
    if state.get("kind") != (kind := mine.get("kind")):
        found = f"kind is {shortened(state.get('kind'))}, expected {shortened(kind)} as in this stream"
        raise StateError(f"{where}: {found}. It is of another kind of stream: open that one")
    if "sources" in mine:
        remedy = f"To continue its run with these sources and arguments, load it with changed=True. {remedy}"
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
        raise StateError(f"{message}. The state is of another release, where the same number means another sample")
    if key not in _CONTENT:
        raise StateError(f"{message}. {remedy}")
    if key == "tokens":
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
