"""The Hugging Face hub: a dataset's card, and its rows through `datasets`, whatever the network does in between.

A question that failed is asked again with growing waits up to a bound, and a stream that broke goes on where it was;
`hub_network.py` has the bounds, and `hub_files.py` says what the libraries would lose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from niels_gpt.data import hub_files, hub_network
from niels_gpt.data.hub_network import BrokenAnswer, GaveUp, Patience, bounded_silence, causes, may_pass, understood

T = TypeVar("T")

SITE = "https://huggingface.co/datasets/"
"""Where people find a dataset, whatever HF_ENDPOINT says."""
CARD_TIMEOUT_S = 30.0
"""Seconds that the hub has to answer for a dataset's card."""
COMMIT_SHA = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Card:
    """What the hub says about a dataset at one commit."""

    revision: str
    """The commit: 40 hexadecimal digits."""
    licence: str | None
    """As the dataset's card says it: the hub's id, for "other" the card's license_name, several joined with ", "."""
    attribution: str
    """Title, author and address, which with `licence` is what CC BY 4.0 section 3(a)(1) wants to be retained."""


def card_of(dataset_id: str, *, revision: str | None = None) -> Card:
    """Ask the hub for a dataset's card at a branch, tag or commit; None stands for its default branch.

    Raises: ConnectionError without a network, after ASK_ATTEMPTS; ValueError for no such dataset or revision, or one
    that is not for this user.
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
    """Stream rows through `datasets`, at one commit throughout.

    dataset_id: NAME or OWNER/NAME, which is the hub's even where a folder of the current directory has that name; or a
        local folder, which is absolute or begins with "." or "~".
    With `shuffle_seed`, rows pass through the library's own shuffle: a buffer of `shuffle_buffer` rows (default 10,000)
    when streaming, else a full permutation. That shuffle draws from NumPy inside the library (D9).
    A stream that breaks is opened again, and the rows already given are passed over: their order is a function of the
    commit, the seed and the buffer, so none is lost or doubled.
    Raises: ConnectionError after ASK_ATTEMPTS failures to open it, or STREAM_ATTEMPTS without a row in between;
    ValueError for no such dataset, revision, config or split, or a dataset that is not for this user.
    """
    local = dataset_id.startswith((".", "~")) or Path(dataset_id).is_absolute()
    if not local and not COMMIT_SHA.fullmatch(revision or ""):
        revision = card_of(dataset_id, revision=revision).revision
    what = f"the {split} split of {dataset_id}" + (f", config {config}" if config else "")

    def open_rows() -> Any:
        found = _opened(dataset_id, config, split, streaming, revision, local)
        if shuffle_seed is not None and streaming:
            return found.shuffle(seed=shuffle_seed, buffer_size=shuffle_buffer or 10_000)
        return found if shuffle_seed is None else found.shuffle(seed=shuffle_seed)

    if local:
        yield from open_rows()
    else:
        yield from _all_of(_asked(what, dataset_id, open_rows), what, dataset_id)


def _all_of(found: Any, what: str, dataset_id: str) -> Iterator[dict[str, Any]]:
    """Iterate over a dataset, and after a failure over it again from the first row not yet given."""
    patience = Patience(what, hub_network.STREAM_ATTEMPTS)
    given = 0
    while True:
        try:
            with bounded_silence():
                for row in islice(found, given, None):
                    given += 1
                    patience.progress()
                    yield row
            return
        except Exception as error:
            _wait_or_raise(understood(error), patience, dataset_id)


def _opened(dataset_id: str, config: str | None, split: str, streaming: bool, revision: str | None, local: bool) -> Any:
    """Do what `datasets.load_dataset` does, in its two steps: between them the files are seen (tests compare both)."""
    import datasets

    # A plain id would be a folder of that name where the process runs, as in a mirror (datasets/load.py `remote_only`).
    address = str(Path(dataset_id).expanduser()) if local else f"hf://datasets/{dataset_id}"
    builder = datasets.load_dataset_builder(address, config, revision=revision)
    # datasets/load.py dataset_module_factory: whatever error it meets, it takes the newest commit in its own cache
    # instead, if there is one. Of the same commit that is welcome, but streamed it has another order.
    if ".packaged_modules.cache" in type(builder).__module__ and (streaming or builder.hash != revision):
        _raise_the_hubs_reason(dataset_id, revision)
        raise BrokenAnswer(f"datasets could not open commit {revision}, and offers {builder.hash} from its cache")
    if not local:
        hub_files.register_checked_files()
        for files in (builder.config.data_files or {}).values():
            files[:] = [re.sub("^hf://", f"{hub_files.PROTOCOL}://", name) for name in files]
    if streaming:
        return builder.as_streaming_dataset(split=split)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _raise_the_hubs_reason(dataset_id: str, revision: str | None) -> None:
    """Raise what the hub says of a dataset that `datasets` could not open; return where it says nothing against it."""
    from huggingface_hub import HfApi

    HfApi().dataset_info(dataset_id, revision=revision, timeout=CARD_TIMEOUT_S)
    HfApi().auth_check(dataset_id, repo_type="dataset")


def _asked(what: str, dataset_id: str, ask: Callable[[], T]) -> T:
    """Ask until there is an answer, or an error that stays."""
    patience = Patience(what, hub_network.ASK_ATTEMPTS)
    while True:
        try:
            with bounded_silence():
                return ask()
        except Exception as error:
            _wait_or_raise(understood(error), patience, dataset_id)


def _wait_or_raise(error: Exception, patience: Patience, dataset_id: str) -> None:
    """Wait after an error that may pass; raise any other, in words of ours where the hub or the library said why."""
    if not may_pass(error):
        _explain(patience.what, dataset_id, error)
        raise error
    patience.wait(error)


def _explain(what: str, dataset_id: str, error: Exception) -> None:
    """Raise what the hub or the library said as an error of ours with its remedy; return where it said nothing."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import errors

    # Without the many "Entry Not Found" that the libraries meet while they look for files that may be absent.
    chain = [one for one in causes(error) if not isinstance(one, errors.EntryNotFoundError)]
    words = next((str(said) for one in chain if (said := getattr(one, "server_message", None))), str(error))
    said = " ".join(words.split())
    if isinstance(error, GaveUp):
        return
    if any(isinstance(one, errors.OfflineModeIsEnabled) for one in chain):
        raise ConnectionError(
            f"could not ask the Hugging Face hub for {what}: {said}; unset HF_HUB_OFFLINE, "
            "or use --source-root MIRROR or --source-root sample"
        ) from error
    for kinds, remedy in (
        ((errors.GatedRepoError,), f"accept its terms at {SITE}{dataset_id}, then run `hf auth login`"),
        ((errors.RevisionNotFoundError,), f"use a commit, branch or tag of {SITE}{dataset_id}/commits/main"),
        (
            (errors.RepositoryNotFoundError, DatasetNotFoundError, errors.HFValidationError),
            f"check the name at {SITE}{dataset_id}; for a private dataset run `hf auth login` as one who may read it"
            + (f"; for the folder here write ./{dataset_id}" if Path(dataset_id).is_dir() else ""),
        ),
        ((errors.HfHubHTTPError,), "check the access token: run `hf auth login`"),
    ):
        if any(isinstance(one, kinds) for one in chain):
            raise ValueError(
                f"the Hugging Face hub has no such thing, or not for you: {what} ({said}); {remedy}"
            ) from error
    library = type(error).__module__ == "builtins" or type(error).__module__.startswith("datasets.")
    if isinstance(error, ValueError | FileNotFoundError) and library:
        # The library's own words name the configs and the splits that there are.
        raise ValueError(f"cannot read {what}: {said}; use what {SITE}{dataset_id} has") from error


def _licence(card: dict[str, Any]) -> str | None:
    found = card.get("license")
    if found == "other":
        found = card.get("license_name") or found
    named = [str(one) for one in found] if isinstance(found, list) else [str(found)] if found else []
    return ", ".join(named) or None
