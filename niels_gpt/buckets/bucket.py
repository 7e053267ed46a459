"""Read and write files at a URL, with retries. Libraries find the credentials, and no message here holds one.

No library is certain to end a request, because a server may send a byte a second. So each request has an end here, and
a line says while no answer comes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import LEAST_SHARE, open_regular, path_inside, printable
from niels_gpt.storage.mounted import is_url
from niels_gpt.storage.waits import Waits, asked_seconds, causes, is_passing

logger = logging.getLogger(__name__)

RANGE_BYTES = 8 << 20
"""Bytes read at once."""
_BUFFER_BYTES = 1 << 18
_SMALL_BYTES = 1 << 20  # of a file that is asked for without its size
ATTEMPTS = 5
"""Attempts at a request, beside the attempts of the libraries."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Seconds before the second attempt. Each later wait is twice as long, up to the longest."""
JITTER = 0.25
"""Part of a wait by which it varies: otherwise many files would all come back to a busy server at once."""
LONGEST_RETRY_AFTER_S = 300.0
"""Longest wait in seconds that a server may ask for. More is an error, because a request ends after ten minutes."""

SAID_AFTER_S, LONGEST_SILENCE_S = 10.0, 60.0
"""Seconds without an answer until a line says so. Each next line waits twice as long, up to the longest."""
LONGEST_S = 600.0
"""Seconds that a request may take, with all its attempts."""
UPLOAD_BYTES_PER_S = 1 << 14
"""For each such number of bytes to send, a request may take another second."""

_LIBRARIES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "az": ("adlfs", "az")}
_SAME = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "local": "file", "": "file"}
_SCHEMES = ("file", "memory", "hf", *_LIBRARIES)
_HALF = re.compile(r"((?:.*/)?)\.([^/]+)\.[0-9a-f]{8}\.tmp")
_PART_BYTES, _MOST_PARTS, _PARTS_AT_ONCE = 16 << 20, 9_000, 2  # of an upload to S3: memory stays below 32 MiB a job
_NETWORK = frozenset(
    {
        *("HTTPClientError", "EndpointConnectionError", "ResponseParserError", "FlexibleChecksumError"),  # botocore
        *("ClientConnectionError", "ClientPayloadError", "TransportError"),  # aiohttp, httpx
        *("IncompleteRead", "IncompleteReadError", "ProtocolError"),  # http, asyncio, urllib3
        *("ServiceRequestError", "ServiceResponseError"),  # azure
    }
)
"""Library errors that a later attempt may not meet."""
HUB_FOLDER = re.compile(r"datasets/([\w.-]+/[\w.-]+)(?:@([^/:@]+))?(?:/(.*))?")
"""A folder of a dataset on the hub: repository, revision and path."""
_HUB_BUCKET = re.compile(r"buckets/[\w.-]+/[\w.-]+(?:/.*)?")
"""A folder of a storage bucket on the hub, which has no revisions. It is only read; never run against the hub."""
NOTE_NAME = "niels_gpt-push.json"
"""The note of a push, in the bucket while the push runs: names the cache and its files."""
_T = TypeVar("_T")


class Stopped(Exception):
    """This transfer was given up because another one failed."""


def scheme_of(url: str) -> str:
    """Return the scheme of a URL: file for a path.

    Raises: ValueError for an unknown scheme, a malformed URL, or credentials in it.
    """
    scheme, colon, rest = url.partition("://")
    kind = _SAME.get(scheme.lower(), scheme.lower()) if colon else "file"
    if kind not in _SCHEMES:
        raise ValueError(f"{printable(scheme)[:40]}://: expected a path or one of {_known()}")
    if not url or (not colon and is_url(url)):
        why = " with two slashes: a Path keeps only one, so pass the URL as text" if url else ""
        raise ValueError(f"{printable(url)[:40] or 'an empty URL'}: expected a path or {_known()}{why}")
    if kind not in ("file", "memory") and rest.partition("/")[0] == "":
        raise ValueError(f"{kind}://: expected the name of a bucket after it, and a folder")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    has_user = at and (":" in user or kind not in ("az", "file"))  # az://CONTAINER@ACCOUNT...
    if colon and (has_user or ("?" in rest and kind != "file")):
        why = "the URL holds credentials or a query, which would be seen in logs. The libraries find credentials"
        raise ValueError(f"{kind}://...: {why} themselves: name the bucket and the folder only")
    if kind == "hf" and not any(each.fullmatch(rest.rstrip("/")) for each in (HUB_FOLDER, _HUB_BUCKET)):
        expected = "hf://datasets/USER/NAME[@REVISION][/FOLDER], or to read hf://buckets/USER/NAME[/FOLDER]"
        raise ValueError(f"hf://...: expected {expected}")
    return kind


