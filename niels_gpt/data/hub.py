"""The Hugging Face hub: a dataset's commit, and its rows through `datasets.load_dataset`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


def revision_of(dataset_id: str, *, revision: str | None = None) -> str:
    """Ask the hub for a dataset's commit sha; ConnectionError without a network, ValueError if there is no such one."""
    from huggingface_hub import HfApi

    with _asking_hub(f"the commit of {dataset_id} at {revision or 'main'}"):
        info = HfApi().dataset_info(dataset_id, revision=revision, timeout=30)
    if not info.sha:
        raise ConnectionError(f"the hub answered for {dataset_id} without a commit sha; try again")
    return info.sha


def rows(
    dataset_id: str,
    *,
    config: str | None = None,
    split: str,
    streaming: bool,
    revision: str | None = None,
    shuffle_seed: int | None = None,
    shuffle_buffer: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Stream rows through `datasets.load_dataset`; `dataset_id` may be a local folder too.

    With `shuffle_seed`, rows pass through the library's own shuffle: a buffer of `shuffle_buffer` rows (default 10,000)
    when streaming, else a full permutation. That shuffle draws from NumPy inside the library (D9).
    Raises: ConnectionError where the network fails, at the first row or in mid-stream; ValueError for no such dataset.
    """
    import datasets

    with _asking_hub(f"the {split} split of {dataset_id}" + (f", config {config}" if config else "")):
        found = datasets.load_dataset(dataset_id, config, split=split, streaming=streaming, revision=revision)
        if shuffle_seed is not None and streaming:
            found = found.shuffle(seed=shuffle_seed, buffer_size=shuffle_buffer or 10_000)
        elif shuffle_seed is not None:
            found = found.shuffle(seed=shuffle_seed)
        yield from found


@contextmanager
def _asking_hub(what: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    # The hub's client has moved from requests to httpx to httpx2; whichever it is, its errors share this base.
    client_error = cast(type[Exception], HfHubHTTPError.__bases__[0])
    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(f"the Hugging Face hub has no such thing, or not for you: {what} ({error})") from error
    except (client_error, ConnectionError, TimeoutError, socket.gaierror) as error:
        raise ConnectionError(
            f"could not ask the Hugging Face hub for {what}: {type(error).__name__}: {error}; "
            "without a network use --source-root MIRROR or --source-root sample"
        ) from error
