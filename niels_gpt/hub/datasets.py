"""Datasets of the Hugging Face hub: a dataset's card, and its rows through `datasets`, at one commit throughout.

A failed question is asked again. A broken stream is opened again and resumes after the last row. retries.py has the
limits; checked_files.py lists the losses of the libraries that it prevents.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from niels_gpt.documents import Partition
from niels_gpt.hub import checked_files, retries
from niels_gpt.hub.retries import (
    COMMIT_SHA,
    Backoff,
    BrokenAnswer,
    GaveUp,
    may_pass,
    read_timeout,
    recognized,
    remedy_of,
)
from niels_gpt.storage.errors import HubRefusal
from niels_gpt.storage.waits import causes

T = TypeVar("T")

SITE = "https://huggingface.co/datasets/"
"""A dataset's page for people, which does not depend on HF_ENDPOINT."""
CARD_TIMEOUT_S = 30.0
"""Limit of one request for a dataset's card."""


@dataclass(frozen=True)
class Card:
    """The hub's description of a dataset at one commit."""

    revision: str
    """The commit: 40 hexadecimal digits."""
    licence: str | None
    """The licence id on the card; its license_name for "other"; several joined with ", "."""
    attribution: str
    """Title, author and address. CC BY 4.0 section 3(a)(1) requires to retain these and `licence`."""


def card_of(dataset_id: str, *, revision: str | None = None) -> Card:
    """Ask the hub for a dataset's card.

    revision: branch, tag or commit; None: the default branch.
    Raises: GaveUp E601 after ASK_ATTEMPTS failures; HubRefusal E602 if the dataset or revision does not exist, or this
        user may not read it.
    """
    from huggingface_hub import HfApi

    def ask() -> Any:
        info = HfApi().dataset_info(dataset_id, revision=revision, timeout=CARD_TIMEOUT_S)
        if not info.sha:
            raise BrokenAnswer("the hub answered without a commit sha")
        return info

    info = _asked(f"the commit of {dataset_id} at {revision or 'main'}", dataset_id, ask)
    card: dict[str, Any] = info.card_data.to_dict() if info.card_data else {}
    author = info.author or dataset_id.rpartition("/")[0]
    title = str(card.get("pretty_name") or dataset_id)
    return Card(
        revision=info.sha,
        licence=_licence(card),
        attribution=f"{title}{f' by {author}' if author else ''}, {SITE}{dataset_id}",
    )


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
    """Yield rows through `datasets`, at one commit throughout.

    A broken stream is opened again, and the rows already yielded are skipped. Their order depends only on the commit,
    the seed and the buffer, so no row is lost or repeated.
    dataset_id: NAME or OWNER/NAME on the hub, even if the current directory has a folder of that name; or the path of a
        local folder, which is absolute or begins with "." or "~".
    shuffle_seed: shuffle with the library's own shuffle: a buffer of `shuffle_buffer` rows (10,000 by default) when
        streaming, else a full permutation. It draws from NumPy inside the library (D9).
    Raises: GaveUp E601 after ASK_ATTEMPTS failures to open it, or STREAM_ATTEMPTS without a row in between; HubRefusal
        E602 if the dataset, revision, config or split does not exist, or this user may not read it.
    """
    revision = _commit_of(dataset_id, revision)

    def open_rows() -> Any:
        builder = _builder(dataset_id, config, streaming, revision)
        if streaming:
            return _shuffled_stream(builder.as_streaming_dataset(split=split), shuffle_seed, shuffle_buffer)
        builder.download_and_prepare()
        found = builder.as_dataset(split=split)
        return found if shuffle_seed is None else found.shuffle(seed=shuffle_seed)

    yield from _opened_rows(open_rows, dataset_id, config, split)


