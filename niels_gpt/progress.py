"""Progress: the callback of long work, which commands turn into a bar and Dagster into log lines."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, int | None], None]
"""Called with the items that are finished (documents, shards, files), the units done, and the units in all (tokens or
bytes; None where that is not known). What the items and the units are, the function that takes the callback says."""
