"""Push a cache to a URL: a note first, then the data, meta.json last. A reader that finds meta.json finds all files.

The note, niels_gpt-push.json, names the content_sha256 of the cache. A push that was killed leaves the note. The next
push of the same cache skips files of the right size; a push of another cache is refused. On the hub a push is one
commit, without a note.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from niels_gpt.buckets.bucket import (
    HUB_FOLDER,
    NOTE_NAME,
    Bucket,
    Patience,
    end_of,
    in_thread,
    is_hub_bucket,
    redacted,
    scheme_of,
)
from niels_gpt.exchange.transfer.described import Described, Pushed, described
from niels_gpt.exchange.transfer.jobs import Tally, at_once
from niels_gpt.kinds.folders import refuse_unless_cache
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json
from niels_gpt.storage.locks import hold_version
from niels_gpt.storage.meta_json import (
    MAX_JSON_BYTES,
    checked_name,
    file_records,
    parse_object,
    path_inside,
    read_regular,
    resolved,
    sha256_regular,
)
from niels_gpt.storage.versions import public_path
from niels_gpt.work import Progress

logger = logging.getLogger(__name__)
NOTE_VERSION = 1
CARD_NAME = "README.md"
_OF_THE_HUB = frozenset({CARD_NAME, ".gitattributes", NOTE_NAME, META_NAME})
_REPLACE = "Push to another URL, or replace what is there: --replace"
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Found:
    """Content of the URL before a push."""

    content: str | None = None
    """content_sha256 of the cache there; None without a meta.json."""
    raw: bytes = b""
    """Bytes of its meta.json."""
    note: dict[str, Any] | None = None
    """Note of a push."""
    names: frozenset[str] = frozenset()
    """Files that meta.json or the note names."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Name and bytes of every file."""


def push(
    cache: Path,
    url: str,
    *,
    replace: bool | Collection[str] = False,
    check: bool = False,
    jobs: int = 8,
    progress: Progress | None = None,
    public: bool = False,
    card: bytes | None = None,
) -> Pushed:
    """Send a cache to a URL, unless it is there already.

    cache: its public folder. url: path or URL of the folder for its files, without credentials.
    replace: replace another cache there; given as a collection, only a cache with one of these content_sha256.
    check: read every file back, and send it again if its sha256 differs. For hf://, offer every file once more: the hub
        knows files by their sha256 and takes those that differ. jobs: files at once.
    progress: called with files, bytes done, and bytes in all, by one thread at a time.
    public, card: only for a repository on the hub: whether everybody may read it, and its README.md.
    Raises: FileNotFoundError; ValueError for the URL; CacheError E610 if something else is there, or another push takes
        its place, E611 for a damaged file, E612 if the bucket cannot be used; OSError.
    """
    refuse_unless_cache(cache)
    if is_hub_bucket(url):
        raise ValueError("hf://buckets/...: only read. Push to a dataset of the hub: hf://datasets/USER/NAME")
    folder = resolved(cache)
    hold = hold_version(folder)
    local = described(read_regular(folder / META_NAME), str(cache / META_NAME))
    if scheme_of(url) == "hf":
        return _push_hub(folder, local, url, replace=replace, check=check, public=public, card=card, progress=progress)
    if card is not None or public:
        raise ValueError("card and public: only a repository on the hub has them (hf://datasets/USER/NAME)")
    bucket = Bucket(url)
    if bucket.folder is not None and public_path(resolved(bucket.folder)) is not None:
        found = "a version of a cache, which never changes"
        raise CacheError(bucket.shown, found, "another folder", "Take stage to copy a cache to it", code="E610")
    pushed = _Push(folder, local, bucket, Tally(local.num_bytes, progress), jobs).run(replace, check)
    del hold  # until now gc left the version
    return pushed


