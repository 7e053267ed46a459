"""Waits between attempts at a server: how long, after which failures, and for how long a server may ask.

Questions to the hub, requests to buckets and the retries of Dagster's steps take their numbers from `Waits`.
"""

from __future__ import annotations

import datetime
import email.utils
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Waits:
    """How long is waited after each failure."""

    first_s: float
    """Seconds after the first failure; after each further one `factor` times as long."""
    longest_s: float
    """The longest wait of ours."""
    factor: float = 2.0
    jitter: float = 0.0
    """Part of a wait by which it is longer or shorter, at random, so that many that wait do not come back at once."""

    def after(self, failures: int, asked: float | None = None) -> float:
        """Return the seconds to wait after so many failures in a row, 1 or more.

        asked: seconds that the server asks for. 0, or a date that has passed, is not believed: our own wait counts.
        """
        own = min(self.first_s * self.factor ** (failures - 1), self.longest_s)
        own *= 1 + self.jitter * random.uniform(-1, 1)
        return max(own, asked or 0.0)


def asked_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of Retry-After (RFC 9110 10.2.3), below 0 for a date that has passed; None without it.

    headers: of an answer; names in small letters or as libraries compare them.
    """
    value = str(headers.get("Retry-After") or headers.get("retry-after") or "").strip()
    if value.isdecimal() and len(value) < 20:
        return float(value)
    try:
        when = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    # A date without a zone is in GMT.
    when = when if when.tzinfo else when.replace(tzinfo=datetime.UTC)
    return (when - datetime.datetime.now(datetime.UTC)).total_seconds()


def is_passing(status: int) -> bool:
    """Return whether a later request may not meet this HTTP status."""
    return status in (408, 425, 429) or status >= 500


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, including those that a library hides with `raise ... from None`."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
