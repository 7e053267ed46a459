"""A bucket beside push and pull: its files, short waits, and what happens in the middle of a run."""

from contextlib import contextmanager

import pytest

from niels_gpt.buckets import bucket as remote
from niels_gpt.buckets.bucket import Bucket

MARK_NAME = "niels_gpt-push.json"
"""What a push leaves while it runs, by docs/buckets.md."""
ATTEMPTS = remote.ATTEMPTS


def bucket(url):
    """The folder at a URL: `sizes()` of its files by name, `read`, `write` and `remove`."""
    return Bucket(url)


def place_of(url):
    """The folder of this machine that a URL names, or the place at its host."""
    return str(remote.path_of(url) if url.lower().startswith("file:") else Bucket(url)._root)


@contextmanager
def waiting(first_wait_s=None, range_bytes=remote.RANGE_BYTES):
    """Let the first wait before another attempt be so long, default the longest; range_bytes: of one request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "FIRST_WAIT_S", remote.LONGEST_WAIT_S if first_wait_s is None else first_wait_s)
        patch.setattr(remote, "RANGE_BYTES", range_bytes)
        yield


@contextmanager
def impatience(said_after_s, longest_s):
    """Let lines say so often that a server does not answer, and a request end so soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "SAID_AFTER_S", said_after_s)
        patch.setattr(remote, "LONGEST_SILENCE_S", said_after_s)
        patch.setattr(remote, "LONGEST_S", longest_s)
        yield


@contextmanager
def before(step, act):
    """Let `act` run before each `send`, `remove`, `create` or `part` of any bucket, with its arguments."""
    real = getattr(Bucket, step)

    def acted(self, *args):
        act(*args)
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, step, acted)
        yield
