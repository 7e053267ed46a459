"""A target's outputs as the fields of a cache, without a run: what is stored of a batch, and what is refused."""

from contextlib import contextmanager

import pytest

from niels_gpt.eagle3 import forward, head, target


def stored_fields(batch, lengths, selected, known, **how):
    """The fields of a batch as versions 1 and 2 store them, and the counts of its receipt. how: topk and dtype."""
    return forward.cache_fields(batch, lengths, selected, known, **how)


def check_finite(batch, names, lengths, layers, *stored):
    """Refuse a batch with a number that is not finite, or that the stored dtype cannot hold."""
    forward.check_finite(batch, names, lengths, layers, *stored)


@contextmanager
def in_parts_of(values):
    """Let logits be worked on in parts of so many values."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (forward, target, head):
            patch.setattr(module, "CHUNK_VALUES", values)
        patch.setattr(target, "CACHED_VALUES", min(values, target.CACHED_VALUES))
        yield
