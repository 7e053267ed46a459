"""A small cache, a folder for what is fetched, and no mount left behind."""

import pytest
from support.mounted_caches import build, forgotten


@pytest.fixture(autouse=True)
def _no_mounts():
    with forgotten():
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache of two shards, with five pieces."""
    return build(tmp_path_factory.mktemp("caches") / "wiki", 2)


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A cache of 24 MB, which does not fit the smallest folder."""
    return build(tmp_path_factory.mktemp("caches") / "large", 10)


@pytest.fixture
def local(tmp_path):
    return tmp_path / "local"
