"""Files of recorded rollouts: which lines they may have. They are read line by line, gzipped or not, and checked.

A line is one group, {"prompt_ids": [...], "completions": [[...], ...]}, or one whole sequence, {"ids": [...]}. Other
keys and blank lines are ignored.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from niels_gpt.prefix_tree.sequences import MAX_ID
from niels_gpt.progress import Progress
from niels_gpt.storage.errors import TreeError
from niels_gpt.storage.meta_json import shortened

_FORMS = '{"prompt_ids": [...], "completions": [[...], ...]} or {"ids": [...]}'

Ids = npt.NDArray[np.int64]


class Rollouts(NamedTuple):
    """One line of a file of rollouts."""

    path: str
    line: int
    """From 1."""
    prompt: Ids | None
    """None: the line is one whole sequence; where its completion begins is not known."""
    sequences: list[Ids]
    """The completions; or the one sequence."""
    key: str | None
    """The value of the group key, as JSON."""

    @property
    def where(self) -> str:
        """FILE:LINE."""
        return f"{self.path}:{self.line}"


def read_rollouts(
    paths: Sequence[str], *, group_key: str | None = None, progress: Progress | None = None
) -> Iterator[Rollouts]:
    """Yield the lines of files in their order, checked.

    paths: .gz is decompressed, "-" is the standard input. group_key: lines with equal values of it are folded together.
    progress: gets the lines and bytes read, and the bytes of all files; None for the standard input.
    Raises: ValueError with file and line for the first bad line and for a file without lines; OSError.
    """
    total = None if "-" in paths else sum(map(os.path.getsize, paths))
    before = lines = 0
    for path in paths:
        count, done = 0, before
        for number, line, read in _lines(path):
            done = before + read
            if line.strip():
                count += 1
                yield _parsed(line, path, number, group_key)
            if progress is not None:
                progress(lines + count, done, total)
        if not count:
            raise TreeError(f"{path}: holds no line. Expected lines of {_FORMS}", code="E804")
        before, lines = done, lines + count


def _lines(path: str) -> Iterator[tuple[int, bytes, int]]:
    """Yield the number and bytes of each line, and the bytes of the file that are read, compressed ones for .gz."""
    with ExitStack() as stack:
        raw = sys.stdin.buffer if path == "-" else stack.enter_context(open(path, "rb"))
        lines = cast(BinaryIO, stack.enter_context(gzip.open(raw, "rb")) if path.endswith(".gz") else raw)
        read = 0
        try:
            for number, line in enumerate(lines, 1):
                read = read + len(line) if path == "-" else raw.tell()
                yield number, line, read
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise TreeError(f"{path}: damaged gzip file ({error}). Write it again", code="E804") from error


def _parsed(line: bytes, path: str, number: int, group_key: str | None) -> Rollouts:
    try:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TreeError(
                f"not JSON ({error}), but {shortened(line[:60])}. Expected {_FORMS}", code="E804"
            ) from error
        if not isinstance(row, dict):
            raise TreeError(f"a JSON {type(row).__name__}. Expected {_FORMS}", code="E804")
        prompt, sequences = _sequences(row)
        key = None
        if group_key is not None:
            if group_key not in row:
                raise TreeError(
                    f"no group key {group_key!r}, but the keys {_keys(row)}. Expected it in each line", code="E804"
                )
            key = json.dumps(row[group_key], sort_keys=True)
    except ValueError as error:
        raise TreeError(f"{path}:{number}: {error}", code="E804") from error
    return Rollouts(path, number, prompt, sequences, key)


def _sequences(row: Mapping[str, Any]) -> tuple[Ids | None, list[Ids]]:
    has_prompt, has_completions = "prompt_ids" in row, "completions" in row
    if has_prompt != has_completions or has_prompt == ("ids" in row):
        raise TreeError(f"the keys {_keys(row)}. Expected {_FORMS}, and not both", code="E804")
    if not has_prompt:
        return None, [_ids(row["ids"], "ids")]
    lists = row["completions"]
    if not isinstance(lists, list) or not lists:
        raise TreeError(f"completions is {shortened(lists)}. Expected a list of one or more lists of ids", code="E804")
    completions = [_ids(each, f"completions[{index}]") for index, each in enumerate(lists)]
    return _ids(row["prompt_ids"], "prompt_ids", may_be_empty=True), completions


def _ids(values: Any, name: str, *, may_be_empty: bool = False) -> Ids:
    expected = f"an integer from 0 to {MAX_ID}"
    if not isinstance(values, list) or not (values or may_be_empty):
        raise TreeError(f"{name} is {shortened(values)}. Expected a list of ids, each {expected}", code="E804")
    if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) > MAX_ID):
        wrong = (place for place, value in enumerate(values) if type(value) is not int or not 0 <= value <= MAX_ID)
        place = next(wrong)
        raise TreeError(f"{name}[{place}] is {shortened(values[place])}. Expected {expected}", code="E804")
    return np.array(values, dtype=np.int64)


def _keys(row: Mapping[str, Any]) -> str:
    return ", ".join(map(shortened, list(row)[:20])) or "(none)"