class _Push:
    """One push to a bucket."""

    def __init__(self, folder: Path, local: Described, bucket: Bucket, tally: Tally, jobs: int) -> None:
        self.folder, self.local, self.bucket, self.tally, self.jobs = folder, local, bucket, tally, jobs
        self.skipped = 0
        bucket.patience.pause = tally.pause

    def run(self, replace: bool | Collection[str], check: bool) -> Pushed:
        """Take the URL, send the files, then meta.json, and remove the note."""
        found = self._take(self._found(), replace)
        is_there = found.content == self.local.content_sha256
        # A file of the right size is skipped only where this cache's own note or meta.json stands: another cache may
        # have a file of the same name and size.
        resumes = is_there or (found.note or {}).get("content_sha256") == self.local.content_sha256
        sizes = dict(found.sizes) if resumes else {}
        at_once(lambda record: self._send(record, sizes, is_there), self._records(), self.jobs, self.tally)
        if check:
            at_once(lambda record: self._check(record, sizes, is_there), self._records(), self.jobs, self.tally)
        sent = self.tally.moved
        if found.raw == self.local.raw:
            self.skipped += 1
        else:
            self._finish(is_there)
            sent += len(self.local.raw)
        if not is_there or found.note is not None:
            self.bucket.remove(NOTE_NAME)  # only now: without a note another push would have taken the URL
        self.bucket.clear((*self.local.records, META_NAME, NOTE_NAME))
        return Pushed(self.bucket.shown, *self.local.whole, sent, self.skipped)

    def _records(self) -> list[dict[str, Any]]:
        return list(self.local.records.values())

    def _found(self) -> _Found:
        """Look at the URL. Raises: CacheError E610 for a meta.json or a note of another program.

        Reads in the opposite order of a push, so that a push which ends meanwhile is seen with its note or its
        meta.json.
        """
        sizes = self.bucket.sizes()
        note_raw, raw = (self.bucket.read(name, MAX_JSON_BYTES) for name in (NOTE_NAME, META_NAME))
        names, content, note = {META_NAME, NOTE_NAME}, None, None
        try:
            if raw is not None:
                meta = parse_object(raw)
                names |= {str(record["name"]) for record in file_records(meta)}
                content = str(meta["content_sha256"])
            if note_raw is not None:
                note = parse_object(note_raw)
                names |= _names_of(note)
        except (ValueError, LookupError, TypeError) as error:
            found = f"its {META_NAME} or {NOTE_NAME} is not of a cache ({error})"
            remedy = "Run it again; where that does not help, push to another URL"
            raise CacheError(self.bucket.shown, found, remedy=remedy, code="E610") from error
        if content != self.local.content_sha256:
            _refuse_foreign_files(self.bucket.shown, sizes.keys() - names)
        return _Found(content, raw or b"", note, frozenset(names), tuple(sizes.items()))

    def _take(self, found: _Found, replace: bool | Collection[str]) -> _Found:
        """Unless the cache is there, write the note of this push and remove the cache that it replaces.

        Raises: CacheError E610 if another cache or push is there, and may not be replaced.
        """
        own = self.local.content_sha256
        if found.content == own:
            return found
        noted = (found.note or {}).get("content_sha256")
        if found.content is None and noted == own and not found.note["removing"]:  # type: ignore[index]
            return found
        replaces = sorted(found.names - {META_NAME, NOTE_NAME}) if found.content or noted else []
        is_replacing = noted == own and found.note["removing"]  # type: ignore[index]
        if found.content is not None and not _may_replace(replace, found.content) and not is_replacing:
            raise _other_cache(self.bucket.shown, found.content, own)
        if noted not in (None, own) and not _may_replace(replace, str(noted)):
            raise self._other_push(str(noted))
        if not replaces:
            return self._begin(replace) if found.note is None else _Found(note=found.note)
        # A push that is killed between these steps leaves a note that names the files still to be removed.
        self.bucket.write(NOTE_NAME, self._note(replaces))
        self.bucket.remove(META_NAME)  # first: from here on no reader takes the rest for a cache
        at_once(self.bucket.remove, replaces, self.jobs, self.tally)
        self.bucket.write(NOTE_NAME, self._note([]))
        return _Found()

    def _begin(self, replace: bool | Collection[str]) -> _Found:
        """Write the note at an empty URL, and look again, because another push may have ended since."""
        if not self.bucket.create(NOTE_NAME, self._note([])):
            return self._take(self._found(), replace)  # another process was faster
        found = self._found()
        if found.content is None:
            return _Found()
        if found.content != self.local.content_sha256:
            self.bucket.remove(NOTE_NAME)
            found = self._found()
        return self._take(found, replace)

    def _note(self, removing: list[str]) -> bytes:
        return canonical_json(
            {
                "content_sha256": self.local.content_sha256,
                "files": sorted(self.local.records),
                "kind": "push",
                "push_version": NOTE_VERSION,
                "removing": removing,
            }
        )

    def _other_push(self, content: str) -> CacheError:
        found = f"another cache ({content[:12]}) is being pushed there, or a push of it was killed"
        return CacheError(self.bucket.shown, found, remedy=f"Wait for it. {_REPLACE}", code="E610")

    def _send(self, record: dict[str, Any], sizes: dict[str, int], is_there: bool) -> None:
        """Send a file, unless it is there, and check the size that arrived."""
        name, size = str(record["name"]), int(record["bytes"])
        self.tally.add()
        if sizes.get(name) == size:
            self.skipped += 1
            self.tally.add(kept=size, files=1)
            return
        path = _whole(self.folder, self.local, record)
        if not is_there:
            self._refuse_if_taken()
        self.bucket.send(name, path)
        if (arrived := self.bucket.size(name)) != size:
            found = "is not there after it was sent" if arrived is None else f"{arrived:,} bytes arrived"
            raise CacheError(self.bucket.at(name), found, f"{size:,}", "Push it again", code="E611")
        self.tally.add(moved=size, files=1)

    def _refuse_if_taken(self) -> None:
        """Raise CacheError E610 if the note at the URL names another cache, unless this cache is there."""
        own, note = self.local.content_sha256, self._parsed(NOTE_NAME)
        content = note.get("content_sha256")
        if content == own:
            return
        if not note.get("removing") and self._parsed(META_NAME).get("content_sha256") == own:
            return  # another push of this cache has ended; one of another cache may have left its note, and gives up
        found = f"another push ({str(content or 'unknown')[:12]}) took the place of this one"
        raise CacheError(self.bucket.shown, found, remedy="Push one of the two again", code="E610")

    def _parsed(self, name: str) -> dict[str, Any]:
        raw = self.bucket.read(name, MAX_JSON_BYTES)
        try:
            return parse_object(raw or b"{}")
        except ValueError:
            return {}

    def _finish(self, is_there: bool) -> None:
        """Compare all sizes once more, and write meta.json."""
        if not is_there:
            self._refuse_if_taken()
        sizes = self.bucket.sizes()  # again: a push of another cache may have removed files since
        for record in self._records():
            name, size = str(record["name"]), int(record["bytes"])
            if sizes.get(name, -1) != size and self.bucket.size(name) != size:  # empty files may not be listed
                found = "has another size than this push sent, or is gone"
                raise CacheError(self.bucket.at(name), found, f"{size:,} bytes", "Push it again", code="E611")
        self.bucket.write(META_NAME, self.local.raw)

    def _check(self, record: dict[str, Any], sizes: dict[str, int], is_there: bool) -> None:
        """Read a file back and compare its sha256. If it differs, send it again, once."""
        where, size, expected = self.bucket.at(str(record["name"])), int(record["bytes"]), record["sha256"]
        if (found := self._read_back(record)) == expected:
            return
        logger.info("%s: read back, its sha256 is %s, expected %s; it is sent again", where, found[:12], expected[:12])
        kept = size if sizes.get(str(record["name"])) == size else 0
        self.skipped -= kept > 0
        self.tally.add(moved=kept - size, kept=-kept, files=-1)
        self._send(record, {}, is_there)
        if (found := self._read_back(record)) != expected:
            found = f"sent again and read back, its sha256 is {found[:12]}"
            command = shlex.join(["niels-gpt", "push", str(public_path(self.folder) or self.folder), self.bucket.shown])
            remedy = f"The bucket or the connection alters it. Run it again: {command} --check"
            raise CacheError(where, found, f"{expected[:12]} by its {META_NAME}", remedy, code="E611")

    def _read_back(self, record: dict[str, Any]) -> str:
        digest = hashlib.sha256()
        with suppress(FileNotFoundError):
            for piece in self.bucket.pieces(str(record["name"]), 0, int(record["bytes"])):
                digest.update(piece)
                self.tally.add()
        return digest.hexdigest()


