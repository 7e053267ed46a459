"""Steps of the disk that fail: whoever takes them must leave what was there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from niels_gpt.storage import fileio


@contextmanager
def writing_fails(name: str) -> Iterator[None]:
    """Let the disk be full when a file of this name is written."""
    real = fileio.write_bytes

    def full(path: Any, content: bytes) -> None:
        if Path(path).name == name:
            raise OSError(28, "No space left on device", str(path))
        real(path, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fileio, "write_bytes", full)
        yield


@contextmanager
def renaming_fails() -> Iterator[None]:
    """Let no file get its name."""

    def fails(*_: Any) -> None:
        raise OSError("no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fileio, "rename", fails)
        yield
