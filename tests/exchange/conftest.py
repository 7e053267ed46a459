"""A bucket in memory, and waits that take no time."""

import fsspec
import pytest
from support.buckets import waiting


@pytest.fixture
def url():
    """A folder in memory."""
    yield "memory://bucket/wiki"
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


@pytest.fixture
def quick():
    with waiting(0.001):
        yield
