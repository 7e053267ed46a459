"""Folders that stand for files elsewhere, as of a cache in a bucket: a file of one arrives before it is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:  # commands that read no file import this
    import numpy as np
    from numpy.typing import NDArray

MOUNTED: dict[str, Mounted] = {}
"""Such folders of this process, by their resolved paths."""
_ONE_SLASH = re.compile("(?i)(s3a?|gs|gcs|az|abfss?|hf|file|local|memory):/")


class Mounted(Protocol):
    """What brings the files of such a folder."""

    url: str
    """Of the folder, without credentials."""
    records: Mapping[str, Mapping[str, Any]]
    """The record of each file in meta.json, by name."""
    max_ahead: int
    """Bytes that a process fetches ahead of its reading."""

    @property
    def max_bytes(self) -> int:
        """Most bytes that are kept here, of all such folders of one place."""

    def arrive(self, name: str) -> None:
        """Bring a file whole, if it is not there, or is another one. name: in the folder; an unknown one is left."""

    def name_of(self, path: Path) -> str:
        """Return the name of a file in the folder."""

    def size(self, name: str) -> int:
        """Return the bytes of a file, which need not be here."""

    def read_into(self, memory: memoryview, name: str, at: int, plan: Any = None) -> None:
        """Fill memory with bytes of a file from byte `at` on. plan: from `plan`, which this read follows."""

    def check_room(self, files: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Raise NoRoomError if there is too little room for the bytes of one batch, from begins[i] to ends[i] - 1."""

    def fetch(self, name: str, begin: int, end: int) -> bytes:
        """Return a few bytes of a file from where it is. They are not compared, and not kept."""

    def forget(self, name: str, begin: int, end: int) -> None:
        """Remove bytes that were found damaged from the folder."""

    def refuse(self, name: str, found: str, expected: str = "") -> NoReturn:
        """Raise the error of a file that is damaged where it is."""

    def plan(
        self,
        owner: object,
        names: Sequence[str | None],
        files: NDArray[np.int64],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> Any:
        """Bring what `owner` will read next, in this order: bytes begins[i] to ends[i] - 1 of names[files[i]]."""


def is_url(text: str) -> bool:
    """Return whether a text is a URL, or what a Path makes of one: "s3:/bucket"."""
    return "://" in text or _ONE_SLASH.match(text) is not None


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path, or the URL of a file or folder that lies in such a folder."""
    text = os.fspath(path)
    for folder, mounted in list(MOUNTED.items()):  # another thread may open a cache
        if text == folder or text.startswith(folder + os.sep):
            return mounted.url + text[len(folder) :]
    return text


def url_of(text: str) -> str | None:
    """Return the URL of the folder that a URL, or a file below it, is in; None if no such folder stands for it."""
    return next((each.url for each in list(MOUNTED.values()) if f"{text}/".startswith(f"{each.url}/")), None)


def let_arrive(path: str | os.PathLike[str]) -> None:
    """Bring a file, if it lies in such a folder. Raises: CacheError, OSError."""
    text = os.fspath(path)
    for folder, mounted in list(MOUNTED.items()):
        if text.startswith(folder + os.sep):
            mounted.arrive(text[len(folder) + 1 :])
