"""Datasets of the hub: their cards and rows, one at a time, and the waits of whoever asks for them."""

from contextlib import contextmanager

import pytest

from niels_gpt.documents import Partition
from niels_gpt.hub import checked_files, datasets, retries

ASK_ATTEMPTS, STREAM_ATTEMPTS, LOGGER = retries.ASK_ATTEMPTS, retries.STREAM_ATTEMPTS, retries.__name__


def card_of(dataset, **asked):
    """Ask for a dataset's card; asked: revision."""
    return datasets.card_of(dataset, **asked)


def rows(dataset, **asked):
    """Yield the rows of a split; asked: config, split, streaming, revision, shuffle_seed, shuffle_buffer."""
    return datasets.rows(dataset, **asked)


def rows_of_partition(dataset, number, total, **asked):
    """Yield the rows of one partition of a split, each with its name."""
    return datasets.rows_of_partition(dataset, Partition(number, total), **asked)


def rows_until_they_end(opened):
    """Yield all rows of a stream that is opened again, from its beginning, where it breaks."""
    return datasets._all_of(opened, "the rows", "a/b")


def may_pass(error):
    """Whether a failure is asked again for."""
    return retries.may_pass(error)


@contextmanager
def waits(*, attempts=ASK_ATTEMPTS):
    """Collect the seconds of each wait, the first one second long, and wait for none of them."""
    seconds = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries, "ASK_ATTEMPTS", attempts)
        patch.setattr(retries, "FIRST_WAIT_S", 1.0)
        patch.setattr("niels_gpt.hub.retries.time.sleep", seconds.append)
        yield seconds


def checked_url(dataset, commit, name):
    """Return the address by which fsspec opens a file of the hub as a stream does: each read is checked."""
    checked_files.register_checked_files()
    return f"{checked_files.PROTOCOL}://datasets/{dataset}@{commit}/{name}"


def check_range(response, first, end, size):
    """Raise an error unless an answer has the bytes from `first` to before `end` of a file of `size`."""
    checked_files._check_range(response, first, end, size)


def is_asking():
    """Whether the client of the libraries is still changed for a question that was asked."""
    return bool(retries._asking)
