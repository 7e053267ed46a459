"""What stands between the hub and `hub.py`: which failures may pass, and how long to be patient with them.

`hub_files.py` reads the files' bytes with the same patience.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import json
import logging
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
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
"""Seconds that the hub may ask us to wait; its own window is 300 s. More is an error."""
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
        # A limit may end now, and a date have passed: our own wait is the least.
        seconds = max(min(FIRST_WAIT_S * 2 ** (self.failures - 1), LONGEST_WAIT_S), asked or 0.0)
        if self.failures >= self.attempts or seconds > LONGEST_RETRY_AFTER_S:
            wish = f" (the hub asks to wait {asked:.0f} s)" if asked == seconds else ""
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
    """Return the seconds that the hub asked to wait, below 0 where it gave a date that has passed; None without a wish.

    Of a 429 the hub says so in RateLimit (draft-ietf-httpapi-ratelimit-headers-09), what is between us and it in
    Retry-After: seconds or a date (RFC 9110 10.2.3).
    """
    for one in causes(error):
        response = getattr(one, "response", None)
        if response is not None:
            found = _rate_limit(response) if response.status_code == 429 else None
            return _retry_after(response.headers) if found is None else found
    return None


def _rate_limit(response: Any) -> float | None:
    try:
        from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]
    except ImportError:  # an older huggingface_hub
        return None
    limit = parse_ratelimit_headers(response.headers)
    # One second more, as the library waits: the hub rounds down.
    return float(limit.reset_in_seconds) + 1 if limit is not None and limit.remaining == 0 else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    said = str(headers.get("Retry-After", "")).strip()
    if said.isdigit():
        return float(said)
    try:
        when = email.utils.parsedate_to_datetime(said)
    except ValueError:
        return None
    # A date without a zone is one of GMT.
    when = when if when.tzinfo else when.replace(tzinfo=datetime.UTC)
    return (when - datetime.datetime.now(datetime.UTC)).total_seconds()


def understood(error: Exception) -> Exception:
    """Return an error, or BrokenAnswer in its place where the hub's client fell over an answer of something else.

    JSON that breaks off or says something else gives JSONDecodeError, KeyError or TypeError there: no error of the
    network, and without a word of the hub.
    """
    if not isinstance(error, json.JSONDecodeError | LookupError | TypeError | AttributeError):
        return error
    packages = [
        str(frame.f_globals.get("__name__", "")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    libraries = [one for one in packages if one in ("datasets", "huggingface_hub")]
    if libraries[-1:] != ["huggingface_hub"]:
        return error
    broken = BrokenAnswer(
        f"the answer is cut off or is not the hub's ({type(error).__name__}: {error}): "
        "a proxy or a login page may be in between"
    )
    broken.__cause__ = error
    return broken


def may_pass(error: BaseException) -> bool:
    """Tell whether a later attempt may succeed: the first known error in the chain of causes decides.

    A plain FileNotFoundError with no such cause is passing: the files are those of one commit's list and cannot have
    gone, but fsspec's `isfile` takes any error of the network for a missing file (datasets/utils/file_utils.py
    FilesIterable), and so does `datasets` with its cache (datasets/load.py dataset_module_factory).
    """
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
    return type(error) is FileNotFoundError


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