def _names_of(note: dict[str, Any]) -> set[str]:
    """Return the files that the note of a push names. Raises: CacheError, LookupError, TypeError for another."""
    if note["kind"] != "push" or note["push_version"] != NOTE_VERSION or not isinstance(note["content_sha256"], str):
        raise ValueError("not the note of a push, or one of a later release")
    return {checked_name(name, "a file's name", NOTE_NAME) for name in [*note["files"], *note["removing"]]}


def _may_replace(replace: bool | Collection[str], content: str) -> bool:
    """Return whether a push may replace the cache with this content_sha256."""
    return replace if isinstance(replace, bool) else content in replace


def _refuse_foreign_files(where: str, foreign: Collection[str]) -> None:
    """Raise CacheError E610 if a URL has files that belong to no cache."""
    if foreign:
        some = ", ".join(sorted(foreign)[:3])
        found = f"holds {len(foreign):,} files that are not of a cache ({some}). Nothing was changed"
        raise CacheError(where, found, remedy="Push to an empty folder", code="E610")


def _other_cache(where: str, content: str, own: str) -> CacheError:
    """Return the error for a URL that holds another cache. content, own: content_sha256 of both."""
    return CacheError(where, f"holds another cache ({content[:12]})", own[:12], _REPLACE, code="E610")


