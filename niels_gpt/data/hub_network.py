"""What stands between the hub and `hub.py`: how long to be patient, and files that cannot end early without saying so.

All retrying of a stream's bytes happens here, in one place and with one bound, instead of in three layers of libraries.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

logger = logging.getLogger(__name__)

ASK_ATTEMPTS = 4
"""Times that a question is asked before anything has come: who has no network is told within 7 s of waiting."""
STREAM_ATTEMPTS = 9
"""Failures in a row, without a byte or a row in between, that a stream survives: 183 s of waiting."""
FIRST_WAIT_S = 1.0
"""Seconds before the second attempt; each later wait is twice as long."""
LONGEST_WAIT_S = 60.0
"""Seconds; no wait of ours is longer."""
LONGEST_RETRY_AFTER_S = 600.0
"""Seconds that the hub may ask us to wait (Retry-After, RFC 9110 10.2.3); its own window is 300 s. More is an error."""
PROTOCOL = "hfchecked"
"""fsspec's name for the hub read through CheckedFile."""
RETRY_STATUSES = (408, 425, 429)  # and every 5xx


class GaveUp(ConnectionError):
    """The bound is reached: nobody above retries."""


class BrokenAnswer(ConnectionError):
    """The hub, or what is between, answered with something else than what was asked."""


class Patience:
    """Counts failures since the last progress, waits longer each time, and gives up at a bound.

    what: what is asked, for the log and the errors.
    """

    def __init__(self, what: str, attempts: int) -> None:
        self.what = what
        self.attempts = attempts
        self.failures = 0

    def progress(self) -> None:
        """Forget the failures so far."""
        self.failures = 0

    def wait(self, error: BaseException) -> None:
        """Log a failure and wait; GaveUp where the bound is reached or the hub asks for a longer wait than we allow."""
        self.failures += 1
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        asked = retry_after(error)
        seconds = min(FIRST_WAIT_S * 2 ** (self.failures - 1), LONGEST_WAIT_S) if asked is None else asked
        if self.failures >= self.attempts or seconds > LONGEST_RETRY_AFTER_S:
            wish = f" (the hub asks to wait {asked:.0f} s)" if asked is not None else ""
            raise GaveUp(
                f"could not ask the Hugging Face hub for {self.what}: {self.failures} attempts without an answer, the "
                f"last one{wish}: {reason}; run it again later, or without a network use --source-root MIRROR or "
                "--source-root sample"
            ) from error
        logger.warning(
            "%s: attempt %d of %d failed (%s); again in %.1f s",
            self.what,
            self.failures,
            self.attempts,
            reason,
            seconds,
        )
        time.sleep(seconds)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came from, also where the libraries hide that with `raise ... from None`."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def retry_after(error: BaseException) -> float | None:
    """Return the seconds that the hub asked to wait with a 429 or 503; None where it did not, or gave a date."""
    for one in causes(error):
        value = getattr(getattr(one, "response", None), "headers", {}).get("Retry-After", "")
        if str(value).strip().isdigit():
            return float(value)
    return None


