"""Opens a cache of any form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from niels_gpt.eagle3.format.manifest import read_manifest
from niels_gpt.eagle3.inspect.published.opened import PublishedCache


def open_cache(
    path: Path, *, follow_links: bool = False, tick: Callable[[int], None] = lambda num_bytes: None
) -> PublishedCache:
    """Resolve a cache once and read its manifest. Raises: FileNotFoundError; CacheError."""
    folder = path.resolve()
    return PublishedCache(path, folder, read_manifest(folder, follow_links=follow_links), follow_links, tick)
