"""Waits between attempts at a server: how long, after which failures, and how long a server may ask for.

Used for requests to the hub, requests to buckets, and retries of Dagster's steps.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Waits:
    """The seconds to wait after each failure."""

    first_s: float
    """After the first failure; after each further one, `factor` times as long."""
    longest_s: float
    """Longest wait, unless the server asks for more."""
    factor: float = 2.0
    jitter: float = 0.0
    """Random part by which a wait is longer or shorter, so that many clients do not return at the same time."""

    def after(self, failures: int, asked: float | None = None) -> float:
        """Return the seconds to wait after `failures` failures in a row, 1 or more.

        asked: seconds that the server asks for. They count if they are more than our own wait.
        """
        own = min(self.first_s * self.factor ** (failures - 1), self.longest_s)
        own *= 1 + self.jitter * random.uniform(-1, 1)
        return max(own, asked or 0.0)


def asked_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of Retry-After (RFC 9110 10.2.3), negative for a past date; None without the header.

    headers: of a response; a plain dict has its names in lower case or as the RFC writes them.
    """
    from email.utils import parsedate_to_datetime

    value = str(headers.get("Retry-After") or headers.get("retry-after") or "").strip()
    if value.isdecimal() and len(value) < 20:
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # the latter for a zone of many digits
        return None
    # A date without a zone is in GMT.
    when = when if when.tzinfo else when.replace(tzinfo=datetime.UTC)
    return (when - datetime.datetime.now(datetime.UTC)).total_seconds()


def is_passing(status: int) -> bool:
    """Return whether this HTTP status is temporary, so that a later request may succeed."""
    return status in (408, 425, 429) or status >= 500


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, also the ones that a library hides with `raise ... from None`."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