def may_pass(error: BaseException) -> bool:
    """Tell whether a later attempt may succeed: the first known error in the chain of causes decides."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The hub's client has moved from requests to httpx to httpx2; whichever it is, its errors share this base.
    client_error = cast(type[Exception], HfHubHTTPError.__bases__[0])
    for one in causes(error):
        if isinstance(one, GaveUp | OfflineModeIsEnabled) or type(one).__module__.startswith("datasets."):
            return False
        if isinstance(one, HfHubHTTPError):
            status = getattr(getattr(one, "response", None), "status_code", None)
            return status is None or status in RETRY_STATUSES or status >= 500
        if isinstance(one, client_error | ConnectionError | TimeoutError | socket.gaierror):
            return True
        # huggingface_hub/file_download.py http_get: a body that ended early; the next download starts again.
        if isinstance(one, OSError) and "Consistency check failed" in str(one):
            return True
        # utils/_http.py http_backoff closes the process's client after an error, under the feet of other threads.
        if isinstance(one, RuntimeError) and "client has been closed" in str(one):
            return True
    return False


_asking = 0  # who is inside bounded_silence
_asking_lock = threading.Lock()


@contextlib.contextmanager
def bounded_silence() -> Iterator[None]:
    """Wait at most HF_HUB_DOWNLOAD_TIMEOUT for a byte also where the library sets no limit.

    huggingface_hub/utils/_pagination.py lists a dataset's files with timeout=None: a hub that goes silent there holds
    the process for good. The client belongs to the whole process, so its hook acts only while somebody is in here; not
    by thread, for the library lists in threads of its own.
    """
    global _asking
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    session = get_session()
    if hasattr(session, "event_hooks"):  # huggingface_hub since 1.0
        with _asking_lock:
            hooks = session.event_hooks
            if _limit_silence not in hooks["request"]:
                session.event_hooks = {**hooks, "request": [*hooks["request"], _limit_silence]}
    with _asking_lock:
        _asking += 1
    try:
        yield
    finally:
        with _asking_lock:
            _asking -= 1


def _limit_silence(request: Any) -> None:
    from huggingface_hub import constants

    limits = request.extensions.get("timeout", {})
    if _asking and limits.get("read") is None:
        request.extensions["timeout"] = {**limits, "read": float(constants.HF_HUB_DOWNLOAD_TIMEOUT)}


@cache
def register_checked_files() -> None:
    """Tell fsspec about PROTOCOL. Nothing of the libraries is replaced: whoever opens hf:// gets what he always got.

    What this prevents, each seen on tests/loopback_hub.py with datasets 5.2.0 and huggingface_hub 2.4.0:
    - HfFileSystemFile._fetch_range (huggingface_hub/hf_file_system.py) returns whatever the answer holds. An empty
      answer without Content-Length reads as the end of the file, and the rest of a jsonl shard is lost without an
      error; an answer that ignores Range puts other bytes in the place of the asked ones. CheckedFile gives the bytes
      asked for or an error.
    - read_with_retries (datasets/utils/file_utils.py) repeats a read of a gzip file whose inner read has failed, but
      Python's BufferedReader has dropped what it had decompressed for that read: a hole in the text. It repeats only
      its own client's errors, and CheckedFile raises GaveUp.
    - HfFileSystemStreamFile.read: after two broken connections in one call its iterator is exhausted, and the next
      read says end of file; on an answer that ignores Range it doubles what it had. Here nobody gets that class.
    - fsspec's `exists` and `isfile` take an error of the network for "no such file".
    """
    import fsspec
    from huggingface_hub import HfFileSystem

    checked_file = _checked_file()

    class CheckedFileSystem(HfFileSystem):
        protocol = PROTOCOL

        def _open(  # never the stream file
            self,
            path: str,
            mode: str = "rb",
            block_size: int | None = None,
            revision: str | None = None,
            **kwargs: Any,
        ) -> Any:
            return checked_file(self, path, revision, mode=mode, block_size=block_size or "default", **kwargs)

        def info(self, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
            with bounded_silence():
                return super().info(path, *args, **kwargs)

        def isfile(self, path: str) -> bool:
            with contextlib.suppress(FileNotFoundError):
                return bool(self.info(path)["type"] == "file")
            return False

        def exists(self, path: str, **kwargs: Any) -> bool:
            with contextlib.suppress(FileNotFoundError):
                return bool(self.info(path, **kwargs))
            return False

    fsspec.register_implementation(PROTOCOL, CheckedFileSystem, clobber=True)


def _checked_file() -> type:
    """Make the class whose files give the bytes asked for or an error."""
    from fsspec.spec import AbstractBufferedFile
    from huggingface_hub.hf_file_system import HfFileSystemFile

    class CheckedFile(HfFileSystemFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            patience = Patience(f"bytes {start} to {end} of {self.path}", STREAM_ATTEMPTS)
            block = bytearray()
            while len(block) < end - start:
                before = len(block)
                try:
                    _append_range(self, block, start, end, super()._fetch_range)
                except Exception as error:
                    if not may_pass(error):
                        raise
                    if len(block) > before:
                        patience.progress()
                    patience.wait(error)
            return bytes(block)

        def read(self, length: int = -1) -> bytes:
            return cast(bytes, AbstractBufferedFile.read(self, length))

    return CheckedFile


def _append_range(file: Any, block: bytearray, start: int, end: int, fetch_whole: Callable[[int, int], bytes]) -> None:
    """Append what is missing of bytes start to end (exclusive), as far as it comes.

    fetch_whole: the library's own way, for a huggingface_hub before 1.0, whose client cannot stream like this.
    Raises: the client's errors; BrokenAnswer for an answer that is not those bytes or ends before them.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

    first = start + len(block)
    session = get_session()
    if not hasattr(session, "stream"):
        whole = fetch_whole(first, end)
        block += whole if len(whole) == end - first else b""
    else:
        # Without identity a CDN may compress, and then it ignores Range.
        asked = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
        headers = {**file.fs._api._build_hf_headers(), **asked}
        with session.stream(
            "GET", file.url(), headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            _check_range(response, first)
            for chunk in response.iter_bytes():
                block += chunk[: max(0, end - start - len(block))]
    if len(block) != end - start:
        found = len(block) - (first - start)
        raise BrokenAnswer(f"asked for {end - first} bytes from byte {first}, and the answer ended after {found}")


def _check_range(response: Any, first: int) -> None:
    span = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    begins = int(span[1]) if span else 0
    if begins != first:
        raise BrokenAnswer(
            f"asked for the file from byte {first}, and got it from byte {begins} (status {response.status_code}): "
            "a proxy may ignore the header Range"
        )
