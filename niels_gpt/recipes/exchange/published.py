"""Carries out a line [published.NAME] of sources.toml: pushes its cache to its URL.

It replaces another cache there only if this line pushed it, or found it up to date: a note in .runs says what it was.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from niels_gpt.cache.meta import find_meta
from niels_gpt.exchange.transfer.described import Pushed
from niels_gpt.exchange.transfer.remote import Bucket, scheme_of
from niels_gpt.progress import Progress
from niels_gpt.recipes.exchange.lines import Line
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import canonical_json, write_bytes
from niels_gpt.storage.meta_json import parse_object, read_regular


def publish(cache: Path, line: Line, content: str, note: Path, progress: Progress | None) -> Pushed:
    """Push the cache of a line. What is there already is not sent again; a missing file is.

    content: the cache's content_sha256. note: a file of this line.
    Raises: CacheError E610 for a cache at the URL that this line did not push, and for other files; as `push`.
    """
    from niels_gpt.exchange.transfer.push import push

    assert line.url is not None
    ours, is_pushed = _noted(note, line.url)
    # The hub's README.md is sent with each content once: what somebody changed in it since then stays.
    has_card = scheme_of(line.url) == "hf" and not (is_pushed and ours == [content])
    card = _card(cache, line.url) if has_card else None
    _write(note, line.url, sorted({*ours, content}), is_pushed=False)  # first: a push may be killed
    try:
        done = push(cache, line.url, replace=ours, card=card, progress=progress)
    except CacheError as error:
        if error.code != "E610":
            raise
        command = shlex.join(["niels-gpt", "push", str(cache), line.url, "--replace"])
        remedy = f"Name another url in sources.toml. To replace a cache there: {command}"
        raise CacheError(error.path, error.problem, remedy=remedy, code="E610") from error
    _write(note, line.url, [content], is_pushed=True)
    return done


def missing_at(cache: Path, line: Line) -> list[str]:
    """Return what is wrong at the URL: another cache than the line's, files that are missing or have another size.

    Raises: CacheError E612 without a cache there, or where the bucket cannot be used; others as `remote_cache`.
    """
    from niels_gpt.exchange.transfer.fetch import remote_cache

    assert line.url is not None
    bucket, meta = Bucket(line.url), find_meta(cache)
    remote = remote_cache(bucket)
    problems, sizes = [], bucket.sizes()
    if meta is None or meta["content_sha256"] != remote.content_sha256:
        problems.append(f"{line.url}: is another version ({remote.content_sha256[:12]}) than {line.cache} is now")
    for name, record in remote.records.items():
        size = sizes[name] if name in sizes else bucket.size(name)  # empty files may not be listed
        if size != record["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes"
            problems.append(f"{bucket.at(name)}: {found}, expected {record['bytes']:,} bytes")
    return problems


def _noted(note: Path, url: str) -> tuple[list[str], bool]:
    """Return the contents that a line pushed to a URL, or tried to, and whether the last push ended well."""
    try:
        found = parse_object(read_regular(note))
        return (list(map(str, found["contents"])), found["is_pushed"] is True) if found["url"] == url else ([], False)
    except (OSError, ValueError, LookupError, TypeError):
        return [], False


def _write(note: Path, url: str, contents: list[str], *, is_pushed: bool) -> None:
    write_bytes(note, canonical_json({"url": url, "contents": contents, "is_pushed": is_pushed}))


def _card(cache: Path, url: str) -> bytes:
    from niels_gpt.exchange.card import card_of
    from niels_gpt.recipes.records import made_by

    return card_of(cache, command=made_by(cache), url=url).encode()
