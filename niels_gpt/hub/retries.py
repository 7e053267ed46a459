"""Failures of the hub and of the network: which are retried, how often and how long, and the remedies for the others.

A question is asked ASK_ATTEMPTS times; a stream survives STREAM_ATTEMPTS failures in a row. The waits between double up
to LONGEST_WAIT_S, or last as long as the hub asks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, cast

from niels_gpt.storage.errors import HubError
from niels_gpt.storage.waits import Waits, asked_seconds, causes, is_passing

logger = logging.getLogger(__name__)

ASK_ATTEMPTS = 4
"""Attempts at a question. Without a network the error comes after 7 s of waiting."""
STREAM_ATTEMPTS = 9
"""Failures in a row, without a byte or a row in between, after which a stream gives up: 183 s of waiting."""
FIRST_WAIT_S = 1.0
"""Seconds before the second attempt; each later wait is twice as long."""
LONGEST_WAIT_S = 60.0
"""Longest wait that we choose."""
LONGEST_RETRY_AFTER_S = 600.0
"""Longest wait that the hub may ask for (its own window is 300 s). More is an error."""
COMMIT_SHA = re.compile(r"[0-9a-f]{40}")


class GaveUp(HubError):
    """The last attempt failed. Callers must not retry it."""


class BrokenAnswer(HubError, code="E603"):
    """The hub, or a proxy in between, answered with something else than asked."""


class Backoff:
    """Counts failures since the last progress, waits twice as long after each, and gives up after `attempts`."""

    def __init__(self, what: str, attempts: int) -> None:
        """what: names the thing asked for in the log and in errors."""
        self.what = what
        self.attempts = attempts
        self.failures = 0

    def progress(self) -> None:
        """Forget the failures so far."""
        self.failures = 0

    def wait(self, error: BaseException) -> None:
        """Log a failure and wait.

        Raises: GaveUp E601 after the last attempt, or if the hub asks to wait longer than LONGEST_RETRY_AFTER_S.
        """
        self.failures += 1
        reason = reason_of(error)
        asked = retry_after(error)
        seconds = Waits(FIRST_WAIT_S, LONGEST_WAIT_S).after(self.failures, asked)
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
            extra={"code": "W601"},
        )
        time.sleep(seconds)


def reason_of(error: BaseException) -> str:
    """Return an error's type and text on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def retry_after(error: BaseException) -> float | None:
    """Return the seconds that the hub asks to wait, below 0 for a date in the past; None if it does not ask.

    With a 429 the hub sends RateLimit (draft-ietf-httpapi-ratelimit-headers-09). Proxies send Retry-After: seconds or a
    date (RFC 9110 10.2.3).
    """
    response = _response_of(error)
    if response is None:
        return None
    limit = _rate_limit(response) if response.status_code == 429 else None
    return asked_seconds(response.headers) if limit is None else limit


def _response_of(error: BaseException) -> Any:
    """Return the HTTP response of an error or of its first cause that has one; None if there was none."""
    responses = (getattr(one, "response", None) for one in causes(error))
    return next((response for response in responses if response is not None), None)


def _rate_limit(response: Any) -> float | None:
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    limit = parse_ratelimit_headers(response.headers)
    # One second more, as the library waits: the hub rounds down.
    return float(limit.reset_in_seconds) + 1 if limit is not None and limit.remaining == 0 else None


def recognized(error: Exception) -> Exception:
    """Return an error, or a BrokenAnswer in its place if the hub's client failed to parse an answer.

    For JSON that is cut off or has other fields the client raises JSONDecodeError, KeyError or TypeError. These name
    neither the network nor the hub.
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
    """Return whether a later attempt may succeed: the first known error in the chain of causes decides.

    A FileNotFoundError without such a cause may pass too. The commit lists the files, so they still exist; but fsspec's
    `isfile` takes any network error for a missing file (datasets/utils/file_utils.py FilesIterable), and so does
    `datasets` with its cache (datasets/load.py dataset_module_factory).
    """
    from socket import gaierror

    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for one in causes(error):
        if isinstance(one, GaveUp | OfflineModeIsEnabled) or type(one).__module__.startswith("datasets."):
            return False
        if isinstance(one, HfHubHTTPError):
            status = getattr(getattr(one, "response", None), "status_code", None)
            return status is None or is_passing(status)
        if isinstance(one, (_client_error(), ConnectionError, TimeoutError, gaierror)):
            return True
        # huggingface_hub/file_download.py http_get: a body that ended early; the next download starts again.
        if isinstance(one, OSError) and "Consistency check failed" in str(one):
            return True
        # utils/_http.py http_backoff closes the process's client after an error, while other threads use it.
        if isinstance(one, RuntimeError) and "client has been closed" in str(one):
            return True
    return type(error) is FileNotFoundError


def is_network(error: BaseException) -> bool:
    """Return whether the network made the download of a model's file fail, so that it may succeed later.

    An HTTP status in the chain of causes decides; without one any network error in it.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    response = _response_of(error)
    if response is not None:
        return is_passing(response.status_code)
    kinds = (_client_error(), ConnectionError, TimeoutError, LocalEntryNotFoundError)
    return any(isinstance(one, kinds) for one in causes(error))


def _client_error() -> type[Exception]:
    """Return the base class of errors of the hub's HTTP client. It was requests, then httpx, now httpx2."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast(type[Exception], HfHubHTTPError.__bases__[0])


def remedy_of(error: BaseException, page: str, not_found: tuple[type[Exception], ...] = ()) -> str | None:
    """Return the remedy for a refusal by the hub; None for any other error.

    page: address of the dataset or model. not_found: further errors for one that does not exist.
    """
    from huggingface_hub import errors

    for kinds, remedy in (
        ((errors.GatedRepoError,), f"accept its terms at {page}, then run `hf auth login`"),
        ((errors.RevisionNotFoundError,), f"use a commit, branch or tag of {page}/commits/main"),
        (
            (errors.RepositoryNotFoundError, errors.HFValidationError, *not_found),
            f"check the name at {page}; for a private one run `hf auth login` as a user who may read it",
        ),
        ((errors.HfHubHTTPError,), "check the access token: run `hf auth login`"),
    ):
        # Libraries meet many "Entry Not Found" while they look for optional files.
        if any(isinstance(one, kinds) and not isinstance(one, errors.EntryNotFoundError) for one in causes(error)):
            return remedy
    return None


_asking = 0  # callers inside read_timeout
_asking_lock = threading.Lock()


@contextlib.contextmanager
def read_timeout() -> Iterator[None]:
    """Wait at most HF_HUB_DOWNLOAD_TIMEOUT for a byte, also where the library sets no timeout.

    huggingface_hub/utils/_pagination.py lists a dataset's files with timeout=None: if the hub stops sending there, the
    process hangs. The client belongs to the whole process, so its hook acts inside this context only. It acts in every
    thread, because the library lists in threads of its own.
    """
    global _asking
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    session = get_session()
    with _asking_lock:
        hooks = session.event_hooks
        if _set_timeout not in hooks["request"]:
            session.event_hooks = {**hooks, "request": [*hooks["request"], _set_timeout]}
        _asking += 1
    try:
        yield
    finally:
        with _asking_lock:
            _asking -= 1


def _set_timeout(request: Any) -> None:
    from huggingface_hub import constants

    limits = request.extensions.get("timeout", {})
    if _asking and limits.get("read") is None:
        request.extensions["timeout"] = {**limits, "read": float(constants.HF_HUB_DOWNLOAD_TIMEOUT)}
