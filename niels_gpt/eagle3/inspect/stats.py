"""`stats`: a cache in numbers: tokens, loss, sizes, lengths, probability mass, entropy, norms."""

from __future__ import annotations

from pathlib import Path

from niels_gpt.eagle3.inspect.figures import Stats
from niels_gpt.eagle3.inspect.native.opened import NativeCache
from niels_gpt.eagle3.inspect.native.stats import native_stats
from niels_gpt.eagle3.inspect.open_cache import refuse_malformed
from niels_gpt.eagle3.inspect.opening import open_cache
from niels_gpt.eagle3.inspect.published.stats import published_stats
from niels_gpt.progress import Progress


@refuse_malformed
def stats(path: Path, *, seed: int = 0, progress: Progress | None = None, follow_links: bool = False) -> Stats:
    """Return the numbers of a cache. All ids and masks are read; of the floats at most MAX_SLOTS slots.

    seed: of the choice of the slots. progress: its items and units are shards.
    follow_links: read files that are links, as in a snapshot of the Hugging Face hub.
    Raises: FileNotFoundError, CacheError where the cache is not whole.
    """
    cache = open_cache(path, follow_links=follow_links)
    if isinstance(cache, NativeCache):
        return native_stats(cache, seed, progress)
    return published_stats(cache, seed, progress)
