"""Steps of the disk that fail: whoever takes them must leave what was there."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from niels_gpt.storage import fileio


@contextmanager
def writing_fails(name):
    """Let the disk be full when a file of this name is written."""
    real = fileio.write_bytes

    def full(path, content):
        if Path(path).name == name:
            raise OSError(28, "No space left on device", str(path))
        real(path, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fileio, "write_bytes", full)
        yield


@contextmanager
def renaming_fails():
    """Let no file get its name."""

    def fails(*_):
        raise OSError("no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fileio, "rename", fails)
        yield
