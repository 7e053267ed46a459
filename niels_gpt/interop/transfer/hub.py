"""A cache -> a dataset repository of the Hugging Face hub, in one commit: a reader sees all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from niels_gpt.interop.transfer.described import (
    MARK_NAME,
    Described,
    Pushed,
    described,
    may_replace,
    other_cache,
    refuse_foreign_files,
    whole,
)
from niels_gpt.interop.transfer.patience import Patience, end_of, in_thread
from niels_gpt.interop.transfer.remote import HUB_FOLDER, Bucket, redacted
from niels_gpt.progress import Progress
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import MAX_JSON_BYTES

CARD_NAME = "README.md"
_OF_THE_HUB = frozenset({CARD_NAME, ".gitattributes", MARK_NAME, META_NAME})
_T = TypeVar("_T")


def push_hub(
    folder: Path,
    local: Described,
    url: str,
    *,
    replace: bool | Collection[str],
    check: bool,
    public: bool,
    card: bytes | None,
    progress: Progress | None,
) -> Pushed:
    """Send a cache as one commit. The repository is made if absent, private unless `public`.

    folder, local: of the version. The rest, and what it raises: as `push.push`.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    found = HUB_FOLDER.fullmatch(url.partition("://")[2].rstrip("/"))
    assert found is not None  # push has looked at the URL
    repo, revision, inside = found[1], found[2] or "main", f"{found[3]}/" if found[3] else ""
    api: Any = HfApi()
    _asked(url, lambda: api.create_repo(repo, private=not public, exist_ok=True, repo_type="dataset"))
    head = str(_asked(url, lambda: api.repo_info(repo, revision=revision, repo_type="dataset")).sha)
    bucket = Bucket(f"hf://datasets/{repo}@{head}/{inside}")
    raw = bucket.read(META_NAME, MAX_JSON_BYTES)
    old = _old_files(bucket, raw, local, url, replace)
    files, size = len(local.records) + 1, local.num_bytes + len(local.raw)
    if raw == local.raw and not check and (card is None or bucket.read(CARD_NAME, MAX_JSON_BYTES) == card):
        return Pushed(url, files, size, 0, files)
    contents: dict[str, Any] = {META_NAME: local.raw}
    if card is not None:
        contents[CARD_NAME] = card
    for number, (name, record) in enumerate(local.records.items(), 1):
        contents[name] = whole(folder, local, record)
        if progress is not None:
            progress(number, 0, size)
    operations: list[Any] = [CommitOperationAdd(inside + name, content) for name, content in contents.items()]
    operations += [CommitOperationDelete(inside + name) for name in sorted(old - contents.keys())]
    said = f"Cache {local.content_sha256[:12]}"
    # The parent: where another push was faster the hub refuses this one.
    _asked(
        url,
        lambda: api.create_commit(
            repo, operations, commit_message=said, revision=revision, parent_commit=head, repo_type="dataset"
        ),
        size,
    )
    if progress is not None:
        progress(files - 1, size, size)
    return Pushed(url, files, size, size, 0)


def _old_files(
    bucket: Bucket, raw: bytes | None, local: Described, url: str, replace: bool | Collection[str]
) -> set[str]:
    """Return the files of the cache that is there. raw: its meta.json; None without one.

    Raises: CacheError E610 for another cache, and for other files.
    """
    there = None if raw is None else described(raw, bucket.at(META_NAME))
    names = set() if there is None else set(there.records)
    refuse_foreign_files(url, bucket.sizes().keys() - names - _OF_THE_HUB)
    content = local.content_sha256 if there is None else there.content_sha256
    if content != local.content_sha256 and not may_replace(replace, content):
        raise other_cache(url, content, local.content_sha256)
    return names


def _asked(url: str, ask: Callable[[], _T], num_bytes: int = 0) -> _T:
    """Ask the hub, whose library repeats what may pass; no message has a credential. num_bytes: that are sent."""
    try:
        return Patience().answer(url, in_thread(ask), end_of(num_bytes))
    except CacheError:
        raise
    except Exception as error:
        last = error.__cause__ or error  # an upload that failed names the file, and its cause says why
        reason = redacted(f"{type(last).__name__}: {last}")
        remedy = "Check the name, and log in as a user who may write there: hf auth login"
        raise CacheError(url, f"refused: {reason}", remedy=remedy, code="E612") from None
