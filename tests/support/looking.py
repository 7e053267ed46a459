"""What looks into caches: in blocks of other sizes, at documents of any length, and which checks there are."""

from contextlib import contextmanager

import numpy as np
import pytest

from niels_gpt.cache import documents
from niels_gpt.cache.kind import plot
from niels_gpt.engine import stream
from niels_gpt.kinds import files
from niels_gpt.kinds.kind import kind_named
from support.disk import write_meta

_BLOCKS = {
    "read_bytes": (files, "_READ_BYTES"),
    "counted_tokens": (documents, "BLOCK_TOKENS"),
    "batch_items": (stream, "BATCH_ITEMS"),
}


@contextmanager
def blocks_of(**sizes):
    """Let files be read, tokens counted and documents encoded in blocks of these sizes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(*_BLOCKS[name], size)
        yield


@contextmanager
def pretended(path, kind, **lengths):
    """Let `path` be a cache whose documents have these lengths in a picture of it, three quarters of each with loss."""
    path.mkdir(exist_ok=True)
    write_meta(path, {"kind": kind, "built": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "lengths", lambda _cache, _meta, split: lengths.get(split, np.zeros(0, np.int64)))
        patch.setattr(plot, "supervised_counts", lambda _cache, _meta, split: lengths[split] * 3 // 4)
        yield path


@contextmanager
def notices():
    """The texts of pictures that show nothing else."""
    said = []
    notice = plot._notice
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "_notice", lambda text: said.append(text) or notice(text))
        yield said


def checks_of(kind, *, blocking=False):
    """The names of the checks of a kind of caches; blocking: of those that fail a build."""
    return [check.name for check in kind_named(kind).checks if check.blocking or not blocking]