def path_of(url: str) -> Path:
    """Return the absolute path that a path or a file:// URL names."""
    _, colon, rest = url.partition("://")
    if colon and rest.startswith("localhost/"):
        rest = rest.removeprefix("localhost")
    return Path(os.path.abspath(os.path.expanduser(rest if colon else url)))


def _known() -> str:
    return ", ".join(f"{each}://" for each in _SCHEMES if each != "memory")


def redacted(text: str) -> str:
    """Return an error text on one line without possible credentials: queries, users and passwords of URLs, and the
    values of environment variables that hold keys."""
    for name, value in os.environ.items():
        if len(value) >= 6 and _SECRET.search(name):
            text = text.replace(value, "***")
    text = re.sub(r"(\w+://)[^/\s@]*:[^/\s@]*@", r"\1***@", text)
    text = re.sub(r"(\w+://[^\s?\"']*)\?[^\s\"']*", r"\1?***", text)
    return printable(" ".join(_KEYS.sub(r"\1***", text).split()))[:500]


_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|CONNECTION_STRING|CREDENTIAL|SAS")
_KEYS = re.compile(r"(?i)((?:signature|credential|secret|token|password|authorization|access_?key(?:_?id)?)\W{1,4})\S+")


class Bucket:
    """The folder of one cache at a URL."""

    def __init__(self, url: str) -> None:
        """url: a path or scheme://..., without credentials. Raises: ValueError; ImportError without the library."""
        kind = scheme_of(url)
        self.shown = printable(url.rstrip("/"))
        """URL for messages."""
        self.folder = path_of(url) if kind == "file" else None
        """Folder on a disk; None for a bucket."""
        self.is_local = kind == "file"
        self.least_share = LEAST_SHARE
        """Limit for holes in a file on a disk: see `refuse_holes`."""
        self.patience = Patience()
        self._fs, self._root = _opened(kind, url, self.patience)
        self._is_s3 = kind == "s3"

    def at(self, name: str) -> str:
        """Return the URL of a file, for messages."""
        return f"{self.shown}/{printable(name)}".rstrip("/")

    def read(self, name: str, most: int) -> bytes | None:
        """Return a small file; None if absent. Raises: CacheError E206 for more than `most` bytes; E612."""
        try:
            if not self.is_local:
                content = self.part(name, 0, _SMALL_BYTES)  # asking for the size would be another round trip
                if len(content) < _SMALL_BYTES:
                    return content
            size = self.size(name)
            if size is None:
                return None
            if size > most:
                raise CacheError(self.at(name), f"{size:,} bytes", f"at most {most:,}", code="E206")
            return self.part(name, 0, size) if size else b""
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if absent."""
        try:
            about = self._asked(name, "info", self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(about["size"]) if about.get("type") == "file" else None

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file below the folder, by name."""
        try:
            found = self._asked("", "find", self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        start = len(self._root.rstrip("/")) + 1
        names = {path[start:]: int(about["size"] or 0) for path, about in found.items()}
        # Tools for buckets make empty objects for folders; a killed push to a disk leaves half a file.
        return {name: size for name, size in names.items() if not _HALF.fullmatch(name) and (size or name)}

    def part(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` of a file; fewer if it ends before.

        Raises: FileNotFoundError; CacheError E612; on a disk E205 for a link or anything but a regular file, because a
            pipe would never end.
        """
        if self.is_local:
            with open(open_regular(self._path(name), least_share=self.least_share), "rb") as file:
                file.seek(begin)
                return file.read(end - begin)
        try:
            return bytes(self._asked(name, "cat_file", self._path(name), start=begin, end=end))
        except CacheError as error:
            if _status(error) != 416:  # of a file that ends before the range
                raise
            return b""

    def pieces(self, name: str, begin: int, end: int) -> Iterator[bytes | memoryview]:
        """Yield bytes `begin` to `end` of a file in ranges; fewer if it ends before. A piece is valid until the next.

        Raises: FileNotFoundError; CacheError E612; on a disk E205, as `part`.
        """
        if self.is_local:
            # Small pieces in one buffer: hashing and writing find them in a core's cache.
            buffer = memoryview(bytearray(_BUFFER_BYTES))
            with open(open_regular(self._path(name), least_share=self.least_share), "rb", buffering=0) as file:
                file.seek(begin)
                while begin < end and (count := file.readinto(buffer[: end - begin])):
                    yield buffer[:count]
                    begin += count
            return
        while begin < end and (piece := self.part(name, begin, min(begin + RANGE_BYTES, end))[: end - begin]):
            yield piece
            begin += len(piece)

    def send(self, name: str, path: Path) -> None:
        """Send a file. On a disk it appears whole. Raises: CacheError E612; OSError."""
        if self.is_local:
            self._place(name, lambda half: self._fs.put_file(os.fspath(path), half))
            return
        from fsspec.callbacks import Callback

        more: dict[str, Any] = {"callback": Callback(hooks={"heard": self.patience.heard})}
        size = path.stat().st_size
        if self._is_s3:
            more |= {"chunksize": max(_PART_BYTES, -(-size // _MOST_PARTS)), "max_concurrency": _PARTS_AT_ONCE}
        self._put(name, size, "put_file", os.fspath(path), self._path(name), **more)

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a small file. Raises: CacheError E612; OSError."""
        if self.is_local:
            self._place(name, lambda half: self._fs.pipe_file(half, content))
        else:
            self._put(name, len(content), "pipe_file", self._path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file. Returns False if it exists. Atomic on disks and on S3."""
        try:
            if self.is_local:
                self._place(name, lambda half: self._fs.pipe_file(half, content), os.link)
            else:
                self._put(name, len(content), "pipe_file", self._path(name), content, mode="create")
        except FileExistsError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        try:
            self._asked(name, "rm_file", self._path(name))
        except FileNotFoundError:
            return

    def clear(self, names: Collection[str]) -> None:
        """Remove half-written versions of these files that killed pushes left on a disk. Running pushes hold locks on
        theirs."""
        for path in self._fs.find(self._root) if self.is_local else ():
            half = _HALF.fullmatch(os.path.relpath(path, self._root))
            if half is None or half[1] + half[2] not in names:
                continue
            with suppress(OSError, CacheError), open(open_regular(path, holes=True), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fileio.remove(path)

    def _path(self, name: str) -> str:
        """Return the path of a file. Raises: CacheError E205 on a disk if a link is in its way."""
        if self.folder is not None:
            return os.fspath(path_inside(self.folder, name))
        return f"{self._root.rstrip('/')}/{name}"

    def _place(
        self, name: str, make: Callable[[str], object], put: Callable[[str, str], object] = fileio.rename
    ) -> None:
        """Make a file on a disk beside its name, durably, and then let it appear."""
        folder, _, last = self._path(name).rpartition("/")
        fileio.make_dir(folder)
        half = f"{folder}/.{last}.{secrets.token_hex(4)}.tmp"
        try:
            with open(half, "xb") as file:
                with suppress(OSError):  # of a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # until it is in its place: `clear` of another push leaves it
                make(half)
                fileio.fsync_file(half)
                put(half, self._path(name))
        finally:
            fileio.remove(half)

    def _put(self, name: str, num_bytes: int, method: str, *arguments: object, **how: object) -> None:
        try:
            self._asked(name, method, *arguments, num_bytes=num_bytes, **how)
        except FileNotFoundError as error:
            raise CacheError(self.shown, redacted(str(error)), "a bucket that exists", code="E612") from None

    def _asked(self, name: str, method: str, *arguments: object, num_bytes: int = 0, **how: object) -> Any:
        """Call a method of the file system, and call it again after passing failures. num_bytes: to send.

        Raises: FileNotFoundError, NotADirectoryError, FileExistsError; OSError of a disk; CacheError E205 for a link on
            a disk, E612 for all else.
        """
        end = end_of(num_bytes)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if self.is_local:
                    return getattr(self._fs, method)(*arguments, **how)
                return self.patience.answer(self.at(name), self._request(method, *arguments, **how), end)
            except (FileNotFoundError, NotADirectoryError, FileExistsError, CacheError, Stopped):
                raise
            except Exception as error:
                if self.is_local and isinstance(error, OSError):
                    raise
                reason = redacted(f"{type(error).__name__}: {error}")
                if not threading.main_thread().is_alive():  # libraries refuse new work, which is no fault of the server
                    raise CacheError(self.at(name), f"not read, because Python ends: {reason}", code="E612") from None
                if not may_pass(error):
                    remedy = _NO_BUCKET if _is_too_long(error) else _CREDENTIALS
                    raise CacheError(self.at(name), f"refused: {reason}", remedy=remedy, code="E612") from None
                asked = _asked_seconds(error)
                if attempt == ATTEMPTS or (asked or 0) > LONGEST_RETRY_AFTER_S:
                    wish = f" (the server asks to wait {asked:.0f} s)" if asked else ""
                    found = f"{attempt} attempts failed, the last one{wish}: {reason}"
                    raise CacheError(self.at(name), found, remedy="Run it again: it resumes", code="E612") from None
            seconds = Waits(FIRST_WAIT_S, LONGEST_WAIT_S, jitter=JITTER).after(attempt, asked)
            logger.warning(
                "%s: attempt %d of %d failed (%s); again in %.1f s",
                *(self.at(name), attempt, ATTEMPTS, reason, seconds),
                extra={"code": "W610"},
            )
            self.patience.pause(seconds)
        raise AssertionError

    def _request(self, method: str, *arguments: object, **how: object) -> Future[Any]:
        if self._fs.async_impl:
            import asyncio

            return asyncio.run_coroutine_threadsafe(getattr(self._fs, f"_{method}")(*arguments, **how), self._fs.loop)
        return in_thread(lambda: getattr(self._fs, method)(*arguments, **how))


_CREDENTIALS = "Check the name, and the credentials that the library finds (docs/buckets.md)"
_NO_BUCKET = "Check the address: this server does not answer as a bucket does"


def _opened(kind: str, url: str, patience: Patience) -> tuple[Any, str]:
    """Return the file system of a URL and the folder in it. Asks no server."""
    import fsspec

    if kind == "file":
        return fsspec.filesystem("file", auto_mkdir=False), os.fspath(path_of(url))
    library, extra = _LIBRARIES.get(kind, ("", ""))
    # Kept instances and listings would show another process's files as they were.
    fresh: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False} if library else {}
    try:
        if kind in ("s3", "gs"):
            from niels_gpt.buckets.answers import bounded

            fresh |= bounded(kind)
        if is_hub_bucket(url):
            _check_hub_buckets()
            fresh["skip_instance_cache"] = True
        fs = fsspec.filesystem(kind, **fresh)
    except ImportError as error:
        found = f"{kind}:// needs the package {library}, which is not installed: pip install 'niels-gpt[{extra}]'"
        raise ImportError(found) from error
    except Exception as error:  # such as Azure without an account
        reason = redacted(f"{type(error).__name__}: {error}")
        raise CacheError(printable(url), f"refused: {reason}", remedy=_CREDENTIALS, code="E612") from None
    scheme, _, rest = url.partition("://")
    root = str(fs._strip_protocol(f"{scheme.lower()}://{rest}")).rstrip("/")  # libraries know small letters only
    return fs, _pinned(fs, root, url, patience) if kind == "hf" and not is_hub_bucket(url) else root


def is_hub_bucket(url: str) -> bool:
    """Return whether a URL is of a storage bucket on the hub: hf://buckets/USER/NAME."""
    scheme, _, rest = url.partition("://")
    return scheme.lower() == "hf" and _HUB_BUCKET.fullmatch(rest.rstrip("/")) is not None


def _check_hub_buckets() -> None:
    """Raise ImportError unless the installed huggingface_hub reads storage buckets."""
    import huggingface_hub
    from huggingface_hub import hf_file_system

    if not hasattr(hf_file_system, "HfFileSystemResolvedBucketPath"):
        found = f"hf://buckets needs a newer huggingface_hub than {huggingface_hub.__version__}, which reads no buckets"
        raise ImportError(f"{found}: pip install -U huggingface_hub")


def _pinned(fs: Any, root: str, url: str, patience: Patience) -> str:
    """Return a folder of a dataset on the hub at its current commit, so that all reads see one revision."""
    from huggingface_hub import HfApi

    def ask() -> str:
        place = fs.resolve_path(root)
        sha = HfApi().repo_info(place.repo_id, repo_type="dataset", revision=place.revision).sha
        return f"datasets/{place.repo_id}@{sha}/{place.path_in_repo}".rstrip("/")

    try:
        return patience.answer(printable(url), in_thread(ask), end_of())
    except CacheError:
        raise
    except Exception as error:
        reason = redacted(f"{type(error).__name__}: {error}")
        raise CacheError(printable(url), f"refused: {reason}", remedy=_CREDENTIALS, code="E612") from None


def may_pass(error: BaseException) -> bool:
    """Return whether a later attempt may succeed, by the class or HTTP status of an error or its causes."""
    for one in () if _is_too_long(error) else causes(error):
        if isinstance(one, ConnectionError | TimeoutError) or _NETWORK & {kind.__name__ for kind in type(one).__mro__}:
            return True  # before its cause: aiohttp gives its own errors the status 400
        if (status := _own_status(one)) is not None:
            return is_passing(status)
    return False


def _is_too_long(error: BaseException) -> bool:
    return any(type(one).__name__ == "AnswerTooLong" for one in causes(error))


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error or one of its causes."""
    return next((status for one in causes(error) if (status := _own_status(one)) is not None), None)


def _asked_seconds(error: BaseException) -> float | None:
    """Return the seconds that a server asked to wait, by the headers that an error or one of its causes holds."""
    for one in causes(error):
        response = getattr(one, "response", None)
        of_botocore = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        for headers in (of_botocore.get("HTTPHeaders"), getattr(response, "headers", None)):
            if headers is not None and (seconds := asked_seconds(headers)) is not None:
                return seconds
    return None


def _own_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error; each library keeps it in another attribute."""
    response = getattr(error, "response", None)
    of_botocore = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    places = (
        of_botocore.get("HTTPStatusCode"),
        getattr(response, "status_code", None),
        *(getattr(error, name, None) for name in ("status", "status_code", "code")),
    )
    found = next((place for place in places if place is not None), None)
    return int(found) if isinstance(found, int | str) and str(found).isdigit() else None


# --- waits for the answers of a server: no library ends a request for certain -----------------------------------------


class Patience:
    """Wait for the answers of one server, in several threads."""

    def __init__(self) -> None:
        self.pause: Callable[[float], object] = time.sleep
        """Waits some seconds; may raise to give up."""
        self._heard = self._said = float("-inf")
        self._silence = SAID_AFTER_S

    def heard(self, *_: object, **__: object) -> None:
        """Note that the server works. Also a hook for fsspec's callbacks."""
        self._heard = time.monotonic()

    def answer(self, what: str, request: Future[_T], end: float) -> _T:
        """Return the answer to a request. what: for messages.

        Raises: the errors of the request; CacheError E612 at `end`.
        """
        begin = time.monotonic()
        try:
            while not request.done() and not wait([request], min(1.0, SAID_AFTER_S)).done:
                self.pause(0)
                self._look(what, begin, end)
            self.heard()
            return request.result()
        finally:
            request.cancel()

    def _look(self, what: str, begin: float, end: float) -> None:
        now = time.monotonic()
        if now >= end:
            remedy = "Run it again: it resumes. On a slow line take fewer files at once: --jobs 1"
            raise CacheError(what, f"no whole answer after {now - begin:,.0f} s", remedy=remedy, code="E612")
        silent = now - max(begin, self._heard)
        if min(silent, now - self._said) >= self._silence:
            self._said, self._silence = now, min(2 * self._silence, LONGEST_SILENCE_S)
            logger.info("%s: no answer for %.0f s; given up in %.0f s", what, silent, end - now)


def end_of(num_bytes: int = 0) -> float:
    """Return the time at which a request that begins now is given up. num_bytes: to send."""
    return time.monotonic() + LONGEST_S + num_bytes / UPLOAD_BYTES_PER_S


def in_thread(ask: Callable[[], _T]) -> Future[_T]:
    """Run a request of a library without coroutines in a thread, which is left behind if it never ends."""
    request: Future[_T] = Future()
    request.set_running_or_notify_cancel()

    def run() -> None:
        try:
            request.set_result(ask())
        except BaseException as error:
            request.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    return request


def in_order(jobs: Iterable[Callable[[], _T]], at_once: int) -> Iterator[_T]:
    """Yield the result of each job, in their order; so many run at once, in threads that an exit does not wait for."""
    running = deque[Future[_T]]()
    for job in jobs:
        running.append(in_thread(job))
        if len(running) >= at_once:
            yield running.popleft().result()
    for request in running:
        yield request.result()
