"""What may be an argument of a stream, and what may be its state: both may be anybody's."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.fileio import CacheError
from niels_gpt.records import shortened

MAX_SAMPLES = 2**62
"""More are not counted."""

_CONTENT = ("split", "tokens", "content_sha256", "tokenizer_sha256")


def limited(name: str, epochs: int, num_windows: int) -> int:
    """Return the samples of so many epochs. Raises: ValueError for more than are counted."""
    if epochs * num_windows > MAX_SAMPLES:
        raise ValueError(f"{name}={epochs}: expected at most {MAX_SAMPLES // num_windows} epochs of {num_windows}")
    return epochs * num_windows


def key_check(keys: NDArray[np.uint64]) -> str:
    """Return eight hex digits that tell keys from others: those of a seed are another torch's to change."""
    return f"{zlib.crc32(keys.astype('<u8').tobytes()):08x}"


def state_count(state: Mapping[str, Any], key: str) -> int:
    """Return a count of a state. Raises: ValueError if it is none."""
    found = state.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= MAX_SAMPLES:
        raise ValueError(f"state: {key} is {shortened(found)}, expected an integer from 0 to {MAX_SAMPLES}")
    return found


def copied(identity: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of which nothing is shared: lists hold scalars or flat dicts."""
    return {
        key: [dict(one) if isinstance(one, dict) else one for one in value] if isinstance(value, list) else value
        for key, value in identity.items()
    }


def identity_crc(identity: Mapping[str, Any]) -> int:
    """Return a CRC-32 of what decides the order, to which `sealed` adds the part of a state that changes."""
    return zlib.crc32(json.dumps(identity, sort_keys=True).encode())


def sealed(
    identity: dict[str, Any], crc: int, progress: Mapping[str, int], worker: Sequence[int] = ()
) -> dict[str, Any]:
    """Return a state, with a checksum of all of it. crc: of `identity_crc`. worker: of a DataLoader, its three numbers.

    Takes under 2 us where it has no lists: every batch has one.
    """
    state = {**copied(identity), **progress, "checksum": _checksum(crc, progress, worker)}
    return {**state, "worker": list(worker)} if worker else state


def check_checksum(state: Mapping[str, Any], identity: Mapping[str, Any], progress: Mapping[str, int]) -> None:
    """Raise ValueError if a state, whose values are of the right types, has a checksum that is not theirs.

    progress: what the state says of it. The content is the state's own, where another one was allowed.
    """
    if "checksum" not in state:
        return
    crc = identity_crc({key: state[key] for key in identity})
    found = _checksum(crc, {key: state[key] for key in progress}, state.get("worker", ()))
    if state["checksum"] != found:
        raise ValueError(
            f"state: checksum is {shortened(state['checksum'])}, but its values give {found!r}: it was edited or is "
            "damaged. Take it from its origin again; to use an edited state, remove its checksum"
        )


def _checksum(crc: int, progress: Mapping[str, int], worker: Sequence[int]) -> str:
    numbers = ",".join(map(str, (*progress.values(), *worker)))
    return f"{zlib.crc32(numbers.encode(), crc):08x}"


def _same(one: Any, other: Any) -> bool:
    """Return whether two scalars, or lists of them, are equal and of the same types; nothing else is compared."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, (int, float, str, type(None))) and bool(one == other)


def check_identity(state: Any, mine: dict[str, Any], where: str, allow_other_content: bool) -> None:
    """Raise unless a state is of a stream with this identity; messages begin with `where`."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{where}: {shortened(state)}, expected what state_dict() returned")
    for key, value in mine.items():
        if key not in state:
            raise ValueError(f"{where}: lacks {key}, expected what state_dict() returned")
        found = state[key]
        if isinstance(value, list) and isinstance(value[0], dict) and isinstance(found, list):
            if len(found) != len(value):
                raise ValueError(f"{where}: {key} has {len(found)} entries, expected {len(value)}")
            for number, (one, other) in enumerate(zip(found, value, strict=True)):
                check_identity(one, other, f"{where}: {key}[{number}]", allow_other_content)
        elif not _same(found, value):
            said = f"{where}: {key} is {shortened(found)}, but this stream's is {shortened(value)}"
            if key == "stream":
                raise ValueError(f"{said}: of another release, by whose rules the same number is another sample")
            if key not in _CONTENT:
                raise ValueError(f"{said}. Open the stream as it was, or start over without the state")
            if key == "tokens":
                state_count(state, key)
            elif not isinstance(found, str | None):
                raise ValueError(f"{said}, expected what state_dict() returned")
            if key == "tokenizer_sha256" and None not in (found, value):
                raise CacheError(f"{said}: its ids mean other text. Open the cache that the state was taken from")
            if not allow_other_content:
                raise CacheError(
                    f"{said}: not the text that was read. Open the version of that time, or continue in the other "
                    "text with allow_other_content=True"
                )
