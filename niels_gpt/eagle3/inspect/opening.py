"""Opens a cache of any form; reads it as a training run does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from niels_gpt.eagle3.cache import CachedEagle3Dataset
from niels_gpt.eagle3.format.manifest import is_native, read_manifest
from niels_gpt.eagle3.inspect.native.opened import NativeCache
from niels_gpt.eagle3.inspect.open_cache import OpenCache
from niels_gpt.eagle3.inspect.published.opened import PublishedCache
from niels_gpt.eagle3.native import NativeEagle3Dataset


def open_cache(
    path: Path, *, follow_links: bool = False, tick: Callable[[int], None] = lambda num_bytes: None
) -> PublishedCache | NativeCache:
    """Resolve a cache once and read its manifest. Raises: FileNotFoundError; CacheError."""
    folder = path.resolve()
    manifest = read_manifest(folder, follow_links=follow_links)
    form = NativeCache if is_native(manifest) else PublishedCache
    return form(path, folder, manifest, follow_links, tick)


def read_each_shard(cache: OpenCache) -> None:
    """Open a cache with its reader, and read a sample of every shard. Raises: what the reader raises."""
    reader = NativeEagle3Dataset if isinstance(cache, NativeCache) else CachedEagle3Dataset
    data = reader(cache.folder, follow_links=cache.follow_links)
    for shard in range(cache.num_shards):
        data[cache.first_of(shard)]