def rows_of_partition(
    dataset_id: str,
    partition: Partition,
    *,
    config: str | None = None,
    split: str,
    revision: str | None = None,
    shuffle_seed: int | None = None,
    shuffle_buffer: int | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of one partition, each with its name PATH#ROW: its file in the repository, its number from 1.

    A split has n files. If n is at least P, the number of partitions, file f from 0 in the library's order is in
    partition f mod P. Otherwise row r of the split, from 0, is in partition r mod P.
    shuffle_seed: shared by all partitions. Each derives its own seed and shuffles its rows as `rows` shuffles a stream:
        also the order of its files, unless it has rows of every file.
    Takes the other arguments of `rows`, and raises its errors.
    """
    revision = _commit_of(dataset_id, revision)
    seed = None if shuffle_seed is None else partition.seed(shuffle_seed)

    def open_rows() -> Any:
        import datasets

        builder = _builder(dataset_id, config, True, revision)
        # The whole split is opened, as the library takes the columns' types from its first file.
        stream = builder.as_streaming_dataset(split=split)
        own = _OwnRows(stream, _paths_of(builder, split), partition)
        if seed is None:
            return own
        generated = datasets.IterableDataset.from_generator(own, gen_kwargs=own.arguments)
        return _shuffled_stream(generated, seed, shuffle_buffer)

    opened = _opened_rows(open_rows, dataset_id, config, split)
    return ((row["name"], row["row"]) for row in opened)


class _OwnRows:
    """The rows of a partition in order, as {"name": ..., "row": ...}; an instance is iterated over, or called."""

    def __init__(self, stream: Any, paths: Sequence[str], partition: Partition) -> None:
        """stream, paths: the whole split and its files. Raises: HubRefusal E602 if it is not streamed file by file."""
        if stream.num_shards != len(paths):
            raise HubRefusal(f"streamed in {stream.num_shards} pieces, expected one for each of its {len(paths)} files")
        self._stream, self._paths, self._partition = stream, paths, partition
        self._has_files = len(paths) >= partition.total

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a call for all rows. The library shuffles a list; rows are counted in order from a tuple."""
        number, total = self._partition
        if self._has_files:
            return {"files": list(range(number, len(self._paths), total))}
        return {"files": tuple(range(len(self._paths)))}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self(**self.arguments)

    def __call__(self, files: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the partition's rows of some files."""
        at = itertools.count()
        number, total = self._partition
        for file in files:
            rows = self._stream.shard(len(self._paths), file)
            for in_file, row in enumerate(rows, 1):
                if self._has_files or next(at) % total == number:
                    yield {"name": f"{self._paths[file]}#{in_file}", "row": row}


def _paths_of(builder: Any, split: str) -> list[str]:
    """Return the paths of a split's files in the repository, or below the local folder, in the library's order."""
    names = (str(builder.base_path), *builder.config.data_files[split])
    base, *files = (re.sub(r"^\w+://", "", name) for name in names)
    return [file.removeprefix(f"{base}/") for file in files]


def _commit_of(dataset_id: str, revision: str | None) -> str | None:
    """Return the commit of a dataset on the hub at a revision; for a folder the revision itself."""
    if _is_folder(dataset_id) or COMMIT_SHA.fullmatch(revision or ""):
        return revision
    return card_of(dataset_id, revision=revision).revision


def _is_folder(dataset_id: str) -> bool:
    return dataset_id.startswith((".", "~")) or Path(dataset_id).is_absolute()


def _shuffled_stream(stream: Any, seed: int | None, buffer: int | None) -> Any:
    return stream if seed is None else stream.shuffle(seed=seed, buffer_size=buffer or 10_000)


def _opened_rows(
    open_rows: Callable[[], Any], dataset_id: str, config: str | None, split: str
) -> Iterator[dict[str, Any]]:
    if _is_folder(dataset_id):
        yield from open_rows()
        return
    what = f"the {split} split of {dataset_id}" + (f", config {config}" if config else "")
    yield from _all_of(_asked(what, dataset_id, open_rows), what, dataset_id)


def _all_of(found: Any, what: str, dataset_id: str) -> Iterator[dict[str, Any]]:
    """Iterate over a dataset; after a failure iterate again, from the first row not yet yielded."""
    backoff = Backoff(what, retries.STREAM_ATTEMPTS)
    num_rows = 0
    while True:
        try:
            with read_timeout():
                for row in islice(found, num_rows, None):
                    num_rows += 1
                    backoff.progress()
                    yield row
            return
        except Exception as error:
            _wait_or_raise(recognized(error), backoff, dataset_id)


def _builder(dataset_id: str, config: str | None, streaming: bool, revision: str | None) -> Any:
    """Return the builder of `datasets.load_dataset`, with PROTOCOL in place of the protocol of its files."""
    import datasets

    local = _is_folder(dataset_id)
    # A plain id could be a folder of that name in the current directory (datasets/load.py `remote_only`).
    address = str(Path(dataset_id).expanduser()) if local else f"hf://datasets/{dataset_id}"
    builder = datasets.load_dataset_builder(address, config, revision=revision)
    # datasets/load.py dataset_module_factory: after any error it uses the newest commit in its own cache, if there is
    # one. The same commit is fine, but not for a stream: the cache has the rows in another order.
    if ".packaged_modules.cache" in type(builder).__module__ and (streaming or builder.hash != revision):
        _raise_the_hubs_reason(dataset_id, revision)
        raise BrokenAnswer(f"datasets could not open commit {revision}, and offers {builder.hash} from its cache")
    if not local:
        checked_files.register_checked_files()
        for files in (builder.config.data_files or {}).values():
            files[:] = [re.sub("^hf://", f"{checked_files.PROTOCOL}://", name) for name in files]
    return builder


def _raise_the_hubs_reason(dataset_id: str, revision: str | None) -> None:
    """Raise the hub's error for a dataset that `datasets` could not open; return if the hub reports none."""
    from huggingface_hub import HfApi

    HfApi().dataset_info(dataset_id, revision=revision, timeout=CARD_TIMEOUT_S)
    HfApi().auth_check(dataset_id, repo_type="dataset")


def _asked(what: str, dataset_id: str, ask: Callable[[], T]) -> T:
    """Ask until there is an answer, a permanent error, or ASK_ATTEMPTS failures."""
    backoff = Backoff(what, retries.ASK_ATTEMPTS)
    while True:
        try:
            with read_timeout():
                return ask()
        except Exception as error:
            _wait_or_raise(recognized(error), backoff, dataset_id)


def _wait_or_raise(error: Exception, backoff: Backoff, dataset_id: str) -> None:
    """Wait after an error that may pass; raise any other, with a remedy if the hub or the library gave a reason."""
    if not may_pass(error):
        _raise_with_remedy(backoff.what, dataset_id, error)
        raise error
    backoff.wait(error)


def _raise_with_remedy(what: str, dataset_id: str, error: Exception) -> None:
    """Raise the reason that the hub or the library gave, with a remedy; return if they gave none."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import errors

    chain = [one for one in causes(error) if not isinstance(one, errors.EntryNotFoundError)]
    answers = (getattr(one, "server_message", None) for one in chain)
    reason = " ".join(str(next(filter(None, answers), error)).split())
    if isinstance(error, GaveUp):
        return
    if any(isinstance(one, errors.OfflineModeIsEnabled) for one in chain):
        raise ConnectionError(
            f"could not ask the Hugging Face hub for {what}: {reason}; unset HF_HUB_OFFLINE, "
            "or use --source-root MIRROR or --source-root sample"
        ) from error
    if remedy := remedy_of(error, SITE + dataset_id, (DatasetNotFoundError,)):
        is_folder = remedy.startswith("check") and Path(dataset_id).is_dir()
        folder = f"; for the folder here write ./{dataset_id}" if is_folder else ""
        raise HubRefusal(
            f"the Hugging Face hub does not have it, or you may not read it: {what} ({reason}); {remedy}{folder}"
        ) from error
    library = type(error).__module__ == "builtins" or type(error).__module__.startswith("datasets.")
    if isinstance(error, ValueError | FileNotFoundError) and library:
        # The library's message lists the configs or splits that exist.
        raise HubRefusal(f"cannot read {what}: {reason}; use what {SITE}{dataset_id} has") from error


def _licence(card: dict[str, Any]) -> str | None:
    licence = card.get("license")
    if licence == "other":
        licence = card.get("license_name") or licence
    names = licence if isinstance(licence, list) else [licence] if licence else []
    return ", ".join(map(str, names)) or None
