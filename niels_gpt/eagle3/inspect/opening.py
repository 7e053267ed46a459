"""Opens a cache of any form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from niels_gpt.eagle3.format.manifest import is_native, read_manifest
from niels_gpt.eagle3.inspect.native.opened import NativeCache
from niels_gpt.eagle3.inspect.published.opened import PublishedCache


def open_cache(
    path: Path, *, follow_links: bool = False, tick: Callable[[int], None] = lambda num_bytes: None
) -> PublishedCache | NativeCache:
    """Resolve a cache once and read its manifest. Raises: FileNotFoundError; CacheError."""
    folder = path.resolve()
    manifest = read_manifest(folder, follow_links=follow_links)
    form = NativeCache if is_native(manifest) else PublishedCache
    return form(path, folder, manifest, follow_links, tick)