def _whole(folder: Path, local: Described, record: dict[str, Any]) -> Path:
    """Return the path of a file of a cache. Raises: CacheError E611 if its sha256 is not the recorded one."""
    path = path_inside(folder, str(record["name"]))
    if (actual := sha256_regular(path, least_share=local.kind.least_share)) != record["sha256"]:
        found = f"its sha256 is {actual[:12]}"
        raise CacheError(path, found, f"{record['sha256'][:12]} by its {META_NAME}", REBUILD, code="E611")
    return path


# --- the Hugging Face hub: one commit, so that a reader sees all of a cache or nothing --------------------------------


def _push_hub(
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
    """Send a cache as one commit. Makes the repository if it is absent, private unless `public`.

    folder, local: of the version. Takes the other arguments of `push`, and raises its errors.
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
    files, size = local.whole
    if raw == local.raw and not check and (card is None or bucket.read(CARD_NAME, MAX_JSON_BYTES) == card):
        return Pushed(url, files, size, 0, files)
    contents: dict[str, Any] = {META_NAME: local.raw}
    if card is not None:
        contents[CARD_NAME] = card
    for number, (name, record) in enumerate(local.records.items(), 1):
        contents[name] = _whole(folder, local, record)
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
    """Return the files of the cache at the URL. raw: its meta.json; None without one.

    Raises: CacheError E610 for another cache, or for files of no cache.
    """
    there = None if raw is None else described(raw, bucket.at(META_NAME))
    names = set() if there is None else set(there.records)
    _refuse_foreign_files(url, bucket.sizes().keys() - names - _OF_THE_HUB)
    content = local.content_sha256 if there is None else there.content_sha256
    if content != local.content_sha256 and not _may_replace(replace, content):
        raise _other_cache(url, content, local.content_sha256)
    return names


def _asked(url: str, ask: Callable[[], _T], num_bytes: int = 0) -> _T:
    """Ask the hub, whose library retries by itself. No message holds a credential. num_bytes: to send."""
    try:
        return Patience().answer(url, in_thread(ask), end_of(num_bytes))
    except CacheError:
        raise
    except Exception as error:
        last = error.__cause__ or error  # an upload that failed names the file, and its cause says why
        reason = redacted(f"{type(last).__name__}: {last}")
        remedy = "Check the name, and log in as a user who may write there: hf auth login"
        raise CacheError(url, f"refused: {reason}", remedy=remedy, code="E612") from None
