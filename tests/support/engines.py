"""gigatoken, its comparison with the reference, and the memory of a process, one at a time."""

from contextlib import contextmanager

import pytest

from niels_gpt import encoding
from niels_gpt.tokenizers import engine, probes
from niels_gpt.tokenizers.gigatoken import GigatokenEngine, Memory, process_size

FIRST_COMPARED, PIECE_BYTES, ONE_COMPARED_OF = engine.FIRST_COMPARED, engine.PIECE_BYTES, engine.ONE_COMPARED_OF
"""So many texts at the beginning are all compared with the reference, in pieces of so many bytes, and one of so many
pieces of the others."""


def gigatoken(tokenizer, **how):
    """Return gigatoken without a comparison; how: max_growth, the bytes that it may grow before it is opened again."""
    return GigatokenEngine(tokenizer, **how)


def compared(fast, tokenizer):
    """Return an engine that is compared with the reference of a tokenizer."""
    return engine.ComparedEngine(fast, engine.ReferenceEngine(tokenizer), tokenizer)


def locks_of(fast):
    """Return the lock that encoding takes, by process."""
    return fast._reopening


@contextmanager
def texts_of_the_reference():
    """Collect how many bytes of text each call of the reference encodes."""
    sizes = []
    encode = engine.ReferenceEngine.encode

    def noted(self, texts, *, first):
        sizes.append(sum(map(len, texts)))
        return encode(self, texts, first=first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.ReferenceEngine, "encode", noted)
        yield sizes


def probe_texts(literals):
    """Return the texts on which gigatoken is compared when it is opened."""
    return probes.probe_texts(literals)


def growing_memory(max_growth):
    """Return what decides when gigatoken is opened again."""
    return Memory(max_growth)


def sees_its_size():
    """Whether a process can see its size here."""
    return process_size() is not None


def encoder_of(tokenizer):
    """Return what a build encodes texts with."""
    return encoding.TextEncoder(tokenizer)
